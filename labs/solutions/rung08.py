"""Worked exercises of rung 08, mixed precision."""

from __future__ import annotations

import math

import torch
from lablib.launch.precision import product_error, through


def round_to(x, exponent_bits, mantissa_bits):
    """The gap at x, a whole number of gaps, and infinity beyond the largest."""
    bias = 2 ** (exponent_bits - 1) - 1
    # frexp gives x = m * 2^e with m in [0.5, 1), so the power of two below |x| is 2^(e-1).
    exponent = max(
        math.frexp(x)[1] - 1, 1 - bias
    )  # subnormals keep the gap of the smallest normal numbers
    gap = 2.0 ** (exponent - mantissa_bits)
    rounded = round(x / gap) * gap  # Python's round takes the even one of two
    largest = (2 - 2.0**-mantissa_bits) * 2.0**bias
    return rounded if abs(rounded) <= largest else math.copysign(math.inf, x)


def scaler_step(weights, gradients, scale, good_steps, lr, interval):
    """To fp32, divided by the scale, and only if all of it is finite."""
    unscaled = [gradient.float() / scale for gradient in gradients]
    if not all(gradient.isfinite().all() for gradient in unscaled):
        return weights, scale / 2, 0
    weights = [
        weight - lr * gradient
        for weight, gradient in zip(weights, unscaled, strict=True)
    ]
    if good_steps + 1 == interval:
        return weights, 2 * scale, 0
    return weights, scale, good_steps + 1


def what_breaks(name, activation, gradients, scale, weight, update, master):
    """Range above, range below, and precision: each against the bits of the format."""
    exponent_bits, mantissa_bits = {"fp16": (5, 10), "bf16": (8, 7)}[name]
    smallest, largest = gradients
    rounded = {
        key: round_to(value, exponent_bits, mantissa_bits)
        for key, value in {
            "activation": activation,
            "smallest": scale * smallest,
            "largest": scale * largest,
            "moved": weight + update,
        }.items()
    }
    broken = set()
    if math.inf in (rounded["activation"], rounded["largest"]):
        broken.add("overflow")
    if rounded["smallest"] == 0:
        broken.add("underflow")
    if rounded["moved"] == weight and not master:
        broken.add("stall")
    return broken


def fp8_round_trip(x, rows, columns):
    """Cut into blocks, bring each one's largest magnitude to 448, cast, and go back."""
    blocks = x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    largest = blocks.abs().amax(dim=(1, 3), keepdim=True)
    scale = torch.where(largest > 0, largest / 448, 1.0)
    values = (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (values.float() * scale).reshape(x.shape)


def mx_blocks():
    """E4M3 ends at 448, which is 1.75 times 256; scales round down, to even, up."""
    rest = [0.0] * 31
    return {
        "floor": [500.0, *rest],  # above 496, where even takes the next power
        "even": [480.0, *rest],  # between 448 and 496
        "none": [300.0, *rest],  # ceil takes 2, where 1 is enough
    }


def block_recipe(units, layers, limit):
    """The fewest bits whose worst of three matmuls is good enough."""
    bits = {"nvfp4": 4.5, "mxfp8": 8.25, "fp8": 8, "bf16": 16}
    formats, kept = {}, 0
    for name, (x, w, g) in layers.items():
        formats[name] = "bf16"
        for candidate in ("nvfp4", "fp8", "mxfp8"):  # by bits
            # Rows lie along the dim that is summed over, so w and x are turned.
            forward = through(candidate, x) @ through(candidate, w).T
            g_in = through(candidate, g, gradient=True)
            of_input = g_in @ through(candidate, w.T).T
            g_out = through(candidate, g.T, gradient=True)
            of_weight = g_out @ through(candidate, x.T).T
            worst = max(
                product_error(forward, x @ w.T),
                product_error(of_input, g @ w),
                product_error(of_weight, g.T @ x),
            )
            if candidate in units and worst <= limit:
                formats[name] = candidate
                break
        form = formats[name]
        kept += x.numel() * bits[form] / 8 + 4 * (form in ("nvfp4", "fp8"))
    return {"formats": formats, "kept": kept}
