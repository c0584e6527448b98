"""Experts of Hugging Face's classes in the memory calculator: both ways to run them, uneven tokens, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lablib.calc.memory import RunConfig, training_memory
from lablib.calc.memory.timeline import memory_timeline
from lablib.calc.models import preset
from lablib.launch.measure import saved_activations
from tests.evidence.cases import Case
from tests.evidence.oracles import measure_case
from tests.evidence.oracles.models import build_model

GROUPED = Case(implementation="hf", family="mixtral-grouped")
LOOP = Case(implementation="hf", family="mixtral-loop", seq=16)


def timeline_of(case: Case):
    return memory_timeline(step=case.step, out_of_place=True, torch=torch.__version__, **case.settings())


@pytest.mark.drawn
@pytest.mark.parametrize(
    "case",
    [
        replace(GROUPED, recipe="pure-bf16", recompute="full"),
        replace(GROUPED, recipe="autocast-bf16"),
        replace(GROUPED, family="qwen3-moe", recipe="fsdp2-mixed", sharding="fsdp2", dp=16, recompute="full"),
        replace(GROUPED, family="qwen3-moe", attention="plain", step="foreach"),
        replace(LOOP, recipe="autocast-bf16", recompute="full"),
        replace(LOOP, recipe="pure-bf16"),
    ],
    ids=lambda case: case.name,
)
def test_experts_are_held_to_the_byte(case: Case) -> None:
    """Hugging Face's own class on real tensors: what forward keeps, and the fullest instant of each backward."""
    found, timeline = measure_case(case), timeline_of(case)
    assert 0 <= found.saved - sum(timeline.saved.values()) <= 8  # the loss and the sum that it divided by
    # Counters of the optimizer, 4 bytes a tensor, frequencies of rotary positions, the loss and its gradient.
    slack = 4 * len(list(build_model(case).model.parameters())) + 64
    for number in range(case.model.num_layers):
        moment = f"backward of block {number}"
        assert 0 <= found.totals[moment] - timeline.instant(moment).total <= slack, moment
    assert 0 <= found.peak - timeline.peak_bytes <= slack


@pytest.mark.parametrize("case", [GROUPED, LOOP], ids=lambda case: case.experts)
def test_what_is_kept_does_not_depend_on_who_gets_the_tokens(case: Case) -> None:
    """From even to all tokens with as few experts as can be: the sum over pairs is the same."""
    block = build_model(case).model.model.layers[0].mlp
    x = torch.zeros(1, 24, case.model.hidden, requires_grad=True)
    kept = []
    for chosen in ([[0, 1], [2, 3]] * 12, [[0, 1]] * 22 + [[2, 3]] * 2, [[3, 1]] * 24):
        kept.append(_kept(block, x, torch.tensor(chosen)))
    assert kept[0] == kept[1] == kept[2]


def _kept(block: nn.Module, x: Tensor, chosen: Tensor) -> int:
    """Bytes that a block of experts keeps if the router's choice is this one."""

    def answer(router: nn.Module, inputs: tuple, output: tuple) -> None:
        output[2].data.copy_(chosen)

    block.gate._forward_hooks.clear()
    block.gate.register_forward_hook(answer)
    with saved_activations(block) as saved:
        y = block(x)
    del y
    return saved.total


def test_a_loop_keeps_one_more_vector_of_each_pair_and_adds_up_zeros() -> None:
    """`index_add_` holds what it adds; each expert's gradient is as large as all of them."""
    how = {"implementation": "hf", "recipe": "pure-bf16", "seq": 64}
    model = Case(family="mixtral-grouped").model
    grouped, loop = (memory_timeline(model, experts=way, out_of_place=True, **how) for way in ("grouped", "loop"))
    pairs = 64 * model.experts_per_token
    indices = 3 * 8 * pairs + 4 * model.num_experts - 2 * 8 * pairs
    more = model.num_layers * (pairs * model.hidden * 2 - indices)
    assert sum(loop.saved.values()) - sum(grouped.saved.values()) == more
    # Zeros with one expert's gradient, the sum so far, and their sum: three times all experts' gate and up.
    both = 2 * model.num_experts * model.expert_ffn * model.hidden * 2
    assert loop.instant("backward of block 0").term("activation_gradients") > 3 * both


def test_autocast_leaves_grouped_experts_in_fp32() -> None:
    """`grouped_mm` is none of its operators: no weight of an expert is cast, unlike in the loop."""
    model = Case(family="mixtral-grouped").model
    how = {"implementation": "hf", "recipe": "autocast-bf16", "seq": 64}
    casts = {way: memory_timeline(model, experts=way, **how).saved["weight_casts"] for way in ("grouped", "loop")}
    experts = 3 * model.num_layers * model.num_experts * model.expert_ffn * model.hidden
    assert casts["loop"] - casts["grouped"] == 2 * experts


def test_fsdp2_shards_experts_by_their_number() -> None:
    """Eight experts are eight rows: on 64 ranks eight have one each, and what is gathered is padded to 64."""
    model = preset("mixtral-8x7b")
    how = {"implementation": "hf", "recipe": "fsdp2-mixed", "sharding": "fsdp2", "zero": 3, "seq": 512}
    few, many = (training_memory(model, dp=dp, **how) for dp in (8, 64))
    expert = 3 * model.expert_ffn * model.hidden
    assert few.states > many.states > model.num_layers * expert * 16  # one of each layer, with gradient and moments
    block = {dp: memory_timeline(model, dp=dp, **how).instant("backward of block 1") for dp in (8, 64)}
    more = block[64].term("gathered_weights") - block[8].term("gathered_weights")
    assert more == pytest.approx((64 - 8) * expert * 2, rel=1e-3)  # 56 experts of nothing, in bf16


def test_uneven_tokens_fill_the_fullest_rank_and_no_more_in_all() -> None:
    how = {"dp": 4, "ep": 4, "recipe": "fsdp2-mixed", "seq": 1000}
    kept = {
        i: training_memory("mixtral-8x7b", imbalance=i, **how).terms["activations.experts"] for i in (1.0, 1.5, 4.0)
    }
    assert kept[1.5] == 1.5 * kept[1.0]
    assert kept[4.0] == 4 * kept[1.0]  # all tokens with one rank's two experts: three others have none
    even = training_memory("mixtral-8x7b", **how).terms
    uneven = training_memory("mixtral-8x7b", imbalance=1.5, **how).terms
    assert {name for name in even if even[name] != uneven[name]} == {"activations.experts"}
    # At the peak, where the fullest rank's copies meet their gradients.
    peaks = [
        memory_timeline("mixtral-8x7b", imbalance=i, **how).instant("backward of block 31").total for i in (1, 1.5)
    ]
    assert peaks[0] < peaks[1]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"imbalance": 1.2}, "imbalance=1.2 must be from 1 to 1: with ep=1"),
        ({"imbalance": 0.5, "dp": 4, "ep": 4}, "must be from 1 to 4"),
        ({"imbalance": 5, "dp": 8, "ep": 8}, "must be from 1 to 4: with ep=8"),
        ({"experts": "loop"}, "experts='loop' is a way of Hugging Face's classes"),
        ({"experts": "batched"}, "experts"),
        ({"implementation": "hf", "dp": 2, "ep": 2}, "is not known with ep=2 and the experts of mixtral-8x7b"),
        ({"implementation": "hf", "tuning": "lora"}, "is not known with tuning='lora'"),
        ({"implementation": "hf", "tp": 2, "recipe": "pure-bf16"}, "family 'mixtral'"),
        ({"implementation": "toy"}, "family 'mixtral'"),
    ],
)
def test_what_no_oracle_was_asked_about_is_refused_by_name(settings: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        training_memory(RunConfig(model="mixtral-8x7b", seq=64, **settings))
