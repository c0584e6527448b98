"""What FSDP2 sends in a step, from the sizes of its units, and when it gathers, computes and scatters. Chapter 06.

`fsdp_traffic` counts an all-gather of each unit in forward, another in backward if it was resharded, and a reduce-scatter
a backward that synchronises, of ranks · Σ ceil(rows / ranks) · row · bytes per value. `fsdp_step` lays a step out on a
link and a device that work side by side: two units of 4 s on the link and 3 s of forward each take 14 s without prefetch,
and 4 + max(3, 4) + 3 = 11 s with it. The link carries one message at a time, in the order in which they are ready; no unit
lies inside another there but the root, which is gathered first, runs last in forward and first in backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lablib.calc.communication import ring_all_gather_bytes, ring_all_reduce_bytes, ring_reduce_scatter_bytes
from lablib.calc.parallel.fsdp_units import Unit, as_units, check_numbers, check_reshard, padded


@dataclass(frozen=True)
class Message:
    """One collective.

    Attributes:
        bytes: The full array, padding included.
    """

    op: str
    unit: str
    bytes: int
    ranks: int
    phase: str


@dataclass(frozen=True)
class FSDPTraffic:
    """The collectives of one optimizer step, on one rank.

    Attributes:
        messages: In the order in which they are sent without prefetch, where no unit lies inside another.
    """

    messages: tuple[Message, ...]

    @property
    def calls(self) -> Counter[str]:
        """Number of messages, by operation."""
        return Counter(message.op for message in self.messages)

    @property
    def bytes(self) -> Counter[str]:
        """Bytes of the arrays, by operation."""
        total: Counter[str] = Counter()
        for message in self.messages:
            total[message.op] += message.bytes
        return total

    def ring_bytes_sent(self) -> float:
        """Return the bytes that one rank sends if rings carry the collectives."""
        sent = {
            "all_gather": ring_all_gather_bytes,
            "reduce_scatter": ring_reduce_scatter_bytes,
            "all_reduce": ring_all_reduce_bytes,
        }
        return sum(sent[m.op](m.bytes, m.ranks) for m in self.messages)


def fsdp_traffic(
    units: Sequence[Unit | int],
    shards: int,
    *,
    replicas: int = 1,
    reshard: bool | int = True,
    root_reshard: bool | int = False,
    param_bytes: int = 4,
    reduce_bytes: int = 4,
    micro_batches: int = 1,
    sync_every: bool = True,
    keep_gathered: bool = False,
) -> FSDPTraffic:
    """Return the collectives of one optimizer step under FSDP2.

    Every unit runs once in each forward and gets a gradient in each backward. A group of one rank sends nothing.

    Args:
        units: The root first. A number stands for a unit of so many parameters in one dim.
        replicas: Copies of the sharded model (HSDP); gradient shards are all-reduced between them.
        reshard: `reshard_after_forward`: True frees a unit after its forward (ZeRO-3), False keeps it until its
            backward is done (ZeRO-2), a number keeps 1/number of it on each rank.
        root_reshard: The same for the root. `fully_shard` keeps the root by default.
        param_bytes: Bytes of a gathered value: 4, or 2 with param_dtype=torch.bfloat16.
        sync_every: Reduce after every backward; False: after the last one only, as inside `no_sync`.
        keep_gathered: Keep the parameters gathered after every backward but the last.
    """
    listed = as_units(units)
    check_numbers(
        shards=shards,
        replicas=replicas,
        param_bytes=param_bytes,
        reduce_bytes=reduce_bytes,
        micro_batches=micro_batches,
    )
    check_reshard(reshard, shards)
    check_reshard(root_reshard, shards, "root_reshard")
    if keep_gathered and sync_every:
        raise ValueError("keep_gathered=True belongs to no_sync: use it with sync_every=False")
    messages: list[Message] = []

    def send(op: str, unit: Unit, values: int, bytes_each: int, ranks: int, phase: str) -> None:
        if values and ranks > 1:
            messages.append(Message(op, unit.name, values * bytes_each, ranks, phase))

    def gather(unit: Unit, ranks: int, phase: str) -> None:
        send("all_gather", unit, padded(unit.shapes + unit.frozen, shards), param_bytes, ranks, phase)

    def gather_again(unit: Unit, kept: bool | int) -> None:
        # A number keeps 1/number of the unit on each rank: the message is as large, in a smaller group.
        if kept is not False:
            gather(unit, shards if kept is True else kept, "backward")

    def reduce(unit: Unit) -> None:
        values = padded(unit.shapes, shards)
        send("reduce_scatter", unit, values, reduce_bytes, shards, "backward")
        send("all_reduce", unit, values // shards, reduce_bytes, replicas, "backward")

    root, *others = listed
    for turn in range(micro_batches):
        reduces = sync_every or turn == micro_batches - 1
        for unit in listed:
            if turn == 0 or not keep_gathered:
                gather(unit, shards, "forward")
        gather_again(root, root_reshard)
        for unit in reversed(others):
            gather_again(unit, not unit.kept and reshard)
            if reduces:
                reduce(unit)
        if reduces:
            reduce(root)
    return FSDPTraffic(tuple(messages))


@dataclass(frozen=True, kw_only=True)
class TimedUnit:
    """A unit, its bytes, the seconds of each of its operations, and whether it stays gathered after forward anyhow."""

    name: str
    bytes: int
    gather: float
    scatter: float
    forward: float
    backward: float
    kept: bool = False


@dataclass(frozen=True)
class Bar:
    """Something that takes time on a lane, "link" or "device", in seconds from the start of the step."""

    lane: str
    kind: str
    unit: str
    start: float
    end: float


@dataclass(frozen=True)
class FsdpStep:
    """One forward and one backward pass.

    Attributes:
        memory: (seconds, bytes of unsharded parameters from then on), in order.
    """

    bars: tuple[Bar, ...]
    memory: tuple[tuple[float, int], ...]

    @property
    def seconds(self) -> float:
        """Until the last reduce-scatter is done."""
        return max(bar.end for bar in self.bars)

    @property
    def compute(self) -> float:
        """Seconds in which the device works."""
        return sum(bar.end - bar.start for bar in self.bars if bar.lane == "device")

    @property
    def exposed(self) -> float:
        """Seconds in which the device waits."""
        return self.seconds - self.compute

    @property
    def peak(self) -> int:
        """The most bytes of unsharded parameters at a time."""
        return max(size for _, size in self.memory)


def fsdp_step(
    units: Sequence[TimedUnit], *, reshard: bool = True, root_reshard: bool = False, prefetch: bool = True
) -> FsdpStep:
    """Lay out one step; the root is the first of the units.

    Args:
        reshard: Free a unit after its forward and gather it again in backward.
    """
    if not units:
        raise ValueError("units=[] is empty; the root is always there, wrapped or not")
    clock = _Clock()
    root, *rest = units
    clock.gather(root, 0.0)
    order = [(unit, "forward") for unit in rest] + [(root, "forward"), (root, "backward")]
    order += [(unit, "backward") for unit in reversed(rest)]
    for place, (unit, kind) in enumerate(order):
        following = order[place + 1][0] if place + 1 < len(order) else None
        clock.run(unit, kind, following if prefetch else None)
        if kind == "forward" and not unit.kept and (root_reshard if unit is root else reshard):
            clock.free(unit)
        elif kind == "backward" and unit is not root:
            clock.free(unit)
            clock.scatter(unit)
    # The root holds what comes before the first unit too, such as the embedding: its gradient is complete last.
    clock.free(root)
    clock.scatter(root)
    return clock.result()


class _Clock:
    """Two lanes, and what is gathered."""

    def __init__(self) -> None:
        self.link = self.device = 0.0  # when each is free
        self.arrived: dict[str, float] = {}
        self.bars: list[Bar] = []
        self.changes: list[tuple[float, int]] = []

    def gather(self, unit: TimedUnit, ready: float) -> None:
        """Start to gather a unit, unless it is there or on its way."""
        if unit.name in self.arrived:
            return
        start = max(self.link, ready)
        self.link = self.arrived[unit.name] = start + unit.gather
        self.bars.append(Bar("link", "gather", unit.name, start, self.link))
        self.changes.append((start, unit.bytes))

    def run(self, unit: TimedUnit, kind: str, following: TimedUnit | None) -> None:
        """Run a unit as soon as it is gathered, and gather the following one meanwhile."""
        self.gather(unit, self.device)
        start = max(self.device, self.arrived[unit.name])
        self.device = start + (unit.forward if kind == "forward" else unit.backward)
        self.bars.append(Bar("device", kind, unit.name, start, self.device))
        if following:
            self.gather(following, start)

    def free(self, unit: TimedUnit) -> None:
        """Free a unit's unsharded parameters."""
        del self.arrived[unit.name]
        self.changes.append((self.device, -unit.bytes))

    def scatter(self, unit: TimedUnit) -> None:
        """Send a unit's gradient; a gather that was ready earlier is on the link already."""
        start = max(self.link, self.device)
        self.link = start + unit.scatter
        self.bars.append(Bar("link", "scatter", unit.name, start, self.link))

    def result(self) -> FsdpStep:
        """Return the step; what is freed at a time is gone before anything is gathered then."""
        held, memory = 0, []
        for when, change in sorted(self.changes):
            held += change
            if memory and memory[-1][0] == when:
                memory.pop()
            memory.append((when, held))
        return FsdpStep(tuple(self.bars), tuple(memory))
