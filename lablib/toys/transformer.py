"""A decoder transformer in plain PyTorch, GPT-2 or Llama, built from a `ModelConfig`.

It is the model that the course counts, measures, replicates, splits and shards.
Therefore every projection is a module of its own, and nothing is fused but the attention kernel, if you ask for it.

Shapes are suffixes, one letter for each dim:

    B  sequences in the batch        N  query heads
    S  tokens in a sequence          K  key and value heads (K divides N)
    T  S + 1: inputs and targets     D  width of one head
    H  hidden width                  F  inner width of the MLP
    V  vocabulary                    2  cosine and sine

A block adds twice to the stream `x_BSH`: `x + attention(norm1(x))`, then `x + mlp(norm2(x))`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lablib.calc.memory.activations import check_config
from lablib.calc.models import ModelConfig

SUPPORTED = ("gpt2", "llama")
ROPE_BASE = 10_000.0
INIT_STD = 0.02
LAYERNORM_EPSILON = 1e-5
RMSNORM_EPSILON = 1e-6


def rotary(seq: int, head_dim: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the cosines and sines of rotary positions, stacked: `rope_2SD`.

    Pair `i` of a head turns by the angle `position / 10000^(2i/D)`: slowly for late pairs (Su et al. 2104.09864).

    Args:
        head_dim: Width of a head, D, even: values `i` and `i + D/2` are a pair.
        dtype: Of the result; the angles themselves are fp32, since bf16 cannot tell late positions apart.
    """
    exponent_P = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    position_S = torch.arange(seq, device=device, dtype=torch.float32)
    angle_SD = torch.outer(position_S, ROPE_BASE**-exponent_P).repeat(1, 2)
    return torch.stack((angle_SD.cos(), angle_SD.sin())).to(dtype)


def rotate(x_BNSD: Tensor, rope_2SD: Tensor) -> Tensor:
    """Turn every pair of values of every head by its position's angle."""
    cos_SD, sin_SD = rope_2SD
    first, second = x_BNSD.chunk(2, dim=-1)
    return x_BNSD * cos_SD + torch.cat((-second, first), dim=-1) * sin_SD


class RMSNorm(nn.Module):
    """`x / rms(x) * weight`, in fp32 whatever the dtype of `x` (Zhang and Sennrich 1910.07467).

    Written out because PyTorch's own saves one thing on a CPU and another on a GPU.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Return the normed stream in the dtype of `x_BSH`."""
        full_BSH = x_BSH.float()
        mean_square_BS1 = full_BSH.pow(2).mean(dim=-1, keepdim=True)
        normed_BSH = full_BSH * torch.rsqrt(mean_square_BS1 + RMSNORM_EPSILON)
        return normed_BSH.to(x_BSH.dtype) * self.weight


class Attention(nn.Module):
    """Causal self-attention with separate q, k, v and output projections; K < N groups the queries (GQA)."""

    def __init__(self, config: ModelConfig, dropout: float, attention: str) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.queries_per_key = config.num_heads // config.num_kv_heads
        self.fused = attention == "fused"
        self.q = nn.Linear(config.hidden, config.q_width, bias=config.qkv_bias)
        self.k = nn.Linear(config.hidden, config.kv_width, bias=config.qkv_bias)
        self.v = nn.Linear(config.hidden, config.kv_width, bias=config.qkv_bias)
        self.out = nn.Linear(config.q_width, config.hidden, bias=config.attn_out_bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BSH: Tensor, rope_2SD: Tensor | None, *more: Tensor | None) -> Tensor:
        """Return what attention adds to the stream; without `rope_2SD` positions are not turned.

        Args:
            *more: What another `core` asks for beside q, k and v, such as the documents of the tokens.
        """
        q_BNSD, k_BKSD, v_BKSD = (self.heads(project(x_BSH)) for project in (self.q, self.k, self.v))
        if rope_2SD is not None:
            q_BNSD, k_BKSD = rotate(q_BNSD, rope_2SD), rotate(k_BKSD, rope_2SD)
        return self.out(self.core(q_BNSD, k_BKSD, v_BKSD, *more).transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        """Cut the last dim into heads: (B, S, heads * D) -> (B, heads, S, D)."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def core(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
        """Mix the values: `softmax(q k^T / sqrt(D) + mask) v`, the part that selective recomputation repeats."""
        if self.fused:
            # The fused kernel keeps no scores. PyTorch's CPU kernel has no dropout, so this path has none here.
            gqa = self.queries_per_key > 1
            return F.scaled_dot_product_attention(q_BNSD, k_BKSD, v_BKSD, is_causal=True, enable_gqa=gqa)
        k_BNSD, v_BNSD = self.repeat(k_BKSD), self.repeat(v_BKSD)
        scores_BNSS = q_BNSD @ k_BNSD.transpose(-2, -1) * (1 / math.sqrt(self.head_dim))
        # Adding -inf above the diagonal keeps nothing for backward; masked_fill would keep its mask.
        future_SS = torch.full_like(scores_BNSS[0, 0], -math.inf).triu(1)
        weights_BNSS = torch.softmax(scores_BNSS + future_SS, dim=-1)
        return self.dropout(weights_BNSS) @ v_BNSD

    def repeat(self, x_BKSD: Tensor) -> Tensor:
        """Give every query head its own copy of its key or value head."""
        if self.queries_per_key == 1:
            return x_BKSD
        return x_BKSD.repeat_interleave(self.queries_per_key, dim=1)


class MLP(nn.Module):
    """`down(gelu(up(x)))` as in GPT-2, or `down(silu(gate(x)) * up(x))`, SwiGLU, as in Llama."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, config.ffn, bias=config.mlp_bias)
        self.gate = nn.Linear(config.hidden, config.ffn, bias=config.mlp_bias) if config.gated_mlp else None
        self.down = nn.Linear(config.ffn, config.hidden, bias=config.mlp_bias)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Return what the MLP adds to the stream."""
        if self.gate is None:
            inner_BSF = F.gelu(self.up(x_BSH), approximate="tanh")
        else:
            inner_BSF = F.silu(self.gate(x_BSH)) * self.up(x_BSH)
        return self.down(inner_BSF)


class Block(nn.Module):
    """One layer: attention and MLP, each behind a norm, each added to the stream."""

    def __init__(self, config: ModelConfig, dropout: float, attention: str) -> None:
        super().__init__()
        self.norm1 = make_norm(config)
        self.attention = Attention(config, dropout, attention)
        self.norm2 = make_norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BSH: Tensor, rope_2SD: Tensor | None = None, *more: Tensor | None) -> Tensor:
        """Return the stream after this layer; `more` is for attention."""
        x_BSH = x_BSH + self.dropout(self.attention(self.norm1(x_BSH), rope_2SD, *more))
        return x_BSH + self.dropout(self.mlp(self.norm2(x_BSH)))


class Transformer(nn.Module):
    """The full model: `embed` (and `positions`), `blocks`, `norm`, `head`.

    Args:
        config: Of the gpt2 or llama family; its fields decide about positions, norms, biases, MLP and tying.
        dropout: Probability, on the embedding, on what each half adds, and on the weights of plain attention.
        attention: "fused" (PyTorch's scaled_dot_product_attention) or "plain" (written out, keeps the scores).
    """

    def __init__(self, config: ModelConfig, *, dropout: float = 0.0, attention: str = "fused") -> None:
        super().__init__()
        check_config(config)
        if attention not in ("fused", "plain"):
            raise ValueError(f"attention={attention!r} must be 'fused' or 'plain'")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout} must be at least 0 and less than 1")
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.max_positions, config.hidden) if config.learned_positions else None
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(config, dropout, attention) for _ in range(config.num_layers))
        self.norm = make_norm(config)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        self.init_weights()

    def init_weights(self) -> None:
        """Draw weights as GPT-2 does: N(0, 0.02), less for what adds to the stream, since 2 L terms add up."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                adds_to_stream = name.endswith(("attention.out.weight", "mlp.down.weight"))
                shrink = math.sqrt(2 * self.config.num_layers) if adds_to_stream else 1
                nn.init.normal_(parameter, std=INIT_STD / shrink)
            else:
                nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return the scores of every next token."""
        seq = tokens_BS.shape[1]
        x_BSH = self.embed(tokens_BS)
        rope_2SD = None
        if self.positions is None:
            # Made anew each time: as a buffer of max_positions rows it would outweigh a small model.
            rope_2SD = rotary(seq, self.config.head_dim, device=x_BSH.device, dtype=x_BSH.dtype)
        elif seq > self.config.max_positions:
            raise ValueError(f"sequence of {seq} tokens, but max_positions={self.config.max_positions}")
        else:
            x_BSH = x_BSH + self.positions(torch.arange(seq, device=tokens_BS.device))
        x_BSH = self.dropout(x_BSH)
        for block in self.blocks:
            x_BSH = block(x_BSH, rope_2SD)
        return self.head(self.norm(x_BSH))

    def loss(self, tokens_BT: Tensor) -> Tensor:
        """Return the mean loss of predicting each token of the windows from those before it.

        Args:
            tokens_BT: Windows of S + 1 tokens: the model reads the first S and is asked for the last S.
        """
        return loss(self(tokens_BT[:, :-1]), tokens_BT)


def loss(logits_BSV: Tensor, tokens_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy of next-token prediction, in fp32 whatever the dtype of the logits.

    Args:
        logits_BSV: Scores made from the first S tokens of every window.
        tokens_BT: The windows, T = S + 1; position `i` is asked for token `i + 1`.
    """
    if tokens_BT.shape[1] != logits_BSV.shape[1] + 1:
        raise ValueError(
            f"logits for {logits_BSV.shape[1]} tokens need windows of {logits_BSV.shape[1] + 1}, "
            f"not {tokens_BT.shape[1]}: the model reads all tokens of a window but the last"
        )
    return F.cross_entropy(logits_BSV.float().flatten(0, 1), tokens_BT[:, 1:].flatten())


def make_norm(config: ModelConfig) -> nn.Module:
    """Return a norm over the hidden dim: LayerNorm with GPT-2's epsilon, or RMSNorm with Llama's."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.hidden, eps=LAYERNORM_EPSILON)
    return RMSNorm(config.hidden)


def tiny_config(family: str, **overrides: object) -> ModelConfig:
    """Return a small config for a laptop: bytes as tokens, 4 layers of width 128.

    Args:
        family: "gpt2" (learned positions, LayerNorm, GELU, biases, tied) or "llama" (rotary, RMSNorm, SwiGLU, GQA).
        **overrides: Fields of ModelConfig to change; head width and inner width follow `hidden` unless given.
    """
    if family not in SUPPORTED:
        raise ValueError(f"family {family!r} has no tiny config; use {' or '.join(SUPPORTED)}")
    gpt = family == "gpt2"
    hidden = overrides.get("hidden", 128)
    fields: dict[str, object] = {
        "name": f"tiny-{family}",
        "family": family,
        "num_layers": 4,
        "hidden": hidden,
        "num_heads": 4,
        "ffn": 4 * hidden if gpt else 8 * hidden // 3,
        "vocab": 256,
        "max_positions": 512,
        "norm": "layernorm" if gpt else "rmsnorm",
        "gated_mlp": not gpt,
    }
    fields |= dict.fromkeys(("learned_positions", "tied", "qkv_bias", "attn_out_bias", "mlp_bias"), gpt)
    if not gpt and overrides.get("num_heads", 4) % 2 == 0:
        fields["num_kv_heads"] = overrides.get("num_heads", 4) // 2
    return ModelConfig(**(fields | overrides))
