"""A plan's memory is the memory calculator's peak, for the implementation that the plan counts and names."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from lablib.calc.communication import hybrid_shard_bytes
from lablib.calc.hardware import accelerator
from lablib.calc.layouts import COUNTED, counting_for, export_job, export_layout
from lablib.calc.layouts.export import EXPORTERS
from lablib.calc.layouts.fit import setup
from lablib.calc.layouts.fit.settings import step_seconds
from lablib.calc.layouts.planner import (
    FIELDS,
    Counting,
    Layout,
    Workload,
    check_layout,
    cluster,
    counted_run,
    layout_memory,
    layout_peak,
    not_modelled,
    plan,
)
from lablib.calc.memory import IMPLEMENTATIONS, RESERVE, UNPROVEN_SHARE, run_config, unproven
from lablib.calc.memory.timeline import memory_peak, memory_timeline
from lablib.calc.models import ModelConfig, preset
from lablib.cli.main import app
from tests.processes import new_seed

GRID = [
    (model, gpus, gpu, framework)
    for model, gpus, gpu in (
        ("llama-3-8b", 8, "h100"),
        ("llama-2-7b", 16, "a100"),
        ("llama-3-8b", 64, "h200"),
        ("llama-2-13b", 32, "h100"),
    )
    for framework in COUNTED
    if framework != "torchtitan" or model == "llama-3-8b"  # it ships no Llama 2
]


@pytest.mark.drawn
@pytest.mark.parametrize(("model", "gpus", "gpu", "framework"), GRID)
def test_the_recommended_memory_is_the_peak_of_what_is_exported(
    model: str, gpus: int, gpu: str, framework: str
) -> None:
    """Every listed layout: its memory is the fullest of all stages, it leaves the reserve, and the exporter takes it."""
    counting = counting_for(framework, model, seq=4096, global_batch=2 * gpus)
    found = plan(model, gpus=gpus, gpu=gpu, seq=4096, global_batch=2 * gpus, counting=counting)
    load = found.load
    listed = found.listed(3)
    assert found.best == listed[0]
    for candidate in listed:
        run = counted_run(load, candidate.layout, counting)
        stages = [memory_timeline(run, step=counting.step, stage=stage).peak_bytes for stage in range(run.pp)]
        assert candidate.total_memory == max(stages) == stages[candidate.peak.stage]
        assert candidate.peak.needs <= found.capacity
        assert run.implementation == counting.implementation == COUNTED[framework].implementation
        job = export_job(
            model, candidate.layout, seq=4096, global_batch=2 * gpus, sequence_parallel=load.sequence_parallel
        )
        assert export_layout(job, framework)


def test_a_peak_that_nobody_judged_leaves_more_than_the_reserve() -> None:
    """405B on 16,384 H100: what leads with 2.5 GiB to spare does not, unless the reserve is given."""
    job = {"gpus": 16384, "seq": 8192, "global_batch": 2048, "cp": 1}
    found, given = plan("llama-3.1-405b", **job), plan("llama-3.1-405b", reserve=RESERVE, **job)
    assert found.capacity == given.capacity
    tight = given.fastest.total_memory
    assert tight <= given.capacity < tight + UNPROVEN_SHARE * tight
    for candidate in found.distinct(8):
        assert candidate.peak.unproven == unproven(counted_run(found.load, candidate.layout, found.counting)) != ()
        assert candidate.total_memory * (1 + UNPROVEN_SHARE) <= found.capacity + 1
    # FSDP2 with Hugging Face's classes is judged, and may use all of it.
    judged = counting_for("accelerate", "llama-3-8b", seq=4096, global_batch=16)
    best = plan("llama-3-8b", gpus=8, seq=4096, global_batch=16, counting=judged, tp=1, cp=1).best
    assert (best.peak.unproven, best.peak.needs) == ((), best.total_memory)


def test_json_says_what_was_counted() -> None:
    job = ["llama-3-8b", "--gpus", "8", "--seq", "8192", "--global-batch", "16", "--implementation", "megatron"]
    said = json.loads(CliRunner().invoke(app, ["plan", *job, "--json"]).output)
    assert said["implementation"] == "megatron"
    best = said["layouts"][0]
    assert best["verdict"] == "fits"
    assert best["memory_bytes"] == sum(best["memory"].values()) <= said["capacity_bytes"]
    assert (best["fits"], best["headroom"]) == (True, accelerator("h100").usable_bytes - best["memory_bytes"])
    assert best["peak_at"]
    assert any("zero=2" in reason for reason in said["left_out"]), "what is not counted is said"
    text = CliRunner().invoke(app, ["plan", *job]).output
    assert "implementation megatron" in text
    assert "Not listed: " in text


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_implementation_can_be_planned(implementation: str) -> None:
    job = {"gpus": 8, "gpu": "h200", "seq": 2048, "global_batch": 16}
    found = plan("llama-3-8b", counting=Counting(implementation=implementation), **job)
    best, how = found.best.layout, {name: getattr(found.best.layout, name) for name in FIELDS}
    assert min(found.best.seconds.values()) >= 0
    # `rung fit` times the same run as the same framework's.
    m = best.num_microbatches(16)
    have = setup(
        "llama-3-8b", gpu="h200", seq=2048, implementation=implementation, num_microbatches=m,
        sequence_parallel=found.load.sequence_parallel and best.tp > 1, **how,
    )  # fmt: skip
    assert step_seconds(have) == pytest.approx(found.best.step)


def test_products_take_the_rate_of_their_dtype() -> None:
    """Four bytes a value go through the units of fp32, an eighth of a T4's fp16, and MFU is a share of that."""
    job = {"gpus": 1, "gpu": "t4", "global_batch": 8}
    half, full = (plan("gpt2", recipe_=name, **job) for name in ("mixed-fp16", "fp32"))
    card = accelerator("t4")
    ratio = card.peak("fp16") / card.peak("fp32")
    assert full.best.seconds["matmul"] == pytest.approx(ratio * half.best.seconds["matmul"])
    assert half.mfu(half.best) < full.mfu(full.best) < 1
    assert not any("bf16" in line for line in not_modelled(half.load, half.best.layout))
    wrong = plan("gpt2", **job)
    assert any("T4 has no bf16" in line for line in not_modelled(wrong.load, wrong.best.layout))
    export = ["plan", "gpt2", "--gpus", "1", "--gpu", "t4", "--global-batch", "8", "--export", "deepspeed"]
    assert "T4 has no bf16" in CliRunner().invoke(app, export).output
    assert "T4 has no bf16" not in CliRunner().invoke(app, [*export, "--recipe", "mixed-fp16"]).output
    with pytest.raises(ValueError, match=r"B200 has no fp32 peak in the table"):
        plan("gpt2", recipe_="fp32", **job | {"gpu": "b200"})


@pytest.mark.parametrize("framework", EXPORTERS)
def test_a_model_that_a_framework_lacks_is_named_and_nothing_else(framework: str) -> None:
    job = {"seq": 1024, "global_batch": 32}
    with pytest.raises(ValueError, match=r"layouts can be counted: .*family 'falcon'") as error:
        plan("falcon-7b", gpus=16, counting=counting_for(framework, "falcon-7b", **job), **job)
    assert "zero=" not in str(error.value)


def test_what_does_not_fit_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"largest term is optimizer, [\d.]+ GB; use more or larger GPUs"):
        _ = plan("llama-3-8b", gpus=8, gpu="t4", seq=512, global_batch=8).best


def test_nothing_sent_takes_no_less_than_nothing() -> None:
    found = plan("gpt2", gpus=64, gpu="v100", nic="50 GB/s", seq=128, global_batch=512)
    assert min(min(one.seconds.values()) for one in found.candidates[:100]) >= 0


def test_what_nobody_counts_is_not_listed() -> None:
    """Hugging Face's classes have no pipeline here, and cp beside tp was not measured: neither is pretended to be."""
    counting = counting_for("accelerate", "llama-3-8b", seq=4096, global_batch=64)
    found = plan("llama-3-8b", gpus=16, seq=4096, global_batch=64, counting=counting)
    assert {c.layout.pp for c in found.distinct()} == {1}
    assert not any(c.layout.cp > 1 < c.layout.tp for c in found.distinct())
    assert any("with cp=" in reason for reason in found.left_out)
    assert any("pp=" in reason for reason in found.left_out)
    # A GPU's autocast takes LayerNorm to fp32 beside FSDP2's policy; DDP under autocast is counted.
    norms = counting_for("accelerate", "gpt2-xl", seq=1024, global_batch=16)
    small = plan("gpt2-xl", gpus=8, seq=1024, global_batch=16, counting=norms)
    assert {c.layout.zero for c in small.candidates} == {0}
    assert any("with LayerNorm" in reason for reason in small.left_out)
    with pytest.raises(ValueError, match=r"none of .* layouts can be counted: .*knows gpt2, llama"):
        plan("deepseek-v3", gpus=1024, seq=4096, global_batch=1024, counting=Counting(implementation="hf"))
    with pytest.raises(ValueError, match="unknown framework"):
        counting_for("horovod", "llama-3-8b", seq=4096, global_batch=64)


def test_the_fullest_stage_need_not_be_the_first_or_the_second() -> None:
    """61 layers on 21 stages: the model's three dense ones fill the first and a third of the second; experts weigh more."""
    layout = Layout(ep=8, dp=64, pp=21, zero=1, recompute="full")
    load = Workload(preset("deepseek-v3"), cluster("h200", 1344), 4096, 64 * 64)
    check_layout(layout, load.model, gpus=1344, seq=4096, global_batch=64 * 64)
    run = counted_run(load, layout, Counting())
    peaks = [memory_timeline(run, stage=stage).peak_bytes for stage in range(21)]
    fullest = peaks.index(max(peaks))
    assert fullest not in (0, 1, 20)
    assert layout_peak(load, layout).stage == fullest
    assert layout_peak(load, layout).total == max(peaks)


def test_the_peak_alone_is_that_of_the_timeline() -> None:
    """Blocks that are alike are not described one by one, nor stages: the fullest instant is found all the same."""
    dice = random.Random(new_seed())
    asked = 0
    while asked < 25:
        pp = dice.choice((1, 1, 2, 4, 8))
        chunks = dice.choice((1, 1, 2, 4)) if pp > 1 else 1
        ends = dice.random() < 0.3 and pp * chunks > 2
        layers = pp * chunks * dice.choice((1, 3, 7)) - 2 * ends
        per_stage = [(layers + 2 * ends) // pp] * pp
        per_stage[0], per_stage[-1] = per_stage[0] - ends, per_stage[-1] - (ends if pp > 1 else 0)
        settings = {
            "pp": pp, "schedule": "interleaved" if chunks > 1 else "1f1b", "virtual_stages": chunks,
            "num_microbatches": pp * dice.choice((1, 2, 4)), "recompute": dice.choice(("none", "selective", "full")),
            "zero": dice.choice((0, 1, 2, 3)), "dp": dice.choice((1, 4)), "prefetch": dice.choice((0, 1, 3)),
            "implementation": dice.choice(("paper", "toy", "hf", "megatron")), "layers_per_stage": per_stage,
            "recipe": dice.choice(("mixed-bf16", "fsdp2-mixed", "fp32")), "seq": 64,
        }  # fmt: skip
        if settings["zero"] >= 2 and dice.random() < 0.5:
            settings |= {"sharding": "fsdp2"}
        try:
            run = run_config(small(preset("llama-2-7b"), layers), **settings)
        except ValueError:
            continue
        step = dice.choice(("foreach", "for-loop", "fused"))
        every = [memory_timeline(run, step=step, stage=stage).peak_bytes for stage in range(pp)]
        assert memory_peak(run, step=step).instant.total == max(every), settings
        asked += 1


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b"])
def test_replicas_of_shards_hold_what_so_many_ranks_alone_would(model: str, zero: int) -> None:
    """HSDP over 8 of 64 ranks: the memory of 8 ranks, their gathers inside a node, and an all-reduce of shards outside."""
    ep = 4 if model == "mixtral-8x7b" else 1
    loads = [Workload(preset(model), cluster("h100", gpus), 4096, 2 * gpus) for gpus in (64, 8)]
    hybrid, alone = (Layout(dp=64, ep=ep, zero=zero, shard=8), Layout(dp=8, ep=ep, zero=zero))
    assert layout_peak(loads[0], hybrid).terms == layout_peak(loads[1], alone).terms
    assert layout_memory(loads[0], hybrid) == layout_memory(loads[1], alone)
    work, inside = loads[0].step_work(hybrid), loads[1].step_work(alone)
    assert (work.gather, work.optimizer) == (inside.gather, inside.optimizer)
    shared, expert = loads[0].stage_params(hybrid, 0)
    sent = hybrid_shard_bytes(2 * shared, 64, shard=8) + 2 * (2 * expert / 2) * 7 / 8  # two ranks share an expert
    assert work.scatter - inside.scatter == pytest.approx(sent / loads[0].cluster.inter)
    with pytest.raises(ValueError, match="shard=8 needs sharded states"):
        check_layout(Layout(dp=64, ep=ep, shard=8), loads[0].model, gpus=64, seq=4096, global_batch=128)


def test_hybrid_sharding_is_searched_inside_a_node() -> None:
    job = {"gpus": 64, "seq": 4096, "global_batch": 128, "pp": 1, "micro_batch": 1, "recompute": "full"}
    found = {c.layout for c in plan("llama-3-8b", **job).candidates}
    assert {(one.zero, one.tp, one.cp, one.shard) for one in found if one.shard} == {
        (3, tp, cp, 8 // tp) for tp in (1, 2, 4) for cp in (1, 2, 4, 8) if 8 % (tp * cp) == 0
    }
    assert "zero=3 shard=8 mb=1" in str(Layout(dp=64, zero=3, shard=8))
    fixed = ["plan", "llama-3-70b", "--gpus", "512", "--seq", "4096", "--global-batch", "1024", "--shard", "64"]
    assert " shard=64" in CliRunner().invoke(app, [*fixed, "--tp", "1", "--pp", "1", "--cp", "1"]).output
    slow = plan("llama-3-8b", nic="100 MB/s", zero=3, tp=1, cp=1, **job)
    assert slow.best.layout.shard == 8, "where the network is slow, gathers stay inside"


@pytest.mark.parametrize(
    ("name", "value"), [("optimizer", "sgd"), ("offload", "parameters"), ("tuning", "lora"), ("tuning", "qlora")]
)
def test_what_is_trained_is_an_option(name: str, value: str) -> None:
    """What the sums drop, the peak would have dropped too; no exporter writes it."""
    found = plan("llama-2-7b", gpus=4, gpu="rtx-4090", seq=2048, global_batch=64, **{name: value})
    partitions = [partition for some in found.found.partitions.values() for partition in some]
    for partition in partitions[::29]:
        assert partition.least <= layout_peak(found.load, partition.layout).total
    job = ["plan", "llama-2-7b", "--gpus", "4", "--gpu", "rtx-4090", "--seq", "2048", "--global-batch", "64"]
    job += [f"--{name}", value]
    assert f"{name} {value}; all of these fit" in CliRunner().invoke(app, job).output
    refused = CliRunner().invoke(app, [*job, "--export", "deepspeed"]).output
    assert "trains all weights with AdamW on the GPU" in refused


def test_where_nothing_fits_fit_is_pointed_to() -> None:
    job = {"gpus": 4, "seq": 2048, "global_batch": 64}
    with pytest.raises(ValueError, match=r"use more or larger GPUs, or --optimizer adamw-8bit, ") as error:
        _ = plan("llama-2-7b", gpu="rtx-4090", **job).best
    command = re.search(r"`rung (fit llama-2-7b .*)`", str(error.value)).group(1).split()
    assert "optimizer=adamw-8bit" in CliRunner().invoke(app, command).output
    with pytest.raises(ValueError, match=r"use more or larger GPUs$"):
        _ = plan("llama-3.1-405b", gpu="t4", **job).best
    with pytest.raises(ValueError, match="GB200 has no link to the CPU in the table"):
        plan("llama-2-7b", gpu="gb200", offload="optimizer", **job)
    with pytest.raises(ValueError, match="sharding='fsdp2' is not known with tuning='full', offload='optimizer'"):
        plan("llama-2-7b", offload="optimizer", counting=Counting(sharding="fsdp2"), **job | {"gpus": 8})


def small(model: ModelConfig, layers: int) -> ModelConfig:
    return replace(model, num_layers=layers, hidden=64, num_heads=4, num_kv_heads=4, ffn=96, vocab=300, head_dim=16)


@pytest.mark.parametrize(
    ("model", "job"),
    [
        # In a pipeline of 8 two micro-batches are through forward before a backward has made gradients.
        (
            "gpt3-175b",
            {"gpus": 4096, "gpu": "a100-40gb", "seq": 2048, "global_batch": 1024, "recipe_": "pure-bf16", "tp": 4, "pp": 8,
             "optimizer": "adamw-8bit", "zero": 1, "micro_batch": 4, "recompute": "selective", "schedule": "1f1b"},
        ),
        # The optimizer's fp32 copy of the gradients is not there before it steps.
        (
            "mixtral-8x7b",
            {"gpus": 4, "gpu": "gb300", "seq": 65536, "global_batch": 64, "recipe_": "megatron-fp16", "tp": 4, "pp": 1,
             "optimizer": "sgd-momentum", "zero": 0, "micro_batch": 1, "recompute": "none"},
        ),
    ],
)  # fmt: skip
def test_a_layout_that_fits_is_not_dropped_for_what_is_not_there_when_forward_ends(model: str, job: dict) -> None:
    found = plan(model, **job)
    assert found.best.peak.needs <= found.capacity
