"""What comes from outside: which names exist, which numbers divide, which files can be read.

A `config.json`, a record and a snapshot are strangers' files. They are read by `read_json` and `read_bounded` alone,
which refuse in one sentence what is too large, too deep, torn, or says a field twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from os import PathLike

LARGEST = 2**40  # of any setting
MOST_TRIED = 10**6  # divisors that a message tries to find
LARGEST_FILE = 64 * 2**20  # bytes; a record of 64 ranks and 1,000 steps has some 30 MB
DEEPEST = 100  # lists and dictionaries inside of each other
_MOST_DIGITS = 400  # of a whole number; the largest float has 309
_CHUNK = 2**20
_SHOWN = 60  # characters of a value in a message
_LISTED = 16  # names in a message, where there are many


def one_of(what: str, name: object, known: Iterable[str]) -> str:
    """Return the name if it is known.

    Args:
        what: What is named, for the message.
    """
    known = list(known)
    if isinstance(name, str) and name in known:
        return name
    import difflib  # 10 ms that only a mistake should pay

    close = difflib.get_close_matches(str(name).lower()[:_SHOWN], known, n=3)
    some = [*known[:_LISTED], f"and {len(known) - _LISTED} others"] if len(known) > 2 * _LISTED else known
    hint = f"did you mean {', '.join(close)}?" if close else f"use one of {', '.join(some)}"
    raise ValueError(f"unknown {what} {shown(name)}; {hint}")


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


def shown(value: object) -> str:
    """Return a value as Python writes it, cut short."""
    text = repr(value[: 2 * _SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def read_bounded(path: str | PathLike, most: int = LARGEST_FILE) -> bytes:
    """Return what a file holds, and never read on where it does not end.

    Raises:
        ValueError: If it holds more than `most` bytes.
        OSError: If it cannot be read.
    """
    content = bytearray()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            content += chunk
            if len(content) > most:
                raise ValueError(f"{path} is too large to be read: it has more than {most >> 20} MiB")
    return bytes(content)


def read_json(path: str | PathLike, most: int = LARGEST_FILE) -> object:
    """Return what a JSON file says.

    Raises:
        ValueError: If it is no JSON, is larger than `most` bytes or nested too deep, or names a field twice.
        OSError: If it cannot be read.
    """
    try:
        content = read_bounded(path, most)
    except (ValueError, TypeError) as error:  # a name with a NUL is a ValueError without the name
        raise ValueError(
            f"{error}" if str(path) in str(error) else f"cannot read {shown(str(path))}: {error}"
        ) from None
    try:
        return parse_json(content)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def parse_json(text: str | bytes) -> object:
    """Return what a JSON text says; a ValueError says what is wrong with it, and does not repeat it."""
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        found = json.loads(text, object_pairs_hook=_once, parse_int=_short)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    level = [found]
    for _ in range(DEEPEST + 1):
        level = [x for each in level for x in _inside(each)]
        if not level:
            return found
    raise ValueError(f"it is nested too deep, in more than {DEEPEST} lists and dictionaries")


def json_text(content: object) -> str:
    """Return JSON that any reader takes, or raise a ValueError where a number is infinite or none at all."""
    try:
        return json.dumps(content, indent=1, allow_nan=False)
    except ValueError:
        raise ValueError(
            "a result is infinite or no number, which JSON cannot say: the input is out of bounds"
        ) from None


def _inside(found: object) -> Iterable[object]:
    return found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{shown(twice)} stands there twice, and one of the two would count")
    return found


def _short(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number has {len(digits):,} digits")
    return int(digits)
