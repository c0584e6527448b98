"""Tensors on several meshes: FSDP puts a layer that tp split on (dp, tp), and one that it did not on (dp) alone."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return tensors by the mesh that they lie on; those that are no DTensors are together too.

    Args:
        tensors: DTensors or not.
    """
    found: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(found.values())


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale all gradients of a stage to a common norm of at most `max_norm`; return the norm before.

    torch's own refuses gradients on different meshes, as FSDP makes them of layers that tp split and of layers that
    it did not. The squares of each mesh's norm add up.

    Args:
        parameters: Of one stage; with several, their squares add up too.
        max_norm: Above 0.
    """
    grads = by_mesh([p.grad for p in parameters if p.grad is not None])
    square = sum(float(whole(nn.utils.get_total_norm(group))) ** 2 for group in grads)
    norm = square**0.5
    if norm > max_norm:
        for grad in [grad for group in grads for grad in group]:
            grad.mul_(max_norm / norm)
    return norm


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor without its layout: gathered from all ranks that share it.

    Args:
        tensor: A DTensor, or any.
    """
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
