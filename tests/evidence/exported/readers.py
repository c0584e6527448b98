"""Each framework's own parser on an exported file: what it holds after it has read and checked it, as plain values."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import io
import itertools
import json
import os
import shlex
import sys
import tempfile
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from unittest import mock

from lablib.calc.layouts.export import ExportJob

#: What is imported, and the distribution whose version counts.
NEEDS = {
    "torchtitan": ("torchtitan.config", "torchtitan"),
    "megatron": ("megatron.training", "megatron-core"),
    "deepspeed": ("deepspeed", "deepspeed"),
    "accelerate": ("accelerate", "accelerate"),
}

_numbers = itertools.count()


def installed(framework: str) -> str | None:
    """Return "package version", or None where its parser is not installed."""
    module, package = NEEDS[framework]
    if importlib.util.find_spec(module.split(".")[0]) is None or importlib.util.find_spec(module) is None:
        return None
    return f"{package} {version(package)}"


def read(framework: str, text: str, job: ExportJob) -> dict:
    """Return what the framework's parser reads, by its own names."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        found = READERS[framework](text, job)
    return json.loads(json.dumps(found))


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def read_torchtitan(text: str, job: ExportJob) -> dict:
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims, pipeline_parallel

    with _folder() as folder:
        module = f"exported_layout_{next(_numbers)}"
        (folder / f"{module}.py").write_text(text)
        with mock.patch.object(sys, "path", [str(folder), *sys.path]):
            importlib.invalidate_caches()
            config = ConfigManager().parse_args(["--module", module, "--config", "layout"])
    dims = ParallelDims.from_config(config.parallelism, job.layout.gpus)
    model = config.model_spec.model
    config.model_spec.model.update_from_config(config=config)
    rope = model.layers[0].attention.rope
    policy = config.activation_checkpoint
    found = {
        "training": dataclasses.asdict(config.training),
        "parallelism": {
            name: value for name, value in dataclasses.asdict(config.parallelism).items() if value is not None
        },
        "activation_checkpoint": None if policy is None else type(policy).__qualname__,
        "dims": {name: getattr(dims, name) for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")},
        "model": {
            "layers": len(model.layers),
            "hidden": model.dim,
            "vocab": model.vocab_size,
            "theta": rope.theta,
            "scaling": rope.scaling,
            "scaling_factor": rope.scaling_factor,
        },
    }
    moe = getattr(model.layers[-1], "moe", None)
    if moe is not None:
        names = ("num_experts", "top_k", "score_func", "route_norm", "route_scale", "num_expert_groups")
        found["router"] = {name: getattr(moe.router, name) for name in (*names, "num_limited_groups")}
    if dims.pp > 1:
        stages, layers, first, last = pipeline_parallel._get_pipeline_metadata(dims, config.parallelism, model)
        parts = pipeline_parallel._generate_llm_fqn_per_model_part(stages, layers, first, last)
        found["layers_of_chunks"] = [sum(name.startswith("layers.") for name in part) for part in parts]
    return found


#: What a reader of the exported script adds: data, tokenizer, learning rate.
YOURS = "--lr 1e-4 --train-iters 10 --tokenizer-type NullTokenizer --vocab-size 1000 --mock-data"

#: What this machine lacks: Transformer Engine and Apex, without which these are refused.
HERE = "--transformer-impl local --no-rope-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm"

MEGATRON_FIELDS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "normalization", "layernorm_epsilon", "gated_linear_unit", "add_bias_linear", "add_qkv_bias", "qk_layernorm",
    "num_moe_experts", "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax",
    "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "moe_layer_freq", "multi_latent_attention", "q_lora_rank", "kv_lora_rank",
    "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type", "rotary_scaling_factor", "mscale",
    "mscale_all_dim", "original_max_position_embeddings", "beta_fast", "beta_slow", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel", "recompute_granularity",
    "recompute_method", "recompute_num_layers", "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split", "bf16", "fp16", "window_size", "window_attn_skip_freq",
)  # fmt: skip
MEGATRON_ARGS = (
    "seq_length", "max_position_embeddings", "position_embedding_type", "rotary_base", "rotary_percent",
    "use_rope_scaling", "rope_scaling_factor", "untie_embeddings_and_output_weights", "micro_batch_size",
    "global_batch_size", "data_parallel_size", "use_distributed_optimizer", "use_megatron_fsdp",
    "data_parallel_sharding_strategy", "accumulate_allreduce_grads_in_fp32", "attention_dropout", "hidden_dropout",
)  # fmt: skip


def read_megatron(text: str, job: ExportJob) -> dict:
    import typing

    if not hasattr(typing, "override"):  # Python 3.11; megatron-core 0.19 asks for 3.12
        import typing_extensions

        typing.override = typing_extensions.override
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import parse_args, validate_args

    words = shlex.split(text.replace("\\\n", " "), comments=True)
    environment = dict(word.split("=", 1) for word in words[: words.index("torchrun")] if "=" in word)
    given = [word for word in words[words.index("pretrain_gpt.py") + 1 :] if word != "$@"]
    environment |= {"RANK": "0", "WORLD_SIZE": str(job.layout.gpus)}
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", ["pretrain_gpt.py", *given, *YOURS.split(), *HERE.split()]),
        mock.patch("megatron.training.arguments.get_device_arch_version", return_value=9),  # a Hopper
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
    ):
        args = parse_args()
        validate_args(args)
        config = core_transformer_config_from_args(args)
    fields = {name: getattr(config, name) for name in MEGATRON_FIELDS if hasattr(config, name)}
    return {name: getattr(args, name) for name in MEGATRON_ARGS} | {"config": fields}


class _Ranks:
    """The part of Megatron's `mpu` that DeepSpeedConfig asks: how many ranks have their own data."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def get_data_parallel_world_size(self) -> int:
        return self.ranks


def read_deepspeed(text: str, job: ExportJob) -> dict:
    from deepspeed.runtime.config import DeepSpeedConfig

    layout = job.layout
    with mock.patch("deepspeed.runtime.config.dist.get_rank", return_value=0):
        config = DeepSpeedConfig(json.loads(text), mpu=_Ranks(layout.dp))
    experts = config.expert_parallel_config
    if experts is not None and experts.enabled:
        from deepspeed.module_inject.auto_ep_config import validate_autoep_config

        validate_autoep_config(
            experts, layout.gpus, 1, config.tensor_parallel_config.autotp_size, 1, zero_stage=layout.zero
        )
    return {
        "train_batch_size": config.train_batch_size,
        "train_micro_batch_size_per_gpu": config.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "stage": int(config.zero_config.stage),
        "bf16": config.bfloat16_config.enabled,
        "fp16": config.float16_config.enabled,
        "autotp_size": config.tensor_parallel_config.autotp_size,
        "autoep": [experts.enabled, experts.autoep_size, experts.preset_model] if experts else None,
    }


def read_accelerate(text: str, job: ExportJob) -> dict:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig

    with _folder() as folder:
        file = folder / "accelerate.yaml"
        file.write_text(text)
        config = load_config_from_file(str(file))  # refuses unknown keys at the top
    known = {action.dest for action in launch_command_parser()._actions}
    blocks = {name: getattr(config, name) or {} for name in ("fsdp_config", "parallelism_config")}
    for block in blocks.values():
        if not set(block) <= known:
            raise ValueError(f"not options of `accelerate launch`: {sorted(set(block) - known)}")
    sizes = {name.removeprefix("parallelism_config_"): size for name, size in blocks["parallelism_config"].items()}
    names = ("num_processes", "num_machines", "mixed_precision")
    return {
        "distributed_type": config.distributed_type.value,
        **{name: getattr(config, name) for name in names},
        **blocks,
        "total_size": ParallelismConfig(**sizes).total_size if sizes else None,
    }


READERS = {
    "torchtitan": read_torchtitan,
    "megatron": read_megatron,
    "deepspeed": read_deepspeed,
    "accelerate": read_accelerate,
}
