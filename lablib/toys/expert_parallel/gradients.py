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
from lablib.toys.gradient_layout import set_grad


def routed_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of the routed experts, which differ between the ranks of an ep group.

    In the order of the model, so that ranks which send them one by one send the same one.
    """
    return [p for module in model.modules() if isinstance(module, Experts) for p in module.parameters()]


@torch.no_grad()
def average_gradients(model: nn.Module, dp_group: dist.ProcessGroup, edp_group: dist.ProcessGroup) -> None:
    """Make every gradient that of the mean of the dp ranks' losses, whose tokens are as many on each.

    Routed experts are summed over edp, all others over dp; both are divided by dp. Each kind goes in one message.

    Args:
        dp_group: The ranks that hold the same attention, ep included.
        edp_group: The ranks that hold the same experts.
    """
    routed = set(routed_parameters(model))
    trained = [p for p in model.parameters() if p.requires_grad]
    for group, parameters in (
        (edp_group, [p for p in trained if p in routed]),
        (dp_group, [p for p in trained if p not in routed]),
    ):
        if not parameters:
            continue
        # Every rank sends, whether it has seen a token or not: a message that one rank leaves out hangs the others.
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        message = torch.cat([grad.flatten() for grad in grads]) / dp_group.size()
        dist.all_reduce(message, group=group)
        for p, part in zip(parameters, message.split([p.numel() for p in parameters]), strict=True):
            set_grad(p, part)  # in its own dtype too: cat of bf16 and fp32 is fp32


def own_group(groups: list[list[int]]) -> dist.ProcessGroup:
    """Return the process group of this rank among groups of ranks that name each rank once; all ranks must call it.

    Args:
        groups: As from `lablib.calc.parallel.expert_groups`.
    """
    named = [rank for ranks in groups for rank in ranks]
    if sorted(named) != list(range(dist.get_world_size())):
        raise ValueError(f"the groups {groups} must name each of the {dist.get_world_size()} ranks once")
    made = [dist.new_group(ranks) for ranks in groups]  # every rank makes all, in the same order
    return next(group for group, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks)
