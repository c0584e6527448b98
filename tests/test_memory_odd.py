"""Odd arguments of the memory calculator and of `rung fit`: refused by name, or answered at once and the same."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from lablib.calc.errors import must_divide, plural
from lablib.calc.hardware import LINKS, link_rate
from lablib.calc.layouts.fit import cheapest_change, setup
from lablib.calc.layouts.fit.changes import SHORT, candidate_changes
from lablib.calc.layouts.planner import cluster
from lablib.calc.memory import MEANING, run_config, training_memory, unproven
from lablib.calc.memory.timeline import memory_timeline
from lablib.calc.memory.timeline.step import piece
from lablib.calc.models import ModelConfig, preset
from lablib.cli.main import app


def rung(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(args))
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"layers_per_stage": "4,4,4", "pp": 3}, "layers_per_stage='4,4,4' must be whole numbers"),
        ({"layers_per_stage": ["4", "8"], "pp": 2}, "must be whole numbers, one for each stage"),
        ({"layers_per_stage": [4.0, 8.0], "pp": 2}, "must be whole numbers, one for each stage"),
        ({"layers_per_stage": 12}, "layers_per_stage=12 must be"),
        ({"layers_per_stage": [6, 0, 6], "pp": 3}, "stage 1 nothing to do.*use pp=2"),
        ({"micro_batch": 2.0}, "micro_batch=2.0 must be a whole number"),
        ({"micro_batch": True}, "micro_batch=True must be a whole number"),
        ({"dp": None}, "dp=None must be a whole number"),
        ({"seq": "64"}, "seq='64' must be a whole number"),
        ({"seq": 10**30}, "seq=1,000,.* is more than anybody has: use at most 1,073,741,824"),
        ({"dropout": "0.1"}, "dropout='0.1' must be at least 0"),
        ({"sequence_parallel": "yes"}, "sequence_parallel='yes' must be True or False"),
        ({"gradient_as_bucket_view": 1}, "gradient_as_bucket_view=1 must be True or False"),
        ({"stage": 1}, "stage=1: with pp=1 there is one stage, 0"),
        ({"stage": True, "pp": 2}, "stage=True is not one of the pp=2 stages; use 0 to 1"),
        ({"model": 5}, "model=5 must be a ModelConfig, the name of a preset"),
        ({"model": None}, "model=None must be a ModelConfig"),
        ({"model": replace(preset("gpt2"), num_layers=10**6)}, "num_layers=1,000,000 of gpt2"),
    ],
)
def test_what_is_no_setting_is_named(how, message) -> None:
    for ask in (training_memory, memory_timeline):
        with pytest.raises(ValueError, match=message):
            ask(**{"model": "gpt2"} | how)
    if "stage" not in how:
        with pytest.raises(ValueError, match=message):
            setup(**{"model": "gpt2", "gpu": "t4"} | how)


def test_only_the_ends_of_a_pipeline_can_be_without_blocks() -> None:
    table = preset("gpt2").vocab * preset("gpt2").hidden
    for sizes, stage in (([0, 6, 6], 0), ([6, 6, 0], 2)):
        how = {"pp": 3, "layers_per_stage": sizes, "stage": stage, "seq": 64, "recipe": "pure-bf16"}
        assert training_memory("gpt2", **how).terms["weights"] >= 2 * table
        assert memory_timeline("gpt2", **how).peak_bytes > 8 * table
    first = memory_timeline("gpt2", pp=3, layers_per_stage=[0, 6, 6], stage=0, seq=64)
    # Its outputs go to the next stage and are held for the micro-batches in flight, three of them.
    assert first.saved["stage_outputs"] == 3 * 64 * 768 * 2


def test_shared_pieces_say_what_pieces_of_their_own_say() -> None:
    for how in (
        {"implementation": "hf", "model": "qwen2.5-0.5b", "pp": 4, "recipe": "autocast-bf16"},
        {"implementation": "paper", "model": "deepseek-v3", "layers_per_stage": [2, 20, 39], "pp": 3, "tuning": "lora"},
        {"implementation": "toy", "model": "gpt2", "recompute": "full", "num_microbatches": 3, "dp": 2, "zero": 2},
    ):
        shared = memory_timeline(seq=64, **how)
        piece.cache_clear()
        assert memory_timeline(seq=64, **how) == shared


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        ("-1 GB/s", "must not be negative"),
        ("0 GB/s", "must be above 0"),
        ("nan GB/s", "is not a bandwidth"),
        ("inf", "is not a bandwidth"),
        ("1e30 GB/s", "more than 1 PB/s"),
        ("400 GB", "has no unit of bandwidth"),
        ("5 parsecs", "has no unit of bandwidth"),
        ("", "is not a bandwidth"),
        ("fast", "unknown link 'fast'.*or give a rate"),
        (float("nan"), "must be above 0"),
        (float("inf"), "more than 1 PB/s"),
        (True, "must be above 0"),
    ],
)
def test_a_rate_that_cannot_be_says_why(rate, message) -> None:
    with pytest.raises(ValueError, match=f"nic.*{message}"):
        setup("gpt2", gpu="h100", nic=rate)
    if isinstance(rate, str):
        code, _, err = rung("fit", "gpt2", "--gpu", "h100", "--nic", rate)
        assert (code, err.count("\n")) == (2, 1)


def test_a_link_a_rate_and_bytes_are_the_same() -> None:
    assert link_rate("nic", "ib-ndr") == link_rate("nic", "400 Gb/s") == link_rate("nic", 50e9)
    assert cluster("h100", 16, nic="40 GB/s").inter == 40e9
    assert all(link_rate("nic", name) == link.bandwidth for name, link in LINKS.items())


def test_an_assumed_length_is_said_and_a_shorter_one_is_offered() -> None:
    run = ["fit", "llama-3.1-8b", "--gpu", "h100", "--gpus", "8"]
    _, out, _ = rung(*run)
    head = " ".join(" ".join(out.split("\n\n")[0].splitlines()).split())
    assert "131,072 tokens a sequence (the model's longest: --seq was not given)" in head
    assert "Add --seq with the length that you train at" in head
    change = next(one for one in cheapest_change("llama-3.1-8b", gpu="h100", gpus=8) if "seq" in one.settings)
    assert change.settings["seq"] == change.at.run.seq == SHORT
    assert change.kind == "other training"
    assert f"other training: seq={SHORT}" in out
    assert "Add --seq" not in rung(*run, "--seq", "131072")[1]
    given = cheapest_change("llama-3.1-8b", gpu="h100", gpus=8, seq=131072)
    assert not any(one.settings.get("seq") == SHORT for one in given)


def test_what_no_oracle_has_counted_is_marked() -> None:
    sharded = {"dp": 2, "recipe": "fsdp2-mixed-fp32-reduce", "sharding": "fsdp2", "zero": 3}
    assert unproven(run_config("gpt2", implementation="hf", **sharded)) == ()
    assert unproven(run_config("gpt2", **sharded)) == ("paper's peak",)  # of the papers' kernels nobody counted one
    # Published peaks of Megatron-LM have ZeRO-1, and experts over ranks; tensor and pipeline parallelism never together.
    megatron = {"implementation": "megatron", "dp": 2, "zero": 1}
    assert unproven(run_config("mixtral-8x7b", ep=2, pp=2, **megatron)) == ()
    assert unproven(run_config("llama-3-8b", tp=2, pp=2, sequence_parallel=True, **megatron)) == ("tp with pp",)
    # Pipelines of the toys were counted, of one replica; of Hugging Face's classes none.
    toy = {"implementation": "toy", "pp": 2}
    assert unproven(run_config("gpt2", **toy)) == ()
    assert unproven(run_config("gpt2", dp=2, **toy)) == ("pp",)
    assert unproven(run_config("gpt2", recipe="autocast-bf16", **toy)) == ("autocast with pp",)
    assert unproven(run_config("llama-3-8b", **sharded | {"implementation": "torchtitan"})) == ("torchtitan",)
    assert unproven(run_config("gpt2", implementation="hf", pp=2)) == ("pp",)
    assert unproven(run_config("gpt2", schedule="gpipe", dropout=0.1, **toy)) == ("gpipe", "dropout")
    every = run_config(
        "mixtral-8x7b", optimizer="adamw-8bit", tuning="qlora", offload="optimizer", dp=2, ep=4, cp=2, zero=1
    )
    assert unproven(every) == ("paper's peak", "adamw-8bit", "qlora", "offload", "flat ZeRO", "cp", "ep")
    run = ["fit", "llama-3-8b", "--gpu", "a100", "--gpus", "4", "--seq", "4096", "--all"]
    out = " ".join(rung(*run)[1].split())
    data = json.loads(rung(*run[:-1], "--json")[1])
    for change in data["changes"]:
        names = change["unproven"]
        assert (f"(unproven: {', '.join(names)})" in out) if names else True
        assert ("offload" in names) == (change["kind"] == "CPU memory")
    assert MEANING[1:] in out
    assert "nproven" not in rung("fit", "gpt2", "--gpu", "h100", "--implementation", "hf", "--recipe", "fp32")[1]


def test_absurd_sizes_are_searched_by_few_questions() -> None:
    assert len(candidate_changes(setup("gpt2", gpu="h100", micro_batch=720720))["micro_batch"]) <= 20
    with pytest.raises(ValueError, match="use 307, 7061"):
        must_divide("cp", 10**9 + 7, "seq", 10**9 + 3)
    deep = ModelConfig(name="deep", num_layers=50_000, hidden=64, num_heads=4, ffn=64, vocab=100, max_positions=64)
    one = replace(deep, num_layers=1)
    blocks = training_memory(deep).states - training_memory(one).states
    assert blocks == 49_999 * (training_memory(replace(deep, num_layers=2)).states - training_memory(one).states)


def test_one_is_one() -> None:
    assert (plural(1, "token"), plural(8192, "token")) == ("1 token", "8,192 tokens")
    assert "1 token a sequence, 1 rank" in rung("memory", "gpt2", "--seq", "1")[1]
    assert "1 token a sequence, 1 rank" in rung("memory", "gpt2", "--seq", "1", "--at", "peak")[1]
    assert "1 token a sequence" in rung("fit", "gpt2", "--gpu", "h100", "--seq", "1")[1]
