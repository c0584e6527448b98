"""FP8: scale a tensor into the range of eight bits, multiply there, and scale back; and a linear layer that does so.

    scale = max |x| / max of the format        q = cast(x / scale)        x ~ q * scale

How many values share a scale is the choice:

| scaling | one scale for | who uses it |
|---|---|---|
| tensor | the whole tensor | torchao "tensorwise", Transformer Engine |
| row | a row: a token, or an output of a weight | torchao "rowwise" |
| block1x128 | 128 values of a row | DeepSeek-V3 (arXiv 2412.19437), activations and gradients |
| block128x128 | a square of a matrix | DeepSeek-V3, weights |
| mx32 | 32 values of a row, a power of two | MXFP8: the scale is E8M0, and rounded up (Transformer Engine, torchtitan) |
| mx32-floor, -even, -ceil | the same, rounded otherwise | the OCP specification suggests floor; see `mx_scale` |

A matmul can take out a scale only if all terms of a sum share it, so blocks lie along the dim that is summed over.

Shapes: M rows (tokens), K columns (the dim that the forward sums over), N outputs.

Papers: Micikevicius et al. 2022 (arXiv 2209.05433); DeepSeek-V3 (arXiv 2412.19437), section 3.3; Mishra et al. 2025
(arXiv 2506.08027). Four bits: `fp4`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lablib.calc.errors import one_of
from lablib.calc.precision import mx_doubles

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# Rows and columns that share a scale; None for all of them.
SCALINGS: dict[str, tuple[int | None, int | None]] = {
    "tensor": (None, None),
    "row": (1, None),
    "block1x128": (1, 128),
    "block128x128": (128, 128),
    "mx32": (1, 32),
    "mx32-floor": (1, 32),
    "mx32-even": (1, 32),
    "mx32-ceil": (1, 32),
}


# --- a matrix in FP8 ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantized:
    """A matrix in FP8.

    Attributes:
        values_MK: The values, in a float8 dtype.
        scale_RC: What they are multiplied by to read them, fp32, one for each block.
        block: Rows and columns of a block; blocks at the lower and right edge may be smaller.
    """

    values_MK: Tensor
    scale_RC: Tensor
    block: tuple[int, int]

    def dequantize(self) -> Tensor:
        """Return the matrix in fp32: every value times the scale of its block."""
        return self.values_MK.float() * spread(self.scale_RC, self.block, self.values_MK.shape)

    @property
    def saturated(self) -> int:
        """How many values are the largest of the format or, where a cast overflowed, none."""
        values = self.values_MK.float()
        return int((~(values.abs() < torch.finfo(self.values_MK.dtype).max)).sum())


def quantize(
    x_MK: Tensor, scaling: str = "tensor", dtype: torch.dtype = E4M3, *, scale: Tensor | None = None
) -> Quantized:
    """Return a matrix in FP8, each block scaled so that its largest value is the largest of the format.

    Args:
        scale: A scale from elsewhere, a scalar, as in delayed scaling; what is too large for it saturates.
    """
    rows, columns = SCALINGS[one_of("scaling", scaling, SCALINGS)]
    if x_MK.dim() != 2:
        raise ValueError(f"quantize takes a matrix, not a tensor of shape {tuple(x_MK.shape)}")
    if scale is not None and scaling != "tensor":
        raise ValueError(f"a given scale is one for the tensor, and scaling={scaling!r} needs one per block")
    block = (rows or max(x_MK.shape[0], 1), columns or max(x_MK.shape[1], 1))
    top = torch.finfo(dtype).max
    if scale is None:
        largest_RC = block_maxima(x_MK.detach().float(), block)
        # A block of zeros: any scale will do.
        scale_RC = torch.where(largest_RC > 0, largest_RC / top, 1.0).clamp(min=torch.finfo(torch.float32).tiny)
        if scaling.startswith("mx32"):
            scale_RC = power_of_two_scale(largest_RC, top, torch.finfo(dtype).eps, scaling.partition("-")[2] or "rceil")
    else:
        scale_RC = scale.detach().float().reshape(1, 1)
    # PyTorch's casts overflow to NaN, to infinity or not at all, by dtype and version: clamp first.
    scaled_MK = x_MK.detach().float() / spread(scale_RC, block, x_MK.shape)
    return Quantized(scaled_MK.clamp(-top, top).to(dtype), scale_RC, block)


def block_maxima(x_MK: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the largest magnitude of every block, `largest_RC`."""
    rows, columns = block
    short, narrow = -x_MK.shape[0] % rows, -x_MK.shape[1] % columns
    padded = F.pad(x_MK.abs(), (0, narrow, 0, short))  # zeros are no maximum
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax(dim=(1, 3))


SMALLEST = -127  # exponent of the smallest E8M0 scale; 127 of the largest


def power_of_two_scale(largest: Tensor, top: float, epsilon: float, rounding: str = "rceil") -> Tensor:
    """Return the scales of MX blocks, powers of two: `lablib.calc.precision.mx_scale` of many.

    Args:
        largest: Largest magnitude of every block.
        top: Largest number of the format: 448 for E4M3, which has no 480; 6 for E2M1.
        epsilon: Its gap between 1 and the next number.
        rounding: A key of `lablib.calc.precision.MX_ROUNDINGS`.
    """
    mantissa, exponent = torch.frexp(largest)
    top_mantissa, top_exponent = torch.frexp(torch.tensor(top))
    doubled = mx_doubles(mantissa, top_mantissa, epsilon, rounding).int()
    exponent = (exponent - top_exponent + doubled).clamp(SMALLEST, -SMALLEST)
    scale = torch.ldexp(torch.ones_like(largest), torch.where(largest > 0, exponent, SMALLEST))
    return torch.where(largest.isfinite(), scale, torch.nan)  # E8M0 has NaN, and no infinity: such a block is lost


def spread(scale_RC: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """Return the scale of every value."""
    rows, columns = block
    if scale_RC.numel() == 1:
        return scale_RC
    return scale_RC.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]


class DelayedScaling:
    """A scale from the past: the largest value of the last steps, so that no pass over this step's tensor is needed.

    The cast can then run in the kernel that makes the tensor. What is larger than anything in the history saturates,
    and the history learns of it one step too late (Transformer Engine's DelayedScaling recipe).

    Args:
        margin: Powers of two that are left free above the history's largest value.
    """

    def __init__(self, dtype: torch.dtype = E4M3, *, history: int = 16, margin: int = 0) -> None:
        if history < 1:
            raise ValueError(f"history={history} must be at least 1")
        self.dtype, self.margin = dtype, margin
        self.maxima: deque[float] = deque(maxlen=history)

    def scale(self) -> Tensor:
        """Return the scale that the history asks for; 1 before the first step, as nothing is known then."""
        largest = max(self.maxima, default=0.0)
        top = torch.finfo(self.dtype).max
        return torch.tensor(largest * 2.0**self.margin / top if largest > 0 else 1.0)

    def quantize(self, x_MK: Tensor) -> Quantized:
        """Return a matrix in FP8 with the scale of the steps before, then remember its own largest value."""
        quantized = quantize(x_MK, "tensor", self.dtype, scale=self.scale())
        largest = x_MK.detach().abs().amax().item()
        if largest < float("inf"):  # neither infinite nor NaN: such a step is skipped, not remembered
            self.maxima.append(largest)
        return quantized


# --- a linear layer -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """How a linear layer goes to FP8, and its three matmuls.

    Each sums over another dim: x wᵀ over K, g w over N, gᵀ x over tokens. So each quantizes its own factors, with rows
    along the dim that it sums over. `lablib.toys.precision.fp4.Recipe4` has the same three.

    Attributes:
        activations: Scaling of inputs and gradients.
        weights: Scaling of weights.
        dtype: Of inputs and weights.
        gradient_dtype: Of gradients: they need range more than precision.
    """

    activations: str = "tensor"
    weights: str = "tensor"
    dtype: torch.dtype = E4M3
    gradient_dtype: torch.dtype = E5M2

    def forward(self, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        """Return `x wᵀ`."""
        return fp8_matmul(x_MK, w_NK, (self.activations, self.weights), (self.dtype, self.dtype))

    def input_gradient(self, g_MN: Tensor, w_NK: Tensor) -> Tensor:
        """Return `g w`."""
        return fp8_matmul(g_MN, w_NK.T, (self.activations, self.weights), (self.gradient_dtype, self.dtype))

    def weight_gradient(self, g_MN: Tensor, x_MK: Tensor) -> Tensor:
        """Return `gᵀ x`."""
        return fp8_matmul(g_MN.T, x_MK.T, (self.activations, self.activations), (self.gradient_dtype, self.dtype))


RECIPES = {
    "tensor": Recipe(),
    "tensor, E4M3 gradients": Recipe(gradient_dtype=E4M3),
    "row": Recipe("row", "row", gradient_dtype=E4M3),
    "deepseek-v3": Recipe("block1x128", "block128x128", gradient_dtype=E4M3),
    "mxfp8": Recipe("mx32", "mx32", gradient_dtype=E4M3),
    "mxfp8, rounded down": Recipe("mx32-floor", "mx32-floor", gradient_dtype=E4M3),
}


def fp8_matmul(
    a_MK: Tensor, b_NK: Tensor, scalings: tuple[str, str], dtypes: tuple[torch.dtype, torch.dtype]
) -> Tensor:
    """Return `a bᵀ` with both factors in FP8 and the sums in fp32.

    Both matrices are quantized as given, with rows along K: the scales of a row can leave the sum.
    """
    a, b = (quantize(x, s, d).dequantize() for x, s, d in zip((a_MK, b_NK), scalings, dtypes, strict=True))
    # Tensor cores multiply the FP8 codes and apply the scales after. In fp32 either order gives the same products.
    return a @ b.T


class _ThreeMatmuls(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_MK: Tensor, w_NK: Tensor, recipe: Recipe) -> Tensor:
        ctx.save_for_backward(x_MK, w_NK)
        ctx.recipe = recipe
        return recipe.forward(x_MK, w_NK).to(x_MK.dtype)

    @staticmethod
    def backward(ctx, g_MN: Tensor) -> tuple[Tensor, Tensor, None]:
        (x_MK, w_NK), recipe = ctx.saved_tensors, ctx.recipe
        g_MK, g_NK = recipe.input_gradient(g_MN, w_NK), recipe.weight_gradient(g_MN, x_MK)
        return g_MK.to(x_MK.dtype), g_NK.to(w_NK.dtype), None


class Fp8Linear(nn.Linear):
    """A linear layer whose three matmuls read FP8, or what the recipe says.

    Weights, gradients and what autograd keeps stay as they were.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, recipe: str | Recipe = "tensor", **kwargs
    ) -> None:
        super().__init__(in_features, out_features, bias, **kwargs)
        self.recipe = RECIPES[one_of("recipe", recipe, RECIPES)] if isinstance(recipe, str) else recipe

    def forward(self, x: Tensor) -> Tensor:
        """Return `x wᵀ + b`."""
        out_MN = _ThreeMatmuls.apply(x.flatten(0, -2), self.weight, self.recipe).unflatten(0, x.shape[:-1])
        return out_MN if self.bias is None else out_MN + self.bias


def swap_linears(model: nn.Module, *, recipe: str | Recipe = "tensor", keep: tuple[str, ...] = ("head",)) -> list[str]:
    """Turn the linear layers of a model into FP8 ones, in place, and return their names.

    Args:
        model: Its weights stay the same tensors.
        recipe: A key of `RECIPES`, or a `Recipe`.
        keep: Names, or last parts of names, of layers that stay in high precision.
    """
    swapped = []
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or name in keep or name.rpartition(".")[2] in keep:
            continue
        with torch.device("meta"):
            fp8 = Fp8Linear(module.in_features, module.out_features, module.bias is not None, recipe=recipe)
        fp8.weight, fp8.bias = module.weight, module.bias
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, fp8)
        swapped.append(name)
    return swapped
