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
    from tests.evidence.table import comparisons, drifted, measured_row, worst_by_kind
    from tests.evidence.verdict import PEAK_BOUND, SAVED_BOUND

    logging.getLogger("transformers").setLevel(logging.ERROR)
    rows = [measured_row(case) for case in grid()]
    moved = drifted(rows, read_table())
    for sentence in moved:
        print(sentence, file=sys.stderr)
    worst = worst_by_kind(rows)
    errors = {
        kind: [
            100 * max(abs(c.error) for c in comparisons(row) if c.what.startswith(kind))
            for row in rows
            if any(c.what.startswith(kind) for c in comparisons(row))
        ]
        for kind in worst
    }
    limits = {"states": 0.0, "saved": SAVED_BOUND, "peak": PEAK_BOUND}
    found = [
        Result(
            f"memory, {kind}: worst of {len(errors[kind])} cases ({worst[kind][0]})",
            100 * abs(worst[kind][1].error),
            100 * limit,
            "%",
            samples={kind: errors[kind]},
        )
        for kind, limit in limits.items()
    ]
    return [*found, Result("memory, numbers that are not the table's", len(moved), 0, "numbers")]
