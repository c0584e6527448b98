"""NVFP4: four bits a value, sixteen values a scale, and two random tricks that make such coarse numbers trainable.

A value is E2M1, one of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign. Sixteen of a row share a scale in E4M3, and the
tensor has one more in fp32, which brings the scales themselves into the range of E4M3:

    x ~ q * block scale * tensor scale
    tensor scale = max |x| / (448 * 6)        block scale = E4M3(max |block| / 6 / tensor scale)

Two of the four ingredients of a training recipe are here. `stochastic` rounds gradients by chance, so that their mean
is right. `hadamard` turns sixteen values at once, so that an outlier is spread over all of them; both factors of the
weights' gradient are turned along the dim that is summed over, and the turns cancel: `(a h)(b h)ᵀ = a bᵀ`.

Shapes: M rows, K columns; R, C blocks along them.

Papers: NVIDIA 2025, Pretraining Large Language Models with NVFP4 (2509.25149); Transformer Engine documentation, NVFP4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lablib.toys.precision.fp8 import E4M3, block_maxima, spread

TOP = 6.0  # largest value of E2M1
BLOCK = 16


@dataclass(frozen=True)
class Nvfp4:
    """A matrix in NVFP4.

    Attributes:
        values_MK: The values of E2M1, kept in fp32: PyTorch has no arithmetic for four bits.
        scale_RC: One for each block, float8_e4m3fn.
        tensor_scale: One for all, fp32.
        block: Rows and columns of a block: (1, 16) for activations and gradients, (16, 16) for weights.
    """

    values_MK: Tensor
    scale_RC: Tensor
    tensor_scale: Tensor
    block: tuple[int, int]

    def dequantize(self) -> Tensor:
        """Return the matrix in fp32."""
        scale_RC = self.scale_RC.float() * self.tensor_scale
        return self.values_MK * spread(scale_RC, self.block, self.values_MK.shape)


def round_e2m1(x: Tensor, *, stochastic: bool = False, generator: torch.Generator | None = None) -> Tensor:
    """Return the values of E2M1 for numbers: the nearest, or one of two by chance so that the mean is the number.

    The gap is 1/2 below 2, then 1, then 2 from 4 on; what is beyond 6 becomes 6.
    """
    size = x.abs()
    gap = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    steps = size / gap
    whole = torch.floor(steps + torch.rand(x.shape, generator=generator)) if stochastic else steps.round()
    return torch.copysign((whole * gap).clamp(max=TOP), x)


def quantize_nvfp4(
    x_MK: Tensor, *, square: bool = False, stochastic: bool = False, generator: torch.Generator | None = None
) -> Nvfp4:
    """Return a matrix in NVFP4.

    Args:
        square: One scale for 16 by 16 values, so that a weight and its transpose are the same numbers; else for 1 by 16.
        stochastic: Round by chance, as for gradients; else to nearest.
    """
    if x_MK.dim() != 2:
        raise ValueError(f"quantize_nvfp4 takes a matrix, not a tensor of shape {tuple(x_MK.shape)}")
    block = (BLOCK if square else 1, BLOCK)
    x_MK = x_MK.detach().float()
    largest_RC = block_maxima(x_MK, block)
    top = largest_RC.max()
    tensor_scale = torch.where(top > 0, top / (torch.finfo(E4M3).max * TOP), 1.0)
    scale_RC = (largest_RC / TOP / tensor_scale).to(E4M3)
    whole_MK = spread(scale_RC.float() * tensor_scale, block, x_MK.shape)
    scaled_MK = torch.where(whole_MK > 0, x_MK / whole_MK, 0.0)  # a scale may round to zero
    return Nvfp4(round_e2m1(scaled_MK, stochastic=stochastic, generator=generator), scale_RC, tensor_scale, block)


def hadamard(*, generator: torch.Generator | None = None) -> Tensor:
    """Return a random orthogonal matrix of 16 by 16: Hadamard's, of ones and minus ones, with rows of random sign, / 4."""
    h = torch.ones(1, 1)
    while len(h) < BLOCK:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    signs = torch.randint(2, (BLOCK, 1), generator=generator) * 2.0 - 1
    return signs * h / BLOCK**0.5


def turn(x_MK: Tensor, h: Tensor) -> Tensor:
    """Return a matrix with every sixteen values of a row turned by `h`."""
    return (x_MK.unflatten(1, (-1, len(h))) @ h).flatten(1)
