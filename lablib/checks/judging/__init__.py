"""What every check is made of: a guard around the answer, readers of what it returned, a table of mistakes, a verdict.

    guard       loops that never end, answers that come one by one
    values      numbers, sequences and named values of any type; orders of samples
    table       `compare`: cases, the truth, and what each known mistake would answer; `refuse`, `recognize`: one answer
    ranks       an answer on real ranks, and what each rank says of jobs with a fault to find
    verdict     `check`: passed, not attempted or wrong, and the hints

Read `table` first.
"""

from lablib.checks.judging.guard import Sealed, Wrong, in_answer, own_line, refuse_peeking
from lablib.checks.judging.ranks import agreed, ask_ranks, on_ranks
from lablib.checks.judging.table import Row, Slip, compare, name_the_mistake, recognize, refuse
from lablib.checks.judging.values import (
    NEW,
    Order,
    as_float,
    by_name,
    chosen,
    close,
    close_bytes,
    epoch_orders,
    numbers,
    pair,
    some,
    whole,
)
from lablib.checks.judging.verdict import Verdict, check

__all__ = [
    "NEW",
    "Order",
    "Row",
    "Sealed",
    "Slip",
    "Verdict",
    "Wrong",
    "agreed",
    "as_float",
    "ask_ranks",
    "by_name",
    "check",
    "chosen",
    "close",
    "close_bytes",
    "compare",
    "epoch_orders",
    "in_answer",
    "name_the_mistake",
    "numbers",
    "on_ranks",
    "own_line",
    "pair",
    "recognize",
    "refuse",
    "refuse_peeking",
    "some",
    "whole",
]
