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

The same counting goes beyond the paper: without dropout a mask is nothing and the softmax output is kept once
(2as²b); grouped queries keep `a_kv d` for keys and values; SwiGLU, one operator, keeps gate and up, and the down
projection its output (3f a token); fused attention keeps q, k, v, its output and fp32 softmax statistics; an expert
keeps its copy of the tokens it visits; latent attention (MLA) its latents, before and after their norms, and
the full q, k, v. Routing is balanced unless an imbalance is given.

Two kinds of values, by what divides them:

- the **stream**: inputs of norms and of the first matrices, and dropout masks of what is added. Tensor parallelism
  leaves a full copy on each rank; sequence parallelism divides them by t.
- **inner** values: heads, and the inner width of an MLP. Tensor parallelism divides them by t.
"""

from __future__ import annotations

from lablib.calc.memory.activations.share import FP32, MASK, Share
from lablib.calc.models import ModelConfig


def layer(share: Share, *, experts: bool, recompute: str, attention: str) -> dict[str, int]:
    """Return one layer's bytes by kind; arguments as in `lablib.calc.memory.activations.layer_activations`."""
    config = share.config
    if recompute == "full":
        return {"input": share.stream(config.hidden)}
    kept = recompute == "none"  # and not computed again
    return {
        # Norms of a parallel block read the same stream.
        "norms": (1 if config.parallel_block else config.norms_per_layer) * share.stream(config.hidden),
        "attention": _attention(share, statistics=kept and attention == "fused"),
        "scores": _scores(share) if kept and attention == "plain" else 0,
        **(_experts(share) if experts else {"mlp": _mlp(share)}),
    }


def embedding(share: Share) -> dict[str, int]:
    """Return the embedding's bytes: a dropout mask."""
    return {"dropout": share.mask()}


def head(share: Share) -> dict[str, int]:
    """Return the bytes of final norm, head and loss; a vocabulary that tp does not divide is rounded up."""
    config = share.config
    return {
        "norms": share.stream(config.hidden),
        "head": share.stream(config.hidden),
        "logits": share.tokens
        * -(-config.vocab // share.tp)
        * (share.value if share.implementation.keeps_logits else FP32),
    }


def _attention(share: Share, statistics: bool) -> int:
    """Input, q, k, v, what enters the output projection (which a fused kernel keeps too), and a dropout mask."""
    config = share.config
    values = config.attn_width if config.is_mla else config.kv_width
    kept = share.stream(config.hidden)
    kept += share.inner(config.q_width + config.kv_width + values + config.attn_width)
    if config.qk_norm:
        kept += share.inner(config.q_width + config.kv_width)  # q and k as they were before their norms
    if config.is_mla:
        # Each latent twice, before and after its norm; the rotary key, shared by the heads, once.
        # Every rank computes the latents: they are not divided by heads.
        kept += share.stream(2 * (config.q_lora_rank + config.kv_lora_rank) + config.qk_rope_head_dim)
    if statistics:
        kept += share.inner(config.num_heads, FP32)  # log of the softmax denominator, one a row
    return kept + share.mask()


def _scores(share: Share) -> int:
    """Softmax output; with dropout also its mask and its output."""
    pairs = share.config.num_heads * share.tokens * share.seq // share.tp
    return pairs * (share.value + (MASK + share.value if share.drops else 0))


def _inner_values(config: ModelConfig, ffn: int) -> int:
    """Values a token that an MLP keeps inside: input and output of its activation function."""
    return (3 if config.gated_mlp else 2) * ffn


def _mlp(share: Share) -> int:
    config = share.config
    shared = config.parallel_block and config.norms_per_layer == 1  # its input is attention's, and counted there
    inner = share.inner(_inner_values(config, config.ffn))
    return (0 if shared else share.stream(config.hidden)) + inner + share.mask()


def _experts(share: Share) -> dict[str, int]:
    """Router: fp32 scores of every expert. Experts: k copies of every token, in, inside and out."""
    config = share.config
    inside = _inner_values(config, config.expert_ffn)
    shared = share.inner(config.num_shared_experts * inside)
    # An expert's output is kept, since the gradient of its routing weight needs it.
    copies = share.visits // (share.tp if share.sequence_parallel else 1)
    routed = (2 * copies * config.hidden + share.visits * inside // share.tp) * share.value
    return {
        "mlp": share.stream(config.hidden) + shared + share.mask(),
        "router": share.stream(config.num_experts, FP32),
        "experts": routed,
    }
