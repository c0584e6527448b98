"""`rung memory-snapshot`: which lines of a program hold the memory of a GPU, from PyTorch's snapshot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lablib.calc.cuda_snapshot import History
    from lablib.calc.cuda_snapshot_blocks import Held

MOMENTS = ("peak", "oom", "end")
GROUPS = ("line", "module")
_CUT = "the peak is that of the events that are left. Record with a larger max_entries"


def memory_snapshot(
    file: Annotated[Path, typer.Argument(help="Written by torch.cuda.memory._dump_snapshot.")],
    at: Annotated[str, typer.Option(help=f"Which instant: {', '.join(MOMENTS)}.")] = "peak",
    by: Annotated[
        str, typer.Option(help="Group by line of the program, or by module: forward methods.")
    ] = "line",
    device: Annotated[
        int | None, typer.Option(help="Number of the GPU, if the snapshot has several.")
    ] = None,
    max_entries: Annotated[
        int | None, typer.Option(min=1, help="As given to _record_memory_history.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many lines of the program to print.")] = 10,
    unit: Annotated[str, typer.Option(help="Unit of bytes: B, MB, MiB, GB or GiB.")] = "GB",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Read a CUDA memory snapshot: its peak, who holds it, and what the allocator adds. Runs nothing in the file."""
    from lablib.calc.choices import one_of
    from lablib.calc.cuda_snapshot import replay
    from lablib.calc.cuda_snapshot_file import load_snapshot
    from lablib.calc.units import BYTE_UNITS

    one_of("at", at, MOMENTS)
    one_of("by", by, GROUPS)
    size = BYTE_UNITS[one_of("unit", unit, BYTE_UNITS)]
    history = replay(load_snapshot(file), device)
    held = _instant(history, at)
    groups = held.by_site() if by == "line" else held.by_module()
    if as_json:
        typer.echo(json.dumps(_as_dict(history, held, groups), indent=1))
        return
    where = f"after event {held.instant:,} of {len(history.events):,}"
    lines = [f"GPU {history.device}, {at}: {where}", "", *_gaps(held, size, unit), "", f"asked for, by {by}:"]
    for name, number in list(groups.items())[:top]:
        lines.append(f"{number / size:12,.3f} {unit} {number / max(held.requested, 1):6.1%}  {name}")
    rest = list(groups.values())[top:]
    if rest:
        lines.append(
            f"{sum(rest) / size:12,.3f} {unit} {sum(rest) / max(held.requested, 1):6.1%}  {len(rest)} others"
        )
    typer.echo("\n".join([*lines, *_notes(history, at, max_entries, size, unit)]))


def _instant(history: History, at: str) -> Held:
    if at == "peak":
        return history.peak()
    if at == "end":
        return history.end()
    failed = history.out_of_memory()
    if not failed:
        raise ValueError("the trace has no out-of-memory event: leave --at oom out, the default is the peak")
    return history.at(failed[-1])


def _gaps(held: Held, size: int, unit: str) -> list[str]:
    rows = [
        ("requested by the program", held.requested, " "),
        ("  rounding to 512 bytes", held.rounding, "+"),
        ("  remainders too small to split off", held.not_split, "+"),
        ("  freed, another stream still uses it", held.waiting, "-"),
        ("allocated", held.allocated, "="),
        ("  freed, another stream still uses it", held.waiting, "+"),
        ("  free beside something in use: fragmentation", held.split_free, "+"),
        ("  free: empty_cache gives it back", held.cached, "+"),
        ("reserved", held.reserved, "="),
    ]
    shown = [row for row in rows if held.waiting or "another stream" not in row[0]]
    return [f"{name:48}{sign}{number / size:12,.3f} {unit}" for name, number, sign in shown]


def _notes(history: History, at: str, max_entries: int | None, size: int, unit: str) -> list[str]:
    notes = []
    for number in history.out_of_memory()[-1:]:
        event = history.events[number - 1]
        free = event.get("device_free")
        left = f"; CUDA had {free / size:,.3f} {unit} free" if isinstance(free, int) else ""
        hint = "" if at == "oom" else ". --at oom shows that instant"
        notes.append(
            f"out of memory at event {number:,}: {event['size'] / size:,.3f} {unit} asked for{left}{hint}"
        )
    events = len(history.events)
    if not events:
        notes.append(
            "the snapshot has no events, so the peak is its end: record with _record_memory_history()"
        )
    elif history.missing:
        notes.append(
            f"{history.missing:,} blocks and segments were made while recording, and their events are lost: {_CUT}"
        )
    elif max_entries is not None and events >= max_entries:
        notes.append(f"the trace is full: if earlier events are lost, {_CUT}")
    elif max_entries is None and events % 1000 == 0:
        notes.append(
            f"it has exactly {events:,} events: if that is your max_entries, earlier ones may be lost, and {_CUT}"
        )
    if history.unsure:
        notes.append(
            f"blocks that are older than the trace may have {history.unsure / size:,.3f} {unit} more in remainders"
        )
    if history.disagree:
        notes.append(
            f"{history.disagree:,} blocks have other sizes than the allocator's defaults give: what is said to be "
            "allocated is an estimate"
        )
    return ["", *notes] if notes else []


def _as_dict(history: History, held: Held, groups: dict[str, int]) -> dict[str, object]:
    names = (
        "instant",
        "requested",
        "rounding",
        "not_split",
        "waiting",
        "allocated",
        "split_free",
        "cached",
        "reserved",
    )
    return {
        "device": history.device,
        "events": len(history.events),
        "missing": history.missing,
        "disagree": history.disagree,
        "unsure": history.unsure,
        **{name: getattr(held, name) for name in names},
        "groups": groups,
    }


if __name__ == "__main__":
    typer.run(memory_snapshot)
