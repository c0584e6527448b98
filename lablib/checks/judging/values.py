"""Read what an answer returned, whatever type it has: numbers, sequences, and values with names; orders to give it."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

from lablib.checks.judging.guard import MOST_VALUES, Wrong

Order = Callable[[int], list[int]]

#: Dice that no seed repeats: what they draw is in no table, so that a check has cases that nobody has seen.
NEW = random.SystemRandom()

#: A run of some steps asks for a few epochs, or at most for one a sample.
_MOST_EPOCHS = 20_000


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


def close_bytes(answer: object, truth: float) -> bool:
    """Say whether a learner's number of bytes is right; it may be rounded to a whole."""
    return close(answer, truth) or abs(float(answer) - truth) < min(1, truth / 100)  # type: ignore[arg-type]


def by_name(got: object, *names: str, otherwise: str = "") -> Mapping[str, Any]:
    """Return these values from a dictionary, an object's attributes, or a sequence in this order.

    Raises:
        Wrong: If one is missing; it says `otherwise`, or that a dictionary with these keys is asked.
    """
    if isinstance(got, Mapping):
        if set(names) <= set(got):
            return got
    elif all(hasattr(got, name) for name in names):
        return {name: getattr(got, name) for name in names}
    elif isinstance(got, Sequence) and not isinstance(got, str) and len(got) == len(names):
        return dict(zip(names, got, strict=True))
    raise Wrong(otherwise or f"Return a dictionary with the keys {', '.join(names)}.")


def pair(got: object, otherwise: str, *names: str) -> tuple[Any, Any]:
    """Return the two parts of an answer, whatever holds them: a sequence, a dataclass, or these names.

    Raises:
        Wrong: If there are not two; it says `otherwise`.
    """
    if names and (isinstance(got, Mapping) or all(hasattr(got, name) for name in names)):
        named = by_name(got, *names, otherwise=otherwise)
        return named[names[0]], named[names[1]]
    if is_dataclass(got) and not isinstance(got, type):
        got = [getattr(got, field.name) for field in fields(got)]
    several = hasattr(got, "__iter__") and not isinstance(got, str | Mapping) and getattr(got, "ndim", 1)
    parts = list(got) if several else []  # type: ignore[call-overload]
    if len(parts) != 2:
        raise Wrong(otherwise)
    return parts[0], parts[1]


def chosen(given: object, names: Iterable[str], otherwise: str) -> set[str]:
    """Return the names that an answer chooses: a collection, one name, or a truth value for each.

    Raises:
        Wrong: If it chooses something else; it says `otherwise`.
    """
    if isinstance(given, Mapping):
        given = [name for name, there in given.items() if there]
    found = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [None]
    if not all(isinstance(name, str) and name in names for name in found):
        raise Wrong(otherwise)
    return {str.__str__(name) for name in found}  # also members of a str Enum


def some(values: list[int], most: int = 6) -> str:
    """Return a few numbers as they are, and of many the first ones and the last."""
    return ", ".join(map(str, values if len(values) <= most else [*values[:4], "...", values[-1]]))


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


def epoch_orders(dice: random.Random, count: int) -> Order:
    """Return a shuffled order for each epoch, the same whenever it is asked for, which notices a loop without end."""
    seed, asked = dice.random(), 0

    def epoch_order(epoch: int) -> list[int]:
        nonlocal asked
        asked += 1
        if asked > _MOST_EPOCHS:
            raise Wrong(f"epoch_order was called {_MOST_EPOCHS:,} times in one run: your loop does not end.")
        samples = list(range(count))
        random.Random(f"{seed} {whole(epoch, 'The number of an epoch')}").shuffle(samples)
        return samples

    return epoch_order
