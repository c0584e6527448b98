"""`rung graduate`: every "Done when" on your own answers, and what is left."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lablib.calc.errors import json_text


def graduate(
    rungs: Annotated[list[str] | None, typer.Argument(help="Rungs, for example 01 06. Default: all.")] = None,
    work: Annotated[Path | None, typer.Option(help="Folder of your labs; default: work/.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Check every exercise, not only Done when.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds for one check.")] = 180,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check your answers in work/ against every Done when, and say what is left to do."""
    from lablib.checks.graduation import GOALS, REQUIREMENTS, examine, unmet
    from lablib.launch.records import repository_root
    from lablib.launch.runs import gpu_report

    work = work or repository_root() / "work"
    outcomes, told = [], set()
    goals = {goal.rung: goal for goal in GOALS}
    for outcome in examine(work, rungs=rungs, every=every, timeout=timeout):
        outcomes.append(outcome)
        if as_json:
            continue
        if outcome.rung not in told:
            told.add(outcome.rung)
            goal = goals[outcome.rung]
            typer.echo(f"\n{goal.rung} {goal.title}\n" + textwrap.indent(textwrap.fill(goal.done_when, 77), "   "))
        typer.echo(f"   {outcome.name}: {outcome.status}")
        if outcome.status in ("wrong", "passed on CPU ranks"):
            typer.echo(textwrap.indent(textwrap.fill(outcome.message, 74), "      "))
    checks = {rung: goal.checks for rung, goal in goals.items()}
    good = {(outcome.rung, outcome.name) for outcome in outcomes if outcome.status == "passed"}
    passed = [rung for rung, names in checks.items() if all((rung, name) in good for name in names)]
    ladder = [rung for rung, goal in goals.items() if not goal.above]
    climbed = [rung for rung in passed if rung in ladder]
    report = gpu_report()
    left = {requirement.text: unmet(requirement, passed, report) for requirement in REQUIREMENTS}
    ready = rungs is None and climbed == ladder and not any(left.values())
    if as_json:
        content = {
            "outcomes": [asdict(o) for o in outcomes],
            "passed": passed,
            "requirements": left,
            "graduated": ready,
        }
        typer.echo(json_text(content))
    else:
        above = len(passed) - len(climbed)
        typer.echo(
            f"\n{len(climbed)} of {len(ladder)} rungs are done" + (f", and {above} above the ladder." if above else ".")
        )
        if rungs is None:
            typer.echo("\nThe least to leave with:")
            for text, wanting in left.items():
                typer.echo(f"   {'done' if not wanting else 'left':<6}{text}")
                for phrase in wanting:
                    typer.echo(f"         - {phrase}")
        if ready:
            typer.echo("\nThat is all of it. You can leave this course.")
    asked = [outcome for outcome in outcomes if rungs is not None or outcome.rung in ladder]
    if any(outcome.status != "passed" for outcome in asked) or (rungs is None and not ready):
        raise typer.Exit(1)
