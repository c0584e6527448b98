"""Activations of `lablib.toys.transformer` under eager PyTorch on a CPU, operator by operator.

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

from lablib.calc.memory.activations.share import FP32, INT64, Share
from lablib.calc.models import ModelConfig


def layer(share: Share, *, experts: bool, recompute: str, attention: str) -> dict[str, int]:
    """Return one layer's bytes by kind; arguments as in `lablib.calc.memory.activations.layer_activations`."""
    config, n, value = share.one_rank, share.tokens, share.value
    stream = n * config.hidden * value
    if recompute == "full":
        return {"input": stream}
    mask = stream if share.drops else 0
    plain = attention == "plain" and recompute == "none"
    # The ring of `lablib.toys.context_parallel` keeps its output in fp32, beside the one in the dtype of the stream.
    wide = n * config.q_width * FP32 if share.cp > 1 and share.rings and value < FP32 and recompute == "none" else 0
    return {
        "norms": 2 * norm(config, n, value),
        "attention": stream + _core(config, n, value, recompute, attention) + wide + mask,
        # The softmax output `a b s²`; with dropout its mask and its output too.
        "scores": config.num_heads * n * share.seq * value * (3 if share.drops else 1) if plain else 0,
        "mlp": stream + n * config.ffn * value * (4 if config.gated_mlp else 2) + mask,
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


def embedding(share: Share) -> dict[str, int]:
    """Return the bytes before the first layer.

    The model reads a view of windows of s + 1 tokens, and a view keeps the whole storage.
    """
    config, value = share.config, share.value
    seq = share.seq // share.cp
    positions = seq * INT64 if config.learned_positions else 2 * seq * config.head_dim * value
    if share.cp > 1:
        positions += share.tokens * INT64  # this rank's tokens are a copy of the window's
    return {
        "tokens": share.batch * (share.seq + 1) * INT64,
        "positions": positions,
        "dropout": share.tokens * config.hidden * value if share.drops else 0,
    }


def head(share: Share) -> dict[str, int]:
    """Return the bytes of final norm, head and loss: tying changes nothing, as weights are no activations."""
    config, n, value = share.config, share.tokens, share.value
    # The targets are flattened: a copy, except where one row or one column can be a view of the windows.
    targets = n * INT64 if (share.batch > 1 and share.seq > 1) or share.cp > 1 else 0
    return {
        "norms": norm(config, n, value),
        "head": n * config.hidden * value,
        "logits": n * config.vocab * FP32,
        "loss": targets + FP32,  # cross-entropy keeps the number that it divided by
    }
