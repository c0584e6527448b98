"""Facts of versions of PyTorch: each is held to the PyTorch that is installed, and the numbers that follow from it."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from lablib.calc.memory import training_memory
from lablib.calc.parallel import gathered_timeline, peak_unsharded_bytes
from lablib.calc.torch_versions import DIFFERENCES, PINNED, SUPPORTED, TorchFacts, release, torch_facts
from lablib.launch.layouts.pipeline_runs import OwnStage
from lablib.launch.ranks import RankError, run_ranks
from lablib.launch.torch_private import FakeStore, MemTracker
from lablib.toys import torch_names
from tests.evidence.oracles.measurement import MomentTracker

HERE = torch_facts(torch.__version__)


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("2.11.0a0+git1234", "2.11"),
        ("2.12.1", "2.12"),
        ("2.13", "2.13"),
        ("2.15.0+cu132", "2.15"),
        ("2.15.0rc3", "2.15"),
        ("2.16.0.dev20261101", "2.15"),
        ("3.0.0", "2.15"),
    ],
)
def test_a_version_belongs_to_a_release(version: str, name: str) -> None:
    assert release(version) == torch_facts(version).version == name


@pytest.mark.parametrize(
    ("version", "says"),
    [("2.10.0", "older than 2.11"), ("1.13", "older"), ("new", "no version of PyTorch"), ("2", "no version")],
)
def test_other_versions_are_refused(version: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        release(version)
    with pytest.raises(ValueError, match=says):
        training_memory("llama-3-8b", torch=version)


def test_every_difference_is_a_field_and_has_a_source() -> None:
    assert [field.name for field in fields(TorchFacts)] == ["version", *(d.name for d in DIFFERENCES)]
    assert PINNED in SUPPORTED
    assert sorted(SUPPORTED, key=lambda name: [*map(int, name.split("."))]) == list(SUPPORTED)
    for difference in DIFFERENCES:
        assert difference.since in SUPPORTED[1:]
        assert difference.before[0] != difference.after[0]
        assert difference.source.startswith("https://github.com/pytorch/pytorch/")
        before = SUPPORTED[SUPPORTED.index(difference.since) - 1]
        assert (difference.of(before), difference.of(difference.since)) == (difference.before, difference.after)


# What the installed PyTorch does. test_fsdp_calc.py has FSDP2's buffers, by PyTorch's own tracker.


def test_the_names_of_collectives() -> None:
    assert hasattr(dist, "all_gather_single") == HERE.collectives_called_single
    assert hasattr(dist, "reduce_scatter_single") == HERE.collectives_called_single
    for older in (dist.all_gather_into_tensor, dist.reduce_scatter_tensor):
        assert hasattr(older, "__deprecated__") == (HERE.version in ("2.13", "2.14"))


def test_the_gap_after_one() -> None:
    assert torch.finfo(torch.float8_e5m2fnuz).eps == (0.25 if HERE.e5m2fnuz_eps_is_right else 0.125)


def test_all_to_all_of_lists_on_gloo() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        got = [torch.zeros(2)]
        if HERE.gloo_has_all_to_all:
            dist.all_to_all(got, [torch.ones(2)])
            assert got[0].tolist() == [1, 1]
        else:
            with pytest.raises(RuntimeError, match="gloo does not support alltoall"):
                dist.all_to_all(got, [torch.ones(2)])
    finally:
        dist.destroy_process_group()


def exchanged() -> list[list[float]]:
    """Each rank sends two numbers to each rank, through both ways to exchange lists."""
    rank, n = dist.get_rank(), dist.get_world_size()
    found = []
    for way in (torch_names.all_to_all, torch_names._as_one_tensor):
        got = [torch.zeros(1, 2) for _ in range(n)]
        way(got, [torch.full((1, 2), 10.0 * rank + peer) for peer in range(n)])
        found.append([x for part in got for x in part.flatten().tolist()])
    return found


def test_lists_are_exchanged_under_every_version() -> None:
    for rank, ways in enumerate(run_ranks(exchanged, 3)):
        assert ways == 2 * [[10.0 * peer + rank for peer in range(3) for _ in range(2)]]


def neighbours_on_one_rank(stage_of: type) -> None:
    stages = [stage_of(torch.nn.Linear(2, 2), s, 2, torch.device("cpu")) for s in range(2)]
    schedule = ScheduleZBVZeroBubble(stages, n_microbatches=2, loss_fn=lambda y, _: y.sum())
    schedule.step(torch.ones(2, 2), target=torch.ones(2, 2))


@pytest.mark.parametrize("stage_of", [PipelineStage, OwnStage])
def test_pipelines_with_two_stages_on_a_rank(stage_of: type) -> None:
    if stage_of is PipelineStage and HERE.pipelining_greets_its_own_rank:
        with pytest.raises(RankError, match="Pair is not connected"):
            run_ranks(neighbours_on_one_rank, 1, stage_of)
    else:
        run_ranks(neighbours_on_one_rank, 1, stage_of)


def test_the_shapes_that_a_dtensor_asks_for() -> None:
    """PyTorch's own tracker counts them in old versions; lablib's counts the same bytes under every version."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (4,))
        peaks = []
        for kind in (MemTracker, MomentTracker):
            weight = distribute_tensor(torch.zeros(1024 + 4 * len(peaks), 256), mesh, [Shard(0)])
            with kind() as tracker:
                if kind is MomentTracker:
                    tracker.start()
                made = weight.exp()
            snapshot = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
            peaks.append((snapshot["Total"], made.to_local().nbytes))
    finally:
        dist.destroy_process_group()
    assert peaks[1][0] == peaks[1][1]
    if HERE.tracker_skips_dtensor_shapes:
        assert peaks[0][0] == peaks[0][1]


def test_half_of_a_tied_pair_in_a_unit() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False))
        model[1].weight = model[0].weight
        fully_shard(model[1])
        fully_shard(model)
        if HERE.fsdp2_refuses_half_tied:
            with pytest.raises(ValueError, match="already managed by another FSDP group"):
                model(torch.zeros(2, dtype=torch.long))
        else:
            assert model(torch.zeros(2, dtype=torch.long)).shape == (2, 8)
    finally:
        dist.destroy_process_group()


# What follows from FSDP2's.


def test_the_buffer_before_goes_earlier_from_2_15() -> None:
    units, ranks = [16, 8, 8, 8], 4
    root, block = 4 * 16, 4 * 8
    old, new = (gathered_timeline(units, ranks, torch=version) for version in ("2.14", "2.15"))
    assert [(m.event, m.phase, m.unit, m.params) for m in old] == [(m.event, m.phase, m.unit, m.params) for m in new]
    copies = [
        (a.buffers - b.buffers) for a, b in zip(old, new, strict=True) if (a.event, a.phase) == ("copy", "forward")
    ]
    assert copies == [0, root, block, block]
    rest = [(a, b) for a, b in zip(old, new, strict=True) if (a.event, a.phase) != ("copy", "forward")]
    assert all(a == b for a, b in rest)
    # Up to 2.14: root, block, its buffer and the root's. From 2.15: root and both buffers, before the copy.
    assert peak_unsharded_bytes(units, ranks, torch="2.14") == 2 * (root + block)
    assert peak_unsharded_bytes(units, ranks, torch="2.15") == 2 * root + block
    assert peak_unsharded_bytes([4, 8, 8, 8], ranks, torch="2.15") == 4 * (4 + 2 * 8)
