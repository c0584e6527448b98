"""`rung memory --at` and `--explain`: one moment of a training step, and where each of its bytes comes from."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING

import typer

from lablib.cli.memory import sentence, verdict

if TYPE_CHECKING:
    from lablib.calc.hardware import Accelerator
    from lablib.calc.memory_timeline import MemoryTimeline
    from lablib.calc.run_config import RunConfig


def print_moment(
    run: RunConfig,
    *,
    step: str,
    stage: int | None,
    at: str,
    explain: bool,
    device: Accelerator | None,
    unit: str,
    as_json: bool,
) -> None:
    """Print one moment, or all of them.

    Args:
        run: The settings.
        step: How the optimizer runs.
        stage: Pipeline stage; None: the one with the highest peak.
        at: "peak", the name of a moment, or "all" for a line each.
        explain: Whether to print formula, numbers and source of each term.
        device: Accelerator to compare the peak with, at whatever moment.
        unit: Unit of bytes.
        as_json: Whether to print JSON.

    Raises:
        ValueError: If a setting, the moment or the unit is unknown.
    """
    from lablib.calc.choices import one_of
    from lablib.calc.memory_explain import explain_moment
    from lablib.calc.memory_timeline import memory_timeline
    from lablib.calc.units import BYTE_UNITS

    size = BYTE_UNITS[one_of("unit", unit, BYTE_UNITS)]
    digits = 0 if size == 1 else 2
    timeline = memory_timeline(run, step=step, stage=stage)
    if at == "all":
        if as_json:
            typer.echo(json.dumps(timeline.as_dict() | verdict(timeline.peak_bytes, device), indent=1))
            return
        typer.echo(_heading(timeline))
        for moment in timeline.moments:
            mark = "  <- peak" if moment is timeline.peak else ""
            typer.echo(f"{moment.name:<32}{moment.total / size:>20,.{digits}f}{mark}")
        _compare(timeline, device)
        return
    moment = timeline.moment(at)
    lines = explain_moment(timeline, at, run, step)
    if as_json:
        found = {"moment": moment.name, "operator": moment.at, "total": moment.total}
        found |= {"terms": [line.__dict__ for line in lines]} | verdict(timeline.peak_bytes, device)
        typer.echo(json.dumps(found, indent=1))
        return
    typer.echo(_heading(timeline))
    typer.echo(f"{'at ' + moment.name:<32}{unit:>20}{'share':>9}")
    for line in lines:
        share = line.bytes / moment.total
        name = line.term.removeprefix("activations.").replace("_", " ")
        name = f"kept: {name}" if line.term.startswith("activations.") else name
        typer.echo(f"  {name:<30}{line.bytes / size:>20,.{digits}f}{share:>9.1%}")
        if explain:
            for text in (line.formula, line.numbers, f"{line.proof}; {line.source}"):
                typer.echo(textwrap.fill(text, 96, initial_indent="      ", subsequent_indent="        "))
    typer.echo(f"{'total':<32}{moment.total / size:>20,.{digits}f}")
    if moment.at:
        typer.echo(f"\nFullest while this operator runs: {moment.at}.")
    _compare(timeline, device)


def _compare(timeline: MemoryTimeline, device: Accelerator | None) -> None:
    if device:
        typer.echo(f"\nAt the peak:\n{sentence(timeline.peak_bytes, device)}")


def _heading(timeline: MemoryTimeline) -> str:
    from lablib.calc.choices import plural

    ranks = plural(timeline.ranks, "rank")
    place = f"; the peak is at {timeline.peak.name}"
    return (
        f"{timeline.model}, {timeline.recipe}, {plural(timeline.seq, 'token')} a sequence, {ranks}{place}\n"
    )
