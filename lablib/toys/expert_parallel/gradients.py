"""Which ranks average which gradients, and what they divide by.

With dp = 4 and ep = 2, two ranks share the experts of a layer, and each expert lives twice, edp = dp/ep = 2:

    rank                     0     1     2     3
    experts                0..3  4..7  0..3  4..7
    ep groups               0 1         2 3              tokens go between these
    edp groups              0 2         1 3              these hold the same experts
    dp group                0 1 2 3                      these hold the same of everything else

The loss of the batch is the mean of the ranks' losses, `L = (1/dp) Σ_r L_r`, so every gradient is `(1/dp) Σ_r dL_r/dw`.
A rank's gradient of a weight that all ranks hold is that of its own L_r: sum over dp, divide by dp.
An expert has already seen the tokens of all ranks of its ep group, and the all-to-all brought back the gradients of
all their losses, so its rank holds a sum over ep ranks. What is missing is the sum over edp; what it is divided by is
still dp, the number of losses. The mean over edp alone is ep times too large.

Sources: NVIDIA/Megatron-LM pull request 5956; torchtitan pull request 1324 for the meshes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from lablib.toys.expert_parallel.experts import Experts


def routed_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of the routed experts, which differ between the ranks of an ep group."""
    return {p for module in model.modules() if isinstance(module, Experts) for p in module.parameters()}


@torch.no_grad()
def average_gradients(model: nn.Module, dp_group: dist.ProcessGroup, edp_group: dist.ProcessGroup) -> None:
    """Make every gradient that of the mean of the dp ranks' losses, whose tokens are as many on each.

    Routed experts are summed over edp, all others over dp; both are divided by dp. One message a parameter, so that it
    can be read; DDP's buckets would do.

    Args:
        dp_group: The ranks that hold the same attention, ep included.
        edp_group: The ranks that hold the same experts.
    """
    routed = routed_parameters(model)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        # Every rank sends, whether it has seen a token or not: a message that one rank leaves out hangs the others.
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        message = grad.contiguous() / dp_group.size()
        dist.all_reduce(message, group=edp_group if parameter in routed else dp_group)
        parameter.grad = message


def own_group(groups: list[list[int]]) -> dist.ProcessGroup:
    """Return the process group of this rank among groups of ranks that name each rank once; all ranks must call it.

    Args:
        groups: As from `lablib.calc.parallel.expert_groups`.
    """
    rank = dist.get_rank()
    made = [dist.new_group(ranks) for ranks in groups]  # every rank makes all, in the same order
    mine = [group for group, ranks in zip(made, groups, strict=True) if rank in ranks]
    if len(mine) != 1:
        raise ValueError(f"rank {rank} is in {len(mine)} of the groups {groups}, not in one")
    return mine[0]
