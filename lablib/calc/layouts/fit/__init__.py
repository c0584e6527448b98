"""The inverse questions: what is the largest run that fits on these GPUs?

Largest micro-batch, longest sequence, fewest GPUs, and the cheapest change that makes a run fit. Each asks
`lablib.calc.memory` until it finds the limit.

    settings   a run on N GPUs of one type, what it needs and what it costs beside memory
    answers    the three largest numbers
    changes    what makes a run fit, the cheapest first

Read `answers` first. Chapter 01; `rung fit`.
"""

from lablib.calc.layouts.fit.answers import Answer, fewest_gpus, largest_micro_batch, last_within, longest_sequence
from lablib.calc.layouts.fit.changes import Change, cheapest_change
from lablib.calc.layouts.fit.settings import RunSpec, setup, size

__all__ = [
    "Answer",
    "Change",
    "RunSpec",
    "cheapest_change",
    "fewest_gpus",
    "largest_micro_batch",
    "last_within",
    "longest_sequence",
    "setup",
    "size",
]
