"""Operators that keep for backward what Korthikanti et al. say that they keep; see `lablib.launch.paper_kernels`.

Each is a function that returns its output and the list of what it keeps; `keep` makes it an operator of autograd.
Outputs are right. Gradients have the right shapes and are zeros: these operators are run for their bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

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
    """Return x normed; keeps its input.

    Args:
        x: Of any shape.
        scale: Of its last dim.
        shift: The same; None for RMSNorm.
    """
    return _NormKeepsInput.apply(x, scale, shift)


def keep(compute: Callable[..., Kept], *inputs: Tensor) -> Tensor:
    """Return what a function computes, as one operator that keeps what the function says."""
    return _Keep.apply(compute, *inputs)


def look_up(table: Tensor, tokens: Tensor) -> Tensor:
    """Return the rows of a table; keeps nothing."""
    return _LookUp.apply(table, tokens)
