"""A CUDA memory snapshot from a file: PyTorch's pickle, read without running anything that is in it.

    snapshot = load_snapshot("oom.pickle")        # by torch.cuda.memory._dump_snapshot("oom.pickle")

A pickle may name any function, and loading it calls that function. A snapshot is lists, dictionaries, texts and
numbers, which need no function at all; so this loader knows none, and a file from a stranger is safe to read.

The dictionary is described where PyTorch makes it, in the docstring of `torch.cuda.memory._snapshot`:

    segments         what the allocator got from CUDA, each with its blocks in the order of their addresses
    device_traces    for each device what the allocator did: alloc, free_requested, free_completed, segment_alloc, ...

Chapter: book/memory_calculator.md
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

HOW = 'make one with torch.cuda.memory._dump_snapshot("snapshot.pickle")'
#: What a block can be. PyTorch's documentation calls the second one "active_awaiting_free".
STATES = ("active_allocated", "active_pending_free", "active_awaiting_free", "inactive")


class _PlainUnpickler(pickle.Unpickler):
    """Builds containers, texts and numbers, and nothing else."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and a snapshot needs no code")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to things outside of itself, and a snapshot does not")


def load_snapshot(path: str | PathLike) -> dict[str, Any]:
    """Return the snapshot in a file; nothing in the file is run.

    Args:
        path: Written by `torch.cuda.memory._dump_snapshot`, or by `pickle.dump` of `torch.cuda.memory_snapshot()`,
            which has segments alone.

    Raises:
        ValueError: If the file is no pickle, is cut off, holds code, or is not a snapshot.
        OSError: If it cannot be read.
    """
    with Path(path).open("rb") as file:
        try:
            found = _PlainUnpickler(file).load()
        except OSError:
            raise
        except Exception as error:  # a damaged pickle may fail with nearly every kind of error
            raise ValueError(f"{path} cannot be read as a snapshot: {error}; {HOW}") from None
    return checked(found, str(path))


def checked(found: Any, name: str = "this") -> dict[str, Any]:
    """Return a snapshot as a dictionary with segments and device_traces, after a look at its shape.

    Args:
        found: What `torch.cuda.memory._snapshot()` or `torch.cuda.memory_snapshot()` returned.
        name: Of it, for errors.

    Raises:
        ValueError: If something is missing, is of another kind, or does not add up.
    """
    if isinstance(found, list):
        found = {"segments": found}
    if not isinstance(found, Mapping) or not isinstance(found.get("segments"), list):
        raise ValueError(f"{name} is not a memory snapshot: it has no list of segments; {HOW}")
    traces = found.get("device_traces", [])
    if not isinstance(traces, list) or not all(isinstance(trace, list) for trace in traces):
        raise ValueError(f"{name} is not a memory snapshot: its device_traces are not lists; {HOW}")
    for number, segment in enumerate(found["segments"]):
        _check_segment(segment, f"segment {number} of {name}")
    for device, trace in enumerate(traces):
        for number, event in enumerate(trace):
            _check_event(event, f"event {number} of device {device} in {name}")
    return {**found, "device_traces": traces}


def _check_segment(segment: Any, where: str) -> None:
    _numbers(segment, ("address", "total_size"), where)
    if not isinstance(segment.get("blocks"), list):
        raise ValueError(f"{where} has no list of blocks; {HOW}")
    for number, block in enumerate(segment["blocks"]):
        _numbers(block, ("size",), f"block {number} of {where}")
        _frames(block, f"block {number} of {where}")
        if block.get("state") not in STATES:
            raise ValueError(f"block {number} of {where} has state {block.get('state')!r}, not {STATES}")
    blocks = sum(block["size"] for block in segment["blocks"])
    if blocks != segment["total_size"]:
        raise ValueError(f"{where} has {segment['total_size']:,} bytes, and its blocks have {blocks:,}")


def _check_event(event: Any, where: str) -> None:
    if not isinstance(event, Mapping) or not isinstance(event.get("action"), str):
        raise ValueError(f"{where} has no action; {HOW}")
    if event["action"].startswith(("alloc", "free_", "segment_")):
        _numbers(event, ("addr", "size"), where)
    elif event["action"] == "oom":
        _numbers(event, ("size",), where)
    _frames(event, where)


def _frames(found: Mapping, where: str) -> None:
    frames = found.get("frames", [])
    if not isinstance(frames, list | tuple) or not all(isinstance(frame, Mapping) for frame in frames):
        raise ValueError(f"{where} has frames that are no stack; {HOW}")


def _numbers(found: Any, names: tuple[str, ...], where: str) -> None:
    for name in names:
        value = found.get(name) if isinstance(found, Mapping) else None
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{where} has no number {name!r}; {HOW}")
