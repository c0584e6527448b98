"""`rung memory`: bytes per rank by term, and whether they fit; one instant of a step, and where its bytes come from.

`settings_as_options` gives a command, this one and `rung fit`, an option for each field of `RunConfig`.
"""

from __future__ import annotations

import functools
import inspect
import os
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lablib.calc.errors import json_text
from lablib.calc.memory import SETTINGS
from lablib.calc.units import MiB, parse_bytes, parse_tokens

if TYPE_CHECKING:
    from lablib.calc.runs import HeldMemory, MemoryHistory


Reserve = Annotated[str, typer.Option(help="Memory that a run should leave free on each GPU.")]


def settings_as_options(
    command: Callable | None = None, *, optional: bool = False, leave_out: Iterable[str] = ()
) -> Any:
    """Give a command with `**settings` an option for each setting, behind its arguments."""
    if command is None:
        return lambda function: settings_as_options(function, optional=optional, leave_out=leave_out)
    hints = typing.get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    own = [
        parameter.replace(annotation=hints[name])
        for name, parameter in signature.parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    made = [_option(name, optional) for name in SETTINGS if name not in leave_out]
    first = [p for p in own if p.kind is not p.KEYWORD_ONLY]
    parameters = [*first, *made, _kernels(), *own[len(first) :]]

    @functools.wraps(command)
    def run(*args: object, kernels: str | None, **given: object) -> None:
        if kernels is not None:
            typer.echo("DeprecationWarning: --kernels is now called --implementation", err=True)
            given["implementation"] = kernels
        command(*args, **given)

    run.__signature__ = signature.replace(parameters=parameters)
    run.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    return run


def _kernels() -> inspect.Parameter:
    """The old name of --implementation, which help does not show."""
    annotation = Annotated[str | None, typer.Option("--kernels", hidden=True)]
    return inspect.Parameter("kernels", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option(name: str, optional: bool) -> inspect.Parameter:
    setting = SETTINGS[name]
    default = f"{setting.default // MiB} MiB" if name == "bucket_bytes" else setting.default
    kind = {
        "seq": str,
        "num_microbatches": int,
        "etp": int,
        "shard": int,
        "prefetch": int,
        "dropout": float,
        "layers_per_stage": str,
    }.get(name, type(default))
    if optional or default is None:
        kind, default = kind | None, None
    annotation = Annotated[kind, typer.Option(help=setting.metadata["help"])]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def from_text(settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings as the calculators take them: sizes and lists are text on the command line.

    Raises:
        ValueError: If a text does not parse.
    """
    found = dict(settings)
    if found.get("seq") is not None:
        found["seq"] = parse_tokens(found["seq"])
    if "bucket_bytes" in found:
        found["bucket_bytes"] = parse_bytes(str(found["bucket_bytes"]))
    if found.get("layers_per_stage") is not None:
        text = str(found["layers_per_stage"])
        try:
            found["layers_per_stage"] = [int(part) for part in text.split(",")]
        except ValueError:
            raise ValueError(f"--layers-per-stage={text!r} must be whole numbers with commas, like 7,8,8,7") from None
    return found


if TYPE_CHECKING:
    from lablib.calc.memory import MemoryBreakdown, RunConfig, Verdict
    from lablib.calc.memory.timeline import MemoryInstant, MemoryTimeline


@settings_as_options
def memory(
    model: Annotated[str, typer.Argument(help="Name (see `rung models`) or path of a config.json.")],
    *,
    stage: Annotated[int | None, typer.Option(help="Pipeline stage, from 0; default: the largest.")] = None,
    step: Annotated[
        str, typer.Option(help="With --at, --explain or --gpu: foreach, for-loop or fused optimizer.")
    ] = "foreach",
    at: Annotated[
        str | None, typer.Option(help='An instant of the step: peak, "backward of block 3", ...; all lists them.')
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print formula, numbers and source of each term, at the peak.")
    ] = False,
    gpu: Annotated[str | None, typer.Option(help="Accelerator to fit on at the peak, for example h100.")] = None,
    reserve: Reserve = "2.5 GiB",
    unit: Annotated[str, typer.Option(help="Unit of the table: GB, GiB, MB, MiB or B.")] = "GB",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    **settings: object,
) -> None:
    """Print the bytes that one rank needs for a training step, by term, and whether they fit."""
    from lablib.calc.errors import one_of, plural
    from lablib.calc.memory import run_config, training_memory, verdict

    assumed = settings["seq"] is None
    run = run_config(named_model(model), **from_text(settings))
    if at is not None or explain or gpu is not None or step != "foreach":
        from lablib.calc.memory.timeline import STEPS, memory_peak, memory_timeline

        one_of("step", step, STEPS)
    if at is not None or explain:
        if explain and at == "all":
            raise ValueError("--explain is about one instant: leave --at all out, or name an instant")
        at = "peak" if at is None else at
        timeline = memory_timeline(run, step=step, stage=stage)
        found = None if gpu is None else verdict(timeline.peak_bytes, gpu, parse_bytes(reserve))
        how = {"step": step, "at": at, "explain": explain}
        _print_instant(run, timeline, **how, found=found, unit=unit, as_json=as_json)
        return
    peak = found = None
    if gpu is not None:
        whole = stage is None
        peak = memory_peak(run, step=step).instant if whole else memory_timeline(run, step=step, stage=stage).peak
        found = verdict(peak.total, gpu, parse_bytes(reserve))
    breakdown = training_memory(run, stage=stage)
    if as_json:
        typer.echo(json_text(breakdown.as_dict() | (found.as_dict() if found else {})))
    else:
        typer.echo(memory_table(breakdown, unit=unit, pp=run.pp))
        _compare(peak, found, unit)
        if assumed:
            typer.echo(
                f"\n{plural(breakdown.seq, 'token')}, the model's longest, because --seq was not given:"
                " add --seq with the length that you train at."
            )


def _print_instant(
    run: RunConfig,
    timeline: MemoryTimeline,
    *,
    step: str,
    at: str,
    explain: bool,
    found: Verdict | None,
    unit: str,
    as_json: bool,
) -> None:
    """Print one instant of the step, or a line for each of them, and the verdict, which is of the peak."""
    from lablib.calc.errors import one_of
    from lablib.calc.memory.timeline import explain_instant
    from lablib.calc.units import BYTE_UNITS

    size = BYTE_UNITS[one_of("unit", unit, BYTE_UNITS)]
    digits = 0 if size == 1 else 2
    judged = found.as_dict() if found else {}
    if at == "all":
        if as_json:
            typer.echo(json_text(timeline.as_dict() | judged))
            return
        typer.echo(_heading(timeline))
        for instant in timeline.instants:
            mark = "  <- peak" if instant is timeline.peak else ""
            typer.echo(f"{instant.name:<32}{instant.total / size:>20,.{digits}f}{mark}")
        _compare(timeline.peak, found, unit)
        return
    instant = timeline.instant(at)
    lines = explain_instant(timeline, at, run, step)
    if as_json:
        said = {"moment": instant.name, "operator": instant.at, "total": instant.total}
        said |= {"terms": [line.__dict__ for line in lines]} | judged
        typer.echo(json_text(said))
        return
    typer.echo(_heading(timeline))
    typer.echo(f"{'at ' + instant.name:<32}{unit:>20}{'share':>9}")
    for line in lines:
        share = line.bytes / instant.total
        name = line.term.removeprefix("activations.").replace("_", " ")
        name = f"kept: {name}" if line.term.startswith("activations.") else name
        typer.echo(f"  {name:<30}{line.bytes / size:>20,.{digits}f}{share:>9.1%}")
        if explain:
            for text in (line.formula, line.numbers, f"{line.proof}; {line.source}"):
                typer.echo(textwrap.fill(text, 96, initial_indent="      ", subsequent_indent="        "))
    typer.echo(f"{'total':<32}{instant.total / size:>20,.{digits}f}")
    if instant.at:
        typer.echo(f"\nFullest while this operator runs: {instant.at}.")
    _compare(timeline.peak, found, unit)


def _compare(instant: MemoryInstant | None, found: Verdict | None, unit: str) -> None:
    """Print the verdict, where there is a GPU."""
    from lablib.calc.units import BYTE_UNITS

    if found:
        size = BYTE_UNITS[unit]
        peak = f"{found.peak / size:,.{0 if size == 1 else 2}f} {unit}"
        text = f"At its peak, {instant.name}, a rank needs {peak}. {found}"
        typer.echo("\n" + "\n".join(textwrap.wrap(text, 80, break_on_hyphens=False)))


def _heading(timeline: MemoryTimeline) -> str:
    from lablib.calc.errors import plural

    ranks = plural(timeline.ranks, "rank")
    place = f"; the peak is at {timeline.peak.name}"
    return f"{timeline.model}, {timeline.recipe}, {plural(timeline.seq, 'token')} a sequence, {ranks}{place}\n"


def memory_table(breakdown: MemoryBreakdown, *, unit: str = "GB", pp: int = 1) -> str:
    """Return the breakdown as aligned text.

    Raises:
        ValueError: If the unit is unknown.
    """
    from lablib.calc.errors import one_of, plural
    from lablib.calc.units import BYTE_UNITS

    size = BYTE_UNITS[one_of("unit", unit, BYTE_UNITS)]
    digits = 0 if size == 1 else 2

    def row(name: str, value: int) -> str:
        share = f"{value / breakdown.total:>9.1%}" if breakdown.total else ""
        return f"{name:<32}{value / size:>20,.{digits}f}{share}"

    ranks = plural(breakdown.ranks, "rank")
    place = f"stage {breakdown.stage} of {pp}, a rank" if pp > 1 else "on one rank"
    lines = [f"{breakdown.model}, {breakdown.recipe}, {plural(breakdown.seq, 'token')} a sequence, {ranks}", ""]
    lines.append(f"{place:<32}{unit:>20}{'share':>9}")
    for name, terms in (
        ("states", breakdown.state_terms),
        ("activations", breakdown.activation_terms),
        ("buffers (estimates)", breakdown.buffer_terms),
    ):
        if terms:
            lines.append(row(name, sum(value for _, value in terms)))
            lines += [row("  " + term.removeprefix("activations.").replace("_", " "), value) for term, value in terms]
    lines.append(row("total", breakdown.total))
    if breakdown.host_terms:
        lines += ["", f"{'on the CPU, offloaded':<32}{breakdown.host / size:>20,.{digits}f}"]
    return "\n".join(lines)


def named_model(model: str) -> str | Path:
    """Return a path if there is such a file or folder, else the name; a folder without a config.json hides no preset."""
    from lablib.calc.models import preset_names

    here = Path(model)
    if model in preset_names() and not here.is_file() and not (here / "config.json").exists():
        return model
    return here if os.path.exists(model) else model


INSTANTS = ("peak", "oom", "end")
GROUPS = ("line", "module")


def memory_snapshot(
    file: Annotated[Path, typer.Argument(help="Written by torch.cuda.memory._dump_snapshot.")],
    at: Annotated[str, typer.Option(help=f"Which instant: {', '.join(INSTANTS)}.")] = "peak",
    by: Annotated[str, typer.Option(help="Group by line of the program, or by module: forward methods.")] = "line",
    device: Annotated[int | None, typer.Option(help="Number of the GPU, if the snapshot has several.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many lines of the program to print.")] = 10,
    unit: Annotated[str, typer.Option(help="Unit of bytes: B, MB, MiB, GB or GiB.")] = "GB",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read a CUDA memory snapshot: its peak, and which lines of the program hold it. Runs nothing in the file."""
    from lablib.calc.errors import one_of
    from lablib.calc.runs import load_snapshot, replay_snapshot
    from lablib.calc.units import BYTE_UNITS

    one_of("at", at, INSTANTS)
    one_of("by", by, GROUPS)
    size = BYTE_UNITS[one_of("unit", unit, BYTE_UNITS)]
    history = replay_snapshot(load_snapshot(file), device)
    held = _held(history, at)
    groups = held.by_line() if by == "line" else held.by_module()
    if as_json:
        found = {"device": history.device, "events": len(history.events), "missing": history.missing}
        found |= {"instant": held.events, "requested": held.requested, "reserved": held.reserved}
        typer.echo(json_text(found | {"rounding": held.rounded - held.requested, "groups": groups}))
        return
    rows = [
        ("requested by the program", held.requested, " "),
        ("  rounding to 512 bytes", held.rounded - held.requested, "+"),
        ("  remainders, cache, fragments: see memory_viz", held.reserved - held.rounded, "+"),
        ("reserved", held.reserved, "="),
    ]
    lines = [f"GPU {history.device}, {at}: after event {held.events:,} of {len(history.events):,}", ""]
    lines += [f"{name:48}{sign}{number / size:12,.3f} {unit}" for name, number, sign in rows]
    lines += ["", f"asked for, by {by}:"]
    shown, rest = list(groups.items())[:top], list(groups.values())[top:]
    for name, number in shown + ([(f"{len(rest)} others", sum(rest))] if rest else []):
        lines.append(f"{number / size:12,.3f} {unit} {number / max(held.requested, 1):6.1%}  {name}")
    typer.echo("\n".join([*lines, *_notes(history, at, size, unit)]))


def _held(history: MemoryHistory, at: str) -> HeldMemory:
    if at == "peak":
        return history.peak()
    if at == "end":
        return history.end()
    failed = history.out_of_memory()
    if not failed:
        raise ValueError("the trace has no out-of-memory event: leave --at oom out, the default is the peak")
    return history.at(failed[-1])


def _notes(history: MemoryHistory, at: str, size: int, unit: str) -> list[str]:
    notes = []
    for number in history.out_of_memory()[-1:]:
        hint = "" if at == "oom" else ". --at oom shows that instant"
        asked = history.events[number - 1]["size"] / size
        notes.append(f"out of memory at event {number:,}: {asked:,.3f} {unit} asked for{hint}")
    cut = "the peak is that of the events that are left. Record with a larger max_entries"
    events = len(history.events)
    if not events:
        notes.append("the snapshot has no events, so the peak is its end: record with _record_memory_history()")
    elif history.missing:
        notes.append(f"{history.missing:,} blocks were made while recording, and their events are lost: {cut}")
    elif events % 1000 == 0:
        notes.append(
            f"it has exactly {events:,} events: if that is your max_entries, earlier ones may be lost, and {cut}"
        )
    return ["", *notes] if notes else []
