"""The submissions of a class: who stands where, which wrong idea is how common, what was predicted, and a board of plans.

A submission that was changed by hand is judged again before it counts. Of several by one name the newest counts, lab by
lab. Nothing leaves the folder. `read_class` is the one to read first.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, get_args

from lablib.calc.errors import one_of, read_json
from lablib.calc.layouts.planner import FIELDS, Layout, Plan, plan
from lablib.checks.answers.graduation import GOALS, TIMEOUT_S, Status, exercises, in_process
from lablib.checks.answers.submission import is_as_written, judge_again
from lablib.launch.records import FLOAT, TEXT, check_fields

_SUBMISSION = {"who": TEXT, "date": TEXT, "lablib": TEXT, "labs": {}, "sha256": TEXT}
_LAB = {
    "notebook": {"cells": [{}]},
    "ran": TEXT,
    "predictions": {},
    "verdicts": [{"name": TEXT, "status": TEXT, "message": TEXT}],
}
#: What counts as solved; the second is an answer whose run on GPUs has not happened yet.
SOLVED = ("passed", "passed on CPU ranks")


@dataclass
class Class:
    """What is known of a class.

    Attributes:
        labs: By name and rung, the newest submission of that lab.
        again: Names whose files were changed by hand, and were judged again.
        unread: Files that are no submissions, each with why.
        files: How many files each name has, and versions: those of lablib that wrote them.
        counted: Names of the exercises that count; empty: all of the rungs that somebody handed in.
    """

    labs: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    again: set[str] = field(default_factory=set)
    unread: dict[str, str] = field(default_factory=dict)
    files: Counter[str] = field(default_factory=Counter)
    versions: set[str] = field(default_factory=set)
    counted: set[str] = field(default_factory=set)

    @property
    def rungs(self) -> list[str]:
        """The rungs that somebody handed in."""
        return sorted({rung for labs in self.labs.values() for rung in labs})

    def columns(self) -> list[tuple[str, str]]:
        """Return (rung, exercise) of the exercises that count, in the order of the course."""
        known = [(rung, name) for rung in self.rungs for name in exercises(rung)]
        return [(rung, name) for rung, name in known if not self.counted or name in self.counted]

    def status(self, who: str, rung: str, name: str) -> str:
        """Return the verdict on one answer; "" where the lab was not handed in."""
        verdicts = self.labs[who].get(rung, {"verdicts": []})["verdicts"]
        return next((each["status"] for each in verdicts if each["name"] == name), "")

    def points(self, who: str) -> int:
        """Return how many exercises somebody solved."""
        return sum(self.status(who, *column) in SOLVED for column in self.columns())

    def rows(self) -> Iterator[list[str]]:
        """Yield a table for a gradebook: a head, and a line for each name, with 1 for a solved exercise and 0 for others."""
        columns = self.columns()
        yield ["name", "points", "of", *(f"{rung} {name}" for rung, name in columns), "judged again"]
        for who in sorted(self.labs):
            told = [self.status(who, *column) for column in columns]
            marks = [str(int(status in SOLVED)) if status else "" for status in told]
            yield [_cell(who), str(self.points(who)), str(len(columns)), *marks, "yes" if who in self.again else ""]

    def wrong_ideas(self) -> list[tuple[str, str, str, int]]:
        """Return (rung, exercise, sentence, people), the most common first; numbers in a sentence do not tell two apart."""
        found: Counter[tuple[str, str, str]] = Counter()
        shown = {}
        for labs in self.labs.values():
            for rung, lab in labs.items():
                for each in lab["verdicts"]:
                    if each["status"] == "wrong":
                        key = rung, each["name"], _idea(each["message"])
                        found[key] += 1
                        shown.setdefault(key, each["message"])
        return [(*key[:2], shown[key], people) for key, people in found.most_common()]

    def guesses(self, rung: str) -> dict[str, list[float]]:
        """Return for each prediction of a lab what was guessed over what was measured; only what both are above 0."""
        found: dict[str, list[float]] = {}
        for labs in self.labs.values():
            for name, one in labs.get(rung, {"predictions": {}})["predictions"].items():
                value, measured = one.get("value"), one.get("measured")
                found.setdefault(name, [])
                if value and measured and value * measured > 0 and isfinite(value / measured):
                    found[name].append(value / measured)
        return found


@dataclass(frozen=True)
class Board:
    """The layouts of a class for one job, each judged by the planner.

    Attributes:
        rows: Name, layout, predicted seconds of a step, seconds over those of the planner's first choice, and "ties" or
            "behind"; where a layout does not run, why, in place of the last three. What ties comes first, by name.
        error: How far such predictions were off.
    """

    job: str
    rows: list[tuple[str, str, float | None, float | None, str]]
    error: str


def read_class(folder: Path, *, everything_again: bool = False) -> Class:
    """Return what the submissions in a folder say.

    Args:
        everything_again: Judge every submission here, not only those that were changed. This runs the learners' code.
    """
    found, dates = Class(), {}
    for path in (path for path in sorted(folder.glob("*.json")) if path.is_file()):
        try:
            content = check_fields(read_json(path), _SUBMISSION, path)
            if not content["labs"]:
                raise ValueError(f"{path}: labs is empty")
            for rung, lab in content["labs"].items():
                _check_lab(rung, lab, path)
            changed = not is_as_written(content)
            if changed or everything_again:
                content = judge_again(content)
        except (ValueError, OSError) as error:
            found.unread[path.name] = str(error)
            continue
        who = content["who"]
        found.files[who] += 1
        found.versions |= {content["lablib"]}
        found.again |= {who} if changed else set()
        for rung, lab in content["labs"].items():
            if content["date"] >= dates.get((who, rung), ""):
                dates[who, rung] = content["date"]
                found.labs.setdefault(who, {})[rung] = lab
    if not found.labs:
        why = "; ".join(f"{name}: {text}" for name, text in found.unread.items())
        raise ValueError(f"{folder} holds no submission{': ' + why if why else '; `rung submit` makes one'}")
    return found


def _check_lab(rung: str, lab: dict[str, Any], path: Path) -> None:
    one_of("rung", rung, [goal.rung for goal in GOALS])  # it becomes the name of a file and of a module
    check_fields(lab, _LAB, path)
    for one in lab["predictions"].values():
        check_fields(one, {"value?": FLOAT, "measured?": FLOAT}, path)
    for each in lab["verdicts"]:
        one_of("status", each["status"], get_args(Status))


def read_jobs(path: Path) -> dict[str, dict[str, Any]]:
    """Return the jobs of a challenge: by name, what `plan` takes; a field of `Layout` among them would give it away."""
    jobs = check_fields(read_json(path), {}, path)
    for name, job in jobs.items():
        if not isinstance(job, dict) or not {"model", "gpus", "global_batch"} <= set(job) or set(job) & set(FIELDS):
            raise ValueError(f"{path}: {name} needs model, gpus and global_batch, and no field of a layout")
        try:
            _ = plan(**job).best
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: {name}: {error}") from None
    return jobs


def board(found: Class, job: str, settings: Mapping[str, Any], *, timeout: float = TIMEOUT_S) -> Board:
    """Ask everybody's `plan_cluster(job)` of lab 07 for a layout, and put them beside the planner's.

    This runs the learners' code, each answer in a process of its own.
    """
    best = plan(**settings)
    rows = []
    for who, labs in sorted(found.labs.items()):
        if "07" not in labs:
            continue
        try:
            layout = _layout(labs["07"]["notebook"], job, timeout)
            mine = plan(**settings, **layout).best
        except (ValueError, TypeError) as error:
            rows.append((who, "", None, None, str(error)[:300]))
            continue
        rows.append(
            (who, str(mine.layout), mine.step, mine.step / best.best.step, "ties" if best.ties(mine) else "behind")
        )
    rows.sort(key=lambda row: (row[4] != "ties", row[3] is None, row[3] if row[4] == "behind" else 0, row[0]))
    return Board(job, rows, _error(best))


def _layout(notebook: Mapping[str, Any], job: str, timeout: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        path = Path(folder) / "07_plan.ipynb"
        path.write_text(json.dumps(notebook), encoding="utf-8")
        given = in_process("call", path, "plan_cluster", job, timeout=timeout)
    if unknown := set(given) - set(FIELDS):
        raise ValueError(f"a layout has no field {', '.join(sorted(unknown))}")
    # What is left out is as in a `Layout`, and not the planner's to choose.
    return {name: value for name, value in vars(Layout(**given)).items() if value is not None}


def _error(found: Plan) -> str:
    return found.like(found.best).sentence


def _idea(message: str) -> str:
    """Return a check's sentence without the case in brackets at its end, and without its numbers."""
    return re.sub(r"\d[\d.,]*", "N", re.sub(r"(?<!\s)\s*\([^()]*\)\.?$", "", message.split("\n")[0])).strip(" .")


def _cell(text: str) -> str:
    """Return a text that a spreadsheet does not take for a formula."""
    return f"'{text}" if text[:1] in "=+-@\t\r" else text
