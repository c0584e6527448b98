"""`rung cost`: what the GPU labs cost on a machine, and what to expect of it."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer

from lablib.calc.errors import json_text


def cost(
    machine: Annotated[list[str], typer.Argument(help="GPUs, kind and price per GPU and hour: 2xa10@0.75 2xh100@3.")],
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
    from lablib.calc.errors import plural
    from lablib.calc.flops import ALL_PAIRS
    from lablib.calc.runs import expect_step, lab_budgets, parse_machine
    from lablib.calc.units import format_count, parse_count

    machines, labs, wanted = [parse_machine(text) for text in machine], lab_budgets(lab), parse_count(tokens)
    minutes = setup + sum(each.minutes for each in labs)
    bills = [each.cost(minutes, billing) for each in machines]
    expected = [expect_step(each, model=model, seq=seq, batch=batch) for each in machines]
    if as_json:
        rows = [
            {
                "machine": each.machine.name, "minutes": minutes, "cost": bill,
                "labs": [{"lab": b.lab, "minutes": b.minutes, "cost": each.machine.cost(b.minutes, "second")} for b in labs],
                "step_seconds": each.seconds, "step_error": each.like.as_dict(), "efficiency": each.efficiency, "mfu": each.mfu,
                "links": {"intra": {"link": each.link, "bytes_per_second": each.bandwidth, "from": "assumed"}},
                "tokens_per_second": each.tokens_per_second, "memory_bytes": each.memory,
                "cost_of_tokens": each.cost_of(wanted),
            }
            for bill, each in zip(bills, expected, strict=True)
        ]  # fmt: skip
        typer.echo(json_text(rows))
        return
    for one, bill in zip(machines, bills, strict=True):
        lines = [f"{one.name} at {one.price:g} per GPU and hour", f"{'lab':<5}{'minutes':>8}{'cost':>8}"]
        for each in labs:
            two = each.on_two and (f", {each.on_two}" if one.gpus > 1 else f"; {each.on_two} wants two GPUs")
            price = one.cost(each.minutes, "second")
            lines.append(f"{each.lab:<5}{each.minutes:>7.1f} {price:>8.2f}  {each.what}{two}")
        price = one.cost(setup, "second")
        lines.append(f"{'setup':<5}{setup:>7.1f} {price:>8.2f}  copy, environment, rung doctor --gpu")
        lines.append(f"{'all':<5}{minutes:>7.1f} {bill:>8.2f}  billed by the {billing}")
        typer.echo("\n".join([*lines, "minutes are budgets, not measured: --budget-minutes holds them", ""]))
    typer.echo(f"Predicted: {model}, FSDP, {plural(batch, 'sequence')} of {plural(seq, 'token')} a GPU and step")
    heads = ("link GB/s", "ms/step", "scaling", "MFU", "tokens/s", "GB", f"cost of {format_count(wanted)}")
    typer.echo(f"{'':<20}{{:>10}}{{:>8}}{{:>8}}{{:>5}}{{:>10}}{{:>6}}{{:>13}}".format(*heads))
    for each in expected:
        typer.echo(
            f"{each.machine.name:<20}{each.bandwidth / 1e9:>10.1f}{1e3 * each.seconds:>8.1f}{each.efficiency:>8.0%}"
            f"{each.mfu:>5.0%}{each.tokens_per_second:>10,.0f}{each.memory / 1e9:>6.1f}{each.cost_of(wanted):>13.2f}"
        )
    typer.echo(f"MFU: {ALL_PAIRS} count")
    for name in dict.fromkeys(f"{each.machine.gpu.name}: {each.link}" for each in expected):
        typer.echo(f"assumed link of {name}")
    for each in expected:
        if each.machine.gpus > each.machine.gpu.gpus_per_node:
            typer.echo(f"taken as one node, with no network between its GPUs: {each.machine.name}")
    for text in dict.fromkeys(f"{each.machine.gpu.name}: {each.like.sentence}" for each in expected):
        typer.echo(textwrap.fill(f"error of ms/step on {text}", 80, subsequent_indent="  "))
    if any(each.efficiency > 1 for each in expected):
        typer.echo("above 100%: sharded, a GPU updates only its part of the weights")
