"""What the fields of a record may be, checked once, where it is read: what comes after it relies on them.

    check_fields(found, {"ranks": WHOLE, "gpus": [TEXT], "predicted?": {"step?": POSITIVE}}, path)

A shape is a kind, a list with the shape of each entry, or a dictionary of shapes by name. A name that ends in "?" may be
missing or null, and fields without a name may be anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lablib.calc.errors import shown

#: Of numbers; two of them may be divided by each other.
SMALLEST, LARGEST = 1e-30, 1e30


class Kind(NamedTuple):
    """What a value is called, and whether one is it."""

    name: str
    holds: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


TEXT = Kind("text", lambda value: isinstance(value, str))
WHOLE = Kind("a whole number, 0 or more", lambda value: type(value) is int and 0 <= value <= LARGEST)
NUMBER = Kind("a number, 0 or more", lambda value: _is_number(value) and 0 <= value <= LARGEST)
POSITIVE = Kind("a number above 0", lambda value: _is_number(value) and SMALLEST <= value <= LARGEST)
#: What a run wrote down, which may have diverged.
FLOAT = Kind("a number", lambda value: _is_number(value) and not LARGEST < abs(value) < math.inf)


def check_fields(found: object, shape: Any, path: Path) -> Any:
    """Return what was read from a file, or raise a ValueError that names the file and the first field that is wrong."""
    if problem := _wrong(found, shape, ""):
        raise ValueError(f"{path}: {problem}")
    return found


def _wrong(found: Any, shape: Any, name: str) -> str:
    what = name or "it"
    if isinstance(shape, Kind):
        return "" if shape.holds(found) else f"{what} is {shown(found)} and must be {shape.name}"
    kind, called = (list, "list") if isinstance(shape, list) else (dict, "dictionary")
    if not isinstance(found, kind):
        return f"{what} is {shown(found)} and must be a {called}"
    if kind is list:
        problems = (_wrong(each, shape[0], f"{name}[{number}]") for number, each in enumerate(found))
        return next(filter(None, problems), "")
    for key, inner in shape.items():
        field = key.removesuffix("?")
        inside = f"{name}.{field}" if name else field
        if field != key and found.get(field) is None:
            continue
        if field not in found:
            return f"{inside} is missing"
        if problem := _wrong(found[field], inner, inside):
            return problem
    return ""
