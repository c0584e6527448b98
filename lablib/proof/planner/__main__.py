"""Fit the planner's constants anew, judge them, and print what moved; with --write, keep the tables."""

from __future__ import annotations

import argparse

from lablib.calc.layouts.planner import FITTED
from lablib.proof.planner.fitting import as_point
from lablib.proof.planner.table import planner_table, save_planner_table
from lablib.proof.planner.verdicts import errors


def main() -> None:
    """Fit, judge and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write book/data/planner_table.json and its short form")
    write = parser.parse_args().write
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
    if write:
        save_planner_table(table)


main()
