"""The checks of rung 11: the order of samples, how often to save, the noise scale, the failure zoo, MFU, and scaling.

`diagnose` leaves healthy twins alone. `observe_scaling` is the Done-when of the rung: say what a run on several ranks
gained, what it lost, and to what. It begins with timelines whose answer is known; then comes the learner's report of a
real model on GPUs or, where there is none, a small job on CPU ranks.
"""

from __future__ import annotations

import copy
import functools
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NoReturn

from lablib.calc.runs import ScalingLoss, lost_time, scaling_loss
from lablib.calc.runs import noise_scale as solve
from lablib.checks.judging import Order, Wrong, by_name, check, close, epoch_orders, numbers, recognize, refuse, whole
from lablib.launch.failure_zoo import FAULTS, HEALTHY, Setting, Symptoms, run_programs
from lablib.launch.ranks import run_ranks
from lablib.launch.runs import describe_machine, gpu_report, read_run, scaling_records
from lablib.launch.training import TrainConfig, Trainer

__all__ = ["audit_mfu", "checkpoint_every", "diagnose", "next_samples", "noise_scale", "observe_scaling"]


def _float(value: Any) -> float:
    """Return a number for a sentence; `float` alone refuses an array of one number."""
    return float(value.item() if hasattr(value, "item") else value)


# --- which samples a rank trains on -------------------------------------------------------------------------


@check(
    idea="Think of one endless list of samples, epoch after epoch, in which `taken` says how far all ranks have come.",
    section="The trainer: a fixed global batch, and an order of data that ignores ranks",
    line="Write down the next `batch` places of the endless order, whose epoch and position follow from the place, and "
    "take every `ranks`-th of them.",
)
def next_samples(answer: Callable[..., list[int]], seed: int = 11) -> str:
    """Judge `next_samples(epoch_order, count, taken, batch, rank, ranks)` over runs whose number of ranks changes."""
    dice = random.Random(seed)
    runs = 0
    for count, batch in [(12, 4), (10, 4), (7, 6), *((dice.randint(5, 40), 12) for _ in range(12))]:
        order = epoch_orders(dice, count)
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
    case = f"count={count}, taken={taken}, batch={batch}, {ranks} ranks"
    of_order = functools.partial(answer, order)  # so that `ask` shows the numbers of a case, and no function
    got = []
    for rank in range(ranks):
        share = numbers(of_order(count, taken, batch, rank, ranks), f"What rank {rank} takes")
        got.append([whole(sample, f"A sample of rank {rank}") for sample in share])
    places = [divmod(place, count) for place in range(taken, taken + batch)]
    right = [order(epoch)[position] for epoch, position in places]
    together = sorted(sample for share in got for sample in share)
    if together != sorted(right):
        _explain_samples(got, together, right, order, count, taken, batch, case)
    sizes = {len(share) for share in got}
    refuse(case, (f"Every rank takes {batch // ranks} of the {batch} samples, and these take {sorted(sizes)}: a rank with fewer "
                  "waits in a collective that the others never call", sizes != {batch // ranks}))  # fmt: skip


def _explain_samples(
    got: list[list[int]],
    together: list[int],
    right: list[int],
    order: Order,
    count: int,
    taken: int,
    batch: int,
    case: str,
) -> NoReturn:
    epoch, position = divmod(taken, count)
    over, shares = position + batch > count, [sorted(share) for share in got]
    refuse(
        case,
        ("Every rank takes the whole batch: they would compute the same gradient",
         len(got) > 1 and all(share == sorted(right) for share in shares)),
        ("Every rank takes the same samples, whatever `rank` is",
         len(got) > 1 and all(share == shares[0] for share in shares)),
        ("Every epoch has the order of the first; ask epoch_order for each of them",
         epoch and together == sorted((order(0) * (epoch + 2))[taken : taken + batch])),
        ("The run begins again at its first sample: what was taken before does not count",
         taken and together == sorted(order(p // count)[p % count] for p in range(batch))),
        ("A batch that reaches the end of an epoch goes on in the next one: epochs follow each other without a gap",
         len(together) < batch and over),
        ("At the end of an epoch the batch goes on in the next epoch's order, from its beginning", over),
        (f"Together the ranks must take samples {sorted(right)}, the next {batch} of the order, and take {together}: the place "
         "in the order is `taken`, of all ranks together, and knows nothing of who took them", True),
    )  # fmt: skip


# --- how often to save --------------------------------------------------------------------------------------

#: An answer may lose this much more time than the best one: Young's interval and Daly's both do less.
_SLACK = 1.02


@check(
    idea="Saving often costs the time of saving, saving seldom the work since the last checkpoint; at the best interval "
    "the two are equal.",
    section="Young's rule: how often to save",
    line="Turn the failures of one GPU into seconds between failures of the job, take the square root of twice that times "
    "the cost of a checkpoint, and divide by a step's seconds, rounding to at least one step.",
)
def checkpoint_every(answer: Callable[..., int], seed: int = 1974) -> str:
    """Judge `checkpoint_every(step_seconds, save_seconds, gpu_hours_between_failures, gpus)` by the time it loses."""
    dice = random.Random(seed)
    cases = [(1.0, 2.0, 10_000 / 3600, 1), (10.0, 60.0, 50_000.0, 16_384), (1000.0, 2.0, 40_000.0, 1024)]
    for _ in range(40):
        gpus = 2 ** dice.randint(0, 14)
        save = dice.uniform(1, 60)
        # The job runs 100 to 10,000 times as long between failures as it saves.
        hours = save * 10 ** dice.uniform(2, 4) * gpus / 3600
        # A search that tries every number of steps up to a failure comes to its end, too.
        step = max(dice.uniform(0.2, 20), 3600 * hours / gpus / 20_000)
        cases.append((step, save, hours, gpus))
    for case in cases:
        step, save, hours, gpus = case
        returned = answer(*case)
        told = f"step {step:.3g} s, save {save:.3g} s, {hours:.3g} GPU-hours between failures, {gpus:,} GPUs"
        steps = whole(returned, f"The number of steps between checkpoints ({told})")
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


def _explain_interval(steps: int, best: int, case: tuple[float, float, float, int], told: str) -> NoReturn:
    step, save, hours, gpus = case
    mtbf, one_gpu = 3600 * hours / gpus, 3600 * hours

    def near(seconds: float) -> bool:
        return abs(steps - seconds / step) <= 0.02 * seconds / step + 1

    def young(between: float) -> bool:
        return near((2 * save * between) ** 0.5)

    refuse(
        told,
        (f"Any of the {gpus:,} GPUs stops the job, which fails so many times as often", gpus > 1 and young(one_gpu)),
        (f"More GPUs fail more often: the job's time between failures is that of one GPU divided by {gpus:,}, not multiplied",
         gpus > 1 and young(one_gpu * gpus)),
        ("The time between failures is in hours, all else in seconds", young(hours / gpus) or young(60 * hours / gpus)),
        ("The interval is the square root of that: seconds times seconds are no seconds", near(2 * save * mtbf)),
        (f"That is seconds, and the answer is in steps of {step:.3g} s",
         step != 1 and near((2 * save * mtbf) ** 0.5 * step)),
        ("A failure destroys half an interval on average, not a whole one: that is where the 2 comes from", young(mtbf / 2)),
        (f"Saving {'every step' if steps == 1 else f'every {steps:,} steps'} loses more time than every {best:,}: weigh the "
         "seconds of saving in each interval against half an interval of work per failure", True),
    )  # fmt: skip


# --- the gradient noise scale -------------------------------------------------------------------------------

_NOISE_KEYS = ("signal", "noise", "examples")


@check(
    idea="Each squared norm is the signal plus the noise over the batch size: two batch sizes are two equations.",
    section="When the global batch grows: the gradient noise scale",
    line="Take the mean of each series first, solve the two equations for signal and noise, and divide last.",
)
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
        got = by_name(answer(list(case[0]), list(case[1]), *case[2:]), *_NOISE_KEYS)
        truth = solve(case[0], case[1], batch_small=case[2], batch_big=case[3])
        right = {"signal": truth.signal, "noise": truth.noise, "examples": truth.examples}
        off = _rounding(*case)
        wrong = [key for key in _NOISE_KEYS if not close(got[key], right[key], rel=off[key] / abs(right[key]))]
        if wrong:
            _explain_noise({key: _float(got[key]) for key in _NOISE_KEYS}, right, *case)
    return f"{len(cases)} series of norms, solved for signal and noise."


def _rounding(small: Sequence[float], big: Sequence[float], batch_small: int, batch_big: int) -> dict[str, float]:
    """Return how far 32-bit floats may be off: a mean by 1e-6 of itself, and the differences of two by more."""
    mean = 1e-6 * fmean(small)
    signal = mean * (batch_big + batch_small) / (batch_big - batch_small)
    noise = 2 * mean / (1 / batch_small - 1 / batch_big)
    truth = solve(small, big, batch_small=batch_small, batch_big=batch_big)
    return {"signal": signal, "noise": noise, "examples": noise / truth.signal + truth.examples * signal / truth.signal}


def _squares(norms: Sequence[float]) -> list[float]:
    return [norm * norm for norm in norms]


def _explain_noise(
    got: dict[str, float], right: dict[str, float], small: Sequence[float], big: Sequence[float], b: int, times_b: int
) -> NoReturn:
    sizes = {"batch_small": b, "batch_big": times_b}
    each = [solve([one], [other], **sizes) for one, other in zip(small, big, strict=True)]
    off = _rounding(small, big, b, times_b)
    near = {key: close(got[key], right[key], rel=off[key] / abs(right[key])) for key in _NOISE_KEYS}
    both = near["signal"] and near["noise"]

    def signal(small: Sequence[float], big: Sequence[float]) -> bool:
        return close(got["signal"], solve(small, big, **sizes).signal)

    refuse(
        f"batches {b} and {times_b}, {len(small)} steps",
        ("A mean of ratios is not the ratio of the means, and is wrong on average: divide last",
         both and all(one.signal for one in each)
         and close(got["examples"], fmean(one.noise / one.signal for one in each if one.signal))),
        ("The noise scale is not signal over noise", both and close(got["examples"] * got["noise"], got["signal"])),
        ("The noise scale is noise over signal, both as you returned them", both),
        ("The numbers are squared norms already: do not square them again", signal(_squares(small), _squares(big))),
        ("The big batch's squared norm still has noise in it, tr(Σ)/B", close(got["signal"], fmean(big))),
        ("The difference of the two is tr(Σ) times (1/b - 1/B)", close(got["noise"], fmean(small) - fmean(big))),
        ("One step says next to nothing: take the mean over all steps first", signal(small[:1], big[:1])),
        ("The equations hold for means, and not for medians", signal([median(small)], [median(big)])),
        ("Solve |G_b|² = |G|² + tr(Σ)/b and |G_B|² = |G|² + tr(Σ)/B, with the means over all steps: signal is "
         f"{right['signal']:.4g} and noise {right['noise']:.4g}", True),
    )  # fmt: skip


# --- the failure zoo ----------------------------------------------------------------------------------------

#: What tells a fault from the others.
_LOOK = {
    "forgotten zero_grad": "the gradient norm of the first step is as expected, and later ones hold all before them",
    "skipped batch": "a rank ends one collective early, and a number is missing among its batches",
    "wrong-dtype reduction": "the reduced vector has fewer bytes than 4 for each parameter",
    "mismatched collectives": "the ranks wait in two different operations, as the same entry of their calls",
    "slow rank": "one rank does several times the FLOPs of the other in every step; all else is as expected",
    "accumulation that communicates": "there are more all-reduces than steps, and the losses are as expected",
    "uneven data": "a rank ends one collective early, and no number is missing among its batches",
    "unsharded parameter": "each rank keeps far more than its half of the bytes",
    "equal seeds": "the two halves of one model were drawn with the same norm, to the last digit",
    "data seen again": "a rank trains on the same batch numbers twice",
    "silent data corruption": "the ranks should hold copies, and their digests part in mid-run; losses hardly move",
    "straggler that comes and goes": "in some steps one rank does several times the FLOPs of the other, each in its turn, "
    "so that their means over the steps are alike",
    HEALTHY: "nothing differs from what is expected but rounding",
}


def cases() -> list[tuple[str, bool, Setting]]:
    """Return every program and every twin, each with a seed, a size and a culprit of its own."""
    found = []
    for i, (program, healthy) in enumerate((p, h) for p in FAULTS for h in (False, True)):
        micro = 2 + i % 2 if program == "F" else 1
        culprit = (i // 2) % 2
        found.append((program, healthy, Setting(4 + i % 3, micro, 6 + 2 * (i % 4), culprit, seed=i)))
    return found


@functools.cache
def _seen() -> list[tuple[str, Symptoms]]:
    work = cases()
    truths = [HEALTHY if healthy else FAULTS[program] for program, healthy, _ in work]
    return list(zip(truths, run_programs(work), strict=True))


def _made_up() -> Symptoms:
    """Symptoms of a healthy job that never ran: whether there is an answer at all is asked before any job is started."""
    series = [[1.0] * 4] * 2
    return Symptoms(
        parameters=178, layout="copies", micro_batches=1, expected={"losses": [1.0] * 4, "norms": [1.0] * 4},
        batches=[[0, 2, 4, 6], [1, 3, 5, 7]], losses=series, norms=series, flops=[[4272] * 4] * 2,
        digests=[["8006a183", "f73095df", "62f2faeb", "91c6ed2c"]] * 2,
        calls=[[("all_reduce", 712)] * 4] * 2, weight_norms=[2.0, 2.0], state_bytes=[None, None],
        ended=["returned", "returned"],
    )  # fmt: skip


@check(
    idea="First ask whether the job hangs, then whether its first steps agree with one process, and then count.",
    section="The failure zoo: faults and their symptoms",
    line="For each fault test the one symptom that its healthy twin does not show, the hangs first; compare ranks step by "
    "step, and allow for rounding wherever you compare losses or norms.",
)
def diagnose(answer: Callable[[Symptoms], str]) -> str:
    """Judge `diagnose(symptoms)`: a name out of `FAULTS`, or "healthy", for each program and each healthy twin."""
    try:
        answer(_made_up())
    except (NotImplementedError, Wrong):
        raise
    except Exception:
        pass  # the jobs below show it where they, too, have what it stumbles over
    names = {*FAULTS.values(), HEALTHY}
    for truth, symptoms in _seen():
        said = str(answer(copy.deepcopy(symptoms)))
        if said == truth:
            continue
        print(symptoms)
        refuse(
            "",
            (f"The answer should be one of the names in zoo.FAULTS, or {HEALTHY!r}, and is {said!r}", said not in names),
            (f"A healthy job is called {said!r}, and one symptom of that is missing above", truth == HEALTHY),
            (f"A job with the fault {truth!r} is called {said!r}: its symptoms are above. Look again: {_LOOK[truth]}", True),
        )  # fmt: skip
    return f"{len(_seen())} jobs on two ranks, half of them healthy, each named from its symptoms."


# --- an MFU that lies ---------------------------------------------------------------------------------------

NO_MISTAKE = "honest"

#: What a report did, for a claim that is not honest.
_MISTAKES = {
    "attention left out": "it counts 6N a token and leaves attention's two products with scores out",
    "attention twice": "it counts 24Lhs a token for attention in place of 12Lhs",
    "padding counted": "it counts positions that are padding",
    "recomputation counted": "it counts four passes, as the hardware runs them, where the model needs three",
    "sparse peak": "it divides by the peak with sparsity, which no dense model reaches",
}


def _claims(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the MFU of a job, and what each mistake makes of it."""
    weights = 6 * report["parameters"]
    scores = 12 * report["layers"] * report["hidden"] * report["seq"]
    rate = 1 / (report["seconds"] * report["gpus"] * report["dense_peak"])
    tokens = report["positions"] - report["padding"]
    honest = tokens * (weights + scores) * rate
    claims = {
        NO_MISTAKE: honest,
        "attention left out": tokens * weights * rate,
        "attention twice": tokens * (weights + 2 * scores) * rate,
        "sparse peak": honest * report["dense_peak"] / report["sparse_peak"],
    }
    if report["recompute"] == "full":
        claims["recomputation counted"] = honest * 4 / 3
    if report["padding"]:
        claims["padding counted"] = report["positions"] * (weights + scores) * rate
    return claims


def _causal(report: Mapping[str, Any]) -> float:
    """Return the MFU that counts only those pairs of attention which a causal mask leaves."""
    scores = 12 * report["layers"] * report["hidden"] * report["seq"]
    needed = 6 * report["parameters"] + scores
    return _claims(report)[NO_MISTAKE] * (needed - scores / 2) / needed


def mfu_reports(seed: int = 2204) -> list[tuple[str, dict[str, Any]]]:
    """Return reports of jobs, each with what is the matter with its MFU; first one that can be done by hand."""
    dice = random.Random(seed)
    hand = {"parameters": 100, "layers": 1, "hidden": 3, "seq": 5, "positions": 10, "padding": 1, "seconds": 1.0,
            "gpus": 1, "dense_peak": 20_000.0, "sparse_peak": 40_000.0, "recompute": "full"}  # fmt: skip
    found = [(mistake, {**hand, "mfu": claim}) for mistake, claim in _claims(hand).items()]
    while len(found) < 60:
        layers, hidden = dice.choice([12, 24, 32, 80]), 128 * dice.randint(6, 64)
        seq, dense = 1024 * dice.choice([1, 2, 4, 8, 32]), dice.choice([125e12, 312e12, 989.4e12])
        job = {"parameters": 12 * layers * hidden**2 + 32_000 * hidden, "layers": layers, "hidden": hidden, "seq": seq}
        job |= {"positions": seq * dice.choice([8, 64, 512]), "gpus": dice.choice([1, 2, 8, 64]), "dense_peak": dense}
        job |= {"padding": dice.choice([0, 0, job["positions"] // 8]), "recompute": dice.choice(["none", "full"])}
        job |= {"sparse_peak": 2 * dense, "seconds": 1.0}
        job["seconds"] = _claims(job)[NO_MISTAKE] / dice.uniform(0.25, 0.45)
        claims = _claims(job)
        # Two mistakes of one job are to be a tenth apart: nobody has to guess.
        ordered = sorted(claims.values())
        mistake = (NO_MISTAKE, *_MISTAKES)[len(found) % (1 + len(_MISTAKES))]
        if mistake in claims and all(b > 1.1 * a for a, b in pairwise(ordered)):
            found.append((mistake, job | {"mfu": claims[mistake]}))
    return found


@check(
    idea="MFU counts what the model needs, for tokens that teach it, over what the GPUs could do with dense matrices.",
    section="MFU, and five ways to get it wrong",
    line="Compute the MFU as the report should have, then once more with each single mistake, and name the one whose "
    "result is nearest to what the report says.",
)
def audit_mfu(answer: Callable[[dict[str, Any]], Any], seed: int = 2204) -> str:
    """Judge `audit_mfu(report)`, which returns the right MFU and what is the matter with the one in the report."""
    for mistake, report in mfu_reports(seed):
        returned = numbers(answer(dict(report)), "What is returned, the MFU and the name of the mistake,")
        if len(returned) != 2:
            raise Wrong(f"Return two things, the right MFU and the name of the mistake, and not {len(returned)}.")
        got, said = returned[0], str(returned[1])
        claims = _claims(report)
        case = ", ".join(
            f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in report.items()
        )
        mine = claims[NO_MISTAKE]
        if not close(got, mine):
            slips = [
                ("That is in percent; an MFU is a share, from 0 to 1", 100 * mine),
                ("Tokens are of all GPUs, so divide by the peak of all of them", report["gpus"] * mine),
                ("This counts the pairs of attention that a causal mask leaves; asked is the convention of this rung's "
                 "equation, 12Lhs, which counts all pairs", _causal(report)),
                ("Backward takes twice the FLOPs of forward: 6N and 12Lhs count all three", mine / 3),
                *((f"Your own MFU has the mistake {name!r}: {_MISTAKES[name]}", claims[name])
                  for name in _MISTAKES if name in claims),
            ]  # fmt: skip
            recognize(got, case, slips)
        refuse(
            case,
            (f"The MFU is tokens that are no padding, times 6N + 12Lhs, over the seconds times the dense peak of all GPUs: "
             f"{mine:.4f}, not {_float(got):.4f}", not close(got, mine)),
        )  # fmt: skip
        if said not in (NO_MISTAKE, *_MISTAKES):
            raise Wrong(f"The mistake is one of {', '.join(map(repr, (NO_MISTAKE, *_MISTAKES)))}, and not {said!r}.")
        if said != mistake:
            why = "This report is honest, and you say" if mistake == NO_MISTAKE else "You say"
            but = "" if mistake == NO_MISTAKE else f", but {_MISTAKES[mistake]}, which makes {claims[mistake]:.4f}"
            raise Wrong(f"{why} {said!r}{but} ({case}).")
    return f"{len(mfu_reports(seed))} reports, honest ones among them."


# --- what limits a run --------------------------------------------------------------------------------------

_KEYS = ("speedup", "efficiency", "lost", "limit")

_PARTS = ("communication", "imbalance", "data", "compute")

_STEPS, _WARM_UP = 8, 3

#: Of a step: what 32-bit floats may be off.
_ROUNDING = 1e-6

Phases = dict[str, float]


@check(
    idea="Throughput over throughput is the speedup; what is missing to the ideal step splits into four parts that add up.",
    section="Speedup, efficiency and what was lost: two ranks by hand",
    line="Take the slowest rank's time as the step, the least communication of any rank as transfer, what ranks spend "
    "above it or idle at the end as imbalance, and data and computing against the ideal's share.",
)
def observe_scaling(answer: Callable[..., dict[str, Any]], seed: int = 1106) -> str:
    """Judge `observe_scaling(alone, ranks, scaling)` on timelines of known answer, then on a run that happened."""
    dice = random.Random(seed)
    one, uneven = _rank(data=1, compute=7), _rank(data=1, compute=9, communication=1)
    cases = [
        (one, [_rank(data=1, compute=7, communication=2)] * 2, "weak"),
        (one, [_rank(data=0.5, compute=3.5, communication=1)] * 2, "strong"),
        (one, [_rank(data=1, compute=7, communication=3), uneven], "weak"),
        (one, [one, _rank(data=4, compute=7)], "weak"),
        # Data is read faster than alone: more is gained there than any other part loses.
        (_rank(data=4, compute=7), [_rank(data=1, compute=8, communication=2.5)] * 2, "weak"),
    ]
    for _ in range(30):
        scaling, n = dice.choice(("weak", "strong")), dice.randint(2, 6)
        share = 1.0 if scaling == "weak" else 1 / n
        alone = _rank(data=dice.uniform(0.1, 1), compute=dice.uniform(5, 9))
        ranks = []
        for _ in range(n):
            data, compute = share * alone["data"] * dice.uniform(1, 3), share * alone["compute"] * dice.uniform(1, 1.3)
            ranks.append(_rank(data=data, compute=compute, communication=dice.uniform(0.2, 3)))
        cases.append((alone, ranks, scaling))
    for alone, ranks, scaling in cases:
        _judge_scaling(answer(dict(alone), [dict(rank) for rank in ranks], scaling), alone, ranks, scaling)
    report = gpu_report()
    alone, ranks, where = _reported(report) if report else (*_run_now(), "2 CPU ranks a moment ago")
    found = answer(dict(alone), [dict(rank) for rank in ranks], "strong")
    _judge_scaling(found, alone, ranks, "strong")
    more = ""
    if _float(found["speedup"]) > len(ranks):
        more = " More than one per rank: something else kept the single rank busy, so run it again on a quiet machine."
    return (
        f"{len(cases)} timelines, and a job on {where}: speedup {_float(found['speedup']):.2f}, efficiency "
        f"{_float(found['efficiency']):.0%}, limited by {found['limit']}.{more}"
    )


def _rank(*, data: float, compute: float, communication: float = 0.0) -> Phases:
    return {"seconds": data + compute + communication, "data": data, "compute": compute, "communication": communication}


def _judge_scaling(found: object, alone: Phases, ranks: Sequence[Phases], scaling: str) -> None:
    if not isinstance(found, dict) or set(found) != set(_KEYS):
        raise Wrong(f"Return a dictionary with the keys {', '.join(_KEYS)}.")
    lost, limit = found["lost"], found["limit"]
    if not isinstance(lost, dict) or not set(lost) >= set(_PARTS) or any(lost[key] for key in set(lost) - set(_PARTS)):
        raise Wrong(f"`lost` is a dictionary of seconds with the keys {', '.join(_PARTS)}.")
    loss, n = scaling_loss([[alone]], [list(ranks)], scaling=scaling), len(ranks)
    told = f"{scaling}, one rank {alone['seconds']:.3g} s, {n} ranks {loss.seconds:.3g} s"
    faster = loss.efficiency * n
    if not close(found["speedup"], faster, rel=_ROUNDING):
        _explain_speedup(_float(found["speedup"]), faster, alone, ranks, scaling, told)
    if not close(found["efficiency"], faster / n, rel=_ROUNDING):
        slips = [
            ("That is the speedup; the efficiency is the speedup over the number of ranks", faster),
            ("That is in percent; an efficiency of 1 is perfect", 100 * faster / n),
        ]
        recognize(found["efficiency"], told, slips)
        raise Wrong(f"The efficiency is the speedup over the number of ranks, {faster / n:.3f} ({told}).")
    for part in _PARTS:
        # Parts are differences of seconds: rounding is measured against the step, not against the part.
        if not close(lost[part] - loss.parts[part] + loss.seconds, loss.seconds, rel=_ROUNDING):
            _explain_part(part, _float(lost[part]), loss, ranks, told)
    largest = max(lost, key=lost.__getitem__)
    if limit != largest and lost.get(limit) != lost[largest]:
        refuse(
            told,
            (f"{limit} took less than in the ideal step, and limits nothing", limit in _PARTS and lost[limit] < 0),
            (f"`limit` names the largest part, here {largest!r}, and not {limit!r}", True),
        )  # fmt: skip


def _explain_speedup(
    got: float, right: float, alone: Phases, ranks: Sequence[Phases], scaling: str, told: str
) -> NoReturn:
    seconds, n = [rank["seconds"] for rank in ranks], len(ranks)
    mean, step = fmean(seconds), max(seconds)
    slips = [
        ("Weak scaling does n times the work in a step, strong scaling the same work: throughput over throughput is n T_1/T_n "
         "for the one and T_1/T_n for the other", right / n if scaling == "weak" else right * n),
        ("A step ends when its slowest rank has ended: T_n is the longest of the ranks' times", right * step / mean),
        ("A speedup above one is faster: it is the other way round", 1 / right),
        ("That is a ratio of times; the speedup is one of throughputs", step / alone["seconds"]),
    ]  # fmt: skip
    recognize(got, told, slips)
    raise Wrong(f"The speedup is throughput over throughput of one rank: {right:.3f}, not {got:.3f} ({told}).")


def _explain_part(part: str, got: float, loss: ScalingLoss, ranks: Sequence[Phases], told: str) -> NoReturn:
    sent, right = [rank["communication"] for rank in ranks], loss.parts[part]
    own = part in ("data", "compute")

    def near(value: float) -> bool:
        return abs(got - value) <= _ROUNDING * loss.seconds

    refuse(
        told,
        ("What a rank sees as communication holds its wait for those that come later. The rank that comes last waits for "
         "nobody, so the transfer itself is the least that any rank spent",
         part == "communication" and (near(fmean(sent)) or near(max(sent)))),
        ("A rank that is done before the step ends waits too: add the time from its own end to the end of the slowest one",
         part == "imbalance" and near(fmean(sent) - min(sent))),
        ("Take the mean over the ranks of what they waited, so that the parts add up",
         part == "imbalance" and near(max(sent) - min(sent))),
        (f"Lost is what {part} took longer than in the ideal step, not all that it took",
         own and near(fmean(rank[part] for rank in ranks))),
        (f"In strong scaling a rank has the n-th part of the work, so its ideal {part} is the n-th part of what one rank "
         f"needs: {right:.3g} s are lost there, not {got:.3g}", own and loss.scaling == "strong"),
        (f"{part} lost {right:.3g} s a step, not {got:.3g}: the four parts add up to the step minus its ideal, "
         f"{loss.seconds - loss.ideal:.3g} s", True),
    )  # fmt: skip


# --- a job that ran -----------------------------------------------------------------------------------------


def _reported(folder: Path) -> tuple[Phases, list[Phases], str]:
    """Return the mean step of one GPU and of each of the most with the same batch, and where that was."""
    one, *_, many = [record for record in scaling_records(folder) if record["scaling"] != "weak"]
    alone = _mean(one["samples"][0], None, one["warm_up"])
    share = alone["compute"] / many["ranks"]
    return alone, [_mean(lines, share, many["warm_up"]) for lines in many["samples"]], describe_machine(many)


@functools.cache
def _run_now() -> tuple[Phases, list[Phases]]:
    """Train on one CPU rank and on two, the same global batch; return the mean step of the one and of each of the two."""
    with tempfile.TemporaryDirectory(prefix="scaling-") as top:
        for ranks in (1, 2):
            run_ranks(_train, ranks, str(Path(top, str(ranks))), 16)
        one, many = (read_run(Path(top, str(ranks))) for ranks in (1, 2))
    alone = _mean(one[0], None, _WARM_UP)
    return alone, [_mean(lines, alone["compute"] / 2, _WARM_UP) for lines in many]


def _train(folder: str, batch: int) -> None:
    settings = {"model": "tiny", "global_batch": batch, "seq": 64, "precision": "fp32"}
    Trainer(TrainConfig(folder=folder, steps=_STEPS, **settings)).run()


def _mean(lines: Sequence[Mapping[str, Any]], compute: float | None, warm_up: int) -> Phases:
    """Return the mean step of a rank; what it took longer than `compute` and its data is communication and waiting."""
    counted = lines[warm_up:]
    data = fmean(line["data_seconds"] for line in counted)
    rest = fmean(max(line["seconds"], line["data_seconds"]) for line in counted) - data
    sent = 0.0 if compute is None else max(0.0, rest - compute)
    return _rank(data=data, compute=rest - sent, communication=sent)
