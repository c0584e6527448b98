"""The end of the course: every "Done when" of the rungs, tried on the learner's own answers.

    for outcome in examine(Path("work")):
        print(outcome)

A notebook's cells are parsed, not run: one that stops half-way, or that trains for minutes, gives its functions all the
same. What a function uses of the other cells, imports, helpers and constants, comes along, as deep as it goes.
Each answer is judged in a process of its own, so one that hangs or crashes costs only itself:
`python -m lablib.checks.answers judge NOTEBOOK NAME RESULT RUNG`.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import json
import linecache
import os
import re
import resource
import signal
import subprocess
import symtable
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lablib.calc.errors import read_json
from lablib.calc.runs import RUN_GPU_LABS
from lablib.checks.judging import Verdict
from lablib.launch.ranks import TURNS, place

TIMEOUT_S = 180.0
LARGEST_B = 2**30  # bytes of a file that an answer may write
#: What leaves nothing of what a name was before; `table[0] = 1` reads it first.
_WHOLE = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign
#: "passed on CPU ranks": the answer is right, and the run that its sentence speaks of has not happened yet.
Status = Literal["passed", "passed on CPU ranks", "not attempted", "wrong", "no lab"]


@dataclass(frozen=True)
class Goal:
    """One rung's "Done when" sentence and the checks that prove it, all of which must pass.

    If `rented`, its sentence speaks of a run on several GPUs, which a report must show.
    A rung that stands `above` the ladder is tried like the others; graduation does not ask for it.
    """

    rung: str
    title: str
    done_when: str
    checks: tuple[str, ...]
    rented: bool = False
    above: bool = False


GOALS = (
    Goal("01", "Why distributed training",
         "You can compute memory requirements for a training run from model size and optimizer choice.",
         ("run_memory",)),
    Goal("02", "Data parallelism",
         "You can explain DDP and where its bottleneck is.", ("train_ddp", "ddp_bottleneck")),
    Goal("03", "Tensor parallelism",
         "You can explain why attention's QKV projections are easy to tensor-parallelize.", ("split_qkv",)),
    Goal("04", "Pipeline parallelism",
         "You can explain pipeline bubbles and 1F1B scheduling at a conceptual level.", ("explain_1f1b",)),
    Goal("05", "ZeRO",
         "You can explain what each ZeRO stage shards and the tradeoffs.", ("zero_tradeoffs",)),
    Goal("06", "FSDP",
         "You can explain FSDP's wrapping policies and when to use them.", ("choose_wrapping", "apply_fsdp")),
    Goal("07", "3D parallelism",
         "You can sketch a 3D parallelism layout for an 8-GPU setup.", ("sketch", "build_mesh")),
    Goal("08", "Mixed precision",
         "You can explain why bf16 is preferred over fp16 for stability.", ("what_breaks",)),
    Goal("09", "Activation checkpointing",
         "You can explain when to use gradient checkpointing.", ("choose",)),
    Goal("10", "Communication",
         "You can explain ring all-reduce and why bandwidth (not latency) matters most for it, and when that stops being true.",
         ("ring_all_reduce", "fast_all_reduce", "make_hook")),
    Goal("11", "A real FSDP run",
         "You have run a multi-GPU job and observed scaling behavior.", ("observe_scaling",), rented=True),
    Goal("12", "Context parallelism",
         "You can choose how a long sequence is split over ranks, say what it sends and what it balances, and write the step "
         "that trains on it as one process would.", ("packed_step", "choose_split"), above=True),
    Goal("13", "Expert parallelism",
         "You can say where the experts of a mixture live, who sends which tokens where, and over which ranks each "
         "gradient is averaged.", ("folded_step", "find_fault"), above=True),
    Goal("14", "Losing machines",
         "You can say what becomes of batch, order of data and weights when a group dies and when it comes back.",
         ("take_part",), above=True),
)  # fmt: skip


@dataclass(frozen=True)
class Requirement:
    """One of the five things to leave with, and the rungs that prove it; `rented` wants a report of GPUs besides."""

    text: str
    rungs: tuple[str, ...]
    rented: bool = False


REQUIREMENTS = (
    Requirement("Compute the memory requirements of a training run", ("01",)),
    Requirement("Explain DDP, FSDP and ZeRO", ("02", "05", "06")),
    Requirement("Tell tensor, pipeline and data parallelism apart", ("02", "03", "04", "07")),
    Requirement("Explain bf16 and gradient checkpointing", ("08", "09")),
    Requirement("Run a multi-GPU FSDP job on rented hardware", ("11",), rented=True),
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one check, with one sentence."""

    rung: str
    name: str
    status: Status
    message: str


def examine(
    work: Path, *, rungs: Sequence[str] | None = None, every: bool = False, timeout: float = TIMEOUT_S
) -> Iterator[Outcome]:
    """Yield the outcome of each check, as soon as it is known; nothing that an answer does ends this."""
    # Late: it loads all of training, which the process of an answer does not need.
    from lablib.launch.runs import gpu_report

    if not timeout > 0:
        raise ValueError(f"timeout={timeout:g} must be above 0 seconds")
    known = [goal.rung for goal in GOALS]
    chosen = known if rungs is None else [rung.zfill(2) for rung in rungs]
    if unknown := sorted(set(chosen) - set(known)):
        raise ValueError(f"there is no rung {', '.join(unknown)}; there are {known[0]} to {known[-1]}")
    for goal in (goal for goal in GOALS if goal.rung in chosen):
        notebook = own_lab(work, goal.rung)
        for name in exercises(goal.rung) if every else goal.checks:
            if notebook is None:
                yield Outcome(goal.rung, name, "no lab", f"{work} has no lab {goal.rung}: `make lab` copies it there.")
                continue
            status, message = _judged(notebook, goal.rung, name, timeout)
            if goal.rented and name in goal.checks and status == "passed" and gpu_report() is None:
                status = "passed on CPU ranks"
                message = f"Not yet on GPUs, which its sentence asks for: {RUN_GPU_LABS}"
            yield Outcome(goal.rung, name, status, message)


def own_lab(work: Path, rung: str) -> Path | None:
    """Return a learner's notebook of a rung, and no newer version that lies beside it; None if there is none."""
    found = [path for path in work.glob(f"{rung}_*.ipynb") if ".new" not in path.name]
    return min(found, key=lambda path: (len(path.name), path.name), default=None)  # and not its -Copy1


def exercises(rung: str) -> list[str]:
    """Return the names of all checks of a rung, in the order of their modules."""
    checks = importlib.import_module(f"lablib.checks.rung{rung}")
    return [name for name, value in vars(checks).items() if getattr(value, "is_check", False)]


def still_missing(requirement: Requirement, passed: Sequence[str], report: Path | None) -> list[str]:
    """Return what a requirement still wants, one phrase each."""
    left = [f"rung {rung}" for rung in requirement.rungs if rung not in passed]
    if requirement.rented and report is None:
        left.append(f"a report of a real model on two GPUs or more: {RUN_GPU_LABS}")
    return left


def _judged(notebook: Path, rung: str, name: str, timeout: float) -> tuple[Status, str]:
    """Return status and message of one check, run in a process of its own."""
    try:
        source = answer_source(notebook, name)
    except (ValueError, SyntaxError, RecursionError) as error:  # a cell that parses and cannot be compiled
        return "wrong", str(error)
    if source is None:
        return "not attempted", f"{name} is not, or not in the end, a `def` at the left edge of a cell that parses."
    if is_untouched(source, name):
        return "not attempted", f"In {notebook.name} the last `def {name}` at the left edge that parses is a stub."
    try:
        verdict = in_process("judge", notebook, name, rung, timeout=timeout)
    except ValueError as error:
        return "wrong", str(error)
    if not isinstance(verdict, dict) or not {"status", "message"} <= verdict.keys():
        return "wrong", "It wrote into the file of its own verdict."
    return verdict["status"], verdict["message"]


def in_process(work: str, notebook: Path, name: str, *more: str, timeout: float) -> Any:
    """Return what `python -m lablib.checks.answers` finds out about an answer, in a process of its own.

    Raises:
        ValueError: If it gives no result in time, or ends without one.
    """
    with tempfile.TemporaryDirectory(prefix="answers-") as folder:
        result, said = Path(folder) / "result.json", Path(folder) / "said"
        command = [sys.executable, "-Pm", "lablib.checks.answers", work, notebook.name, name, str(result), *more]
        with place(), said.open("wb") as errors:  # a turn is waited for before the clock starts
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
                env=os.environ | {TURNS: ""}, cwd=notebook.parent,  # where a kernel of the notebook is
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_B, LARGEST_B)),  # it fills no disk
            )  # fmt: skip
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise ValueError(f"It gave no result in {timeout:g} seconds: does it end?") from None
            finally:
                with suppress(ProcessLookupError):  # with all that it started, also where it has ended itself
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if not result.exists():
            last = (said.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no word"])[-1][:300]
            raise ValueError(f"Its process ended with code {process.returncode}: {last}")
        return json.loads(result.read_text(encoding="utf-8"))


def judge(notebook: Path, rung: str, name: str) -> Verdict:
    """Define an answer as the notebook does, and run its check."""
    check = getattr(importlib.import_module(f"lablib.checks.rung{rung}"), name)
    try:
        answer = defined(notebook, name)
    except Exception as error:
        return Verdict(name, "wrong", f"What {name} needs stopped with {type(error).__name__}: {error}")
    return check(answer)


def defined(notebook: Path, name: str) -> Callable[..., Any]:
    """Return an answer, defined as the notebook does."""
    source = answer_source(notebook, name)
    file = f"<{notebook.name}: {name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    sys.path.insert(0, "")  # as in a kernel, after its own imports: a queue.py of the learner's is not the library's
    # As in a notebook: functions of `__main__` are sent to ranks by value.
    answers: dict[str, object] = {"__name__": "__main__", "display": lambda *_, **__: None}
    if awaits := eval(compile(source, file, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), answers):  # as a cell may
        asyncio.run(awaits)
    main = vars(sys.modules["__main__"])
    main |= answers | main  # where pickle looks for its classes
    return answers[name]


def answer_source(notebook: str | Path, name: str) -> str | None:
    """Return a program that defines a function as a notebook's last definition does, or None if there is none."""
    try:
        cells = read_json(notebook)["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{notebook} is no notebook: {type(error).__name__}: {error}") from None
    statements = [each for source in sources for each in _parsed(source)]
    bound = [set(_defines(statement)) for statement in statements]
    end = len(bound)
    wanted, found = [(name, end), ("*", end)], set()  # what `from math import *` brings has no names here
    while wanted:
        read, before = wanted.pop()
        for line in [line for line in range(before) if read in bound[line]][::-1]:
            if (line, before) not in found:
                found.add((line, before))
                wanted += _reads(statements[line], line, before, end)
            if isinstance(statements[line], _WHOLE):
                break
    kept = [statements[line] for line in sorted({line for line, _ in found})]
    if not any(isinstance(each, ast.FunctionDef) and each.name == name for each in kept):
        return None
    return "\n\n".join(ast.unparse(each) for each in kept) + "\n"


def _parsed(source: str) -> list[ast.stmt]:
    """Return the statements of a cell: none of a broken one, and all but the lines for the shell and IPython's own."""
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.parse(source).body
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError, ImportError):
        shell = importlib.import_module("IPython.core.inputtransformer2").TransformerManager()  # late
        python = re.sub(r"(?m)\A\s*%%(?:time|capture|prun)\b.*|^%time ", "", source)  # what %%bash holds is none
        return ast.parse(shell.transform_cell(python)).body
    return []


def is_untouched(source: str, name: str) -> bool:
    """Say whether a function of a program is still the stub that raises NotImplementedError."""
    functions = [s for s in ast.parse(source).body if isinstance(s, ast.FunctionDef) and s.name == name]
    body = [s for s in functions[-1].body if not isinstance(getattr(s, "value", None), ast.Constant)]
    return len(body) == 1 and isinstance(body[0], ast.Raise) and "NotImplementedError" in ast.unparse(body[0])


def _defines(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a cell defines or changes."""
    nodes: list[ast.AST] = [statement]
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.split(".")[0]
        elif isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield re.match(r"\w*", ast.unparse(node))[0]  # `table[0] = 1` binds what table is
        else:  # the k of `[k for k in x]` is its own, and `case [k, *more]` binds both
            yield from (name for name in vars(node).values() if isinstance(node, ast.pattern) and isinstance(name, str))
            own = node.target if isinstance(node, ast.comprehension) else None
            nodes += [each for each in ast.iter_child_nodes(node) if each is not own]


def _reads(statement: ast.stmt, line: int, before: int, end: int) -> Iterator[tuple[str, int]]:
    """Yield the notebook's names that a statement reads, and before which line it does: a function when it is called."""
    cell = symtable.symtable(ast.unparse(statement), "cell", "exec")
    yield from ((symbol.get_name(), line) for symbol in cell.get_symbols() if symbol.is_referenced())
    called = (before, end) if isinstance(statement, ast.FunctionDef) else (line, before, end)
    scopes = cell.get_children()
    for one in scopes:  # a function's parameters and locals are none of them; a class may say `size = size`
        scopes += one.get_children()
        of = [s for s in one.get_symbols() if s.is_global() or (s.is_referenced() and one.get_type() == "class")]
        yield from ((s.get_name(), when) for s in of for when in called)
