"""The verdict of a check: passed, not attempted, or which idea is wrong, and the hints that follow a wrong one."""

from __future__ import annotations

import ast
import dis
import functools
import html
import operator
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Literal

from lablib.launch.records import repository_root

#: Lines of Python that an answer may run for one case: a second of work, a hundred times what a search needs.
MOST_LINES = 1_000_000

#: Where lines are not counted: a library's first use may import a million of them, as `torch.optim.SGD` does.
_LIBRARIES = ("<frozen ", *(sysconfig.get_paths()[where] for where in ("stdlib", "purelib", "platlib")))


class Wrong(Exception):
    """Raised by a check: one sentence about the idea that is wrong."""


class _Endless(BaseException):
    """Raised inside an answer that does not come to its end; no `except Exception` of the answer holds it up."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one check.

    Attributes:
        status: "passed", "not attempted" or "wrong".
    """

    name: str
    status: Literal["passed", "not attempted", "wrong"]
    message: str

    def __str__(self) -> str:
        """Return the line that a terminal prints."""
        return f"{self.name}: {self.status}" + (f". {self.message}" if self.message else ".")


@dataclass(frozen=True)
class Hints:
    """What a learner may ask for, one after the other: the idea, where it stands, what the line must do."""

    idea: str
    section: str
    line: str


#: Each status has its own edge in a notebook, so that a glance tells them apart, without colour too.
_EDGES = {"passed": "solid #1b9e77", "wrong": "double #cf5a3c", "not attempted": "dotted #8c939c"}


class _Shown:
    """A verdict as a notebook shows it."""

    def __init__(self, verdict: Verdict, more: str) -> None:
        self.verdict, self.more = verdict, more

    def _repr_html_(self) -> str:
        edge = _EDGES[self.verdict.status]
        text = html.escape(self.verdict.message + self.more).replace("\n", "<br>")
        head = f"<b>{self.verdict.name}: {self.verdict.status}.</b>"
        return f'<div style="border-left: 6px {edge}; padding: 0 0.8em">{head} {text}</div>'

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return f"{self.verdict}{self.more}"


def check(
    judge: Callable[..., str | None] | None = None, *, idea: str = "", section: str = "", line: str = ""
) -> Callable[..., Verdict]:
    """Turn a judging function into a check that never stops the notebook.

    The judge calls the learner's answer and raises `Wrong` with a sentence about the idea.
    It may return a sentence to print when the answer is right.
    A `NotImplementedError` from the answer means that the stub is untouched.
    Any other exception of the answer is reported as wrong, with its type and text.
    Each call of the check's `hint()` says more: idea, section, line, and at last the solution.

    Args:
        idea: What to think of, in one sentence.
        section: The heading of the section of the rung's chapter that has it.
        line: What the deciding line of code must do, in one sentence.
    """
    if judge is None:
        return functools.partial(check, idea=idea, section=section, line=line)
    hints, given = Hints(idea, section, line), 0
    rung = judge.__module__.rpartition(".")[2]

    @functools.wraps(judge)
    def run(*answers: object) -> Verdict:
        more = ""
        try:
            message = judge(*answers) or ""
            verdict = Verdict(judge.__name__, "passed", message)
        except NotImplementedError:
            verdict = Verdict(judge.__name__, "not attempted", "Replace the raise line with your answer.")
        except Wrong as wrong:
            verdict = Verdict(judge.__name__, "wrong", str(wrong))
        except Exception as error:
            message = f"Your answer stopped with {type(error).__name__}: {error}"
            verdict = Verdict(judge.__name__, "wrong", message)
        if verdict.status == "wrong" and hints.idea:
            more = f"\nFor a hint: {rung}.{judge.__name__}.hint()"
        _tell(_Shown(verdict, more))
        return verdict

    def hint() -> None:
        nonlocal given
        steps = [
            f"Idea: {hints.idea}",
            f'Section: "{hints.section}", in chapter {rung.removeprefix("rung")}.',
            f"Line: {hints.line}",
            f"Solution:\n\n{_solution(rung, judge.__name__)}",
        ]
        print(steps[given])
        if given < len(steps) - 1:
            given += 1
            print("Call it again for the next hint." if given < len(steps) - 1 else "Call it again for the solution.")

    run.is_check, run.hints, run.hint = True, hints, hint
    return run


def ask(answer: Callable, *case: object) -> Any:
    """Return the answer for a case; a loop without end is ended by counting its lines, on any machine alike."""
    lines = 0

    def count(frame: FrameType, event: str, arg: object) -> Callable | None:
        nonlocal lines
        if event == "call" and frame.f_code.co_filename.startswith(_LIBRARIES):
            return None
        if event == "call":
            frame.f_trace_opcodes = _spins(frame.f_code)
        lines += event in ("line", "opcode")
        if lines > MOST_LINES:
            raise _Endless
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        return answer(*case)
    except _Endless:
        shown = ", ".join(f"{value:g}" if isinstance(value, float) else repr(value) for value in case)
        where = f" for {shown}" if len(shown) < 100 else ""
        raise Wrong(f"It never ends{where}: a loop waits for something that no line in it brings about.") from None
    finally:
        sys.settrace(before)


@functools.lru_cache
def _spins(code: CodeType) -> bool:
    """Say whether a jump leads to itself, as `while True: pass` does on one line: Python 3.11 counts no line there."""
    return any(step.argval == step.offset and step.opname.startswith("JUMP") for step in dis.get_instructions(code))


def whole(value: object, what: str = "The answer") -> int:
    """Return a number as an int, whatever type it has; raise `Wrong` if it is not whole."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = _number(value, what)
    if not number.is_integer():
        raise Wrong(f"{what} should be a whole number, and is {number:g}.")
    return int(number)


def numbers(values: object, what: str = "The answer") -> list:
    """Return a sequence as a list, whatever type it has; raise `Wrong` if it is none."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, str | dict) or not hasattr(values, "__iter__"):
        raise Wrong(f"{what} should be a list, and is {values!r}.")
    return list(values)


def close(answer: object, truth: float, *, rel: float = 1e-6) -> bool:
    """Say whether a learner's number equals the truth to a relative tolerance."""
    return abs(_number(answer, "The answer") - truth) <= rel * max(abs(truth), 1e-12)


def some(numbers: list[int]) -> str:
    """Return a few numbers as they are, and many as how many they are."""
    return f"{numbers}" if len(numbers) < 4 else f"[{len(numbers)} of them]"


def _number(value: object, what: str) -> float:
    if getattr(value, "size", 0) == 1 and hasattr(value, "item"):  # numpy's array of one number
        value = value.item()
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise Wrong(f"{what} should be a number, and is {value!r}.") from None


def _tell(shown: _Shown) -> None:
    """Show a verdict in a notebook, and print it elsewhere."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None and shell.has_trait("kernel"):
        from IPython.display import display

        display(shown)
    else:
        print(shown)


def _solution(rung: str, name: str) -> str:
    """Return the source of a worked exercise."""
    path = repository_root() / "labs" / "solutions" / f"{rung}.py"
    if not path.exists():
        return "The solutions are not in this copy."
    text = path.read_text(encoding="utf-8")
    known = {node.name: node for node in ast.parse(text).body if hasattr(node, "name")}
    wanted = [name]
    for each in wanted:  # with the helpers that it uses, as deep as they go
        used = {node.id for node in ast.walk(known[each]) if isinstance(node, ast.Name)} if each in known else set()
        wanted += sorted((used & set(known)) - set(wanted))
    parts = [ast.get_source_segment(text, node) for each, node in known.items() if each in wanted]
    return "\n\n\n".join([*parts, f"# from labs/solutions/{rung}.py"])
