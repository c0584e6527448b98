"""What a training step of a sharded model needs: accumulation without communication, clipping, whole tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


@contextmanager
def no_sync(model: nn.Module, *, keep_gathered: bool = False) -> Iterator[None]:
    """Accumulate gradients without communication: backward passes in the block reduce nothing.

    A rank then holds whole gradients, not shards. The first backward after the block reduces all of them.

    Args:
        model: A sharded model.
        keep_gathered: Also leave the parameters gathered after backward: no all-gather for the next forward,
            for the price of the whole model in memory.

    Raises:
        ValueError: If the model is not sharded.
    """
    root = _root(model)
    root.set_requires_gradient_sync(False)
    root.set_is_last_backward(False)
    root.set_reshard_after_backward(not keep_gathered)
    try:
        yield
    finally:
        root.set_requires_gradient_sync(True)
        root.set_is_last_backward(True)
        root.set_reshard_after_backward(True)


def clip_grad_norm(model: nn.Module, max_norm: float) -> float:
    """Scale all gradients so that their common norm is at most `max_norm`; return the norm before.

    The norm is that of the whole model. torch's own returns it as a DTensor; `full_tensor` makes it the same
    number on every rank, however the DTensor holds it.

    Args:
        model: A sharded model, after backward.
        max_norm: Above 0.

    Raises:
        ValueError: If `max_norm` is not positive.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} must be above 0; float('inf') measures and changes nothing")
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole model on every rank, on the CPU, under its own names; for small models and tests.

    Args:
        model: A sharded model; every rank must call.
    """
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu().clone()
        for name, value in model.state_dict().items()
    }


def _root(model: nn.Module) -> FSDPModule:
    if not isinstance(model, FSDPModule):
        raise ValueError(f"{type(model).__name__} is not sharded: call shard(model) first")
    return model
