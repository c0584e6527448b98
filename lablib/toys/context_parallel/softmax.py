"""Attention in pieces: over some of the keys, merged with the rest by log-sum-exps, and its gradients piece by piece.

A softmax needs all its scores for its denominator. A piece divides by its own, and remembers its logarithm, the
log-sum-exp: `lse = log Σ_j exp(score_j)`. Two pieces a and b then become one:

    lse = log(exp(lse_a) + exp(lse_b))        out = exp(lse_a - lse) · out_a + exp(lse_b - lse) · out_b

The order of the pieces does not matter, and no exponent is above 0, so nothing overflows.
In backward the final log-sum-exp gives the true weights of any piece, `exp(score - lse)`, so the gradients of all
pieces just add up.

    B  sequences    N  query heads    K  key and value heads, K divides N    D  width of a head
    s  queries      S  keys

Papers: Milakov and Gimelshein 2018 (1805.02867), section 3; Dao 2023 (2307.08691), sections 2.3 and 3.1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """Attention over some of the keys: its output and its log-sum-exp."""

    out_BNsD: Tensor
    lse_BNs: Tensor


def nothing_seen(q_BNsD: Tensor) -> Partial:
    """Return attention over no keys: the log of an empty sum is -inf. Merged with a piece, it gives that piece."""
    out_BNsD = torch.zeros_like(q_BNsD, dtype=wide(q_BNsD))
    return Partial(out_BNsD, torch.full_like(out_BNsD[..., 0], -math.inf))


def attend(q_BNsD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor | None = None) -> Partial:
    """Return `softmax(q k^T / sqrt(D)) v` over these keys and its log-sum-exp, in fp32 or wider.

    A query that sees none of the keys gets the output 0 and the log-sum-exp -inf.

    Args:
        mask: True where a query may look, of a shape that broadcasts to (B, N, s, S); None lets all see all.
    """
    scores_BNsS = scores(q_BNsD, k_BKSD, mask)
    lse_BNs = scores_BNsS.logsumexp(dim=-1)
    return Partial(weights(scores_BNsS, lse_BNs) @ for_queries(v_BKSD, q_BNsD), lse_BNs)


def merge(a: Partial, b: Partial) -> Partial:
    """Return attention over the keys of two partial results, which have no key in common.

    Args:
        a: (out_BNsD, lse_BNs), for the same queries as `b`.
    """
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse_BNs = torch.logaddexp(lse_a, lse_b)
    share_a, share_b = (weights(lse[..., None], lse_BNs) for lse in (lse_a, lse_b))
    return Partial(share_a * out_a + share_b * out_b, lse_BNs)


def attend_backward(
    q_BNsD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor | None, whole: Partial, grad_BNsD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what these keys add to the gradients of q, k and v, in fp32 or wider.

        dv = w^T dout        dscore = w ∘ (dout v^T - rowsum(dout ∘ out))        w = exp(score - lse)

    Args:
        whole: Output and log-sum-exp over *all* keys, of these and the other pieces.
        grad_BNsD: Gradient of the output.
    """
    out_BNsD, lse_BNs = whole
    kv_heads, scale = k_BKSD.shape[1], 1 / math.sqrt(q_BNsD.shape[-1])
    q_BNsD, grad_BNsD = q_BNsD.to(wide(q_BNsD)), grad_BNsD.to(wide(q_BNsD))
    weights_BNsS = weights(scores(q_BNsD, k_BKSD, mask), lse_BNs)
    grad_weights_BNsS = grad_BNsD @ for_queries(v_BKSD, q_BNsD).transpose(-2, -1)
    mean_BNs1 = (grad_BNsD * out_BNsD).sum(dim=-1, keepdim=True)
    grad_scores_BNsS = weights_BNsS * (grad_weights_BNsS - mean_BNs1) * scale
    grad_k_BNSD, grad_v_BNSD = grad_scores_BNsS.transpose(-2, -1) @ q_BNsD, weights_BNsS.transpose(-2, -1) @ grad_BNsD
    # A key head has served N / K query heads, and gets the sum of what they ask for.
    grad_k_BKSD, grad_v_BKSD = (g.unflatten(1, (kv_heads, -1)).sum(2) for g in (grad_k_BNSD, grad_v_BNSD))
    return grad_scores_BNsS @ for_queries(k_BKSD, q_BNsD), grad_k_BKSD, grad_v_BKSD


def scores(q_BNsD: Tensor, k_BKSD: Tensor, mask: Tensor | None) -> Tensor:
    """Return `q k^T / sqrt(D)`, -inf where the mask is False."""
    k_BNSD = for_queries(k_BKSD, q_BNsD)
    scores_BNsS = q_BNsD.to(k_BNSD.dtype) @ k_BNSD.transpose(-2, -1) * (1 / math.sqrt(q_BNsD.shape[-1]))
    return scores_BNsS if mask is None else scores_BNsS.masked_fill(~mask, -math.inf)


def weights(scores_BNsS: Tensor, lse_BNs: Tensor) -> Tensor:
    """Return `exp(score - lse)`, and 0 where there is nothing to see, since -inf - -inf would be no number."""
    return (scores_BNsS - lse_BNs.masked_fill(lse_BNs == -math.inf, 0)[..., None]).exp()


def for_queries(x_BKSD: Tensor, q_BNsD: Tensor) -> Tensor:
    """Return keys or values with a copy of their head for each query head that reads it, in fp32 or wider."""
    return x_BKSD.to(wide(x_BKSD)).repeat_interleave(q_BNsD.shape[1] // x_BKSD.shape[1], dim=1)


def wide(x: Tensor) -> torch.dtype:
    """Return the dtype of sums: as many pieces are added as there are ranks, too many for 8 bits of bf16."""
    return torch.promote_types(x.dtype, torch.float32)
