"""`rung memory-peers`: other memory calculators on the cases of the memory table."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def memory_peers(
    committed: Annotated[
        bool, typer.Option("--committed", help="Print the committed comparison; compute nothing.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Write the comparison anew, from the memory table.")
    ] = False,
) -> None:
    """Put the cases of the memory table through the other calculators; fail where a number drifted."""
    import logging

    from lablib.calc.memory_headline import OTHERS, read_table
    from lablib.launch.other_calculators import compare, comparison_text, drifted, save_comparison

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


if __name__ == "__main__":
    typer.run(memory_peers)
