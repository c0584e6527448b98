"""Write a lab as nbgrader's source version: python tools/room/to_nbgrader.py 05 COURSE/source/lab05/05_zero.ipynb.

In each exercise the worked solution stands where the stub raises, between the marks that nbgrader cuts at. A locked cell
follows, which fails with the check's own sentence. It needs labs/solutions; nbgrader itself need not be there.
"""

import argparse
import ast
import json
import re
import textwrap
from pathlib import Path

from lablib.checks.judging.verdict import _solution

RAISE = "    raise NotImplementedError\n"
TEST = """import contextlib, io
from lablib.checks import {rung}

with contextlib.redirect_stderr(io.StringIO()):  # nbgrader takes a warning for a failure
    graded = {call}
assert graded.status == "passed", graded.message"""


def solved(source: str, rung: str, name: str) -> str:
    """Return a stub with its solution, which brings its imports and helpers into the body and is called there."""
    (stub,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name)
    call = f"return {name}({', '.join(argument.arg for argument in stub.args.args)})"
    body = f"### BEGIN SOLUTION\n{_solution(rung, name)}\n\n{call}\n### END SOLUTION\n"
    return source.replace(RAISE, textwrap.indent(body, "    "))


def cell_of(cell: dict, source: str, grade_id: str, **graded: float) -> dict:
    """Return a cell with nbgrader's metadata, schema version 3: a test if it has points, an answer otherwise."""
    flags = {"schema_version": 3, "grade": bool(graded), "locked": bool(graded), "solution": not graded, "task": False}
    changed = {"metadata": cell["metadata"] | {"nbgrader": flags | {"grade_id": grade_id} | graded}}
    return cell | changed | {"id": cell["id"] + "-test" * bool(graded), "source": source.splitlines(keepends=True)}


def main() -> None:
    """Convert one lab."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", help="the lab's, 01 to 14")
    parser.add_argument("to", type=Path, help="the notebook to write")
    parser.add_argument("--points", type=float, default=1, help="for each exercise; 1 if not given")
    asked, cells = parser.parse_args(), []
    rung, root = f"rung{asked.number}", Path(__file__).resolve().parents[2]
    lab = json.loads(next(root.glob(f"labs/{asked.number.zfill(2)}_*.ipynb")).read_text(encoding="utf-8"))
    for cell in lab["cells"]:
        cells += [cell]
        if RAISE in (source := "".join(cell["source"])):
            call = re.search(rf"{rung}\.(\w+)\(\1\b[^()]*\)", source)
            cells[-1] = cell_of(cell, solved(source, rung, call[1]), call[1])
            cells += [cell_of(cell, TEST.format(rung=rung, call=call[0]), f"test-{call[1]}", points=asked.points)]
    asked.to.parent.mkdir(parents=True, exist_ok=True)
    asked.to.write_text(json.dumps(lab | {"cells": cells}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
