"""Thousands of random cases against the data-parallel toys: how many are equal to one process, or refused in a sentence.

`tests/attacked_toys.py` draws and judges them; `tests/test_toys_attacked.py` runs a few of other seeds in `make test`.
A case that fails is printed with its seed and number, from which `draw` makes it again.
"""

from __future__ import annotations

from collections import Counter

from tests.bench.harness import Result

#: Cases by ranks, and how many one start of the ranks takes.
CASES = {1: 1500, 2: 2500, 3: 1000, 4: 700}
AT_ONCE = 250
SEED = 13


def results() -> list[Result]:
    """Attack on 1 to 4 ranks."""
    from tests.attacked_toys import attack, draw_many, failures

    rows = []
    for ranks, count in CASES.items():
        kinds: Counter[str] = Counter()
        for first in range(0, count, AT_ONCE):
            cases = list(draw_many(SEED * 10 + ranks, min(AT_ONCE, count - first), first))
            found = attack(cases, ranks, timeout=600)
            for case, outcome in failures(found).items():
                print(f"seed {case.seed}, number {case.number}, {ranks} ranks, {case.toy}: {outcome}", flush=True)
            kinds.update("failed" if outcome.startswith("FAILED") else outcome for outcome in found.values())
            print(
                f"attacked toys, {ranks} ranks: {sum(kinds.values())} of {count} cases, {kinds['failed']} failed",
                flush=True,
            )
        rows.append(
            Result(
                name=f"random cases that the data-parallel toys get right or refuse, {ranks} ranks",
                ours=float(count - kinds["failed"]),
                reference=float(count),
                unit="cases",
                against="all",
                more_is_better=True,
                samples={kind: [float(number)] for kind, number in sorted(kinds.items())},
            )
        )
    return rows
