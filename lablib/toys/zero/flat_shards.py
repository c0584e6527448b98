"""Flat shards: several parameters laid end to end, padded to a multiple of the ranks, and cut into equal pieces.

Three parameters of 3, 4 and 2 values on 4 ranks are 9 values, so a shard has ceil(9/4) = 3, and 3 values are padding:

    rank 0        rank 1        rank 2        rank 3
    [a0 a1 a2]    [b0 b1 b2]    [b3 c0 c1]    [-- -- --]

A shard knows nothing of parameters: a piece may hold the end of one and the start of the next. Equal pieces are what
all-gather and reduce-scatter want, one message for many parameters is what a network wants, and an optimizer that
treats every value alike (SGD, Adam, AdamW) cannot tell the difference.

Paper: Rajbhandari et al. 2019, ZeRO (arXiv 1910.02054), section 5.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lablib.toys.torch_names import all_gather, reduce_scatter


class FlatShards:
    """Parameters of one dtype, all trained or all frozen, as one padded array of which this rank owns a shard.

    Attributes:
        width: Values of a shard, ceil(ψ / N).
        full: The full array, N · width values; without memory while released.
        shard: This rank's piece of the weights; a view of `full` until `detach_shard`.
        updated: What the optimizer updates: the shard, or its master copy.
        grads: The gradients of this rank's samples, N · width values; None before the first one.
        grad: This rank's piece of the mean gradient; None before the first reduce-scatter.
    """

    def __init__(self, params: list[nn.Parameter], group: dist.ProcessGroup | None, master: torch.dtype | None = None):
        self.params, self.group = params, group
        self.world_size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.trained = params[0].requires_grad
        self.numel = sum(p.numel() for p in params)
        self.width = -(-self.numel // self.world_size)
        self.full = params[0].new_zeros(self.world_size * self.width, requires_grad=False)
        for p, view in zip(params, self.split(self.full), strict=True):
            p.data = view.copy_(p.data)
        self.shard = self.full.chunk(self.world_size)[self.rank]
        self.nothing = self.full.new_full((), torch.nan)  # what released parameters read as
        self.master = None if master == self.full.dtype else master
        self.updated = nn.Parameter(self.shard.to(self.master or self.full.dtype), self.trained)
        self.grads: Tensor | None = None
        self.grad: Tensor | None = None
        self._missing, self._gathering, self._reducing = set(params), None, None

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return the views of a padded array that have the parameters' places and shapes."""
        parts = flat[: self.numel].split([p.numel() for p in self.params])
        return [part.view(p.shape) for part, p in zip(parts, self.params, strict=True)]

    # Weights

    def detach_shard(self) -> None:
        """Give the shard memory of its own, so that the full array can be released."""
        self.shard = self.shard.clone()
        if self.master is None:
            self.updated = nn.Parameter(self.shard, self.trained)

    def adopt(self) -> None:
        """Have the master copy take over weights that others have changed since it was rounded into the shard."""
        if self.master is not None:
            ours = self.updated.to(self.shard.dtype) == self.shard
            self.updated.copy_(torch.where(ours, self.updated, self.shard))

    @property
    def released(self) -> bool:
        """Whether the full array has no memory now."""
        return not self.full.untyped_storage().nbytes()

    @property
    def intact(self) -> bool:
        """Whether the parameters still live here: nobody froze them or gave them other memory, dtype or device."""
        ours = {tensor.untyped_storage().data_ptr() for tensor in (self.full, self.nothing)}
        return all(p.untyped_storage().data_ptr() in ours and p.requires_grad == self.trained for p in self.params)

    def release(self) -> None:
        """Free the memory of the full array, and let the parameters read as NaN, which needs none."""
        self.wait()
        for p in self.params:
            p.data = self.nothing.expand(p.shape)
        self.full.untyped_storage().resize_(0)

    def gather(self) -> None:
        """Start to fill the full array from the shards of all ranks, unless it is there or on its way."""
        if self.released:
            self.full.untyped_storage().resize_(self.full.nbytes)
            self.refill()

    def refill(self) -> None:
        """Start an all-gather into the array that exists: ψ(N-1)/N values sent."""
        self._gathering = all_gather(self.full, self.shard, group=self.group, async_op=True)

    def wait(self) -> None:
        """Wait until the full array is there."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            for p, view in zip(self.params, self.split(self.full), strict=True):
                p.data = view

    # Gradients

    @property
    def complete(self) -> bool:
        """Whether every parameter has put its gradient since the last reduce-scatter."""
        return not self._missing

    def put(self, p: nn.Parameter) -> None:
        """Move the gradient of a parameter into `grads`, or add it to what is there, and divide it by the ranks."""
        if self.grads is None:
            self.grads = torch.empty_like(self.full)
            self._views = dict(zip(self.params, self.split(self.grads), strict=True))
        if p in self._missing:
            torch.mul(p.grad, 1 / self.world_size, out=self._views[p])  # divided first: a sum can overflow
            self._missing.remove(p)
        else:
            self._views[p].add_(p.grad, alpha=1 / self.world_size)
        p.grad = None

    def reduce(self) -> None:
        """Start a reduce-scatter: the mean gradient, to each rank its piece; ψ(N-1)/N values sent."""
        self.finish()  # an earlier one, if autograd came by twice
        if self.grads is None:
            self.grads = torch.zeros_like(self.full)
        else:
            for p in self._missing:  # what backward did not use, on this rank
                self._views[p].zero_()
            self.grads[self.numel :].zero_()
        piece = torch.empty_like(self.shard)
        work = reduce_scatter(piece, self.grads, group=self.group, async_op=True)
        # The message must live until it has left.
        self._reducing = work, piece, self.grads
        self.grads, self._views, self._missing = None, {}, set(self.params)

    def finish(self) -> None:
        """Wait for the reduce-scatter and add its piece to `grad`."""
        if self._reducing is not None:
            work, piece, _ = self._reducing
            work.wait()
            self.grad = piece if self.grad is None else self.grad.add_(piece)
            self._reducing = None

    def forget(self) -> None:
        """Drop all gradients."""
        self.finish()
        self.grads = self.grad = self.updated.grad = None
        self._missing = set(self.params)


def group_flat(
    params: list[nn.Parameter], group: dist.ProcessGroup | None, master: torch.dtype | None = None
) -> list[FlatShards]:
    """Return flat shards for parameters of any kind, one for each dtype, trained and frozen apart."""
    kinds: dict[tuple, list[nn.Parameter]] = {}
    for p in params:
        if p.numel() and (p.is_floating_point() or p.is_complex()):
            kinds.setdefault((p.dtype, p.device, p.requires_grad), []).append(p)
    return [FlatShards(alike, group, master if alike[0].requires_grad else None) for alike in kinds.values()]
