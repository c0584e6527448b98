"""What Hugging Face's eager classes keep for backward: GPT-2, Llama, Qwen2 and Mistral as `transformers` writes them.

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
from lablib.calc.models import ModelConfig

FAMILIES = ("gpt2", "llama", "qwen2", "mistral")
INT64 = toy.INT64
FP32 = toy.FP32


def check_config(config: ModelConfig) -> None:
    """Raise a ValueError unless the model is one of those that are counted here.

    Raises:
        ValueError: If the family, or a feature of this config, is not known here.
    """
    if config.family not in FAMILIES:
        raise ValueError(
            f"{config.name}: implementation='hf' knows {', '.join(FAMILIES[:-1])} and {FAMILIES[-1]}, not family "
            f"{config.family!r}; use implementation='paper'"
        )
    toy.refuse_extras(config, f"Hugging Face's {config.family} classes have")
    gpt = config.family == "gpt2"
    if (config.norm == "layernorm", config.learned_positions, not config.gated_mlp) != (gpt, gpt, gpt):
        raise ValueError(
            f"{config.name}: norm={config.norm!r}, learned_positions={config.learned_positions} and gated_mlp="
            f"{config.gated_mlp} are not those of Hugging Face's {config.family} classes"
        )


def layer(
    config: ModelConfig, batch: int, seq: int, value: int, recompute: str, attention: str, dropout: bool
) -> dict[str, int]:
    """Return one layer's bytes by kind."""
    kinds = toy.layer(config, batch, seq, value, recompute, attention, dropout)
    if recompute == "full":
        return kinds
    if config.family == "gpt2":
        # x/2, tanh, 1 + tanh beside GELU's input and output.
        kinds["mlp"] += 3 * batch * seq * config.ffn * value
    elif kinds["scores"] and value != FP32:
        # The softmax in fp32; its copy in the model's dtype is kept too, unless dropout reads it and makes another.
        pairs = batch * config.num_heads * seq * seq
        kinds["scores"] += pairs * (FP32 - (value if dropout else 0))
    return kinds


def embedding(config: ModelConfig, batch: int, seq: int, value: int, dropout: bool) -> dict[str, int]:
    """Return the bytes before the first layer: token ids, and position ids or rotary tables."""
    return toy.embedding(config, batch, seq, value, dropout) | {"tokens": batch * seq * INT64}


def head(config: ModelConfig, batch: int, seq: int, value: int) -> dict[str, int]:
    """Return the bytes of final norm, head and loss."""
    return toy.head(config, batch, seq, value) | {"loss": batch * seq * INT64 + FP32}
