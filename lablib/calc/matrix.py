"""The combinations of Python and PyTorch that `make matrix` tries, and when each last passed.

    last_runs(read_runs())      # one dictionary a combination, for the status page

Page: book/status.md
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lablib.calc.torch_versions import SUPPORTED

PYTHONS = ("3.11", "3.12", "3.13")
#: Every Python with the version of constraints.txt, and every other PyTorch with one Python; the ends with two.
COMBINATIONS = (
    "3.11/2.13.0",
    "3.12/2.13.0",
    "3.13/2.13.0",
    "3.11/2.11.0",
    "3.12/2.12.1",
    "3.13/2.14.0",
    "3.11/2.15.0",
    "3.13/2.15.0",
)
PARTS = ("unit", "labs")
#: Written by `tools/matrix.py` alone: combination -> part -> what was run.
RUNS = Path(__file__).resolve().parents[2] / "book" / "data" / "matrix.json"


@dataclass(frozen=True)
class Combination:
    """A Python and a PyTorch.

    Attributes:
        python: Minor version, "3.13".
        torch: Exact version, "2.14.0".
    """

    python: str
    torch: str

    def __str__(self) -> str:
        return f"{self.python}/{self.torch}"

    @property
    def folder(self) -> str:
        """The name of its environment."""
        return f"{self.python}-{self.torch}"


def combination(text: str) -> Combination:
    """Read a combination.

    Args:
        text: "3.13/2.14.0".

    Raises:
        ValueError: If it is none, or the course does not support it.
    """
    found = re.fullmatch(r"(\d+\.\d+)/(\d+\.\d+)\.(\d+)", text)
    if not found:
        raise ValueError(f"{text!r} is no combination of Python and PyTorch; write it like 3.13/2.14.0")
    if found[1] not in PYTHONS or found[2] not in SUPPORTED:
        raise ValueError(
            f"{text!r} is not supported: use Python {PYTHONS[0]} to {PYTHONS[-1]} and torch {SUPPORTED[0]} to "
            f"{SUPPORTED[-1]}"
        )
    return Combination(found[1], f"{found[2]}.{found[3]}")


def read_runs(path: Path = RUNS) -> dict[str, dict[str, Any]]:
    """Return the runs by combination; none where nothing was run."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def last_runs(runs: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """Return a row for each combination: what was run last, when, of which commit, and how it went.

    Args:
        runs: From `read_runs`.
    """
    rows = []
    for name in dict.fromkeys([*COMBINATIONS, *runs]):
        python, torch = name.split("/")
        row = {"Python": python, "torch": torch}
        for part, title in zip(PARTS, ("tests", "labs"), strict=True):
            row[title] = _said(runs.get(name, {}).get(part))
        rows.append(row)
    return rows


def _said(run: dict[str, Any] | None) -> str:
    if run is None:
        return "not yet run"
    how = (
        f"{run['failed']} FAILED, {run['passed']:,} passed" if run["failed"] else f"{run['passed']:,} passed"
    )
    how += f", {run['skipped']} skipped" if run["skipped"] else ""
    changed = " with changes" if run["changed"] else ""
    return f"{run['date'][:10]}: {how} (Python {run['python']}, torch {run['torch']}, {run['commit'][:7]}{changed})"
