"""What a block keeps for backward as Korthikanti et al. count it, for every family; see `lablib.calc.memory.activations.block`.

Every operator keeps its input. Two kinds of values, by what divides them:

- the **stream**: inputs of norms and of the first matrices, and dropout masks of what is added. Tensor parallelism
  leaves a full copy on each rank; sequence parallelism divides them by t.
- **inner** values: heads, and the inner width of an MLP. Tensor parallelism divides them by t.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lablib.calc.models import ModelConfig

MASK = 1  # bytes of one value of a dropout mask on a GPU
FP32 = 4


@dataclass(frozen=True)
class Share:
    """What one rank holds of one micro-batch.

    Attributes:
        config: The model.
        seq: Tokens in a whole sequence, s: what the keys span.
        tokens: Tokens of this rank, `b s / cp`.
        value: Bytes of a value.
        tp: What divides inner values.
        stream_split: What divides the stream: tp with sequence parallelism, else 1.
        dropout: Whether there are dropout masks.
    """

    config: ModelConfig
    seq: int
    tokens: int
    value: int
    tp: int
    stream_split: int
    dropout: bool

    @property
    def batch(self) -> int:
        """Sequences, where context parallelism divides none."""
        return self.tokens // self.seq

    @property
    def one_rank(self) -> ModelConfig:
        """A layer's sizes on one tensor-parallel rank: its heads, its part of the MLP; the stream is not divided."""
        if self.tp == 1:
            return self.config
        c, t = self.config, self.tp
        return replace(c, num_heads=c.num_heads // t, num_kv_heads=c.num_kv_heads // t, ffn=c.ffn // t)

    def stream(self, width: int, size: int | None = None) -> int:
        """Return the bytes of so many values a token in the stream, of `size` bytes each."""
        return self.tokens * width * (self.value if size is None else size) // self.stream_split

    def inner(self, width: int, size: int | None = None) -> int:
        """Return the bytes of so many inner values a token, of `size` bytes each."""
        return self.tokens * width * (self.value if size is None else size) // self.tp

    def mask(self) -> int:
        """Return the bytes of the dropout mask of something that is added to the stream."""
        return self.stream(self.config.hidden, MASK) if self.dropout else 0


def layer(share: Share, *, experts: bool, recompute: str, attention: str) -> dict[str, int]:
    """Return one layer's bytes by kind; arguments as in `lablib.calc.memory.activations.layer_activations`."""
    config = share.config
    if recompute == "full":
        return {"input": share.stream(config.hidden)}
    kept = recompute == "none"  # and not computed again
    return {
        "norms": config.norms_per_layer * share.stream(config.hidden),
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
        "logits": share.tokens * -(-config.vocab // share.tp) * FP32,
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
    return pairs * (share.value + (MASK + share.value if share.dropout else 0))


def _inner_values(config: ModelConfig, ffn: int) -> int:
    """Values a token that an MLP keeps inside: input and output of its activation function."""
    return (3 if config.gated_mlp else 2) * ffn


def _mlp(share: Share) -> int:
    inner = share.inner(_inner_values(share.config, share.config.ffn))
    return share.stream(share.config.hidden) + inner + share.mask()


def _experts(share: Share) -> dict[str, int]:
    """Router: fp32 scores of every expert. Experts: k copies of every token, in, inside and out."""
    config = share.config
    k, inside = config.experts_per_token, _inner_values(config, config.expert_ffn)
    shared = share.inner(config.num_shared_experts * inside)
    # An expert's output is kept, since the gradient of its routing weight needs it.
    routed = 2 * share.stream(k * config.hidden) + share.inner(k * inside)
    return {
        "mlp": share.stream(config.hidden) + shared + share.mask(),
        "router": share.stream(config.num_experts, FP32),
        "experts": routed,
    }
