"""The Done-when of rung 11: say what a run on several ranks gained, what it lost, and to what.

First on timelines whose answer is known, then on the learner's report of a real model on GPUs, or, where there is none,
on a small job that runs here and now on CPU ranks.
"""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from lablib.calc.scaling_loss import Loss, scaling_loss
from lablib.checks.report import Wrong, check, close
from lablib.launch.ranks import run_ranks
from lablib.launch.scaling_records import gpu_report, read_run, records, where_of
from lablib.launch.train_config import TrainConfig
from lablib.launch.trainer import Trainer

_KEYS = ("speedup", "efficiency", "lost", "limit")
_PARTS = ("communication", "imbalance", "data", "compute")
_STEPS, _WARM_UP = 8, 3

Phases = dict[str, float]


@check
def observe_scaling(answer: Callable[..., dict[str, Any]], seed: int = 1106) -> str:
    """Judge `observe_scaling(alone, ranks, scaling)` on timelines of known answer, then on a run that happened."""
    dice = random.Random(seed)
    cases = [
        (_rank(data=1, compute=7), [_rank(data=1, compute=7, communication=2)] * 2, "weak"),
        (_rank(data=1, compute=7), [_rank(data=0.5, compute=3.5, communication=1)] * 2, "strong"),
        (
            _rank(data=1, compute=7),
            [_rank(data=1, compute=7, communication=3), _rank(data=1, compute=9, communication=1)],
            "weak",
        ),
        (_rank(data=1, compute=7), [_rank(data=1, compute=7), _rank(data=4, compute=7)], "weak"),
    ]
    for _ in range(30):
        scaling, n = dice.choice(("weak", "strong")), dice.randint(2, 6)
        share = 1.0 if scaling == "weak" else 1 / n
        alone = _rank(data=dice.uniform(0.1, 1), compute=dice.uniform(5, 9))
        ranks = [
            _rank(
                data=share * alone["data"] * dice.uniform(1, 3),
                compute=share * alone["compute"] * dice.uniform(1, 1.3),
                communication=dice.uniform(0.2, 3),
            )
            for _ in range(n)
        ]
        cases.append((alone, ranks, scaling))
    for alone, ranks, scaling in cases:
        _judge(answer(dict(alone), [dict(rank) for rank in ranks], scaling), alone, ranks, scaling)
    report = gpu_report()
    alone, ranks, where = _reported(report) if report else (*_run_now(), "2 CPU ranks a moment ago")
    found = answer(dict(alone), [dict(rank) for rank in ranks], "strong")
    _judge(found, alone, ranks, "strong")
    return (
        f"{len(cases)} timelines, and a job on {where}: speedup {found['speedup']:.2f}, efficiency "
        f"{found['efficiency']:.0%}, limited by {found['limit']}."
    )


def _rank(*, data: float, compute: float, communication: float = 0.0) -> Phases:
    return {
        "seconds": data + compute + communication,
        "data": data,
        "compute": compute,
        "communication": communication,
    }


def _judge(found: object, alone: Phases, ranks: Sequence[Phases], scaling: str) -> None:
    if not isinstance(found, dict) or set(found) != set(_KEYS):
        raise Wrong(f"Return a dictionary with the keys {', '.join(_KEYS)}.")
    lost = found["lost"]
    if not isinstance(lost, dict) or set(lost) != set(_PARTS):
        raise Wrong(f"`lost` is a dictionary of seconds with the keys {', '.join(_PARTS)}.")
    loss = scaling_loss([[alone]], [list(ranks)], scaling=scaling)
    told = f"{scaling}, one rank {alone['seconds']:.3g} s, {len(ranks)} ranks {loss.seconds:.3g} s"
    n = len(ranks)
    faster = loss.efficiency * n
    if not close(found["speedup"], faster, rel=1e-9):
        _explain_speedup(float(found["speedup"]), faster, alone, ranks, scaling, told)
    if not close(found["efficiency"], faster / n, rel=1e-9):
        if close(found["efficiency"], faster, rel=1e-9):
            raise Wrong(
                f"That is the speedup; the efficiency is the speedup over the number of ranks ({told})."
            )
        raise Wrong(f"The efficiency is the speedup over the number of ranks, {faster / n:.3f} ({told}).")
    for part in _PARTS:
        # Parts are differences of seconds: rounding is measured against the step, not against the part.
        if abs(float(lost[part]) - loss.parts[part]) > 1e-9 * loss.seconds:
            _explain_part(part, float(lost[part]), loss, ranks, told)
    largest = max(lost, key=lost.__getitem__)
    if found["limit"] != largest and lost.get(found["limit"]) != lost[largest]:
        raise Wrong(f"`limit` names the largest part, here {largest!r}, and not {found['limit']!r} ({told}).")


def _explain_speedup(
    got: float, right: float, alone: Phases, ranks: Sequence[Phases], scaling: str, told: str
) -> None:
    mean = fmean(rank["seconds"] for rank in ranks)
    step = max(rank["seconds"] for rank in ranks)
    n = len(ranks)
    other = right / n if scaling == "weak" else right * n
    if close(got, other, rel=1e-9):
        raise Wrong("Weak scaling does n times the work in a step, strong scaling the same work: throughput over "
                    f"throughput is n T_1/T_n for the one and T_1/T_n for the other ({told}).")  # fmt: skip
    if mean != step and close(got, right * step / mean, rel=1e-9):
        raise Wrong(
            f"A step ends when its slowest rank has ended: T_n is the longest of the ranks' times ({told})."
        )
    if close(got, 1 / right, rel=1e-9):
        raise Wrong(f"A speedup above one is faster: it is the other way round ({told}).")
    if close(got * alone["seconds"], step, rel=1e-9):
        raise Wrong(f"That is a ratio of times; the speedup is one of throughputs ({told}).")
    raise Wrong(
        f"The speedup is throughput over throughput of one rank: {right:.3f}, not {got:.3f} ({told})."
    )


def _explain_part(part: str, got: float, loss: Loss, ranks: Sequence[Phases], told: str) -> None:
    sent = [rank["communication"] for rank in ranks]
    right = loss.parts[part]

    def near(value: float) -> bool:
        return abs(got - value) <= 1e-9 * loss.seconds

    if part == "communication" and (near(fmean(sent)) or near(max(sent))):
        raise Wrong("What a rank sees as communication holds its wait for those that come later. The rank that comes "
                    f"last waits for nobody, so the transfer itself is the least that any rank spent ({told}).")  # fmt: skip
    if part == "imbalance" and near(fmean(sent) - min(sent)):
        raise Wrong("A rank that is done before the step ends waits too: add the time from its own end to the end of "
                    f"the slowest one ({told}).")  # fmt: skip
    if part == "imbalance" and near(max(sent) - min(sent)):
        raise Wrong(f"Take the mean over the ranks of what they waited, so that the parts add up ({told}).")
    if part in ("data", "compute") and near(fmean(rank[part] for rank in ranks)):
        raise Wrong(f"Lost is what {part} took longer than in the ideal step, not all that it took ({told}).")
    if part in ("data", "compute") and loss.scaling == "strong":
        raise Wrong(f"In strong scaling a rank has the n-th part of the work, so its ideal {part} is the n-th part of "
                    f"what one rank needs: {right:.3g} s are lost there, not {got:.3g} ({told}).")  # fmt: skip
    raise Wrong(f"{part} lost {right:.3g} s a step, not {got:.3g}: the four parts add up to the step minus its ideal, "
                f"{loss.seconds - loss.ideal:.3g} s ({told}).")  # fmt: skip


# --- a job that ran ----------------------------------------------------------------------------------------


def _reported(folder: Path) -> tuple[Phases, list[Phases], str]:
    """Return the mean step of one GPU and of each of the most with the same batch, and where that was."""
    one, *_, many = [record for record in records(folder) if record["scaling"] != "weak"]
    alone = _mean(one["samples"][0], None, one["warm_up"])
    share = alone["compute"] / many["ranks"]
    return alone, [_mean(lines, share, many["warm_up"]) for lines in many["samples"]], where_of(many)


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
