"""Measure the gradient noise scale while training: squared gradient norms at two batch sizes.

Replicas (plain modules or DDP before its all-reduce) hold their own gradient: the small batch is a rank's, the
big one all ranks'. Under FSDP2 no rank ever holds its own full gradient, since it is averaged on its way into the
shards. There the small batch is one micro-batch of all ranks, and the big one several of them.

    replicas  b = examples of a rank                  B = examples of a rank times ranks
    FSDP2     b = examples of a micro-batch, all ranks    B = b times micro-batches

Paper: McCandlish et al. 2018 (1812.06162), appendix A.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from lablib.calc.runs import NoiseScale

LossOf = Callable[[nn.Module, Any], torch.Tensor]


def squared_norm(gradients: Iterable[torch.Tensor]) -> float:
    """Return the sum of squares of all gradients, full ones or shards (then over all ranks of the mesh)."""
    gradients = list(gradients)
    if not gradients:
        raise ValueError("no gradients: call backward before the norm is taken")
    own = [_local(gradient).detach() for gradient in gradients]
    own = [part.to(torch.promote_types(part.dtype, torch.float32)) for part in own]
    total = nn.utils.get_total_norm(own).square()
    mesh = getattr(gradients[0], "device_mesh", None)
    if mesh is not None:
        # On a mesh of replicas and shards only the last axis splits the numbers.
        dist.all_reduce(total, group=mesh.get_group(mesh.ndim - 1))
    return total.item()


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def _is_fsdp2(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule  # takes a second, in every rank of every check and lab

    return isinstance(model, FSDPModule)


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def between_ranks(model: nn.Module, loss_of: LossOf, batch: Any) -> tuple[float, float]:
    """Return |G_b|², the mean over ranks, and |G_B|² of a step of replicas; the mean gradient stays in `p.grad`."""
    if _is_fsdp2(model):
        raise ValueError("FSDP2 averages gradients over ranks before anybody sees them; use between_micro_batches")
    model.zero_grad()
    loss_of(model, batch).backward()
    gradients = _gradients(model)
    small = torch.tensor(squared_norm(gradients), dtype=torch.float64, device=gradients[0].device)
    ranks = dist.get_world_size()
    dist.all_reduce(small)
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient.div_(ranks)
    return small.item() / ranks, squared_norm(gradients)


def between_micro_batches(model: nn.Module, loss_of: LossOf, batches: Sequence[Any]) -> tuple[float, float]:
    """Return |G_b|², the mean over micro-batches, and |G_B|² of one step; the mean gradient stays in `p.grad`."""
    if len(batches) < 2:
        raise ValueError(f"{len(batches)} micro-batch gives one batch size; the noise scale needs two or more")
    sums: list[torch.Tensor] = []
    small = 0.0
    for batch in batches:
        model.zero_grad()
        loss_of(model, batch).backward()
        gradients = _gradients(model)
        small += squared_norm(gradients) / len(batches)
        # Shards add up like full gradients, and as plain tensors they do so without DTensor's bookkeeping.
        own = [_local(gradient) for gradient in gradients]
        if sums:
            for total, mine in zip(sums, own, strict=True):
                total.add_(mine)
        else:
            sums = [mine.clone() for mine in own]
    gradients = _gradients(model)
    for gradient, total in zip(gradients, sums, strict=True):
        _local(gradient).copy_(total / len(batches))
    return small, squared_norm(gradients)


def measure_noise_scale(
    model: nn.Module, loss_of: LossOf, steps: Iterable[Sequence[Any]], *, examples: int
) -> NoiseScale:
    """Return the noise scale of a model as it is, over many steps and without updating it.

    Args:
        loss_of: Takes the model and this rank's micro-batch, returns its mean loss.
        steps: For each step this rank's micro-batches, equally many each time.
    """
    small, big, counts = [], [], set()
    sharded = _is_fsdp2(model)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    for batches in steps:
        counts.add(len(batches))
        pairs = (
            [between_micro_batches(model, loss_of, batches)]
            if sharded or ranks == 1
            else [between_ranks(model, loss_of, batch) for batch in batches]
        )
        for pair in pairs:
            small.append(pair[0])
            big.append(pair[1])
    model.zero_grad()
    if len(counts) != 1:
        raise ValueError(f"steps of {sorted(counts)} micro-batches; all must have the same number")
    by_micro_batch = sharded or ranks == 1
    batch_small = examples * ranks if by_micro_batch else examples
    times = counts.pop() if by_micro_batch else ranks
    from lablib.calc.runs import noise_scale  # every rank loads this module, and the door of runs is wide

    return noise_scale(small, big, batch_small=batch_small, batch_big=times * batch_small)
