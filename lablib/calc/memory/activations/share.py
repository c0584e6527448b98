"""One rank's part of a micro-batch, checked: what the formulas of `paper`, `toy` and `hf` take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from lablib.calc.errors import check_whole, either
from lablib.calc.memory.implementation import Implementation, find_implementation
from lablib.calc.models import ModelConfig
from lablib.calc.parallel import check_sequence

MASK = 1  # bytes of one value of a dropout mask on a GPU
FP32 = 4
INT64 = 8
#: Families that Hugging Face's classes are counted of, the plainest first.
FAMILIES = (
    *("gpt2", "llama", "qwen2", "mistral", "qwen3", "starcoder2", "gemma", "olmo2", "phi3", "gpt-neox"),
    *("mixtral", "qwen3-moe"),
)
WITH_EXPERTS = ("mixtral", "qwen3-moe")


@dataclass(frozen=True)
class Share:
    """The part of a micro-batch on one rank.

    Attributes:
        batch: Sequences.
        seq: Tokens in a sequence, s, before context parallelism divides it.
        implementation: Whose operators; a name of `lablib.calc.memory.implementation`.
        bytes_per_value: 2 for bf16 and fp16, 4 for fp32.
        sequence_parallel: Whether norms, dropout and the stream are split over the tensor-parallel ranks too.
        cp: Context-parallel ranks; each holds `s / cp` tokens and sees every key.
        cp_way: How: "ring", "gathered" or "ulysses".
        dropout: Probability; only whether it is 0 matters. None: as published, which is dropout in the paper's
            GPT blocks and none in later families; none with the toy and Hugging Face's classes.
        experts: How Hugging Face's classes multiply with experts: "grouped" or "loop".
        imbalance: Tokens that the fullest expert-parallel rank gets, over the average.

    Raises:
        ValueError: If a size is not positive, factors do not divide each other, or the implementation has no such model.
    """

    config: ModelConfig
    batch: int
    seq: int
    implementation: Implementation = "paper"
    bytes_per_value: int = 2
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    cp_way: str = "ring"
    dropout: float | None = None
    experts: str = "grouped"
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        config, tp, cp = self.config, self.tp, self.cp
        whose = find_implementation(self.implementation)
        object.__setattr__(self, "implementation", whose)
        if self.bytes_per_value not in (2, 4):
            raise ValueError(f"bytes_per_value={self.bytes_per_value!r} must be one of 2, 4")
        for name in ("batch", "seq", "tp", "cp"):
            check_whole(name, getattr(self, name), 1)
        if self.dropout is None:
            object.__setattr__(self, "dropout", whose.default_dropout(config))
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and less than 1")
        if whose.eager:
            CHECKS[whose](config)
            if self.sequence_parallel:
                raise ValueError(
                    f"implementation={whose!r} splits a layer by tp alone, and not with sequence_parallel=True; use "
                    "sequence_parallel=False, or implementation='paper'"
                )
        if cp > 1 and self.cp_way not in whose.context_ways:
            known = f"use {either(whose.context_ways)}" if whose.context_ways else "use cp=1, or implementation='paper'"
            raise ValueError(
                f"implementation={whose!r} is not counted with cp={cp} and cp_way={self.cp_way!r}; {known}"
            )
        check_sequence(config, tp=tp, cp=cp, seq=self.seq, sequence_parallel=self.sequence_parallel, cp_way=self.cp_way)

    @property
    def tokens(self) -> int:
        """Tokens of this rank, `b s / cp`."""
        return self.batch * self.seq // self.cp

    @property
    def visits(self) -> int:
        """Copies of tokens that this rank's experts get: `k n` if all ranks get as many, more by the imbalance."""
        return ceil(self.tokens * self.config.experts_per_token * self.imbalance)

    @property
    def rings(self) -> bool:
        """Whether attention is the ring of this course."""
        return self.implementation == "toy" and self.cp_way == "ring"

    @property
    def value(self) -> int:
        """Bytes of a value."""
        return self.bytes_per_value

    @property
    def drops(self) -> bool:
        """Whether there are dropout masks."""
        return self.dropout > 0

    @property
    def one_rank(self) -> ModelConfig:
        """A layer's sizes on one tensor-parallel rank: its heads, its part of the MLP; the stream is not divided."""
        if self.tp == 1:
            return self.config
        c, t = self.config, self.tp
        return replace(c, num_heads=c.num_heads // t, num_kv_heads=c.num_kv_heads // t, ffn=c.ffn // t)

    def stream(self, width: int, size: int | None = None) -> int:
        """Return the bytes of so many values a token in the stream, of `size` bytes each."""
        split = self.tp if self.sequence_parallel else 1
        return self.tokens * width * (self.value if size is None else size) // split

    def inner(self, width: int, size: int | None = None) -> int:
        """Return the bytes of so many inner values a token, of `size` bytes each."""
        return self.tokens * width * (self.value if size is None else size) // self.tp

    def mask(self) -> int:
        """Return the bytes of the dropout mask of something that is added to the stream."""
        return self.stream(self.config.hidden, MASK) if self.drops else 0


def check_config(config: ModelConfig) -> None:
    """Raise a ValueError that names what the toy transformer does not have.

    Raises:
        ValueError: If the family, or a feature of this config, is not one of its own.
    """
    if config.family not in ("gpt2", "llama"):
        raise ValueError(
            f"{config.name}: the toy transformer is built from gpt2 or llama, not from family {config.family!r}"
        )
    refuse_extras(config, "the toy transformer has")
    if not config.learned_positions and config.head_dim % 2:
        raise ValueError(
            f"head_dim={config.head_dim} must be even: rotary positions turn pairs; use {config.head_dim + 1}"
        )


def refuse_extras(config: ModelConfig, whose: str) -> None:
    """Raise a ValueError if a model has more than blocks of attention and MLP with two norms.

    Raises:
        ValueError: If it has experts, latent attention, norms on q and k, or another number of norms a layer.
    """
    extras = {
        "experts": config.is_moe,
        "latent attention": config.is_mla,
        "norms on q and k": config.qk_norm,
        f"{config.norms_per_layer} norms a layer, only 2": config.norms_per_layer != 2,
    }
    for extra, present in extras.items():
        if present:
            raise ValueError(f"{config.name}: {whose} no {extra}")


def check_hugging_face(config: ModelConfig) -> None:
    """Raise a ValueError unless the model is one of those that are counted here.

    Raises:
        ValueError: If the family, or a feature of this config, is not known here.
    """
    family = config.family
    if family not in FAMILIES:
        raise ValueError(
            f"{config.name}: implementation='hf' knows {', '.join(FAMILIES[:-1])} and {FAMILIES[-1]}, not family "
            f"{family!r}; use implementation='paper'"
        )
    gpt, plain = family == "gpt2", family in ("gpt2", "starcoder2", "gpt-neox")
    known = {
        "norm": "layernorm" if plain else "rmsnorm",
        "learned_positions": gpt,
        "gated_mlp": not plain,
        "qk_norm": family in ("qwen3", "olmo2", "qwen3-moe"),
        "qk_norm_shared": family != "olmo2",
        "post_norm": family == "olmo2",
        "norms_per_layer": 2,
        "is_moe": family in WITH_EXPERTS,
        "num_shared_experts": 0,
        "router_bias": False,
        "is_mla": False,
        "attention_sinks": False,
        "parallel_block": config.parallel_block and family == "gpt-neox",
        "turned_dim": config.turned_dim if family in ("phi3", "gpt-neox") else 0 if gpt else config.head_dim,
    }
    for field, value in known.items():
        if getattr(config, field) != value:
            raise ValueError(
                f"{config.name}: {field}={getattr(config, field)!r} is not that of Hugging Face's {family} classes, "
                f"where it is {value!r}"
            )
    if config.window and config.num_window_layers != config.num_layers:
        raise ValueError(
            f"{config.name}: window_layers={config.window_layers}: implementation='hf' counts a sliding window in all "
            "layers or in none; use implementation='paper'"
        )


def check_torchtitan(config: ModelConfig) -> None:
    """Raise a ValueError unless the model is one that torchtitan's Llama 3 can be.

    Raises:
        ValueError: If the family, or a feature of this config, is not known here.
    """
    if config.family != "llama" or config.tied or config.qkv_bias or not config.gated_mlp or config.norm != "rmsnorm":
        raise ValueError(
            f"{config.name}: implementation='torchtitan' knows its Llama 3, of family 'llama' with an untied head, not "
            f"family {config.family!r}; use implementation='paper'"
        )
    refuse_extras(config, "torchtitan's Llama 3 has")


CHECKS: dict[str, Callable[[ModelConfig], None]] = {
    "toy": check_config, "hf": check_hugging_face, "torchtitan": check_torchtitan,
}  # fmt: skip
