"""Real English with no download: the course's own prose, as bytes.

`text.txt`, beside this file, is a copy of what the chapters said on one day, without code, formulas and tables: 125 kB
of plain ASCII, under CC BY 4.0 like all prose here (LICENSE-PROSE). It is frozen. The chapters go on changing and this
copy does not, so that a seed gives the same batches on every machine, in every version of Python and of the course.

A token is a byte, so the vocabulary is 256 and every text of every language works.
Any other text takes its place through `path`.

Shapes: B windows, T = S + 1 tokens each: S inputs, and the same moved by one as targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

VOCAB = 256
_PROSE = Path(__file__).with_name("text.txt")


def text(path: str | Path | None = None) -> str:
    """Return the training text: a file's, or by default the course's own prose, the same bytes on every machine."""
    path = _PROSE if path is None else path
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path} as UTF-8 text: {error}") from error
    if not content:
        raise ValueError(f"{path} is empty: give a file with text in it")
    return content


def tokens(content: str | None = None) -> Tensor:
    """Return a text as byte-level tokens, int64, one for each byte of its UTF-8 form."""
    encoded = (text() if content is None else content).encode()
    if not encoded:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8).long()


def decode(tokens_T: Tensor) -> str:
    """Return the text of byte-level tokens; bytes that are no UTF-8, as at a window's edge, become a mark."""
    return bytes(tokens_T.tolist()).decode(errors="replace")


def windows(tokens: Tensor, seq: int) -> Tensor:
    """Return the text cut into consecutive windows, `windows_NT`: a map-style dataset for a sampler.

    Each window begins with the last token of the one before, so that every token is a target once.

    Args:
        seq: Inputs in a window, S; a rest shorter than a window is dropped.
    """
    _check(tokens, seq)
    return tokens.unfold(0, seq + 1, seq).contiguous()


def sample_windows(tokens: Tensor, *, count: int, seq: int, generator: torch.Generator) -> Tensor:
    """Return windows that begin anywhere in the text, `windows_BT`."""
    _check(tokens, seq)
    if count < 1:
        raise ValueError(f"{count} windows: ask for at least 1")
    starts = torch.randint(tokens.numel() - seq, (count, 1), generator=generator)
    return tokens[starts + torch.arange(seq + 1)]


def batches(tokens: Tensor, *, batch: int, seq: int, seed: int) -> Iterator[Tensor]:
    """Return an endless stream of batches `windows_BT`; the same seed gives the same stream.

    Every rank that uses the same seed sees the same batches: splitting them over ranks is a sampler's work.
    """
    _check(tokens, seq)
    if batch < 1:
        raise ValueError(f"batch={batch} must be at least 1")
    generator = torch.Generator().manual_seed(seed)

    def stream() -> Iterator[Tensor]:
        while True:
            yield sample_windows(tokens, count=batch, seq=seq, generator=generator)

    # The checks above run when the stream is made, not when its first batch is asked for.
    return stream()


def _check(tokens: Tensor, seq: int) -> None:
    if seq < 1:
        raise ValueError(f"seq={seq} must be at least 1")
    if tokens.dim() != 1:
        raise ValueError(f"tokens must have one dim, not shape {tuple(tokens.shape)}")
    if tokens.numel() < seq + 1:
        raise ValueError(f"a window of seq={seq} needs {seq + 1} tokens, the text has {tokens.numel()}")
