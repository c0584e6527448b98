"""DeepSpeed's ZeRO to the byte: the formulas against what DeepSpeed itself held, rank by rank."""

from __future__ import annotations

import importlib.util
import random

import pytest

from lablib.calc.deepspeed_states import deepspeed_memory, deepspeed_states, touched
from lablib.calc.memory import training_memory
from lablib.calc.memory_cases import Case
from lablib.calc.memory_headline import read_table
from lablib.launch.deepspeed_facts import RECORD, ROWS, measure_rows

TABLE = read_table(RECORD)
ARGUMENTS = {
    "reduce_bucket_size": "reduce_bucket_size",
    "overlap_comm": "overlap_comm",
    "stage3_param_persistence_threshold": "persistence_threshold",
}
ids = [
    f"stage {row['stage']}, {row['family']}, {row['ranks']} ranks, {row['recipe']}" for row in TABLE["rows"]
]


def predicted(row: dict) -> list[dict[str, int]]:
    """Return what the formulas say of a row of the record."""
    how = {ARGUMENTS[name]: value for name, value in row["changes"].items()}
    if row["stage"] == 0:
        how["reduce_bucket_size"] = 0  # it has none
    model = Case(family=row["family"]).settings()["model"]
    return deepspeed_memory(
        model, ranks=row["ranks"], stage=row["stage"], recipe=row["recipe"], kernels="toy", **how
    )


@pytest.mark.parametrize("row", TABLE["rows"], ids=ids)
def test_every_rank_holds_what_the_formulas_say(row: dict) -> None:
    """Every term of every rank, and nothing is left that no term names but counters of a few bytes."""
    assert len(row["measured"]) == row["ranks"]
    for ours, theirs in zip(predicted(row), row["measured"], strict=True):
        # The optimizer's step counters are one number a tensor (39 at most here), flags and norms a few more.
        assert 0 <= theirs["other"] < 39 * 8
        named = {term: size for term, size in theirs.items() if size and term != "other"}
        assert {term: size for term, size in ours.items() if size} == named


def test_the_record_has_every_stage_odd_ranks_and_both_buckets() -> None:
    rows = [(r["ranks"], r["family"], r["stage"], r["recipe"], r["changes"]) for r in TABLE["rows"]]
    assert rows == list(ROWS)
    assert {row[2] for row in rows} == {0, 1, 2, 3}
    assert {row[0] for row in rows} >= {2, 3, 4}
    assert {row[4].get("overlap_comm", False) for row in rows if row[2] in (1, 2)} == {True, False}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_the_paper_s_formula_is_off_by_padding_alone(stage: int, ranks: int) -> None:
    """`training_memory` counts one flat array. DeepSpeed pads it by less than 2 N values, and at stage 3 every tensor
    by less than N; a rank has 1/N of that. Persistent weights, gradients by whole tensors and buckets come on top."""
    model = Case(family="gpt2").settings()["model"]
    flat = training_memory(model, kernels="toy", recipe="mixed-bf16", seq=64, dp=ranks, zero=stage).terms
    theirs = deepspeed_memory(model, ranks=ranks, stage=stage, kernels="toy")[0]
    tensors = 4 * 16 + 4
    for term, value in (("weights", 2), ("master_weights", 4), ("momentum", 4), ("variance", 4)):
        padding = tensors if stage == 3 else 2 if term != "weights" else 2 * ranks
        assert 0 <= theirs[term] - flat[term] <= padding * value, term


def test_a_small_case_by_hand() -> None:
    """10 + 5 values on 2 ranks: 16 with padding, 8 each; rank 1's part begins inside of the first tensor."""
    first, second = (
        deepspeed_states([10, 5], ranks=2, rank=rank, stage=2, reduce_bucket_size=3) for rank in (0, 1)
    )
    assert first["weights"] == second["weights"] == 2 * 16
    assert first["master_weights"] == first["momentum"] == first["variance"] == 4 * 8
    # One value of padding is rank 1's: its gradient is made, of zeros.
    assert (first["gradients"], second["gradients"]) == (2 * 10, 2 * (10 + 5 + 1))
    assert first["communication_buckets"] == 2 * 3
    third = deepspeed_states([10, 5], ranks=2, rank=1, stage=3, reduce_bucket_size=3, persistence_threshold=5)
    assert third["weights"] == third["gradients"] == 2 * (5 + 3)
    assert third["persistent_weights"] == 2 * 5
    none = deepspeed_states([10, 5], ranks=2, rank=1, stage=3, persistence_threshold=0)
    assert none["persistent_weights"] == 0
    two = deepspeed_states([10, 5], ranks=2, rank=0, stage=1, reduce_bucket_size=3, overlap_comm=True)
    assert two["communication_buckets"] == 2 * first["communication_buckets"]


def test_one_rank_holds_everything_and_parts_of_ranks_cover_it() -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    dice = random.Random(seed)
    sizes = [dice.randint(1, 50) for _ in range(dice.randint(1, 30))]
    ranks = dice.randint(1, 9)
    whole = sum(sizes)
    for stage in (1, 2, 3):
        parts = [deepspeed_states(sizes, ranks=ranks, rank=rank, stage=stage) for rank in range(ranks)]
        held = sum(part["momentum"] for part in parts)
        # Each rank is padded by less than 2 values, or by less than one a tensor.
        assert 4 * whole <= held < 4 * (whole + ranks * (len(sizes) if stage == 3 else 2)) + 1
        assert all(part["master_weights"] == part["momentum"] for part in parts)
    assert touched(sizes, 0, whole) == whole
    assert touched(sizes, whole, whole + 7) == 7


def test_bad_input() -> None:
    for how, message in (
        ({"rank": 2}, r"rank=2 is not one of the ranks=2; use 0 to 1"),
        ({"stage": 4}, r"stage=4 must be 0, 1, 2 or 3"),
        ({"value": 8}, r"value=8 2 or 4 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            deepspeed_states([1], **{"ranks": 2, "rank": 0, "stage": 1} | how)
    with pytest.raises(ValueError, match="unknown recipe 'pure-bf16'"):
        deepspeed_memory("gpt2", ranks=2, stage=1, recipe="pure-bf16")


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed; `pip install -c constraints.txt -e '.[deepspeed]'` runs this test",
)
def test_deepspeed_holds_what_the_record_says() -> None:
    of_two = [row for row in ROWS if row[0] == 2]
    assert measure_rows(of_two) == [row for row in TABLE["rows"] if row["ranks"] == 2]
