"""Distributed data parallelism in three steps: naive, then bucketed, then overlapped with backward.

    model = OverlappedDDP(module)   # a replica per rank: rank 0's parameters and buffers go to all
    loss(model(x)).backward()       # x is this rank's part of the batch; to accumulate, see model.no_sync()
    model.sync()                    # from here on every rank holds the same mean gradient
    optimizer.step()

Paper: Li et al. 2020, PyTorch Distributed (2006.15704), section 3.2.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lablib.toys.gradient_layout import empty_grad


class NaiveDDP(nn.Module):
    """Average gradients with one blocking all-reduce per parameter, after backward.

    Args:
        module: Any module with dense gradients, the same on every rank. Convert and freeze it first, then wrap.
        group: The process group of the replicas; None is all ranks.
        find_unused: Leave `grad` None where no rank used the parameter, as one process does, for one more
            all-reduce of 1 byte per parameter. Otherwise that gradient becomes zero.

    Attributes:
        timeline: The last step as (event, message, time.perf_counter()). Events: "forward" (returned),
            "gradient" (ready; OverlappedDDP only), "sync" (called), "launch" and "reduced".
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None, find_unused: bool = False):
        super().__init__()
        check_replica(module, group)
        self.module, self.group, self.find_unused = module, group, find_unused
        self.world_size = dist.get_world_size(group)
        self.wrapped = describe_replica(module)
        self.params = [p for p in module.parameters() if p.requires_grad]  # a tied weight comes once
        self.syncing = True
        self.timeline = []
        self._broadcast(*module.parameters(), *module.buffers())

    def _broadcast(self, *tensors: Tensor) -> None:
        broadcast_tensors(tensors, self.group)

    def _note(self, event: str, message: int = 0) -> None:
        self.timeline.append((event, message, time.perf_counter()))

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the module; in training, take rank 0's buffers (running statistics) first."""
        if describe_replica(self.module) != self.wrapped:
            raise RuntimeError("the module was changed after wrapping; convert or freeze it first, then wrap")
        if self.training and self.syncing:
            self._broadcast(*self.module.buffers())
        output = self.module(*args, **kwargs)
        self.timeline = [("forward", 0, time.perf_counter())]
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of backward on this rank, where they add up until the next `sync`."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    @torch.no_grad()
    def sync(self) -> None:
        """Replace every gradient by its mean over the ranks, (1/n) Σ_r grad_r."""
        self._note("sync")
        used = [p.grad is not None for p in self.params]
        self._reduce()
        if self.find_unused and used:
            used = torch.tensor(used, dtype=torch.uint8, device=self.params[0].device)
            dist.all_reduce(used, dist.ReduceOp.MAX, group=self.group)
            for p, somewhere in zip(self.params, used.tolist(), strict=True):
                p.grad = p.grad if somewhere else None

    def _reduce(self) -> None:
        for index, p in enumerate(self.params):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # every rank sends, used or not
            message = p.grad.contiguous().div_(self.world_size)  # divided first: a sum can overflow in fp16
            self._note("launch", index)
            dist.all_reduce(message, group=self.group)
            self._note("reduced", index)
            p.grad.copy_(message)  # where the parameter's memory layout is not plain, the message was a copy


class BucketedDDP(NaiveDDP):
    """Average gradients in few large messages, after backward: a message costs latency + bytes / bandwidth."""

    def __init__(self, module: nn.Module, *args, first_bytes=2**20, bucket_bytes=25 * 2**20, **options):
        super().__init__(module, *args, **options)
        self.buckets, filling = [], {}
        for p in reversed(self.params):  # backward reaches the last layer first
            kind = (p.dtype, p.device)  # one message has one dtype
            bucket = filling.setdefault(kind, [])
            bucket.append(p)
            # Full at bucket_bytes; the first one at first_bytes, which is small, so that it leaves early.
            full = bucket_bytes if self.buckets else first_bytes
            if sum(q.nbytes for q in bucket) >= full:
                self.buckets.append(filling.pop(kind))
        self.buckets += filling.values()
        self.flats = [torch.cat([torch.zeros_like(p).flatten() for p in bucket]) for bucket in self.buckets]
        self.bucket_index = {p: index for index, bucket in enumerate(self.buckets) for p in bucket}
        self.views = {}  # where in its flat buffer each gradient lives
        for bucket, flat in zip(self.buckets, self.flats, strict=True):
            parts = flat.split([p.numel() for p in bucket])
            for p, part in zip(bucket, parts, strict=True):
                self.views[p] = empty_grad(p, part)
        self._reset_buckets()

    def _reset_buckets(self) -> None:
        self.missing = [set(bucket) for bucket in self.buckets]
        self.futures = []  # one for each bucket on its way

    def _mark_ready(self, p: nn.Parameter) -> None:
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        p.grad = torch.mul(grad, 1 / self.world_size, out=self.views[p])
        self.missing[self.bucket_index[p]].remove(p)
        # Full buckets leave strictly in order, so that ranks agree on it whatever their backward used.
        while len(self.futures) < len(self.buckets) and not self.missing[len(self.futures)]:
            self._launch(len(self.futures))

    def _launch(self, index: int) -> None:
        self._note("launch", index)
        work = dist.all_reduce(self.flats[index], group=self.group, async_op=True)
        self.futures.append(work.get_future().then(lambda _: self._note("reduced", index)))

    def _reduce(self) -> None:
        for p in [p for missing in self.missing for p in missing]:  # if overlapped: what backward did not use
            self._mark_ready(p)
        torch.futures.wait_all(self.futures)
        self._reset_buckets()


class OverlappedDDP(BucketedDDP):
    """Send each bucket from within backward, as soon as its last gradient exists."""

    def __init__(self, module: nn.Module, *args: object, **options: object):
        super().__init__(module, *args, **options)
        for p in self.params:
            p.register_post_accumulate_grad_hook(self._on_gradient)

    @torch.no_grad()
    def _on_gradient(self, p: nn.Parameter) -> None:
        if self.syncing and p.grad is not None:  # None: backward came by, and had nothing for it
            index = self.bucket_index[p]
            self._note("gradient", index)
            if p not in self.missing[index]:
                raise RuntimeError("second backward before sync(); accumulate inside no_sync()")
            self._mark_ready(p)


# --- what must be the same on every rank ------------------------------------------------------------------------
#
# A message has no names. If two ranks hold different modules, their messages still meet, by their order alone, and the
# sums are of things that have nothing to do with each other; or one rank sends more of them, and the others wait.


def describe_replica(module: nn.Module) -> list[tuple]:
    """Return what ranks must agree on: name, shape, dtype, memory layout and training of every parameter."""
    return [(name, tuple(p.shape), p.dtype, p.stride(), p.requires_grad) for name, p in module.named_parameters()]


def check_replica(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Refuse what data parallelism would get wrong; every rank of the group must call it."""
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group; wrap only on the group's ranks")
    for name, m in module.named_modules():
        if getattr(m, "sparse", False):
            raise ValueError(f"{name}: gradients would be sparse; build with sparse=False")
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None:
            raise ValueError(
                f"{name}: max_norm changes weights in forward, other ones on every rank; use max_norm=None"
            )
    buffers = [(name, tuple(b.shape), b.dtype) for name, b in module.named_buffers()]
    of_ranks: list[list] = [[]] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, describe_replica(module) + buffers, group=group)
    for rank, theirs in enumerate(of_ranks):
        if theirs != (ours := of_ranks[0]):
            odd = [entry for entry in theirs if entry not in ours] + [e for e in ours if e not in theirs]
            what = odd[0][0] if odd else "the order of the parameters"
            raise ValueError(
                f"rank {rank} of the group has another module than rank 0, first seen in {what}: names, shapes, "
                "dtypes, memory layouts and requires_grad must be the same on every rank"
            )


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Overwrite tensors with the values that the group's first rank has."""
    for tensor in tensors:
        message = tensor.contiguous()  # a copy only where the layout is not plain
        dist.broadcast(message, group=group, group_src=0)
        tensor.copy_(message)
