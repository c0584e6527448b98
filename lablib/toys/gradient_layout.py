"""Where a gradient lies in memory: as its parameter does.

A parameter may be transposed, or have its channels last. Autograd gives its gradient the same strides; who takes a
gradient out of a message must do so too. A fused optimizer walks through weight, gradient and states as they lie in
memory, and with other strides it updates the wrong entries without a word.

Source: torch/csrc/autograd/functions/accumulate_grad.h, "Gradient Layout Contract".
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def empty_grad(p: nn.Parameter, memory: Tensor | None = None) -> Tensor:
    """Return an uninitialized tensor with the shape, dtype and strides that a parameter's gradient must have.

    Args:
        memory: A flat array of as many values to lie in, such as a part of a bucket; None takes new memory.
    """
    grad = torch.empty_like(p, requires_grad=False)
    return grad if memory is None else memory.as_strided(p.shape, grad.stride())


def set_grad(p: nn.Parameter, values: Tensor) -> None:
    """Give a parameter a gradient of its own with these values, which come in the order of the parameter's indices."""
    p.grad = empty_grad(p).copy_(values.view(p.shape))
