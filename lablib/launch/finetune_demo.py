"""A pretrained model and a dataset that need no download: a tiny random Qwen2, and sums to learn."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from lablib.launch.finetune import Example, encode
from lablib.launch.pretrained import write_safetensors
from lablib.toys.text import VOCAB


def tiny_qwen2(
    folder: str | Path, *, hidden: int = 32, layers: int = 2, tied: bool = False, seed: int = 0
) -> Path:
    """Write a small Qwen2 with random weights as a pretrained model would lie on disk: config.json and safetensors.

    Its tokens are bytes. It knows nothing, so what it learns later is seen at once.

    Args:
        folder: Target.
        hidden: Width, a multiple of 8.
        layers: Blocks.
        tied: Use the embedding as output head.
        seed: Of the weights.

    Raises:
        ValueError: If the width does not divide into heads.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    if hidden % 8:
        raise ValueError(f"hidden={hidden} must be a multiple of 8: 4 heads of an even width")
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    write_safetensors(Qwen2ForCausalLM(config), Path(folder) / "model.safetensors")
    return Path(folder)


def sums(count: int, *, largest: int = 20, seed: int = 0) -> list[Example]:
    """Return examples such as prompt "12+7=" and answer "19", as bytes.

    Args:
        count: How many.
        largest: Terms are from 0 to this.
        seed: Of the choice.
    """
    draw = random.Random(seed)
    pairs = [(draw.randint(0, largest), draw.randint(0, largest)) for _ in range(count)]
    return [encode(f"{a}+{b}=", str(a + b)) for a, b in pairs]
