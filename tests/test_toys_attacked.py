"""Random cases against the data-parallel toys: each is equal to one process in float64, or refused in a sentence.

The seed is fixed, so a failure comes back; `make bench` runs thousands more. See `tests/attacked_toys.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.attacked_toys import PLANTED, REFUSALS, TOYS, attack, draw_many, failures

#: Ranks, and the cases drawn for them. Ranks start once for all of a row.
SMALL = {1: 20, 2: 60, 3: 20, 4: 10}


@pytest.mark.drawn
@pytest.mark.parametrize("ranks", SMALL)
def test_random_cases_are_equal_or_refused(ranks: int) -> None:
    found = attack(list(draw_many(seed=ranks, count=SMALL[ranks])), ranks)
    assert len(found) == SMALL[ranks]
    assert not failures(found), "\n".join(f"{outcome}: {case}" for case, outcome in failures(found).items())
    kinds = Counter(found.values())
    print(ranks, "ranks:", dict(kinds))
    assert kinds["equal"] > len(found) / 2  # or the generator has lost its aim


def test_cases_come_back_and_cover_everything() -> None:
    cases = list(draw_many(seed=0, count=1500))
    assert cases == list(draw_many(seed=0, count=1500))
    assert {case.toy for case in cases} == set(TOYS)
    assert {name for case in cases for name in case.may_be_refused()} == set(REFUSALS)


def test_a_planted_mistake_is_found() -> None:
    """One percent of a gradient is less than any mistake of an idea would lose."""
    cases = draw_many(seed=0, count=60)
    ordinary = [case for case in cases if not (case.may_be_refused() or case.single)]
    planted = [replace(case, habits=case.habits | {PLANTED}, clip=None) for case in ordinary[:12]]
    found = attack(planted, ranks=1)
    assert len(failures(found)) == len(planted), found
