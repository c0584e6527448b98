"""Strategies on the toy transformer: bytes, FLOPs and batches measured, equal to what was predicted."""

from __future__ import annotations

import random

import pytest
import torch

from lablib.calc.memory.activations import largest_batch
from lablib.launch.ranks import run_ranks
from lablib.launch.recompute import (
    apply_strategy,
    ddp_error,
    find_largest_batch,
    fsdp_gathers,
    measure_step,
    pipeline_error,
    predicted_cost,
    tensor_parallel_reduces,
)
from lablib.toys.transformer import Transformer, tiny_config

SEED = 29
STRATEGIES = (
    "none",
    "selective",
    "matmuls",
    "full",
    "every:2",
    "sqrt",
    "first:2",
    "first:1+matmuls",
    "one-in:2",
    "offload",
    "full+offload",
)
#: What these keep of a block is what "none", "full" or "offload" keeps, whatever the block is: they only choose the
#: blocks. Two kinds of block are enough for them.
CHOOSE_BLOCKS = {"every:2", "sqrt", "first:2", "first:1+matmuls", "one-in:2", "full+offload"}


def drawn(dice: random.Random, family: str, attention: str, dropout: float, dtype: torch.dtype) -> Transformer:
    heads = 2 * dice.randint(1, 3)
    config = tiny_config(
        family,
        num_layers=dice.choice((3, 4)),
        num_heads=heads,
        hidden=2 * heads * dice.randint(2, 4),
        ffn=dice.randint(20, 60),
        vocab=dice.choice((5, 60)),  # a small head puts the peak into backward
        norm=dice.choice(("layernorm", "rmsnorm")),
    )
    return Transformer(config, dropout=dropout, attention=attention).to(dtype)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("family", "attention", "dropout", "dtype"),
    [
        ("gpt2", "plain", 0.1, torch.bfloat16),
        ("gpt2", "fused", 0.0, torch.float32),
        ("llama", "plain", 0.0, torch.float32),
        ("llama", "fused", 0.0, torch.bfloat16),
    ],
)
def test_measured_is_predicted_to_the_byte_and_the_flop(family, attention, dropout, dtype):
    dice = random.Random(f"{SEED}{family}{attention}")
    print(f"seed {SEED}{family}{attention}")
    model = drawn(dice, family, attention, dropout, dtype)
    losses = set()
    every = (family, attention) in (("gpt2", "plain"), ("llama", "fused"))
    for strategy in STRATEGIES:
        if strategy in CHOOSE_BLOCKS and not every:
            continue
        how = {"batch": dice.randint(1, 3), "seq": dice.randint(2, 13)}
        ways = [{"implementation": "torch", "early_stop": dice.random() < 0.7}]
        if strategy in ("selective", "full", "every:2", "full+offload"):
            ways.append({"implementation": dice.choice(("toy", "torch-reentrant"))})
        for way in ways:
            measured = measure_step(model, strategy, **how, **way)
            cost = predicted_cost(model, strategy, **how, **way)
            case = (strategy, how, way, model.config)
            assert measured.saved_bytes == cost.saved_bytes, case
            assert measured.peak_bytes == cost.peak_bytes, case
            assert measured.host_bytes == cost.host_bytes, case
            assert measured.extra_flops == cost.extra_flops, case
            assert 3 * measured.forward_flops == cost.model_flops, case
            # A fused kernel computes the scores again in its own backward: one product, whatever the strategy.
            inside = 0
            if attention == "fused":
                c = model.config
                inside = 2 * c.num_layers * how["batch"] * how["seq"] ** 2 * c.q_width
            assert measured.flops == cost.hardware_flops + inside, case
            losses.add((how["batch"], how["seq"], measured.loss))
    assert len({loss[:2] for loss in losses}) == len(losses)  # strategies change no loss


def test_gradients_are_those_of_a_run_without_recomputation():
    torch.manual_seed(0)
    model = Transformer(tiny_config("gpt2", num_layers=5, hidden=16, vocab=31), dropout=0.1, attention="plain")
    names = list(model.state_dict())
    tokens = torch.randint(31, (2, 8))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        model.loss(tokens).backward()
        return [p.grad.clone() for p in model.parameters()]

    right = gradients()
    for strategy in STRATEGIES:
        with apply_strategy(model, strategy):
            assert list(model.state_dict()) == names
            assert all(torch.equal(a, b) for a, b in zip(gradients(), right, strict=True)), strategy
    assert all(torch.equal(a, b) for a, b in zip(gradients(), right, strict=True))  # removed without a trace
    with apply_strategy(model, "full", preserve_rng_state=False):
        assert not all(torch.equal(a, b) for a, b in zip(gradients(), right, strict=True))


def test_the_largest_batch_found_is_the_one_predicted():
    model = Transformer(tiny_config("llama", num_layers=2, hidden=16, vocab=7), attention="plain")
    for strategy in ("none", "full"):
        budget = predicted_cost(model, strategy, batch=4, seq=9).peak_bytes + 100
        how = {"implementation": "toy", "bytes_per_value": 4, "attention": "plain"}
        predicted = largest_batch(budget, model.config, strategy, seq=9, **how)
        assert predicted == find_largest_batch(budget, model, strategy, seq=9) == 4
    assert find_largest_batch(100, model, "none", seq=9) == 0


def test_bad_input():
    model = Transformer(tiny_config("gpt2", num_layers=2, hidden=8, vocab=7))
    with pytest.raises(ValueError, match="implementation='other'"):
        apply_strategy(model, "full", implementation="other")
    with pytest.raises(ValueError, match="needs implementation='torch'"):
        apply_strategy(model, "matmuls", implementation="toy")
    with apply_strategy(model, "full"), pytest.raises(ValueError, match="on already"):
        apply_strategy(model, "full")
    model.blocks[1].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="past the hooks"):
        apply_strategy(model, "every:2")
    apply_strategy(model, "full").remove()


def _on_two_ranks():
    from torch.distributed.pipelining import Schedule1F1B

    gathers = {
        (order, reshard): fsdp_gathers(order, reshard_after_forward=reshard)
        for order, reshard in (
            ("none", True),
            ("inside", True),
            ("outside", True),
            ("segments", True),
            ("inside", False),
        )
    }
    reduces = {
        "none": tensor_parallel_reduces("none"),
        "selective": tensor_parallel_reduces("selective"),
        "full": tensor_parallel_reduces("full", early_stop=False),
        "full, early stop": tensor_parallel_reduces("full"),
    }
    errors = [ddp_error(True), ddp_error(False), ddp_error(True, find_unused_parameters=False)]
    return gathers, reduces, errors, pipeline_error(Schedule1F1B)


def test_with_fsdp_tensor_parallelism_ddp_and_pipelines():
    for gathers, reduces, errors, pipeline in run_ranks(_on_two_ranks, 2):
        # Four blocks and the root; the root keeps its parameters until backward.
        for order in ("none", "inside", "outside", "segments"):
            assert gathers[order, True].all_gathers == (5, 4)
            assert gathers[order, True].reduce_scatters == 5
            # Both ranks have the same batch: the mean of two equal gradients is exact.
            assert gathers[order, True].gradient_error == 0
        assert gathers["inside", False].all_gathers == (5, 0)
        assert reduces == {"none": (2, 2), "selective": (2, 2), "full": (2, 4), "full, early stop": (2, 3)}
        assert "mark a variable ready only once" in errors[0]
        assert errors[1:] == ["", ""]
        # Four micro-batches are summed in another order: a few fp32 roundings of numbers below 1.
        assert pipeline < 1e-6
