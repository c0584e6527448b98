"""One training run as the memory calculator sees it: every setting, checked together before anything is computed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from os import PathLike
from os.path import exists
from typing import Any

from lablib.calc.errors import LARGEST, check_flag, check_whole, either, one_of
from lablib.calc.memory.implementation import ATTENTION, Implementation, current_names, find_implementation
from lablib.calc.models import ModelConfig, from_hf, layer_tensors, preset
from lablib.calc.parallel import WAYS, check_degrees, check_schedule, check_shard
from lablib.calc.precision import Optimizer, Recipe, find_optimizer, recipe
from lablib.calc.schedules import SCHEDULES, layers_of_stage
from lablib.calc.torch_versions import PINNED, release
from lablib.calc.units import MiB

TUNINGS = ("full", "lora", "qlora")
LORA_TARGETS = ("all", "attention")
RECOMPUTE = ("none", "selective", "full")
SHARDINGS = ("flat", "fsdp2", "per-tensor")
MOST_LAYERS = 100_000  # as of a config.json
LONGEST = 2**30  # tokens of a sequence; the longest of a published model is below 2**27
OFFLOADS = ("none", "optimizer", "gradients", "parameters")


def _setting(
    default: object,
    text: str,
    *,
    choices: tuple[str, ...] = (),
    least: int | None = None,
    most: int = LARGEST,
    flag: bool = False,
) -> Any:
    """Return a field with its default, its help and its range."""
    about = {"help": text, "choices": choices, "least": least, "most": most, "flag": flag}
    return field(default=default, metadata=about)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Every setting of a training run, with its default and its meaning; it checks itself when it is made.

    Commands get an option for each of these fields.

    Raises:
        ValueError: If a setting is out of range, sizes do not divide, or settings contradict each other.
    """

    model: ModelConfig
    recipe: Recipe = _setting("mixed-bf16", "Dtypes: mixed-bf16, fp32, fsdp2-mixed, pure-bf16, ...; see `recipes`.")
    optimizer: Optimizer = _setting(
        "adamw", "adamw, adamw-8bit, adamw-4bit, adamw-fp8, adamw-bf16, sgd, ...; see `recipes`."
    )
    tuning: str = _setting(
        "full",
        "full; lora: frozen weights and trained adapters; qlora: the same with the blocks' matrices in NF4.",
        choices=TUNINGS,
    )
    lora_rank: int = _setting(16, "Rank of the adapters.", least=1)
    lora_targets: str = _setting(
        "all", "Matrices of a block with an adapter: all (QLoRA's advice) or attention.", choices=LORA_TARGETS
    )
    micro_batch: int = _setting(1, "Sequences in one forward pass of one replica.", least=1)
    seq: int = _setting(
        None,
        "Tokens in a sequence, before cp divides it, like 8192 or 8k; default: the model's longest.",
        least=1,
        most=LONGEST,
    )
    dp: int = _setting(1, "Data-parallel replicas.", least=1)
    zero: int = _setting(
        0, "ZeRO stage: 1 shards the optimizer, 2 gradients too, 3 weights too, over dp times cp ranks.", least=0
    )
    shard: int | None = _setting(
        None,
        "Ranks that share one copy of what ZeRO shards, each copy a replica of the others (HSDP); default: dp times cp.",
        least=2,
    )
    tp: int = _setting(
        1,
        "Tensor-parallel ranks. With implementation toy or hf it is PyTorch's parallelize_module with Hugging Face's plan.",
        least=1,
    )
    sequence_parallel: bool = _setting(False, "Split norms and residuals over tp too.", flag=True)
    pp: int = _setting(1, "Pipeline stages.", least=1)
    schedule: str = _setting("1f1b", "1f1b, gpipe or interleaved.", choices=SCHEDULES)
    virtual_stages: int = _setting(1, "Chunks of layers in each stage, when interleaved.", least=1)
    num_microbatches: int | None = _setting(
        None, "Micro-batches in a step; default: enough to fill the pipeline.", least=1
    )
    layers_per_stage: tuple[int, ...] | None = _setting(None, "Layers of each stage, if uneven: 7,8,8,7.")
    cp: int = _setting(1, "Context-parallel ranks, which split every sequence and hold the same weights.", least=1)
    cp_way: str = _setting(
        "ring",
        "How queries meet the keys of all cp ranks: ring (keys and values travel from rank to rank), gathered (all are "
        "gathered) or ulysses (ranks exchange heads for tokens).",
        choices=WAYS,
    )
    ep: int = _setting(1, "Expert-parallel ranks, taken from cp times dp.", least=1)
    etp: int | None = _setting(
        None, "Ranks that split one expert; ep times etp divides tp times cp times dp; default: tp.", least=1
    )
    recompute: str = _setting(
        "none",
        "none, selective (the attention core runs again) or full (all but each block's input).",
        choices=RECOMPUTE,
    )
    attention: str = _setting("fused", "fused, which never stores the scores, or plain, which does.", choices=ATTENTION)
    implementation: Implementation = _setting(
        "paper",
        "Whose tensors: paper (Korthikanti et al.), toy (lablib.toys.transformer), hf (Hugging Face's eager classes), "
        "torchtitan (its Llama 3), megatron (Megatron-LM with Transformer Engine) or megatron-te-loss (and its "
        "fused loss).",
    )
    experts: str = _setting(
        "grouped",
        "How Hugging Face's classes run experts: grouped (grouped_mm, their default) or loop (their eager one: one "
        "expert after the other).",
        choices=("grouped", "loop"),
    )
    imbalance: float = _setting(
        1.0, "Tokens that the fullest expert-parallel rank gets, over the average; with ep above 1."
    )
    dropout: float | None = _setting(None, "Dropout probability; default: 0, with paper as published.")
    offload: str = _setting(
        "none",
        "On the CPU: none, optimizer (master weights and moments), gradients (them too, ZeRO-Offload) or parameters "
        "(all states; weights are gathered unit by unit).",
        choices=OFFLOADS,
    )
    gradient_as_bucket_view: bool = _setting(
        False, "DDP's option: gradients live in its buckets, with no second copy.", flag=True
    )
    bucket_bytes: int = _setting(
        25 * MiB, "Size of a gradient bucket of ZeRO stages 1 and 2, of which two exist.", least=0
    )
    prefetch: int | None = _setting(
        None,
        "Units that ZeRO-3 gathers ahead of the one in use; default: 1 with sharding flat, and what FSDP2 does by itself.",
        least=0,
    )
    sharding: str = _setting(
        "flat",
        "flat: a shard is ceil(n / ranks) of one flat array; fsdp2: each tensor by its rows (fully_shard), with zero 3 "
        "(reshards after forward) or 2 (does not); per-tensor: each tensor's optimizer states on one rank "
        "(ZeroRedundancyOptimizer), with zero 1, and the fullest rank is described.",
        choices=SHARDINGS,
    )
    torch: str = _setting(PINNED, "PyTorch whose FSDP2 it is: 2.11 to 2.15.")

    def __post_init__(self) -> None:
        # Names become what they name, once, before anybody reads a field.
        model = resolve_model(self.model)
        resolved = {
            "model": model,
            "recipe": recipe(self.recipe),
            "optimizer": find_optimizer(self.optimizer),
            "implementation": find_implementation(self.implementation),
            "seq": model.max_positions if self.seq is None else self.seq,
            "layers_per_stage": _sizes(self.layers_per_stage),
            "torch": release(self.torch),
        }
        for name, value in resolved.items():
            object.__setattr__(self, name, value)
        self._check_ranges()
        self.implementation.check_recompute(self.recompute)
        check_degrees(
            model, tp=self.tp, cp=self.cp, dp=self.dp, ep=self.ep, etp=self.etp, seq=self.seq,
            sequence_parallel=self.sequence_parallel, cp_way=self.cp_way, imbalance=self.imbalance,
        )  # fmt: skip
        check_shard(self.shard, zero=self.zero, tp=self.tp, cp=self.cp, dp=self.dp, ep=self.ep, etp=self.etp)
        self._check_experts()
        self.implementation.check_split(
            model, attention=self.attention, seq=self.seq, tp=self.tp, cp=self.cp, cp_way=self.cp_way
        )
        self._check_tensor_parallel()
        self._check_context_parallel()
        self._check_adapters()
        self._check_schedule()
        self._check_sharding()

    @property
    def ranks(self) -> int:
        """Ranks of the run: dp, cp, tp and pp multiply; ep lives inside dp times cp."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def reduced_bytes(self) -> int:
        """Bytes of a gradient value as ranks reduce it."""
        return self.recipe.reduced(self.torch)

    @property
    def units_ahead(self) -> int:
        """Units that ZeRO-3 is told to gather ahead; one where nothing is said, but FSDP2 decides by itself."""
        return int(self.sharding == "flat") if self.prefetch is None else self.prefetch

    def replicas(self, expert: bool) -> int:
        """Return over how many ranks ZeRO can shard a parameter: dp times cp, or `shard` of them.

        A routed expert is sharded over what ep and etp leave of these and of tp.

        Args:
            expert: Whether it belongs to a routed expert.
        """
        ranks = self.shard or self.dp * self.cp
        return self.tp * ranks // (self.ep * (self.etp or self.tp)) if expert else ranks

    def _check_ranges(self) -> None:
        for name, setting in SETTINGS.items():
            value, allowed = getattr(self, name), setting.metadata
            if allowed["choices"]:
                one_of(name, value, allowed["choices"])
            elif allowed["flag"]:
                check_flag(name, value)
            elif allowed["least"] is not None and (value is not None or setting.default is not None):
                check_whole(name, value, allowed["least"], allowed["most"])
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

    def _check_experts(self) -> None:
        """Of real classes experts were measured on one rank each."""
        m = self.model
        real = m.family in self.implementation.joined_experts
        if self.experts != "grouped" and not real:
            raise ValueError(
                f"experts={self.experts!r} is a way of Hugging Face's classes with experts, not of {m.name} with "
                f"implementation={self.implementation!r}; use 'grouped'"
            )
        for name, only in (("ep", 1), ("etp", None), ("tuning", "full")):
            if real and getattr(self, name) != only:
                instead = "leave it out" if only is None else f"use {only!r}"
                raise ValueError(
                    f"implementation={self.implementation!r} is not known with {name}={getattr(self, name)!r} and the experts "
                    f"of {m.name}; {instead}, or use implementation='paper'"
                )

    def _check_tensor_parallel(self) -> None:
        """With eager classes `tp` is PyTorch's, with Hugging Face's plan; what it was not measured with is refused."""
        if self.tp == 1 or not self.implementation.eager:
            return
        how, m = f"implementation={self.implementation!r} with tp={self.tp}", self.model
        if m.tied or m.family in self.implementation.joined_qkv:
            why = "its head and its embedding are one table" if m.tied else "its matrices are Conv1D, not Linear"
            raise ValueError(f"{how} does not know {m.name}: {why}; use implementation='paper'")
        self._know_only(how, sequence_parallel=(False,), pp=(1,), tuning=("full",), offload=("none",))
        if self.dp > 1 and self.sharding != "fsdp2":
            raise ValueError(
                f"{how} is not known with dp={self.dp} and sharding={self.sharding!r}: DDP takes no split tensors; "
                "use sharding='fsdp2' and zero=3, or implementation='paper'"
            )
        if self.recipe.master:
            raise ValueError(
                f"{how} is not known with recipe={self.recipe.name!r}, which has a master copy; use 'fsdp2-mixed', "
                "'autocast-bf16', 'pure-bf16' or 'fp32', or implementation='paper'"
            )

    def _check_context_parallel(self) -> None:
        """With eager classes `cp` is a real ring's; what it was not measured with is refused."""
        if self.cp == 1 or not self.implementation.eager:
            return
        how = f"implementation={self.implementation!r} with cp={self.cp}"
        self._know_only(how, pp=(1,), tuning=("full",), dropout=(0.0, None))
        if self.recipe.casts:
            raise ValueError(
                f"{how} is not known with recipe={self.recipe.name!r}: autocast does not reach into its attention; use "
                "'fsdp2-mixed', 'pure-bf16' or 'fp32', or implementation='paper'"
            )

    def _check_adapters(self) -> None:
        """`lablib.launch.training.add_lora` puts adapters beside matrices with Llama's names."""
        if self.tuning != "full" and self.model.family in self.implementation.own_names:
            raise ValueError(
                f"tuning={self.tuning!r} is not known with implementation={self.implementation!r} and family "
                f"{self.model.family!r}, whose matrices have other names than Llama's; use tuning='full', or "
                "implementation='paper'"
            )
        if self.tuning != "full" and self.lora_rank > 1:
            most = largest_lora_rank(self.model, self.lora_targets)
            if self.lora_rank > most:
                raise ValueError(
                    f"lora_rank={self.lora_rank:,} is above the {most:,} of the smaller side of the largest adapted "
                    f"matrix of {self.model.name}, where B A has its full rank; use at most {most:,}"
                )

    def _check_schedule(self) -> None:
        layers_of_stage(self.model.num_layers, self.pp, self.virtual_stages, self.layers_per_stage, 0)
        check_schedule(
            self.schedule, pp=self.pp, virtual_stages=self.virtual_stages, num_microbatches=self.num_microbatches
        )

    def _check_sharding(self) -> None:
        how = f"implementation={self.implementation!r}"
        if self.implementation.accumulates_in_kernel:
            why = ": its distributed optimizer is counted, over all weights"
            self._know_only(how, why, zero=(0, 1), sharding=("flat",), tuning=("full",), offload=("none",))
        if self.implementation.fused_norms:
            self._know_only(how, tuning=("full",))
            if self.recipe.casts:
                raise ValueError(
                    f"{how} is not known with recipe={self.recipe.name!r}, which casts at every matmul; use another, or implementation='paper'"
                )
        if self.sharding == "flat":
            return
        zero = {"fsdp2": (2, 3), "per-tensor": (1,)}[self.sharding]
        if self.zero not in zero:
            why = {
                "fsdp2": "FSDP2 shards weights, gradients and optimizer; "
                "use zero=3 (reshards after forward) or zero=2 (keeps the gathered weights until backward)",
                "per-tensor": "ZeroRedundancyOptimizer shards the optimizer alone, by whole parameters; use zero=1",
            }[self.sharding]
            raise ValueError(f"sharding={self.sharding!r} contradicts zero={self.zero}: {why}")
        if self.tuning == "qlora" or self.offload != "none" or self.ep > 1:
            raise ValueError(
                f"sharding={self.sharding!r} is not known with tuning={self.tuning!r}, offload={self.offload!r} and "
                f"ep={self.ep}; use tuning='full' or 'lora', offload='none' and ep=1"
            )
        if self.sharding == "per-tensor" and self.shard:
            raise ValueError(f"sharding='per-tensor' is not known with shard={self.shard}; leave it out")
        if self.sharding == "per-tensor" and self.optimizer.quantized:
            raise ValueError(
                f"sharding='per-tensor' is not known with optimizer={self.optimizer.name!r}; use 'adamw', 'adamw-bf16', "
                "'sgd' or 'sgd-momentum'"
            )
        if self.sharding == "fsdp2" and self.optimizer.shared_table:
            raise ValueError(
                f"sharding='fsdp2' contradicts optimizer={self.optimizer.name!r}: bitsandbytes' optimizers take no DTensor; "
                "use 'adamw-8bit', which is torchao's"
            )

    def _know_only(self, how: str, why: str = "", **known: tuple[object, ...]) -> None:
        """Raise a ValueError for the first setting whose value is not among the known ones."""
        for name, values in known.items():
            found = getattr(self, name)
            if found not in values:
                use = either(map(repr, values))
                raise ValueError(f"{how} is not known with {name}={found!r}{why}; use {use}, or implementation='paper'")


#: The settings by name, in order: fields of `RunConfig` but the model.
SETTINGS = {setting.name: setting for setting in fields(RunConfig) if setting.name != "model"}


@lru_cache(maxsize=64)
def largest_lora_rank(model: ModelConfig, targets: str) -> int:
    """Return the smaller side of the adapted matrix that has the largest: no adapter of a higher rank says more."""
    adapted = [
        tensor
        for layer in {0, model.num_layers - 1}
        for tensor in layer_tensors(model, layer)
        if tensor.is_adapted and targets in ("all", tensor.component)
    ]
    return max(min(tensor.outputs, tensor.inputs) for tensor in adapted)


def run_config(model: RunConfig | ModelConfig | str | PathLike, **settings: object) -> RunConfig:
    """Return the checked settings of a run; those not given have the defaults of `RunConfig`.

    Args:
        model: A ModelConfig, the name of a preset, or the path of a config.json; or a RunConfig, of which other
            settings are wanted, if any.
        **settings: Fields of `RunConfig`; `rung memory --help` explains them.

    Raises:
        ValueError: If a setting does not exist, or as `RunConfig`.
    """
    settings = current_names(settings, level=4)  # who called the function that asks
    for name in settings:
        one_of("setting", name, SETTINGS)
    if isinstance(model, RunConfig):
        return replace(model, **settings) if settings else model
    return RunConfig(model=model, **settings)


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
        model: Text counts as a path if it contains a slash or ends in .json; "meta-llama/Llama-3.1-8B" is one only if it
            is there.

    Raises:
        ValueError: If there is no such model or file.
    """
    if isinstance(model, ModelConfig):
        return model
    if isinstance(model, PathLike):
        return from_hf(model)
    if isinstance(model, str) and ("/" in model or model.endswith(".json")):
        hub = re.fullmatch(r"[\w.-]+/[\w.-]+(?<!\.json)", model) and not exists(model)
        return preset(model) if hub else from_hf(model)
    if not isinstance(model, str):
        raise ValueError(f"model={model!r} must be a ModelConfig, the name of a preset, or the path of a config.json")
    return preset(model)
