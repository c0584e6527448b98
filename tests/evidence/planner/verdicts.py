"""How wrong the planner's times are: beside one constant a GPU, in ranking, and without each term.

Every number is of ratios, predicted over measured seconds of a step. An error is |ratio - 1|.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lablib.calc.flops import step_flops
from lablib.calc.layouts.planner import (
    LLAMA3,
    Fitted,
    Layout,
    Plan,
    Run,
    counted_flops,
    counting_of_run,
    generation,
    like_this,
    measured_rows,
    plan,
    workload_of_run,
)
from lablib.calc.layouts.planner.calibration import MOST_ROWS
from lablib.calc.memory import RESERVE
from tests.evidence.planner.fitting import START, Row, fit_rates
from tests.evidence.planner.runs import is_fitted

Ratios = Sequence[tuple[Run, float]]

#: Each term of the time model, and what removes it: a field of `Fitted`, and the value at which it costs nothing.
TERMS = {"overlap": 0.0, "product": 0.0, "layer": 0.0, "step": 0.0, "memory": 1.0}


@dataclass(frozen=True)
class Errors:
    """Errors of some rows.

    Attributes:
        bias: Median of predicted over measured, less 1.
        ninth: The error that nine in ten rows stay below.
    """

    rows: int
    bias: float
    median: float
    ninth: float
    worst: float


def errors(ratios: Iterable[float]) -> Errors:
    """Return the errors of ratios of predicted over measured.

    Raises:
        ValueError: If there is none.
    """
    ratios = list(ratios)
    if not ratios:
        raise ValueError("no measured run: there is no error to give")
    found = sorted(abs(ratio - 1) for ratio in ratios)
    ninth = found[math.ceil(0.9 * len(found)) - 1]
    return Errors(len(found), statistics.median(ratios) - 1, statistics.median(found), ninth, found[-1])


def card(run: Run) -> str:
    return generation(workload_of_run(run).cluster.gpu)


def one_constant(runs: Sequence[Run]) -> list[tuple[Run, float]]:
    """Return every row predicted by one number a generation of GPUs and precision: the middle share that its rows reach.

    The share counts recomputation (HFU): with it a step takes hardware FLOPs over share and peak. It is fitted to the
    very rows that it is judged on, and as in the planner's fit no source counts for more than `MOST_ROWS` of them.
    """
    count, shares = Counter(run.paper for run in runs), defaultdict(list)
    for run in runs:
        shares[card(run), run.precision].append((_share(run), min(1.0, MOST_ROWS / count[run.paper])))
    constant = {}
    for name, found in shares.items():
        found.sort()
        passed = list(itertools.accumulate(weight for _, weight in found))
        constant[name] = found[bisect_left(passed, passed[-1] / 2)][0]
    return [(run, _share(run) / constant[card(run), run.precision]) for run in runs]


def _share(run: Run) -> float:
    """Hardware FLOP/s over peak, all pairs of tokens counted; `run.tflops` is the rate that its source counts."""
    flops = step_flops(
        run.model, batch=run.global_batch, seq=run.seq, recompute=run.recompute or "none", selective_passes=1
    )
    seconds = seconds_of(run)
    gpu = workload_of_run(run).cluster.gpu
    return flops.hardware / seconds / run.gpus / gpu.peak("bf16" if "bf16" in gpu.flops else "fp16")


def seconds_of(run: Run) -> float:
    return counted_flops(run, run.recompute or "none") / run.gpus / run.tflops / 1e12


def concordance(judged: Ratios) -> dict[str, tuple[float, int]]:
    """Return the share of pairs of one job that are predicted in their measured order, and the pairs, by source.

    Two rows are of one job if model, GPUs, sequence, global batch and precision agree; layouts, micro-batches and
    recomputation differ. One layout that was measured twice, as in release after release, is no pair.
    """
    jobs = jobs_of(judged)
    right, pairs = defaultdict(int), defaultdict(int)
    for (source, *_), rows in jobs.items():
        for i, (mine, predicted, _) in enumerate(rows):
            for other, its, _ in rows[:i]:
                if mine != other and not math.isclose(predicted, its, rel_tol=1e-3):
                    pairs[source] += 1
                    right[source] += (mine < other) == (predicted < its)
    return {source: (right[source] / count, count) for source, count in pairs.items()}


def jobs_of(judged: Iterable[tuple[Run, float]]) -> dict[tuple, list[tuple[float, float, Run]]]:
    """Return measured seconds, predicted seconds and run of each row, by job."""
    jobs = defaultdict(list)
    for run, ratio in judged:
        seconds = seconds_of(run)
        job = (run.paper, run.model.name, run.gpu, run.gpus, run.seq, run.global_batch, run.precision)
        jobs[job].append((seconds, ratio * seconds, run))
    return jobs


def first_choices(judged: Iterable[tuple[Run, float]], least: int = 5) -> list[dict[str, object]]:
    """Return, for each job with so many measured layouts, how much its predicted best loses to its measured best."""
    found = []
    for (source, model, _, gpus, seq, batch, _), rows in jobs_of(judged).items():
        layouts = {
            (run.tp, run.cp, run.pp, run.ep, run.virtual_stages, run.micro_batch, run.recompute) for *_, run in rows
        }
        if len(layouts) >= least:
            chosen, best = min(rows, key=lambda row: row[1]), min(rows, key=lambda row: row[0])
            found.append(
                {"source": source, "model": model, "gpus": gpus, "seq": seq, "global_batch": batch,
                 "layouts": len(rows), "loses": chosen[0] / best[0] - 1}
            )  # fmt: skip
    return found


def coverage(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Return how many runs, in the rows' order, lie in their interval, by kind, and how many between the runs like them.

    Every run counts as if its source were yours: the constants that predicted it and the runs like it are of others. Runs on
    GPUs that only their source has get no interval.
    """
    found = defaultdict(list)
    for run, row in zip(runs, measured_rows(), strict=True):
        layout = Layout(tp=run.tp, cp=run.cp, pp=run.pp, ep=run.ep, dp=run.dp, zero=run.zero or 0)
        like, took = like_this(workload_of_run(run), layout, _of_others(run)), 1 / row["ratio"]
        kinds = {
            "all": True,
            "never fitted": not is_fitted(run),
            "experts": row["experts"],
            "FP8": "fp8" in row["precision"],
        }
        between = like.interval(1) if like.known else None
        for kind in (name for name, so in kinds.items() if so):
            found[kind if between else f"{kind}, none"].append(bool(between) and between[0] <= took <= between[1])
        if like.took:
            found["near"].append(like.took[0] <= took <= like.took[1])
    return {name: {"rows": len(hits), "within": statistics.mean(hits)} for name, hits in sorted(found.items())}


def _of_others(run: Run) -> list[dict[str, object]]:
    """The measured rows of other sources than a run's."""
    return [row for row in measured_rows() if row["source"] != run.paper]


def held_out(rows: Sequence[Row], *, folds: int = 5, seed: int = 0) -> list[tuple[Run, float]]:
    """Return every row by constants fitted on the other folds: an unseen row of a source that was seen."""
    order = list(rows)
    random.Random(seed).shuffle(order)
    found = []
    for i in range(folds):
        fitted = fit_rates([row for j, row in enumerate(order) if j % folds != i])
        found += [(row.run, math.exp(row.log_ratio(fitted))) for row in order[i::folds]]
    return found


def without_each_term(rows: Sequence[Row]) -> dict[str, Errors]:
    """Return the errors after a fit in which one term is left out, for each in turn; "nothing" is the whole model."""
    found = {"nothing": _after_fit(rows, START, ())}
    for name, off in TERMS.items():
        value = getattr(START, name)
        start = replace(START, **{name: dict.fromkeys(value, off) if isinstance(value, dict) else off})
        found[name] = _after_fit(rows, start, (name,))
    same = statistics.mean(START.attention.values())
    found["attention"] = _after_fit(
        rows, replace(START, attention=dict.fromkeys(START.attention, same)), ("attention",)
    )
    return found


def _after_fit(rows: Sequence[Row], start: Fitted, held: tuple[str, ...]) -> Errors:
    fitted = fit_rates(rows, start=start, held=held)
    return errors(math.exp(row.log_ratio(fitted)) for row in rows)


@dataclass(frozen=True)
class Place:
    """Where a published layout stands.

    Attributes:
        place: 1 for the planner's first choice; None if it thinks that the layout does not fit.
        slower: How much slower it is predicted to be than the first choice, as a share; None with no place.
    """

    run: Run
    place: int | None
    of: int
    slower: float | None


def plan_run(run: Run) -> Plan:
    """Return the planner's layouts for a published row, given what its paper prints besides the layout."""
    fixed = {"recompute": run.recompute, "micro_batch": run.micro_batch, "zero": run.zero}
    hybrid = {"shard": None}  # none of these papers replicates what it shards
    if run.paper != LLAMA3:
        fixed["cp"] = 1
    same = ("gpus", "gpu", "seq", "global_batch", "attention", "sequence_parallel", "gpus_per_node", "nic", "rails")
    return plan(
        run.model,
        recipe_=run.recipe,
        framework=run.framework,
        counting=counting_of_run(run),
        reserve=RESERVE,
        **{name: getattr(run, name) for name in same},
        **hybrid,
        **{name: value for name, value in fixed.items() if value is not None},
    )


def place_of_published(run: Run) -> Place:
    """Return the place of a row's layout among the planner's distinct (tp, cp, pp, dp).

    The Megatron papers had no context parallelism, so theirs is fixed at 1; Llama 3's gathers, and is planned as a ring,
    which is what Megatron-LM's memory is known for.
    """
    shapes = plan_run(run).distinct()
    for number, candidate in enumerate(shapes, start=1):
        if candidate.layout.shape == (run.tp, run.cp, run.pp, run.dp):
            return Place(run, number, len(shapes), candidate.step / shapes[0].step - 1)
    return Place(run, None, len(shapes), None)
