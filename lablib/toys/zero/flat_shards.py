"""Flat shards: several parameters laid end to end, padded to a multiple of the ranks, and cut into equal pieces.

Three parameters of 3, 4 and 2 values on 4 ranks are 9 values, so a shard has ceil(9/4) = 3, and 3 values are padding:

    rank 0        rank 1        rank 2        rank 3
    [a0 a1 a2]    [b0 b1 b2]    [b3 c0 c1]    [-- -- --]

A shard knows nothing of parameters: a piece may hold the end of one and the start of the next. An optimizer that treats
every value alike (SGD, Adam, AdamW) cannot tell the difference.

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
        full: The full array, N · width values; without memory while resharded.
        shard: This rank's piece of the weights; a view of `full` until `detach_shard`.
        sharded_param: What the optimizer updates: the shard, or its master copy.
        unsharded_grad: The gradients of this rank's samples, N · width values; None before the first one.
        sharded_grad: This rank's piece of the mean gradient; None before the first reduce-scatter.
    """

    def __init__(
        self, params: list[nn.Parameter], group: dist.ProcessGroup | None, master_dtype: torch.dtype | None = None
    ):
        self.params, self.group = params, group
        self.world_size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.trained = params[0].requires_grad
        self.numel = sum(p.numel() for p in params)
        self.width = -(-self.numel // self.world_size)
        self.full = params[0].new_zeros(self.world_size * self.width, requires_grad=False)
        for p, view in zip(params, self.split(self.full), strict=True):
            p.data = view.copy_(p.data)
        self.shard = self.full.chunk(self.world_size)[self.rank]
        self.placeholder = self.full.new_full((), torch.nan)  # what resharded parameters read as
        self.master_dtype = None if master_dtype == self.full.dtype else master_dtype
        self.sharded_param = nn.Parameter(self.shard.to(self.master_dtype or self.full.dtype), self.trained)
        self.unsharded_grad: Tensor | None = None
        self.sharded_grad: Tensor | None = None
        self._params_without_grad, self._all_gather_work, self._reduce_scatter_state = set(params), None, None

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return the views of a padded array that have the parameters' places and shapes."""
        parts = flat[: self.numel].split([p.numel() for p in self.params])
        return [part.view(p.shape) for part, p in zip(parts, self.params, strict=True)]

    # Weights

    def detach_shard(self) -> None:
        """Give the shard memory of its own, so that the full array can be released."""
        self.shard = self.shard.clone()
        if self.master_dtype is None:
            self.sharded_param = nn.Parameter(self.shard, self.trained)

    def refresh_master(self) -> None:
        """Have the master copy take over weights that others have changed since it was rounded into the shard."""
        if self.master_dtype is not None:
            own = self.sharded_param.to(self.shard.dtype) == self.shard
            self.sharded_param.copy_(torch.where(own, self.sharded_param, self.shard))

    @property
    def is_unsharded(self) -> bool:
        """Whether the full array has memory now; it may still be on its way."""
        return bool(self.full.untyped_storage().nbytes())

    @property
    def owns_params(self) -> bool:
        """Whether the parameters still live here: nobody froze them or gave them other memory, dtype or device."""
        own = {tensor.untyped_storage().data_ptr() for tensor in (self.full, self.placeholder)}
        return all(p.untyped_storage().data_ptr() in own and p.requires_grad == self.trained for p in self.params)

    def reshard(self) -> None:
        """Free the memory of the full array, and let the parameters read as NaN, which needs none."""
        self.wait_for_unshard()
        for p in self.params:
            p.data = self.placeholder.expand(p.shape)
        self.full.untyped_storage().resize_(0)

    def unshard(self) -> None:
        """Start to fill the full array from the shards of all ranks, unless it is there or on its way."""
        if not self.is_unsharded:
            self.full.untyped_storage().resize_(self.full.nbytes)
            self.start_all_gather()

    def start_all_gather(self) -> None:
        """Start an all-gather into the array that exists: ψ(N-1)/N values sent."""
        self._all_gather_work = all_gather(self.full, self.shard, group=self.group, async_op=True)

    def wait_for_unshard(self) -> None:
        """Wait until the full array is there."""
        if self._all_gather_work is not None:
            self._all_gather_work.wait()
            self._all_gather_work = None
            for p, view in zip(self.params, self.split(self.full), strict=True):
                p.data = view

    # Gradients

    @property
    def grads_ready(self) -> bool:
        """Whether every parameter has added its gradient since the last reduce-scatter."""
        return not self._params_without_grad

    def accumulate_grad(self, p: nn.Parameter) -> None:
        """Move the gradient of a parameter into `unsharded_grad`, or add it to what is there, and divide it by the ranks."""
        if self.unsharded_grad is None:
            self.unsharded_grad = torch.empty_like(self.full)
            self._grad_views = dict(zip(self.params, self.split(self.unsharded_grad), strict=True))
        if p in self._params_without_grad:
            torch.mul(p.grad, 1 / self.world_size, out=self._grad_views[p])  # divided first: a sum can overflow
            self._params_without_grad.remove(p)
        else:
            self._grad_views[p].add_(p.grad, alpha=1 / self.world_size)
        p.grad = None

    def reduce_scatter_grads(self) -> None:
        """Start a reduce-scatter: the mean gradient, to each rank its piece; ψ(N-1)/N values sent."""
        self.wait_for_reduce_scatter()  # an earlier one, if autograd came by twice
        if self.unsharded_grad is None:
            self.unsharded_grad = torch.zeros_like(self.full)
        else:
            for p in self._params_without_grad:  # what backward did not use, on this rank
                self._grad_views[p].zero_()
            self.unsharded_grad[self.numel :].zero_()
        piece = torch.empty_like(self.shard)
        work = reduce_scatter(piece, self.unsharded_grad, group=self.group, async_op=True)
        # The message must live until it has left.
        self._reduce_scatter_state = work, piece, self.unsharded_grad
        self.unsharded_grad, self._grad_views, self._params_without_grad = None, {}, set(self.params)

    def wait_for_reduce_scatter(self) -> None:
        """Wait for the reduce-scatter and add its piece to `sharded_grad`."""
        if self._reduce_scatter_state is not None:
            work, piece, _ = self._reduce_scatter_state
            work.wait()
            self.sharded_grad = piece if self.sharded_grad is None else self.sharded_grad.add_(piece)
            self._reduce_scatter_state = None

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.wait_for_reduce_scatter()
        self.unsharded_grad = self.sharded_grad = self.sharded_param.grad = None
        self._params_without_grad = set(self.params)


def group_flat(
    params: list[nn.Parameter], group: dist.ProcessGroup | None, master_dtype: torch.dtype | None = None
) -> list[FlatShards]:
    """Return flat shards for parameters of any kind, one for each dtype, trained and frozen apart."""
    kinds: dict[tuple, list[nn.Parameter]] = {}
    for p in params:
        if p.numel() and (p.is_floating_point() or p.is_complex()):
            kinds.setdefault((p.dtype, p.device, p.requires_grad), []).append(p)
    return [FlatShards(alike, group, master_dtype if alike[0].requires_grad else None) for alike in kinds.values()]
