"""`rung memory-table` and `rung memory-peers`: the memory calculator, and others, against PyTorch, case by case."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer


def memory_table(
    only: Annotated[str | None, typer.Option(help="Cases whose name contains this text.")] = None,
    few: Annotated[bool, typer.Option("--few", help="The dozen cases that the tests run.")] = False,
    committed: Annotated[bool, typer.Option("--committed", help="Print the committed table; measure nothing.")] = False,
    predict: Annotated[
        bool, typer.Option("--predict", help="Write the table with new predictions, old measurements.")
    ] = False,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Cases drawn at random, none of them in the grid.")
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="Measure all cases and write the table anew.")] = False,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Real steps on this machine's GPU; write and compare nothing.")
    ] = False,
) -> None:
    """Measure configurations in PyTorch beside the calculator; fail where a bound breaks or a number drifted."""
    from lablib.proof.headline import HELD_OUT, TABLE

    if gpu and (few or committed or predict or held_out or write):
        raise ValueError("--gpu goes with --only alone; rung labs run 01 --record writes its record")
    if write and (only or few or committed):
        raise ValueError("--write makes the whole table: leave --only, --few and --committed out")
    if few and held_out:
        raise ValueError("--few are of the grid: leave it or --held-out out")
    if predict and (write or only or few or committed):
        raise ValueError("--predict makes the whole table: leave --write, --only, --few and --committed out")
    if committed and few:
        raise ValueError("--committed prints what was measured: leave --few out, and use --only")
    path = HELD_OUT if held_out else TABLE
    if gpu:
        _quiet()
        typer.echo(_on_gpu(only))
    elif committed:
        _print_committed(path, only)
    elif predict:
        _predict_anew(path)
    else:
        _measure(path, only, few=few, write=write)


def _print_committed(path: Path, only: str | None) -> None:
    from lablib.proof.headline import read_table
    from lablib.proof.table import text

    table = read_table(path)
    rows = [row for row in table["rows"] if not only or only in row["name"]]
    if not rows:
        raise ValueError(f"no case has {only!r} in its name; see rung memory-table --committed")
    typer.echo(text(rows))
    typer.echo(f"measured with {_made_with(table['versions'])}")


def _predict_anew(path: Path) -> None:
    from lablib.proof.headline import read_table
    from lablib.proof.table import predicted_anew

    table = read_table(path)
    anew = predicted_anew(table["rows"], table["versions"]["torch"])
    typer.echo(f"wrote {_save(anew, path, table['versions'])}")


def _write_real_runs() -> Path:
    from lablib.proof.real_runs import REAL_RUNS, real_run, save_real_runs
    from lablib.proof.table import versions

    return save_real_runs([real_run(case) for case in REAL_RUNS], versions())


def _save(rows: list[dict], path: Path, made: dict[str, str] | None = None) -> Path:
    from lablib.proof.headline import HELD_OUT
    from lablib.proof.table import save_held_out, save_table

    return (save_held_out if path == HELD_OUT else save_table)(rows, path, made)


def _measure(path: Path, only: str | None, *, few: bool, write: bool) -> None:
    from lablib.proof.grid import drawn_experts, grid
    from lablib.proof.grid import held_out as drawn
    from lablib.proof.headline import HELD_OUT, read_table
    from lablib.proof.table import broken, drifted, measured_row, representatives, text, versions

    chosen = (*drawn(), *drawn_experts()) if path == HELD_OUT else representatives() if few else grid()
    cases = [case for case in chosen if not only or only in case.name]
    if not cases:
        raise ValueError(f"no case has {only!r} in its name; see rung memory-table --committed")
    _quiet()
    rows = []
    for number, case in enumerate(cases, start=1):
        start = time.perf_counter()
        rows.append(measured_row(case))
        typer.echo(f"{number}/{len(cases)}  {case.name}  {time.perf_counter() - start:.1f} s", err=True)
    typer.echo(text(rows))
    typer.echo(f"measured with {_made_with(versions())}")
    problems = broken(rows)
    if write:
        typer.echo(f"\nwrote {_save(rows, path)}")
        if path != HELD_OUT:
            typer.echo(f"wrote {_write_real_runs()}")
    else:
        problems += drifted(rows, read_table(path))
    _fail_with(problems)


def _fail_with(problems: list[str]) -> None:
    for problem in problems:
        typer.echo(problem, err=True)
    if problems:
        sys.exit(1)


def _quiet() -> None:
    import logging

    logging.getLogger("transformers").setLevel(logging.ERROR)


def _made_with(versions: dict[str, str]) -> str:
    return " and ".join(f"{name} {version}" for name, version in versions.items())


def _on_gpu(only: str | None) -> str:
    from lablib.proof.gpu_measure import CudaCounters

    here = CudaCounters()  # or a sentence that there is none
    import torch

    from lablib.proof.gpu_measure import measured_samples
    from lablib.proof.gpu_rows import gpu_cases, gpu_rows, gpu_text

    fitting = gpu_cases(torch.cuda.mem_get_info(here.device)[0])
    cases = [case for case in fitting if not only or only in case.name]
    if not cases:
        names = "; ".join(case.name for case in fitting) or "none"
        raise ValueError(f"no case that fits this GPU has {only!r} in its name; those that fit: {names}")
    return gpu_text(gpu_rows(measured_samples(cases, say=lambda line: typer.echo(line, err=True))))


def memory_peers(
    committed: Annotated[
        bool, typer.Option("--committed", help="Print the committed comparison; compute nothing.")
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="Write the comparison anew, from the memory table.")] = False,
) -> None:
    """Put the cases of the memory table through the other calculators; fail where a number drifted."""
    from lablib.proof.comparison import compare, comparison_text, drifted, save_comparison
    from lablib.proof.headline import OTHERS, read_table

    if write and committed:
        raise ValueError("--write makes the comparison anew: leave --committed out")
    before = read_table(OTHERS) if OTHERS.exists() else None
    if committed:
        if before is None:
            raise ValueError("there is no committed comparison: make it with rung memory-peers --write")
        typer.echo(comparison_text(before))
        return
    _quiet()
    table = compare(deepspeed=before and before["deepspeed"])
    typer.echo(comparison_text(table))
    if write:
        typer.echo(f"\nwrote {save_comparison(table)}")
        return
    _fail_with(drifted(table, before) if before else ["there is no committed comparison yet: use --write"])
