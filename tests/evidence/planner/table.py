"""The planner judged, as one file: every measured run beside its prediction, and what follows from them.

    table = planner_table()        # a minute: a fit for every source that is left out, for every fold and every term
    read_planner_table()           # the committed one

`book/data/planner_table.json` is what the page shows. `lablib/calc/layouts/planner/measured.json` is its short form,
which the planner needs where it runs, a reader's browser among them: what ran and the ratio, a row a run.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lablib.calc.layouts.planner import FITTED, LIKE_THIS, MEASURED, MEASURED_RUNS, Run, measured_rows, workload_of_run
from lablib.calc.layouts.planner.calibration import MOST_ROWS
from lablib.calc.params import count_params
from tests.evidence.planner.fitting import NEAR, TIE, as_point, fit_rates, judge, rows_of
from tests.evidence.planner.runs import SOURCES, is_fitted, measured_runs, read_rows
from tests.evidence.planner.verdicts import (
    card,
    concordance,
    coverage,
    errors,
    first_choices,
    held_out,
    one_constant,
    place_of_published,
    seconds_of,
    without_each_term,
)

#: As the page shows it.
PLANNER_TABLE = Path(__file__).parents[3] / "book" / "data" / "planner_table.json"


def planner_table() -> dict[str, Any]:
    """Return the fit, every row, and the errors by source, fold and term."""
    runs = measured_runs()
    rows = rows_of(runs)
    fitted = fit_rates([row for row in rows if is_fitted(row.run)])
    known = [row for row in rows if is_fitted(row.run)]
    judged = judge(runs)
    seen = {id(row.run): row.log_ratio(fitted) for row in rows}
    constant = dict(zip(map(id, runs), (ratio for _, ratio in one_constant(runs)), strict=True))
    kept = [_row(run, ratio=ratio, seen=math.exp(seen[id(run)]), constant=constant[id(run)]) for run, ratio in judged]
    shipped = list(zip(runs, (row["seen"] for row in kept), strict=True))
    return {
        "most": MOST_ROWS,
        "near": NEAR,
        "tie": TIE,
        "sources": {name: {k: v for k, v in asdict(one).items() if k != "name"} for name, one in SOURCES.items()},
        "constants": [[list(map(_text, key)), round(value, 9)] for key, value in as_point(fitted).items()],
        "rows": kept,
        "unseen": asdict(errors(row["ratio"] for row in kept)),
        "folds": asdict(errors(ratio for _, ratio in held_out(known))),
        "terms": {name: asdict(found) for name, found in without_each_term(known).items()},
        "ranking": {source: list(found) for source, found in concordance(judged).items()},
        "ranking_fitted": {source: list(found) for source, found in concordance(shipped).items()},
        "first_choices": first_choices(judged),
        "first_choices_fitted": first_choices(shipped),
        "places": [
            {"name": one.run.name, "place": one.place, "of": one.of, "slower": one.slower}
            for one in map(place_of_published, MEASURED_RUNS)
        ],
    }


def _text(part: object) -> object:
    return list(part) if isinstance(part, tuple) else part


def _row(run: Run, *, ratio: float, seen: float, constant: float) -> dict[str, Any]:
    return {
        "source": run.paper,
        "fitted": is_fitted(run),
        "table": "" if run.paper in SOURCES else run.table,
        "name": run.name,
        "model": run.model.name,
        "global_batch": run.global_batch,
        "kernel": run.framework.attention if run.attention == "fused" else None,
        "card": card(run),
        "gpu": run.gpu,
        "gpus": run.gpus,
        "kernels": run.framework.kernels,
        "zero": run.zero,
        "sharded": (run.zero or 0) >= 2,
        "billions": round(count_params(run.model).total / 1e9, 3),
        "hidden": run.model.hidden,
        "seq": run.seq,
        "precision": run.precision or "bf16",
        "experts": run.model.is_moe,
        "layout": {
            "tp": run.tp,
            "cp": run.cp,
            "pp": run.pp,
            "ep": run.ep,
            "dp": run.dp,
            "micro_batch": run.micro_batch,
        },
        "cp_way": workload_of_run(run).cp_way,
        "recompute": run.recompute,
        "seconds": float(f"{seconds_of(run):.6g}"),
        "ratio": round(ratio, 4),
        "seen": round(seen, 4),
        "constant": round(constant, 4),
    }


def short_form(table: dict[str, Any]) -> list[list[object]]:
    """Return the rows as the planner's answers need them; see `lablib.calc.layouts.planner.like_this`."""
    return [[_short(row)[name] for name in LIKE_THIS] for row in table["rows"]]


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its axes beside the rest."""
    return row | row["layout"] | {"gathers": row["zero"] == 3}


def save_planner_table(table: dict[str, Any]) -> None:
    """Write the table and its short form, a row a line; intervals are those of the new rows."""
    MEASURED.write_text("[\n" + ",\n".join(json.dumps(row) for row in short_form(table)) + "\n]\n")
    measured_rows.cache_clear()
    table["intervals"] = coverage(measured_runs())
    rows = ",\n".join(json.dumps(row) for row in table["rows"])
    rest = json.dumps({name: value for name, value in table.items() if name != "rows"}, indent=1)
    PLANNER_TABLE.write_text(rest.removesuffix("\n}") + ',\n "rows": [\n' + rows + "\n]}\n")


def read_planner_table() -> dict[str, Any]:
    return json.loads(PLANNER_TABLE.read_text())


def judge_file(path: str) -> str:
    """Return the errors of the shipped constants on a file's rows, beside one constant taken from these very rows."""
    found, fp8 = read_rows(path)
    rows = [row for row in rows_of(found) if row.jobs]
    runs = [row.run for row in rows]
    ours = [(row.run, math.exp(row.log_ratio(FITTED))) for row in rows]
    lines = [f"{path}: {fp8} rows in fp8 are left out"] if fp8 else []
    if len(rows) < len(found):
        lines.append(f"{path}: {len(found) - len(rows)} rows whose layout the planner does not know are left out")
    for name, ratios in (("planner", ours), ("one constant a GPU", one_constant(runs))):
        found = errors(ratio for _, ratio in ratios)
        lines.append(
            f"{path}: {name}: median {found.median:.1%}, nine in ten {found.ninth:.1%}, worst {found.worst:.1%}, "
            f"bias {found.bias:+.1%} of {found.rows} rows"
        )
    for source, (share, pairs) in concordance(ours).items():
        lines.append(f"{path}: {source}: {share:.2f} of {pairs:,} pairs of layouts in their measured order")
    return "\n".join(lines)


def fit_text(table: dict[str, Any]) -> str:
    """Return a fit's constants beside the shipped ones, and its errors."""
    kept, lines = as_point(FITTED), []
    for (name, *key), value in table["constants"]:
        at = (name, *(tuple(part) if isinstance(part, list) else part for part in key))
        lines.append(f"{' '.join(map(str, (name, *key))):<44}{value:>14.6g}{value / kept[at] - 1:>+10.2%} from FITTED")
    new = errors(row["ratio"] for row in table["rows"] if not row["fitted"])
    for title, found in (
        ("source left out", table["unseen"]), ("never fitted", asdict(new)), ("fold left out", table["folds"])
    ):  # fmt: skip
        lines.append(f"{title}: median {found['median']:.1%}, nine in ten {found['ninth']:.1%} of {found['rows']} rows")
    return "\n".join(lines)
