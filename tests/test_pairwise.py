"""The chooser of configurations against brute force, and the grid of the memory calculator against its own rules."""

from __future__ import annotations

import random
from itertools import combinations, product

import pytest

from tests.evidence.cases import FACTORS, Case
from tests.evidence.grid import BESIDE, LANDMARKS, RULES, Pair, Rule, allowed_pairs, choose, grid, pairs_of


def everything(factors: dict, rules: list[Rule]) -> list[dict]:
    """Every configuration that breaks no rule, by trying all."""
    rows = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    return [row for row in rows if all(r.holds(*(row[f] for f in r.factors)) for r in rules)]


def some_system(seed: int) -> tuple[dict, list[Rule]]:
    """A few factors, and rules over two or three of them that forbid some of their values."""
    draw = random.Random(seed)
    factors = {f"f{i}": tuple(range(draw.randint(1, 4))) for i in range(draw.randint(2, 5))}
    rules = []
    for _ in range(draw.randint(0, 4)):
        of = tuple(draw.sample(sorted(factors), min(len(factors), draw.randint(2, 3))))
        bad = {tuple(draw.choice(factors[f]) for f in of) for _ in range(draw.randint(1, 3))}
        rules.append(Rule(of, lambda *values, bad=bad: values not in bad))
    return factors, rules


@pytest.mark.parametrize("seed", range(40))
def test_every_allowed_pair_is_shown_and_no_rule_broken(seed: int) -> None:
    factors, rules = some_system(seed)
    possible = everything(factors, rules)
    shown = set().union(*map(pairs_of, possible)) if possible else set()
    assert set(allowed_pairs(factors, rules)) == shown
    chosen = choose(factors, rules)
    assert all(row in possible for row in chosen)
    assert (set().union(*map(pairs_of, chosen)) if chosen else set()) == shown
    assert len(chosen) <= max(1, len(shown))
    assert chosen == choose(factors, rules)


def test_three_switches_need_four_rows() -> None:
    rows = choose({"a": (0, 1), "b": (0, 1), "c": (0, 1)}, [])
    assert len(rows) == 4


def test_given_rows_come_first_and_are_checked() -> None:
    factors = {"a": (0, 1), "b": (0, 1)}
    rules = [Rule(("a", "b"), lambda a, b: a != b, "they differ")]
    assert choose(factors, rules, [{"a": 1, "b": 0}])[0] == {"a": 1, "b": 0}
    with pytest.raises(ValueError, match="a=0, b=0 cannot occur together: they differ"):
        choose(factors, rules, [{"a": 0, "b": 0}])
    with pytest.raises(ValueError, match="a=2 must be one of 0, 1"):
        choose(factors, rules, [{"a": 2, "b": 0}])
    with pytest.raises(ValueError, match="must have exactly the factors a, b"):
        choose(factors, rules, [{"a": 0}])


def chosen() -> tuple[Case, ...]:
    """The grid without what stands beside the factors."""
    return grid()[: -len(BESIDE)]


@pytest.mark.drawn
def test_the_grid_shows_every_allowed_pair() -> None:
    cases = chosen()
    rows = [{factor: getattr(case, factor) for factor in FACTORS} for case in cases]
    assert len(rows) >= 60
    assert len({case.name for case in cases}) == len(rows)
    assert cases[: len(LANDMARKS)] == LANDMARKS
    for row in rows:
        for rule in RULES:
            assert rule.allows(row), (row, rule.why)
    shown = set().union(*map(pairs_of, rows))
    assert shown == set(allowed_pairs(FACTORS, RULES))
    # What is not shown is forbidden: for each such pair the rules leave nothing, whatever the other factors are.
    for (one, ones), (other, others) in combinations(FACTORS.items(), 2):
        for first, second in product(ones, others):
            if Pair({(one, first), (other, second)}) not in shown:
                assert not _some_case(one, first, other, second)


def _some_case(one: str, first: object, other: str, second: object) -> bool:
    """Look for a case with two values by drawing at random: independent of how the chooser looks."""
    draw = random.Random(f"{one} {first} {other} {second}")
    for _ in range(300):
        row = {factor: draw.choice(values) for factor, values in FACTORS.items()} | {one: first, other: second}
        if all(rule.allows(row) for rule in RULES):
            return True
    return False


def test_every_value_of_every_factor_is_judged() -> None:
    for factor, values in FACTORS.items():
        assert {getattr(case, factor) for case in chosen()} == set(values), factor


def test_names_and_settings() -> None:
    case = Case(
        implementation="hf", family="qwen2", size="8b", sharding="fsdp2-keep", dp=8, recipe="fsdp2-mixed-fp32-reduce"
    )
    assert case.name == "qwen2.5-7b, hf, 1 x 64, fsdp2-mixed-fp32-reduce, fsdp2-keep, dp 8"
    settings = case.settings()
    assert (settings["zero"], settings["sharding"], settings["dp"]) == (2, "fsdp2", 8)
    assert Case(implementation="toy", family="qwen2").settings()["model"].family == "llama"
    assert Case(implementation="toy", family="qwen2").settings()["model"].qkv_bias
    with pytest.raises(ValueError, match="there is no model of family 'gpt2' in size '70b'"):
        _ = Case(family="gpt2", size="70b").model
