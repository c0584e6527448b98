"""A submission: a learner's labs run again in a clean process, and written into one JSON file with a hash.

The notebooks are in the file as they were handed in, without outputs, so whoever reads it can judge them again. The hash says
that nobody changed the file by hand since it was written; it is no signature, and who wants to forge one can. Verdicts are
those of `rung graduate`, whatever the cells of the notebook say about themselves. `submit` is the one to read.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lablib import __version__
from lablib.calc.errors import read_json
from lablib.checks.answers.graduation import GOALS, examine, own_lab
from lablib.launch.ranks import TURNS, place
from lablib.launch.records import FOLDER_SWITCH, RECORD_SWITCH, experiments_dir, git_commit, this_machine, utc_now

#: Seconds for a cell, and for a check. Only what never ends needs a limit: a machine that others use too may be slow.
PATIENCE_S = 600


def submit(work: Path, rungs: Sequence[str], who: str, *, timeout: float = PATIENCE_S) -> dict[str, Any]:
    """Return what a learner hands in: for each lab its notebook, how it ran, verdicts and predictions.

    Args:
        work: The folder of the learner's notebooks.
        rungs: Their numbers; one without a notebook there is refused.
        who: The name, as the learner types it.
    """
    from lablib.launch.runs import report_rows  # late, as in `graduation`

    if not who.strip():
        raise ValueError("a submission needs a name")
    labs = {rung: _lab(_notebook(work, rung), rung, timeout) for rung in rungs}
    reports = []
    for report in sorted({path.parent.parent for path in experiments_dir().glob("*/runs/one-1.json")}):
        with suppress(ValueError):  # a torn one is no report
            reports.append({"name": report.name, "rows": report_rows(report)})
    content = {
        "who": unicodedata.normalize("NFC", who.strip().encode(errors="replace").decode()),
        "date": utc_now(),
        "lablib": __version__,
        "commit": git_commit(),
        "machine": this_machine(),
        "labs": labs,
        "reports": reports,
    }
    return content | {"sha256": _hash(content)}


def is_as_written(content: Mapping[str, Any]) -> bool:
    """Say whether nothing in a submission was changed since it was written."""
    return content.get("sha256") == _hash(content)


def judge_again(content: dict[str, Any], *, timeout: float = PATIENCE_S) -> dict[str, Any]:
    """Return a submission with what its notebooks give here and now, in place of what it says of them.

    This runs the learner's code.
    """
    labs = {}
    for rung, lab in content["labs"].items():
        with tempfile.TemporaryDirectory(prefix="submitted-") as folder:
            notebook = Path(folder) / f"{rung}_submitted.ipynb"
            notebook.write_text(json.dumps(lab["notebook"]), encoding="utf-8")
            labs[rung] = _lab(notebook, rung, timeout)
    return content | {"labs": labs, "sha256": _hash(content | {"labs": labs})}


def _notebook(work: Path, rung: str) -> Path:
    if rung not in {goal.rung for goal in GOALS}:
        raise ValueError(f"there is no rung {rung}; there are {GOALS[0].rung} to {GOALS[-1].rung}")
    found = own_lab(work, rung)
    if found is None:
        raise ValueError(f"{work} has no lab {rung}: `rung lab` copies it there")
    return found


def _lab(notebook: Path, rung: str, timeout: float) -> dict[str, Any]:
    """Run a notebook and judge each of its answers, one process after the other."""
    try:
        cells = [
            {"cell_type": cell["cell_type"], "source": "".join(cell["source"])} for cell in read_json(notebook)["cells"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{notebook} is no notebook: {error}") from None
    ran, predictions = _run(notebook, timeout)
    outcomes = examine(notebook.parent, rungs=[rung], every=True, timeout=timeout)
    return {
        "notebook": {"cells": cells},
        "ran": ran,
        "predictions": predictions,
        "verdicts": [asdict(outcome) for outcome in outcomes],
    }


def _run(notebook: Path, timeout: float) -> tuple[str, dict[str, Any]]:
    """Run a notebook's code in a new kernel; return its first error, or "", and its predictions.

    Cells after an error run too: what they predict counts.
    """
    from lablib.launch.lab_runs import run_cells

    sources = ["".join(cell["source"]) for cell in read_json(notebook)["cells"] if cell["cell_type"] == "code"]
    predictions: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="submit-") as folder:
        switches = {FOLDER_SWITCH: folder, RECORD_SWITCH: "0", "LABLIB_EXPERIMENTS": folder, "TQDM_DISABLE": "1"}
        with place():  # waited for before the clock of the first cell starts
            cells, stopped = run_cells(sources, notebook.parent, variables=switches | {TURNS: ""}, timeout=timeout)
        for path in sorted(Path(folder).glob("*-predictions.json")):
            with suppress(ValueError, KeyError, TypeError):  # a learner's own file of that name
                predictions |= read_json(path)["predictions"]
    for number, cell in enumerate(cells, 1):
        for output in cell.get("outputs", []):
            if output["output_type"] == "error":
                return f"code cell {number} failed with {output['ename']}: {output['evalue'][:300]}", predictions
    return f"the notebook stopped: {stopped}" if stopped else "", predictions


def _hash(content: Mapping[str, Any]) -> str:
    text = json.dumps({key: value for key, value in content.items() if key != "sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
