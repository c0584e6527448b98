"""Validation errors: which names exist, and which numbers divide."""

from __future__ import annotations

import math
from collections.abc import Iterable

LARGEST = 2**40  # of any setting
MOST_TRIED = 10**6  # divisors that a message tries to find


def one_of(what: str, name: object, known: Iterable[str]) -> str:
    """Return the name if it is known.

    Args:
        what: What is named, for the message.
    """
    known = list(known)
    if isinstance(name, str) and name in known:
        return name
    import difflib  # 10 ms that only a mistake should pay

    close = difflib.get_close_matches(str(name).lower(), known, n=3)
    hint = f"did you mean {', '.join(close)}?" if close else f"use one of {', '.join(known)}"
    raise ValueError(f"unknown {what} {name!r}; {hint}")


def must_divide(name: str, value: int, of: str, size: int) -> None:
    """Raise a ValueError that names both factors and lists what divides, unless `value` divides `size`."""
    if size % value:
        # Large sizes have many divisors: the ones near the value are of use.
        small = [n for n in range(1, min(math.isqrt(size), MOST_TRIED) + 1) if size % n == 0]
        divisors = {n for pair in ((n, size // n) for n in small) for n in pair if n <= 8 * value}
        near = sorted(sorted(divisors, key=lambda n: (abs(n - value), n))[:6])
        raise ValueError(f"{name}={value} does not divide {of}={size}; use {either(near)}")


def check_whole(name: str, value: object, least: int, most: int = LARGEST) -> None:
    """Raise a ValueError unless a value is an integer in a range; bools and floats are rejected."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
    if value > most:
        raise ValueError(f"{name}={value:,} is more than anybody has: use at most {most:,}")


def check_flag(name: str, value: object) -> None:
    """Raise a ValueError unless a value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def check_stage(stage: object, pp: int) -> None:
    """Raise a ValueError unless a pipeline has such a stage."""
    if isinstance(stage, int) and not isinstance(stage, bool) and 0 <= stage < pp:
        return
    if pp == 1:
        raise ValueError(f"stage={stage!r}: with pp=1 there is one stage, 0; leave stage out, or set pp")
    raise ValueError(f"stage={stage!r} is not one of the pp={pp} stages; use 0 to {pp - 1}")


def plural(count: int, noun: str) -> str:
    """Return how many as text: "1 token", "8,192 tokens"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def either(options: Iterable[object]) -> str:
    """Return options as text: "1, 2 or 4"."""
    *most, last = map(str, options)
    return f"{', '.join(most)} or {last}" if most else last
