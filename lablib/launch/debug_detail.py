"""TORCH_DISTRIBUTED_DEBUG=DETAIL: collectives that compare notes first, and say what does not fit.

At this level every collective is preceded by a small exchange: operation, shape and dtype of each rank. Where they
differ, all ranks get an error that names both, in place of a hang or of wrong numbers. It costs messages for every
call, so it is for looking, not for training.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from lablib.launch.ranks import run_ranks


def detailed_group(timeout: float = 60.0) -> dist.ProcessGroup:
    """Return a group of all ranks whose collectives are compared; every rank must call.

    The variable is read when a process loads PyTorch; a group can be made so later, too.

    Args:
        timeout: Seconds to wait for a rank that does not come.
    """
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    finally:
        dist.set_debug_level(level)


def messages(work: Callable[[dist.ProcessGroup], object], ranks: int = 2) -> list[str]:
    """Call `work(group)` on every rank with a detailed group, and return what each was told; "" where all is well."""
    return run_ranks(_told, ranks, work)


def mismatched(group: dist.ProcessGroup) -> None:
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
