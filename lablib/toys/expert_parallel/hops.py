"""A token sent once to a rank, or once to a node, however many of its experts are there.

`dispatch` sends a row for each expert. If two experts of a token are on one rank, that rank gets it twice; if four are
on one node, it crosses the network four times. Here a row is a token and what it still has to visit:

    x_RH          the token
    chosen_Rk     its experts, NOBODY where another row takes care of it
    weights_Rk    their weights

A hop sends to each rank of a group the tokens that have experts behind that rank. On the way back what comes home of one
token is added up by the rank that sent it out, before it goes on, so that return costs as little.

    per rank   one hop over all ep ranks; behind a rank are its own experts
    per node   a hop across nodes, to the rank of the same number in each node, behind which are all experts of that
               node; then a hop inside the node

A row brings k numbers of experts and k weights along, 12 k bytes or so, beside H values.

Shapes: R rows, k experts of a token, H hidden width, e experts of this rank.

Paper: DeepSeek-AI 2024 (2412.19437), section 3.2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lablib.calc.errors import must_divide
from lablib.toys.expert_parallel.exchange import all_to_all, exchange_counts
from lablib.toys.expert_parallel.experts import Experts
from lablib.toys.expert_parallel.sorting import permute, unpermute

NOBODY = -1


@dataclass(frozen=True)
class Hop:
    """One step on the way to an expert.

    Attributes:
        group: The ranks that this step sends between.
        experts_behind: Experts that each of them leads to, in the order of the ranks. Inside a node only that node's
            experts are asked for, and they are counted from its first.
    """

    group: dist.ProcessGroup
    experts_behind: int

    def destination(self, chosen_Rk: Tensor) -> Tensor:
        """Return the rank of the group that leads to each expert; NOBODY stays."""
        rank_Rk = chosen_Rk // self.experts_behind % self.group.size()
        return rank_Rk.masked_fill(chosen_Rk == NOBODY, NOBODY)


def rank_hop(experts: int, group: dist.ProcessGroup) -> list[Hop]:
    """Return the way that sends a token once to each rank.

    Args:
        group: The ep ranks.
    """
    must_divide("ep", group.size(), "experts", experts)
    return [Hop(group, experts // group.size())]


def node_hops(experts: int, across: dist.ProcessGroup, inside: dist.ProcessGroup) -> list[Hop]:
    """Return the way that sends a token once to each node.

    The ep ranks are numbered node by node, so that a node has neighbouring experts.

    Args:
        across: The ranks that have this rank's number in their nodes, one of each node.
        inside: The ranks of this rank's node.
    """
    ranks = across.size() * inside.size()
    must_divide(f"ep={across.size()} nodes x {inside.size()} ranks", ranks, "experts", experts)
    return [Hop(across, experts // across.size()), Hop(inside, experts // ranks)]


def send_once(
    x_TH: Tensor, weights_Tk: Tensor, chosen_Tk: Tensor, kept_Tk: Tensor | None, experts: Experts, hops: Sequence[Hop]
) -> Tensor:
    """Return for every token the weighted sum of its experts, y_TH, by way of the hops.

    Weights go with the tokens, because what is added up on the way must be weighted before.
    """
    if kept_Tk is not None:
        chosen_Tk = chosen_Tk.masked_fill(~kept_Tk, NOBODY)
    if not hops:
        asked_Tk, mine_Tk = chosen_Tk != NOBODY, chosen_Tk - experts.first
        if (asked_Tk & ((mine_Tk < 0) | (mine_Tk >= experts.count))).any():
            raise ValueError(
                f"the hops brought tokens for other experts than {experts.first} to {experts.first + experts.count - 1}: "
                "number the ep ranks node by node"
            )
        rows_RH, counts_e, order_R = permute(x_TH, mine_Tk.clamp(min=0), experts.count, asked_Tk)
        return unpermute(experts(rows_RH, counts_e), order_R, weights_Tk)
    hop, *further = hops
    ranks = hop.group.size()
    rank_Tk = hop.destination(chosen_Tk)
    # Every pair of a rank and a token that has an expert behind it, in the order of the ranks: one row each.
    asked_nT = torch.stack([(rank_Tk == rank).any(dim=-1) for rank in range(ranks)])
    rank_R, token_R = asked_nT.nonzero(as_tuple=True)
    elsewhere_Rk = rank_Tk[token_R] != rank_R.unsqueeze(-1)
    send = rank_R.bincount(minlength=ranks)
    receive = exchange_counts(send.unsqueeze(-1), hop.group).flatten().tolist()
    send = send.tolist()
    arrived_RH, arrived_weights_Rk, arrived_chosen_Rk = (
        all_to_all(rows, send, receive, hop.group)
        for rows in (x_TH[token_R], weights_Tk[token_R], chosen_Tk[token_R].masked_fill(elsewhere_Rk, NOBODY))
    )
    y_RH = send_once(arrived_RH, arrived_weights_Rk, arrived_chosen_Rk, None, experts, further)
    back_RH = all_to_all(y_RH, receive, send, hop.group)
    return back_RH.new_zeros(x_TH.shape).index_add(0, token_R, back_RH)
