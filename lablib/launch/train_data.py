"""Token files that need no memory, and an order of samples that knows nothing of ranks.

A token file is a NumPy array file (.npy) of 16- or 32-bit token ids. It is mapped into memory: a rank reads the pages
that it needs, and all ranks of a machine share them.

The order: all samples of an epoch are shuffled by seed and epoch, epochs follow each other without a gap, and step k
takes the next `global_batch` samples. The position in it is one number, the samples taken so far. So a run continues
where it was, whatever the number of ranks is now:

    samples taken: 8, global batch 4     one rank     two ranks          four ranks
    ... 5 0 7 2 | 6 1 3 4 | 2 7 ...      6 1 3 4      6 3  and  1 4      6, 1, 3, 4
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from lablib.toys.text import VOCAB, text

_CHUNK = 1 << 24  # token ids written at a time


def write_tokens(path: str | Path, chunks: Iterable[np.ndarray | Tensor], *, vocab: int) -> Path:
    """Write token ids to a file that `open_tokens` maps; it appears when it is complete.

    Args:
        path: Target, a name that ends with .npy.
        chunks: Pieces of the text in order, each a 1-D array of ids.
        vocab: Ids are below it; up to 65,536 take 2 bytes each, more take 4.

    Raises:
        ValueError: If the name is another, a piece is not 1-D, an id is out of range, or there are none.
    """
    path = Path(path)
    if path.suffix != ".npy":
        raise ValueError(f"{path} must end with .npy: it is a NumPy array file")
    dtype = np.dtype("<u2" if vocab <= 1 << 16 else "<u4")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    count = 0
    try:
        with aside.open("wb") as file:
            data_at = _header(file, dtype, 0)
            for chunk in chunks:
                ids = np.asarray(chunk)
                if ids.ndim != 1:
                    raise ValueError(f"a piece of {path} has shape {ids.shape}; token ids are 1-D")
                if ids.size and not 0 <= ids.min() <= ids.max() < vocab:
                    raise ValueError(f"token ids from {ids.min()} to {ids.max()} are not in 0..{vocab - 1}")
                for first in range(0, ids.size, _CHUNK):
                    file.write(ids[first : first + _CHUNK].astype(dtype).tobytes())
                count += ids.size
            if not count:
                raise ValueError(f"there are no tokens to write to {path}")
            file.seek(0)
            # The header leaves room for a longer shape, so it keeps its length.
            if _header(file, dtype, count) != data_at:
                raise RuntimeError("NumPy's header changed its length")
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return path


def text_tokens(folder: str | Path, source: str = "") -> Path:
    """Write a text as byte-level tokens into a folder, unless its file is there already; return the file.

    Args:
        folder: Where to write `text-<checksum>.npy`: another text gets another name.
        source: A UTF-8 file; "" for the course's own prose.

    Raises:
        ValueError: If the source cannot be read.
    """
    encoded = text(source or None).encode()
    path = Path(folder) / f"text-{zlib.crc32(encoded):08x}.npy"
    if not path.exists():
        write_tokens(path, [np.frombuffer(encoded, dtype=np.uint8)], vocab=VOCAB)
    return path


def open_tokens(path: str | Path) -> np.ndarray:
    """Return the token ids of a file, mapped into memory and read-only.

    Args:
        path: Written by `write_tokens`.

    Raises:
        ValueError: If it is no such file, or it is cut short.
    """
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

    Args:
        ids: From `open_tokens`.
        seq: Inputs in a sequence, S.
        vocab: Of the model.

    Raises:
        ValueError: If the file is too short for one sequence.
    """

    def __init__(self, ids: np.ndarray, *, seq: int, vocab: int) -> None:
        if len(ids) < seq + 1:
            raise ValueError(f"a sequence of seq={seq} needs {seq + 1} tokens, the file has {len(ids)}")
        self.ids, self.seq, self.vocab = ids, seq, vocab

    def __len__(self) -> int:
        return (len(self.ids) - 1) // self.seq

    def read(self, samples: list[int]) -> Tensor:
        """Return some samples, `windows_BT` with T = S + 1, int64, on the CPU.

        Raises:
            ValueError: If a token is not in the model's vocabulary; a GPU would end with a memory error.
        """
        rows = [self.ids[i * self.seq : (i + 1) * self.seq + 1] for i in samples]
        windows_BT = torch.from_numpy(np.stack(rows).astype(np.int64))
        if (largest := int(windows_BT.max())) >= self.vocab:
            raise ValueError(f"token {largest} is not in the model's vocabulary of {self.vocab}")
        return windows_BT


class SampleOrder:
    """The endless sequence of samples that a run trains on.

    Args:
        count: Samples in the data.
        seed: Of the shuffles.

    Raises:
        ValueError: If there are no samples.
    """

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
        """Return a rank's share of these samples: every `ranks`-th, from its own number on.

        Args:
            first: As in `take`.
            count: Of all ranks together.
            rank: This rank.
            ranks: How many ranks.
        """
        return self.take(first, count)[rank::ranks]

    def _of_epoch(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            # Spread apart, so that neighbouring seeds do not share their epochs.
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._shuffled = epoch, torch.randperm(self.count, generator=generator)
        return self._shuffled


def _header(file: object, dtype: np.dtype, count: int) -> int:
    """Write the header of a 1-D array; return where the data begins."""
    npy.write_array_header_1_0(
        file, {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    )
    return file.tell()
