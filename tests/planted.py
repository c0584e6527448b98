"""Planted defects: plain functions in the body of a class that has the name of the check they are for.

Names among them that begin with `right` are no defects: they solve the exercise in other ways than the course's solution.
"""

import functools
import inspect
import numbers
import os
import random
from collections.abc import Callable

import numpy as np


def listed(*checks: type) -> tuple[dict[str, list[Callable]], dict[str, list[Callable]]]:
    """Return the defects and the other solutions by the name of the check; each has its own name, if a lambda."""
    defects, solutions = {}, {}
    for check in checks:
        functions = {name: value for name, value in vars(check).items() if not name.startswith("_")}
        for name, function in functions.items():
            function.__name__ = name
        solutions[check.__name__] = [functions.pop(name) for name in list(functions) if name.startswith("right")]
        defects[check.__name__] = list(functions.values())
    return defects, solutions


def share_of(answers: list[Callable]) -> list[Callable]:
    """Return half of these answers where a run takes a share of the checks, and one that has no idea among them."""
    first = random.choice([one for one in answers if one.__name__.startswith("without_the_idea")] or answers)
    others = [one for one in answers if one is not first]
    return [first, *random.sample(others, len(others) // min(2, int(os.environ.get("LABLIB_SHARE", 1))))]


def asked(solution: Callable, **others: object) -> Callable:
    """Return the answer of a solution to another question.

    Args:
        solution: Of positional arguments.
        others: Arguments by name: what they are, or a function that makes them of the arguments that it names.
    """

    def answer(*case: object) -> object:
        given = _named(solution, case)
        return solution(**given | {n: _made(other, given) if callable(other) else other for n, other in others.items()})

    return answer


def told(solution: Callable, change: Callable) -> Callable:
    """Return the answer of a solution, changed by a function of it and of the arguments that the function names."""

    def answer(*case: object) -> object:
        return _made(functools.partial(change, solution(*case)), _named(solution, case))

    return answer


def _named(solution: Callable, case: tuple) -> dict[str, object]:
    return dict(zip(inspect.signature(solution).parameters, case, strict=False))


def _made(function: Callable, given: dict[str, object]) -> object:
    return function(**{name: given[name] for name in inspect.signature(function).parameters})


def of_numpy(value: object) -> object:
    """Return plain data with numpy's numbers for Python's, and tuples for lists."""
    if isinstance(value, bool) or not isinstance(value, numbers.Number):
        return _inside(value, of_numpy)
    return np.int64(value) if isinstance(value, int) else np.float64(value) if isinstance(value, float) else value


def of_floats(value: object) -> object:
    """Return plain data with floats for whole numbers, and lists for tuples."""
    if isinstance(value, bool) or not isinstance(value, int) or value != int(float(value)):
        return _inside(value, of_floats)
    return float(value)


def answers_with(convert: Callable, solution: Callable) -> Callable:
    """Return a solution whose results are of other types."""

    @functools.wraps(solution)
    def answer(*args: object, **kwargs: object) -> object:
        return convert(solution(*args, **kwargs))

    return answer


def _inside(value: object, convert: Callable) -> object:
    if type(value) is dict:
        return {key: convert(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        other = tuple if convert is of_numpy else list
        return other(convert(each) for each in value)
    return value
