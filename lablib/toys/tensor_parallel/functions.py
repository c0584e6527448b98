"""Communication between tensor-parallel ranks: Megatron's f and g, and their sequence parallel relatives.

    function          forward          backward         2019    2022
    copy_to_tp        nothing          all-reduce       f       f
    reduce_from_tp    all-reduce       nothing          g       f with a bar
    gather_from_sp    all-gather       reduce-scatter           g
    scatter_to_sp     reduce-scatter   all-gather               g with a bar

In each pair, forward of the one is backward of the other.
The letter g changed hands between the two papers; this module and chapter 03 use those of 2019 for the first pair.
`gather_from_sp` keeps the gathered input for the products that follow; `gathered_linears` gathers it again.
The full sequence has S tokens; with sequence parallelism each of the t ranks holds S / t of them.

Papers: Shoeybi et al. 2019 (1909.08053), section 3; Korthikanti et al. 2022 (2205.05198), section 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lablib.toys import torch_names as collective_names


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of `x` over the ranks; `x` itself stays as it is, since autograd may still need it."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_gather(x_BsH: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the full sequence from every rank's part, x_BSH."""
    parts = x_BsH.new_empty(group.size() * len(x_BsH), *x_BsH.shape[1:])  # one after the other in dim 0
    collective_names.all_gather(parts, x_BsH.contiguous(), group=group)
    return torch.cat(parts.chunk(group.size()), dim=1)


def reduce_scatter(x_BSH: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of the sequence, x_BsH, summed over the ranks."""
    t, seq = group.size(), x_BSH.shape[1]
    if seq % t:
        raise ValueError(f"tp={t} does not divide the sequence of {seq} tokens; pad it to {seq + -seq % t}")
    part_BsH = x_BSH.new_empty(len(x_BSH), seq // t, *x_BSH.shape[2:])
    collective_names.reduce_scatter(part_BsH, torch.cat(x_BSH.chunk(t, dim=1)), group=group)
    return part_BsH


class _CopyToTP(torch.autograd.Function):
    """f: each rank's columns see all of x, so the gradient of x is a sum over the ranks."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class _ReduceFromTP(torch.autograd.Function):
    """g: the sum of partial products; its gradient is the gradient of each term."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherFromSP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x_BsH: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather(x_BsH, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_BSH: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad_BSH, ctx.group), None


class _ScatterToSP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x_BSH: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter(x_BSH, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_BsH: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad_BsH, ctx.group), None


class _GatheredLinears(torch.autograd.Function):
    """Several products of one gathered input, which backward gathers again instead of keeping it."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_BsH: Tensor, group: dist.ProcessGroup, *parameters: Tensor | None):
        weights, biases = parameters[::2], parameters[1::2]
        ctx.group = group
        ctx.save_for_backward(x_BsH, *weights)  # the shard: 1/t of what gather_from_sp makes linear keep
        x_BSH = all_gather(x_BsH, group)
        return tuple(F.linear(x_BSH, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor):
        x_BsH, *weights = ctx.saved_tensors
        x_RH = all_gather(x_BsH, ctx.group).flatten(0, 1)  # R rows: every token of every sequence
        grad_x, grad_parameters = 0, []
        for grad, weight in zip(grads, weights, strict=True):
            grad_x = grad_x + grad @ weight
            rows = grad.flatten(0, 1)
            # Autograd ignores what it did not ask for: the gradient of a bias that is None must be None.
            grad_parameters += [rows.t() @ x_RH, rows.sum(0)]
        wanted = ctx.needs_input_grad[2:]
        asked = [g if want else None for g, want in zip(grad_parameters, wanted, strict=True)]
        return reduce_scatter(grad_x, ctx.group), None, *asked


def copy_to_tp(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `x`, whose gradient is summed over the ranks: Megatron's f, before column-parallel products."""
    return _CopyToTP.apply(x, group)


def reduce_from_tp(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of `x` over the ranks, whose gradient passes as it is: Megatron's g, after row-parallel ones."""
    return _ReduceFromTP.apply(x, group)


def gather_from_sp(x_BsH: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the full sequence; the gradient is summed and cut again. What follows keeps the full input."""
    return _GatherFromSP.apply(x_BsH, group)


def scatter_to_sp(x_BSH: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of the sum of `x_BSH` over the ranks."""
    return _ScatterToSP.apply(x_BSH, group)


def gathered_linears(
    x_BsH: Tensor, group: dist.ProcessGroup, parameters: Sequence[tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, ...]:
    """Return `gather(x) W^T + b` for each weight and bias, keeping only the shard of x for backward.

    Args:
        parameters: (weight, bias or None) of each product.
    """
    return _GatheredLinears.apply(x_BsH, group, *(p for pair in parameters for p in pair))


def sum_gradient(parameter: torch.nn.Parameter, group: dist.ProcessGroup) -> None:
    """Sum the gradient of a replicated parameter over ranks that each see a part of its uses.

    The hook runs in every backward before the gradient is added to `grad`, so accumulation stays right.
    A frozen parameter has no gradient and gets no hook.
    """
    if group.size() > 1 and parameter.requires_grad:
        parameter.register_hook(lambda grad: all_reduce(grad, group))
