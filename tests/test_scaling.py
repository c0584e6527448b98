"""Timelines drawn by hand, of which the answer is known; then parts that always add up."""

import random

import pytest

from lablib.calc.runs import predicted_step, scaling_loss, spread
from lablib.calc.runs.scaling import PARTS, middle_half, split_step


def _rank(**phases):
    return {"seconds": sum(phases.values()), **phases}


ALONE = [[_rank(data=1.0, compute=7.0)]]  # eight seconds, one of them data


def test_perfect_weak_scaling_loses_nothing():
    loss = scaling_loss(ALONE, [[_rank(data=1.0, compute=7.0)] * 4], scaling="weak")
    assert loss.efficiency == 1
    assert loss.parts == dict.fromkeys(PARTS, 0.0)


def test_perfect_strong_scaling_takes_the_nth_part():
    loss = scaling_loss(ALONE, [[_rank(data=0.25, compute=1.75)] * 4], scaling="strong")
    assert loss.efficiency == 1
    assert loss.ideal == 2
    assert loss.parts == dict.fromkeys(PARTS, 0.0)


@pytest.mark.parametrize(
    ("ranks", "parts"),
    [
        # Everybody sends for two seconds: communication, and nothing else.
        ([_rank(data=1.0, compute=7.0, communication=2.0)] * 2, {"communication": 2.0}),
        # Rank 1 computes two seconds longer; rank 0 waits for it inside the collective, which itself takes one.
        (
            [_rank(data=1.0, compute=7.0, communication=3.0), _rank(data=1.0, compute=9.0, communication=1.0)],
            {"communication": 1.0, "imbalance": 1.0, "compute": 1.0},
        ),
        # Rank 1 waits two seconds for its disk, and rank 0 for rank 1.
        (
            [_rank(data=1.0, compute=7.0, communication=3.0), _rank(data=3.0, compute=7.0, communication=1.0)],
            {"communication": 1.0, "imbalance": 1.0, "data": 1.0},
        ),
        # A pipeline of two stages, one micro-batch each way: each stage idles while the other one works.
        ([_rank(data=1.0, compute=7.0, bubble=7.0), _rank(data=1.0, compute=7.0, bubble=7.0)], {"bubble": 7.0}),
        # Rank 0 was done early and waits for nothing: the step is as long as rank 1's.
        ([_rank(data=1.0, compute=7.0), _rank(data=1.0, compute=9.0)], {"imbalance": 1.0, "compute": 1.0}),
    ],
    ids=["communication", "slow rank", "slow disk", "bubble", "done early"],
)
def test_hand_made_timelines(ranks, parts):
    loss = scaling_loss(ALONE, [ranks], scaling="weak")
    assert loss.parts == pytest.approx(dict.fromkeys(PARTS, 0.0) | parts)
    assert loss.seconds == max(rank["seconds"] for rank in ranks)
    assert loss.largest == max(parts, key=parts.get)


def test_the_order_of_ranks_plays_no_part_and_all_always_adds_up():
    seed = random.SystemRandom().randrange(10**9)
    print("seed", seed)
    dice = random.Random(seed)
    for _ in range(50):
        n, steps = dice.randint(1, 6), dice.randint(1, 9)

        def run(n=n, steps=steps):
            names = ("data", "compute", "communication", "bubble")
            return [[_rank(**{name: dice.random() for name in names}) for _ in range(n)] for _ in range(steps)]

        one, many = run(1), run()
        for scaling in ("weak", "strong"):
            loss = scaling_loss(one, many, scaling=scaling)
            # Sums of at most 9 * 6 * 5 numbers below 1: rounding is far below 1e-9.
            assert sum(loss.parts.values()) == pytest.approx(loss.seconds - loss.ideal, abs=1e-9)
            assert loss.efficiency + sum(loss.shares.values()) == pytest.approx(1, abs=1e-9)
            turned = scaling_loss(one, [step[::-1] for step in many], scaling=scaling)
            assert turned.parts == pytest.approx(loss.parts, abs=1e-9)
            assert min(loss.parts[part] for part in ("imbalance", "bubble")) >= -1e-9


def test_an_outlier_is_outside_the_middle_half():
    steps = [[_rank(compute=1.0)]] * 7 + [[_rank(compute=100.0)]]
    assert len(middle_half(steps)) == 4
    assert scaling_loss(steps, steps, scaling="weak").seconds == 1
    assert middle_half(steps[-3:]) == steps[-3:]


def test_spread_is_median_and_quartiles():
    assert spread([4.0, 1.0, 2.0, 3.0, 5.0]) == spread(range(1, 6))
    assert (spread([1.0, 2.0, 3.0, 4.0, 5.0]).low, spread([1.0, 2.0, 3.0, 4.0, 5.0]).high) == (2, 4)
    assert spread([7.0]).median == 7
    with pytest.raises(ValueError, match="warm-up"):
        spread([])


@pytest.mark.parametrize(
    ("one", "many", "message"),
    [
        ([], ALONE, "one needs steps"),
        (ALONE, [[_rank(compute=1.0)], [_rank(compute=1.0)] * 2], "many needs steps, all with the same"),
        ([[_rank(compute=1.0)] * 2], ALONE, "has 2 ranks and needs 1"),
        (ALONE, [[{"seconds": 1.0, "compute": 2.0}]], "nor longer than their step"),
        (ALONE, [[{"seconds": 1.0, "compute": -2.0}]], "must not be negative"),
    ],
)
def test_what_makes_no_sense_is_refused(one, many, message):
    with pytest.raises(ValueError, match=message):
        scaling_loss(one, many, scaling="weak")
    with pytest.raises(ValueError, match="at least one rank"):
        split_step([])


def test_a_predicted_step_by_hand():
    # 8 bytes of weights on 4 ranks at 1 byte/s: 6 s for a gather; 4 bytes of gradients: 3 s to scatter them.
    times = {"forward": 2.0, "backward": 10.0, "other": 1.0}
    link = {"gather_bytes": 8, "scatter_bytes": 4, "ranks": 4, "bandwidth": 1.0}
    open_ = predicted_step(**times, **link, hidden=False)
    assert open_ == {"compute": 13.0, "communication": 15.0, "exposed": 15.0, "step": 28.0}
    # Behind 2 s of forward 4 of the 6 s are exposed; behind 10 s of backward none of the 9.
    assert predicted_step(**times, **link, hidden=True)["exposed"] == 4.0
    assert predicted_step(**times, **link, hidden=True, still_costs=0.5)["exposed"] == 4 + 0.5 * (2 + 9)
    assert predicted_step(**times, **(link | {"ranks": 1}), hidden=True)["step"] == 13.0
    with pytest.raises(ValueError, match="bandwidth=0"):
        predicted_step(**times, **(link | {"bandwidth": 0}), hidden=True)
