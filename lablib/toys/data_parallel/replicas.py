"""Requirements of data parallelism: every rank wraps the same module, and it stays the same while it trains.

A message has no names. If two ranks hold different modules, their messages still meet, by their order alone, and the
sums are of things that have nothing to do with each other; or one rank sends more of them, and the others wait.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def describe_replica(module: nn.Module) -> list[tuple]:
    """Return what ranks must agree on: name, shape, dtype, memory layout and training of every parameter."""
    return [(name, tuple(p.shape), p.dtype, p.stride(), p.requires_grad) for name, p in module.named_parameters()]


def check_replica(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Refuse what data parallelism would get wrong; every rank of the group must call it."""
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group; wrap only on the group's ranks")
    for name, m in module.named_modules():
        if getattr(m, "sparse", False):
            raise ValueError(f"{name}: gradients would be sparse; build with sparse=False")
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None:
            raise ValueError(
                f"{name}: max_norm changes weights in forward, other ones on every rank; use max_norm=None"
            )
    buffers = [(name, tuple(b.shape), b.dtype) for name, b in module.named_buffers()]
    of_ranks: list[list] = [[]] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, describe_replica(module) + buffers, group=group)
    for rank, theirs in enumerate(of_ranks):
        if theirs != (ours := of_ranks[0]):
            odd = [entry for entry in theirs if entry not in ours] + [e for e in ours if e not in theirs]
            what = odd[0][0] if odd else "the order of the parameters"
            raise ValueError(
                f"rank {rank} of the group has another module than rank 0, first seen in {what}: names, shapes, "
                "dtypes, memory layouts and requires_grad must be the same on every rank"
            )


@torch.no_grad()
def take_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Overwrite tensors with the values that the group's first rank has."""
    for tensor in tensors:
        message = tensor.contiguous()  # a copy only where the layout is not plain
        dist.broadcast(message, group=group, group_src=0)
        tensor.copy_(message)
