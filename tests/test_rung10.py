"""Rung 10: its checks for every draw, what their sentences say, and the ranks that take turns."""

import pytest
import torch

from lablib.calc.communication import traffic
from lablib.checks import rung10
from lablib.checks.report import Wrong
from lablib.checks.rung10 import World
from tests import defects_rung10

DRAWN = ("choose_algorithm", "place")


@pytest.mark.parametrize("name", DRAWN)
def test_right_answers_pass_whatever_is_drawn(name):
    answer = defects_rung10.SECOND_SOLUTIONS[name]
    assert {getattr(rung10, name)(answer, seed).status for seed in range(5)} == {"passed"}


@pytest.mark.parametrize("name", DRAWN)
def test_defects_are_caught_whatever_is_drawn(name):
    for defect in defects_rung10.DEFECTS[name]:
        assert {getattr(rung10, name)(defect, seed).status for seed in range(3)} == {"wrong"}, defect.__name__


@pytest.mark.parametrize(("ranks", "numel"), [(2, 9), (5, 7), (6, 31), (4, 3)])
def test_the_world_counts_what_the_formula_says(ranks, numel):
    world = World(ranks)
    rows = [torch.arange(numel, dtype=torch.float64) + rank for rank in range(ranks)]
    world.run(
        lambda rank, exchange: defects_rung10.SECOND_SOLUTIONS["ring_all_reduce"](rows[rank], rank, ranks, exchange)
    )
    sent = sum(message.elements for message in world.messages)
    expected = sum(traffic("ring_all_reduce", numel, ranks, rank=r, itemsize=1).bytes for r in range(ranks))
    assert sent == expected == 2 * (ranks - 1) * numel
    assert all(
        torch.equal(row, sum(torch.arange(numel, dtype=torch.float64) + r for r in range(ranks))) for row in rows
    )


def _pair(rank, exchange, **changes):
    box = torch.zeros(2)
    words = {"send": torch.ones(2), "to": 1 - rank, "receive": box, "source": 1 - rank} | changes
    exchange(**words)
    return box


MISUSE = {
    "wait for each other for ever": lambda rank, exchange: _pair(rank, exchange) if rank else None,
    "comes rank 0": lambda rank, exchange: _pair(rank, exchange, to=rank + 1),
    "another number than the one": lambda rank, exchange: _pair(rank, exchange, receive=torch.zeros(3)),
}


@pytest.mark.parametrize("words", MISUSE)
def test_a_misused_exchange_is_named(words):
    with pytest.raises(Wrong, match=words):
        World(2).run(MISUSE[words])


def test_ranks_that_take_different_numbers_of_steps_are_told_so():
    def act(rank, exchange):
        for _ in range(2 if rank == 0 else 1):
            _pair(rank, exchange)

    with pytest.raises(Wrong, match="wait for each other"):
        World(2).run(act)


def test_an_error_of_a_rank_reaches_the_learner():
    def act(rank, exchange):
        _pair(rank, exchange)
        if rank == 1:
            raise KeyError("chunk")

    with pytest.raises(KeyError, match="chunk"):
        World(2).run(act)
