"""The drawn configurations, measured: the file that says how wrong the memory calculator is where nobody looked.

    save_held_out([measured_row(case) for case in held_out()])

Chapter: book/memory_calculator.md
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lablib.calc.memory_headline import HELD_OUT
from lablib.calc.memory_held_out import SEED
from lablib.launch.experiments import write_json
from lablib.launch.memory_table import Row, versions


def save_held_out(rows: Sequence[Row], path: Path = HELD_OUT, made: dict[str, str] | None = None) -> Path:
    """Write the rows with the seed that drew them; `lablib.calc.memory_headline.read_table` reads the file.

    Args:
        rows: Of every drawn configuration.
        path: Target.
        made: Versions that the measurements are of; the installed ones by default.
    """
    return write_json(path, {"versions": made or versions(), "seed": SEED, "rows": list(rows)})
