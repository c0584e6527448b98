"""The exporters by name, and what a plan counts whose winner goes to one: operators, dtypes, and what is refused.

| framework | implementation | dtypes | optimizer |
|---|---|---|---|
| accelerate | hf | FSDP2's policy; autocast where nothing is sharded | PyTorch's default, foreach |
| torchtitan | torchtitan | FSDP2's policy with fp32 reduction | fused |
| megatron | megatron | bf16 weights, gradients accumulated in fp32, as `--bf16` sets | fused (Apex's or Transformer Engine's) |
| deepspeed | hf | bf16 weights and gradients, fp32 master | fused |

Accelerate 1.15: `set_mixed_precision` of its FSDP plugin makes the policy, and `prepare_model` runs every model under
autocast.
torchtitan: torchtitan/distributed/fsdp.py and config. Megatron-LM: megatron/training/arguments.py, `validate_args`.
"""

from __future__ import annotations

from dataclasses import replace

from lablib.calc.errors import either, one_of
from lablib.calc.layouts.export.accelerate import ACCELERATE
from lablib.calc.layouts.export.deepspeed import DEEPSPEED
from lablib.calc.layouts.export.job import Exporter, ExportJob, export_job
from lablib.calc.layouts.export.megatron import MEGATRON
from lablib.calc.layouts.export.torchtitan import TORCHTITAN
from lablib.calc.layouts.planner import Counting, Layout
from lablib.calc.memory import find_implementation, resolve_model
from lablib.calc.models import ModelConfig

EXPORTERS: dict[str, Exporter] = {
    "torchtitan": TORCHTITAN,
    "megatron": MEGATRON,
    "deepspeed": DEEPSPEED,
    "accelerate": ACCELERATE,
}

#: Those whose file has a word for hybrid sharding here.
HYBRID = ("torchtitan", "accelerate")


def export_layout(job: ExportJob, framework: str) -> str:
    """Return the layout as text that the framework reads."""
    exporter = EXPORTERS[one_of("framework", framework, EXPORTERS)]
    if job.layout.shard and framework not in HYBRID:
        raise ValueError(
            f"shard={job.layout.shard}: the file for {framework} shards over all ranks; use {either(HYBRID)}, or leave it out"
        )
    return exporter.text(job)


COUNTED = {
    "accelerate": Counting(
        implementation="hf",
        recipe=EXPORTERS["accelerate"].recipe,
        replicas="autocast-bf16",
        sharding="fsdp2",
        cp_way="gathered",  # the default of `cp_comm_strategy` in its TorchContextParallelConfig
        not_counted=(
            "Accelerate returns logits as an fp32 copy, 4 bytes for each token and word, which lives through backward "
            "if the script keeps the model's output: keep its loss alone",
            "whole gradients between the micro-batches of a step, which Accelerate keeps under FSDP2 unless it is made "
            "with GradientAccumulationPlugin(num_steps=..., sync_each_batch=True)",
        ),
    ),
    # FSDP2's root has the ends here, and each is a unit of its own there: up to one table more than torchtitan gathers.
    "torchtitan": Counting(
        implementation="torchtitan", recipe=EXPORTERS["torchtitan"].recipe, sharding="fsdp2", step="fused"
    ),
    "megatron": Counting(implementation="megatron", recipe=EXPORTERS["megatron"].recipe, step="fused"),
    "deepspeed": Counting(implementation="hf", recipe=EXPORTERS["deepspeed"].recipe, step="fused"),
}


def counting_for(
    framework: str,
    model: ModelConfig | str,
    *,
    seq: int | None,
    global_batch: int,
    gpus_per_node: int | None = None,
    implementation: str | None = None,
    recipe: str | None = None,
    attention: str = "fused",
) -> Counting:
    """Return what a plan for a framework counts; it accepts the layouts that the framework's exporter does.

    Args:
        implementation: Whose operators are counted in place of the framework's, for what nobody has counted of it.
        recipe: Dtypes in place of the framework's own.

    Raises:
        ValueError: If the framework is unknown.
    """
    counted = COUNTED[one_of("framework", framework, COUNTED)]
    counted = replace(counted, implementation=implementation or counted.implementation)
    config = resolve_model(model)
    job = {
        "seq": config.max_positions if seq is None else seq, "global_batch": global_batch,
        "gpus_per_node": gpus_per_node or 8,
        "sequence_parallel": find_implementation(counted.implementation).splits_stream,
        "recipe": recipe, "attention": attention,
    }  # fmt: skip

    def accepts(layout: Layout) -> None:
        # Autocast runs beside FSDP2's policy. It changes nothing of an RMSNorm written out, and takes LayerNorm to fp32.
        if framework == "accelerate" and layout.zero and config.norm == "layernorm":
            raise ValueError(
                f"zero={layout.zero} with LayerNorm: under Accelerate autocast runs it in fp32 beside FSDP2's policy, "
                "which is not counted; use zero=0"
            )
        export_layout(export_job(config, layout, **job), framework)

    return replace(counted, framework=framework, accepts=accepts)
