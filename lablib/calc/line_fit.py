"""Fit latency and bandwidth to measured times: one straight line, or several where one does not do.

t(S) = α + S/W is a line, and least squares finds it. Sizes go from bytes to gigabytes, so an error is counted in
parts of the time, (t_fit/t - 1)²: otherwise the largest size alone would decide. On a real machine one line seldom
fits: protocols and caches change with the size. Then the sizes are cut into ranges with a line each.

Chapter: book/10_communication.md
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """A line through some of the points.

    Attributes:
        latency: α in seconds: where the line meets S = 0. A line over large sizes only may meet it below 0.
        seconds_per_byte: 1/W.
        first: Smallest size that it was fitted to, in bytes.
        last: Largest one.
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
        """Return α + S/W.

        Args:
            size: S in bytes.
        """
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
        """Return the time by the line in whose range the size lies; between two ranges by the nearer one.

        Args:
            size: S in bytes.
        """
        for line, after in zip(self.lines, self.lines[1:], strict=False):
            if size < math.sqrt(line.last * after.first):  # the middle, counted in factors
                return line.seconds(size)
        return self.lines[-1].seconds(size)


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """Return the line with the least sum of squared relative errors.

    With weights w = 1/t²: 1/W = (Σw·ΣwSt - ΣwS·Σwt) / (Σw·ΣwS² - (ΣwS)²), α = (Σwt - ΣwS/W) / Σw.

    Args:
        sizes: Bytes, in any order; at least two different ones.
        seconds: The time of each.

    Raises:
        ValueError: If there are fewer than two different sizes, or a time is not above 0.
    """
    points = _sorted(sizes, seconds)
    if len({size for size, _ in points}) < 2:
        raise ValueError(f"a line needs two different sizes, and there are only {sorted(set(sizes))}")
    return _fit(points)


def fit_pieces(sizes: Sequence[float], seconds: Sequence[float], pieces: int) -> Pieces:
    """Return the best lines over consecutive ranges of sizes; where the ranges end is fitted too.

    All ways to cut are compared, by dynamic programming: best(k lines up to point j) is the least over i of
    best(k - 1 lines up to i) + error of one line from i to j. Every range has at least two different sizes.

    Args:
        sizes: Bytes, in any order. Times of one size stay together.
        seconds: The time of each.
        pieces: How many lines.

    Raises:
        ValueError: If there are fewer than two different sizes for each line, or a time is not above 0.
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
    # Around the weighted means the sums stay small, and nothing cancels.
    mean_size = math.fsum(w * s for w, (s, _) in zip(weights, points, strict=True)) / total
    mean_time = math.fsum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    spread = math.fsum(w * (s - mean_size) ** 2 for w, (s, _) in zip(weights, points, strict=True))
    rise = math.fsum(w * (s - mean_size) * (t - mean_time) for w, (s, t) in zip(weights, points, strict=True))
    slope = rise / spread
    latency = mean_time - slope * mean_size
    residuals = tuple((latency + slope * s) / t - 1 for s, t in points)
    return Line(latency, slope, points[0][0], points[-1][0], residuals)
