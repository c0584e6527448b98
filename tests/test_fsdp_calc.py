"""FSDP2's traffic and gathered bytes by hand and by the formulas of ZeRO; test_fsdp.py counts them in real runs."""

from __future__ import annotations

import random

import pytest

from lablib.calc.communication import data_parallel_bytes, hybrid_shard_bytes
from lablib.calc.parallel import Unit, fsdp_traffic, gathered_timeline, padded, peak_unsharded_bytes
from tests.processes import new_seed


def test_padding_by_hand() -> None:
    assert padded([(8, 3)], 4) == 24
    assert padded([(6, 3)], 4) == 24  # ceil(6 / 4) = 2 rows a rank
    assert padded([(5,), (6, 3)], 4) == 8 + 24  # each tensor by itself
    assert padded([(1, 100)], 4) == 400  # one row, four times its size
    assert padded([(0, 3)], 4) == 0
    assert padded([(7, 3)], 1) == 21


def test_traffic_by_hand() -> None:
    """A root of 16 and two blocks of 8, on 4 ranks, in fp32."""
    traffic = fsdp_traffic([16, 8, 8], 4)
    # Forward gathers all; backward gathers the blocks only, since the root stays; every unit is reduced.
    assert traffic.calls == {"all_gather": 5, "reduce_scatter": 3}
    assert traffic.bytes == {"all_gather": 4 * (32 + 16), "reduce_scatter": 4 * 32}
    assert traffic.ring_bytes_sent() == 3 / 4 * (192 + 128)
    assert [m.unit for m in traffic.messages if m.phase == "forward"] == ["", "unit 1", "unit 2"]
    assert fsdp_traffic([16, 8, 8], 1).messages == ()  # one rank: nothing to send


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_equals_zero(ranks: int) -> None:
    """3 psi (N-1)/N with everything resharded, 2 psi (N-1)/N with nothing, where nothing is padded."""
    seed = new_seed()
    units = [8 * random.Random(seed + i).randrange(1, 50) for i in range(5)]
    size = 4 * sum(units)
    three = fsdp_traffic(units, ranks, root_reshard=True)
    two = fsdp_traffic(units, ranks, reshard=False)
    assert three.ring_bytes_sent() == pytest.approx(data_parallel_bytes(size, ranks, stage=3))
    assert two.ring_bytes_sent() == pytest.approx(data_parallel_bytes(size, ranks, stage=2))


def test_accumulation() -> None:
    """k micro-batches cost k times as much, unless the reduction waits, and then the gathers do not."""
    every = fsdp_traffic([16, 8], 4, micro_batches=3, root_reshard=True)
    last = fsdp_traffic([16, 8], 4, micro_batches=3, root_reshard=True, sync_every=False)
    kept = fsdp_traffic([16, 8], 4, micro_batches=3, reshard=False, sync_every=False, keep_gathered=True)
    assert every.calls == {"all_gather": 12, "reduce_scatter": 6}
    assert last.calls == {"all_gather": 12, "reduce_scatter": 2}
    assert kept.calls == {"all_gather": 2, "reduce_scatter": 2}


def test_hybrid() -> None:
    """2 replicas x 4 shards: gathers in the group of 4, then an all-reduce of each shard between the two."""
    units = [64, 32, 32]
    traffic = fsdp_traffic(units, 4, replicas=2, root_reshard=True)
    assert traffic.calls["all_reduce"] == 3
    assert traffic.bytes["all_reduce"] == 4 * 128 // 4
    within, between = data_parallel_bytes(4 * 128, 4, stage=3), hybrid_shard_bytes(4 * 128, 8, shard=4)
    assert traffic.ring_bytes_sent() == pytest.approx(within + between)


def test_reshard_to_a_number_and_dtypes() -> None:
    traffic = fsdp_traffic([16, 8], 4, reshard=2, param_bytes=2, reduce_bytes=4)
    gathers = [(m.unit, m.ranks, m.bytes) for m in traffic.messages if m.op == "all_gather"]
    assert gathers == [("", 4, 32), ("unit 1", 4, 16), ("unit 1", 2, 16)]
    assert traffic.bytes["reduce_scatter"] == 4 * 24


def test_frozen_parameters_are_gathered_and_not_reduced() -> None:
    units = [Unit(name="", shapes=((8,),)), Unit(name="a", shapes=((4,),), frozen=((8, 2),))]
    traffic = fsdp_traffic(units, 4)
    assert traffic.bytes == {"all_gather": 4 * (8 + 20 + 20), "reduce_scatter": 4 * 12}


# What is gathered


def test_peak_by_hand() -> None:
    """Parameters: root and one block. Buffers: this block's and the one before, while it is copied."""
    root, block = 4 * 16, 4 * 8
    assert peak_unsharded_bytes([16, 8, 8, 8], 4, buffers=False) == root + block
    # The root's buffer is the one before the first block's.
    assert peak_unsharded_bytes([16, 8, 8, 8], 4) == root + block + root + block
    assert peak_unsharded_bytes([0, 8, 8, 8], 4) == block + 2 * block
    assert peak_unsharded_bytes([40], 4) == 2 * 160  # wrap="none": everything, and its buffer
    assert peak_unsharded_bytes([40], 1) == 160  # one rank gathers nothing
    assert peak_unsharded_bytes([16, 8, 8, 8], 4, reshard=False, buffers=False) == 4 * 40
    assert peak_unsharded_bytes([16, 8, 8, 8], 4, param_bytes=2, buffers=False) == 2 * 24


def test_prefetch_costs_one_buffer_each() -> None:
    units = [0, *[8] * 6]
    peaks = [peak_unsharded_bytes(units, 4, prefetch=p) for p in (0, 1, 2, 3)]
    # Copying unit k: its parameters, its buffer, the one before, and the p - 1 that were gathered ahead of it.
    assert peaks == [3 * 32, 3 * 32, 4 * 32, 5 * 32]
    assert len({peak_unsharded_bytes(units, 4, prefetch=p, buffers=False) for p in (None, 0, 3)}) == 1


def test_timeline_ends_empty_and_nests() -> None:
    units = [Unit(name="", shapes=((4,),)), Unit(name="a", shapes=((8,),)), Unit(name="a.b", shapes=((16,),))]
    moments = gathered_timeline(units, 4)
    assert (moments[-1].params, moments[-1].buffers) == (0, 0)
    assert max(m.params for m in moments) == 4 * 28  # the inner unit runs while the outer one is there
    assert [m.unit for m in moments if m.event == "compute"] == ["a.b", "a", "", "", "a", "a.b"]
    kept = gathered_timeline(units, 4, reshard=2)
    between = next(m for m in kept if m.event == "release" and m.unit == "" and m.phase == "forward")
    assert (between.params, between.parts) == (4 * 4, 4 * (8 + 16) / 2)  # the root, and half of each unit


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([], 2), "no units"),
        (([8, 8], 4, {"reshard": 3}), r"reshard=3 must divide shards=4 and be neither 1 nor 4; use True, False or 2"),
        (([8], 2, {"keep_gathered": True}), "keep_gathered=True belongs to no_sync"),
        (([Unit(name="a", shapes=((),))], 2), "needs at least one dim"),
    ],
)
def test_bad_input(arguments: tuple, says: str) -> None:
    units, shards, *options = arguments
    with pytest.raises(ValueError, match=says):
        fsdp_traffic(units, shards, **(options[0] if options else {}))
