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

Where replicas can be groups that die one at a time, the bill says what `replica_groups` gives for them, or is made by it
(`by_groups`). Steps are taken to be as long as without. Three more numbers come in:

- `SHARED`: the share of Llama 3's failures that is software, and stops all groups at once;
- `HEARTBEAT`: after so many seconds torchft takes a group for dead (src/lighthouse.rs, heartbeat_timeout_ms at 0e0c75a);
  the others stand still for it, and do the step again;
- `REPAIR`: a day until a broken node is back. It is assumed; it counts where no spare is left.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from textwrap import wrap

from lablib.calc.errors import check_whole, must_divide
from lablib.calc.flops import require_positive
from lablib.calc.layouts.planner import Candidate, Layout, Plan, divisors, layout_peak
from lablib.calc.runs.failures import LLAMA3_FAILURES, LostTime, best_interval, lost_time
from lablib.calc.runs.replica_groups import GroupGoodput, ReplicaGroups, group_goodput, stop_mtbf
from lablib.calc.units import GB, format_bytes, format_count, format_time

DAY, HOUR, MINUTE = 86_400.0, 3600.0, 60.0

RESTART = 10 * MINUTE
STORAGE = 7 * GB / (32 * 8)  # bytes per second for each GPU of the job
SPARES = 0.05
SHARED = LLAMA3_FAILURES.share("Dependency")
HEARTBEAT = 5.0
REPAIR = DAY

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
        replica_groups: Groups with a whole copy of the states that the replicas can make; 1 if none.
        by_groups: Whether they die one at a time; else all restart together.
        shared: Share of the failures that stop all groups.
        repair: Seconds until a broken node is back.
        node: GPUs of a node.
        link: Bytes per second that a GPU receives from other nodes, or None where there is one.
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
    replica_groups: int = 1
    by_groups: bool = False
    shared: float = SHARED
    repair: float = REPAIR
    node: int = 8
    link: float | None = None

    def __post_init__(self) -> None:
        free = ("step", "spares", "like", "by_groups")
        given = {name: value for name, value in asdict(self).items() if name not in free}
        require_positive(**{name: value for name, value in given.items() if value is not None})
        if self.spares < 0:
            raise ValueError(f"spares={self.spares} must not be negative")
        if self.by_groups and self.replica_groups < 2:
            raise ValueError(f"replica_groups={self.replica_groups} must be at least 2 for a bill by groups")

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

    @cached_property
    def groups(self) -> ReplicaGroups | None:
        """The replicas as groups that die one at a time, or None."""
        if self.replica_groups < 2:
            return None
        return ReplicaGroups(
            gpus=self.gpus,
            groups=self.replica_groups,
            gpu_mtbf=self.gpu_mtbf,
            stall=HEARTBEAT + self.step[1],
            restart=self.restart,
            repair=self.repair,
            spares=self.spares // self.node,
            node=self.node,
            state_bytes=self.checkpoint_bytes,
            link=self.link or math.inf,
            shared=self.shared,
        )

    @property
    def with_groups(self) -> Bill | None:
        """The bill by replica groups, or None."""
        return replace(self, by_groups=True) if self.groups else None

    @cached_property
    def group_goodput(self) -> GroupGoodput | None:
        """What replica groups do between two failures that stop all, or None."""
        return group_goodput(self.groups) if self.groups else None

    @property
    def stop_mtbf(self) -> float:
        """Mean seconds between two failures that send the whole job back to a checkpoint."""
        return stop_mtbf(self.groups) if self.by_groups else self.mtbf

    @property
    def save_every(self) -> float:
        """Seconds of work between two checkpoints that lose least."""
        return best_interval(self.checkpoint, self.stop_mtbf)

    @cached_property
    def lost(self) -> LostTime:
        """Where the time goes; a restart reads a checkpoint as fast as one is written. By groups, of failures that stop all."""
        restart = self.restart + self.checkpoint
        return lost_time(self.save_every, cost=self.checkpoint, mtbf=self.stop_mtbf, restart=restart)

    @property
    def goodput(self) -> float:
        """Share of the time that is useful."""
        return self.lost.useful * (self.group_goodput.useful if self.by_groups else 1)

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
            "stop_mtbf",
            "save_every",
            "goodput",
            "days",
            "gpu_hours",
            "reserved_hours",
            "dollars",
        )
        found = asdict(self) | {name: getattr(self, name) for name in names} | {"lost": asdict(self.lost)}
        return found | {"group_goodput": self.with_groups.goodput if self.groups else None}

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
        sentences = (
            f"{'Interval' if known else 'No interval'} of s/step: {self.like}.",
            *(self._by_groups() if self.by_groups else self._together()),
            "Not in it: storage, staff, queues, and all runs but this one.",
        )
        return "\n".join([*lines, *(line for sentence in sentences for line in wrap(sentence, 80))])

    def _together(self) -> tuple[str, ...]:
        """Return what the text says of goodput if all restart together."""
        other = ()
        if self.groups:
            other = (
                f"{self.replica_groups} replica groups would have {self.with_groups.goodput:.1%} by a model: {self.shared:.0%} "
                f"of failures stop all, others one group and the rest for {format_time(self.groups.stall)} (--replica-groups).",
            )
        return (
            f"Goodput {self.goodput:.1%}: {self._lost()}.",
            *other,
            f"Assumed: {self._failures()}; {self._checkpoints()}; {self.spares:,} spare GPUs.",
        )

    def _by_groups(self) -> tuple[str, ...]:
        """Return what the text says of goodput by replica groups."""
        job, found = self.groups, self.group_goodput
        train = 1 - found.idle
        return (
            f"Goodput {self.goodput:.1%}, by a model of {job.groups} replica groups of {job.gpus // job.groups:,} GPUs: "
            f"{found.absent / train:.1%} of them are away, {found.stalled / train:.1%} stand still because another died; "
            f"{self._lost()}, of all.",
            f"Assumed: {self._failures()}; {self.shared:.0%} of the failures stop all groups; each other one stops its "
            f"group, and the rest for {format_time(job.stall)}; a group is back {format_time(job.away)} after it has one of "
            f"{job.spares:,} spare nodes, or one repaired in {job.repair / HOUR:.3g} h; {self._checkpoints()}; steps as long as "
            "without groups.",
        )

    def _lost(self) -> str:
        lost = self.lost
        return (
            f"{lost.checkpoint:.1%} of the time goes into checkpoints, {lost.rework:.1%} into work done again, "
            f"{lost.restart:.1%} into restarts"
        )

    def _failures(self) -> str:
        log = LLAMA3_FAILURES
        law = f", as often per GPU as {log.name}'s {log.gpus:,} failed" if self.gpu_mtbf == log.gpu_mtbf else ""
        return f"a failure every {format_time(self.mtbf)}{law}; {format_time(self.restart)} to find it"

    def _checkpoints(self) -> str:
        return (
            f"a checkpoint of {format_bytes(self.checkpoint_bytes)} every {format_time(self.save_every)}, written at "
            f"{format_bytes(self.storage)}/s while training waits"
        )


def plan_bill(
    result: Plan,
    candidate: Candidate | None = None,
    *,
    tokens: float,
    price: float | None = None,
    storage: float | None = None,
    restart: float = RESTART,
    spares: float = SPARES,
    replica_groups: int | None = None,
    repair: float = REPAIR,
) -> Bill:
    """Return the bill of a plan's layout.

    Args:
        candidate: Which layout; None means the first.
        tokens: Tokens to train on.
        price: Dollars per GPU and hour.
        storage: Bytes per second that all ranks write together; None means `STORAGE` for each GPU.
        restart: Seconds from a failure to reading the checkpoint.
        spares: Nodes that are held back, as a share of those that train, rounded to whole ones.
        replica_groups: Groups that die one at a time, to make the bill by; None means that all restart together.
        repair: Seconds until a broken node is back.

    Raises:
        ValueError: If the layout cannot be so many replica groups; it says why.
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
    groups = most_groups(result, one.layout, node)
    if replica_groups is not None:
        check_groups(result, one.layout, replica_groups, node)
        groups = replica_groups
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
        replica_groups=groups,
        by_groups=replica_groups is not None,
        repair=repair,
        node=node,
        link=machine.inter,
    )


def most_groups(result: Plan, layout: Layout, node: int) -> int:
    """Return the most replica groups that a layout can be, by `check_groups`; 1 if it cannot be any."""
    for groups in reversed(divisors(layout.dp)[1:]):
        with suppress(ValueError):
            check_groups(result, layout, groups, node)
            return groups
    return 1


def check_groups(result: Plan, layout: Layout, groups: int, node: int) -> None:
    """Raise a ValueError unless the replicas can be so many groups of whole nodes, each with a whole copy of the states.

    What ZeRO shards over all replicas is sharded inside a group, as `shard` does, which takes more memory.
    """
    check_whole("replica_groups", groups, 2)
    must_divide("replica_groups", groups, "dp", layout.dp)
    size, ranks, copy = layout.gpus // groups, layout.dp * layout.cp // groups, layout.ep * layout.expert_split
    told = f"replica_groups={groups} with {layout} makes groups of {size} GPUs"
    if size % node:
        raise ValueError(f"{told}, which are no whole nodes of {node}; use fewer groups")
    if layout.tp * ranks % copy or (layout.zero and layout.shard and ranks % layout.shard):
        raise ValueError(f"{told}, {ranks} ranks of dp x cp in each, which hold no whole copy; use fewer groups")
    inside = layout
    if layout.zero and not layout.shard:
        inside = replace(layout, shard=ranks) if ranks > 1 else replace(layout, zero=0)
    needs = layout_peak(result.load, inside, result.counting).needs
    if needs > result.capacity:
        room = format_bytes(result.capacity)
        raise ValueError(f"{told}; a copy in each takes {format_bytes(needs)} of {room} on a GPU; use fewer groups")
