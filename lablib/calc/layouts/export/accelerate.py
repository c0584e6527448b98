"""A layout as Accelerate's YAML (names of `ClusterConfig` and `ParallelismConfig`): DDP, or FSDP2 with tp and cp.

Mixed precision is two things here. FSDP2 keeps fp32 shards, and gathers and reduces in bf16. DDP (zero=0) runs under
autocast, which keeps a cast copy of every weight. Tensor parallelism is transformers' `tp_plan`, which splits products
and not the stream between them. Accumulation is an argument of `Accelerator` in the script, not a key.
"""

from __future__ import annotations

from lablib.calc.layouts.export.job import Exporter, ExportJob, counted

PROVEN = "accelerate 1.15.0"

#: `mixed_precision` by recipe, with shards and with replicas.
SHARDED = {"fsdp2-mixed": "bf16", "fp32": "no", "pure-bf16": "no"}
REPLICATED = {"autocast-bf16": "bf16", "autocast-fp16": "fp16", "fp32": "no", "pure-bf16": "no"}

#: Class of a block in transformers, by family.
BLOCKS = {
    "gpt2": "GPT2Block",
    "llama": "LlamaDecoderLayer",
    "mistral": "MistralDecoderLayer",
    "mixtral": "MixtralDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "qwen3-moe": "Qwen3MoeDecoderLayer",
    "gemma": "GemmaDecoderLayer",
    "gemma2": "Gemma2DecoderLayer",
    "gemma3": "Gemma3DecoderLayer",
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
    "deepseek-v3": "DeepseekV3DecoderLayer",
}


def accelerate_config(job: ExportJob) -> dict[str, object]:
    """Return the entries of Accelerate's file.

    Raises:
        ValueError: If Accelerate cannot run the layout; it names what it lacks.
    """
    _refuse(job)
    layout = job.layout
    sharded = layout.zero > 0
    found: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if sharded else "MULTI_GPU" if layout.gpus > 1 else "NO",
        "num_machines": job.nodes,
        "machine_rank": 0,
        "num_processes": layout.gpus,
        "mixed_precision": (SHARDED if sharded else REPLICATED)[_recipe(job)],
    }
    if job.nodes > 1:
        found |= {"rdzv_backend": "c10d", "main_process_ip": "MASTER_ADDR", "main_process_port": 29500}
    if sharded:
        if job.model.family not in BLOCKS:
            raise ValueError(f"family {job.model.family!r}: its block's class is not known here")
        found["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": BLOCKS[job.model.family],
            "fsdp_reshard_after_forward": layout.zero == 3,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_offload_params": False,
            "fsdp_activation_checkpointing": layout.recompute == "full",
        }
    if layout.tp * layout.cp > 1 or layout.shard:
        found["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": layout.dp * layout.cp // layout.shards,
            "parallelism_config_dp_shard_size": layout.shards // layout.cp,
            "parallelism_config_tp_size": layout.tp,
            "parallelism_config_cp_size": layout.cp,
        }
    return found


def _recipe(job: ExportJob) -> str:
    if job.layout.zero:
        return job.dtypes("Accelerate's FSDP2", SHARDED)
    return job.dtypes("Accelerate's DDP (zero=0; shards are zero=1, 2 and 3)", REPLICATED)


def _refuse(job: ExportJob) -> None:
    layout = job.layout
    for name, value in (("pp", layout.pp), ("ep", layout.ep)):
        if value > 1:
            raise ValueError(f"{name}={value}: Accelerate has no such parallelism; use torchtitan or Megatron-LM")
    job.require_fused("Accelerate")
    if layout.gpus == 1 and layout.zero:
        raise ValueError(f"zero={layout.zero} on one GPU: Accelerate shards over at least two processes; use zero=0")
    if layout.recompute == "selective":
        raise ValueError("recompute='selective': Accelerate checkpoints whole blocks; use 'full' or 'none'")
    if layout.zero == 0 and layout.recompute == "full":
        raise ValueError(
            "recompute='full' with zero=0: only FSDP has a key for it; call gradient_checkpointing_enable() in the script"
        )
    if layout.tp * layout.cp > 1 and layout.zero == 0:
        raise ValueError(f"tp={layout.tp}, cp={layout.cp} with zero=0: Accelerate combines them with FSDP2; use zero=3")
    if layout.shard == layout.cp:
        raise ValueError(
            f"shard={layout.shard} with cp={layout.cp}: beside replicas Accelerate wants dp_shard_size above 1; use more"
        )
    if layout.tp > 1 and job.sequence_parallel:
        raise ValueError(
            f"sequence_parallel=True with tp={layout.tp}: transformers' tp_plan keeps norms and the stream whole on every "
            "rank; use sequence_parallel=False (--no-sequence-parallel), or torchtitan or Megatron-LM"
        )


def accelerate_yaml(job: ExportJob) -> str:
    """Return Accelerate's file as text; accumulation and batch stand in its comments, since the script sets them."""
    layout, entries, recipe = job.layout, accelerate_config(job), _recipe(job)
    # Between the micro-batches of a step FSDP2 would keep whole gradients, which are not counted, unless it is told.
    how = f"gradient_accumulation_steps={job.accumulation}"
    if layout.zero and job.accumulation > 1:
        plugin = f"num_steps={job.accumulation}, sync_each_batch=True"
        how = f"gradient_accumulation_plugin=GradientAccumulationPlugin({plugin})"
    lines = [
        f"# {counted(job, recipe)}.",
        f"# Read by the parser of {PROVEN}.",
        f"# In the script: Accelerator({how}), a loader with batch_size={layout.micro_batch}, and sequences of "
        f"{job.seq} tokens.",
    ]
    if recipe == "pure-bf16":
        lines.append("# In the script: from_pretrained(..., dtype=torch.bfloat16); the file has no key for it.")
    if layout.zero in (1, 2):
        lines.append(
            f"# zero={layout.zero}: FSDP2 that keeps gathered weights until backward; it shards gradients with both."
        )
    if job.nodes > 1:
        lines.append("# On every machine: its own machine_rank, and the address of the first for MASTER_ADDR.")
    for key, value in entries.items():
        if isinstance(value, dict):
            lines += [f"{key}:"] + [f"  {name}: {_yaml_value(inner)}" for name, inner in value.items()]
        else:
            lines.append(f"{key}: {_yaml_value(value)}")
    return "\n".join(lines) + "\n"


def _yaml_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}'" if value == "no" else str(value)  # YAML reads a bare no as false


ACCELERATE = Exporter(accelerate_yaml, next(iter(SHARDED)), PROVEN, "accelerate.yaml")
