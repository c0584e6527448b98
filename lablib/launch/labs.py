"""Execute a lab from the command line with papermill, and let it record what it measures.

Papermill only warns about a parameter that a notebook does not have; a paid hour spent on a misspelt
parameter is lost, so unknown names are refused here before anything starts.

Chapter: book/status.md shows what was recorded.
"""

from __future__ import annotations

import os
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lablib.launch.experiments import RECORD_SWITCH, experiments_dir, repository_root


def find_lab(name: str) -> Path:
    """Return the path of a lab given its number ("2", "02") or its stem.

    Args:
        name: Number or stem.

    Raises:
        ValueError: If there is no such lab; the message lists those there are.
    """
    labs = sorted((repository_root() / "labs").glob("[0-9][0-9]_*.ipynb"))
    number = name.zfill(2) if name.isdigit() else None
    for path in labs:
        if path.stem == name or path.stem.split("_")[0] == number:
            return path
    known = ", ".join(path.stem for path in labs)
    raise ValueError(f"no lab {name!r}; there are: {known}")


def lab_parameters(path: Path) -> dict[str, Any]:
    """Return the parameters of a lab and their defaults as text.

    Args:
        path: The notebook.
    """
    import papermill

    return {name: info["default"] for name, info in papermill.inspect_notebook(str(path)).items()}


def run_lab(name: str, parameters: dict[str, Any] | None = None, *, record: bool = False) -> Path:
    """Execute a lab and keep the executed notebook.

    Args:
        name: Number or stem of the lab.
        parameters: Values for its `parameters` cell.
        record: Let the lab write its measurements to `labs/recorded/`.

    Returns:
        The executed notebook, under `distributed-experiments/`.

    Raises:
        ValueError: If the lab or a parameter does not exist.
        papermill.exceptions.PapermillExecutionError: If a cell fails; the notebook up to it is kept.
    """
    import papermill

    path, parameters = find_lab(name), parameters or {}
    known = lab_parameters(path)
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        raise ValueError(
            f"{path.stem} has no parameter {', '.join(unknown)}; it has: {', '.join(known) or 'none'}"
        )
    stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H%M%S")
    out = experiments_dir() / f"{stamp}-{path.stem}" / path.name
    out.parent.mkdir(parents=True, exist_ok=True)
    switch = {
        RECORD_SWITCH: "1" if record else "0",
        "LABLIB_RECORD_COMMAND": shlex.join(["rung", *sys.argv[1:]]),
    }
    before = {key: os.environ.get(key) for key in switch}
    os.environ.update(switch)  # the kernel inherits the environment of this process
    try:
        papermill.execute_notebook(str(path), str(out), parameters, cwd=str(path.parent), progress_bar=False)
    finally:
        for key, value in before.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value
    return out
