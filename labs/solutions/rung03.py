"""Worked exercises of rung 03, tensor parallelism."""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from lablib.toys.tensor_parallel import copy_to_tp, reduce_from_tp


def column_parallel(x, weight, bias, group):
    """All of the input, this rank's outputs; f sums the gradient of x in backward."""
    width = len(weight) // group.size()
    mine = slice(group.rank() * width, (group.rank() + 1) * width)
    return F.linear(copy_to_tp(x, group), weight[mine], bias[mine])


def row_parallel(x_part, weight, bias, group):
    """This rank's inputs, a partial sum of all outputs; g sums it, and the bias comes after the sum."""
    width = weight.shape[1] // group.size()
    mine = slice(group.rank() * width, (group.rank() + 1) * width)
    return reduce_from_tp(F.linear(x_part, weight[:, mine]), group) + bias


def split_qkv(num_heads, num_kv_heads, head_dim, tp):
    """Whole query heads in order, and the key heads that they read."""
    if num_heads % tp:
        raise ValueError(f"tp={tp} does not divide num_heads={num_heads}")
    if num_kv_heads % tp and tp % num_kv_heads:
        raise ValueError(f"tp={tp} neither divides num_kv_heads={num_kv_heads} nor is a multiple of it")
    queries = num_heads // tp
    keys = max(1, num_kv_heads // tp)
    ranks = []
    for rank in range(tp):
        first_query = rank * queries
        first_key = rank * num_kv_heads // tp
        ranks.append(
            (
                range(first_query * head_dim, (first_query + queries) * head_dim),
                range(first_key * head_dim, (first_key + keys) * head_dim),
            )
        )
    return ranks


def cross_entropy(logits, targets, first, group):
    """A maximum, a sum of exponentials and the target's logit, each reduced over the ranks."""
    highest = logits.detach().amax(-1)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    shifted = logits - highest.unsqueeze(-1)
    total = reduce_from_tp(shifted.exp().sum(-1), group)
    mine = (targets >= first) & (targets < first + logits.shape[-1])
    column = (targets - first).where(mine, 0)
    target = shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1) * mine
    return total.log() - reduce_from_tp(target, group)
