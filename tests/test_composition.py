"""Compositions on real ranks: toys and PyTorch against one process, and what each axis sends against its prediction.

Distances. GPT-2 shapes run in float64 throughout, so sums in another order differ by some 1e-15 of values that are at
most about 10. AdamW with lr = eps makes of an error of a gradient no larger one of a weight. 1e-11 leaves a factor of
1,000. Llama shapes have a norm that works in fp32 by design: there errors are near 1e-6, and 1e-5 is the bound, as in
test_tensor_parallel. A slip in the idea (a sum for a mean, a forgotten all-reduce, a stage's gradient lost) moves a
gradient by a good part of itself, 1e-2 and more.

Traffic is compared exactly: calls by operation, and bytes.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lablib.calc.layouts import AxisTraffic, Miniature, predicted_traffic
from lablib.launch.layouts import run_miniature, try_orders
from lablib.launch.layouts.composition import Composition, RankRun, train, train_alone
from lablib.launch.layouts.orders import CASES, VERDICTS, Outcome
from lablib.launch.layouts.variants import DIMS, make_groups
from lablib.launch.ranks import run_ranks
from lablib.toys.transformer import tiny_config
from tests.processes import new_seed

EXACT, ROUNDED = 1e-11, 1e-5


@pytest.fixture(scope="module")
def seed() -> int:
    return new_seed()


def draw(seed: int, family: str = "gpt2", **layout: object) -> Miniature:
    """A miniature with odd sizes; what must divide does."""
    dice = random.Random(seed)
    config = tiny_config(
        family,
        num_layers=2 * dice.randint(1, 2),
        hidden=8 * dice.randint(1, 3),
        num_heads=4,
        ffn=2 * dice.randrange(7, 25, 2),
        vocab=2 * dice.randrange(9, 40, 2),
        max_positions=23,
        tied=False,
    )
    fields = {"batch": 8 * dice.randint(1, 2), "seq": dice.randint(3, 13), "steps": 2, "dtype": "float64"}
    return Miniature(config=config, **fields | layout)


SMALL = {"dtype": "float32", "batch": 8}
#: (family, layout, versions): all on four ranks. The two with DTensors have equal sizes, which torch remembers.
FOUR = (
    ("gpt2", {"dp": 2, "tp": 2}, ("toys",)),
    ("gpt2", {"dp": 2, "pp": 2, "micro_batches": 4, "steps": 3}, ("toys", "torch")),
    ("gpt2", {"dp": 2, "pp": 2, "micro_batches": 2, "sharded": True}, ("toys", "torch")),
    ("llama", {"dp": 2, "tp": 2, "sharded": True, **SMALL}, ("toys", "torch")),
    ("llama", {"tp": 2, "pp": 2, "micro_batches": 2, "schedule": "gpipe", **SMALL}, ("toys", "torch")),
)


def _four(seed: int) -> list[dict]:
    found = []
    for family, layout, versions in FOUR:
        job = draw(seed, family, **layout)
        found.append({version: train(job, version, seed) for version in versions})
    return found


@pytest.fixture(scope="module")
def four(seed: int) -> list[Composition]:
    """All compositions on four ranks, in one start of the ranks."""
    by_rank = run_ranks(_four, 4, seed, timeout=120)
    found = []
    for i, (family, layout, versions) in enumerate(FOUR):
        job = draw(seed, family, **layout)
        ranks = {version: [ran[i][version] for ran in by_rank] for version in versions}
        found.append(Composition(job, train_alone(job, seed), ranks))
    return found


EIGHT = Miniature(
    config=tiny_config("gpt2", num_layers=2, hidden=16, vocab=34, max_positions=16, tied=False),
    dp=2, tp=2, pp=2, micro_batches=4, sharded=True, steps=2, seq=7, dtype="float64",
)  # fmt: skip


def _eight(seed: int) -> tuple[dict, dict[str, RankRun]]:
    axes = ("tp", "dp", "pp")
    theirs = init_device_mesh("cpu", (EIGHT.pp, EIGHT.dp, EIGHT.tp), mesh_dim_names=DIMS)
    ours, read = make_groups(EIGHT), dist.get_process_group_ranks
    groups = {axis: (read(ours[axis]), read(theirs[axis].get_group())) for axis in axes}
    return groups, {version: train(EIGHT, version, seed) for version in ("toys", "torch")}


@pytest.fixture(scope="module")
def on_eight(seed: int) -> list[tuple[dict, dict[str, RankRun]]]:
    """2 x 2 x 2 on eight ranks, both versions, and the groups of both."""
    return run_ranks(_eight, 8, seed, timeout=120)


@pytest.fixture(scope="module")
def eight(on_eight: list, seed: int) -> Composition:
    ranks = {version: [ran[version] for _, ran in on_eight] for version in ("toys", "torch")}
    return Composition(EIGHT, train_alone(EIGHT, seed), ranks)


def test_four_ranks_equal_one_process(four: list[Composition]) -> None:
    for ran in four:
        bound = EXACT if ran.job.dtype == "float64" else ROUNDED
        for version in ran.ranks:
            far = ran.worst(version)
            assert max(far.loss, far.gradients, far.weights) < bound, (ran.job, version, far)


def test_every_axis_sends_what_is_predicted(four: list[Composition], eight: Composition) -> None:
    for ran in (*four, eight):
        for version, runs in ran.ranks.items():
            for run in runs:
                assert run.traffic == ran.predicted(version, run.rank), (ran.job, version, run.rank)
                assert run.other == {}
            assert ran.as_predicted(version)


def test_two_by_two_by_two_equals_one_process(eight: Composition) -> None:
    for version in ("toys", "torch"):
        far = eight.worst(version)
        assert max(far.loss, far.gradients, far.weights) < EXACT, (version, far)
        losses = [run.losses for run in eight.ranks[version]]
        # The last stage of every replica and tp rank has the loss of the whole batch; the first has none.
        assert [len(one) for one in losses] == [0] * 4 + [2] * 4
    report = eight.report(rank=7)
    assert report.count("as predicted") == 6
    assert "torch  rank 7  tp" in report


def test_the_comparison_can_fail(four: list[Composition], seed: int) -> None:
    """Another start, a lost stage, and another job are seen."""
    ran = four[1]
    other = replace(ran, alone=train_alone(ran.job, seed + 1))
    assert other.worst("toys").gradients > 1e-2
    first = [run for run in ran.ranks["toys"] if run.coordinates["pp"] == 0]
    with pytest.raises(RuntimeError, match=r"head\.weight.* are on no rank"):
        replace(ran, ranks={"toys": first}).worst("toys")
    longer = replace(ran, job=replace(ran.job, seq=ran.job.seq + 1))
    assert not longer.as_predicted("toys")
    assert "predicted 4 send" in longer.report()


def test_traffic_by_hand() -> None:
    """2 layers of width 8 in 2 stages, tp=2, dp=2, 2 micro-batches of 1 window of 4 tokens, fp32: X is 128 bytes."""
    config = tiny_config("llama", num_layers=2, hidden=8, num_heads=2, num_kv_heads=2, ffn=6, vocab=10, tied=False)
    job = Miniature(config=config, dp=2, tp=2, pp=2, micro_batches=2, batch=4, seq=4)
    assert job.stream_bytes == 128
    first, last = predicted_traffic(job, 0), predicted_traffic(job, 7)
    # Of a ring all-reduce on two ranks each sends the message once. Stage 0: 4 of its layer, 1 of the embedding.
    assert first["tp"] == AxisTraffic({"all_reduce": 2 * 5}, 2 * 5 * 128)
    # Stage 1: 4, 1 of the head's input, and the loss: 4 maxima, then 8 sums.
    assert last["tp"] == AxisTraffic({"all_reduce": 2 * 7}, 2 * (5 * 128 + 3 * 4 * 4))
    assert first["pp"] == last["pp"] == AxisTraffic({"send": 2}, 2 * 128)
    # A block: 4 matrices of 8 x 4, 3 of 8 x 3 and two norms of 8; the table 5 x 8; the last stage a norm more.
    block = 4 * 32 + 3 * 24 + 16
    assert first["dp"] == AxisTraffic({"all_reduce": 1}, (block + 40) * 4)
    assert last["dp"] == AxisTraffic({"all_reduce": 1}, (block + 40 + 8) * 4)
    # PyTorch reduces the gradients through q, k, v, up and gate one by one, and gathers 4 x 10 logits.
    torch_first, torch_last = predicted_traffic(job, 0, "torch"), predicted_traffic(job, 7, "torch")
    assert torch_first["tp"] == AxisTraffic({"all_reduce": 2 * 8}, 2 * 8 * 128)
    assert torch_last["tp"] == AxisTraffic({"all_reduce": 2 * 8, "all_gather": 2}, 2 * (8 * 128 + 4 * 5 * 4))


def test_what_cannot_be_is_refused_before_anything_starts() -> None:
    config = tiny_config("gpt2", num_layers=2, hidden=8, tied=False)
    refused = (
        ({"tp": 3}, "tp=3 does not divide num_heads=4"),
        ({"pp": 4}, "pp=4 does not divide num_layers=2"),
        ({"dp": 3}, "dp x micro_batches=3 does not divide batch=8"),
        ({"micro_batches": 2}, "micro_batches=2 needs pp of at least 2"),
        ({"schedule": "zb-h1"}, "unknown schedule 'zb-h1'"),
        ({"dtype": "bf16"}, "unknown dtype 'bf16'"),
    )
    for fields, message in refused:
        with pytest.raises(ValueError, match=message):
            Miniature(config=config, **fields)
    with pytest.raises(ValueError, match="tied=False"):
        Miniature(config=tiny_config("gpt2"), pp=2, micro_batches=2)
    job = Miniature(config=config, dp=2, tp=2)
    with pytest.raises(ValueError, match="takes no DTensors"):
        run_miniature(job, ("torch",))
    with pytest.raises(ValueError, match="in the second step"):
        run_miniature(Miniature(config=config, dp=2, steps=2), ("torch",))
    with pytest.raises(ValueError, match="unknown version 'jax'"):
        run_miniature(job, ("jax",))
    with pytest.raises(ValueError, match="only the toys take others"):
        run_miniature(replace(job, order="dp-tp-cp-ep-pp", sharded=True), ("torch",))
    with pytest.raises(ValueError, match="micro_batches=1 with pp=2: PyTorch's Schedule1F1B needs one for every"):
        run_miniature(Miniature(config=config, pp=2), ("toys", "torch"))


# Orders of application, each run on four ranks: the verdicts are PyTorch's own

REFUSED = {
    "fsdp-tp": "ValueError: Cannot distribute a DTensor",
    "tp-ddp": "mixed torch.Tensor and DTensor|Attempted to flatten multiple dimensions",  # torch 2.11 stops earlier
    "root-blocks": "RuntimeError",
    "fsdp-stages": "mixed torch.Tensor and DTensor",
    "clip": "must have the same mesh",
}
WARNED = {"recompute-tp", "compile-tp", "ddp-tp"}


@pytest.fixture(scope="module")
def seen() -> dict[str, Outcome]:
    return {one.name: one for one in try_orders()}


def test_every_order_was_tried(seen: dict[str, Outcome]) -> None:
    assert list(seen) == list(CASES)
    assert {one.verdict for one in seen.values()} == set(VERDICTS)


def test_the_right_order_trains_what_one_process_trains(seen: dict[str, Outcome]) -> None:
    one = seen["right"]
    assert one.verdict == "right"
    assert one.order == ("tp", "recompute", "compile", "FSDP", "optimizer")
    assert one.numbers["off"] < 1e-5


def test_some_orders_are_refused(seen: dict[str, Outcome]) -> None:
    assert {name for name, one in seen.items() if one.verdict == "refused"} == set(REFUSED)
    for name, text in REFUSED.items():
        assert re.search(text, seen[name].seen)
        assert seen[name].fix


def test_a_plan_that_finds_nothing_only_warns(seen: dict[str, Outcome]) -> None:
    """The names have changed: nothing is split, the loss is right, and only warnings tell."""
    for name in WARNED:
        one = seen[name]
        assert one.verdict == "silently wrong"
        assert one.numbers["held"] == one.numbers["whole"]
        assert one.numbers["loss"] == pytest.approx(one.numbers["right"], abs=1e-5)
        assert one.warned >= 6


def test_an_optimizer_made_too_early_trains_nothing_or_a_part(seen: dict[str, Outcome]) -> None:
    sharded, split = seen["optimizer-fsdp"].numbers, seen["optimizer-tp"].numbers
    assert sharded["loss"] == pytest.approx(sharded["before"], abs=1e-5)
    assert split["right"] + 1e-2 < split["loss"] < split["before"] - 1e-3
    assert {seen[name].verdict for name in ("optimizer-fsdp", "optimizer-tp")} == {"silently wrong"}


def test_replicas_drift_apart_when_stages_are_cut_out_of_ddp(seen: dict[str, Outcome]) -> None:
    assert seen["ddp-stages"].numbers["all_reduces"] == 0
    assert seen["ddp-stages"].numbers["apart"] > 0.01


def test_splitting_before_cutting_sends_every_stage(seen: dict[str, Outcome]) -> None:
    numbers = seen["tp-stages"].numbers
    # Two equal stages but for the ends, which are equal too: a table and a head of one size.
    assert numbers["bytes"] == 2 * numbers["bytes_of_own_stage"]


def test_recompute_around_fsdp_gathers_no_more(seen: dict[str, Outcome]) -> None:
    one = seen["fsdp-recompute"]
    assert one.verdict == "no difference"
    assert one.numbers["all_gathers"] == one.numbers["usual_all_gathers"] > 0


def test_clipping_mesh_by_mesh_is_right(seen: dict[str, Outcome]) -> None:
    numbers = seen["clip-by-mesh"].numbers
    assert numbers["norm"] == pytest.approx(numbers["right"], rel=1e-5)
    assert numbers["clipped"] == pytest.approx(numbers["right"] / 2, rel=1e-5)


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown order tp-jax; use some of right"):
        try_orders(["tp-jax"])
