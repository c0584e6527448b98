"""Gathered attention: every rank gets all keys and values in one all-gather, and keeps its own queries.

In backward each rank has a gradient for every token's key and value; a reduce-scatter sums them and leaves each rank
those of its own tokens.

Bytes sent by a rank: (cp - 1) / cp of 2·B·K·S·D values forward, and as many backward.

Paper: Grattafiori et al. 2024, Llama 3 (2407.21783), section 3.3.2.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lablib.toys import torch_names as collective_names
from lablib.toys.context_parallel.softmax import attend, wide
from lablib.toys.context_parallel.split import all_positions, check_parts, size_and_rank, token_positions, visible


def gathered_attention(
    q_BNsD: Tensor,
    k_BKsD: Tensor,
    v_BKsD: Tensor,
    group: dist.ProcessGroup,
    *,
    order: str = "zigzag",
    causal: bool = True,
    documents: Tensor | None = None,
) -> Tensor:
    """Return attention over the keys of all ranks, out_BNsD; arguments as for `ring_attention`."""
    check_parts(q_BNsD, k_BKsD, v_BKsD, group, order, documents)
    cp, rank = size_and_rank(group)
    seq = q_BNsD.shape[2] * cp
    k_BKSD, v_BKSD = _GatherTokens.apply(torch.stack((k_BKsD, v_BKsD)), group)
    # Gathered tokens lie in the order of the ranks. A softmax does not care; the mask has to know.
    query_s, key_S = token_positions(seq, cp, rank, order, q_BNsD.device), all_positions(seq, cp, order, q_BNsD.device)
    mask = visible(query_s, key_S, causal, documents)
    return attend(q_BNsD, k_BKSD, v_BKSD, mask).out_BNsD.to(q_BNsD.dtype)


class _GatherTokens(torch.autograd.Function):
    """All ranks' tokens: sent in their own dtype, then fp32 or wider, in which backward sums and sends gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, kv_2BKsD: Tensor, group: dist.ProcessGroup) -> Tensor:
        cp, _ = size_and_rank(group)
        ctx.group, ctx.cp, ctx.dtype = group, cp, kv_2BKsD.dtype
        parts = kv_2BKsD.new_empty(cp * 2, *kv_2BKsD.shape[1:])  # one after the other in dim 0
        if cp > 1:
            collective_names.all_gather(parts, kv_2BKsD.contiguous(), group=group)
        else:
            parts.copy_(kv_2BKsD)
        return torch.cat(parts.chunk(cp), dim=3).to(wide(kv_2BKsD))

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_2BKSD: Tensor) -> tuple[Tensor, None]:
        parts = torch.cat(grad_2BKSD.chunk(ctx.cp, dim=3))
        mine_2BKsD = parts
        if ctx.cp > 1:
            mine_2BKsD = parts.new_empty(2, *parts.shape[1:])
            collective_names.reduce_scatter(mine_2BKsD, parts, group=ctx.group)
        return mine_2BKsD.to(ctx.dtype), None
