"""The memory calculator asked backwards: the largest micro-batch, the longest sequence, and the fewest GPUs.

    largest_micro_batch("llama-3-8b", gpu="h100", gpus=8, zero=3, seq=8192).value
    longest_sequence("llama-3-8b", gpu="h100", gpus=8, zero=3, recompute="full").value
    fewest_gpus("llama-3-70b", gpu="h100", seq=8192).value

Each takes a RunSpec, or a model with the arguments of `setup`. More sequences or tokens never need less memory, so halving
finds the end, and the answer carries the bytes at its value, which fit, and at the next one, which do not.
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
    RunSpec,
    as_spec,
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
        budget: Bytes that a rank may use.
        at: The run at the value, None if nothing fits.
        beyond: The next value that the settings admit; None without one.
        memory_beyond: Bytes that a rank needs there, more than the budget; None without one.
        trade: What the value costs, in one sentence with computed numbers; "" if nothing is to be said.
    """

    question: str
    value: int
    unit: str
    budget: int
    at: RunSpec | None = field(default=None, repr=False)
    beyond: int | None = None
    memory_beyond: int | None = None
    trade: str = ""

    @property
    def memory(self) -> int:
        """Bytes that a rank needs at the value; 0 if nothing fits."""
        return self.at.memory if self.at else 0

    @property
    def room(self) -> int:
        """Bytes of the budget that the value leaves."""
        return self.budget - self.memory if self.value else 0


def largest_micro_batch(model: Model, **settings: object) -> Answer:
    """Return the most sequences of one forward pass that fit, everything else as given."""
    spec = as_spec(model, settings)

    def at(number: int) -> RunSpec:
        return spec.replace(micro_batch=number)

    value = last_within(lambda number: at(number).memory, spec.budget)
    trade = ""
    if value:
        tokens = plural(value * spec.run.seq, "token")
        trade = f"{tokens} in a forward pass of a replica; {_kept(spec, at(value), 'micro_batch')}"
    return _answer("largest micro-batch", "sequences", spec, value, value + 1, at, trade)


def longest_sequence(model: Model, **settings: object) -> Answer:
    """Return the longest sequence that fits, everything else as given, a multiple of `calc.parallel.sequence_step`.

    Learned positions end at the table's last row, all else at the longest sequence that the calculator takes; what an
    implementation was not measured with, such as a window under cp, ends where it begins.
    """
    spec = as_spec(model, settings)
    run, refused = spec.run, []
    grain = sequence_step(tp=run.tp, cp=run.cp, sequence_parallel=run.sequence_parallel, cp_way=run.cp_way)
    positions = run.model.max_positions
    most = positions if run.model.learned_positions else LONGEST

    def at(number: int) -> RunSpec:
        return spec.replace(seq=number)

    def need(steps: int) -> float:
        try:
            return at(steps * grain).memory if steps * grain <= most else float("inf")
        except ValueError as error:
            if steps * grain <= run.seq:
                raise
            refused.append((steps * grain, str(error)))
            return float("inf")

    value = grain * last_within(need, spec.budget)
    ends = refused and min(refused)[0] == value + grain
    beyond = value + grain if value + grain <= most and not ends else None
    trade = _kept(spec, at(value), "seq") if value else ""
    if value and beyond is None and run.model.learned_positions:
        trade += f"; the {positions:,} learned positions of {run.model.name} end it, not the memory"
    elif ends:
        trade += f"; longer ones are not counted: {min(refused)[1]}"
    elif value > positions:
        trade += f"; {run.model.name} was made for {positions:,}: longer ones fit, and need other positions"
    return _answer("longest sequence", "tokens", spec, value, beyond, at, trade)


def fewest_gpus(model: Model, **settings: object) -> Answer:
    """Return the fewest GPUs on which some layout of a search fits. What was given stays; the rest is searched.

    tp are divisors of a node; cp is 1, 2, 4 or 8; pp a divisor of the layers up to 16; zero any stage. Numbers of GPUs are
    divisors of a node and whole nodes; below a node also multiples of what was given. More GPUs are not always better, but for
    one (tp, cp, pp, zero) more replicas never need more memory, from two on, so each shape is halved down to its own fewest.
    Only experts that are rows of one tensor are tried number by number: FSDP2 pads them. Of the layouts of the least number
    that fit it takes the one with the shortest predicted step for each sequence.
    """
    spec = as_spec(model, settings)
    best = MOST_GPUS + 1
    for shape in sorted(_shapes(spec), key=lambda shape: -shape.zero):
        best = _fewest(spec, shape, best)
    if best > MOST_GPUS:
        tried = ", ".join((f"up to {MOST_GPUS:,} GPUs", *_limits(spec)))
        return Answer(
            question="fewest GPUs", value=0, unit="GPUs", budget=spec.budget,
            trade=f"no number of GPUs is enough with {_rest(spec)}, of what was tried ({tried}): what sharding leaves on a "
            f"rank is more than {size(spec.budget)}",
        )  # fmt: skip
    found = _fastest(layouts(spec, best))
    run = found.run
    names = ("tp", "cp", "pp", "dp", "zero") + ("sequence_parallel",) * run.sequence_parallel
    trade = " ".join(f"{name}={getattr(run, name)}" for name in names) + f", with {_rest(found)}"
    beyond = least = None
    for smaller in reversed(_numbers(spec, 1, best)):
        least = _least(layouts(spec, smaller))
        if least is not None:
            beyond = smaller
            trade += f"; on {beyond:,} the layout that needs least needs {size(least)} of {size(spec.budget)}"
            break
    return Answer(
        question="fewest GPUs", value=best, unit="GPUs", budget=spec.budget, at=found, beyond=beyond,
        memory_beyond=least, trade=trade,
    )  # fmt: skip


def layouts(spec: RunSpec, gpus: int) -> Iterator[RunSpec]:
    """Yield every layout of the search of `fewest_gpus` on so many GPUs."""
    return (one for shape in _shapes(spec) if (one := shape.at(spec, gpus)) is not None)


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
    question: str, unit: str, spec: RunSpec, value: int, beyond: int | None, at: Callable[[int], RunSpec], trade: str
) -> Answer:
    return Answer(
        question=question, value=value, unit=unit, budget=spec.budget, at=at(value) if value else None, beyond=beyond,
        memory_beyond=None if beyond is None else at(beyond).memory, trade=trade,
    )  # fmt: skip


def _kept(spec: RunSpec, found: RunSpec, name: str) -> str:
    old, new = getattr(spec.run, name), getattr(found.run, name)
    was, now = (size(training_memory(**one.settings()).activations) for one in (spec, found))
    before = "" if old == new else f", {was} with {old:,}"
    return f"activations {now} with {name}={new:,}{before}"


@dataclass(frozen=True)
class _Shape:
    """A way to cut a run that leaves only the number of replicas open."""

    tp: int
    cp: int
    pp: int
    zero: int

    def at(self, spec: RunSpec, gpus: int) -> RunSpec | None:
        """Return the setup of this shape on so many GPUs, or None if that cannot be."""
        dp, left = divmod(gpus, self.tp * self.cp * self.pp)
        free = "zero" not in spec.given
        if left or not dp or (free and (self.zero == 0) != (dp * self.cp == 1)):
            return None
        split = spec.run.sequence_parallel
        if "sequence_parallel" not in spec.given:
            split = self.tp > 1 and spec.run.seq % (self.tp * self.cp) == 0
        try:
            return spec.replace(tp=self.tp, cp=self.cp, pp=self.pp, dp=dp, zero=self.zero, sequence_parallel=split)
        except ValueError:
            return None  # something does not divide


def _shapes(spec: RunSpec) -> Iterator[_Shape]:
    run, given = spec.run, spec.given
    one_width = run.implementation.eager or "tp" in given  # of the other two tensor parallelism is counted where given
    one_length = run.cp_way not in run.implementation.context_ways or "cp" in given
    stages = [n for n in range(1, MOST_STAGES + 1) if run.model.num_layers % n == 0]
    widths = divisors(gcd(spec.gpus_per_node, run.model.num_kv_heads))  # tp divides both
    for tp in [run.tp] if one_width else widths:
        for cp in [run.cp] if one_length else CONTEXT:
            for pp in [run.pp] if {"pp", "layers_per_stage", "schedule"} & given else stages:
                for zero in [run.zero] if "zero" in given else range(4):
                    yield _Shape(tp, cp, pp, zero)


def _fewest(spec: RunSpec, shape: _Shape, limit: int) -> int:
    """The fewest GPUs of one shape below a limit, or the limit."""

    def fits(gpus: int) -> bool:
        one = shape.at(spec, gpus)
        return one is not None and least_states(one) <= spec.budget and one.within_budget

    run = spec.run
    # Expert parallelism takes its ranks from dp times cp.
    width = shape.tp * shape.pp * lcm(shape.cp * (run.ep // gcd(run.ep, shape.cp)), run.shard or 1)
    states = state_bytes(run, int(rank_params(run)[0] * run.tp * run.pp), 1, 0)
    numbers = _numbers(spec, width, limit)
    numbers = numbers[bisect_left(numbers, states / spec.budget) :]
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


def _numbers(spec: RunSpec, width: int, limit: int) -> list[int]:
    """Numbers of GPUs below a limit, in order: parts of a node, the one given, and whole nodes that a width divides."""
    node = spec.gpus_per_node
    whole = lcm(width, node)
    odd = node % prod(getattr(spec.run, name) for name in {"tp", "cp", "pp"} & spec.given)
    parts = [n for n in range(width, min(node, limit), width) if odd or node % n == 0 or n == spec.gpus]
    return [*parts, *range(whole, limit, whole)]


def _fastest(setups: Iterable[RunSpec]) -> RunSpec:
    """The one that fits with the shortest predicted step for each sequence, and of equal ones that with least memory."""

    def time(one: RunSpec) -> float:
        seconds = predicted_seconds(one)
        return float("inf") if seconds is None else seconds / one.sequences

    for _, equal in groupby(sorted(setups, key=time), key=time):
        fitting = [one for one in equal if least_states(one) <= one.budget and one.within_budget]
        if fitting:
            return min(fitting, key=lambda one: one.memory)
    raise RuntimeError("none fits")  # the search has found one


def _least(setups: Iterable[RunSpec]) -> int | None:
    """The least memory of them, or None if there are none: who surely needs more is not asked."""
    found: int | None = None
    for sure, one in sorted(((least_states(one), one) for one in setups), key=itemgetter(0)):
        if found is not None and sure >= found:
            break
        found = one.memory if found is None else min(found, one.memory)
    return found


def _rest(spec: RunSpec) -> str:
    run = spec.run
    return f"recompute={run.recompute!r}, micro_batch={run.micro_batch} and seq={run.seq:,}"


def _limits(spec: RunSpec) -> Iterator[str]:
    """Limits of the search: larger degrees may fit where they are given."""
    if not spec.run.implementation.eager and "tp" not in spec.given:
        yield "tp within a node"
    if spec.run.cp_way in spec.run.implementation.context_ways and "cp" not in spec.given:
        yield f"cp up to {max(CONTEXT)}"
    if not {"pp", "layers_per_stage", "schedule"} & spec.given:
        yield f"pp up to {MOST_STAGES}"
