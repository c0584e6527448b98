"""The formulas of the course, one list: the sheet, the head of each chapter and a test are made from it.

    formula     what a formula has, and the job that the examples are computed for
    rung01 ...  the formulas of one rung each

Read `formula` first.
"""

import importlib
import pkgutil

from lablib.calc.formulas.formula import Formula, Job, job

__all__ = ["FORMULAS", "Formula", "Job", "job"]

#: By rung.
FORMULAS: dict[str, tuple[Formula, ...]] = {
    module.name.removeprefix("rung"): importlib.import_module(f"{__name__}.{module.name}").FORMULAS
    for module in pkgutil.iter_modules(__path__)
    if module.name.startswith("rung")
}
