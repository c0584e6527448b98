"""When FSDP gathers, computes and scatters: one step on a link and a device that work side by side.

Two units of 4 s on the link and 3 s of forward each, without prefetch: gather 4, run 3, gather 4, run 3 are 14 s.
With prefetch the second gather starts when the first has arrived: 4 + max(3, 4) + 3 are 11 s.

    forward     gather k  ->  run k                       k + 1 is gathered meanwhile
    backward    gather k  ->  run k  ->  scatter k        k - 1 is gathered meanwhile
    freed       after its run, when it is resharded; in backward always

The link carries one message at a time, in the order in which messages are ready. A unit inside another one does
not occur here: the root is gathered first, runs last in forward and first in backward.

Chapter: book/06_fsdp.md. Source: Zhao et al. 2023, PyTorch FSDP (arXiv 2304.11277), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TimedUnit:
    """A unit and what it costs.

    Attributes:
        name: Text for the picture.
        bytes: Whole parameters, as gathered.
        gather: Seconds of its all-gather.
        scatter: Seconds of its reduce-scatter.
        forward: Seconds of its forward pass.
        backward: Seconds of its backward pass.
    """

    name: str
    bytes: int
    gather: float
    scatter: float
    forward: float
    backward: float


@dataclass(frozen=True)
class Bar:
    """Something that takes time.

    Attributes:
        lane: "link" or "device".
        kind: "gather", "scatter", "forward" or "backward".
        unit: Name of the unit.
        start: Seconds from the start of the step.
        end: Seconds from the start of the step.
    """

    lane: str
    kind: str
    unit: str
    start: float
    end: float


@dataclass(frozen=True)
class FsdpStep:
    """One forward and one backward pass.

    Attributes:
        bars: What the link and the device do.
        memory: (seconds, bytes of whole parameters from then on), in order.
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
        """The most bytes of whole parameters at a time."""
        return max(size for _, size in self.memory)


def fsdp_step(
    units: Sequence[TimedUnit], *, reshard: bool = True, root_reshard: bool = False, prefetch: bool = True
) -> FsdpStep:
    """Lay out one step.

    Args:
        units: The root first, then the others as they run.
        reshard: Free a unit after its forward and gather it again in backward.
        root_reshard: The same for the root.
        prefetch: Gather the next unit while the present one runs.

    Raises:
        ValueError: If there is no unit.
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
        if kind == "forward" and (root_reshard if unit is root else reshard):
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
        """Drop a unit's whole parameters."""
        del self.arrived[unit.name]
        self.changes.append((self.device, -unit.bytes))

    def scatter(self, unit: TimedUnit) -> None:
        """Send a unit's gradient; a gather that was ready earlier is on the link already."""
        start = max(self.link, self.device)
        self.link = start + unit.scatter
        self.bars.append(Bar("link", "scatter", unit.name, start, self.link))

    def result(self) -> FsdpStep:
        """Return the step; what is freed at a moment is gone before anything is gathered at it."""
        held, memory = 0, []
        for when, change in sorted(self.changes):
            held += change
            if memory and memory[-1][0] == when:
                memory.pop()
            memory.append((when, held))
        return FsdpStep(tuple(self.bars), tuple(memory))
