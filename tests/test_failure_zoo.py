"""The failure zoo: every fault shows, no healthy twin does, and the check tells right diagnosers from wrong ones."""

from __future__ import annotations

import pytest

from lablib.checks import rung11 as failure_zoo
from lablib.launch.failures import FAULTS, Setting, Symptoms, zoo
from lablib.launch.measure import flight_recorder
from lablib.launch.ranks import RankError

LETTER = {fault: letter for letter, fault in FAULTS.items()}


@pytest.fixture(scope="module")
def seen() -> dict[tuple[str, bool], tuple[Symptoms, Setting]]:
    """The runs that the check judges by: (fault, healthy) to symptoms and setting."""
    runs = failure_zoo._seen()
    cases = failure_zoo.cases()
    return {
        (FAULTS[letter], healthy): (symptoms, setting)
        for (letter, healthy, setting), (_, symptoms) in zip(cases, runs, strict=True)
    }


def mean_losses(symptoms: Symptoms) -> list[float]:
    return [sum(ranks) / len(ranks) for ranks in zip(*symptoms.losses, strict=True)]


def reduced(symptoms: Symptoms, rank: int = 0) -> list[int]:
    return [size for op, size in symptoms.calls[rank] if op == "all_reduce"]


@pytest.mark.parametrize("fault", list(LETTER))
def test_a_healthy_twin_learns_what_one_process_learns(seen, fault):
    symptoms, setting = seen[fault, True]
    assert not symptoms.hangs
    assert len(symptoms.losses[0]) == setting.steps
    # The same sums in another order: a few rounding errors of 6e-8 each, amplified by at most e in 6 steps of lr 0.1.
    assert mean_losses(symptoms) == pytest.approx(symptoms.expected["losses"], rel=1e-5)
    if not symptoms.sharded:
        assert symptoms.norms[0] == pytest.approx(symptoms.expected["norms"], rel=1e-5)
        assert reduced(symptoms) == [4 * symptoms.parameters] * setting.steps
    dealt = [number for numbers in symptoms.batches for number in numbers]
    assert sorted(dealt) == list(range(2 * setting.steps * setting.micro_batches))


def test_mismatched_collectives(seen):
    symptoms, setting = seen["mismatched collectives", False]
    last = [calls[-1][0] for calls in symptoms.calls]
    assert last[setting.culprit] == "broadcast"
    assert last[1 - setting.culprit] == "all_reduce"
    assert [ended.partition("(")[0] for ended in symptoms.ended] == [f"dist.{op}" for op in last]


def test_skipped_batch(seen):
    symptoms, setting = seen["skipped batch", False]
    culprit, other = setting.culprit, 1 - setting.culprit
    assert symptoms.ended[culprit] == "returned"
    assert symptoms.ended[other] == "dist.all_reduce(gradient)"
    assert len(symptoms.calls[other]) == len(symptoms.calls[culprit]) + 1
    assert set(range(culprit, 2 * setting.steps, 2)) - set(symptoms.batches[culprit]) == {
        2 * (setting.steps // 2) + culprit
    }


def test_uneven_data(seen):
    symptoms, setting = seen["uneven data", False]
    assert symptoms.ended == ["dist.all_reduce(gradient)", "returned"]
    assert [len(numbers) for numbers in symptoms.batches] == [setting.steps + 1, setting.steps]


def test_forgotten_zero_grad(seen):
    symptoms, _ = seen["forgotten zero_grad", False]
    assert symptoms.norms[0][0] == pytest.approx(symptoms.expected["norms"][0], rel=1e-5)
    assert symptoms.norms[0][1] > 1.1 * symptoms.expected["norms"][1]


def test_unsharded_parameter(seen):
    symptoms, setting = seen["unsharded parameter", False]
    healthy, _ = seen["unsharded parameter", True]
    assert healthy.state_bytes == [2 * healthy.parameters] * 2  # half of 4 bytes; all sizes are even
    width = setting.width
    # The largest weight, (2 width, width), is kept whole.
    rest = symptoms.parameters - 2 * width * width
    assert symptoms.state_bytes == [2 * rest + 4 * 2 * width * width] * 2
    gathered = {size for op, size in symptoms.calls[0] if op == "all_gather"}
    assert gathered == {4 * rest}


def test_wrong_dtype(seen):
    symptoms, _ = seen["wrong-dtype reduction", False]
    assert set(reduced(symptoms)) == {2 * symptoms.parameters}
    assert mean_losses(symptoms) != pytest.approx(symptoms.expected["losses"], rel=1e-6)


def test_slow_rank(seen):
    symptoms, setting = seen["slow rank", False]
    work = [flops[0] for flops in symptoms.flops]
    assert work[setting.culprit] == 3 * work[1 - setting.culprit]
    assert mean_losses(symptoms) == pytest.approx(symptoms.expected["losses"], rel=1e-5)


def test_accumulation_that_communicates(seen):
    symptoms, setting = seen["accumulation that communicates", False]
    assert len(reduced(symptoms)) == setting.steps * setting.micro_batches
    assert mean_losses(symptoms) == pytest.approx(symptoms.expected["losses"], rel=1e-5)


def test_symptoms_do_not_name_the_fault(seen):
    for (fault, _), (symptoms, _) in seen.items():
        assert fault not in str(symptoms)
        assert not any(line.startswith("def ") for line in symptoms.ended)


def test_the_flight_recorder_says_where_a_hang_began():
    setting = Setting(culprit=1, steps=4)
    told = flight_recorder.compare_flight_records(zoo.recorded_hang(LETTER["mismatched collectives"], setting))
    assert told.startswith("call 1 is not the same on all ranks: rank 0: all_reduce of [178] Float")
    assert "rank 1: broadcast of [3] Float (zoo.py, line" in told
    told = flight_recorder.compare_flight_records(zoo.recorded_hang(LETTER["skipped batch"], setting))
    assert told.startswith("rank 1 never came to call 4, where rank 0 waits in all_reduce of [178] Float")


def test_a_bug_in_a_program_that_hangs_is_no_hang(monkeypatch):
    monkeypatch.setattr(zoo, "_play", _raise)
    with pytest.raises(RankError, match="a bug"):
        zoo.run("B")


def _raise(work):
    raise KeyError("a bug")


@pytest.mark.parametrize(
    ("program", "setting", "text"),
    [
        ("Z", Setting(), "there is no program 'Z'; use A, B"),
        ("A", Setting(width=7), "width=7 even"),
        ("F", Setting(), "F accumulates"),
    ],
)
def test_bad_settings(program, setting, text):
    with pytest.raises(ValueError, match=text):
        zoo.run(program, setting=setting)
