"""Local SGD and DiLoCo: replicas that train alone, and exchange once in H steps.

    trainer = DiLoCo(module, torch.optim.AdamW(module.parameters(), lr=1e-3), inner_steps=100)
    loss(module(x)).backward()      # x is this replica's own data
    trainer.step()                  # instead of the optimizer's step and zero_grad; every 100th time an exchange

With k replicas that started at w and are at w_1 ... w_k after H steps of their own, an exchange sets

    local SGD    w ← mean of w_i
    DiLoCo       Δ = mean of (w - w_i)      the outer gradient: where the replicas went, against the sign
                 b ← μ b + Δ                the outer momentum
                 w ← w - α (Δ + μ b)        Nesterov's step, as torch.optim.SGD takes it

With α = 1 and μ = 0 the second is the first. H = 1, local SGD and plain SGD are data parallelism: the mean of
w - η g_i is w minus η times the mean of g_i.

Papers: Stich 2018, local SGD (arXiv 1805.09767); Douillard et al. 2023, DiLoCo (arXiv 2311.08105), algorithm 1.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lablib.calc.errors import check_whole
from lablib.toys.data_parallel.ddp import broadcast_tensors, check_replica


class LocalSGD:
    """Train a replica with its own optimizer, and average the weights of all replicas every H steps.

    The optimizer's states and the module's buffers stay each replica's own.

    Args:
        module: The same module on every rank; rank 0's parameters and buffers go to all.
        optimizer: The inner optimizer, over the module's parameters.
        inner_steps: H, steps between two exchanges.
        group: The process group of the replicas; None is all ranks.

    Raises:
        ValueError: If H is no whole number above 0, the rank is not in the group, or replicas differ.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        inner_steps: int,
        group: dist.ProcessGroup | None = None,
    ):
        check_whole("inner_steps", inner_steps, 1)
        check_replica(module, group)
        self.optimizer, self.inner_steps, self.group = optimizer, inner_steps, group
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.steps = 0  # taken so far
        broadcast_tensors([*module.parameters(), *module.buffers()], group)

    def step(self) -> bool:
        """Take an inner step; after every H-th exchange, and return whether it was one."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        due = self.steps % self.inner_steps == 0
        if due:
            self.exchange()
        return due

    @torch.no_grad()
    def exchange(self) -> None:
        """Replace the weights by their mean over the replicas."""
        for p, mean in zip(self.params, mean_over_replicas(self.params, self.group), strict=True):
            p.copy_(mean)


class DiLoCo(LocalSGD):
    """Exchange changes of weights, and step along their mean with Nesterov momentum.

    Args:
        outer_lr: α; 0.7 is the paper's.
        outer_momentum: μ; 0.9 is the paper's.

    Attributes:
        before: The weights as the last exchange left them, the same on every replica.
        momentum: b. With `before` it is what DiLoCo keeps beside the inner optimizer: two copies of the weights.
    """

    def __init__(self, *args: object, outer_lr: float = 0.7, outer_momentum: float = 0.9, **options: object):
        super().__init__(*args, **options)
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self.before = [p.detach().clone() for p in self.params]
        self.momentum = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def exchange(self) -> None:
        """Take the outer step from where the last exchange left the weights."""
        changes = [before - p for before, p in zip(self.before, self.params, strict=True)]
        means = mean_over_replicas(changes, self.group)
        for p, before, momentum, mean in zip(self.params, self.before, self.momentum, means, strict=True):
            momentum.mul_(self.outer_momentum).add_(mean)
            before.sub_(self.outer_lr * (mean + self.outer_momentum * momentum))
            p.copy_(before)


def mean_over_replicas(tensors: list[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return each tensor's mean over the group, with one all-reduce for all: a slow link is far away as well."""
    message = torch.cat([tensor.flatten() for tensor in tensors])  # in the widest of their dtypes
    message.div_(dist.get_world_size(group))
    dist.all_reduce(message, group=group)
    parts = message.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
