"""The exporters: each file is held to what its framework's own parser read in it, and to what was planned."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from lablib.calc.layouts import export_job, export_layout, export_plan
from lablib.calc.layouts.export import COUNTED, EXPORTERS, ExportJob, frameworks
from lablib.calc.layouts.export.accelerate import BLOCKS
from lablib.calc.layouts.planner import Layout
from lablib.calc.models import ModelConfig, from_hf, preset
from lablib.calc.params import count_params
from lablib.calc.schedules import chunk_layers
from lablib.cli.plan import FRAMEWORKS
from tests.evidence.exported.cases import CASES, Case
from tests.evidence.exported.readers import installed, read

PROVEN = json.loads((Path(__file__).parent / "evidence" / "exported" / "proven.json").read_text(encoding="utf-8"))


def of(framework: str) -> list[Case]:
    return [case for case in CASES if case.framework == framework]


def named(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_proven_file_is_what_is_written_today(case: Case) -> None:
    proof = PROVEN[case.name]
    text = export_layout(case.exported(), case.framework)
    assert text.splitlines() == proof["text"], "read it again: python -m tests.evidence.exported"
    assert text.endswith("\n")
    assert proof["with"] == EXPORTERS[case.framework].proven
    assert f"Read by the parser of {proof['with']}." in text  # the file says so itself


@pytest.mark.parametrize("case", CASES, ids=named)
def test_its_own_parser_reads_it_again(case: Case) -> None:
    have, proven = installed(case.framework), PROVEN[case.name]["with"]
    if have != proven:
        pytest.skip(f"{have or 'no ' + case.framework} is installed, and {proven} has read this file")
    text = export_layout(case.exported(), case.framework)
    assert read(case.framework, text, case.exported()) == PROVEN[case.name]["read"]


@pytest.mark.parametrize("case", of("torchtitan"), ids=named)
def test_torchtitan_holds_what_was_planned(case: Case) -> None:
    job, found = case.exported(), PROVEN[case.name]["read"]
    model, layout = job.model, job.layout
    replicas = layout.dp if layout.zero == 0 else 1
    assert found["dims"] == {
        "dp_replicate": replicas, "dp_shard": layout.dp // replicas, "cp": layout.cp, "tp": layout.tp,
        "pp": layout.pp, "ep": layout.ep,
    }  # fmt: skip
    batch = found["training"]
    assert (batch["global_batch_size"], batch["seq_len"]) == (job.global_batch, job.seq)
    assert batch["local_batch_size"] == (job.global_batch // layout.dp if layout.pp > 1 else layout.micro_batch)
    assert (batch["dtype"], batch["mixed_precision_param"], batch["mixed_precision_reduce"]) == (
        "float32", "bfloat16", "float32",
    )  # fmt: skip
    assert found["parallelism"]["fsdp_reshard_after_forward"] == ("always" if layout.zero == 3 else "never")
    kind = {"none": None, "selective": "SelectiveAC.Config", "full": "FullAC.Config"}
    assert found["activation_checkpoint"] == kind[layout.recompute]
    if layout.pp > 1:
        first, middle, last = chunk_layers(model.num_layers, layout.pp, layout.virtual_stages)
        assert found["layers_of_chunks"] == [first, *[middle] * (layout.pp * layout.virtual_stages - 2), last]
    if layout.cp > 1:  # its default cannot split the mask of its own attention
        assert found["parallelism"]["context_parallel_load_balancer"] == "ptrr"
    built = found["model"]
    assert (built["layers"], built["hidden"], built["vocab"]) == (model.num_layers, model.hidden, model.vocab)
    assert built["theta"] == model.rotary.base
    assert built["scaling"] == {"llama3": "llama"}.get(model.rotary.scaling, model.rotary.scaling)
    if model.rotary.scaling == "llama3":
        assert built["scaling_factor"] == model.rotary.factor
    if model.is_moe:
        router = model.router
        assert found["router"] == {
            "num_experts": model.num_experts, "top_k": model.experts_per_token, "score_func": router.score,
            "route_norm": router.normalized, "route_scale": router.scale,
            "num_expert_groups": router.groups or None, "num_limited_groups": router.group_topk or None,
        }  # fmt: skip


def test_what_cannot_be_exported_is_passed_over_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exporter may refuse what its framework was asked about in general: the next layout is taken."""
    job = {"gpus": 8, "gpu": "h100", "seq": 4096, "global_batch": 64}
    first = export_plan("llama-3-8b", "megatron", **job)
    assert not any("passed over" in line for line in first.said)
    own = EXPORTERS["megatron"]

    def text(given: ExportJob) -> str:
        if given.layout == first.candidate.layout:
            raise ValueError("not this one")
        return own.text(given)

    monkeypatch.setitem(EXPORTERS, "megatron", replace(own, text=text))
    monkeypatch.setattr(frameworks, "counting_for", lambda *_, **__: COUNTED["megatron"])
    other = export_plan("llama-3-8b", "megatron", **job)
    assert other.said[-1].startswith(f"passed over: {first.candidate.layout}, {first.candidate.step:.3f} s: not this")
    assert other.candidate.step >= first.candidate.step
    assert str(other.candidate.layout) in other.text.splitlines()[1]


def megatrons_model(found: dict, vocab: int) -> ModelConfig:
    """The model that Megatron-LM builds of what it read."""
    config = found["config"]
    moe = config["num_moe_experts"] is not None
    latent = config["multi_latent_attention"]
    bias = config["add_bias_linear"]
    expert = config["moe_ffn_hidden_size"] if moe else 0
    return ModelConfig(
        num_layers=config["num_layers"],
        hidden=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_query_groups"],
        head_dim=0 if latent else config["kv_channels"],
        ffn=config["ffn_hidden_size"],
        vocab=vocab,
        max_positions=found["max_position_embeddings"],
        learned_positions=found["position_embedding_type"] == "learned_absolute",
        tied=not found["untie_embeddings_and_output_weights"],
        norm=config["normalization"].lower(),
        gated_mlp=config["gated_linear_unit"],
        qkv_bias=bias or config["add_qkv_bias"],
        attn_out_bias=bias,
        mlp_bias=bias,
        qk_norm=config["qk_layernorm"] and not latent,
        num_experts=config["num_moe_experts"] or 0,
        experts_per_token=config["moe_router_topk"] if moe else 0,
        expert_ffn=expert,
        num_shared_experts=(config["moe_shared_expert_intermediate_size"] or 0) // expert if moe else 0,
        num_dense_layers=config["moe_layer_freq"].count(0) if isinstance(config["moe_layer_freq"], list) else 0,
        **(
            {
                "q_lora_rank": config["q_lora_rank"],
                "kv_lora_rank": config["kv_lora_rank"],
                "qk_nope_head_dim": config["qk_head_dim"],
                "qk_rope_head_dim": config["qk_pos_emb_head_dim"],
                "v_head_dim": config["v_head_dim"],
            }
            if latent
            else {}
        ),
    )


@pytest.mark.parametrize("case", of("megatron"), ids=named)
def test_megatron_builds_the_same_model(case: Case) -> None:
    model, found = case.exported().model, PROVEN[case.name]["read"]
    config = found["config"]
    assert count_params(megatrons_model(found, model.vocab)).total == count_params(model).total
    assert config["layernorm_epsilon"] == model.norm_eps
    # A query sees its own key, and so many to the left and to the right.
    assert config["window_size"] == ([model.window - 1, 0] if model.window else None)
    rotary = model.rotary
    if rotary is not None:
        assert (found["rotary_base"], found["rotary_percent"]) == (rotary.base, rotary.share)
        assert found["use_rope_scaling"] is (rotary.scaling == "llama3")
        if rotary.scaling == "llama3":
            assert found["rope_scaling_factor"] == rotary.factor
        if model.is_mla:
            names = ("rope_type", "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
            wanted = [rotary.scaling, rotary.factor, rotary.original, rotary.high, rotary.low]
            assert [config[name] for name in names] == wanted
            assert (config["mscale"], config["mscale_all_dim"]) == rotary.mscale
    if model.is_moe:
        router = model.router
        wanted = {
            "score_function": router.score, "pre_softmax": not router.normalized,
            "num_groups": router.groups or None, "group_topk": router.group_topk or None,
            "topk_scaling_factor": router.scale if router.scale != 1 else None,
            "enable_expert_bias": router.bias, "load_balancing_type": router.balance,
        }  # fmt: skip
        assert {name: config[f"moe_router_{name}"] for name in wanted} == wanted
        assert config["moe_aux_loss_coeff"] == router.coefficient


@pytest.mark.parametrize("case", of("megatron"), ids=named)
def test_megatron_runs_what_was_planned(case: Case) -> None:
    job, found = case.exported(), PROVEN[case.name]["read"]
    layout, config = job.layout, found["config"]
    wanted = {
        "tensor_model_parallel_size": layout.tp, "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp, "expert_model_parallel_size": layout.ep,
        "virtual_pipeline_model_parallel_size": layout.virtual_stages if layout.virtual_stages > 1 else None,
        "sequence_parallel": layout.tp > 1, "fp16": case.job.get("recipe") == "megatron-fp16",
        "recompute_granularity": None if layout.recompute == "none" else layout.recompute,
    }  # fmt: skip
    assert {name: config[name] for name in wanted} == wanted
    if job.model.is_moe:  # by default Megatron-LM splits an expert over tp, and so it was counted
        assert config["expert_tensor_parallel_size"] == layout.tp
    assert (found["data_parallel_size"], found["seq_length"]) == (layout.dp, job.seq)
    assert (found["micro_batch_size"], found["global_batch_size"]) == (layout.micro_batch, job.global_batch)
    assert found["use_distributed_optimizer"] is (layout.zero > 0)
    assert found["use_megatron_fsdp"] is (layout.zero > 1)
    assert found["accumulate_allreduce_grads_in_fp32"] is config["bf16"]  # 18 bytes a parameter
    first, middle, last = chunk_layers(job.model.num_layers, layout.pp, layout.virtual_stages)
    ends = [config[f"account_for_{end}_in_pipeline_split"] for end in ("embedding", "loss")]
    if any(ends):
        assert (first, last) == (middle - ends[0], middle - ends[1])
    elif config["num_layers_in_first_pipeline_stage"] is not None:
        sides = [config[f"num_layers_in_{end}_pipeline_stage"] for end in ("first", "last")]
        assert sides == [first, last]
    else:
        assert first == middle == last


@pytest.mark.parametrize("case", of("deepspeed"), ids=named)
def test_deepspeed_runs_what_was_planned(case: Case) -> None:
    job, found = case.exported(), PROVEN[case.name]["read"]
    layout = job.layout
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "stage")
    sizes = [job.global_batch, layout.micro_batch, job.accumulation, layout.zero]
    assert [found[name] for name in names] == sizes
    assert found["fp16"] is not found["bf16"]
    assert found["fp16"] is (case.job.get("recipe") == "mixed-fp16")
    assert max(1, found["autotp_size"]) == layout.tp
    if layout.ep > 1:
        assert found["autoep"] == [True, layout.ep, "qwen3_moe"]
    said = " ".join(json.loads("\n".join(PROVEN[case.name]["text"]))["_plan"])
    assert ("gradient_checkpointing_enable" in said) is (layout.recompute == "full")


@pytest.mark.parametrize("case", of("accelerate"), ids=named)
def test_accelerate_runs_what_was_planned(case: Case) -> None:
    job, found = case.exported(), PROVEN[case.name]["read"]
    layout = job.layout
    assert found["distributed_type"] == ("FSDP" if layout.zero else "MULTI_GPU")
    assert (found["num_processes"], found["num_machines"]) == (layout.gpus, job.nodes)
    assert found["mixed_precision"] == "bf16"
    if layout.zero:
        assert found["fsdp_config"]["fsdp_reshard_after_forward"] is (layout.zero == 3)
        assert found["fsdp_config"]["fsdp_activation_checkpointing"] is (layout.recompute == "full")
    assert found["total_size"] == (layout.gpus if layout.tp * layout.cp > 1 or layout.shard else None)
    if layout.shard:
        sizes = found["parallelism_config"]
        assert sizes["parallelism_config_dp_shard_size"] == layout.shard // layout.cp
    head = "\n".join(PROVEN[case.name]["text"])
    sharded = layout.zero and job.accumulation > 1
    steps = (
        f"num_steps={job.accumulation}, sync_each_batch=True"
        if sharded
        else f"gradient_accumulation_steps={job.accumulation}"
    )
    assert steps in head
    assert f"batch_size={layout.micro_batch}" in head


LLAMA = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 250000.0,
}  # fmt: skip


def arguments(model: ModelConfig) -> dict[str, str]:
    """The options of an exported script."""
    text = export_layout(export_job(model, Layout(dp=8), seq=1024, global_batch=64), "megatron")
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    words = words[words.index("pretrain_gpt.py") + 1 : -1]
    found: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word[2:]] = "" if following.startswith("--") else following
    return found


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({}, {"rotary-base": "250000", "norm-epsilon": "1e-06"}),
        ({"partial_rotary_factor": 0.5}, {"rotary-percent": "0.5"}),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                              "original_max_position_embeddings": 8192}},
            {"use-rope-scaling": "", "rope-scaling-factor": "32"},
        ),
        ({"model_type": "mistral", "sliding_window": 64}, {"window-size": "63,0", "window-attn-skip-freq": None}),
        # transformers 5 writes both into one field
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"rotary-base": "1000000"}),
    ],
)  # fmt: skip
def test_a_configurations_positions_reach_megatron(more: dict, wanted: dict) -> None:
    found = arguments(from_hf(LLAMA | more))
    assert {name: found.get(name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rope_theta": None}, "rotary base of llama is not known here; give its config.json"),
        ({"rms_norm_eps": None}, "epsilon of llama's norms is not known"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary scaling 'yarn' of llama"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                              "original_max_position_embeddings": 4096}},
            r"original=4096.*for Llama 3's and for latent attention's YaRN alone",
        ),
        ({"attention_bias": True}, "Megatron-LM has them on all, on none, or on qkv alone"),
    ],
)  # fmt: skip
def test_what_megatron_has_no_argument_for_is_refused(more: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arguments(from_hf(LLAMA | more))


def test_a_router_that_is_not_made_to_sum_to_one_is_another_router() -> None:
    fields = LLAMA | {
        "model_type": "qwen3_moe", "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 128, "norm_topk_prob": False, "router_aux_loss_coef": 0.01,
    }  # fmt: skip
    assert "moe-router-pre-softmax" in arguments(from_hf(fields))
    assert "moe-router-pre-softmax" not in arguments(from_hf(fields | {"norm_topk_prob": True}))
    with pytest.raises(ValueError, match="router of qwen3_moe is not known"):
        arguments(from_hf(fields | {"norm_topk_prob": None}))
    with pytest.raises(ValueError, match="coefficient of qwen3_moe's balance loss is not known"):
        arguments(from_hf(fields | {"router_aux_loss_coef": None}))


def test_presets_and_configurations_say_the_same_of_positions() -> None:
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 8192}  # fmt: skip
    read_back = from_hf(LLAMA | {"rope_theta": 5e5, "rope_scaling": scaled})
    assert read_back.rotary == preset("llama-3.1-8b").rotary
    assert preset("llama-3-8b").rotary != preset("llama-3.1-8b").rotary


def test_accelerates_blocks_are_transformers_classes() -> None:
    transformers = pytest.importorskip("transformers")
    folder = Path(transformers.__file__).parent / "models"
    for family, block in BLOCKS.items():
        name = family.replace("-", "_")
        source = (folder / name / f"modeling_{name}.py").read_text(encoding="utf-8")
        assert f"class {block}(" in source, family


def test_megatrons_fsdp_and_its_other_modes_want_other_environments() -> None:
    def script(layout: Layout) -> str:
        return export_layout(export_job("llama-3-8b", layout, seq=1024, global_batch=64), "megatron")

    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in script(Layout(tp=2, dp=4))
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in script(Layout(dp=8))
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in script(Layout(tp=2, dp=4, zero=3))


def test_every_exporter_is_behind_the_door() -> None:
    job = export_job("llama-3-8b", Layout(dp=8, zero=2), seq=8192, global_batch=64)
    for framework in EXPORTERS:
        assert len(export_layout(job, framework)) > 300
    with pytest.raises(ValueError, match="unknown framework 'fairscale'"):
        export_layout(job, "fairscale")
    with pytest.raises(ValueError, match="unknown recipe 'fp8'"):
        export_job("llama-3-8b", Layout(dp=8), seq=8192, global_batch=64, recipe="fp8")


MOE = "qwen3-30b-a3b"


@pytest.mark.parametrize(
    ("framework", "model", "layout", "more", "message"),
    [
        ("megatron", "llama-3-8b", {"dp": 8, "schedule": "gpipe"}, {}, "schedule='gpipe' does not exist"),
        ("megatron", "gemma-2-9b", {"dp": 8}, {}, "four norms"),
        ("megatron", "llama-3-8b", {"dp": 4, "pp": 2, "zero": 2}, {}, "zero=2 with pp=2"),
        ("megatron", "llama-3-8b", {"dp": 8}, {"recipe": "mixed-bf16"}, "trains in mixed-bf16-fp32-grads, megatron-fp16 or"),
        ("megatron", "deepseek-v3", {"dp": 2, "pp": 32}, {}, "pp=32 does not cut num_layers=61"),
        ("megatron", MOE, {"dp": 4, "tp": 2}, {"sequence_parallel": False}, "refuses to train it"),
        ("torchtitan", "llama-3-8b", {"dp": 8}, {"recipe": "mixed-bf16"}, "trains in fsdp2-mixed-fp32-reduce or fp32"),
        ("torchtitan", "qwen2-7b", {"dp": 8}, {}, "ships no qwen2-7b"),
        ("torchtitan", MOE, {"dp": 4, "tp": 2}, {}, "splits no expert over tp"),
        ("torchtitan", "llama-3.2-1b", {"dp": 4, "pp": 2}, {}, "pp=2 with the tied output of llama-3.2-1b"),
        ("torchtitan", MOE, {"dp": 8, "ep": 8}, {}, "ep=8 with zero=0"),
        ("torchtitan", "llama-3-8b", {"dp": 8}, {"attention": "plain"}, "attention='plain'"),
        ("accelerate", "llama-3-8b", {"dp": 4, "pp": 2}, {}, "pp=2: Accelerate has no such parallelism"),
        ("accelerate", MOE, {"dp": 8, "ep": 8}, {}, "ep=8: Accelerate has no such parallelism"),
        ("accelerate", "llama-3-8b", {"dp": 4, "tp": 2}, {}, "tp=2, cp=1 with zero=0"),
        ("accelerate", "llama-3-8b", {"dp": 4, "tp": 2, "zero": 3}, {}, "tp_plan keeps norms and the stream whole"),
        ("accelerate", "llama-3-8b", {"dp": 8, "recompute": "full"}, {}, "only FSDP has a key"),
        ("accelerate", "llama-3-8b", {"dp": 8}, {"recipe": "fsdp2-mixed"}, "DDP .zero=0.* trains in autocast-bf16"),
        ("accelerate", "llama-3-8b", {"dp": 8, "zero": 3}, {"recipe": "autocast-bf16"}, "FSDP2 trains in fsdp2-mixed"),
        ("accelerate", "gpt2", {"zero": 3}, {"seq": 1024}, "zero=3 on one GPU"),
        ("deepspeed", "llama-3-8b", {"dp": 3}, {}, "dp x micro_batch=3 does not divide global_batch=64"),
        ("deepspeed", "llama-3-8b", {"dp": 4, "pp": 2}, {}, "pp=2: DeepSpeed's pipelines are built in code"),
        ("deepspeed", "llama-3-8b", {"dp": 4, "cp": 2}, {}, "cp=2: .*Ulysses"),
        ("deepspeed", "llama-3-8b", {"dp": 4, "tp": 2, "zero": 3}, {}, "tp=2 with zero=3"),
        ("deepspeed", "llama-3-8b", {"dp": 4, "tp": 2}, {}, "sequence_parallel=True with tp=2"),
        ("accelerate", "llama-3-8b", {"dp": 4, "cp": 2, "zero": 3, "shard": 2}, {}, "shard=2 with cp=2"),
        ("deepspeed", "llama-3-8b", {"dp": 4, "zero": 3, "shard": 2}, {}, "shard=2: .* use torchtitan or accelerate"),
        ("megatron", "llama-3-8b", {"dp": 4, "zero": 1, "shard": 2}, {}, "shard=2: .* use torchtitan or accelerate"),
        ("deepspeed", "llama-3-8b", {"dp": 8, "recompute": "selective"}, {}, "whole blocks"),
        ("deepspeed", MOE, {"dp": 4, "tp": 2, "ep": 2}, {"sequence_parallel": False}, "ep=2 with tp=2"),
    ],
)  # fmt: skip
def test_what_a_framework_lacks_is_said(framework: str, model: str, layout: dict, more: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        export_layout(export_job(model, Layout(**layout), **{"seq": 8192, "global_batch": 64} | more), framework)


def test_replicas_of_shards_are_torchtitans_two_degrees() -> None:
    """Its ranks of cp are among those that share a copy, beside `data_parallel_shard_degree`."""
    job = export_job("llama-3-8b", Layout(dp=8, cp=2, zero=3, shard=8), seq=8192, global_batch=64)
    text = export_layout(job, "torchtitan")
    assert "data_parallel_replicate_degree=2," in text
    assert "data_parallel_shard_degree=4," in text


def test_the_help_names_every_framework():
    assert re.findall(r"\w+", FRAMEWORKS.replace(" or ", ", ")) == list(EXPORTERS)
