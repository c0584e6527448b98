"""Read the traces that torch.profiler writes, put all ranks on one clock, and say where each rank's time went.

    traces = [parse_trace(path) for path in paths]  # one file a rank, as `export_chrome_trace` writes it
    events = merge_traces(traces)                   # seconds from the first event of any rank
    split_time(events)[0].communication             # of rank 0, and no computation hides it

A trace is a list of events with a start, a length and a thread or a stream. What counts:

    compute         operators such as aten::mm; where there is a GPU its kernels, since its operators only launch them
    communication   gloo:all_reduce and the like, on the backend's threads; on a GPU the NCCL kernels
    launch          c10d::allreduce_ and the like: the call that hands a message over and returns
    annotation      what the program named by `record_function`, and a wrapper's own marks, such as FSDP::all_gather

An operator that calls others contains them, so times are lengths of unions, never sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lablib.calc.errors import read_json

_LARGEST = 2**31  # bytes; a trace of a few steps has hundreds of MB
KINDS = ("compute", "communication", "launch", "annotation")
_BACKENDS = ("gloo:", "nccl:", "mpi:", "ucc:")
_MESSAGES = ("c10d", "_c10d_functional", "_dtensor")
#: Autograd's own bookkeeping contains the hooks that wait for messages; its work is in the operators that it calls.
_WRAPPERS = ("autograd", "torch", "profiler", "record_param_comms")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

Interval = tuple[float, float]


class Event(NamedTuple):
    """One thing that a rank did.

    Attributes:
        start: Seconds; from the first event of all ranks once they are merged.
    """

    rank: int
    kind: str
    name: str
    start: float
    end: float
    lane: str


@dataclass(frozen=True)
class Trace:
    """The events of one rank.

    Attributes:
        base_ns: Where its clock begins, in nanoseconds since 1970.
        events: With seconds since then, by start.
    """

    rank: int
    base_ns: int
    events: tuple[Event, ...]


def parse_trace(source: str | Path | dict[str, Any], rank: int | None = None) -> Trace:
    """Return the events of a trace that are computation, communication, launches or annotations.

    Args:
        source: The path of a JSON file that `torch.profiler` wrote, or its content.

    Raises:
        ValueError: If it is no such trace, or does not say its rank and none is given.
    """
    content = source if isinstance(source, dict) else read_json(source, _LARGEST)
    if not isinstance(content, dict) or "traceEvents" not in content:
        raise ValueError("no chrome trace: it has no traceEvents; write it with export_chrome_trace")
    own = content.get("distributedInfo", {}).get("rank")
    number = own if rank is None else rank
    if number is None:
        raise ValueError("the trace does not say its rank; pass parse_trace(source, rank=...)")
    timed = [event for event in content["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    device = any(event.get("cat") in _ON_DEVICE for event in timed)
    events = []
    for event in timed:
        if kind := _kind(event.get("cat", ""), event["name"], device):
            start, lane = float(event["ts"]), f"{event.get('pid')}/{event.get('tid')}"
            seconds = start * 1e-6, (start + float(event["dur"])) * 1e-6
            events.append(Event(number, kind, event["name"], *seconds, lane))
    events.sort(key=lambda event: (event.start, -event.end))
    return Trace(number, int(content.get("baseTimeNanoseconds", 0)), tuple(events))


def _kind(category: str, name: str, device: bool) -> str | None:
    if category in _ON_DEVICE:
        return "communication" if "nccl" in name.lower() else "compute"
    if category == "user_annotation":
        if name.startswith(_BACKENDS):
            # On a GPU this is the launch; its kernel is in the trace too.
            return "launch" if device else "communication"
        return "annotation"
    if category != "cpu_op":
        return None
    space, colons, _ = name.partition("::")
    if space in _MESSAGES:
        return "launch"
    if not colons or space in _WRAPPERS or device:
        return None
    return "compute"


def merge_traces(traces: Sequence[Trace], align: str | None = None) -> list[Event]:
    """Return the events of all ranks on one clock, in seconds from the first of them.

    Args:
        align: The name of an annotation whose first start is the same instant on every rank, right after a barrier: ranks of
            several machines have no common clock. None trusts the clocks.

    Raises:
        ValueError: If there is no event, two traces are of one rank, or an annotation is missing on a rank.
    """
    if len({trace.rank for trace in traces}) != len(traces):
        raise ValueError(f"ranks {sorted(trace.rank for trace in traces)}: a rank has two traces")
    if not any(trace.events for trace in traces):
        raise ValueError("the traces have no events; profile at least one step")
    base, moved = min(trace.base_ns for trace in traces), []
    for trace in traces:
        shift = (trace.base_ns - base) * 1e-9
        if align is not None:
            starts = [e.start for e in trace.events if e.kind == "annotation" and e.name == align]
            if not starts:
                raise ValueError(f"rank {trace.rank} has no annotation {align!r}; wrap the step in record_function")
            shift = -starts[0]
        moved += [e._replace(start=e.start + shift, end=e.end + shift) for e in trace.events]
    zero = min(event.start for event in moved)
    moved = [event._replace(start=event.start - zero, end=event.end - zero) for event in moved]
    return sorted(moved, key=lambda event: (event.start, event.rank, -event.end))


@dataclass(frozen=True)
class Split:
    """Where a rank's time went, in seconds; the four parts add up to the window.

    Attributes:
        both: Computing while a message is on its way: overlapped.
        idle: Neither; the processor may still be busy with what is no operator.
    """

    compute: float
    communication: float
    both: float
    idle: float

    @property
    def window(self) -> float:
        """All of it."""
        return self.compute + self.communication + self.both + self.idle


def split_time(events: Iterable[Event], window: Interval | None = None) -> dict[int, Split]:
    """Return where the time of every rank went.

    Args:
        window: From when to when, in seconds; by default from the first computation or communication of any rank to
            the last.
    """
    events = [event for event in events if event.kind in ("compute", "communication")]
    if not events:
        raise ValueError("there is neither computation nor communication in these events")
    low, high = window or (min(e.start for e in events), max(e.end for e in events))
    if not low < high:
        raise ValueError(f"window=({low}, {high}) is empty; it needs start < end")
    parts = {}
    for rank in sorted({event.rank for event in events}):
        spans = {
            kind: merge_intervals(
                (max(low, e.start), min(high, e.end)) for e in events if (e.rank, e.kind) == (rank, kind)
            )
            for kind in ("compute", "communication")
        }
        every = merge_intervals([*spans["compute"], *spans["communication"]])
        busy, computing, talking = (
            sum(end - start for start, end in covered) for covered in (every, spans["compute"], spans["communication"])
        )
        both = computing + talking - busy
        parts[rank] = Split(computing - both, talking - both, both, high - low - busy)
    return parts


def annotated_window(events: Iterable[Event], name: str) -> Interval:
    """Return from when the first rank begins something named until the last one ends it."""
    spans = [(event.start, event.end) for event in events if event.kind == "annotation" and event.name == name]
    if not spans:
        raise ValueError(f"no rank has an annotation {name!r}")
    return min(start for start, _ in spans), max(end for _, end in spans)


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Return intervals that do not touch, by start, and cover the same time; empty ones are left out."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged
