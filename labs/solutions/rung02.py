"""Worked exercises of rung 02, data parallelism."""

from __future__ import annotations


def token_losses(micro_batches, ranks, all_reduce):
    """Every token of the step gets the same weight, whichever rank and micro-batch has it."""
    total = all_reduce(
        sum(len(losses) for losses in micro_batches)
    )  # once, with a count
    # DDP divides the sum over ranks by their number; nobody divides by micro-batches.
    return [losses.sum() * ranks / total for losses in micro_batches]


def all_reduce_mean(gradients, send):
    """Reduce-scatter round the ring, all-gather round the ring, divide by n."""
    n = len(gradients)
    width = len(gradients[0]) // n
    held = [
        [list(g[c * width : (c + 1) * width]) for c in range(n)]
        for g in gradients
    ]
    for step in range(n - 1):  # what arrives is added
        for rank in range(n):
            chunk, right = (rank - step) % n, (rank + 1) % n
            arriving = send(rank, right, held[rank][chunk])
            held[right][chunk] = [
                a + b
                for a, b in zip(held[right][chunk], arriving, strict=True)
            ]
    for step in range(n - 1):  # what arrives replaces
        for rank in range(n):
            chunk, right = (rank + 1 - step) % n, (rank + 1) % n
            held[right][chunk] = send(rank, right, held[rank][chunk])
    return [
        [value / n for chunk in chunks for value in chunk] for chunks in held
    ]


def make_buckets(sizes, first, cap):
    """Fill from the last gradient to the first; close a bucket once it holds its limit."""
    buckets, held, limit = [[]], 0, first
    for index in reversed(range(len(sizes))):
        if held >= limit:
            buckets.append([])
            held, limit = 0, cap
        buckets[-1].append(index)
        held += sizes[index]
    return buckets


def ddp_bottleneck(params, grad_bytes, tokens, ranks, flops, bandwidth):
    """Ring all-reduce against a backward pass of 4 FLOPs per parameter and token."""
    sent = 2 * (ranks - 1) / ranks * params * grad_bytes
    communication = sent / bandwidth
    backward = 4 * params * tokens / flops
    exposed = max(0.0, communication - backward)
    return {
        "bytes_sent": sent,
        "communication": communication,
        "backward": backward,
        "exposed": exposed,
        "hides": communication <= backward,
    }


def diagnose(charts, alone):
    """Compare what must be equal: replica with replica, epoch with epoch, one step with one process."""
    first = charts[0]
    if any((chart.weights[0] != first.weights[0]).any() for chart in charts):
        return "replicas start from different weights"
    taken = [index for chart in charts for index in chart.samples[0][0]]
    if len(set(taken)) < len(taken):
        return "same data on every rank"
    if first.samples[0] == first.samples[1]:
        return "set_epoch is missing"
    if abs(first.gradient_norms[0] / alone.gradient_norms[0] - 1) > 0.01:
        return "gradients summed instead of averaged"
    return "healthy"
