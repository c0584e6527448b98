"""Replay a CUDA memory snapshot: the bytes after every event, the peak, and who held memory there.

    history = replay(load_snapshot("oom.pickle"))
    peak = history.peak()
    print(peak.allocated, peak.reserved, peak.by_site())

A snapshot says what is held at its end and what the allocator did before. Walked backwards from the end, each event
undone, it says what was held at its beginning; walked forwards again, what was held after every event.

The trace has the bytes that the program asked for. Those that it was given follow from the allocator's rules:

    rounded     to 512 bytes
    not split   what was left of a free block when it was too little to be a block: with requests above 1 MiB up to
                1 MiB, and nothing with smaller ones or in expandable segments

Blocks that are held at the end show both sizes, so each replay is checked on those (`History.disagree`).

Three counters of `torch.cuda.memory_stats()` are found again: `requested_bytes` and `active_bytes` count a block from
"alloc" to "free_completed", and `allocated_bytes`, whose peak is `max_memory_allocated`, to "free_requested". Between
these two another stream still uses the block.

Sources: c10/cuda/CUDACachingAllocator.cpp of PyTorch (malloc, alloc_found_block, should_split, free, free_block);
"Understanding CUDA Memory Usage" in its documentation. Chapter: book/memory_calculator.md
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lablib.calc.cuda_snapshot_blocks import Held
from lablib.calc.cuda_snapshot_state import Event, State


@dataclass(frozen=True)
class History:
    """What a snapshot tells about one device.

    Attributes:
        device: Its number.
        events: The trace as it is in the snapshot, possibly empty.
        requested: Bytes asked for, before the first event and after each one: one more than there are events.
        allocated: Bytes given, the same way; its largest is `max_memory_allocated`.
        active: Bytes given and not free for others yet, the same way.
        reserved: Bytes that the allocator had from CUDA, the same way.
        missing: Blocks and segments whose stack was recorded and whose event is not in the trace. If there are any,
            the trace was cut at `max_entries`, or begun anew, and what came before it is unknown. If there are none,
            it may be cut all the same, when nothing is left of what came before: compare the number of events.
        disagree: Blocks whose size is not what the allocator's rules say, because its settings are others. If there
            are any, the sizes of blocks that are freed by now are estimates.
        unsure: Bytes that `allocated` and `active` may have more until they are freed: remainders of blocks above
            1 MiB that were made before the trace and freed in it. 0 where it begins with the program.
    """

    device: int
    events: Sequence[Event]
    requested: tuple[int, ...]
    allocated: tuple[int, ...]
    active: tuple[int, ...]
    reserved: tuple[int, ...]
    missing: int
    disagree: int
    unsure: int
    _start: State = field(repr=False)

    def peak(self) -> Held:
        """Return what is held when `allocated` is largest; the first time, if there are several."""
        return self.at(max(range(len(self.allocated)), key=self.allocated.__getitem__))

    def end(self) -> Held:
        """Return what is held at the end, when the snapshot was taken."""
        return self.at(len(self.events))

    def out_of_memory(self) -> list[int]:
        """Return the instants at which the allocator had to give up; `events[instant - 1]` says how much was asked."""
        return [number for number, event in enumerate(self.events, 1) if event["action"] == "oom"]

    def at(self, instant: int) -> Held:
        """Return what is held after a number of events, block by block.

        Args:
            instant: 0 is before the first event.

        Raises:
            ValueError: If there are fewer events.
        """
        if not 0 <= instant <= len(self.events):
            raise ValueError(
                f"instant={instant} is not between 0 and the {len(self.events)} events of the trace"
            )
        state = self._start.copy()
        for number, event in enumerate(self.events[:instant]):
            state.do(event, number)
        return state.held(instant)

    def by_phase(self, marks: Sequence[tuple[str, int]]) -> dict[str, int]:
        """Return the most bytes held in each phase, as they were asked for, and "before" the first mark.

        Args:
            marks: Names and the moments when they begin, in microseconds since 1970 (`1e6 * time.time()`), ascending.
                A name may come again; it then counts with the former.

        Raises:
            ValueError: If marks are out of order, or events have no time.
        """
        times = [moment for _, moment in marks]
        if times != sorted(times):
            raise ValueError("marks must be in the order of time")
        if not all("time_us" in event for event in self.events):
            raise ValueError("events of this snapshot have no time_us, so phases cannot be told")
        begun = [0, *(bisect_right(times, event["time_us"]) for event in self.events), len(marks)]
        found: dict[str, int] = {}
        for size, first, last in zip(self.requested, begun[:-1], begun[1:], strict=True):
            # What an event left is held until the next one, in every phase that begins in between.
            for phase in range(first, last + 1):
                name = marks[phase - 1][0] if phase else "before"
                found[name] = max(found.get(name, 0), size)
        return found


def devices(snapshot: Mapping[str, Any]) -> list[int]:
    """Return the devices that hold or did something.

    Args:
        snapshot: From `lablib.calc.cuda_snapshot_file.load_snapshot`.
    """
    held = {segment.get("device", 0) for segment in snapshot["segments"]}
    return sorted(held | {number for number, trace in enumerate(snapshot["device_traces"]) if trace})


def replay(snapshot: Mapping[str, Any], device: int | None = None) -> History:
    """Return the history of one device.

    Args:
        snapshot: From `lablib.calc.cuda_snapshot_file.load_snapshot` or `checked`.
        device: Its number; None for the only one.

    Raises:
        ValueError: If there are several devices and none is named, if this one is not in the snapshot, or if the
            trace and the blocks contradict each other.
    """
    there = devices(snapshot)
    if device is None and len(there) > 1:
        raise ValueError(
            f"the snapshot has devices {', '.join(map(str, there))}: say which one, device={there[0]}"
        )
    if device is None:
        device = there[0] if there else 0
    elif device not in there:
        raise ValueError(f"the snapshot has nothing of device {device}; it has {there or 'none at all'}")
    traces = snapshot["device_traces"]
    events = traces[device] if device < len(traces) else []
    state = State.at_end([s for s in snapshot["segments"] if s.get("device", 0) == device])
    state.completes = any(event["action"] == "free_completed" for event in events)
    for number in range(len(events) - 1, -1, -1):
        state.undo(events[number], number)
    disagree, unsure = state.size_blocks()
    start, lines = state.copy(), [state.totals()]
    for number, event in enumerate(events):
        disagree += state.do(event, number)
        lines.append(state.totals())
    return History(device, events, *zip(*lines, strict=True), len(state.unexplained), disagree, unsure, start)
