"""Context parallelism of the cases with cp: Hugging Face's classes over PyTorch's ring or an exchange, on one rank of many.

transformers lets any function stand for attention (`AttentionInterface`). Here it is the loop that PyTorch's own
`context_parallel` puts in the place of `scaled_dot_product_attention`, forward and backward, kept as its operators keep
it: q, k, v, the output and the log-sum-exps. Around that loop PyTorch uses DTensors, and takes a GPU's kernels only; the
loop itself takes the CPU's. PyTorch has no Ulysses; the exchange is that of this course, around fused attention.

A rank's batch is what transformers' Trainer gives it: tokens, labels that were shifted before they were cut, and
positions, all of this rank's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import scaled_dot_product_attention

from lablib.launch import torch_private
from lablib.toys.context_parallel import swap

NAME = "context_parallel"
#: How PyTorch calls the ways.
METHODS = {"ring": "alltoall", "gathered": "allgather"}

_HOW = {"is_causal": True, "dropout_p": 0.0, "scale": None}
_HEADS, _TOKENS = 1, 2  # dims of a tensor of heads, (B, N, s, D)


class _TorchRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = torch_private.ring_attention(group, _TOKENS, kernel, query=q, key=k, value=v, **_HOW)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        names = ("query", "key", "value", "out", "logsumexp")
        kept = dict(zip(names, ctx.saved_tensors, strict=True))
        grads = torch_private.ring_attention_backward(
            ctx.group, _TOKENS, kernel, grad_out=grad, grad_out_name="grad_out", **kept, **_HOW
        )
        return *grads, None


def torch_ring(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return attention in PyTorch's ring, as `set_rotate_method` has it."""
    return _TorchRing.apply(q, k, v, group)


class _Exchange(torch.autograd.Function):
    """Heads for tokens, or tokens for heads, by the exchange of this course's Ulysses."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: dist.ProcessGroup, cut: int, join: int) -> Tensor:
        ctx.how = group, join, cut  # of the way back
        return swap(x, group, cut, join)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return swap(grad, *ctx.how), None, None, None


def exchanged_attention(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return fused attention over all tokens of this rank's heads, exchanged before and after."""
    q, k, v = (_Exchange.apply(x, group, _HEADS, _TOKENS) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return _Exchange.apply(out, group, _TOKENS, _HEADS)


def split_attention(model: nn.Module, group: dist.ProcessGroup, way: str) -> None:
    """Let a model of Hugging Face's attend over the tokens of all ranks of a group."""
    from transformers import AttentionInterface

    core = exchanged_attention if way == "ulysses" else torch_ring
    if way != "ulysses":
        torch_private.set_rotate_method(METHODS[way])

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, **how: Any) -> tuple[Tensor, None]:
        # As transformers' own function ends: tokens one after the other.
        return core(q, k, v, group).transpose(1, 2).contiguous(), None

    AttentionInterface.register(NAME, attend)
    model.config._attn_implementation = NAME


def local_batch(sequences: int, tokens: int) -> Tensor:
    """Return token ids, shifted labels and positions of this rank's tokens, one after the other."""
    return torch.zeros(3, sequences, tokens, dtype=torch.int64)


def local_loss(model: nn.Module, batch: Tensor) -> Tensor:
    tokens, labels, positions = batch
    return model(input_ids=tokens, labels=labels, shift_labels=labels, position_ids=positions).loss


@contextmanager
def waits_without_copies() -> Iterator[None]:
    """Let a collective's result be what one waits for: under fake tensors waiting makes a second tensor, and a run does not."""
    functions = torch_private.functional_collectives
    wait = functions.wait_tensor
    functions.wait_tensor = lambda tensor: tensor
    try:
        yield
    finally:
        functions.wait_tensor = wait
