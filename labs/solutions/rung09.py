"""Worked exercises of rung 09, activation checkpointing."""

from __future__ import annotations

import torch


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


def segment_peak(layers, boundary, block, k):
    """Backward at segment i has i inputs before it, and its blocks."""
    peak = 0
    for i, first in enumerate(range(0, layers, k)):
        length = min(k, layers - first)
        peak = max(peak, i * boundary + length * block)
    return peak


def choose(job):
    """Of what fits, what computes least again."""
    choices = [("none", job.layers * job.block, 0)]
    stored = job.layers * (job.block - job.core)
    peak = stored + max(0, job.core - job.behind)
    choices.append(("selective", peak, job.layers * job.core_flops))
    for n in range(1, job.layers + 1):
        forward = n * job.boundary + (job.layers - n) * job.block
        replay = (n - 1) * job.boundary + job.block
        peak, extra = max(forward, replay), n * job.block_flops
        choices.append((f"first:{n}", peak, extra))
    fitting = [choice for choice in choices if choice[1] <= job.budget]
    if not fitting:
        return None
    strategy, peak, extra = min(fitting, key=lambda choice: choice[2])
    return {"strategy": strategy, "peak": peak, "extra": extra}
