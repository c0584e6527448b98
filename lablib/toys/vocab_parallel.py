"""The two ends of the model split over the vocabulary: embedding and cross-entropy.

Rank r holds the rows `first ... first + v - 1` of the table and the same columns of the logits.
No rank ever holds all the logits, which are the largest activation of a small model.

Paper: Shoeybi et al. 2019 (1909.08053), section 3.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from lablib.toys.tp_functions import reduce_from_tp, scatter_to_sp


def owned(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return which ids fall into this rank's part, and their rows there (0 for all others)."""
    mine = (ids >= first) & (ids < first + count)
    return mine, torch.where(mine, ids - first, 0)


class VocabParallelEmbedding(nn.Module):
    """Look up the tokens of this rank's part, zero for all others, and add up over the ranks.

    Args:
        weight_vH: This rank's rows.
        first: Token id of the first row.
        group: The tensor parallel ranks.
        sequence_parallel: Return this rank's part of the sequence only.
    """

    def __init__(
        self, weight_vH: nn.Parameter, first: int, group: dist.ProcessGroup, sequence_parallel: bool = False
    ) -> None:
        super().__init__()
        self.weight, self.first, self.group = weight_vH, first, group
        self.sequence_parallel = sequence_parallel

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return x_BSH, or x_BsH with sequence parallelism."""
        mine_BS, rows_BS = owned(tokens_BS, self.first, len(self.weight))
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
        mine_BS, column_BS = owned(targets_BS, first, z_BSv.shape[-1])
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
        logits_BSv: This rank's columns.
        targets_BS: Token ids, the same on every rank.
        first: Token id of the first column.
        group: The tensor parallel ranks.

    Returns:
        loss_BS, the same on every rank.
    """
    return _CrossEntropy.apply(logits_BSv, targets_BS, first, group)
