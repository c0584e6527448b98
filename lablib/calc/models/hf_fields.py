"""The fields of a `config.json`, each complaint with the field's name: what the readers of `hf_families` ask."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from pathlib import Path

from lablib.calc.errors import read_json, shown

#: A default that says: the field must be there.
REQUIRED = object()


#: Larger numbers are mistakes, and layers are counted one by one.
LARGEST, MOST_LAYERS = 2**40, 100_000


class Fields:
    """The fields of one configuration."""

    def __init__(self, fields: dict, where: str, defaults: dict[str, object] | None = None) -> None:
        self.fields, self.where, self.defaults = fields, where, defaults or {}
        self.read: set[str] = set()

    def get(self, name: str, default: object = None) -> object:
        """Return a field as it stands there, and note that its meaning is known."""
        self.read.add(name)
        return self.fields.get(name, default)

    def refuse_unread(self, names: Iterable[str]) -> None:
        """Refuse a field that means something and that nobody asked for; false, null, 0 and nothing mean nothing."""
        for name in names:
            if name not in self.read and self.fields.get(name):
                raise self.error(name, f"is {shown(self.fields[name])}, which is not known of this family")

    def error(self, field: str, problem: str) -> ValueError:
        """Return the error that says what is wrong with a field."""
        return ValueError(f"{self.where}: {field} {problem}")

    def whole(self, *names: str, default: object = REQUIRED, least: int = 1, most: int = LARGEST) -> int:
        """Return the whole number under the first of these names that is there; null counts as missing."""
        there = [name for name in names if self.get(name) is not None]
        if not there:
            default = self.defaults.get(names[0], default)
            if default is REQUIRED:
                state = "is null" if any(name in self.fields for name in names) else "is missing"
                raise self.error(names[0], f"{state} and must be a whole number")
            return default
        for name in there:
            value = self.fields[name]
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                large = isinstance(value, int) and value > most
                end = f" and at most {most:,}" if large or most != LARGEST else ""
                raise self.error(name, f"is {shown(value)} and must be a whole number, at least {least}{end}")
            if value != self.fields[there[0]]:
                first = f"{there[0]}={self.fields[there[0]]}"
                raise self.error(name, f"is {value} and contradicts {first}, which is the same field")
        return self.fields[there[0]]

    def needed(self, name: str, *, null: bool) -> None:
        """Refuse a field that is missing, or one that is null, where only the other of the two means something."""
        if null and name not in self.fields and name not in self.defaults:
            raise self.error(name, "is missing; null has a meaning, but a missing field has none")
        if not null and name in self.fields and self.fields[name] is None:
            raise self.error(name, "is null and must be a whole number")

    def flag(self, name: str, default: bool) -> bool:
        """Return a field that is true or false; only a missing one means the default."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"is {shown(value)} and must be true or false")
        return value

    def only(self, name: str, *allowed: object, why: str) -> None:
        """Refuse a field that changes the model in a way that is not counted."""
        value = self.get(name, allowed[0])
        if not any(value is one or (type(value) is type(one) and value == one) for one in allowed):
            raise self.error(name, f"is {shown(value)}: {why}")

    def divides(self, name: str, value: int, of: str, size: int) -> None:
        """Refuse a number that does not divide another one."""
        if size % value:
            raise self.error(name, f"is {value} and does not divide {of}={size}")

    def at_most(self, name: str, value: int, of: str, size: int) -> None:
        """Refuse a number that is larger than another one."""
        if value > size:
            raise self.error(name, f"is {value} and more than {of}={size}")


def load(source: object) -> dict:
    """Return the fields of a file."""
    if not isinstance(source, str | PathLike):
        raise ValueError(f"{type(source).__name__} is neither a dictionary nor the path of a config.json")
    path = Path(source)
    try:
        path = path / "config.json" if path.is_dir() else path
        fields = read_json(path)
    except OSError as error:
        raise ValueError(f"cannot read {str(path)[:200]}: {error.strerror}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds a {type(fields).__name__} and not a dictionary of fields")
    return fields
