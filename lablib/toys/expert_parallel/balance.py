"""Load balance: how uneven the experts are, and three ways to even them out.

    load_balancing_loss   E Σ_i f_i P_i: 1 if all experts are chosen equally often; its gradient moves P, the scores
    update_bias           b_i goes up by γ where tokens are missing and down by γ where there are too many; no gradient
    z_loss                mean of (log Σ exp logit)^2: no balance, but logits stay small, and exp stays exact

f_i is the share of choices that fell on expert i, and P_i its mean score. f counts, so it has no gradient.
A loss over one rank's tokens evens out each rank, which is more than it needs to be. With a `group` f is counted over
all ranks, and the mean of the ranks' losses is the loss of the whole batch: P enters linearly, f does not.

Shapes: T tokens, E experts, k experts of a token.

Papers: Lepikhin et al. 2020 (GShard, 2006.16668); Fedus et al. 2021 (Switch, 2101.03961), equations 4 to 6, for k = 1;
Zoph et al. 2022 (ST-MoE, 2202.08906); DeepSeek-AI 2024 (2412.19437), section 2.1.2; Wang et al. 2024 (2408.15664) for
`max_violation`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lablib.toys.expert_parallel.router import TINY, TopKRouter


def count_choices(chosen_Tk: Tensor, experts: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return how many tokens chose each expert, counts_E, on this rank or on all ranks of a group."""
    counts_E = chosen_Tk.flatten().bincount(minlength=experts)
    if group is not None:
        dist.all_reduce(counts_E, group=group)
    return counts_E


def load_balancing_loss(scores_TE: Tensor, chosen_Tk: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return `E Σ_i f_i P_i`, 1 for an even choice and E if all tokens want one expert (k = 1).

    Hugging Face's classes return k times as much, since their f is counted in tokens.

    Args:
        scores_TE: Softmax or sigmoid of the logits; sigmoids are divided by their sum.
        group: Ranks over which f is counted, each with as many tokens; None is this rank alone.
    """
    experts = scores_TE.shape[-1]
    counts_E = count_choices(chosen_Tk, experts, group)
    f_E = counts_E / counts_E.sum().clamp(min=1)
    share_TE = scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + TINY)
    p_E = share_TE.sum(dim=0) / max(1, len(share_TE))  # a rank without tokens has no mean
    return experts * (f_E.to(p_E.dtype) * p_E).sum()


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


def max_violation(counts_E: Tensor) -> float:
    """Return the load of the busiest expert above the mean, over the mean: 0 is even, E - 1 is one expert for all."""
    total = int(counts_E.sum())
    return int(counts_E.max()) * len(counts_E) / total - 1 if total else 0.0


def largest_share(counts_E: Tensor) -> float:
    """Return the share of the choices that fell on the most popular expert: 1/E is even."""
    total = int(counts_E.sum())
    return int(counts_E.max()) / total if total else 0.0
