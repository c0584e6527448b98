"""How much FP8 loses, by what is quantized and by how its scales are shared: from a transformer that really trains.

Weights, activations and gradients spread differently. The error of a block comes from its largest value: all others
are read relative to it, and those that are too small become zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lablib.toys.fp8 import E4M3, E5M2, SCALINGS, DelayedScaling, quantize
from lablib.toys.precision import MasterWeights
from lablib.toys.text import batches, tokens
from lablib.toys.transformer import Transformer, tiny_config

KINDS = ("weights", "activations", "gradients")


@dataclass(frozen=True)
class Fp8Error:
    """What one quantization lost.

    Attributes:
        error: Relative, `rms(x' - x) / rms(x)`.
        zeroed: Share of the values that were not zero and became zero.
        saturated: Share of the values that are the largest of the format, or were cut off at it.
    """

    error: float
    zeroed: float
    saturated: float


def fp8_error(
    x_MK: Tensor, scaling: str = "tensor", dtype: torch.dtype = E4M3, *, scale: Tensor | None = None
) -> Fp8Error:
    """Return what is lost when a matrix goes to FP8 and back.

    Args:
        x_MK: A matrix.
        scaling: As in `lablib.toys.fp8.quantize`.
        dtype: A float8 dtype.
        scale: A given scale, as there.
    """
    quantized = quantize(x_MK, scaling, dtype, scale=scale)
    exact, found = x_MK.detach().double(), quantized.dequantize().double()
    power = exact.square().sum()
    error = ((found - exact).square().sum() / power).sqrt().item() if power else 0.0
    zeroed = ((found == 0) & (exact != 0)).double().mean().item()
    return Fp8Error(error, zeroed, quantized.saturated / exact.numel())


@contextmanager
def linear_tensors(model: nn.Module) -> Iterator[dict[str, dict[str, Tensor]]]:
    """Catch what the linear layers of a model multiply, while the block runs forward and backward.

    Yields:
        By kind, then by layer: "weights" (N, K), "activations" (tokens, K), "gradients" of outputs (tokens, N).
    """
    caught: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}

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
    """Return the matrices of one step of a small Llama after a short training on real text.

    Args:
        steps: Of AdamW before.
        hidden: Width, wide enough for two blocks of 128.
        seed: Of weights and batches.
    """
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
    return {kind: {name: t for name, t in caught[kind].items() if name != "head"} for kind in KINDS}


def error_table(
    matrices: dict[str, dict[str, Tensor]],
    *,
    scalings: tuple[str, ...] = tuple(SCALINGS),
    dtypes: tuple[torch.dtype, ...] = (E4M3, E5M2),
) -> dict[tuple[str, str, str], Fp8Error]:
    """Return the mean loss over layers by kind, scaling and format ("e4m3", "e5m2").

    Args:
        matrices: From `trained_tensors`.
        scalings: To try.
        dtypes: To try.
    """
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

    Args:
        steps: Of training.
        history: Steps that delayed scaling remembers.
        spike: Step in which the gradient is `factor` times larger, as in a loss spike; None for no spike.
        factor: Of the spike.

    Returns:
        For every step: "amax", the scale's range "covered", relative errors "delayed" and "current", and "saturated",
        the share of values that the delayed scale cuts off.
    """
    from lablib.launch.precision_runs import BATCH, SEQ, small_model

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
