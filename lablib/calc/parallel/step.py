"""When data parallelism computes and sends in a step: DDP, ZeRO's stages and FSDP, unit by unit. Chapters 05 and 06.

A link and a device work side by side, each on one thing at a time, in the order in which things are ready. Two units of 4 s
on the link and 3 s of forward each take 14 s in stage 3 without prefetch, and 4 + max(3, 4) + 3 = 11 s with it. No unit lies
inside another but the root, which is gathered first, runs last in forward and first in backward; its gradient, with the
embedding's, is complete last.

    stage 0   gradients are all-reduced as backward makes them, in the last micro-batch
    stage 1   they are reduce-scattered instead; after the optimizer the weights are gathered, behind the next forward
    stage 2   the same, but scattered in each micro-batch
    stage 3   each unit's weights are gathered for its forward and again for its backward, and freed after both
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lablib.calc.communication import ring_all_gather_time
from lablib.calc.errors import check_whole
from lablib.calc.models import ModelConfig
from lablib.calc.params import count_params, layer_params


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
class DataParallelStep:
    """One optimizer step.

    Attributes:
        memory: (seconds, bytes of unsharded parameters from then on) in stage 3, in order; else nothing is gathered.
        gradients: (seconds, bytes of gradients from then on), in order; a gradient has as many bytes as its unit.
    """

    bars: tuple[Bar, ...]
    memory: tuple[tuple[float, int], ...]
    gradients: tuple[tuple[float, int], ...]

    @property
    def seconds(self) -> float:
        """Until the last message is there and the last computation done."""
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
) -> DataParallelStep:
    """Lay out one forward and one backward under FSDP2; the root is the first of the units.

    Args:
        reshard: Free a unit after its forward and gather it again in backward.
    """
    return data_parallel_step(units, overlap=prefetch, reshard=reshard, root_reshard=root_reshard)


def data_parallel_step(
    units: Sequence[TimedUnit],
    *,
    stage: int = 3,
    ranks: int = 1,
    micro_batches: int = 1,
    overlap: bool = True,
    reshard: bool = True,
    root_reshard: bool = True,
    optimizer: float = 0.0,
) -> DataParallelStep:
    """Lay out one step of a ZeRO stage; 0 is DDP. The root is the first of the units.

    Args:
        ranks: Over which stages 2 and 3 shard the gradients that are held.
        overlap: Stages 0 to 2 send gradients during backward, and gather weights during the next forward, which is drawn
            at the start of this one; False sends after backward, and gathers after the optimizer. In stage 3 it is the
            prefetch: the next unit is gathered while one runs.
        reshard: Stage 3 frees a unit after its forward; `root_reshard` likewise, for the root.
        optimizer: Seconds of the update, which waits for every gradient.
    """
    if not units:
        raise ValueError("units=[] is empty; the root is always there, wrapped or not")
    check_whole("micro_batches", micro_batches, 1)
    clock = _Clock(ranks, sharded=stage >= 2)
    root, *rest = units
    order = [(unit, "forward") for unit in rest] + [(root, "forward"), (root, "backward")]
    order += [(unit, "backward") for unit in reversed(rest)]
    if stage in (1, 2) and overlap:
        for unit in units:
            clock.arrived[unit.name] = clock.send("gather", unit, unit.gather, 0.0)
    for turn in range(micro_batches):
        last = turn == micro_batches - 1
        if stage == 3:
            clock.gather(root, clock.device)
        waiting = []
        for place, (unit, kind) in enumerate(order):
            if stage == 3:
                clock.gather(unit, clock.device)
            start = clock.run(unit, kind)
            if stage == 3:
                if overlap and place + 1 < len(order):
                    clock.gather(order[place + 1][0], start)
                kept = unit.kept or not (root_reshard if unit is root else reshard)
                if (kind == "forward" and not kept) or (kind == "backward" and unit is not root):
                    clock.free(unit)
            if kind == "backward" and (last or stage >= 2) and unit is not root:
                # What waits for the end of backward leaves in the order in which it was made.
                if overlap or stage == 3:
                    clock.reduce(unit, stage)
                else:
                    waiting.append(unit)
        if stage == 3:
            clock.free(root)
        if last or stage >= 2:
            for unit in (*waiting, root):
                clock.reduce(unit, stage)
            if waiting:
                clock.device = max(clock.device, clock.link)
    if optimizer:
        clock.device = max(clock.device, clock.link)
        clock.compute("optimizer", "", optimizer)
    if stage in (1, 2) and not overlap:
        for unit in units:
            clock.send("gather", unit, unit.gather, clock.device)
    return DataParallelStep(tuple(clock.bars), _summed(clock.gathered), _summed(clock.gradients))


def timed_units(
    config: ModelConfig,
    *,
    units: int,
    tokens: int,
    ranks: int,
    flops: float,
    bandwidth: float,
    latency: float = 0.0,
    bytes_per_value: int = 2,
) -> list[TimedUnit]:
    """Return the root and so many units of neighbouring blocks, with the times of their rings and matrices.

    A forward takes 2 · parameters · tokens FLOPs, a backward twice that; the root multiplies with the head alone, since the
    embedding's rows are looked up. Attention's scores are left out, so what is sent seems a little harder to hide than it is.

    Args:
        units: At most the layers of the model; the first ones have a layer more where they do not go in.
        tokens: Of one rank in one micro-batch.
        flops: FLOP/s that a rank reaches.
        bandwidth: Bytes per second that a rank sends.
        latency: Seconds before each of the n - 1 messages of a ring.
    """
    if config.is_moe:
        raise ValueError(f"{config.name} has experts, and a token does not multiply with all of them")
    if not 1 <= units <= config.num_layers:
        raise ValueError(f"units={units} must be from 1 to the {config.num_layers} layers of {config.name}")
    each, more = divmod(config.num_layers, units)
    found, first = [], 0
    for unit in range(units):
        layers = range(first, first + each + (unit < more))
        first = layers.stop
        name = f"layer {layers.start + 1}" if len(layers) == 1 else f"layers {layers.start + 1} to {layers.stop}"
        size = sum(sum(layer_params(config, layer).values()) for layer in layers)
        found.append((name, size, size))
    rest = count_params(config).total - sum(size for _, size, _ in found)
    timed = []
    for name, size, multiplied in (("embedding and head", rest, config.vocab * config.hidden), *found):
        whole, run = bytes_per_value * size, 2 * multiplied * tokens / flops
        ring = ring_all_gather_time(whole, ranks, bandwidth=bandwidth, latency=latency)  # a scatter sends as much
        timed.append(TimedUnit(name=name, bytes=whole, gather=ring, scatter=ring, forward=run, backward=2 * run))
    return timed


class _Clock:
    """Two lanes, what is gathered, and what is held of gradients."""

    def __init__(self, ranks: int, sharded: bool) -> None:
        self.ranks, self.sharded = ranks, sharded
        self.link = self.device = 0.0  # when each is free
        self.arrived: dict[str, float] = {}
        self.bars: list[Bar] = []
        self.gathered: list[tuple[float, int]] = []
        self.gradients: list[tuple[float, int]] = []
        self.made: set[str] = set()  # units of which a gradient, or its shard, stays
        self.reduced: dict[str, float] = {}  # when a sharded gradient was gone

    def send(self, kind: str, unit: TimedUnit, seconds: float, ready: float) -> float:
        """Send a message, and return when it is there."""
        start = max(self.link, ready)
        self.link = start + seconds
        self.bars.append(Bar("link", kind, unit.name, start, self.link))
        return self.link

    def compute(self, kind: str, name: str, seconds: float) -> float:
        """Compute something as soon as the device is free, and return when it began."""
        start = self.device
        self.device = start + seconds
        self.bars.append(Bar("device", kind, name, start, self.device))
        return start

    def gather(self, unit: TimedUnit, ready: float) -> None:
        """Start to gather a unit, unless it is there or on its way."""
        if unit.name not in self.arrived:
            self.gathered.append((max(self.link, ready), unit.bytes))
            self.arrived[unit.name] = self.send("gather", unit, unit.gather, ready)

    def run(self, unit: TimedUnit, kind: str) -> float:
        """Run a unit as soon as its weights are there, and return when it began."""
        self.device = max(self.device, self.arrived.get(unit.name, 0.0))
        if kind == "backward":  # a gradient that is still on its way has the memory of the next
            self.device = max(self.device, self.reduced.get(unit.name, 0.0))
        start = self.compute(kind, unit.name, unit.forward if kind == "forward" else unit.backward)
        if kind == "backward" and (self.sharded or unit.name not in self.made):
            self.gradients.append((start, unit.bytes))
            if not self.sharded:
                self.made.add(unit.name)
        return start

    def free(self, unit: TimedUnit) -> None:
        """Free a unit's unsharded parameters."""
        del self.arrived[unit.name]
        self.gathered.append((self.device, -unit.bytes))

    def reduce(self, unit: TimedUnit, stage: int) -> None:
        """Send a unit's gradient; a gather that was ready earlier is on the link already."""
        kind, seconds = ("scatter", unit.scatter) if stage else ("all-reduce", unit.scatter + unit.gather)
        done = self.send(kind, unit, seconds, self.device)
        if self.sharded:
            self.reduced[unit.name] = done
            shard = 0 if unit.name in self.made else -(-unit.bytes // self.ranks)
            self.gradients.append((done, shard - unit.bytes))
            self.made.add(unit.name)


def _summed(changes: Sequence[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """Return what is held from each time on; what is freed at a time is gone before anything comes then."""
    held, found = 0, []
    for when, change in sorted(changes):
        held += change
        if found and found[-1][0] == when:
            found.pop()
        found.append((when, held))
    return tuple(found)
