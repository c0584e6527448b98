"""Fit the planner's constants anew, judge them, and print what moved; with --write, keep the tables.

With --rows, judge the shipped constants on the rows of files: vTrain's and LLM Foundry's own tables, or your own runs in
the columns of measured_runs.csv.
"""

from __future__ import annotations

import argparse
import math

from lablib.calc.layouts.planner import FITTED
from lablib.proof.planner.fitting import as_point, rows_of
from lablib.proof.planner.runs import runs_of
from lablib.proof.planner.table import planner_table, save_planner_table
from lablib.proof.planner.verdicts import concordance, errors, one_constant


def judge_file(path: str) -> None:
    """Print the errors of the shipped constants on a file's rows, beside one constant taken from these very rows."""
    runs = runs_of(path)
    ours = [(row.run, math.exp(row.log_ratio(FITTED))) for row in rows_of(runs)]
    for name, ratios in (("planner", ours), ("one constant a GPU", one_constant(runs))):
        found = errors(ratio for _, ratio in ratios)
        print(
            f"{path}: {name}: median {found.median:.1%}, nine in ten {found.ninth:.1%}, worst {found.worst:.1%}, "
            f"bias {found.bias:+.1%} of {found.rows} rows"
        )
    for source, (share, pairs) in concordance(ours).items():
        print(f"{path}: {source}: {share:.2f} of {pairs:,} pairs of layouts in their measured order")


def main() -> None:
    """Fit, judge and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write book/data/planner_table.json and its short form")
    parser.add_argument(
        "--rows", nargs="+", metavar="FILE", help="rows to judge the shipped constants on; fits nothing"
    )
    given = parser.parse_args()
    if given.rows:
        for path in given.rows:
            judge_file(path)
        return
    table = planner_table()
    kept = as_point(FITTED)
    for (name, *key), value in table["constants"]:
        at = (name, *(tuple(part) if isinstance(part, list) else part for part in key))
        print(f"{' '.join(map(str, (name, *key))):<44}{value:>14.6g}{value / kept[at] - 1:>+10.2%} from FITTED")
    for title, rows in (
        ("source left out", table["rows"]),
        ("never fitted", [row for row in table["rows"] if not row["fitted"]]),
    ):
        found = errors(row["ratio"] for row in rows)
        print(f"{title}: median {found.median:.1%}, nine in ten {found.ninth:.1%} of {found.rows} rows")
    print(f"fold left out: median {table['folds']['median']:.1%}, nine in ten {table['folds']['ninth']:.1%}")
    if given.write:
        save_planner_table(table)


main()
