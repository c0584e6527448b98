"""The drawn configurations, measured: the file that says how wrong the memory calculator is where nobody looked.

    save_held_out([measured_row(case) for case in held_out()])

Chapter: book/memory_calculator.md
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lablib.calc.memory_held_out import SEED
from lablib.launch.experiments import repository_root, write_json
from lablib.launch.memory_table import Row, versions


def held_out_path() -> Path:
    """Return the committed file."""
    return repository_root() / "book" / "data" / "memory_held_out.json"


def save_held_out(rows: Sequence[Row], path: Path | None = None) -> Path:
    """Write the rows with the seed that drew them; `lablib.launch.memory_table.load_table` reads the file.

    Args:
        rows: Of every drawn configuration.
        path: Target; None for the committed file.
    """
    return write_json(path or held_out_path(), {"versions": versions(), "seed": SEED, "rows": list(rows)})
