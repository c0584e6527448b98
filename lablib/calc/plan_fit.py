"""The three fitted constants of the planner, how they are fitted, and how far off they are.

    EFFICIENCY      fitted on all rows of `plan_runs`: what the planner uses
    judge()         every row predicted by constants that never saw its paper: what to believe

The constants minimize the sum over rows of (log of predicted over published)². A row's prediction is the best among
the choices that its paper does not print.

What the rows cannot say: only the ZeRO-3 rows of Narayanan et al. have much communication to hide. Without that paper
`overlap` goes to its bound of 1, where hidden communication costs all of its time, and those rows come out slow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from lablib.calc.flops import step_flops
from lablib.calc.plan_cluster import cluster
from lablib.calc.plan_job import Workload
from lablib.calc.plan_layout import Layout, check_layout
from lablib.calc.plan_memory import layout_memory
from lablib.calc.plan_runs import RUNS, Run
from lablib.calc.plan_time import Efficiency, Job, step_time
from lablib.calc.recipes import recipe

#: The result of `fit(RUNS)`; a test fits again.
EFFICIENCY = Efficiency(matmul=0.8139, bandwidth=0.7455, overlap=0.4117)

START = (0.8, 0.8, 0.2)
STEPS = (0.1, 1e-4)
MICRO_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Prediction:
    """A published row beside what the planner makes of it.

    Attributes:
        run: The row.
        layout: The layout, with what the paper leaves out chosen.
        tflops: Predicted TFLOP/s per device, counted as the paper counts.
        seconds: Predicted seconds of a step, by part.
        memory: Bytes of a rank by term.
        efficiency: The constants used.
    """

    run: Run
    layout: Layout
    tflops: float
    seconds: dict[str, float]
    memory: dict[str, int]
    efficiency: Efficiency

    @property
    def error(self) -> float:
        """Predicted over published, less 1."""
        return self.tflops / self.run.tflops - 1


def workload(run: Run) -> Workload:
    """Return what a row trains and where."""
    return Workload(
        run.model,
        cluster(run.gpu, run.gpus, nic=run.nic, rails=run.rails),
        run.seq,
        run.global_batch,
        recipe(run.recipe),
        run.attention,
        run.sequence_parallel,
    )


def choices(run: Run) -> list[tuple[Layout, Job, float]]:
    """Return the layouts that a row may mean, each as work and with the FLOPs that its paper would count for a device.

    Memory is not asked: what a paper printed did fit.
    """
    load, found = workload(run), []
    for micro, chunks, again, zero in product(
        MICRO_BATCHES if run.micro_batch is None else (run.micro_batch,),
        range(1, (run.model.num_layers + 2) // run.pp + 1)
        if run.virtual_stages is None
        else (run.virtual_stages,),
        ("none", "selective", "full") if run.recompute is None else (run.recompute,),
        (1, 2, 3) if run.zero is None else (run.zero,),
    ):
        layout = Layout(
            tp=run.tp, cp=run.cp, dp=run.dp, pp=run.pp, zero=zero, micro_batch=micro, recompute=again,
            virtual_stages=chunks, schedule="interleaved" if chunks > 1 else "1f1b",
        )  # fmt: skip
        try:
            check_layout(
                layout, run.model, gpus=run.gpus, seq=run.seq, global_batch=run.global_batch,
                sequence_parallel=run.sequence_parallel,
            )  # fmt: skip
        except ValueError:
            continue
        flops = counted_flops(run, again) / run.gpus
        found.append((layout, load.job(layout), flops))
    return found


def counted_flops(run: Run, recompute: str) -> float:
    """Return the FLOPs of a step as a row's paper counts them.

    Fused attention skips the masked half of the scores, and the half is what is counted for it.
    """
    causal = run.attention == "fused"
    flops = step_flops(run.model, batch=run.global_batch, seq=run.seq, recompute=recompute, causal=causal)
    return flops.hardware if run.counts == "hardware" else flops.model


def predict(run: Run, rates: Efficiency = EFFICIENCY) -> Prediction:
    """Return the row as the planner predicts it.

    Raises:
        ValueError: If no layout of the row can be.
    """
    options = choices(run)
    if not options:
        raise ValueError(
            f"no layout: tp={run.tp}, cp={run.cp}, pp={run.pp} and dp={run.dp} do not go into gpus={run.gpus}, "
            f"num_layers={run.model.num_layers} and global_batch={run.global_batch}"
        )
    speed, i = _best(options, rates)
    layout, job, _ = options[i]
    memory = layout_memory(workload(run), layout)
    return Prediction(run, layout, speed / 1e12, step_time(job, rates), memory, rates)


def _best(options: list[tuple[Layout, Job, float]], rates: Efficiency) -> tuple[float, int]:
    """FLOP/s of the fastest choice, and its number."""
    return max((flops / sum(step_time(job, rates).values()), i) for i, (_, job, flops) in enumerate(options))


def fit(runs: Sequence[Run] = RUNS) -> Efficiency:
    """Return the constants that suit these rows best, by a pattern search: a step along each axis while it helps.

    Raises:
        ValueError: If there are no rows.
    """
    if not runs:
        raise ValueError("runs is empty: at least one row is needed to fit three constants")
    options = [(run.tflops * 1e12, choices(run)) for run in runs]

    def loss(point: tuple[float, ...]) -> float:
        rates = Efficiency(*point)
        return sum(math.log(_best(choice, rates)[0] / published) ** 2 for published, choice in options)

    point, (step, smallest) = START, STEPS
    best = loss(point)
    while step > smallest:
        before = best
        for axis in range(3):
            for move in (step, -step):
                other = tuple(x + move * (i == axis) for i, x in enumerate(point))
                # Shares lie between 0 and 1; the first two divide.
                if min(other[:2]) > 0 and min(other) >= 0 and max(other) <= 1 and loss(other) < best:
                    best, point = loss(other), other
        if best == before:
            step /= 2
    return Efficiency(*point)


def judge(runs: Sequence[Run] = RUNS) -> list[Prediction]:
    """Return every row predicted by constants fitted on the rows of the other papers.

    Raises:
        ValueError: If all rows are of one paper.
    """
    papers = list(dict.fromkeys(run.paper for run in runs))
    if len(papers) < 2:
        raise ValueError(f"all rows are of {papers}: at least two papers are needed to leave one out")
    rates = {paper: fit([run for run in runs if run.paper != paper]) for paper in papers}
    return [predict(run, rates[run.paper]) for run in runs]
