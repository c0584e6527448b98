"""Predictions lock once measured; records are whole, dated and never made by accident."""

import json
import math

import pytest

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
    assert lab.compare("bytes", 32) == 2
    assert lab.predict("bytes", 32, "B") == 16
    printed = capsys.readouterr().out
    assert "locked at 16 B" in printed
    assert "restart the kernel" in printed


def test_without_a_guess_a_comparison_is_with_the_expected_number(capsys):
    lab = Predictions("00_test")
    assert lab.predict("bytes", None, "B") is None
    assert lab.compare("bytes", 32, 16) == 2
    assert "yours - | lablib 16 | measured 32 | ratio 2.000" in capsys.readouterr().out
    assert lab.predict("bytes", 20, "B") is None  # locked without a guess
    assert "locked at no guess" in capsys.readouterr().out
    lab.predict("steps", 3, "")
    assert math.isnan(lab.compare("steps", 1, 0))
    assert "yours 3 | lablib 0 | measured 1 | ratio -" in capsys.readouterr().out


def test_a_guess_is_shown_beside_the_expected_number():
    lab = Predictions("00_test")
    lab.predict("bytes", 20, "B")
    assert lab.compare("bytes", 32, 16) == 2  # the ratio that asserts use does not depend on the guess
    assert lab.table().splitlines()[1:] == ["bytes", f"{20:>14}  {16:>14}  {32:>14}    2.000  B"]


@pytest.mark.parametrize("numbers", [(None, 8e15, 8e15), (123456.789, 1e-9, 9.99999e14)])
def test_a_comparison_fits_the_column_of_a_page(capsys, numbers):
    guess, expected, measured = numbers
    lab = Predictions("00_test")
    lab.predict("bytes", guess, "bytes")
    lab.compare("bytes", measured, expected)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 72


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
