"""ZeRO stage 1 as PyTorch has it, for the oracles of the memory calculator: ZeroRedundancyOptimizer behind DDP.

It divides the optimizer by whole parameters, so ranks hold different numbers of bytes. The calculator answers for the
fullest, and `fullest_rank` asks PyTorch which one that is. `states_of_every_rank` counts all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from lablib.launch.torch_private import FakeStore, must_have

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

Constructor = Callable[..., torch.optim.Optimizer]


def shard_optimizer(
    constructor: Constructor, model: nn.Module, **settings: object
) -> ZeroRedundancyOptimizer:
    """Return an optimizer whose states are divided over all ranks of the process group.

    Args:
        constructor: `torch.optim.AdamW` or another, or a `functools.partial` of it.
        model: Its trained parameters are updated.
        **settings: For the constructor.
    """
    with warnings.catch_warnings():
        # Its module compiles a few functions with torch.jit.script, which is deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return ZeroRedundancyOptimizer(trained, optimizer_class=constructor, **settings)


@contextmanager
def pretended(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of many in a fake process group, which answers every collective at once."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def fullest_rank(model: nn.Module, world_size: int) -> int:
    """Return the rank to which PyTorch gives most parameters, the first if several have as many.

    Call it in a process without a process group.
    """
    with pretended(0, world_size):
        optimizer = shard_optimizer(torch.optim.SGD, model, lr=0.0)
        must_have(optimizer, "_partition_parameters")
        parts = optimizer._partition_parameters()
    sizes = [sum(p.numel() for group in groups for p in group["params"]) for groups in parts]
    return sizes.index(max(sizes))


def states_of_every_rank(constructor: Constructor, model: nn.Module, world_size: int) -> list[int]:
    """Return the bytes of optimizer states that each rank holds behind a first step, counters of one value left out.

    Call it in a process without a process group.
    """
    found = []
    for rank in range(world_size):
        with pretended(rank, world_size):
            optimizer = shard_optimizer(constructor, model)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        found.append(
            sum(
                value.nbytes
                for parameter, state in optimizer.optim.state.items()
                for value in state.values()
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape
            )
        )
    return found
