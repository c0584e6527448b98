"""Planted defects of rung 11: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

from itertools import cycle, islice
from math import sqrt
from statistics import fmean

from tests import defects_failure_zoo as _zoo
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


def rank_by_rank(epoch_order, count, taken, batch, rank, ranks):
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


def by_elimination(small, big, batch_small, batch_big):
    """Second solution: subtract one equation from the other, then put the noise back."""
    a, b = sum(small) / len(small), sum(big) / len(big)
    noise = (a - b) * batch_small * batch_big / (batch_big - batch_small)
    signal = a - noise / batch_small
    return {"signal": signal, "noise": noise, "examples": noise / signal}


def _young(seconds_between, save, step):
    return max(1, round(sqrt(2 * save * seconds_between) / step))


class checkpoint_every:
    as_if_one_gpu_failed_the_job = lambda step, save, hours, gpus: _young(3600 * hours, save, step)
    hours_for_seconds = lambda step, save, hours, gpus: _young(hours / gpus, save, step)
    seconds_for_steps = lambda step, save, hours, gpus: _young(3600 * hours / gpus, save, 1)

    def loses_the_whole_interval(step, save, hours, gpus):
        return max(1, round(sqrt(save * 3600 * hours / gpus) / step))

    hourly = lambda step, save, hours, gpus: max(1, round(3600 / step))
    may_be_zero = lambda step, save, hours, gpus: int(sqrt(2 * save * 3600 * hours / gpus) / step)


def by_search(step, save, hours, gpus):
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


def by_what_is_left(alone, ranks, scaling):
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


DEFECTS = listed(observe_scaling, next_samples, noise_scale, checkpoint_every) | _zoo.DEFECTS
SECOND_SOLUTIONS = {
    "next_samples": rank_by_rank,
    "noise_scale": by_elimination,
    "checkpoint_every": by_search,
    "observe_scaling": by_what_is_left,
    **_zoo.SECOND_SOLUTIONS,
}
