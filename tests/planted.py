"""Planted defects: plain functions in the body of a class that has the name of the check they are for."""

from collections.abc import Callable


def listed(*checks: type) -> dict[str, list[Callable]]:
    """Return the functions of each class, by the name of the check."""
    return {
        check.__name__: [value for name, value in vars(check).items() if not name.startswith("_")]
        for check in checks
    }
