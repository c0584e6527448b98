"""The challenge: published layouts, the planner's, and layouts with one thing wrong."""

from __future__ import annotations

import pytest

from lablib.calc.hardware import accelerator
from lablib.calc.layouts import CASES, plan_case, score
from lablib.calc.layouts.planner import MEASURED_RUNS, Layout, predict_run
from lablib.calc.memory import RESERVE


@pytest.mark.parametrize("name", CASES)
def test_the_published_layout_runs_and_is_its_own_measure(name: str) -> None:
    case = CASES[name]
    judged = score(case.published, case)
    assert case.run in MEASURED_RUNS
    assert judged.verdict == "runs"
    assert judged.to_published == pytest.approx(1)
    assert judged.step == pytest.approx(sum(predict_run(case.run).seconds.values()))
    assert judged.to_planner >= 1
    assert 50 < judged.points <= 100
    assert sum(judged.memory.values()) <= judged.capacity
    assert case.published.shape == (case.run.tp, case.run.cp, case.run.pp, case.run.dp)


@pytest.mark.parametrize("name", CASES)
def test_the_planners_first_choice_has_all_points(name: str) -> None:
    best = plan_case(name).best
    judged = score(best.layout.as_dict(), name)
    assert judged.points == 100
    assert judged.to_planner == pytest.approx(1)
    assert judged.memory == best.memory
    assert judged.seconds == pytest.approx(best.seconds)
    # A layout that is faster has no more: it is a tie.
    fastest = plan_case(name).fastest
    assert score(fastest.layout, name).points == 100
    assert fastest.step <= best.step
    assert judged.ties
    assert score(fastest.layout, name).ties


def test_a_layout_with_split_sequences_is_timed_as_the_plan_times_it() -> None:
    split = next(plan_case("llama-405b").candidates.walk(lambda layout: layout.cp > 1))
    assert score(split.layout, "llama-405b").seconds == pytest.approx(split.seconds)


def test_what_cannot_be_says_why() -> None:
    cannot = (
        ({"tp": 16, "pp": 16, "dp": 64}, "tp=16 does not divide num_kv_heads=8"),
        ({"tp": 8, "pp": 16, "dp": 64}, "there are gpus=16384; with dp=128 they would be 16384"),
        ({"tp": 8, "pp": 16, "dp": 128, "colour": 3}, "unknown field 'colour'"),
        ({"tp": 8, "pp": 16, "dp": 128, "micro_batch": 32}, "global_batch=2048"),
    )
    for layout, why in cannot:
        judged = score(layout, "llama-405b")
        assert judged.verdict == "cannot be"
        assert why in judged.sentences[0]
        assert (judged.points, judged.step, judged.to_planner, judged.runs) == (0, 0, None, False)
    with pytest.raises(ValueError, match="unknown case 'gpt-5'"):
        score(Layout(), "gpt-5")


def test_what_does_not_fit_names_the_term_that_broke_it() -> None:
    whole = score({"tp": 8, "pp": 2, "dp": 4, "micro_batch": 1, "recompute": "full"}, "gpt-175b")
    assert whole.verdict == "does not fit"
    assert whole.term == "optimizer" == max(whole.memory, key=whole.memory.get)
    assert "zero=1" in whole.sentences[0]
    kept = score({"tp": 8, "pp": 8, "micro_batch": 4}, "gpt-175b")
    assert kept.term == "activations"
    assert "recompute" in kept.sentences[0]
    assert kept.points == 0
    assert kept.capacity == accelerator("a100").usable_bytes - RESERVE == plan_case("gpt-175b").capacity
    assert kept.step > 0, "a time is predicted; it counts for nothing"


def test_slow_layouts_hear_the_idea() -> None:
    across = score({"tp": 16, "pp": 4, "dp": 16, "recompute": "full", "zero": 1}, "gpt-76b")
    assert across.to_planner > 1.5
    assert not across.ties
    assert any("leaves the node of 8" in sentence for sentence in across.sentences)
    idle = score({"tp": 8, "pp": 8, "recompute": "full", "micro_batch": 8}, "gpt-175b")
    assert any("8 micro-batches for 8 stages leave the pipeline idle" in sentence for sentence in idle.sentences)
    assert any("fewer stages or smaller micro-batches or more chunks, if that fits." in one for one in idle.sentences)
    for pp, advice in ((16, "fewer stages or more chunks"), (32, "fewer stages")):  # of one sequence; m = 16 is no 32
        few = score({"tp": 128 // pp, "pp": pp, "dp": 128, "zero": 1}, "llama-405b")
        assert any(sentence.endswith(f"of the step: {advice}, if that fits.") for sentence in few.sentences)
    gathered = score({"dp": 64, "zero": 3, "recompute": "full"}, "gpt-175b")
    assert any("ZeRO-3 gathers the weights" in sentence for sentence in gathered.sentences)
    # 6 of 8 parts of a step grow; the sentence names the one that grows most.
    assert "What the planner gains most on is tensor-parallel collectives" in across.sentences[-1]
    assert str(across).startswith("gpt-76b: tp=16")
