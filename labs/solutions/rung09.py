"""Worked exercises of rung 09, activation checkpointing."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)


def block_bytes(
    batch, seq, hidden, heads, kv_heads, ffn, gated, dropout, fused
):
    """Bytes of a block; a mask has 1 byte a value."""
    tokens, width = batch * seq, hidden // heads
    stream, inner = 2 * tokens * hidden, 2 * tokens * ffn
    keys = 2 * tokens * kv_heads * width
    norms = 2 * stream
    # Input of the projections; q, k and v; input of the output.
    attention = stream + (stream + 2 * keys) + stream
    mlp = stream + (3 if gated else 2) * inner
    masks = 2 * tokens * hidden if dropout else 0
    pairs = heads * batch * seq * seq
    plain = pairs * (2 + 1 + 2 if dropout else 2)
    scores = 4 * tokens * heads if fused else plain
    return norms + attention + scores + mlp + masks


class Forgetful(torch.autograd.Function):
    """A block that keeps its input and nothing else."""

    @staticmethod
    def forward(ctx, x, block):
        """Run without a graph."""
        ctx.block, ctx.random = block, torch.get_rng_state()
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        """Run again with a graph, on the same random numbers."""
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.random)
            y = ctx.block(x)
        y.backward(gradient)
        return x.grad, None


def checkpoint(block, x):
    """`block(x)`, kept as its input."""
    return Forgetful.apply(x, block)


def every_second(block, x):
    """`block(x)`; products 1, 3, 5 ... are saved, the others run again."""
    aten = torch.ops.aten

    def contexts():
        asked = {"forward": 0, "replay": 0}

        def policy(ctx, operator, *args, **kwargs):
            if operator not in (aten.mm.default, aten.addmm.default):
                return CheckpointPolicy.PREFER_RECOMPUTE
            run = "replay" if ctx.is_recompute else "forward"
            asked[run] += 1
            if asked[run] % 2 == 1:
                return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return torch.utils.checkpoint.checkpoint(
        block, x, use_reentrant=False, context_fn=contexts
    )


def choose(job):
    """Of what fits, what computes least again, and of that the least peak."""
    layers, x, block, head = job.layers, job.boundary, job.block, job.head
    choices = [("none", layers * block + head, 0)]
    stored = layers * (block - job.core)
    peak = stored + max(head, job.core - job.behind)
    choices.append(("selective", peak, layers * job.core_flops))
    for n in range(1, layers):
        forward = n * x + (layers - n) * block + head
        replay = (n - 1) * x + block
        extra = n * job.block_flops
        choices.append((f"first:{n}", max(forward, replay), extra))
    for k in range(1, layers + 1):
        forward = -(-layers // k) * x + head
        starts = range(0, layers, k)
        replay = max(
            i * x + min(k, layers - first) * block
            for i, first in enumerate(starts)
        )
        extra = layers * job.block_flops
        choices.append((f"every:{k}", max(forward, replay), extra))
    fitting = [choice for choice in choices if choice[1] <= job.budget]
    if not fitting:
        return None
    best = min(fitting, key=lambda choice: (choice[2], choice[1]))
    return {"strategy": best[0], "peak": best[1], "extra": best[2]}
