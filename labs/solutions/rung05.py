"""Worked exercises of rung 05, ZeRO."""

from __future__ import annotations

import torch
import torch.distributed as dist
from lablib.toys.torch_names import all_gather, reduce_scatter
from torch.distributed.fsdp import fully_shard


def zero2_step(weights, backward, momenta, lr):
    """The mean gradient of my pieces, my update, everybody's updates."""
    n, rank = dist.get_world_size(), dist.get_rank()
    for k, gradient in backward():
        mean = torch.empty_like(momenta[k])
        gradient /= n  # divided first: a sum could overflow
        reduce_scatter(mean, gradient)
        momenta[k].mul_(0.9).add_(mean)
    for bucket, momentum in zip(weights, momenta, strict=True):
        mine = bucket.chunk(n)[rank] - lr * momentum
        all_gather(bucket, mine)


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


def train(model, steps, loss_of, adamw, budget):
    """The lowest stage that fits, by what stays whole, and its steps."""
    n, m = dist.get_world_size(), len(steps[0])
    size = sum(p.nbytes for p in model.parameters())
    held = {1: 2 + 3 / n, 2: 1 + 4 / n, 3: 4 / n}  # pieces beside the whole
    stage = next(k for k in held if held[k] * size <= budget)
    for block in model:
        fully_shard(block, reshard_after_forward=stage == 3)
    fully_shard(model)
    optimizer = adamw(model.parameters())
    for micro_batches in steps:
        for i, batch in enumerate(micro_batches):
            last = i == m - 1
            model.set_requires_gradient_sync(last or stage > 1)
            model.set_reshard_after_backward(last or stage == 3)
            (loss_of(model, batch) / m).backward()
        optimizer.step()
        optimizer.zero_grad()


def find_bad_shard(job):
    """The first difference from one process, seen by whichever rank."""
    n, rank = dist.get_world_size(), dist.get_rank()
    model, alone = job.build()
    optimizer = job.optimizer(alone.parameters())
    named = zip(
        model.module.parameters(), alone.named_parameters(), strict=True
    )
    rows = [(model.flat_of[mine], name, p) for mine, (name, p) in named]

    def same(a, b):
        return torch.allclose(a, b, atol=1e-9)

    for step in range(job.steps):
        samples = job.batch(step)
        model.backward(job.loss(model, samples.chunk(n)[rank]))
        optimizer.zero_grad()
        job.loss(alone, samples).backward()
        seen = []  # part of the step, rank, name
        for flat, name, p in rows:
            if not same(flat.sharded_grad, job.pieces(flat, p.grad)[rank]):
                seen.append((0, rank, name))
        torch.nn.utils.clip_grad_norm_(alone.parameters(), job.max_norm)
        optimizer.step()
        model.step(job.max_norm)
        for flat, name, p in rows:
            for r, right in enumerate(job.pieces(flat, p)):
                if not same(flat.full.chunk(n)[r], right):
                    seen.append((1 if r == rank else 2, r, name))
        everybody = [None] * n
        dist.all_gather_object(everybody, seen)
        every = [each for found in everybody for each in found]
        if every:
            part, who, name = min(every)
            parts = "reduce-scatter", "update", "all-gather"
            return who, name, parts[part]
    return None


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
