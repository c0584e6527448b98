"""Run the labs on machines that pretend to have GPUs, and say which cells need a real one.

    python -m tests.pretend                     every lab with a GPU cell or ranks, on 1, 2 and 8 pretended GPUs
    python -m tests.pretend 2 --labs 06 11      some

A lab passes if everything ran but what needs a kernel: the first error of a cell must be `NoKernel`.
"""

import argparse
import ast
import json
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tests.pretend import ROOT, environment


def run_lab(path: Path, gpus: int) -> tuple[list[str], list[str], list[dict]]:
    """Run one lab as shipped.

    Args:
        path: The notebook.
        gpus: How many the machine pretends to have.

    Returns:
        The cells that need a kernel, the cells that failed for another reason with it, and what was asked of CUDA.
    """
    notebook = nbformat.read(path, as_version=4)
    needs, failures, missing = [], [], set()
    with tempfile.TemporaryDirectory(prefix="pretend-") as name:
        log = Path(name, "log")
        client = NotebookClient(
            notebook, timeout=600, allow_errors=True, kernel_name="python3",
            resources={"metadata": {"path": str(path.parent)}},
        )  # fmt: skip
        with client.setup_kernel(env=environment(gpus, log, Path(name, "experiments")), cwd=str(path.parent)):
            for number, cell in enumerate(notebook.cells):
                if cell.cell_type != "code":
                    continue
                client.execute_cell(cell, number)
                for error in (output for output in cell.outputs if output.output_type == "error"):
                    if "GPUs are pretended" in "".join(error.traceback):
                        needs.append(cell.id)
                    elif not (error.ename == "NameError" and set(error.evalue.split("'")) & missing):
                        failures.append(f"{cell.id}: {error.ename}: {error.evalue.splitlines()[0]}")
                    # What this cell would have bound, the cells after it may miss.
                    nodes = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Name)]
                    missing |= {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
        asked = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return needs, failures, asked


def main() -> int:
    """Run what the command line names; return 1 if a lab failed for want of anything but a kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", nargs="*", type=int, default=[1, 2, 8])
    parser.add_argument("--labs", nargs="*", default=[f"{n:02}" for n in range(1, 14)])
    given = parser.parse_args()
    bad = 0
    for gpus in given.gpus:
        for path in sorted(p for lab in given.labs for p in (ROOT / "labs").glob(f"{lab}_*.ipynb")):
            begun = time.monotonic()
            needs, failures, asked = run_lab(path, gpus)
            kernels = ", ".join(sorted({f"{line['what']} in {line['stack'][0]}" for line in asked if line["stack"]}))
            stopped = f"stops in {', '.join(needs)}" if needs else "runs whole"
            verdict = "; ".join(failures) or stopped + (f"; a kernel was asked for: {kernels}" if kernels else "")
            print(f"{gpus} GPU(s) {path.stem:28} {time.monotonic() - begun:5.0f} s  {verdict}", flush=True)
            bad += bool(failures)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
