"""Whose operators are counted: the papers', this course's, Hugging Face's or Megatron-LM's; each an object that answers.

    find_implementation("hf").joins_qkv(config)

What an implementation keeps for backward is in `activations` as formulas, and in `tape` operator by operator.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps

from lablib.calc.errors import either, one_of
from lablib.calc.models import ModelConfig


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
    """

    __slots__ = ()
    eager = keeps_stage_outputs = True
    splits_stream = accumulates_in_kernel = keeps_logits = fused_norms = False
    loss_in_root = holds_variables = shares_mask = checkpoints_positions = False
    context_ways: tuple[str, ...] = ("ring",)
    recomputes: tuple[str, ...] = ("none", "selective", "full")

    def check_recompute(self, recompute: str) -> None:
        """Raise a ValueError unless there is such a run: some classes know whole blocks alone."""
        one_of("recompute", recompute, Implementation.recomputes)
        if recompute not in self.recomputes:
            raise ValueError(
                f"implementation={str(self)!r} runs whole blocks again or nothing, so recompute={recompute!r} is no run of it; "
                f"use {either(self.recomputes)}, or another implementation"
            )

    def default_dropout(self, config: ModelConfig) -> float:
        """Return the probability of dropout where none was given."""
        return 0.0

    def joins_qkv(self, config: ModelConfig) -> bool:
        """Return whether q, k and v are one matrix."""
        return False

    def joins_gate(self, config: ModelConfig) -> bool:
        """Return whether gate and up are one matrix."""
        return False

    def inputs_first(self, config: ModelConfig) -> bool:
        """Return whether matrices have their inputs first (Conv1D)."""
        return False

    def wide_norms(self, config: ModelConfig) -> bool:
        """Return whether an RMSNorm multiplies with its weight in fp32, and not in the model's dtype."""
        return False

    def shifts_norms(self, config: ModelConfig) -> bool:
        """Return whether an RMSNorm multiplies with 1 + its weight, in fp32: a tensor of its own."""
        return False

    def names_as_llama(self, config: ModelConfig) -> bool:
        """Return whether its matrices have names that our adapters know."""
        return True

    def wide_tables(self, config: ModelConfig) -> bool:
        """Return whether rotary tables are fp32 always, and what they turn is cast back."""
        return False

    def joins_rotated(self, config: ModelConfig) -> bool:
        """Return whether the turned part of a head is put together with the rest, even where the rest is nothing."""
        return False

    def masks_window(self, config: ModelConfig, seq: int) -> bool:
        """Return whether fused attention gets a sliding window as a mask of every pair of tokens."""
        return False

    def norms_last(self, config: ModelConfig) -> bool:
        """Return whether a block registers its norms behind attention and MLP."""
        return False

    def joins_experts(self, config: ModelConfig) -> bool:
        """Return whether all experts of a layer are two tensors of three dims: gate and up, and down."""
        return False

    def routes_last(self, config: ModelConfig) -> bool:
        """Return whether a block registers its router behind its experts."""
        return False

    def wide_routing(self, config: ModelConfig) -> bool:
        """Return whether the weights of the chosen experts stay fp32, so that what experts made becomes fp32 too."""
        return False


class _Paper(Implementation):
    __slots__ = ()
    eager = False
    splits_stream = True
    context_ways = ("ring", "gathered", "ulysses")  # a rank's own q, k, v and output, whatever the way

    def default_dropout(self, config: ModelConfig) -> float:
        return 0.1 if config.family == "gpt2" else 0.0


class _HuggingFace(Implementation):
    __slots__ = ()
    loss_in_root = holds_variables = shares_mask = checkpoints_positions = True
    context_ways = ("ring", "gathered", "ulysses")
    recomputes = ("none", "full")  # gradient_checkpointing_enable wraps each decoder layer

    def joins_qkv(self, config: ModelConfig) -> bool:
        return config.family in ("gpt2", "phi3", "gpt-neox")

    def joins_gate(self, config: ModelConfig) -> bool:
        return config.family == "phi3"

    def inputs_first(self, config: ModelConfig) -> bool:
        return config.family == "gpt2"

    def wide_norms(self, config: ModelConfig) -> bool:
        return config.family in ("gemma", "olmo2")

    def shifts_norms(self, config: ModelConfig) -> bool:
        return config.family == "gemma"

    def names_as_llama(self, config: ModelConfig) -> bool:
        return config.family not in ("starcoder2", "phi3", "gpt-neox")

    def wide_tables(self, config: ModelConfig) -> bool:
        return config.family == "olmo2"

    def joins_rotated(self, config: ModelConfig) -> bool:
        return config.family in ("phi3", "gpt-neox")

    def masks_window(self, config: ModelConfig, seq: int) -> bool:
        return config.window > 0 and seq >= config.window

    def norms_last(self, config: ModelConfig) -> bool:
        return config.family not in ("gpt2", "gpt-neox")

    def joins_experts(self, config: ModelConfig) -> bool:
        return config.is_moe

    def routes_last(self, config: ModelConfig) -> bool:
        return config.family == "qwen3-moe"

    def wide_routing(self, config: ModelConfig) -> bool:
        return config.family == "mixtral"


class _Torchtitan(Implementation):
    """torchtitan 0.3's Llama 3 with `CrossEntropyLoss`, not compiled."""

    __slots__ = ()
    fused_norms = True
    context_ways = ()
    recomputes = ("none", "full")


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


def accepts_old_names(function: Callable) -> Callable:
    """Let a function take settings under the names of the version before."""

    @wraps(function)
    def call(*args: object, **settings: object) -> object:
        return function(*args, **current_names(settings))

    return call
