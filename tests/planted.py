"""Planted defects: plain functions in the body of a class that has the name of the check they are for.

`right` among them is no defect: it solves the exercise in another way than the course's solution.
"""

from collections.abc import Callable


def listed(*checks: type) -> tuple[dict[str, list[Callable]], dict[str, Callable]]:
    """Return the defects and the second solutions by the name of the check; a defect has its own name, if a lambda."""
    defects, solutions = {}, {}
    for check in checks:
        functions = {name: value for name, value in vars(check).items() if not name.startswith("_")}
        solutions[check.__name__] = functions.pop("right")
        for name, function in functions.items():
            function.__name__ = name
        defects[check.__name__] = list(functions.values())
    return defects, solutions
