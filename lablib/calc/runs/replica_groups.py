"""Replica groups that die one at a time: what the others still do, by a closed form and played. Chapter 14.

    job = ReplicaGroups(gpus=16_384, groups=128, gpu_mtbf=LLAMA3_FAILURES.gpu_mtbf, stall=30, restart=600, repair=86_400)
    group_goodput(job).goodput                         # the closed form
    simulate_groups(job, seconds=1e8).goodput          # the same, event by event
    checkpointed_goodput(job, cost=13)                 # with what groups do not survive
    restart_instead(job, cost=13).useful               # the same GPUs, all back to a checkpoint at each failure

A group is the GPUs that hold a whole copy of the states, as HSDP replicates them. A failure takes a node and with it its
group. The others stand still for a moment, throw the step under way away, and go on with fewer samples a step (torchft;
FT-HSDP, arXiv 2602.00277). The group comes back when it has a whole node again: at once where a spare is free, else with
the first one repaired. It starts, and takes the states from a living group. Failures come without memory, to groups that
live, during a stall too. All in seconds.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from lablib.calc.errors import check_whole, must_divide
from lablib.calc.flops import require_positive
from lablib.calc.runs.failures import LostTime, restarting


@dataclass(frozen=True, kw_only=True)
class ReplicaGroups:
    """A job on groups of GPUs that die one at a time.

    Attributes:
        gpus: GPUs that train, in `groups` groups of equal size.
        gpu_mtbf: Seconds that one GPU, with its share of host and network, runs between two failures.
        stall: Seconds that the others stand still: until heartbeats are missed, a new quorum, the step done again.
        restart: Seconds from a failure to a started group that has a whole node, reading the states left out.
        repair: Seconds until a broken node is back; 0 if it is replaced at once.
        spares: Nodes that are reserved and do not train.
        node: GPUs of a node.
        min_groups: Groups below which nobody trains.
        state_bytes: That a group takes from a living one, which goes on meanwhile.
        link: Bytes per second that each of its GPUs receives.
        shared: Share of the failures that no group survives; see `rare_restarts`.
    """

    gpus: int
    groups: int
    gpu_mtbf: float
    stall: float
    restart: float
    repair: float
    spares: int = 0
    node: int = 8
    min_groups: int = 1
    state_bytes: float = 0.0
    link: float = math.inf
    shared: float = 0.0

    def __post_init__(self) -> None:
        check_whole("groups", self.groups, 1)
        check_whole("min_groups", self.min_groups, 1, self.groups)
        check_whole("spares", self.spares, 0)
        require_positive(gpus=self.gpus, gpu_mtbf=self.gpu_mtbf, node=self.node)
        must_divide("groups", self.groups, "gpus", self.gpus)
        for name in ("stall", "restart", "repair", "state_bytes"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name):g} must not be negative, and finite")
        if not self.link > 0 or not 0 <= self.shared <= 1:
            raise ValueError(f"link={self.link:g} must be positive, and shared={self.shared:g} from 0 to 1")

    @property
    def mtbf(self) -> float:
        """Mean seconds between two failures in the job while all groups live."""
        return self.gpu_mtbf / self.gpus

    @property
    def group_mtbf(self) -> float:
        """Mean seconds that a group lives until it dies alone."""
        alone = (1 - self.shared) / (self.mtbf * self.groups)
        return 1 / alone if alone else math.inf

    @property
    def away(self) -> float:
        """Seconds from a whole node to a group that trains."""
        return self.restart + self.state_bytes / (self.link * self.gpus / self.groups)

    @property
    def idle(self) -> float:
        """Share of the reserved GPUs that are spares."""
        return self.spares * self.node / (self.gpus + self.spares * self.node)


@dataclass(frozen=True)
class GroupGoodput:
    """Samples per second over those of all reserved GPUs without failures, and where the rest is; shares add up to 1.

    Attributes:
        living: Mean groups that live.
        stalled: Living groups that stand still.
        absent: Groups that are away, and those that live while fewer than `min_groups` do.
        idle: Spares.
        all_gone: Mean seconds between two moments at which no group lives, and only a checkpoint helps; may be infinite.
    """

    goodput: float
    living: float
    stalled: float
    absent: float
    idle: float
    all_gone: float

    @property
    def useful(self) -> float:
        """Useful share of the GPUs that train, spares left out."""
        return self.goodput / (1 - self.idle)


def group_goodput(job: ReplicaGroups) -> GroupGoodput:
    """Return the steady state: a group trains while it lives and no other died within the last `stall` seconds.

    With s spares, n groups and a death of each in m seconds, k broken nodes leave n - max(0, k - s) groups with a node: the
    machine-repair model with spares, whose chances depend on the mean of a repair alone. A group with a node lives for
    m / (m + away) of its time, so that L groups live in the mean. Another died lately with the chance L/n · stall/m, and
    L/n · (1 - that)^(n-1) is useful. Exact without spares, for stalls no longer than a group is away; spares couple deaths
    a little.
    """
    n, m = job.groups, job.group_mtbf
    lives = 1 / (1 + job.away / m)
    living = ready = last = 0.0  # last: deaths of the last one per second
    for slots, chance in _slots(job):
        enough = 1 - sum(_chance(slots - 1, k, lives) for k in range(min(slots, job.min_groups - 1)))
        living += chance * slots * lives
        ready += chance * slots * lives * enough
        last += chance * _chance(slots, 1, lives) / m
    quiet = max(0.0, 1 - living / n * job.stall / m) ** (n - 1)
    return _result(job, living, ready * quiet / n, ready / n, 1 / last if last else math.inf)


def simulate_groups(job: ReplicaGroups, *, seconds: float, seed: int = 0) -> GroupGoodput:
    """Play a job for so many seconds, event by event: deaths, repairs that take `repair`, starts that take `away`."""
    require_positive(seconds=seconds)
    draw = random.Random(seed).expovariate
    living, spares, waiting, gone = job.groups, job.spares, 0, 0
    now, quiet, alive, ready, done = 0.0, 0.0, 0.0, 0.0, 0.0  # quiet: until when the living stand still
    coming: list[tuple[float, bool]] = []  # (when, whether a group starts; else a node is repaired)
    while now < seconds:
        death = now + draw(living / job.group_mtbf) if living and job.group_mtbf < math.inf else math.inf
        then = min(death, coming[0][0] if coming else math.inf, seconds)
        alive += living * (then - now)
        if living >= job.min_groups:
            ready += living * (then - now)
            done += living * max(0.0, then - max(now, quiet))
        now = then
        if then == death:
            living, waiting = living - 1, waiting + 1
            quiet = then + job.stall if living else then
            gone += not living
            heappush(coming, (then + job.repair, False))
        elif coming and then == coming[0][0]:
            started = heappop(coming)[1]
            living, spares = living + started, spares + (not started)
        while waiting and spares:
            waiting, spares = waiting - 1, spares - 1
            heappush(coming, (now + job.away, True))
    total = seconds * job.groups
    return _result(job, alive / seconds, done / total, ready / total, seconds / gone if gone else math.inf)


def _result(job: ReplicaGroups, living: float, useful: float, ready: float, all_gone: float) -> GroupGoodput:
    train = 1 - job.idle
    return GroupGoodput(train * useful, living, train * (ready - useful), train * (1 - ready), job.idle, all_gone)


def _slots(job: ReplicaGroups) -> list[tuple[int, float]]:
    """Return how many groups have a whole node, with its chance, for 0, 1, ... broken nodes; what is too rare is left out."""
    load = job.repair / (job.group_mtbf + job.away)  # a group with a node breaks one in so many seconds
    slots, broken, log, most = job.groups, 0, 0.0, 0.0
    found = [(slots, log)]  # with the logarithm of the chance, up to a constant
    while load and slots and log > most - 60:
        broken += 1
        log += math.log(load * slots / broken)
        most = max(most, log)
        slots = job.groups - max(0, broken - job.spares)
        found.append((slots, log))
    whole = sum(math.exp(log - most) for _, log in found)
    return [(slots, math.exp(log - most) / whole) for slots, log in found]


def _chance(n: int, k: int, a: float) -> float:
    """Return the chance that k of n groups live, each with the chance a."""
    if k > n or a == 1:
        return float(k == n)
    count = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(count + k * math.log(a) + (n - k) * math.log1p(-a))


def restart_instead(job: ReplicaGroups, *, cost: float) -> LostTime:
    """Return where the time of the same GPUs goes if all restart at each failure, from checkpoints that take `cost`.

    A spare is always there. Where none is, all wait: add `repair` to `restart` first.
    """
    return restarting(cost, job.mtbf, job.restart)


def stop_mtbf(job: ReplicaGroups) -> float:
    """Return the mean seconds between two failures that send all groups back to a checkpoint; may be infinite."""
    rate = job.shared / job.mtbf + 1 / group_goodput(job).all_gone
    return 1 / rate if rate else math.inf


def rare_restarts(job: ReplicaGroups, *, cost: float) -> LostTime:
    """Return what failures that no group survives cost beside `group_goodput`, with checkpoints only for them."""
    mtbf = stop_mtbf(job)
    return restarting(cost, mtbf, job.restart) if mtbf < math.inf else LostTime(1.0, 0.0, 0.0, 0.0, 0.0)


def checkpointed_goodput(job: ReplicaGroups, *, cost: float) -> float:
    """Return the useful share of the GPUs that train, what groups survive and what they do not taken together."""
    return group_goodput(job).useful * rare_restarts(job, cost=cost).useful


def crossover(job: ReplicaGroups, *, cost: float, slowdown: float) -> int | None:
    """Return the fewest groups of this size that outdo restarts although their steps take `slowdown` more time.

    Replicas do not come free: more memory, an all-reduce between them that no failure breaks, a vote a step. Below so many
    groups that costs more than failures do. Spares grow with the groups. None: not below a million.

    Args:
        cost: Seconds of a checkpoint.
        slowdown: 0.02 if a step takes 2 % more.
    """
    if not slowdown >= 0:
        raise ValueError(f"slowdown={slowdown:g} must not be negative")

    def ahead(groups: int) -> bool:
        spares = round(job.spares * groups / job.groups)
        other = replace(job, gpus=job.gpus // job.groups * groups, groups=groups, spares=spares, min_groups=1)
        return checkpointed_goodput(other, cost=cost) / (1 + slowdown) > restart_instead(other, cost=cost).useful

    high = 2
    while not ahead(high):
        high *= 2
        if high > 2**20:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if ahead(middle) else (middle, high)
    return high
