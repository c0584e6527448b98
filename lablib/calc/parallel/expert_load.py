"""How unevenly a router loads its experts, and what experts with a capacity drop.

Eight tokens with two of four experts each make 16 copies, 4 for an expert in the mean. If the loads are 8, 4, 3 and 1
and an expert takes 4, the first drops 4 of the 16. If two ranks hold two experts each, the first computes 12 copies
where 8 would be even, and the other waits.

Letters: T tokens that are routed together, E experts, k experts a token, C capacity, φ capacity factor. Chapter 13.

Sources: Lepikhin et al. 2020 (GShard, arXiv 2006.16668), section 2.2; Fedus et al. 2021 (Switch, arXiv 2101.03961),
section 2.2.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from lablib.calc.errors import check_whole, must_divide


def expert_capacity(tokens: int, num_experts: int, experts_per_token: int, factor: float) -> int:
    """Return the copies that an expert takes: `⌈ φ T k / E ⌉`.

    Args:
        tokens: T, of the tokens that are routed together.
        factor: φ, the capacity factor; 1 leaves no room above the mean.
    """
    for name, number in (("tokens", tokens), ("num_experts", num_experts), ("experts_per_token", experts_per_token)):
        check_whole(name, number, 1)
    if not factor > 0:
        raise ValueError(f"factor={factor} must be above 0; 1 is room for the mean")
    # Rounded first, so that 1.1 x 80 / 8 is 11 and not 12: 1.1 has no exact binary value.
    return math.ceil(round(factor * tokens * experts_per_token / num_experts, 6))


def dropped_share(loads: Sequence[int], capacity: int) -> float:
    """Return the share of copies that find their expert full: `Σ max(0, n_i - C) / Σ n_i`.

    Args:
        loads: Copies that chose each expert.
        capacity: C, copies that an expert takes.
    """
    _check_loads(loads)
    return sum(max(0, load - capacity) for load in loads) / sum(loads)


def random_dropped_share(tokens: int, num_experts: int, experts_per_token: int, factor: float) -> float:
    """Return the share of copies that a router without preferences drops, in the mean.

    Each token chooses an expert with chance k/E, so an expert's load is binomial:
    `E/(T k) · Σ_{n>C} (n - C) binomial(n; T, k/E)`.

    Args:
        tokens: T, of the tokens that are routed together.
        factor: φ, the capacity factor.
    """
    capacity = expert_capacity(tokens, num_experts, experts_per_token, factor)
    check_whole("experts_per_token", experts_per_token, 1, num_experts)
    p = experts_per_token / num_experts
    if p == 1:
        return max(0, tokens - capacity) / tokens
    mean, spread = tokens * p, math.sqrt(tokens * p * (1 - p))
    first = max(capacity + 1, int(mean - 12 * spread))  # beyond 12 standard deviations nothing is left to add
    last = min(tokens, int(mean + 12 * spread) + 12)
    over = math.fsum((n - capacity) * _binomial(n, tokens, p) for n in range(first, last + 1))
    return over / mean


def _binomial(n: int, tokens: int, p: float) -> float:
    ways = math.lgamma(tokens + 1) - math.lgamma(n + 1) - math.lgamma(tokens - n + 1)
    return math.exp(ways + n * math.log(p) + (tokens - n) * math.log1p(-p))


def random_loads(tokens: int, num_experts: int, experts_per_token: int, *, seed: int = 0) -> list[int]:
    """Return how many tokens chose each expert, for one draw of a router without preferences."""
    check_whole("tokens", tokens, 1)
    check_whole("experts_per_token", experts_per_token, 1, num_experts)
    draw, loads = random.Random(seed), [0] * num_experts
    for _ in range(tokens):
        for expert in draw.sample(range(num_experts), experts_per_token):
            loads[expert] += 1
    return loads


def rank_loads(loads: Sequence[int], ep: int) -> list[int]:
    """Return the copies that each of ep ranks computes; rank i holds the i-th part of the experts."""
    _check_loads(loads)
    check_whole("ep", ep, 1)
    must_divide("ep", ep, "num_experts", len(loads))
    held = len(loads) // ep
    return [sum(loads[first : first + held]) for first in range(0, len(loads), held)]


def imbalance(loads: Sequence[int], ep: int) -> float:
    """Return the copies of the busiest rank over the mean, `max_j n_j / (Σ n_j / e)`: how much longer all ranks wait."""
    ranks = rank_loads(loads, ep)
    return max(ranks) / (sum(ranks) / ep)


def _check_loads(loads: Sequence[int]) -> None:
    if not len(loads) or min(loads) < 0 or not sum(loads):
        raise ValueError(f"loads={list(loads)} must be a number for each expert, none negative and one above 0")
