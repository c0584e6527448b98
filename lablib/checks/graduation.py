"""The end of the course: every "Done when" of the eleven rungs, tried on the learner's own answers.

    for outcome in examine(Path("work")):
        print(outcome)

Each answer is judged in a process of its own, so one that hangs or crashes costs only itself.
The five requirements are those that the course's syllabus names as the least to leave with.

Chapter: book/11_practical_fsdp.md
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lablib.calc.course_plan import RUN_GPU_LABS
from lablib.checks.learner_answers import answer_source, is_untouched
from lablib.launch.scaling_records import gpu_report

TIMEOUT_S = 180.0
#: "passed on CPU ranks": the answer is right, and the run that its sentence speaks of has not happened yet.
Status = Literal["passed", "passed on CPU ranks", "not attempted", "wrong", "no lab"]


@dataclass(frozen=True)
class Goal:
    """One rung's "Done when" and the checks that prove it.

    Attributes:
        rung: Two digits.
        title: Of the rung.
        done_when: The sentence.
        checks: Names of the checks, all of which must pass.
        rented: Whether its sentence speaks of a run on several GPUs, which a report must show.
    """

    rung: str
    title: str
    done_when: str
    checks: tuple[str, ...]
    rented: bool = False


GOALS = (
    Goal("01", "Why distributed training",
         "You can compute memory requirements for a training run from model size and optimizer choice.",
         ("run_memory",)),
    Goal("02", "Data parallelism",
         "You can explain DDP and where its bottleneck is.", ("ddp_bottleneck",)),
    Goal("03", "Tensor parallelism",
         "You can explain why attention's QKV projections are easy to tensor-parallelize.", ("split_qkv",)),
    Goal("04", "Pipeline parallelism",
         "You can explain pipeline bubbles and 1F1B scheduling at a conceptual level.", ("explain_1f1b",)),
    Goal("05", "ZeRO",
         "You can explain what each ZeRO stage shards and the tradeoffs.", ("zero_tradeoffs",)),
    Goal("06", "FSDP",
         "You can explain FSDP's wrapping policies and when to use them.", ("choose_wrapping",)),
    Goal("07", "3D parallelism",
         "You can sketch a 3D parallelism layout for an 8-GPU setup.", ("sketch",)),
    Goal("08", "Mixed precision",
         "You can explain why bf16 is preferred over fp16 for stability.", ("what_breaks",)),
    Goal("09", "Activation checkpointing",
         "You can explain when to use gradient checkpointing.", ("choose",)),
    Goal("10", "Communication",
         "You can explain ring all-reduce and why bandwidth (not latency) matters most for it.",
         ("ring_all_reduce", "choose_algorithm", "place")),
    Goal("11", "A real FSDP run",
         "You have run a multi-GPU job and observed scaling behavior.", ("observe_scaling",), rented=True),
)  # fmt: skip


@dataclass(frozen=True)
class Requirement:
    """One of the five things to leave with.

    Attributes:
        text: What it asks.
        rungs: The rungs whose "Done when" proves it.
        rented: Whether it also wants a report made on several GPUs.
    """

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
    """What became of one check.

    Attributes:
        rung: Two digits.
        name: Of the check.
        status: "passed", "passed on CPU ranks", "not attempted", "wrong" or "no lab".
        message: One sentence.
    """

    rung: str
    name: str
    status: Status
    message: str


def exercises(rung: str) -> list[str]:
    """Return the names of all checks of a rung, in the order of their modules.

    Args:
        rung: Two digits.
    """
    checks = importlib.import_module(f"lablib.checks.rung{rung}")
    return [name for name, value in vars(checks).items() if getattr(value, "is_check", False)]


def examine(
    work: Path, *, rungs: Sequence[str] | None = None, every: bool = False, timeout: float = TIMEOUT_S
) -> Iterator[Outcome]:
    """Yield what became of each check, as soon as it is known; nothing that an answer does ends this.

    Args:
        work: Folder of the learner's notebooks.
        rungs: Two digits each; None means all eleven.
        every: Try all exercises, not those of "Done when" alone.
        timeout: Seconds for one check.

    Raises:
        ValueError: If a rung does not exist, or the timeout is not positive.
    """
    if not timeout > 0:
        raise ValueError(f"timeout={timeout:g} must be above 0 seconds")
    known = [goal.rung for goal in GOALS]
    chosen = known if rungs is None else [rung.zfill(2) for rung in rungs]
    if unknown := sorted(set(chosen) - set(known)):
        raise ValueError(f"there is no rung {', '.join(unknown)}; there are {known[0]} to {known[-1]}")
    for goal in (goal for goal in GOALS if goal.rung in chosen):
        notebooks = sorted(p for p in work.glob(f"{goal.rung}_*.ipynb") if not p.name.endswith(".new.ipynb"))
        names = exercises(goal.rung) if every else goal.checks
        for name in names:
            if not notebooks:
                yield Outcome(
                    goal.rung, name, "no lab", f"{work} has no lab {goal.rung}: `make lab` copies it there."
                )
            else:
                outcome = _examine_one(notebooks[0], goal.rung, name, timeout)
                here = goal.rented and name in goal.checks and outcome.status == "passed"
                yield _not_yet_on_gpus(outcome) if here and gpu_report() is None else outcome


def _not_yet_on_gpus(outcome: Outcome) -> Outcome:
    told = f"Not yet on GPUs, which its sentence asks for: {RUN_GPU_LABS}"
    return replace(outcome, status="passed on CPU ranks", message=told)


def _examine_one(notebook: Path, rung: str, name: str, timeout: float) -> Outcome:
    try:
        source = answer_source(notebook, name)
    except ValueError as error:
        return Outcome(rung, name, "wrong", str(error))
    if source is None or is_untouched(source, name):
        return Outcome(rung, name, "not attempted", f"{name} in {notebook.name} is still a stub.")
    with tempfile.TemporaryDirectory(prefix="graduate-") as folder:
        result = Path(folder) / "verdict.json"
        process = subprocess.Popen(
            [sys.executable, "-m", "lablib.checks.run_answer", str(notebook), rung, name, str(result)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            errors = process.communicate(timeout=timeout)[1]
        except subprocess.TimeoutExpired:
            _end(process)
            return Outcome(rung, name, "wrong", f"It gave no result in {timeout:g} seconds: does it end?")
        finally:
            if process.poll() is None:
                _end(process)
        if not result.exists():
            last = (errors.strip().splitlines() or ["no word"])[-1]
            return Outcome(rung, name, "wrong", f"Its process ended with code {process.returncode}: {last}")
        verdict = json.loads(result.read_text(encoding="utf-8"))
    return Outcome(rung, name, verdict["status"], verdict["message"])


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and its session, what it left behind when it ended itself included; its ranks follow it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def unmet(requirement: Requirement, passed: Sequence[str], report: Path | None) -> list[str]:
    """Return what a requirement still wants, one phrase each; nothing if it is met.

    Args:
        requirement: One of `REQUIREMENTS`.
        passed: Rungs of which every "Done when" check passed.
        report: From `lablib.launch.scaling_records.gpu_report`.
    """
    left = [f"rung {rung}" for rung in requirement.rungs if rung not in passed]
    if requirement.rented and report is None:
        left.append(f"a report of a real model on two GPUs or more: {RUN_GPU_LABS}")
    return left
