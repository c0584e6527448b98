"""Speedup and efficiency: what more ranks buy.

Chapter: book/01_why_distributed.md.
"""

from __future__ import annotations

from typing import Literal

Scaling = Literal["strong", "weak"]


def amdahl_speedup(ranks: int, serial_fraction: float) -> float:
    """Return Amdahl's bound on the speedup, 1 / (f + (1 - f)/n), which never passes 1/f.

    Args:
        ranks: n, at least 1.
        serial_fraction: f, the share of the one-rank time that more ranks do not divide; 0 to 1.

    Raises:
        ValueError: If a number is out of range.
    """
    _check_ranks(ranks)
    if not 0 <= serial_fraction <= 1:
        raise ValueError(f"serial_fraction={serial_fraction} must be between 0 and 1")
    return 1 / (serial_fraction + (1 - serial_fraction) / ranks)


def speedup(seconds_one: float, seconds_many: float, ranks: int, *, scaling: Scaling) -> float:
    """Return throughput on n ranks over throughput on one, from two step times.

    Strong scaling keeps the global batch, so a step does the same work: T_1/T_n. Weak scaling keeps the
    batch per rank, so a step does n times the work: n · T_1/T_n.

    Args:
        seconds_one: T_1, a step on one rank.
        seconds_many: T_n, a step on n ranks.
        ranks: n, at least 1.
        scaling: "strong" or "weak".

    Raises:
        ValueError: If a time is not above 0, or `scaling` is neither.
    """
    _check_ranks(ranks)
    for name, value in (("seconds_one", seconds_one), ("seconds_many", seconds_many)):
        if not value > 0:
            raise ValueError(f"{name}={value} must be above 0")
    if scaling not in ("strong", "weak"):
        raise ValueError(f'scaling={scaling!r} is unknown; use "strong" or "weak"')
    return seconds_one / seconds_many * (ranks if scaling == "weak" else 1)


def efficiency(seconds_one: float, seconds_many: float, ranks: int, *, scaling: Scaling) -> float:
    """Return the speedup over n: 1.0 is perfect. A speedup of 1.6 on 2 ranks is an efficiency of 0.8.

    Args:
        seconds_one: T_1, a step on one rank.
        seconds_many: T_n, a step on n ranks.
        ranks: n, at least 1.
        scaling: "strong" or "weak", as in `speedup`.

    Raises:
        ValueError: If a time is not above 0, or `scaling` is neither.
    """
    return speedup(seconds_one, seconds_many, ranks, scaling=scaling) / ranks


def _check_ranks(ranks: int) -> None:
    if ranks < 1 or ranks != int(ranks):
        raise ValueError(f"ranks={ranks} must be a whole number, at least 1")
