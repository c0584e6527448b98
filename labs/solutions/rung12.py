"""Worked exercises of rung 12, context parallelism."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lablib.toys.context_parallel import shard, token_positions, unshard


def merge(a, b):
    """Weigh each output by its share of both sums of exponentials."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse = torch.logaddexp(lse_a, lse_b)
    # Where both are -inf nothing is subtracted, and exp gives 0.
    base = torch.where(lse.isinf(), torch.zeros_like(lse), lse)
    weight_a = (lse_a - base).exp().unsqueeze(-1)
    weight_b = (lse_b - base).exp().unsqueeze(-1)
    return weight_a * out_a + weight_b * out_b, lse


def packed_step(model, tokens, documents, counted, mesh):
    """Labels of the whole windows, one cut for all, one mean for all."""
    replica, r = mesh.get_coordinate()
    dp, cp = mesh.shape
    rows = slice(
        replica * len(tokens) // dp, (replica + 1) * len(tokens) // dp
    )
    tokens, documents, counted = tokens[rows], documents[rows], counted[rows]
    learned = counted[:, 1:] & (documents[:, 1:] == documents[:, :-1])
    labels = tokens[:, 1:].masked_fill(~learned, -100)
    chunks = torch.arange(labels.shape[1]).chunk(2 * cp)
    mine = torch.cat((chunks[r], chunks[2 * cp - 1 - r]))
    logits = model(tokens[:, mine], mine, documents[:, :-1])
    labels = labels[:, mine]
    own = F.cross_entropy(
        logits.transpose(1, 2), labels, ignore_index=-100, reduction="sum"
    )
    both = torch.stack((own.detach(), (labels != -100).sum()))
    dist.all_reduce(both)  # over dp and cp
    total, count = both
    (own * dp * cp / count).backward()  # the average divides by dp * cp
    return total / count


def find_wrong_block(job):
    """Let each attention show its weights, forward and backward."""
    group = dist.group.WORLD
    cp, seq = dist.get_world_size(), 32
    owner = torch.empty(seq, dtype=torch.long)
    for each in range(cp):
        owner[token_positions(seq, cp, each)] = each
    dice = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, seq, seq, generator=dice).double()
    unit = torch.eye(seq).double()[None, None]
    alone = F.scaled_dot_product_attention(q, k, unit, is_causal=True)
    right = alone[0, 0]
    for layer, block in enumerate(job(group).blocks):
        parts = [shard(x, 2, group).requires_grad_() for x in (q, k, unit)]
        out = block.attention.core(*parts)
        out.backward(shard(unit, 2, group))
        forth = unshard(out.detach(), 2, group)[0, 0]
        back = unshard(parts[2].grad, 2, group)[0, 0].T
        what, got = "gradients", back
        if not torch.allclose(forth, right):
            same = torch.equal(forth > 0, right > 0)
            what, got = "weights" if same else "keys", forth
        off = ~torch.isclose(got, right)
        if not off.any():
            continue
        rank = owner[off.any(1)][0].item()
        rows = (owner == rank).nonzero()[-seq // cp // 2 :, 0]
        # Its late rows see all. What each rank's keys weigh, over what they
        # should: rows add up to 1, so one factor, but for one rank's keys.
        shares = torch.stack(
            [
                got[rows][:, owner == e].sum(1)
                / right[rows][:, owner == e].sum(1)
                for e in range(cp)
            ]
        )
        odd = shares / shares.median(0).values - 1
        source = odd.abs().sum(1).argmax().item()
        step = (rank - source) % cp
        return {"what": what, "layer": layer, "rank": rank, "step": step}
    return None


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
    sent = {
        # Keys and values go round in forward and again in backward,
        # where the gradients of both come home.
        "ring": (2 + 4) * keys * (cp - 1),
        # An all-gather of both, a reduce-scatter of their gradients.
        "gathered": (2 + 2) * keys * (cp - 1),
        # q, k, v and the output, there and in backward again; of each
        # one part in cp stays.
        "ulysses": 2 * (2 * queries + 2 * keys) * (cp - 1) / cp,
    }
    way = min(possible, key=sent.get)
    balanced = way == "ulysses" or not causal
    return {
        "possible": possible,
        "way": way,
        "order": "contiguous" if balanced else "zigzag",
        "sent": sent[way],
        "averaged_over": dp * cp,
    }
