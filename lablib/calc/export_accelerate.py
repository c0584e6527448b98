"""A layout as Accelerate's YAML file, and as DeepSpeed's JSON.

Accelerate runs DDP (zero=0) or FSDP2, with tensor and context parallelism in its `parallelism_config`. It has no
pipeline and no experts. The accumulation of micro-batches is an argument of `Accelerator` in the script, not a key.
DeepSpeed's file describes ZeRO alone; see `lablib.calc.deepspeed` for every key's reason.

Key names are those of Accelerate 1.15, `ClusterConfig` and `ParallelismConfig`.
"""

from __future__ import annotations

import json

from lablib.calc.deepspeed import as_json, settings
from lablib.calc.export_job import ExportJob

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
}


def accelerate_config(job: ExportJob) -> dict[str, object]:
    """Return the entries of the file.

    Raises:
        ValueError: If Accelerate cannot run the layout; it names what it lacks.
    """
    layout = job.layout
    for name, value in (("pp", layout.pp), ("ep", layout.ep)):
        if value > 1:
            raise ValueError(
                f"{name}={value}: Accelerate has no such parallelism; use torchtitan or Megatron-LM"
            )
    if layout.recompute == "selective":
        raise ValueError("recompute='selective': Accelerate checkpoints whole blocks; use 'full' or 'none'")
    sharded = layout.zero > 0
    if not sharded and layout.recompute == "full":
        raise ValueError(
            "recompute='full' with zero=0: only FSDP has a key for it; call gradient_checkpointing_enable() in the script"
        )
    if layout.tp * layout.cp > 1 and not sharded:
        raise ValueError(
            f"tp={layout.tp}, cp={layout.cp} with zero=0: Accelerate combines them with FSDP2; use zero=3"
        )
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
    """Return the file as text; accumulation and batch stand in its comments, since the script sets them.

    Raises:
        ValueError: As `accelerate_config`.
    """
    lines = [
        f"# In the script: Accelerator(gradient_accumulation_steps={job.accumulation}), and a loader with batch_size="
        f"{job.layout.micro_batch}:",
        f"# {job.layout.micro_batch} x {job.accumulation} x dp={job.layout.dp} = {job.global_batch} sequences a step.",
    ]
    if job.nodes > 1:
        lines.append(
            "# On every machine: its own machine_rank, and the address of the first for MASTER_ADDR."
        )
    for key, value in accelerate_config(job).items():
        if isinstance(value, dict):
            lines += [f"{key}:"] + [f"  {name}: {_value(inner)}" for name, inner in value.items()]
        else:
            lines.append(f"{key}: {_value(value)}")
    return "\n".join(lines) + "\n"


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
    found = settings(
        job.model,
        ranks=layout.dp,
        stage=layout.zero,
        micro_batch=layout.micro_batch,
        accumulation=job.accumulation,
        precision=job.dtype,
    )
    return json.dumps(as_json(found), indent=2) + "\n"


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
