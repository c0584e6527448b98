"""How rungs and pages were read: each round is counted, and none is left out."""

import csv
import datetime
import re

from tests.scripts import ROOT

with (ROOT / "book" / "data" / "readings.csv").open(encoding="utf-8", newline="") as file:
    READINGS = list(csv.DictReader(file))
RUNGS = {path.stem[:2] for path in (ROOT / "labs").glob("[0-9][0-9]_*.ipynb")}


def test_each_reading_has_its_rung_reader_counts_date_and_commit():
    for row in READINGS:
        assert row["rung"] in RUNGS or (ROOT / "book" / f"{row['rung']}.md").exists()
        assert row["reader"] in ("expert", "learner")
        assert row["way"] in ("short", "sampled", "whole")
        assert all(int(row[count]) >= 0 for count in ("wrong", "stale", "verdicts"))
        assert datetime.date.fromisoformat(row["date"])
        assert re.fullmatch(r"[0-9a-f]{7,40}", row["commit"])


def test_the_rounds_of_a_rung_follow_each_other():
    for rung in RUNGS | {row["rung"] for row in READINGS}:
        rounds = [int(row["round"]) for row in READINGS if row["rung"] == rung]
        assert rounds == list(range(1, len(rounds) + 1))
    assert [(row["rung"], int(row["round"])) for row in READINGS] == sorted(
        (row["rung"], int(row["round"])) for row in READINGS
    )
