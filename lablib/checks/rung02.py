"""The checks of rung 02: all-reduce by hand, buckets, the bottleneck of DDP, faults from their symptoms.

`ddp_bottleneck` is the Done-when of the rung: formulas on drawn models and links first, then a recorded run.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from lablib.calc.communication import ring_all_reduce_bytes
from lablib.calc.models import preset
from lablib.calc.parallel import bucket_sizes
from lablib.calc.params import count_params
from lablib.checks.report import Wrong, check, close
from lablib.launch.measure import medians
from lablib.launch.ranks import run_ranks
from lablib.launch.records import recorded
from lablib.toys.data_parallel import DIAGNOSES, Chart, diagnosis, train_regression

__all__ = ["RECORDING", "all_reduce_mean", "ddp_bottleneck", "diagnose", "make_buckets"]

#: Name of the recorded run in labs/recorded/ that `ddp_bottleneck` is held to.
RECORDING = "02_ddp_step_time"


# --- all-reduce by hand -------------------------------------------------------------------------------------

Send = Callable[[int, int, Sequence[float]], list[float]]


@check
def all_reduce_mean(answer: Callable[[list[list[float]], Send], list[list[float]]]) -> str:
    """Judge `all_reduce_mean(gradients, send)`: 4 ranks with 8 numbers first, then other sizes."""
    for ranks, length in ((4, 8), (2, 6), (3, 12), (5, 5)):
        # Powers of ten: the digits of every sum say which ranks are in it.
        gradients = [[float(10**rank * (k + 1)) for k in range(length)] for rank in range(ranks)]
        sent, got = _over_the_wire(answer, gradients)
        _judge_result(got, gradients)
        _judge_traffic(sent, ranks, length)
        _judge_wire(answer, gradients)
    return "Each rank sends 12 numbers where the obvious way sends 24 from rank 0."


def _over_the_wire(
    answer: Callable[..., list[list[float]]], gradients: list[list[float]]
) -> tuple[list[int], list[list[float]]]:
    sent = [0] * len(gradients)

    def send(source: int, target: int, numbers: Sequence[float]) -> list[float]:
        if source == target:
            raise Wrong(f"Rank {source} sends to itself; what a rank has, it need not send.")
        if not isinstance(numbers, Sequence):
            raise Wrong(f"`send` takes a list of numbers, and gets {numbers!r}: send a whole chunk at once.")
        sent[source] += len(numbers)
        return list(numbers)

    return sent, answer([list(row) for row in gradients], send)


def _judge_result(got: object, gradients: list[list[float]]) -> None:
    ranks, length = len(gradients), len(gradients[0])
    rows = got if isinstance(got, list) and all(isinstance(row, Sequence) for row in got) else []
    if [len(row) for row in rows] != [length] * ranks:
        raise Wrong(f"Return one list of {length} numbers for each of the {ranks} ranks.")
    total = [sum(column) for column in zip(*gradients, strict=True)]
    if all(close(value, s / ranks) for row in got for value, s in zip(row, total, strict=True)):
        return
    if all(close(value, s) for row in got for value, s in zip(row, total, strict=True)):
        raise Wrong(f"The gradients are summed, not averaged: every step would be {ranks} times too long.")
    finished = [[close(v, s / ranks) or close(v, s) for v, s in zip(row, total, strict=True)] for row in got]
    divided = any(close(v, s / ranks) for row in got for v, s in zip(row, total, strict=True))
    if all(any(row) and not all(row) for row in finished):
        if any(v > 1.001 * (s / ranks if divided else s) for row in got for v, s in zip(row, total, strict=True)):
            raise Wrong("The all-gather adds: a finished chunk that arrives must replace the partial one.")
        if all(sum(row) <= length // ranks for row in finished):
            raise Wrong("Each rank has only one chunk finished: that is a reduce-scatter, the all-gather is missing.")
        raise Wrong("Some finished chunks do not reach every rank: the all-gather takes n - 1 steps, too.")
    if any(all(row) for row in finished) and not all(all(row) for row in finished):
        raise Wrong("Some ranks have the mean and others do not: the replicas would drift apart from here on.")
    for column, value in enumerate(got[0]):
        absent = _absent_ranks(value, column, ranks)
        if absent:
            who = f"Rank {absent[0]} is" if len(absent) == 1 else f"Ranks {', '.join(map(str, absent))} are"
            raise Wrong(
                f"{who} missing from element {column}: n - 1 steps bring a chunk past every rank, and what the "
                f"all-gather hands round first is the chunk that a rank has finished."
            )
    if len({tuple(row) for row in got}) > 1:
        raise Wrong("The ranks do not hold the same numbers at the end: the replicas would drift apart.")
    raise Wrong("The ranks do not enter with equal weight: add all of them first, then divide once by n.")


def _absent_ranks(value: float, column: int, ranks: int) -> list[int]:
    """Read from the digits which ranks are not in the sum; none if it is no plain sum."""
    for divisor in (1, ranks, ranks - 1):
        digits = round(value * divisor / (column + 1), 6)
        text = f"{int(digits):0{ranks}d}"
        if digits == int(digits) and len(text) == ranks and set(text) == {"0", "1"}:
            return [rank for rank in range(ranks) if text[ranks - 1 - rank] == "0"]
    return []


def _judge_traffic(sent: list[int], ranks: int, length: int) -> None:
    least = round(ring_all_reduce_bytes(length, ranks))
    if all(count == least for count in sent):
        return
    if max(sent) > least and min(sent) < max(sent):
        busiest = sent.index(max(sent))
        raise Wrong(
            f"The mean is right, but rank {busiest} sends {max(sent)} numbers and the least is {least}: one rank's "
            f"link is the bottleneck. Let every rank finish one chunk instead."
        )
    if least < min(sent) < (ranks - 1) * length:
        raise Wrong(
            f"The mean is right, but every rank sends {min(sent)} numbers and {least} are enough: each half takes "
            f"n - 1 steps of one chunk."
        )
    if min(sent) > least:
        raise Wrong(
            f"The mean is right, but every rank sends {min(sent)} numbers and {least} are enough: send chunks of the "
            f"gradient, not all of it."
        )
    raise Wrong(f"Only {min(sent)} numbers left a rank and {least} must: some numbers arrived without being sent.")


def _judge_wire(answer: Callable[..., list[list[float]]], gradients: list[list[float]]) -> None:
    """Deliver zeros: an answer that really uses what arrives can no longer be right."""
    got = answer([list(row) for row in gradients], lambda source, target, numbers: [0.0] * len(numbers))
    means = [sum(column) / len(gradients) for column in zip(*gradients, strict=True)]
    if got and all(close(value, mean) for value, mean in zip(got[0], means, strict=True)):
        raise Wrong("The answer reads other ranks' gradients directly: use only what `send` returns.")


# --- buckets ------------------------------------------------------------------------------------------------


@check
def make_buckets(answer: Callable[[list[int], int, int], list[list[int]]], seed: int = 2) -> str:
    """Judge `make_buckets(sizes, first, cap)` on a hand-made model and on random ones."""
    dice = random.Random(seed)
    cases = [([8] * 9, 16, 24), ([4, 4, 40, 4, 4, 4], 4, 12)]
    cases += [([dice.randint(1, 40) for _ in range(dice.randint(3, 30))], 10, 50) for _ in range(20)]
    for sizes, first, cap in cases:
        got, truth = answer(list(sizes), first, cap), bucket_sizes(sizes, first=first, cap=cap)
        if not isinstance(got, list) or not all(isinstance(bucket, list | tuple) for bucket in got):
            raise Wrong("Return a list of buckets, and each bucket is a list of indices into `sizes`.")
        got = [list(bucket) for bucket in got]
        if got != truth:
            _explain_buckets(got, truth, sizes, first, cap)
    return f"{len(cases)} models cut as DDP cuts them."


def _explain_buckets(got: list[list[int]], truth: list[list[int]], sizes: list[int], first: int, cap: int) -> None:
    case = f"sizes {sizes[:6]}{'...' if len(sizes) > 6 else ''}, first {first}, cap {cap}"
    flat = [index for bucket in got for index in bucket]
    if got == [[sizes[index] for index in bucket] for bucket in truth]:
        raise Wrong(f"A bucket lists which gradients are in it, not their sizes: indices, please ({case}).")
    if sorted(map(sorted, got)) == sorted(map(sorted, truth)):
        raise Wrong(f"The buckets are right, their order is not: backward makes the last gradient first ({case}).")
    if sorted(flat) != sorted(set(flat)):
        raise Wrong(f"A gradient is in two buckets: it would be averaged twice ({case}).")
    if missing := sorted(set(range(len(sizes))) - set(flat)):
        raise Wrong(
            f"Gradients {missing[:4]} are in no bucket: those parameters would never be averaged. "
            f"The last bucket leaves half full ({case})."
        )
    if flat == sorted(flat) and len(flat) > 1:
        raise Wrong(
            f"Backward makes the last layer's gradient first: in registration order the first bucket is ready "
            f"only at the end of backward, and nothing overlaps ({case})."
        )
    if not all(got):
        raise Wrong(f"An empty bucket costs a message and carries nothing ({case}).")
    if len(got) == 1 < len(truth):
        raise Wrong(f"One bucket for everything is ready when backward ends: nothing overlaps ({case}).")
    if all(len(bucket) == 1 for bucket in got) and any(len(bucket) > 1 for bucket in truth):
        raise Wrong(f"One message per gradient pays the latency once per parameter ({case}).")
    if got == bucket_sizes(sizes, first=cap, cap=cap):
        raise Wrong(f"The first bucket has its own, smaller limit, so that the link starts early ({case}).")
    if got == bucket_sizes(sizes, first=first, cap=first):
        raise Wrong(f"Only the first bucket has the small limit; the others close at the cap ({case}).")
    raise Wrong(
        f"A bucket starts at zero, takes gradients until it holds at least its limit, and closes then, even if it "
        f"is now above it ({case})."
    )


# --- the bottleneck of DDP ----------------------------------------------------------------------------------


@check
def ddp_bottleneck(answer: Callable[..., Mapping[str, float]], seed: int = 2) -> str:
    """Judge `ddp_bottleneck(params, grad_bytes, tokens, ranks, flops, bandwidth)` on models, links and a record."""
    dice = random.Random(seed)
    gpt3 = count_params(preset("gpt3-175b")).total
    cases = [
        (gpt3, 4, 2048, 6, 140e12, 300e9),  # no slip gives the number of another one here
        (gpt3, 2, 2048, 8, 140e12, 300e9),
        (gpt3, 2, 2048, 64, 140e12, 200e9),
        (gpt3, 2, 256, 64, 140e12, 25e9),
    ]
    for _ in range(30):
        params = int(10 ** dice.uniform(7, 11))
        tokens, ranks = 2 ** dice.randint(6, 15), dice.choice([2, 3, 8, 16, 100, 512])
        cases.append(
            (params, dice.choice([2, 4]), tokens, ranks, dice.uniform(40, 900) * 1e12, dice.uniform(1, 450) * 1e9)
        )
    cases.append((10**9, 2, 1024, 1, 140e12, 25e9))
    for case in cases:
        _judge_bottleneck(answer(*case), *case)
    return _judge_against_record(answer)


def _judge_bottleneck(
    got: Mapping[str, float], params: int, grad_bytes: int, tokens: int, ranks: int, flops: float, bandwidth: float
) -> None:
    keys = ("bytes_sent", "communication", "backward", "exposed", "hides")
    if not isinstance(got, Mapping) or set(keys) - set(got):
        raise Wrong(f"Return a dictionary with the keys {', '.join(keys)}.")
    case = f"{params:.3g} parameters, {grad_bytes}-byte gradients, {tokens} tokens, {ranks} ranks"
    size = params * grad_bytes
    sent = ring_all_reduce_bytes(size, ranks)
    if ranks == 1 and not close(got["bytes_sent"], 0):
        raise Wrong("One rank has nobody to send to: the factor 2(n-1)/n is 0 at n = 1.")
    _explain(
        got["bytes_sent"],
        sent,
        {
            "A rank sends more than the gradient once: 2(n-1)/n times, nearly twice": size,
            "That is one half of an all-reduce; the all-gather sends as much again": sent / 2,
            "The factor is 2(n-1)/n, and not yet 2": 2 * size,
            "Bytes on a ring do not grow with n: a rank sends chunks of 1/n": 2 * (ranks - 1) * size,
            "That is the gradient's share of one rank; each rank sends 2(n-1) such chunks": size / ranks,
            "Communication does not grow with the tokens: there is one gradient per parameter": sent * tokens,
            "Count bytes, not parameters": sent / grad_bytes,
            "That is 16 bytes per parameter: the model states stay home, only gradients travel": sent / grad_bytes * 16,
        },
        "The bytes that a rank sends in a ring are 2(n-1)/n times the bytes of the gradient",
        case,
    )
    _judge_times(got, sent, size, params, tokens, ranks, flops, bandwidth)


def _judge_times(
    got: Mapping[str, float],
    sent: float,
    size: int,
    params: int,
    tokens: int,
    ranks: int,
    flops: float,
    bandwidth: float,
) -> None:
    case = f"{params:.3g} parameters, {size // params}-byte gradients, {tokens} tokens, {ranks} ranks"
    communication = sent / bandwidth
    _explain(
        got["communication"],
        communication,
        {
            "Bandwidth is per direction here, and a ring sends in one: do not halve the time": communication / 2,
            "Bandwidth is in bytes per second, not bits": communication * 8,
            "Bandwidth is in bytes per second already": communication / 8,
            "All ranks send at the same time: the time is one rank's bytes over its link": communication * ranks,
            "A rank does not send the gradient once: divide `bytes_sent` by the bandwidth": size / bandwidth,
            "`bytes_sent` holds both halves of the all-reduce already": communication * 2,
        },
        "The ideal communication time is the bytes of one rank over the bandwidth of its link",
        case,
    )
    backward = 4 * params * tokens / flops
    _explain(
        got["backward"],
        backward,
        {
            "That is forward and backward; gradients exist only during backward, 4 of the 6 FLOPs": backward * 1.5,
            "That is the forward pass; backward takes twice as many FLOPs": backward / 2,
            "`tokens` is already the share of one rank: do not divide it again": backward / ranks,
            "Each rank has its own tokens and its own FLOP/s: the number of ranks drops out": backward * ranks,
            "Computation grows with parameters times tokens": backward / tokens,
        },
        "Backward takes 4 FLOPs per parameter and token of this rank",
        case,
    )
    exposed = max(0.0, communication - backward)
    if not close(got["exposed"], exposed) and float(got["exposed"]) < 0:
        raise Wrong(f"Exposed time cannot be negative: what hides completely costs nothing ({case}).")
    _explain(
        got["exposed"],
        exposed,
        {
            "That is all of the communication, as if nothing overlapped": communication,
            "Communication hides behind backward only: no gradient exists during forward": max(
                0.0, communication - backward * 1.5
            ),
            "That is the length of an overlapped step; exposed is what lies beyond backward": max(
                communication, backward
            ),
        },
        "With ideal overlap, what is exposed is the part of the communication that is longer than backward",
        case,
    )
    if bool(got["hides"]) != (exposed == 0):
        raise Wrong(f"`hides` says whether the all-reduce fits behind backward, that is, nothing is exposed ({case}).")


def _explain(answer: object, truth: float, slips: Mapping[str, float], otherwise: str, case: str) -> None:
    if close(answer, truth):
        return
    for sentence, value in slips.items():
        if close(answer, value, rel=1e-6):
            raise Wrong(f"{sentence} ({case}).")
    raise Wrong(f"{otherwise} ({case}).")


def _judge_against_record(answer: Callable[..., Mapping[str, float]]) -> str:
    """Predict every recorded step from one calibration per number of ranks, and hold it to the measurement."""
    record = recorded(RECORDING)
    if record is None:
        return "Right for 35 drawn models and links. No run is recorded yet to compare with."
    rows = [row for row in medians(record.samples) if row["ranks"] > 1]
    errors = []
    for row in rows:
        # The link is calibrated on the largest message only; the smaller models are predictions.
        largest = max((r for r in rows if r["ranks"] == row["ranks"]), key=lambda r: r["params"])
        moved = ring_all_reduce_bytes(largest["params"] * largest["grad_bytes"], largest["ranks"])
        flops = 6 * row["params"] * row["tokens"] / row["compute"]
        got = answer(
            row["params"], row["grad_bytes"], row["tokens"], row["ranks"], flops, moved / largest["communication"]
        )
        step = row["compute"] + got["communication"]
        errors.append(abs(step / row["after backward"] - 1))
    error = median(errors)
    if error > 0.35:
        raise Wrong(f"Computation plus communication misses the recorded steps by {error:.0%} in the median.")
    return f"And your formula predicts the {len(rows)} recorded steps without overlap within {error:.0%} (median)."


# --- faults -------------------------------------------------------------------------------------------------

_WITNESSES = {
    "healthy": "nothing is wrong with this run: replicas equal, samples distinct over ranks, a new order in every "
    "epoch, and the gradient norm of one process",
    "gradients summed instead of averaged": "the gradients were summed: compare the norm of the first step with one "
    "process, which took the same samples from the same weights",
    "replicas start from different weights": "the ranks hold different weights before the first step, and DDP never "
    "compares them again",
    "same data on every rank": "in each step all ranks take the same samples: collect the indices over ranks and "
    "count the distinct ones",
    "set_epoch is missing": "the order of the second epoch is that of the first: compare the indices of two epochs "
    "on one rank",
}


@functools.cache
def _ward(ranks: int, seed: int) -> tuple[dict[str, list[Chart]], Chart]:
    """Run every patient on `ranks` ranks, and the healthy one in a single process."""
    names = {diagnosis(name): name for name in "ABCDE"}
    by_rank = run_ranks(_train_all, ranks, tuple(names.values()), seed)
    charts = {illness: [results[name] for results in by_rank] for illness, name in names.items()}
    return charts, run_ranks(_train_all, 1, (names["healthy"],), seed)[0][names["healthy"]]


def _train_all(names: tuple[str, ...], seed: int) -> dict[str, Chart]:
    return {name: train_regression(name, seed=seed) for name in names}


@check
def diagnose(answer: Callable[[list[Chart], Chart], str]) -> str:
    """Judge `diagnose(charts, alone)` on all five patients, with other ranks and seeds than the lab's."""
    seen = 0
    for ranks, seed in ((2, 11), (4, 12)):
        charts, alone = _ward(ranks, seed)
        for illness in sorted(charts, key=lambda name: (len(name) * seed) % 7):
            said = answer(copy.deepcopy(charts[illness]), copy.deepcopy(alone))
            if said not in DIAGNOSES:
                raise Wrong(f"{said!r} is no diagnosis; answer one of {', '.join(DIAGNOSES)}.")
            if said != illness:
                raise Wrong(f"You say {said!r} on {ranks} ranks, but {_WITNESSES[illness]}.")
            seen += 1
    return f"All {seen} runs diagnosed, on 2 and on 4 ranks."
