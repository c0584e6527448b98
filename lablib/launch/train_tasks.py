"""What is trained on what: a task gives the trainer a model, samples and logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lablib.calc.flops import step_flops
from lablib.launch.meta_init import init_transformer, materialize
from lablib.launch.together import agree, from_rank_0, own_rank
from lablib.launch.train_config import TrainConfig, train_model
from lablib.launch.train_data import TokenWindows, open_tokens, text_tokens
from lablib.toys.transformer import Transformer

#: A target of this value has no loss.
IGNORE = -100


def token_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Return the sum of the cross-entropies of all targets, in fp32; those that are `IGNORE` have none.

    The sum and not the mean: ranks and micro-batches may hold different numbers of targets, and a mean of their means
    would weigh them wrongly.

    Args:
        logits_BSV: Scores of every next token.
        targets_BS: The next tokens.
    """
    return F.cross_entropy(
        logits_BSV.float().flatten(0, 1), targets_BS.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def compiled_loss(how: bool | str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `token_loss`, compiled if asked for: one kernel then reads the logits and makes no fp32 copy of them.

    Args:
        how: False, True, or the name of a backend.
    """
    if not how:
        return token_loss
    return torch.compile(token_loss, backend=how if isinstance(how, str) else "inductor")


@dataclass(frozen=True)
class TaskFlops:
    """FLOPs of one optimizer step.

    Attributes:
        model: What the task needs: the numerator of MFU.
        hardware: What is computed, recomputation included: the numerator of HFU.
    """

    model: float
    hardware: float


class Task:
    """A model and its data. The trainer calls the methods in this order.

    Attributes:
        uneven: Whether samples differ in their number of targets; ranks then count them in every step.
    """

    uneven = False

    def build(self) -> nn.Module:
        """Return the whole model on the meta device: shapes and no memory."""
        raise NotImplementedError

    def fill(self, model: nn.Module, device: torch.device) -> None:
        """Give the sharded model its memory and its first values."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Return the number of samples."""
        raise NotImplementedError

    def read(self, samples: list[int]) -> tuple[Tensor, Tensor]:
        """Return `inputs_BS` and `targets_BS` of some samples, on the CPU."""
        raise NotImplementedError

    def logits(self, model: nn.Module, inputs_BS: Tensor) -> Tensor:
        """Return `logits_BSV`."""
        return model(inputs_BS)

    def flops(self, batch: int, recompute: str) -> TaskFlops | None:
        """Return the FLOPs of a step of `batch` samples, or None where they are not known."""
        return None


class Pretraining(Task):
    """Next-token prediction on a text, by the course's own transformer.

    Args:
        config: The run: its model, its text or token file, its sequence length.

    Raises:
        ValueError: If the text or the token file cannot be used; on all ranks, before the model is built.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.shape = config, train_model(config.model)
        path = [config.tokens]

        def write() -> None:
            if not config.tokens and own_rank() == 0:
                path[0] = str(text_tokens(Path(config.folder), config.text))

        agree(write, "the text could not be written as tokens")
        ids = open_tokens(from_rank_0(path[0]))
        self.windows = TokenWindows(ids, seq=config.seq, vocab=self.shape.vocab)

    def build(self) -> nn.Module:
        """Return the transformer on the meta device."""
        with torch.device("meta"):
            return Transformer(self.shape)

    def fill(self, model: nn.Module, device: torch.device) -> None:
        """Draw the weights from the run's seed, the same on any number of ranks."""
        torch.manual_seed(self.config.seed)
        materialize(model, init_transformer(self.shape), device)

    def __len__(self) -> int:
        return len(self.windows)

    def read(self, samples: list[int]) -> tuple[Tensor, Tensor]:
        """Return the windows without their last and without their first token."""
        windows_BT = self.windows.read(samples)
        return windows_BT[:, :-1], windows_BT[:, 1:]

    def flops(self, batch: int, recompute: str) -> TaskFlops:
        """Return the FLOPs of a step; "matmuls" runs no product again, so it counts as none."""
        counted = {"matmuls": "none"}.get(recompute, recompute)
        step = step_flops(self.shape, batch=batch, seq=self.config.seq, recompute=counted, selective_passes=1)
        return TaskFlops(step.model, step.hardware)
