"""One training run as the memory calculator sees it: every setting, checked together before anything is computed.

Chapter: book/01_why_distributed.md
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

from lablib.calc.choices import must_divide, one_of
from lablib.calc.models import ModelConfig, from_hf, preset
from lablib.calc.recipes import Optimizer, Recipe, find_optimizer, recipe
from lablib.calc.stages import SCHEDULES

TUNINGS = ("full", "lora", "qlora")
LORA_TARGETS = ("all", "attention")
RECOMPUTE = ("none", "selective", "full")
ATTENTION = ("fused", "plain")
KERNELS = ("paper", "toy", "hf")
SHARDINGS = ("flat", "fsdp2")
OFFLOADS = ("none", "optimizer", "gradients", "parameters")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of a training run; `training_memory` documents each. It checks itself when it is made.

    Raises:
        ValueError: If a setting is unknown or out of range, or two contradict each other.
    """

    model: ModelConfig
    recipe: Recipe
    optimizer: Optimizer
    tuning: str
    lora_rank: int
    lora_targets: str
    micro_batch: int
    seq: int
    dp: int
    zero: int
    tp: int
    sequence_parallel: bool
    pp: int
    schedule: str
    virtual_stages: int
    num_microbatches: int | None
    layers_per_stage: tuple[int, ...] | None
    cp: int
    ep: int
    recompute: str
    attention: str
    kernels: str
    dropout: float | None
    offload: str
    gradient_as_bucket_view: bool
    bucket_bytes: int
    prefetch: int
    sharding: str = "flat"

    def __post_init__(self) -> None:
        # Names become what they name, once, before anybody reads a field.
        model = resolve_model(self.model)
        resolved = {
            "model": model,
            "recipe": recipe(self.recipe),
            "optimizer": find_optimizer(self.optimizer),
            "seq": model.max_positions if self.seq is None else self.seq,
            "layers_per_stage": None if self.layers_per_stage is None else tuple(self.layers_per_stage),
        }
        for field, value in resolved.items():
            object.__setattr__(self, field, value)
        self._check_choices()
        self._check_numbers()
        self._check_split()
        self._check_schedule()
        self._check_sharding()

    @property
    def ranks(self) -> int:
        """Ranks of the run: dp, cp, tp and pp multiply; ep lives inside dp times cp."""
        return self.dp * self.cp * self.tp * self.pp

    def replicas(self, expert: bool) -> int:
        """Return over how many ranks ZeRO can shard a parameter: dp times cp, divided by ep for routed experts.

        Args:
            expert: Whether it belongs to a routed expert.
        """
        return self.dp * self.cp // (self.ep if expert else 1)

    def _check_choices(self) -> None:
        for field, known in (
            ("tuning", TUNINGS),
            ("lora_targets", LORA_TARGETS),
            ("schedule", SCHEDULES),
            ("recompute", RECOMPUTE),
            ("attention", ATTENTION),
            ("kernels", KERNELS),
            ("offload", OFFLOADS),
            ("sharding", SHARDINGS),
        ):
            one_of(field, getattr(self, field), known)

    def _check_numbers(self) -> None:
        whole = {"zero": 0, "bucket_bytes": 0, "prefetch": 0}
        whole |= dict.fromkeys(
            ("lora_rank", "micro_batch", "seq", "dp", "tp", "pp", "virtual_stages", "cp", "ep"), 1
        )
        if self.num_microbatches is not None:
            whole["num_microbatches"] = 1
        for field, least in whole.items():
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{field}={value!r} must be a whole number of at least {least}")
        if self.zero > 3:
            raise ValueError(f"zero={self.zero} does not exist: use 1, 2 or 3, or 0 for replicas")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and less than 1")

    def _check_split(self) -> None:
        m = self.model
        divided = {"num_heads": m.num_heads, "num_kv_heads": m.num_kv_heads, "ffn": m.ffn}
        if m.is_moe:
            divided["expert_ffn"] = m.expert_ffn
        for name, size in divided.items():
            must_divide("tp", self.tp, name, size)
        must_divide("cp", self.cp, "seq", self.seq)
        if self.sequence_parallel:
            must_divide("tp", self.tp, "seq/cp" if self.cp > 1 else "seq", self.seq // self.cp)
        if m.learned_positions and self.seq > m.max_positions:
            raise ValueError(
                f"seq={self.seq} is more than the {m.max_positions} learned positions of {m.name}; "
                f"use at most {m.max_positions}"
            )
        if self.ep > 1 and not m.is_moe:
            raise ValueError(f"ep={self.ep} needs a model with experts and {m.name} has none; use ep=1")
        if self.ep > 1:
            must_divide("ep", self.ep, "num_experts", m.num_experts)
            must_divide("ep", self.ep, "dp * cp", self.dp * self.cp)

    def _check_schedule(self) -> None:
        if self.pp > self.model.num_layers:
            raise ValueError(
                f"pp={self.pp} stages are more than the num_layers={self.model.num_layers} of {self.model.name}"
            )
        if self.schedule == "interleaved":
            if self.pp == 1 or self.virtual_stages == 1:
                raise ValueError(
                    f"schedule='interleaved' needs pp and virtual_stages of at least 2; they are pp={self.pp} and "
                    f"virtual_stages={self.virtual_stages}"
                )
            if self.num_microbatches is not None and self.num_microbatches % self.pp:
                raise ValueError(
                    f"num_microbatches={self.num_microbatches} is not a multiple of pp={self.pp}, which "
                    f"schedule='interleaved' needs; use {-(-self.num_microbatches // self.pp) * self.pp}"
                )
        elif self.virtual_stages > 1:
            raise ValueError(
                f"virtual_stages={self.virtual_stages} contradicts schedule={self.schedule!r}; "
                "use schedule='interleaved'"
            )

    def _check_sharding(self) -> None:
        if self.sharding != "fsdp2":
            return
        if self.zero < 2:
            raise ValueError(
                f"sharding='fsdp2' contradicts zero={self.zero}: FSDP2 shards weights, gradients and optimizer; "
                "use zero=3 (reshards after forward) or zero=2 (keeps the gathered weights until backward)"
            )
        if self.tuning == "qlora" or self.offload != "none" or self.ep > 1:
            raise ValueError(
                f"sharding='fsdp2' is not known with tuning={self.tuning!r}, offload={self.offload!r} and "
                f"ep={self.ep}; use tuning='full' or 'lora', offload='none' and ep=1"
            )


def resolve_model(model: ModelConfig | str | PathLike) -> ModelConfig:
    """Return the model that was meant: a ModelConfig, the name of a preset, or the path of a config.json.

    Args:
        model: Text counts as a path if it contains a slash or ends in .json.

    Raises:
        ValueError: If there is no such model or file.
    """
    if isinstance(model, ModelConfig):
        return model
    if isinstance(model, PathLike) or (isinstance(model, str) and ("/" in model or model.endswith(".json"))):
        return from_hf(model)
    return preset(model)
