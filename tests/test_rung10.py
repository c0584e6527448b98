"""Rung 10: its checks for every draw, what their sentences say, and the ranks that take turns."""

import sys
from pathlib import Path

import pytest
import torch

from lablib.calc.collective_costs import traffic
from lablib.checks import rung10
from lablib.checks.report import Wrong
from lablib.checks.ring_world import World

sys.path.insert(0, str(Path(__file__).parent))

import defects_rung10

DRAWN = ("choose_algorithm", "place")


@pytest.mark.parametrize("name", DRAWN)
def test_right_answers_pass_whatever_is_drawn(name):
    answer = defects_rung10.SECOND_SOLUTIONS[name]
    assert {getattr(rung10, name)(answer, seed).status for seed in range(5)} == {"passed"}


@pytest.mark.parametrize("name", DRAWN)
def test_defects_are_caught_whatever_is_drawn(name):
    for defect in defects_rung10.DEFECTS[name]:
        assert {getattr(rung10, name)(defect, seed).status for seed in range(3)} == {"wrong"}, defect.__name__


#: Slips, and the words that the sentence about them must have.
SENTENCES = {
    "no_all_gather": "must go round once more",
    "adds_in_the_all_gather": "replaces what is there",
    "one_step_too_few": "No rank has the sum",
    "own_chunk_in_every_step": "the chunk that has just arrived",
    "drops_what_is_left_over": "whatever is left over",
    "last_chunk_takes_the_rest": "cut as evenly as can be",
    "whole_array_round_the_ring": "never the whole array",
    "to_everybody_directly": "one right neighbour",
    "one_chunk_at_a_time": "all chunks travel at the same time",
    "no_latency": "The latencies are missing",
    "latency_once": "their latencies add up",
    "reduce_scatter_only": "two halves",
    "whole_array_in_every_step": "one chunk of S/n bytes",
    "twice_the_array": "not twice all of it",
    "broadcast_only": "two halves",
    "tree_of_chunks": "does not cut the array",
    "half_a_level": "Rounds are whole",
    "always_the_ring": "The tree takes less time",
    "where_latency_equals_bytes": "The times cross where",
    "tensor_parallel_always_inside": "count the bytes of every order",
    "largest_payload_inside": "count the bytes of every order",
    "largest_payload_outside": "count the bytes of every order",
    "counts_what_stays_inside": "stay inside a host",
    "stages_send_one_way": "activations forward and gradients back",
    "payload_once": "2(n-1)/n of its payload",
    "all_hosts_together": "each has a link of its own",
    "ranks_dealt_out_like_cards": "rank r is on host",
}


@pytest.mark.parametrize("slip", SENTENCES)
def test_a_slip_gets_the_sentence_about_its_own_idea(slip):
    name, defect = next(
        (name, d) for name, ds in defects_rung10.DEFECTS.items() for d in ds if d.__name__ == slip
    )
    assert SENTENCES[slip] in getattr(rung10, name)(defect).message


def test_every_slip_has_its_sentence():
    assert set(SENTENCES) == {d.__name__ for ds in defects_rung10.DEFECTS.values() for d in ds}


@pytest.mark.parametrize(("ranks", "numel"), [(2, 9), (5, 7), (6, 31), (4, 3)])
def test_the_world_counts_what_the_formula_says(ranks, numel):
    world = World(ranks)
    rows = [torch.arange(numel, dtype=torch.float64) + rank for rank in range(ranks)]
    world.run(
        lambda rank, exchange: defects_rung10.SECOND_SOLUTIONS["ring_all_reduce"](
            rows[rank], rank, ranks, exchange
        )
    )
    sent = sum(message.elements for message in world.messages)
    expected = sum(traffic("ring_all_reduce", numel, ranks, rank=r, itemsize=1).bytes for r in range(ranks))
    assert sent == expected == 2 * (ranks - 1) * numel
    assert all(
        torch.equal(row, sum(torch.arange(numel, dtype=torch.float64) + r for r in range(ranks)))
        for row in rows
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
