"""One training run as the memory calculator sees it: every setting, checked together before anything is computed.

Chapter: book/01_why_distributed.md
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike

from lablib.calc.choices import check_flag, check_whole, must_divide, one_of
from lablib.calc.models import ModelConfig, from_hf, preset
from lablib.calc.recipes import Optimizer, Recipe, find_optimizer, recipe
from lablib.calc.stages import SCHEDULES
from lablib.calc.torch_versions import PINNED, release

TUNINGS = ("full", "lora", "qlora")
LORA_TARGETS = ("all", "attention")
RECOMPUTE = ("none", "selective", "full")
ATTENTION = ("fused", "plain")
KERNELS = ("paper", "toy", "hf")
SHARDINGS = ("flat", "fsdp2", "whole")
MOST_LAYERS = 100_000  # as of a config.json
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
    torch: str = PINNED

    def __post_init__(self) -> None:
        # Names become what they name, once, before anybody reads a field.
        model = resolve_model(self.model)
        resolved = {
            "model": model,
            "recipe": recipe(self.recipe),
            "optimizer": find_optimizer(self.optimizer),
            "seq": model.max_positions if self.seq is None else self.seq,
            "layers_per_stage": _sizes(self.layers_per_stage),
            "torch": release(self.torch),
        }
        for field, value in resolved.items():
            object.__setattr__(self, field, value)
        self._check_choices()
        self._check_numbers()
        self._check_split()
        self._check_tensor_parallel()
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
            check_whole(field, getattr(self, field), least)
        for field in ("sequence_parallel", "gradient_as_bucket_view"):
            check_flag(field, getattr(self, field))
        if self.model.num_layers > MOST_LAYERS:
            raise ValueError(
                f"num_layers={self.model.num_layers:,} of {self.model.name} is more than anybody has: "
                f"use at most {MOST_LAYERS:,}"
            )
        if self.zero > 3:
            raise ValueError(f"zero={self.zero} does not exist: use 1, 2 or 3, or 0 for replicas")
        number = isinstance(self.dropout, int | float) and not isinstance(self.dropout, bool)
        if self.dropout is not None and not (number and 0 <= self.dropout < 1):
            raise ValueError(f"dropout={self.dropout!r} must be at least 0 and less than 1")

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

    def _check_tensor_parallel(self) -> None:
        """With eager kernels `tp` is PyTorch's, with Hugging Face's plan; what it was not measured with is refused."""
        if self.tp == 1 or self.kernels == "paper":
            return
        how, m = f"kernels={self.kernels!r} with tp={self.tp}", self.model
        if m.tied or (self.kernels == "hf" and m.family == "gpt2"):
            why = (
                "its head and its embedding are one table"
                if m.tied
                else "its matrices are Conv1D, not Linear"
            )
            raise ValueError(f"{how} does not know {m.name}: {why}; use kernels='paper'")
        for name, only in (
            ("sequence_parallel", False),
            ("cp", 1),
            ("pp", 1),
            ("tuning", "full"),
            ("offload", "none"),
        ):
            if getattr(self, name) != only:
                raise ValueError(
                    f"{how} is not known with {name}={getattr(self, name)!r}; use {only!r}, or kernels='paper'"
                )
        if self.dp > 1 and self.sharding != "fsdp2":
            raise ValueError(
                f"{how} is not known with dp={self.dp} and sharding={self.sharding!r}: DDP takes no split tensors; "
                "use sharding='fsdp2' and zero=3, or kernels='paper'"
            )
        if self.recipe.master:
            raise ValueError(
                f"{how} is not known with recipe={self.recipe.name!r}, which has a master copy; use 'fsdp2-mixed', "
                "'autocast-bf16', 'pure-bf16' or 'fp32', or kernels='paper'"
            )

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
        if self.sharding == "flat":
            return
        zero = {"fsdp2": (2, 3), "whole": (1,)}[self.sharding]
        if self.zero not in zero:
            why = {
                "fsdp2": "FSDP2 shards weights, gradients and optimizer; "
                "use zero=3 (reshards after forward) or zero=2 (keeps the gathered weights until backward)",
                "whole": "ZeroRedundancyOptimizer shards the optimizer alone, by whole parameters; use zero=1",
            }[self.sharding]
            raise ValueError(f"sharding={self.sharding!r} contradicts zero={self.zero}: {why}")
        if self.tuning == "qlora" or self.offload != "none" or self.ep > 1:
            raise ValueError(
                f"sharding={self.sharding!r} is not known with tuning={self.tuning!r}, offload={self.offload!r} and "
                f"ep={self.ep}; use tuning='full' or 'lora', offload='none' and ep=1"
            )
        if self.sharding == "whole" and self.optimizer.quantized:
            raise ValueError(
                f"sharding='whole' is not known with optimizer={self.optimizer.name!r}; use 'adamw', 'sgd' or 'sgd-momentum'"
            )


def _sizes(layers_per_stage: object) -> tuple[int, ...] | None:
    if layers_per_stage is None:
        return None
    listed = isinstance(layers_per_stage, Iterable) and not isinstance(layers_per_stage, str | bytes)
    found = tuple(layers_per_stage) if listed else ()
    if not found or not all(isinstance(size, int) and not isinstance(size, bool) for size in found):
        raise ValueError(
            f"layers_per_stage={layers_per_stage!r} must be whole numbers, one for each stage, like [7, 8, 8, 7]"
        )
    return found


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
    if not isinstance(model, str):
        raise ValueError(
            f"model={model!r} must be a ModelConfig, the name of a preset, or the path of a config.json"
        )
    return preset(model)
