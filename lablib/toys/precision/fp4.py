"""NVFP4: four bits a value, sixteen values a scale, and what makes such coarse numbers trainable; MXFP4 beside it.

A value is E2M1, one of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign. Sixteen of a row share a scale in E4M3, and the
tensor has one more in fp32, which brings the scales themselves into the range of E4M3:

    x ~ q * block scale * tensor scale
    tensor scale = max |x| / (448 * 6)        block scale = E4M3(max |block| / 6 / tensor scale)

MXFP4 has one power of two for 32 values, and nothing else: `quantize_mxfp4`.

The ingredients of a training recipe, which `Recipe4` switches one by one: two levels of scales; `square` scales for
weights; `stochastic` rounding of gradients, so that their mean is right; `hadamard`, which turns sixteen values at
once, so that an outlier is spread over all of them: both factors of the weights' gradient are turned along the dim that
is summed over, and the turns cancel, `(a h)(b h)ᵀ = a bᵀ`. The last one, layers that stay in high precision, is
`keep` of `lablib.toys.precision.fp8.swap_linears`.

Shapes: M rows, K columns; R, C blocks along them.

Papers: NVIDIA 2025, Pretraining Large Language Models with NVFP4 (2509.25149), section 4 and the appendix on
quantization; Transformer Engine documentation, NVFP4.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lablib.toys.precision.fp8 import E4M3, block_maxima, power_of_two_scale, spread

TOP = 6.0  # largest value of E2M1
EPSILON = 0.5
BLOCK = 16
LEAST_SCALE = torch.finfo(E4M3).tiny  # 2^-6: torchao takes no subnormal scale


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
    x_MK: Tensor,
    *,
    two_level: bool = True,
    square: bool = False,
    stochastic: bool = False,
    generator: torch.Generator | None = None,
) -> Nvfp4:
    """Return a matrix in NVFP4.

    Args:
        two_level: Have a scale for the tensor; else the blocks' E4M3 scales stand alone, and reach from 2^-6 to 448.
        square: One scale for 16 by 16 values, so that a weight and its transpose are the same numbers; else for 1 by 16.
        stochastic: Round by chance, as for gradients; else to nearest.
    """
    if x_MK.dim() != 2:
        raise ValueError(f"quantize_nvfp4 takes a matrix, not a tensor of shape {tuple(x_MK.shape)}")
    block = (BLOCK if square else 1, BLOCK)
    x_MK = x_MK.detach().float()
    largest_RC, top = block_maxima(x_MK, block), torch.finfo(E4M3).max
    tensor_scale = x_MK.abs().max() / (top * TOP) if two_level and x_MK.numel() else torch.tensor(1.0)
    tensor_scale = torch.where(tensor_scale > 0, tensor_scale, 1.0)
    scale_RC = (largest_RC / TOP / tensor_scale).clamp(LEAST_SCALE, top).to(E4M3)
    # Kernels multiply by one number, and not divide by two: the last bit differs.
    inverse_RC = (1 / tensor_scale) / scale_RC.float()
    # In a tensor of fp32's subnormals the inverse is infinite, and a zero stays one.
    values_MK = torch.where(x_MK == 0, x_MK, x_MK * spread(inverse_RC, block, x_MK.shape))
    return Nvfp4(round_e2m1(values_MK, stochastic=stochastic, generator=generator), scale_RC, tensor_scale, block)


def quantize_mxfp4(x_MK: Tensor, rounding: str = "rceil") -> tuple[Tensor, Tensor]:
    """Return the values of E2M1, in fp32, and the scales of a matrix in MXFP4, a power of two for 32 values of a row."""
    if x_MK.dim() != 2:
        raise ValueError(f"quantize_mxfp4 takes a matrix, not a tensor of shape {tuple(x_MK.shape)}")
    x_MK = x_MK.detach().float()
    scale_RC = power_of_two_scale(block_maxima(x_MK, (1, 32)), TOP, EPSILON, rounding)
    return round_e2m1(x_MK / spread(scale_RC, (1, 32), x_MK.shape)), scale_RC


def hadamard(*, generator: torch.Generator | None = None) -> Tensor:
    """Return a random orthogonal matrix of 16 by 16: Hadamard's, of ones and minus ones, with rows of random sign, / 4.

    Transformer Engine has one fixed vector of signs; here they are drawn.
    """
    h = torch.ones(1, 1)
    while len(h) < BLOCK:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    signs = torch.randint(2, (BLOCK, 1), generator=generator) * 2.0 - 1
    return signs * h / BLOCK**0.5


def turn(x_MK: Tensor, h: Tensor) -> Tensor:
    """Return a matrix with every sixteen values of a row turned by `h`."""
    if x_MK.shape[1] % len(h):
        raise ValueError(f"{x_MK.shape[1]} columns are no multiple of {len(h)}: turned are {len(h)} values at a time")
    return (x_MK.unflatten(1, (-1, len(h))) @ h).flatten(1)


@dataclass(frozen=True)
class Recipe4:
    """How a linear layer goes to NVFP4, and its three matmuls; the sums are in fp32.

    Attributes:
        generator: For chance and turns; None is torch's own.
    """

    two_level: bool = True
    square: bool = True
    stochastic: bool = True
    turned: bool = True
    generator: torch.Generator | None = field(default=None, repr=False)

    def _there_and_back(self, x_MK: Tensor, *, square: bool = False, stochastic: bool = False) -> Tensor:
        how = {"two_level": self.two_level, "square": square, "stochastic": stochastic}
        return quantize_nvfp4(x_MK, **how, generator=self.generator).dequantize()

    def forward(self, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        """Return `x wᵀ`."""
        return self._there_and_back(x_MK) @ self._there_and_back(w_NK, square=self.square).T

    def input_gradient(self, g_MN: Tensor, w_NK: Tensor) -> Tensor:
        """Return `g w`. With square scales these are the numbers of w that forward read."""
        g_MN = self._there_and_back(g_MN, stochastic=self.stochastic)
        return g_MN @ self._there_and_back(w_NK.T, square=self.square).T

    def weight_gradient(self, g_MN: Tensor, x_MK: Tensor) -> Tensor:
        """Return `gᵀ x`, a sum over tokens, of which there must be a multiple of 16 where it is turned."""
        g_NM, x_KM = g_MN.T, x_MK.T
        if self.turned:
            h = hadamard(generator=self.generator)
            g_NM, x_KM = turn(g_NM, h), turn(x_KM, h)
        return self._there_and_back(g_NM, stochastic=self.stochastic) @ self._there_and_back(x_KM).T
