"""Whose operators are counted: the papers', our transformer's, or Hugging Face's. Each is a name that answers.

    find_implementation("hf").layer(share, recompute="none", attention="fused")

What it keeps in closed form is in `paper_activations`, `toy_activations` and `hf_activations`; what it does operator by
operator, on a tape, in `tape_paper`, `tape_blocks` and `tape_ends`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps

from lablib.calc.errors import one_of
from lablib.calc.memory.activations import hf, paper, toy
from lablib.calc.memory.activations.paper import Share
from lablib.calc.memory.tape import (
    BlockSetting,
    Tape,
    eager_block,
    eager_embedding,
    eager_head,
    paper_block,
    paper_embedding,
    paper_head,
)
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
        source: Where what it keeps can be checked.
    """

    __slots__ = ()
    eager = True
    loss_in_root = holds_variables = shares_mask = checkpoints_positions = False
    _kept = toy

    def default_dropout(self, config: ModelConfig) -> float:
        """Return the probability of dropout where none was given."""
        return 0.0

    def joins_qkv(self, config: ModelConfig) -> bool:
        """Return whether q, k and v are one matrix, and matrices have their inputs first (Conv1D)."""
        return False

    def norms_last(self, config: ModelConfig) -> bool:
        """Return whether a block registers its norms behind attention and MLP."""
        return False

    def check(self, config: ModelConfig) -> None:
        """Raise a ValueError unless it has such a model."""
        self._kept.check_config(config)

    def layer(self, share: Share, *, experts: bool, recompute: str, attention: str) -> dict[str, int]:
        """Return the bytes that one layer keeps, by kind."""
        own = share.one_rank
        return self._kept.layer(own, share.batch, share.seq, share.value, recompute, attention, share.dropout)

    def embedding(self, share: Share) -> dict[str, int]:
        """Return the bytes that the embedding keeps, by kind."""
        return self._kept.embedding(share.config, share.batch, share.seq, share.value, share.dropout)

    def head(self, share: Share) -> dict[str, int]:
        """Return the bytes that final norm, head and loss keep, by kind."""
        return self._kept.head(share.config, share.batch, share.seq, share.value)

    def block_tape(self, setting: BlockSetting) -> Tape:
        """Return the tape of one block."""
        return eager_block(setting)

    def head_tape(self, setting: BlockSetting) -> Tape:
        """Return the tape of final norm, head and loss."""
        return eager_head(setting)

    def embedding_tape(self, setting: BlockSetting) -> Tape:
        """Return the tape of the embeddings and the dropout behind them."""
        return eager_embedding(setting)


class _Paper(Implementation):
    __slots__ = ()
    eager = False

    def default_dropout(self, config: ModelConfig) -> float:
        return 0.1 if config.family == "gpt2" else 0.0

    def check(self, config: ModelConfig) -> None:
        pass

    def layer(self, share: Share, *, experts: bool, recompute: str, attention: str) -> dict[str, int]:
        return paper.layer(share, experts=experts, recompute=recompute, attention=attention)

    def embedding(self, share: Share) -> dict[str, int]:
        return paper.embedding(share)

    def head(self, share: Share) -> dict[str, int]:
        return paper.head(share)

    def block_tape(self, setting: BlockSetting) -> Tape:
        return paper_block(setting)

    def head_tape(self, setting: BlockSetting) -> Tape:
        return paper_head(setting)

    def embedding_tape(self, setting: BlockSetting) -> Tape:
        return paper_embedding(setting)


class _HuggingFace(Implementation):
    __slots__ = ()
    loss_in_root = holds_variables = shares_mask = checkpoints_positions = True
    _kept = hf

    def joins_qkv(self, config: ModelConfig) -> bool:
        return config.family == "gpt2"

    def norms_last(self, config: ModelConfig) -> bool:
        return config.family != "gpt2"


IMPLEMENTATIONS = {"paper": _Paper("paper"), "toy": Implementation("toy"), "hf": _HuggingFace("hf")}


def find_implementation(name: str) -> Implementation:
    """Return an implementation by its name.

    Raises:
        ValueError: If there is none of this name.
    """
    return IMPLEMENTATIONS[one_of("implementation", name, IMPLEMENTATIONS)]


def current_names(settings: dict[str, object], level: int = 3) -> dict[str, object]:
    """Return settings under their present names: `kernels` is `implementation`, with a DeprecationWarning."""
    if "kernels" not in settings:
        return settings
    warnings.warn("kernels= is now called implementation=", DeprecationWarning, stacklevel=level)
    return {"implementation" if name == "kernels" else name: value for name, value in settings.items()}


def accepts_old_names(function: Callable) -> Callable:
    """Let a function take settings under the names of the version before."""

    @wraps(function)
    def call(*args: object, **settings: object) -> object:
        return function(*args, **current_names(settings))

    return call
