"""What `lablib.toys.transformer` keeps for backward under eager PyTorch on a CPU, operator by operator.

Autograd keeps what an operator's derivative needs, once, however many operators need it:

| operator | keeps |
|---|---|
| embedding | its indices, int64 |
| x + y | nothing |
| linear | its input (the weight is a parameter: it exists anyway) |
| dropout | the mask, already scaled, in the dtype of its input; a GPU keeps 1 byte |
| LayerNorm | its input, and a mean and an inverse deviation a token |
| RMSNorm, written out in fp32 | the fp32 input, an fp32 inverse root a token, the normed value |
| rotary positions | cosines and sines, shared by all layers; not what they turn |
| q kᵀ, weights v | both factors: a copy of k and v for every query head |
| softmax | its output |
| fused attention | q, k, v, output, one fp32 statistic a head and token |
| GELU, SiLU | its input |
| SiLU(gate) × up | both factors |
| cross-entropy | fp32 log-probabilities, the targets, the sum of weights |

A tensor that two operators keep is one storage: the output of a norm, which q, k and v read, counts once, and so does
the output of a fused kernel, which the output projection reads. Casts, sums, views and scalars keep nothing.

Formulas below: b sequences, s tokens, n = bs, h hidden, a heads of width d, f inner width, V vocabulary.
"""

from __future__ import annotations

from lablib.calc.models import ModelConfig

INT64 = 8
FP32 = 4


def check_config(config: ModelConfig) -> None:
    """Raise a ValueError that names what the toy transformer does not have.

    Raises:
        ValueError: If the family, or a feature of this config, is not one of its own.
    """
    if config.family not in ("gpt2", "llama"):
        raise ValueError(
            f"{config.name}: the toy transformer is built from gpt2 or llama, not from family {config.family!r}"
        )
    refuse_extras(config, "the toy transformer has")
    if not config.learned_positions and config.head_dim % 2:
        raise ValueError(
            f"head_dim={config.head_dim} must be even: rotary positions turn pairs; use {config.head_dim + 1}"
        )


def refuse_extras(config: ModelConfig, whose: str) -> None:
    """Raise a ValueError if a model has more than blocks of attention and MLP with two norms.

    Raises:
        ValueError: If it has experts, latent attention, norms on q and k, or another number of norms a layer.
    """
    extras = {
        "experts": config.is_moe,
        "latent attention": config.is_mla,
        "norms on q and k": config.qk_norm,
        f"{config.norms_per_layer} norms a layer, only 2": config.norms_per_layer != 2,
    }
    for extra, present in extras.items():
        if present:
            raise ValueError(f"{config.name}: {whose} no {extra}")


def layer(
    config: ModelConfig, batch: int, seq: int, value: int, recompute: str, attention: str, dropout: bool
) -> dict[str, int]:
    """Return one layer's bytes by kind; arguments as in `lablib.calc.memory.activations.layer_activations`."""
    n, h = batch * seq, config.hidden
    if recompute == "full":
        return {"input": n * h * value}
    mask = n * h * value if dropout else 0
    return {
        "norms": 2 * norm(config, n, value),
        "attention": n * h * value + _core(config, n, value, recompute, attention) + mask,
        "scores": _scores(config, batch, seq, value, dropout) if attention == "plain" and recompute == "none" else 0,
        "mlp": n * h * value + n * config.ffn * value * (4 if config.gated_mlp else 2) + mask,
    }


def norm(config: ModelConfig, tokens: int, value: int) -> int:
    """Return what one norm keeps: `n h + 2 n` values, or with RMSNorm `4 n h + 4 n` bytes and `n h` values."""
    if config.norm == "layernorm":
        return tokens * (config.hidden + 2) * value
    return tokens * (config.hidden + 1) * FP32 + tokens * config.hidden * value


def _core(config: ModelConfig, n: int, value: int, recompute: str, attention: str) -> int:
    """Queries and output, `n a d` each; keys and values; the statistics of a fused kernel."""
    repeated = attention == "plain" and recompute == "none"
    keys = config.q_width if repeated else config.kv_width
    statistics = n * config.num_heads * FP32 if attention == "fused" and recompute == "none" else 0
    return n * (2 * config.q_width + 2 * keys) * value + statistics


def _scores(config: ModelConfig, batch: int, seq: int, value: int, dropout: bool) -> int:
    """Softmax output `a b s²`; with dropout its mask and its output too."""
    return batch * config.num_heads * seq * seq * value * (3 if dropout else 1)


def embedding(config: ModelConfig, batch: int, seq: int, value: int, dropout: bool) -> dict[str, int]:
    """Return the bytes before the first layer.

    The model reads a view of windows of s + 1 tokens, and a view keeps the whole storage.
    """
    positions = seq * INT64 if config.learned_positions else 2 * seq * config.head_dim * value
    return {
        "tokens": batch * (seq + 1) * INT64,
        "positions": positions,
        "dropout": batch * seq * config.hidden * value if dropout else 0,
    }


def head(config: ModelConfig, batch: int, seq: int, value: int) -> dict[str, int]:
    """Return the bytes of final norm, head and loss: tying changes nothing, as weights are no activations."""
    n = batch * seq
    # The targets are flattened: a copy, except where one row or one column can be a view of the windows.
    targets = n * INT64 if batch > 1 and seq > 1 else 0
    return {
        "norms": norm(config, n, value),
        "head": n * config.hidden * value,
        "logits": n * config.vocab * FP32,
        "loss": targets + FP32,  # cross-entropy keeps the number that it divided by
    }
