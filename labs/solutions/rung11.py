"""Worked exercises of rung 11, a real FSDP run."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt
from statistics import fmean


def next_samples(epoch_order, count, taken, batch, rank, ranks):
    """Write the batch down as one rank would take it, then take every ranks-th of it."""
    wanted = []
    for place in range(taken, taken + batch):
        epoch, position = divmod(place, count)
        wanted.append(epoch_order(epoch)[position])
    return wanted[rank::ranks]


def noise_scale(small, big, batch_small, batch_big):
    """Two means, two equations, one ratio."""
    a, b = fmean(small), fmean(big)
    signal = (batch_big * b - batch_small * a) / (batch_big - batch_small)
    noise = (a - b) / (1 / batch_small - 1 / batch_big)
    return {"signal": signal, "noise": noise, "examples": noise / signal}


def checkpoint_every(
    step_seconds, save_seconds, gpu_hours_between_failures, gpus
):
    """Young's interval, in whole steps, and never less than one."""
    mtbf = 3600 * gpu_hours_between_failures / gpus
    return max(1, round(sqrt(2 * save_seconds * mtbf) / step_seconds))


def diagnose(seen):
    """Does it hang? Do the first two steps agree with one process? Then count."""
    if seen.hangs:
        calls = list(zip(*seen.calls, strict=False))
        if any(len(set(entry)) > 1 for entry in calls):
            return "mismatched collectives"
        gaps = [{b - a for a, b in pairwise(mine)} for mine in seen.batches]
        return (
            "skipped batch"
            if any(len(gap) > 1 for gap in gaps)
            else "uneven data"
        )
    if any(len(set(mine)) < len(mine) for mine in seen.batches):
        return "data seen again"
    if seen.layout == "tensor parallel":
        return (
            "equal seeds" if len(set(seen.weight_norms)) == 1 else "healthy"
        )
    if seen.sharded:
        half = 4 * seen.parameters / len(seen.state_bytes)
        return (
            "unsharded parameter"
            if max(seen.state_bytes) > 1.2 * half
            else "healthy"
        )
    reduced = [size for op, size in seen.calls[0] if op == "all_reduce"]
    if len(reduced) > len(seen.losses[0]):
        return "accumulation that communicates"
    if min(reduced) < 4 * seen.parameters:
        return "wrong-dtype reduction"
    if any(len(set(step)) > 1 for step in zip(*seen.digests, strict=True)):
        return "silent data corruption"
    uneven = [max(w) > 1.5 * min(w) for w in zip(*seen.flops, strict=True)]
    if any(uneven):
        return "slow rank" if all(uneven) else "straggler that comes and goes"
    later = zip(seen.norms[0], seen.expected["norms"], strict=True)
    return (
        "forgotten zero_grad"
        if any(abs(a - b) > 1e-2 * b for a, b in later)
        else "healthy"
    )


def audit_mfu(report):
    """The MFU as it should be, and as each mistake makes it; the nearest one is what was done."""
    weights = 6 * report["parameters"]
    scores = 12 * report["layers"] * report["hidden"] * report["seq"]
    tokens = report["positions"] - report["padding"]

    def mfu(flops, tokens=tokens, peak=report["dense_peak"]):
        return flops * tokens / (report["seconds"] * report["gpus"] * peak)

    right = mfu(weights + scores)
    claims = {
        "honest": right,
        "attention left out": mfu(weights),
        "attention twice": mfu(weights + 2 * scores),
        "sparse peak": mfu(weights + scores, peak=report["sparse_peak"]),
    }
    if report["padding"]:
        claims["padding counted"] = mfu(
            weights + scores, tokens=report["positions"]
        )
    if report["recompute"] == "full":
        claims["recomputation counted"] = 4 / 3 * right
    return right, min(
        claims, key=lambda name: abs(claims[name] - report["mfu"])
    )


def observe_scaling(alone, ranks, scaling):
    """Speedup from the slowest rank's time; the loss split so that its parts add up."""
    n = len(ranks)
    step = max(rank["seconds"] for rank in ranks)
    share = 1 if scaling == "weak" else 1 / n
    ideal = share * alone["seconds"]
    transfer = min(rank["communication"] for rank in ranks)
    waited = [
        rank["communication"] - transfer + step - rank["seconds"]
        for rank in ranks
    ]
    lost = {"communication": transfer, "imbalance": fmean(waited)}
    for part in ("data", "compute"):
        lost[part] = fmean(rank[part] for rank in ranks) - share * alone[part]
    return {
        "speedup": n * ideal / step,
        "efficiency": ideal / step,
        "lost": lost,
        "limit": max(lost, key=lost.get),
    }
