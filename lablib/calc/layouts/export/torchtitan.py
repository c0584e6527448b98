"""A layout as torchtitan's configuration: a Python module with one function, which `--module` and `--config` name.

torchtitan read TOML until its version 0.2.2. Now a function returns the whole `Trainer.Config`, and flags change single
values of it: `--training.local_batch_size 2`. The function here starts from the model alone, since the configurations
that torchtitan ships train otherwise than they are called: `llama3_405b` computes in FP8 with asynchronous tensor
parallelism.

- FSDP2 shards data parallelism; replicas (zero=0, or of `shard` ranks) are its `data_parallel_replicate_degree`. zero=3 frees a gathered
  weight after forward, zero=1 and 2 keep it until backward; gradients are sharded with all three.
- With a pipeline, the local batch is what one replica runs in a step, cut into micro-batches; without one it is the
  micro-batch, and accumulation makes up the global batch.
- Experts are spread over `expert_parallel_degree` ranks, which it takes from dp, cp and tp together. An expert itself is
  never split, so a layout that splits it over tp is refused.
"""

from __future__ import annotations

from lablib.calc.layouts.export.job import Exporter, ExportJob, counted, torchrun
from lablib.calc.models import Rotary
from lablib.calc.schedules import chunk_layers

PROVEN = "torchtitan 0.3.0"

#: fp32 shards, gathered in bf16 and reduced in fp32, the only dtype that `mixed_precision_reduce` takes; or all in fp32.
RECIPES = ("fsdp2-mixed-fp32-reduce", "fp32")

_LLAMA = Rotary(base=500_000.0, scaling="llama3", factor=8.0, original=8192, low=1.0, high=4.0)
_QWEN = Rotary(base=1_000_000.0)

#: Preset to (module, flavor, rotary positions, epsilon of its norms) of the models that torchtitan ships.
FLAVORS = {
    **dict.fromkeys(("llama-3-8b", "llama-3.1-8b"), ("llama3", "8B", _LLAMA, 1e-5)),
    **dict.fromkeys(("llama-3-70b", "llama-3.1-70b"), ("llama3", "70B", _LLAMA, 1e-5)),
    "llama-3.1-405b": ("llama3", "405B", _LLAMA, 1e-5),
    "llama-3.2-1b": ("llama3", "1B", _LLAMA, 1e-5),
    "llama-3.2-3b": ("llama3", "3B", _LLAMA, 1e-5),
    "qwen3-0.6b": ("qwen3", "0.6B", _QWEN, 1e-6),
    "qwen3-8b": ("qwen3", "8B", _QWEN, 1e-6),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B", _QWEN, 1e-6),
    "deepseek-v3": ("deepseek_v3", "671B", None, 1e-5),
}

SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}

POLICIES = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}


def torchtitan_config(job: ExportJob) -> str:
    """Return torchtitan's configuration as Python, headed by the line that starts it.

    Raises:
        ValueError: If torchtitan does not ship the model, or cannot run the layout as it was counted.
    """
    _refuse(job)
    recipe = job.dtypes("torchtitan", RECIPES)
    module, flavor, shipped, _ = FLAVORS[job.model.name]
    rotary = job.model.rotary
    policy = POLICIES[job.layout.recompute]
    return "\n".join(
        [
            f"# {counted(job, recipe)}.",
            f"# Read by the parser of {PROVEN}. Save as layout.py where it starts, and start it with",
            f"#     {torchrun(job, '-m torchtitan.train --module layout --config layout')}",
            *_said(job),
            *(["from dataclasses import replace", ""] if shipped and rotary != shipped else []),
            "from torchtitan.components.loss import CrossEntropyLoss",
            "from torchtitan.components.optimizer import default_adamw",
            "from torchtitan.config import ParallelismConfig, TrainingConfig",
            *(
                [f"from torchtitan.distributed.activation_checkpoint import {policy.split('.')[0]}"]
                if policy != "None"
                else []
            ),
            "from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader",
            "from torchtitan.models.common.config_utils import decoder_vocab_size",
            f"from torchtitan.models.{module} import model_registry",
            "from torchtitan.trainer import Trainer",
            "",
            "",
            "def layout() -> Trainer.Config:",
            f'    spec = model_registry("{flavor}")',
            *(_rotary_lines(rotary) if shipped and rotary != shipped else []),
            "    return Trainer.Config(",
            "        model_spec=spec,",
            "        # The logits in one piece, as they are counted; ChunkedLossWrapper needs less.",
            "        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),",
            '        hf_assets_path="./assets/hf",  # yours: the tokenizer',
            '        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),  # yours',
            "        optimizer=default_adamw(lr=3e-4),  # yours",
            *_call("training", "TrainingConfig", training(job, recipe)),
            *_call("parallelism", "ParallelismConfig", parallelism(job)),
            f"        activation_checkpoint={policy},",
            "    )",
            "",
        ]
    )


def _refuse(job: ExportJob) -> None:
    model, layout = job.model, job.layout
    if model.name not in FLAVORS:
        raise ValueError(f"torchtitan ships no {model.name}; here it can train {', '.join(FLAVORS)}")
    job.require_fused("torchtitan")
    if layout.pp > 1 and model.tied:
        raise ValueError(f"pp={layout.pp} with the tied output of {model.name}: torchtitan cannot cut it; use pp=1")
    if model.is_moe and layout.expert_split > 1:
        raise ValueError(
            f"tp={layout.tp} with experts: torchtitan splits no expert over tp, as was counted; its "
            "expert_parallel_degree takes ranks from dp and tp; use etp=1, or Megatron-LM"
        )
    if layout.ep > 1 and layout.zero == 0:
        raise ValueError(
            f"ep={layout.ep} with zero=0: torchtitan takes expert-parallel ranks from those of FSDP; use zero=3"
        )


def training(job: ExportJob, recipe: str) -> dict[str, object]:
    """Return the values of torchtitan's TrainingConfig."""
    layout = job.layout
    return {
        "local_batch_size": job.global_batch // layout.dp if layout.pp > 1 else layout.micro_batch,
        "global_batch_size": job.global_batch,
        "seq_len": job.seq,
        "dtype": "float32",
        "mixed_precision_param": "float32" if recipe == "fp32" else "bfloat16",
        "mixed_precision_reduce": "float32",
        "disable_cuda_graphs": True,  # their memory is not counted, and pipelines and experts cannot run in them
    }


def parallelism(job: ExportJob) -> dict[str, object]:
    """Return the values of torchtitan's ParallelismConfig."""
    layout = job.layout
    replicas = layout.dp * layout.cp // layout.shards if layout.zero else layout.dp
    found: dict[str, object] = {
        "data_parallel_replicate_degree": replicas,
        "data_parallel_shard_degree": layout.dp // replicas,
        "fsdp_reshard_after_forward": "always" if layout.zero == 3 else "never",
        "tensor_parallel_degree": layout.tp,
        "enable_sequence_parallel": job.sequence_parallel,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
        "expert_parallel_degree": layout.ep,
    }
    if layout.cp > 1:
        found["context_parallel_load_balancer"] = (
            "ptrr"  # the default, "headtail", cannot split its FlexAttention's mask
        )
    if layout.pp > 1:
        first, middle, last = chunk_layers(job.model.num_layers, layout.pp, layout.virtual_stages)
        found |= {
            "pipeline_parallel_schedule": SCHEDULES[layout.schedule],
            "pipeline_parallel_microbatch_size": layout.micro_batch,
            "pipeline_parallel_layers_per_stage": middle,
            "pipeline_parallel_first_stage_less_layers": middle - first,
            "pipeline_parallel_last_stage_less_layers": middle - last,
        }
    return found


def _said(job: ExportJob) -> list[str]:
    """What is not as it was counted, or not as the model's configuration says."""
    model, layout, found = job.model, job.layout, []
    if layout.zero == 1:
        found.append("# zero=1 was counted; FSDP2 shards gradients too, and needs less.")
    if layout.recompute == "selective":
        found.append(
            "# Selective: torchtitan keeps every second product and attention; counted is attention run again."
        )
    epsilon = FLAVORS[model.name][3]
    if model.norm_eps and model.norm_eps != epsilon:
        found.append(f"# Norms have epsilon {epsilon:g} here, and {model.norm_eps:g} in the model's configuration.")
    if model.router and model.router.balance == "aux_loss":
        found.append("# Experts are balanced by a bias (load_balance_coeff), not by the auxiliary loss of the model.")
    return [*found, ""]


def _rotary_lines(rotary: Rotary) -> list[str]:
    values = {"theta": rotary.base, "scaling": {"llama3": "llama"}.get(rotary.scaling, rotary.scaling)}
    if rotary.scaling == "llama3":
        values |= {
            "scaling_factor": rotary.factor,
            "low_freq_factor": rotary.low,
            "high_freq_factor": rotary.high,
            "original_max_position_embeddings": rotary.original,
        }
    given = ", ".join(f"{name}={_python(value)}" for name, value in values.items())
    return [
        "    for block in spec.model.layers:  # the flavor's positions are another model's",
        f"        block.attention.rope = replace(block.attention.rope, {given})",
    ]


def _call(field: str, kind: str, values: dict[str, object]) -> list[str]:
    inner = [f"            {name}={_python(value)}," for name, value in values.items()]
    return [f"        {field}={kind}(", *inner, "        ),"]


def _python(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


TORCHTITAN = Exporter(torchtitan_config, RECIPES[0], PROVEN, "layout.py")
