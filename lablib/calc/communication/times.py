"""The time of collective algorithms, lines fitted to measured times, and the tables of nccl-tests. Chapter 10.

An algorithm on S bytes in equal chunks takes T = rounds · α + passes · S/W + sums · γ · S, with factors of n alone
(`cost_terms`): α seconds a message, W bytes per second and direction, γ seconds to add one byte to another.

`fit_line` finds α and W by least squares of (t_fit/t - 1)², so that small sizes, whose times are short, count too;
`fit_pieces` fits a line to each range of sizes, as protocols may change with the size. nccl-tests' GB are 1e9 bytes and
its times microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lablib.calc.communication.algorithms import ALGORITHMS
from lablib.calc.communication.costs import algorithm_bandwidth, bus_bandwidth, check_link


class Terms(NamedTuple):
    """The factors of α, S/W and γ·S.

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
        """Return T = rounds · α + passes · S/W + sums · γ · S."""
        return self.rounds * latency + size * (self.passes / bandwidth + self.sums * gamma)


def _levels(n: int) -> int:
    return n.bit_length() - 1


def _up(n: int) -> int:
    return (n - 1).bit_length()


def _fold(n: int) -> Terms:
    """Before and after an algorithm for a power of two, when n is not one: S bytes to a partner, and S back."""
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


def cost_terms(algorithm: str, ranks: int) -> Terms:
    """Return what multiplies α, S/W and γ·S."""
    check_link(ranks)
    if algorithm not in _TERMS:
        raise ValueError(f"algorithm={algorithm!r} is unknown; use one of {', '.join(ALGORITHMS)}")
    return _TERMS[algorithm](ranks)


def collective_time(
    algorithm: str, size: float, ranks: int, *, bandwidth: float, latency: float = 0.0, gamma: float = 0.0
) -> float:
    """Return the seconds of a collective.

    Args:
        size: S, the bytes of the whole array: before a reduce-scatter, after an all-gather.
    """
    check_link(ranks, size=size, bandwidth=bandwidth, latency=latency, gamma=gamma)
    return cost_terms(algorithm, ranks).seconds(size, bandwidth=bandwidth, latency=latency, gamma=gamma)


def crossover(
    short: str, long: str, ranks: int, *, bandwidth: float, latency: float, gamma: float = 0.0
) -> float | None:
    """Return the size in bytes from which `long` is faster than `short`.

    Both times are straight lines in S, so they cross at most once: S* = α · Δrounds / (Δpasses/W + Δsums · γ).

    Returns:
        S*; 0 if `long` is never slower; None if it is slower at large sizes.
    """
    check_link(ranks, bandwidth=bandwidth, latency=latency, gamma=gamma)
    one, other = cost_terms(short, ranks), cost_terms(long, ranks)
    saved = (one.passes - other.passes) / bandwidth + (one.sums - other.sums) * gamma
    paid = (other.rounds - one.rounds) * latency
    if paid <= 0 and saved >= 0:
        return 0.0
    return paid / saved if saved > 0 else None


def fastest_algorithm(
    size: float, ranks: int, *, bandwidth: float, latency: float, gamma: float = 0.0, operation: str = "all_reduce"
) -> str:
    """Return which algorithm whose name ends with `operation` is the fastest; of equals the first of `ALGORITHMS`."""
    names = [name for name in ALGORITHMS if name.endswith(operation)]
    if not names:
        raise ValueError(f"operation={operation!r}: no algorithm's name ends so; they are {', '.join(ALGORITHMS)}")
    link = {"bandwidth": bandwidth, "latency": latency, "gamma": gamma}
    return min(names, key=lambda name: collective_time(name, size, ranks, **link))


@dataclass(frozen=True)
class Line:
    """A line fitted to points.

    Attributes:
        latency: α in seconds: where the line meets S = 0, which may be below 0.
        seconds_per_byte: 1/W; not above 0 where the time does not grow with the size.
        first: Smallest size that it was fitted to, in bytes.
        residuals: t_fit/t - 1 of each point, in order of size.
    """

    latency: float
    seconds_per_byte: float
    first: float
    last: float
    residuals: tuple[float, ...]

    @property
    def bandwidth(self) -> float:
        """W in bytes per second; infinite if the time does not grow with the size."""
        return 1 / self.seconds_per_byte if self.seconds_per_byte > 0 else math.inf

    @property
    def worst(self) -> float:
        """The largest residual, without its sign."""
        return max(map(abs, self.residuals))

    def seconds(self, size: float) -> float:
        """Return the line's time at a size."""
        return self.latency + size * self.seconds_per_byte


@dataclass(frozen=True)
class Pieces:
    """Lines over ranges of sizes, the small sizes first."""

    lines: tuple[Line, ...]

    @property
    def worst(self) -> float:
        """The largest residual of all lines, without its sign."""
        return max(line.worst for line in self.lines)

    @property
    def residuals(self) -> tuple[float, ...]:
        """The residuals of all points, in order of size."""
        return tuple(residual for line in self.lines for residual in line.residuals)

    def seconds(self, size: float) -> float:
        """Return the time by the line in whose range the size lies; between two ranges by the nearer one."""
        for line, after in zip(self.lines, self.lines[1:], strict=False):
            if size < math.sqrt(line.last * after.first):  # the middle, counted in factors
                return line.seconds(size)
        return self.lines[-1].seconds(size)


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """Return the line with the least sum of squared relative errors.

    With weights w = 1/t²: 1/W = (Σw·ΣwSt - ΣwS·Σwt) / (Σw·ΣwS² - (ΣwS)²), α = (Σwt - ΣwS/W) / Σw.

    Args:
        sizes: Bytes, in any order; at least two different ones.
    """
    points = _sorted(sizes, seconds)
    if len({size for size, _ in points}) < 2:
        raise ValueError(f"a line needs two different sizes, and there are only {sorted(set(sizes))}")
    return _fit(points)


def fit_pieces(sizes: Sequence[float], seconds: Sequence[float], pieces: int) -> Pieces:
    """Return the best lines over consecutive ranges of sizes; where the ranges end is fitted too.

    All ways to cut are compared, by dynamic programming: best(k lines up to size j) is the least over i of
    best(k - 1 lines up to i) + error of one line from i to j. Every range has at least two different sizes.

    Args:
        sizes: Bytes, in any order. Times of one size stay together.
    """
    points = _sorted(sizes, seconds)
    different = sorted({size for size, _ in points})
    if pieces < 1 or len(different) < 2 * pieces:
        raise ValueError(f"pieces={pieces} needs two sizes for each line, and there are {len(different)}")
    n = len(different)

    def line(first: int, end: int) -> Line:
        """One line through the sizes number `first` to `end` - 1."""
        return _fit([point for point in points if different[first] <= point[0] <= different[end - 1]])

    lines = {(i, j): line(i, j) for i in range(n) for j in range(i + 2, n + 1)}
    error = {key: sum(r * r for r in one.residuals) for key, one in lines.items()}
    best: dict[int, tuple[float, tuple[Line, ...]]] = {0: (0.0, ())}
    for _ in range(pieces):
        following: dict[int, tuple[float, tuple[Line, ...]]] = {}
        for (i, j), cost in error.items():
            if i in best and (j not in following or best[i][0] + cost < following[j][0]):
                following[j] = best[i][0] + cost, (*best[i][1], lines[i, j])
        best = following
    return Pieces(best[n][1])


def _sorted(sizes: Sequence[float], seconds: Sequence[float]) -> list[tuple[float, float]]:
    if len(sizes) != len(seconds):
        raise ValueError(f"there are {len(sizes)} sizes and {len(seconds)} times")
    if bad := [t for t in seconds if not (t > 0 and math.isfinite(t))]:
        raise ValueError(f"times must be above 0, and one is {bad[0]}")
    if bad := [s for s in sizes if not (s >= 0 and math.isfinite(s))]:
        raise ValueError(f"sizes must not be negative, and one is {bad[0]}")
    return sorted(zip(sizes, seconds, strict=True))


def _fit(points: list[tuple[float, float]]) -> Line:
    weights = [1 / t**2 for _, t in points]
    total = math.fsum(weights)
    # Around the weighted means the sums stay small, and less cancels.
    mean_size = math.fsum(w * s for w, (s, _) in zip(weights, points, strict=True)) / total
    mean_time = math.fsum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    spread = math.fsum(w * (s - mean_size) ** 2 for w, (s, _) in zip(weights, points, strict=True))
    rise = math.fsum(w * (s - mean_size) * (t - mean_time) for w, (s, t) in zip(weights, points, strict=True))
    slope = rise / spread
    latency = mean_time - slope * mean_size
    residuals = tuple((latency + slope * s) / t - 1 for s, t in points)
    return Line(latency, slope, points[0][0], points[-1][0], residuals)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One half of one line: a size, out of place or in place.

    Attributes:
        size: S in bytes.
        count: Elements, as the program counts them.
        dtype: NCCL's name of the type.
        in_place: Which half of the line it is.
        algbw: As printed, in bytes per second.
        busbw: As printed, in bytes per second.
        wrong: Elements that were wrong, or None where the check was off.
    """

    size: int
    count: int
    dtype: str
    in_place: bool
    seconds: float
    algbw: float
    busbw: float
    wrong: float | None


def parse_nccl_tests(text: str) -> list[Run]:
    """Return two runs for each line of a table that a program of nccl-tests has printed.

    Args:
        text: The whole output; lines without these columns are skipped: size, count, type, perhaps `redop` and `root`,
            then time, algbw, busbw and #wrong twice.
    """
    runs = []
    for line in text.splitlines():
        words = line.split()
        if len(words) not in (11, 12, 13) or not (words[0].isdigit() and words[1].isdigit()):
            continue
        for in_place, half in ((False, words[-8:-4]), (True, words[-4:])):
            time, algbw, busbw, wrong = half
            runs.append(
                Run(
                    size=int(words[0]),
                    count=int(words[1]),
                    dtype=words[2],
                    in_place=in_place,
                    seconds=float(time) * 1e-6,
                    algbw=float(algbw) * 1e9,
                    busbw=float(busbw) * 1e9,
                    wrong=None if wrong == "N/A" else float(wrong),
                )
            )
    if not runs:
        raise ValueError("no line of an nccl-tests table: it begins with size, count and type")
    return runs


def recomputed_bandwidths(run: Run, collective: str, ranks: int) -> tuple[float, float]:
    """Return algbw and busbw of a line, computed from its size and time."""
    return (algorithm_bandwidth(run.size, run.seconds), bus_bandwidth(collective, run.size, ranks, run.seconds))
