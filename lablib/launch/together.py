"""Do something on all ranks, and fail on all of them if it fails on one; works without ranks, too."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lablib.launch.known_failures import explain

_own_group: tuple[Any, dist.ProcessGroup] | None = None


def own_rank() -> int:
    """Return the number of this rank; 0 without ranks."""
    return dist.get_rank() if dist.is_initialized() else 0


def count_ranks() -> int:
    """Return the number of ranks; 1 without any."""
    return dist.get_world_size() if dist.is_initialized() else 1


def own_group() -> dist.ProcessGroup | None:
    """Return a gloo group of its own: messages of a save in the background must not mix with those of training."""
    global _own_group
    if not dist.is_initialized():
        return None
    if _own_group is None or _own_group[0] is not dist.group.WORLD:
        _own_group = (dist.group.WORLD, dist.new_group(backend="gloo"))
    return _own_group[1]


def from_rank_0(value: Any) -> Any:
    """Return rank 0's value on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=own_group())
    return box[0]


class _Unwritten(RuntimeError):
    """What went wrong, with the rank in the text."""


def readable(error: BaseException) -> BaseException:
    """Return one line for what DCP tells with the tracebacks of all ranks, and what is known about it."""
    if not isinstance(error, CheckpointException):
        return error
    failures = (
        f"rank {rank}: {_meaning(e)}{type(e).__name__}: {e}" for rank, (e, _) in error.failures.items()
    )
    return _Unwritten("; ".join(failures))


def _meaning(error: BaseException) -> str:
    meaning = explain(f"{error}")
    return f"{meaning} " if meaning else ""


def agree(work: Callable[[], Any], failure: str) -> None:
    """Do something on every rank; if it fails on any, raise on all of them.

    Without it the others would wait for ever for the rank that failed.

    Raises:
        ValueError: On the ranks where `work` raised one, and everywhere if the first rank that failed did.
        RuntimeError: For any other failure.
    """
    error: BaseException | None = None
    try:
        work()
    except Exception as caught:
        error = caught
    known = isinstance(error, _Unwritten)
    text = str(error) if known else f"rank {own_rank()}: {type(error).__name__}: {error}" if error else ""
    texts = [text] * count_ranks()
    if dist.is_initialized():
        dist.all_gather_object(texts, text, group=own_group())
    if isinstance(error, ValueError):
        raise error
    if told := next(filter(None, texts), None):
        if found := re.match(r"rank \d+: ValueError: ", told):
            raise ValueError(told[found.end() :])
        raise RuntimeError(f"{failure}. {told}") from error
