"""Worked exercises of rung 08, mixed precision."""

from __future__ import annotations

import math

import torch


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
