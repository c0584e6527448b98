"""The order in which kinds of parallelism are applied, and what really happens in another order.

    for outcome in try_orders():
        print(outcome)

The order is: cut stages, split layers (tp), recompute, compile, shard (FSDP), and then make the optimizer. Each wrong
order here is run on four ranks, two replicas of two tp ranks, with PyTorch's own functions. What is reported is what
was seen: the text of the error, or the number that came out wrong without one.

Not every other order is wrong: one here makes no difference, against what is often said.

The programs are in `composition_order_cases`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lablib.launch.composition_order_cases import CASES, run_cases
from lablib.launch.ranks import run_ranks

RANKS = 4
VERDICTS = ("right", "refused", "silently wrong", "wasteful", "no difference")


@dataclass(frozen=True)
class Outcome:
    """One order, tried.

    Attributes:
        name: Short name.
        order: What was applied, in this order.
        verdict: One of `VERDICTS`.
        seen: What was seen: the first line of the error, or the numbers as a sentence.
        numbers: The numbers behind the sentence.
        warned: How many different warnings PyTorch gave.
        mend: What to do.
    """

    name: str
    order: tuple[str, ...]
    verdict: str
    seen: str
    numbers: dict[str, float] = field(default_factory=dict)
    warned: int = 0
    mend: str = ""

    def __str__(self) -> str:
        return f"{' -> '.join(self.order)}: {self.verdict}. {self.seen}"


def case_names() -> list[str]:
    """Return the names of all orders that can be tried."""
    return list(CASES)


def try_orders(names: list[str] | None = None, *, timeout: float = 120) -> list[Outcome]:
    """Run orders of application on four ranks, and say what happened.

    Args:
        names: Of `case_names()`; None means all.
        timeout: Seconds for all of them.

    Raises:
        ValueError: If a name is unknown.
    """
    chosen = case_names() if names is None else list(names)
    if unknown := [name for name in chosen if name not in CASES]:
        raise ValueError(f"unknown order {', '.join(unknown)}; use some of {', '.join(CASES)}")
    found = run_ranks(run_cases, RANKS, chosen, timeout=timeout)[0]
    return [Outcome(name, CASES[name].order, *found[name], CASES[name].mend) for name in chosen]


def table(outcomes: list[Outcome]) -> list[tuple[str, str, str, str]]:
    """Return rows of text for a page: order, verdict, what was seen, mend.

    Args:
        outcomes: From `try_orders`.
    """
    return [(" -> ".join(one.order), one.verdict, one.seen, one.mend) for one in outcomes]
