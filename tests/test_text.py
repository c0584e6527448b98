"""The training text: real, the same everywhere, cut into deterministic windows."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

import pytest
import torch

from lablib.toys import text

SIZE = 125_235
SHA256 = "71aad43def5be333094a867a2b349560393ad67ee5e663b74616e763c2dfb3a1"


def test_the_text_is_frozen():
    """Losses, norms and shares that labs print follow from these bytes, so an edit of a chapter must not reach them."""
    stored = Path(text.__file__).with_name("text.txt").read_bytes()
    assert (len(stored), hashlib.sha256(stored).hexdigest()) == (SIZE, SHA256)
    assert stored.isascii()
    assert b"\r" not in stored
    assert text.text().encode() == stored


def test_a_wheel_carries_the_text():
    root = Path(text.__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    assert "text.txt" in project["tool"]["setuptools"]["package-data"]["lablib.toys"]


def test_tokens_are_bytes_and_come_back():
    content = "Naïve café: 2 × 3"
    tokens = text.tokens(content)
    assert tokens.dtype == torch.int64
    assert tokens.numel() == len(content.encode())
    assert int(tokens.max()) < text.VOCAB
    assert text.decode(tokens) == content
    assert text.decode(tokens[:3]) == "Na\N{REPLACEMENT CHARACTER}"
    assert text.tokens().numel() == len(text.text().encode())


def test_another_text_takes_its_place(tmp_path):
    path = tmp_path / "poem.txt"
    path.write_text("größer", encoding="utf-8")
    assert text.text(path) == "größer"
    for broken, words in ((b"", "is empty"), (b"\xff\xfe", "cannot read .* as UTF-8")):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=words):
            text.text(path)
    with pytest.raises(ValueError, match="cannot read"):
        text.text(tmp_path / "missing.txt")


def test_windows_make_every_token_a_target_once():
    tokens = torch.arange(23)
    windows = text.windows(tokens, 5)
    assert windows.shape == (4, 6)
    assert windows[:, 1:].flatten().tolist() == list(range(1, 21))
    assert windows[:, :-1].flatten().tolist() == list(range(20))
    assert text.windows(torch.arange(6), 5).tolist() == [[0, 1, 2, 3, 4, 5]]


def test_batches_are_windows_of_the_text_and_follow_the_seed():
    tokens = torch.arange(50)
    stream = text.batches(tokens, batch=3, seq=7, seed=4)
    first, second = next(stream), next(stream)
    assert first.shape == second.shape == (3, 8)
    for window in torch.cat((first, second)):
        assert torch.equal(window, window[0] + torch.arange(8))
    assert not torch.equal(first, second)
    again = text.batches(tokens, batch=3, seq=7, seed=4)
    assert torch.equal(next(again), first)
    assert not torch.equal(next(text.batches(tokens, batch=3, seq=7, seed=5)), first)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda t: text.batches(t, batch=0, seq=3, seed=1), "batch=0"),
        (lambda t: text.batches(t, batch=1, seq=0, seed=1), "seq=0"),
        (lambda t: text.batches(t, batch=1, seq=10, seed=1), "needs 11 tokens, the text has 10"),
        (lambda t: text.windows(t, 10), "needs 11 tokens"),
        (lambda t: text.windows(t[None], 2), "one dim"),
        (lambda t: text.sample_windows(t, count=0, seq=2, generator=torch.Generator()), "0 windows"),
    ],
)
def test_bad_input_is_named_before_the_first_batch(make, words):
    with pytest.raises(ValueError, match=words):
        make(torch.arange(10))
