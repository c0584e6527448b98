"""`rung memory-snapshot`: which lines of a program hold the memory of a GPU, from PyTorch's snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lablib.calc.errors import json_text

if TYPE_CHECKING:
    from lablib.calc.runs import HeldMemory, MemoryHistory

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
