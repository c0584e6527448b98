"""Rings and buckets: against the definition of an all-reduce, against PyTorch's own bucketing, against comm."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist

from lablib.calc.comm import ring_all_reduce_time
from lablib.calc.overlap import backward_transfers, bucket_sizes, ddp_step_time, exposed_time
from lablib.calc.ring import ring_states, summation_orders


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_a_ring_ends_with_every_rank_in_every_chunk_once(ranks):
    states = ring_states(ranks)
    assert len(states) == 2 * (ranks - 1) + 1
    for held in states[-1]:
        assert [sorted(chunk) for chunk in held] == [list(range(ranks))] * ranks
    halfway = states[ranks - 1]
    assert [sum(len(chunk) == ranks for chunk in held) for held in halfway] == [1] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_every_rank_receives_one_chunk_a_step(ranks):
    states = ring_states(ranks)
    for before, after in itertools.pairwise(states):
        changed = [sum(a != b for a, b in zip(x, y, strict=True)) for x, y in zip(before, after, strict=True)]
        assert changed == [1] * ranks


def test_chunk_c_is_added_from_rank_c_on():
    assert summation_orders(4) == [(0, 1, 2, 3), (1, 2, 3, 0), (2, 3, 0, 1), (3, 0, 1, 2)]


def test_a_ring_needs_a_rank():
    with pytest.raises(ValueError, match="ranks=0"):
        ring_states(0)


def test_buckets_are_those_of_pytorch():
    dice = random.Random(0)
    for _ in range(20):
        sizes = [4 * dice.randint(1, 400) for _ in range(dice.randint(1, 40))]
        # PyTorch is given the gradients in the order of backward; ours reverses by itself.
        tensors = [torch.empty(size // 4) for size in reversed(sizes)]
        theirs, _ = dist._compute_bucket_assignment_by_size(tensors, [500, 2000])
        last = len(sizes) - 1
        assert bucket_sizes(sizes, first=500, cap=2000) == [[last - i for i in bucket] for bucket in theirs]


def test_grouping_gradients_into_buckets_does_not_change_a_step():
    sizes = [30, 10, 50, 20, 90, 40]
    buckets = bucket_sizes(sizes, first=40, cap=60)
    link = {"ranks": 4, "bandwidth": 25.0, "latency": 0.1}
    for overlap in (True, False):
        moves = backward_transfers(sizes, buckets, backward=7.0, overlap=overlap, **link)
        step = ddp_step_time(
            compute_forward=3.5,
            compute_backward=7.0,
            gradient_bytes=sum(sizes),
            buckets=[move.bytes for move in moves],
            overlap=overlap,
            **link,
        )
        assert exposed_time(moves, backward=7.0) == pytest.approx(step.exposed)


@pytest.mark.parametrize(("seconds", "end"), [(8.0, 48.0), (15.0, 70.0)])
def test_the_chapter_s_four_layers(seconds, end):
    moves = backward_transfers(
        [1] * 4, [[3], [2], [1], [0]], backward=40.0, ranks=2, bandwidth=1 / seconds, overlap=True
    )
    assert moves[-1].end == pytest.approx(end)
    assert ring_all_reduce_time(1, 2, bandwidth=1 / seconds) == pytest.approx(seconds)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="exactly once"):
        backward_transfers([1, 2], [[0]], backward=1, ranks=2, bandwidth=1)
    with pytest.raises(ValueError, match="backward=-1"):
        backward_transfers([1], [[0]], backward=-1, ranks=2, bandwidth=1)
    with pytest.raises(ValueError, match="cap=0"):
        bucket_sizes([1], cap=0)
    with pytest.raises(ValueError, match="negative"):
        bucket_sizes([1, -2])
    assert bucket_sizes([]) == []
    assert exposed_time([], backward=1.0) == 0
