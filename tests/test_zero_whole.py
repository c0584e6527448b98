"""ZeRO-1 by whole parameters: the calculator against PyTorch's ZeroRedundancyOptimizer, on every rank."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from lablib.calc.memory import Stage, run_config, training_memory
from lablib.calc.memory.formulas import greedy_partition, parts_of_ranks
from lablib.calc.memory.timeline import memory_timeline
from tests.evidence.cases import Case
from tests.evidence.oracles import build_model
from tests.evidence.oracles.models import fullest_rank, states_of_every_rank

ADAMW = partial(torch.optim.AdamW, lr=1e-3)


@pytest.mark.parametrize(
    ("implementation", "family", "recipe", "ranks"),
    [
        ("toy", "gpt2", "fp32", 3),
        ("toy", "llama", "pure-bf16", 3),
        ("hf", "qwen2", "fp32", 2),
        ("hf", "gpt2", "pure-bf16", 5),
    ],
)
def test_every_rank_holds_what_the_partition_says(implementation: str, family: str, recipe: str, ranks: int) -> None:
    """Two moments a value, in the dtype of the parameter. GPT-2's tables make it uneven, three equal ranks cannot be."""
    case = Case(implementation=implementation, family=family, recipe=recipe)
    model = build_model(case).model
    theirs = states_of_every_rank(ADAMW, model, ranks)
    settings = case.settings() | {"dp": ranks, "zero": 1, "sharding": "per-tensor"}
    del settings["stage"]
    run = run_config(settings.pop("model"), **settings)
    parts = parts_of_ranks(Stage(run, 0))
    assert [2 * sum(part) * run.recipe.moment for part in parts] == theirs
    states = training_memory(run.model, **settings).terms
    assert states["momentum"] + states["variance"] == max(theirs)
    assert theirs.index(max(theirs)) == fullest_rank(model, ranks)


def test_the_example_of_the_module() -> None:
    assert greedy_partition([4, 10, 3, 6, 5], 2) == [[10, 4], [6, 5, 3]]
    assert greedy_partition([6, 100, 4, 5], 2) == [[100], [6, 5, 4]]
    assert greedy_partition([7], 3) == [[7], [], []]
    with pytest.raises(ValueError, match="ranks=0 must be at least 1"):
        greedy_partition([1], 0)


def test_no_rank_has_less_than_its_share_or_much_more() -> None:
    """The largest load is at least the mean. It is at most the mean and one parameter more: when the last parameter
    came to the fullest rank, no other had less, so that rank had no more than the mean of what there was by then."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    dice = random.Random(seed)
    sizes = [dice.randint(1, 1000) for _ in range(dice.randint(1, 60))]
    ranks = dice.randint(1, 12)
    parts = greedy_partition(sizes, ranks)
    assert sorted(size for part in parts for size in part) == sorted(sizes)
    most = max(map(sum, parts))
    assert sum(sizes) <= ranks * most <= sum(sizes) + ranks * max(sizes)


def test_what_differs_from_ddp_is_the_optimizer_alone() -> None:
    """On one rank nothing is divided; on four, weights, gradients and DDP's buckets are what they were."""
    settings = {"implementation": "hf", "recipe": "fp32", "seq": 256}
    alone = training_memory("gpt2", **settings)
    assert training_memory("gpt2", zero=1, sharding="per-tensor", **settings).terms == alone.terms
    ddp = training_memory("gpt2", dp=4, **settings).terms
    whole = training_memory("gpt2", dp=4, zero=1, sharding="per-tensor", **settings).terms
    assert {t for t in ddp if ddp[t] != whole[t]} == {"momentum", "variance"}
    # The token table is 38.6 of 124 million parameters: more than a quarter, so a fourth rank does not help.
    table = 50257 * 768
    assert whole["momentum"] == 4 * table > ddp["momentum"] / 4
    # The fullest instants differ by the moments, and in the step by their root: it is taken of the own part.
    steps = [
        memory_timeline("gpt2", dp=4, zero=zero, sharding=sharding, **settings)
        for zero, sharding in ((0, "flat"), (1, "per-tensor"))
    ]
    moments = 2 * (ddp["momentum"] - whole["momentum"])
    at = "backward of the loss"
    assert steps[0].instant(at).total - steps[1].instant(at).total == moments
    assert steps[1].instant("optimizer step").term("optimizer_temporaries") == 4 * table


def test_bad_input() -> None:
    for how, message in (
        ({"zero": 2}, "sharding='per-tensor' contradicts zero=2: ZeroRedundancyOptimizer shards the optimizer alone"),
        ({"zero": 1, "tuning": "qlora"}, "sharding='per-tensor' is not known with tuning='qlora'"),
        ({"zero": 1, "offload": "optimizer"}, "is not known with .* offload='optimizer'"),
        ({"zero": 1, "optimizer": "adamw-8bit"}, "is not known with optimizer='adamw-8bit'"),
    ):
        with pytest.raises(ValueError, match=message):
            training_memory("gpt2", dp=4, sharding="per-tensor", **how)
