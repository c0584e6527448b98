"""Planted defects: plain functions in the body of a class that has the name of the check they are for."""

from collections.abc import Callable


def listed(*checks: type) -> dict[str, list[Callable]]:
    """Return the functions of each class by the name of the check, each with its own name, lambdas too."""
    found = {}
    for check in checks:
        functions = {name: value for name, value in vars(check).items() if not name.startswith("_")}
        for name, function in functions.items():
            function.__name__ = name
        found[check.__name__] = list(functions.values())
    return found
