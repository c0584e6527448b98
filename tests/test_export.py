"""The exporters: parsed by the real packages where they are installed, else against documented option names."""

from __future__ import annotations

import importlib.util
import json
import shlex
import tomllib
from pathlib import Path

import pytest

from lablib.calc.layouts import export_job, export_layout
from lablib.calc.layouts.export import (
    EXPORTERS,
    ExportJob,
    accelerate_yaml,
    deepspeed_json,
    megatron_arguments,
    megatron_script,
    torchtitan_config,
    torchtitan_toml,
)
from lablib.calc.layouts.planner import WORKED_EXAMPLES, Layout
from lablib.calc.models import ModelConfig, preset
from lablib.calc.params import count_params

#: Options of torchtitan/config/job_config.py (2025) that the exporter may use, and the values of those with a list.
TORCHTITAN = {
    "model": {"name", "flavor"},
    "training": {
        "local_batch_size", "global_batch_size", "seq_len", "mixed_precision_param", "mixed_precision_reduce",
    },
    "parallelism": {
        "data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward",
        "tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree", "expert_parallel_degree",
        "pipeline_parallel_schedule", "pipeline_parallel_microbatch_size", "pipeline_parallel_layers_per_stage",
    },
    "activation_checkpoint": {"mode", "selective_ac_option"},
}  # fmt: skip

#: Options of Megatron-LM's megatron/training/arguments.py that the exporter may use.
MEGATRON = {
    "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "seq-length", "max-position-embeddings",
    "group-query-attention", "num-query-groups", "kv-channels", "position-embedding-type", "swiglu",
    "normalization", "disable-bias-linear", "add-qkv-bias", "qk-layernorm", "untie-embeddings-and-output-weights",
    "attention-dropout", "hidden-dropout", "num-experts", "moe-router-topk", "moe-ffn-hidden-size",
    "moe-grouped-gemm", "moe-token-dispatcher-type", "moe-shared-expert-intermediate-size", "moe-layer-freq",
    "multi-latent-attention", "q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim",
    "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size", "micro-batch-size",
    "global-batch-size", "bf16", "fp16", "expert-model-parallel-size", "sequence-parallel",
    "num-virtual-stages-per-pipeline-rank", "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split", "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers",
    "use-distributed-optimizer", "overlap-grad-reduce", "overlap-param-gather", "use-megatron-fsdp",
    "data-parallel-sharding-strategy", "recompute-activations", "recompute-granularity", "recompute-method",
    "recompute-num-layers",
}  # fmt: skip

LLAMA3 = Layout(tp=8, pp=16, dp=128, zero=1, schedule="interleaved", virtual_stages=8)


def llama3() -> ExportJob:
    return export_job("llama-3.1-405b", LLAMA3, seq=8192, global_batch=2048)


def options(arguments: list[str]) -> dict[str, str]:
    """Arguments as Megatron-LM's parser would see them: name to value, "" for a switch."""
    found: dict[str, str] = {}
    for argument in arguments:
        name, *value = shlex.split(argument)
        assert name.startswith("--")
        assert name[2:] not in found
        found[name[2:]] = value[0] if value else ""
        assert len(value) <= 1
    return found


def model_of(found: dict[str, str], vocab: int) -> ModelConfig:
    """The model that Megatron-LM would build of these options, by its own defaults: GPT-3's shape."""
    heads = int(found["num-attention-heads"])
    bias = "disable-bias-linear" not in found
    moe = "num-experts" in found
    frequency = eval(found["moe-layer-freq"]) if "moe-layer-freq" in found else []
    shared = int(found.get("moe-shared-expert-intermediate-size", 0))
    return ModelConfig(
        num_layers=int(found["num-layers"]),
        hidden=int(found["hidden-size"]),
        num_heads=heads,
        num_kv_heads=int(found["num-query-groups"]) if "group-query-attention" in found else heads,
        head_dim=0 if "multi-latent-attention" in found else int(found.get("kv-channels", 0)),
        ffn=int(found["ffn-hidden-size"]),
        vocab=vocab,
        max_positions=int(found["max-position-embeddings"]),
        learned_positions=found.get("position-embedding-type") != "rope",
        tied="untie-embeddings-and-output-weights" not in found,
        norm="rmsnorm" if found.get("normalization") == "RMSNorm" else "layernorm",
        gated_mlp="swiglu" in found,
        qkv_bias=bias or "add-qkv-bias" in found,
        attn_out_bias=bias,
        mlp_bias=bias,
        qk_norm="qk-layernorm" in found,
        num_experts=int(found.get("num-experts", 0)),
        experts_per_token=int(found.get("moe-router-topk", 0)),
        expert_ffn=int(found.get("moe-ffn-hidden-size", 0)),
        num_shared_experts=shared // int(found["moe-ffn-hidden-size"]) if moe else 0,
        num_dense_layers=frequency.count(0),
        q_lora_rank=int(found.get("q-lora-rank", 0)),
        kv_lora_rank=int(found.get("kv-lora-rank", 0)),
        qk_nope_head_dim=int(found.get("qk-head-dim", 0)),
        qk_rope_head_dim=int(found.get("qk-pos-emb-head-dim", 0)),
        v_head_dim=int(found.get("v-head-dim", 0)),
    )


@pytest.mark.parametrize(
    "name",
    ["gpt3-175b", "llama-2-13b", "llama-3-70b", "llama-3.2-1b", "qwen2-7b", "qwen3-8b", "qwen3-0.6b",
     "mixtral-8x7b", "deepseek-v3"],
)  # fmt: skip
def test_megatron_builds_the_same_model_to_the_last_parameter(name: str) -> None:
    model = preset(name)
    job = export_job(model, Layout(dp=8, zero=1), seq=1024, global_batch=64)
    found = options(megatron_arguments(job))
    assert set(found) <= MEGATRON
    assert count_params(model_of(found, model.vocab)).total == count_params(model).total


def test_megatron_runs_llama_3s_layout() -> None:
    found = options(megatron_arguments(llama3()))
    assert {name: found[name] for name in found if "parallel-size" in name} == {
        "tensor-model-parallel-size": "8",
        "pipeline-model-parallel-size": "16",
        "context-parallel-size": "1",
    }
    for switch in ("sequence-parallel", "use-distributed-optimizer", "swiglu", "group-query-attention", "bf16"):
        assert found[switch] == ""
    # 126 layers and the two ends over 16 x 8 chunks: one layer each.
    assert found["num-virtual-stages-per-pipeline-rank"] == "8"
    assert {"account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"} <= set(found)
    text = megatron_script(llama3())
    assert text.startswith("torchrun --nnodes=2048 --nproc-per-node=8 ")
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    assert words[-1] == "$@"
    assert "pretrain_gpt.py" in words


def test_megatron_runs_deepseek_v3s_layout() -> None:
    layout = Layout(pp=16, dp=128, ep=64, zero=1, recompute="full")
    found = options(megatron_arguments(export_job("deepseek-v3", layout, seq=4096, global_batch=15360)))
    assert (found["expert-model-parallel-size"], found["pipeline-model-parallel-size"]) == ("64", "16")
    first, last = (int(found[f"decoder-{end}-pipeline-num-layers"]) for end in ("first", "last"))
    assert (61 - first - last) % 14 == 0
    assert found["recompute-granularity"] == "full"
    assert "sequence-parallel" not in found


@pytest.mark.parametrize("name", list(WORKED_EXAMPLES))
def test_published_layouts_run_in_both_frameworks(name: str) -> None:
    layout, job = WORKED_EXAMPLES[name]
    exported = export_job(name, layout, **job)
    degrees = torchtitan_config(exported)["parallelism"]
    assert degrees["pipeline_parallel_degree"] == 16
    assert degrees["expert_parallel_degree"] == layout.ep
    assert f"--nnodes={layout.gpus // 8} " in megatron_script(exported)


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [(Layout(dp=8, zero=2), "optim_grads"), (Layout(dp=8, zero=3, recompute="selective"), "optim_grads_params")],
)
def test_megatrons_own_fsdp(layout: Layout, strategy: str) -> None:
    found = options(megatron_arguments(export_job("llama-3-8b", layout, seq=8192, global_batch=64)))
    assert found["data-parallel-sharding-strategy"] == strategy
    assert ("recompute-activations" in found) == (layout.recompute == "selective")


def test_torchtitan_runs_llama_3s_layout() -> None:
    text = torchtitan_toml(llama3(), path="run.toml")
    read = tomllib.loads(text)
    assert read == torchtitan_config(llama3())
    for table, entries in read.items():
        assert set(entries) <= TORCHTITAN[table]
    degrees = read["parallelism"]
    product = 1
    for name in ("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree",
                 "context_parallel_degree", "pipeline_parallel_degree"):  # fmt: skip
        product *= degrees[name]
    assert product == 16384
    assert degrees["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert degrees["pipeline_parallel_layers_per_stage"] == 1
    assert read["training"]["local_batch_size"] * 128 == read["training"]["global_batch_size"] == 2048
    assert text.startswith("# torchrun --nnodes=2048")
    assert "--job.config_file run.toml" in text.splitlines()[0]


@pytest.mark.parametrize(("zero", "shard", "reshard"), [(0, 1, "never"), (2, 8, "never"), (3, 8, "always")])
def test_torchtitan_shards_as_asked(zero: int, shard: int, reshard: str) -> None:
    job = export_job(
        "llama-3-8b", Layout(dp=8, zero=zero, micro_batch=2, recompute="selective"), seq=8192, global_batch=64
    )
    read = torchtitan_config(job)
    assert read["parallelism"]["data_parallel_shard_degree"] == shard
    assert read["parallelism"]["data_parallel_replicate_degree"] == 8 // shard
    assert read["parallelism"]["fsdp_reshard_after_forward"] == reshard
    assert read["training"]["local_batch_size"] == 2  # accumulation makes up the rest
    assert read["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "op"}


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (Layout(dp=16), "MULTI_GPU"),
        (Layout(dp=16, zero=3, recompute="full"), "FSDP"),
        (Layout(dp=4, tp=2, cp=2, zero=2, micro_batch=2), "FSDP"),
    ],
)
def test_accelerate_reads_its_file(layout: Layout, kind: str, tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
    from accelerate.commands.launch import launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig

    job = export_job("llama-3-8b", layout, seq=8192, global_batch=64)
    file = tmp_path / "accelerate.yaml"
    file.write_text(accelerate_yaml(job))
    read = load_config_from_file(str(file))  # refuses unknown keys at the top
    assert isinstance(read, ClusterConfig)
    assert (read.distributed_type.value, read.num_processes, read.num_machines) == (kind, 16, 2)
    assert read.mixed_precision == "bf16"
    launch = {action.dest for action in launch_command_parser()._actions}
    for block in (read.fsdp_config, read.parallelism_config):
        assert set(block or {}) <= launch  # every key of a block is an option of `accelerate launch`
    if kind == "FSDP":
        assert read.fsdp_config["fsdp_reshard_after_forward"] is (layout.zero == 3)
        assert read.fsdp_config["fsdp_activation_checkpointing"] is (layout.recompute == "full")
    sizes = {name.removeprefix("parallelism_config_"): size for name, size in (read.parallelism_config or {}).items()}
    if sizes:
        assert ParallelismConfig(**sizes).total_size == 16


def test_deepspeed_reads_its_file() -> None:
    job = export_job("llama-3-8b", Layout(dp=8, zero=3, micro_batch=2), seq=8192, global_batch=64)
    read = json.loads(deepspeed_json(job))
    assert (read["train_batch_size"], read["train_micro_batch_size_per_gpu"]) == (64, 2)
    assert (read["gradient_accumulation_steps"], read["zero_optimization"]["stage"]) == (4, 3)
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed (it is an extra): its own parser did not read the file")
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = DeepSpeedZeroConfig(**read["zero_optimization"])
    assert int(config.stage) == 3


def test_every_exporter_is_behind_the_door() -> None:
    job = export_job("llama-3-8b", Layout(dp=8, zero=2), seq=8192, global_batch=64)
    for framework in EXPORTERS:
        text = export_layout(job, framework)
        assert text.endswith("\n")
        assert len(text) > 300
    with pytest.raises(ValueError, match="unknown framework 'fairscale'"):
        export_layout(job, "fairscale")


@pytest.mark.parametrize(
    ("framework", "model", "layout", "more", "message"),
    [("megatron", "llama-3-8b", {"dp": 8, "schedule": "gpipe"}, {}, "schedule='gpipe' does not exist"), ("megatron", "gemma-2-9b", {"dp": 8}, {}, "four norms"), ("megatron", "gemma-7b", {"dp": 8}, {}, "family 'gemma': pretrain_gpt.py has no switches"), ("torchtitan", "llama-3-8b", {"dp": 8}, {"dtype": "fp16"}, "trains in bf16"), ("accelerate", "llama-3-8b", {"dp": 4, "pp": 2}, {}, "pp=2: Accelerate has no such parallelism"), ("accelerate", "llama-3-8b", {"dp": 4, "tp": 2}, {}, "tp=2, cp=1 with zero=0"), ("accelerate", "llama-3-8b", {"dp": 8, "recompute": "full"}, {}, "only FSDP has a key"), ("deepspeed", "llama-3-8b", {"dp": 3}, {}, "dp x micro_batch=3 does not divide global_batch=64"), ("deepspeed", "llama-3-8b", {"dp": 8}, {"dtype": "fp8"}, "dtype='fp8' must be"),],
)  # fmt: skip
def test_what_a_framework_lacks_is_said(framework: str, model: str, layout: dict, more: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        export_layout(export_job(model, Layout(**layout), seq=8192, global_batch=64, **more), framework)
