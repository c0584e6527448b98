"""DeepSpeed's configuration and estimators: published tables, the rules of its code, and DeepSpeed itself where it is.

DeepSpeed is an optional extra of the course. Where it is installed, its own parser reads every configuration and its
own estimators are compared; where it is not, these tests say so and are skipped.
"""

import importlib.util
import inspect
import json
import os
import random

import pytest

from lablib.calc.models import preset
from lablib.calc.parallel import (
    as_deepspeed_json,
    deepspeed_settings,
    offload_efficiency,
    offload_step,
    persistent_params,
    zero2_estimate,
    zero3_estimate,
)
from lablib.calc.parallel.deepspeed import OFFLOADS
from lablib.calc.params import count_params
from lablib.calc.units import GiB

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed; `pip install -c constraints.txt -e '.[deepspeed]'` runs this test",
)
XL = preset("gpt2-xl")


def every_choice() -> list[dict[str, object]]:
    """Return the combinations of stage, offload and device that exist."""
    found = [{"stage": stage, "offload": "none", "device": "cpu"} for stage in range(4)]
    found += [{"stage": stage, "offload": "optimizer", "device": "cpu"} for stage in (1, 2, 3)]
    found += [{"stage": 3, "offload": "parameters", "device": "cpu"}]
    return found + [{"stage": 3, "offload": part, "device": "nvme"} for part in ("optimizer", "parameters")]


# The configuration


@pytest.mark.parametrize("choice", every_choice(), ids=str)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_every_key_stands_once_and_has_a_reason(choice, precision):
    found = deepspeed_settings(XL, ranks=8, micro_batch=2, accumulation=3, precision=precision, **choice)
    keys = [setting.key for setting in found]
    assert len(set(keys)) == len(keys)
    assert all(setting.why.endswith(".") and len(setting.why) > 15 for setting in found)
    tree = json.loads(json.dumps(as_deepspeed_json(found)))
    for setting in found:
        node = tree
        for name in setting.key.split("."):
            node = node[name]
        assert node == setting.value
    assert tree["train_batch_size"] == 2 * 3 * 8
    zero = tree["zero_optimization"]
    assert zero["stage"] == choice["stage"]
    assert ("offload_optimizer" in zero) == (choice["offload"] != "none")
    assert ("offload_param" in zero) == (choice["offload"] == "parameters")
    assert (precision in tree) == (precision != "fp32")


def test_sizes_follow_the_hidden_size_as_in_accelerate():
    zero = as_deepspeed_json(deepspeed_settings(XL, ranks=8, stage=3))["zero_optimization"]
    assert zero["reduce_bucket_size"] == 1600 * 1600
    assert zero["stage3_prefetch_bucket_size"] == int(0.9 * 1600 * 1600)
    assert zero["stage3_param_persistence_threshold"] == 10 * 1600


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "mixtral-8x7b"])
def test_what_persists_is_bounded_by_the_model(name):
    model = preset(name)
    assert persistent_params(model, 1) == 0
    everything = persistent_params(model, 10**12)
    assert everything == count_params(model).total
    assert 0 < persistent_params(model, 10 * model.hidden) < everything / 100


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"stage": 4}, "stage=4 does not exist"),
        ({"stage": 2, "offload": "parameters"}, "needs stage=3, not stage=2"),
        ({"stage": 0, "offload": "optimizer"}, "needs stage=1, 2 or 3, not stage=0"),
        ({"stage": 1, "offload": "optimizer", "device": "nvme"}, "use device='cpu'"),
        ({"stage": 3, "ranks": 0}, "ranks=0 must be at least 1"),
        ({"stage": 3, "offload": "gradients"}, "unknown offload 'gradients'"),
        ({"stage": 3, "precision": "bf8"}, "unknown precision 'bf8'"),
    ],
)
def test_bad_input_is_named(wrong, says):
    with pytest.raises(ValueError, match=says):
        deepspeed_settings(XL, **({"ranks": 8} | wrong))


# The estimators, against the tables of DeepSpeed's documentation, which print two decimals of a GiB

EXAMPLE = {"params": 2_851_000_000, "gpus_per_node": 8}
ZERO3 = [
    ("parameters", True, 71.69, 0.12),
    ("parameters", False, 127.45, 0.12),
    ("optimizer", True, 63.72, 0.78),
    ("optimizer", False, 127.45, 0.78),
    ("none", True, 1.43, 6.09),
    ("none", False, 127.45, 6.09),
]


@pytest.mark.parametrize(("offload", "zero_init", "cpu", "gpu"), ZERO3)
def test_zero3_estimates_are_those_of_the_documentation(offload, zero_init, cpu, gpu):
    found = zero3_estimate(**EXAMPLE, largest_layer=32_000_000, offload=offload, zero_init=zero_init)
    assert found.cpu / GiB == pytest.approx(cpu, abs=0.005)
    assert found.gpu / GiB == pytest.approx(gpu, abs=0.005)


@pytest.mark.parametrize(
    ("offload", "variant", "gpu"),
    [(True, "code", 5.31), (True, "doc", 5.31), (False, "doc", 15.93), (False, "code", 11.28)],
)
def test_zero2_documentation_and_code_disagree(offload, variant, gpu):
    found = zero2_estimate(**EXAMPLE, offload=offload, variant=variant)
    assert found.cpu / GiB == pytest.approx(127.45, abs=0.005)
    assert found.gpu / GiB == pytest.approx(gpu, abs=0.005)


# Offload: what ZeRO-Infinity prints, at 70 TFLOP/s and sequences of 1024


def test_zero_infinity_s_bandwidths():
    weights, optimizer, checkpoints = 1024, 2 * 1024 / 4, 24 * 2048  # FLOPs a byte: s b, s b / 4 and 24 h
    assert offload_efficiency(weights, 70e9, 70e12) > 0.5 > offload_efficiency(weights, 60e9, 70e12)
    assert offload_efficiency(optimizer, 1.5e12, 70e12) > 0.9
    assert offload_efficiency(checkpoints, 2e9, 70e12) > 0.5


def test_offload_step_adds_up():
    """By hand: 1e9 parameters, 3e3 tokens at 1e12 FLOP/s, 1e9 B/s to the host and 28e9 B/s in it."""
    fast = offload_step(10**9, tokens=3000, flops=1e12, host_bandwidth=1e9, cpu_bandwidth=28e9)
    assert (fast.compute, fast.down, fast.exposed_down, fast.update, fast.up) == (18, 2, 0, 1, 2)
    assert fast.step == 18 + 0 + 1 + 2
    assert fast.efficiency == pytest.approx(18 / 21)
    few = offload_step(10**9, tokens=300, flops=1e12, host_bandwidth=1e9, cpu_bandwidth=28e9)
    assert few.exposed_down == pytest.approx(2 - 1.2)
    shared = offload_step(10**9, tokens=3000, flops=1e12, host_bandwidth=1e9, cpu_bandwidth=28e9, ranks=4)
    assert shared.step == pytest.approx(18 + 3 / 4)


# DeepSpeed itself


@needs_deepspeed
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("choice", every_choice(), ids=str)
def test_deepspeed_s_own_parser_takes_it(choice, monkeypatch):
    monkeypatch.setitem(os.environ, "DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.lr_schedules import WarmupDecayLR
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    assert inspect.signature(WarmupDecayLR).parameters["warmup_type"].default == "log"  # as its reason says
    tree = as_deepspeed_json(deepspeed_settings(XL, ranks=1, **choice))["zero_optimization"]
    known = set(DeepSpeedZeroConfig.model_fields)
    known |= {field.alias for field in DeepSpeedZeroConfig.model_fields.values() if field.alias}
    assert set(tree) <= known
    assert int(DeepSpeedZeroConfig(**tree).stage) == choice["stage"]


@needs_deepspeed
@pytest.mark.filterwarnings("ignore")
def test_deepspeed_s_own_estimators_agree(monkeypatch):
    monkeypatch.setitem(os.environ, "DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    dice = random.Random(7)
    for _ in range(30):
        params, gpus, nodes = dice.randint(10**7, 10**11), dice.randint(1, 8), dice.randint(1, 16)
        layer = params // dice.randint(10, 100)
        for offload in OFFLOADS:
            for zero_init in (True, False):
                theirs = estimate_zero3_model_states_mem_needs(
                    params, layer, gpus, nodes, offload != "none", offload == "parameters", zero_init
                )
                ours = zero3_estimate(
                    params, layer, gpus_per_node=gpus, nodes=nodes, offload=offload, zero_init=zero_init
                )
                assert (ours.cpu, ours.gpu) == pytest.approx(theirs[:2], rel=1e-12, abs=2)
        theirs = estimate_zero2_model_states_mem_needs(params, gpus, nodes, offload != "none")
        ours = zero2_estimate(params, gpus_per_node=gpus, nodes=nodes, offload=offload != "none")
        assert (ours.cpu, ours.gpu) == pytest.approx(theirs, rel=1e-12, abs=2)
