"""Where the efficiency went: the step on n ranks against its ideal, split so that the parts add up.

    T       seconds of a step on n ranks, the same for all of them: a step ends when the slowest rank has ended
    ideal   T_1 for weak scaling (each rank does what the one did), T_1/n for strong (each does the n-th part)
    lost    T - ideal = data + compute + communication + bubble + imbalance

A rank's step is data + compute + communication + bubble + rest. What a rank sees as communication is the transfer
and the wait for those that come later. The rank that comes last does not wait, so

    communication   the least that any rank spent in it
    imbalance       the mean over the ranks of what they spent above that, and of the rest, in which they were done
    bubble          the mean over the ranks of the idle time that a pipeline's order forces
    data, compute   the mean over the ranks, above the ideal's

Parts can be negative: half a batch may be more than twice as fast where it fits the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles

from lablib.calc.communication import Scaling, efficiency

#: What a rank's step is made of; what is missing counts as 0.
PHASES = ("data", "compute", "communication", "bubble")
#: What the loss is made of.
PARTS = ("communication", "imbalance", "bubble", "data", "compute")

Phases = Mapping[str, float]


@dataclass(frozen=True)
class ScalingLoss:
    """The loss of efficiency of a step on n ranks, by part.

    Attributes:
        seconds: T, of the step on n ranks.
        parts: Seconds by `PARTS`; they add up to seconds - ideal.
    """

    ranks: int
    scaling: Scaling
    seconds: float
    ideal: float
    parts: dict[str, float]

    @property
    def efficiency(self) -> float:
        """The ideal over what it took: 1.0 is perfect."""
        return self.ideal / self.seconds

    @property
    def shares(self) -> dict[str, float]:
        """Share of the step that each part took: with the efficiency they add up to 1."""
        return {part: seconds / self.seconds for part, seconds in self.parts.items()}

    @property
    def largest(self) -> str:
        """The part that took most."""
        return max(self.parts, key=self.parts.get)


def split_step(ranks: Sequence[Phases]) -> dict[str, float]:
    """Split one step into seconds that add up to it: data, compute, communication, bubble and imbalance.

    Args:
        ranks: For every rank its `seconds`, and of them those in each of `PHASES`. A step's time is the longest.
    """
    if not ranks:
        raise ValueError("a step needs at least one rank")
    for number, phases in enumerate(ranks):
        spent = [phases.get(name, 0.0) for name in PHASES]
        if min(spent) < 0 or sum(spent) > phases["seconds"] * (1 + 1e-9):
            raise ValueError(f"rank {number}: phases {dict(phases)} must not be negative, nor longer than their step")
    step = max(phases["seconds"] for phases in ranks)
    means = {name: fmean(phases.get(name, 0.0) for phases in ranks) for name in PHASES}
    transfer = min(phases.get("communication", 0.0) for phases in ranks)
    rest = step - sum(means.values())
    waiting = means["communication"] - transfer
    return means | {"communication": transfer, "imbalance": waiting + rest}


def scaling_loss(one: Sequence[Sequence[Phases]], many: Sequence[Sequence[Phases]], *, scaling: Scaling) -> ScalingLoss:
    """Compare a run on n ranks with one on a single rank, and split what is lost.

    Args:
        one: Steps of the run on one rank, warm-up dropped: for each step a list with the phases of that rank.
        many: Steps of the run on n ranks: for each step the phases of every rank.
    """
    for name, steps in (("one", one), ("many", many)):
        if not steps or len({len(step) for step in steps}) != 1:
            raise ValueError(f"{name} needs steps, all with the same number of ranks")
    if len(one[0]) != 1:
        raise ValueError(f"the run to compare with has {len(one[0])} ranks and needs 1")
    ranks = len(many[0])
    base, found = _mean_split(one), _mean_split(many)
    # One rank has no partner: what it calls communication is work of the step.
    base = {
        "data": base["data"],
        "compute": base["compute"] + base["communication"] + base["bubble"] + base["imbalance"],
    }
    share = 1.0 if scaling == "weak" else 1 / ranks
    ideal = share * sum(base.values())
    seconds = sum(found.values())
    efficiency(ideal / share, seconds, ranks, scaling=scaling)  # refuses what cannot be
    parts = {part: found[part] - share * base.get(part, 0.0) for part in PARTS}
    return ScalingLoss(ranks, scaling, seconds, ideal, parts)


def _mean_split(steps: Sequence[Sequence[Phases]]) -> dict[str, float]:
    splits = [split_step(step) for step in middle_half(steps)]
    return {part: fmean(split[part] for split in splits) for part in PARTS}


def middle_half(steps: Sequence[Sequence[Phases]]) -> list[Sequence[Phases]]:
    """Return the steps whose time lies between the quartiles, or all where there are fewer than four."""
    if len(steps) < 4:
        return list(steps)
    ordered = sorted(steps, key=lambda step: max(phases["seconds"] for phases in step))
    cut = len(steps) // 4
    return ordered[cut : len(steps) - cut]


@dataclass(frozen=True)
class Spread:
    """A median with what lies around it."""

    median: float
    low: float
    high: float
    count: int


def spread(samples: Sequence[float]) -> Spread:
    """Return the median and the quartiles of samples."""
    if not samples:
        raise ValueError("no samples: is the warm-up longer than the run?")
    if len(samples) == 1:
        return Spread(samples[0], samples[0], samples[0], 1)
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return Spread(median(samples), low, high, len(samples))


def predicted_step(
    *,
    forward: float,
    backward: float,
    other: float = 0.0,
    gather_bytes: float,
    scatter_bytes: float,
    ranks: int,
    bandwidth: float,
    hidden: bool,
) -> dict[str, float]:
    """Predict a step of fully sharded data parallelism from what one rank measured and what its link carries.

    Weights are gathered before forward and before backward, gradients scattered behind backward, (n-1)/n of their bytes each.
    On CPU ranks nothing is hidden: the cores compute and send.

    Args:
        forward: Seconds of the forward passes of a step on a rank, without communication; `backward` likewise.
        gather_bytes: Bytes of all weights as they are gathered, once.
        scatter_bytes: Bytes of all gradients as they are reduced.

    Returns:
        Seconds: compute, communication (all of it), exposed (what the step waits for), and step.
    """
    if ranks < 1 or not bandwidth > 0:
        raise ValueError(f"ranks={ranks} must be at least 1 and bandwidth={bandwidth} above 0")
    part = (ranks - 1) / ranks / bandwidth
    gather, scatter = gather_bytes * part, scatter_bytes * part

    def added(sending: float, computing: float) -> float:
        return max(0.0, sending - computing) if hidden else sending

    exposed = added(gather, forward) + added(gather + scatter, backward)
    compute = forward + backward + other
    return {"compute": compute, "communication": 2 * gather + scatter, "exposed": exposed, "step": compute + exposed}
