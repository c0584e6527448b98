"""Planted defects of rung 11: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import math
from itertools import cycle, islice, pairwise
from statistics import fmean, median

import numpy as np
import torch

from tests.planted import asked, listed, told


def _places(taken, batch):
    return range(taken, taken + batch)


class next_samples:
    def never_ends(epoch_order, count, taken, batch, rank, ranks):
        """Looks for the sample that it has already, epoch after epoch."""
        found, epoch = [], 0
        while len(found) < batch or epoch >= 0:
            found += epoch_order(epoch)
            epoch += 1
        return found

    def waits_for_samples(epoch_order, count, taken, batch, rank, ranks):
        """Asks for no epoch, and waits for what nobody adds."""
        found = []
        while len(found) < batch // ranks:
            pass
        return found

    def one_order_for_all_epochs(epoch_order, count, taken, batch, rank, ranks):
        return [epoch_order(0)[p % count] for p in _places(taken, batch)][rank::ranks]

    def its_own_seed(epoch_order, count, taken, batch, rank, ranks):
        """Every rank shuffles for itself: it takes the order of another epoch."""
        return [epoch_order(p // count + rank)[p % count] for p in _places(taken, batch)][rank::ranks]

    def resumes_at_the_epoch(epoch_order, count, taken, batch, rank, ranks):
        """What was taken of this epoch is forgotten."""
        return [epoch_order(p // count)[p % count] for p in _places(taken - taken % count, batch)][rank::ranks]

    def begins_again(epoch_order, count, taken, batch, rank, ranks):
        """A resumed run starts at the first sample."""
        return [epoch_order(p // count)[p % count] for p in _places(0, batch)][rank::ranks]

    def everybody_takes_all(epoch_order, count, taken, batch, rank, ranks):
        return [epoch_order(p // count)[p % count] for p in _places(taken, batch)]

    def all_take_the_first_share(epoch_order, count, taken, batch, rank, ranks):
        return [epoch_order(p // count)[p % count] for p in _places(taken, batch)][::ranks]

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

    def right_a_generator(epoch_order, count, taken, batch, rank, ranks):
        """Third solution: twelve epochs at once, walked through from the beginning."""
        walk = (sample for epoch in range(12) for sample in epoch_order(epoch))
        return tuple(islice(walk, taken + rank, taken + batch, ranks))

    def right_of_numpy(epoch_order, count, taken, batch, rank, ranks):
        """Arrays, and the ranks dealt from the last to the first."""
        epochs = [np.array(epoch_order(np.int64(epoch))) for epoch in range((taken + batch) // count + 1)]
        return np.concatenate(epochs)[taken : taken + batch].reshape(-1, ranks)[:, ranks - 1 - rank]


def _answer(signal, noise, examples=None):
    return {"signal": signal, "noise": noise, "examples": noise / signal if examples is None else examples}


def _solved(small, big, batch_small, batch_big):
    signal = (batch_big * big - batch_small * small) / (batch_big - batch_small)
    return signal, (small - big) / (1 / batch_small - 1 / batch_big)


def _of(mean):
    """Return an answer from the two numbers that `mean` makes of the squared norms."""
    return lambda small, big, batch_small, batch_big: _answer(*_solved(mean(small), mean(big), batch_small, batch_big))


_of_means = _of(fmean)


class noise_scale:
    def mean_of_ratios(small, big, batch_small, batch_big):
        each = [_solved(s, b, batch_small, batch_big) for s, b in zip(small, big, strict=True)]
        signal, noise = _solved(fmean(small), fmean(big), batch_small, batch_big)
        return _answer(signal, noise, fmean(n / s for s, n in each))

    medians = _of(median)
    upside_down = told(_of_means, lambda found: found | {"examples": 1 / found["examples"]})
    believes_the_big_batch = told(_of_means, lambda found, big: _answer(fmean(big), found["noise"]))
    difference_is_noise = told(_of_means, lambda found, small, big: _answer(found["signal"], fmean(small) - fmean(big)))
    first_step_only = _of(lambda norms: norms[0])
    squares_again = _of(lambda norms: fmean(norm * norm for norm in norms))

    # The noise of a step moves this mean by a ten-thousandth, which is more than rounding.
    geometric_means = _of(lambda norms: math.exp(fmean(map(math.log, norms))))

    # Takes b = 1, and the big batch for so many times one example.
    forgets_batch_sizes = asked(
        _of_means, batch_small=1, batch_big=lambda batch_small, batch_big: batch_big // batch_small
    )

    def right(small, big, batch_small, batch_big):
        """Second solution: subtract one equation from the other, then put the noise back."""
        a, b = sum(small) / len(small), sum(big) / len(big)
        noise = (a - b) * batch_small * batch_big / (batch_big - batch_small)
        signal = a - noise / batch_small
        return {"signal": signal, "noise": noise, "examples": noise / signal}

    def right_linear_system(small, big, batch_small, batch_big):
        """Third solution: two rows, two unknowns, and a solver."""
        rows = np.array([[1, 1 / batch_small], [1, 1 / batch_big]])
        signal, noise = np.linalg.solve(rows, [np.mean(small), np.mean(big)])
        return {"examples": noise / signal, "signal": signal, "noise": noise}

    # Torch's usual 32-bit floats.
    right_in_tensors = _of(lambda norms: torch.tensor(norms).float().mean())

    def right_step_by_step(small, big, batch_small, batch_big):
        """Each step solved by itself; the means of both are taken before the ratio."""
        each = [_solved(s, b, batch_small, batch_big) for s, b in zip(small, big, strict=True)]
        return _answer(fmean(s for s, _ in each), fmean(n for _, n in each))


def _young(seconds_between, save, step):
    return max(1, round(math.sqrt(2 * save * seconds_between) / step))


class checkpoint_every:
    as_if_one_gpu_failed_the_job = lambda step, save, hours, gpus: _young(3600 * hours, save, step)
    hours_for_seconds = lambda step, save, hours, gpus: _young(hours / gpus, save, step)
    seconds_for_steps = lambda step, save, hours, gpus: _young(3600 * hours / gpus, save, 1)
    more_gpus_fail_less = lambda step, save, hours, gpus: _young(3600 * hours * gpus, save, step)
    forgets_the_root = lambda step, save, hours, gpus: max(1, round(2 * save * 3600 * hours / gpus / step))

    def climbs_for_ever(step, save, hours, gpus):
        """Looks for the first interval that is worse, and never takes a step."""
        k = 1
        while save / (k * step) >= 0:
            k = max(1, k)
        return k

    def loses_the_whole_interval(step, save, hours, gpus):
        return max(1, round(math.sqrt(save * 3600 * hours / gpus) / step))

    hourly = lambda step, save, hours, gpus: max(1, round(3600 / step))
    saves_after_the_mtbf = lambda step, save, hours, gpus: max(1, int(3600 * hours / gpus / step))
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

    def right_tries_every_number(step, save, hours, gpus):
        """Walks through all intervals up to a failure, a few lines each."""
        mtbf = 3600 * hours / gpus

        def lost(k):
            seconds = k * step
            saving = save / seconds
            again = seconds / (2 * mtbf)
            return saving + again

        best = 1
        for k in range(2, int(mtbf / step)):
            if lost(k) < lost(best):
                best = k
        return best

    def right_daly(step, save, hours, gpus):
        """Third solution: Daly's series, rounded up, as a float that is whole."""
        mtbf = 3600 * hours / gpus
        x = math.sqrt(save / (2 * mtbf))
        return float(math.ceil((math.sqrt(2 * save * mtbf) * (1 + x / 3 + x * x / 9) - save) / step))

    def right_exact(step, save, hours, gpus):
        """The exact optimum, by halving where the derivative changes its sign."""
        mtbf, low, high = 3600 * hours / gpus, 0.0, 1.0
        for _ in range(60):
            x = (low + high) / 2
            low, high = (x, high) if 1 - math.exp(-x - save / mtbf) > x else (low, x)
        return np.int64(max(1, round(low * mtbf / step)))


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
    always_weak = lambda *case: _observed(*case, faster=lambda one, many, n: n * one / many)
    without_the_idea_waiting_is_transfer = lambda *case: _observed(*case, transfer=fmean)
    done_early_is_not_waiting = lambda *case: _observed(*case, rest=False)
    all_computing_is_lost = lambda *case: _observed(*case, ideal=False)

    def ideal_of_one_rank(alone, ranks, scaling):
        """In strong scaling too it takes the whole of one rank's work for a rank's share."""
        found = _observed(alone, ranks, scaling)
        right = _observed(alone, ranks, "weak")["lost"]
        return {**found, "lost": right, "limit": max(right, key=right.get)}

    names_the_smallest = lambda *case: _observed(*case, limit=min)

    # The part that is farthest from its ideal, to whichever side.
    names_a_gain = told(
        _observed, lambda found: found | {"limit": max(found["lost"], key=lambda part: abs(found["lost"][part]))}
    )
    lost_is_no_number = told(_observed, lambda found: found | {"lost": found["lost"] | {"data": math.nan}})

    def right_in_tensors(alone, ranks, scaling):
        """32-bit floats all the way, and each number an array of one."""
        keys = ("seconds", "data", "compute", "communication")
        table = torch.tensor([[rank[key] for key in keys] for rank in ranks], dtype=torch.float32)
        ideal = torch.tensor([alone[key] for key in keys], dtype=torch.float32)
        ideal = ideal / (1 if scaling == "weak" else len(ranks))
        step, moved = table[:, 0].max(), table[:, 3].min()
        lost = dict(zip(("data", "compute"), table[:, 1:3].mean(0) - ideal[1:3], strict=True))
        lost |= {"communication": moved, "imbalance": (step - table[:, 0] + table[:, 3] - moved).mean()}
        share = (ideal[0] / step).numpy().reshape(1)
        return {
            "speedup": len(ranks) * share,
            "efficiency": share,
            "lost": {part: value.numpy().reshape(1) for part, value in lost.items()},
            "limit": max(lost, key=lost.get),
        }

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

    def right_in_arrays(alone, ranks, scaling):
        """Third solution: a row a rank, a column a phase."""
        keys = ("seconds", "data", "compute", "communication")
        table = np.array([[rank[key] for key in keys] for rank in ranks])
        share = {"weak": 1.0, "strong": 1 / len(ranks)}[scaling]
        step, moved = table[:, 0].max(), table[:, 3].min()
        ideal = share * np.array([alone["data"], alone["compute"]])
        lost = dict(zip(("data", "compute"), table[:, 1:3].mean(axis=0) - ideal, strict=True))
        lost |= {"communication": moved, "imbalance": (step - table[:, 0] + table[:, 3] - moved).mean()}
        efficiency = ideal.sum() / step
        return {
            "speedup": np.float64(len(ranks) * efficiency),
            "efficiency": efficiency,
            "lost": lost,
            "limit": max(lost.items(), key=lambda pair: pair[1])[0],
        }


# The failure zoo: each diagnoses most jobs.

HEALTHY = "healthy"


def _hang(seen, *, by_calls=True, by_gap=True):
    same = all(a == b for a, b in zip(*seen.calls, strict=False))
    if by_calls and not same:
        return "mismatched collectives"
    gap = any(len({b - a for a, b in pairwise(n)}) > 1 for n in seen.batches)
    return "skipped batch" if gap and by_gap else "uneven data"


def _parted(seen):
    return seen.digests[0] != seen.digests[1]


def _late(seen, *, many="slow rank", few="straggler that comes and goes"):
    """Compares the ranks step by step."""
    far = [max(step) > 1.5 * min(step) for step in zip(*seen.flops, strict=True)]
    return None if not any(far) else many if all(far) else few


def _diagnose(
    seen,
    *,
    hang=_hang,
    most_state=0.6,
    steps=lambda seen: len(seen.losses[0]),
    reduces=lambda seen: [size for op, size in seen.calls[0] if op == "all_reduce"],
    dtype=True,
    parted=_parted,
    late=_late,
    norm=1e-2,
    first=1,
    again=True,
    seeds=True,
):
    if seen.hangs:
        return hang(seen)
    if again and any(max(numbers.count(n) for n in numbers) > 1 for numbers in seen.batches):
        return "data seen again"
    if seen.layout == "tensor parallel":
        return "equal seeds" if seeds and abs(seen.weight_norms[0] - seen.weight_norms[1]) < 1e-9 else HEALTHY
    if seen.sharded:
        large = max(seen.state_bytes) > most_state * 4 * seen.parameters
        return "unsharded parameter" if large else HEALTHY
    if len(reduces(seen)) > steps(seen):
        return "accumulation that communicates"
    if dtype and min(reduces(seen)) < 4 * seen.parameters:
        return "wrong-dtype reduction"
    if parted(seen):
        return "silent data corruption"
    if late(seen):
        return late(seen)
    off = zip(seen.norms[0][first:], seen.expected["norms"][first:], strict=True)
    if any(abs(a - b) > norm * b for a, b in off):
        return "forgotten zero_grad"
    return HEALTHY


class diagnose:
    every_hang_is_a_mismatch = lambda seen: _diagnose(seen, hang=lambda seen: "mismatched collectives")
    never_looks_at_operations = lambda seen: _diagnose(seen, hang=lambda seen: _hang(seen, by_calls=False))
    never_looks_at_batches = lambda seen: _diagnose(seen, hang=lambda seen: _hang(seen, by_gap=False))
    # Takes the bytes of the whole model for what a rank should keep.
    believes_in_one_copy_of_the_weights = lambda seen: _diagnose(seen, most_state=1.0)
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

    nobody_is_slow = lambda seen: _diagnose(seen, late=lambda seen: None)
    slow_once_is_slow = lambda seen: _diagnose(seen, late=lambda seen: _late(seen, few="slow rank"))
    slow_now_and_then = lambda seen: _diagnose(
        seen, late=lambda seen: _late(seen, many="straggler that comes and goes")
    )

    def means_over_steps(seen):
        """Ranks that are late in turn are alike in the mean."""

        def late(seen):
            low, high = sorted(fmean(steps) for steps in seen.flops)
            return "slow rank" if high > 2 * low else "straggler that comes and goes" if high > 1.01 * low else None

        return _diagnose(seen, late=late)

    def slow_in_the_first_step(seen):
        return _diagnose(seen, late=lambda seen: "slow rank" if seen.flops[0][0] != seen.flops[1][0] else None)

    def looks_for_corruption_in_the_final_loss(seen):
        found = _diagnose(seen, parted=lambda seen: False)
        moved = abs(seen.job_losses[-1] / seen.expected["losses"][-1] - 1) > 1e-3 if found == HEALTHY else False
        return "silent data corruption" if moved else found

    # Compares the norms of the gradients, which the ranks have added up.
    looks_for_corruption_in_the_norms = lambda seen: _diagnose(seen, parted=lambda seen: seen.norms[0] != seen.norms[1])
    believes_the_first_checksums = lambda seen: _diagnose(
        seen, parted=lambda seen: seen.digests[0][0] != seen.digests[1][0]
    )

    def halves_are_no_copies(seen):
        """Each rank of FSDP2 and of tensor parallelism has a part of its own, and a checksum with it."""
        return "silent data corruption" if not seen.hangs and _parted(seen) else _diagnose(seen)

    norms_to_the_bit = lambda seen: _diagnose(seen, norm=0.0)
    everything_is_well = lambda seen: HEALTHY
    believes_the_loader = lambda seen: _diagnose(seen, again=False)
    never_compares_the_halves = lambda seen: _diagnose(seen, seeds=False)

    def equal_norms_are_equal_seeds(seen):
        """Copies of a model begin with the same weights too, and must."""
        same = seen.weight_norms[0] == seen.weight_norms[1]
        return "equal seeds" if same and not seen.hangs else _diagnose(seen)

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
            ("data seen again", any(len(n) != len(set(n)) for n in seen.batches)),
            ("equal seeds", seen.layout == "tensor parallel" and seen.weight_norms[0] == seen.weight_norms[1]),
            (HEALTHY, seen.layout == "tensor parallel"),
            ("unsharded parameter", seen.sharded and sum(seen.state_bytes) > 1.2 * 4 * seen.parameters),
            ("silent data corruption", not seen.sharded and seen.digests[0][-1:] != seen.digests[1][-1:]),
            ("slow rank", max(map(sum, seen.flops)) > 1.5 * min(map(sum, seen.flops))),
            ("straggler that comes and goes", sum(seen.job_flops) > 1.01 * max(map(sum, seen.flops))),
            ("accumulation that communicates", not seen.sharded and len(sizes[0]) >= 2 * len(norms)),
            ("wrong-dtype reduction", not seen.sharded and sizes[0] and sizes[0][0] == 2 * seen.parameters),
            ("forgotten zero_grad", not seen.sharded and any(a > 1.02 * b or b > 1.02 * a for a, b in pairs)),
        ]
        return next((name for name, true in suspicions if true), HEALTHY)

    def right_by_layout(seen):
        """Third solution: what the job should have done is written down, by its layout, and compared."""
        if seen.hangs:
            together = min(len(calls) for calls in seen.calls)
            if len({tuple(calls[:together]) for calls in seen.calls}) > 1:
                return "mismatched collectives"
            whole = sum(len(range(n[0], n[-1] + 1, 2)) for n in seen.batches)
            return "uneven data" if whole == sum(map(len, seen.batches)) else "skipped batch"
        steps, ranks = len(seen.losses[0]), len(seen.losses)
        if seen.layout == "tensor parallel":
            drift = max(abs(a / b - 1) for a, b in zip(seen.job_losses, seen.expected["losses"], strict=True))
            return "equal seeds" if drift > 1e-3 else HEALTHY
        if seen.layout == "sharded":
            return HEALTHY if sum(seen.state_bytes) < 1.1 * 4 * seen.parameters else "unsharded parameter"
        if {n for each in seen.batches for n in each} != set(range(steps * ranks * seen.micro_batches)):
            return "data seen again"
        if len({tuple(digests) for digests in seen.digests}) == ranks:
            return "silent data corruption"
        work = np.array(seen.flops)
        if work.std(axis=0).any():  # some step, and if one rank is always ahead, every step
            return "slow rank" if np.ptp(work, axis=1).max() == 0 else "straggler that comes and goes"
        reduced = [size for op, size in seen.calls[0] if op == "all_reduce"]
        if len(reduced) != steps:
            return "accumulation that communicates"
        if set(reduced) != {4 * seen.parameters}:
            return "wrong-dtype reduction"
        wrong = zip(seen.job_norms, seen.expected["norms"], strict=True)
        return "forgotten zero_grad" if any(abs(math.log(a / b)) > 1e-3 for a, b in wrong) else HEALTHY


def _audit(report, *, peak="dense_peak", scores=12, padding=1):
    """The number by the formula, with the slip that was asked for, and the right name."""

    def mfu(peak=peak, scores=scores, padding=padding, passes=3):
        tokens = report["positions"] - padding * report["padding"]
        flops = passes / 3 * (6 * report["parameters"] + scores * report["layers"] * report["hidden"] * report["seq"])
        return tokens * flops / report["seconds"] / report["gpus"] / report[peak]

    usual = {"peak": "dense_peak", "scores": 12, "padding": 1}
    names = {
        "honest": {}, "sparse peak": {"peak": "sparse_peak"}, "attention left out": {"scores": 0},
        "attention twice": {"scores": 24}, "padding counted": {"padding": 0}, "recomputation counted": {"passes": 4},
    }  # fmt: skip
    name = min(names, key=lambda each: abs(mfu(**{**usual, **names[each]}) - report["mfu"]))
    return mfu(), name


class audit_mfu:
    in_percent = told(_audit, lambda found: (100 * found[0], found[1]))
    takes_the_sparse_peak = lambda report: _audit(report, peak="sparse_peak")

    # HFU for MFU.
    counts_what_the_gpu_runs = told(
        _audit, lambda found, report: (found[0] * (4 / 3 if report["recompute"] == "full" else 1), found[1])
    )
    six_nd = lambda report: _audit(report, scores=0)
    attention_of_all_heads_twice = lambda report: _audit(report, scores=24)
    padding_is_work_too = lambda report: _audit(report, padding=0)
    the_pairs_that_a_mask_leaves = lambda report: _audit(report, scores=6)
    of_one_gpu = asked(_audit, report=lambda report: report | {"gpus": 1})
    forward_alone = told(_audit, lambda found: (found[0] / 3, found[1]))
    believes_every_report = told(_audit, lambda found: (found[0], "honest"))
    suspects_every_report = told(_audit, lambda found: (found[0], "sparse peak" if found[1] == "honest" else found[1]))
    never_looks_at_padding = told(
        _audit, lambda found: (found[0], "recomputation counted" if found[1] == "padding counted" else found[1])
    )

    def right(report):
        """Second solution: what the claim is of the right number, and which mistake has that ratio."""
        right = _audit(report)[0]
        weights, scores = 6 * report["parameters"], 12 * report["layers"] * report["hidden"] * report["seq"]
        ratios = {
            1.0: "honest",
            4 / 3: "recomputation counted",
            report["dense_peak"] / report["sparse_peak"]: "sparse peak",
            report["positions"] / (report["positions"] - report["padding"]): "padding counted",
            weights / (weights + scores): "attention left out",
            (weights + 2 * scores) / (weights + scores): "attention twice",
        }
        if not report["padding"]:
            ratios[1.0] = "honest"
        found = min(ratios, key=lambda ratio: abs(math.log(ratio * right / report["mfu"])))
        return [np.float64(right), ratios[found]]

    def right_one_after_the_other(report):
        """Third solution: each suspicion is tested by itself, within a percent."""
        right, claim = _audit(report)[0], report["mfu"]
        tests = [
            ("honest", right),
            ("sparse peak", _audit(report, peak="sparse_peak")[0]),
            ("padding counted", _audit(report, padding=0)[0]),
            ("attention left out", _audit(report, scores=0)[0]),
            ("attention twice", _audit(report, scores=24)[0]),
        ]
        return right, next((name for name, value in tests if math.isclose(value, claim, rel_tol=0.01)),
                           "recomputation counted")  # fmt: skip


DEFECTS, SECOND_SOLUTIONS = listed(observe_scaling, next_samples, noise_scale, checkpoint_every, diagnose, audit_mfu)
#: What the learner reads of some of them.
SENTENCES = {
    "medians": "not for medians",
    "the_pairs_that_a_mask_leaves": "which counts all pairs",
    "never_ends": "your loop does not end",
    "names_a_gain": "limits nothing",
    "all_take_the_first_share": "the same samples",
    "waits_for_samples": "It never ends",
    "climbs_for_ever": "It never ends",
    "one_order_for_all_epochs": "Every epoch has the order of the first",
    "more_gpus_fail_less": "not multiplied",
    "forgets_the_root": "square root",
    "squares_again": "squared norms already",
    "in_percent": "That is in percent",
    "of_one_gpu": "divide by the peak of all of them",
    "forward_alone": "Backward takes twice the FLOPs of forward",
    "six_nd": "'attention left out'",
    "padding_is_work_too": "'padding counted'",
    "takes_the_sparse_peak": "'sparse peak'",
    "begins_again": "begins again at its first sample",
    "believes_the_loader": "trains on the same batch numbers twice",
    "never_compares_the_halves": "drawn with the same norm",
    "loses_the_whole_interval": "half an interval on average",
    "hours_for_seconds": "is in hours",
}
