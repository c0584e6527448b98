"""The grid: which cases the memory calculator is judged on; and others, drawn at random.

    for case in grid():       # or held_out()
        print(case.name)

The grid is few cases that bring every pair of values together that can occur together. A defect that needs one or two
values is met; one that needs three may be missed. The chooser begins each case with a pair that is still to be shown,
gives every other factor the value that shows most new pairs (of equals the one that was used least), and goes back where
a rule leaves none.

Every miss of the grid was looked at until its cause was found. What a configuration of yours will meet is better told by
cases that were never looked at. They are drawn by a seed; whoever corrects the calculator because of one of them draws
anew, with another seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product

from tests.evidence.cases import FACTORS, Case, case_model, has_model

Factors = Mapping[str, Sequence]

Row = dict[str, object]

Pair = frozenset  # of two (factor, value)


# --- few rows that show every pair --------------------------------------------------------------------------


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
    """Return a complete configuration that contains `row`, or None if the rules leave none."""
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
    return {Pair(pair) for pair in combinations(row.items(), 2)}


def allowed_pairs(factors: Factors, rules: Sequence[Rule]) -> list[Pair]:
    """Return the pairs that at least one complete configuration shows, in the order of the factors."""
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
    """Return configurations that together show every allowed pair, the given ones first; the same every time."""
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


# --- what cannot be combined --------------------------------------------------------------------------------

_SIXTEEN_BITS_BY_HAND = ("fp32", "pure-bf16", "mixed-bf16")
_FSDP2_MIXED = ("fsdp2-mixed", "fsdp2-mixed-fp32-reduce")

_REPLICAS = ("ddp", "zero1")


def _divides(family: str, size: str, tensor: str) -> bool:
    if not has_model(family, size):
        return True
    model, tp = case_model(family, size), int(tensor[0])
    return not any(number % tp for number in (model.num_heads, model.num_kv_heads, model.ffn))


def _fits(family: str, size: str, seq: int) -> bool:
    if size == "tiny":
        return seq <= 1000  # on real tensors
    return not has_model(family, size) or seq <= case_model(family, size).max_positions


def _has_own_head(family: str, size: str) -> bool:
    return family != "gpt2" and not (has_model(family, size) and case_model(family, size).tied)


RULES: tuple[Rule, ...] = (
    Rule(("family", "size"), has_model, "no model of this family in this size"),
    Rule(("family", "size", "tensor"), _divides, "tp does not divide heads or MLP"),
    Rule(("family", "size", "seq"), _fits, "longer than the model's positions, or than a test on real tensors"),
    Rule(
        ("implementation", "family"),
        lambda implementation, family: (
            family
            in {"toy": ("gpt2", "llama", "qwen2"), "paper": FACTORS["family"]}.get(
                implementation, ("gpt2", "llama", "qwen2", "mistral")
            )
        ),
        "experts are counted as the papers do; the toy has three families",
    ),
    Rule(
        ("implementation", "tensor"),
        lambda implementation, tensor: implementation == "paper" or "+sp" not in tensor,
        "the plan that Hugging Face ships for PyTorch has no sequence parallelism",
    ),
    *(
        Rule(
            ("implementation", "tensor", *factors),
            lambda implementation, tensor, *values, allowed=allowed: (
                implementation == "paper" or tensor == "1" or allowed(*values)
            ),
            why,
        )
        for factors, allowed, why in (
            (("family", "size"), _has_own_head, "the plan splits the head, and not the table that is tied to it"),
            (("sharding",), lambda sharding: sharding == "none", "PyTorch's split is judged alone"),
            (("pp",), lambda pp: pp == 1, "PyTorch's split is judged alone"),
            (("accumulate",), lambda accumulate: accumulate == 1, "PyTorch's split is judged alone"),
            (("recipe",), lambda recipe: recipe in ("fp32", "pure-bf16"), "DTensor has no autocast"),
            (("tuning",), lambda tuning: tuning == "full", "adapters are not in the plan"),
            (
                ("optimizer", "step"),
                lambda optimizer, step: optimizer == "adamw" or step != "fused",
                "PyTorch's fused SGD takes no DTensors",
            ),
        )
    ),
    Rule(
        ("implementation", "recompute"),
        lambda implementation, recompute: implementation != "hf" or recompute != "selective",
        "Hugging Face's classes recompute whole blocks",
    ),
    Rule(
        ("implementation", "pp"),
        lambda implementation, pp: implementation != "hf" or pp == 1,
        "Hugging Face's classes are one stage",
    ),
    Rule(
        ("implementation", "recipe"),
        lambda implementation, recipe: implementation != "paper" or recipe in (*_SIXTEEN_BITS_BY_HAND, *_FSDP2_MIXED),
        "no paper counts autocast",
    ),
    Rule(
        ("recipe", "sharding"),
        lambda recipe, sharding: (recipe in _FSDP2_MIXED) <= sharding.startswith("fsdp2"),
        "MixedPrecisionPolicy belongs to FSDP2",
    ),
    Rule(
        ("recipe", "sharding"),
        lambda recipe, sharding: not sharding.startswith("fsdp2") or recipe not in ("mixed-bf16", "autocast-bf16"),
        "FSDP2 has a policy of its own for mixed precision",
    ),
    Rule(("sharding", "dp"), lambda sharding, dp: (sharding == "none") == (dp == 1), "one rank, or a reason for more"),
    Rule(
        ("sharding", "size"),
        lambda sharding, size: sharding not in _REPLICAS or size == "tiny",
        "DDP's reducer is C++ and takes real tensors",
    ),
    Rule(
        ("sharding", "pp"),
        lambda sharding, pp: sharding == "none" or pp == 1,
        "pipelines are judged without data parallelism",
    ),
    Rule(
        ("sharding", "implementation"),
        lambda sharding, implementation: sharding not in _REPLICAS or implementation != "paper",
        "DDP is judged with real classes",
    ),
    Rule(("tensor", "pp"), lambda tensor, pp: tensor == "1" or pp == 1, "stages are judged whole"),
    Rule(("size", "pp"), lambda size, pp: size != "70b" or pp == 1, "only sharded"),
    Rule(
        ("size", "sharding", "dp"),
        lambda size, sharding, dp: size != "70b" or (sharding.startswith("fsdp2") and dp >= 8),
        "70b needs many ranks",
    ),
    Rule(
        ("optimizer", "step", "sharding"),
        lambda optimizer, step, sharding: optimizer == "adamw" or step != "fused" or not sharding.startswith("fsdp2"),
        "PyTorch's fused SGD takes no sharded tensors",
    ),
    Rule(
        ("tuning", "implementation", "family"),
        lambda tuning, implementation, family: tuning == "full" or (implementation == "hf" and family != "gpt2"),
        "adapters go beside Hugging Face's linear layers",
    ),
    Rule(
        ("tuning", "recipe"),
        lambda tuning, recipe: tuning == "full" or recipe in ("fp32", "autocast-bf16", *_FSDP2_MIXED),
        "our adapters are fp32",
    ),
    Rule(
        ("pp", "recipe"),
        lambda pp, recipe: pp == 1 or recipe in _SIXTEEN_BITS_BY_HAND,
        "stages are judged without autocast",
    ),
    Rule(
        ("accumulate", "pp"),
        lambda accumulate, pp: accumulate == 1 or pp == 1,
        "a pipeline has micro-batches of its own",
    ),
    Rule(
        ("accumulate", "implementation"),
        lambda accumulate, implementation: accumulate == 1 or implementation != "paper",
        "no paper says what gradients that add up need",
    ),
    Rule(
        ("accumulate", "size"),
        lambda accumulate, size: accumulate == 1 or size in ("tiny", "small"),
        "steps of a large model take minutes, and three of them three times as many",
    ),
    Rule(
        ("accumulate", "attention", "seq"),
        lambda accumulate, attention, seq: accumulate == 1 or attention == "fused" or seq == 64,
        "three times the scores of a thousand tokens take long, and show nothing that 64 do not",
    ),
)


# --- the grid -----------------------------------------------------------------------------------------------

#: Cases that everybody asks for, whatever the chooser would take.
_FSDP2 = {"implementation": "hf", "seq": 2048, "recipe": "fsdp2-mixed-fp32-reduce", "sharding": "fsdp2"}
_FOREACH = {"seq": 1000, "step": "foreach"}
LANDMARKS: tuple[Case, ...] = (
    Case(**_FSDP2, size="8b", dp=8, step="foreach"),
    Case(**_FSDP2, size="70b", dp=64, step="foreach", recompute="full"),
    Case(**_FOREACH, implementation="hf", family="gpt2", size="small"),
    Case(implementation="hf", size="small", seq=2048, recipe="autocast-bf16", step="foreach"),
    Case(implementation="hf", family="qwen2", size="8b", seq=2048, recipe="pure-bf16", step="fused", recompute="full"),
    Case(**_FSDP2 | {"sharding": "fsdp2-keep"}, family="mistral", size="8b", dp=64, step="foreach"),
    Case(**_FOREACH, size="small", recipe="mixed-bf16"),
)

#: Cases whose step is kept moment by moment, to be drawn.
DRAWN: tuple[Case, ...] = (LANDMARKS[0], LANDMARKS[2])

#: What else people train every day; they come after the chosen ones.
EVERYDAY: tuple[Case, ...] = (
    Case(**_FOREACH, implementation="hf"),
    Case(**_FOREACH, implementation="hf", family="qwen2", size="small", recompute="full"),
    Case(implementation="hf", family="mistral", size="small", seq=1000, recipe="mixed-bf16"),
    Case(
        implementation="hf",
        size="small",
        seq=2048,
        micro_batch=3,
        recipe="pure-bf16",
        step="foreach",
        attention="plain",
    ),
    Case(**_FSDP2, size="8b", micro_batch=3, step="fused", recompute="full", dp=64),
    Case(family="gpt2", size="small", seq=1000, recompute="selective", attention="plain"),
    Case(seq=1000, sharding="fsdp2", dp=2),
)


#: Families beside the factors', a sliding window, and FSDP2's default reduction: Hugging Face's classes alone.
FAMILIES: tuple[Case, ...] = tuple(
    Case(implementation="hf", family=family, **how)
    for family, size in (
        ("mistral-window", "small"),
        ("qwen3", "small"),
        ("starcoder2", "small"),
        ("gemma", "small"),
        ("olmo2", "8b"),
        ("phi3", "small"),
        ("gpt-neox", "small"),
    )
    for how in (
        {"micro_batch": 3, "seq": 1000, "recipe": "pure-bf16", "step": "foreach"},
        {"micro_batch": 3, "recipe": "autocast-bf16", "recompute": "full", "attention": "plain"},
        {"size": size, "seq": 2048, "recipe": "fsdp2-mixed", "sharding": "fsdp2", "dp": 8, "step": "fused"},
    )
)

#: Experts of Hugging Face's classes: grouped, as they run by themselves, at real sizes too; and in a loop, whose answers
#: depend on values, so that fake tensors cannot run it.
EXPERTS: tuple[Case, ...] = tuple(
    Case(implementation="hf", family=family, **how)
    for family in ("mixtral-grouped", "qwen3-moe")
    for how in (
        {"micro_batch": 3, "seq": 1000, "recipe": "pure-bf16", "step": "foreach"},
        {"micro_batch": 3, "recipe": "autocast-bf16", "recompute": "full", "attention": "plain"},
        {"recipe": "mixed-bf16", "accumulate": 3, "optimizer": "sgd-momentum", "attention": "plain"},
        {"sharding": "zero1", "dp": 2, "step": "foreach"},
        {"recipe": "fsdp2-mixed-fp32-reduce", "sharding": "fsdp2", "dp": 8, "step": "foreach"},
        {"size": "8b", "seq": 1000, "micro_batch": 3, "recipe": "pure-bf16", "recompute": "full"},
        {"size": "8b", "seq": 2048, "recipe": "fsdp2-mixed", "sharding": "fsdp2", "dp": 8, "step": "fused"},
        {"size": "8b", "seq": 2048, "recipe": "fsdp2-mixed-fp32-reduce", "sharding": "fsdp2", "dp": 64}
        | {"step": "foreach", "recompute": "full"},
        {"size": "8b", "seq": 2048, "recipe": "fsdp2-mixed", "sharding": "fsdp2-keep", "dp": 64, "optimizer": "sgd"}
        | {"attention": "plain", "step": "foreach"},
    )
) + tuple(
    Case(implementation="hf", family=family, **how)
    for family in ("mixtral-loop", "qwen3-moe-loop")
    for how in (
        {"micro_batch": 3, "recipe": "pure-bf16", "step": "foreach", "recompute": "full"},
        {"recipe": "autocast-bf16", "attention": "plain"},
        {"recipe": "mixed-bf16", "accumulate": 3, "optimizer": "sgd-momentum"},
        {"recipe": "fsdp2-mixed-fp32-reduce", "sharding": "fsdp2", "dp": 8, "step": "fused"},
    )
)

#: Context parallelism: Hugging Face's classes in three ways, real tensors first, and the ring of this course.
CONTEXT: tuple[Case, ...] = (
    *(
        Case(implementation="hf", seq=512, **how)
        for how in (
            {"cp": 2, "sharding": "fsdp2", "step": "foreach"},
            {"cp": 2, "cp_way": "gathered", "sharding": "ddp", "recipe": "pure-bf16", "micro_batch": 3},
            {"cp": 4, "sharding": "ddp", "dp": 2, "recipe": "mixed-bf16", "recompute": "full"},
            {"cp": 4, "cp_way": "ulysses", "sharding": "fsdp2", "dp": 2, "family": "qwen2", "accumulate": 3},
            {"cp": 8, "sharding": "fsdp2-keep", "recipe": "fsdp2-mixed", "family": "qwen3", "optimizer": "sgd"},
        )
    ),
    *(
        Case(implementation="hf", size=size, sharding="fsdp2", step="foreach", **how)
        for size, how in (
            ("small", {"cp": 2, "seq": 4096, "recipe": "fsdp2-mixed", "micro_batch": 3}),
            ("small", {"cp": 4, "seq": 8192, "recipe": "pure-bf16", "cp_way": "gathered", "recompute": "full"}),
            ("small", {"cp": 8, "seq": 8192, "recipe": "fsdp2-mixed", "cp_way": "ulysses", "dp": 2}),
            ("small", {"cp": 4, "seq": 8192, "recipe": "fp32", "family": "mistral", "dp": 2}),
            ("8b", {"cp": 2, "seq": 16384, "recipe": "fsdp2-mixed-fp32-reduce", "dp": 4}),
            ("8b", {"cp": 4, "seq": 32768, "recipe": "fsdp2-mixed", "cp_way": "ulysses", "dp": 8, "family": "qwen2"}),
            (
                "8b",
                {"cp": 4, "seq": 32768, "recipe": "fsdp2-mixed", "cp_way": "gathered", "dp": 2, "recompute": "full"},
            ),
            ("8b", {"cp": 8, "seq": 131072, "recipe": "fsdp2-mixed-fp32-reduce", "dp": 8}),
            ("8b", {"cp": 8, "seq": 131072, "recipe": "fsdp2-mixed-fp32-reduce", "dp": 8, "recompute": "full"}),
            ("8b", {"cp": 8, "seq": 131072, "recipe": "fsdp2-mixed-fp32-reduce", "cp_way": "ulysses"}),
        )
    ),
    Case(seq=512, cp=2, sharding="fsdp2", step="foreach"),
    Case(seq=512, cp=4, sharding="fsdp2", dp=2, recipe="fsdp2-mixed", micro_batch=3, recompute="full"),
    Case(seq=512, cp=4, sharding="fsdp2", family="qwen2", recompute="selective", accumulate=3),
    Case(seq=512, cp=8, sharding="fsdp2", family="gpt2", recipe="pure-bf16", optimizer="sgd-momentum"),
)

#: All that stands beside the factors; it comes last.
BESIDE: tuple[Case, ...] = (*FAMILIES, *EXPERTS, *CONTEXT)


@cache
def grid() -> tuple[Case, ...]:
    """Return the cases: the landmarks, what shows every other allowed pair of values, and everyday ones."""
    landmarks = [{factor: getattr(case, factor) for factor in FACTORS} for case in LANDMARKS]
    rows = choose(FACTORS, RULES, landmarks, cheap_first=("size",))
    return (*(Case(**row) for row in rows), *EVERYDAY, *BESIDE)


# --- drawn at random ----------------------------------------------------------------------------------------

#: The present draw. Raise it when the calculator was changed because of one of its configurations; keep the old file then.
SEED = 13

#: How many of each size: the larger ones run for minutes under fake tensors.
COUNTS = {"tiny": 30, "small": 10}

#: Papers have no peak, so their counting is drawn less often.
IMPLEMENTATIONS = ("hf", "hf", "toy", "toy", "paper")


def held_out(seed: int = SEED, counts: dict[str, int] | None = None) -> tuple[Case, ...]:
    """Return configurations that are not in the grid, the same for the same seed.

    Kernels, family, recipe and recomputation are drawn first, each value as likely as another; then the rest, among
    what the rules of the grid leave.
    """
    draw = random.Random(seed)
    seen = {case.name for case in grid()}
    found: list[Case] = []
    for size, count in (COUNTS if counts is None else counts).items():
        left = count
        while left:
            row = _row(draw, size)
            if row is None:
                continue
            case = Case(**row)
            # On real tensors scores of a thousand tokens squared take long, and show nothing that 64 do not.
            slow = size == "tiny" and case.attention == "plain" and case.seq > 64
            if slow or case.name in seen:
                continue
            seen.add(case.name)
            found.append(case)
            left -= 1
    return tuple(found)


#: How many configurations of experts are drawn.
DRAWN_EXPERTS = 10


def drawn_experts(seed: int = SEED, count: int = DRAWN_EXPERTS) -> tuple[Case, ...]:
    """Return small configurations of Hugging Face's experts that are not in the grid, the same for the same seed."""
    draw = random.Random(f"experts {seed}")
    families = list(dict.fromkeys(case.family for case in EXPERTS))
    found: dict[str, Case] = {case.name: case for case in EXPERTS}
    while len(found) < len(EXPERTS) + count:
        # What Mistral's classes can be combined with, those with experts can, but for tensor parallelism and adapters.
        given: Row = {"implementation": "hf", "family": "mistral", "size": "tiny", "tensor": "1", "tuning": "full"}
        given |= {factor: draw.choice(FACTORS[factor]) for factor in ("recipe", "recompute", "sharding", "seq")}
        row = complete(FACTORS, RULES, given, lambda row, item: draw.random())
        family = draw.choice(families)
        if row is None or (row["seq"] > 64 and (row["attention"] == "plain" or family.endswith("-loop"))):
            continue
        case = Case(**{factor: row[factor] for factor in FACTORS} | {"family": family})
        found.setdefault(case.name, case)
    return tuple(found.values())[len(EXPERTS) :]


def _row(draw: random.Random, size: str) -> Row | None:
    given: Row = {"size": size, "implementation": draw.choice(IMPLEMENTATIONS)}
    given |= {factor: draw.choice(FACTORS[factor]) for factor in ("family", "recipe", "recompute")}
    row = complete(FACTORS, RULES, given, lambda row, item: draw.random())
    return None if row is None else {factor: row[factor] for factor in FACTORS}
