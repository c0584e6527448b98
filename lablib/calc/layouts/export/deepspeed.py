"""A layout as DeepSpeed's JSON: ZeRO, its automatic tensor parallelism, and its automatic expert parallelism.

`lablib.calc.parallel.deepspeed_settings` has the reason of every key of ZeRO. `tensor_parallel.autotp_size` splits the
products of a transformers model and keeps the stream between them whole, with ZeRO 0, 1 or 2 (tutorial "Automatic
Tensor Parallelism (Training)"). `expert_parallel.autoep_size` spreads the experts of the families that it has a preset for.
Pipelines are built in code, and the file has no word for them; its sequence parallelism is another one (Ulysses).
JSON has no comments, so what the script must do stands under "_plan", which DeepSpeed passes over.
"""

from __future__ import annotations

import json

from lablib.calc.layouts.export.job import Exporter, ExportJob, counted
from lablib.calc.parallel import as_deepspeed_json, deepspeed_settings

PROVEN = "deepspeed 0.19.8"

#: `precision` of `deepspeed_settings` by recipe.
RECIPES = {"mixed-bf16": "bf16", "mixed-fp16": "fp16", "fp32": "fp32"}

#: DeepSpeed's name of a family, for `expert_parallel.preset_model`.
PRESETS = {"mixtral": "mixtral", "qwen3-moe": "qwen3_moe", "deepseek-v3": "deepseek_v3"}


def deepspeed_json(job: ExportJob) -> str:
    """Return DeepSpeed's configuration as text.

    Raises:
        ValueError: If the file cannot say the layout; it names what it lacks.
    """
    _refuse(job)
    layout = job.layout
    recipe = job.dtypes("DeepSpeed", RECIPES)
    found = deepspeed_settings(
        job.model,
        ranks=layout.dp,
        stage=layout.zero,
        micro_batch=layout.micro_batch,
        accumulation=job.accumulation,
        precision=RECIPES[recipe],
    )
    tree = {"_plan": _said(job, recipe), **as_deepspeed_json(found)}
    if layout.tp > 1:
        tree["tensor_parallel"] = {"autotp_size": layout.tp}
    if layout.ep > 1:
        tree["expert_parallel"] = {"enabled": True, "autoep_size": layout.ep, "preset_model": PRESETS[job.model.family]}
    return json.dumps(tree, indent=2) + "\n"


def _refuse(job: ExportJob) -> None:
    layout = job.layout
    for name, value, why in (
        (
            "pp",
            layout.pp,
            "DeepSpeed's pipelines are built in code (PipelineModule), and its file has no word for them",
        ),
        ("cp", layout.cp, "DeepSpeed splits sequences over heads (Ulysses), which is not what was counted"),
    ):
        if value > 1:
            raise ValueError(f"{name}={value}: {why}; use torchtitan or Megatron-LM")
    job.require_fused("DeepSpeed")
    if layout.recompute == "selective":
        raise ValueError("recompute='selective': transformers checkpoints whole blocks; use 'full' or 'none'")
    if layout.tp > 1 and layout.zero == 3:
        raise ValueError(f"tp={layout.tp} with zero=3: DeepSpeed's tensor parallelism runs with ZeRO 0, 1 or 2")
    if layout.tp > 1 and job.sequence_parallel:
        raise ValueError(
            f"sequence_parallel=True with tp={layout.tp}: DeepSpeed keeps norms and the stream whole on every rank; use "
            "sequence_parallel=False (--no-sequence-parallel)"
        )
    if layout.ep > 1 and layout.tp > 1:
        raise ValueError(f"ep={layout.ep} with tp={layout.tp}: how DeepSpeed folds the two is not counted; use tp=1")
    if layout.ep > 1 and job.model.family not in PRESETS:
        raise ValueError(
            f"ep={layout.ep}: DeepSpeed has no preset for {job.model.family!r}; {', '.join(PRESETS)} have one"
        )


def _said(job: ExportJob, recipe: str) -> list[str]:
    found = [
        f"{counted(job, recipe)}.",
        f"Read by the parser of {PROVEN}.",
        f"In the script: sequences of {job.seq} tokens.",
        "Yours: the learning rate, its warmup, and total_num_steps, after which the rate is zero.",
    ]
    if job.layout.recompute == "full":
        found.append("In the script: model.gradient_checkpointing_enable().")
    return found


DEEPSPEED = Exporter(deepspeed_json, next(iter(RECIPES)), PROVEN, "deepspeed.json")
