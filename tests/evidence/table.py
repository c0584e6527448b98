"""The table of the memory calculator: every case of the grid, or drawn, predicted and measured, and compared.

    rows = [measured_row(case) for case in grid()]
    drifted(rows, read_table())           # [] unless something moved
    save_table(rows)

The table of drawn cases says how wrong the calculator is where nobody looked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from lablib.calc.torch_versions import PINNED, torch_facts
from lablib.launch.records import write_json
from tests.evidence.cases import FACTORS, Case
from tests.evidence.grid import BESIDE, DRAWN, SEED
from tests.evidence.headline import (
    EARLIER,
    HELD_OUT,
    NOTICEABLE,
    TABLE,
    headline,
    pairs_shown,
    read_table,
    step_moments,
)
from tests.evidence.oracles import measure_case
from tests.evidence.verdict import PEAK_BOUND, SAVED_BOUND, Comparison, compare, predict

Row = dict[str, Any]


def measured_row(case: Case) -> Row:
    """Measure a case, and put what the calculator says of the installed PyTorch beside it."""
    found = measure_case(case)
    measured = {"states": found.states, "saved": found.saved, "groups": found.groups}
    if case.implementation == "paper":
        # What papers do not count: the batch itself, and the outputs that a pipeline's runtime holds.
        measured["saved"] -= found.inputs + found.outputs
    if case.implementation != "paper":
        measured |= {"peak": found.peak, "peak_at": found.peak_at, "peak_terms": found.peak_terms}
    if case in DRAWN:
        measured |= {"moments": found.totals, "moment_terms": found.moments}
    oracle = "real tensors" if case.size == "tiny" else "fake tensors"
    return {"name": case.name, "oracle": f"{oracle}, {'FSDPMemTracker' if case.shards else 'MemTracker'}"} | _said(
        case, measured, torch.__version__
    )


def _said(case: Case, measured: dict[str, Any], version: str) -> Row:
    return {
        "case": asdict(case),
        "experts": case.model.num_experts,
        "predicted": predict(case, measured.get("peak_at"), version),
        "measured": measured,
    }


def predicted_anew(rows: Iterable[Row], version: str = PINNED) -> list[Row]:
    """Return rows with what the calculator says now, and their measurements as they are."""
    return [row | _said(Case(**row["case"]), row["measured"], version) for row in rows]


def versions() -> dict[str, str]:
    import transformers

    return {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}


def save_table(rows: Sequence[Row], path: Path = TABLE, made: dict[str, str] | None = None) -> Path:
    """Write the table, and beside its rows what the pages quote of them."""
    of_factors = [row for row in rows if Case(**row["case"]) not in BESIDE]
    found = {
        "versions": made or versions(),
        "bounds": {"states": 0.0, "saved": SAVED_BOUND, "peak": PEAK_BOUND},
        "noticeable": NOTICEABLE,
        "factors": FACTORS,
        "pairs": pairs_shown(of_factors),
        "headline": headline(rows),
        "steps": [
            {"name": row["name"], "case": row["case"], "moments": step_moments(row)}
            | {key: row["measured"][key] for key in ("peak", "peak_at")}
            for row in rows
            if Case(**row["case"]) in DRAWN
        ],
    }
    return write_json(path, found | {"rows": list(rows)})


def save_held_out(rows: Sequence[Row], path: Path = HELD_OUT, made: dict[str, str] | None = None) -> Path:
    return write_json(
        path, {"versions": made or versions(), "seed": SEED, "headline": headline(rows), "rows": list(rows)}
    )


def save_earlier(path: Path = EARLIER) -> Path:
    """Write anew how far the worst of each earlier draw was off, and is today."""
    return write_json(path, [earlier | _then_and_now(earlier["worst"]) for earlier in read_table(path)])


def _then_and_now(row: Row) -> dict[str, float]:
    return {when: headline([said])["peak"]["off"] for when, said in (("then", row), ("now", predicted_anew([row])[0]))}


def comparisons(row: Row) -> list[Comparison]:
    return compare(row["predicted"], row["measured"])


def broken(rows: Iterable[Row]) -> list[str]:
    """Return a sentence for every number whose bound does not hold."""
    return [
        f"{row['name']}: {c.what} is predicted as {c.predicted:,} bytes and measured as {c.measured:,}, "
        f"off by {abs(c.error):.2%} where {c.bound:.0%} is allowed"
        for row in rows
        for c in comparisons(row)
        if not c.holds
    ]


def drifted(rows: Iterable[Row], committed: dict[str, Any]) -> list[str]:
    """Return a sentence for every number that is no longer what the committed table says.

    Measurements must be the same under the versions that the table was made with; under others a new operator may
    keep something else, and the bounds decide. Predictions must be the same wherever PyTorch does the same.
    """
    old = {row["name"]: row for row in committed["rows"]}
    made, here = committed["versions"], versions()
    alike = replace(torch_facts(made["torch"]), version="") == replace(torch_facts(here["torch"]), version="")
    parts = ("predicted", "measured") if made == here else ("predicted",) if alike else ()
    found = []
    for row in rows:
        if row["name"] not in old:
            found.append(
                f"{row['name']} is not in the table: make it anew with python -m tests.evidence memory-table --write"
            )
            continue
        for part in parts:
            for key, value in row[part].items():
                was = old[row["name"]][part].get(key)
                if was != value:
                    found.append(f"{row['name']}: {part} {key} was {was} and is {value}")
    return found


def representatives(cases: Sequence[Case], count: int = 12) -> list[Case]:
    """Return cheap ones of the cases that between them show every value of every factor that cheap cases have."""
    # Real tensors with scores of 1,000 x 1,000 tokens take seconds, and so do several steps of 1,000.
    tiny = [case for case in cases if case.size == "tiny" and case not in BESIDE]
    cheap = [c for c in tiny if c.seq == 64 or (c.attention == "fused" and c.accumulate == 1)]
    chosen: list[Case] = []
    shown: set[tuple[str, object]] = set()
    while cheap and len(chosen) < count:
        # Of those that show as much, the one with the fewest tokens to run through.
        best = max(cheap, key=lambda c: (len(set(asdict(c).items()) - shown), -c.accumulate * c.micro_batch * c.seq))
        chosen.append(best)
        cheap.remove(best)
        shown |= set(asdict(best).items())
    return chosen


def text(rows: Sequence[Row]) -> str:
    """Return the table as aligned text: predicted, measured and ratio of what is kept and of the peak.

    Under "worst kind" stands the largest error of a kind of memory at the peak, as a share of the whole peak.
    """
    heads = f"{'states':>8}{'saved, GB':>12}{'ratio':>8}{'peak, GB':>12}{'ratio':>8}{'worst kind':>12}  at the peak"
    lines = [f"{'':68}{heads}"]
    for row in rows:
        numbers = {c.what: c for c in comparisons(row)}
        exact = all(c.holds for what, c in numbers.items() if what.startswith("states"))
        saved, peak = numbers["saved"], numbers.get("peak")
        line = f"{row['name']:68}{'exact' if exact else 'WRONG':>8}{saved.measured / 1e9:>12.4g}{saved.ratio:>8.4f}"
        if peak:
            kinds = max(abs(c.error) for what, c in numbers.items() if what.startswith("peak: "))
            at, expected = row["measured"]["peak_at"], row["predicted"]["peak_at"]
            line += f"{peak.measured / 1e9:>12.4g}{peak.ratio:>8.4f}{kinds:>12.2%}  {at}"
            if at != expected:  # two moments that are nearly equal
                line += f" (predicted: {expected}; kinds are compared at the measured one)"
        lines.append(line)
    lines.append("")
    found = headline(rows)
    for what in [what for what in ("saved", "peak") if found[what]]:
        lines.append(f"worst {what}: off by {found[what]['off']:.3%} ({found[what]['name']})")
    lines.append(f"states exact in {found['states_exact']} of {found['configurations']}")
    return "\n".join(lines)
