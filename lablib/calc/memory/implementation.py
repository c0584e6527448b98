"""Whose operators are counted: the papers', this course's, Hugging Face's or Megatron-LM's; each an object that answers.

    config.family in find_implementation("hf").joined_qkv

What an implementation keeps for backward is in `tape`, operator by operator.
"""

from __future__ import annotations

import warnings

from lablib.calc.errors import either, one_of
from lablib.calc.models import ModelConfig

#: Families that Hugging Face's classes are counted of, the plainest first.
FAMILIES = (
    *("gpt2", "llama", "qwen2", "mistral", "qwen3", "starcoder2", "gemma", "olmo2", "phi3", "gpt-neox"),
    *("mixtral", "qwen3-moe"),
)
ATTENTION = ("fused", "plain")
WITH_EXPERTS = ("mixtral", "qwen3-moe")


def check_config(config: ModelConfig) -> None:
    """Raise a ValueError that names what the toy transformer does not have."""
    if config.family not in ("gpt2", "llama"):
        raise ValueError(
            f"{config.name}: the toy transformer is built from gpt2 or llama, not from family {config.family!r}"
        )
    _refuse_extras(config, "the toy transformer has")
    if not config.learned_positions and config.head_dim % 2:
        raise ValueError(
            f"head_dim={config.head_dim} must be even: rotary positions turn pairs; use {config.head_dim + 1}"
        )


def _refuse_extras(config: ModelConfig, what: str) -> None:
    """Raise a ValueError if a model has more than blocks of attention and MLP with two norms."""
    extras = {
        "experts": config.is_moe,
        "latent attention": config.is_mla,
        "norms on q and k": config.qk_norm,
        f"{config.norms_per_layer} norms a layer, only 2": config.norms_per_layer != 2,
    }
    for extra, present in extras.items():
        if present:
            raise ValueError(f"{config.name}: {what} no {extra}")


def _check_hugging_face(config: ModelConfig) -> None:
    """Raise a ValueError unless the model is one of those that are counted here."""
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


def _check_torchtitan(config: ModelConfig) -> None:
    """Raise a ValueError unless the model is one that torchtitan's Llama 3 can be."""
    if config.family != "llama" or config.tied or config.qkv_bias or not config.gated_mlp or config.norm != "rmsnorm":
        raise ValueError(
            f"{config.name}: implementation='torchtitan' knows its Llama 3, of family 'llama' with an untied head, not "
            f"family {config.family!r}; use implementation='paper'"
        )
    _refuse_extras(config, "torchtitan's Llama 3 has")


class Implementation(str):
    """One of them; this one is eager PyTorch with blocks as `lablib.toys.transformer` has them.

    Attributes:
        eager: Whether it runs operator by operator in eager PyTorch, with autocast's casts among them. Then tensor
            parallelism is PyTorch's, which splits neither the embedding nor the logits.
        loss_in_root: Whether the loss is inside of FSDP2's root module.
        holds_variables: Whether variables of the model's Python code hold tensors longer than autograd does.
        shares_mask: Whether plain attention has one mask for all blocks, in the dtype of the stream.
        checkpoints_positions: Whether position ids are an argument of every block, which a checkpoint holds.
        splits_stream: Whether tensor parallelism can split the stream too (sequence parallelism).
        accumulates_in_kernel: Whether matrices add their gradients to a buffer that is always there, so that no gradient
            of theirs is made, and whoever asks gets a dummy; one for each shape.
        fused_norms: Whether it is torchtitan's model, in eager PyTorch with norms of one operator.
        context_ways: Ways of context parallelism that are counted.
        recomputes: What of a block can be run again in backward.
        keeps_stage_outputs: Whether a pipeline's runtime holds a stage's output until its backward.
        keeps_logits: Whether the loss keeps the logits and writes their gradient over them, and no fp32 probabilities.

    Families of models of which it has a block
        joined_qkv: with q, k and v in one matrix.
        joined_gate: with gate and up in one matrix.
        inputs_first: with matrices that have their inputs first (Conv1D).
        wide_norms: with an RMSNorm that multiplies with its weight in fp32, and not in the model's dtype.
        shifted_norms: with an RMSNorm that multiplies with 1 + its weight, in fp32: a tensor of its own.
        own_names: whose matrices have names that our adapters do not know.
        wide_tables: with rotary tables that are fp32 always, and a cast back of what they turn.
        joined_heads: that puts the turned part of a head together with the rest, even where the rest is nothing.
        norms_last: that registers both norms behind attention and MLP.
        joined_experts: with all experts of a layer in two tensors of three dims: gate and up, and down.
        router_last: that registers its router behind its experts.
        wide_routing: whose weights of the chosen experts stay fp32, so that what experts made becomes fp32 too.
    """

    __slots__ = ()
    eager = keeps_stage_outputs = True
    splits_stream = accumulates_in_kernel = keeps_logits = fused_norms = False
    loss_in_root = holds_variables = shares_mask = checkpoints_positions = False
    context_ways: tuple[str, ...] = ("ring",)
    recomputes: tuple[str, ...] = ("none", "selective", "full")
    joined_qkv: tuple[str, ...] = ()
    joined_gate = inputs_first = wide_norms = shifted_norms = own_names = wide_tables = joined_heads = ()
    norms_last = joined_experts = router_last = wide_routing = ()

    def check_recompute(self, recompute: str) -> None:
        """Raise a ValueError unless there is such a run: some classes know whole blocks alone."""
        one_of("recompute", recompute, Implementation.recomputes)
        if recompute not in self.recomputes:
            raise ValueError(
                f"implementation={str(self)!r} runs whole blocks again or nothing, so recompute={recompute!r} is no run of it; "
                f"use {either(self.recomputes)}, or another implementation"
            )

    def check_model(self, config: ModelConfig) -> None:
        """Raise a ValueError unless this model is counted with it."""
        check_config(config)

    def check_split(
        self, config: ModelConfig, *, attention: str, seq: int, tp: int = 1, cp: int = 1, cp_way: str = "ring"
    ) -> None:
        """Raise a ValueError unless it is counted with these ranks: eager classes were measured with few models on several."""
        one_of("attention", attention, ATTENTION)
        if tp > 1 and self.fused_norms:
            raise ValueError(
                f"implementation={str(self)!r} with tp={tp} is not known: torchtitan splits stream and loss too; use "
                "implementation='paper'"
            )
        if tp > 1 and self.eager:
            how = f"implementation={str(self)!r} with tp={tp}"
            if config.family not in ("gpt2", "llama", "qwen2", "mistral") or self.masks_window(config, seq):
                raise ValueError(
                    f"{how} does not know {config.name}: family {config.family!r} and sliding windows were not measured with "
                    "it; use implementation='paper'"
                )
            if cp > 1:
                raise ValueError(f"{how} is not known with cp={cp}; use 1, or implementation='paper'")
        how = f"implementation={str(self)!r}" + (f" with cp={cp}" if cp > 1 else "")
        paper = "or implementation='paper'"
        if cp > 1 and cp_way not in self.context_ways:
            known = either(self.context_ways) if self.context_ways else f"cp=1, {paper}"
            raise ValueError(f"{how} is not known with cp_way={cp_way!r}; use {known}")
        families = ("llama", "qwen2", "qwen3", "mistral") if self.holds_variables else ("llama", "gpt2")
        if cp > 1 and self.eager and (config.family not in families or self.masks_window(config, seq)):
            raise ValueError(
                f"{how} does not know {config.name}: family {config.family!r} or its sliding window was not measured with "
                f"it; use a model of family {either(families)} without a window, {paper}"
            )
        if attention == "plain" and (self.fused_norms or (self.eager and cp > 1)):
            raise ValueError(f"{how} is not known with attention='plain'; use 'fused', {paper}")

    def default_dropout(self, config: ModelConfig) -> float:
        """Return the probability of dropout where none was given."""
        return 0.0

    def masks_window(self, config: ModelConfig, seq: int) -> bool:
        """Return whether fused attention gets a sliding window as a mask of every pair of tokens."""
        return False


class _Paper(Implementation):
    __slots__ = ()
    eager = False
    splits_stream = True
    context_ways = ("ring", "gathered", "ulysses")  # a rank's own q, k, v and output, whatever the way

    def check_model(self, config: ModelConfig) -> None:
        pass

    def default_dropout(self, config: ModelConfig) -> float:
        return 0.1 if config.family == "gpt2" else 0.0


class _HuggingFace(Implementation):
    __slots__ = ()
    loss_in_root = holds_variables = shares_mask = checkpoints_positions = True
    context_ways = ("ring", "gathered", "ulysses")
    recomputes = ("none", "full")  # gradient_checkpointing_enable wraps each decoder layer
    joined_qkv = ("gpt2", "phi3", "gpt-neox")
    joined_gate = ("phi3",)
    inputs_first = ("gpt2",)
    wide_norms = ("gemma", "olmo2")
    shifted_norms = ("gemma",)
    own_names = ("starcoder2", "phi3", "gpt-neox")
    wide_tables = ("olmo2",)
    joined_heads = ("phi3", "gpt-neox")
    norms_last = tuple(family for family in FAMILIES if family not in ("gpt2", "gpt-neox"))
    joined_experts = WITH_EXPERTS
    router_last = ("qwen3-moe",)
    wide_routing = ("mixtral",)

    def check_model(self, config: ModelConfig) -> None:
        _check_hugging_face(config)

    def masks_window(self, config: ModelConfig, seq: int) -> bool:
        return config.window > 0 and seq >= config.window


class _Torchtitan(Implementation):
    """torchtitan 0.3's Llama 3 with `CrossEntropyLoss`, not compiled."""

    __slots__ = ()
    fused_norms = True
    context_ways = ()
    recomputes = ("none", "full")

    def check_model(self, config: ModelConfig) -> None:
        _check_torchtitan(config)


class _Megatron(_Paper):
    """Megatron-LM's core with Transformer Engine, as its arguments default to: fused norms, SwiGLU and attention.

    Source: megatron/core/tensor_parallel/layers.py, models/gpt, pipeline_parallel/schedules.py and fusions;
    transformer_engine/pytorch/module/base.py.
    """

    __slots__ = ()
    accumulates_in_kernel = True
    keeps_stage_outputs = False
    context_ways = ("ring",)


class _MegatronFusedLoss(_Megatron):
    """The same with --cross-entropy-loss-fusion --cross-entropy-fusion-impl te (transformer_engine/pytorch/cross_entropy.py)."""

    __slots__ = ()
    keeps_logits = True


IMPLEMENTATIONS = {
    "paper": _Paper("paper"),
    "toy": Implementation("toy"),
    "hf": _HuggingFace("hf"),
    "torchtitan": _Torchtitan("torchtitan"),
    "megatron": _Megatron("megatron"),
    "megatron-te-loss": _MegatronFusedLoss("megatron-te-loss"),
}


def find_implementation(name: str) -> Implementation:
    """Return an implementation by its name.

    Raises:
        ValueError: If the name is unknown.
    """
    return IMPLEMENTATIONS[one_of("implementation", name, IMPLEMENTATIONS)]


def current_names(settings: dict[str, object], level: int = 3) -> dict[str, object]:
    """Return settings under the names of this version; an old one gives a DeprecationWarning."""
    found = dict(settings)
    if "kernels" in found:
        warnings.warn("kernels= is now called implementation=", DeprecationWarning, stacklevel=level)
        found["implementation"] = found.pop("kernels")
    if found.get("sharding") == "whole":
        warnings.warn("sharding='whole' is now called 'per-tensor'", DeprecationWarning, stacklevel=level)
        found["sharding"] = "per-tensor"
    return found
