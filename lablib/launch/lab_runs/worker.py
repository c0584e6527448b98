"""The process that runs a queue of labs, in a session of its own, so that it survives its terminal; and their archive.

`python -m lablib.launch.lab_runs QUEUE` runs one job after the other, each under papermill in a process of its own,
and stops everything when the budget is used up. Whatever a lab started and left behind is ended with it.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import nbformat
import psutil

from lablib.launch.lab_runs.queue import progress, read_job, read_json, update
from lablib.launch.records import (
    FOLDER_SWITCH,
    RECORD_SWITCH,
    experiments_dir,
    read_record,
    recorded_files,
    this_machine,
    utc_now,
)

#: What is larger stays behind, and is named in the archive: weights, not results.
LARGEST = 20 * 10**6
SUFFIXES = (".distcp", ".safetensors", ".pt", ".tar.gz")
_AUTOSAVE_S = 5
_END_S = 10  # for a process that is asked to end
_DEAD_KERNEL = 138  # papermill's exit code
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Stopped(BaseException):
    """The queue was asked to stop; the text says by whom."""


def start_worker(queue: Path, lock: TextIO) -> int:
    """Start the process for a queue and return its number; it takes over the lock.

    It has a session of its own and ignores SIGHUP, so neither a closed terminal nor a lost connection reaches it.
    """
    update(queue, state="running", started=utc_now())
    with queue.with_suffix(".log").open("wb") as log, lock:
        process = subprocess.Popen(
            [sys.executable, "-m", "lablib.launch.lab_runs", str(queue)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[lock.fileno()],
        )
    process.returncode = 0  # nobody here waits for it: no warning about that
    return process.pid


def main(queue: Path) -> int:
    """Run a queue."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(
            _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
        )  # what a lab leaves behind becomes a child of this process
    try:
        return _run(queue)
    except (OSError, ValueError) as error:  # a full disk, a damaged job: what the labs have kept so far is complete
        from lablib.launch.ranks import explain  # late: it loads torch, which a queue that ends well never needs

        _say(f"stopped: {explain(str(error)) or error}")
        with suppress(OSError, ValueError):
            update(queue, state="stopped", reason=str(error), ended=utc_now())
        return 1


def _stop(signum: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: a second one would cut the end short
    raise Stopped("somebody asked for it")


def _say(text: str) -> None:
    print(text, flush=True)


def _run(queue: Path) -> int:
    content = update(queue, pid=os.getpid())
    budget = content["budget_minutes"]
    deadline = time.monotonic() + 60 * budget if budget else None
    jobs, reason = [Path(name) for name in content["jobs"]], ""
    try:
        for number, job in enumerate(jobs, 1):
            name = f"[{number}/{len(jobs)}] {read_json(job)['lab']}"
            if read_json(job)["status"] == "done":
                _say(f"{name}: done before, in {job.parent}")
            elif deadline and time.monotonic() >= deadline:
                raise Stopped(f"the budget of {budget:g} minutes is used up")
            else:
                _say(f"{name}: started")
                _say(f"{name}: {_attempt(job, content, deadline)}")
    except Stopped as stopped:
        reason = str(stopped)
        _say(f"stopped: {reason}. The same command goes on where this one stopped.")
    finally:
        # Nothing more may stop what is left to do: the state, and the archive that was asked for.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if content["pack"]:
        try:
            _say(f"packed: {pack_results()}")
        except (OSError, ValueError) as error:
            _say(f"not packed: {error}; try again: rung labs pack")
    left = [read_json(job)["lab"] for job in jobs if read_json(job)["status"] != "done"]
    _say(f"{len(jobs) - len(left)} of {len(jobs)} labs are done" + (f"; left: {', '.join(left)}" if left else ""))
    update(queue, state="stopped" if reason else "finished", reason=reason, ended=utc_now())
    return 1 if left else 0


def _attempt(job: Path, queue: dict[str, Any], deadline: float | None) -> str:
    """Run one job and return a line on what became of it."""
    content = update(job, status="running")
    start_time, began = time.monotonic(), utc_now()
    failure, stopped = "", None
    try:
        process = subprocess.Popen(
            _papermill_command(job, content),
            stdin=subprocess.DEVNULL,
            env=os.environ | _environment(job, queue),
            # A kill -9 of this process frees its lock: a lab that went on would be measured beside the next one.
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        code = process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        failure = _failure(job, code) if code else ""
    except subprocess.TimeoutExpired:
        stopped = Stopped(f"the budget of {queue['budget_minutes']:g} minutes is used up")
    except Stopped as error:
        stopped = error
    finally:
        # Who stops it now waits until nothing is left behind, and until it is written down what became of the job.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        end_children()
    status = "stopped" if stopped else "failed" if failure else "done"
    seconds = time.monotonic() - start_time
    attempt = {"began": began, "seconds": round(seconds, 3), "status": status, "failure": failure}
    update(job, status=status, attempts=[*content["attempts"], attempt])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if stopped:
        raise stopped
    return failure or f"done in {seconds:.0f} s, in {job.parent}"


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _papermill_command(job: Path, content: Mapping[str, Any]) -> list[str]:
    """Return the command that executes a job's notebook and saves it after every cell; cells print to its output."""
    source = path = Path(content["path"])
    if content["parameters"].get("only_gpu"):
        source = job.parent / "only_gpu.ipynb"
        nbformat.write(without_rehearsals(nbformat.read(path, as_version=4)), source)
    parameters = json.dumps(content["parameters"])
    return [
        sys.executable, "-m", "papermill", str(source), str(job.parent / path.name), "--parameters_yaml", parameters,
        "--cwd", str(path.parent), "--no-progress-bar", "--autosave-cell-every", str(_AUTOSAVE_S),
        "--stdout-file", "-", "--log-level", "ERROR",
    ]  # fmt: skip


def without_rehearsals(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return a lab without the sections between its set-up and the first one with a cell tagged `gpu`."""
    cells = notebook.cells
    heads = [i for i, cell in enumerate(cells) if cell.cell_type == "markdown" and cell.source.startswith("## ")]
    tagged = [i for i, cell in enumerate(cells) if "gpu" in cell.metadata.get("tags", [])]
    if heads and tagged:
        section = max((i for i in heads if i <= tagged[0]), default=heads[0])
        notebook.cells = cells[: heads[0]] + cells[section:]
    return notebook


def _failure(job: Path, code: int) -> str:
    """Return in one sentence why papermill ended with a code other than 0."""
    if code == _DEAD_KERNEL:
        begun, _ = progress(job)
        return f"the kernel died in cell {begun}: a crash in a library, or killed for want of memory (dmesg says so)"
    with suppress(OSError, ValueError):
        cells = read_json(job.parent / Path(read_job(job)["path"]).name)["cells"]
        for cell in cells:
            for output in cell.get("outputs", []):
                if output["output_type"] == "error":
                    return f"cell {cell['execution_count']} failed with {output['ename']}: {output['evalue']}"
    return f"papermill ended with code {code}; what it printed stands above"


def _environment(job: Path, queue: dict[str, Any]) -> dict[str, str]:
    """Return the variables of a lab's process; the kernel inherits them."""
    outer = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    chosen = [outer[number] if outer else str(number) for number in queue["gpus"]]
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(chosen),
        RECORD_SWITCH: "1" if queue["record"] else "0",
        "LABLIB_RECORD_COMMAND": queue["command"],
        FOLDER_SWITCH: str(job.parent),
        "TQDM_DISABLE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def end_children(patience: float = _END_S) -> None:
    """End all that descends from this process."""
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                end(process)
        psutil.wait_procs(psutil.Process().children(recursive=True), timeout=patience)


def pack_results() -> Path:
    """Write one archive with everything that was measured here, beside it, and return its path.

    LEFT_OUT.txt in it names what was too large. Records of other machines are not in it: at home they are there, and
    perhaps newer. A damaged record may be of this machine: it is packed under a name that replaces none at home.
    """
    source, here = experiments_dir(), this_machine()
    target = source / f"{datetime.now(UTC):%Y-%m-%dT%H%M%S}-results.tar.gz"
    archives = set(source.glob("*.tar.gz"))
    files = [path for path in sorted(source.rglob("*")) if path.is_file() and not path.is_symlink()]
    files = [path for path in files if path.name != "lock" and path.name[0] != "." and path not in archives]
    if not files:
        raise FileNotFoundError(f"there is nothing in {source} to pack; run a lab first")
    left = [path for path in files if path.name.endswith(SUFFIXES) or path.stat().st_size > LARGEST]
    temporary = target.with_name(f".{target.name}.part")
    try:
        with tarfile.open(temporary, "w:gz") as archive:
            for path in files:
                if path not in left:
                    archive.add(path, Path("distributed-experiments") / path.relative_to(source))
            for path in recorded_files():
                try:
                    where = read_record(path).machine
                except (OSError, ValueError) as error:
                    _say(f"{error}; packed as {path.name}.damaged")
                    archive.add(path, Path("labs", "recorded", f"{path.name}.damaged"))
                    continue
                # A lab may have seen some of the GPUs, or none.
                if where["cpu"] == here["cpu"] and set(where["gpus"]) <= set(here["gpus"]):
                    archive.add(path, Path("labs", "recorded", path.name))
            text = "".join(f"{path.stat().st_size}\t{path.relative_to(source)}\n" for path in left).encode()
            entry = tarfile.TarInfo("distributed-experiments/LEFT_OUT.txt")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return target
