"""Rounding errors in 8 and 16 bits: FP8 quantization, a sum over ranks in 16 bits, and FP8 training with torchao.

`to_float8` (the optional extra `fp8`): torchao swaps `nn.Linear` for a layer that casts its inputs to float8, as
`lablib.toys.precision.fp8.Fp8Linear` does, and runs `torch._scaled_mm` on tensor cores. With FSDP2 it can also gather
the weights in float8. Without `torch.compile` the casts cost more than the matmuls gain. It needs compute capability
8.9; on a CPU it runs too, slowly. Source: torchao documentation, quantized training.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lablib.calc.communication import summation_orders
from lablib.calc.errors import one_of
from lablib.calc.precision import ring_sum_error, rounding_error
from lablib.toys.precision import E4M3, E5M2, SCALINGS, DelayedScaling, MasterWeights, quantize, quantize_nvfp4
from lablib.toys.text import batches, tokens
from lablib.toys.transformer import Transformer, tiny_config

TENSOR_KINDS = ("weights", "activations", "gradients")
FLOAT8_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
MIN_CAPABILITY = (8, 9)
MULTIPLE = 16  # of both sizes of a matrix, for the float8 kernels


@dataclass(frozen=True)
class Fp8Error:
    """The error of one quantization."""

    error: float  # relative, `rms(x' - x) / rms(x)`
    zeroed: float  # share of the values that were not zero and became zero
    saturated: float  # share of the values that are the largest of the format, or were cut off at it


def fp8_error(
    x_MK: Tensor, scaling: str = "tensor", dtype: torch.dtype = E4M3, *, scale: Tensor | None = None
) -> Fp8Error:
    """Return what is lost when a matrix goes to FP8 and back."""
    quantized = quantize(x_MK, scaling, dtype, scale=scale)
    exact, found = x_MK.detach().double(), quantized.dequantize().double()
    power = exact.square().sum()
    error = ((found - exact).square().sum() / power).sqrt().item() if power else 0.0
    zeroed = ((found == 0) & (exact != 0)).double().mean().item()
    return Fp8Error(error, zeroed, quantized.saturated / exact.numel())


def through(name: str, x_MK: Tensor, *, gradient: bool = False) -> Tensor:
    """Return a matrix after its trip through a format, in fp32; rows lie along the dim that is summed over.

    Args:
        name: "nvfp4", "mxfp8", "fp8" (one scale for the matrix, gradients in E5M2) or "bf16".
    """
    if name == "nvfp4":
        return quantize_nvfp4(x_MK).dequantize()
    if name == "bf16":
        return x_MK.bfloat16().float()
    dtype = E5M2 if gradient and name == "fp8" else E4M3
    return quantize(x_MK, {"mxfp8": "mx32", "fp8": "tensor"}[name], dtype).dequantize()


def product_error(found_MN: Tensor, exact_MN: Tensor) -> float:
    """Return the mean over rows of a row's error over its size: a row that is lost counts, however small it is."""
    return ((found_MN - exact_MN).norm(dim=1) / exact_MN.norm(dim=1)).mean().item()


@contextmanager
def linear_tensors(model: nn.Module) -> Iterator[dict[str, dict[str, Tensor]]]:
    """Catch what the linear layers of a model multiply, while the block runs forward and backward.

    By kind, then by layer: "weights" (N, K), "activations" (tokens, K), "gradients" of outputs (tokens, N).
    """
    caught: dict[str, dict[str, Tensor]] = {kind: {} for kind in TENSOR_KINDS}

    def watch(name: str, layer: nn.Linear):
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            caught["weights"][name] = layer.weight.detach()
            caught["activations"][name] = inputs[0].detach().flatten(0, -2)
            output.register_hook(lambda g: caught["gradients"].update({name: g.detach().flatten(0, -2)}))

        return layer.register_forward_hook(hook)

    handles = [watch(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    try:
        yield caught
    finally:
        for handle in handles:
            handle.remove()


def trained_tensors(*, steps: int = 15, hidden: int = 256, seed: int = 0) -> dict[str, dict[str, Tensor]]:
    """Return the matrices of one step of a small Llama after a short training on real text."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(tiny_config("llama", num_layers=2, hidden=hidden))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    stream = batches(tokens(), batch=4, seq=64, seed=seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model.loss(next(stream)).backward()
        optimizer.step()
    with linear_tensors(model) as caught:
        model.loss(next(stream)).backward()
    return {kind: {name: t for name, t in caught[kind].items() if name != "head"} for kind in TENSOR_KINDS}


def error_table(
    matrices: dict[str, dict[str, Tensor]],
    *,
    scalings: tuple[str, ...] = tuple(SCALINGS),
    dtypes: tuple[torch.dtype, ...] = (E4M3, E5M2),
) -> dict[tuple[str, str, str], Fp8Error]:
    """Return the mean loss over layers by kind, scaling and format ("e4m3", "e5m2")."""
    table = {}
    for kind, layers in matrices.items():
        for scaling in scalings:
            for dtype in dtypes:
                found = [fp8_error(x, scaling, dtype) for x in layers.values()]
                columns = zip(*((e.error, e.zeroed, e.saturated) for e in found), strict=True)
                key = (kind, scaling, "e4m3" if dtype == E4M3 else "e5m2")
                table[key] = Fp8Error(*(math.fsum(column) / len(found) for column in columns))
    return table


def with_outlier(x_MK: Tensor, factor: float, *, row: int = 0, column: int = 0) -> Tensor:
    """Return a copy of a matrix with one value made `factor` times its largest."""
    copy = x_MK.detach().clone()
    copy[row, column] = factor * x_MK.abs().max()
    return copy


def delayed_scaling_run(
    *, steps: int = 40, history: int = 8, spike: int | None = 25, factor: float = 8.0
) -> list[dict[str, float]]:
    """Train, and quantize one layer's gradient in every step with a scale from the past and one from the present.

    Returns:
        For every step: "amax", the scale's range "covered", relative errors "delayed" and "current", and "saturated",
        the share of values that the delayed scale cuts off.
    """
    from lablib.launch.precision.watched_training import BATCH, SEQ, small_model

    weights = MasterWeights(small_model(), torch.float32)
    optimizer = torch.optim.AdamW(weights.master.parameters(), lr=3e-3)
    delayed, stream = DelayedScaling(E5M2, history=history), batches(tokens(), batch=BATCH, seq=SEQ, seed=1)
    rows = []
    for step in range(steps):
        with linear_tensors(weights.model) as caught:
            weights.model.loss(next(stream)).backward()
        x = caught["gradients"]["blocks.0.mlp.up"] * (factor if step == spike else 1.0)
        scale, top = delayed.scale(), torch.finfo(E5M2).max
        late, now = fp8_error(x, "tensor", E5M2, scale=scale), fp8_error(x, "tensor", E5M2)
        delayed.quantize(x)
        cut = (x.abs() > scale * top).double().mean().item()
        rows.append(
            {
                "amax": x.abs().max().item(),
                "covered": scale.item() * top,
                "delayed": late.error,
                "current": now.error,
                "saturated": cut,
            }
        )
        weights.take_gradients()
        optimizer.step()
        weights.give_weights()
    return rows


@dataclass(frozen=True)
class Float8Report:
    """The layers that `to_float8` swapped, and those that it kept."""

    swapped: tuple[str, ...]  # linear layers that multiply in float8 now
    kept: dict[str, str]  # linear layers that stayed as they were, with the reason


def missing_for_float8() -> str | None:
    """Return what this machine lacks for float8 training, as a sentence, or None if it has all."""
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed; in the course's folder, .venv/bin/pip install -e '.[fp8]' adds it"
    if not torch.cuda.is_available():
        return "no GPU: float8 training would run, but not faster; see lablib.toys.precision.fp8 for what it computes"
    capability = torch.cuda.get_device_capability()
    if torch.version.hip is None and capability < MIN_CAPABILITY:
        least = ".".join(map(str, MIN_CAPABILITY))
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
        recipe: "tensorwise", "rowwise" or "rowwise_with_gw_hp" (gradients of weights in bf16).
        keep: Says by its name which layer stays in high precision: the head, as a rule.
        emulate: Compute in fp32 what float8 would give: for machines without float8 units.
    """
    one_of("recipe", recipe, FLOAT8_RECIPES)
    if fsdp_gather and recipe != "tensorwise":
        raise ValueError(f"fsdp_gather needs one scale for a tensor, and recipe={recipe!r} has more; use 'tensorwise'")
    if importlib.util.find_spec("torchao") is None:
        raise ValueError("torchao is not installed; in the course's folder, .venv/bin/pip install -e '.[fp8]' adds it")
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
    """Compute the scales of all weights with one all-reduce; call it after every step of the optimizer."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


@dataclass(frozen=True)
class SumError:
    """The error of one sum over ranks, relative: `rms(result - exact) / rms(exact)`."""

    ranks: int  # n
    reduced: float  # summed in the low precision
    full: float  # summed in fp32 and rounded once at the end
    expected_reduced: float  # what `expected_error` says for it
    expected_full: float  # and for the other


def ring_sum(values: list[Tensor], *, full: bool = False) -> Tensor:
    """Return the sum of one tensor from each rank as a ring computes it: chunk by chunk, one rank after the other."""
    orders = summation_orders(len(values))
    chunks = []
    for chunk, order in enumerate(orders):
        parts = [values[rank].tensor_split(len(orders))[chunk] for rank in order]
        total = parts[0].float() if full else parts[0]
        for part in parts[1:]:
            total = total + part
        chunks.append(total.to(parts[0].dtype))
    return torch.cat(chunks)


def rounding_noise(dtype: torch.dtype) -> float:
    """Return the relative root mean square error of rounding one number, about `0.21 eps`."""
    return rounding_error(torch.finfo(dtype).eps)


def expected_error(ranks: int, dtype: torch.dtype, *, full: bool = False, same_sign: bool = False) -> float:
    """Return the relative error that a ring's sum should have: `lablib.calc.precision.fp8.ring_sum_error`."""
    return ring_sum_error(ranks, torch.finfo(dtype).eps, full=full, same_sign=same_sign)


def rank_values(ranks: int, *, size: int, dtype: torch.dtype, seed: int = 0, mean: float = 0.0) -> list[Tensor]:
    """Return a tensor of random numbers for every rank; a rank has the same whatever the number of ranks."""
    made = []
    for rank in range(ranks):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
        made.append((torch.randn(size, generator=generator) + mean).to(dtype))
    return made


def allreduce_error(
    world_sizes: tuple[int, ...] = (2, 4, 8, 16, 64),
    dtype: torch.dtype = torch.bfloat16,
    *,
    size: int = 1 << 14,
    seed: int = 0,
    mean: float = 0.0,
) -> list[SumError]:
    """Return the error of an all-reduce for several numbers of ranks, summed as a ring sums."""
    if min(world_sizes) < 2:
        raise ValueError(f"world_sizes={world_sizes}: a sum over ranks needs at least 2 of them")
    errors = []
    for ranks in world_sizes:
        values = rank_values(ranks, size=size, dtype=dtype, seed=seed, mean=mean)
        exact = torch.stack(values).double().sum(0)
        found = [relative_error(ring_sum(values, full=full), exact) for full in (False, True)]
        expected = [expected_error(ranks, dtype, full=f, same_sign=mean >= 4) for f in (False, True)]
        errors.append(SumError(ranks, *found, *expected))
    return errors


def relative_error(x: Tensor, exact: Tensor) -> float:
    """Return `rms(x - exact) / rms(exact)`."""
    return ((x.double() - exact).square().mean() / exact.double().square().mean()).sqrt().item()


def gloo_error(
    dtype: torch.dtype = torch.bfloat16, *, size: int = 1 << 14, seed: int = 0, mean: float = 0.0
) -> SumError:
    """Return the error of a real all-reduce between the ranks of this job; call it through `run_ranks`."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    values = rank_values(ranks, size=size, dtype=dtype, seed=seed, mean=mean)
    exact = torch.stack(values).double().sum(0)
    reduced, full = values[rank].clone(), values[rank].float()
    dist.all_reduce(reduced)
    dist.all_reduce(full)
    found = (relative_error(reduced, exact), relative_error(full.to(dtype), exact))
    expected = (expected_error(ranks, dtype, full=f, same_sign=mean >= 4) for f in (False, True))
    return SumError(ranks, *found, *expected)
