"""The gradient noise scale: the estimator against enumerated batches, and the rules."""

import itertools
import math
import random

import pytest

from lablib.calc.runs import examples_needed, linear_rule, noise_rule, noise_scale, sqrt_rule, step_gain, steps_needed

SEED = random.randrange(10**6)
DICE = random.Random(SEED)


def _square(vector):
    return sum(x * x for x in vector)


def _mean(vectors):
    return [sum(column) / len(vectors) for column in zip(*vectors, strict=True)]


@pytest.mark.parametrize(("examples", "width", "batch"), [(5, 3, 2), (4, 7, 3), (3, 1, 4)])
def test_over_all_batches_the_estimator_is_exact(examples, width, batch):
    """Every way to draw a batch with replacement, once each: expectations are sums, and nothing is left to chance."""
    print(f"seed {SEED}")
    gradients = [[DICE.gauss(0.5, 1) for _ in range(width)] for _ in range(examples)]
    true = _mean(gradients)
    variance = sum(_square([x - t for x, t in zip(g, true, strict=True)]) for g in gradients) / examples
    batches = list(itertools.product(gradients, repeat=batch))
    got = noise_scale(
        [sum(map(_square, b)) / batch for b in batches],
        [_square(_mean(b)) for b in batches],
        batch_small=1,
        batch_big=batch,
    )
    # Means of at most 81 batches, whose squares add up to signal and noise: double precision loses less than 1e-12
    # of that sum. Of a small signal alone it may lose more, so the tolerance is absolute.
    size = _square(true) + variance
    assert got.signal == pytest.approx(_square(true), rel=0, abs=1e-12 * size)
    assert got.noise == pytest.approx(variance, rel=0, abs=1e-12 * size)
    assert got.steps == examples**batch


def test_by_hand():
    # Two examples with gradients 3 and 1: |G|² = 4, variance 1, so a quarter of an example.
    # Four equally likely pairs: squares of the means are 9, 4, 4, 1, of the parts 9, 5, 5, 1.
    got = noise_scale([9, 5, 5, 1], [9, 4, 4, 1], batch_small=1, batch_big=2)
    assert (got.signal, got.noise, got.examples) == (4, 1, 0.25)
    assert "0.25" in str(got)


def test_the_trade_between_steps_and_examples():
    print(f"seed {SEED}")
    for _ in range(100):
        noise, batch = math.exp(DICE.uniform(0, 12)), math.exp(DICE.uniform(0, 12))
        s, e = steps_needed(batch, noise_scale=noise), examples_needed(batch, noise_scale=noise)
        # The hyperbola of the paper; both factors are exact ratios, and 1 is subtracted from numbers of size 1 and more,
        # so up to 2^-52 * e^12 of the smaller factor is lost.
        assert (s - 1) * (e - 1) == pytest.approx(1, rel=1e-9)
        # Steps times batch is examples, in units of S_min B_noise = E_min.
        assert s * batch / noise == pytest.approx(e, rel=1e-12)
        assert step_gain(batch, noise_scale=noise) * s == pytest.approx(1)
    assert steps_needed(50, noise_scale=50, steps_min=300) == 600
    assert examples_needed(50, noise_scale=50, examples_min=7) == 14


def test_the_three_rules():
    assert linear_rule(0.1, 256, 8192) == pytest.approx(3.2)  # Goyal et al.'s headline: 0.1 for 256, 3.2 for 8192
    assert sqrt_rule(3e-4, 64, 256) == pytest.approx(6e-4)
    # Far below the noise scale the third is the linear rule, far above it the rate stays.
    assert noise_rule(0.1, 1, 8, noise_scale=1e9) == pytest.approx(0.8, rel=1e-6)
    assert noise_rule(0.1, 1e9, 8e9, noise_scale=1) == pytest.approx(0.1, rel=1e-6)
    assert noise_rule(1.0, 100, 300, noise_scale=100) == pytest.approx(0.75 / 0.5)
    for rule in (linear_rule, sqrt_rule):
        assert rule(0.1, 32, 32) == 0.1
        with pytest.raises(ValueError, match="new_batch=0"):
            rule(0.1, 32, 0)
    with pytest.raises(ValueError, match="noise_scale=-1"):
        noise_rule(0.1, 32, 64, noise_scale=-1)
    with pytest.raises(ValueError, match="batch=0"):
        step_gain(0, noise_scale=3)
