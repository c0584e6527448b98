"""How wrong is the memory calculator: what the pages quote of a judged table, as plain data.

    headline(rows)["peak"]       # {"name": the configuration, "what": "peak", "off": a share without sign}

The worst case is chosen here and nowhere else, and no page types it: the result is written beside the rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from tests.evidence.cases import FACTORS
from tests.evidence.grid import Pair, pairs_of
from tests.evidence.verdict import Comparison, compare

#: The chosen cases, the drawn ones, earlier draws, and other calculators on the cases of the first.
TABLE = Path(__file__).resolve().parents[2] / "book" / "data" / "memory_table.json"
HELD_OUT = TABLE.with_name("memory_held_out.json")
#: Of each earlier draw the worst peak, as it was predicted before the calculator was corrected because of it.
EARLIER = TABLE.with_name("memory_earlier_draws.json")
OTHERS = TABLE.with_name("other_calculators.json")

Row = Mapping[str, Any]

#: No sum is further off than this, as a share.
NOTICEABLE = 0.001


def read_table(path: Path = TABLE) -> Any:
    """Return a committed file; a table has "versions" and "rows"."""
    return json.loads(path.read_text(encoding="utf-8"))


def headline(rows: Iterable[Row]) -> dict[str, Any]:
    """Return how wrong the calculator is.

    Returns:
        "configurations"; "states_exact", those whose states are exact to the byte, each term; "peaks", those whose
        peak can be measured; "typical_peak", the median error of these. "saved" and "peak" are the worst sums,
        "saved_term" and "peak_term" the worst parts of them, as shares of the whole. "noticeable" are all sums that are
        off by more than `NOTICEABLE`, the worst first.
    """
    numbers = {row["name"]: compare(row["predicted"], row["measured"]) for row in rows}
    every = [(name, c) for name, found in numbers.items() for c in found]
    peaks = [c for _, c in every if c.what == "peak"]

    def worst(what: str, parts: bool = True) -> dict[str, Any] | None:
        told = [_told(name, c) for name, c in every if c.what.startswith(what) and (": " in c.what) == parts]
        return max(told, key=_off, default=None)

    sums = [_told(name, c) for name, c in every if c.what in ("saved", "peak") or c.what.startswith("states")]
    return {
        "configurations": len(numbers),
        "states_exact": sum(
            all(c.predicted == c.measured for c in found if c.what.startswith("states")) for found in numbers.values()
        ),
        "peaks": len(peaks),
        "typical_peak": median([abs(c.error) for c in peaks] or [0.0]),
        "saved": worst("saved", parts=False),
        "saved_term": worst("saved"),
        "peak": worst("peak", parts=False),
        "peak_term": worst("peak"),
        "noticeable": sorted((one for one in sums if one["off"] > NOTICEABLE), key=_off, reverse=True),
    }


def _told(name: str, number: Comparison) -> dict[str, Any]:
    return {"name": name, "what": number.what, "off": abs(number.error)}


def _off(told: Mapping[str, Any]) -> float:
    return told["off"]


def step_moments(row: Row) -> list[dict[str, Any]]:
    """Return the moments of a row whose step was kept, in the order of time: "name", "phase", "kinds", "measured".

    A tracker cannot tell the reduction of the last gradients from the backward pass before it, so a moment that it does
    not name is folded into the one before: the fuller of the two was what it saw.
    """
    measured = row["measured"]["moments"]
    found: list[dict[str, Any]] = []
    for name, kinds in row["predicted"]["moment_terms"].items():
        if name in measured:
            word = "loss" if "loss" in name else name.split()[0]
            phase = {"optimizer": "step"}.get(word, word)
            found.append({"name": name, "phase": phase, "kinds": kinds, "measured": measured[name]})
        elif found and sum(kinds.values()) > sum(found[-1]["kinds"].values()):
            found[-1]["kinds"] = kinds
    return found


def pairs_shown(rows: Iterable[Row]) -> int:
    """Return how many pairs of values of two factors occur together in some configuration."""
    shown: set[Pair] = set()
    for row in rows:
        shown |= pairs_of({factor: row["case"][factor] for factor in FACTORS})
    return len(shown)
