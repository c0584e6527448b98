"""Worked exercises of rung 12, context parallelism."""

from __future__ import annotations

import torch


def merge(a, b):
    """Weigh each output by its share of both sums of exponentials."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse = torch.logaddexp(lse_a, lse_b)
    # Where both are -inf nothing is subtracted, and exp gives 0.
    base = torch.where(lse.isinf(), torch.zeros_like(lse), lse)
    weight_a = (lse_a - base).exp().unsqueeze(-1)
    weight_b = (lse_b - base).exp().unsqueeze(-1)
    return weight_a * out_a + weight_b * out_b, lse


def held_positions(seq, cp, rank):
    """An early chunk and the late one that makes up for it."""
    if seq % (2 * cp):
        raise ValueError(f"2*cp={2 * cp} does not divide seq={seq}")
    width = seq // (2 * cp)
    return [
        chunk * width + i
        for chunk in (rank, 2 * cp - 1 - rank)
        for i in range(width)
    ]


def global_loss(sums, counts):
    """One mean over all tokens; the average divides by the ranks."""
    tokens = sum(counts)
    return sum(sums) / tokens, len(sums) / tokens


def sent_bytes(seq, heads, kv_heads, head_dim, cp):
    """Two bytes a value, forward and backward, one sequence."""
    queries = 2 * seq / cp * heads * head_dim  # bytes of a rank's queries
    keys = 2 * seq / cp * kv_heads * head_dim
    others = cp - 1
    return {
        # Keys and values go round in forward and again in backward,
        # where the gradients of both come home.
        "ring": (2 + 4) * keys * others,
        # An all-gather of both, a reduce-scatter of their gradients.
        "gathered": (2 + 2) * keys * others,
        # q, k, v and the output, there and in backward again; of each
        # one part in cp stays.
        "ulysses": 2 * (2 * queries + 2 * keys) * others / cp,
    }


def choose_split(seq, heads, kv_heads, head_dim, tp, cp, dp, causal, room):
    """What can run, then what sends least."""
    heads, kv_heads = heads // tp, kv_heads // tp
    queries = 2 * seq // cp * heads * head_dim
    keys = 2 * seq // cp * kv_heads * head_dim
    buffers = {
        "ring": min(2, cp - 1) * 2 * keys,
        "gathered": (cp - 1) * 2 * keys,
        "ulysses": 2 * queries + 2 * keys,
    }
    chunks = 2 * cp if causal else cp
    even = {
        "ring": seq % chunks == 0,
        "gathered": seq % chunks == 0,
        "ulysses": seq % cp == 0 and kv_heads % cp == 0,
    }
    possible = [way for way in even if even[way] and buffers[way] <= room]
    if not possible:
        raise ValueError(f"no way runs at cp={cp} with {room} bytes of room")
    sent = sent_bytes(seq, heads, kv_heads, head_dim, cp)
    way = min(possible, key=sent.get)
    balanced = way == "ulysses" or not causal
    return {
        "possible": possible,
        "way": way,
        "order": "contiguous" if balanced else "zigzag",
        "sent": sent[way],
        "averaged_over": dp * cp,
    }
