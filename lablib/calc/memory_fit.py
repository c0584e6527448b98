"""The memory calculator asked backwards: the largest micro-batch, the longest sequence, and what else would fit.

    largest_micro_batch("llama-3-8b", gpu="h100", gpus=8, zero=3, seq=8192).value
    longest_sequence("llama-3-8b", gpu="h100", gpus=8, zero=3, recompute="full").value
    fewest_gpus("llama-3-70b", gpu="h100", seq=8192).value              # in memory_fit_gpus
    cheapest_change("llama-3-70b", gpu="h100", gpus=16, seq=8192)[0]    # in memory_fit_changes

Nothing is solved for: the forward calculator is asked at one value after another, and the answer carries the bytes at
its value, which fit, and at the next one, which do not. More sequences or tokens never need less memory, because every
term is a number of values that grows with them, or does not depend on them; so halving finds the end.

Chapter: book/01_why_distributed.md
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike

from lablib.calc.choices import plural
from lablib.calc.memory import training_memory
from lablib.calc.memory_fit_setup import Setup, counted, setup, size
from lablib.calc.models import ModelConfig

__all__ = [
    "Answer",
    "Setup",
    "cheapest_change",
    "fewest_gpus",
    "largest_micro_batch",
    "longest_sequence",
    "setup",
]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The last value that fits, the next one that does not, and what the value trades.

    Attributes:
        question: What was asked.
        value: The answer; 0 if nothing fits.
        unit: Of what: "sequences", "tokens" or "GPUs".
        memory: Bytes that a rank needs at the value; 0 if nothing fits.
        budget: Bytes that it may use.
        beyond: The next value that the settings admit; None if there is none.
        memory_beyond: Bytes that a rank needs there, more than the budget; None if there is none.
        at: The setup at the value, None if nothing fits.
        traded: What the value costs, in sentences with computed numbers.
    """

    question: str
    value: int
    unit: str
    memory: int
    budget: int
    beyond: int | None
    memory_beyond: int | None
    at: Setup | None = field(repr=False)
    traded: tuple[str, ...]

    @property
    def room(self) -> int:
        """Bytes of the budget that the value leaves."""
        return self.budget - self.memory if self.value else 0


def largest_micro_batch(model: ModelConfig | str | PathLike | Setup, **settings: object) -> Answer:
    """Return the most sequences of one forward pass that fit, everything else as given.

    Args:
        model: A ModelConfig, the name of a preset, the path of a config.json, or a Setup.
        **settings: Arguments of `memory_fit_setup.setup`: gpu, gpus, and those of `training_memory`.

    Raises:
        ValueError: As `setup`.
    """
    have = _setup(model, settings)

    def at(number: int) -> Setup:
        return have.having(micro_batch=number)

    value = _last(lambda number: at(number).memory, have.budget)
    return _answer("largest micro-batch", "sequences", have, value, value + 1, at, _micro_batch)


def longest_sequence(model: ModelConfig | str | PathLike | Setup, **settings: object) -> Answer:
    """Return the longest sequence that fits, everything else as given, in steps that cp and tp can divide.

    With context parallelism every sequence is cut into cp parts, and with sequence parallelism each of them into tp, so
    lengths are multiples of cp, or of cp times tp. Learned positions end at the table's last row.

    Args:
        model: A ModelConfig, the name of a preset, the path of a config.json, or a Setup.
        **settings: Arguments of `memory_fit_setup.setup`: gpu, gpus, and those of `training_memory`.

    Raises:
        ValueError: As `setup`.
    """
    have = _setup(model, settings)
    run = have.run
    grain = run.cp * (run.tp if run.sequence_parallel else 1)
    most = run.model.max_positions if run.model.learned_positions else None

    def at(number: int) -> Setup:
        return have.having(seq=number)

    def need(steps: int) -> float:
        return at(steps * grain).memory if most is None or steps * grain <= most else float("inf")

    value = grain * _last(need, have.budget)
    beyond = value + grain if most is None or value + grain <= most else None
    return _answer("longest sequence", "tokens", have, value, beyond, at, _sequence)


def fewest_gpus(model: ModelConfig | str | PathLike | Setup, **settings: object) -> Answer:
    """Return the fewest GPUs that would do; see `lablib.calc.memory_fit_gpus.fewest_gpus`.

    Args:
        model: A ModelConfig, the name of a preset, the path of a config.json, or a Setup.
        **settings: Arguments of `memory_fit_setup.setup`, without gpus.
    """
    from lablib.calc import memory_fit_gpus

    return memory_fit_gpus.fewest_gpus(_setup(model, settings))


def cheapest_change(model: ModelConfig | str | PathLike | Setup, **settings: object) -> list:
    """Return the changes that make it fit, cheapest first; see `lablib.calc.memory_fit_changes.cheapest_change`.

    Args:
        model: A ModelConfig, the name of a preset, the path of a config.json, or a Setup.
        **settings: Arguments of `memory_fit_setup.setup`.
    """
    from lablib.calc import memory_fit_changes

    return memory_fit_changes.cheapest_change(_setup(model, settings))


def _last(need: Callable[[int], float], budget: int) -> int:
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


def _setup(model: ModelConfig | str | PathLike | Setup, settings: dict[str, object]) -> Setup:
    if not isinstance(model, Setup):
        return setup(model, **settings)
    if settings:
        raise ValueError(f"a Setup has all settings: leave out {', '.join(settings)}")
    return model


def _answer(
    question: str,
    unit: str,
    have: Setup,
    value: int,
    beyond: int | None,
    at: Callable[[int], Setup],
    trade: Callable[[Setup, Setup], list[str]],
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
        traded=(*(trade(have, found) if found else ()), f"Compared with the card: {counted(have)}."),
    )


def activations(have: Setup) -> int:
    """Return the bytes of activations that a rank keeps from forward to backward.

    Args:
        have: The setup.
    """
    return training_memory(**have.settings()).activations


def _micro_batch(have: Setup, found: Setup) -> list[str]:
    run, now = have.run, found.run
    return [
        f"{plural(now.micro_batch * run.seq, 'token')} in a forward pass of a replica; {_kept(have, found, 'micro_batch')}"
    ]


def _sequence(have: Setup, found: Setup) -> list[str]:
    run, now = have.run, found.run
    made_for = run.model.max_positions
    rows = [_kept(have, found, "seq")]
    grain = run.cp * (run.tp if run.sequence_parallel else 1)
    if run.model.learned_positions and now.seq + grain > made_for:
        rows.append(f"the {made_for:,} learned positions of {run.model.name} end it, not the memory")
    elif now.seq > made_for:
        rows.append(f"{run.model.name} was made for {made_for:,}: longer ones fit, and need other positions")
    return rows


def _kept(have: Setup, found: Setup, name: str) -> str:
    old, new = getattr(have.run, name), getattr(found.run, name)
    before = "" if old == new else f", {size(activations(have))} with {old:,}"
    return f"activations {size(activations(found))} with {name}={new:,}{before}"
