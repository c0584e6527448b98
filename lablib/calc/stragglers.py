"""Stragglers: a collective ends with its slowest rank, so rare delays of one become common delays of all.

Chapter: book/10_communication.md. Source: Dean and Barroso 2013, The Tail at Scale.
"""

from __future__ import annotations

import math

from lablib.calc.comm import check_numbers


def chance_of_any(ranks: int, chance: float) -> float:
    """Return the chance that at least one of n independent ranks is slow, 1 - (1 - p)^n.

    Args:
        ranks: n, at least 1.
        chance: p, that a given one is slow; 0 to 1.

    Raises:
        ValueError: If a number is out of range.
    """
    check_numbers(ranks, chance=chance)
    if chance > 1:
        raise ValueError(f"chance={chance} must be from 0 to 1")
    return 1.0 if chance == 1 else -math.expm1(ranks * math.log1p(-chance))


def expected_slowest(ranks: int, *, base: float, jitter: float) -> float:
    """Return the mean time of the slowest of n ranks, T + j · (1 + 1/2 + ... + 1/n).

    Every rank takes T and a delay of its own, independent of the others and exponentially distributed with mean j:
    the largest of n such delays is j · H_n on average, and H_n grows like ln n.

    Args:
        ranks: n, at least 1.
        base: T, in any unit.
        jitter: j, in the same unit.
    """
    check_numbers(ranks, base=base, jitter=jitter)
    return base + jitter * math.fsum(1 / k for k in range(1, ranks + 1))
