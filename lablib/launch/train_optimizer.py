"""AdamW over the shards, and the norm of the whole gradient without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lablib.launch.train_config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW over the trained parameters; matrices decay, biases and norms do not.

    One kernel updates all parameters, on a CPU too: DTensor then has one operation to look up, and not ten of each
    parameter.

    Args:
        model: Sharded already: the optimizer must see the shards.
        config: Of the run.

    Raises:
        ValueError: If no parameter is trained.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("no parameter of the model has requires_grad: there is nothing to train")
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their common norm is at most `max_norm`; return the norm before, on the device.

    `lablib.launch.fsdp.clip_grad_norm` returns a number, for which the host must wait; a trainer reads it later.

    Args:
        model: Sharded, after backward.
        max_norm: float("inf") measures and changes nothing.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = lr
