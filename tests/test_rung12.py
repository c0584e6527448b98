"""The case by hand of the check of bytes tells its mistakes apart."""

from itertools import combinations

import pytest

from lablib.calc.parallel import WAYS
from lablib.checks import rung12


@pytest.mark.parametrize("way", WAYS)
def test_no_two_mistakes_send_the_same_number_of_bytes(way):
    slips = rung12._slips(way, *rung12.FIRST)
    assert all(abs(change - 1) > 0.01 for _, change in slips)
    for (first, one), (second, other) in combinations(slips, 2):
        assert abs(one / other - 1) > 0.01, (first, second)
