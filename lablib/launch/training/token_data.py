"""Training data: token files, an order of samples that does not depend on the ranks, and tasks.

A token file is a NumPy array file (.npy) of 16- or 32-bit token ids. It is mapped into memory: a rank reads the pages
that it needs, and all ranks of a machine share them.

All samples of an epoch are shuffled by seed and epoch, epochs follow each other without a gap, and step k takes the
next `global_batch` samples. The position is one number, the samples taken so far, so a run continues where it was on
any number of ranks:

    samples taken: 8, global batch 4     one rank     two ranks          four ranks
    ... 5 0 7 2 | 6 1 3 4 | 2 7 ...      6 1 3 4      6 3  and  1 4      6, 1, 3, 4

A `Task` gives the trainer its model, samples and logits; `Pretraining` is the usual one.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lablib.calc.flops import step_flops
from lablib.launch.fsdp import init_transformer, materialize
from lablib.launch.ranks import agree, from_rank_0, own_rank
from lablib.launch.training.train_config import TrainConfig, train_model
from lablib.toys.text import VOCAB, text
from lablib.toys.transformer import Transformer

#: A target of this value has no loss.
IGNORE_INDEX = -100


def write_tokens(path: str | Path, ids: np.ndarray | Tensor, *, vocab: int) -> Path:
    """Write token ids to a file that `open_tokens` maps; it appears when it is complete.

    Ids are below `vocab`; up to 65,536 take 2 bytes each, more take 4.
    """
    path, ids = Path(path), np.asarray(ids)
    if path.suffix != ".npy":
        raise ValueError(f"{path} must end with .npy: it is a NumPy array file")
    if ids.ndim != 1 or not ids.size:
        raise ValueError(f"token ids of shape {ids.shape} for {path}; they are 1-D, and at least one")
    if not 0 <= ids.min() <= ids.max() < vocab:
        raise ValueError(f"token ids from {ids.min()} to {ids.max()} are not in 0..{vocab - 1}")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            np.save(file, ids.astype("<u2" if vocab <= 1 << 16 else "<u4"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return path


def text_tokens(folder: str | Path, source: str = "") -> Path:
    """Write a text as byte-level tokens to `text-<checksum>.npy` in a folder, unless it is there; return the file.

    The source is a UTF-8 file, or "" for the course's own prose.
    """
    encoded = text(source or None).encode()
    path = Path(folder) / f"text-{zlib.crc32(encoded):08x}.npy"
    if not path.exists():
        write_tokens(path, np.frombuffer(encoded, dtype=np.uint8), vocab=VOCAB)
    return path


def open_tokens(path: str | Path) -> np.ndarray:
    """Return the token ids of a file, mapped into memory and read-only."""
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} is no token file: {error}; write one with write_tokens") from None
    if not isinstance(ids, np.ndarray):  # np.load takes archives of arrays, too
        raise ValueError(f"{path} is no token file but an archive; write one with write_tokens")
    if ids.ndim != 1 or ids.dtype.kind != "u":
        raise ValueError(f"{path} holds {ids.dtype} of shape {ids.shape}; token ids are 1-D and unsigned")
    return ids


class TokenWindows:
    """A token file cut into sequences: sample i is tokens i * seq to (i + 1) * seq, both ends included.

    Each begins with the last token of the one before, so that every token but the first is a target once.
    """

    def __init__(self, ids: np.ndarray, *, seq: int, vocab: int) -> None:
        if len(ids) < seq + 1:
            raise ValueError(f"a sequence of seq={seq} needs {seq + 1} tokens, the file has {len(ids)}")
        self.ids, self.seq, self.vocab = ids, seq, vocab

    def __len__(self) -> int:
        return (len(self.ids) - 1) // self.seq

    def read(self, samples: list[int]) -> Tensor:
        """Return some samples, `windows_BT` with T = S + 1, int64, on the CPU."""
        rows = [self.ids[i * self.seq : (i + 1) * self.seq + 1] for i in samples]
        windows_BT = torch.from_numpy(np.stack(rows).astype(np.int64))
        if (largest := int(windows_BT.max())) >= self.vocab:
            raise ValueError(f"token {largest} is not in the model's vocabulary of {self.vocab}")
        return windows_BT


class SampleOrder:
    """The endless sequence of samples that a run trains on."""

    def __init__(self, count: int, seed: int) -> None:
        if count < 1:
            raise ValueError("there are no samples to order")
        self.count, self.seed = count, seed
        self._epoch, self._shuffled = -1, torch.empty(0, dtype=torch.int64)

    def take(self, first: int, count: int) -> list[int]:
        """Return the samples at places `first` to `first + count - 1`."""
        taken: list[int] = []
        while len(taken) < count:
            epoch, place = divmod(first + len(taken), self.count)
            taken += self._of_epoch(epoch)[place : place + count - len(taken)].tolist()
        return taken

    def share(self, first: int, count: int, rank: int, ranks: int) -> list[int]:
        """Return a rank's share of these samples: every `ranks`-th, from its own number on."""
        return self.take(first, count)[rank::ranks]

    def _of_epoch(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            # Spread apart, so that neighbouring seeds do not share their epochs.
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._shuffled = epoch, torch.randperm(self.count, generator=generator)
        return self._shuffled


def token_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Return the sum of the cross-entropies of all targets, in fp32; those that are `IGNORE_INDEX` have none.

    The sum and not the mean: ranks and micro-batches may hold different numbers of targets, and a mean of their means
    would weigh them wrongly.
    """
    return F.cross_entropy(
        logits_BSV.float().flatten(0, 1), targets_BS.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


def compiled_loss(how: bool | str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `token_loss`, compiled if asked for: one kernel then reads the logits and makes no fp32 copy of them."""
    if not how:
        return token_loss
    return torch.compile(token_loss, backend=how if isinstance(how, str) else "inductor")


@dataclass(frozen=True)
class TaskFlops:
    """FLOPs of one optimizer step."""

    model: float  # what the task needs: the numerator of MFU
    hardware: float  # what is computed, recomputation included: the numerator of HFU


class Task:
    """A model and its data. The trainer calls the methods in this order.

    Attributes:
        uneven: Whether samples differ in their number of targets; ranks then count them in every step.
    """

    uneven = False

    def build(self) -> nn.Module:
        """Return the full model on the meta device: shapes and no memory."""
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
    """Next-token prediction on a text, by the course's own transformer."""

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
