"""A layer of experts over the ranks of a group in one function, to be read from top to bottom.

Route, count, permute, all-to-all, experts, all-to-all back, weighted sum. `lablib.toys.expert_parallel.layer` has the
same steps as a module, with other routers, capacities, shared experts and grouped products. Tests hold both to one
process.

Shapes: T tokens of this rank, H hidden width, F inner width, E experts, e = E / n of them on each of n ranks,
k experts of a token, R = T k rows to send, A rows that arrive, a of them for one expert.

Papers: Lepikhin et al. 2020 (GShard, 2006.16668); Jiang et al. 2024 (Mixtral, 2401.04088).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lablib.toys.expert_parallel.dispatcher import all_to_all
from lablib.toys.expert_parallel.router import wide_linear


def moe_forward(
    x_TH: Tensor,  # this rank's tokens; T may differ between ranks, and may be 0
    router_EH: Tensor,  # the same on every rank
    gate_eFH: Tensor,  # of this rank's experts: rank i has experts i e to (i + 1) e - 1
    up_eFH: Tensor,
    down_eHF: Tensor,
    k: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """Return what the experts of all ranks make of this rank's tokens, y_TH; every rank must call it.

    Every rank must run backward, too, one without tokens like the others: its all-to-alls wait for all.
    """
    num_experts, num_local = len(router_EH), len(gate_eFH)
    ranks = group.size()

    # Route: softmax over all experts, the k best of them, weights that sum to one. The product is in fp32 already.
    scores_TE = wide_linear(x_TH, router_EH).softmax(dim=-1)
    weights_Tk, experts_Tk = scores_TE.topk(k, dim=-1)
    weights_Tk = (weights_Tk / weights_Tk.sum(dim=-1, keepdim=True)).to(x_TH.dtype)

    # Count, and tell every rank how many rows come for each of its experts.
    counts_E = experts_Tk.flatten().bincount(minlength=num_experts)
    send_ne = counts_E.view(ranks, num_local)  # line i is for rank i
    receive_ne = torch.empty_like(send_ne)  # line i is from rank i
    dist.all_to_all_single(receive_ne, send_ne, group=group)
    # .tolist() makes the CPU wait for the GPU: it must know the sizes before it can ask for memory.
    send, receive = send_ne.sum(dim=1).tolist(), receive_ne.sum(dim=1).tolist()

    # Permute: one row for each choice, in the order of the experts and so of the ranks.
    order_R = experts_Tk.flatten().argsort(stable=True)  # choice number c = token * k + place
    rows_RH = x_TH[order_R // k]

    # Dispatch. Its backward is an all-to-all the other way.
    arrived_AH = all_to_all(rows_RH, send, receive, group)

    # What arrived is in the order of the ranks, and by expert within each of them: take every expert's rows together.
    expert_A = torch.arange(num_local, device=x_TH.device).repeat(ranks).repeat_interleave(receive_ne.flatten())
    made_AH = torch.zeros_like(arrived_AH)
    for i in range(num_local):
        mine = expert_A == i  # may be empty, and then has gradients of zero
        x_aH = arrived_AH[mine]
        inner_aF = F.silu(x_aH @ gate_eFH[i].t()) * (x_aH @ up_eFH[i].t())
        made_AH = made_AH.index_put((mine,), inner_aF @ down_eHF[i].t())

    # Combine: the results go back the way the rows came, so they are in the order of `rows_RH`.
    back_RH = all_to_all(made_AH, receive, send, group)

    # Weighted sum: k rows for each token. `order_R` says which choice a row was, hence its weight and its token.
    weighted_RH = back_RH * weights_Tk.flatten()[order_R].unsqueeze(-1)
    return torch.zeros_like(x_TH).index_add(0, order_R // k, weighted_RH)
