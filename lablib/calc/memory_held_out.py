"""Configurations that nobody chose: drawn at random, outside of the grid on which the calculator was corrected.

Every miss of the grid was looked at until its cause was found, so the grid says how well the causes are understood.
What a configuration of yours will meet is better told by some that were never looked at. They are drawn by a seed;
whoever corrects the calculator because of one of them draws anew, with another seed.

    for case in held_out():
        print(case.name)
"""

from __future__ import annotations

import random

from lablib.calc.memory_cases import FACTORS, Case
from lablib.calc.memory_grid import RULES, grid
from lablib.calc.pairwise import Row, complete

#: The present draw. Raise it when the calculator was changed because of one of its configurations; keep the old file then.
SEED = 13
#: How many of each size: the larger ones run for minutes under fake tensors.
COUNTS = {"tiny": 30, "small": 10}
#: Papers have no peak, so their kernels are drawn less often.
KERNELS = ("hf", "hf", "toy", "toy", "paper")


def held_out(seed: int = SEED, counts: dict[str, int] | None = None) -> tuple[Case, ...]:
    """Return configurations that are not in the grid, the same for the same seed.

    Kernels, family, recipe and recomputation are drawn first, each value as likely as another; then the rest, among
    what the rules of the grid leave.

    Args:
        seed: Of the draw.
        counts: Size of the model to how many; None for `COUNTS`.
    """
    draw = random.Random(seed)
    seen = {case.name for case in grid()}
    found: list[Case] = []
    for size, count in (COUNTS if counts is None else counts).items():
        left = count
        while left:
            row = _row(draw, size)
            if row is None:
                continue
            case = Case(**row)
            # On real tensors scores of a thousand tokens squared take long, and show nothing that 64 do not.
            slow = size == "tiny" and case.attention == "plain" and case.seq > 64
            if slow or case.name in seen:
                continue
            seen.add(case.name)
            found.append(case)
            left -= 1
    return tuple(found)


def _row(draw: random.Random, size: str) -> Row | None:
    given: Row = {"size": size, "kernels": draw.choice(KERNELS)}
    given |= {factor: draw.choice(FACTORS[factor]) for factor in ("family", "recipe", "recompute")}
    row = complete(FACTORS, RULES, given, lambda row, item: draw.random())
    return None if row is None else {factor: row[factor] for factor in FACTORS}
