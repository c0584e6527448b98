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

import json
import re
from dataclasses import replace
from itertools import chain, islice
from typing import NamedTuple

from lablib.calc.errors import either, one_of
from lablib.calc.layouts.export.accelerate import ACCELERATE
from lablib.calc.layouts.export.deepspeed import DEEPSPEED
from lablib.calc.layouts.export.job import Exporter, ExportJob, export_job
from lablib.calc.layouts.export.megatron import MEGATRON
from lablib.calc.layouts.export.torchtitan import TORCHTITAN
from lablib.calc.layouts.planner import Candidate, Counting, Layout, Plan, missing_units, plan
from lablib.calc.memory import find_implementation, resolve_model
from lablib.calc.models import ModelConfig

#: How many times the step of the plan by itself a file may take; beyond, it is another plan, and refused.
SLOWER = 1.2

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


class Export(NamedTuple):
    """A plan as a framework's file.

    Attributes:
        text: The file, headed by the first sentence where it has comments.
        said: Step times first, then how it was counted, what was not, and what the framework could not use.
    """

    candidate: Candidate
    text: str
    said: tuple[str, ...]


def export_plan(
    model: ModelConfig | str, framework: str, *, implementation: str | None = None, recipe: str | None = None,
    **job: object,
) -> Export:  # fmt: skip
    """Return the first layout of a plan for a framework as its file, beside the plan that is made for none.

    Args:
        implementation: Whose operators both plans count; None means the framework's and the papers'.
        **job: Arguments of `plan`; layout fields that are given hold for both.

    Raises:
        ValueError: If nothing can be exported, or only what is more than `SLOWER` times slower than the other plan.
    """
    if recipe and "fp8" in recipe:
        raise ValueError(f"recipe {recipe!r}: files are written for products in 16 bits; plan without --export for FP8")
    own = {name: job[name] for name in ("seq", "global_batch", "gpus_per_node", "attention") if name in job}
    counting = counting_for(framework, model, implementation=implementation, recipe=recipe, **own)
    found = plan(model, recipe_=recipe, counting=counting, **job)
    candidate, text, passed = _first_exported(found, framework, recipe)
    whose = implementation or "paper"
    free = plan(model, recipe_=recipe, counting=Counting(implementation=whose), **job)
    ratio = candidate.step / free.best.step if free.candidates else 0.0
    beside = f"{ratio:.2f} times the {free.best.step:.3f} s of the plan" if ratio else "and nothing fits in the plan"
    times = f"{framework}: predicted {candidate.step:.3f} s a step, {beside} without --export, counted as {whose}"
    if free.candidates and candidate.layout.shape != free.best.layout.shape:
        times += f"; that plan has another layout, {free.best.layout}"
    unused = [f"not used: {reason}" for reason in found.left_out if re.search(r"\b(tp|cp|ep|pp)=", reason)]
    if found.load.model.is_moe and found.load.framework.dispatch != free.load.framework.dispatch:
        unused.append(
            "not used: a token goes once to a node, behind another micro-batch; the file sends every copy, unhidden"
        )
    if ratio > SLOWER:
        refused = f"this one is {candidate.layout}; beyond {SLOWER:g} times no file is written"
        raise ValueError(
            "; ".join((times, refused, *unused))
            + ". What you fix, such as --tp 1 --recompute full, holds for both plans"
        )
    mark = f"; unproven: {', '.join(candidate.peak.unproven)}" if candidate.peak.unproven else ""
    said = (
        times,
        f"counted as {counting.implementation}: {candidate.layout} peaks at {candidate.total_memory / 1e9:.1f} of "
        f"{found.capacity / 1e9:.1f} GB ({candidate.peak.at}{mark})",
        *(f"not counted: {what}" for what in counting.not_counted),
        *missing_units(found.load),
        *unused,
        *passed,
    )
    if text.startswith("{"):  # JSON has no comments
        text = text.replace('"_plan": [', f'"_plan": [\n    {json.dumps(times + ".")},', 1)
    else:
        text = f"# {times}.\n{text}"
    return Export(candidate, text, said)


def _first_exported(found: Plan, framework: str, recipe: str | None) -> tuple[Candidate, str, list[str]]:
    """The first layout that the exporter takes, its file, and why those before it were passed over."""
    load, machine = found.load, found.cluster
    passed: list[str] = []
    for candidate in islice(chain((found.best,), found.candidates), 20):
        try:
            job = export_job(
                load.model, candidate.layout, seq=load.seq, global_batch=load.global_batch,
                gpus_per_node=min(machine.gpus_per_node, machine.gpu.gpus_per_host),
                sequence_parallel=load.sequence_parallel, recipe=recipe, attention=load.attention,
            )  # fmt: skip
            return candidate, export_layout(job, framework), passed
        except ValueError as error:
            passed.append(f"passed over: {candidate.layout}, {candidate.step:.3f} s: {error}")
    raise ValueError(f"{framework} can run none of the first layouts; {passed[0]}")
