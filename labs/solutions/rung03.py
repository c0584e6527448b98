"""Worked exercises of rung 03, tensor parallelism."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lablib.toys.torch_names import all_gather, reduce_scatter


def enter_columns(x, group):
    """f: x itself; backward sums its gradient over the ranks."""

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            total = (
                grad.clone()
            )  # the path around the layer may still need grad
            dist.all_reduce(total, group=group)
            return total

    return Enter.apply(x)


def leave_rows(part, group):
    """g: the sum of the parts; backward hands its gradient to each part."""

    class Leave(torch.autograd.Function):
        @staticmethod
        def forward(ctx, part):
            total = part.clone()
            dist.all_reduce(total, group=group)
            return total

        @staticmethod
        def backward(ctx, grad):
            return grad

    return Leave.apply(part)


def split_mlp(x, up, up_bias, down, down_bias, group):
    """Columns of the first matrix, rows of the second; the last bias last."""
    width = len(up) // group.size()
    mine = slice(group.rank() * width, (group.rank() + 1) * width)
    inner = torch.relu(
        F.linear(enter_columns(x, group), up[mine], up_bias[mine])
    )
    return leave_rows(F.linear(inner, down[:, mine]), group) + down_bias


def gather_tokens(part, group):
    """All tokens; backward sums gradients over ranks and keeps its own."""
    t = group.size()

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, part):
            stacked = part.new_empty(t * len(part), *part.shape[1:])
            all_gather(stacked, part.contiguous(), group=group)
            return torch.cat(
                stacked.chunk(t), dim=1
            )  # the collective stacks along dim 0

        @staticmethod
        def backward(ctx, grad):
            pieces = torch.cat(grad.chunk(t, dim=1))
            mine = torch.empty_like(pieces.chunk(t)[0])
            reduce_scatter(mine, pieces, group=group)
            return mine

    return Gather.apply(part)


def scatter_tokens(partial, group):
    """This rank's tokens of the sum; backward gathers all gradients."""
    t = group.size()

    class Scatter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, partial):
            pieces = torch.cat(
                partial.chunk(t, dim=1)
            )  # the collective cuts along dim 0
            mine = torch.empty_like(pieces.chunk(t)[0])
            reduce_scatter(mine, pieces, group=group)
            return mine

        @staticmethod
        def backward(ctx, grad):
            stacked = grad.new_empty(t * len(grad), *grad.shape[1:])
            all_gather(stacked, grad.contiguous(), group=group)
            return torch.cat(stacked.chunk(t), dim=1)

    return Scatter.apply(partial)


def split_qkv(num_heads, num_kv_heads, head_dim, tp):
    """Whole query heads in order, the key heads they read, and who sums."""
    if num_heads % tp:
        raise ValueError(f"tp={tp} does not divide num_heads={num_heads}")
    if num_kv_heads % tp and tp % num_kv_heads:
        raise ValueError(
            f"tp={tp} and num_kv_heads={num_kv_heads} do not come out even"
        )
    queries = num_heads // tp
    keys = max(1, num_kv_heads // tp)
    copies = max(1, tp // num_kv_heads)
    ranks = []
    for rank in range(tp):
        q, k = rank * queries, rank * num_kv_heads // tp
        first = rank // copies * copies  # neighbours hold the same key head
        ranks.append(
            (
                range(q * head_dim, (q + queries) * head_dim),
                range(k * head_dim, (k + keys) * head_dim),
                range(first, first + copies),
            )
        )
    return ranks


def cross_entropy(logits, targets, first, group):
    """A maximum, a sum of exponentials, the target's logit: all reduced."""
    highest = logits.detach().amax(-1)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    shifted = logits - highest.unsqueeze(-1)
    total = leave_rows(shifted.exp().sum(-1), group)
    mine = (targets >= first) & (targets < first + logits.shape[-1])
    column = (targets - first).where(mine, 0)
    target = shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1) * mine
    return total.log() - leave_rows(target, group)
