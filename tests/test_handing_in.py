"""What learners hand in is judged in a clean process; a class is read from it, and a file that was changed is judged again."""

import csv
import fcntl
import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import nbformat
import psutil
import pytest
from typer.testing import CliRunner

from lablib.checks import answers
from lablib.checks.answers import classroom, submission
from lablib.cli.main import app
from lablib.launch import lab_runs, records
from lablib.launch.lab_runs import people
from lablib.launch.ranks import TURNS, place, shared_machine
from lablib.launch.records import experiments
from tests.processes import ended

ROOT = Path(__file__).resolve().parents[1]
WORKED = (ROOT / "labs" / "solutions" / "rung01.py").read_text(encoding="utf-8")
STUBS = "".join(
    f"def {name}(*case):\n    raise NotImplementedError\n\n\n"
    for name in ("train_within", "find_surplus", "run_memory")
)
PREDICTS = """
from lablib.launch.records import Predictions
P = Predictions("01_why_distributed")
P.predict("bytes", {}, "B")
P.compare("bytes", 10, 10)
P.predict("zero", 3, "")
P.compare("zero", 0)
"""


def _lab(work, *sources):
    work.mkdir(parents=True, exist_ok=True)
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), work / "01_why_distributed.ipynb")


@pytest.fixture(scope="module")
def handed_in(tmp_path_factory):
    """Two people's files: all is right; one wrong idea beside what is untouched, and a cell that fails."""
    folder = tmp_path_factory.mktemp("handed in")
    slip = WORKED.split("def train_within")[0].replace("4 if master else 0", "0") + STUBS
    assert "master_bytes = 0\n" in slip
    for who, sources in {"Ada": (WORKED, PREDICTS.format(10)), "=Bob": (slip, "gone", PREDICTS.format(20))}.items():
        work = folder / f"work of {who}"
        _lab(work, *sources)
        result = CliRunner().invoke(app, ["submit", "1", "--name", who, "--work", str(work), "--to", str(folder)])
        assert result.exit_code == 0, result.output
    assert "0 of 4 exercises solved, 2 of 2 predictions made" in result.output
    assert "code cell 2 failed with NameError" in result.output
    return folder


def test_the_solution_gets_full_marks_the_stub_none_and_a_slip_is_named(handed_in):
    found = answers.read_class(handed_in)
    assert [found.points(who) for who in ("Ada", "=Bob")] == [4, 0]
    told = [found.status("=Bob", *column) for column in found.columns()]
    assert told == ["wrong", "not attempted", "not attempted", "not attempted"]
    assert found.again == set()
    ((rung, name, sentence, people_),) = found.wrong_ideas()
    assert (rung, name, people_) == ("01", "bytes_per_parameter", 1)
    assert "master copy" in sentence
    assert found.guesses("01") == {"bytes": [1.0, 2.0], "zero": []}


def test_the_gradebook_has_a_line_a_name_and_no_formula(handed_in):
    result = CliRunner().invoke(app, ["class", str(handed_in)])
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader((handed_in / "class.csv").read_text(encoding="utf-8").splitlines()))
    assert [(row["name"], row["points"]) for row in rows] == [("'=Bob", "0"), ("Ada", "4")]
    assert rows[0]["01 bytes_per_parameter"] == "0"
    page = (handed_in / "class.html").read_text(encoding="utf-8")
    assert "Wrong ideas" in page
    assert "Predictions of lab 01" in page
    assert "code cell 2 failed with NameError" in page


@pytest.mark.drawn
def test_a_file_that_was_changed_by_hand_is_judged_again(handed_in, tmp_path):
    for path in handed_in.glob("bob*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        assert answers.is_as_written(content)
        for verdict in content["labs"]["01"]["verdicts"]:
            verdict["status"] = "passed"
        (tmp_path / path.name).write_text(json.dumps(content))
    found = answers.read_class(tmp_path)
    assert found.again == {"=Bob"}
    assert found.points("=Bob") == 0
    assert list(found.rows())[1][-1] == "yes"


def _written(who, rung, date, **verdicts):
    lab = {"notebook": {"cells": []}, "ran": "", "predictions": {}}
    lab |= {"verdicts": [{"rung": rung, "name": n, "status": s, "message": m} for n, (s, m) in verdicts.items()]}
    content = {"who": who, "date": date, "lablib": "1", "labs": {rung: lab}}
    return json.dumps(content | {"sha256": submission._hash(content)})


def test_the_newest_counts_and_what_is_no_submission_is_named(tmp_path):
    (tmp_path / "b.json").write_text(_written("Ada", "05", "2026-02", state_bytes=("passed", "")))
    (tmp_path / "a.json").write_text(_written("Ada", "05", "2026-01", state_bytes=("wrong", "Old.")))
    (tmp_path / "c.json").write_text(
        _written("Ada", "01", "2026-01", bytes_per_parameter=("wrong", "Say 3 GB, not 4 (8B on 2 GPUs)."))
    )
    (tmp_path / "d.json").write_text(
        _written("Bob", "01", "2026-01", bytes_per_parameter=("wrong", "Say 30.5 GB, not 41 (7B on 4 GPUs)."))
    )
    (tmp_path / "torn.json").write_text("{")
    found = answers.read_class(tmp_path)
    assert found.status("Ada", "05", "state_bytes") == "passed"
    assert found.rungs == ["01", "05"]
    assert found.status("Bob", "05", "state_bytes") == ""
    assert [(name, count) for _, name, _, count in found.wrong_ideas()] == [("bytes_per_parameter", 2)]
    assert list(found.unread) == ["torn.json"]
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="holds no submission"):
        answers.read_class(empty)


@pytest.mark.parametrize(
    "change",
    [
        lambda labs: labs.clear(),
        lambda labs: labs.update({"../x": labs.pop("01")}),
        lambda labs: labs.update({"99": labs.pop("01")}),
        lambda labs: labs["01"].update(predictions={"a": 5}),
        lambda labs: labs["01"].update(predictions={"a": {"value": "x"}}),
        lambda labs: labs["01"]["verdicts"][0].update(status="excellent"),
        lambda labs: labs["01"].update(notebook={"cells": 5}),
    ],
)
def test_a_strange_file_is_named_and_ends_nothing(tmp_path, change):
    (tmp_path / "good.json").write_text(_written("Ada", "01", "2026", bytes_per_parameter=("passed", "")))
    content = json.loads(_written("Bob \udc80", "01", "2026", bytes_per_parameter=("wrong", "x" * 10 + " " * 200_000)))
    (tmp_path / "also good.json").write_text(json.dumps(content | {"sha256": submission._hash(content)}))
    change(content["labs"])
    (tmp_path / "strange.json").write_text(json.dumps(content | {"sha256": submission._hash(content)}))
    (tmp_path / "folder.json").mkdir()
    result = CliRunner().invoke(app, ["class", str(tmp_path), "--exercise", "bytes_per_parameter"])
    assert result.exit_code == 0, result.output
    assert "not read: strange.json" in result.output
    assert "Ada,1,1,1," in (tmp_path / "class.csv").read_text(encoding="utf-8")


def test_names_and_rungs_that_make_no_sense_are_refused(tmp_path):
    for args, said in (
        (["01", "--name", " "], "needs a name"),
        (["77", "--name", "x"], "no rung 77"),
        (["01", "--name", "x"], "has no lab 01"),
    ):
        result = CliRunner().invoke(app, ["submit", *args, "--work", str(tmp_path)])
        assert (result.exit_code, said in result.output) == (2, True), result.output


@pytest.mark.drawn
def test_the_board_ties_what_the_planner_cannot_tell_apart(tmp_path):
    job = {"model": "llama-3-8b", "gpus": 16, "gpu": "h100", "seq": 8192, "global_batch": 64}
    from lablib.calc.layouts.planner import plan

    best = plan(**job).best.layout
    plans = {
        "Ada": f"dict({', '.join(f'{k}={v!r}' for k, v in vars(best).items() if v is not None)})",
        "Bob": "dict(tp=8, pp=2, micro_batch=1, recompute='full', zero=1)",
        "Cleo": "dict(dp=16)",
        "Dan": "dict(speed=9)",
        "Eve": "1 / 0",
    }
    found = classroom.Class()
    for who, layout in plans.items():
        cell = {
            "cell_type": "code",
            "source": f"def plan_cluster(case):\n    if case == 'tonight':\n        return {layout}\n",
        }
        found.labs[who] = {"07": {"notebook": {"cells": [cell]}, "verdicts": [], "predictions": {}, "ran": ""}}
    found.labs["Fay"] = {"01": {}}
    board = answers.board(found, "tonight", job)
    told = {row[0]: row[4] for row in board.rows}
    assert board.rows[0][:1] == ("Ada",)
    assert told["Ada"] == "ties"
    assert told["Bob"] in ("ties", "behind")
    assert "fit" in told["Cleo"]
    assert "no field speed" in told["Dan"]
    assert "ZeroDivisionError" in told["Eve"]
    assert "Fay" not in told
    (tmp_path / "jobs.json").write_text(json.dumps({"tonight": job | {"tp": 8}}))
    with pytest.raises(ValueError, match="no field of a layout"):
        answers.read_jobs(tmp_path / "jobs.json")


# --- the queue of a room -------------------------------------------------------------------------------------------


def test_a_request_is_checked_when_it_is_made(tmp_path):
    file = lab_runs.ask(tmp_path, "Ada L.", "6", {})
    assert file.name.startswith("ada-l-06-")
    assert lab_runs.ask(tmp_path, "Ada L.", "06", {}) == file
    for who, lab, parameters in (("Ada", "77", {}), ("Ada", "06", {"nothing": 1}), ("..", "06", {})):
        with pytest.raises(ValueError, match=r"no lab|no parameter|no letter"):
            lab_runs.ask(tmp_path, who, lab, parameters)


def _job(room, who, seconds):
    folder = room / "people" / who / "2026-01-01-01_why-abc"
    folder.mkdir(parents=True)
    attempt = {"began": "2026", "seconds": seconds, "status": "done", "failure": ""}
    (folder / "job.json").write_text(
        json.dumps(
            {"lab": "01_why", "status": "done", "key": "x", "attempts": [attempt], "device": {"gpus": ["a", "b"]}}
        )
    )


def test_who_has_used_least_goes_first_and_who_has_used_all_is_told(tmp_path):
    for name in ("wanted", "done", "answers"):
        (tmp_path / name).mkdir()
    for who, seconds in (("ada", 60), ("bob", 15), ("cleo", 350)):
        lab_runs.ask(tmp_path, who, "01", {})
        _job(tmp_path, who, seconds)
    lab_runs.ask(tmp_path, "dan", "01", {}, gpus=8)
    (tmp_path / "wanted" / "eve-01-abc.json").write_text('{"who": "eve", "lab": "import os"}')
    said = []
    waiting = people._waiting(tmp_path, set(), 10, 2, said.append)
    assert [file.name.split("-")[0] for file, _ in waiting] == ["bob", "ada"]
    assert "the budget of 10 minutes is used up" in (tmp_path / "answers" / "cleo.txt").read_text()
    assert "asks for 8 GPUs, and there are 2" in (tmp_path / "answers" / "dan.txt").read_text()
    assert "not run" in (tmp_path / "answers" / "eve.txt").read_text()
    assert len(list((tmp_path / "done").iterdir())) == 3


def test_strange_things_in_a_room_end_no_queue(tmp_path):
    for name in ("wanted", "done", "answers", "elsewhere"):
        (tmp_path / name).mkdir()
    wanted = tmp_path / "wanted"
    (wanted / "a-01-x.json").mkdir()
    (wanted / "b-01-x.json").symlink_to(tmp_path / "gone")
    long = {"who": "c", "lab": "01", "parameters": {"x": "x" * 10**5}, "gpus": 1, "asked": ""}
    (wanted / "c-01-x.json").write_text(json.dumps(long))
    (tmp_path / "answers" / "c.txt").symlink_to(tmp_path / "elsewhere" / "mine")
    assert people._waiting(tmp_path, set(), 10, 2, print) == []
    assert list((tmp_path / "elsewhere").iterdir()) == []
    people._answer(tmp_path, "d", wanted / "taken back.json", "done", print)


def test_a_room_has_one_queue(tmp_path):
    with (tmp_path / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="is shared already"):
            lab_runs.share(tmp_path, until_empty=True)
    lab_runs.share(tmp_path, until_empty=True)


def test_ranks_wait_for_a_place_where_these_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_machine, "_cores", lambda: 2)
    with place():  # nobody counts
        assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(TURNS, str(tmp_path / "gone"))
    with pytest.raises(ValueError, match="gone: No such file or directory; it must be a folder"), place():
        pass
    monkeypatch.setenv(TURNS, str(tmp_path))
    with place(), place(), (tmp_path / "place-0").open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / "place-0").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_ranks_that_wait_for_each_other_are_told_from_slow_ones():
    """A process that sleeps is not at work; one that computes is."""
    command = [sys.executable, "-c", "import sys, time; print(1, flush=True); {}"]
    for line, at_work in (("sys.stdin.read()", False), ("\nwhile True: pass", True)):
        process = subprocess.Popen(
            [*command[:2], command[2].format(line)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        with ended(process):
            process.stdout.readline()
            threading.Event().wait(0.3)  # the first one comes to its read
            assert shared_machine.any_at_work([process.pid]) == at_work


def _share(room, *options):
    command = [
        sys.executable,
        "-c",
        "from lablib.cli.main import app; app()",
        "labs",
        "share",
        str(room),
        "--gpus",
        "cpu",
    ]
    return subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.drawn
def test_what_was_asked_for_is_run_and_handed_back(tmp_path):
    lab_runs.ask(tmp_path, "Ada", "01", {})
    with ended(_share(tmp_path, "--until-empty", "--minutes", "30")) as process:
        said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    answer = (tmp_path / "answers" / "ada.txt").read_text()
    assert ": done; " in answer
    home = tmp_path / "home"
    home.mkdir()
    subprocess.run(["tar", "xzf", tmp_path / "answers" / "ada.tar.gz", "-C", home], check=True)
    assert list(home.glob("distributed-experiments/*/01_why_distributed.ipynb"))


def test_a_person_s_record_comes_before_the_course_s_and_is_not_written_into_it(tmp_path, monkeypatch):
    before = records.recorded("02_ddp_step_time")
    monkeypatch.setenv(records.RECORDED_SWITCH, str(tmp_path / "recorded"))
    assert records.recorded("02_ddp_step_time") == before
    experiments.save_record("02_ddp_step_time", [{"ranks": 2}], "rung labs run 02 --record")
    mine = records.recorded("02_ddp_step_time")
    assert (mine.samples, mine.command) == ([{"ranks": 2}], "rung labs run 02 --record")
    assert [path.parent for path in records.recorded_files() if path.stem == mine.name] == [tmp_path / "recorded"]
    monkeypatch.delenv(records.RECORDED_SWITCH)
    assert records.recorded("02_ddp_step_time") == before


@pytest.mark.drawn
def test_a_queue_that_is_asked_to_stop_ends_its_runs(tmp_path):
    lab_runs.ask(tmp_path, "Ada", "01", {})
    jobs = tmp_path / "people" / "ada"
    with ended(_share(tmp_path)) as process:
        end, pause = time.monotonic() + 120, threading.Event()
        while not list(jobs.glob("*/job.json")) and time.monotonic() < end:
            pause.wait(0.1)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)

    left = []
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            left += [one.pid] if one.environ().get("LABLIB_EXPERIMENTS") == str(jobs) else []
    assert left == []
    assert list((tmp_path / "wanted").glob("*.json")), "what was not done waits for the next queue"
