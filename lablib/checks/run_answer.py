"""One check on one answer, in a process of its own: `python -m lablib.checks.run_answer NOTEBOOK RUNG NAME RESULT`.

An answer may loop for ever, end the process or take all memory. That is then the end of this process, not of
whoever asked.

Chapter: book/11_practical_fsdp.md
"""

from __future__ import annotations

import importlib
import json
import linecache
import sys
from dataclasses import asdict
from pathlib import Path

from lablib.checks.learner_answers import answer_source
from lablib.checks.report import Verdict


def judge(notebook: Path, rung: str, name: str) -> Verdict:
    """Define the answer and run its check.

    Args:
        notebook: The learner's.
        rung: Two digits.
        name: Of the check and of the function.
    """
    source = answer_source(notebook, name)
    if source is None:
        return Verdict(name, "not attempted", f"{notebook.name} has no function {name}.")
    file = f"<{notebook.name}: {name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    # As in a notebook: functions of `__main__` are sent to ranks by value.
    answers: dict[str, object] = {"__name__": "__main__"}
    try:
        exec(compile(source, file, "exec"), answers)
    except Exception as error:
        return Verdict(name, "wrong", f"What {name} needs stopped with {type(error).__name__}: {error}")
    return getattr(importlib.import_module(f"lablib.checks.rung{rung}"), name)(answers[name])


def main() -> None:
    """Judge what the command line names and write the verdict as JSON."""
    notebook, rung, name, result = sys.argv[1:]
    Path(result).write_text(json.dumps(asdict(judge(Path(notebook), rung, name))), encoding="utf-8")


if __name__ == "__main__":
    main()
