"""The checks of rung 11: the order of samples, the noise scale, how often to save, the failure zoo, and scaling."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import fmean

from lablib.calc.failures import lost_time
from lablib.calc.noise_scale import noise_scale as solve
from lablib.checks.failure_zoo import diagnose
from lablib.checks.report import Wrong, check, close
from lablib.checks.scaling_run import observe_scaling

#: What the lab and the tests use from here; two checks have their own modules.
__all__ = ["checkpoint_every", "diagnose", "next_samples", "noise_scale", "observe_scaling"]

# --- which samples a rank trains on ------------------------------------------------------------------------

Order = Callable[[int], list[int]]


def _orders(dice: random.Random, count: int) -> Order:
    seeds = [dice.random() for _ in range(9)]

    def epoch_order(epoch: int) -> list[int]:
        samples = list(range(count))
        random.Random(seeds[epoch]).shuffle(samples)
        return samples

    return epoch_order


@check
def next_samples(answer: Callable[..., list[int]], seed: int = 11) -> str:
    """Judge `next_samples(epoch_order, count, taken, batch, rank, ranks)` over runs whose number of ranks changes."""
    dice = random.Random(seed)
    runs = 0
    for count, batch in [(12, 4), (10, 4), (7, 6), *((dice.randint(5, 40), 12) for _ in range(12))]:
        order = _orders(dice, count)
        taken = 0
        for step in range(2 * count // batch + 2):
            ranks = dice.choice([n for n in (1, 2, 3, 4, 6) if batch % n == 0])
            _judge_step(answer, order, count, taken, batch, ranks, step)
            taken += batch
        runs += 1
    return f"{runs} runs that changed their number of ranks at every step."


def _judge_step(
    answer: Callable[..., list[int]], order: Order, count: int, taken: int, batch: int, ranks: int, step: int
) -> None:
    got = [answer(order, count, taken, batch, rank, ranks) for rank in range(ranks)]
    case = f"count={count}, taken={taken}, batch={batch}, {ranks} ranks"
    for rank, share in enumerate(got):
        if not isinstance(share, list) or not all(isinstance(sample, int) for sample in share):
            raise Wrong(f"Return a list of sample numbers; rank {rank} returned {type(share).__name__}.")
    places = [divmod(place, count) for place in range(taken, taken + batch)]
    right = [order(epoch)[position] for epoch, position in places]
    together = sorted(sample for share in got for sample in share)
    if together != sorted(right):
        _explain_samples(got, together, right, order, count, taken, batch, case)
    sizes = {len(share) for share in got}
    if sizes != {batch // ranks}:
        raise Wrong(f"Every rank takes {batch // ranks} samples, and these take {sorted(sizes)}: a rank with fewer "
                    f"waits in a collective that the others never call ({case}).")  # fmt: skip


def _explain_samples(
    got: list[list[int]],
    together: list[int],
    right: list[int],
    order: Order,
    count: int,
    taken: int,
    batch: int,
    case: str,
) -> None:
    if len(got) > 1 and all(sorted(share) == sorted(right) for share in got):
        raise Wrong(f"Every rank takes the whole batch: they would compute the same gradient ({case}).")
    epoch, position = divmod(taken, count)
    if taken and together == sorted(order(p // count)[p % count] for p in range(batch)):
        raise Wrong(
            f"The run begins again at its first sample: what was taken before does not count ({case})."
        )
    if epoch and together == sorted((order(0) * (epoch + 2))[taken : taken + batch]):
        raise Wrong(f"Every epoch has the order of the first; ask epoch_order for each of them ({case}).")
    if len(together) < batch and position + batch > count:
        raise Wrong(f"A batch that reaches the end of an epoch goes on in the next one: epochs follow each other "
                    f"without a gap ({case}).")  # fmt: skip
    if position + batch > count:
        raise Wrong(
            f"At the end of an epoch the batch goes on in the next epoch's order, from its beginning ({case})."
        )
    raise Wrong(f"Together the ranks must take samples {sorted(right)}, the next {batch} of the order, and take "
                f"{together}: the place in the order is `taken`, of all ranks together, and knows nothing of who took "
                f"them ({case}).")  # fmt: skip


# --- the gradient noise scale ------------------------------------------------------------------------------

_KEYS = ("signal", "noise", "examples")


@check
def noise_scale(answer: Callable[..., dict[str, float]], seed: int = 1812) -> str:
    """Judge `noise_scale(small, big, batch_small, batch_big)` by hand, then on random series of norms."""
    dice = random.Random(seed)
    cases: list[tuple[list[float], list[float], int, int]] = [([9, 5, 5, 1], [9, 4, 4, 1], 1, 2)]
    for _ in range(30):
        b, times, steps = dice.randint(1, 16), dice.randint(2, 8), dice.randint(2, 40)
        signal, noise = dice.uniform(1, 4), dice.uniform(1, 60)
        # Norms scatter by up to 20 percent, and signal stays positive: at most noise/b of the small norm is noise.
        small = [(signal + noise / b) * dice.uniform(0.98, 1.02) for _ in range(steps)]
        big = [(signal + noise / b / times) * dice.uniform(0.98, 1.02) for _ in range(steps)]
        if solve(small, big, batch_small=b, batch_big=b * times).signal > 0.1:
            cases.append((small, big, b, b * times))
    for case in cases:
        got = answer(list(case[0]), list(case[1]), *case[2:])
        if not isinstance(got, dict) or set(got) != set(_KEYS):
            raise Wrong(f"Return a dictionary with the keys {', '.join(_KEYS)}.")
        truth = solve(case[0], case[1], batch_small=case[2], batch_big=case[3])
        right = {"signal": truth.signal, "noise": truth.noise, "examples": truth.examples}
        # Differences of numbers that agree in up to two digits: 1e-9 is far above rounding.
        wrong = [key for key in _KEYS if not close(got[key], right[key], rel=1e-9)]
        if wrong:
            _explain_noise({key: float(got[key]) for key in _KEYS}, right, *case)
    return f"{len(cases)} series of norms, solved for signal and noise."


def _explain_noise(
    got: dict[str, float],
    right: dict[str, float],
    small: Sequence[float],
    big: Sequence[float],
    batch_small: int,
    batch_big: int,
) -> None:
    told = f"batches {batch_small} and {batch_big}, {len(small)} steps"
    each = [
        solve([s], [b], batch_small=batch_small, batch_big=batch_big) for s, b in zip(small, big, strict=True)
    ]
    near = {key: close(got[key], right[key], rel=1e-9) for key in _KEYS}
    if near["signal"] and near["noise"]:
        if all(one.signal for one in each) and close(
            got["examples"], fmean(one.noise / one.signal for one in each), rel=1e-9
        ):
            raise Wrong(
                f"A mean of ratios is not the ratio of the means, and is wrong on average: divide last ({told})."
            )
        if close(got["examples"] * got["noise"], got["signal"], rel=1e-9):
            raise Wrong(f"The noise scale is noise over signal, not signal over noise ({told}).")
        raise Wrong(f"The noise scale is noise over signal, both as you returned them ({told}).")
    if close(got["signal"], fmean(big), rel=1e-9):
        raise Wrong(
            f"The big batch's squared norm still has noise in it, tr(Σ)/B: take it out of the signal ({told})."
        )
    if close(got["noise"], fmean(small) - fmean(big), rel=1e-9):
        raise Wrong(
            f"The difference of the two norms is tr(Σ) times (1/b - 1/B), so divide by that ({told})."
        )
    if close(
        got["signal"],
        solve(small[:1], big[:1], batch_small=batch_small, batch_big=batch_big).signal,
        rel=1e-9,
    ):
        raise Wrong(f"One step says next to nothing: take the mean over all steps first ({told}).")
    raise Wrong(f"Solve |G_b|² = |G|² + tr(Σ)/b and |G_B|² = |G|² + tr(Σ)/B, with the means over all steps: signal is "
                f"{right['signal']:.4g} and noise {right['noise']:.4g} ({told}).")  # fmt: skip


# --- how often to save -------------------------------------------------------------------------------------

#: An answer may lose this much more time than the best one: Young's interval and Daly's both do less.
_SLACK = 1.02


@check
def checkpoint_every(answer: Callable[..., int], seed: int = 1974) -> str:
    """Judge `checkpoint_every(step_seconds, save_seconds, gpu_hours_between_failures, gpus)` by the time it loses."""
    dice = random.Random(seed)
    cases = [(1.0, 2.0, 10_000 / 3600, 1), (10.0, 60.0, 50_000.0, 16_384), (1000.0, 2.0, 40_000.0, 1024)]
    for _ in range(40):
        gpus = 2 ** dice.randint(0, 14)
        save = dice.uniform(1, 60)
        # The job runs 100 to 10,000 times as long between failures as it saves.
        hours = save * 10 ** dice.uniform(2, 4) * gpus / 3600
        cases.append((dice.uniform(0.2, 20), save, hours, gpus))
    for case in cases:
        step, save, hours, gpus = case
        steps = answer(*case)
        told = f"step {step:.3g} s, save {save:.3g} s, {hours:.3g} GPU-hours between failures, {gpus:,} GPUs"
        if not isinstance(steps, int) or isinstance(steps, bool):
            raise Wrong(f"Return a whole number of steps, not {steps!r} ({told}).")
        if steps < 1:
            raise Wrong(f"Save after one step at the earliest, not after {steps} ({told}).")
        mtbf = 3600 * hours / gpus
        best, least = _best_steps(step, save, mtbf)
        if _lost(steps, step, save, mtbf) > _SLACK * least:
            _explain_interval(steps, best, case, told)
    return f"{len(cases)} jobs, none of which loses more than {_SLACK - 1:.0%} over its least."


def _lost(steps: int, step: float, save: float, mtbf: float) -> float:
    # Beyond 50 failures an interval never ends; any large number says so.
    return lost_time(steps * step, cost=save, mtbf=mtbf).lost if steps * step < 50 * mtbf else 1e9


def _best_steps(step: float, save: float, mtbf: float) -> tuple[int, float]:
    """Return the best number of steps and its loss; one bowl, so the neighbours of Young's interval suffice."""
    guess = max(1, int((2 * save * mtbf) ** 0.5 / step))
    tried = {k: _lost(k, step, save, mtbf) for k in range(max(1, guess // 2), 2 * guess + 2)} if guess < 50 else {
        k: _lost(k, step, save, mtbf) for k in range(int(0.7 * guess), int(1.3 * guess), max(1, guess // 200))
    }  # fmt: skip
    best = min(tried, key=tried.__getitem__)
    return best, tried[best]


def _explain_interval(steps: int, best: int, case: tuple[float, float, float, int], told: str) -> None:
    step, save, hours, gpus = case

    def near(seconds: float) -> bool:
        return abs(steps - seconds / step) <= 0.02 * seconds / step + 1

    whole = 3600 * hours
    if gpus > 1 and near((2 * save * whole) ** 0.5):
        raise Wrong(
            f"Any one of the {gpus:,} GPUs stops the job, so it fails {gpus:,} times as often as one ({told})."
        )
    if near((2 * save * hours / gpus) ** 0.5):
        raise Wrong(f"The time between failures is in hours, all else in seconds ({told}).")
    if near((2 * save * whole / gpus) ** 0.5 * step) and step != 1:
        raise Wrong(f"That is seconds; the answer is in steps, and a step takes {step:.3g} s ({told}).")
    if near((save * whole / gpus) ** 0.5):
        raise Wrong(f"A failure destroys half an interval on average, not a whole one: that is where the 2 comes from "
                    f"({told}).")  # fmt: skip
    raise Wrong(f"Saving every {steps:,} steps loses more time than every {best:,}: weigh the seconds of saving in each "
                f"interval against half an interval of work per failure ({told}).")  # fmt: skip
