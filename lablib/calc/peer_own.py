"""This course's calculator, as one more peer, asked and judged like the others.

Chapter: book/memory_calculator.md
"""

from __future__ import annotations

from functools import cache

from lablib.calc.memory_cases import Case
from lablib.calc.memory_verdict import predict
from lablib.calc.peer import Peer, first_reason, only_with_peak, state_terms

NAME = "this course"
CITATION = "lablib.calc.training_memory and lablib.calc.memory_timeline"


@cache
def _predicted(case: Case) -> dict:
    return predict(case)


def _covers(case: Case) -> str:
    return ""


def _states(case: Case) -> dict[str, float]:
    return state_terms(_predicted(case)["states"])


def _activations(case: Case) -> dict[str, float]:
    return {"kept": _predicted(case)["saved"]}


def _covers_total(case: Case) -> str:
    return first_reason(only_with_peak(case))


def _total(case: Case) -> dict[str, float]:
    return {"peak": _predicted(case)["peak"]}


PEERS = (
    Peer(NAME, "states", CITATION, _covers, _states),
    Peer(NAME, "activations", CITATION, _covers, _activations),
    Peer(NAME, "total", CITATION, _covers_total, _total),
)
