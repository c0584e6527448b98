"""Tokens put in the order of their experts, and back: permute, unpermute, and which tokens an expert has room for.

    x_TH, three tokens       a  b  c
    chosen_Tk, two each      a: 2 0    b: 0 1    c: 0 2
    rows_RH                  a b c | b | a c        experts 0, 1, 2: counts_E = 3, 1, 2
    order_R                  1 2 4   3   0 5        the number of the choice, token * k + place

A row is one choice: a token appears once for each expert that it chose.
With a capacity C an expert takes C rows, and the choices beyond it are dropped: they become no row. A token that loses
all of its choices gets zeros from this layer, so that only the residual stream carries it on.

Shapes: T tokens, k experts of a token, E experts, R rows (T k, or less with a capacity), H hidden width.

Papers: Lepikhin et al. 2020 (GShard, 2006.16668) and Fedus et al. 2021 (Switch, 2101.03961) for capacities; Gale et al.
2022 (MegaBlocks, 2211.15841) for layers that drop nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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


def within_capacity(chosen_Tk: Tensor, experts: int, capacity: int, weights_Tk: Tensor | None = None) -> Tensor:
    """Return which choices find room, kept_Tk.

    Everybody's first choice comes before anybody's second, and among these the earlier token, as in DeepSpeed's
    `top2gating`. So the last tokens of a batch are dropped, whatever they are. With weights the highest comes first.

    Args:
        capacity: C, rows that an expert takes.
        weights_Tk: To let weights decide in place of positions.
    """
    queue_C = chosen_Tk.t().flatten()  # all first choices, then all second ones
    order_C = torch.arange(len(queue_C), device=queue_C.device)
    if weights_Tk is not None:
        order_C = weights_Tk.detach().t().flatten().argsort(descending=True, stable=True)
    arrived_CE = F.one_hot(queue_C[order_C], experts).cumsum(dim=0)
    place_C = arrived_CE.gather(1, queue_C[order_C].unsqueeze(-1)).squeeze(-1)  # 1 for the first at an expert
    kept_C = torch.empty_like(queue_C, dtype=torch.bool)
    kept_C[order_C] = place_C <= capacity
    return kept_C.view(chosen_Tk.shape[::-1]).t()
