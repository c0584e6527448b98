"""The price of a session on rented GPUs, what to expect of a machine, and the minutes of the course.

    cost = GPUs · price per GPU and hour · billed hours,    billed = minutes rounded up as the provider bills

All of the machine is paid for, also while a lab uses one of its GPUs, and while it is set up. The minutes of a lab are
a budget to hold it to (`rung labs run --budget-minutes`), not a measurement. `parse_machine` is the one to read first.
Pages print the minutes and the line for a rented machine; a test holds them to this module.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from lablib.calc.hardware import Accelerator, accelerator
from lablib.calc.layouts.planner import FRAMEWORKS, Likeness, plan

#: Minutes of the chapter and of the lab, by rung.
STUDY_MINUTES = {
    "01": (70, 125),
    "02": (65, 135),
    "03": (70, 155),
    "04": (70, 165),
    "05": (70, 140),
    "06": (70, 140),
    "07": (70, 115),
    "08": (70, 150),
    "09": (65, 150),
    "10": (65, 130),
    "11": (70, 160),
    "12": (60, 150),
    "13": (60, 165),
    "14": (60, 100),
}

#: The labs that a GPU is rented for. The first one writes the scaling report, which graduation asks for.
GPU_LABS = ("11", "06", "01", "08", "09")
BUDGET_MINUTES = 50
RUN_GPU_LABS = f"rung labs run {' '.join(GPU_LABS)} --gpus all --budget-minutes {BUDGET_MINUTES} --pack"


def study_minutes(*rungs: str) -> int:
    """Return the minutes of rungs, chapter and lab."""
    return sum(sum(STUDY_MINUTES[rung]) for rung in rungs)


def rented_minutes() -> float:
    """Return for how long the machine is rented: set up, and the GPU labs, as `rung cost` has them."""
    return SETUP_MINUTES + sum(budget.minutes for budget in LAB_BUDGETS if budget.lab in GPU_LABS)


def hours_text(minutes: float) -> str:
    """Return minutes as "1 h 40 min"."""
    full, rest = divmod(round(minutes), 60)
    return " ".join(part for part, count in ((f"{full} h", full), (f"{rest} min", rest or not full)) if count)


#: What a provider may bill by, in minutes.
BILLING = {"second": 1 / 60, "minute": 1.0, "hour": 60.0}
#: Setting up an image: copying the course, environment, `rung doctor --gpu`. A budget, too.
SETUP_MINUTES = 10


@dataclass(frozen=True)
class LabBudget:
    """Minutes of a lab on a rented machine, what it measures there, and what only two GPUs can measure."""

    lab: str
    minutes: float
    what: str
    on_two: str = ""


#: Labs with a cell that runs on a GPU; tests/test_cost_sheet.py holds this to the notebooks. The others run at home.
LAB_BUDGETS = (
    LabBudget("01", 3, "predicted memory beside CUDA's allocator"),
    LabBudget("06", 4, "offload: peak memory and time"),
    LabBudget("08", 4, "bf16 and FP8: time and memory"),
    LabBudget("09", 4, "recomputation: time and peak"),
    LabBudget("11", 30, "the run: memory, MFU, compile", "scaling"),
)


@dataclass(frozen=True)
class Machine:
    """A machine to rent: the number of its GPUs, their kind, and the price of one for an hour in any currency."""

    gpus: int
    gpu: Accelerator
    price: float

    @property
    def name(self) -> str:
        """How tables call it: "2 x A10"."""
        return f"{self.gpus} x {self.gpu.name}"

    def cost(self, minutes: float, billing: str = "minute") -> float:
        """Return what so many minutes cost, rounded up to the "second", "minute" or "hour"."""
        if billing not in BILLING:
            raise ValueError(f"billing={billing!r} is unknown; use one of {', '.join(BILLING)}")
        if not 0 <= minutes < math.inf:
            raise ValueError(f"minutes={minutes} must not be negative or infinite")
        unit = BILLING[billing]
        # A rounding error must not cost an hour: 3 x 20 minutes are one hour.
        billed = math.ceil(round(minutes / unit, 9)) * unit
        return self.gpus * self.price * billed / 60


def parse_machine(text: str) -> Machine:
    """Read "2xa10@0.75": two A10 at 0.75 per GPU and hour."""
    found = re.fullmatch(r"\s*(\d+)\s*x\s*([\w.-]+)\s*@\s*(\d+(?:\.\d*)?)\s*", text)
    if found is None or int(found[1]) < 1:
        raise ValueError(f"{text!r} is no machine; write GPUs, kind and price per GPU and hour: 2xa10@0.75")
    return Machine(int(found[1]), accelerator(found[2]), float(found[3]))


def lab_budgets(labs: list[str] | None = None) -> list[LabBudget]:
    """Return the budgets of labs by their numbers, None for all that measure something on a GPU."""
    known = {budget.lab: budget for budget in LAB_BUDGETS}
    chosen = known if labs is None else dict.fromkeys(lab.zfill(2) for lab in labs)
    for lab in chosen:
        if lab not in known:
            raise ValueError(f"lab {lab} measures nothing on a GPU: run it at home; there are {', '.join(known)}")
    return [known[lab] for lab in chosen]


@dataclass(frozen=True)
class Expectation:
    """The planner's expectation of fully sharded training on a machine.

    Attributes:
        one: Seconds of a step on one of its GPUs.
        seconds: Seconds of a step on all of them, with the same batch per GPU.
        bandwidth: Bytes per second of one GPU to the others, per direction, as the table has it.
    """

    machine: Machine
    one: float
    seconds: float
    tokens_per_second: float
    mfu: float
    memory: int
    bandwidth: float
    link: str
    like: Likeness

    @property
    def efficiency(self) -> float:
        """Weak scaling efficiency, T_1 / T_n."""
        return self.one / self.seconds

    def cost_of(self, tokens: float) -> float:
        """Return what training on so many tokens costs."""
        return tokens / self.tokens_per_second / 3600 * self.machine.gpus * self.machine.price


def expect_step(machine: Machine, *, model: str = "gpt2", seq: int = 1024, batch: int = 8) -> Expectation:
    """Predict a step of FSDP (ZeRO-3) on the GPUs of one node and on one of them, with the same batch per GPU.

    It knows nothing of a virtual machine without peer access: `rung doctor --gpu` measures.
    """
    n = machine.gpus
    common = {
        "seq": seq, "gpus_per_node": max(8, n), "zero": 3, "tp": 1, "pp": 1, "cp": 1, "framework": FRAMEWORKS["hf"],
    }  # fmt: skip
    many = plan(model, gpu=machine.gpu, gpus=n, global_batch=batch * n, dp=n, **common)
    best = many.best
    # On one GPU the unsharded model may not fit: its time is asked for with memory for everything.
    alone = plan(
        model, gpu=replace(machine.gpu, cuda_bytes=2**50), gpus=1, global_batch=batch, dp=1, intra=many.cluster.intra,
        micro_batch=best.layout.micro_batch, recompute=best.layout.recompute, **common,
    ).best  # fmt: skip
    tokens = batch * n * seq / best.step
    return Expectation(
        machine,
        alone.step,
        best.step,
        tokens,
        many.mfu(best),
        best.total_memory,
        many.cluster.intra,
        many.cluster.links()["intra"]["link"],
        many.like(best),
    )
