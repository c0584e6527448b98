"""The checks of rung 08: rounding to a format, a loss scaler, what breaks in 16 bits, blocks in 8 bits, and a recipe."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from lablib.calc.precision import FORMATS, MX_ROUNDINGS, Format, quantized_bytes
from lablib.checks.judging import Wrong, as_float, by_name, check, chosen, close, numbers, refuse, whole
from lablib.launch.precision import product_error, through
from lablib.toys.precision import E4M3, SCALINGS, quantize

__all__ = ["block_recipe", "fp8_round_trip", "mx_blocks", "round_to", "scaler_step", "what_breaks"]


# --- rounding to a format -----------------------------------------------------------------------------------

_SHAPES = {"fp16": (5, 10), "bf16": (8, 7), "e5m2": (5, 2), "4 and 3 bits": (4, 3)}

_BY_HAND = [
    ("bf16", 1.018),  # 130.3 gaps: only rounding it up is wrong here, so that no other mistake is taken for it
    ("bf16", 1.026),  # 131.3 gaps: rounding it down and rounding it to two gaps are told apart
    *(("bf16", x) for x in (1.006, -1.018, 257.0, 259.0, -259.0)),
    *(("fp16", x) for x in (30000.0, 65519.0, 65520.0, -1e6, 2.0**-24, 1e-7, 2.0**-25, 0.0)),
    ("e5m2", 0.3),
]


def _format(name: str) -> Format:
    exponent, mantissa = _SHAPES[name]
    bias = 2 ** (exponent - 1) - 1
    return Format(name=name, exponent_bits=exponent, mantissa_bits=mantissa, bias=bias)


@check(
    idea="A format is a ruler whose marks are one gap apart, and the gap depends on where the number lies.",
    section="Rounding: ulp, overflow, underflow and absorption",
    line="The gap is 2 to the power below x minus the mantissa bits, and no smaller than that of the least normal number; "
    "the result is a whole number of gaps.",
)
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
            got = answer(x, fmt.exponent_bits, fmt.mantissa_bits)
        except OverflowError:
            raise Wrong(f"{x:g} needs more room than your arithmetic has: look at the exponent first.") from None
        except (ValueError, ZeroDivisionError):
            if x:
                raise
            raise Wrong("Zero has no power of two below it: it rounds to itself.") from None
        if (got := as_float(got, "The rounded number")) != fmt.round(x):
            _explain_rounding(got, x, fmt)
    return f"{len(cases)} numbers, ties and subnormals included."


def _explain_rounding(got: float, x: float, fmt: Format) -> NoReturn:
    right, size, gap = fmt.round(x), abs(x), fmt.ulp(x)
    beyond, infinite = math.isinf(right), math.isinf(got)
    subnormal = size < fmt.min_normal and (got == 0 or got % fmt.min_subnormal)
    steps = size / gap
    down, up = (math.copysign((math.floor(steps) + step) * gap, x) for step in (0, 1))
    refuse(
        f"{x:.6g} in {fmt.name}: {fmt.exponent_bits} exponent bits, {fmt.mantissa_bits} mantissa bits",
        ("Infinity has the sign of the number", beyond and infinite),
        (f"Beyond the largest finite number, {fmt.max:g}, rounding gives infinity", beyond),
        (f"{fmt.name} reaches {fmt.max:g}: bias 2^(E-1) - 1, the top field unused", infinite and size < fmt.max / 2),
        (f"Only what rounds to more than {fmt.max:g} is infinite, not half a gap above", infinite or math.isnan(got)),
        (f"More than half of the smallest subnormal, {fmt.min_subnormal:.3g}, is rounded to it, not to zero",
         subnormal and got == 0 and size < fmt.min_subnormal),
        (f"Below the smallest normal number, {fmt.min_normal:.3g}, subnormals lie evenly", subnormal and got == 0),
        (f"Below {fmt.min_normal:.3g} the gap no longer shrinks; it stays {fmt.min_subnormal:.3g}", subnormal),
        ("The sign is lost: work with the magnitude and give the sign back at the end", got == -right),
        (f"The nearest value is {right:.6g}: whole gaps of {gap:.3g}, rounded to nearest, not {'up' if x > 0 else 'down'}",
         steps % 1 < 0.5 and math.floor(steps) % 2 == 0 and got == up),
        ("Halfway between two neighbours the even mantissa wins", steps % 1 == 0.5 and abs(got - x) == gap / 2),
        (f"Your gap is twice the right one, {gap:.3g}: the power of two below x = m * 2^e is 2^(e-1), since m is less than 1",
         got != down and abs(got) == round(steps / 2) * 2 * gap),
        ("The rest is cut off; the nearest neighbour is the one above", got == down),
        (f"You keep more bits than the format has: the gap here is {gap:.3g}", abs(got - x) < abs(right - x)),
        ("This number is in the normal range, and does not become zero", got == 0),
        (f"The nearest value is {right:.6g}, not {got:.6g}; the gap here is {gap:.3g}", True),
    )  # fmt: skip


# --- a loss scaler ------------------------------------------------------------------------------------------

_INTERVAL, _LR = 3, 0.5

#: Three weights: were they two, an average over them would look like a scale that was doubled too early.
_SHAPES_OF_WEIGHTS = ((5,), (2,), (3, 4))

#: What each step's gradients are: fine, tiny, large, with an infinity or with a NaN, in the first or in the last tensor.
_STEPS = ("tiny", "fine", "inf last", "fine", "fine", "fine", "fine", "nan first", "fine", "fine", "inf first", "large")


def _gradients(kind: str, scale: float, generator: torch.Generator) -> list[Tensor]:
    """Return what fp16 backward leaves of the scaled loss, a tensor for each weight."""
    made = [torch.randn(shape, generator=generator) for shape in _SHAPES_OF_WEIGHTS]
    if kind == "tiny":  # of a size that fp16 nearly loses once the scale is divided out again
        made = [g * 2e-7 for g in made]
    if kind == "large":  # all are finite, and their sum is not in fp16
        made = [(1 + g.abs()).clamp(max=3) * 2e4 / scale for g in made]
    scaled = [(g * scale).half() for g in made]
    if kind.startswith(("inf", "nan")):
        scaled[0 if kind.endswith("first") else -1].flatten()[-1] = float(kind[:3])
    return scaled


@check(
    idea="The gradients that come in are those of scale times the loss, and one bad value spoils the whole step.",
    section="GradScaler: fp16 gradients that overflow",
    line="Take the gradients to fp32, divide them by the scale that came in, and step only if every value of every tensor "
    "is finite.",
)
def scaler_step(answer: Callable[..., tuple[list[Tensor], float, int]], seed: int = 80) -> str:
    """Judge `scaler_step(weights, gradients, scale, good_steps, lr, interval)` on a sequence of steps."""
    generator = torch.Generator().manual_seed(seed)
    # Small weights at first, so that an error in the smallest updates shows.
    weights = [2e-7 * torch.randn(shape, generator=generator) for shape in _SHAPES_OF_WEIGHTS]
    scale, good = 2.0**12, 0
    for kind in _STEPS:
        scaled = _gradients(kind, scale, generator)
        given = [w.clone() for w in weights], [g.clone() for g in scaled]
        got = answer(*given, scale, good, _LR, _INTERVAL)
        if not isinstance(got, list | tuple) or len(got) != 3 or not isinstance(got[0], Iterable):
            raise Wrong("Return three things: the list of new weights, the new scale and the new count of good steps.")
        new = list(got[0].values() if isinstance(got[0], Mapping) else got[0])
        if len(new) != len(weights) or any(w is None for w in new):
            found = sum(w is not None for w in new)
            raise Wrong(
                f"{len(weights)} weights went in, and {found} came out: return them all, also in a skipped step."
            )
        weights, scale, good = _judge_step((new, *got[1:]), weights, scaled, scale, good)
    return f"{len(_STEPS)} steps: {sum(k[:3] in ('inf', 'nan') for k in _STEPS)} skipped, and the scale went both ways."


def _judge_step(
    got: Any, weights: list[Tensor], scaled: list[Tensor], scale: float, good: int
) -> tuple[list[Tensor], float, int]:
    new = [torch.as_tensor(w) for w in got[0]]
    refuse("", ("The weights came back in 16 bits, where small updates are lost: the step is made and kept in fp32",
                any(w.dtype in (torch.float16, torch.bfloat16) for w in new)))  # fmt: skip
    new_scale, new_good = as_float(got[1], "The scale"), whole(got[2], "The count of good steps")
    became = f"{scale:g} became {new_scale:g}"
    if not all(g.isfinite().all() for g in scaled):
        refuse(
            "",
            ("A step with an infinite or NaN gradient is skipped", not all(w.isfinite().all() for w in new)),
            ("One infinite or NaN gradient, in any tensor, spoils the whole step: no weight of any tensor moves",
             not all(torch.equal(a, b) for a, b in zip(new, weights, strict=True))),
            (f"After an overflow the scale is halved; {became}", new_scale != scale / 2),
            ("After an overflow the count of good steps in a row starts again at zero", new_good != 0),
        )  # fmt: skip
        return weights, scale / 2, 0
    wanted = [w - _LR * g.float() / scale for w, g in zip(weights, scaled, strict=True)]
    grows = good + 1 >= _INTERVAL
    if not _equal(new, wanted):
        _explain_step(new, weights, scaled, scale, grows=grows)
    refuse(
        "",
        (f"After {_INTERVAL} good steps in a row the scale is doubled; it stayed {scale:g}", grows and new_scale == scale),
        (f"The scale changed after {good + 1} good steps; it grows after {_INTERVAL}",
         not grows and new_scale != scale),
        (f"The scale is doubled when it grows; {became}", grows and new_scale != 2 * scale),
        ("When the scale has grown the count starts at zero, or it grows in every step", grows and new_good != 0),
        (f"A good step counts: after {good} comes {good + 1}, not {new_good}", not grows and new_good != good + 1),
    )  # fmt: skip
    return wanted, new_scale, new_good


def _equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    # A power of two divides exactly, so only the update itself rounds: two roundings of fp32, 2^-23 in all.
    return all(
        a.shape == b.shape and bool(((a.double() - b.double()).abs() <= 1e-6 * b.abs().max()).all())
        for a, b in zip(found, wanted, strict=True)
    )


def _explain_step(
    new: list[Tensor], weights: list[Tensor], scaled: list[Tensor], scale: float, *, grows: bool
) -> NoReturn:
    def gives(unscaled: Callable[[Tensor], Tensor]) -> bool:
        return _equal(new, [w - _LR * unscaled(g) for w, g in zip(weights, scaled, strict=True)])

    in_fp16 = (
        lambda g: (g / scale).float(),
        lambda g: (g * (_LR / scale)).float() / _LR,
        lambda g: (_LR * (g / scale)).float() / _LR,
        lambda g: (_LR * g / scale).float() / _LR,
    )
    beyond = any(not g.sum().isfinite() for g in scaled)
    sums = ": a sum of them may be infinite in fp16, so look at each value" if beyond else ""
    first = (weights[0] - _LR * scaled[0].float() / scale)[0].item()
    refuse(
        "",
        (f"All gradients are finite, and the weights did not move{sums}", _equal(new, weights)),
        ("The gradients are still multiplied by the scale: divide by it before the update", gives(lambda g: g.float())),
        ("These gradients carry the scale that came in; a doubled scale is for the next step's loss, not for them",
         grows and gives(lambda g: g.float() / (2 * scale))),
        ("Divided in fp16, what the scale had saved becomes zero again: go to fp32 first", any(map(gives, in_fp16))),
        ("The gradients carry the scale already: divide by it, and do not multiply",
         gives(lambda g: g.float() * scale)),
        ("The learning rate is missing, which multiplies the gradient", gives(lambda g: g.float() / scale / _LR)),
        ("The gradients were divided by the number of tensors too: each weight takes its own gradient",
         gives(lambda g: g.float() / scale / len(weights))),
        ("The gradients were divided by the scale twice", gives(lambda g: g.float() / scale**2)),
        ("The gradients are clipped here, which the exercise does not ask for",
         gives(lambda g: (g.float() / scale).clamp(-1, 1) if g.abs().max() > scale else g.float() / scale)),
        ("The weights moved up the gradient; SGD subtracts", gives(lambda g: -g.float() / scale)),
        ("A good step is one of SGD: weights minus lr times the gradient, divided by the scale, in fp32. The first weight "
         f"should become {first:.6g}, and is {new[0].flatten()[0].item():.6g}", True),
    )  # fmt: skip


# --- what breaks --------------------------------------------------------------------------------------------

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
        ("bf16", 300.0, (1e-10, 1e-3), 1.0, 1.5, -3e-2, False),  # four gaps, downwards
    ]
    while len(made) < count:
        name = dice.choice(("fp16", "bf16"))
        small = dice.choice(_GRADIENTS) * dice.uniform(0.96, 1.04)
        large = small * 10.0 ** dice.uniform(1, 7)
        held = dice.choice(("fp16", "bf16"))
        # Exact in both formats, and with neighbours on both sides that are as far away as the gap says.
        weight = dice.choice((1, -1)) * dice.randint(132, 250) / 128 * 2.0 ** dice.randint(-6, 2)
        update = dice.choice((1, -1)) * dice.choice((0.3, 0.7, 3.0)) * FORMATS[held].ulp(weight)
        scale = dice.choice((1.0, 1.0, 2.0**10, 2.0**16, 2.0**24))
        activation = dice.choice(_ACTIVATIONS) * dice.uniform(0.96, 1.04)
        case = (name, activation, (small, large), scale, weight, update, dice.random() < 0.4)
        if not _near_an_edge(case):
            made.append(case)
    return made


@check(
    idea="Range above, range below and precision are three questions, and each has its own number to compare with.",
    section="bf16 against fp16: range or precision",
    line="Round the activation, both scaled gradients and the moved weight to the format, and look for infinity, zero and "
    "the old weight.",
)
def what_breaks(answer: Callable[..., set[str]], seed: int = 88) -> str:
    """Judge `what_breaks(name, activation, gradients, scale, weight, update, master)` on random training steps."""
    cases = _situations(random.Random(seed), 250)
    for case in cases:
        got, truth = _named(answer(*case)), _truth(case)
        for failure in sorted(got ^ truth):
            _explain_failure(failure, failure in truth, case)
    return f"{len(cases)} steps: fp16 breaks by its range, bf16 by its precision."


def _named(got: Any) -> set[str]:
    otherwise = 'Return a set with some of "overflow", "underflow" and "stall", empty if nothing breaks.'
    return chosen(None if isinstance(got, str) else got, _FAILURES, otherwise)


def _explain_failure(failure: str, breaks: bool, case: _Case) -> NoReturn:
    name, activation, (small, large), scale, weight, update, master = case
    fmt = FORMATS[name]
    gap, least = fmt.ulp(weight), f"{fmt.min_subnormal:.3g}"
    signs = {
        ("overflow", True): [
            (f"An activation of {activation:.3g} is beyond the largest number of {name}, {fmt.max:.4g}",
             math.isinf(fmt.round(activation))),
            (f"The loss scale multiplies the large gradients too: {scale:g} times {large:.3g} is beyond the largest number of "
             f"{name}, {fmt.max:.4g}", True),
        ],
        ("overflow", False): [
            (f"The loss scale is for gradients and for nothing else; the activation stays {activation:.3g}, and {name} holds "
             "it", math.isinf(fmt.round(scale * activation))),
            (f"{name} reaches {fmt.max:.4g}: an activation of {activation:.3g} and scaled gradients up to {scale * large:.3g} "
             "are within", True),
        ],
        ("underflow", True): [
            (f"{scale:g} times {small:.3g} is less than half of {name}'s smallest subnormal, {least}, and becomes zero",
             True),
        ],
        ("underflow", False): [
            (f"{scale:g} times {small:.3g} does not become zero in {name}: subnormals reach down to {least}, half of that "
             "still rounds up, and loss scaling counts", True),
        ],
        ("stall", True): [
            (f"A {name} weight of {weight:g} has its next neighbour {gap:.3g} away, and an update of {update:.3g} is less "
             "than half of that: nothing moves", True),
        ],
        ("stall", False): [
            ("With a master copy the update is added in fp32, and small updates are not lost", master),
            (f"An update of {update:.3g} takes the {name} weight {weight:g} down by more than a gap, {gap:.3g}: its size "
             "counts, not its sign", update < -2 * gap),
            (f"An update of {update:.3g} is over half of the gap at {weight:g} in {name}, {gap:.3g}: it moves", True),
        ],
    }  # fmt: skip
    refuse("", *signs[failure, breaks])


# --- blocks in FP8 ------------------------------------------------------------------------------------------


def _matrix(generator: torch.Generator) -> Tensor:
    """Return a matrix whose rows and blocks differ in size, with an outlier and a row that is zero."""
    x_MK = torch.randn(256, 256, generator=generator)
    x_MK *= torch.logspace(-3, 1, 256).unsqueeze(1)
    x_MK[:, 128:] *= 30
    x_MK[17, 40] = -2e4
    x_MK[100] = 0
    return x_MK


@check(
    idea="Every block is brought to the same largest magnitude before the cast, and brought back after it.",
    section="FP8 training: eight bits and a scale",
    line="The scale is the largest magnitude of each rectangle over 448, and one where a block is all zeros; divide by it, "
    "cast, and multiply by it.",
)
def fp8_round_trip(answer: Callable[[Tensor, int, int], Tensor], seed: int = 888) -> str:
    """Judge `fp8_round_trip(x, rows, columns)` for one scale a tensor, a row, 1x128 and 128x128."""
    x_MK = _matrix(torch.Generator().manual_seed(seed))
    _must_end(answer, x_MK[:4, :4].clone())
    for scaling in ("tensor", "row", "block1x128", "block128x128"):
        rows, columns = (size or 256 for size in SCALINGS[scaling])
        got = _matrix_of(answer(x_MK.clone(), rows, columns), x_MK.shape)
        if not _agrees(got, quantize(x_MK, scaling).dequantize()):
            _explain_trip(got, x_MK, scaling, rows, columns)
    return "Four block shapes, an outlier and a row of zeros."


def _must_end(answer: Callable, small_MK: Tensor) -> None:
    """Raise `Wrong` if a loop never ends, tried where even a slow answer runs few lines; nothing else is judged."""
    try:
        answer(small_MK, 2, 2)
    except Wrong:
        raise
    except Exception:
        return  # an answer may know the four shapes of the exercise alone; what it does there is judged next


def _matrix_of(got: Any, shape: torch.Size) -> Tensor:
    try:
        found = got.detach() if isinstance(got, Tensor) else torch.as_tensor(numbers(got))
    except (TypeError, ValueError):
        raise Wrong(f"Return a matrix, not {type(got).__name__}.") from None
    if found.shape != shape:
        raise Wrong(f"A matrix of {shape[0]} by {shape[1]} went in, and one of shape {tuple(found.shape)} came out.")
    if found.dtype not in (torch.float32, torch.float64):
        raise Wrong(
            "Return the matrix in float32: the FP8 values times their scales, which have more bits than the values."
        )
    return found.float()


def _agrees(got: Tensor, wanted: Tensor) -> bool:
    # Dividing by the scale and multiplying by its inverse round differently, and put a number that lies almost
    # halfway on the other side: a few in ten thousand, and never further than to the neighbour.
    off = (got - wanted).abs() > 1e-5 * wanted.abs() + 1e-30
    return bool(got.isfinite().all()) and off.double().mean().item() < 2e-3


def _by(
    x_MK: Tensor,
    rows: int,
    columns: int,
    scale_of: Callable[[Tensor], Tensor],
    cast: Callable[[Tensor], Tensor] = lambda values: values.clamp(-448, 448).to(E4M3).float(),
) -> Tensor:
    """Return the matrix there and back with another rule for the scale, or another format."""
    blocks = x_MK.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    largest = blocks.abs().amax(dim=(1, 3), keepdim=True)
    scale = torch.where(largest > 0, scale_of(largest), 1.0)
    return (cast(blocks / scale) * scale).reshape(x_MK.shape)


def _explain_trip(got: Tensor, x_MK: Tensor, scaling: str, rows: int, columns: int) -> NoReturn:
    block = f"blocks of {rows} x {columns}"
    there = quantize(x_MK, scaling)
    wanted, values = there.dequantize(), there.values_MK.float()

    def scaled(scale_of: Callable[[Tensor], Tensor], *cast: Callable[[Tensor], Tensor]) -> Callable[[], bool]:
        return lambda: _agrees(got, _by(x_MK, rows, columns, scale_of, *cast))

    def is_(made: Callable[[], Tensor]) -> Callable[[], bool]:
        return lambda: _agrees(got, made())

    others = {
        other: _agrees(got, quantize(x_MK, other).dequantize())
        for other in SCALINGS if other != scaling and got.isfinite().all()
    }  # fmt: skip
    in_memory = quantize(x_MK.reshape(-1, rows * columns), "row").dequantize().reshape(x_MK.shape)
    e5m2 = torch.float8_e5m2
    largest = int(x_MK.abs().argmax())
    cut_off = f"{x_MK.flatten()[largest]:.6g}, was cut off to {got.flatten()[largest]:.6g}"
    row, column = divmod(int((got - wanted).abs().argmax()), x_MK.shape[1])
    refuse(
        "",
        (f"There are NaN or infinite values: a block of zeros divides by zero ({block})", not got.isfinite().all()),
        ("Nothing was rounded: cast to torch.float8_e4m3fn in between", torch.equal(got, x_MK)),
        (lambda: f"This is what {max(others, key=others.get)!r} scaling gives; {block} were asked for", any(others.values())),
        (f"Rows and columns are swapped: a block has {rows} rows and {columns} columns",
         is_(lambda: quantize(x_MK.T, scaling).dequantize().T)),
        (f"A block here is {rows * columns} values that follow one another in memory; it should be a rectangle, {rows} rows "
         f"by {columns} columns", is_(lambda: in_memory)),
        ("These are the values of E5M2; E4M3 has one more mantissa bit, and 448 as its largest number",
         is_(lambda: quantize(x_MK, scaling, e5m2).dequantize())),
        ("These are the values of E5M2; E4M3 has one more mantissa bit, and 448 as its largest number",
         scaled(lambda most: most / 448, lambda values: values.to(e5m2).float())),
        ("Without a scale everything above 448 is cut off and everything below 2^-10 becomes zero",
         is_(lambda: quantize(x_MK, "tensor", E4M3, scale=torch.tensor(1.0)).dequantize())),
        ("The FP8 values were not multiplied by their scales again", is_(lambda: values)),
        ("The FP8 values were divided by their scales once more; on the way back they are multiplied",
         is_(lambda: (values / (wanted / values)).nan_to_num(0.0))),
        ("The scale is upside down: divide by it before the cast, and multiply by it after", scaled(lambda most: 448 / most)),
        ("The negative values are gone: magnitudes decide the scale, not values", not (got[x_MK < 0] < 0).any()),
        (f"The largest of a block lands on 1, not on 448, and small values lose their bits ({block})", scaled(lambda m: m)),
        (f"The scale is rounded to a power of two, as in MXFP8; here it is the largest over 448 ({block})",
         scaled(lambda most: torch.exp2(torch.ceil(torch.log2(most / 448))))),
        (f"The largest of E4M3 is 448, not 240: it has no infinity ({block})", scaled(lambda most: most / 240)),
        ("The matrix came back transposed", got.shape[0] == got.shape[1] and _agrees(got, wanted.T)),
        ("These are whole numbers up to 127, as in INT8; E4M3 has a mantissa and an exponent, and ends at 448",
         scaled(lambda most: most / 127, torch.round)),
        (f"The values are right and stand in other places: put each block back where it was ({block})",
         _agrees(got.flatten().sort().values, wanted.flatten().sort().values)),
        (lambda: f"A zero comes back as {got[x_MK == 0].abs().max():.3g}: a block of zeros stays one ({block})",
         (got[x_MK == 0] != 0).any()),
        (f"The largest value, {cut_off}: the scale of its block is too small, since its largest magnitude belongs on 448 "
         f"({block})", got.flatten()[largest].abs() < 0.9 * x_MK.abs().max()),
        (f"This is no mistake that the check knows. With {block}, {x_MK[row, column]:.6g} in row {row} and column {column} "
         f"should come back as {wanted[row, column]:.6g}, and is {got[row, column]:.6g}: the scale is the largest magnitude of "
         "the block over 448", True),
    )  # fmt: skip


# --- scales of MX blocks --------------------------------------------------------------------------------------

_SCALING = {name: "mx32" if name == "rceil" else f"mx32-{name}" for name in MX_ROUNDINGS}
#: What each of the blocks must show: the roundings that cut its largest value off.
_CUT = {"floor": {"floor"}, "even": {"floor", "even"}, "none": set()}


@check(
    idea="A power of two brings the largest of a block near the top of E4M3, and the top is 1.75 of a power of two, not 2.",
    section="MXFP8: a power of two for 32 values",
    line="Between 448 and 496 times a power of two both floor and even cut, from 496 to 512 floor alone; below 448 none does.",
)
def mx_blocks(answer: Callable[[], Mapping[str, Any]]) -> str:
    """Judge `mx_blocks()`: a block that floor alone cuts, one that even cuts too, one where ceil wastes a power of two."""
    got = by_name(answer(), *_CUT)
    for name, wanted in _CUT.items():
        block = torch.as_tensor(numbers(got[name], f"The block {name!r}"), dtype=torch.float32)
        refuse(
            f"block {name!r}",
            (f"A block of MXFP8 has 32 values, not {tuple(block.shape)}", block.shape != (32,)),
            ("There are infinite values or NaN: nothing was cut off that was there", not block.isfinite().all()),
            ("A block of zeros has no largest value", not block.any()),
        )
        scale = {rounding: quantize(block[None], scaling).scale_RC.item() for rounding, scaling in _SCALING.items()}
        largest = block.abs().max().item()
        cut = {rounding for rounding, each in scale.items() if largest > 448 * each}
        lands = largest / scale["floor"]
        refuse(
            f"block {name!r}, largest value {largest:g}",
            (f"Rounded down the scale is {scale['floor']:g}, and the largest value lands on {lands:g}: E4M3 has 448, so it is "
             "not cut off", "floor" in wanted - cut),
            (f"Rounded to even the scale is {scale['even']:g} as well: {lands:g} is below 496, where even goes up, and above "
             "448", name == "floor" and "even" in cut),
            (f"{lands:g} is so near to 512 that even rounds it up, and nothing is cut; find one that it does cut",
             name == "even" and "even" not in cut),
            (f"Rounded down, {lands:g} is above 448 and is cut off", name == "none" and bool(cut)),
            (f"ceil and rceil have the same scale here, {scale['ceil']:g}: the largest value lands on a power of two, and ceil "
             "wastes nothing", name == "none" and scale["ceil"] == scale["rceil"]),
        )  # fmt: skip
    return "One largest value for each rounding; rceil cuts none, and wastes nothing that it can keep."


# --- a recipe -------------------------------------------------------------------------------------------------

#: Fewest bits first, and the scaling by which `quantized_bytes` counts what is kept.
_FORMATS = {"nvfp4": "nvfp4", "fp8": "tensor", "mxfp8": "mx32"}


def _errors(name: str, layer: tuple[Tensor, Tensor, Tensor]) -> tuple[float, float, float]:
    """Return the errors of x wᵀ, g w and gᵀ x, each factor quantized along the dim of its sum."""
    x, w, g = layer
    return (
        product_error(through(name, x) @ through(name, w).T, x @ w.T),
        product_error(through(name, g, gradient=True) @ through(name, w.T).T, g @ w),
        product_error(through(name, g.T, gradient=True) @ through(name, x.T).T, g.T @ x),
    )


_Layers = dict[str, tuple[Tensor, Tensor, Tensor]]


def _layers(seed: int) -> _Layers:
    """Return layers whose three matmuls suffer from different things."""
    generator = torch.Generator().manual_seed(seed)

    def layer(columns: int = 64, outputs: int = 96) -> tuple[Tensor, Tensor, Tensor]:
        shapes = ((128, columns), (outputs, columns), (128, outputs))
        x, w, g = (torch.randn(shape, generator=generator) for shape in shapes)
        return x, 0.05 * w, 1e-6 * g

    found = {
        name: layer() for name in ("plain", "one large token", "tokens of all sizes", "outputs of all sizes", "inputs")
    }
    mixed = 10.0 ** (-6 * torch.randperm(96, generator=generator) / 95)
    found["one large token"][0][5] *= 3e5  # takes the scale of the tensor: the others vanish in forward
    found["tokens of all sizes"][2].mul_(10.0 ** torch.linspace(0, -5.6, 128)[:, None])  # so do small gradients in g w
    found["outputs of all sizes"][2].mul_(mixed)  # and these in gᵀ x, or next to large ones
    found["inputs"][1].mul_(10.0 ** torch.linspace(0, -4, 64)[None])  # weights that wᵀ has in rows
    return found


def _recipe(units: set[str], layers: _Layers, limit: float, errors: Callable = _errors) -> dict[str, str]:
    """Return the format of fewest bits of each layer whose error is within the limit."""
    return {
        name: next((f for f in _FORMATS if f in units and max(errors(f, layer)) <= limit), "bf16")
        for name, layer in layers.items()
    }


def _kept(layers: _Layers, chosen: Mapping[str, str]) -> float:
    """Return the bytes of all inputs as backward reads them, quantized along tokens."""
    sizes = {name: layer[0].T.shape for name, layer in layers.items()}
    return sum(
        2 * math.prod(size) if chosen[name] == "bf16" else quantized_bytes(*size, _FORMATS[chosen[name]])
        for name, size in sizes.items()
    )


#: What the GPU multiplies, and the error that a layer may have.
_JOBS = (
    ({"fp8"}, 0.08),
    ({"mxfp8", "nvfp4"}, 0.12),
    ({"mxfp8", "nvfp4"}, 0.16),
    ({"fp8", "mxfp8"}, 0.08),
    ({"mxfp8"}, 0.08),
    (set(), 0.2),
)


@check(
    idea="A layer has three matmuls, and each sums over another dim: a format serves the layer if it serves the worst of them.",
    section="MXFP8 and NVFP4: scales inside the format",
    line="For x w-transposed, g w and g-transposed x, quantize both factors with rows along the summed dim, and take the largest "
    "of the three errors.",
)
def block_recipe(answer: Callable[..., Any], seed: int = 8080) -> str:
    """Judge `block_recipe(units, layers, limit)` on six GPUs and limits: the format of each layer, and bytes kept."""
    layers, count = _layers(seed), 0
    for units, limit in _JOBS:
        given = {name: tuple(matrix.clone() for matrix in layer) for name, layer in layers.items()}
        got = by_name(answer(set(units), given, limit), "formats", "kept")
        formats = by_name(got["formats"], *layers)
        right = _recipe(units, layers, limit)
        where = f"matrix units for {', '.join(sorted(units)) or 'none of the three'}, limit {limit:g}"
        for name, layer in layers.items():
            if formats[name] != right[name]:
                _explain_recipe(formats, name, layer, units, limit, where, layers)
            count += 1
        kept, truth = as_float(got["kept"], "`kept`"), _kept(layers, right)
        bf16 = sum(2 * layer[0].numel() for layer in layers.values())
        refuse(
            where,
            ("`kept` is in bf16: backward reads the inputs in the format of their layer",
             truth != bf16 and close(kept, bf16)),
            ("Scales are kept too: 8 bits for 32 values of MXFP8, 8 bits for 16 of NVFP4, and a scale of 32 bits for a tensor "
             "of NVFP4 or FP8",
             set(right.values()) != {"bf16"}
             and close(kept, sum(x.numel() * {"bf16": 2, "nvfp4": 0.5}.get(right[n], 1) for n, (x, *_) in layers.items()))),
            (f"All inputs together take {truth:,.0f} bytes as they are kept, not {kept:,.0f}", not close(kept, truth)),
        )  # fmt: skip
    return f"{count} layers on {len(_JOBS)} GPUs: what the hardware has, and the worst of three matmuls."


def _explain_recipe(
    formats: Mapping[str, Any], name: str, layer: tuple[Tensor, Tensor, Tensor], units: set[str], limit: float,
    where: str, layers: _Layers,
) -> NoReturn:  # fmt: skip
    got, right = formats[name], _recipe(units, layers, limit)[name]
    products = ("x wᵀ", "g w", "gᵀ x")

    def with_(errors: Callable) -> bool:
        return all(formats[n] == f for n, f in _recipe(units, layers, limit, errors).items())

    def along_rows(form: str, each: tuple[Tensor, Tensor, Tensor]) -> tuple[float, ...]:
        x, w, g = each
        a, b, c = through(form, x), through(form, w), through(form, g, gradient=True)
        return product_error(a @ b.T, x @ w.T), product_error(c @ b, g @ w), product_error(c.T @ a, g.T @ x)

    def of_factors(form: str, each: tuple[Tensor, Tensor, Tensor]) -> tuple[float, ...]:
        return tuple(product_error(through(form, m, gradient=k == 2), m) for k, m in enumerate(each))

    known = got in ("bf16", *_FORMATS)
    worst = {f: max(zip(_errors(f, layer), products, strict=True)) for f in {got, right} if f in _FORMATS}
    shown = {f: f"{error:.3f} in {product}" for f, (error, product) in worst.items()}
    refuse(
        f"layer {name!r}; {where}",
        (f"{got!r} is none of nvfp4, mxfp8, fp8 and bf16", not known),
        (f"This GPU has no matrix units for {got}: it would store the format and gain nothing", got != "bf16" and got not in units),
        ("That looks at forward alone: the gradients g w and gᵀ x are matmuls of the layer too",
         with_(lambda f, each: _errors(f, each)[:1])),
        ("Forward and g w are not all: the weight's gradient sums over tokens, and quantizes x along them",
         with_(lambda f, each: _errors(f, each)[:2])),
        ("Each matrix is quantized once, along its rows: a matmul that sums over the other dim needs its factors quantized along "
         "that one", with_(along_rows)),
        ("Those are errors of single matrices; a product of two has another", with_(of_factors)),
        ("g w is left out, or the mean of three errors hides the worst: one matmul that fails spoils the step",
         with_(lambda f, each: _errors(f, each)[::2]) or with_(lambda f, each: (sum(_errors(f, each)) / 3,))),
        (f"{got} has an error of {shown.get(got)}, and {limit:g} is allowed; {right} is right", got in worst and worst[got][0] > limit),
        (f"{right} is within the limit, with {shown.get(right)}, and has fewer bits than {got}", True),
    )  # fmt: skip
