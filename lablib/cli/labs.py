"""`rung labs`: list the labs, run one, record one."""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer(help="List and run the labs.", no_args_is_help=True)


@app.command("list")
def list_labs(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the labs and their parameters."""
    from lablib.launch.experiments import repository_root
    from lablib.launch.labs import lab_parameters

    labs = {
        p.stem: lab_parameters(p) for p in sorted((repository_root() / "labs").glob("[0-9][0-9]_*.ipynb"))
    }
    if as_json:
        typer.echo(json.dumps(labs, indent=1))
        return
    for stem, parameters in labs.items():
        typer.echo(stem + "".join(f"  {name}={default}" for name, default in parameters.items()))


@app.command("run")
def run(
    lab: Annotated[str, typer.Argument(help="Number or stem, for example 02.")],
    parameter: Annotated[
        list[str] | None, typer.Option("--parameter", "-p", help="NAME=VALUE, as often as needed.")
    ] = None,
    record: Annotated[bool, typer.Option(help="Write what it measures to labs/recorded/.")] = False,
) -> None:
    """Execute a lab with papermill; the executed notebook stays in distributed-experiments/."""
    from papermill.exceptions import PapermillExecutionError

    from lablib.launch.labs import run_lab

    try:
        typer.echo(run_lab(lab, dict(_assignment(text) for text in parameter or []), record=record))
    except ValueError as error:
        typer.echo(f"rung: {error}", err=True)
        raise typer.Exit(2) from None
    except PapermillExecutionError as error:
        typer.echo(f"rung: cell {error.cell_index} failed with {error.ename}: {error.evalue}", err=True)
        raise typer.Exit(1) from None


def _assignment(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"a parameter is written NAME=VALUE, not {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
