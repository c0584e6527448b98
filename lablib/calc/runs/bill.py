"""From a plan to its bill: days, GPU hours and dollars as intervals, and what of them is assumed. Chapter 11.

    result = plan("llama-3-70b", gpus=512, gpu="h100", seq=8192, global_batch=512)
    bill = plan_bill(result, tokens=15e12, price=2.0)
    bill.days                    # low, predicted, high

    days = tokens / tokens of a step · seconds of a step / goodput,    GPU hours = 24 · days · (GPUs + spares)

The interval is that of the step, from measured runs on such GPUs. Goodput is rung 11's law at its best interval between
checkpoints, with four numbers that belong to a machine and not to a model. Their defaults are published:

- failures: Llama 3's, so many per GPU and hour (arXiv 2407.21783, table 5);
- `RESTART`: less than 10 minutes to detect a failure and diagnose it, MegaScale's average on more than 10,000 GPUs
  (arXiv 2402.15627, section 6.3); reading the checkpoint comes on top;
- `STORAGE`: 7 GB/s of writes for each unit of 32 nodes with 8 GPUs, what NVIDIA asks of storage for language models,
  where checkpoints are written while training waits (DGX SuperPOD with H100, RA-11333-001 V11, tables 5 and 6);
- `SPARES`: 5 % more nodes (Cui et al. 2025, arXiv 2503.11901, abstract).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from textwrap import wrap

from lablib.calc.flops import require_positive
from lablib.calc.layouts.planner import Candidate, Layout, Plan
from lablib.calc.runs.failures import LLAMA3_FAILURES, LostTime, best_interval, lost_time
from lablib.calc.units import GB, format_bytes, format_count, format_time

DAY, HOUR, MINUTE = 86_400.0, 3600.0, 60.0

RESTART = 10 * MINUTE
STORAGE = 7 * GB / (32 * 8)  # bytes per second for each GPU of the job
SPARES = 0.05

Interval = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Bill:
    """What training on so many tokens takes. Intervals are low, predicted, high.

    Attributes:
        step: Seconds of a step.
        step_tokens: Tokens of a step, over all replicas.
        spares: GPUs that are reserved and do not train.
        price: Dollars per GPU and hour, or None.
        checkpoint_bytes: Of one checkpoint, over all ranks.
        storage: Bytes per second that all ranks write together, while training waits.
        restart: Seconds from a failure to reading the checkpoint.
        gpu_mtbf: Seconds that one GPU, with its share of host and network, runs between two failures.
        like: What is known of such steps.
    """

    step: Interval
    step_tokens: float
    tokens: float
    gpus: int
    spares: int = 0
    price: float | None = None
    checkpoint_bytes: float
    storage: float
    restart: float = RESTART
    gpu_mtbf: float = LLAMA3_FAILURES.gpu_mtbf
    like: str = ""

    def __post_init__(self) -> None:
        given = {name: value for name, value in asdict(self).items() if name not in ("step", "spares", "like")}
        require_positive(**{name: value for name, value in given.items() if value is not None})
        if self.spares < 0:
            raise ValueError(f"spares={self.spares} must not be negative")

    @property
    def steps(self) -> int:
        """Steps that the tokens take."""
        return math.ceil(self.tokens / self.step_tokens)

    @property
    def checkpoint(self) -> float:
        """Seconds that one checkpoint takes."""
        return self.checkpoint_bytes / self.storage

    @property
    def mtbf(self) -> float:
        """Mean seconds between two failures of the job."""
        return self.gpu_mtbf / self.gpus

    @property
    def save_every(self) -> float:
        """Seconds of work between two checkpoints that lose least."""
        return best_interval(self.checkpoint, self.mtbf)

    @cached_property
    def lost(self) -> LostTime:
        """Where the time goes; a restart reads a checkpoint as fast as one is written."""
        restart = self.restart + self.checkpoint
        return lost_time(self.save_every, cost=self.checkpoint, mtbf=self.mtbf, restart=restart)

    @property
    def goodput(self) -> float:
        """Share of the time that is useful."""
        return self.lost.useful

    @property
    def days(self) -> Interval:
        """Days from the first step to the last."""
        return self._times(self.steps / self.goodput / DAY)

    @property
    def gpu_hours(self) -> Interval:
        """Hours of the GPUs that train."""
        return self._times(self.steps / self.goodput / HOUR * self.gpus)

    @property
    def reserved_hours(self) -> Interval:
        """Hours of all GPUs, spares too."""
        return self._times(self.steps / self.goodput / HOUR * (self.gpus + self.spares))

    @property
    def dollars(self) -> Interval | None:
        """Price of the reserved hours."""
        return None if self.price is None else tuple(self.price * hours for hours in self.reserved_hours)

    def _times(self, factor: float) -> Interval:
        low, best, high = self.step
        return low * factor, best * factor, high * factor

    def as_dict(self) -> dict[str, object]:
        """Return inputs and results as plain numbers."""
        names = (
            "steps",
            "checkpoint",
            "mtbf",
            "save_every",
            "goodput",
            "days",
            "gpu_hours",
            "reserved_hours",
            "dollars",
        )
        return asdict(self) | {name: getattr(self, name) for name in names} | {"lost": asdict(self.lost)}

    @property
    def text(self) -> str:
        """The bill in words, within 80 columns: a table, goodput, and what is assumed."""
        rows = {"s/step": self.step, "days": self.days, "GPU hours": self.gpu_hours}
        if self.spares:
            rows["with spares"] = self.reserved_hours
        if self.dollars:
            rows["dollars"] = self.dollars
        known = self.step[0] < self.step[2]
        heads = ("low", "predicted", "high") if known else ("predicted",)
        lines = [
            f"Bill for {format_count(self.tokens)} tokens, {self.steps:,} steps on {self.gpus:,} GPUs (first layout):",
            f"{'':<12}" + "".join(f"{head:>10}" for head in heads),
        ]
        for name, values in rows.items():
            lines.append(f"{name:<12}" + "".join(f"{format_count(value):>10}" for value in values[: len(heads)]))
        lost, log = self.lost, LLAMA3_FAILURES
        law = f", as often per GPU as {log.name}'s {log.gpus:,} failed" if self.gpu_mtbf == log.gpu_mtbf else ""
        sentences = (
            f"{'Interval' if known else 'No interval'} of s/step: {self.like}.",
            f"Goodput {self.goodput:.1%}: {lost.checkpoint:.1%} of the time goes into checkpoints, {lost.rework:.1%} into "
            f"work done again, {lost.restart:.1%} into restarts.",
            f"Assumed: a failure every {format_time(self.mtbf)}{law}; {format_time(self.restart)} to find it; a checkpoint "
            f"of {format_bytes(self.checkpoint_bytes)} every {format_time(self.save_every)}, written at "
            f"{format_bytes(self.storage)}/s while training waits; {self.spares:,} spare GPUs.",
            "Not in it: storage, staff, queues, and all runs but this one.",
        )
        return "\n".join([*lines, *(line for sentence in sentences for line in wrap(sentence, 80))])


def plan_bill(
    result: Plan,
    candidate: Candidate | None = None,
    *,
    tokens: float,
    price: float | None = None,
    storage: float | None = None,
    restart: float = RESTART,
    spares: float = SPARES,
) -> Bill:
    """Return the bill of a plan's layout.

    Args:
        candidate: Which layout; None means the first.
        tokens: Tokens to train on.
        price: Dollars per GPU and hour.
        storage: Bytes per second that all ranks write together; None means `STORAGE` for each GPU.
        restart: Seconds from a failure to reading the checkpoint.
        spares: Nodes that are held back, as a share of those that train, rounded to whole ones.
    """
    load, machine, one = result.load, result.cluster, candidate or result.best
    if not 0 <= spares <= 1:
        raise ValueError(f"spares={spares} is a share of the nodes: give 0 to 1, 5 percent as 0.05")
    recipe, training = load.recipe, load.training
    # A checkpoint has what is trained, weights and optimizer: all states but the gradients, or those of the adapters.
    trained = sum(load.stage_params(Layout(), 0, trained=True))
    moments = sum(training.optimizer.moment_bytes(trained, recipe.moment).values())
    like = result.like(one)
    low, high = like.interval(one.step) or (one.step, one.step)
    node = min(machine.gpus, machine.gpu.gpus_per_host)
    return Bill(
        step=(min(low, one.step), one.step, max(high, one.step)),
        step_tokens=load.global_batch * load.seq,
        tokens=tokens,
        gpus=machine.gpus,
        spares=node * round(spares * machine.gpus / node),
        price=price,
        checkpoint_bytes=trained * (recipe.weights + recipe.master) + moments,
        storage=STORAGE * machine.gpus if storage is None else storage,
        restart=restart,
        like=like.between(one.step),
    )
