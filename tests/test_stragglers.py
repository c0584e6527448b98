"""The slowest of n: exact small cases, and a simulation for the mean of a maximum."""

import math
import random
from statistics import fmean

import pytest

from lablib.calc.communication import chance_of_any, expected_slowest


def test_the_example_of_the_paper():
    """Dean and Barroso: one server in a hundred requests is slow; with 100 servers 63 percent of requests are."""
    assert chance_of_any(100, 0.01) == pytest.approx(0.634, abs=5e-4)


def test_the_slowest_of_many_grows_like_the_logarithm():
    step = expected_slowest(2000, base=0, jitter=1) - expected_slowest(1000, base=0, jitter=1)
    assert step == pytest.approx(math.log(2), abs=1e-3)


def test_the_mean_of_simulated_maxima():
    """The maximum of 8 exponential delays has variance 1 + 1/4 + ... + 1/64 < 1.6; of 20,000 means the standard error
    is below 0.009. The seed is fixed, so the test is too; 0.05 is more than five of them."""
    dice = random.Random(10)
    seen = fmean(max(dice.expovariate(1) for _ in range(8)) for _ in range(20_000))
    assert expected_slowest(8, base=0, jitter=1) == pytest.approx(seen, abs=0.05)


@pytest.mark.parametrize(("ranks", "chance"), [(0, 0.1), (2, -0.1), (2, 1.1)])
def test_impossible_numbers_are_named(ranks, chance):
    with pytest.raises(ValueError, match=r"ranks=|chance="):
        chance_of_any(ranks, chance)
