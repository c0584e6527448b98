"""Planted defects of rung 08: each runs, keeps shapes, and is wrong in one idea."""

# ruff: noqa: E731

import bisect
import enum
import math
from fractions import Fraction

import numpy as np
import torch

from lablib.launch.precision import product_error, through
from tests.planted import asked, listed, told


def _rounded(x, exponent_bits, mantissa_bits, how=round, floor=None, largest=None):
    bias = 2 ** (exponent_bits - 1) - 1
    least = 1 - bias if floor is None else floor(bias)
    exponent = max(math.frexp(x)[1] - 1, least)
    gap = 2.0 ** (exponent - mantissa_bits)
    rounded = how(x / gap) * gap
    top = (2 - 2.0**-mantissa_bits) * 2.0**bias
    if abs(rounded) <= top:
        return rounded
    return math.copysign(math.inf if largest is None else largest(top), x)


class round_to:
    cuts_off_the_rest = lambda *case: _rounded(*case, how=math.trunc)
    halves_go_up = lambda *case: _rounded(*case, how=lambda steps: math.floor(steps + 0.5))

    def no_subnormals(x, exponent_bits, mantissa_bits):
        bias = 2 ** (exponent_bits - 1) - 1
        return 0.0 if abs(x) < 2.0 ** (1 - bias) else _rounded(x, exponent_bits, mantissa_bits)

    gap_shrinks_for_ever = lambda *case: _rounded(*case, floor=lambda bias: -1000)
    saturates = lambda *case: _rounded(*case, largest=lambda top: top)

    # Takes the exponent of frexp for that of the power of two below.
    gap_of_the_power_above = asked(_rounded, mantissa_bits=lambda mantissa_bits: mantissa_bits - 1)
    infinity_without_its_sign = told(_rounded, lambda rounded: math.inf if math.isinf(rounded) else rounded)

    # Counts the leading one, which is not stored, as a mantissa bit that is.
    one_bit_too_many = asked(_rounded, mantissa_bits=lambda mantissa_bits: mantissa_bits + 1)

    def infinite_from_the_largest_on(x, exponent_bits, mantissa_bits):
        largest = (2 - 2.0**-mantissa_bits) * 2.0 ** (2 ** (exponent_bits - 1) - 1)
        return math.copysign(math.inf, x) if abs(x) > largest else _rounded(x, exponent_bits, mantissa_bits)

    def zero_below_the_smallest_subnormal(x, exponent_bits, mantissa_bits):
        least = 2.0 ** (2 - 2 ** (exponent_bits - 1) - mantissa_bits)
        return 0.0 if abs(x) < least else _rounded(x, exponent_bits, mantissa_bits)

    def right(x, exponent_bits, mantissa_bits):
        """Second solution: a large number pushes the low bits out, and fp64 itself rounds them to nearest even."""
        bias = 2 ** (exponent_bits - 1) - 1
        power = 1 - bias
        while 2.0 ** (power + 1) <= abs(x):
            power += 1
        push = 1.5 * 2.0 ** (52 + power - mantissa_bits)
        rounded = (x + push) - push
        if abs(rounded) >= 2.0 ** (bias + 1):
            return math.inf if x > 0 else -math.inf
        return rounded

    rounds_up_always = lambda *case: _rounded(*case, how=lambda steps: math.copysign(math.ceil(abs(steps)), steps))
    rounds_negatives_down = asked(_rounded, how=lambda x: math.floor if x < 0 else round)
    loses_the_sign = told(_rounded, lambda rounded: abs(rounded))

    def waits_for_zero_to_grow(x, exponent_bits, mantissa_bits):
        size, power = abs(x), 0
        while size < 1:
            size, power = size * 2, power - 1
        return _rounded(x, exponent_bits, mantissa_bits)

    def right_2(x, exponent_bits, mantissa_bits):
        """Look the number up among all values of the format, the even code first where two are as near."""
        bias, values = 2 ** (exponent_bits - 1) - 1, _VALUES
        if (exponent_bits, mantissa_bits) not in values:
            codes = range((2**exponent_bits - 1) * 2**mantissa_bits)
            fields = (divmod(code, 2**mantissa_bits) for code in codes)
            values[exponent_bits, mantissa_bits] = [
                (2.0**mantissa_bits * (e > 0) + f) * 2.0 ** (max(e, 1) - bias - mantissa_bits) for e, f in fields
            ]
        found = values[exponent_bits, mantissa_bits]
        size = abs(x)
        if size >= found[-1] + (found[-1] - found[-2]) / 2:
            return math.copysign(math.inf, x)
        place = bisect.bisect_left(found, size)
        near = [k for k in (place - 1, place) if 0 <= k < len(found)]
        return math.copysign(found[min(near, key=lambda k: (abs(found[k] - size), k % 2))], x)

    def right_3(x, exponent_bits, mantissa_bits):
        """In exact fractions, with the power from a loop, as numpy's number."""
        bias = 2 ** (exponent_bits - 1) - 1
        exact, power = Fraction(x), 1 - bias
        while abs(exact) >= Fraction(2) ** (power + 1):
            power += 1
        gap = Fraction(2) ** (power - mantissa_bits)
        rounded = round(exact / gap) * gap
        beyond = abs(rounded) >= Fraction(2) ** (bias + 1)
        return np.float64(math.copysign(math.inf, x) if beyond else rounded)


#: Values of a format by its bits, for the solution that looks them up.
_VALUES = {}


def _finite(gradients):
    return all(gradient.isfinite().all() for gradient in gradients)


def _sgd(weights, gradients, lr):
    return [weight - lr * gradient for weight, gradient in zip(weights, gradients, strict=True)]


def _scaler(weights, gradients, scale, good_steps, lr, interval, divide=None, finite=_finite):
    unscaled = [divide(g) if divide else g.float() / scale for g in gradients]
    if not finite(unscaled):
        return weights, scale / 2, 0
    grows = good_steps + 1 == interval
    return _sgd(weights, unscaled, lr), scale * (2 if grows else 1), 0 if grows else good_steps + 1


class scaler_step:
    never_unscales = lambda *args: _scaler(*args, divide=lambda g: g.float())
    unscales_in_fp16 = asked(_scaler, divide=lambda scale: lambda g: (g / scale).float())

    def never_leaves_fp16(weights, gradients, scale, good_steps, lr, interval):
        _, *rest = _scaler(weights, gradients, scale, good_steps, lr, interval)
        moved = [w - lr * (g / scale) for w, g in zip(weights, gradients, strict=True)]
        return moved if _finite(gradients) else weights, *rest

    def adds_up_in_fp16_to_look_for_infinity(*args):
        """A sum in fp16 may be infinite where each value is finite."""
        return _scaler(*args) if _finite(g.sum() for g in args[1]) else (args[0], args[2] / 2, 0)

    doubles_before_it_divides = asked(
        _scaler,
        divide=lambda scale, good_steps, interval: (
            lambda g: g.float() / scale / (2 if good_steps + 1 == interval else 1)
        ),
    )
    looks_at_the_first_tensor = lambda *args: _scaler(*args, finite=lambda gradients: _finite(gradients[:1]))

    def skips_only_what_is_infinite(weights, gradients, scale, good_steps, lr, interval):
        kept = [torch.nan_to_num(g.float(), nan=0.0, posinf=0.0, neginf=0.0) / scale for g in gradients]
        new = _sgd(weights, kept, lr)
        return (new, *_scaler(weights, gradients, scale, good_steps, lr, interval)[1:])

    scale_never_shrinks = told(_scaler, lambda found, scale: (found[0], max(found[1], scale), found[2]))
    scale_never_grows = told(_scaler, lambda found, scale: (found[0], min(found[1], scale), found[2]))
    counts_on_after_an_overflow = told(
        _scaler, lambda found, gradients, good_steps: (*found[:2], found[2] if _finite(gradients) else good_steps)
    )
    counts_on_after_growing = told(
        _scaler, lambda found, gradients, good_steps: (*found[:2], good_steps + 1 if _finite(gradients) else 0)
    )
    grows_a_step_late = asked(_scaler, interval=lambda interval: interval + 1)

    def right(weights, gradients, scale, good_steps, lr, interval):
        """Second solution: one flat fp32 vector, whose sum with zeros is NaN if anything is not finite, in place."""
        flat = torch.cat([gradient.flatten().to(torch.float32) for gradient in gradients])
        if torch.isnan((flat * 0).sum()):
            return weights, 0.5 * scale, 0
        flat.mul_(1 / scale)
        for weight, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
            weight.sub_(lr * part.view_as(weight))
        good_steps = (good_steps + 1) % interval
        return weights, scale if good_steps else scale * 2, good_steps

    averages_over_tensors = asked(_scaler, divide=lambda gradients, scale: lambda g: g.float() / scale / len(gradients))

    def loses_the_weights_of_a_skipped_step(weights, *rest):
        new, scale, good = _scaler(weights, *rest)
        return [None if each is old else each for each, old in zip(new, weights, strict=True)], scale, good

    multiplies_once_more = asked(_scaler, divide=lambda scale: lambda g: g.float() * scale)
    forgets_the_learning_rate = asked(_scaler, lr=1.0)
    weights_in_16_bits = told(_scaler, lambda found: ([w.half() for w in found[0]], *found[1:]))

    def right_2(weights, gradients, scale, good_steps, lr, interval):
        """Add with the step's factor, in fp64, and look at the largest magnitude; numpy's numbers come back."""
        largest = max(gradient.abs().max().item() for gradient in gradients)
        broken = not largest < math.inf or any(gradient.isnan().any() for gradient in gradients)
        if broken:
            return tuple(weights), np.float64(scale) / 2, np.int64(0)
        new = tuple(
            weight.double().add(gradient.double(), alpha=-lr / scale).float()
            for weight, gradient in zip(weights, gradients, strict=True)
        )
        grown = (good_steps + 1) // interval
        return new, np.float64(scale) * 2**grown, np.int64((good_steps + 1) % interval)

    def right_3(weights, gradients, scale, good_steps, lr, interval):
        """The loop of PyTorch's own scaler: unscale in place, note what is not finite, decide at the end."""
        found, inverse = torch.zeros(1), torch.tensor(1 / scale)
        unscaled = [gradient.float() for gradient in gradients]
        torch._amp_foreach_non_finite_check_and_unscale_(unscaled, found, inverse)
        if found.item():
            return weights, scale * 0.5, 0
        torch._foreach_add_(weights, unscaled, alpha=-lr)
        good_steps += 1
        while good_steps >= interval:
            scale, good_steps = scale * 2, good_steps - interval
        return weights, torch.tensor(scale), torch.tensor(good_steps)

    def right_4(weights, gradients, scale, good_steps, lr, interval):
        """One generator over pairs, and a flag for the whole step."""
        good = math.isfinite(sum(float(gradient.double().sum()) for gradient in gradients))
        step = lr / scale if good else 0.0
        pairs = zip(weights, gradients, strict=True)
        new = (weight - step * gradient.float() if good else weight for weight, gradient in pairs)
        count = (good_steps + 1) * good
        return [new, scale * (0.5, 1.0, 2.0)[good + (count == interval)], count % interval]


_LARGEST = {"fp16": 65504.0, "bf16": 3.3895e38}
_SUBNORMAL = {"fp16": 2.0**-24, "bf16": 2.0**-133}
_NORMAL = {"fp16": 2.0**-14, "bf16": 2.0**-126}
_BITS = {"fp16": 10, "bf16": 7}


def _broken(
    name,
    activation,
    gradients,
    scale,
    weight,
    update,
    master,
    *,
    largest=_LARGEST,
    smallest=_SUBNORMAL,
    gap=0.5,
    bits=_BITS,
    relative=True,
    signed=True,
    on_activation=1.0,
    on_large=None,
    on_small=None,
    cures=None,
):
    low, high = gradients
    broken = set()
    large = high * (scale if on_large is None else on_large)
    if activation * (scale if on_activation == "scale" else 1) > largest[name] or large > largest[name]:
        broken.add("overflow")
    if low * (scale if on_small is None else on_small) < smallest[name] / 2:
        broken.add("underflow")
    power = 2.0 ** (math.frexp(weight)[1] - 1) if relative else 1.0
    if (abs(update) if signed else update) < gap * power * 2.0 ** -bits[name] and not (
        master if cures is None else cures
    ):
        broken.add("stall")
    return broken


class what_breaks:
    bf16_with_the_range_of_fp16 = lambda *case: _broken(*case, largest=dict.fromkeys(_LARGEST, 65504.0))

    def no_subnormals_at_all(*case):
        return _broken(*case, smallest={name: 2 * least for name, least in _NORMAL.items()})

    a_whole_gap = lambda *case: _broken(*case, gap=1.0)
    bf16_as_precise_as_fp16 = lambda *case: _broken(*case, bits=dict.fromkeys(_BITS, 10))
    a_negative_update_is_a_small_one = lambda *case: _broken(*case, signed=False)
    scales_activations_too = lambda *case: _broken(*case, on_activation="scale")
    scaling_only_helps = lambda *case: _broken(*case, on_large=1.0)
    a_master_copy_does_not_help = lambda *case: _broken(*case, cures=False)
    without_the_idea_bf16_never_breaks = lambda name, *case: set() if name == "bf16" else _broken(name, *case)
    fp16_never_stalls = lambda name, *case: _broken(name, *case) - ({"stall"} if name == "fp16" else set())

    def right(name, activation, gradients, scale, weight, update, master):
        """Second solution: let PyTorch cast, from fp64."""
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[name]

        def held(value):
            return torch.tensor(value, dtype=torch.float64).to(dtype)

        low, high = (held(g * scale) for g in gradients)
        checks = {
            "overflow": bool(torch.isinf(held(activation)) or torch.isinf(high)),
            "underflow": bool(low == 0),
            "stall": not master and bool(held(weight + update) == held(weight)),
        }
        return [failure for failure, there in checks.items() if there]

    def right_2(name, activation, gradients, scale, weight, update, master):
        """By the table of the chapter: edges half a gap beyond the last number and half of the smallest one."""
        bits, top = {"fp16": (10, 15), "bf16": (7, 127)}[name]
        infinite_from = 2.0 ** (top + 1) * (1 - 2.0 ** -(bits + 2))
        zero_up_to = 2.0 ** (1 - top - bits - 1)
        low, high = gradients
        broken = set()
        if max(activation, scale * high) >= infinite_from:
            broken |= {"overflow"}
        if scale * low <= zero_up_to:
            broken |= {"underflow"}
        gap = 2.0 ** (math.floor(math.log2(abs(weight))) - bits)
        if abs(update) < gap / 2 and not master:
            broken |= {"stall"}
        return frozenset(broken)

    def right_3(name, activation, gradients, scale, weight, update, master):
        """A generator, over numpy's casts; bf16 is fp32 with the lower half of its bits rounded away."""

        def held(value):
            with np.errstate(over="ignore"):
                single = np.array(value, dtype=np.float64).astype(np.float32)
                if name == "fp16":
                    return float(np.float16(value))
            bits = int(single.view(np.uint32))
            upper = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
            return float(np.array(upper, dtype=np.uint32).view(np.float32))

        if held(activation) == math.inf or held(gradients[1] * scale) == math.inf:
            yield "overflow"
        if held(gradients[0] * scale) == 0:
            yield "underflow"
        if not master and held(weight + update) == weight:
            yield "stall"

    def names_without_end(*case):
        while True:
            yield "overflow"

    def right_4(name, activation, gradients, scale, weight, update, master):
        """Members of an Enum of words, and limits from PyTorch."""
        info = torch.finfo({"fp16": torch.float16, "bf16": torch.bfloat16}[name])
        low, high = (scale * gradient for gradient in gradients)
        gap = 2.0 ** math.floor(math.log2(abs(weight))) * info.eps
        breaks = {
            _Failure.OVERFLOW: max(activation, high) > info.max,
            _Failure.UNDERFLOW: low <= info.smallest_normal * info.eps / 2,
            _Failure.STALL: not master and abs(update) < gap / 2,
        }
        return {failure for failure in _Failure if breaks[failure]}


class _Failure(str, enum.Enum):  # noqa: UP042
    OVERFLOW, UNDERFLOW, STALL = "overflow", "underflow", "stall"


def _trip(x, rows, columns, largest=None, top=448.0, dtype=torch.float8_e4m3fn, back=True, exact=None):
    blocks = x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    found = (largest or (lambda b: b.abs().amax(dim=(1, 3), keepdim=True)))(blocks)
    scale = torch.where(found > 0, found / top, 1.0)
    if exact:
        scale = exact(scale)
    limit = torch.finfo(dtype).max if dtype.is_floating_point else top
    values = (blocks / scale).clamp(-limit, limit)
    values = (values if dtype.is_floating_point else values.round()).to(dtype).float()
    if callable(back):
        return back(values, scale).reshape(x.shape)
    return (values * scale if back else values).reshape(x.shape)


class fp8_round_trip:
    one_scale_for_all = lambda x, rows, columns: _trip(x, *x.shape)
    a_scale_for_every_row = lambda x, rows, columns: _trip(x, 1, x.shape[1])
    rows_and_columns_swapped = lambda x, rows, columns: _trip(x, columns, rows)

    def blocks_of_consecutive_values(x, rows, columns):
        return _trip(x.reshape(-1, rows * columns), 1, rows * columns).reshape(x.shape)

    never_scales_back = lambda x, rows, columns: _trip(x, rows, columns, back=False)
    no_scale = lambda x, rows, columns: x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    largest_not_magnitude = lambda *case: _trip(*case, largest=lambda b: b.amax(dim=(1, 3), keepdim=True))
    e5m2_for_e4m3 = lambda x, rows, columns: _trip(x, rows, columns, top=57344.0, dtype=torch.float8_e5m2)
    e5m2_up_to_448 = lambda x, rows, columns: _trip(x, rows, columns, dtype=torch.float8_e5m2)
    # INT8's rule: evenly spaced, up to 127.
    whole_numbers = lambda x, rows, columns: _trip(x, rows, columns, top=127.0, dtype=torch.int8)

    def blocks_out_of_their_places(x, rows, columns):
        return _trip(x, rows, columns).unfold(0, rows, rows).unfold(1, columns, columns).reshape(x.shape)

    def ones_for_a_block_of_zeros(x, rows, columns):
        largest = torch.nn.functional.max_pool2d(x.abs()[None], (rows, columns))[0]
        zero = (largest == 0).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return _trip(x, rows, columns) + zero

    def divides_by_zero(x, rows, columns):
        blocks = x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
        return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).reshape(x.shape)

    forgets_to_cast = lambda x, rows, columns: x.clone()

    def right(x, rows, columns):
        """Second solution: a loop over blocks, and the inverse of the scale."""
        out = torch.zeros_like(x)
        for top in range(0, x.shape[0], rows):
            for left in range(0, x.shape[1], columns):
                place = (slice(top, top + rows), slice(left, left + columns))
                largest = x[place].abs().max().item()
                if largest > 0:
                    inverse = 448.0 / largest
                    codes = (x[place] * inverse).clamp(-448, 448).to(torch.float8_e4m3fn)
                    out[place] = codes.float() / inverse
        return out

    divides_again = lambda x, rows, columns: _trip(x, rows, columns, back=lambda values, scale: values / scale)
    upside_down = lambda x, rows, columns: _trip(x, rows, columns, exact=lambda scale: 1 / scale)

    def counts_no_rows(x, rows, columns):
        row, below, height = 0, 0, len(x)
        while row < height:
            below = row + rows
        return x[:below]

    power_of_two = lambda *case: _trip(*case, exact=lambda scale: torch.exp2(torch.ceil(torch.log2(scale))))
    top_of_ieee = lambda x, rows, columns: _trip(x, rows, columns, top=240.0)
    to_one = lambda x, rows, columns: _trip(x, rows, columns, top=1.0)

    def right_2(x, rows, columns):
        """The calculator's rounding of every value, in numpy."""
        values = x.numpy().reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns).astype(np.float64)
        largest = np.abs(values).max(axis=(1, 3), keepdims=True)
        scale = np.where(largest == 0, 1, largest) / 448
        scaled = values / scale
        gap = 2.0 ** np.maximum(np.floor(np.log2(np.maximum(np.abs(scaled), 2.0**-20))) - 3, -9)
        return (np.round(scaled / gap) * gap * scale).reshape(x.shape).astype(np.float32)

    def right_3(x, rows, columns):
        """Scales by pooling, spread by repetition, and blocks of zeros kept by a tiny floor."""
        pooled = torch.nn.functional.max_pool2d(x.abs()[None, None], (rows, columns), (rows, columns))[0, 0]
        scale = (pooled.clamp(min=1e-30) / 448).double()
        whole = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return (x.double() / whole).clamp(-448, 448).to(torch.float8_e4m3fn).double() * whole


def _block(largest, rest=0.0):
    return [largest, *[rest] * 31]


def _blocks(floor=500.0, even=480.0, none=300.0):
    return {"floor": _block(floor), "even": _block(even), "none": _block(none)}


class mx_blocks:
    even_cuts_it_too = lambda: _blocks(floor=480.0)
    e4m3_reaches_512 = lambda: _blocks(floor=400.0, even=400.0)
    even_rounds_it_up = lambda: _blocks(even=508.0)
    a_power_of_two = lambda: _blocks(none=256.0)
    none_is_cut_too = lambda: _blocks(none=470.0)
    sixteen_values = lambda: {name: block[:16] for name, block in _blocks().items()}
    infinite = lambda: _blocks(floor=math.inf)
    nothing = lambda: _blocks(even=0.0)

    def right():
        """Second solution: other powers, other places, negative, in tensors."""
        made = {"floor": -0.973, "even": 1.8 * 2.0**-90, "none": 1.1 * 2.0**60}
        return {name: torch.full((32,), value) for name, value in made.items()}

    right_2 = lambda: tuple(np.array(_block(x, x / 3)) for x in (511.0, 449.0, 440.0))


def _of_three(form, x, w, g, trip=through):
    return [
        product_error(trip(form, x) @ trip(form, w).T, x @ w.T),
        product_error(trip(form, g, gradient=True) @ trip(form, w.T).T, g @ w),
        product_error(trip(form, g.T, gradient=True) @ trip(form, x.T).T, g.T @ x),
    ]


def _recipe(units, layers, limit, errors=_of_three, worst=max, scales=True, kept=None, order=("nvfp4", "fp8", "mxfp8")):
    bits = {"nvfp4": 4.5 if scales else 4, "mxfp8": 8.25 if scales else 8, "fp8": 8, "bf16": 16}
    formats = {
        name: next((f for f in order if f in units and worst(errors(f, *layer)) <= limit), "bf16")
        for name, layer in layers.items()
    }
    size = sum(
        x.numel() * bits[kept or formats[n]] / 8 + 4 * (scales and not kept and formats[n] in ("nvfp4", "fp8"))
        for n, (x, *_) in layers.items()
    )
    return {"formats": formats, "kept": size}


def _once(form, x, w, g):
    x_, w_, g_ = (through(form, m, gradient=m is g) for m in (x, w, g))
    return [product_error(x_ @ w_.T, x @ w.T), product_error(g_ @ w_, g @ w), product_error(g_.T @ x_, g.T @ x)]


class block_recipe:
    # Right arithmetic for forward, and no thought of backward.
    without_the_idea_forward_alone = lambda *case: _recipe(*case, errors=lambda *layer: _of_three(*layer)[:1])
    without_the_weights_gradient = lambda *case: _recipe(*case, errors=lambda *layer: _of_three(*layer)[:2])
    quantizes_each_matrix_once = lambda *case: _recipe(*case, errors=_once)
    errors_of_matrices = lambda *case: _recipe(
        *case, errors=lambda f, x, w, g: [product_error(through(f, m, gradient=m is g), m) for m in (x, w, g)]
    )
    the_mean_of_three = lambda *case: _recipe(*case, worst=lambda errors: sum(errors) / 3)
    whatever_the_hardware = lambda units, layers, limit: _recipe({"nvfp4", "fp8", "mxfp8"}, layers, limit)
    bf16_to_be_safe = lambda units, layers, limit: _recipe(set(), layers, limit)
    keeps_bf16 = lambda *case: _recipe(*case, kept="bf16")
    keeps_no_scales = lambda *case: _recipe(*case, scales=False)
    most_bits_first = lambda *case: _recipe(*case, order=("mxfp8", "fp8", "nvfp4"))
    int8_for_all = lambda units, layers, limit: {"formats": dict.fromkeys(layers, "int8"), "kept": 1}

    def right(units, layers, limit):
        """Second solution: torch.linalg, a table of bits, and the layers backwards."""
        found, kept = {}, 0.0
        for name in reversed(layers):
            x, w, g = layers[name]
            pairs = [(x, w, False), (g, w.T, True), (g.T, x.T, True)]
            good = ["bf16"]
            for form in sorted(units, key={"nvfp4": 1, "fp8": 2, "mxfp8": 3}.get, reverse=True):
                off = []
                for a, b, gradient in pairs:
                    exact = a @ b.T
                    made = through(form, a, gradient=gradient) @ through(form, b).T
                    off.append(
                        (torch.linalg.vector_norm(made - exact, dim=1) / torch.linalg.vector_norm(exact, dim=1)).mean()
                    )
                if all(one <= limit for one in off):
                    good.append(form)
            found[name] = good[-1]
            per = {"nvfp4": 4 + 8 / 16 + 32 / x.numel(), "fp8": 8 + 32 / x.numel(), "mxfp8": 8 + 8 / 32, "bf16": 16}
            kept += per[good[-1]] * x.numel() / 8
        return found, kept

    right_2 = lambda *case: told(_recipe, lambda answer: {**answer, "kept": np.float32(answer["kept"])})(*case)


DEFECTS, SECOND_SOLUTIONS = listed(round_to, scaler_step, what_breaks, fp8_round_trip, mx_blocks, block_recipe)

#: What the sentence about a defect must say.
SENTENCES = {
    "cuts_off_the_rest": "cut off", "halves_go_up": "even mantissa", "no_subnormals": "subnormals",
    "gap_shrinks_for_ever": "no longer shrinks", "saturates": "gives infinity",
    "infinite_from_the_largest_on": "not half a gap above", "gap_of_the_power_above": "twice the right one",
    "infinity_without_its_sign": "sign of the number", "one_bit_too_many": "more bits",
    "never_unscales": "divide by it", "unscales_in_fp16": "fp32 first",
    "doubles_before_it_divides": "carry the scale that came in", "looks_at_the_first_tensor": "is skipped",
    "skips_only_what_is_infinite": "whole step", "counts_on_after_an_overflow": "again at zero",
    "grows_a_step_late": "doubled", "bf16_with_the_range_of_fp16": "bf16 reaches",
    "no_subnormals_at_all": "subnormals", "scales_activations_too": "for gradients",
    "scaling_only_helps": "large gradients too", "a_master_copy_does_not_help": "master copy",
    "without_the_idea_bf16_never_breaks": "nothing moves", "one_scale_for_all": "'tensor' scaling",
    "blocks_of_consecutive_values": "rectangle", "never_scales_back": "multiplied by their scales",
    "largest_not_magnitude": "magnitude", "e5m2_for_e4m3": "E5M2", "divides_by_zero": "zeros",
    "forgets_to_cast": "cast", "rounds_up_always": "not up", "loses_the_sign": "sign",
    "waits_for_zero_to_grow": "never ends", "multiplies_once_more": "and do not multiply",
    "forgets_the_learning_rate": "learning rate", "weights_in_16_bits": "16 bits", "power_of_two": "power of two",
    "top_of_ieee": "240", "to_one": "lands on 1", "rounds_negatives_down": "not down",
    "averages_over_tensors": "number of tensors", "loses_the_weights_of_a_skipped_step": "also in a skipped step",
    "names_without_end": "never ends", "divides_again": "once more", "upside_down": "upside down",
    "counts_no_rows": "never ends", "zero_below_the_smallest_subnormal": "is rounded to it, not to zero",
    "never_leaves_fp16": "fp32 first", "adds_up_in_fp16_to_look_for_infinity": "look at each value",
    "a_negative_update_is_a_small_one": "not its sign", "a_whole_gap": "over half of the gap", "e5m2_up_to_448": "E5M2", "whole_numbers": "INT8",
    "even_cuts_it_too": "where even goes up", "e4m3_reaches_512": "E4M3 has 448", "even_rounds_it_up": "near to 512",
    "a_power_of_two": "wastes nothing", "none_is_cut_too": "is cut off", "sixteen_values": "32 values",
    "infinite": "infinite values", "nothing": "no largest value",
    "without_the_idea_forward_alone": "forward alone", "without_the_weights_gradient": "sums over tokens",
    "quantizes_each_matrix_once": "quantized once", "errors_of_matrices": "single matrices", "the_mean_of_three": "hides the worst",
    "whatever_the_hardware": "no matrix units", "bf16_to_be_safe": "fewer bits than bf16", "keeps_bf16": "in bf16",
    "keeps_no_scales": "Scales are kept too", "most_bits_first": "fewer bits than mxfp8", "int8_for_all": "none of nvfp4",
    "blocks_out_of_their_places": "in other places", "ones_for_a_block_of_zeros": "a block of zeros stays one",
}  # fmt: skip
