"""The memory calculator asked backwards: the largest micro-batch, the longest sequence, and the fewest GPUs.

    largest_micro_batch("llama-3-8b", gpu="h100", gpus=8, zero=3, seq=8192).value
    longest_sequence("llama-3-8b", gpu="h100", gpus=8, zero=3, recompute="full").value
    fewest_gpus("llama-3-70b", gpu="h100", seq=8192).value

Nothing is solved for: the forward calculator is asked at one value after another, and the answer carries the bytes at
its value, which fit, and at the next one, which do not. More sequences or tokens never need less memory, because every
term is a number of values that grows with them, or does not depend on them; so halving finds the end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from math import gcd, lcm, prod
from operator import itemgetter

from lablib.calc.errors import plural
from lablib.calc.layouts.fit.settings import (
    Model,
    Setup,
    as_setup,
    least_states,
    predicted_seconds,
    rank_params,
    size,
    state_bytes,
)
from lablib.calc.layouts.planner import divisors
from lablib.calc.memory import LONGEST, training_memory
from lablib.calc.parallel import sequence_step

#: What is searched for the fewest GPUs.
CONTEXT, MOST_STAGES = (1, 2, 4, 8), 16
MOST_GPUS = 2**17  # where not even these fit, more replicas do not help


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The last value that fits and the next one that does not.

    Attributes:
        value: The answer; 0 if nothing fits.
        unit: Of what: "sequences", "tokens" or "GPUs".
        memory: Bytes that a rank needs at the value; 0 if nothing fits.
        budget: Bytes that it may use.
        beyond: The next value that the settings admit; None without one.
        memory_beyond: Bytes that a rank needs there, more than the budget; None without one.
        at: The setup at the value, None if nothing fits.
        trade: What the value costs, in one sentence with computed numbers; "" if nothing is to be said.
    """

    question: str
    value: int
    unit: str
    memory: int
    budget: int
    beyond: int | None
    memory_beyond: int | None
    at: Setup | None = field(repr=False)
    trade: str

    @property
    def room(self) -> int:
        """Bytes of the budget that the value leaves."""
        return self.budget - self.memory if self.value else 0


def largest_micro_batch(model: Model, **settings: object) -> Answer:
    """Return the most sequences of one forward pass that fit, everything else as given.

    Args:
        model: A ModelConfig, the name of a preset, the path of a config.json, or a Setup.
        **settings: Arguments of `setup`: gpu, gpus, and those of `training_memory`.
    """
    have = as_setup(model, settings)

    def at(number: int) -> Setup:
        return have.having(micro_batch=number)

    value = last_within(lambda number: at(number).memory, have.budget)
    trade = ""
    if value:
        tokens = plural(value * have.run.seq, "token")
        trade = f"{tokens} in a forward pass of a replica; {_kept(have, at(value), 'micro_batch')}"
    return _answer("largest micro-batch", "sequences", have, value, value + 1, at, trade)


def longest_sequence(model: Model, **settings: object) -> Answer:
    """Return the longest sequence that fits, everything else as given, in steps that cp and tp can divide.

    Lengths are multiples of `calc.parallel.sequence_step`. Learned positions end at the table's last row, and
    all else at the longest sequence that the calculator takes.

    Args:
        model: A ModelConfig, the name of a preset, the path of a config.json, or a Setup.
        **settings: Arguments of `setup`: gpu, gpus, and those of `training_memory`.
    """
    have = as_setup(model, settings)
    run = have.run
    grain = sequence_step(tp=run.tp, cp=run.cp, sequence_parallel=run.sequence_parallel, cp_way=run.cp_way)
    positions = run.model.max_positions
    most = positions if run.model.learned_positions else LONGEST

    def at(number: int) -> Setup:
        return have.having(seq=number)

    def need(steps: int) -> float:
        return at(steps * grain).memory if steps * grain <= most else float("inf")

    value = grain * last_within(need, have.budget)
    beyond = value + grain if value + grain <= most else None
    trade = _kept(have, at(value), "seq") if value else ""
    if value and beyond is None and run.model.learned_positions:
        trade += f"; the {positions:,} learned positions of {run.model.name} end it, not the memory"
    elif value > positions:
        trade += f"; {run.model.name} was made for {positions:,}: longer ones fit, and need other positions"
    return _answer("longest sequence", "tokens", have, value, beyond, at, trade)


def fewest_gpus(model: Model, **settings: object) -> Answer:
    """Return the fewest GPUs on which some layout of a search fits. What was given stays; the rest is searched.

    - tp: every divisor of a node, with sequence parallelism over the same ranks where they divide the sequence;
    - cp: 1, 2, 4 and 8; pp: every divisor of the layers up to 16; dp: what the number of GPUs leaves, given or not;
    - zero: 1, 2 and 3, or 0 where there is one replica.

    A number of GPUs is a divisor of a node, or a number of whole nodes; below a node also the number that was given, and
    any multiple of what was given where that does not divide a node. More GPUs are not always better: 16 have a layout
    with tp=2 and cp=8, and 20 have none. But for one (tp, cp, pp, zero) more replicas never need more memory, from two on
    (and from two for each expert-parallel group): shards get smaller, and nothing else changes. So each shape is halved
    down to its own fewest, and the answer is the least of them. Only experts that are rows of one tensor are tried number
    by number: FSDP2 pads them. Of the layouts of that number that fit it takes the one
    with the shortest predicted step for each sequence.

    Args:
        model: A ModelConfig, the name of a preset, the path of a config.json, or a Setup, whose dp does not matter.
        **settings: Arguments of `setup`, without gpus.
    """
    have = as_setup(model, settings)
    best = MOST_GPUS + 1
    for shape in sorted(_shapes(have), key=lambda shape: -shape.zero):
        best = _fewest(have, shape, best)
    if best > MOST_GPUS:
        tried = ", ".join((f"up to {MOST_GPUS:,} GPUs", *_limits(have)))
        return Answer(
            question="fewest GPUs", value=0, unit="GPUs", memory=0, budget=have.budget, beyond=None, memory_beyond=None,
            at=None, trade=f"no number of GPUs is enough with {_rest(have)}, of what was tried ({tried}): what sharding "
            f"leaves on a rank is more than {size(have.budget)}",
        )  # fmt: skip
    found = _fastest(layouts(have, best))
    run = found.run
    names = ("tp", "cp", "pp", "dp", "zero") + ("sequence_parallel",) * run.sequence_parallel
    trade = " ".join(f"{name}={getattr(run, name)}" for name in names) + f", with {_rest(found)}"
    beyond = least = None
    for smaller in reversed(_numbers(have, 1, best)):
        least = _least(layouts(have, smaller))
        if least is not None:
            beyond = smaller
            trade += f"; on {beyond:,} the layout that needs least needs {size(least)} of {size(have.budget)}"
            break
    return Answer(
        question="fewest GPUs", value=best, unit="GPUs", memory=found.memory, budget=have.budget, beyond=beyond,
        memory_beyond=least, at=found, trade=trade,
    )  # fmt: skip


def layouts(have: Setup, gpus: int) -> Iterator[Setup]:
    """Yield every layout of the search of `fewest_gpus` on so many GPUs."""
    return (one for shape in _shapes(have) if (one := shape.at(have, gpus)) is not None)


def last_within(need: Callable[[int], float], budget: int) -> int:
    """The largest number from 1 on whose need is within the budget, 0 if there is none; more never needs less.

    Most needs are nearly straight lines: a line through 1 and 2 says where to look, steps that double find both sides.
    """
    if need(1) > budget:
        return 0
    slope = need(2) - need(1)
    guess = 1 + int((budget - need(1)) // slope) if 0 < slope < float("inf") else 1
    low, high, step = 1, guess, 1
    if need(guess) <= budget:
        while need(guess + step) <= budget:
            guess, step = guess + step, 2 * step
        low, high = guess, guess + step
    else:
        while high - step > 1 and need(high - step) > budget:
            high, step = high - step, 2 * step
        low = max(1, high - step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if need(middle) <= budget else (low, middle)
    return low


def _answer(
    question: str, unit: str, have: Setup, value: int, beyond: int | None, at: Callable[[int], Setup], trade: str
) -> Answer:
    """Put an answer together, asking forwards once more at the value and at the next one."""
    found = at(value) if value else None
    return Answer(
        question=question,
        value=value,
        unit=unit,
        memory=found.memory if found else 0,
        budget=have.budget,
        beyond=beyond,
        memory_beyond=None if beyond is None else at(beyond).memory,
        at=found,
        trade=trade,
    )


def _kept(have: Setup, found: Setup, name: str) -> str:
    old, new = getattr(have.run, name), getattr(found.run, name)
    was, now = (size(training_memory(**one.settings()).activations) for one in (have, found))
    before = "" if old == new else f", {was} with {old:,}"
    return f"activations {now} with {name}={new:,}{before}"


@dataclass(frozen=True)
class _Shape:
    """A way to cut a run that leaves only the number of replicas open."""

    tp: int
    cp: int
    pp: int
    zero: int

    def at(self, have: Setup, gpus: int) -> Setup | None:
        """Return the setup of this shape on so many GPUs, or None if that cannot be."""
        dp, left = divmod(gpus, self.tp * self.cp * self.pp)
        free = "zero" not in have.given
        if left or not dp or (free and (self.zero == 0) != (dp * self.cp == 1)):
            return None
        split = have.run.sequence_parallel
        if "sequence_parallel" not in have.given:
            split = self.tp > 1 and have.run.seq % (self.tp * self.cp) == 0
        try:
            return have.having(tp=self.tp, cp=self.cp, pp=self.pp, dp=dp, zero=self.zero, sequence_parallel=split)
        except ValueError:
            return None  # something does not divide


def _shapes(have: Setup) -> Iterator[_Shape]:
    run, given = have.run, have.given
    one_width = run.implementation.eager or "tp" in given  # of the other two tensor parallelism is counted where given
    one_length = run.cp_way not in run.implementation.context_ways or "cp" in given
    stages = [n for n in range(1, MOST_STAGES + 1) if run.model.num_layers % n == 0]
    widths = divisors(gcd(have.gpus_per_node, run.model.num_kv_heads))  # tp divides both
    for tp in [run.tp] if one_width else widths:
        for cp in [run.cp] if one_length else CONTEXT:
            for pp in [run.pp] if {"pp", "layers_per_stage", "schedule"} & given else stages:
                for zero in [run.zero] if "zero" in given else range(4):
                    yield _Shape(tp, cp, pp, zero)


def _fewest(have: Setup, shape: _Shape, limit: int) -> int:
    """The fewest GPUs of one shape below a limit, or the limit."""

    def fits(gpus: int) -> bool:
        one = shape.at(have, gpus)
        return one is not None and least_states(one) <= have.budget and one.within_budget

    run = have.run
    # Expert parallelism takes its ranks from dp times cp.
    width = shape.tp * shape.cp * shape.pp * (run.ep // gcd(run.ep, shape.cp))
    states = state_bytes(run, int(rank_params(run)[0] * run.tp * run.pp), 1, 0)
    numbers = _numbers(have, width, limit)
    numbers = numbers[bisect_left(numbers, states / have.budget) :]
    few = bisect_left(numbers, 2 * width * run.ep)
    if run.sharding == "fsdp2" and run.model.family in run.implementation.joined_experts:
        # FSDP2 cuts these tensors by the number of experts: behind as many replicas shards get no smaller, and what is
        # gathered is padded; before, it is padded where they do not divide.
        numbers = numbers[: bisect_right(numbers, width * run.model.num_experts)]
        few = len(numbers)
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


def _fastest(setups: Iterable[Setup]) -> Setup:
    """The one that fits with the shortest predicted step for each sequence, and of equal ones that with least memory."""

    def time(one: Setup) -> float:
        seconds = predicted_seconds(one)
        return float("inf") if seconds is None else seconds / one.sequences

    for _, equal in groupby(sorted(setups, key=time), key=time):
        fitting = [one for one in equal if least_states(one) <= one.budget and one.within_budget]
        if fitting:
            return min(fitting, key=lambda one: one.memory)
    raise RuntimeError("none fits")  # the search has found one


def _least(setups: Iterable[Setup]) -> int | None:
    """The least memory of them, or None if there are none: who surely needs more is not asked."""
    found: int | None = None
    for sure, one in sorted(((least_states(one), one) for one in setups), key=itemgetter(0)):
        if found is not None and sure >= found:
            break
        found = one.memory if found is None else min(found, one.memory)
    return found


def _rest(have: Setup) -> str:
    run = have.run
    return f"recompute={run.recompute!r}, micro_batch={run.micro_batch} and seq={run.seq:,}"


def _limits(have: Setup) -> Iterator[str]:
    """Limits of the search: larger degrees may fit where they are given."""
    if not have.run.implementation.eager and "tp" not in have.given:
        yield "tp within a node"
    if have.run.cp_way in have.run.implementation.context_ways and "cp" not in have.given:
        yield f"cp up to {max(CONTEXT)}"
    if not {"pp", "layers_per_stage", "schedule"} & have.given:
        yield f"pp up to {MOST_STAGES}"
