"""`rung cost`: what the GPU labs cost on a machine, and what to expect of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lablib.calc.cost_sheet import Expectation, Machine, Sheet


def cost(
    machine: Annotated[
        list[str], typer.Argument(help="GPUs, kind and price per GPU and hour: 2xa10@0.75 2xh100@3.")
    ],
    lab: Annotated[list[str] | None, typer.Option("--lab", help="A lab; repeatable. Default: all.")] = None,
    model: Annotated[str, typer.Option(help="Model of the prediction.")] = "gpt2",
    seq: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 1024,
    batch: Annotated[int, typer.Option(help="Sequences of a step on one GPU.")] = 8,
    tokens: Annotated[str, typer.Option(help="Tokens to train on.")] = "1B",
    setup: Annotated[float, typer.Option(help="Minutes to set a machine up.")] = 10,
    billing: Annotated[str, typer.Option(help="second, minute or hour.")] = "minute",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what the GPU labs cost on a machine at a price, and what the planner expects of it."""
    from dataclasses import asdict

    from lablib.calc.cost_sheet import expectations, parse_machine, sheet
    from lablib.calc.units import parse_count

    machines = [parse_machine(text) for text in machine]
    sheets = [sheet(m, lab, measured=measured_minutes(m), setup=setup, billing=billing) for m in machines]
    expected = expectations(machines, model=model, seq=seq, batch=batch)
    wanted = parse_count(tokens)
    if as_json:
        rows = [
            {
                "machine": s.machine.name,
                "minutes": s.minutes,
                "cost": s.cost,
                "labs": [asdict(row) for row in s.rows],
                "step_seconds": e.seconds,
                "parts": e.parts,
                "efficiency": e.efficiency,
                "tokens_per_second": e.tokens_per_second,
                "mfu": e.mfu,
                "memory_bytes": e.memory,
                "cost_of_tokens": e.cost_of(wanted),
            }
            for s, e in zip(sheets, expected, strict=True)
        ]
        typer.echo(json.dumps(rows, indent=1))
        return
    for one in sheets:
        typer.echo(sheet_table(one) + "\n")
    typer.echo(expectation_table(expected, model, seq, batch, wanted))


def sheet_table(sheet: Sheet) -> str:
    """Return a cost sheet as aligned text.

    Args:
        sheet: From `lablib.calc.cost_sheet.sheet`.
    """
    machine = sheet.machine
    lines = [
        f"{machine.name} at {machine.price:g} per GPU and hour",
        f"{'lab':<5}{'minutes':>8}{'cost':>8}  what it measures there",
    ]
    for row in sheet.rows:
        kind = " " if row.measured else "*"
        lines.append(f"{row.lab:<5}{row.minutes:>7.1f}{kind}{row.cost:>8.2f}  {row.what}")
    lines.append(
        f"{'setup':<5}{sheet.setup:>7.1f}*{machine.cost(sheet.setup, 'second'):>8.2f}  copy, environment, rung doctor --gpu"
    )
    lines.append(f"{'all':<5}{sheet.minutes:>7.1f} {sheet.cost:>8.2f}  billed by the {sheet.billing}")
    lines.append("* a budget, not a measurement: hold it with --budget-minutes")
    return "\n".join(lines)


def expectation_table(expected: list[Expectation], model: str, seq: int, batch: int, tokens: float) -> str:
    """Return what to expect of machines as aligned text.

    Args:
        expected: From `lablib.calc.cost_sheet.expectations`.
        model: Its name.
        seq: Tokens in a sequence.
        batch: Sequences of a step on one GPU.
        tokens: To train on.
    """
    from lablib.calc.units import format_count

    lines = [
        f"Predicted: {model}, FSDP, {batch} sequences of {seq:,} tokens a GPU and step",
        f"{'':<16}{'link GB/s':>10}{'ms/step':>9}{'scaling':>9}{'MFU':>6}{'tokens/s':>10}{'GB':>6}"
        f"{f'cost of {format_count(tokens)}':>14}",
    ]
    lines += [
        f"{one.machine.name:<16}{one.bandwidth / 1e9:>10.1f}{1e3 * one.seconds:>9.1f}{one.efficiency:>9.0%}"
        f"{one.mfu:>6.0%}{one.tokens_per_second:>10,.0f}{one.memory / 1e9:>6.1f}{one.cost_of(tokens):>14.2f}"
        for one in expected
    ]
    if any(one.efficiency > 1 for one in expected):
        lines.append("above 100%: sharded, a GPU updates only its part of the weights")
    return "\n".join(lines)


def measured_minutes(machine: Machine) -> dict[str, float]:
    """Return the minutes that labs took in runs on such a machine, the latest one of each.

    Args:
        machine: Kind and number of its GPUs count.
    """
    from lablib.calc.gpu_names import known_accelerator
    from lablib.launch.experiments import experiments_dir

    found = {}
    for path in sorted(experiments_dir().glob("*/job.json")):
        job = json.loads(path.read_text(encoding="utf-8"))
        names = job["device"].get("gpus", [])
        if job["status"] != "done" or len(names) != machine.gpus:
            continue
        if known_accelerator(names[0]) == machine.card:
            found[job["lab"][:2]] = sum(attempt["seconds"] for attempt in job["attempts"]) / 60
    return found
