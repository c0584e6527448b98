"""Layouts by predicted step time, the fastest first, each judged by its peak before it is named.

A search may find ten thousand layouts whose sums could fit, and somebody asks for five. So a peak, a millisecond each, is
computed when the walk comes to it. A layout whose peak leaves too little goes back with more recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import islice

from lablib.calc.layouts.planner.layout import Layout
from lablib.calc.layouts.planner.peak import Counting, Peak, layout_peak
from lablib.calc.layouts.planner.rates import Fitted
from lablib.calc.layouts.planner.time import Workload, step_time


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with its predicted step.

    Attributes:
        seconds: Predicted seconds of a step by part; see `step_time`.
    """

    layout: Layout
    seconds: dict[str, float]
    peak: Peak

    @property
    def step(self) -> float:
        """Predicted seconds of a step."""
        return sum(self.seconds.values())

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of weights, gradients, optimizer, activations and buffers of a rank at its peak."""
        return self.peak.memory

    @property
    def total_memory(self) -> int:
        """Bytes of a rank at its peak."""
        return self.peak.total


@dataclass(frozen=True)
class Partition:
    """A layout that could fit, by its sums, with one or more recompute modes.

    Attributes:
        layout: With the first of them.
        recompute_modes: The fastest first.
        least: Bytes that it holds at least with the first.
    """

    layout: Layout
    recompute_modes: tuple[str, ...]
    least: int

    def at(self, number: int) -> Layout:
        """Return the layout with one of its modes."""
        return replace(self.layout, recompute=self.recompute_modes[number]) if number else self.layout


class Candidates(Sequence[Candidate]):
    """Layouts that fit, fastest first; of those that differ in recomputation alone, the fastest."""

    def __init__(
        self, load: Workload, counting: Counting, capacity: float, partitions: Sequence[Partition], fitted: Fitted
    ) -> None:
        self.load, self.counting, self.capacity, self.partitions = load, counting, capacity, partitions
        self.rates = load.rates(fitted)
        self._first = [
            (self._step(partition.layout), partition.least, number, 0) for number, partition in enumerate(partitions)
        ]
        heapify(self._first)
        self._peaks: dict[Layout, Peak] = {}  # of layouts that a walk came to
        self._known: list[Candidate] = []
        self._rest = self.walk()

    def walk(self, where: Callable[[Layout], bool] | None = None) -> Iterator[Candidate]:
        """Yield the layouts that fit, fastest first.

        Args:
            where: Which of them; peaks of others are not computed. It is asked anew each time.
        """
        heap = list(self._first)
        while heap:
            _, least, number, mode = heappop(heap)
            partition = self.partitions[number]
            layout = partition.at(mode)
            if where is None or where(layout):
                peak = self._peaks[layout] = layout_peak(self.load, layout, self.counting)
                if peak.total <= self.capacity:
                    yield Candidate(layout, step_time(self.load.step_work(layout), self.rates), peak)
                    continue
            for again in range(mode + 1, len(partition.recompute_modes)):
                if where is None or where(partition.at(again)):
                    heappush(heap, (self._step(partition.at(again)), least, number, again))
                    break

    def too_large(self) -> list[Layout]:
        """Return the layouts whose peak was computed and leaves too little."""
        return [layout for layout, peak in self._peaks.items() if peak.total > self.capacity]

    def _step(self, layout: Layout) -> float:
        return sum(step_time(self.load.step_work(layout), self.rates).values())

    def __iter__(self) -> Iterator[Candidate]:
        number = 0
        while self._has(number):
            yield self._known[number]
            number += 1

    def _has(self, number: int) -> bool:
        self._known += islice(self._rest, max(0, number + 1 - len(self._known)))
        return number < len(self._known)

    def __bool__(self) -> bool:
        return self._has(0)

    def __len__(self) -> int:
        self._known += self._rest
        return len(self._known)

    def __getitem__(self, number: int | slice) -> Candidate | list[Candidate]:
        """Return one or several, as of a list; only as many peaks are computed as that takes."""
        if isinstance(number, slice):
            few = number.stop is not None and number.stop >= 0 and (number.start or 0) >= 0
            return list(islice(self, number.stop if few else None))[number]
        return self._known[number] if number >= 0 and self._has(number) else list(self)[number]
