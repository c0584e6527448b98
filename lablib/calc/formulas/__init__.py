"""The formulas of the course, one list: the sheet, the end of each chapter and a test are made from it.

    formula     what a formula has
    values      the job that the examples are computed for, and the letters of each rung's equations in it
    sheet       the formulas

Read `formula` first.
"""

from lablib.calc.formulas.formula import Formula
from lablib.calc.formulas.sheet import FORMULAS
from lablib.calc.formulas.values import Job, job, symbol_values

__all__ = ["FORMULAS", "Formula", "Job", "job", "symbol_values"]
