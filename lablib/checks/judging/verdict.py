"""The verdict of a check: passed, not attempted, or which idea is wrong, and the hints that follow a wrong one."""

from __future__ import annotations

import ast
import functools
import html
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lablib.checks.judging.guard import MOST_LINES, Answer, Wrong, guarded, own_line
from lablib.launch.records import CHECKED, repository_root

_Status = Literal["passed", "not attempted", "wrong"]
Kind = Literal["", "work", "fault"]


@dataclass(frozen=True)
class Verdict:
    """The outcome of one check.

    Attributes:
        status: "passed", "not attempted" or "wrong".
    """

    name: str
    status: _Status
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
    judge: Callable[..., str | None] | None = None,
    *,
    idea: str = "",
    section: str = "",
    line: str = "",
    lines: int = MOST_LINES,
    kind: Kind = "",
) -> Callable[..., Verdict]:
    """Turn a judging function into a check that never stops the notebook.

    The judge calls the learner's answer and raises `Wrong` with a sentence about the idea.
    It may return a sentence to print when the answer is right.
    A `NotImplementedError` from the answer means that the stub is untouched.
    Any other exception of the answer is reported as wrong, with its type, its text and the learner's line.
    The judge runs inside `guarded`, and each call of the answer has lines of its own.
    Each call of the check's `hint()` says more: idea, section, line, and at last the solution.

    Args:
        idea: What to think of, in one sentence.
        section: The heading of the section of the rung's chapter that has it.
        line: What the deciding line of code must do, in one sentence.
        lines: How many lines of Python the answer may run for one case.
        kind: "work" for what is written at work, judged by running it; "fault" for one that is not announced, to find on
            ranks; each rung has both.
    """
    if judge is None:
        return functools.partial(check, idea=idea, section=section, line=line, lines=lines, kind=kind)
    hints, given = Hints(idea, section, line), 0
    rung = judge.__module__.rpartition(".")[2]

    @functools.wraps(judge)
    def run(*answers: object) -> Verdict:
        verdict = Verdict(judge.__name__, *_judged(judge, answers, lines))
        CHECKED[judge.__name__] = verdict.status
        asks = verdict.status == "wrong" and hints.idea
        more = f"\nFor a hint: {rung}.{judge.__name__}.hint()" if asks else ""
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

    run.is_check, run.hints, run.hint, run.kind = True, hints, hint, kind
    return run


def _judged(judge: Callable[..., str | None], answers: tuple, lines: int) -> tuple[_Status, str]:
    """Return the status and the sentence, whatever the answer does."""
    try:
        with guarded(lines=lines):
            return "passed", judge(*(Answer(one, lines) if callable(one) else one for one in answers)) or ""
    except NotImplementedError:
        return "not attempted", "A stub's raise line was reached: replace it with your answer."
    except Wrong as wrong:
        return "wrong", str(wrong)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a check never stops the notebook
        try:
            with guarded(lines=lines):
                text = f": {error}"[:300]
        except BaseException:  # the text of an exception is code of the answer's: it may fail, exit, or never end
            text = ""
        return "wrong", f"Your answer stopped{own_line(error)} with {type(error).__name__}{text}"


def _tell(shown: _Shown) -> None:
    """Show a verdict in a notebook, and print it elsewhere."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None and shell.has_trait("kernel"):
        from IPython.display import display

        display(shown)
    else:
        print(shown)


def _solution(rung: str, name: str) -> str:
    """Return the source of a worked exercise with all that it uses, so that it runs where it is pasted."""
    path = repository_root() / "labs" / "solutions" / f"{rung}.py"
    if not path.exists():
        return "The solutions are not in this copy."
    text = path.read_text(encoding="utf-8")
    bound = [(node, names) for node in ast.parse(text).body if (names := _bound(node))]
    known = {one: node for node, names in bound for one in names}
    wanted = [name]
    for each in wanted:  # with what it uses, as deep as that goes
        used = {node.id for node in ast.walk(known[each]) if isinstance(node, ast.Name)} if each in known else set()
        wanted += sorted((used & set(known)) - set(wanted))
    imports, parts = [], []
    for node, names in bound:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [alias for alias in node.names if _bound_by(alias) in wanted]
            imports += [ast.unparse(node)] if node.names else []
        elif set(names) & set(wanted):
            first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
            parts.append("\n".join(text.splitlines()[first - 1 : node.end_lineno]))
    return "\n\n\n".join([*["\n".join(imports)] * bool(imports), *parts, f"# from labs/solutions/{rung}.py"])


def _bound(node: ast.stmt) -> list[str]:
    """Return the names that a statement of a module binds."""
    if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.module != "__future__"):
        return [_bound_by(alias) for alias in node.names]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []


def _bound_by(alias: ast.alias) -> str:
    return (alias.asname or alias.name).partition(".")[0]
