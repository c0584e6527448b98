"""The alpha-beta-gamma time of every collective algorithm, and the size at which one overtakes another.

A message of s bytes takes α + s/W; adding s bytes up takes γ·s. So the time of an algorithm on S bytes is

    T = rounds · α + passes · S/W + sums · γ · S

with three numbers that depend on n alone: the rounds one waits for, how many times S bytes pass the busiest rank, and
how many times S bytes are added one after the other. Each rank sends one message and receives one at a time, in both
directions at full bandwidth.

Chapter: book/10_communication.md. Paper: Thakur, Rabenseifner and Gropp 2005.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lablib.calc.collective_costs import ALGORITHMS
from lablib.calc.comm import check_numbers


class Terms(NamedTuple):
    """What multiplies α, S/W and γ·S.

    Attributes:
        rounds: Latencies one after the other.
        passes: How many times S bytes pass the busiest rank, one after the other.
        sums: How many times S bytes are added there.
    """

    rounds: float
    passes: float
    sums: float

    def __add__(self, other: Terms) -> Terms:
        """Return the terms of one algorithm after the other."""
        return Terms(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def seconds(self, size: float, *, bandwidth: float, latency: float = 0.0, gamma: float = 0.0) -> float:
        """Return T = rounds · α + passes · S/W + sums · γ · S.

        Args:
            size: S in bytes.
            bandwidth: W in bytes per second, per direction.
            latency: α in seconds.
            gamma: γ in seconds per byte.
        """
        return self.rounds * latency + size * (self.passes / bandwidth + self.sums * gamma)


def _levels(n: int) -> int:
    return n.bit_length() - 1


def _up(n: int) -> int:
    return (n - 1).bit_length()


def _fold(n: int) -> Terms:
    """Before and after an algorithm for a power of two, when n is none: S bytes to a partner, and S back."""
    return Terms(0, 0, 0) if n & (n - 1) == 0 else Terms(2, 2, 1)


def _halving(n: int) -> Terms:
    power = 1 << _levels(n)
    return Terms(2 * _levels(n), 2 * (power - 1) / power, (power - 1) / power) + _fold(n)


_TERMS: dict[str, Callable[[int], Terms]] = {
    "ring_reduce_scatter": lambda n: Terms(n - 1, (n - 1) / n, (n - 1) / n),
    "ring_all_gather": lambda n: Terms(n - 1, (n - 1) / n, 0),
    "ring_all_reduce": lambda n: Terms(2 * (n - 1), 2 * (n - 1) / n, (n - 1) / n),
    "recursive_doubling_all_reduce": lambda n: Terms(_levels(n), _levels(n), _levels(n)) + _fold(n),
    "halving_doubling_all_reduce": _halving,
    "tree_broadcast": lambda n: Terms(_up(n), _up(n), 0),
    "tree_reduce": lambda n: Terms(_up(n), _up(n), _up(n)),
    "tree_all_reduce": lambda n: Terms(2 * _up(n), 2 * _up(n), _up(n)),
    "naive_all_reduce": lambda n: Terms(2 * (n - 1), 2 * (n - 1), n - 1),
    "pairwise_all_to_all": lambda n: Terms(n - 1, (n - 1) / n, 0),
}


def terms(algorithm: str, ranks: int) -> Terms:
    """Return what multiplies α, S/W and γ·S.

    Args:
        algorithm: One of `lablib.calc.collective_costs.ALGORITHMS`.
        ranks: n, at least 1.

    Raises:
        ValueError: If the algorithm is unknown or there is no rank.
    """
    check_numbers(ranks)
    if algorithm not in _TERMS:
        raise ValueError(f"algorithm={algorithm!r} is unknown; use one of {', '.join(ALGORITHMS)}")
    return _TERMS[algorithm](ranks)


def collective_time(
    algorithm: str, size: float, ranks: int, *, bandwidth: float, latency: float = 0.0, gamma: float = 0.0
) -> float:
    """Return the seconds of a collective.

    Args:
        algorithm: One of `lablib.calc.collective_costs.ALGORITHMS`.
        size: S, the bytes of the whole array: before a reduce-scatter, after an all-gather.
        ranks: n, at least 1.
        bandwidth: W, bytes per second, per direction.
        latency: α, seconds per message.
        gamma: γ, seconds to add one byte to another; 0 neglects it.

    Raises:
        ValueError: If the algorithm is unknown or a number makes no sense.
    """
    check_numbers(ranks, size=size, bandwidth=bandwidth, latency=latency, gamma=gamma)
    return terms(algorithm, ranks).seconds(size, bandwidth=bandwidth, latency=latency, gamma=gamma)


def all_reduce_bound(size: float, ranks: int, *, bandwidth: float, latency: float = 0.0) -> float:
    """Return the seconds below which no all-reduce of point-to-point messages can be.

    Every rank must send 2(n-1)/n · S bytes (Patarasuk and Yuan 2009, theorem 1), and news from one rank needs
    ⌈log2 n⌉ rounds to reach all others when each sends one message at a time.

    Args:
        size: S in bytes.
        ranks: n, at least 1.
        bandwidth: W, as in `collective_time`.
        latency: α, as there.
    """
    check_numbers(ranks, size=size, bandwidth=bandwidth, latency=latency)
    return max(_up(ranks) * latency, 2 * (ranks - 1) / ranks * size / bandwidth)


def crossover(
    short: str, long: str, ranks: int, *, bandwidth: float, latency: float, gamma: float = 0.0
) -> float | None:
    """Return the size in bytes from which `long` is faster than `short`.

    Both times are straight lines in S, so they cross at most once: S* = α · Δrounds / (Δpasses/W + Δsums · γ).

    Args:
        short: The algorithm with fewer rounds.
        long: The one with fewer bytes.
        ranks: n.
        bandwidth: W, as in `collective_time`.
        latency: α, as there.
        gamma: γ, as there.

    Returns:
        S*; 0 if `long` is never slower; None if it never becomes faster.

    Raises:
        ValueError: If an algorithm is unknown or a number makes no sense.
    """
    check_numbers(ranks, bandwidth=bandwidth, latency=latency, gamma=gamma)
    one, other = terms(short, ranks), terms(long, ranks)
    saved = (one.passes - other.passes) / bandwidth + (one.sums - other.sums) * gamma
    paid = (other.rounds - one.rounds) * latency
    if paid <= 0 and saved >= 0:
        return 0.0
    return paid / saved if saved > 0 else None


def fastest(
    size: float,
    ranks: int,
    *,
    bandwidth: float,
    latency: float,
    gamma: float = 0.0,
    operation: str = "all_reduce",
) -> str:
    """Return the algorithm that takes the shortest time for this size; of equals the first in the table.

    Args:
        size: S in bytes.
        ranks: n.
        bandwidth: W, as in `collective_time`.
        latency: α, as there.
        gamma: γ, as there.
        operation: What the algorithms' names end with.

    Raises:
        ValueError: If no algorithm is for this operation, or a number makes no sense.
    """
    names = [name for name in ALGORITHMS if name.endswith(operation)]
    if not names:
        raise ValueError(
            f"operation={operation!r}: no algorithm's name ends so; they are {', '.join(ALGORITHMS)}"
        )
    link = {"bandwidth": bandwidth, "latency": latency, "gamma": gamma}
    return min(names, key=lambda name: collective_time(name, size, ranks, **link))
