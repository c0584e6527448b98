"""The settings of a training run: a frozen object that checks itself, and a command line with an option a field.

    config = TrainConfig(model="gpt2-124m", folder="runs/a", steps=200, global_batch=64, micro_batch=8, seq=1024)

A step trains on `global_batch` sequences. Each of n ranks takes global_batch / n of them, in
global_batch / (n * micro_batch) micro-batches. The step is the same on any number of ranks that divides it.
"""

# ruff: noqa: RUF009 (each `_option` makes a field)
from __future__ import annotations

import argparse
import math
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lablib.calc.flops import step_flops
from lablib.calc.memory.activations import check_config
from lablib.calc.memory.activations import recompute_units as recompute_plan
from lablib.calc.models import ModelConfig, preset, preset_names
from lablib.calc.params import count_params
from lablib.calc.runs import cosine_lr

#: Sizes for a laptop, of byte-level tokens: trained parameters in the name.
_SMALL = {
    "tiny": {"num_layers": 4, "hidden": 64, "num_heads": 4, "ffn": 160, "max_positions": 512},
    "10m": {"num_layers": 8, "hidden": 320, "num_heads": 5, "ffn": 864, "max_positions": 2048},
}
#: Times a million, for the shuffle of an epoch, it must still be a 64-bit number.
_LARGEST_SEED = 2**32
#: The trainer's own names for models of `lablib.calc.models.presets`.
_ALIASES = {"gpt2-124m": "gpt2"}

#: Models from a laptop's to one that needs several large GPUs; every gpt2, llama or qwen2 preset works too.
MODELS = ("tiny", "10m", "gpt2-124m", "llama-3.2-1b", "qwen2-7b")

#: Settings that a resumed run must share with the run that it continues: they decide what is learned.
SAME_RUN = (
    "model",
    "global_batch",
    "seq",
    "seed",
    "lr",
    "lr_final",
    "lr_steps",
    "warmup",
    "weight_decay",
    "betas",
    "eps",
    "clip",
    "precision",
)


def train_model(name: str) -> ModelConfig:
    """Return the shape of a model that the trainer can build.

    Qwen2 is the Llama shape with biases on q, k and v, so the course's transformer builds it as that.
    """
    if name in _SMALL:
        return ModelConfig(name=name, family="llama", vocab=256, **_SMALL[name])
    try:
        config = preset(_ALIASES.get(name, name))
    except ValueError:
        buildable = [n for n in preset_names() if preset(n).family in ("gpt2", "llama", "qwen2")]
        raise ValueError(f"model={name!r} is unknown; use {', '.join((*MODELS, *buildable))}") from None
    if config.family == "qwen2":
        config = replace(config, family="llama")
    check_config(config)
    return config


def _option(default: Any, text: str) -> Any:
    """Return a field of `TrainConfig` with the help of its option."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run; it checks itself when it is made.

    `model` is "" where a task brings its own, and `compile` may name a backend.
    """

    folder: str | Path = _option(MISSING, "the run's folder: metrics, checkpoints, run.json")
    model: str = _option("tiny", f"shape: {', '.join(MODELS)}, or another preset of the gpt2, llama or qwen2 family")
    steps: int = _option(100, "optimizer steps in all")
    global_batch: int = _option(16, "sequences in a step, over all ranks")
    micro_batch: int = _option(0, "sequences in one forward pass of a rank; 0 takes a rank's full share")
    seq: int = _option(128, "tokens in a sequence")
    lr: float = _option(1e-3, "peak learning rate")
    lr_final: float = _option(0.1, "learning rate of the last step, as a share of the peak")
    lr_steps: int = _option(0, "steps of the schedule, if the run may be extended; 0 means --steps")
    warmup: int = _option(0, "steps of the linear warm-up")
    weight_decay: float = _option(0.1, "of AdamW, on matrices")
    betas: tuple[float, float] = _option((0.9, 0.95), "of AdamW")
    eps: float = _option(1e-8, "of AdamW")
    clip: float = _option(1.0, "largest gradient norm; inf measures it and changes nothing")
    precision: str = _option("bf16", "bf16 (fp32 shards, bf16 computation) or fp32")
    recompute: str = _option("none", "none, selective (attention), matmuls (keeps products) or full")
    compile: bool | str = _option(False, "torch.compile each block and the loss")
    wrap: str = _option("block", "what is gathered at a time: block, linear, none or size:N")
    replicas: int = _option(1, "copies of the sharded model (HSDP)")
    reshard: bool = _option(
        True, "free a block's weights after forward; --no-reshard keeps them until backward (ZeRO-2)"
    )
    prefetch: int = _option(0, "blocks to gather ahead; 0 leaves it to FSDP2")
    reduce_every: bool = _option(False, "reduce gradients after every micro-batch: saves the memory of full gradients")
    seed: int = _option(0, "of the first weights and the order of the data")
    text: str = _option("", "train on this UTF-8 file; by default on the course's own prose")
    tokens: str = _option("", "train on this token file (.npy)")
    held_out: int = _option(0, "sequences at the end of the data that are kept for validation and never trained on")
    keep: int = _option(2, "checkpoints to keep")
    peak_flops: float = _option(0.0, "FLOP/s of a device for MFU; by default looked up by the GPU's name")

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "eps", "peak_flops"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must be a finite number")
        for name in ("steps", "global_batch", "seq", "replicas", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("micro_batch", "lr_steps", "warmup", "weight_decay", "prefetch", "peak_flops", "held_out"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("lr", "eps", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must each be from 0 to below 1")
        if abs(self.seed) > _LARGEST_SEED:
            raise ValueError(f"seed={self.seed} must lie between -{_LARGEST_SEED} and {_LARGEST_SEED}")
        if self.precision not in ("bf16", "fp32"):
            raise ValueError(f"precision={self.precision!r} must be 'bf16' or 'fp32'")
        if self.text and self.tokens:
            raise ValueError(f"text={self.text} and tokens={self.tokens}: give one of the two")
        if not 0 <= self.lr_final <= 1:
            raise ValueError(f"lr_final={self.lr_final} is a share of the peak: from 0 to 1")
        self.learning_rate(1)
        self.split_batch(self.replicas)
        if not self.model:
            return
        shape = train_model(self.model)
        if self.seq > shape.max_positions:
            raise ValueError(f"seq={self.seq} is longer than the {shape.max_positions} positions of {self.model}")
        recompute_plan(self.recompute, shape.num_layers)

    @property
    def schedule_steps(self) -> int:
        """Steps of the learning-rate schedule."""
        return self.lr_steps or self.steps

    def split_batch(self, ranks: int) -> tuple[int, int]:
        """Return (sequences in a micro-batch, micro-batches in a step) of each of so many ranks."""
        share, rest = divmod(self.global_batch, ranks)
        if rest or not share:
            raise ValueError(f"{ranks} ranks do not divide global_batch={self.global_batch}; use a multiple of {ranks}")
        micro = self.micro_batch or share
        if share % micro:
            raise ValueError(
                f"micro_batch={micro} does not divide the {share} sequences of a rank: "
                f"global_batch={self.global_batch} on {ranks} ranks"
            )
        if ranks % self.replicas:
            raise ValueError(f"replicas={self.replicas} does not divide {ranks} ranks")
        return micro, share // micro

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        floor = self.lr * self.lr_final
        return cosine_lr(step, peak=self.lr, steps=self.schedule_steps, warmup=self.warmup, floor=floor)

    def settings(self) -> dict[str, Any]:
        """Return what a resumed run must share, as JSON keeps it."""
        values = {name: getattr(self, name) for name in SAME_RUN}
        values["lr_steps"] = self.schedule_steps
        values["clip"], values["betas"] = str(self.clip), list(self.betas)
        return values

    def as_dict(self) -> dict[str, Any]:
        """Return every setting, as JSON keeps it."""
        return asdict(self) | {"folder": str(self.folder), "betas": list(self.betas), "clip": str(self.clip)}


def differences(saved: dict[str, Any], settings: dict[str, Any]) -> str:
    """Return in words what differs between the settings of a checkpoint and of a run; "" where nothing does."""
    wrong = [key for key in settings if saved.get(key) != settings[key]]
    changes = "; ".join(f"{key} was {saved.get(key)} and is {settings[key]}" for key in wrong)
    if wrong == ["lr_steps"]:  # nobody typed it: it follows --steps
        changes += f" (to take more steps of the same run, keep its schedule: lr_steps={saved.get('lr_steps')})"
    return changes


def describe(config: TrainConfig, ranks: int) -> str:
    """Return in one sentence what a step of a run is."""
    shape = train_model(config.model)
    micro, count = config.split_batch(ranks)
    flops = step_flops(shape, batch=config.global_batch, seq=config.seq).model
    return (
        f"{config.model} ({count_params(shape).total / 1e6:,.1f} M parameters): a step is {config.global_batch} x "
        f"{config.seq} tokens, {count} micro-batches of {micro} on each of {ranks} ranks, {flops / 1e12:,.3f} TFLOP"
    )


def train_parser(description: str, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with an option for every field of TrainConfig, and the options of the launch."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for each in fields(TrainConfig):
        default = defaults.get(each.name, each.default)
        required = default is MISSING
        options: dict[str, Any] = {**each.metadata, **({"required": True} if required else {"default": default})}
        if isinstance(default, bool):
            options["action"] = argparse.BooleanOptionalAction
        elif isinstance(default, tuple):
            options |= {"type": type(default[0]), "nargs": len(default)}
        elif not required:
            options["type"] = type(default)
        parser.add_argument(f"--{each.name.replace('_', '-')}", **options)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train")
    parser.add_argument("--print-every", type=int, default=1, help="steps between two lines")
    return parser


def config_from_args(args: argparse.Namespace) -> TrainConfig:
    """Return the run that was asked for."""
    values = {each.name: getattr(args, each.name) for each in fields(TrainConfig)}
    return TrainConfig(**values | {"betas": tuple(values["betas"])})
