"""Worked exercises of rung 01, why distributed training."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from lablib.launch.measure import LiveBytes
from torch.utils.checkpoint import checkpoint

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def bytes_per_parameter(weights, gradients, master, optimizer):
    """Add up every copy of a parameter that exists when the optimizer steps."""
    moments = {
        "sgd": 0,
        "sgd-momentum": 4,
        "adamw": 4 + 4,
        # One byte a moment, and one fp32 scale shared by a block of 256 values.
        "adamw-8bit": 2 * (1 + 4 / 256),
    }
    gradient_bytes = sum(BYTES[dtype] for dtype in gradients)
    master_bytes = 4 if master else 0
    return BYTES[weights] + gradient_bytes + master_bytes + moments[optimizer]


def train_within(model, batches, adamw, device):
    """Take the fullest choice, and the next one whenever the device is full."""
    optimizer = adamw(model.parameters(), fused=True)
    own = [block.forward for block in model.blocks]
    # What costs no FLOPs comes first: fewer sequences at a time.
    sizes = range(len(batches[0]), 0, -1)
    choices = [(size, again) for again in (False, True) for size in sizes]

    def passes(batch, size, again):
        for block, run in zip(model.blocks, own, strict=True):
            twice = partial(checkpoint, run, use_reentrant=False)
            block.forward = twice if again else run
        total = 0.0
        for part in batch.split(size):
            loss = model.loss(part) * (len(part) / len(batch))
            loss.backward()
            total += loss.item()
        return total

    losses = []
    for batch in batches:
        while True:
            try:
                losses.append(passes(batch, *choices[0]))
                break
            except torch.OutOfMemoryError:
                choices.pop(0)
            # Out of the except clause the attempt's frames are gone.
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def find_surplus(job):
    """Count after each part, and compare with the other rank."""
    job.start()
    mine = []
    with LiveBytes() as live:
        for step in range(job.steps):
            for part in job.parts:
                live.peak = live.live
                getattr(job, part)(step)
                mine.append((step, part, live.live, live.peak))
    both = [None] * dist.get_world_size()
    dist.all_gather_object(both, mine)
    other = both[1 - dist.get_rank()]
    over, found = [], None
    for (step, part, held, most), (*_, h, m) in zip(mine, other, strict=True):
        if found is None and (held > h or most > m):
            found = part, step
        if found and part == job.parts[-1]:
            over.append(held - h)  # what the step leaves
    if found is None:
        return None
    grows = all(later > now for now, later in pairwise(over))
    return *found, grows


def run_memory(shape, optimizer, seq, batch, recompute, loss):
    """Count parameters, then terms, then what is held at the loss and in the optimizer's step."""
    layers, h, f, vocab = (
        shape[name] for name in ("layers", "hidden", "ffn", "vocab")
    )
    q, k = (
        shape["heads"] * shape["head_dim"],
        shape["kv_heads"] * shape["head_dim"],
    )
    tables = (1 if shape["tied"] else 2) * vocab * h
    n = layers * (2 * h * q + 2 * h * k + 3 * h * f + 2 * h) + h + tables
    # Two moments and their roots for AdamW; its fused kernel keeps the roots in registers.
    moments, roots = {
        "adamw": (8, 4),
        "adamw-fused": (8, 0),
        "sgd-momentum": (4, 0),
        "sgd": (0, 0),
    }[optimizer]
    tokens = seq * batch
    block = (
        2 * tokens * h
        if recompute == "full"
        else tokens * (8 * h + 4 * q + 4 * k + 6 * f)
    )
    terms = {
        "parameters": n,
        "weights": 2 * n,
        "gradients": 2 * n,
        "optimizer": (4 + moments)
        * n,  # the fp32 master copy belongs to the optimizer
        "activations": layers * block,
        "logits": 4 * tokens * vocab,
    }
    always = terms["weights"] + terms["optimizer"]
    # Eager PyTorch: log-probabilities and two gradients in fp32. Megatron: probabilities, and a bf16 gradient.
    a_logit = {"eager": 4 + 4 + 4, "megatron": 4 + 2}[loss]
    at_loss = always + terms["activations"] + a_logit * tokens * vocab
    in_step = always + (4 + roots) * n  # gradients in fp32 by now
    return terms | {
        "peak": max(at_loss, in_step),
        "at": "loss" if at_loss > in_step else "step",
    }
