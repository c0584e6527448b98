"""The inverse questions: what is the largest run that fits on these GPUs?

Largest micro-batch, longest sequence, fewest GPUs, and the cheapest change that makes a run fit. Each asks
`lablib.calc.memory` until it finds the limit.

Read `answers` first. Chapter 01; `rung fit`.
"""

from lablib.calc.layouts.fit.answers import Answer, fewest_gpus, largest_micro_batch, longest_sequence
from lablib.calc.layouts.fit.changes import Change, cheapest_change
from lablib.calc.layouts.fit.settings import MEANING, Setup, counted, setup, size, unproven

__all__ = [
    "MEANING",
    "Answer",
    "Change",
    "Setup",
    "cheapest_change",
    "counted",
    "fewest_gpus",
    "largest_micro_batch",
    "longest_sequence",
    "setup",
    "size",
    "unproven",
]
