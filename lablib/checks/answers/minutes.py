"""How long a rung takes, by a rule that counts what there is to read, to guess and to write.

The rule is printed in book/how_to_use.md, and was set by a diary of rungs 02 and 04, whose reader estimated 90 and 95 minutes
for the chapters and 115 and 135 for the labs, for somebody with two years of PyTorch.
"""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from lablib import course_folder

READ = 200  # words of a lab a minute
STUDY = 80  # words of a chapter a minute: it is read with a pencil, and some of it twice
CODE = 12  # lines of a lab's code a minute
WRITE = 50  # characters a minute, of the worked solution
A_TRY = 3  # minutes until the verdicts of an exercise are read
A_GUESS = 2  # minutes for a prediction, a guess or a question, and for what came of it
A_PROBLEM = 5  # minutes

_CELL = re.compile(r"(?ms)^(?P<fence>`{3,}|:{3,})\{code-cell\}.*?^(?P=fence)[ ]*$")
_FOLDED = re.compile(r"(?ms)^(?P<fence>`{3,}|:{3,})\{admonition\}[^\n]*\n:class: dropdown\n.*?^(?P=fence)[ ]*$")
_STUB = re.compile(r'def (\w+)\([^)]*\):\n(?:    """(?:[^"]|"[^"])*"""\n)?    raise NotImplementedError')


class Exercise(NamedTuple):
    """An exercise of a lab: its check, the words that state it, and the characters of its worked solution."""

    name: str
    words: int
    characters: int

    @property
    def minutes(self) -> float:
        """Return the minutes to read it, to write it and to try it."""
        return self.words / READ + self.characters / WRITE + A_TRY


class Lab(NamedTuple):
    """What a lab asks for: words outside of the exercises, lines of code to read, predictions, exercises."""

    words: int
    lines: int
    guesses: int
    exercises: list[Exercise]

    @property
    def minutes(self) -> float:
        """Return the minutes of the lab."""
        reading = self.words / READ + self.lines / CODE
        return reading + A_GUESS * self.guesses + sum(exercise.minutes for exercise in self.exercises)


def chapter_minutes(rung: str) -> float:
    """Return the minutes of a chapter: its text, without code and what is folded, and its guesses, questions and problems."""
    (page,) = (course_folder() / "book").glob(f"{rung}_*.md")
    text = page.read_text(encoding="utf-8").split("---\n", 2)[2]
    asked = len(re.findall(r"(?m)^(?:guess|question)\(", text))
    problems = len(re.findall(r"(?m)^\*\*\d", text.split("\n## Problems\n")[1].split("\n## ")[0]))
    words = len(_FOLDED.sub("", _CELL.sub("", text)).split())
    return words / STUDY + A_GUESS * asked + A_PROBLEM * problems


@cache
def read_lab(rung: str) -> Lab:
    """Return what the lab of a rung asks for."""
    (path,) = (course_folder() / "labs").glob(f"{rung}_*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    names = [name for cell in cells for name in _STUB.findall("".join(cell["source"]))]
    words = lines = guesses = 0
    said, found = "", []
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            said = source
            words += len(source.split())
        else:
            guesses += len(re.findall(r"predict\([^\n]*\bNone\b|[])\de\"]: None(?=}|, )|: float = None", source))
            lines += sum(bool(line.strip()) for line in source.splitlines())
            for name in _STUB.findall(source):
                found.append(Exercise(name, len(said.split()), _to_write(rung, name, names)))
    return Lab(words - sum(exercise.words for exercise in found), lines, guesses, found)


def _to_write(rung: str, name: str, others: list[str]) -> int:
    """Return the characters of a worked exercise, with its helpers, without docstrings and line breaks."""
    solutions: Path = course_folder() / "labs" / "solutions" / f"rung{rung}.py"
    tree = ast.parse(solutions.read_text(encoding="utf-8"))
    known = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    wanted = [name]
    for each in wanted:
        used = {node.id for node in ast.walk(known[each]) if isinstance(node, ast.Name)}
        wanted += sorted(used & set(known) - set(wanted) - set(others))
    docs = sum(len("".join((ast.get_docstring(known[each]) or "").split())) for each in wanted)
    return sum(len("".join(ast.unparse(known[each]).split())) for each in wanted) - docs
