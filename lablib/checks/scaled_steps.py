"""The checks of rung 08 that need tensors: a step with loss scaling, and a trip through FP8 block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lablib.checks.report import Wrong, check
from lablib.toys.fp8_scaling import E4M3, SCALINGS, quantize

# --- a loss scaler -----------------------------------------------------------------------------------------

_INTERVAL, _LR = 3, 0.5
#: What each step's gradients are: fine, tiny, with an infinity or with a NaN, in the first or in the last tensor.
_STEPS = (
    "tiny",
    "fine",
    "inf last",
    "fine",
    "fine",
    "fine",
    "fine",
    "nan first",
    "fine",
    "fine",
    "inf first",
    "fine",
)


def _gradients(kind: str, scale: float, generator: torch.Generator) -> list[Tensor]:
    """Return what fp16 backward leaves of the scaled loss: two tensors, the second with more dims."""
    made = [torch.randn(shape, generator=generator) for shape in ((5,), (3, 4))]
    if kind == "tiny":  # of a size that fp16 nearly loses once the scale is divided out again
        made = [g * 2e-7 for g in made]
    scaled = [(g * scale).half() for g in made]
    if kind.startswith(("inf", "nan")):
        scaled[0 if kind.endswith("first") else -1].flatten()[-1] = float(kind[:3])
    return scaled


@check
def scaler_step(answer: Callable[..., tuple[list[Tensor], float, int]], seed: int = 80) -> str:
    """Judge `scaler_step(weights, gradients, scale, good_steps, lr, interval)` on a sequence of steps."""
    generator = torch.Generator().manual_seed(seed)
    # Small weights at first, so that an error in the smallest updates shows.
    weights = [2e-7 * torch.randn(shape, generator=generator) for shape in ((5,), (3, 4))]
    scale, good = 2.0**12, 0
    for kind in _STEPS:
        scaled = _gradients(kind, scale, generator)
        given = [w.clone() for w in weights], [g.clone() for g in scaled]
        got = answer(*given, scale, good, _LR, _INTERVAL)
        if not isinstance(got, list | tuple) or len(got) != 3 or len(got[0]) != len(weights):
            raise Wrong(
                "Return three things: the list of new weights, the new scale and the new count of good steps."
            )
        weights, scale, good = _judge_step(got, weights, scaled, scale, good)
    return f"{len(_STEPS)} steps: {sum(k[:3] in ('inf', 'nan') for k in _STEPS)} skipped, and the scale went both ways."


def _judge_step(
    got: Any, weights: list[Tensor], scaled: list[Tensor], scale: float, good: int
) -> tuple[list[Tensor], float, int]:
    new, new_scale, new_good = [torch.as_tensor(w) for w in got[0]], float(got[1]), int(got[2])
    if not all(g.isfinite().all() for g in scaled):
        if not all(w.isfinite().all() for w in new):
            raise Wrong("An infinite or NaN gradient reached the weights; such a step is skipped.")
        if not all(torch.equal(a, b) for a, b in zip(new, weights, strict=True)):
            raise Wrong(
                "One infinite or NaN gradient, in any tensor, spoils the whole step: no weight of any tensor moves."
            )
        if new_scale != scale / 2:
            raise Wrong(f"After an overflow the scale is halved; {scale:g} became {new_scale:g}.")
        if new_good != 0:
            raise Wrong("After an overflow the count of good steps in a row starts again at zero.")
        return weights, scale / 2, 0
    wanted = [w - _LR * g.float() / scale for w, g in zip(weights, scaled, strict=True)]
    if not _equal(new, wanted):
        _explain_step(new, weights, scaled, scale)
    grows = good + 1 >= _INTERVAL
    if grows and new_scale == scale:
        raise Wrong(f"After {_INTERVAL} good steps in a row the scale is doubled; it stayed {scale:g}.")
    if not grows and new_scale != scale:
        raise Wrong(f"The scale changed after {good + 1} good steps in a row; it grows after {_INTERVAL}.")
    if grows and new_scale != 2 * scale:
        raise Wrong(f"The scale is doubled when it grows; {scale:g} became {new_scale:g}.")
    if new_good != (0 if grows else good + 1):
        raise Wrong(
            "After the scale has grown the count starts again at zero, or it grows in every step from then on."
            if grows
            else f"A good step counts: after {good} comes {good + 1}, not {new_good}."
        )
    return wanted, new_scale, new_good


def _equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    # A power of two divides exactly, so only the update itself rounds: two roundings of fp32, 2^-23 in all.
    return all(
        a.shape == b.shape and bool(((a.double() - b.double()).abs() <= 1e-6 * b.abs().max()).all())
        for a, b in zip(found, wanted, strict=True)
    )


def _explain_step(new: list[Tensor], weights: list[Tensor], scaled: list[Tensor], scale: float) -> None:
    def stepped(unscaled: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return [w - _LR * unscaled(g) for w, g in zip(weights, scaled, strict=True)]

    if _equal(new, weights):
        raise Wrong("All gradients are finite, and the weights did not move.")
    if _equal(new, stepped(lambda g: g.float())):
        raise Wrong("The gradients are still multiplied by the scale: divide by it before the update.")
    if _equal(new, stepped(lambda g: g.float() / (2 * scale))):
        raise Wrong(
            "These gradients carry the scale that came in; a doubled scale is for the next step's loss, not for them."
        )
    in_fp16 = (lambda g: (g / scale).float(), lambda g: (g * (_LR / scale)).float() / _LR)
    if any(_equal(new, stepped(unscaled)) for unscaled in in_fp16):
        raise Wrong(
            "The division happened in fp16, so what the scale had saved becomes zero again: go to fp32 first."
        )
    if _equal(new, stepped(lambda g: -g.float() / scale)):
        raise Wrong("The weights moved up the gradient; SGD subtracts.")
    raise Wrong(
        "A good step is one of SGD: weights minus lr times the gradient, divided by the scale, in fp32."
    )


# --- blocks in FP8 -----------------------------------------------------------------------------------------


def _matrix(generator: torch.Generator) -> Tensor:
    """Return a matrix whose rows and blocks differ in size, with an outlier and a row that is zero."""
    x_MK = torch.randn(256, 256, generator=generator)
    x_MK *= torch.logspace(-3, 1, 256).unsqueeze(1)
    x_MK[:, 128:] *= 30
    x_MK[17, 40] = -2e4
    x_MK[100] = 0
    return x_MK


@check
def fp8_round_trip(answer: Callable[[Tensor, int, int], Tensor], seed: int = 888) -> str:
    """Judge `fp8_round_trip(x, rows, columns)` for one scale a tensor, a row, 1x128 and 128x128."""
    x_MK = _matrix(torch.Generator().manual_seed(seed))
    for scaling in ("tensor", "row", "block1x128", "block128x128"):
        rows, columns = (size or 256 for size in SCALINGS[scaling])
        got = answer(x_MK.clone(), rows, columns)
        if not isinstance(got, Tensor) or got.shape != x_MK.shape or got.dtype != torch.float32:
            raise Wrong("Return a matrix of the same shape in float32: the FP8 values times their scales.")
        if not _agrees(got, quantize(x_MK, scaling).dequantize()):
            _explain_trip(got, x_MK, scaling, rows, columns)
    return "Four block shapes, an outlier and a row of zeros."


def _agrees(got: Tensor, wanted: Tensor) -> bool:
    # Dividing by the scale and multiplying by its inverse round differently, and put a number that lies almost
    # halfway on the other side: a few in ten thousand, and never further than to the neighbour.
    off = (got - wanted).abs() > 1e-5 * wanted.abs() + 1e-30
    return bool(got.isfinite().all()) and off.double().mean().item() < 2e-3


def _explain_trip(got: Tensor, x_MK: Tensor, scaling: str, rows: int, columns: int) -> None:
    block = f"blocks of {rows} x {columns}"
    if not got.isfinite().all():
        raise Wrong(
            f"There are NaN or infinite values: a block of zeros has no largest value to divide by ({block})."
        )
    if torch.equal(got, x_MK):
        raise Wrong("Nothing was rounded: cast to torch.float8_e4m3fn in between.")
    for other in SCALINGS:
        if other != scaling and _agrees(got, quantize(x_MK, other).dequantize()):
            raise Wrong(f"This is what {other!r} scaling gives; {block} were asked for.")
    if _agrees(got, quantize(x_MK.T, scaling).dequantize().T):
        raise Wrong(f"Rows and columns are swapped: a block has {rows} rows and {columns} columns.")
    runs = quantize(x_MK.reshape(-1, rows * columns), "row").dequantize().reshape(x_MK.shape)
    if _agrees(got, runs):
        raise Wrong(
            f"A block here is {rows * columns} values that follow one another in memory; it should be a rectangle, {rows} rows by {columns} columns."
        )
    if _agrees(got, quantize(x_MK, scaling, torch.float8_e5m2).dequantize()):
        raise Wrong(
            "These are the values of E5M2; E4M3 has one more mantissa bit, and 448 as its largest number."
        )
    if _agrees(got, quantize(x_MK, "tensor", E4M3, scale=torch.tensor(1.0)).dequantize()):
        raise Wrong(
            "Without a scale everything above 448 is cut off and everything below 2^-10 becomes zero."
        )
    if got.abs().max() <= 448 < x_MK.abs().max():
        raise Wrong("The FP8 values were not multiplied by their scales again.")
    if not (got[x_MK < 0] < 0).any():
        raise Wrong(
            "The negative values are gone: the largest magnitude decides the scale, not the largest value."
        )
    raise Wrong(
        f"The scale of a block is its largest magnitude over 448, so that this one lands on the largest FP8 number ({block})."
    )
