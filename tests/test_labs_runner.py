"""The runner refuses what a lab does not have, outlives its terminal, repeats nothing and loses nothing."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import nbformat
import psutil
import pytest
from typer.testing import CliRunner

from lablib.cli import labs as labs_cli
from lablib.cli.main import app
from lablib.launch import lab_runs
from lablib.launch.lab_runs import queue as labs
from lablib.launch.lab_runs import worker as lab_worker
from lablib.launch.records import experiments
from tests.processes import ended

#: The lab says when it has begun, keeps a sample, and then waits for a file.
WORK = """
import os, subprocess, sys, time
from pathlib import Path
from lablib.launch.records.experiments import SampleCache, lab_folder
kept = SampleCache("speed")
print(steps, os.environ["LABLIB_RECORD"], os.environ["CUDA_VISIBLE_DEVICES"] == "")
sample = kept.sample({"steps": steps}, lambda: {"pid": os.getpid()})
assert steps > 0
if wait:
    # What a launcher leaves behind: in a session of its own, so no signal to the kernel's group reaches it.
    left = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    Path(wait + ".left").write_text(str(left.pid))
    print("waiting", flush=True)
    with open(wait) as gate:
        gate.read()
"""


def _lab(path, name, source=WORK):
    cells = [
        nbformat.v4.new_markdown_cell(f"# {name}", id="a"),
        nbformat.v4.new_code_cell('steps = 2\nwait = ""', id="b", metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell(source, id="c"),
    ]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path.mkdir(exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), path / f"{name}.ipynb")


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A repository with two small labs."""
    _lab(tmp_path / "labs", "07_small")
    _lab(tmp_path / "labs", "08_other", "steps + 1\nassert 0 < steps < 100")
    for module in (experiments, labs):
        monkeypatch.setattr(module, "repository_root", lambda: tmp_path)
    monkeypatch.setenv("LABLIB_EXPERIMENTS", str(tmp_path / "mine"))
    monkeypatch.delenv("LABLIB_LAB_FOLDER", raising=False)
    yield tmp_path
    # Only a test that failed half-way leaves any. They are in sessions of their own, and known by their environment.
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("LABLIB_EXPERIMENTS") == str(tmp_path / "mine"):
                process.kill()


def rung(*args):
    return CliRunner().invoke(app, ["labs", *args])


def _job(house, lab):
    (path,) = (house / "mine").glob(f"*{lab}*/job.json")
    return path, json.loads(path.read_text())


def test_a_lab_is_found_by_number_or_stem(house):
    assert labs.find_lab("7") == labs.find_lab("07") == labs.find_lab("07_small")
    with pytest.raises(ValueError, match="there are: 07_small"):
        labs.find_lab("9")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["7", "-p", "step=3"], "no parameter step; 07_small has: steps, wait"),
        (["7", "8", "-p", "step=3"], "no parameter step; 07_small has: .*; 08_other has: "),
        (["7", "-p", "8.steps=3"], "lab 8 is not among the chosen labs"),
        (["7", "-p", "steps=three"], "steps='three' is no int; 07_small has steps=2"),
        (["9"], "no lab '9'"),
        (["7", "--mine"], "work/07_small.ipynb is not there; `make lab` copies the labs"),
        (["7", "--budget-minutes", "0"], "must be above 0"),
        (["7", "--gpus", "64"], "this machine has"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(house, args, message):
    result = rung("run", *args)
    assert result.exit_code == 2
    assert re.search(message, result.output), result.output
    assert not list((house / "mine").glob("*/*.json"))


def _write(path, *cells):
    made = [
        nbformat.v4.new_code_cell(source, metadata={"tags": tags}) if tags is not None else
        nbformat.v4.new_markdown_cell(source) for source, tags in cells
    ]  # fmt: skip
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path.parent.mkdir(exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=made, metadata=metadata), path)


def test_a_parameter_without_a_default_takes_what_its_cell_names(house):
    """A lab ships without predictions; a prediction that is no number would cost the paid hour."""
    _write(house / "labs" / "09_told.ipynb", ("told: float = None  # ms\nfree = None", ["parameters"]))
    paths = [labs.find_lab("7"), labs.find_lab("9")]
    assert labs.assign_parameters(paths, {"told": 12}) == [{}, {"told": 12}]  # those that know it
    assert labs.assign_parameters(paths, {"told": 1.5, "free": "x"})[1] == {"told": 1.5, "free": "x"}
    for wrong in ("abc", True, float("nan")):
        with pytest.raises(ValueError, match="is no float; 09_told has told=None"):
            labs.assign_parameters(paths, {"told": wrong})
    with pytest.raises(ValueError, match=r"no parameter tld; 07_small has: .*; 09_told has: told, free"):
        labs.assign_parameters(paths, {"tld": 1})


def test_a_lab_for_gpus_runs_its_gpu_section_alone_where_there_are_some(house, monkeypatch):
    cells = [
        ("# Lab", None), ("only_gpu = False", ["parameters"]), ("base = 1", []), ("## 1. At home", None),
        ("raise SystemExit('a rehearsal')", []), ("## 2. On GPUs", None), ("print('paid', only_gpu, base)", ["gpu"]),
    ]  # fmt: skip
    _write(house / "labs" / "09_paid.ipynb", *cells)
    monkeypatch.setattr(labs, "get_device", lambda gpus: {"gpus": ["H100"] * len(gpus)})

    def parameters(given, gpus):
        queue = labs.read_json(labs.prepare_queue(["9", "7"], given, gpus=gpus))
        return [labs.read_json(Path(job))["parameters"] for job in queue["jobs"]]

    assert parameters({}, [0, 1]) == [{"only_gpu": True}, {}]
    assert parameters({"only_gpu": False}, [0, 1]) == [{"only_gpu": False}, {}]
    assert parameters({}, []) == [{}, {}]
    kept = lab_worker.without_rehearsals(nbformat.read(house / "labs" / "09_paid.ipynb", 4))
    assert [cell.source for cell in kept.cells] == [cells[i][0] for i in (0, 1, 2, 5, 6)]


def test_my_own_copy_is_run_where_i_say_so(house):
    _write(house / "work" / "07_small.ipynb", ("steps = 9", ["parameters"]))
    queue = labs.read_json(labs.prepare_queue(["7"], {"7.steps": 5}, mine=True))
    job = labs.read_json(Path(queue["jobs"][0]))
    assert (job["path"], job["lab"]) == (str(house / "work" / "07_small.ipynb"), "07_small")
    assert job["parameters"] == {"steps": 5}
    # Its code is another, so it is another run than the course's.
    other = labs.read_json(Path(labs.read_json(labs.prepare_queue(["7"], {"steps": 5}))["jobs"][0]))
    assert other["key"] != job["key"]


def test_a_key_depends_on_code_parameters_device_and_record_and_not_on_prose(house):
    path, here = labs.find_lab("7"), {"cpu": "x", "cpus": 2}
    key = labs.lab_key(path, {"steps": 2}, here, record=False)
    others = {
        labs.lab_key(path, {"steps": 3}, here, record=False),
        labs.lab_key(path, {"steps": 2}, {"gpus": ["H100"]}, record=False),
        labs.lab_key(path, {"steps": 2}, here, record=True),
        labs.lab_key(labs.find_lab("8"), {"steps": 2}, here, record=False),
    }
    assert len(others | {key}) == 5
    path.write_text(path.read_text().replace("# 07_small", "# another title"))
    assert labs.lab_key(path, {"steps": 2}, here, record=False) == key
    path.write_text(path.read_text().replace("steps > 0", "steps >= 0"))
    assert labs.lab_key(path, {"steps": 2}, here, record=False) != key


def _until(condition, seconds=60):
    """Wait for what another process does: its files are all that it shows."""
    end, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < end, "it never happened"
        pause.wait(0.05)


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.drawn
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_labs_outlive_their_terminal_stop_go_on_and_are_never_repeated(house):
    gate = house / "gate"
    os.mkfifo(gate)
    _lab(house / "labs", "09_dies", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    chosen = ["-p", f"7.wait={gate}", "-p", "7.steps=5", "--gpus", "cpu", "--record"]
    queue = labs.prepare_queue(["7"], {"wait": str(gate), "steps": 5}, record=True, budget_minutes=10)
    pid = lab_worker.start_worker(queue, labs.acquire_lock())
    _until(lambda: Path(f"{gate}.left").exists() and "waiting" in queue.with_suffix(".log").read_text())

    # The terminal goes: SIGHUP reaches its own session, which this process left, and it ignores one even so.
    assert os.getsid(pid) == pid
    os.kill(pid, signal.SIGHUP)
    busy = rung("run", "8")
    assert (busy.exit_code, "already running" in busy.output) == (2, True)
    assert re.search(r"^running +07_small +cell 4 of 4", rung("status").output, re.M)  # papermill adds a cell
    left = int(Path(f"{gate}.left").read_text())
    assert _alive(pid)
    assert _alive(left)
    assert not list((house / "mine").glob("*08_other*")), "what is refused leaves no job that waits"
    assert labs.latest_queue() == queue
    assert rung("stop").exit_code == 0
    _until(lambda: not _alive(pid))
    assert not _alive(left), "what the lab left behind was not ended"
    path, job = _job(house, "07_small")
    assert [attempt["status"] for attempt in job["attempts"]] == ["stopped"]
    sample = json.loads(next((path.parent / "samples").iterdir()).read_text())

    # A budget that is as good as used up ends the next attempt.
    short = rung("run", "7", *chosen, "--budget-minutes", "0.0001")
    assert short.exit_code == 1
    assert "stopped: the budget of 0.0001 minutes is used up" in short.output

    # The same labs again: one goes on and is done, the other one fails, and an archive is left.
    with ended(subprocess.Popen([sys.executable, "-c", f"open({str(gate)!r}, 'w').write('go')"])) as writer:
        third = rung("run", "7", "8", "9", *chosen, "-p", "8.steps=100", "--pack")
        writer.wait(60)
    assert third.exit_code == 1
    assert "5 1 True\n" in third.output  # parameter, record switch and no GPU reached the kernel
    assert "kept from" in third.output  # the sample of the first attempt was not measured again
    assert json.loads(next((path.parent / "samples").iterdir()).read_text()) == sample
    assert re.search(r"\[2/3\] 08_other: cell \d failed with AssertionError", third.output)
    assert re.search(r"\[3/3\] 09_dies: the kernel died in cell 3: .*want of memory \(dmesg says so\)", third.output)
    assert "1 of 3 labs are done; left: 08_other, 09_dies" in third.output
    assert "RuntimeWarning" not in third.output
    path, job = _job(house, "07_small")
    assert [attempt["status"] for attempt in job["attempts"]] == ["stopped", "stopped", "done"]
    assert set(job["device"]) == {"cpu", "cpus"}
    assert set(job["versions"]) == {"torch", "python", "cuda", "nccl", "driver"}
    executed = nbformat.read(path.parent / "07_small.ipynb", 4)
    assert executed.cells[-1].outputs[0].text.startswith("5 1 True")
    assert not _alive(int(Path(f"{gate}.left").read_text()))
    (archive,) = (house / "mine").glob("*.tar.gz")
    with tarfile.open(archive) as content:
        names = content.getnames()
    assert f"distributed-experiments/{path.parent.name}/07_small.ipynb" in names
    assert any("/samples/speed-" in name for name in names)

    again = rung("run", "7", *chosen)
    assert again.exit_code == 0
    assert "[1/1] 07_small: done before, in " in again.output
    assert len(_job(house, "07_small")[1]["attempts"]) == 3
    status = rung("status").output
    assert re.search(r"^done +07_small", status, re.M)
    assert re.search(r"^failed +08_other +cell \d failed with AssertionError", status, re.M)


def test_a_look_at_the_lock_refuses_nobody(house):
    held = labs.acquire_lock()
    with pytest.raises(BlockingIOError):
        labs.acquire_lock()
    threading.Timer(0.1, held.close).start()
    with labs.acquire_lock():  # waits for as long as a look takes
        assert labs.is_running()


def test_looking_writes_nothing(house):
    """A folder on a disk that can only be read is looked at like any other."""
    assert not labs.is_running()
    assert "no lab was run here yet" in rung("status").output
    assert not (house / "mine").exists()
    labs.acquire_lock().close()
    lock = house / "mine" / "runs" / "lock"
    lock.chmod(0o444)
    lock.parent.chmod(0o555)
    os.utime(lock, (0, 0))
    assert not labs.is_running()
    assert lock.stat().st_mtime == 0
    lock.parent.chmod(0o755)


@pytest.mark.parametrize("content", ["", '{"lab": "07_small"}'])
def test_a_damaged_job_is_named_and_blocks_only_itself(house, content):
    damaged, whole = (Path(labs.read_json(labs.prepare_queue([lab]))["jobs"][0]) for lab in "78")
    damaged.write_text(content)
    result = rung("status")
    assert result.exit_code == 0
    assert re.search(r"^waiting +08_other", result.output, re.M)
    assert re.search(rf"^damaged +{damaged} is damaged \(.*\): delete it", result.output, re.M)
    assert str(damaged) in json.loads(rung("status", "--json").output)["damaged"][0]
    again = labs.read_json(labs.prepare_queue(["7", "8"]))["jobs"]
    assert again[1] == str(whole)
    assert labs.read_job(Path(again[0]))["status"] == "waiting"
    (house / "mine" / "runs" / "9999.json").write_text(content)
    assert json.loads(labs.latest_queue().read_text())["jobs"] == again


def test_a_worker_that_is_gone_is_a_sentence_with_its_reason(house, monkeypatch):
    queue = labs.prepare_queue(["7"])
    labs.update(queue, state="running")  # it could write down nothing more
    queue.with_suffix(".log").touch()
    usage = shutil.disk_usage(house)
    monkeypatch.setattr(labs_cli.shutil, "disk_usage", lambda path: usage._replace(free=0))
    result = rung("follow")
    assert result.exit_code == 1
    assert re.search(r"is gone, and the disk of \S+ is full: free some room; the same command", result.output)


def test_ctrl_c_leaves_the_labs_running_and_is_no_success(house, monkeypatch):
    def interrupted(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(lab_runs, "start_worker", lambda queue, lock: queue.with_suffix(".log").touch())
    monkeypatch.setattr(labs_cli.time, "sleep", interrupted)
    result = rung("run", "7", "--gpus", "cpu")
    assert result.exit_code == 130
    assert "still running; see `rung labs status`, or end it: rung labs stop" in result.output


def test_large_files_stay_behind_and_are_named(house, monkeypatch):
    with pytest.raises(FileNotFoundError, match="run a lab first"):
        lab_worker.pack_results()
    (house / "mine" / "x").mkdir(parents=True)
    (house / "mine" / "x" / "a.json").write_text("{}")
    (house / "mine" / "x" / "w.safetensors").write_text("weights")
    monkeypatch.setattr(lab_worker, "LARGEST", 10)
    (house / "mine" / "x" / "big.bin").write_text("more than ten")
    with tarfile.open(lab_worker.pack_results()) as content:
        left = "distributed-experiments/LEFT_OUT.txt"
        assert sorted(content.getnames()) == [left, "distributed-experiments/x/a.json"]
        assert content.extractfile(left).read().decode() == "13\tx/big.bin\n7\tx/w.safetensors\n"


def test_an_archive_unpacks_where_reports_and_records_are_looked_for(house, monkeypatch, tmp_path):
    (house / "mine" / "x" / "runs").mkdir(parents=True)
    (house / "mine" / "x" / "runs" / "one-1.json").write_text("{}")
    experiments.save_record("11_speed-2gpu", [{"s": 1.0}], "here")
    record = json.loads((house / "labs" / "recorded" / "11_speed-2gpu.json").read_text())
    record["machine"]["cpu"] = "another machine's"
    (house / "labs" / "recorded" / "02_other.json").write_text(json.dumps(record))
    home = tmp_path / "home"
    with tarfile.open(lab_worker.pack_results()) as content:
        # Debian 12's Python 3.11.2 has no filters, and Python 3.12 warns where none is named.
        content.extractall(home, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    assert (home / "distributed-experiments" / "x" / "runs" / "one-1.json").exists()
    # What another machine recorded is at home already, and perhaps newer there.
    assert [path.name for path in (home / "labs" / "recorded").iterdir()] == ["11_speed-2gpu.json"]


@pytest.mark.parametrize("content", ["", '{"machine"', "[]", '{"machine": {"cpu": 3}}', "[" * 10**5])
def test_a_damaged_record_is_named_and_packed_beside_the_others(house, capsys, content):
    (house / "mine").mkdir()
    (house / "mine" / "a.json").write_text("{}")
    experiments.save_record("11_speed-2gpu", [{"s": 1.0}], "here")
    (house / "labs" / "recorded" / "02_torn.json").write_text(content)
    with tarfile.open(lab_worker.pack_results()) as packed:
        names = packed.getnames()
    # At home it replaces no record of that name.
    assert {name for name in names if "recorded" in name} == {
        "labs/recorded/11_speed-2gpu.json",
        "labs/recorded/02_torn.json.damaged",
    }
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "02_torn.json" in line]
    assert line.startswith(str(house / "labs" / "recorded" / "02_torn.json"))
    assert line.endswith("; packed as 02_torn.json.damaged")


@pytest.mark.parametrize("error", [ValueError("a record is damaged"), OSError("no room")])
def test_a_queue_whose_results_cannot_be_packed_ends_and_says_so(house, monkeypatch, capsys, error):
    def fails():
        raise error

    queue = labs.prepare_queue(["7"], pack=True)
    (job,) = labs.read_json(queue)["jobs"]
    labs.update(Path(job), status="done")
    monkeypatch.setattr(lab_worker, "pack_results", fails)
    monkeypatch.setattr(lab_worker.signal, "signal", lambda *_: None)
    assert lab_worker._run(queue) == 0
    assert labs.read_json(queue)["state"] == "finished"
    assert f"not packed: {error}; try again: rung labs pack" in capsys.readouterr().out


def test_a_queue_that_meets_a_damaged_job_stops_and_says_which(house, monkeypatch, capsys):
    queue = labs.prepare_queue(["7"])
    (job,) = labs.read_json(queue)["jobs"]
    Path(job).write_text("{")
    monkeypatch.setattr(lab_worker.signal, "signal", lambda *_: None)
    monkeypatch.setattr(lab_worker.ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *_: 0))
    assert lab_worker.main(queue) == 1
    assert labs.read_json(queue)["state"] == "stopped"
    assert f"stopped: {job} is damaged" in capsys.readouterr().out


def test_records_belong_to_a_number_of_gpus_and_gaps_are_named(house, monkeypatch, capsys):
    import torch

    def must_not_measure():
        raise AssertionError("measured without a GPU")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert experiments.gpu_samples("11_speed", must_not_measure, gpus=2) is None
    assert "11_speed: not yet recorded on 2 GPUs\n" in capsys.readouterr().out
    monkeypatch.setenv("LABLIB_RECORD", "1")
    experiments.save_record("11_speed-2gpu", [{"ranks": 2, "s": 1.0}], "rung labs run 11")
    monkeypatch.delenv("LABLIB_RECORD")
    assert experiments.recorded_counts("11_speed") == [2]
    assert experiments.gpu_samples("11_speed", must_not_measure).samples == [{"ranks": 2, "s": 1.0}]
    capsys.readouterr()
    assert experiments.gpu_samples("11_speed", must_not_measure, gpus=8) is None
    assert "not yet recorded on 8 GPUs; there are records on 2 GPUs" in capsys.readouterr().out
    (row,) = experiments.coverage(["11_speed"])
    assert row["1 GPU"] == row["8 GPUs"] == "not yet recorded"
    assert row["2 GPUs"].startswith("20")
