"""A job that fails, second by second: what the formulas of `lablib.calc.failures` are checked against.

    simulate(500 * 3600, 600, cost=10, restart=300, gaps=exponential_gaps(3 * 3600, seed=0))

Chapter: book/11_practical_fsdp.md
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """What became of one job, in seconds.

    Attributes:
        useful: Work that counts.
        checkpoint: Checkpoints that were completed.
        rework: Work and unfinished checkpoints that failures destroyed.
        restart: Restarts, those that a further failure cut short included.
        failures: How many.
    """

    useful: float
    checkpoint: float
    rework: float
    restart: float
    failures: int

    @property
    def wall(self) -> float:
        """Seconds from the first step to the last checkpoint."""
        return self.useful + self.checkpoint + self.rework + self.restart


def exponential_gaps(mtbf: float, seed: int) -> Iterator[float]:
    """Yield the seconds from each failure to the next, without memory.

    Args:
        mtbf: Their mean.
        seed: The same seed gives the same failures.
    """
    generator = random.Random(seed)
    while True:
        yield generator.expovariate(1 / mtbf)


def simulate(
    work: float, interval: float, *, cost: float, gaps: Iterable[float], restart: float = 0.0
) -> Run:
    """Play a job through: work, checkpoint, and at a failure back to the last complete checkpoint.

    Args:
        work: Seconds of useful work to do.
        interval: Seconds of work between checkpoints; the last piece may be shorter, and is saved too.
        cost: Seconds of a checkpoint.
        gaps: Seconds from the start to the first failure, from each failure to the next; when they end, nothing
            fails any more.
        restart: Seconds from a failure to the first step after it.

    Raises:
        ValueError: If a number makes no sense.

    Chapter: book/11_practical_fsdp.md.
    """
    if not (work > 0 and interval > 0 and cost >= 0 and restart >= 0):
        raise ValueError(
            f"work={work} and interval={interval} must be positive, cost={cost} and restart={restart} not negative"
        )
    upcoming = iter(gaps)
    left = next(upcoming, float("inf"))  # until the next failure
    done = saved = lost = restarting = 0.0
    failures = 0
    while done < work:
        piece = min(interval, work - done)
        if left > piece + cost:
            left -= piece + cost
            done, saved = done + piece, saved + cost
            if work - done < 1e-9 * work:  # what rounding leaves of the last piece is no piece
                break
            continue
        lost, failures = lost + left, failures + 1
        while (left := next(upcoming, float("inf"))) <= restart:
            restarting, failures = restarting + left, failures + 1
        left, restarting = left - restart, restarting + restart
    return Run(done, saved, lost, restarting, failures)
