"""One formula of the course: the function that computes it, and its example."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType

from lablib.calc.formulas.values import Job, symbol_values
from lablib.calc.units import GB, MB


@dataclass(frozen=True)
class Formula:
    """One formula: what it gives, the function that computes it, and its example. Its TeX is the labelled equation's.

    tests/test_formulas.py evaluates that equation for drawn jobs and compares it with `compute`.

    Attributes:
        label: The label of the displayed equation in the chapter; "eq-05-..." is of rung 05.
        symbols: What its letters mean, "K: bytes of optimizer state of a parameter; N: ranks".
        compute: A call of one function of lablib. Its parameters are the symbols of the equation, as
            `lablib.calc.formulas.symbol_values` gives them; the full name of a function of `lablib.toys`, which calc does not
            import, where that computes it.
        text: The example, a format string: {} is the value, {GB}, {MB}, {billions}, {ms} the value in that unit, {GB16}
            and {MB16} of so many 16-bit values; symbols by name, and {job}.
        page: The page of the book with the derivation; empty for the rung's chapter.
        line: Which line of an equation of several; None takes all.
        called: What `symbol_values` calls a symbol, where two equations of a rung mean different things by one letter.
        within: Relative tolerance of the comparison, where the equation leaves something out.
    """

    label: str
    name: str
    symbols: str
    compute: Callable[..., object] | str
    text: str
    page: str = ""
    line: int | None = None
    called: Mapping[str, str] = field(default_factory=dict, compare=False)
    within: float = 1e-9

    @property
    def rung(self) -> str:
        """Return the rung, "05"."""
        return self.label.split("-")[1]

    @property
    def code(self) -> str:
        """Return the full name of the function that computes it: the first of lablib's that `compute` calls."""
        if isinstance(self.compute, str):
            return self.compute
        made = next(_called(self.compute.__code__, self.compute.__globals__))
        return f"{made.__module__}.{made.__qualname__}"

    def given(self, symbols: dict[str, object]) -> dict[str, object]:
        """Return the symbols of this formula among all of its rung's."""
        if isinstance(self.compute, str):
            return {}
        return {name: symbols[self.called.get(name, name)] for name in inspect.signature(self.compute).parameters}

    def example(self, job: Job) -> str:
        """Return what it gives for a job, with the unit."""
        symbols = symbol_values(self.rung, job)
        given = self.given(symbols)
        value = None if isinstance(self.compute, str) else self.compute(**given)
        number = value if isinstance(value, int | float) else 0
        units = {"GB": number / GB, "MB": number / MB, "billions": number / 1e9, "ms": 1e3 * number}
        units |= {"hours": number / 3600, "days": number / 86400}
        units |= {"GB16": 2 * number / GB, "MB16": 2 * number / MB}
        return self.text.format(value, job=job, **(symbols | units | given))


def _called(code: CodeType, names: dict[str, object]) -> Iterator[Callable]:
    """Yield the functions of lablib that some code calls, and in place of one of the sheet's own what that calls."""
    for name in code.co_names:
        found = names.get(name)
        if callable(found) and found.__module__ == "lablib.calc.formulas.sheet":
            yield from _called(found.__code__, names)
        elif callable(found) and found.__module__.startswith("lablib."):
            yield found
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _called(inner, names)
