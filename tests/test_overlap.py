"""Rings and buckets: against the definition of an all-reduce, against PyTorch's own bucketing, against comm."""

import random

import pytest
import torch
import torch.distributed as dist

from lablib.calc.communication import ring_states
from lablib.calc.parallel import backward_transfers, bucket_sizes, exposed_time, token_factor
from lablib.launch.measure import linear_stack, record_comms
from lablib.launch.ranks import run_ranks


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


def sent_by_ddp(cap):
    model = torch.nn.parallel.DistributedDataParallel(linear_stack(256, 12), bucket_cap_mb=cap)
    for _ in range(2):  # buckets are rebuilt after the first step
        with record_comms() as log:
            model(torch.randn(2, 256)).sum().backward()
    return [event.bytes for event in log.events if event.op == "all_reduce"]


@pytest.mark.parametrize(("cap", "limits"), [(None, {}), (25, {"first": 25 * 2**20}), (1, {"cap": 2**20})])
def test_the_first_bucket_of_ddp_is_small_only_by_default(cap, limits):
    sizes = [p.nbytes for p in linear_stack(256, 12).parameters()]
    ours = [sum(sizes[i] for i in bucket) for bucket in bucket_sizes(sizes, **limits)]
    assert run_ranks(sent_by_ddp, 1, cap) == [ours]
    assert (len(ours) == 1) == (cap == 25)


def test_every_token_weighs_the_same_whoever_holds_it():
    losses = [[1.0, 4.0, 7.0], [2.0], [], [5.0, 6.0]]
    factor = token_factor([len(own) for own in losses])
    everything = [loss for own in losses for loss in own]
    mean_over_ranks = sum(factor * sum(own) for own in losses) / len(losses)
    assert mean_over_ranks == pytest.approx(sum(everything) / len(everything))
    for wrong in ([], [0, 0], [3, -1]):
        with pytest.raises(ValueError, match="tokens="):
            token_factor(wrong)


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
