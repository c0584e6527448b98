"""A linear layer in FP8: its three matmuls read eight bits, and everything else stays as it was.

Scaling is in `fp8_scaling`, and its names are here too. Shapes: M rows (tokens), K columns (the dim that the forward
sums over), N outputs.

Papers: Micikevicius et al. 2022 (arXiv 2209.05433); DeepSeek-V3
(arXiv 2412.19437), section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lablib.calc.choices import one_of
from lablib.toys.fp8_scaling import (
    E4M3,
    E5M2,
    SCALINGS,
    DelayedScaling,
    Quantized,
    block_maxima,
    power_of_two_scale,
    quantize,
)

__all__ = [
    "E4M3",
    "E5M2",
    "RECIPES",
    "SCALINGS",
    "DelayedScaling",
    "Fp8Linear",
    "Quantized",
    "Recipe",
    "block_maxima",
    "fp8_matmul",
    "power_of_two_scale",
    "quantize",
    "swap_linears",
]


def fp8_matmul(
    a_MK: Tensor, b_NK: Tensor, scalings: tuple[str, str], dtypes: tuple[torch.dtype, torch.dtype]
) -> Tensor:
    """Return `a bᵀ` with both factors in FP8 and the sums in fp32.

    Both matrices are quantized as given, with rows along K: the scales of a row can leave the sum.

    Args:
        a_MK: Left factor.
        b_NK: Right factor, transposed.
        scalings: Of the two.
        dtypes: Of the two.
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


class Fp8Linear(nn.Linear):
    """A linear layer whose three matmuls read FP8. Weights, gradients and what autograd keeps stay as they were.

    Args:
        in_features: K.
        out_features: N.
        bias: Whether to add a bias, in the dtype of the weights.
        recipe: A key of `RECIPES`, or a `Recipe`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: str | Recipe = "tensor",
        **kwargs,
    ) -> None:
        super().__init__(in_features, out_features, bias, **kwargs)
        self.recipe = RECIPES[one_of("recipe", recipe, RECIPES)] if isinstance(recipe, str) else recipe

    def forward(self, x: Tensor) -> Tensor:
        """Return `x wᵀ + b`.

        Args:
            x: (..., K).
        """
        out_MN = _Fp8Linear.apply(x.flatten(0, -2), self.weight, self.recipe).unflatten(0, x.shape[:-1])
        return out_MN if self.bias is None else out_MN + self.bias


def swap_linears(
    model: nn.Module, *, recipe: str | Recipe = "tensor", keep: tuple[str, ...] = ("head",)
) -> list[str]:
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
