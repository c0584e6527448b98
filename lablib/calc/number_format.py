"""One number format from its bits: what a code means, and how a number is rounded.

A number is a sign, an exponent field e of E bits and a mantissa field f of M bits:

    normal     e > 0    (-1)^s * 2^(e - bias) * (1 + f / 2^M)
    subnormal  e = 0    (-1)^s * 2^(1 - bias) * (f / 2^M)

Everything else follows. The table of formats is in `formats`.

Chapter: book/08_mixed_precision.md
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lablib.calc.choices import one_of


@dataclass(frozen=True, kw_only=True)
class Format:
    """A binary floating-point format.

    Attributes:
        name: How tables call it.
        exponent_bits: E.
        mantissa_bits: M, without the leading one, which is not stored.
        bias: What is subtracted from the exponent field.
        specials: "ieee", "fn", "fnuz" or "none", as in the table of `formats`.
        signed: Whether there is a sign bit; a scale (E8M0) has none.
        stored_bits: Bits in memory, where they are more than the format has: TF32 lives in 32.
        torch_name: Its dtype in PyTorch, or None where there is none.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: str = "ieee"
    signed: bool = True
    stored_bits: int = 0
    torch_name: str | None = None

    @property
    def bits(self) -> int:
        """Bits of the format: sign, exponent and mantissa."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def bytes(self) -> float:
        """Bytes of a value in memory."""
        return (self.stored_bits or self.bits) / 8

    @property
    def epsilon(self) -> float:
        """Gap between 1 and the next value, `2^-M`; PyTorch's `finfo.eps`."""
        return 2.0**-self.mantissa_bits

    @property
    def unit_roundoff(self) -> float:
        """Bound of the relative error of rounding a number in the normal range, `epsilon / 2`."""
        return self.epsilon / 2

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number, `1 - bias`; E8M0, which has no subnormals, begins at `-bias`."""
        return 1 - self.bias if self.has_subnormals else -self.bias

    @property
    def has_subnormals(self) -> bool:
        """Whether the exponent field 0 means smaller numbers and zero."""
        return self.mantissa_bits > 0

    @property
    def max(self) -> float:
        """Largest finite number."""
        return self.decode(self._largest_code())

    @property
    def min_normal(self) -> float:
        """Smallest positive number with full precision, `2^(1 - bias)`."""
        return 2.0**self.min_exponent

    @property
    def min_subnormal(self) -> float:
        """Smallest positive number, `2^(1 - bias - M)`: half of it, or less, is rounded to zero."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)

    @property
    def binades(self) -> int:
        """Powers of two from the smallest normal number to the largest: the range in bits."""
        return math.frexp(self.max)[1] - 1 - self.min_exponent + 1

    def _largest_code(self) -> int:
        code = 2 ** (self.exponent_bits + self.mantissa_bits) - 1
        if self.specials == "ieee":
            return code - 2**self.mantissa_bits
        return code - 1 if self.specials == "fn" else code

    def fields(self, code: int) -> tuple[int, int, int]:
        """Return sign, exponent field and mantissa field of a code.

        Args:
            code: The bits as an unsigned integer.

        Raises:
            ValueError: If the code does not fit into the format.
        """
        if not 0 <= code < 2**self.bits:
            raise ValueError(f"code {code} is not among the {2**self.bits} codes of {self.name}")
        mantissa = code % 2**self.mantissa_bits
        exponent = (code >> self.mantissa_bits) % 2**self.exponent_bits
        return code >> (self.exponent_bits + self.mantissa_bits), exponent, mantissa

    def bit_string(self, code: int) -> str:
        """Return the bits of a code in groups: `0 10000 1001001000` for sign, exponent, mantissa.

        Args:
            code: The bits as an unsigned integer.
        """
        widths = (int(self.signed), self.exponent_bits, self.mantissa_bits)
        return " ".join(
            f"{value:0{width}b}" for value, width in zip(self.fields(code), widths, strict=True) if width
        )

    def decode(self, code: int) -> float:
        """Return the number that a code means: finite, infinite or NaN.

        Args:
            code: The bits as an unsigned integer.

        Raises:
            ValueError: If the code does not fit into the format.
        """
        sign, exponent, mantissa = self.fields(code)
        magnitude = code % 2 ** (self.exponent_bits + self.mantissa_bits)
        if self.specials == "fnuz" and sign and not magnitude:
            return math.nan
        if self.specials in ("ieee", "fn") and magnitude > self._largest_code():
            infinite = self.specials == "ieee" and mantissa == 0
            return math.nan if not infinite else -math.inf if sign else math.inf
        normal = exponent > 0 or not self.has_subnormals
        significand = mantissa + (2**self.mantissa_bits if normal else 0)
        power = (exponent if normal else 1) - self.bias - self.mantissa_bits
        value = math.ldexp(significand, power)
        return -value if sign else value

    def ulp(self, x: float) -> float:
        """Return the gap between neighbours at a number, `2^(floor(log2 |x|) - M)`.

        It is the gap above `|x|`. Just below a power of two the gap is half of it.

        Args:
            x: A finite number; below the smallest normal number the gap stays `min_subnormal`.
        """
        if x == 0 or (not self.has_subnormals and abs(x) < self.min_normal):
            return self.min_subnormal
        exponent = max(math.frexp(x)[1] - 1, self.min_exponent)
        return math.ldexp(1.0, exponent - self.mantissa_bits)

    def round(self, x: float, *, overflow: str = "special") -> float:
        """Return the nearest value of the format; of two that are equally near, the one with an even mantissa.

        E8M0 has no mantissa, and of two equally near powers of two it takes the larger, as PyTorch does.

        Args:
            x: Any number.
            overflow: What a number becomes that rounds to more than `max`: "special" for infinity, or NaN where
                the format has none, or "saturate" for `max`. PyTorch's cast to float8_e5m2 gives infinity; its
                cast to float8_e4m3fn saturates or gives NaN, depending on the version.

        Raises:
            ValueError: If `overflow` is neither, or if a number below zero is given to a format without a sign.
        """
        one_of("overflow", overflow, ("special", "saturate"))
        if math.isnan(x):
            return x
        if x < 0 and not self.signed:
            raise ValueError(f"{self.name} has no sign bit: it cannot hold {x}")
        rounded = x
        if math.isfinite(x):
            gap = self.ulp(x)
            steps = x / gap  # exact: the gap is a power of two
            rounded = (round(steps) if self.has_subnormals else math.floor(steps + 0.5)) * gap
            rounded = rounded if self.has_subnormals else max(rounded, self.min_normal)
        if abs(rounded) <= self.max:
            # Zero keeps its sign, save where the code of minus zero means NaN.
            return rounded if self.specials == "fnuz" and rounded == 0 else math.copysign(rounded, x)
        if overflow == "saturate" or self.specials == "none":
            return math.copysign(self.max, x)
        return math.copysign(math.inf, x) if self.specials == "ieee" else math.nan

    def encode(self, x: float, *, overflow: str = "special") -> int:
        """Return the code of a number, rounded: the inverse of `decode`.

        Args:
            x: Any number.
            overflow: As in `round`.

        Raises:
            ValueError: As in `round`, and for NaN where the format has no code for it.
        """
        value = self.round(x, overflow=overflow)
        sign_bit = 1 << (self.exponent_bits + self.mantissa_bits)
        if math.isnan(value):
            if self.specials == "none":
                raise ValueError(f"{self.name} has no code for NaN")
            if self.specials == "fnuz":
                return sign_bit
            quiet = 2**self.mantissa_bits // 2 if self.specials == "ieee" else 0
            return self._largest_code() + 1 + quiet
        sign = sign_bit if math.copysign(1, value) < 0 else 0
        if math.isinf(value):
            return sign + self._largest_code() + 1
        if value == 0:
            return 0 if self.specials == "fnuz" else sign
        exponent = max(math.frexp(value)[1] - 1, self.min_exponent)
        steps = int(abs(value) / math.ldexp(1.0, exponent - self.mantissa_bits))
        hidden = 2**self.mantissa_bits if self.has_subnormals else 1
        field = exponent - self.min_exponent
        # A subnormal has field 0 and no hidden one; a normal number has both, and they add up to its exponent field.
        return sign + field * 2**self.mantissa_bits + (steps if self.has_subnormals else steps - hidden)

    def neighbours(self, x: float) -> tuple[float, float]:
        """Return the nearest values of the format at or below a number, and at or above it.

        Both are the number itself where the format has it. Stochastic rounding chooses between the two.

        Args:
            x: A number within the range of the format.

        Raises:
            ValueError: If it is outside the range.
        """
        if not abs(x) <= self.max:
            raise ValueError(f"{x} is outside the range of {self.name}, which ends at {self.max:g}")
        gap = self.ulp(x)
        return math.floor(x / gap) * gap, math.ceil(x / gap) * gap

    def moves(self, weight: float, update: float) -> bool:
        """Return whether a weight of this format changes when an update is added and the sum rounded.

        It does not if the update is less than half of the gap to its neighbour: between `2^-(M+2)` and `2^-(M+1)` of
        the weight, which for bf16 is between 1/512 and 1/256.

        Args:
            weight: Rounded to the format first.
            update: In any precision.
        """
        held = self.round(weight)
        return self.round(held + update) != held

    def values(self, low: float = 0.0, high: float = math.inf) -> Iterator[float]:
        """Yield the finite values from `low` to `high` that are not negative, smallest first.

        Args:
            low: Least value, at least 0.
            high: Largest value; `max` if beyond it.

        Raises:
            ValueError: If `low` is negative.
        """
        if low < 0:
            raise ValueError(f"low={low} must be at least 0: negative values mirror the positive ones")
        first = self.encode(min(low, self.max))
        for code in range(first, self._largest_code() + 1):
            value = self.decode(code)
            if value > high:
                return
            if value >= low:
                yield value
