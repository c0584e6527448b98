"""Layers split over tensor-parallel ranks: column- and row-parallel products, and the vocabulary at the model's two ends.

`y = x W^T`. Column-parallel splits the output dim, row-parallel the input dim: for PyTorch's weight of shape (out, in)
that is dim 0 and dim 1. The names are those of the matrix W^T, which stands to the right of x.

Of the vocabulary, rank r holds the rows `first ... first + v - 1` of the table and the same columns of the logits. No
rank ever holds all the logits, which are the largest activation of a small model.

Paper: Shoeybi et al. 2019 (1909.08053), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from lablib.toys.tensor_parallel.functions import (
    copy_to_tp,
    gather_from_sp,
    gathered_linears,
    reduce_from_tp,
    scatter_to_sp,
    sum_gradient,
)

VARIANTS = (False, "keep", "shard")


# --- who holds which slice ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Which slice of a dim each rank holds.

    Attributes:
        bounds: (start, stop) by rank; slices of replicated heads are equal.
    """

    bounds: tuple[tuple[int, int], ...]

    def cut(self, full: Tensor, dim: int, rank: int) -> Tensor:
        """Return the rank's slice, as a view."""
        start, stop = self.bounds[rank]
        return full.narrow(dim, start, stop - start)


def even_split(size: int, ranks: int) -> Split:
    """Return slices whose sizes differ by one at most.

    Args:
        size: Of the dim; at least one for each rank.
    """
    return Split(tuple((size * r // ranks, size * (r + 1) // ranks) for r in range(ranks)))


def head_split(heads: int, head_dim: int, ranks: int) -> Split:
    """Return slices of whole heads; with more ranks than heads, `ranks / heads` neighbours hold the same head.

    Args:
        heads: A divisor or a multiple of the ranks.
    """
    per_rank = max(1, heads // ranks)
    starts = [r * heads // ranks * head_dim for r in range(ranks)]
    return Split(tuple((start, start + per_rank * head_dim) for start in starts))


def local(full: nn.Parameter, dim: int, split: Split, group: dist.ProcessGroup) -> nn.Parameter:
    """Return a copy of this rank's slice of a parameter."""
    piece = split.cut(full.detach(), dim, group.rank()).clone()
    return nn.Parameter(piece, requires_grad=full.requires_grad)


def replicate(full: nn.Parameter) -> nn.Parameter:
    """Return a copy of a parameter that every rank holds in full."""
    return nn.Parameter(full.detach().clone(), requires_grad=full.requires_grad)


# --- linear layers ------------------------------------------------------------------------------------------


class ColumnParallelLinear(nn.Module):
    """Some of the outputs of a linear layer, from all of its inputs.

    Args:
        linear: The full layer; its slice is copied.
        sequence_parallel: False (f), "keep" or "shard".
        replicas: The ranks that hold the same slice, if there are others.
    """

    def __init__(
        self,
        linear: nn.Linear,
        split: Split,
        group: dist.ProcessGroup,
        sequence_parallel: bool | str = False,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.splits = {"weight": (0, split), "bias": (0, split)}
        self.weight = local(linear.weight, 0, split, group)
        self.bias = None if linear.bias is None else local(linear.bias, 0, split, group)
        for parameter in self.parameters() if replicas is not None else ():
            sum_gradient(parameter, replicas)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's outputs, of the full sequence.

        Args:
            x: The full input x_BSH, the same on every rank; with sequence parallelism this rank's x_BsH.
        """
        return columns(x, self)[0]


def columns(x: Tensor, *layers: ColumnParallelLinear) -> tuple[Tensor, ...]:
    """Return the outputs of layers that read the same input, which enters once for all of them.

    Forward gathers once instead of once a layer, and backward reduces the sum of their input gradients.

    Args:
        *layers: All of one group and one variant.
    """
    group, variant = layers[0].group, layers[0].sequence_parallel
    if variant == "shard":
        return gathered_linears(x, group, [(layer.weight, layer.bias) for layer in layers])
    x_BSH = gather_from_sp(x, group) if variant == "keep" else copy_to_tp(x, group)
    return tuple(F.linear(x_BSH, layer.weight, layer.bias) for layer in layers)


class RowParallelLinear(nn.Module):
    """All outputs of a linear layer, each rank adding the part that its inputs make.

    Args:
        linear: The full layer; its slice is copied.
        sequence_parallel: Return this rank's part of the sequence only.
    """

    def __init__(
        self, linear: nn.Linear, split: Split, group: dist.ProcessGroup, sequence_parallel: bool | str = False
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, sequence_parallel
        self.splits = {"weight": (1, split)}
        self.weight = local(linear.weight, 1, split, group)
        self.bias = None if linear.bias is None else replicate(linear.bias)
        if sequence_parallel and self.bias is not None:
            sum_gradient(self.bias, group)  # it meets this rank's tokens only

    def forward(self, x_BSf: Tensor) -> Tensor:
        """Return x_BSH, the same on every rank; with sequence parallelism this rank's x_BsH.

        Args:
            x_BSf: This rank's inputs: what a column-parallel layer returned.
        """
        leave = scatter_to_sp if self.sequence_parallel else reduce_from_tp
        y = leave(F.linear(x_BSf, self.weight), self.group)
        return y if self.bias is None else y + self.bias  # after the sum, or it would count t times


# --- the vocabulary -----------------------------------------------------------------------------------------


def local_ids(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return which ids fall into this rank's part, and their rows there (0 for all others)."""
    mine = (ids >= first) & (ids < first + count)
    return mine, torch.where(mine, ids - first, 0)


class VocabParallelEmbedding(nn.Module):
    """Look up the tokens of this rank's part, zero for all others, and add up over the ranks."""

    def __init__(
        self, weight_vH: nn.Parameter, first: int, group: dist.ProcessGroup, sequence_parallel: bool = False
    ) -> None:
        super().__init__()
        self.weight, self.first, self.group = weight_vH, first, group
        self.sequence_parallel = sequence_parallel

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return x_BSH, or x_BsH with sequence parallelism."""
        mine_BS, rows_BS = local_ids(tokens_BS, self.first, len(self.weight))
        partial_BSH = F.embedding(rows_BS, self.weight) * mine_BS.unsqueeze(-1)
        leave = scatter_to_sp if self.sequence_parallel else reduce_from_tp
        return leave(partial_BSH, self.group)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, logits_BSv: Tensor, targets_BS: Tensor, first: int, group: dist.ProcessGroup
    ) -> Tensor:
        z_BSv = logits_BSv.to(torch.promote_types(logits_BSv.dtype, torch.float32))
        highest_BS = z_BSv.amax(dim=-1)
        dist.all_reduce(highest_BS, dist.ReduceOp.MAX, group=group)
        z_BSv = z_BSv - highest_BS.unsqueeze(-1)
        exp_BSv = z_BSv.exp()
        mine_BS, column_BS = local_ids(targets_BS, first, z_BSv.shape[-1])
        target_BS = z_BSv.gather(-1, column_BS.unsqueeze(-1)).squeeze(-1) * mine_BS
        both_2BS = torch.stack((exp_BSv.sum(dim=-1), target_BS))  # two sums in one message
        dist.all_reduce(both_2BS, group=group)
        sum_BS, target_BS = both_2BS
        softmax_BSv = exp_BSv.div_(sum_BS.unsqueeze(-1))
        ctx.save_for_backward(softmax_BSv, mine_BS, column_BS)
        ctx.dtype = logits_BSv.dtype
        return sum_BS.log() - target_BS

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_BS: Tensor) -> tuple[Tensor, None, None, None]:
        softmax_BSv, mine_BS, column_BS = ctx.saved_tensors
        # Softmax minus one at the target; the target is a column of one rank only.
        one_BS1 = -mine_BS.to(softmax_BSv.dtype).unsqueeze(-1)
        grad_BSv = softmax_BSv.scatter_add(-1, column_BS.unsqueeze(-1), one_BS1) * grad_BS.unsqueeze(-1)
        return grad_BSv.to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits_BSv: Tensor, targets_BS: Tensor, first: int, group: dist.ProcessGroup
) -> Tensor:
    """Return the loss of every token, log Σ_j exp(z_j) - z_target, from logits split over the ranks.

    Two messages: the maximum, then the sum of exponentials together with the target's logit, 3·B·S numbers
    instead of B·S·V. Computed in fp32, or fp64 for such logits.

    Args:
        targets_BS: Token ids, the same on every rank.
        first: Token id of the first column.

    Returns:
        loss_BS, the same on every rank.
    """
    return _CrossEntropy.apply(logits_BSv, targets_BS, first, group)
