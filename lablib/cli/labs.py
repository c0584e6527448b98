"""`rung labs`: list the labs, run them, follow them, carry the results off; `rung cost`: what that costs."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from lablib.calc.errors import json_text, parse_json

app = typer.Typer(
    name="labs", help="List and run the labs.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)
POLL_S = 0.2
FULL_B = 1 << 20  # a disk with less room than this is full
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_labs(as_json: Json = False) -> None:
    """List the labs and their parameters."""
    from lablib.launch.lab_runs import all_labs, lab_parameters

    labs = {path.stem: lab_parameters(path) for path in all_labs()}
    if as_json:
        typer.echo(json_text(labs))
        return
    for stem, parameters in labs.items():
        typer.echo(stem + "".join(f"  {name}={default}" for name, default in parameters.items()))


@app.command("run")
def run(
    labs: Annotated[list[str], typer.Argument(help="Numbers or stems, for example 06 11.")],
    gpus: Annotated[str, typer.Option(help="all, a number, a list such as 0,3, or cpu.")] = "all",
    parameter: Annotated[
        list[str] | None,
        typer.Option("--parameter", "-p", help="NAME=VALUE, or 06.NAME=VALUE for one lab; repeatable."),
    ] = None,
    record: Annotated[bool, typer.Option("--record", help="Write measurements to labs/recorded/.")] = False,
    budget_minutes: Annotated[float | None, typer.Option(help="Stop everything after so long.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Run what is done, too.")] = False,
    pack: Annotated[bool, typer.Option("--pack", help="Leave one archive at the end.")] = False,
    mine: Annotated[bool, typer.Option("--mine", help="Run your copies in work/.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Return at once.")] = False,
) -> None:
    """Execute labs with papermill; they go on when the terminal closes, and nothing done is done again."""
    import torch

    from lablib.launch.lab_runs import acquire_lock, parse_gpus, prepare_queue, start_worker

    chosen = parse_gpus(gpus, torch.cuda.device_count())
    try:
        lock = acquire_lock()
    except BlockingIOError:
        message = "labs are already running here; see `rung labs status`, or end them: rung labs stop"
        raise ValueError(message) from None
    with lock:
        queue = prepare_queue(
            labs,
            dict(_assignment(text) for text in parameter or []),
            gpus=chosen,
            record=record,
            again=again,
            budget_minutes=budget_minutes,
            pack=pack,
            mine=mine,
            command=shlex.join(["rung", *sys.argv[1:]]),
        )
        start_worker(queue, lock)
    if detach:
        typer.echo("started; see `rung labs status`, or follow it: rung labs follow")
        return
    _exit_like(queue, _follow(queue))


@app.command("status")
def status(as_json: Json = False) -> None:
    """Say what runs, what is done and what is left."""
    from lablib.launch.lab_runs import all_jobs, is_running, latest_queue, read_job

    jobs, damaged = [], []
    for path in all_jobs():
        try:
            jobs.append(read_job(path) | {"folder": str(path.parent)})
        except ValueError as error:
            damaged.append(str(error))
    running = is_running()
    for job in jobs:
        if job["status"] == "running" and not running:
            job["status"] = "interrupted"
    if as_json:
        queue = latest_queue()
        found = {"running": running, "queue": str(queue) if queue else None, "jobs": jobs, "damaged": damaged}
        typer.echo(json_text(found))
        return
    if not jobs and not damaged:
        typer.echo("no lab was run here yet; for example: rung labs run 02")
    for job in jobs:
        typer.echo(f"{job['status']:<12}{job['lab']:<28}{_detail(job)}")
    for text in damaged:
        typer.echo(f"{'damaged':<12}{text}")


@app.command("follow")
def follow() -> None:
    """Show what the running labs print, until they end."""
    from lablib.launch.lab_runs import latest_queue

    queue = latest_queue()
    if queue is None:
        raise ValueError("no lab was run here yet; for example: rung labs run 02")
    _exit_like(queue, _follow(queue))


@app.command("stop")
def stop() -> None:
    """End the running labs; the same command as before goes on where they stopped."""
    from lablib.launch.lab_runs import is_running, latest_queue, read_json

    if not is_running():
        raise ValueError("no labs are running here")
    asked = None
    while is_running():
        queue = latest_queue()
        pid = read_json(queue).get("pid") if queue else None  # a queue that begins has none yet
        if pid and pid != asked:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.kill(pid, signal.SIGTERM)
            asked = pid
        time.sleep(POLL_S)
    typer.echo("stopped")


@app.command("pack")
def pack_results() -> None:
    """Write one archive with all results, to carry off a machine before it is stopped."""
    from lablib.launch.lab_runs import pack_results

    try:
        target = pack_results()
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None
    typer.echo(f"{target}  {target.stat().st_size / 1e6:.1f} MB")


@app.command("ask")
def ask_for_run(
    lab: Annotated[str, typer.Argument(help="Number or stem, for example 06.")],
    room: Annotated[Path, typer.Option("--room", help="The room's folder, which the machine with the GPUs sees too.")],
    name: Annotated[str, typer.Option("--name", help="Your name.")],
    gpus: Annotated[int, typer.Option(help="How many GPUs.", min=1)] = 1,
    parameter: Annotated[list[str] | None, typer.Option("--parameter", "-p", help="NAME=VALUE; repeatable.")] = None,
) -> None:
    """Ask for a run of a lab on the room's GPUs; `rung labs share` runs it there."""
    from lablib.launch.lab_runs import ask

    file = ask(room, name, lab, dict(_assignment(text) for text in parameter or []), gpus=gpus)
    typer.echo(f"asked: {file}; the answer comes into {room / 'answers'}")


@app.command("share")
def share_gpus(
    room: Annotated[Path, typer.Argument(help="The room's folder; made where it is missing.")],
    gpus: Annotated[str, typer.Option(help="all, a number, a list such as 0,3, or cpu.")] = "all",
    minutes: Annotated[float, typer.Option(help="Minutes for each person, over all runs.")] = 10,
    until_empty: Annotated[bool, typer.Option("--until-empty", help="End when nothing is left to run.")] = False,
) -> None:
    """Run what the people of a room ask for, on this machine; who has used least goes first."""
    import torch

    from lablib.launch.lab_runs import parse_gpus, share

    chosen = parse_gpus(gpus, torch.cuda.device_count())
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # asked to stop, it ends its runs as after Ctrl-C
    share(room, gpus=chosen, minutes=minutes, until_empty=until_empty, say=typer.echo)


def _follow(queue: Path) -> bool:
    """Print the queue's log until its process ends; return whether it did."""
    from lablib.launch.lab_runs import is_running

    try:
        with queue.with_suffix(".log").open("rb") as log:
            running = True
            while running:
                running = is_running()
                # Whole lines' bytes as they come; a multi-byte letter cut in two is no reason to stop.
                typer.echo(log.read().decode(errors="replace"), nl=False)
                time.sleep(POLL_S if running else 0)
    except KeyboardInterrupt:
        typer.echo("\nstill running; see `rung labs status`, or end it: rung labs stop")
        return False
    return True


def _exit_like(queue: Path, ended: bool) -> None:
    """Exit with 0 if all jobs are done, 1 if one is not, 130 as others do after Ctrl-C while labs still run."""
    from lablib.launch.lab_runs import read_json

    if not ended:
        raise typer.Exit(128 + signal.SIGINT)
    content = read_json(queue)
    if content["state"] == "running":  # it could not write down what a full disk did to it
        full = shutil.disk_usage(queue.parent).free < FULL_B
        why = f", and the disk of {queue.parent} is full: free some room" if full else ""
        typer.echo(f"rung: the process that ran the labs is gone{why}; the same command goes on", err=True)
        raise typer.Exit(1)
    if any(read_json(Path(job))["status"] != "done" for job in content["jobs"]):
        raise typer.Exit(1)


def _detail(job: dict) -> str:
    from lablib.launch.lab_runs import progress

    attempts = job["attempts"]
    if job["status"] == "running":
        cell, cells = progress(Path(job["folder"]) / "job.json")
        return f"cell {cell} of {cells}" if cells else "starting"
    if not attempts:
        return ""
    if attempts[-1]["failure"]:
        return attempts[-1]["failure"].splitlines()[0][:120]
    return f"{attempts[-1]['began'][:16]}  {attempts[-1]['seconds']:.0f} s  {Path(job['folder']).name}"


def _assignment(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"a parameter is written NAME=VALUE, not {text!r}")
    try:
        return name, parse_json(value)
    except ValueError:
        return name, value


def cost(
    machine: Annotated[list[str], typer.Argument(help="GPUs, kind and price per GPU and hour: 2xa10@0.75 2xh100@3.")],
    lab: Annotated[list[str] | None, typer.Option("--lab", help="A lab; repeatable. Default: all.")] = None,
    model: Annotated[str, typer.Option(help="Model of the prediction.")] = "gpt2",
    seq: Annotated[str, typer.Option(help="Tokens in a sequence, like 1024 or 1k.")] = "1024",
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
    from lablib.calc.units import format_count, parse_count, parse_tokens

    machines, labs, wanted = [parse_machine(text) for text in machine], lab_budgets(lab), parse_count(tokens)
    length = parse_tokens(seq)
    minutes = setup + sum(each.minutes for each in labs)
    bills = [each.cost(minutes, billing) for each in machines]
    expected = [expect_step(each, model=model, seq=length, batch=batch) for each in machines]
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
    typer.echo(f"Predicted: {model}, FSDP, {plural(batch, 'sequence')} of {plural(length, 'token')} a GPU and step")
    heads = ("link GB/s", "ms/step", "scaling", "MFU", "tokens/s", "GB", f"cost of {format_count(wanted)}")
    typer.echo(f"{'':<20}{{:>10}}{{:>8}}{{:>8}}{{:>5}}{{:>10}}{{:>6}}{{:>13}}".format(*heads))
    for each in expected:
        speed = each.tokens_per_second
        typer.echo(
            f"{each.machine.name:<20}{each.bandwidth / 1e9:>10.1f}{1e3 * each.seconds:>8.1f}{each.efficiency:>8.0%}"
            f"{each.mfu:>5.0%}{f'{speed:,.0f}' if speed < 1e7 else format_count(speed):>10}{each.memory / 1e9:>6.1f}{each.cost_of(wanted):>13.2f}"
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
