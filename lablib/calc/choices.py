"""Messages for settings that cannot be: which names exist, and which numbers divide.

Chapter: book/01_why_distributed.md
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def one_of(what: str, name: object, known: Iterable[str]) -> str:
    """Return the name if it is known.

    Args:
        what: What is named, for the message.
        name: The name.
        known: The names that exist.

    Raises:
        ValueError: If it is not; the message suggests close names, or lists all.
    """
    known = list(known)
    if isinstance(name, str) and name in known:
        return name
    import difflib  # 10 ms that only a mistake should pay

    close = difflib.get_close_matches(str(name).lower(), known, n=3)
    hint = f"did you mean {', '.join(close)}?" if close else f"use one of {', '.join(known)}"
    raise ValueError(f"unknown {what} {name!r}; {hint}")


def must_divide(name: str, value: int, of: str, size: int) -> None:
    """Raise a ValueError that names both factors and lists what divides, unless `value` divides `size`.

    Args:
        name: What divides.
        value: By how much.
        of: What is divided.
        size: Its size.

    Raises:
        ValueError: If it does not.
    """
    if size % value:
        # Large sizes have many divisors: the ones near the value are of use.
        small = [n for n in range(1, math.isqrt(size) + 1) if size % n == 0]
        divisors = {n for pair in ((n, size // n) for n in small) for n in pair if n <= 8 * value}
        near = sorted(sorted(divisors, key=lambda n: (abs(n - value), n))[:6])
        raise ValueError(f"{name}={value} does not divide {of}={size}; use {either(near)}")


def either(options: Iterable[object]) -> str:
    """Return options as text: "1, 2 or 4".

    Args:
        options: At least one.
    """
    *most, last = map(str, options)
    return f"{', '.join(most)} or {last}" if most else last
