"""A transformer whose operators keep what Korthikanti et al. say that they keep: the oracle of implementation="paper".

The paper counts fused kernels on a GPU: a norm keeps its input and computes its statistics again, SwiGLU is one
operator, a dropout mask has 1 byte a value, the loss keeps fp32 logits. Each is a function here that returns its output
and the list of what it keeps; `keep` makes it an operator of autograd. Outputs are right; gradients are zeros of the right
shapes, because these operators are run for their bytes. Matrix products are PyTorch's own; what ranks of tensor
parallelism say to each other is `lablib.toys.tensor_parallel.functions`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from lablib.calc.models import ModelConfig
from lablib.toys.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    columns,
    copy_to_tp,
    even_split,
    gathered_linears,
    head_split,
    reduce_from_tp,
    scatter_to_sp,
)

Kept = tuple[Tensor, list[Tensor]]


class _NormKeepsInput(torch.autograd.Function):
    """LayerNorm, or RMSNorm where there is no shift; backward computes the statistics again."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        return F.rms_norm(x, x.shape[-1:], scale) if shift is None else x * scale + shift

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        vector = grad.flatten(0, -2).sum(0)
        return grad.clone(), vector, vector if ctx.needs_input_grad[2] else None


class _Keep(torch.autograd.Function):
    """An operator of several inputs that returns something of the shape of the first and keeps what it is told."""

    @staticmethod
    def forward(ctx: FunctionCtx, compute: Callable, *inputs: Tensor) -> Tensor:
        output, kept = compute(*inputs)
        ctx.save_for_backward(*kept)
        ctx.shapes = [x.shape for x in inputs]
        return output

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.saved_tensors  # noqa: B018  (backward reads what was kept, and by that frees it)
        return None, *(grad.new_zeros(shape) for shape in ctx.shapes)


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Kept:
    """Return the values mixed by one kernel, x_BSH; it keeps q, k, v, its output and an fp32 number a row."""
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    out = out.transpose(1, 2).flatten(2)
    return out, [q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32)]


def scores(q: Tensor, k: Tensor) -> Kept:
    """Return q kᵀ; keeps both."""
    groups = k.shape[1]
    product = q.unflatten(1, (groups, -1)) @ k.unsqueeze(2).transpose(-1, -2)
    return product.flatten(1, 2), [q, k]


def softmax(scores: Tensor) -> Kept:
    """Return the weights; keeps them, its output."""
    weights = scores.softmax(-1)
    return weights, [weights]


def mix(weights: Tensor, v: Tensor) -> Kept:
    """Return weights × v, x_BSH; keeps both."""
    out = weights.unflatten(1, (v.shape[1], -1)) @ v.unsqueeze(2)
    return out.flatten(1, 2).transpose(1, 2).flatten(2), [weights, v]


def dropout(x: Tensor) -> Kept:
    """Return x; keeps a mask of 1 byte a value."""
    return x.clone(), [x.new_empty(x.shape, dtype=torch.bool)]


def gelu(x: Tensor) -> Kept:
    """Return GELU(x); keeps its input."""
    return F.gelu(x), [x]


def swiglu(gate: Tensor, up: Tensor) -> Kept:
    """Return SiLU(gate) × up, as one operator; keeps both inputs."""
    return F.silu(gate) * up, [gate, up]


def route(logits: Tensor) -> Kept:
    """Return the scores of the experts; keeps them in fp32."""
    scores = logits.float()
    # fp32 scores of every expert, in the dtype that they are used in: the copy is kept, whatever that dtype is.
    return logits.clone(), [scores if scores is not logits else logits.clone()]


def combine(outputs: Tensor, scores: Tensor) -> Kept:
    """Return the weighted outputs of the experts; keeps the outputs, for the gradients of the weights."""
    return outputs.clone(), [outputs]


class _LookUp(torch.autograd.Function):
    """Rows of a table. The indices are the batch, which exists anyway."""

    @staticmethod
    def forward(ctx: FunctionCtx, table: Tensor, tokens: Tensor) -> Tensor:
        ctx.tokens, ctx.shape = tokens, table.shape
        return F.embedding(tokens % len(table), table)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(ctx.shape), None


def cross_entropy(logits: Tensor) -> Kept:
    """Return a loss; keeps fp32 logits."""
    kept = logits.float()
    return kept.logsumexp(-1).mean(), [kept]


def norm(x: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    return _NormKeepsInput.apply(x, scale, shift)


def keep(compute: Callable[..., Kept], *inputs: Tensor) -> Tensor:
    """Return what a function computes, as one operator that keeps what the function says."""
    return _Keep.apply(compute, *inputs)


def look_up(table: Tensor, tokens: Tensor) -> Tensor:
    return _LookUp.apply(table, tokens)


again = partial(checkpoint, use_reentrant=False)


class PaperNorm(nn.Module):
    """LayerNorm or RMSNorm that keeps its input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden))
        self.bias = nn.Parameter(torch.zeros(config.hidden)) if config.norm == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.bias)


class PaperDropout(nn.Module):
    """Dropout of what is added to the stream, if the model has any."""

    def __init__(self, on: bool) -> None:
        super().__init__()
        self.on = on

    def forward(self, x: Tensor) -> Tensor:
        return keep(dropout, x) if self.on else x


class PaperAttention(nn.Module):
    """Attention over this rank's heads; rotary positions are fused and keep nothing."""

    def __init__(self, config: ModelConfig, group: dist.ProcessGroup, variant: str | bool, run: dict) -> None:
        super().__init__()
        t, h, d = group.size(), config.hidden, config.head_dim
        q, kv = head_split(config.num_heads, d, t), head_split(config.num_kv_heads, d, t)
        self.head_dim, self.run = d, run
        for name, width, split in (("q", config.q_width, q), ("k", config.kv_width, kv), ("v", config.kv_width, kv)):
            linear = nn.Linear(h, width, bias=config.qkv_bias)
            setattr(self, name, ColumnParallelLinear(linear, split, group, variant))
        self.out = RowParallelLinear(nn.Linear(config.q_width, h, bias=config.attn_out_bias), q, group, variant)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in columns(x, self.q, self.k, self.v))
        core = partial(again, self.core) if self.run["recompute"] == "selective" else self.core
        return self.out(core(q, k, v))

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.run["attention"] == "fused":
            return keep(fused_attention, q, k, v)
        weights = keep(softmax, keep(scores, q, k))
        if self.run["dropout"]:
            weights = keep(dropout, weights)
        return keep(mix, weights, v)


class PaperMLP(nn.Module):
    """One MLP, split over the ranks by its inner values; not split without a group."""

    def __init__(self, config: ModelConfig, ffn: int, group: dist.ProcessGroup, variant: str | bool) -> None:
        super().__init__()
        split, h, bias = even_split(ffn, group.size()), config.hidden, config.mlp_bias
        self.up = ColumnParallelLinear(nn.Linear(h, ffn, bias=bias), split, group, variant)
        gate = nn.Linear(h, ffn, bias=bias) if config.gated_mlp else None
        self.gate = gate and ColumnParallelLinear(gate, split, group, variant)
        self.down = RowParallelLinear(nn.Linear(ffn, h, bias=bias), split, group, variant)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(keep(gelu, *columns(x, self.up)))
        return self.down(keep(swiglu, *columns(x, self.gate, self.up)))


class PaperExperts(nn.Module):
    """Routed experts of equal load: every one gets `k n / E` tokens, in a copy of its own."""

    def __init__(self, config: ModelConfig, group: dist.ProcessGroup, variant: str | bool) -> None:
        super().__init__()
        self.k = config.experts_per_token
        self.router = nn.Linear(config.hidden, config.num_experts, bias=False)
        self.experts = nn.ModuleList(
            PaperMLP(config, config.expert_ffn, group, variant) for _ in range(config.num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = keep(route, self.router(x))
        parts = x.repeat(1, self.k, 1).chunk(len(self.experts), dim=1)  # k copies of every token
        ends = [expert(part.contiguous()) for expert, part in zip(self.experts, parts, strict=True)]
        total = keep(combine, torch.cat(ends, dim=1), scores)
        return sum(total.chunk(self.k, dim=1))


class PaperBlock(nn.Module):
    def __init__(self, config: ModelConfig, group: dist.ProcessGroup, variant: str | bool, run: dict) -> None:
        super().__init__()
        self.norm1, self.norm2 = PaperNorm(config), PaperNorm(config)
        self.attention_dropout, self.mlp_dropout = (PaperDropout(run["dropout"]) for _ in range(2))
        self.attention = PaperAttention(config, group, variant, run)
        self.mlp = (
            PaperExperts(config, group, variant) if config.is_moe else PaperMLP(config, config.ffn, group, variant)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.norm1(x)))
        return x + self.mlp_dropout(self.mlp(self.norm2(x)))


class PaperTransformer(nn.Module):
    """A model, or some of its blocks, on one rank of tensor parallelism.

    Args:
        config: The model: GPT-2's or Llama's shape, with or without experts.
    """

    def __init__(
        self,
        config: ModelConfig,
        group: dist.ProcessGroup,
        *,
        sequence_parallel: bool = False,
        attention: str = "fused",
        recompute: str = "none",
        dropout: bool = False,
        blocks: int | None = None,
        ends: tuple[str, ...] = ("embedding", "head"),
    ) -> None:
        super().__init__()
        self.config, self.group, self.split = config, group, sequence_parallel and group.size() > 1
        self.embedding_dropout, self.full = PaperDropout(dropout), recompute == "full"
        variant = "shard" if self.split else False
        rows = -(-config.vocab // group.size())
        self.embed = self.positions = self.norm = self.head = None
        if "embedding" in ends:
            self.embed = nn.Parameter(torch.empty(rows, config.hidden))
            if config.learned_positions:
                self.positions = nn.Parameter(torch.empty(config.max_positions, config.hidden))
        count = config.num_layers if blocks is None else blocks
        run = {"attention": attention, "recompute": recompute, "dropout": dropout}
        self.blocks = nn.ModuleList(PaperBlock(config, group, variant, run) for _ in range(count))
        if "head" in ends:
            self.norm = PaperNorm(config)
            shared = config.tied and self.embed is not None
            self.head = self.embed if shared else nn.Parameter(torch.empty(rows, config.hidden))

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            partial_sum = look_up(self.embed, x)
            if self.positions is not None:
                partial_sum = partial_sum + self.positions[: x.shape[1]]
            x = (scatter_to_sp if self.split else reduce_from_tp)(partial_sum, self.group)
            x = self.embedding_dropout(x)
        for block in self.blocks:
            x = again(block, x) if self.full else block(x)
        if self.head is None:
            return x
        if self.split:
            return gathered_linears(self.norm(x), self.group, [(self.head, None)])[0]
        return F.linear(copy_to_tp(self.norm(x), self.group), self.head)

    def loss(self, tokens_BT: Tensor) -> Tensor:
        """Return a number whose backward pass goes through everything."""
        return keep(cross_entropy, self(tokens_BT[:, :-1]))
