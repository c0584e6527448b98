"""How much of its time a run trains where machines die: one law, and what follows from it for published runs. Chapter 14.

    run = PUBLISHED_RUNS[0]
    run.effective            # what its authors say
    run.predicted            # what follows from its failures, least and most
    run.longest_restart      # what a restart may take, if what they say is to follow

`failures` has the law and its letters: M, δ, τ, R, all in seconds. Here it is Meta's expected ETTR, played event by event,
and held against runs. `replica_groups` has those of which a part goes on.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from lablib.calc.errors import check_whole
from lablib.calc.flops import require_positive
from lablib.calc.runs.failures import LLAMA3_FAILURES, LostTime, restarting
from lablib.calc.runs.replica_groups import ReplicaGroups, group_goodput

_DAY, _MINUTE = 86_400.0, 60.0

#: Failures per 1,000 days of a node with 8 A100, in jobs on more than 128 GPUs (arXiv 2410.21680).
RSC_FAILURES = {"RSC-1": 6.50, "RSC-2": 2.34}

#: Hours between two failures of a job on so many GPUs that the same paper prints for RSC-1: the first was counted, the others
#: are projected. They follow from the rate above; the first is a quarter of what does.
RSC_MTTF_HOURS = {1_024: 7.9, 16_384: 1.8, 131_072: 0.23}

#: Least and most of what a source leaves out. Meta's clusters take 5 to 20 minutes to start a job again (arXiv 2410.21680);
#: a checkpoint stops 2,048 to 16,384 GPUs for 0.01 to 13.02 s (arXiv 2509.16293, table 8).
UNKNOWN_RESTART, UNKNOWN_COST = (5 * _MINUTE, 20 * _MINUTE), (0.01, 13.02)


def mtbf_of_rate(rate: float, *, node: int = 8) -> float:
    """Return the seconds that one GPU runs between two failures, from failures per 1,000 days of a node of so many GPUs."""
    require_positive(rate=rate, node=node)
    return 1000 * _DAY * node / rate


def expected_ettr(interval: float, *, mtbf: float, restart: float, cost: float = 0.0) -> float:
    """Return Meta's expected effective training time ratio: (1 - (R + τ/2)/M) / (1 + δ/τ).

    "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", arXiv 2410.21680, where 1/M is nodes times
    failures per node and day, R the time u₀ to start again and δ the time w to write. Here nobody queues. 1 - ETTR is
    `lost_share` over 1 + δ/τ: equal to first order.

    Raises:
        ValueError: If a failure loses more than M: the formula is for rare failures.
    """
    require_positive(interval=interval, mtbf=mtbf)
    if not (restart >= 0 and cost >= 0):
        raise ValueError(f"restart={restart:g} s and cost={cost:g} s must not be negative")
    lost = (restart + interval / 2) / mtbf
    if lost > 1:
        raise ValueError(
            f"with interval={interval:g} s and restart={restart:g} s a failure loses more than the mtbf={mtbf:g} s after "
            "which the next one comes, and this formula is for rare ones: use lost_time"
        )
    return (1 - lost) / (1 + cost / interval)


def simulate_restarts(
    interval: float, *, cost: float, mtbf: float, restart: float = 0.0, intervals: int = 1000, seed: int = 0
) -> LostTime:
    """Play so many intervals of a job that goes back to its last checkpoint at each failure; return where its time went."""
    require_positive(interval=interval, cost=cost, mtbf=mtbf)
    check_whole("intervals", intervals, 1)
    if not restart >= 0:
        raise ValueError(f"restart={restart:g} s must not be negative")
    draw = random.Random(seed).expovariate
    left = draw(1 / mtbf)  # until the next failure
    rework = restarted = failures = 0.0
    for _ in range(intervals):
        while left < interval + cost:
            rework += left
            failures += 1
            while (left := draw(1 / mtbf)) < restart:
                restarted += left
                failures += 1
            restarted += restart
            left -= restart
        left -= interval + cost
    work = intervals * interval
    wall = work + intervals * cost + rework + restarted
    return LostTime(work / wall, intervals * cost / wall, rework / wall, restarted / wall, failures / work)


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """What somebody says of the useful time of a run, and what is known of its failures.

    Attributes:
        gpus: Accelerators, as the source rounds them.
        effective: Useful share of the time, or None.
        least: Whether `effective` is a lower bound, "more than 90 %".
        mtbf: Seconds between two interruptions, from their count, or None.
        restart: Seconds to find a failure and start again, or None.
        groups: Fewest and most replica groups, or None where all restart together.
        stall: Seconds that the other groups stand still.
    """

    name: str
    gpus: int
    effective: float | None
    least: bool = False
    mtbf: float | None = None
    restart: float | None = None
    groups: tuple[int, int] | None = None
    stall: float = 0.0
    source: str

    @property
    def predicted(self) -> tuple[float, float] | None:
        """Least and most useful time by the law; what is not known spans `UNKNOWN_RESTART` and `UNKNOWN_COST`."""
        if self.mtbf is None:
            return None
        restarts = UNKNOWN_RESTART if self.restart is None else (self.restart,)
        if not self.groups:
            return _span(restarting(cost, self.mtbf, r).useful for cost, r in product(UNKNOWN_COST, restarts))
        known = {"gpus": self.gpus, "gpu_mtbf": self.mtbf * self.gpus, "stall": self.stall, "repair": 0.0}
        return _span(
            group_goodput(ReplicaGroups(groups=n, restart=r, **known)).goodput
            for n, r in product(self.groups, restarts)
        )

    @property
    def longest_restart(self) -> tuple[float, float] | None:
        """Mean seconds of a restart with which `effective` follows, for the dearest checkpoint and for the cheapest."""
        if self.mtbf is None or self.effective is None or self.groups:
            return None
        # A restart multiplies the useful share by exp(-R/M).
        return _span(self.mtbf * math.log(restarting(cost, self.mtbf).useful / self.effective) for cost in UNKNOWN_COST)


def _span(values: Iterable[float]) -> tuple[float, float]:
    found = list(values)
    return min(found), max(found)


_QUOTED = "the share as glennklockwood.com/garden/job-reliability quotes it"

PUBLISHED_RUNS = (
    PublishedRun(
        name="Llama 3 405B", gpus=LLAMA3_FAILURES.gpus, effective=0.90, least=True, mtbf=LLAMA3_FAILURES.mtbf,
        source="arXiv 2407.21783, section 3.3.4 and table 5: 419 unexpected interruptions in 54 days",
    ),
    PublishedRun(
        name="OPT-175B", gpus=992, effective=0.59, mtbf=60 * _DAY / (35 + 70),
        source=f"arXiv 2205.01068, sections 2.4 and 2.5: 35 and 70 restarts in two months; {_QUOTED}",
    ),
    PublishedRun(
        name="ByteRobust, dense", gpus=9_600, effective=0.97, mtbf=90 * _DAY / (128 + 15 + 12 + 20),
        source="arXiv 2509.16293, abstract and table 4: 175 incidents in three months, 20 of them wanted",
    ),
    PublishedRun(
        name="MegaScale", gpus=10_000, effective=0.90, least=True, restart=10 * _MINUTE,
        source="arXiv 2402.15627, section 6.3: found in less than 10 minutes; over 100 restarts in several weeks",
    ),
    PublishedRun(name="HLAT, automatic", gpus=4_096, effective=0.9881, source=f"arXiv 2404.10630; {_QUOTED}"),
    PublishedRun(name="HLAT, by hand", gpus=4_096, effective=0.7783, source=f"arXiv 2404.10630; {_QUOTED}"),
    PublishedRun(
        name="FT-HSDP's baseline", gpus=100_000, effective=0.44, mtbf=18 * _MINUTE, restart=10 * _MINUTE,
        source="arXiv 2602.00277; abstract: 10 minutes a recovery; not in it: a failure every 18 minutes",
    ),
    PublishedRun(
        name="FT-HSDP", gpus=100_000, effective=0.80, mtbf=18 * _MINUTE, groups=(10, 20), stall=3 * _MINUTE,
        source="arXiv 2602.00277; abstract: 3 minutes a recovery; not in it: 10 to 20 replicas",
    ),
)  # fmt: skip
