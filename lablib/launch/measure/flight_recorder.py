"""After a hang, or before one: PyTorch's flight recorder, and collectives that compare notes (debug level DETAIL).

    env = flight_recorder_settings("traces")    # set before the job starts; NCCL then dumps by itself at a timeout
    dump_flight_record("traces")                # or from a thread of a rank that hangs, on gloo too
    print(compare_flight_records(read_flight_records("traces")))    # rank 1 never came to call 7 ...

The recorder is a ring of the last calls of each process group. Each entry has the call's number in its group, its
operation, sizes, state and the Python stack that issued it. Ranks of one group must have the same call under the same
number; the first number where they do not is where the hang began.

With TORCH_DISTRIBUTED_DEBUG=DETAIL a small exchange of operation, shape and dtype precedes every collective. Where they
differ, all ranks get an error that names both, instead of a hang or wrong numbers. It costs messages for every call.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lablib.calc.errors import read_bounded
from lablib.launch.ranks import run_ranks

_LARGEST = 2**30  # bytes
PREFIX = "nccl_trace_rank_"  # PyTorch's own, so that `torchfrtrace` reads what `dump` writes


@dataclass(frozen=True)
class Call:
    """One entry of the recorder."""

    group: str  # name of the process group
    number: int  # of the call in its group
    op: str  # such as "all_reduce"
    sizes: tuple[tuple[int, ...], ...]  # of the inputs
    dtypes: tuple[str, ...]  # of the inputs
    line: str  # "train.py, line 12, in step", the innermost that is not PyTorch's; "" without stacks
    ended: bool  # whether the recorder saw it end

    def __str__(self) -> str:
        """Return operation and sizes."""
        return f"{self.op} of {', '.join(map(str, map(list, self.sizes)))} {'/'.join(self.dtypes)}"


def flight_recorder_settings(folder: str | Path, entries: int = 2000) -> dict[str, str]:
    """Return the environment variables that switch the recorder on, under their new and their old names.

    Source: "ProcessGroupNCCL Environment Variables" in PyTorch's documentation.
    Chapter: book/11_practical_fsdp.md.
    """
    if entries < 1:
        raise ValueError(f"entries={entries} must be at least 1; the recorder is a ring of so many calls")
    prefix = str(Path(folder) / PREFIX)
    return {
        "TORCH_FR_BUFFER_SIZE": str(entries),
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(entries),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": prefix,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix,
    }


def dump_flight_record(folder: str | Path) -> Path:
    """Write this rank's recorder to a file, also while another thread of the process hangs."""
    name = "_dump_nccl_trace" if dist.get_backend() == "nccl" else "_dump_fr_trace"
    take = getattr(torch._C._distributed_c10d, name, None)  # private, as PyTorch's own tools use it
    if take is None:
        raise RuntimeError(f"torch {torch.__version__} has no flight recorder for {dist.get_backend()}")
    path = Path(folder) / f"{PREFIX}{dist.get_rank()}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(take())
    return path


def read_flight_records(folder: str | Path) -> dict[int, list[Call]]:
    """Return the calls of every rank that left a dump, in the order of their issue."""
    files = sorted(Path(folder).glob(f"{PREFIX}*"))
    if not files:
        raise ValueError(f"{folder} has no dump {PREFIX}*: was the job started with flight_recorder_settings(...)?")
    return {int(file.name.removeprefix(PREFIX)): _calls(file) for file in files}


def compare_flight_records(ranks: Mapping[int, list[Call]]) -> str:
    """Return a sentence on the first call that is not the same on all ranks of its group."""
    groups = dict.fromkeys(call.group for calls in ranks.values() for call in calls)
    for group in groups:
        by_rank = {rank: {call.number: call for call in calls if call.group == group} for rank, calls in ranks.items()}
        by_rank = {rank: calls for rank, calls in by_rank.items() if calls}
        # What fell out of one rank's ring cannot be compared.
        first = max(min(calls) for calls in by_rank.values())
        last = max(max(calls) for calls in by_rank.values())
        for number in range(first, last + 1):
            if told := _difference(number, {rank: calls.get(number) for rank, calls in by_rank.items()}):
                return told
    return "All ranks recorded the same calls."


def _difference(number: int, calls: dict[int, Call | None]) -> str | None:
    there = {rank: call for rank, call in calls.items() if call}
    absent = [rank for rank in calls if rank not in there]
    if not there:
        return None
    if len({str(call) for call in there.values()}) > 1:
        told = "; ".join(f"rank {rank}: {call}{_at(call)}" for rank, call in there.items())
        return f"call {number} is not the same on all ranks: {told}"
    if absent:
        rank, call = next(iter(there.items()))
        who = " and ".join(map(str, absent))
        return f"rank {who} never came to call {number}, where rank {rank} waits in {call}{_at(call)}"
    return None


def _at(call: Call) -> str:
    return f" ({call.line})" if call.line else ""


class _Plain(pickle.Unpickler):
    """Reads dictionaries, lists, texts and numbers, and runs nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it wants to load {module}.{name}")


def _calls(file: Path) -> list[Call]:
    try:
        content = _Plain(io.BytesIO(read_bounded(file, _LARGEST))).load()
        entries = content["entries"]
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is no dump of the flight recorder: {error}") from None
    return [_call(entry) for entry in entries if not entry.get("is_p2p")]


def _call(entry: dict[str, Any]) -> Call:
    # Neither PyTorch's own code nor a dispatch mode that only looks on, such as `record_comms`.
    frames = [f for f in entry.get("frames", []) if "/torch/" not in f["filename"]]
    own = [f for f in frames if f["name"] != "__torch_dispatch__"]
    line = f"{Path(own[0]['filename']).name}, line {own[0]['line']}, in {own[0]['name']}" if own else ""
    return Call(
        group=str(entry["process_group"][0]),
        number=entry["collective_seq_id"],
        op=entry["profiling_name"].partition(":")[2],
        sizes=tuple(tuple(size) for size in entry["input_sizes"]),
        dtypes=tuple(entry["input_dtypes"]),
        line=line,
        ended=bool(entry.get("retired")) or entry["state"] == "completed",
    )


def detailed_group(timeout: float = 60.0) -> dist.ProcessGroup:
    """Return a group of all ranks whose collectives are compared; every rank must call."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    finally:
        dist.set_debug_level(level)


def debug_messages(work: Callable[[dist.ProcessGroup], object], ranks: int = 2) -> list[str]:
    """Call `work(group)` on every rank with a detailed group, and return what each was told; "" where all is well."""
    return run_ranks(_told, ranks, work)


def mismatched_collectives(group: dist.ProcessGroup) -> None:
    """Call an all-reduce on rank 0 and a broadcast of another shape on the others."""
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(4), group=group)
    else:
        dist.broadcast(torch.ones(3), src=0, group=group)


def _told(work: Callable[[dist.ProcessGroup], object]) -> str:
    group = detailed_group()
    try:
        work(group)
    except RuntimeError as error:
        return str(error)
    return ""
