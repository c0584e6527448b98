"""Measure, judge and write anew what the pages on the calculators quote.

    python -m tests.evidence memory-table           the memory calculator against PyTorch, case by case
    python -m tests.evidence memory-peers           other people's calculators on the same cases
    python -m tests.evidence planner                the planner's times against measured runs
    python -m tests.evidence low-bits               moments in 8 and 4 bits, and training in few bits
    python -m tests.evidence local-sgd              local SGD and DiLoCo between two hosts with a slow link
    python -m tests.evidence storm                  replica groups that are killed and come back, the toy's and torchft's
    python -m tests.evidence facts                  what the pages say of frameworks, in the frameworks' files

`--write` keeps the result in book/data; `make memory-table` runs the first two so. `--help` of each has the rest.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from lablib.cli.main import OneSentence
from tests.evidence.headline import HELD_OUT, OTHERS, TABLE, read_table

app = typer.Typer(
    cls=OneSentence, help=__doc__.partition("\n")[0], no_args_is_help=True, add_completion=False, rich_markup_mode=None
)


@app.command()
def memory_table(
    only: Annotated[str | None, typer.Option(help="Cases whose name contains this text.")] = None,
    few: Annotated[bool, typer.Option("--few", help="The dozen cases that the tests run.")] = False,
    committed: Annotated[bool, typer.Option("--committed", help="Print the committed table; measure nothing.")] = False,
    held_out: Annotated[bool, typer.Option("--held-out", help="Cases drawn at random, none in the grid.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Measure all cases and write the table anew.")] = False,
    predict: Annotated[
        bool, typer.Option("--predict", help="Write all tables with new predictions, old measurements.")
    ] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="Real steps on this machine's GPU; write nothing.")] = False,
) -> None:
    """Measure configurations in PyTorch beside the calculator; fail where a bound breaks or a number drifted."""
    if sum((gpu, predict, write, committed)) > 1 or (few and (held_out or committed)):
        raise ValueError("choose one of --gpu, --predict, --write and --committed, and --few without --held-out")
    if ((only or few) and (predict or write)) or (gpu and (few or held_out)):
        raise ValueError("--only and --few choose what is measured: --predict and --write make whole tables")
    path = HELD_OUT if held_out else TABLE
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if gpu:
        typer.echo(_on_gpu(only))
    elif predict:
        _predict_anew()
    elif committed:
        from tests.evidence.table import text

        table = read_table(path)
        typer.echo(text(_named(table["rows"], only)))
        typer.echo(f"measured with {_made_with(table['versions'])}")
    else:
        _measure(path, only, few=few, write=write)


@app.command()
def memory_peers(
    committed: Annotated[
        bool, typer.Option("--committed", help="Print the committed comparison; compute nothing.")
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="Write the comparison anew, from the memory table.")] = False,
) -> None:
    """Put the cases of the memory table through the other calculators; fail where a number drifted."""
    from tests.evidence.comparison import compare, comparison_text, drifted, save_comparison

    if write and committed:
        raise ValueError("--write makes the comparison anew: leave --committed out")
    before = read_table(OTHERS)
    if committed:
        typer.echo(comparison_text(before))
        return
    logging.getLogger("transformers").setLevel(logging.ERROR)
    table = compare(deepspeed=before["deepspeed"])
    typer.echo(comparison_text(table))
    if write:
        typer.echo(f"\nwrote {save_comparison(table)}")
        return
    _fail_with(drifted(table, before))


@app.command()
def planner(
    rows: Annotated[list[str] | None, typer.Option(help="Files of rows to judge the shipped constants on.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Write the planner's table and its short form anew.")] = False,
) -> None:
    """Fit the planner's constants anew, judge them and print what moved; with --rows, judge the shipped ones.

    Rows are runs of your own in the columns of tests/evidence/planner/measured_runs.csv, or the files of vTrain and LLM
    Foundry as their repositories publish them.
    """
    from tests.evidence.planner.table import fit_text, judge_file, planner_table, save_planner_table

    if rows and write:
        raise ValueError("--rows fits nothing: leave --write out")
    if rows:
        for path in rows:
            typer.echo(judge_file(path))
        return
    table = planner_table()
    typer.echo(fit_text(table))
    if write:
        save_planner_table(table)


@app.command()
def low_bits(
    only: Annotated[str, typer.Option(help="Cases whose name contains this text.")] = "",
    write: Annotated[bool, typer.Option("--write", help="Train all recipes too, and write the file anew.")] = False,
) -> None:
    """Measure real low-bit optimizers beside the calculator; fail where a byte is off or a number drifted."""
    from tests.evidence.low_bits import make

    logging.getLogger("transformers").setLevel(logging.ERROR)
    _fail_with(make(only, write=write, say=typer.echo))


@app.command()
def local_sgd(
    write: Annotated[bool, typer.Option("--write", help="Train on two hosts, and write the file anew.")] = False,
) -> None:
    """Count the bytes of every way to exchange and sum the committed runs up; fail where they are not what is predicted."""
    from tests.evidence.local_sgd import make

    _fail_with(make(write=write, say=typer.echo))


@app.command()
def storm(
    write: Annotated[
        bool, typer.Option("--write", help="Sweep timeouts and pauses too, and write the record.")
    ] = False,
) -> None:
    """Kill replica groups and let them come back; fail where one stays away or weights differ in a bit."""
    from tests.evidence.storm import make

    _fail_with(make(write=write, say=typer.echo))


@app.command()
def facts(
    newest: Annotated[
        bool, typer.Option("--newest", help="Look in the newest releases; torch and repositories as read.")
    ] = False,
    rows: Annotated[Path | None, typer.Option(help="Another table than book/data/framework_facts.jsonl.")] = None,
) -> None:
    """Look up what the pages say of frameworks; fail where a fact does not hold, or no page says it any more.

    What is not installed is fetched from the package index, or from its repository, and kept in .cache/frameworks.
    """
    from tests.evidence.facts import FACTS, TORCH, look_up, newest_of, read_facts, unsaid

    table = read_facts(rows or FACTS)
    indexed = {fact.project for fact in table if fact.project != TORCH and "/" not in fact.project}
    versions = {project: newest_of(project) for project in indexed} if newest else {}
    problems = [*unsaid(table), *look_up(table, versions)]
    where = ", ".join(sorted({f"{one.project} {versions.get(one.project, one.version)}" for one in table}))
    told = f"{len(problems)} to look at" if problems else "all hold"
    typer.echo(f"{len(table)} facts of {len({fact.page for fact in table})} pages, looked up in {where}: {told}")
    _fail_with(problems)


def _named(rows: list[dict], only: str | None) -> list[dict]:
    found = [row for row in rows if not only or only in row["name"]]
    if not found:
        raise ValueError(f"no case has {only!r} in its name; memory-table --committed prints all")
    return found


def _predict_anew() -> None:
    from tests.evidence.published_peaks import save_peaks
    from tests.evidence.real_runs import REAL_TABLE, predicted_runs, save_real_runs
    from tests.evidence.table import predicted_anew, save_earlier, save_held_out, save_table

    for path, save in ((TABLE, save_table), (HELD_OUT, save_held_out)):
        table = read_table(path)
        made = table["versions"]
        typer.echo(f"wrote {save(predicted_anew(table['rows'], made['torch']), path, made)}")
    real = read_table(REAL_TABLE)
    typer.echo(f"wrote {save_real_runs(predicted_runs(real['rows']), real['versions'])}")
    typer.echo(f"wrote {save_earlier()}")
    typer.echo(f"wrote {save_peaks()}")


def _measure(path: Path, only: str | None, *, few: bool, write: bool) -> None:
    from tests.evidence import table
    from tests.evidence.grid import drawn_experts, grid
    from tests.evidence.grid import held_out as drawn
    from tests.evidence.real_runs import REAL_RUNS, real_run, save_real_runs

    drawn_ones = path == HELD_OUT
    chosen = (*drawn(), *drawn_experts()) if drawn_ones else table.representatives(grid()) if few else grid()
    names = {row["name"] for row in _named([{"name": case.name} for case in chosen], only)}
    cases = [case for case in chosen if case.name in names]
    rows = []
    for number, case in enumerate(cases, start=1):
        start = time.perf_counter()
        rows.append(table.measured_row(case))
        typer.echo(f"{number}/{len(cases)}  {case.name}  {time.perf_counter() - start:.1f} s", err=True)
    typer.echo(table.text(rows))
    typer.echo(f"measured with {_made_with(table.versions())}")
    problems = table.broken(rows)
    if not write:
        _fail_with(problems + table.drifted(rows, read_table(path)))
    elif drawn_ones:
        typer.echo(f"\nwrote {table.save_held_out(rows)}")
        typer.echo(f"wrote {table.save_earlier()}")
    else:
        typer.echo(f"\nwrote {table.save_table(rows)}")
        typer.echo(f"wrote {save_real_runs([real_run(case) for case in REAL_RUNS], table.versions())}")
    _fail_with(problems)


def _fail_with(problems: list[str]) -> None:
    for problem in problems:
        typer.echo(problem, err=True)
    if problems:
        sys.exit(1)


def _made_with(versions: dict[str, str]) -> str:
    return " and ".join(f"{name} {version}" for name, version in versions.items())


def _on_gpu(only: str | None) -> str:
    import torch

    from lablib.launch.gpu_step import CudaCounters, gpu_rows, gpu_text
    from tests.evidence.gpu import gpu_cases, weighed_cases

    here = CudaCounters()  # or a sentence that there is none
    fitting = gpu_cases(torch.cuda.mem_get_info(here.device)[0])
    names = {row["name"] for row in _named([{"name": case.name} for case in fitting], only)}
    cases = [case for case in fitting if case.name in names]
    return gpu_text(gpu_rows(weighed_cases(cases, say=lambda line: typer.echo(line, err=True))))


if __name__ == "__main__":
    app()
