"""The fewest GPUs on which a run fits, over many ways to cut it.

What was given stays. What was left out is searched:

- tp: every divisor of a node, with sequence parallelism over the same ranks where they divide the sequence;
- cp: 1, 2, 4 and 8; pp: every divisor of the layers up to 16; dp: what the number of GPUs leaves, given or not;
- zero: 1, 2 and 3, or 0 where there is one replica.

A number of GPUs is a divisor of a node, or a number of whole nodes; below a node also the number that was given, and any
multiple of what was given where that does not divide a node. More GPUs are not always better: 16 have a layout
with tp=2 and cp=8, and 20 have none. But for one (tp, cp, pp, zero) more replicas never need more memory, from two on
(and from two for each expert-parallel group): shards get smaller, and nothing else changes. So each shape is halved
down to its own fewest, and the answer is the least of them. Of the layouts of that number that fit it takes the one with
the shortest predicted step for each sequence.

Chapter: book/07_3d_parallelism.md
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, lcm, prod

from lablib.calc.memory_fit import Answer
from lablib.calc.memory_fit_cost import least_states, predicted_seconds, state_bytes
from lablib.calc.memory_fit_setup import Setup, size
from lablib.calc.memory_fit_trade import needs
from lablib.calc.memory_fit_traffic import rank_params
from lablib.calc.plan_search import divisors

CONTEXT, MOST_STAGES = (1, 2, 4, 8), 16
MOST_GPUS = 2**17  # where not even these fit, more replicas do not help


@dataclass(frozen=True)
class Shape:
    """A way to cut a run that leaves only the number of replicas open.

    Attributes:
        tp: Tensor-parallel ranks.
        cp: Context-parallel ranks.
        pp: Pipeline stages.
        zero: ZeRO stage.
    """

    tp: int
    cp: int
    pp: int
    zero: int

    def at(self, have: Setup, gpus: int) -> Setup | None:
        """Return the setup of this shape on so many GPUs, or None if that cannot be.

        Args:
            have: The setup whose other settings it has.
            gpus: How many.
        """
        dp, left = divmod(gpus, self.tp * self.cp * self.pp)
        free = "zero" not in have.given
        if left or not dp or (free and (self.zero == 0) != (dp * self.cp == 1)):
            return None
        split = have.run.sequence_parallel
        if "sequence_parallel" not in have.given:
            split = self.tp > 1 and have.run.seq % (self.tp * self.cp) == 0
        try:
            return have.having(
                tp=self.tp, cp=self.cp, pp=self.pp, dp=dp, zero=self.zero, sequence_parallel=split
            )
        except ValueError:
            return None  # something does not divide


def fewest_gpus(have: Setup) -> Answer:
    """Return the fewest GPUs on which some layout of the search fits.

    Args:
        have: The setup; its dp does not matter, nor its number of GPUs but for a part of a node that is no divisor.
    """
    best = MOST_GPUS + 1
    for shape in sorted(shapes(have), key=lambda shape: -shape.zero):
        best = _fewest(have, shape, best)
    return _answer(have, best if best <= MOST_GPUS else None)


def shapes(have: Setup) -> Iterator[Shape]:
    """Yield every shape of the search.

    Args:
        have: The setup.
    """
    run, given = have.run, have.given
    one_process = run.kernels.eager  # the other two count no tensor or context parallelism
    stages = [n for n in range(1, MOST_STAGES + 1) if run.model.num_layers % n == 0]
    widths = divisors(gcd(have.gpus_per_node, run.model.num_kv_heads))  # tp divides both
    for tp in [run.tp] if one_process or "tp" in given else widths:
        for cp in [run.cp] if one_process or "cp" in given else CONTEXT:
            for pp in [run.pp] if {"pp", "layers_per_stage", "schedule"} & given else stages:
                for zero in [run.zero] if "zero" in given else range(4):
                    yield Shape(tp, cp, pp, zero)


def layouts(have: Setup, gpus: int) -> Iterator[Setup]:
    """Yield every layout of the search on so many GPUs.

    Args:
        have: The setup.
        gpus: How many.
    """
    return (one for shape in shapes(have) if (one := shape.at(have, gpus)) is not None)


def _fewest(have: Setup, shape: Shape, limit: int) -> int:
    """The fewest GPUs of one shape below a limit, or the limit."""

    def fits(gpus: int) -> bool:
        one = shape.at(have, gpus)
        return one is not None and least_states(one) <= have.budget and one.fits

    run = have.run
    # Expert parallelism takes its ranks from dp times cp.
    width = shape.tp * shape.cp * shape.pp * (run.ep // gcd(run.ep, shape.cp))
    states = state_bytes(run, int(rank_params(run)[0] * run.tp * run.pp), 1, 0)
    numbers = _numbers(have, width, limit)
    numbers = numbers[bisect_left(numbers, states / have.budget) :]
    few = bisect_left(numbers, 2 * width * run.ep)
    for number in numbers[:few]:
        if fits(number):
            return number
    many = numbers[few:]
    if not many or not fits(many[-1]):
        return limit
    return many[bisect_left(many, True, key=fits)]


def _numbers(have: Setup, width: int, limit: int) -> list[int]:
    """Numbers of GPUs below a limit, in order: parts of a node, the one given, and whole nodes that a width divides."""
    node = have.gpus_per_node
    whole = lcm(width, node)
    odd = node % prod(getattr(have.run, name) for name in {"tp", "cp", "pp"} & have.given)
    parts = [n for n in range(width, min(node, limit), width) if odd or node % n == 0 or n == have.gpus]
    return [*parts, *range(whole, limit, whole)]


def _answer(have: Setup, number: int | None) -> Answer:
    found = beyond = least = None
    if number is not None:
        fitting = [one for one in layouts(have, number) if one.fits]
        found = min(fitting, key=_time)
        for smaller in reversed(_numbers(have, 1, number)):
            missing = [one.memory for one in layouts(have, smaller)]
            if missing:
                beyond, least = smaller, min(missing)
                break
    return Answer(
        question="fewest GPUs",
        value=number or 0,
        unit="GPUs",
        memory=found.memory if found else 0,
        budget=have.budget,
        beyond=beyond,
        memory_beyond=least,
        at=found,
        traded=tuple(_sentences(have, found, beyond, least)),
    )


def _time(one: Setup) -> tuple[float, int]:
    seconds = predicted_seconds(one)
    return (float("inf") if seconds is None else seconds / one.sequences), one.memory


def _sentences(have: Setup, found: Setup | None, beyond: int | None, least: int | None) -> Iterator[str]:
    run = (found or have).run
    rest = f"recompute={run.recompute!r}, micro_batch={run.micro_batch} and seq={run.seq:,}"
    if found is None:
        tried = [f"up to {MOST_GPUS:,} GPUs", *_limits(have)]
        text = f"no number of GPUs is enough with {rest}, of what was tried ({', '.join(tried)})"
        yield f"{text}: what sharding leaves on a rank is more than {size(have.budget)}"
        return
    names = ("tp", "cp", "pp", "dp", "zero") + ("sequence_parallel",) * run.sequence_parallel
    degrees = " ".join(f"{name}={getattr(run, name)}" for name in names)
    text = f"{degrees}, with {rest}"
    if beyond is not None:
        text += f"; on {beyond:,} the layout that needs least needs {size(least)} of {size(have.budget)}"
    yield text
    yield needs(found)


def _limits(have: Setup) -> Iterator[str]:
    """What the search leaves out: larger degrees may fit where they are given."""
    if not have.run.kernels.eager and "tp" not in have.given:
        yield "tp within a node"
    if not have.run.kernels.eager and "cp" not in have.given:
        yield f"cp up to {max(CONTEXT)}"
    if not {"pp", "layers_per_stage", "schedule"} & have.given:
        yield f"pp up to {MOST_STAGES}"
