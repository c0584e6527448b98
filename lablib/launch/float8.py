"""Float8 training with torchao, for a GPU: the optional extra `fp8`.

torchao swaps `nn.Linear` for a layer that casts its inputs to float8, as `lablib.toys.fp8.Fp8Linear` does, and runs
`torch._scaled_mm` on tensor cores. With FSDP2 it can also gather the weights in float8. Without `torch.compile` the
casts cost more than the matmuls gain.

Needs compute capability 8.9 or more, `lablib.calc.format_support`. On a CPU everything runs too, slowly, which is how
the tests see it.

Source: torchao documentation, quantized training.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from lablib.calc.choices import one_of

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
LEAST_CAPABILITY = (8, 9)
MULTIPLE = 16  # of both sizes of a matrix, for the float8 kernels


@dataclass(frozen=True)
class Float8Report:
    """What `to_float8` did.

    Attributes:
        swapped: Linear layers that multiply in float8 now.
        kept: Linear layers that stayed as they were, with the reason.
    """

    swapped: tuple[str, ...]
    kept: dict[str, str]


def missing() -> str | None:
    """Return what this machine lacks for float8 training, as a sentence, or None if it has all."""
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed; in the course's folder, .venv/bin/pip install -e '.[fp8]' adds it"
    if not torch.cuda.is_available():
        return "no GPU: float8 training would run, but not faster; see lablib.toys.fp8 for what it computes"
    capability = torch.cuda.get_device_capability()
    if torch.version.hip is None and capability < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        return f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}; float8 needs {least}"
    return None


def to_float8(
    model: nn.Module,
    *,
    recipe: str = "tensorwise",
    fsdp_gather: bool = False,
    keep: Callable[[str], bool] = lambda name: name.rpartition(".")[2] in ("head", "lm_head"),
    emulate: bool = False,
) -> Float8Report:
    """Swap the linear layers of a model for torchao's float8 ones, in place; do it before `fully_shard`.

    Args:
        model: On the device and in the dtype where it will train.
        recipe: "tensorwise", "rowwise" or "rowwise_with_gw_hp" (gradients of weights in bf16).
        fsdp_gather: Whether FSDP2 gathers the weights in float8; with "tensorwise" only.
        keep: Says by its name which layer stays in high precision: the head, as a rule.
        emulate: Compute in fp32 what float8 would give: for machines without float8 units.

    Raises:
        ValueError: If torchao is missing, the recipe is unknown, or the gather does not go with it.
    """
    one_of("recipe", recipe, RECIPES)
    if fsdp_gather and recipe != "tensorwise":
        raise ValueError(
            f"fsdp_gather needs one scale for a tensor, and recipe={recipe!r} has more; use 'tensorwise'"
        )
    if importlib.util.find_spec("torchao") is None:
        raise ValueError(
            "torchao is not installed; in the course's folder, .venv/bin/pip install -e '.[fp8]' adds it"
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    names = {module: name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    kept: dict[str, str] = {}
    for module, name in names.items():
        odd = [size for size in (module.in_features, module.out_features) if size % MULTIPLE]
        if keep(name):
            kept[name] = "kept in high precision"
        elif odd:
            kept[name] = f"{odd[0]} is not a multiple of {MULTIPLE}"
    if recipe == "tensorwise":
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=fsdp_gather, emulate=emulate)
    else:
        config = Float8LinearConfig.from_recipe_name(recipe)
        object.__setattr__(config, "emulate", emulate)  # a frozen dataclass whose recipes take no arguments
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name not in kept)
    return Float8Report(tuple(name for name in names.values() if name not in kept), kept)


def precompute_scales(model: nn.Module) -> None:
    """Compute the scales of all weights with one all-reduce; call it after every step of the optimizer.

    Only with `fsdp_gather`: without it FSDP2 asks for every weight's scale by itself.

    Args:
        model: Sharded by `fully_shard`.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)
