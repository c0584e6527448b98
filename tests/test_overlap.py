"""Rings and buckets: against the definition of an all-reduce, against PyTorch's own bucketing, against comm."""

import random

import pytest
import torch
import torch.distributed as dist

from lablib.calc.communication import ring_states
from lablib.calc.parallel import backward_transfers, bucket_sizes, exposed_time


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_a_ring_ends_with_every_rank_in_every_chunk_once(ranks):
    states = ring_states(ranks)
    assert len(states) == 2 * (ranks - 1) + 1
    for held in states[-1]:
        assert [sorted(chunk) for chunk in held] == [list(range(ranks))] * ranks
    halfway = states[ranks - 1]
    assert [sum(len(chunk) == ranks for chunk in held) for held in halfway] == [1] * ranks


def test_buckets_are_those_of_pytorch():
    dice = random.Random(0)
    for _ in range(20):
        sizes = [4 * dice.randint(1, 400) for _ in range(dice.randint(1, 40))]
        # PyTorch is given the gradients in the order of backward; ours reverses by itself.
        tensors = [torch.empty(size // 4) for size in reversed(sizes)]
        theirs, _ = dist._compute_bucket_assignment_by_size(tensors, [500, 2000])
        last = len(sizes) - 1
        assert bucket_sizes(sizes, first=500, cap=2000) == [[last - i for i in bucket] for bucket in theirs]


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
