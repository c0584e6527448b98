"""Predictions lock once measured; records are whole, dated and never made by accident."""

import json
import re

import pytest

from lablib.checks import judging
from lablib.checks.judging import verdict
from lablib.launch.records import Predictions, experiments, recorded, run_or_replay, write_json


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LABLIB_EXPERIMENTS", str(tmp_path / "mine"))
    monkeypatch.setattr(experiments, "repository_root", lambda: tmp_path)
    monkeypatch.delenv("LABLIB_RECORD", raising=False)


def test_a_prediction_can_change_until_it_is_measured(capsys):
    lab = Predictions("00_test")
    lab.predict("bytes", 10, "B")
    assert lab.predict("bytes", 16, "B") == 16
    lab.compare("bytes", 32)
    assert lab.predict("bytes", 32, "B") == 16
    printed = capsys.readouterr().out
    assert "locked at 16 B" in printed
    assert "restart the kernel" in printed


def test_without_a_guess_a_comparison_is_with_the_expected_number(capsys):
    lab = Predictions("00_test")
    assert lab.predict("bytes", None, "B") is None
    lab.compare("bytes", 32, 16)
    assert "yours - | lablib 16 (50 % too low) | measured 32" in capsys.readouterr().out
    assert lab.predict("bytes", 20, "B") is None  # locked without a guess
    assert "locked at no guess" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("guess", "expected", "measured", "line"),
    [
        (5, 6, 6, "yours 5 (17 % too low) | lablib 6 (exact) | measured 6"),
        (300, None, 349, "yours 300 (14 % too low) | lablib - | measured 349"),
        (1, 0.5, 0.5, "yours 1 (100 % too high) | lablib 0.5 (exact) | measured 0.5"),
        (-3, -2, -2.0001, "yours -3 (50 % too low) | lablib -2 (below 0.01 % too high) | measured -2"),
        (0, 0, 0, "yours 0 (exact) | lablib 0 (exact) | measured 0"),
        (3, -1, 0, "yours 3 (too high) | lablib -1 (too low) | measured 0"),
        (0.333, 1 / 3, 0.3333333432674408, "yours 0.333 (0.1 % too low) | lablib 0.3333 (exact) | measured 0.3333"),
        (10**9 + 1, 1, 10**9, "yours 1,000,000,001 (below 0.01 % too high) | lablib 1 (over 99 % too low) | measured"),
        (1e308, 1, 1e-308, "yours 1e+308 (over 9,999 % too high)"),
    ],
)
def test_a_comparison_shows_the_error_of_the_learner(capsys, guess, expected, measured, line):
    lab = Predictions("00_test")
    lab.predict("count", guess, "")
    capsys.readouterr()
    lab.compare("count", measured, expected)
    assert " | ".join(part.strip() for part in capsys.readouterr().out.splitlines()[1:]).startswith(line)


@pytest.mark.parametrize("guess", [None, 8e14, 123456.789, 1e-300, -7e14])
@pytest.mark.parametrize("expected", [None, 8.123e14, 1e-9])
@pytest.mark.parametrize("measured", [8.12e14, 9.99999e14, 0, 123456.7891])
def test_a_comparison_fits_the_column_of_a_page(capsys, guess, expected, measured):
    lab = Predictions("00_test")
    lab.predict("bytes", guess, "bytes")
    lab.compare("bytes", measured, expected)
    print(lab.table())
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 72


def test_the_table_has_every_guess_with_its_error():
    lab = Predictions("00_test")
    lab.predict("bytes", 20, "B")
    lab.predict("steps", None, "")
    lab.predict("later", 4, "s")
    lab.compare("bytes", 32, 16)
    lab.compare("steps", 1, 1)
    head, *rows = (re.split(r"\s{2,}", line.strip()) for line in lab.table().splitlines())
    assert head == ["yours", "yours off by", "lablib", "measured"]
    assert rows == [["bytes (B)"], ["20", "38 % too low", "16", "32"], ["later (s)"], ["4", "-", "-", "-"]]


def _verdicts(monkeypatch, **verdicts):
    monkeypatch.setattr(experiments, "CHECKED", verdicts)


def test_a_lab_that_was_only_run_is_told_how_to_begin(monkeypatch):
    _verdicts(monkeypatch, first_one="not attempted", second_one="wrong")
    lab = Predictions("00_test")
    lab.predict("bytes", None, "B")
    lab.compare("bytes", 32, 16)
    said = lab.summary()
    assert "Nothing is guessed and nothing is solved" in said
    assert '"bytes"' in said
    assert "first exercise is `first_one`" in said
    assert "32" not in said
    assert max(map(len, said.splitlines())) <= 72


def test_a_summary_says_what_was_guessed_and_what_passed(monkeypatch):
    _verdicts(monkeypatch, average="passed", split="wrong", merge="not attempted")
    lab = Predictions("00_test")
    for name, guess in (("bytes", 32), ("steps", 2), ("time", None)):
        lab.predict(name, guess, "")
        lab.compare(name, 32)
    said = lab.summary()
    assert said.splitlines()[:3] == [
        "Guessed: 2 of 3 predictions, 1 of them exact.",
        "Passed: 1 of 3 exercises, average.",
        "Open: split, merge.",
    ]
    assert said.endswith(lab.table())


def test_an_exercise_alone_counts_as_begun(monkeypatch):
    _verdicts(monkeypatch, average="passed")
    lab = Predictions("00_test")
    lab.predict("bytes", None, "")
    said = lab.summary().splitlines()
    assert said == ["Guessed: 0 of 1 predictions, 0 of them exact.", "Passed: 1 of 1 exercises, average."]


def test_the_last_verdict_of_an_exercise_is_kept(monkeypatch):
    kept = {}
    monkeypatch.setattr(verdict, "CHECKED", kept)

    @judging.check
    def halve(answer):
        if answer(4) != 2:
            raise judging.Wrong("Half of four is two.")

    def stub(number):
        raise NotImplementedError

    for answer, status in ((stub, "not attempted"), (lambda n: n, "wrong"), (lambda n: n / 2, "passed")):
        halve(answer)
        assert kept == {"halve": status}


def test_measuring_without_predicting_is_refused():
    with pytest.raises(ValueError, match="predict before you measure"):
        Predictions("00_test").compare("time", 1.0)


def test_predictions_are_on_disk_before_the_run(tmp_path):
    Predictions("00_test").predict("step", 1.5, "ms")
    saved = json.loads((tmp_path / "mine" / "00_test-predictions.json").read_text())
    assert saved["predictions"]["step"]["value"] == 1.5
    assert saved["predictions"]["step"]["measured"] is None


def test_nothing_is_recorded_unless_the_runner_asks(tmp_path):
    with pytest.raises(FileNotFoundError, match="not yet recorded"):
        run_or_replay("speed", lambda: pytest.fail("measured without being asked"))
    assert not (tmp_path / "labs").exists()


def test_a_record_carries_machine_commit_and_every_sample(monkeypatch):
    monkeypatch.setenv("LABLIB_RECORD", "1")
    made = run_or_replay("speed", lambda: [{"ms": 1.0}, {"ms": 2.0}])
    monkeypatch.delenv("LABLIB_RECORD")
    assert run_or_replay("speed", lambda: pytest.fail("replay must not measure")) == made
    assert made.samples == [{"ms": 1.0}, {"ms": 2.0}]
    assert {"cpu", "cpus", "gpus", "python", "torch"} <= set(made.machine)
    assert recorded("nothing") is None


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    path = write_json(tmp_path / "x.json", {"old": 1})
    with pytest.raises(TypeError):
        write_json(path, {"new": object()})
    assert json.loads(path.read_text()) == {"old": 1}
    assert [p.name for p in tmp_path.glob(".*")] == []


@pytest.mark.parametrize(("device", "gpus"), [("cpu", []), ("cuda", ["H100"])])
def test_a_record_of_cpu_ranks_names_no_gpu(device, gpus, monkeypatch):
    here = {"cpu": "Xeon", "cpus": 2, "gpus": ["H100"], "gpu_details": [{"name": "H100"}]}
    monkeypatch.setattr(experiments, "this_machine", lambda: here)
    monkeypatch.setattr(experiments, "gpu_topology", dict)
    made = experiments.save_record("speed", [{"ranks": 1}], "rung labs run 02", device=device)
    assert made.machine["gpus"] == gpus
    assert made.where == ("1 x H100" if gpus else "Xeon, 2 CPUs")
