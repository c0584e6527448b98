"""How the planner's time model is fitted and judged, on step times that others measured and published.

    measured_runs()                        every row, in the form of the planner's own `Run`
    judge(measured_runs())                 each row predicted by constants that never saw its source
    python -m lablib.proof.planner         fit anew, judge, and say what moved; --write keeps it
    python -m lablib.proof.planner --rows FILE   judge the shipped constants on rows of your own

    runs       rows of `measured_runs.csv`, and where each source's are from
    tables     rows of two sources as they publish them
    fitting    least squares of log ratios
    verdicts   errors, one constant beside ours, ranking, what each term earns
    table      all of it as one file, which the page and the planner's answers quote

Read `fitting` first. The page "How wrong is the planner?" shows the result.
"""

from lablib.proof.planner.fitting import Row, fit_rates, judge, rows_of
from lablib.proof.planner.runs import SOURCES, Source, is_fitted, measured_runs, runs_of
from lablib.proof.planner.table import PLANNER_TABLE, planner_table, read_planner_table
from lablib.proof.planner.verdicts import Errors, concordance, errors, one_constant, without_each_term

__all__ = [
    "PLANNER_TABLE",
    "SOURCES",
    "Errors",
    "Row",
    "Source",
    "concordance",
    "errors",
    "fit_rates",
    "is_fitted",
    "judge",
    "measured_runs",
    "one_constant",
    "planner_table",
    "read_planner_table",
    "rows_of",
    "runs_of",
    "without_each_term",
]
