"""The command line of the training scripts: one option for each field of `TrainConfig`, and what the launch needs."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, fields
from typing import Any

from lablib.launch.train_config import MODELS, TrainConfig

_HELP = {
    "folder": "the run's folder: metrics, checkpoints, run.json",
    "model": f"shape: {', '.join(MODELS)}, or another preset of the gpt2, llama or qwen2 family",
    "steps": "optimizer steps in all",
    "global_batch": "sequences in a step, over all ranks",
    "micro_batch": "sequences in one forward pass of a rank; 0 takes a rank's whole share",
    "seq": "tokens in a sequence",
    "lr": "peak learning rate",
    "lr_final": "learning rate of the last step, as a share of the peak",
    "lr_steps": "steps of the schedule, if the run may be prolonged; 0 means --steps",
    "warmup": "steps of the linear warm-up",
    "weight_decay": "of AdamW, on matrices",
    "betas": "of AdamW",
    "eps": "of AdamW",
    "clip": "largest gradient norm; inf measures it and changes nothing",
    "precision": "bf16 (fp32 shards, bf16 computation) or fp32",
    "recompute": "none, selective (attention), matmuls (keeps products) or full",
    "compile": "torch.compile each block and the loss",
    "wrap": "what is gathered at a time: block, linear, none or size:N",
    "replicas": "copies of the sharded model (HSDP)",
    "reshard": "free a block's weights after forward; --no-reshard keeps them until backward (ZeRO-2)",
    "prefetch": "blocks to gather ahead; 0 leaves it to FSDP2",
    "reduce_every": "reduce gradients after every micro-batch: saves the memory of whole gradients",
    "seed": "of the first weights and the order of the data",
    "text": "train on this UTF-8 file; by default on the course's own prose",
    "tokens": "train on this token file (.npy)",
    "keep": "checkpoints to keep",
    "peak_flops": "FLOP/s of a device for MFU; by default looked up by the GPU's name",
}


def train_parser(description: str, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with an option for every field of TrainConfig, and the options of the launch."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for field in fields(TrainConfig):
        default = defaults.get(field.name, field.default)
        options: dict[str, Any] = {"help": _HELP[field.name], "default": default}
        if default is MISSING:
            options = {"help": _HELP[field.name], "required": True}
        if isinstance(default, bool):
            options["action"] = argparse.BooleanOptionalAction
        elif isinstance(default, tuple):
            options |= {"type": type(default[0]), "nargs": len(default)}
        elif default is not MISSING:
            options["type"] = type(default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", **options)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train")
    parser.add_argument("--print-every", type=int, default=1, help="steps between two lines")
    return parser


def config_of(args: argparse.Namespace) -> TrainConfig:
    """Return the run that was asked for.

    Args:
        args: From a parser of `train_parser`.

    Raises:
        ValueError: If the options contradict each other.
    """
    values = {field.name: getattr(args, field.name) for field in fields(TrainConfig)}
    return TrainConfig(**values | {"betas": tuple(values["betas"])})
