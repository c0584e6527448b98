"""The check behind "you can explain DDP and where its bottleneck is": formulas first, then a recorded run."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from statistics import median

from lablib.calc.comm import ring_all_reduce_bytes
from lablib.calc.models import preset
from lablib.calc.params import count_params
from lablib.checks.report import Wrong, check, close
from lablib.launch.experiments import recorded
from lablib.launch.step_time import medians

#: Name of the recorded run in labs/recorded/ that `ddp_bottleneck` is held to.
RECORDING = "02_ddp_step_time"


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
            (
                params,
                dice.choice([2, 4]),
                tokens,
                ranks,
                dice.uniform(40, 900) * 1e12,
                dice.uniform(1, 450) * 1e9,
            )
        )
    cases.append((10**9, 2, 1024, 1, 140e12, 25e9))
    for case in cases:
        _judge_bottleneck(answer(*case), *case)
    return _judge_against_record(answer)


def _judge_bottleneck(
    got: Mapping[str, float],
    params: int,
    grad_bytes: int,
    tokens: int,
    ranks: int,
    flops: float,
    bandwidth: float,
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
            "That is 16 bytes per parameter: the model states stay home, only gradients travel": sent
            / grad_bytes
            * 16,
        },
        "The bytes that a rank sends in a ring are 2(n-1)/n times the bytes of the gradient",
        case,
    )
    communication = sent / bandwidth
    _explain(
        got["communication"],
        communication,
        {
            "Bandwidth is per direction here, and a ring sends in one: do not halve the time": communication
            / 2,
            "Bandwidth is in bytes per second, not bits": communication * 8,
            "Bandwidth is in bytes per second already": communication / 8,
            "All ranks send at the same time: the time is one rank's bytes over its link": communication
            * ranks,
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
            "That is forward and backward; gradients exist only during backward, 4 of the 6 FLOPs": backward
            * 1.5,
            "That is the forward pass; backward takes twice as many FLOPs": backward / 2,
            "`tokens` is already the share of one rank: do not divide it again": backward / ranks,
            "Each rank has its own tokens and its own FLOP/s: the number of ranks drops out": backward
            * ranks,
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
        raise Wrong(
            f"`hides` says whether the all-reduce fits behind backward, that is, nothing is exposed ({case})."
        )


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
            row["params"],
            row["grad_bytes"],
            row["tokens"],
            row["ranks"],
            flops,
            moved / largest["communication"],
        )
        step = row["compute"] + got["communication"]
        errors.append(abs(step / row["after backward"] - 1))
    error = median(errors)
    if error > 0.35:
        raise Wrong(f"Computation plus communication misses the recorded steps by {error:.0%} in the median.")
    return f"And your formula predicts the {len(rows)} recorded steps without overlap within {error:.0%} (median)."
