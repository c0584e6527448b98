"""The planner's constants by least squares of log ratios, and every row by constants that never saw its source.

    fitted = fit_rates(rows_of(measured_runs(fitted=True)))     # `lablib.calc.layouts.planner.FITTED`
    judge(measured_runs())                                      # predicted over measured, leave one source out

Huber's loss of log(predicted over measured), summed over rows weighted so that no source counts for more than `MOST_ROWS`, is
made small by Levenberg and Marquardt's method: steps along the constants' logarithms, since each is a scale. Up to
`NEAR` it is the square, beyond that the distance, so that a run of unfinished software does not bend what others agree on.
Each constant is tied to `START` by `TIE` of a row, or few rows of one source would carry it anywhere; one that no row
informs stays there, as that of a kernel that only one source has when that source is left out.
Where a source leaves out what it ran, the fastest choice counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch

from lablib.calc.layouts.planner import FITTED, Fitted, Run, StepWork, run_choices, step_time, workload_of_run
from lablib.calc.layouts.planner.calibration import MOST_ROWS
from tests.evidence.planner.runs import is_fitted

NEAR = 0.1
TIE = 0.1

#: Constants before anything is fitted: shares as kernels' own authors measured them, or a round number.
START = Fitted(
    matmul=dict.fromkeys(("a100", "h100", "b200"), 0.85),
    attention=dict.fromkeys(FITTED.attention, 0.4) | {key: FITTED.attention[key] for key in FITTED.published},
    memory=dict.fromkeys(FITTED.memory, 0.7),
    fp8=dict.fromkeys(FITTED.fp8, 0.85),
    overlap=0.4,
    product=30e-6,
    layer=1e-3,
    step=10e-3,
)
SHARES = ("attention", "memory", "overlap")  # at most 1; of matmul see `Accelerator.achievable`, which it multiplies

Point = dict[str | tuple, float]


@dataclass(frozen=True)
class Row:
    """A measured run: the jobs that it may have been, each with its seconds as the source counts them.

    Attributes:
        seconds: Measured seconds of a step.
    """

    run: Run
    jobs: tuple[tuple[StepWork, float], ...]

    def log_ratio(self, fitted: Fitted) -> float:
        """Return the logarithm of predicted over measured, of the choice that is fastest."""
        rates = workload_of_run(self.run).rates(fitted)
        return min(math.log(sum(step_time(job, rates).values()) / seconds) for job, seconds in self.jobs)


def rows_of(runs: Iterable[Run]) -> list[Row]:
    """Return runs with their work, which no constant changes."""
    return [Row(run, tuple((job, flops / run.tflops / 1e12) for _, job, flops in run_choices(run))) for run in runs]


def as_point(fitted: Fitted) -> Point:
    """Return the constants as one flat dictionary; those of a table have its key too."""
    point: Point = {}
    for field in fields(fitted):
        value = getattr(fitted, field.name)
        if isinstance(value, dict):
            point |= {(field.name, key): number for key, number in value.items()}
        elif isinstance(value, float):
            point[field.name,] = value
    return point


def from_point(point: Point) -> Fitted:
    tables: dict[str, dict | float] = {}
    for (name, *key), value in point.items():
        if key:
            tables.setdefault(name, {})[key[0]] = value
        else:
            tables[name] = value
    return Fitted(**tables)


def fit_rates(rows: Sequence[Row], *, start: Fitted = START, held: Iterable[str] = ()) -> Fitted:
    """Return the constants that suit these rows best.

    Args:
        held: Names of fields of `Fitted` that stay as they are in `start`; attention kernels with published rates do.
    """
    if not rows:
        raise ValueError("rows is empty: at least one measured run is needed to fit the constants")
    point = began = as_point(start)
    free = [key for key in point if key[0] not in held and key[1:] not in {(key,) for key in FITTED.published}]
    count = Counter(row.run.paper for row in rows)
    weights = torch.tensor([min(1.0, MOST_ROWS / count[row.run.paper]) for row in rows], dtype=torch.float64).sqrt()

    def residuals(at: Point) -> torch.Tensor:
        fitted = from_point(at)
        ratios = torch.tensor([row.log_ratio(fitted) for row in rows], dtype=torch.float64)
        # Its square is Huber's loss beyond NEAR.
        far = ratios.sign() * (2 * NEAR * ratios.abs() - NEAR**2).clamp(min=0).sqrt()
        moved = torch.tensor([math.log(at[key] / began[key]) for key in free], dtype=torch.float64)
        return torch.cat([weights * torch.where(ratios.abs() > NEAR, far, ratios), TIE**0.5 * moved])

    here, damping = residuals(point), 1e-3
    while True:
        slopes = torch.stack([(residuals(point | {k: 1.01 * point[k]}) - here) / math.log(1.01) for k in free], 1)
        normal, gradient = slopes.T @ slopes, slopes.T @ here
        before = float(here @ here)
        while damping < 1e5:
            step = torch.linalg.solve(normal + damping * torch.diag(normal.diag() + 1e-9), -gradient).clamp(-0.7, 0.7)
            moved = {key: point[key] * math.exp(d) for key, d in zip(free, step.tolist(), strict=True)}
            trial = point | {key: min(value, 1.0) if key[0] in SHARES else value for key, value in moved.items()}
            there = residuals(trial)
            if there @ there < before:
                point, here, damping = trial, there, max(damping / 5, 1e-6)
                break
            damping *= 4
        if before - float(here @ here) < 1e-6 * before:
            return from_point(point)


def judge(runs: Sequence[Run], *, start: Fitted = START) -> list[tuple[Run, float]]:
    """Return every run with predicted over measured, by constants fitted on the rows of the other sources."""
    rows = rows_of(runs)
    found = {}
    for source in dict.fromkeys(run.paper for run in runs):
        others = [row for row in rows if row.run.paper != source and is_fitted(row.run)]
        fitted = fit_rates(others, start=start)
        found |= {id(row): math.exp(row.log_ratio(fitted)) for row in rows if row.run.paper == source}
    return [(row.run, found[id(row)]) for row in rows]
