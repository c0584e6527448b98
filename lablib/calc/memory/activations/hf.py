"""Activations of Hugging Face's eager classes: GPT-2, Llama, Qwen2 and Mistral as `transformers` writes them.

The blocks are those of `lablib.calc.memory.activations.toy`, operator by operator, but for four things:

| what | our transformer | Hugging Face |
|---|---|---|
| GPT-2's GELU | one operator: 2 f a token with its output | written out in eight: 5 f |
| softmax of Llama's plain attention | in the model's dtype | in fp32, and a copy in the model's dtype |
| tokens | windows of s + 1 | s, which are the labels too |
| targets | a copy, where a view cannot be | a shifted copy always |

RMSNorm in fp32, rotary positions in four products, and SiLU and product as two operators are the same, so a Llama
block with fused attention keeps the same bytes in both, and more than the papers' kernels count.

This is training mode with `use_cache=False`, no attention mask, and dropout 0 unless asked for (GPT-2's own config
says 0.1). Checked with transformers 5; names are those of the classes.
"""

from __future__ import annotations

from lablib.calc.memory.activations import toy
from lablib.calc.memory.activations.share import FP32, INT64, Share


def layer(share: Share, *, experts: bool, recompute: str, attention: str) -> dict[str, int]:
    """Return one layer's bytes by kind."""
    config, n, value = share.one_rank, share.tokens, share.value
    kinds = toy.layer(share, experts=experts, recompute=recompute, attention=attention)
    if recompute == "full":
        return kinds
    if config.family == "gpt2":
        # x/2, tanh, 1 + tanh beside GELU's input and output.
        kinds["mlp"] += 3 * n * config.ffn * value
    elif kinds["scores"] and value != FP32:
        # The softmax in fp32; its copy in the model's dtype is kept too, unless dropout reads it and makes another.
        kinds["scores"] += config.num_heads * n * share.seq * (FP32 - (value if share.drops else 0))
    return kinds


def embedding(share: Share) -> dict[str, int]:
    """Return the bytes before the first layer: token ids, and position ids or rotary tables."""
    return toy.embedding(share) | {"tokens": share.tokens * INT64}


def head(share: Share) -> dict[str, int]:
    """Return the bytes of final norm, head and loss."""
    return toy.head(share) | {"loss": share.tokens * INT64 + FP32}
