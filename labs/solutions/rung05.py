"""Worked exercises of rung 05, ZeRO."""

from __future__ import annotations

import torch
import torch.distributed as dist
from lablib.toys.torch_names import all_gather, reduce_scatter


def state_bytes(params, ranks, stage):
    """Bytes of one rank; a shard is rounded up, since padding is held too."""
    own = -(-params // ranks)
    return {
        "weights": 2 * (own if stage >= 3 else params),
        "gradients": 2 * (own if stage >= 2 else params),
        "optimizer": 12 * (own if stage >= 1 else params),
    }


def zero2_step(weights, gradient, momentum, lr):
    """The mean gradient of my shard, my update, everybody's updates."""
    n, rank = dist.get_world_size(), dist.get_rank()
    mine = weights.chunk(n)[rank]
    mean = torch.empty_like(momentum)
    reduce_scatter(mean, gradient / n)  # divided first: a sum could overflow
    momentum.mul_(0.9).add_(mean)
    mine.sub_(lr * momentum)
    all_gather(weights, mine.clone())


def zero3_step(layers, x, gather, release, forward, backward, scatter):
    """Gather before use, release after it, in forward and in backward."""
    inputs = []
    for k in range(layers):
        weights = gather(k)
        inputs.append(x)
        x = forward(k, weights, x)
        release(k)
    gradient = [1.0] * len(x)
    shards = {}
    for k in reversed(range(layers)):
        weights = gather(k)
        gradient, of_weights = backward(k, weights, inputs[k], gradient)
        release(k)
        shards[k] = scatter(k, of_weights)
    return [shards[k] for k in range(layers)]


def zero_tradeoffs(params, ranks, sequences, activations, budget):
    """What every stage holds and sends with the largest micro-batches."""
    own, once = -(-params // ranks), 2 * params * (ranks - 1) / ranks
    held = [
        16 * params,
        4 * params + 12 * own,
        2 * params + 14 * own,
        16 * own,
    ]
    micro_batches, sent = [None] * 4, [None] * 4
    for stage in range(4):
        fit = (budget - held[stage]) // activations
        if fit < 1:
            continue
        m = micro_batches[stage] = -(-(sequences // ranks) // fit)
        # Full gradients are reduced once a step, full weights gathered once.
        sent[stage] = once * (2, 2, m + 1, 3 * m)[stage]
    fits = [stage for stage in range(4) if sent[stage] is not None]
    best = min(fits, key=lambda stage: sent[stage], default=None)
    return {
        "held": held,
        "micro_batches": micro_batches,
        "sent": sent,
        "best": best,
    }
