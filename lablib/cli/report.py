"""`rung report` and `rung compare`: a scaling report drawn from its records, and two of them side by side."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from lablib.calc.errors import json_text

NOTES = (
    "A step's time is that of its slowest rank. Steps of the warm-up do not count; the rest give a median and quartiles.",
    "Weak scaling keeps the batch of a rank, strong scaling the batch of all. Speedup is throughput over that of one "
    "rank, efficiency is speedup over ranks.",
    "A rank is taken to compute as long as the run on one rank did for the same work. What it took longer is "
    "communication (the least that any rank spent so) or imbalance (what the others spent above that). Slower "
    "computation on many ranks, because they share a memory bus or a cooler, therefore counts as communication, unless "
    "a profiler measured communication itself.",
    "The parts of the loss are means over the middle half of the steps, so that they add up; the table's times are "
    "medians over all of them.",
)


def report(
    folder: Annotated[Path | None, typer.Argument(help="Folder of a report; default: the newest.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows instead.")] = False,
) -> None:
    """Draw a scaling report anew from its records, as one HTML page and its figures."""
    from lablib.launch.runs import report_rows

    folder = folder or _newest()
    if as_json:
        typer.echo(json_text(report_rows(folder)))
        return
    target = build_report(folder)
    for line in summary(report_rows(folder)):
        typer.echo(line)
    typer.echo(target)


def compare(
    a: Annotated[Path, typer.Argument(help="Folder of the report to compare with.")],
    b: Annotated[Path, typer.Argument(help="Folder of the other report.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Put two scaling reports side by side: times, what changed, and whether the difference is more than spread."""
    from lablib.launch.runs import compare_reports, report_differences

    table, changed = compare_reports(a, b), report_differences(a, b)
    if as_json:
        typer.echo(json_text({"runs": table, "differences": changed}))
        return
    typer.echo(f"{'':<18}{'A ms':>10}{'B ms':>10}{'B/A':>8}")
    for row in table:
        verdict = "differs" if row["apart"] else "within the spread"
        typer.echo(f"{row['run']:<18}{1e3 * row['a']:>10.1f}{1e3 * row['b']:>10.1f}{row['ratio']:>8.3f}  {verdict}")
    typer.echo("\nnot the same in both:" if changed else "\nsettings, versions and machine are the same in both")
    for line in changed:
        typer.echo(f"  {line}")


def build_report(folder: str | Path) -> Path:
    """Draw the figures and the page of a report from its records, and nothing else.

    Returns:
        The page, report.html; the figures are beside it in figures/, and rows.json has the numbers.
    """
    import matplotlib.pyplot as plt

    from lablib.calc.flops import ALL_PAIRS
    from lablib.launch.records import write_json
    from lablib.launch.runs import report_rows, scaling_records
    from lablib.view import runs as view
    from lablib.view.style import themed_svg

    folder = Path(folder)
    found, table = scaling_records(folder), report_rows(folder)
    many = [row for row in table if "loss" in row]
    steps = {
        row["run"]: [max(line["seconds"] for line in step) for step in zip(*record["samples"], strict=False)]
        for row, record in zip(table, found, strict=True)
    }
    drawn = {
        "step_times": (
            view.step_times(table),
            "Time of a step: bars are medians, whiskers quartiles, and the line across is the prediction.",
            "A horizontal bar a run with its median step time, whiskers at the quartiles, a mark at the prediction.",
        ),
        "every_step": (
            view.every_step(steps, found[0]["warm_up"]),
            "Every step of every run, the warm-up included. A report of one number would hide what this shows.",
            "A line a run: milliseconds of each step over its number, with the warm-up shaded.",
        ),
    }
    if many:
        drawn["loss"] = (
            view.loss_shares(many),
            "What of a step was kept, and what took the rest.",
            "A bar for each run on several ranks: the part kept, then communication, imbalance, bubble, data, compute.",
        )
    figures = []
    for name, (fig, caption, alt) in drawn.items():
        svg = themed_svg(fig, alt)
        plt.close(fig)
        path = folder / "figures" / f"{name}.svg"
        path.parent.mkdir(exist_ok=True)
        path.write_text(svg, encoding="utf-8")
        figures.append((svg, caption))
    write_json(folder / "rows.json", {"rows": table})
    head = ["run", "ms a step", "quartiles", "predicted ms", "your ms", "tokens/s"]
    head += ["speedup", "predicted speedup", "your speedup", "efficiency"]
    head += [f"MFU, {ALL_PAIRS}", "GB", "predicted GB", "your GB"]
    cells = [_cells(row) for row in table]
    # A column that nobody has a number for says nothing: MFU on a CPU, predictions where there were none.
    kept = [i for i in range(len(head)) if any(row[i] != "-" for row in cells)]
    target = folder / "report.html"
    temporary = target.with_suffix(".part")
    temporary.write_text(
        view.page(
            f"Scaling report: {found[0]['report']}",
            sentences=summary(table),
            tables=[("", [head[i] for i in kept], [[row[i] for i in kept] for row in cells])],
            figures=figures,
            facts=_facts(found),
            notes=NOTES,
        ),
        encoding="utf-8",
    )
    temporary.replace(target)
    return target


def summary(table: list[dict[str, Any]]) -> list[str]:
    """Return what a report says, one sentence a run."""
    lines = []
    for row in table:
        text = f"{row['run']}: {1e3 * row['seconds']['median']:.1f} ms a step"
        if row["error"] is not None:
            text += f", predicted {1e3 * row['predicted']:.1f} ({row['error']:+.0%})"
        yours = row["yours"]
        if "step" in yours:
            text += f", you said {1e3 * yours['step']:.1f} ({yours['step'] / row['seconds']['median'] - 1:+.0%})"
        if "loss" in row:
            text += f"; speedup {row['speedup']:.2f}"
            if row["predicted_speedup"]:
                text += f", predicted {row['predicted_speedup']:.2f}"
            if "speedup" in yours:
                text += f", you said {yours['speedup']:.2f}"
            text += f"; efficiency {row['efficiency']:.0%}"
            if row["efficiency"] < 1:
                # Shares are of the middle half of the steps, the efficiency of medians over all: they may differ.
                most, lost = row["loss"][row["largest"]], sum(row["loss"].values())
                text += f"; the middle half of its steps lost {lost:.0%}, the most, {most:.0%}, to {row['largest']}"
        lines.append(text + ".")
        if row.get("loss_apart") is not None:
            lines.append(f"{row['run']}: the losses differ from those of one rank by at most {row['loss_apart']:.1g}.")
    shared = sorted({row["where"] for row in table if "gloo ranks on" in row["where"]})
    lines += [f"Predicted. {links}." for links in sorted({row.get("predicted_links") or "" for row in table} - {""})]
    errors = sorted({row.get("predicted_error") or "" for row in table} - {""})
    lines += [f"Error of such times: {sentence}." for sentence in errors]
    return lines + [f"Measured on {where}." for where in shared]


def _cells(row: dict[str, Any]) -> list[str]:
    seconds = row["seconds"]

    def told(value: float | None, form: str, scale: float) -> str:
        return "-" if value is None else format(scale * value, form)

    def maybe(key: str, form: str, scale: float = 1) -> str:
        return told(row.get(key), form, scale)

    def yours(key: str, form: str, scale: float = 1) -> str:
        return told(row["yours"].get(key), form, scale)

    return [
        row["run"],
        f"{1e3 * seconds['median']:.1f}",
        f"{1e3 * seconds['low']:.1f} to {1e3 * seconds['high']:.1f}",
        maybe("predicted", ".1f", 1e3),
        yours("step", ".1f", 1e3),
        f"{row['tokens_per_second']:,.0f}",
        maybe("speedup", ".2f"),
        maybe("predicted_speedup", ".2f"),
        yours("speedup", ".2f"),
        maybe("efficiency", ".0%"),
        maybe("mfu", ".1%"),
        maybe("memory_bytes", ".2f", 1e-9),
        maybe("predicted_memory", ".2f", 1e-9),
        yours("memory_bytes", ".2f", 1e-9),
    ]


def _facts(found: list[dict[str, Any]]) -> dict[str, str]:
    from lablib.launch.runs import describe_machine

    first = found[0]
    where = first["machine"]
    versions = (f"{name} {where[name]}" for name in ("python", "torch", "cuda", "nccl", "driver") if where.get(name))
    config = first["facts"].get("config") or {}
    commands = dict.fromkeys(record["command"] for record in found)
    return {
        "machine": "; ".join(dict.fromkeys(describe_machine(record) for record in found)),
        "versions": ", ".join(versions),
        "settings": ", ".join(f"{key}={value}" for key, value in config.items() if key != "folder") or "not known",
        "commit": ", ".join(dict.fromkeys(record["commit"] for record in found)),
        "command": "; ".join(commands),
        "date": ", ".join(dict.fromkeys(record["date"] for record in found)),
    }


def _newest() -> Path:
    from lablib.launch.records import experiments_dir

    found = {path.parent.parent for path in experiments_dir().glob("*/runs/one-1.json")}
    if not found:
        raise ValueError(f"there is no report in {experiments_dir()}; lab 11 makes one")
    return max(found, key=lambda folder: (folder / "runs" / "one-1.json").stat().st_mtime)


def graduate(
    rungs: Annotated[list[str] | None, typer.Argument(help="Rungs, for example 01 06. Default: all.")] = None,
    work: Annotated[Path | None, typer.Option(help="Folder of your labs; default: work/.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Check every exercise, not only Done when.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds for one check.")] = 180,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check your answers in work/ against every Done when, and say what is left to do."""
    from lablib.checks.answers import GOALS, REQUIREMENTS, examine, still_missing
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
    left = {requirement.text: still_missing(requirement, passed, report) for requirement in REQUIREMENTS}
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
