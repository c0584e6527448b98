"""FP8: scale a tensor into the range of eight bits, multiply there, and scale back; and a linear layer that does so.

    scale = max |x| / max of the format        q = cast(x / scale)        x ~ q * scale

How many values share a scale is the choice:

| scaling | one scale for | who uses it |
|---|---|---|
| tensor | the whole tensor | torchao "tensorwise", Transformer Engine |
| row | a row: a token, or an output of a weight | torchao "rowwise" |
| block1x128 | 128 values of a row | DeepSeek-V3 (arXiv 2412.19437), activations and gradients |
| block128x128 | a square of a matrix | DeepSeek-V3, weights |
| mx32 | 32 values of a row, a power of two, rounded up | MXFP8 in Transformer Engine and torchao: the scale is E8M0 |
| mx32-floor | the same, rounded down | what the OCP specification suggests; training with it diverged (2506.08027) |

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

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# Rows and columns that share a scale; None for all of them.
SCALINGS: dict[str, tuple[int | None, int | None]] = {
    "tensor": (None, None),
    "row": (1, None),
    "block1x128": (1, 128),
    "block128x128": (128, 128),
    "mx32": (1, 32),
    "mx32-floor": (1, 32),
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
            scale_RC = power_of_two_scale(largest_RC, dtype, up=scaling == "mx32")
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


def power_of_two_scale(largest: Tensor, dtype: torch.dtype, *, up: bool = True) -> Tensor:
    """Return MXFP8's scale, a power of two.

        up      2^ceil(log2(largest / top))                       the largest lands at most at the top: none saturates
        else    2^(floor(log2 largest) - floor(log2 top))         it lands in the top binade, and above the top it is cut

    E4M3 has no 480, so rounded down up to 1/8 of a binade saturates at 448.
    """
    top = torch.tensor(torch.finfo(dtype).max)
    if up:
        mantissa, exponent = torch.frexp(largest / top)
        exponent = exponent - (mantissa == 0.5).int()  # a power of two is its own ceiling
    else:
        exponent = torch.frexp(largest).exponent - torch.frexp(top).exponent
    return torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent.clamp(-127, 127)), 1.0)


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
    """How a linear layer goes to FP8.

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


RECIPES = {
    "tensor": Recipe(),
    "row": Recipe("row", "row"),
    "deepseek-v3": Recipe("block1x128", "block128x128", gradient_dtype=E4M3),
    "mxfp8": Recipe("mx32", "mx32", gradient_dtype=E4M3),
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


class _Fp8Linear(torch.autograd.Function):
    # Three matmuls, and each sums over another dim: x wᵀ over K, g w over N, gᵀ x over tokens.
    # So each quantizes its own factors, along the dim that it sums over.
    @staticmethod
    def forward(ctx, x_MK: Tensor, w_NK: Tensor, recipe: Recipe) -> Tensor:
        ctx.save_for_backward(x_MK, w_NK)
        ctx.recipe = recipe
        scalings = (recipe.activations, recipe.weights)
        return fp8_matmul(x_MK, w_NK, scalings, (recipe.dtype, recipe.dtype)).to(x_MK.dtype)

    @staticmethod
    def backward(ctx, g_MN: Tensor) -> tuple[Tensor, Tensor, None]:
        (x_MK, w_NK), recipe = ctx.saved_tensors, ctx.recipe
        dtypes = (recipe.gradient_dtype, recipe.dtype)
        g_MK = fp8_matmul(g_MN, w_NK.T, (recipe.activations, recipe.weights), dtypes)
        g_NK = fp8_matmul(g_MN.T, x_MK.T, (recipe.activations, recipe.activations), dtypes)
        return g_MK.to(x_MK.dtype), g_NK.to(w_NK.dtype), None


class Fp8Linear(nn.Linear):
    """A linear layer whose three matmuls read FP8. Weights, gradients and what autograd keeps stay as they were."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, recipe: str | Recipe = "tensor", **kwargs
    ) -> None:
        super().__init__(in_features, out_features, bias, **kwargs)
        self.recipe = RECIPES[one_of("recipe", recipe, RECIPES)] if isinstance(recipe, str) else recipe

    def forward(self, x: Tensor) -> Tensor:
        """Return `x wᵀ + b`."""
        out_MN = _Fp8Linear.apply(x.flatten(0, -2), self.weight, self.recipe).unflatten(0, x.shape[:-1])
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
