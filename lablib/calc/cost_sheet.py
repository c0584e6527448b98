"""What a session on rented GPUs costs, and what to expect of a machine before it is rented.

    cost = GPUs · price per GPU and hour · billed hours,    billed = minutes rounded up as the provider bills

The whole machine is paid for, also while a lab uses one of its GPUs, and while it is set up.
The minutes of a lab are a budget to hold it to (`rung labs run --budget-minutes`) until a run has measured them.

Chapter: book/11_practical_fsdp.md
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lablib.calc.hardware import Accelerator
from lablib.calc.plan import plan
from lablib.calc.rental import Machine as Machine
from lablib.calc.rental import parse_machine as parse_machine
from lablib.calc.units import GiB

#: Setting up an image: copying the course, environment, `rung doctor --gpu`. A budget, too.
SETUP_MINUTES = 10


@dataclass(frozen=True)
class LabBudget:
    """What a lab asks of a machine.

    Attributes:
        lab: Its number.
        minutes: Budget.
        what: What it measures on one GPU.
        on_two: What it measures besides where there are two or more; empty if nothing.
    """

    lab: str
    minutes: float
    what: str
    on_two: str = ""


#: Labs with a cell that runs on a GPU; tests/test_cost_sheet.py holds this to the notebooks. The others run at home.
LABS = (
    LabBudget("01", 3, "predicted memory beside CUDA's allocator"),
    LabBudget("06", 4, "offload: peak memory and time"),
    LabBudget("08", 4, "bf16 and FP8: time and memory"),
    LabBudget("09", 4, "recomputation: time and peak"),
    LabBudget("11", 30, "the run: memory, MFU, compile", "scaling"),
)


@dataclass(frozen=True)
class Row:
    """One lab on one machine.

    Attributes:
        lab: Its number.
        minutes: Budgeted or measured.
        measured: Whether a run measured them.
        cost: What these minutes cost, before rounding.
        what: What it measures there, and what it cannot.
    """

    lab: str
    minutes: float
    measured: bool
    cost: float
    what: str


@dataclass(frozen=True)
class Sheet:
    """A session on one machine.

    Attributes:
        machine: The machine.
        rows: One a lab.
        setup: Minutes before the first lab.
        billing: How time is rounded up.
    """

    machine: Machine
    rows: tuple[Row, ...]
    setup: float
    billing: str

    @property
    def minutes(self) -> float:
        """Minutes from start to stop."""
        return self.setup + sum(row.minutes for row in self.rows)

    @property
    def cost(self) -> float:
        """What the session costs, as billed."""
        return self.machine.cost(self.minutes, self.billing)


def sheet(
    machine: Machine,
    labs: Iterable[str] | None = None,
    *,
    measured: Mapping[str, float] | None = None,
    setup: float = SETUP_MINUTES,
    billing: str = "minute",
) -> Sheet:
    """Return what labs cost on a machine.

    Args:
        machine: The machine.
        labs: Numbers; None means all with something to measure on a GPU.
        measured: Minutes by lab where a run on such a machine has measured them.
        setup: Minutes before the first lab.
        billing: "second", "minute" or "hour".

    Raises:
        ValueError: If a lab has nothing to measure on a GPU.
    """
    known = {budget.lab: budget for budget in LABS}
    # A lab named twice is run once.
    chosen = list(known) if labs is None else list(dict.fromkeys(lab.zfill(2) for lab in labs))
    rows = []
    for lab in chosen:
        if lab not in known:
            raise ValueError(
                f"lab {lab} measures nothing on a GPU: run it at home; there are {', '.join(known)}"
            )
        budget, minutes = known[lab], (measured or {}).get(lab)
        time = budget.minutes if minutes is None else minutes
        price = machine.gpus * machine.price / 60
        what = budget.what
        if budget.on_two:
            what += f", {budget.on_two}" if machine.gpus > 1 else f"; {budget.on_two} wants two GPUs"
        rows.append(Row(lab, time, minutes is not None, time * price, what))
    machine.cost(setup, billing)  # refuses what makes no sense
    return Sheet(machine, tuple(rows), setup, billing)


@dataclass(frozen=True)
class Expectation:
    """What the planner expects of fully sharded training on a machine.

    Attributes:
        machine: The machine.
        one: Seconds of a step on one of its GPUs.
        seconds: Seconds of a step on all of them, with the same batch per GPU.
        parts: Those seconds by part; see `lablib.calc.plan_time.PARTS`.
        tokens_per_second: Of all GPUs.
        mfu: 0 to 1.
        memory: Bytes of a GPU.
        micro_batch: Sequences on a GPU at a time.
        bandwidth: Bytes per second of the link between the GPUs, per direction, as the table has it.
    """

    machine: Machine
    one: float
    seconds: float
    parts: dict[str, float]
    tokens_per_second: float
    mfu: float
    memory: int
    micro_batch: int
    bandwidth: float

    @property
    def efficiency(self) -> float:
        """Weak scaling efficiency, T_1 / T_n."""
        return self.one / self.seconds

    def cost_of(self, tokens: float) -> float:
        """Return what training on so many tokens costs.

        Args:
            tokens: How many.
        """
        return tokens / self.tokens_per_second / 3600 * self.machine.gpus * self.machine.price


def expect(
    machine: Machine,
    *,
    model: str = "gpt2",
    seq: int = 1024,
    batch: int = 8,
    intra: float | None = None,
    reserve: int = 2 * GiB,
) -> Expectation:
    """Predict a step of FSDP (ZeRO-3) on a machine and on one of its GPUs, with the same batch per GPU.

    The prediction takes the link's line rate times the planner's fitted share. It knows nothing of launch overhead,
    which small models on fast cards feel, nor of a virtual machine without peer access: measure with
    `rung doctor --gpu`, and give the measured `intra`.

    Args:
        machine: The machine; its GPUs in one node.
        model: A name from `rung models`.
        seq: Tokens in a sequence.
        batch: Sequences of a step on one GPU.
        intra: Measured bytes per second between two GPUs; None means the link's line rate.
        reserve: Bytes of a GPU kept free.

    Raises:
        ValueError: If nothing fits; it says what is too large.
    """
    common = {
        "gpu": machine.card, "seq": seq, "gpus_per_node": max(8, machine.gpus), "intra": intra, "reserve": reserve,
        "tp": 1, "pp": 1, "cp": 1,
    }  # fmt: skip
    many = plan(
        model, gpus=machine.gpus, global_batch=batch * machine.gpus, dp=machine.gpus, zero=3, **common
    )
    best = many.best
    # On one GPU the whole model may not fit; its time is asked for all the same, with the same layout.
    alone = plan(
        model, gpus=1, global_batch=batch, dp=1, zero=3, micro_batch=best.layout.micro_batch,
        recompute=best.layout.recompute, **(common | {"gpu": _roomy(machine.card), "intra": many.cluster.intra}),
    ).best  # fmt: skip
    return Expectation(
        machine=machine,
        one=alone.step,
        seconds=best.step,
        parts=dict(best.seconds),
        tokens_per_second=batch * machine.gpus * seq / best.step,
        mfu=many.mfu(best),
        memory=best.total_memory,
        micro_batch=best.layout.micro_batch,
        bandwidth=many.cluster.intra,
    )


def _roomy(card: Accelerator) -> Accelerator:
    """The same card with memory for everything."""
    return replace(card, memory_bytes=2**50)


def cheaper(a: Expectation, b: Expectation) -> tuple[Expectation, float]:
    """Return which machine trains a token for less, and how many times less.

    Args:
        a: A machine's expectation.
        b: Another's.
    """
    costs = [(expectation.cost_of(1e9), i) for i, expectation in enumerate((a, b))]
    (least, winner), (most, _) = sorted(costs)
    return (a, b)[winner], most / least if least else math.inf


def expectations(
    machines: Sequence[Machine], *, model: str = "gpt2", seq: int = 1024, batch: int = 8
) -> list[Expectation]:
    """Return what to expect of several machines for the same work per GPU.

    Args:
        machines: The machines.
        model: A name from `rung models`.
        seq: Tokens in a sequence.
        batch: Sequences of a step on one GPU.
    """
    return [expect(machine, model=model, seq=seq, batch=batch) for machine in machines]
