"""Collectives from send and receive: against torch.distributed, against the formulas, and against the recorder.

Copies must be exact. Sums of integers must be exact too, whatever the order. Sums of n floats in another order than
gloo's differ by rounding: each of the n - 1 additions of either sum errs by at most u times the sum of magnitudes,
u = 2^-24 for float32, so the two differ by at most 2(n-1)·u·Σ|x|.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from lablib.launch.ranks import RankError, run_ranks
from tests.processes import new_seed

SIZES = 3  # drawn for each number of ranks, on top of 0, 1 and n


def everything(seed: int) -> int:
    """Run every collective on this rank in every way, and return how many were compared."""
    from lablib.calc.communication import chunk_sizes, hierarchical_traffic, traffic
    from lablib.calc.communication.algorithms import ALGORITHMS
    from lablib.launch.measure import record_comms
    from lablib.toys import collectives

    n, rank = dist.get_world_size(), dist.get_rank()
    draw, mine = random.Random(seed), torch.Generator().manual_seed(seed + rank)
    groups = {g: collectives.node_groups(g) for g in range(1, n + 1) if n % g == 0}
    compared = 0

    def run(name: str, *tensors: torch.Tensor, call: tuple = (), **job: object) -> None:
        """Call a collective; what it says it sent, what it did send and the formula must agree."""
        nonlocal compared
        with record_comms() as log:
            said = getattr(collectives, name)(*tensors, *call)
        whole = max(t.numel() for t in tensors)
        assert said == traffic(name, whole, n, rank=rank, itemsize=tensors[0].element_size(), **job), name
        assert (log.messages["send"], log.bytes["send"]) == (said.messages, said.bytes), name
        compared += 1

    for numel in [0, 1, n, *(draw.randrange(2, 400) for _ in range(SIZES))]:
        dtype = draw.choice([torch.int32, torch.float32, torch.int64])
        x = torch.randint(-99, 99, (numel,), generator=mine).to(dtype)
        total = x.clone()
        dist.all_reduce(total)
        for name in [name for name in ALGORITHMS if name.endswith("all_reduce")]:
            got = x.clone()
            run(name, got)
            assert torch.equal(got, total), (name, numel)  # whole numbers below 2^24: exact in float32 too
        for g, pair in groups.items():
            got = x.clone()
            said = collectives.hierarchical_all_reduce(got, pair)
            job = {"ranks_per_node": g, "rank": rank, "itemsize": x.element_size()}
            assert tuple(said) == hierarchical_traffic(numel, n, **job)
            assert torch.equal(got, total), (g, numel)
        sizes = chunk_sizes(numel, n)
        chunk, kept, whole = total.new_empty(sizes[rank]), x.clone(), torch.empty_like(x)
        run("ring_reduce_scatter", chunk, x)
        assert torch.equal(chunk, total.split(sizes)[rank])
        assert torch.equal(x, kept)
        run("ring_all_gather", whole, chunk)
        assert torch.equal(whole, total)
        for root in range(n):
            got, theirs, summed = x.clone(), x.clone(), x.clone()
            run("tree_broadcast", got, call=(root,), root=root)
            dist.broadcast(theirs, root)
            assert torch.equal(got, theirs)
            run("tree_reduce", summed, call=(root,), root=root)
            assert rank != root or torch.equal(summed, total)
        even = torch.randn(numel * n, generator=mine)
        got, theirs = torch.empty_like(even), torch.empty_like(even)
        run("pairwise_all_to_all", got, even)
        dist.all_to_all_single(theirs, even)
        assert torch.equal(got, theirs)
        # Floats that round, in an odd shape
        y = torch.randn(numel, 3, 1, generator=mine)
        want, magnitude = y.clone(), y.abs()
        dist.all_reduce(want)
        dist.all_reduce(magnitude)
        for name in [name for name in ALGORITHMS if name.endswith("all_reduce")]:
            got = y.clone()
            getattr(collectives, name)(got)
            assert ((got - want).abs() <= 2 * (n - 1) * 2**-24 * magnitude).all(), name
            everywhere = [torch.empty_like(got) for _ in range(n)]
            dist.all_gather(everywhere, got)
            assert all(torch.equal(got, other) for other in everywhere), name  # the same bits on all ranks
    return compared


@pytest.mark.drawn
@pytest.mark.parametrize("n", [1, 2, 3, 4, 6])
def test_every_collective(n: int) -> None:
    """Powers of two and others; every size; results, counts and the recorder agree."""
    compared = run_ranks(everything, n, new_seed(), timeout=120)
    assert compared == [(3 + SIZES) * (5 + 2 + 2 * n + 1)] * n


def refusals() -> dict[str, str]:
    from lablib.toys import collectives

    n, rank = dist.get_world_size(), dist.get_rank()
    alone = dist.new_group([0])
    x = torch.zeros(4 * n)
    attempts = {
        "turned": lambda: collectives.ring_all_reduce(torch.zeros(2, 3).t()),
        "output": lambda: collectives.ring_reduce_scatter(torch.zeros(3), x),
        "dtype": lambda: collectives.ring_reduce_scatter(torch.zeros(4, dtype=torch.int32), x),
        "input": lambda: collectives.ring_all_gather(x, torch.zeros(5)),
        "root": lambda: collectives.tree_broadcast(x, n),
        "pieces": lambda: collectives.pairwise_all_to_all(torch.zeros(4 * n + 1), torch.zeros(4 * n + 1)),
        "groups": lambda: collectives.node_groups(n + 1),
    }
    if rank:
        attempts["outside"] = lambda: collectives.ring_all_reduce(x, alone)
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except ValueError as error:
            said[name] = str(error)
    return said


def test_bad_input_is_refused_before_anything_is_sent() -> None:
    said = run_ranks(refusals, 2)[1]
    expected = {
        "turned": "not contiguous",
        "output": "output has numel 3, but chunk 1 of input has 4",
        "dtype": "output has dtype torch.int32",
        "input": "input has numel 5",
        "root": "root=2 is not a rank of the group; use 0 to 1",
        "pieces": "ranks=2 does not divide input=9",
        "groups": "ranks_per_node=3 does not divide the 2 ranks",
        "outside": "rank 1 is not in the group",
    }
    assert said.keys() == expected.keys()
    for name, words in expected.items():
        assert words in said[name]


def defect() -> None:
    """A ring in which one rank adds its own chunk a second time."""
    from lablib.toys import collectives

    x = torch.ones(12)
    if dist.get_rank() == 1:
        x[3] += 1
    collectives.ring_all_reduce(x)
    assert torch.equal(x, torch.full((12,), 3.0)), "caught"


def test_the_comparison_can_fail() -> None:
    with pytest.raises(RankError, match="caught"):
        run_ranks(defect, 3)
