"""The committed table of the memory calculator: its bounds hold, and neither side drifts."""

from __future__ import annotations

import copy

import pytest
from typer.testing import CliRunner

from lablib.calc.memory import Stage, run_config
from lablib.calc.torch_versions import release
from tests.evidence import table as memory_table
from tests.evidence.__main__ import app
from tests.evidence.cases import Case
from tests.evidence.grid import BESIDE, DRAWN, grid
from tests.evidence.headline import headline, read_table
from tests.evidence.real_runs import REAL_BOUND, REAL_RUNS, REAL_TABLE, predicted, real_peak
from tests.evidence.table import (
    broken,
    comparisons,
    drifted,
    measured_row,
    predicted_anew,
    representatives,
    save_table,
    text,
)
from tests.evidence.verdict import KINDS, PEAK_BOUND, compare, predict

TABLE = read_table()
ROWS = TABLE["rows"]
# The grid as the table has it: to choose it anew takes seconds, in each worker, before any test runs.
FEW = representatives([Case(**row["case"]) for row in ROWS])


def test_the_table_is_of_the_grid() -> None:
    assert [row["name"] for row in ROWS] == [case.name for case in grid()]
    assert [Case(**row["case"]) for row in ROWS] == list(grid())


def test_every_bound_holds_in_every_case() -> None:
    assert broken(ROWS) == []


def test_predictions_are_what_the_table_says_and_so_is_what_pages_quote_of_them(tmp_path) -> None:
    assert read_table(save_table(ROWS, tmp_path / "again.json", TABLE["versions"])) == TABLE
    for row, anew in zip(ROWS, predicted_anew(ROWS, TABLE["versions"]["torch"]), strict=True):
        assert anew["predicted"] == row["predicted"], row["name"]


def test_states_and_what_is_kept_are_judged_everywhere_and_peaks_of_real_kernels() -> None:
    for row in ROWS:
        kinds = {c.what.partition(":")[0] for c in comparisons(row)}
        assert kinds == {"states", "saved"} | ({"peak"} if row["case"]["implementation"] != "paper" else set())
        assert row["measured"]["states"]["weights"] > 0
        assert row["measured"]["saved"] > 0
    peaks = sum("peak" in row["measured"] for row in ROWS)
    assert peaks >= 30
    # Hooks tell groups apart where nothing is recomputed, sharded, cast or in flight.
    assert sum(bool(row["measured"]["groups"]) for row in ROWS) >= 6


@pytest.mark.drawn
@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_a_dozen_measured_again(case: Case) -> None:
    row = measured_row(case)
    assert drifted([row], TABLE) == []
    assert broken([row]) == []


def test_the_dozen_is_cheap_and_shows_much() -> None:
    assert len(FEW) == 12
    assert {case.size for case in FEW} == {"tiny"}
    seen = (
        "implementation",
        "recipe",
        "optimizer",
        "step",
        "recompute",
        "sharding",
        "accumulate",
        "attention",
        "tuning",
    )
    for factor in seen:
        judged = {getattr(c, factor) for c in grid() if c not in BESIDE}
        assert {getattr(c, factor) for c in FEW} == judged, factor


def test_a_number_that_moved_is_found() -> None:
    row = copy.deepcopy(ROWS[0])
    row["predicted"]["saved"] += 1
    row["measured"]["states"]["weights"] += 1

    def moved(torch: str) -> list[str]:
        table = TABLE | {"versions": memory_table.versions() | {"torch": torch}}
        return [problem.partition(" was ")[0] for problem in drifted([row], table)]

    here = memory_table.versions()["torch"]
    assert moved(here) == [f"{row['name']}: predicted saved", f"{row['name']}: measured states"]
    # Under other versions PyTorch may keep something else: only predictions must stay.
    assert moved(f"{release(here)}.99") == [f"{row['name']}: predicted saved"]
    # And where PyTorch is known to do something else, they may move too.
    assert moved("2.15.99" if release(here) < "2.15" else "2.13.99") == []
    assert "is not in the table" in drifted([row | {"name": "another"}], TABLE)[0]


def test_a_row_is_predicted_for_the_version_that_it_was_measured_with() -> None:
    row = next(row for row in ROWS if Case(**row["case"]).sharding == "fsdp2" and "peak" in row["measured"])
    old, new = (
        predict(Case(**row["case"]), "forward of block 0", version)["peak_terms"] for version in ("2.13", "2.15")
    )
    assert old["all-gather buffers"] > new["all-gather buffers"]


@pytest.mark.parametrize("part", ["states", "saved", "group", "peak", "kind"])
def test_a_bound_that_breaks_is_found(part: str) -> None:
    row = copy.deepcopy(next(r for r in ROWS if r["measured"]["groups"] and "peak" in r["measured"]))
    measured = row["measured"]
    if part == "states":
        measured["states"]["gradients"] += 1
    elif part == "saved":
        row["predicted"]["saved"] = round(measured["saved"] * 1.011)
    elif part == "group":
        row["predicted"]["groups"]["mlp"] = measured["groups"]["mlp"] + round(measured["saved"] * 0.011)
    elif part == "peak":
        row["predicted"]["peak"] = round(measured["peak"] * 0.949)
    else:
        row["predicted"]["peak_terms"]["inputs"] += round(measured["peak"] * 0.051)
    (problem,) = broken([row])
    where = {"states": "states: gradients", "group": "saved: mlp", "kind": "peak: inputs"}.get(part, part)
    assert problem.startswith(f"{row['name']}: {where} is predicted")


def test_the_peak_is_judged_by_kind_at_the_measured_moment() -> None:
    for row in ROWS:
        predicted, measured = row["predicted"], row["measured"]
        if "peak" not in measured:
            assert not {"peak", "peak_terms", "peak_at"} & {*predicted, *measured}
            continue
        assert predicted["peak_terms_at"] == measured["peak_at"]
        assert sum(measured["peak_terms"].values()) == measured["peak"]
        if predicted["peak_at"] == measured["peak_at"]:
            assert sum(predicted["peak_terms"].values()) == predicted["peak"]
        kinds = {c.what.removeprefix("peak: ") for c in comparisons(row) if c.what.startswith("peak: ")}
        assert kinds == {*predicted["peak_terms"], *measured["peak_terms"]}
        assert {"weights", "activations"} & kinds
    seen = {kind for row in ROWS for kind in row["measured"].get("peak_terms", {})}
    # A peak meets no reduction: FSDP2's unsharded gradients wait under another name, see `kind_of`.
    assert seen >= {*KINDS} - {"unsharded gradients", "reduce-scatter buffers"}


def test_what_no_term_counts_has_a_name() -> None:
    """AdamW's counters, 4 bytes a tensor; rotary frequencies, twice: with them both kinds are exact at every peak."""
    for row in ROWS:
        case = Case(**row["case"])
        if case.implementation == "paper" or row["predicted"]["peak_at"] == "optimizer step":
            continue
        predicted, measured = row["predicted"]["peak_terms"], row["measured"]["peak_terms"]
        rotary = case.implementation == "hf" and not case.model.learned_positions
        models = 2 if case.recipe == "mixed-bf16" else 1  # the master copy is one, too
        tables = models * 2 * (case.model.turned_dim // 2) * 4 if rotary else 0
        if case.model.family == "gemma":  # the factor of its embeddings, in the dtype of the model
            tables += 2 if case.recipe == "pure-bf16" else 4
        assert measured.get("buffers", 0) == tables, case.name
        if case.optimizer == "adamw" and case.sharding != "zero1":  # there rank by rank
            run = run_config(**{k: v for k, v in case.settings().items() if k != "stage"})
            tensors = len(Stage(run, 0).trained_shapes)
            assert measured["optimizer"] - predicted["optimizer"] == 4 * tensors, case.name


def test_a_drawn_step_is_kept_moment_by_moment_and_kind_by_kind() -> None:
    drawn = [row for row in ROWS if Case(**row["case"]) in DRAWN]
    assert len(drawn) == len(DRAWN)
    for row in drawn:
        predicted, measured = row["predicted"], row["measured"]
        # In the order of the calculator's: between two of FSDP2's blocks a tracker knows of no block.
        assert set(predicted["moment_terms"]) == set(measured["moment_terms"])
        for side in (predicted, measured):
            assert {name: sum(kinds.values()) for name, kinds in side["moment_terms"].items()} == side["moments"]
        for name, total in measured["moments"].items():
            assert abs(predicted["moments"][name] - total) <= PEAK_BOUND * total


def test_real_steps_without_a_tracker_are_as_predicted() -> None:
    """Tied and untied, cast by autocast or not; beside each the same step under a tracker."""
    rows = read_table(REAL_TABLE)["rows"]
    assert [Case(**row["case"]) for row in rows] == list(REAL_RUNS)
    for row in rows:
        assert predicted(Case(**row["case"])) == row["predicted"], row["name"]
        for way, measured in row["measured"].items():
            assert abs(row["predicted"][way] - measured) <= REAL_BOUND * measured, (row["name"], way)
    tied = [row for row in rows if row["tied"]]
    # A whole table is between a tied and an untied peak, or none: which one it is, is what these rows are there for.
    assert {row["measured"]["tracked"] > 1.1 * row["measured"]["real"] for row in tied} == {True, False}
    assert [row["tied"] for row in rows] == [case.model.tied for case in REAL_RUNS]
    assert len(tied) < len(rows)


@pytest.mark.drawn
@pytest.mark.parametrize("case", [*REAL_RUNS[3:6], REAL_RUNS[10], REAL_RUNS[15]], ids=lambda case: case.name)
def test_a_few_real_steps_again(case: Case) -> None:
    real = real_peak(case)
    assert abs(predicted(case)["real"] - real) <= REAL_BOUND * real


def test_a_term_that_only_one_side_has_is_found() -> None:
    predicted = {"states": {"weights": 8, "variance": 8}, "saved": 100, "groups": {}}
    measured = {"states": {"weights": 8, "momentum": 8}, "saved": 100, "groups": {"mlp": 100}}
    wrong = [c.what for c in compare(predicted, measured) if not c.holds]
    assert wrong == ["states: variance", "states: momentum", "saved: mlp"]


def test_the_text_names_the_worst_case() -> None:
    found = headline(ROWS)
    for what in ("saved", "peak"):
        assert f"worst {what}: off by {found[what]['off']:.3%} ({found[what]['name']})" in text(ROWS)
    assert f"states exact in {len(ROWS)} of {len(ROWS)}" in text(ROWS)


def test_the_command(monkeypatch) -> None:
    run = CliRunner().invoke
    name = ROWS[0]["name"]
    printed = run(app, ["memory-table", "--committed", "--only", name])
    assert printed.exit_code == 0
    assert name in printed.output
    for arguments, message in (
        (["--write", "--few"], "--only and --few choose what is measured"),
        (["--predict", "--only", "gpt2"], "--only and --few choose what is measured"),
        (["--committed", "--few"], "--few without --held-out"),
        (["--held-out", "--few"], "--few without --held-out"),
        (["--only", "no such case"], "no case has 'no such case' in its name"),
    ):
        refused = run(app, ["memory-table", *arguments])
        assert refused.exit_code == 2
        assert message in refused.output
    # A calculator that is off by two percent makes the command fail, and say by how much.
    wrong = copy.deepcopy(ROWS[0])
    wrong["predicted"]["saved"] = round(wrong["measured"]["saved"] * 1.02)
    monkeypatch.setattr(memory_table, "measured_row", lambda case: wrong)
    failed = run(app, ["memory-table", "--only", name])
    assert failed.exit_code == 1
    assert "off by 2.00% where 1% is allowed" in failed.output
