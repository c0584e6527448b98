"""Tokens on their way to their experts and back: permute, all-to-all, all-to-all back, unpermute.

    rows_RH, counts_E, order_R = permute(x_TH, chosen_Tk, E)      a row for each choice, in the order of the experts
    rows_RH, handle = dispatch(rows_RH, counts_E, group)          to the ranks of the experts
    rows_RH = combine(experts(rows_RH, handle.counts_e), handle)  the results, in the order of `permute`
    y_TH = unpermute(rows_RH, order_R, weights_Tk)

Three tokens, two experts each, of three experts on one rank:

    x_TH                     a  b  c
    chosen_Tk                a: 2 0    b: 0 1    c: 0 2
    rows_RH                  a b c | b | a c        experts 0, 1, 2: counts_E = 3, 1, 2
    order_R                  1 2 4   3   0 5        the number of the choice, token * k + place

With a capacity C an expert takes C rows, and the choices beyond it are dropped: they become no row. A token that loses
all of its choices gets zeros from this layer, so that only the residual stream carries it on.

Shapes: T tokens, k experts of a token, E experts, e = E/n of them on each of n ranks, R rows (T k, or less with a
capacity; other ones after a dispatch), H hidden width.

Papers: Lepikhin et al. 2020 (GShard, 2006.16668) and Fedus et al. 2021 (Switch, 2101.03961) for capacities; Gale et al.
2022 (MegaBlocks, 2211.15841) for layers that drop nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lablib.calc.errors import must_divide


def permute(
    x_TH: Tensor, chosen_Tk: Tensor, experts: int, kept_Tk: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a row for every choice, in the order of the experts, and in that of the tokens within an expert.

    Args:
        chosen_Tk: Numbers of the experts, 0 to E - 1.
        experts: E.
        kept_Tk: Choices that count; None means all.

    Returns:
        rows_RH; counts_E, the rows of each expert; and order_R, which `unpermute` takes.
    """
    if chosen_Tk.dim() != 2 or len(chosen_Tk) != len(x_TH):
        raise ValueError(f"{tuple(chosen_Tk.shape)} choices do not fit {len(x_TH)} tokens: one line of k a token")
    expert_C = chosen_Tk.flatten()  # C = T k choices
    order_R = expert_C.argsort(stable=True)
    if kept_Tk is not None:
        order_R = order_R[kept_Tk.flatten()[order_R]]
    counts_E = expert_C[order_R].bincount(minlength=experts)
    return x_TH[order_R // chosen_Tk.shape[1]], counts_E, order_R


def unpermute(rows_RH: Tensor, order_R: Tensor, weights_Tk: Tensor) -> Tensor:
    """Return for every token the sum of its rows times their weights, y_TH; a choice that was dropped adds nothing."""
    tokens, k = weights_Tk.shape
    weighted_RH = rows_RH * weights_Tk.flatten()[order_R].unsqueeze(-1).to(rows_RH.dtype)
    return rows_RH.new_zeros(tokens, rows_RH.shape[-1]).index_add(0, order_R // k, weighted_RH)


def within_capacity(chosen_Tk: Tensor, experts: int, capacity: int) -> Tensor:
    """Return which choices find room, kept_Tk.

    Everybody's first choice comes before anybody's second, and among these the earlier token, as in DeepSpeed's
    `top2gating`. So the last tokens of a batch are dropped, whatever they are.

    Args:
        capacity: C, rows that an expert takes.
    """
    queue_C = chosen_Tk.t().flatten()  # all first choices, then all second ones
    arrived_CE = F.one_hot(queue_C, experts).cumsum(dim=0)
    place_C = arrived_CE.gather(1, queue_C.unsqueeze(-1)).squeeze(-1)  # 1 for the first at an expert
    return (place_C <= capacity).view(chosen_Tk.shape[::-1]).t()


class _AllToAll(torch.autograd.Function):
    """What goes from a to b in forward has its gradient go from b to a in backward."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows_RH: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        arrived_RH = rows_RH.new_empty(sum(receive), *rows_RH.shape[1:])
        dist.all_to_all_single(arrived_RH, rows_RH.contiguous(), receive, send, group=group)
        return arrived_RH

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_RH: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(grad_RH, ctx.receive, ctx.send, ctx.group), None, None, None


def all_to_all(rows_RH: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return the rows that the ranks have for this one, in the order of the ranks; gradients go the way back.

    Args:
        send: Rows for each rank, one after the other in `rows_RH`.
        receive: Rows from each rank.
    """
    return _AllToAll.apply(rows_RH, send, receive, group)


def exchange_counts(counts_nC: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return what each rank has for this one: line i of the result is this rank's line on rank i."""
    offered_nC = torch.empty_like(counts_nC)
    dist.all_to_all_single(offered_nC, counts_nC.contiguous(), group=group)
    return offered_nC


@dataclass(frozen=True)
class DispatchHandle:
    """What `combine` needs to send the rows of a `dispatch` home.

    Attributes:
        sent: Rows to each rank.
        received: Rows from each rank.
        counts_e: Rows of each expert of this rank.
        order_R: The rows that arrived, in the order of the experts.
    """

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]
    counts_e: Tensor
    order_R: Tensor


def dispatch(rows_RH: Tensor, counts_E: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, DispatchHandle]:
    """Return all ranks' rows for the experts of this rank, in the order of the experts, and the way back.

    Sends 8 E (n-1)/n bytes of counts, and H values for each row whose expert is on another rank. Backward sends as many values.

    Args:
        rows_RH: In the order of the experts, as from `permute`.
        counts_E: Rows of each expert.
        group: The ep ranks; its size divides E.
    """
    ranks, experts = group.size(), len(counts_E)
    must_divide("ep", ranks, "experts", experts)
    if int(counts_E.sum()) != len(rows_RH):
        raise ValueError(f"counts {counts_E.tolist()} do not fit {len(rows_RH)} rows")
    offered_ne = exchange_counts(counts_E.view(ranks, -1), group)
    sent = counts_E.view(ranks, -1).sum(dim=1).tolist()
    received = offered_ne.sum(dim=1).tolist()
    arrived_RH = all_to_all(rows_RH, sent, received, group)
    expert_R = (
        torch.arange(experts // ranks, device=rows_RH.device).repeat(ranks).repeat_interleave(offered_ne.flatten())
    )
    order_R = expert_R.argsort(stable=True)
    return arrived_RH[order_R], DispatchHandle(group, sent, received, offered_ne.sum(dim=0), order_R)


def combine(rows_RH: Tensor, handle: DispatchHandle) -> Tensor:
    """Return the results of this rank's own rows, in the order in which `dispatch` took them."""
    by_rank_RH = rows_RH[handle.order_R.argsort()]  # sorting an order gives its inverse
    return all_to_all(by_rank_RH, handle.received, handle.sent, handle.group)
