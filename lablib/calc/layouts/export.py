"""A layout as the files of four frameworks: torchtitan, Megatron-LM, Accelerate and DeepSpeed.

    job = export_job("llama-3.1-405b", layout, gpus_per_node=8, seq=8192, global_batch=2048)
    print(export_layout(job, "megatron"))

What a framework cannot run is refused, and so is what would be another model without an error.

torchtitan (names of torchtitan/config/job_config.py while it read TOML, 2025) shards data parallelism with FSDP2;
replicas (zero=0) are its `data_parallel_replicate_degree`. zero=3 frees a gathered weight after forward, zero=1 and 2
keep it until backward. With a pipeline, the local batch is what one replica runs in a step, cut into micro-batches;
without one it is the micro-batch, and accumulation makes up the global batch.

Megatron-LM (names of megatron/training/arguments.py, core 0.12 and later) has the defaults of GPT-3: two-matrix GELU,
LayerNorm, biases, learned positions, tied output, and as many key heads as query heads. A Llama needs an argument for
each of these. `--sequence-parallel` and `--use-distributed-optimizer` are off by default too. Data and tokenizer are
left to the reader.

Accelerate (names of 1.15, `ClusterConfig` and `ParallelismConfig`) runs DDP (zero=0) or FSDP2 with tensor and context
parallelism. Accumulation is an argument of `Accelerator` in the script, not a key.

DeepSpeed's file describes ZeRO alone; `lablib.calc.parallel.deepspeed_settings` has the reason of every key.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike

from lablib.calc.errors import one_of
from lablib.calc.layouts.planner import Layout, check_layout, chunk_layers
from lablib.calc.memory import resolve_model
from lablib.calc.models import ModelConfig
from lablib.calc.parallel import as_deepspeed_json, deepspeed_settings


@dataclass(frozen=True)
class ExportJob:
    """A layout that was checked, and what it trains.

    Attributes:
        sequence_parallel: Whether tp splits norms and residuals too.
        dtype: "bf16" or "fp16".
    """

    model: ModelConfig
    layout: Layout
    seq: int
    global_batch: int
    gpus_per_node: int = 8
    sequence_parallel: bool = True
    dtype: str = "bf16"

    @property
    def nodes(self) -> int:
        """Nodes of the job."""
        return -(-self.layout.gpus // self.gpus_per_node)

    @property
    def per_node(self) -> int:
        """Processes to start on a node."""
        return min(self.gpus_per_node, self.layout.gpus)

    @property
    def accumulation(self) -> int:
        """Micro-batches of a replica in a step."""
        return self.layout.num_microbatches(self.global_batch)


def export_job(
    model: ModelConfig | str | PathLike,
    layout: Layout,
    *,
    seq: int,
    global_batch: int,
    gpus_per_node: int = 8,
    sequence_parallel: bool = True,
    dtype: str = "bf16",
) -> ExportJob:
    """Return a job whose factors were checked.

    Args:
        model: A ModelConfig, the name of a preset, or the path of a config.json.
        sequence_parallel: Whether tp splits norms and residuals too.
        dtype: "bf16" or "fp16".
    """
    config = resolve_model(model)
    check_layout(
        layout, config, gpus=layout.gpus, seq=seq, global_batch=global_batch, sequence_parallel=sequence_parallel
    )
    if gpus_per_node < 1 or (layout.gpus > gpus_per_node and layout.gpus % gpus_per_node):
        raise ValueError(f"{layout.gpus} ranks are not whole nodes of gpus_per_node={gpus_per_node}")
    if dtype not in ("bf16", "fp16"):
        raise ValueError(f"dtype={dtype!r} must be 'bf16' or 'fp16'")
    return ExportJob(config, layout, seq, global_batch, gpus_per_node, sequence_parallel, dtype)


def torchrun(job: ExportJob, script: str) -> str:
    """Return the line that starts a job on every node; it reads MASTER_ADDR and JOB_ID from the shell."""
    if job.nodes == 1:
        return f"torchrun --standalone --nproc-per-node={job.per_node} {script}"
    return (
        f"torchrun --nnodes={job.nodes} --nproc-per-node={job.per_node} --rdzv-backend=c10d "
        f'--rdzv-endpoint="$MASTER_ADDR:29500" --rdzv-id="$JOB_ID" {script}'
    )


Table = dict[str, object]


#: Preset to (name, flavor) of the models that torchtitan ships.
FLAVORS = {
    "llama-3-8b": ("llama3", "8B"),
    "llama-3.1-8b": ("llama3", "8B"),
    "llama-3-70b": ("llama3", "70B"),
    "llama-3.1-70b": ("llama3", "70B"),
    "llama-3.1-405b": ("llama3", "405B"),
    "deepseek-v3": ("deepseek_v3", "671B"),
}


SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}


def torchtitan_config(job: ExportJob) -> dict[str, Table]:
    """Return the tables of torchtitan's file.

    Raises:
        ValueError: If torchtitan does not ship the model, or trains in no such dtype.
    """
    layout = job.layout
    if job.model.name not in FLAVORS:
        raise ValueError(f"torchtitan ships no {job.model.name}; here it can train {', '.join(FLAVORS)}")
    if job.dtype != "bf16":
        raise ValueError(f"dtype={job.dtype!r}: torchtitan trains in bf16")
    if layout.tp > 1 and not job.sequence_parallel:
        raise ValueError(f"sequence_parallel=False with tp={layout.tp}: torchtitan always splits the stream over tp")
    name, flavor = FLAVORS[job.model.name]
    replicated = layout.zero == 0
    parallelism: Table = {
        "data_parallel_replicate_degree": layout.dp if replicated else 1,
        "data_parallel_shard_degree": 1 if replicated else layout.dp,
        "fsdp_reshard_after_forward": "always" if layout.zero == 3 else "never",
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
        "expert_parallel_degree": layout.ep,
    }
    local = job.global_batch // layout.dp if layout.pp > 1 else layout.micro_batch
    if layout.pp > 1:
        _, middle, _ = chunk_layers(job.model.num_layers, layout.pp, layout.virtual_stages)
        parallelism |= {
            "pipeline_parallel_schedule": SCHEDULES[layout.schedule],
            "pipeline_parallel_microbatch_size": layout.micro_batch,
            "pipeline_parallel_layers_per_stage": middle,
        }
    checkpointing: Table = {"mode": layout.recompute}
    if layout.recompute == "selective":
        checkpointing["selective_ac_option"] = "op"
    return {
        "model": {"name": name, "flavor": flavor},
        "training": {
            "local_batch_size": local,
            "global_batch_size": job.global_batch,
            "seq_len": job.seq,
            "mixed_precision_param": "bfloat16",
            "mixed_precision_reduce": "float32",
        },
        "parallelism": parallelism,
        "activation_checkpoint": checkpointing,
    }


def torchtitan_toml(job: ExportJob, *, path: str = "layout.toml") -> str:
    """Return torchtitan's file as text, headed by the line that starts it."""
    lines = ["# " + torchrun(job, f"-m torchtitan.train --job.config_file {path}")]
    for table, entries in torchtitan_config(job).items():
        lines += ["", f"[{table}]"]
        lines += [f"{key} = {_toml_value(value)}" for key, value in entries.items()]
    return "\n".join(lines) + "\n"


def _toml_value(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


SHARDING = {1: "optim", 2: "optim_grads", 3: "optim_grads_params"}


def megatron_arguments(job: ExportJob) -> list[str]:
    """Return Megatron-LM's arguments, one string each: "--name" or "--name value".

    Raises:
        ValueError: If Megatron-LM cannot run the layout: GPipe, ZeRO 2 or 3 with a pipeline, or a family that it
            has no switches for.
    """
    layout = job.layout
    if layout.schedule == "gpipe":
        raise ValueError("schedule='gpipe' does not exist in Megatron-LM; use '1f1b' or 'interleaved'")
    if layout.zero > 1 and layout.pp > 1:
        raise ValueError(
            f"zero={layout.zero} with pp={layout.pp}: Megatron-LM shards the optimizer (zero=1) beside a pipeline, and "
            "gradients and weights only with its FSDP, without one"
        )
    if job.model.family not in MEGATRON:
        why = " for its four norms a layer" if job.model.norms_per_layer == 4 else ", as far as this course knows them"
        raise ValueError(f"family {job.model.family!r}: pretrain_gpt.py has no switches{why}")
    return [*_model_arguments(job.model, job.seq), *_degree_arguments(job), *_memory_arguments(job)]


#: Families whose blocks `_model_arguments` can say.
MEGATRON = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3-moe", "deepseek-v3")


def megatron_script(job: ExportJob) -> str:
    """Return a shell command: torchrun, the script, and one argument a line."""
    arguments = " \\\n    ".join(megatron_arguments(job))
    return torchrun(job, "pretrain_gpt.py \\\n    " + arguments) + ' \\\n    "$@"  # data and tokenizer\n'


def _model_arguments(model: ModelConfig, seq: int) -> list[str]:
    found = [
        f"--num-layers {model.num_layers}",
        f"--hidden-size {model.hidden}",
        f"--ffn-hidden-size {model.ffn}",
        f"--num-attention-heads {model.num_heads}",
        f"--seq-length {seq}",
        f"--max-position-embeddings {max(seq, model.max_positions)}",
    ]
    if model.num_kv_heads != model.num_heads:
        found += ["--group-query-attention", f"--num-query-groups {model.num_kv_heads}"]
    if model.head_dim * model.num_heads != model.hidden and not model.is_mla:
        found.append(f"--kv-channels {model.head_dim}")
    if not model.learned_positions:
        found.append("--position-embedding-type rope")
    if model.gated_mlp:
        found.append("--swiglu")
    if model.norm == "rmsnorm":
        found.append("--normalization RMSNorm")
    if not (model.mlp_bias or model.attn_out_bias):
        found.append("--disable-bias-linear")
        if model.qkv_bias:
            found.append("--add-qkv-bias")
    if model.qk_norm:
        found.append("--qk-layernorm")
    if not model.tied:
        found.append("--untie-embeddings-and-output-weights")
    if model.family != "gpt2":
        found += ["--attention-dropout 0", "--hidden-dropout 0"]
    return found + _expert_arguments(model) + _latent_arguments(model)


def _expert_arguments(model: ModelConfig) -> list[str]:
    if not model.is_moe:
        return []
    found = [
        f"--num-experts {model.num_experts}",
        f"--moe-router-topk {model.experts_per_token}",
        f"--moe-ffn-hidden-size {model.expert_ffn}",
        "--moe-grouped-gemm",
        "--moe-token-dispatcher-type alltoall",
    ]
    if model.num_shared_experts:
        found.append(f"--moe-shared-expert-intermediate-size {model.num_shared_experts * model.expert_ffn}")
    if model.num_dense_layers:
        sparse = model.num_layers - model.num_dense_layers
        found.append(f'--moe-layer-freq "([0]*{model.num_dense_layers}+[1]*{sparse})"')
    return found


def _latent_arguments(model: ModelConfig) -> list[str]:
    if not model.is_mla:
        return []
    query = [f"--q-lora-rank {model.q_lora_rank}"] if model.q_lora_rank else []
    return [
        "--multi-latent-attention",
        *query,
        f"--kv-lora-rank {model.kv_lora_rank}",
        f"--qk-head-dim {model.qk_nope_head_dim}",
        f"--qk-pos-emb-head-dim {model.qk_rope_head_dim}",
        f"--v-head-dim {model.v_head_dim}",
    ]


def _degree_arguments(job: ExportJob) -> list[str]:
    layout = job.layout
    found = [
        f"--tensor-model-parallel-size {layout.tp}",
        f"--pipeline-model-parallel-size {layout.pp}",
        f"--context-parallel-size {layout.cp}",
        f"--micro-batch-size {layout.micro_batch}",
        f"--global-batch-size {job.global_batch}",
        f"--{job.dtype}",
    ]
    if layout.ep > 1:
        found.append(f"--expert-model-parallel-size {layout.ep}")
    if layout.tp > 1 and job.sequence_parallel:
        found.append("--sequence-parallel")
    if layout.virtual_stages > 1:
        found.append(f"--num-virtual-stages-per-pipeline-rank {layout.virtual_stages}")
    first, middle, last = chunk_layers(job.model.num_layers, layout.pp, layout.virtual_stages)
    if (first, last) == (middle - 1, middle - 1):
        found += ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
    elif first != middle or last != middle:
        found += [f"--decoder-first-pipeline-num-layers {first}", f"--decoder-last-pipeline-num-layers {last}"]
    return found


def _memory_arguments(job: ExportJob) -> list[str]:
    layout, found = job.layout, []
    if layout.zero:
        found += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    if layout.zero > 1:
        found += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {SHARDING[layout.zero]}"]
    if layout.recompute == "selective":
        found.append("--recompute-activations")
    if layout.recompute == "full":
        found += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    return found


#: Class of a block in transformers, by family.
BLOCKS = {
    "gpt2": "GPT2Block",
    "llama": "LlamaDecoderLayer",
    "mistral": "MistralDecoderLayer",
    "mixtral": "MixtralDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "qwen3-moe": "Qwen3MoeDecoderLayer",
    "gemma2": "Gemma2DecoderLayer",
    "gemma3": "Gemma3DecoderLayer",
    "deepseek-v3": "DeepseekV3DecoderLayer",
    "gemma": "GemmaDecoderLayer",
    "olmo2": "Olmo2DecoderLayer",
    "phi3": "Phi3DecoderLayer",
    "glm4": "Glm4DecoderLayer",
    "starcoder2": "Starcoder2DecoderLayer",
    "gpt-neox": "GPTNeoXLayer",
    "falcon": "FalconDecoderLayer",
    "cohere": "CohereDecoderLayer",
    "cohere2": "Cohere2DecoderLayer",
    "gpt-oss": "GptOssDecoderLayer",
    "deepseek-v2": "DeepseekV2DecoderLayer",
}


def accelerate_config(job: ExportJob) -> dict[str, object]:
    """Return the entries of Accelerate's file.

    Raises:
        ValueError: If Accelerate cannot run the layout; it names what it lacks.
    """
    layout = job.layout
    for name, value in (("pp", layout.pp), ("ep", layout.ep)):
        if value > 1:
            raise ValueError(f"{name}={value}: Accelerate has no such parallelism; use torchtitan or Megatron-LM")
    if layout.recompute == "selective":
        raise ValueError("recompute='selective': Accelerate checkpoints whole blocks; use 'full' or 'none'")
    sharded = layout.zero > 0
    if not sharded and layout.recompute == "full":
        raise ValueError(
            "recompute='full' with zero=0: only FSDP has a key for it; call gradient_checkpointing_enable() in the script"
        )
    if layout.tp * layout.cp > 1 and not sharded:
        raise ValueError(f"tp={layout.tp}, cp={layout.cp} with zero=0: Accelerate combines them with FSDP2; use zero=3")
    found: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if sharded else "MULTI_GPU" if layout.gpus > 1 else "NO",
        "num_machines": job.nodes,
        "machine_rank": 0,
        "num_processes": layout.gpus,
        "mixed_precision": job.dtype,
    }
    if job.nodes > 1:
        found |= {"rdzv_backend": "c10d", "main_process_ip": "MASTER_ADDR", "main_process_port": 29500}
    if sharded:
        found["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": BLOCKS[job.model.family],
            "fsdp_reshard_after_forward": layout.zero == 3,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_offload_params": False,
            "fsdp_activation_checkpointing": layout.recompute == "full",
        }
    if layout.tp * layout.cp > 1:
        found["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": 1,
            "parallelism_config_dp_shard_size": layout.dp,
            "parallelism_config_tp_size": layout.tp,
            "parallelism_config_cp_size": layout.cp,
        }
    return found


def accelerate_yaml(job: ExportJob) -> str:
    """Return Accelerate's file as text; accumulation and batch stand in its comments, since the script sets them."""
    lines = [
        f"# In the script: Accelerator(gradient_accumulation_steps={job.accumulation}), and a loader with batch_size="
        f"{job.layout.micro_batch}:",
        f"# {job.layout.micro_batch} x {job.accumulation} x dp={job.layout.dp} = {job.global_batch} sequences a step.",
    ]
    if job.nodes > 1:
        lines.append("# On every machine: its own machine_rank, and the address of the first for MASTER_ADDR.")
    for key, value in accelerate_config(job).items():
        if isinstance(value, dict):
            lines += [f"{key}:"] + [f"  {name}: {_yaml_value(inner)}" for name, inner in value.items()]
        else:
            lines.append(f"{key}: {_yaml_value(value)}")
    return "\n".join(lines) + "\n"


def _yaml_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def deepspeed_json(job: ExportJob) -> str:
    """Return DeepSpeed's configuration as text.

    Raises:
        ValueError: If the layout has more than data parallelism, which this file cannot say.
    """
    layout = job.layout
    others = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "ep": layout.ep}
    for name, value in others.items():
        if value > 1:
            raise ValueError(
                f"{name}={value}: DeepSpeed's file describes ZeRO over data-parallel ranks only; use torchtitan or "
                "Megatron-LM"
            )
    found = deepspeed_settings(
        job.model,
        ranks=layout.dp,
        stage=layout.zero,
        micro_batch=layout.micro_batch,
        accumulation=job.accumulation,
        precision=job.dtype,
    )
    return json.dumps(as_deepspeed_json(found), indent=2) + "\n"


EXPORTERS: dict[str, Callable[[ExportJob], str]] = {
    "torchtitan": torchtitan_toml,
    "megatron": megatron_script,
    "deepspeed": deepspeed_json,
    "accelerate": accelerate_yaml,
}


def export_layout(job: ExportJob, framework: str) -> str:
    """Return the layout as text that the framework reads.

    Args:
        framework: One of `EXPORTERS`.
    """
    return EXPORTERS[one_of("framework", framework, EXPORTERS)](job)
