"""Execute the notebook of one job with papermill, in a process of its own: `python -m ... JOB/job.json`.

The executed notebook is saved after every cell, and every few seconds within one. What cells print also goes to
standard output, and `progress.json` says which cell runs.

With the parameter `only_gpu` the sections between the set-up and the first one with a cell tagged `gpu` are left out.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import papermill
from nbclient.exceptions import DeadKernelError
from papermill.engines import NBClientEngine, NotebookExecutionManager, papermill_engines
from papermill.exceptions import PapermillExecutionError

from lablib.launch.labs.labs import read_json
from lablib.launch.ranks import explain
from lablib.launch.records import utc_now, write_json

AUTOSAVE_S = 5
_WITH_PARENT = 1  # PR_SET_PDEATHSIG: end when the process that started this one does


class _Engine(NBClientEngine):
    """papermill's own engine, which also tells which cell runs."""

    @classmethod
    def execute_managed_notebook(
        cls,
        nb_man: NotebookExecutionManager,
        kernel_name: str,
        tell: Callable[[int, int], None] = lambda cell, cells: None,
        **options: Any,
    ) -> Any:
        start = nb_man.cell_start

        def cell_start(cell: Any, cell_index: int | None = None, **more: Any) -> None:
            tell(cell_index or 0, len(nb_man.nb.cells))
            start(cell, cell_index, **more)

        nb_man.cell_start = cell_start
        return super().execute_managed_notebook(nb_man, kernel_name, **options)


papermill_engines.register("rung", _Engine)


def run(job_file: Path) -> str | None:
    """Execute the notebook of a job; return None, or what failed in one sentence."""
    job, folder = read_json(job_file), job_file.parent
    path = source = Path(job["path"])
    if job["parameters"].get("only_gpu"):
        source = folder / "only_gpu.ipynb"
        nbformat.write(without_rehearsals(nbformat.read(path, as_version=4)), source)

    current = 0

    def tell(cell: int, cells: int) -> None:
        nonlocal current
        current = cell
        write_json(folder / "progress.json", {"cell": cell, "cells": cells, "since": utc_now()})

    try:
        papermill.execute_notebook(
            str(source),
            str(folder / path.name),
            job["parameters"],
            engine_name="rung",
            cwd=str(path.parent),
            progress_bar=False,
            autosave_cell_every=AUTOSAVE_S,
            stdout_file=sys.stdout,
            tell=tell,
        )
    except PapermillExecutionError as error:
        return f"cell {error.cell_index} failed with {error.ename}: {error.evalue}"
    except DeadKernelError:
        return f"the kernel died in cell {current}: a crash in a library, or killed for want of memory (dmesg says so)"
    except OSError as error:
        return explain(str(error)) or f"{type(error).__name__}: {error}"
    return None


def without_rehearsals(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return a lab without the sections that lie between its set-up and the first section with a cell tagged `gpu`.

    A machine that is paid for by the minute need not run again what a laptop can.
    """
    cells = notebook.cells
    heads = [i for i, cell in enumerate(cells) if cell.cell_type == "markdown" and cell.source.startswith("## ")]
    tagged = [i for i, cell in enumerate(cells) if "gpu" in cell.metadata.get("tags", [])]
    if heads and tagged:
        section = max((i for i in heads if i <= tagged[0]), default=heads[0])
        notebook.cells = cells[: heads[0]] + cells[section:]
    return notebook


def main() -> int:
    """Run the job named on the command line; the reason of a failure goes to `failure.json`."""
    if sys.platform == "linux":
        # A kill -9 of the runner frees its lock: a lab that went on would be measured beside the next one.
        # The kernel looks for this process itself, and its ranks for the kernel.
        ctypes.CDLL(None).prctl(_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == 1:
            return 1
    logging.getLogger("papermill").setLevel(logging.ERROR)
    job_file = Path(sys.argv[1])
    failure = run(job_file)
    if failure:
        print(failure, file=sys.stderr)  # on a full disk the file cannot be written
        write_json(job_file.parent / "failure.json", {"failure": failure})
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
