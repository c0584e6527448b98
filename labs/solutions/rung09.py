"""Worked exercises of rung 09, activation checkpointing."""

from __future__ import annotations

import itertools
import weakref
from functools import partial

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch


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


PRODUCTS = [
    getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm")
]


def run_saving(model, x, save=(), seen=None):
    """Run each block under a checkpoint, and save the products named."""
    seen = {} if seen is None else seen

    def contexts(block):
        # Some releases ask in the replay as well: count there anew.
        asked = {False: itertools.count(), True: itertools.count()}

        def policy(ctx, operator, *args, **kwargs):
            if operator not in PRODUCTS:
                return CheckpointPolicy.PREFER_RECOMPUTE
            name = block, next(asked[ctx.is_recompute])
            left, right = args[-2:]
            size = left.nbytes // left.shape[-1] * right.shape[-1]
            seen[name] = right.shape[-2], size
            if name in save:
                return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    for number, block in enumerate(model):
        how = {"context_fn": partial(contexts, number)}
        x = checkpoint_of_torch(block, x, use_reentrant=False, **how)
    return x


def keep_within(model, x, limit):
    """Of all products, save those with the most FLOPs a byte that fit."""
    seen, save = {}, set()
    with torch.random.fork_rng(devices=[]):
        run_saving(model, x, seen=seen)
    # Blocks' inputs are as large as x, which is there anyway.
    room = limit - (len(model) - 1) * x.nbytes
    # FLOPs a byte are the width that a product sums over.
    for name, (_, size) in sorted(seen.items(), key=lambda one: -one[1][0]):
        if size <= room:
            save.add(name)
            room -= size
    return run_saving(model, x, save)


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


def faulty_part(job):
    """Compare a step with and without checkpoints, part by part."""
    steps = {}
    for checkpointed in (False, True):
        model, calls = job.model(checkpointed), []

        def note(part, args, y, name=None, calls=calls):
            given = tuple(each.double().sum().item() for each in args)
            calls.append((name, given, y.detach().clone(), weakref.ref(y)))

        for i, block in enumerate(model):
            for name, part in block.named_children():
                part.register_forward_hook(partial(note, name=(i, name)))
        losses = job.forward(model)
        held = [name for name, *_, y in calls if y() is not None]
        sum(losses).backward()
        buffers = dict(model.named_buffers())
        steps[checkpointed] = calls, held, buffers
    calls, held, buffers = steps[True]
    if held:
        return held[0]
    first = {}
    for name, given, y, _ in calls:
        if not torch.equal(first.setdefault((name, given), y), y):
            return name
    for path, buffer in buffers.items():
        if not torch.equal(buffer, steps[False][2][path]):
            block, part, _ = path.split(".")
            return int(block), part
    return None
