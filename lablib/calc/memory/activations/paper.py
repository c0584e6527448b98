"""Activations of a block as Korthikanti et al. (2022, arXiv 2205.05198, section 4) count them, for every family.

Every operator keeps its input, values have 2 bytes, dropout masks 1; norm statistics and indices are too small to
count. For a GPT block (s tokens, b sequences, h hidden, a heads, t-way tensor parallelism), equations 1, 2, 4 and 6 and
table 2:

| what | bytes of one layer |
|---|---|
| nothing done | sbh (34 + 5as/h): attention 11sbh + 5as²b, MLP 19sbh, norms 4sbh |
| tensor parallelism | sbh (10 + 24/t + 5as/(ht)) |
| + sequence parallelism, inputs sharded | sbh (34 + 5as/h) / t |
| + sequence parallelism, inputs gathered | the same and 4sbh (1 - 1/t) |
| + selective recomputation | the same without the term in as |
| full recomputation | 2sbh |

The same counting goes beyond the paper: without dropout a mask is nothing and the softmax output is kept once (2as²b);
grouped queries keep `a_kv d` for keys and values; SwiGLU, one operator, keeps gate and up; an expert keeps its copy of
the tokens it visits; latent attention (MLA) its latents, before and after their norms, and the full q, k, v.

`lablib.calc.memory.tape.paper` counts the same operator by operator; a test holds the two to each other.

Two kinds of values, by what divides them:

- the **stream**: inputs of norms and of the first matrices, and dropout masks of what is added. Tensor parallelism
  leaves a full copy on each rank; sequence parallelism divides them by t.
- **inner** values: heads, and the inner width of an MLP. Tensor parallelism divides them by t.
"""

from __future__ import annotations

from lablib.calc.memory.tape import FP32, MASK, BlockSetting
from lablib.calc.models import ModelConfig
from lablib.calc.parallel import variant


def layer(s: BlockSetting) -> dict[str, int]:
    """Return one layer's bytes by kind."""
    config = s.config
    if s.recompute == "full":
        return {"input": _stream(s, config.hidden)}
    kept = s.recompute == "none"  # and not computed again
    return {
        # Norms of a parallel block read the same stream.
        "norms": (1 if config.parallel_block else config.norms_per_layer) * _stream(s, config.hidden),
        "attention": _attention(s, statistics=kept and s.fused),
        "scores": _scores(s) if kept and not s.fused else 0,
        **(_experts(s) if config.has_experts(s.layer) else {"mlp": _mlp(s)}),
    }


def embedding(s: BlockSetting) -> dict[str, int]:
    """Return the embedding's bytes: a dropout mask."""
    return {"dropout": _mask(s)}


def head(s: BlockSetting) -> dict[str, int]:
    """Return the bytes of final norm, head and loss; a vocabulary that tp does not divide is rounded up."""
    words = -(-s.config.vocab // s.tp)
    return {
        "norms": _stream(s, s.config.hidden),
        "head": _stream(s, s.config.hidden),
        "logits": s.tokens * words * (s.value if s.implementation.keeps_logits else FP32),
    }


def paper_activations(
    config: ModelConfig, *, batch: int, seq: int, tp: int, sequence_parallel: bool | str = False, **how: object
) -> int:
    """Return the bytes that one layer keeps on one rank.

    Args:
        sequence_parallel: False, "keep" or "shard".
        **how: `recompute`, `attention`, `dropout` and `bytes_per_value` of `lablib.calc.memory.tape.BlockSetting`.

    Raises:
        ValueError: If the variant is unknown, or tp does not divide what it splits.
    """
    kind = variant(sequence_parallel)
    s = BlockSetting(config=config, batch=batch, seq=seq, tp=tp, sequence_parallel=kind is not False, **how)
    gathered = 2 * s.tokens * config.hidden * s.value if kind == "keep" else 0
    return sum(layer(s).values()) + gathered - gathered // tp


def _stream(s: BlockSetting, width: int, size: int | None = None) -> int:
    """Return the bytes of so many values a token in the stream, of `size` bytes each."""
    return s.stream * width * (s.value if size is None else size)


def _inner(s: BlockSetting, width: int, size: int | None = None) -> int:
    """Return the bytes of so many inner values a token, of `size` bytes each."""
    return s.tokens * width * (s.value if size is None else size) // s.tp


def _mask(s: BlockSetting) -> int:
    """Return the bytes of the dropout mask of something that is added to the stream."""
    return _stream(s, s.config.hidden, MASK) if s.dropout else 0


def _attention(s: BlockSetting, statistics: bool) -> int:
    """Input, q, k, v, what enters the output projection (which a fused kernel keeps too), and a dropout mask."""
    config = s.config
    values = config.attn_width if config.is_mla else config.kv_width
    kept = _stream(s, config.hidden)
    kept += _inner(s, config.q_width + config.kv_width + values + config.attn_width)
    if config.qk_norm:
        kept += _inner(s, config.q_width + config.kv_width)  # q and k as they were before their norms
    if config.is_mla:
        # Each latent twice, before and after its norm; the rotary key, shared by the heads, once.
        # Every rank computes the latents: they are not divided by heads.
        kept += _stream(s, 2 * (config.q_lora_rank + config.kv_lora_rank) + config.qk_rope_head_dim)
    if statistics:
        kept += _inner(s, config.num_heads, FP32)  # log of the softmax denominator, one a row
    return kept + _mask(s)


def _scores(s: BlockSetting) -> int:
    """Softmax output; with dropout also its mask and its output."""
    pairs = s.config.num_heads * s.tokens * s.seq // s.tp
    return pairs * (s.value + (MASK + s.value if s.dropout else 0))


def _inner_values(config: ModelConfig, ffn: int) -> int:
    """Values a token that an MLP keeps inside: input and output of its activation function."""
    return (3 if config.gated_mlp else 2) * ffn


def _mlp(s: BlockSetting) -> int:
    config = s.config
    shared = config.parallel_block and config.norms_per_layer == 1  # its input is attention's, and counted there
    inner = _inner(s, _inner_values(config, config.ffn))
    return (0 if shared else _stream(s, config.hidden)) + inner + _mask(s)


def _experts(s: BlockSetting) -> dict[str, int]:
    """Router: fp32 scores of every expert. Experts: k copies of every token, in, inside and out."""
    config = s.config
    inside = _inner_values(config, config.expert_ffn)
    shared = _inner(s, config.num_shared_experts * inside)
    # An expert's output is kept, since the gradient of its routing weight needs it.
    copies = s.visits // (s.tp if s.sequence_parallel else 1)
    routed = (2 * copies * config.hidden + s.visits * inside // s.tp) * s.value
    return {
        "mlp": _stream(s, config.hidden) + shared + _mask(s),
        "router": _stream(s, config.num_experts, FP32),
        "experts": routed,
    }
