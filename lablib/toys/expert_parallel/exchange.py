"""Rows sent to the ranks of their experts, and back: two all-to-alls whose pieces have different sizes.

    rows_RH, trip = dispatch(rows_RH, counts_E, group)     from the order of `permute` to this rank's experts
    rows_RH = combine(experts(rows_RH, trip.counts_e), trip)     the results, in the order of `permute`

Nobody knows how many rows will arrive, so the counts are sent first: E whole numbers a rank. On a GPU the CPU waits for
them, since it has to know the sizes before it can ask for memory.
Rank i of a group of n has the experts from i E/n on. What arrives is in the order of the ranks that sent it, and is
sorted by expert once more.

Shapes: R rows (other ones before and after), H hidden width, E experts, e = E/n of them on this rank, n ranks.

Paper: Lepikhin et al. 2020 (GShard, 2006.16668).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lablib.calc.errors import must_divide


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
class Trip:
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


def dispatch(rows_RH: Tensor, counts_E: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Trip]:
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
    return arrived_RH[order_R], Trip(group, sent, received, offered_ne.sum(dim=0), order_R)


def combine(rows_RH: Tensor, trip: Trip) -> Tensor:
    """Return the results of this rank's own rows, in the order in which `dispatch` took them."""
    by_rank_RH = rows_RH[trip.order_R.argsort()]  # sorting an order gives its inverse
    return all_to_all(by_rank_RH, trip.received, trip.sent, trip.group)
