"""Planted defects of rung 11: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import math
from itertools import cycle, islice, pairwise
from statistics import fmean

from tests.planted import listed


def _places(taken, batch):
    return range(taken, taken + batch)


class next_samples:
    def begins_again(epoch_order, count, taken, batch, rank, ranks):
        """A resumed run starts at the first sample."""
        return [epoch_order(p // count)[p % count] for p in _places(0, batch)][rank::ranks]

    def everybody_takes_all(epoch_order, count, taken, batch, rank, ranks):
        return [epoch_order(p // count)[p % count] for p in _places(taken, batch)]

    def drops_the_end_of_the_epoch(epoch_order, count, taken, batch, rank, ranks):
        epoch, place = divmod(taken, count)
        return epoch_order(epoch)[place : place + batch][rank::ranks]

    def each_rank_counts_its_own(epoch_order, count, taken, batch, rank, ranks):
        """Every rank owns a part of the data and counts batches in it, as a loader per rank does."""
        epoch, place = divmod(taken, count)
        own = epoch_order(epoch)[rank::ranks] + epoch_order(epoch + 1)[rank::ranks]
        mine = place // ranks
        return own[mine : mine + batch // ranks]

    def a_part_of_the_epoch_each(epoch_order, count, taken, batch, rank, ranks):
        """Rank r trains on the r-th part of the epoch: whoever joins later gets samples that were taken."""
        epoch, place = divmod(taken, count)
        order = epoch_order(epoch)
        part = order[rank * count // ranks : (rank + 1) * count // ranks] or order
        return list(islice(cycle(part), place // ranks, place // ranks + batch // ranks))

    def right(epoch_order, count, taken, batch, rank, ranks):
        """Second solution: a contiguous share, from an order that goes on over epochs."""
        last = (taken + batch - 1) // count
        endless = [sample for epoch in range(last + 1) for sample in epoch_order(epoch)]
        share = batch // ranks
        first = taken + rank * share
        return endless[first : first + share]


def _answer(signal, noise, examples=None):
    return {"signal": signal, "noise": noise, "examples": noise / signal if examples is None else examples}


def _solved(small, big, batch_small, batch_big):
    signal = (batch_big * big - batch_small * small) / (batch_big - batch_small)
    return signal, (small - big) / (1 / batch_small - 1 / batch_big)


class noise_scale:
    def mean_of_ratios(small, big, batch_small, batch_big):
        each = [_solved(s, b, batch_small, batch_big) for s, b in zip(small, big, strict=True)]
        signal, noise = _solved(fmean(small), fmean(big), batch_small, batch_big)
        return _answer(signal, noise, fmean(n / s for s, n in each))

    def upside_down(small, big, batch_small, batch_big):
        signal, noise = _solved(fmean(small), fmean(big), batch_small, batch_big)
        return _answer(signal, noise, signal / noise)

    def believes_the_big_batch(small, big, batch_small, batch_big):
        _, noise = _solved(fmean(small), fmean(big), batch_small, batch_big)
        return _answer(fmean(big), noise)

    def difference_is_noise(small, big, batch_small, batch_big):
        signal, _ = _solved(fmean(small), fmean(big), batch_small, batch_big)
        return _answer(signal, fmean(small) - fmean(big))

    def first_step_only(small, big, batch_small, batch_big):
        return _answer(*_solved(small[0], big[0], batch_small, batch_big))

    def forgets_batch_sizes(small, big, batch_small, batch_big):
        """Takes b = 1, and the big batch for so many times one example."""
        return _answer(*_solved(fmean(small), fmean(big), 1, batch_big // batch_small))

    def right(small, big, batch_small, batch_big):
        """Second solution: subtract one equation from the other, then put the noise back."""
        a, b = sum(small) / len(small), sum(big) / len(big)
        noise = (a - b) * batch_small * batch_big / (batch_big - batch_small)
        signal = a - noise / batch_small
        return {"signal": signal, "noise": noise, "examples": noise / signal}


def _young(seconds_between, save, step):
    return max(1, round(math.sqrt(2 * save * seconds_between) / step))


class checkpoint_every:
    as_if_one_gpu_failed_the_job = lambda step, save, hours, gpus: _young(3600 * hours, save, step)
    hours_for_seconds = lambda step, save, hours, gpus: _young(hours / gpus, save, step)
    seconds_for_steps = lambda step, save, hours, gpus: _young(3600 * hours / gpus, save, 1)

    def loses_the_whole_interval(step, save, hours, gpus):
        return max(1, round(math.sqrt(save * 3600 * hours / gpus) / step))

    hourly = lambda step, save, hours, gpus: max(1, round(3600 / step))
    may_be_zero = lambda step, save, hours, gpus: int(math.sqrt(2 * save * 3600 * hours / gpus) / step)

    def right(step, save, hours, gpus):
        """Second solution: try intervals that grow by a hundredth, with the loss to first order."""
        mtbf = 3600 * hours / gpus
        tried, k = [], 1.0
        while k * step < 4 * mtbf:
            steps = max(1, round(k))
            tried.append((save / (steps * step) + steps * step / (2 * mtbf), steps))
            k *= 1.01
        return min(tried)[1] if tried else 1


def _observed(
    alone,
    ranks,
    scaling,
    *,
    longest=max,
    per_rank=True,
    transfer=min,
    rest=True,
    ideal=True,
    share=None,
    faster=None,
    limit=max,
):
    n = len(ranks)
    step = longest([rank["seconds"] for rank in ranks])
    part = share or (1 if scaling == "weak" else 1 / n)
    speed = faster(alone["seconds"], step, n) if faster else n * part * alone["seconds"] / step
    sent = [rank["communication"] for rank in ranks]
    moved = transfer(sent)
    waits = [
        c - min(sent) + (max(r["seconds"] for r in ranks) - r["seconds"]) * rest
        for c, r in zip(sent, ranks, strict=True)
    ]
    lost = {"communication": moved, "imbalance": fmean(waits)}
    for name in ("data", "compute"):
        lost[name] = fmean(rank[name] for rank in ranks) - part * alone[name] * ideal
    efficiency = speed / n if per_rank else speed
    return {"speedup": speed, "efficiency": efficiency, "lost": lost, "limit": limit(lost, key=lost.get)}


class observe_scaling:
    speedup_for_efficiency = lambda *case: _observed(*case, per_rank=False)
    mean_step = lambda *case: _observed(*case, longest=fmean)

    def always_weak(alone, ranks, scaling):
        return _observed(alone, ranks, scaling, faster=lambda one, many, n: n * one / many)

    waiting_is_transfer = lambda *case: _observed(*case, transfer=fmean)
    done_early_is_not_waiting = lambda *case: _observed(*case, rest=False)
    all_computing_is_lost = lambda *case: _observed(*case, ideal=False)

    def ideal_of_one_rank(alone, ranks, scaling):
        """In strong scaling too it takes the whole of one rank's work for a rank's share."""
        found = _observed(alone, ranks, scaling)
        right = _observed(alone, ranks, "weak")["lost"]
        return {**found, "lost": right, "limit": max(right, key=right.get)}

    names_the_smallest = lambda *case: _observed(*case, limit=min)

    def right(alone, ranks, scaling):
        """Second solution: imbalance is what the other parts leave of the step."""
        n, step = len(ranks), sorted(rank["seconds"] for rank in ranks)[-1]
        work = 1 if scaling == "strong" else n
        speed = work * alone["seconds"] / step
        each = {name: sum(rank[name] for rank in ranks) / n for name in ("data", "compute")}
        lost = {name: value - alone[name] * work / n for name, value in each.items()}
        lost["communication"] = sorted(rank["communication"] for rank in ranks)[0]
        lost["imbalance"] = step - each["data"] - each["compute"] - lost["communication"]
        limit = sorted(lost, key=lambda name: -lost[name])[0]
        return {"speedup": speed, "efficiency": speed / n, "lost": lost, "limit": limit}


# The failure zoo: each diagnoses most jobs.

HEALTHY = "healthy"


def _hang(seen, *, by_calls=True, by_gap=True):
    same = all(a == b for a, b in zip(*seen.calls, strict=False))
    if by_calls and not same:
        return "mismatched collectives"
    gap = any(len({b - a for a, b in pairwise(n)}) > 1 for n in seen.batches)
    return "skipped batch" if gap and by_gap else "uneven data"


def _diagnose(
    seen,
    *,
    hang=_hang,
    most_state=0.6,
    steps=lambda seen: len(seen.losses[0]),
    reduces=lambda seen: [size for op, size in seen.calls[0] if op == "all_reduce"],
    dtype=True,
    work=1.5,
    norm=1e-2,
    first=1,
):
    if seen.hangs:
        return hang(seen)
    if seen.sharded:
        large = max(seen.state_bytes) > most_state * 4 * seen.parameters
        return "unsharded parameter" if large else HEALTHY
    if len(reduces(seen)) > steps(seen):
        return "accumulation that communicates"
    if dtype and min(reduces(seen)) < 4 * seen.parameters:
        return "wrong-dtype reduction"
    flops = [ranks[0] for ranks in seen.flops]
    if max(flops) > work * min(flops):
        return "slow rank"
    off = zip(seen.norms[0][first:], seen.expected["norms"][first:], strict=True)
    if any(abs(a - b) > norm * b for a, b in off):
        return "forgotten zero_grad"
    return HEALTHY


class diagnose:
    every_hang_is_a_mismatch = lambda seen: _diagnose(seen, hang=lambda seen: "mismatched collectives")
    never_looks_at_operations = lambda seen: _diagnose(seen, hang=lambda seen: _hang(seen, by_calls=False))
    never_looks_at_batches = lambda seen: _diagnose(seen, hang=lambda seen: _hang(seen, by_gap=False))

    def believes_in_one_copy_of_the_weights(seen):
        """Takes the bytes of the whole model for what a rank should keep."""
        return _diagnose(seen, most_state=1.0)

    expects_a_half_to_the_byte = lambda seen: _diagnose(seen, most_state=0.5 - 1e-9)

    def one_reduction_per_micro_batch(seen):
        return _diagnose(seen, steps=lambda seen: len(seen.losses[0]) * seen.micro_batches)

    never_looks_at_bytes = lambda seen: _diagnose(seen, dtype=False)

    def only_the_losses(seen):
        """Says wrong dtype whenever the losses move a little."""
        found = _diagnose(seen, dtype=False)
        means = [sum(ranks) / len(ranks) for ranks in zip(*seen.losses, strict=False)]
        moved = any(a != b for a, b in zip(means, seen.expected["losses"], strict=False))
        return "wrong-dtype reduction" if found == HEALTHY and moved else found

    nobody_is_slow = lambda seen: _diagnose(seen, work=math.inf)
    norms_to_the_bit = lambda seen: _diagnose(seen, norm=0.0)
    everything_is_well = lambda seen: HEALTHY

    def right(seen):
        """Second solution: a list of suspicions, the first true one wins."""
        calls = seen.calls
        rounds = min(map(len, calls))
        sizes = [[size for op, size in each if op == "all_reduce"] for each in calls]
        norms = seen.norms[0]
        pairs = list(zip(norms, seen.expected["norms"], strict=False))
        last = {r: numbers[-1] - numbers[0] for r, numbers in enumerate(seen.batches)}
        suspicions = [
            ("mismatched collectives", seen.hangs and calls[0][:rounds] != calls[1][:rounds]),
            ("skipped batch", seen.hangs and any(last[r] != 2 * (len(n) - 1) for r, n in enumerate(seen.batches))),
            ("uneven data", seen.hangs),
            ("unsharded parameter", seen.sharded and sum(seen.state_bytes) > 1.2 * 4 * seen.parameters),
            ("slow rank", max(map(sum, seen.flops)) > 1.5 * min(map(sum, seen.flops))),
            ("accumulation that communicates", not seen.sharded and len(sizes[0]) >= 2 * len(norms)),
            ("wrong-dtype reduction", not seen.sharded and sizes[0] and sizes[0][0] == 2 * seen.parameters),
            ("forgotten zero_grad", not seen.sharded and any(a > 1.02 * b or b > 1.02 * a for a, b in pairs)),
        ]
        return next((name for name, true in suspicions if true), HEALTHY)


DEFECTS, SECOND_SOLUTIONS = listed(observe_scaling, next_samples, noise_scale, checkpoint_every, diagnose)
