"""The router: which k of E experts a token visits, how much of each it takes, and how its load is balanced.

    scores_TE = softmax(x_TH W^T)                  or sigmoid, each expert judged alone (DeepSeek-V3)
    chosen_Tk = the k highest of scores_TE (+ a bias of each expert, where one balances the load)
    weights_Tk = their scores, without the bias    and divided by their sum, if they are normalized

No gradient goes through the choice. The router learns from the weights alone, so that with k = 1 and normalized
weights, which are all 1, the loss of the model teaches it nothing.

    load_balancing_loss   E Σ_i f_i P_i: 1 if all experts are chosen equally often; its gradient moves P, the scores
    update_bias           b_i goes up by γ where tokens are missing and down by γ where there are too many; no gradient
    z_loss                mean of (log Σ exp logit)^2: no balance, but logits stay small, and exp stays exact

f_i is the share of choices that fell on expert i, and P_i its mean score. f counts, so it has no gradient.
A loss over one rank's tokens evens out each rank, which is more than it needs to be. With a `group` f is counted over
all ranks, and the mean of the ranks' losses is the loss of the whole batch: P enters linearly, f does not.

Shapes: T tokens, H hidden width, E experts, k experts of a token, N nodes.

Sources: Jiang et al. 2024 (Mixtral, 2401.04088), whose softmax over the k highest logits is `normalized`; Qwen3-MoE in
Hugging Face, which has both settings; DeepSeek-AI 2024 (2412.19437), section 2.1.2, for sigmoid, bias and nodes;
Lepikhin et al. 2020 (GShard, 2006.16668) and Fedus et al. 2021 (Switch, 2101.03961), equations 4 to 6, for the loss;
Zoph et al. 2022 (ST-MoE, 2202.08906) for `z_loss`.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lablib.calc.errors import check_whole, must_divide, one_of
from lablib.calc.models import Router

INIT_STD = 0.02
EPSILON = 1e-20  # sigmoids can all be 0


class TopKRouter(nn.Module):
    """Score every expert, keep the k best.

    Args:
        hidden: Width of a token, H.
        experts: E.
        k: Experts of a token.
        rules: Score, normalization, scale, bias, and `group_topk` of `groups` of experts that a token may visit, a
            group being the experts of a node. None is Mixtral's: softmax, weights that sum to one.
    """

    def __init__(self, hidden: int, experts: int, k: int, rules: Router | None = None) -> None:
        super().__init__()
        check_whole("hidden", hidden, 1)
        check_whole("experts", experts, 1)
        check_whole("k", k, 1)
        if k > experts:
            raise ValueError(f"k={k} experts of a token, but experts={experts}; use 1 to {experts}")
        self.k, self.rules = k, rules or Router()
        one_of("score", self.rules.score, ("softmax", "sigmoid"))
        if self.rules.groups:
            check_nodes(experts, k, self.rules.groups, self.rules.group_topk)
        self.weight = nn.Parameter(torch.empty(experts, hidden).normal_(std=INIT_STD))
        # A buffer: saved with the weights, and out of the optimizer's sight.
        self.register_buffer("bias_E", torch.zeros(experts) if self.rules.bias else None)

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and the numbers of the chosen experts, weights_Tk and chosen_Tk, the best one first."""
        return self.choose(self.scores(self.logits(x_TH)))

    def logits(self, x_TH: Tensor) -> Tensor:
        """Return a number for every expert, logits_TE, at least in fp32, under autocast too; see `wide_linear`."""
        return wide_linear(x_TH, self.weight)

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Return the scores, in the dtype of the logits."""
        return logits_TE.softmax(dim=-1) if self.rules.score == "softmax" else logits_TE.sigmoid()

    def choose(self, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights_Tk and chosen_Tk of given scores."""
        ranked_TE = scores_TE.detach()
        if self.bias_E is not None:
            ranked_TE = ranked_TE + self.bias_E
        if self.rules.groups:
            ranked_TE = limit_nodes(ranked_TE, self.rules.groups, self.rules.group_topk, self.k)
        chosen_Tk = ranked_TE.topk(self.k, dim=-1).indices
        weights_Tk = scores_TE.gather(-1, chosen_Tk)
        if self.rules.normalized:
            weights_Tk = weights_Tk / (weights_Tk.sum(dim=-1, keepdim=True) + EPSILON)
        return weights_Tk * self.rules.scale, chosen_Tk


def wide_linear(x_TH: Tensor, weight_EH: Tensor) -> Tensor:
    """Return `x W^T` at least in fp32: in bf16 scores that differ become ties, and a tie goes to whom the sort likes.

    A softmax in fp32 is too late, since the product itself has been rounded by then. As in Megatron Core with
    `moe_router_dtype="fp32"`; autocast would make the product one in 16 bits.
    """
    wide = torch.promote_types(x_TH.dtype, torch.float32)
    with torch.autocast(x_TH.device.type, enabled=False):
        return F.linear(x_TH.to(wide), weight_EH.to(wide))


def check_nodes(experts: int, k: int, nodes: int, max_nodes: int) -> None:
    """Raise a ValueError unless a token finds its k experts on `max_nodes` nodes."""
    must_divide("nodes", nodes, "experts", experts)
    check_whole("nodes of a token", max_nodes, 1, nodes)
    must_divide("nodes of a token", max_nodes, "k", k)
    if k // max_nodes > experts // nodes:
        raise ValueError(
            f"k={k} experts on {max_nodes} nodes are {k // max_nodes} on each, but experts={experts} on nodes={nodes} are "
            f"{experts // nodes} on each; let a token visit {math.ceil(k * nodes / experts)} or more"
        )


def limit_nodes(ranked_TE: Tensor, nodes: int, max_nodes: int, k: int) -> Tensor:
    """Return the scores with -inf for experts on nodes that a token does not visit.

    A node is worth the sum of its k/M best scores, and a token visits the M best nodes (DeepSeek-V3, section 2.1.2).

    Args:
        nodes: N; node i has the i-th part of the experts.
        max_nodes: M, nodes that a token visits.
    """
    by_node_TNe = ranked_TE.unflatten(-1, (nodes, -1))
    worth_TN = by_node_TNe.topk(k // max_nodes, dim=-1).values.sum(dim=-1)
    visited_TN = torch.zeros_like(worth_TN, dtype=torch.bool).scatter(
        -1, worth_TN.topk(max_nodes, dim=-1).indices, True
    )
    return by_node_TNe.masked_fill(~visited_TN.unsqueeze(-1), -math.inf).flatten(-2)


def count_choices(chosen_Tk: Tensor, experts: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return how many tokens chose each expert, counts_E, on this rank or on all ranks of a group."""
    counts_E = chosen_Tk.flatten().bincount(minlength=experts)
    if group is not None:
        dist.all_reduce(counts_E, group=group)
    return counts_E


def load_balancing_loss(scores_TE: Tensor, chosen_Tk: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return `E Σ_i f_i P_i`: 1 for an even choice, which is no lower limit, and E if all tokens want one expert (k = 1).

    Hugging Face's classes return k times as much, since their f is counted in tokens.

    Args:
        scores_TE: Softmax or sigmoid of the logits; sigmoids are divided by their sum.
        group: Ranks over which f is counted, each with as many tokens; None is this rank alone.
    """
    experts = scores_TE.shape[-1]
    counts_E = count_choices(chosen_Tk, experts, group)
    f_E = counts_E.to(scores_TE.dtype) / counts_E.sum().clamp(min=1)
    share_TE = scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + EPSILON)
    p_E = share_TE.sum(dim=0) / max(1, len(share_TE))  # a rank without tokens has no mean
    return experts * (f_E * p_E).sum()


def z_loss(logits_TE: Tensor) -> Tensor:
    """Return `mean over tokens of (log Σ_i exp logit_i)^2`."""
    full_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    return full_TE.logsumexp(dim=-1).square().sum() / max(1, len(full_TE))


@torch.no_grad()
def update_bias(router: TopKRouter, counts_E: Tensor, speed: float) -> None:
    """Add γ to the bias of every expert below the mean load, and take γ off those above; after the optimizer's step.

    Args:
        counts_E: Tokens of each expert, of all ranks: biases must stay equal everywhere.
        speed: γ.
    """
    if router.bias_E is None:
        raise ValueError("this router has no bias; make it with Router(bias=True)")
    if router.bias_E.dtype.itemsize < 4:
        raise ValueError(
            f"bias_E is {router.bias_E.dtype}, in which small steps are lost beside a bias that has grown; "
            "use router.bias_E = router.bias_E.float()"
        )
    load_E = counts_E.to(router.bias_E.dtype)
    router.bias_E += speed * torch.sign(load_E.mean() - load_E)


def largest_share(counts_E: Tensor) -> float:
    """Return the share of the choices that fell on the most popular expert: 1/E is even."""
    total = int(counts_E.sum())
    return int(counts_E.max()) / total if total else 0.0
