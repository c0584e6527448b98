"""A layout as torchtitan's TOML file.

torchtitan shards data parallelism with FSDP2. Replicas (zero=0) are its `data_parallel_replicate_degree`. FSDP2 shards
weights, gradients and optimizer together; what it can choose is whether a gathered weight is freed after forward:
zero=3 does, zero=1 and 2 keep it until backward. Gradients are reduced in fp32.
With a pipeline, the local batch is what one replica runs in a step, cut into micro-batches. Without one it is the
micro-batch, and accumulation makes up the global batch.

Option names are those of torchtitan/config/job_config.py while it read TOML (2025); later versions moved to Python.
"""

from __future__ import annotations

from lablib.calc.export_job import ExportJob, torchrun
from lablib.calc.plan_layout import chunk_layers

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

Table = dict[str, object]


def torchtitan_config(job: ExportJob) -> dict[str, Table]:
    """Return the tables of the file.

    Raises:
        ValueError: If torchtitan does not ship the model, or trains in no such dtype.
    """
    layout = job.layout
    if job.model.name not in FLAVORS:
        raise ValueError(f"torchtitan ships no {job.model.name}; here it can train {', '.join(FLAVORS)}")
    if job.dtype != "bf16":
        raise ValueError(f"dtype={job.dtype!r}: torchtitan trains in bf16")
    if layout.tp > 1 and not job.sequence_parallel:
        raise ValueError(
            f"sequence_parallel=False with tp={layout.tp}: torchtitan always splits the stream over tp"
        )
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
    """Return the file as text, headed by the line that starts it.

    Raises:
        ValueError: As `torchtitan_config`.
    """
    lines = ["# " + torchrun(job, f"-m torchtitan.train --job.config_file {path}")]
    for table, entries in torchtitan_config(job).items():
        lines += ["", f"[{table}]"]
        lines += [f"{key} = {_value(value)}" for key, value in entries.items()]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
