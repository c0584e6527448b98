"""Read what an answer returned, whatever type it has: numbers, sequences, and values with names."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from lablib.checks.judging.guard import MOST_VALUES, Wrong


def whole(value: object, what: str = "The answer") -> int:
    """Return a number as an int, whatever type it has; raise `Wrong` if it is not whole."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = as_float(value, what)
    if not number.is_integer():
        raise Wrong(f"{what} should be a whole number, and is {number:g}.")
    return int(number)


def numbers(values: object, what: str = "The answer") -> list:
    """Return a sequence as a list, whatever type it has; raise `Wrong` if it is none."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, str | Mapping) or not hasattr(values, "__iter__"):
        raise Wrong(f"{what} should be a list, and is {str(values)[:200]!r}.")
    found = list(islice(values, MOST_VALUES + 1))
    if len(found) > MOST_VALUES:
        raise Wrong(f"{what} has more than {MOST_VALUES:,} values.")
    return found


def close(answer: object, truth: float, *, rel: float = 1e-6) -> bool:
    """Say whether a learner's number equals the truth to a relative tolerance."""
    return abs(as_float(answer, "The answer") - truth) <= rel * max(abs(truth), 1e-12)


def by_name(got: object, *names: str) -> Mapping[str, Any] | None:
    """Return these values from a dictionary, an object's attributes, or a sequence in this order.

    None is returned if one is missing.
    """
    if isinstance(got, Mapping):
        return got if set(names) <= set(got) else None
    if all(hasattr(got, name) for name in names):
        return {name: getattr(got, name) for name in names}
    if isinstance(got, Sequence) and not isinstance(got, str) and len(got) == len(names):
        return dict(zip(names, got, strict=True))
    return None


def some(numbers: list[int]) -> str:
    """Return a few numbers as they are, and many as how many they are."""
    return f"{numbers}" if len(numbers) < 4 else f"[{len(numbers)} of them]"


def as_float(value: object, what: str = "The answer") -> float:
    """Return a number as a float, whatever type it has; raise `Wrong` if it is none."""
    if getattr(value, "size", 0) == 1 and hasattr(value, "item"):  # numpy's array of one number
        value = value.item()
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise Wrong(f"{what} should be a number, and is {str(value)[:200]!r}.") from None
