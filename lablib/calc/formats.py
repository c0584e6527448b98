"""The number formats of training, and where they lie on one axis.

A number is a sign, an exponent field e of E bits and a mantissa field f of M bits:

    normal     e > 0    (-1)^s * 2^(e - bias) * (1 + f / 2^M)
    subnormal  e = 0    (-1)^s * 2^(1 - bias) * (f / 2^M)

The exponent bits decide the range, the mantissa bits the precision: between two powers of two there are 2^M values,
so the gap after 1 is `epsilon = 2^-M`.

What the largest codes mean differs, and is the `specials` of a format:

| specials | codes that are no numbers |
|---|---|
| ieee | the largest e: infinity with f = 0, NaN with any other f |
| fn | all ones: NaN; there is no infinity, so E4M3 reaches 448 and not 240 |
| fnuz | the code of minus zero: NaN; there is neither infinity nor minus zero |
| none | none |

Sources: IEEE 754-2019; OCP 8-bit Floating Point Specification (E4M3, E5M2); Micikevicius et al. 2022
(arXiv 2209.05433); OCP Microscaling Formats Specification (E8M0, E2M1, and blocks of 32).

Chapter: book/08_mixed_precision.md
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lablib.calc.choices import one_of
from lablib.calc.number_format import Format

__all__ = ["FORMATS", "Format", "Span", "find_format", "significant_bits", "spans"]


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

    Raises:
        ValueError: If there is none of this name; it lists those that there are.
    """
    by_dtype = {fmt.torch_name: key for key, fmt in FORMATS.items() if fmt.torch_name}
    key = by_dtype.get(name.removeprefix("torch."), name)
    return FORMATS[one_of("format", key, FORMATS)]


@dataclass(frozen=True)
class Span:
    """Where a format lies on an axis of powers of two.

    Attributes:
        name: Of the format.
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


def spans(names: Iterable[str] = ("fp32", "tf32", "bf16", "fp16", "e5m2", "e4m3")) -> list[Span]:
    """Return the spans of formats, for one axis.

    Args:
        names: Of formats.

    Raises:
        ValueError: If a name is unknown.
    """
    found = [find_format(name) for name in names]
    return [
        Span(
            fmt.name,
            math.log2(fmt.min_subnormal),
            math.log2(fmt.min_normal),
            math.log2(fmt.max),
            fmt.mantissa_bits + 1,
        )
        for fmt in found
    ]


def significant_bits(fmt: Format, x: float) -> float:
    """Return the bits that a format keeps of a number: M + 1 in its normal range, fewer below it, 0 outside.

    Args:
        fmt: The format.
        x: A number.
    """
    if not fmt.min_subnormal <= abs(x) <= fmt.max:
        return 0.0
    return math.floor(math.log2(abs(x) / fmt.ulp(x))) + 1
