"""Data parallelism on the two-host cluster: steps at several rates, and what makes them cheaper.

A stack of linear layers in `lablib.toys.ddp`, which tests hold equal to PyTorch's DistributedDataParallel and the
bench to its speed; PyTorch's own would load its compiler on every rank, which takes longer than this study. A variant
only replaces what a full bucket does: PyTorch calls that a communication hook. Runs inside a job,
`lablib.launch.network_study`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lablib.calc.comm import ring_all_reduce_bytes
from lablib.launch.network_clock import Sample, timed
from lablib.launch.step_time import stack
from lablib.toys.collectives import NodeGroups, hierarchical_all_reduce
from lablib.toys.ddp import OverlappedDDP

#: Starts to add a bucket, already divided by the number of ranks, up over all ranks.
Hook = Callable[[Tensor], torch.futures.Future]


def plain_hook(bucket: Tensor) -> torch.futures.Future:
    """Add a bucket up by gloo's all-reduce, a ring."""
    return dist.all_reduce(bucket, async_op=True).get_future()


def bf16_hook(bucket: Tensor) -> torch.futures.Future:
    """Send a bucket in bf16: half the bytes, 8 bits of precision, and the sum is rounded at every addition."""
    half = bucket.to(torch.bfloat16)
    return dist.all_reduce(half, async_op=True).get_future().then(lambda _: bucket.copy_(half))


def hierarchical_hook(groups: NodeGroups) -> Hook:
    """Return a hook that adds a bucket up by `hierarchical_all_reduce`.

    The work is done on a thread of its own, in the order of the buckets, while backward goes on.

    Args:
        groups: From `node_groups`. Nobody else may use them meanwhile.
    """
    worker = ThreadPoolExecutor(1)

    def hook(bucket: Tensor) -> torch.futures.Future:
        done = torch.futures.Future()

        def reduce() -> None:
            try:
                hierarchical_all_reduce(bucket, groups)
                done.set_result(bucket)
            except Exception as error:  # `sync` waits for this; without it for ever
                done.set_exception(error)

        worker.submit(reduce)
        return done

    return hook


class HookedDDP(OverlappedDDP):
    """The overlapped DDP of rung 2 with another way to add a bucket up; every parameter must be used."""

    def __init__(self, module: torch.nn.Module, hook: Hook, **options: Any) -> None:
        super().__init__(module, **options)
        self.hook = hook

    def _put(self, p: torch.nn.Parameter) -> None:
        torch.mul(p.grad, 1 / self.world_size, out=self.views[p])
        p.grad = self.views[p]
        self.missing[self.home[p]].remove(p)
        while (index := len(self.futures)) < len(self.buckets) and not self.missing[index]:
            self.futures.append(self.hook(self.flats[index]))  # as there, in order; only this line is new


class Step:
    """A training step of one variant: forward and backward, as often as it accumulates, and the mean gradient.

    Args:
        variant: A name of `lablib.calc.network_ddp_rows.VARIANTS`, or "compute", which never communicates.
        width: Of the layers.
        layers: How many.
        tokens: Rows on this rank.
        bucket_bytes: When a bucket is full.
        micro_batches: What "accumulate" puts into one step.
        groups: Of the hosts.
    """

    def __init__(
        self,
        variant: str,
        *,
        width: int,
        layers: int,
        tokens: int,
        bucket_bytes: int,
        micro_batches: int,
        groups: NodeGroups,
    ) -> None:
        self.variant, self.hosts = variant, dist.get_world_size(groups.across)
        self.micro_batches = micro_batches if variant == "accumulate" else 1
        self.x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(dist.get_rank()))
        self.model, self.buckets = stack(width, layers), []
        self.gradient_bytes = sum(p.nbytes for p in self.model.parameters())
        if variant != "compute":
            hooks: dict[str, Hook] = {"bf16": bf16_hook, "hierarchical": hierarchical_hook(groups)}
            limit = self.gradient_bytes if variant == "one bucket" else bucket_bytes
            options = {"first_bytes": limit, "bucket_bytes": limit}
            self.model = HookedDDP(self.model, hooks.get(variant, plain_hook), **options)
            self.buckets = [flat.nbytes // (1 + (variant == "bf16")) for flat in self.model.flats]

    def __call__(self) -> dict[str, float]:
        """Take the step; return how long forward and backward took."""
        self.model.zero_grad(set_to_none=False)
        forward = backward = 0.0
        for k in range(self.micro_batches):
            last = k == self.micro_batches - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                start = time.perf_counter()
                loss = self.model(self.x).square().mean()
                between = time.perf_counter()
                loss.backward()
                forward += between - start
                backward += time.perf_counter() - between
        if self.buckets:
            self.model.sync()
        return {"forward": forward, "backward": backward}

    def facts(self) -> dict[str, Any]:
        """Return what a sample says of its step; `bytes_across` by the formula, out of one host."""
        ranks = dist.get_world_size()
        # Of a ring over all ranks one rank's bytes leave each host; of a hierarchical one each host's share.
        across = ring_all_reduce_bytes(
            sum(self.buckets), self.hosts if self.variant == "hierarchical" else ranks
        )
        return {
            "part": "ddp",
            "variant": self.variant,
            "micro_batches": self.micro_batches,
            "ranks": ranks,
            "gradient_bytes": self.gradient_bytes,
            "buckets": list(self.buckets),
            "bytes_across": across,
        }


def ddp_samples(step: Step, rate: str | None, *, turns: int, warm: int = 1) -> list[Sample]:
    """Time a step on all ranks.

    Args:
        step: Which.
        rate: What the link is throttled to; only noted.
        turns: How many samples.
        warm: Steps before the first that counts.
    """
    return timed(step, turns=turns, warm=warm, rate=rate, **step.facts())


def alone_samples(step: Step, *, turns: int) -> list[Sample]:
    """Time a step without communication on rank 0 while all others wait."""
    rank = dist.get_rank()
    samples = timed(lambda: step() if rank == 0 else None, turns=turns, rate=None, **step.facts())
    return [{**sample, "variant": "alone"} for sample in samples]
