"""Units, written and read: bytes, counts, FLOPs, bandwidth, time.

Four conventions, each a common source of wrong answers:

- A GB is 1e9 bytes and a GiB is 2**30 bytes. They differ by 7.4 percent. Both are always named.
- K, M, B and T count things: "7B" is seven thousand million. They never mean bytes.
- A small b is a bit: a 400 Gb/s network card moves 50 GB/s.
- FLOPs are a count and FLOP/s are a rate.

Tokens of a sequence and of a step are counted in powers of two: "8k" is 8,192 and "4M" is 4,194,304, as PaLM's batch
of 2,048 sequences of 2,048 tokens is called 4M (arXiv 2204.02311, training setup). Tokens of a whole run are a count.
"""

from __future__ import annotations

import re

from lablib.calc.errors import shown

#: Of a number before its unit: what is smaller or larger is a slip, and its products are infinite.
SMALLEST, LARGEST = 1e-30, 1e30

KB, MB, GB, TB, PB = 10**3, 10**6, 10**9, 10**12, 10**15
KiB, MiB, GiB, TiB, PiB = 2**10, 2**20, 2**30, 2**40, 2**50

BYTE_UNITS = {
    "B": 1,
    "KB": KB,
    "kB": KB,
    "MB": MB,
    "GB": GB,
    "TB": TB,
    "PB": PB,
    "KiB": KiB,
    "MiB": MiB,
    "GiB": GiB,
    "TiB": TiB,
    "PiB": PiB,
}
COUNT_UNITS = {"": 1, "K": 10**3, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
TOKEN_UNITS = {"": 1, "k": 2**10, "K": 2**10, "M": 2**20}
SI_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18, "Z": 10**21}
TIME_UNITS = {
    "ns": 1e-9,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "days": 86400.0,
    "years": 365.25 * 86400.0,
}

_NUMBER = re.compile(r"\s*([+-]?(?:\d[\d,_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*?)\s*")


def gb(n: float) -> int:
    """Return `n` GB in bytes: `n` times 1e9."""
    return round(n * GB)


def gib(n: float) -> int:
    """Return `n` GiB in bytes: `n` times 2**30."""
    return round(n * GiB)


def parse_bytes(text: str | float) -> int:
    """Return the bytes of a size such as "80 GiB", "1.5TB" or "512 B"; a number is bytes already.

    Args:
        text: A number and a unit of `BYTE_UNITS`, capitals as written there; 0 needs none.

    Raises:
        ValueError: If there is no number or no unit, the unit is bits or a count, or the size is negative.
    """
    value, unit = _split(text, "a size", "80 GiB")
    if isinstance(text, str) and unit not in BYTE_UNITS and (value or unit):  # nothing is nothing in any unit
        hint = (
            "a small b is a bit, and memory is in bytes" if unit.endswith("b") else "GB is 1e9 and GiB is 2**30 bytes"
        )
        raise ValueError(f"{shown(text)} has no unit of bytes: use {', '.join(BYTE_UNITS)} ({hint})")
    return round(value * BYTE_UNITS.get(unit, 1))


def parse_count(text: str | float) -> int:
    """Return the count that "7B", "124M", "15.6T" or "2048" says.

    Args:
        text: A number, with K, M, B or T for 1e3, 1e6, 1e9, 1e12.
    """
    value, unit = _split(text, "a count", "7B")
    if unit not in COUNT_UNITS:
        raise ValueError(f"{shown(text)} is not a count: after the number use K, M, B, T or nothing")
    count = value * COUNT_UNITS[unit]
    # "15.6T" is 15.6 times 1e12 in floating point: accept its rounding, and no real fraction.
    if abs(count - round(count)) > 1e-9 * max(1.0, count):
        raise ValueError(f"{shown(text)} is not a whole number")
    return round(count)


def parse_tokens(text: str | float) -> int:
    """Return the tokens of a sequence or of a step that "8k", "8192" or "4M" says.

    Args:
        text: A number, with k or K for 1,024 and M for 1,048,576.
    """
    value, unit = _split(text, "a number of tokens", "8k")
    if unit not in TOKEN_UNITS:
        raise ValueError(f"{shown(text)} is not a number of tokens: after it use k (1,024), M (1,048,576) or nothing")
    tokens = value * TOKEN_UNITS[unit]
    if tokens != round(tokens):
        said = f", as {unit} is {TOKEN_UNITS[unit]:,}: write all its digits" if unit else ""
        raise ValueError(f"{shown(text)} is not a whole number of tokens{said}")
    return round(tokens)


def parse_bandwidth(text: str | float) -> float:
    """Return the bytes per second of "450 GB/s", "50 GiB/s", "400 Gb/s" or "400 Gbps"; a number is bytes per second.

    Args:
        text: A number and a unit; a small b is a bit, eight to the byte.
    """
    value, unit = _split(text, "a bandwidth", "450 GB/s")
    if not isinstance(text, str):
        return value
    if unit.endswith("/s") and unit[:-2] in BYTE_UNITS:
        return value * BYTE_UNITS[unit[:-2]]
    match = re.fullmatch(r"([kMGT]?)(?:b/s|bit/s|bps)", unit)
    if not match:
        raise ValueError(f"{shown(text)} has no unit of bandwidth: write it like '450 GB/s' or, in bits, '400 Gb/s'")
    return value * SI_PREFIXES[match[1]] / 8


def format_bytes(n: float, unit: str = "GB") -> str:
    """Return bytes in a named unit, with about three digits: "112 GB", "16.1 GB", "0.0625 GiB"."""
    if unit not in BYTE_UNITS:
        raise ValueError(f"unit={unit!r} must be one of {', '.join(BYTE_UNITS)}")
    return f"{_digits(n / BYTE_UNITS[unit])} {unit}"


def format_count(n: float) -> str:
    """Return a count with K, M, B or T: "8.03B", "124M", "512"."""
    value, prefix = _scale(n, {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12})
    return f"{_digits(value)}{prefix}"


def format_time(seconds: float) -> str:
    """Return a time in the largest unit that it fills: "20.9 ms", "1.42 s", "33.9 days"."""
    value, unit = _scale(seconds, TIME_UNITS)
    return f"{_digits(value)} {unit}"


def _split(text: str | float, what: str, example: str) -> tuple[float, str]:
    """Split text into its number, not negative and finite, and what follows it."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        value, unit = float(text), ""
    else:
        match = _NUMBER.fullmatch(text) if isinstance(text, str) else None
        if not match:
            raise ValueError(f"{shown(text)} is not {what}: write it like {example!r}")
        value, unit = float(match[1].replace(",", "").replace("_", "")), match[2]
    if not 0 <= value < float("inf"):
        raise ValueError(f"{shown(text)} must not be negative or infinite")
    if value and not SMALLEST <= value <= LARGEST:
        raise ValueError(f"{shown(text)} is out of bounds: a number is 0, or from {SMALLEST:g} to {LARGEST:g}")
    return value, unit


def _scale(n: float, units: dict[str, float]) -> tuple[float, str]:
    """Return n in the largest unit that it fills, or in the smallest one."""
    # 999.96 of a unit would print as "1,000": let the next unit have it.
    fits = [unit for unit, size in units.items() if abs(n) >= 0.9995 * size]
    unit = max(fits or [min(units, key=units.get)], key=units.get)
    return n / units[unit], unit


def _digits(value: float) -> str:
    """Write a number with about three digits and no needless zeros."""
    size = abs(value)
    if size and size < 1:
        return f"{value:.3g}"
    text = f"{value:,.{0 if size >= 100 else 1 if size >= 10 else 2}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
