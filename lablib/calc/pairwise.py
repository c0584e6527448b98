"""Choose few configurations that bring every pair of values together that can occur together.

Three switches have 8 combinations. Four of them, (0,0,0), (0,1,1), (1,0,1), (1,1,0), already show every pair of values of
every two switches. With many factors the saving is large: pairs grow with the square of the factors, combinations
exponentially. A defect that needs one or two values is met; one that needs three may be missed.

Some values exclude each other. A pair is *allowed* if some whole configuration contains it. The chooser begins each
configuration with a pair that is still to be shown, gives every other factor the value that shows most new pairs (of
equals the one that was used least), and goes back where a rule leaves none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

Factors = Mapping[str, Sequence]
Row = dict[str, object]
Pair = frozenset  # of two (factor, value)


@dataclass(frozen=True)
class Rule:
    """Something that cannot be: it is asked as soon as all of its factors have a value.

    Attributes:
        factors: What it reads.
        holds: Gets their values, in this order, and says whether they can occur together.
        why: The reason, for people.
    """

    factors: tuple[str, ...]
    holds: Callable[..., bool]
    why: str = ""

    def allows(self, row: Row) -> bool:
        """Return whether a row that may be incomplete can still become a configuration, as far as this rule knows."""
        if any(factor not in row for factor in self.factors):
            return True
        return bool(self.holds(*(row[factor] for factor in self.factors)))


def complete(factors: Factors, rules: Sequence[Rule], row: Row, prefer: Callable | None = None) -> Row | None:
    """Return a whole configuration that contains `row`, or None if the rules leave none.

    Args:
        factors: Every factor and its values.
        rules: What excludes what.
        row: Values that are given.
        prefer: Gets a row and a (factor, value); the values of a factor are tried from the highest answer down. None:
            in the order in which they are listed.
    """
    if not all(rule.allows(row) for rule in rules):
        return None
    # The factor with the fewest values left goes first: it fails soonest.
    open_values = {
        factor: [v for v in values if all(r.allows(row | {factor: v}) for r in rules if factor in r.factors)]
        for factor, values in factors.items()
        if factor not in row
    }
    if not open_values:
        return row
    factor = min(open_values, key=lambda name: len(open_values[name]))
    values = open_values[factor]
    if prefer is not None:
        values = sorted(values, key=lambda value: prefer(row, (factor, value)), reverse=True)
    for value in values:
        if (found := complete(factors, rules, row | {factor: value}, prefer)) is not None:
            return found
    return None


def pairs_of(row: Row) -> set[Pair]:
    """Return every pair of values that a configuration shows."""
    return {Pair(pair) for pair in combinations(row.items(), 2)}


def allowed_pairs(factors: Factors, rules: Sequence[Rule]) -> list[Pair]:
    """Return the pairs that at least one whole configuration shows, in the order of the factors."""
    found: dict[Pair, bool] = {}
    for (one, ones), (other, others) in combinations(factors.items(), 2):
        for first, second in product(ones, others):
            pair = Pair({(one, first), (other, second)})
            if pair in found:
                continue
            row = complete(factors, rules, {one: first, other: second})
            found[pair] = row is not None
            if row is not None:
                found |= dict.fromkeys(pairs_of(row), True)
    return [
        pair
        for (one, ones), (other, others) in combinations(factors.items(), 2)
        for first, second in product(ones, others)
        if found[pair := Pair({(one, first), (other, second)})]
    ]


def choose(
    factors: Factors, rules: Sequence[Rule], given: Iterable[Row] = (), cheap_first: Sequence[str] = ()
) -> list[Row]:
    """Return configurations that together show every allowed pair, the given ones first; the same every time.

    Raises:
        ValueError: If a given one is incomplete, has an unknown value or breaks a rule.
    """
    chosen = [dict(row) for row in given]
    for row in chosen:
        _check(factors, rules, row)
    left = dict.fromkeys(allowed_pairs(factors, rules))  # a set that keeps its order
    for row in chosen:
        _cross_off(left, row)

    used = Counter(item for row in chosen for item in row.items())

    def news(row: Row, item: tuple[str, object]) -> tuple[int, int]:
        new = sum(Pair({item, other}) in left for other in row.items())
        return new, 0 if item[0] in cheap_first else -used[item]

    while left:
        seed = next(iter(left))
        row = complete(factors, rules, dict(seed), news)
        assert row is not None  # the pair is allowed
        row = {factor: row[factor] for factor in factors}
        chosen.append(row)
        used.update(row.items())
        _cross_off(left, row)
    return chosen


def _cross_off(left: dict[Pair, None], row: Row) -> None:
    for pair in pairs_of(row):
        left.pop(pair, None)


def _check(factors: Factors, rules: Sequence[Rule], row: Row) -> None:
    if set(row) != set(factors):
        raise ValueError(f"{row} must have exactly the factors {', '.join(factors)}")
    for factor, value in row.items():
        if value not in factors[factor]:
            raise ValueError(f"{factor}={value!r} must be one of {', '.join(map(str, factors[factor]))}")
    for rule in rules:
        if not rule.allows(row):
            values = ", ".join(f"{factor}={row[factor]!r}" for factor in rule.factors)
            raise ValueError(f"{values} cannot occur together: {rule.why}")
