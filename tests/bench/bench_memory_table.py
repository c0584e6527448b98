"""The whole grid of the memory calculator, measured again in PyTorch: bounds, and drift from the committed table.

`make test` does this for a dozen small cases; here are all of them, up to 70B shapes under fake tensors.
"""

from __future__ import annotations

import logging
import sys

from tests.bench.harness import Result


def results() -> list[Result]:
    """Return the worst error of each kind, in percent, and how many numbers are not those of the table."""
    from tests.evidence.grid import grid
    from tests.evidence.headline import read_table
    from tests.evidence.table import comparisons, drifted, measured_row

    logging.getLogger("transformers").setLevel(logging.ERROR)
    rows = [measured_row(case) for case in grid()]
    table = read_table()
    moved = drifted(rows, table)
    for sentence in moved:
        print(sentence, file=sys.stderr)
    found = []
    for kind, limit in table["bounds"].items():
        errors = {
            row["name"]: 100 * max(abs(c.error) for c in numbers)
            for row in rows
            if (numbers := [c for c in comparisons(row) if c.what.startswith(kind)])
        }
        worst = max(errors, key=errors.get)
        name = f"memory, {kind}: worst of {len(errors)} cases ({worst})"
        found.append(Result(name, errors[worst], 100 * limit, "%", samples={kind: list(errors.values())}))
    return [*found, Result("memory, numbers that are not the table's", len(moved), 0, "numbers")]
