"""Stages of a pipeline: a transformer cut by depth, and a backward that can be cut in two.

Five layers on two stages. A stage is a module of its own, and the names of its weights are those of the model:

    stage 0: embed, positions, blocks 0 and 1          tokens_BS -> x_BSH
    stage 1: blocks 2, 3 and 4, norm, head             x_BSH -> logits_BSV

A stage takes the model's own modules and copies nothing: what a rank does not run, it may drop.
GPT-2 ties the head to the embedding, and a cut puts the two uses of that one weight on two ranks. Each rank then has a
copy, and half of the gradient: `lablib.toys.pipeline.executor` adds the halves.

Shapes: B sequences, S tokens in a sequence, H hidden width, V vocabulary, O and I outputs and inputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import linear

from lablib.toys.gradient_layout import set_grad
from lablib.toys.transformer import Transformer, rotary


class Stage(nn.Module):
    """Some layers of a transformer; the first stage also embeds, the last also has the norm and the head.

    Args:
        layers: Which of its blocks; may be none.
        first: Whether it starts with the embedding.
        last: Whether it ends with the head.
    """

    def __init__(self, model: Transformer, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.config = model.config
        self.embed = model.embed if first else None
        self.positions = model.positions if first else None
        self.dropout = model.dropout if first else None
        self.blocks = nn.ModuleDict({str(layer): model.blocks[layer] for layer in layers})
        self.norm = model.norm if last else None
        self.head = model.head if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Return what the next stage reads, or the logits.

        Args:
            x: tokens_BS on the first stage, x_BSH on the others.

        Returns:
            x_BSH, or logits_BSV from the last stage.
        """
        seq = x.shape[1]
        if self.embed is not None:
            tokens_BS, x = x, self.embed(x)
            if self.positions is not None:
                if seq > self.config.max_positions:
                    raise ValueError(f"sequence of {seq} tokens, but max_positions={self.config.max_positions}")
                x = x + self.positions(torch.arange(seq, device=tokens_BS.device))
            x = self.dropout(x)
        rope_2SD = None
        if not self.config.learned_positions:
            # Every stage makes its own: sending the angles would cost more than computing them.
            rope_2SD = rotary(seq, self.config.head_dim, device=x.device, dtype=x.dtype)
        for block in self.blocks.values():
            x = block(x, rope_2SD)
        return x if self.head is None else self.head(self.norm(x))


def split_stages(model: Transformer, num_stages: int, layers: Sequence[int] | None = None) -> list[Stage]:
    """Cut a transformer by depth.

    Args:
        model: The full model; the stages share its weights.
        num_stages: How many stages, all ranks together.
        layers: Number of layers of each stage; by default as equal as can be. The head costs time too, so fewer on
            the last stage often balance better, as Llama 3 did (arXiv 2407.21783, section 3.3.2).
    """
    total = len(model.blocks)
    if num_stages < 1:
        raise ValueError(f"num_stages={num_stages} must be at least 1")
    if layers is None:
        if num_stages > total:
            raise ValueError(f"num_stages={num_stages} for num_layers={total}; use at most {total}, or give layers")
        cuts = [stage * total // num_stages for stage in range(num_stages + 1)]
    else:
        sizes = list(layers)
        if len(sizes) != num_stages or sum(sizes) != total or min(sizes) < 0:
            raise ValueError(
                f"layers={sizes} must have num_stages={num_stages} entries that sum to num_layers={total}; "
                f"it has {len(sizes)} that sum to {sum(sizes)}"
            )
        cuts = [sum(sizes[:stage]) for stage in range(num_stages + 1)]
    last = num_stages - 1
    return [
        Stage(model, range(cuts[stage], cuts[stage + 1]), first=stage == 0, last=stage == last)
        for stage in range(num_stages)
    ]


class DeferWeights:
    """Put off the weight gradients of the linear layers whose forward runs inside: W after I, not with it.

        with DeferWeights() as deferred:
            y = stage(x)
        with deferred:              # again, as activation checkpointing runs the layers again
            y.backward(grad_y)      # I: the gradient of x, and of the small weights of norms and embeddings
        deferred.run()              # W: the gradients of the linear layers

    Backward through `y = x w^T` is two products of the same size: `grad_x = grad_y w`, which the stage before waits
    for, and `grad_w = grad_y^T x`, which nobody waits for. Calling autograd twice, for the inputs and then for the
    weights, would repeat the first chain of products; here the second half is kept as a list of pairs (grad_y, x).

    Zero Bubble (Qi et al. 2023, arXiv 2401.10241), section 2.1.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[nn.Parameter, nn.Parameter | None, Tensor, Tensor]] = []

    def __enter__(self) -> DeferWeights:
        functional.linear = self._linear  # which nn.Linear calls
        return self

    def __exit__(self, *_: object) -> None:
        functional.linear = linear

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return _Linear.apply(input, weight, bias, self)

    @torch.no_grad()
    def run(self) -> None:
        """Add the gradients that were put off to `.grad`, and forget what they needed."""
        while self.pending:
            weight, bias, x, grad_y = self.pending.pop()
            x_nI, grad_nO = x.flatten(0, -2), grad_y.flatten(0, -2)
            if weight.requires_grad:
                if weight.grad is None:
                    set_grad(weight, grad_nO.t() @ x_nI)
                else:
                    weight.grad.addmm_(grad_nO.t(), x_nI)
            if bias is not None and bias.requires_grad:
                bias.grad = grad_nO.sum(0) if bias.grad is None else bias.grad.add_(grad_nO.sum(0))


class _Linear(torch.autograd.Function):
    """`x w^T + b`, whose backward computes the gradient of x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, deferred: DeferWeights) -> Tensor:
        ctx.save_for_backward(x)
        # Not saved: under checkpointing what is saved comes back as another tensor, whose `.grad` nobody reads.
        ctx.weight, ctx.bias, ctx.deferred = weight, bias, deferred
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        ctx.deferred.pending.append((ctx.weight, ctx.bias, x, grad_y))
        return grad_y @ ctx.weight if ctx.needs_input_grad[0] else None, None, None, None
