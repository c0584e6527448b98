"""Count what a rank communicates: calls, messages and bytes, collectives and send/recv alike.

    with record_comms() as log:
        loss.backward()
    log.calls            # Counter({'all_reduce': 3})
    log.ring_bytes_sent()

Calls of `torch.distributed`, of functional collectives (DTensor) and of PyTorch's own wrappers
(DistributedDataParallel's C++ reducer, FSDP2, pipeline stages) end in operators of the dispatcher, and a
TorchDispatchMode sees them, in backward too; those in `_OPERATORS` are recorded.
Barriers, which carry no data, stay out, and so does what another Python thread sends, since a mode
belongs to its thread; open `record_comms(log)` in that thread to count it in the same log.
"""

from __future__ import annotations

import io
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lablib.calc.communication import ring_all_gather_bytes, ring_all_reduce_bytes, ring_reduce_scatter_bytes
from lablib.calc.errors import read_bounded
from lablib.launch.ranks import run_ranks
from lablib.launch.torch_private import TorchDispatchMode, resolve_process_group


@dataclass(frozen=True)
class CommEvent:
    """One call."""

    # "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "gather", "scatter", "send" or
    # "recv"
    op: str
    # the full array: what every rank holds before an all-reduce, reduce-scatter or all-to-all and after an all-gather
    # or broadcast; what the root holds in a gather or scatter; the tensor of a send or recv
    bytes: int
    group_size: int  # ranks in the group
    time: float  # seconds from the opening of the log to the call
    sent: float  # bytes that this rank sends if the collective runs as `CommLog.ring_bytes_sent` says
    messages: int  # messages that it sends then
    ranks: tuple[int, ...] = ()  # the ranks of the group, in order


@dataclass
class CommLog:
    """The calls that were recorded while the log was open."""

    events: list[CommEvent] = field(default_factory=list)  # every call, in order
    _opened: float = field(default_factory=time.perf_counter, repr=False)

    @property
    def calls(self) -> Counter[str]:
        """Number of calls by operation."""
        return Counter(event.op for event in self.events)

    @property
    def messages(self) -> Counter[str]:
        """Messages that this rank sends, by operation: one a send, 2(n-1) a ring all-reduce."""
        return self._sum("messages")

    @property
    def bytes(self) -> Counter[str]:
        """Bytes of the full arrays (see `CommEvent`), by operation."""
        return self._sum("bytes")

    def ring_bytes_sent(self) -> float:
        """Return the bytes this rank sends when ring algorithms carry the collectives.

        For n ranks and an array of S bytes: all-reduce 2(n-1)/n · S; reduce-scatter and all-gather
        (n-1)/n · S; all-to-all S minus the piece that stays; broadcast and reduce along a chain S, nothing
        for the rank at its end; gather S/n from each rank but the root; scatter (n-1)/n · S from the root;
        send S; recv nothing.
        """
        return sum(event.sent for event in self.events)

    def _sum(self, what: str) -> Counter[str]:
        total: Counter[str] = Counter()
        for event in self.events:
            total[event.op] += getattr(event, what)
        return total


@contextmanager
def record_comms(log: CommLog | None = None) -> Iterator[CommLog]:
    """Record what this rank communicates inside the block, in a given log or a new one, which can be read at any time.

    It sees every operator, so `torch.compile` compiles nothing inside the block.
    """
    log = CommLog() if log is None else log
    with _Recorder(log):
        yield log


@dataclass(frozen=True)
class _Kind:
    """How to read one operator: its name here, which argument holds the data, and how often it fits the array."""

    op: str
    data: int = 0
    times_n: bool = False


# By the dispatcher's names, which stay when Python's change: `all_gather_single` of torch 2.13 and the older
# `all_gather_into_tensor` are both `_allgather_base_`, and so for reduce-scatter.
_OPERATORS = {
    "c10d": {
        _Kind("all_reduce"): "allreduce_ allreduce_coalesced_",
        _Kind("all_gather"): "allgather_ _allgather_base_ allgather_coalesced_ allgather_into_tensor_coalesced_",
        _Kind("reduce_scatter", 1): "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_",
        _Kind("all_to_all", 1): "alltoall_ alltoall_base_",
        _Kind("broadcast"): "broadcast_",
        _Kind("reduce"): "reduce_",
        _Kind("gather", 1, times_n=True): "gather_",
        _Kind("scatter", times_n=True): "scatter_",
        _Kind("send"): "send",
        _Kind("recv"): "recv_ recv_any_source_",
    },
    "_c10d_functional": {
        _Kind("all_reduce"): "all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_",
        _Kind("all_gather", times_n=True): (
            "all_gather_into_tensor all_gather_into_tensor_out all_gather_into_tensor_coalesced"
        ),
        _Kind("reduce_scatter"): "reduce_scatter_tensor reduce_scatter_tensor_out reduce_scatter_tensor_coalesced",
        _Kind("all_to_all"): "all_to_all_single",
        _Kind("broadcast"): "broadcast broadcast_",
        _Kind("send"): "isend",
        _Kind("recv"): "irecv",
    },
    "_dtensor": {_Kind("all_to_all"): "shard_dim_alltoall"},
}
_KINDS = {
    f"{space}::{name}": kind
    for space, kinds in _OPERATORS.items()
    for kind, names in kinds.items()
    for name in names.split()
}


class _Recorder(TorchDispatchMode):
    """Writes an event for every operator in the table."""

    supports_higher_order_operators = True

    def __init__(self, log: CommLog) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: tuple[type, ...], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            # DTensor goes first, and its collectives come back here on plain tensors.
            return NotImplemented
        schema = getattr(func, "_schema", None)
        kind = _KINDS.get(schema.name) if schema else None
        started = time.perf_counter() - self._log._opened
        result = func(*args, **(kwargs or {}))
        if kind:
            names = [argument.name for argument in schema.arguments]
            named = dict(zip(names, args, strict=False)) | (kwargs or {})
            self._log.events.append(_event(kind, named[names[kind.data]], named, started))
        return result


def _event(kind: _Kind, data: Any, named: dict[str, Any], started: float) -> CommEvent:
    group = _group(named)
    n, rank = group.size(), group.rank()
    size = _nbytes(data) * (n if kind.times_n else 1)
    root = named.get("root_rank", named.get("src", 0))
    match kind.op:
        case "all_reduce":
            sent, messages = ring_all_reduce_bytes(size, n), 2 * (n - 1)
        case "reduce_scatter":
            sent, messages = ring_reduce_scatter_bytes(size, n), n - 1
        case "all_gather":
            sent, messages = ring_all_gather_bytes(size, n), n - 1
        case "all_to_all":
            sent, messages = size - _own_piece(data, named, rank, n), n - 1
        case "broadcast":
            forwards = (rank + 1) % n != root
            sent, messages = size * forwards, int(forwards)
        case "reduce":
            sent, messages = size * (rank != root), int(rank != root)
        case "gather":
            sent, messages = size / n * (rank != root), int(rank != root)
        case "scatter":
            sent, messages = size * (n - 1) / n * (rank == root), (n - 1) * (rank == root)
        case "send":
            sent, messages = size, 1
        case _:  # recv
            sent, messages = 0, 0
    ranks = tuple(dist.get_process_group_ranks(group))
    return CommEvent(kind.op, size, n, started, float(sent), messages, ranks)


def _group(named: dict[str, Any]) -> dist.ProcessGroup:
    """Return the process group of a call: c10d passes it boxed, functional collectives by name."""
    if "process_group" in named:
        return dist.ProcessGroup.unbox(named["process_group"])
    name = named["group_name"]
    return resolve_process_group(name) if isinstance(name, str) else name


def _own_piece(data: Any, named: dict[str, Any], rank: int, n: int) -> float:
    """Return the bytes of an all-to-all that a rank keeps for itself."""
    if isinstance(data, list | tuple):
        return _nbytes(data[rank])
    splits = named.get("input_split_sizes")
    return _nbytes(data) * (splits[rank] / max(1, sum(splits)) if splits else 1 / n)


def _nbytes(data: torch.Tensor | list | tuple) -> int:
    if isinstance(data, list | tuple):
        return sum(_nbytes(item) for item in data)
    return data.numel() * data.element_size()


_LARGEST = 2**30  # bytes
PREFIX = "nccl_trace_rank_"  # PyTorch's own, which `torchfrtrace` looks for (torch 2.13's fails on gloo's dumps)


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


def flight_recorder_settings(folder: str | Path) -> dict[str, str]:
    """Return the environment variables that switch the recorder on, under their new and their old names.

    Source: "ProcessGroupNCCL Environment Variables" in PyTorch's documentation.
    """
    prefix, entries = str(Path(folder) / PREFIX), "2000"  # the recorder is a ring of so many calls
    return {
        "TORCH_FR_BUFFER_SIZE": entries,
        "TORCH_NCCL_TRACE_BUFFER_SIZE": entries,
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
            if difference := _difference(number, {rank: calls.get(number) for rank, calls in by_rank.items()}):
                return difference
    return "All ranks recorded the same calls."


def _difference(number: int, calls: dict[int, Call | None]) -> str | None:
    there = {rank: call for rank, call in calls.items() if call}
    absent = [rank for rank in calls if rank not in there]
    if not there:
        return None
    if len({str(call) for call in there.values()}) > 1:
        difference = "; ".join(f"rank {rank}: {call}{_at(call)}" for rank, call in there.items())
        return f"call {number} is not the same on all ranks: {difference}"
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
    """Call `work(group)` on every rank with a detailed group, and return each one's RuntimeError, or "" if none."""
    return run_ranks(_error_text, ranks, work)


def mismatched_collectives(group: dist.ProcessGroup) -> None:
    """Call an all-reduce on rank 0 and a broadcast of another shape on the others."""
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(4), group=group)
    else:
        dist.broadcast(torch.ones(3), src=0, group=group)


def _error_text(work: Callable[[dist.ProcessGroup], object]) -> str:
    group = detailed_group()
    try:
        work(group)
    except RuntimeError as error:
        return str(error)
    return ""
