"""`rung schedule`: a pipeline schedule as a grid, with its bubbles and what every rank holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lablib.calc.errors import json_text

if TYPE_CHECKING:
    from lablib.calc.schedules import Timeline

#: A grid with more lines than this is left out of the text.
_MOST_LINES = 400


def schedule(
    name: Annotated[str, typer.Argument(help="naive, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v or dualpipe-v.")],
    stages: Annotated[int, typer.Option(help="Pipeline ranks; with --virtual each holds several stages.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Micro-batches in a step.")] = 8,
    virtual: Annotated[
        int | None, typer.Option(help="Stages on every rank; default: 2 when interleaved, else what the schedule has.")
    ] = None,
    forward: Annotated[float, typer.Option(help="Time of a forward through one rank's share.")] = 1,
    backward: Annotated[
        float | None, typer.Option(help="Time of a full backward; default: input + weight, or 2.")
    ] = None,
    input: Annotated[float | None, typer.Option(help="Time of the input half of a backward.")] = None,
    weight: Annotated[float | None, typer.Option(help="Time of the weight half of a backward.")] = None,
    communication: Annotated[float, typer.Option(help="Time of a message between two ranks.")] = 0,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print PyTorch's CSV.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print a pipeline schedule, how long its ranks idle and how many micro-batches they hold."""
    times = {"forward": forward, "backward": backward, "input": input, "weight": weight, "communication": communication}
    form = "json" if as_json else "csv" if as_csv else "text"
    typer.echo(schedule_text(name, stages, microbatches, virtual, form=form, **times).rstrip())


def schedule_text(
    name: str, stages: int, microbatches: int, virtual: int | None = None, *, form: str = "text", **times: float | None
) -> str:
    """Return a schedule as a grid with its bubbles, as JSON, or as PyTorch's CSV."""
    from lablib.calc.errors import one_of
    from lablib.calc.schedules import schedule as make
    from lablib.calc.schedules import simulate, to_csv

    one_of("form", form, ("text", "json", "csv"))
    if virtual is None:
        virtual = 2 if name.lower() == "interleaved" else 1
    made = make(name, stages, microbatches, virtual)
    if form == "csv":
        return to_csv(made)
    timeline = simulate(made, **times)
    return json_text(_as_dict(timeline, times)) if form == "json" else _as_text(timeline, times)


def _as_dict(timeline: Timeline, times: dict[str, float | None]) -> dict[str, object]:
    made = timeline.schedule
    return {
        "schedule": made.name,
        "ranks": made.num_ranks,
        "stages": made.num_stages,
        "num_microbatches": made.num_microbatches,
        "placement": made.placement,
        "actions": [[str(step) for step in steps] for steps in made.ranks],
        "times": {key: value for key, value in times.items() if value is not None},
        "makespan": timeline.makespan,
        "bubble_over_ideal": timeline.bubble_over_ideal,
        "bubble_over_total": timeline.bubble_over_total,
        "span_bubble_rate": timeline.span_bubble_rate,
        "idle": timeline.idle,
        "span_idle": timeline.span_idle,
        "peak_in_flight": timeline.peak_in_flight,
        "peak_in_flight_until_input": timeline.peak_in_flight_until_input,
    }


def _as_text(timeline: Timeline, times: dict[str, float | None]) -> str:
    from lablib.calc.schedules import time_grid

    made = timeline.schedule
    # A line for each action of a rank, and for each stage that a micro-batch comes to: known before it is drawn.
    grid = time_grid(timeline) if max(made.num_stages, *map(len, made.ranks)) <= _MOST_LINES else None
    if grid is None or grid.count("\n") > _MOST_LINES:
        grid = "(the grid is too long to read and left out; --csv and --json have the actions)"
    rows = {
        "idle": timeline.idle,
        "idle within its span": timeline.span_idle,
        "in flight, until B or W": timeline.peak_in_flight,
    }
    if timeline.peak_in_flight_until_input != timeline.peak_in_flight:
        rows["in flight, until B or I"] = timeline.peak_in_flight_until_input
    cells = [["rank", *map(str, range(made.num_ranks))]]
    cells += [[label, *(f"{value:g}" for value in values)] for label, values in rows.items()]
    first, *rest = (max(map(len, column)) for column in zip(*cells, strict=True))
    table = [
        row[0].ljust(first) + "".join(text.rjust(width + 2) for text, width in zip(row[1:], rest, strict=True))
        for row in cells
    ]
    given = ", ".join(f"{key} {value:g}" for key, value in times.items() if value)
    per_rank = made.num_stages // made.num_ranks
    held = f"{made.num_ranks} ranks" + (f" with {per_rank} stages each" if per_rank > 1 else "")
    return "\n".join(
        [
            f"{made.name}, {held}, {made.num_microbatches} micro-batches; times: {given or 'defaults'}",
            "",
            grid,
            "",
            f"makespan              {timeline.makespan:g}",
            f"idle over ideal time  {timeline.bubble_over_ideal:.2%}",
            f"idle over total time  {timeline.bubble_over_total:.2%}",
            "",
            *table,
        ]
    )
