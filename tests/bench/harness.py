"""What the benches share: fair timing, one table, one JSON file, one exit code.

A bench is a module `bench_*.py` beside this file with a function `results()` that returns a list of `Result`. One
that cannot run everywhere has a function `missing()` too, which says what it lacks here, or "". One that counts and
does not time names its own record, RECORD, and can be recorded without the others.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lablib.launch.experiments import machine, save_record, write_json


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes:
        name: What was measured.
        ours: Our number.
        reference: Theirs, or the limit.
        unit: Of both.
        against: "limit", or whose number the reference is.
        at_most: The ratio ours/reference that is still good; with `more_is_better`, at least.
        more_is_better: For counts of successes and for rates.
        samples: Every raw sample behind the numbers, by variant.
    """

    name: str
    ours: float
    reference: float
    unit: str
    against: str = "limit"
    at_most: float = 1.0
    more_is_better: bool = False
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Ours over the reference, None for a reference of zero."""
        return self.ours / self.reference if self.reference else None

    @property
    def good(self) -> bool:
        """Whether the limit is held."""
        allowed = self.reference * self.at_most
        return self.ours >= allowed if self.more_is_better else self.ours <= allowed


def interleaved(
    variants: dict[str, Callable[[], object]], *, rounds: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Time variants in turn, so that a slow moment of the machine meets them all.

    Args:
        variants: What to call, by name.
        rounds: Timed calls of each.
        warmup: Calls of each that do not count.

    Returns:
        Seconds of every timed call, by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(warmup + rounds):
        # The order turns round, so that nobody always runs after the same neighbour.
        names = list(variants) if turn % 2 else list(reversed(variants))
        for name in names:
            gc.collect()
            start = time.perf_counter()
            variants[name]()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def median(samples: list[float]) -> float:
    """Return the median, the one statistic of every table.

    Args:
        samples: At least one number.
    """
    return statistics.median(samples)


def table(results: list[Result]) -> str:
    """Return the results as aligned text.

    Args:
        results: In the order to print.
    """
    rows = [("bench", "ours", "reference", "ratio", "allowed", "verdict")]
    for r in results:
        sign = ">=" if r.more_is_better else "<="
        rows.append(
            (
                r.name,
                f"{r.ours:.4g} {r.unit}",
                f"{r.reference:.4g} {r.unit} ({r.against})",
                "-" if r.ratio is None else f"{r.ratio:.3f}",
                f"{sign} {r.at_most:g}",
                "ok" if r.good else "MISSED",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _rows(results: list[Result]) -> list[dict]:
    return [{**asdict(r), "ratio": r.ratio, "good": r.good} for r in results]


def main(arguments: list[str] | None = None) -> int:
    """Run the benches and return 1 if a limit is missed, 0 otherwise.

    Args:
        arguments: Command line; that of the process by default.
    """
    available = sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description="Measure what the course promises."
    )
    parser.add_argument(
        "names", nargs="*", metavar="bench", help=f"which ones (default: all): {', '.join(available)}"
    )
    parser.add_argument("--json", type=Path, help="write every result and raw sample to this file")
    parser.add_argument(
        "--record", action="store_true", help="keep the results of all benches for the status page"
    )
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in available:
            parser.error(f"no bench {name!r}; there are {', '.join(available)}")
    benches = [importlib.import_module(f"tests.bench.bench_{name}") for name in options.names or available]
    if options.record and options.names and not all(hasattr(bench, "RECORD") for bench in benches):
        parser.error("--record keeps one run of all benches that time something; leave the names out")
    # Asked before the first one starts: what the last one lacks should not cost the minutes of all others.
    lacking = [what for bench in benches if hasattr(bench, "missing") and (what := bench.missing())]
    if lacking:
        parser.error("; ".join(lacking))
    found = {bench: bench.results() for bench in benches}
    results = [result for of_one in found.values() for result in of_one]
    print(table(results))
    if options.record:
        for bench in [bench for bench in benches if hasattr(bench, "RECORD")]:
            name = bench.__name__.rpartition("bench_")[2]
            save_record(bench.RECORD, _rows(found.pop(bench)), f"make bench BENCH='{name} --record'")
        if found:
            timed = [result for of_one in found.values() for result in of_one]
            save_record("bench", _rows(timed), "make bench BENCH=--record")
    rows = _rows(results)
    if options.json:
        write_json(options.json, {"machine": machine(), "results": rows})
    return 0 if all(r.good for r in results) else 1
