"""Ulysses: between the projections and attention the ranks swap tokens for heads, and swap back after it.

    q_BNsD  all heads, s tokens     --all-to-all-->     q_BnSD  n = N / cp heads, all S tokens

Heads do not mix in attention, so each rank runs ordinary attention on its heads, whatever the mask.

Limits: cp divides the query heads N, since a head is not cut. It divides the key heads K, too; or it is a multiple of K,
and each key head is copied before it leaves, once for each of the cp / K ranks whose queries read it. Tensor parallelism
has taken its part of both N and K before.

Bytes sent by a rank: (cp - 1) / cp of 2·B·(N + max(K, cp))·s·D values forward, in four all-to-alls (q, k, v, output),
and as many backward.

Paper: Jacobs et al. 2023, DeepSpeed-Ulysses (2309.14509), section 3.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lablib.calc.errors import either
from lablib.toys.context_parallel.softmax import attend
from lablib.toys.context_parallel.split import all_positions, check_parts, size_and_rank, visible

HEADS, TOKENS = 1, 2  # dims of q_BNsD


def ulysses_attention(
    q_BNsD: Tensor,
    k_BKsD: Tensor,
    v_BKsD: Tensor,
    group: dist.ProcessGroup,
    *,
    order: str = "zigzag",
    causal: bool = True,
    documents: Tensor | None = None,
) -> Tensor:
    """Return attention over the keys of all ranks, out_BNsD; arguments as for `ring_attention`.

    The number of ranks divides N, and divides K or is a multiple of it.
    """
    check_parts(q_BNsD, k_BKsD, v_BKsD, group, order, documents)
    (cp, _), heads, kv_heads = size_and_rank(group), q_BNsD.shape[HEADS], k_BKsD.shape[HEADS]
    check_heads(heads, kv_heads, cp)
    if cp > kv_heads:
        k_BKsD, v_BKsD = (x.repeat_interleave(cp // kv_heads, dim=HEADS) for x in (k_BKsD, v_BKsD))
    q_BnSD, k_BkSD, v_BkSD = (_Swap.apply(x, group, HEADS, TOKENS) for x in (q_BNsD, k_BKsD, v_BKsD))
    # The tokens lie in the order of the ranks; only the mask has to know.
    position_S = all_positions(q_BnSD.shape[TOKENS], cp, order, q_BNsD.device)
    out_BnSD = attend(q_BnSD, k_BkSD, v_BkSD, visible(position_S, position_S, causal, documents)).out_BNsD
    return _Swap.apply(out_BnSD.to(q_BNsD.dtype), group, TOKENS, HEADS)


def check_heads(heads: int, kv_heads: int, cp: int) -> None:
    """Raise a ValueError unless every rank gets whole heads, and the key heads that its queries read."""
    usable = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if cp not in usable:
        why = (
            f"does not divide num_heads={heads}"
            if heads % cp
            else f"neither divides num_kv_heads={kv_heads} nor is a multiple of it"
        )
        raise ValueError(f"cp={cp} {why}: Ulysses gives each rank whole heads; use {either(usable)}, or a ring")


class _Swap(torch.autograd.Function):
    """Cut one dim over the ranks and put another one together; backward does the reverse."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: dist.ProcessGroup, cut: int, join: int) -> Tensor:
        ctx.group, ctx.dims = group, (cut, join)
        return swap(x, group, cut, join)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cut, join = ctx.dims
        return swap(grad, ctx.group, join, cut), None, None, None


def swap(x: Tensor, group: dist.ProcessGroup, cut: int, join: int) -> Tensor:
    """Return this rank's part in dim `cut` of all ranks' tensors, one after the other in dim `join`."""
    cp, _ = size_and_rank(group)
    if cp == 1:
        return x.clone()
    parts = torch.stack(x.chunk(cp, dim=cut))  # part i goes to rank i
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(), dim=join)
