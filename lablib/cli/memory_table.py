"""`rung memory-table` and `rung memory-peers`: the memory calculator, and others, against PyTorch, case by case."""

from __future__ import annotations

import sys
import time
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
    import logging

    if gpu:
        if few or committed or predict or held_out or write:
            raise ValueError("--gpu goes with --only alone; rung labs run 01 --record writes its record")
        logging.getLogger("transformers").setLevel(logging.ERROR)
        typer.echo(_on_gpu(only))
        return
    from lablib.proof.grid import grid
    from lablib.proof.grid import held_out as drawn
    from lablib.proof.headline import HELD_OUT, TABLE, read_table
    from lablib.proof.table import (
        broken,
        drifted,
        measured_row,
        predicted_anew,
        representatives,
        save_held_out,
        save_table,
        text,
        versions,
    )

    if write and (only or few or committed):
        raise ValueError("--write makes the whole table: leave --only, --few and --committed out")
    if few and held_out:
        raise ValueError("--few are of the grid: leave it or --held-out out")
    if predict and (write or only or few or committed):
        raise ValueError("--predict makes the whole table: leave --write, --only, --few and --committed out")
    if committed and few:
        raise ValueError("--committed prints what was measured: leave --few out, and use --only")
    path, save = (HELD_OUT, save_held_out) if held_out else (TABLE, save_table)
    if committed:
        table = read_table(path)
        rows = [row for row in table["rows"] if not only or only in row["name"]]
        if not rows:
            raise ValueError(f"no case has {only!r} in its name; see rung memory-table --committed")
        typer.echo(text(rows))
        typer.echo(f"measured with {_made_with(table['versions'])}")
        return
    if predict:
        table = read_table(path)
        anew = predicted_anew(table["rows"], table["versions"]["torch"])
        typer.echo(f"wrote {save(anew, path, table['versions'])}")
        return
    chosen = drawn() if held_out else representatives() if few else grid()
    cases = [case for case in chosen if not only or only in case.name]
    if not cases:
        raise ValueError(f"no case has {only!r} in its name; see rung memory-table --committed")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    rows = []
    for number, case in enumerate(cases, start=1):
        start = time.perf_counter()
        rows.append(measured_row(case))
        typer.echo(f"{number}/{len(cases)}  {case.name}  {time.perf_counter() - start:.1f} s", err=True)
    typer.echo(text(rows))
    typer.echo(f"measured with {_made_with(versions())}")
    problems = broken(rows)
    if write:
        typer.echo(f"\nwrote {save(rows)}")
    else:
        problems += drifted(rows, read_table(path))
    for problem in problems:
        typer.echo(problem, err=True)
    if problems:
        sys.exit(1)


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
    import logging

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
    logging.getLogger("transformers").setLevel(logging.ERROR)
    table = compare(deepspeed=before and before["deepspeed"])
    typer.echo(comparison_text(table))
    if write:
        typer.echo(f"\nwrote {save_comparison(table)}")
        return
    problems = drifted(table, before) if before else ["there is no committed comparison yet: use --write"]
    for problem in problems:
        typer.echo(problem, err=True)
    if problems:
        sys.exit(1)
