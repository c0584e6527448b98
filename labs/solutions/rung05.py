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


def lean_muon(weights, gradients, momenta, lr, factor):
    """Momentum to its home, every rank's rows of the factor back."""
    n, rank = dist.get_world_size(), dist.get_rank()
    rows_of_factor = {}
    for k, momentum in enumerate(momenta):
        momentum.mul_(0.9).add_(gradients[k])
        home = k % n
        rows = [torch.empty_like(momentum) for _ in range(n)]
        dist.gather(momentum, rows if rank == home else None, home)
        if rank == home:
            rows_of_factor[k] = rows
    # All momenta are home before the first factor: no home waits for another.
    for k, rows in rows_of_factor.items():
        rows_of_factor[k] = list(factor(torch.cat(rows)).chunk(n))
    for k, weight in enumerate(weights):
        mine = torch.empty_like(weight)
        dist.scatter(mine, rows_of_factor.get(k), k % n)
        weight.sub_(lr * mine)


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


def moments_recipe(shapes, ranks, budget, step, diverges):
    """Tensor by tensor, what rank 0 holds of both moments."""
    shards = [-(-rows // ranks) * columns for rows, columns in shapes]
    held = {}
    for states, bits, block in (
        ("fp32", 32, 1),
        ("8bit", 8, 256),
        ("4bit", 4, 128),
    ):
        held[states] = 0
        for n in shards:
            if states != "fp32" and n >= 4096 and n % block == 0:
                held[states] += 2 * (n * bits // 8 + 4 * (n // block))
            else:
                held[states] += 2 * 4 * n
    best = None
    for states in ("fp32", "8bit", "4bit"):  # most bits first
        temporary = 0 if states == "fp32" else step * max(shards)
        if states not in diverges and held[states] + temporary <= budget:
            best = states
            break
    return {"held": held, "best": best}
