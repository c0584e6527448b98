"""FSDP2's traffic and gathered bytes by hand, by ZeRO's formulas and by PyTorch's tracker; test_fsdp.py counts real runs."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lablib.calc.communication import data_parallel_bytes, hybrid_shard_bytes
from lablib.calc.parallel import Unit, fsdp_traffic, gathered_timeline, padded, peak_held_bytes, peak_unsharded_bytes
from lablib.launch.fsdp import forecast
from lablib.toys.transformer import Block, Transformer, tiny_config
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


# PyTorch's FSDPMemTracker against the calculator: to the byte, for every way of wrapping

CONFIG = tiny_config("gpt2", hidden=18, num_heads=3, ffn=50, num_layers=2, vocab=50, max_positions=16)
RANKS = 4


def seen(**options: object):
    # SGD has no state, and a step of AdamW on fake tensors takes longer than forward and backward.
    options.setdefault("optimizer", partial(torch.optim.SGD, lr=0.1))
    return forecast(lambda: Transformer(CONFIG), world_size=RANKS, batch=1, seq=4, **options)


@pytest.mark.drawn
@pytest.mark.parametrize(
    "options",
    [
        {"wrap": "none", "optimizer": torch.optim.AdamW},
        {"wrap": "linear"},
        {"reshard_after_forward": False},
        {"reshard_after_forward": 2, "root_reshard": True},
        {"prefetch": 2, "mesh": (2, 2), "precision": "bf16"},
    ],
    ids=lambda options: ", ".join(options),
)
def test_gathered_bytes_are_the_calculator_s(options: dict) -> None:
    """The most of whole parameters and all-gather buffers at any operation, in forward and backward."""
    found = seen(**options)
    # With a number, the parts kept after forward are activations to the tracker; all else has the same name.
    without_parts = max(moment.params + moment.buffers for moment in found.report.gathered_timeline())
    assert found.most_gathered == without_parts
    if isinstance(found.report.reshard, bool):
        assert found.most_gathered == found.report.peak_unsharded_bytes()
        # Autograd adds up a tied weight's two gradients before it is anybody's `.grad`: until then the first of them,
        # which the calculator counts, has no name in the tracker.
        tied = found.report.param_bytes * CONFIG.vocab * CONFIG.hidden
        assert found.most_gathered <= found.most_held <= found.report.peak_held_bytes() <= found.most_held + tied
    kept = 4 * found.report.params_per_rank
    assert found.after_backward["parameters"] == found.after_backward["gradients"] == kept
    assert found.after_backward["unsharded parameters"] == found.after_backward["all-gather buffers"] == 0
    assert found.total >= 2 * kept + found.peak["unsharded parameters"]
    assert found.most["activations"] > 0
    # AdamW keeps two more, with padding, and a step counter of 4 bytes for each tensor.
    tensors = sum(len(unit.shapes) for unit in found.report.units)
    states = 2 * kept + 4 * tensors if options.get("optimizer") is torch.optim.AdamW else 0
    assert found.after_backward["optimizer"] == states


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("wrap", "kept"),
    [("none", False), ("block", False), ("block", True), ("linear", True), ("ends", True), ("ends, head", False)],
)
def test_unsharded_gradients_and_their_buffers(wrap: str, kept: bool) -> None:
    """A vocabulary larger than a block, reduced in twice the bytes of a weight: the peak is in backward."""
    config = tiny_config("llama", hidden=16, ffn=48, num_layers=3, vocab=400)

    def ends(name: str, module: nn.Module) -> bool:
        return name in ("embed", "head") or isinstance(module, Block)

    found = forecast(
        lambda: Transformer(config),
        world_size=RANKS,
        batch=1,
        seq=4,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        wrap=ends if "ends" in wrap else wrap,
        keep=("head",) if "head" in wrap else (),
        precision="bf16",
        reshard_after_forward=not kept,
    )
    assert found.most_held == found.report.peak_held_bytes()
    assert found.most_gathered == found.report.peak_unsharded_bytes() < found.most_held
    if wrap == "none":  # all gradients, and all of them once more in the buffer of the reduce-scatter
        assert found.most_held == (2 + 4) * found.report.params


@pytest.mark.drawn
@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers"), reason="this torch keeps one buffer"
)
@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_more_buffers_of_reduce_scatters(buffers: int) -> None:
    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        model.set_reduce_scatter_max_input_buffers(buffers)  # before the first forward, which reads it
        return model.loss(tokens)

    config = tiny_config("llama", hidden=16, ffn=48, num_layers=4, vocab=16)
    sgd = partial(torch.optim.SGD, lr=0.1)
    found = forecast(lambda: Transformer(config), world_size=RANKS, batch=1, seq=4, optimizer=sgd, loss=loss)
    counted = peak_held_bytes(found.report.units, RANKS, scatter_buffers=buffers, torch=torch.__version__)
    assert found.most_held == counted


def test_unsharded_gradients_by_hand() -> None:
    """A root of 4 and two units of 8, on 4 ranks, in fp32: 4 bytes for each number."""
    walk = [m for m in gathered_timeline([4, 8, 8], 4) if m.phase == "backward" and m.event in ("compute", "reduce")]
    # root, last unit, its reduction, first unit with the buffer of the last, its reduction, the root's reduction
    assert [m.gradients // 4 for m in walk] == [4, 12, 12, 12, 12, 4]
    assert [m.scatter_buffers // 4 for m in walk] == [0, 0, 8, 8, 8, 4]
    assert peak_held_bytes([40], 4) == 2 * 160
    two = gathered_timeline([4, 8, 8], 4, scatter_buffers=2)
    assert max(m.scatter_buffers for m in two) == 4 * 16


def test_a_forecast_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size=0 must be at least 1"):
        forecast(lambda: Transformer(CONFIG), world_size=0, batch=1, seq=4)
    with pytest.raises(ValueError, match="wrap='blocks' is unknown"):
        seen(wrap="blocks")
    assert not dist.is_initialized()  # a refusal leaves no process group behind
