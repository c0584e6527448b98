"""Read a CUDA memory snapshot: how much a program held at its peak, and which lines of it asked for that.

    history = replay_snapshot(load_snapshot("oom.pickle"))       # by torch.cuda.memory._dump_snapshot("oom.pickle")
    peak = history.peak()
    print(peak.requested, peak.reserved, peak.by_line())

A snapshot says what is held at its end, and what the allocator did before. Walked backwards from the end, each event
undone, it says what was held before. The trace has the bytes that the program asked for, so `requested` is that of
`torch.cuda.memory_stats()` to the byte; what the allocator adds to each block is its own, and `reserved` has all of
it. PyTorch's viewer, pytorch.org/memory_viz, draws where it lies.

Sources: the docstring of `torch.cuda.memory._snapshot`; c10/cuda/CUDACachingAllocator.cpp (malloc, free).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, NoReturn

from lablib.calc.errors import read_bounded

#: Every block is a multiple of this.
ROUNDING = 512
BEFORE = "(allocated before the recording)"
NO_FRAMES = "(no Python frames: backward, or C++)"
#: A frame in a file of these is PyTorch's own: the line that called it is what a reader wants to know.
_LIBRARY = ("-packages/torch/", "<frozen ", "<string>", "<eval_with_key>")
_HOW = 'make one with torch.cuda.memory._dump_snapshot("snapshot.pickle")'
_LARGEST = 2**30  # bytes of a file
#: What an event changes of `reserved`.
_RESERVE = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


def round_up(size: int) -> int:
    """Return the bytes of the block for a request, as long as the rest of the free block can be split off."""
    return max(ROUNDING, -(-size // ROUNDING) * ROUNDING)


@dataclass(frozen=True)
class Block:
    """Bytes that a program asked for and holds.

    Attributes:
        frames: The stack when it asked, the innermost frame first; empty if it was not recorded.
        recorded: Whether its allocation is in the trace.
    """

    requested: int
    frames: Sequence[Mapping[str, Any]] = ()
    recorded: bool = False

    @property
    def line(self) -> str:
        """The line that asked for it, "train.py:12 step": the innermost frame outside of PyTorch."""
        own = next((frame for frame in self.frames if not _is_library(frame)), None)
        if own is not None:
            return f"{_place(own)} {own.get('name', '')}"
        return NO_FRAMES if self.frames or self.recorded else BEFORE

    @property
    def module(self) -> str:
        """The lines of `forward` methods that it was made in, the outermost first; where there is none, its line."""
        chain = [f for f in reversed(self.frames) if f.get("name") == "forward" and not _is_library(f)]
        return " > ".join(map(_place, chain)) or self.line


@dataclass(frozen=True)
class HeldMemory:
    """Memory of a device after a number of events: blocks, and the bytes that the allocator has from CUDA."""

    events: int
    reserved: int
    blocks: tuple[Block, ...]

    @property
    def requested(self) -> int:
        """Bytes that the program asked for."""
        return sum(block.requested for block in self.blocks)

    @property
    def rounded(self) -> int:
        """Bytes of the blocks, each request rounded up to 512: at most what is allocated."""
        return sum(round_up(block.requested) for block in self.blocks)

    def by_line(self) -> dict[str, int]:
        """Return the bytes asked for by the line that asked, the most first."""
        return _sums((block.line, block.requested) for block in self.blocks)

    def by_module(self) -> dict[str, int]:
        """Return the bytes asked for by the chain of `forward` methods, the most first."""
        return _sums((block.module, block.requested) for block in self.blocks)


@dataclass(frozen=True)
class MemoryHistory:
    """The history of one device in a snapshot.

    Attributes:
        events: The trace as it is in the snapshot, possibly empty.
        requested: Bytes asked for, before the first event and after each one: one more than there are events.
        reserved: Bytes that the allocator had from CUDA, the same way.
        missing: Blocks whose stack was recorded and whose allocation is not in the trace. If there are any, the trace
            was cut at `max_entries`, and what came before it is unknown.
    """

    device: int
    events: Sequence[Mapping[str, Any]]
    requested: tuple[int, ...]
    reserved: tuple[int, ...]
    missing: int
    _end: Mapping[int, Block]

    def peak(self) -> HeldMemory:
        """Return what is held when the most bytes are asked for; the first time, if there are several."""
        return self.at(max(range(len(self.requested)), key=self.requested.__getitem__))

    def end(self) -> HeldMemory:
        """Return what is held when the snapshot was taken."""
        return self.at(len(self.events))

    def out_of_memory(self) -> list[int]:
        """Return after how many events the allocator had to give up; `events[n - 1]` says how much was asked."""
        return [number for number, event in enumerate(self.events, 1) if event["action"] == "oom"]

    def at(self, number: int) -> HeldMemory:
        """Return what is held after so many events."""
        blocks = dict(self._end)
        for event in reversed(self.events[number:]):
            _undo(blocks, event)
        # The snapshot has the stacks of what lives at its end, and the trace those of what it saw allocated.
        made = {event["addr"]: event for event in self.events[:number] if event["action"] == "alloc"}
        for address in blocks.keys() & made.keys():
            frames = made[address].get("frames") or blocks[address].frames
            blocks[address] = Block(blocks[address].requested, frames, recorded=True)
        return HeldMemory(number, self.reserved[number], tuple(blocks.values()))


def replay_snapshot(snapshot: Mapping[str, Any], device: int | None = None) -> MemoryHistory:
    """Return the history of one device of a snapshot, the only one if none is named.

    Raises:
        ValueError: If there are several devices and none is named, if this one is not in the snapshot, or if trace and
            blocks contradict each other.
    """
    try:
        return _replay(_with_traces(snapshot), device)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"this is not a memory snapshot: {type(error).__name__}: {error}") from None


def _replay(snapshot: Mapping[str, Any], device: int | None) -> MemoryHistory:
    traces = snapshot["device_traces"]
    there = {segment.get("device", 0) for segment in snapshot["segments"]}
    there = sorted(there | {number for number, trace in enumerate(traces) if trace})
    if device is None and len(there) > 1:
        raise ValueError(f"the snapshot has devices {', '.join(map(str, there))}: say which one, device={there[0]}")
    if device is None:
        device = there[0] if there else 0
    elif device not in there:
        raise ValueError(f"the snapshot has nothing of device {device}; it has {there or 'none at all'}")
    events = traces[device] if device < len(traces) else []
    end, segments = {}, [s for s in snapshot["segments"] if s.get("device", 0) == device]
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                end[address] = Block(block.get("requested_size", block["size"]), block.get("frames", ()))
            address += block["size"]
    blocks, requested, reserved = dict(end), [], []
    asked, kept = sum(block.requested for block in end.values()), sum(s["total_size"] for s in segments)
    for number in range(len(events) - 1, -1, -1):
        requested.append(asked)
        reserved.append(kept)
        event = events[number]
        kept -= _RESERVE.get(event["action"], 0) * event.get("size", 0)
        try:
            asked += _undo(blocks, event)
        except ValueError as error:
            raise ValueError(f"event {number} {error}") from None
    missing = sum(bool(block.frames) for block in blocks.values())
    return MemoryHistory(device, events, (asked, *reversed(requested)), (kept, *reversed(reserved)), missing, end)


def _undo(blocks: dict[int, Block], event: Mapping[str, Any]) -> int:
    """Go back over the last event of what `blocks` hold by address; return the change of the bytes asked for."""
    action, address, size = event["action"], event.get("addr", 0), event.get("size", 0)
    if action == "free_completed":
        if address in blocks:
            raise ValueError(f"({action} of {size:,} bytes) contradicts the others: the block is in use after it")
        blocks[address] = Block(size)
        return size
    if action == "alloc":
        block = blocks.pop(address, None)
        if block is None or block.requested != size:
            raise ValueError(
                f"({action} of {size:,} bytes) contradicts the others: there is no such block after it. Record every "
                "action, without skip_actions"
            )
        return -size
    return 0


class _PlainUnpickler(pickle.Unpickler):
    """Builds containers, texts and numbers: a pickle may name any function, and loading it would call that function."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and a snapshot needs no code")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to things outside of itself, and a snapshot does not")


def load_snapshot(path: str | PathLike) -> dict[str, Any]:
    """Return the snapshot in a file of `torch.cuda.memory._dump_snapshot`; nothing in the file is run.

    Raises:
        ValueError: If the file is no pickle, is cut off, holds code, or is not a snapshot.
        OSError: If it cannot be read.
    """
    content = read_bounded(path, _LARGEST)
    try:
        return _with_traces(_PlainUnpickler(io.BytesIO(content)).load())
    except Exception as error:  # a damaged pickle may fail with nearly every kind of error
        raise ValueError(f"{path} cannot be read as a snapshot: {error}; {_HOW}") from None


def _with_traces(found: Any) -> dict[str, Any]:
    """Return a snapshot as a dictionary with segments and device_traces; `torch.cuda.memory_snapshot()` has no traces."""
    found = {"segments": found} if isinstance(found, list) else found
    if not isinstance(found, dict) or not isinstance(found.get("segments"), list):
        raise ValueError("this is not a memory snapshot: it has no segments")
    return {"device_traces": [], **found}


def _sums(pairs: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, size in pairs:
        found[name] = found.get(name, 0) + size
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _is_library(frame: Mapping[str, Any]) -> bool:
    name = _path(frame)
    # Frames of C++ have a source of PyTorch's build, or ?? without one.
    compiled = name in ("", "??") or name.endswith((".cpp", ".cc", ".c", ".cu", ".h"))
    return compiled or any(mark in name for mark in _LIBRARY)


def _place(frame: Mapping[str, Any]) -> str:
    return f"{'/'.join(_path(frame).split('/')[-2:])}:{frame.get('line', '?')}"


def _path(frame: Mapping[str, Any]) -> str:
    return str(frame.get("filename", "")).replace("\\", "/")
