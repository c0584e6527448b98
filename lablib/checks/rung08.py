"""The checks of rung 08: rounding to a format, a loss scaler, what breaks in 16 bits, and blocks in FP8."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from lablib.calc.formats import FORMATS, Format
from lablib.checks.report import Wrong, check
from lablib.checks.scaled_steps import fp8_round_trip, scaler_step

#: What the lab and the tests use from here; the checks that need tensors have their own module.
__all__ = ["fp8_round_trip", "round_to", "scaler_step", "what_breaks"]

# --- rounding to a format ----------------------------------------------------------------------------------

_SHAPES = {"fp16": (5, 10), "bf16": (8, 7), "e5m2": (5, 2), "4 and 3 bits": (4, 3)}
_BY_HAND = [
    ("bf16", 1.026),  # 131.3 gaps: rounding it down and rounding it to two gaps are told apart
    ("bf16", 1.006),
    ("bf16", 257.0),
    ("bf16", 259.0),
    ("bf16", -259.0),
    ("fp16", 65519.0),
    ("fp16", 65520.0),
    ("fp16", -1e6),
    ("fp16", 2.0**-24),
    ("fp16", 1e-7),
    ("fp16", 2.0**-25),
    ("fp16", 0.0),
    ("e5m2", 0.3),
]


def _format(name: str) -> Format:
    exponent, mantissa = _SHAPES[name]
    bias = 2 ** (exponent - 1) - 1
    return Format(name=name, exponent_bits=exponent, mantissa_bits=mantissa, bias=bias)


@check
def round_to(answer: Callable[[float, int, int], float], seed: int = 8) -> str:
    """Judge `round_to(x, exponent_bits, mantissa_bits)` by hand first, then on random numbers of four formats."""
    dice = random.Random(seed)
    cases = list(_BY_HAND)
    for name in _SHAPES:
        fmt = _format(name)
        low, high = math.log2(fmt.min_subnormal) - 2, math.log2(fmt.max) + 1
        cases += [(name, dice.choice((-1, 1)) * 2.0 ** dice.uniform(low, high)) for _ in range(60)]
        # Ties between neighbours, where "even" decides.
        whole = 2**fmt.mantissa_bits
        cases += [(name, (whole + k + 0.5) * fmt.epsilon) for k in range(min(whole - 1, 6))]
    for name, x in cases:
        fmt = _format(name)
        try:
            got = float(answer(x, fmt.exponent_bits, fmt.mantissa_bits))
        except TypeError as error:
            raise Wrong(
                f"Return a number, the rounded one; here something else came back or went in ({error})."
            ) from None
        except OverflowError:
            raise Wrong(
                f"{x:g} needs more room than your arithmetic has: look at the exponent first."
            ) from None
        except ValueError:
            if x:
                raise
            raise Wrong("Zero has no power of two below it: it rounds to itself.") from None
        if got != fmt.round(x):
            _explain_rounding(got, x, fmt)
    return f"{len(cases)} numbers, ties and subnormals included."


def _explain_rounding(got: float, x: float, fmt: Format) -> None:
    right, size = fmt.round(x), abs(x)
    where = f"{x:.6g} in {fmt.name} ({fmt.exponent_bits} exponent bits, {fmt.mantissa_bits} mantissa bits)"
    if math.isinf(right) and math.isinf(got):
        raise Wrong(f"Infinity has the sign of the number: {where}.")
    if math.isinf(right):
        raise Wrong(f"Beyond the largest finite number, {fmt.max:g}, rounding gives infinity: {where}.")
    if math.isinf(got) or math.isnan(got):
        raise Wrong(
            f"Only what rounds to more than {fmt.max:g} is infinite; half a gap above it still rounds back: {where}."
        )
    if size < fmt.min_normal:
        if got == 0:
            raise Wrong(
                f"Below the smallest normal number, {fmt.min_normal:.3g}, there are subnormals, evenly spaced: {where}."
            )
        raise Wrong(
            f"Below {fmt.min_normal:.3g} the gap no longer shrinks; it stays {fmt.min_subnormal:.3g}: {where}."
        )
    gap = fmt.ulp(x)
    down = math.copysign(math.floor(size / gap) * gap, x)
    if size / gap % 1 == 0.5 and abs(got - x) == gap / 2:
        raise Wrong(f"This number is halfway between two neighbours, and the even mantissa wins: {where}.")
    if got != down and abs(got) == round(size / (2 * gap)) * 2 * gap:
        raise Wrong(
            f"Your gap is twice the right one, {gap:.3g}: the power of two below x = m * 2^e is 2^(e-1), since m is less than 1 ({where})."
        )
    if got == down:
        raise Wrong(f"The rest is cut off; the nearest neighbour is the one above: {where}.")
    if abs(got - x) < abs(right - x):
        raise Wrong(f"You keep more bits than the format has: the gap here is {gap:.3g} ({where}).")
    raise Wrong(f"The nearest value is {right:.6g}, not {got:.6g}; the gap here is {gap:.3g} ({where}).")


# --- what breaks -------------------------------------------------------------------------------------------

_FAILURES = {"overflow", "underflow", "stall"}
_ACTIVATIONS = (300.0, 6e4, 7e4, 1e6, 3e38, 4e38)
_GRADIENTS = (1e-2, 1e-4, 1e-6, 4e-8, 2e-8, 1e-10, 6e-41, 3e-41, 1e-45)
_Case = tuple[str, float, tuple[float, float], float, float, float, bool]


def _truth(case: _Case) -> set[str]:
    name, activation, (small, large), scale, weight, update, master = case
    fmt, found = FORMATS[name], set()
    if math.isinf(fmt.round(activation)) or math.isinf(fmt.round(scale * large)):
        found.add("overflow")
    if fmt.round(scale * small) == 0:
        found.add("underflow")
    if not master and not fmt.moves(weight, update):
        found.add("stall")
    return found


def _near_an_edge(case: _Case) -> bool:
    """Whether a difference of five percent would change the answer: such cases teach nothing."""
    name, activation, (small, large), scale, *_ = case
    fmt = FORMATS[name]
    edges = [(activation, fmt.max), (scale * large, fmt.max), (scale * small, fmt.min_subnormal / 2)]
    return any(abs(math.log(value / edge)) < 0.05 for value, edge in edges)


def _situations(dice: random.Random, count: int) -> list[_Case]:
    made: list[_Case] = [
        ("fp16", 300.0, (1e-10, 1e-3), 1.0, 1.0, 1e-2, True),
        ("bf16", 300.0, (1e-10, 1e-3), 1.0, 1.0, 1e-2, True),
        ("bf16", 1e5, (1e-10, 1e-3), 1.0, 1.0, 1e-2, True),
        ("bf16", 300.0, (1e-10, 1e-3), 1.0, 1.0, 1e-3, False),
        ("fp16", 300.0, (1e-10, 1e-3), 2.0**16, 1.0, 1e-3, True),
        ("fp16", 1e5, (1e-6, 1e-3), 1.0, 1.0, 1e-2, True),
    ]
    while len(made) < count:
        name = dice.choice(("fp16", "bf16"))
        small = dice.choice(_GRADIENTS) * dice.uniform(0.96, 1.04)
        large = small * 10.0 ** dice.uniform(1, 7)
        held = dice.choice(("fp16", "bf16"))
        # Exact in both formats, and with a neighbour above it that is as far away as the gap says.
        weight = dice.randint(128, 254) / 128 * 2.0 ** dice.randint(-6, 2)
        update = dice.choice((0.3, 0.7, 3.0)) * FORMATS[held].ulp(weight)
        scale = dice.choice((1.0, 1.0, 2.0**10, 2.0**16, 2.0**24))
        activation = dice.choice(_ACTIVATIONS) * dice.uniform(0.96, 1.04)
        case = (name, activation, (small, large), scale, weight, update, dice.random() < 0.4)
        if not _near_an_edge(case):
            made.append(case)
    return made


@check
def what_breaks(answer: Callable[..., set[str]], seed: int = 88) -> str:
    """Judge `what_breaks(name, activation, gradients, scale, weight, update, master)` on random training steps."""
    cases = _situations(random.Random(seed), 250)
    for case in cases:
        got, truth = answer(*case), _truth(case)
        if not isinstance(got, set | list | tuple | frozenset) or not set(got) <= _FAILURES:
            raise Wrong(
                'Return a set with some of "overflow", "underflow" and "stall", empty if nothing breaks.'
            )
        for failure in sorted(set(got) ^ truth):
            _explain_failure(failure, failure in truth, case)
    return f"{len(cases)} steps: fp16 breaks by its range, bf16 by its precision."


def _explain_failure(failure: str, breaks: bool, case: _Case) -> None:
    name, activation, (small, large), scale, weight, update, master = case
    fmt = FORMATS[name]
    if failure == "overflow" and breaks:
        if math.isinf(fmt.round(activation)):
            raise Wrong(
                f"An activation of {activation:.3g} is beyond the largest number of {name}, {fmt.max:.4g}."
            )
        raise Wrong(
            f"The loss scale multiplies the large gradients too: {scale:g} times {large:.3g} is beyond the largest "
            f"number of {name}, {fmt.max:.4g}."
        )
    if failure == "overflow":
        if math.isinf(fmt.round(scale * activation)):
            raise Wrong(
                f"The loss scale is for gradients and for nothing else; the activation stays {activation:.3g}, and {name} holds it."
            )
        raise Wrong(
            f"{name} reaches {fmt.max:.4g}: an activation of {activation:.3g} and scaled gradients up to "
            f"{scale * large:.3g} are within."
        )
    if failure == "underflow" and breaks:
        raise Wrong(
            f"{scale:g} times {small:.3g} is less than half of the smallest subnormal of {name}, {fmt.min_subnormal:.3g}, "
            "and becomes zero."
        )
    if failure == "underflow":
        raise Wrong(
            f"{scale:g} times {small:.3g} does not become zero in {name}: subnormals reach down to "
            f"{fmt.min_subnormal:.3g}, half of that still rounds up, and loss scaling counts."
        )
    if breaks:
        raise Wrong(
            f"A {name} weight of {weight:g} has its next neighbour {fmt.ulp(weight):.3g} away, and an update of "
            f"{update:.3g} is less than half of that: nothing moves."
        )
    if master:
        raise Wrong("With a master copy the update is added in fp32, and small updates are not lost.")
    raise Wrong(
        f"An update of {update:.3g} is more than half of the gap at {weight:g} in {name}, {fmt.ulp(weight):.3g}: the "
        "weight moves."
    )
