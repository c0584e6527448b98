"""Number formats: what a code means, how a number is rounded, and which GPU multiplies in them.

A number is a sign, an exponent field e of E bits and a mantissa field f of M bits:

    normal     e > 0    (-1)^s * 2^(e - bias) * (1 + f / 2^M)
    subnormal  e = 0    (-1)^s * 2^(1 - bias) * (f / 2^M)

The exponent bits decide the range, the mantissa bits the precision: between two powers of two there are 2^M values, so
the gap after 1 is `epsilon = 2^-M`. What the largest codes mean differs, and is the `specials` of a format:

| specials | codes that are no numbers |
|---|---|
| ieee | the largest e: infinity with f = 0, NaN with any other f |
| fn | all ones: NaN; there is no infinity, so E4M3 reaches 448 and not 240 |
| fnuz | the code of minus zero: NaN; there is neither infinity nor minus zero |
| none | none |

Any GPU can store a bf16 or an FP8 tensor, but only one with matrix units (tensor cores) for the format multiplies it
faster. NVIDIA's follow the compute capability; AMD's MI300X (CDNA 3) has FP8 in the FNUZ variants:

| compute capability | generation | adds |
|---|---|---|
| 7.0, 7.5 | Volta, Turing | fp16 |
| 8.0, 8.6 | Ampere | bf16, TF32 |
| 8.9 | Ada | FP8 with one scale for a tensor |
| 9.0 | Hopper | FP8 with fp32 scales for blocks; later generations emulate it with MXFP8 |
| 10.0, 10.3, 12.0 | Blackwell | MXFP8, and FP4 with block scales (NVFP4, MXFP4) |

AMD's MI350X and MI355X (CDNA 4) take the OCP formats instead, with MXFP8 and MXFP4, and have no TF32.

Sources: IEEE 754-2019; OCP 8-bit Floating Point Specification (E4M3, E5M2); Micikevicius et al. 2022 (arXiv 2209.05433);
OCP Microscaling Formats Specification (E8M0, E2M1, and blocks of 32); Transformer Engine documentation, datatype and
hardware support matrix (bf16 and all FP8 rows); NVIDIA whitepapers of Volta, Turing and Ampere (fp16, TF32); PTX ISA,
`mma` with `.block_scale` (12.0); AMD Instinct MI300X datasheet; hipBLASLt documentation, data type support (gfx942
FNUZ, gfx950 OCP); AMD ROCm blog "Matrix Core Programming on AMD CDNA3 and CDNA4" (block scales, FP4); PyTorch
documentation, torch.float8_e4m3fnuz. Read `Format` first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lablib.calc.errors import one_of
from lablib.calc.hardware import ACCELERATORS, accelerator


@dataclass(frozen=True, kw_only=True)
class Format:
    """A binary floating-point format.

    Attributes:
        exponent_bits: E.
        mantissa_bits: M, without the leading one, which is not stored.
        bias: What is subtracted from the exponent field.
        specials: "ieee", "fn", "fnuz" or "none", as in the table above.
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
        """Return sign, exponent field and mantissa field of a code."""
        if not 0 <= code < 2**self.bits:
            raise ValueError(f"code {code} is not among the {2**self.bits} codes of {self.name}")
        mantissa = code % 2**self.mantissa_bits
        exponent = (code >> self.mantissa_bits) % 2**self.exponent_bits
        return code >> (self.exponent_bits + self.mantissa_bits), exponent, mantissa

    def bit_string(self, code: int) -> str:
        """Return the bits of a code in groups: `0 10000 1001001000` for sign, exponent, mantissa."""
        widths = (int(self.signed), self.exponent_bits, self.mantissa_bits)
        return " ".join(f"{value:0{width}b}" for value, width in zip(self.fields(code), widths, strict=True) if width)

    def decode(self, code: int) -> float:
        """Return the number that a code means: finite, infinite or NaN."""
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
            overflow: What a number becomes that rounds to more than `max`: "special" for infinity, or NaN where
                the format has none, or "saturate" for `max`. PyTorch's cast to float8_e5m2 gives infinity; its
                cast to float8_e4m3fn saturates or gives NaN, depending on the version.
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
        """Return the code of a number, rounded: the inverse of `decode`."""
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
        """
        if not abs(x) <= self.max:
            raise ValueError(f"{x} is outside the range of {self.name}, which ends at {self.max:g}")
        gap = self.ulp(x)
        return math.floor(x / gap) * gap, math.ceil(x / gap) * gap

    def moves(self, weight: float, update: float) -> bool:
        """Return whether a weight of this format changes when an update is added and the sum rounded.

        It does not if the update is less than half of the gap to its neighbour: between `2^-(M+2)` and `2^-(M+1)` of
        the weight, which for bf16 is between 1/512 and 1/256.
        """
        held = self.round(weight)
        return self.round(held + update) != held

    def values(self) -> Iterator[float]:
        """Return the finite values that are not negative, smallest first."""
        return map(self.decode, range(self._largest_code() + 1))


def _format(name: str, exponent: int, mantissa: int, *, torch_name: str | None, **more: object) -> Format:
    fields = {"bias": 2 ** (exponent - 1) - 1} | more
    return Format(name=name, exponent_bits=exponent, mantissa_bits=mantissa, torch_name=torch_name, **fields)


FORMATS = {
    "fp32": _format("fp32", 8, 23, torch_name="float32"),
    "tf32": _format("tf32", 8, 10, torch_name=None, stored_bits=32),
    "bf16": _format("bf16", 8, 7, torch_name="bfloat16"),
    "fp16": _format("fp16", 5, 10, torch_name="float16"),
    "e4m3": _format("e4m3", 4, 3, torch_name="float8_e4m3fn", specials="fn"),
    "e5m2": _format("e5m2", 5, 2, torch_name="float8_e5m2"),
    "e4m3fnuz": _format("e4m3fnuz", 4, 3, torch_name="float8_e4m3fnuz", specials="fnuz", bias=8),
    "e5m2fnuz": _format("e5m2fnuz", 5, 2, torch_name="float8_e5m2fnuz", specials="fnuz", bias=16),
    "e2m1": _format("e2m1", 2, 1, torch_name=None, specials="none"),
    "e8m0": _format("e8m0", 8, 0, torch_name="float8_e8m0fnu", specials="fn", signed=False),
}


def find_format(name: str) -> Format:
    """Return a format by its name, or by the name of its dtype in PyTorch.

    Args:
        name: "fp32", "tf32", "bf16", "fp16", "e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e2m1" or "e8m0".
    """
    by_dtype = {fmt.torch_name: key for key, fmt in FORMATS.items() if fmt.torch_name}
    key = by_dtype.get(name.removeprefix("torch."), name)
    return FORMATS[one_of("format", key, FORMATS)]


@dataclass(frozen=True)
class Span:
    """Where a format lies on an axis of powers of two.

    Attributes:
        subnormal: log2 of the smallest subnormal.
        normal: log2 of the smallest normal number: from here on it has its full precision.
        top: log2 of the largest number.
        bits: Significant bits in the normal range, M + 1.
    """

    name: str
    subnormal: float
    normal: float
    top: float
    bits: int


def format_spans(names: Iterable[str] = ("fp32", "tf32", "bf16", "fp16", "e5m2", "e4m3")) -> list[Span]:
    """Return the spans of formats, for one axis."""
    found = [find_format(name) for name in names]
    return [
        Span(
            fmt.name, math.log2(fmt.min_subnormal), math.log2(fmt.min_normal), math.log2(fmt.max), fmt.mantissa_bits + 1
        )
        for fmt in found
    ]


def gap_at(fmt: Format, x: float) -> float:
    """Return the gap between neighbours at a number, `2^(floor(log2 |x|) - M)`: `Format.ulp`."""
    return fmt.ulp(x)


def least_update(fmt: Format, weight: float) -> float:
    """Return half of the gap at a weight: what is added must be larger than this, or the weight stays."""
    return fmt.ulp(weight) / 2


def scale_window(smallest: float, largest: float, fmt: Format = FORMATS["fp16"]) -> tuple[float, float]:
    """Return the loss scales between which no gradient becomes zero and none infinite.

    A scale must be more than the first, half of the smallest subnormal over the smallest gradient, and at most the
    second, the largest number over the largest gradient.

    Args:
        smallest: Smallest magnitude of a gradient that should survive, above 0.
    """
    return fmt.min_subnormal / 2 / smallest, fmt.max / largest


# In the order of tables. "fp8-block": one scale for 1x128 or 128x128 values, "mxfp8": for 32, a power of two.
UNITS = ("fp16", "bf16", "tf32", "fp8", "fp8-block", "mxfp8", "fp4")
_SINCE = {
    "fp16": (7, 0),
    "bf16": (8, 0),
    "tf32": (8, 0),
    "fp8": (8, 9),
    "fp8-block": (9, 0),
    "mxfp8": (10, 0),
    "fp4": (10, 0),
}
#: Units that a later generation no longer has: Blackwell emulates FP8 in blocks with MXFP8 (Transformer Engine).
_UNTIL = {"fp8-block": (9, 0)}
_MATRIX = "Transformer Engine, support matrix"
#: Where it stands, by compute capability or by key.
_SOURCES = {
    (7, 0): "NVIDIA, Volta whitepaper",
    (7, 5): "NVIDIA, Turing whitepaper",
    (8, 0): "NVIDIA, Ampere whitepaper",
    (8, 6): "NVIDIA, Ampere whitepaper",
    (12, 0): f"{_MATRIX}; PTX ISA, mma",
    "mi300x": "AMD data sheet; hipBLASLt documentation",
    "mi325x": "AMD data sheet; hipBLASLt documentation",
    "mi350x": "AMD, Matrix Core Programming; hipBLASLt documentation",
    "mi355x": "AMD, Matrix Core Programming; hipBLASLt documentation",
    "tpu-v4": "Google Cloud, TPU v4",
    "tpu-v5p": "Google Cloud, TPU v5p",
    "tpu-v6e": "Google Cloud, TPU v6e",
    "tpu-v7": "Google Cloud, TPU7x",
}
#: Whose FP8 has no infinity and no negative zero: CDNA 3.
_FNUZ = ("mi300x", "mi325x")


@dataclass(frozen=True)
class Support:
    """The formats that one GPU multiplies in matrix units.

    Attributes:
        card: Key in `hardware.ACCELERATORS`.
        capability: Compute capability as text, "" where it is not NVIDIA's.
        formats: Those of `UNITS` that it has.
        fp8_formats: Keys in `FORMATS` of its FP8 variants.
    """

    card: str
    name: str
    capability: str
    formats: tuple[str, ...]
    fp8_formats: tuple[str, ...]
    source: str


def support(card: str) -> Support:
    """Return which formats a GPU multiplies in matrix units."""
    found = accelerator(card)
    key = next(key for key, row in ACCELERATORS.items() if row is found)
    level, formats = found.capability, found.formats
    if level:
        formats = tuple(unit for unit in UNITS if _SINCE[unit] <= level <= _UNTIL.get(unit, level))
    capability = ".".join(map(str, level or ()))
    source = _SOURCES.get(level) or _SOURCES.get(key, _MATRIX)
    variants = ("e4m3fnuz", "e5m2fnuz") if key in _FNUZ else ("e4m3", "e5m2")
    return Support(key, found.name, capability, formats, variants if "fp8" in formats else (), source)


def support_table() -> list[Support]:
    """Return every GPU with its formats, NVIDIA's oldest generation first."""
    ages = sorted(ACCELERATORS, key=lambda card: ACCELERATORS[card].capability or (99, 0))
    return [support(card) for card in ages]


def peak_ratio(card: str, fast: str, slow: str) -> float:
    """Return how many times faster a GPU is in one dtype than in another, at its peak.

    The gain of a whole step is smaller: norms, softmax and the optimizer are not matmuls, and a fp32 baseline runs its
    matmuls in TF32 where that is switched on (`torch.set_float32_matmul_precision("high")`).

    Args:
        card: A name that `hardware.accelerator` knows.
        fast: A dtype of `Accelerator.flops`.
    """
    found = accelerator(card)
    return found.peak(fast) / found.peak(slow)
