"""What the benches share: one table, one record each, one exit code.

A bench is a module `bench_*.py` beside this file with a function `results()` that returns a list of `Result`. One
that cannot run everywhere has a function `missing()` too, which says what it lacks here, or "".
"""

from __future__ import annotations

import argparse
import importlib
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lablib.launch.records.experiments import save_record


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes:
        name: What was measured.
        ours: Our number.
        reference: Theirs, or the limit.
        unit: Of both.
        against: "limit", or whose number the reference is.
        at_most: The ratio ours/reference that is still good, with `more_is_better` at least; None reports it only.
        more_is_better: For counts of successes.
        samples: Every raw sample behind the numbers, by variant.
    """

    name: str
    ours: float
    reference: float
    unit: str
    against: str = "limit"
    at_most: float | None = 1.0
    more_is_better: bool = False
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Ours over the reference, None for a reference of zero."""
        return self.ours / self.reference if self.reference else None

    @property
    def good(self) -> bool:
        """Whether the limit is held, if there is one."""
        allowed = self.reference * (1.0 if self.at_most is None else self.at_most)
        held = self.ours >= allowed if self.more_is_better else self.ours <= allowed
        return held or self.at_most is None


def median(samples: list[float]) -> float:
    """Return the median, the one statistic of every table."""
    return statistics.median(samples)


def table(results: list[Result]) -> str:
    """Return the results as aligned text."""
    rows = [("bench", "ours", "reference", "ratio", "verdict")]
    for r in results:
        ratio = "-" if r.ratio is None else f"{r.ratio:.3f}"
        verdict = "-" if r.at_most is None else "ok" if r.good else "MISSED"
        rows.append((r.name, f"{r.ours:.4g} {r.unit}", f"{r.reference:.4g} {r.unit} ({r.against})", ratio, verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def main(arguments: list[str] | None = None) -> int:
    """Run the benches of a command line and return 1 if a limit is missed, 0 otherwise."""
    available = sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Measure what the course promises.")
    parser.add_argument("names", nargs="*", metavar="bench", help=f"which ones (default: all): {', '.join(available)}")
    parser.add_argument("--record", action="store_true", help="keep the results for the status page")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in available:
            parser.error(f"no bench {name!r}; there are {', '.join(available)}")
    names = options.names or available
    benches = {name: importlib.import_module(f"tests.bench.bench_{name}") for name in names}
    # Asked before the first one starts: what the last one lacks should not cost the minutes of all others.
    lacking = [what for bench in benches.values() if hasattr(bench, "missing") and (what := bench.missing())]
    if lacking:
        parser.error("; ".join(lacking))
    found = {name: bench.results() for name, bench in benches.items()}
    results = [result for of_one in found.values() for result in of_one]
    print(table(results))
    if options.record:
        for name, of_one in found.items():
            rows = [{**asdict(r), "ratio": r.ratio, "good": r.good} for r in of_one]
            save_record(f"bench_{name}", rows, f"make bench BENCH='{name} --record'")
    return 0 if all(r.good for r in results) else 1
