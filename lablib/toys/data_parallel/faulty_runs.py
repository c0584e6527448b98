"""Five data-parallel runs that all end with a falling loss. One is healthy, four have a fault.

Every run is a way to wrap a model and a way to share out the samples, with the interface of the right thing.
`train_regression` runs one on all ranks and returns what it measured; which run has which fault is for the reader to
find.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DistributedSampler

from lablib.calc.errors import must_divide
from lablib.toys.data_parallel.ddp import NaiveDDP

#: What a run can have, in the words of the chapter.
DIAGNOSES = (
    "healthy",
    "gradients summed instead of averaged",
    "replicas start from different weights",
    "same data on every rank",
    "set_epoch is missing",
)
_DIAGNOSIS_OF = {"A": 3, "B": 1, "C": 0, "D": 4, "E": 2}  # letter to diagnosis; look only after you have decided


class _Model(NaiveDDP):
    """NaiveDDP, with two ways to break it."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None, factor: bool, start: bool):
        self._factor, self._start = factor, start
        super().__init__(module, group)

    def _broadcast(self, *tensors: torch.Tensor) -> None:
        if not self._start:
            super()._broadcast(*tensors)

    def _reduce(self) -> None:
        super()._reduce()
        for p in self.params:
            p.grad.mul_(self.world_size if self._factor else 1)


class _Sampler(DistributedSampler):
    """DistributedSampler, with a way to lose the epoch."""

    def __init__(self, length: int, ranks: int, rank: int, seed: int, lose_epoch: bool):
        super().__init__(range(length), num_replicas=ranks, rank=rank, seed=seed, drop_last=True)
        self._lose_epoch = lose_epoch

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(0 if self._lose_epoch else epoch)


@dataclass(frozen=True)
class FaultyRun:
    """A way to wrap a model and a way to share out samples, both with the usual interface."""

    name: str
    _case: int = field(repr=False)

    def wrap(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
        """Return the module as a replica, used as in `lablib.toys.data_parallel.ddp`: forward, backward, `sync`."""
        return _Model(module, group, factor=self._case == 1, start=self._case == 2)

    def sampler(self, length: int, *, ranks: int, rank: int, seed: int = 0) -> DistributedSampler:
        """Return this rank's sampler over a data set, used as PyTorch's: `set_epoch`, then iterate."""
        return _Sampler(length, ranks, 0 if self._case == 3 else rank, seed, lose_epoch=self._case == 4)


def get_run(name: str) -> FaultyRun:
    """Return a run by letter."""
    if name not in _DIAGNOSIS_OF:
        raise ValueError(f"there is no run {name!r}; there are {', '.join(_DIAGNOSIS_OF)}")
    return FaultyRun(name, _DIAGNOSIS_OF[name])


def diagnosis(name: str) -> str:
    """Return what the run has: one of `DIAGNOSES`. Decide before you look."""
    return DIAGNOSES[get_run(name)._case]


@dataclass
class Chart:
    """Measurements of one rank; one entry per step.

    Attributes:
        losses: Mean loss over this rank's own samples.
        gradient_norms: 2-norm of all gradients after `sync`.
        weights: All parameters as one vector of shape (parameters,), as the step found them.
        samples: `samples[epoch][step]`, the indices of the samples that this rank took.
    """

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    samples: list[list[list[int]]] = field(default_factory=list)


SAMPLES, GLOBAL_BATCH = 48, 8  # in an epoch; in a step, over all ranks


def train_regression(name: str, *, epochs: int = 3, seed: int = 0) -> Chart:
    """Train a small regression with SGD on every rank, and return this rank's chart.

    Call it on all ranks. Each rank seeds its generator with its own number, as programs with dropout do, and
    builds its model after that. The data are the same whatever the number of ranks.

    Args:
        seed: Of the data and the shuffle.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    must_divide("ranks", ranks, "global_batch", GLOBAL_BATCH)
    chosen, chart, batch = get_run(name), Chart(), GLOBAL_BATCH // ranks
    data = torch.Generator().manual_seed(seed)
    x_ND = torch.randn(SAMPLES, 8, generator=data)
    y_N1 = torch.sin(x_ND.sum(dim=1, keepdim=True))
    torch.manual_seed(rank)
    model = chosen.wrap(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    sampler = chosen.sampler(SAMPLES, ranks=ranks, rank=rank, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        order = list(sampler)
        steps = [order[i : i + batch] for i in range(0, len(order) - batch + 1, batch)]
        chart.samples.append(steps)
        for indices in steps:
            chart.weights.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
            loss = nn.functional.mse_loss(model(x_ND[indices]), y_N1[indices])
            loss.backward()
            model.sync()
            chart.losses.append(loss.item())
            chart.gradient_norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
            optimizer.step()
            optimizer.zero_grad()
    return chart
