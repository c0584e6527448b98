"""The process that runs a queue of labs, in a session of its own, so that it survives its terminal; and their archive.

`python -m lablib.launch.labs QUEUE` runs one job after the other, each in a process of its own, and stops
everything when the budget is used up. Whatever a lab started and left behind is ended with it.

`pack_results` writes the archive to take home from a rented machine: experiments and records, without checkpoints.
Unpacked in the folder of the course, everything lies where labs and reports look for it.
"""

from __future__ import annotations

import ctypes
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from lablib.launch.labs.labs import only_queue, read_json, refuse, update
from lablib.launch.ranks import explain
from lablib.launch.records import (
    FOLDER_SWITCH,
    RECORD_SWITCH,
    experiments_dir,
    read_record,
    repository_root,
    this_machine,
    utc_now,
)

#: What is larger stays behind, and is named in the archive: weights, not results.
LARGEST = 20 * 10**6
SUFFIXES = (".distcp", ".safetensors", ".pt", ".tar.gz")
_ADOPT = 36  # PR_SET_CHILD_SUBREAPER: what a lab leaves behind becomes a child of this process
_LOCK_S = 1  # to wait for somebody who only looks whether labs are running
_END_S = 10  # for a process that is asked to end


class Stopped(BaseException):
    """The queue was asked to stop; the text says by whom."""


def start_worker(queue: Path) -> int:
    """Start the process for a queue and return its number.

    It has a session of its own and ignores SIGHUP, so neither a closed terminal nor a lost connection reaches it.
    """
    with queue.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "lablib.launch.labs", str(queue)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    process.returncode = 0  # nobody here waits for it: no warning about that
    return process.pid


def main() -> int:
    """Run the queue named on the command line."""
    queue = Path(sys.argv[1])
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_ADOPT, 1, 0, 0, 0)
    try:
        with only_queue(_LOCK_S):
            return _run(queue)
    except BlockingIOError:
        refuse(queue)
        _say("labs are already running here; follow them with: rung labs follow")
        return 2
    except (OSError, ValueError) as error:  # a full disk, a damaged job: what the labs have kept so far is complete
        _say(f"stopped: {explain(str(error)) or error}")
        with suppress(OSError, ValueError):
            update(queue, state="stopped", reason=str(error), ended=utc_now())
        return 1


def _run(queue: Path) -> int:
    content = update(queue, state="running", started=utc_now(), pid=os.getpid())
    budget = content["budget_minutes"]
    deadline = time.monotonic() + 60 * budget if budget else None
    jobs, reason = [Path(name) for name in content["jobs"]], ""
    try:
        for number, job in enumerate(jobs, 1):
            status = read_json(job)["status"]
            name = f"[{number}/{len(jobs)}] {read_json(job)['lab']}"
            if status == "done":
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
    found = [read_json(job)["status"] for job in jobs]
    left = [read_json(job)["lab"] for job in jobs if read_json(job)["status"] != "done"]
    _say(f"{found.count('done')} of {len(jobs)} labs are done" + (f"; left: {', '.join(left)}" if left else ""))
    update(queue, state="stopped" if reason else "finished", reason=reason, ended=utc_now())
    return 1 if left else 0


def _attempt(job: Path, queue: dict[str, Any], deadline: float | None) -> str:
    """Run one job and return a line on what became of it."""
    content = read_json(job)
    start_time, began = time.monotonic(), utc_now()
    update(job, status="running")
    (job.parent / "failure.json").unlink(missing_ok=True)
    failure, stopped = "", None
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "lablib.launch.labs.notebook", str(job)],
            stdin=subprocess.DEVNULL,
            env=os.environ | _environment(job, queue),
        )
        code = process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if code:
            path = job.parent / "failure.json"
            failure = read_json(path)["failure"] if path.exists() else f"its process ended with code {code}"
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


def _environment(job: Path, queue: dict[str, Any]) -> dict[str, str]:
    """The variables of a lab's process; the kernel inherits them."""
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


def end_children(patience: float = _END_S) -> Sequence[int]:
    """End all that descends from this process and return the numbers of what was there."""
    there = psutil.Process().children(recursive=True)
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        for process in psutil.Process().children(recursive=True):
            try:
                ask(process)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(psutil.Process().children(recursive=True), timeout=patience)
    return [process.pid for process in there]


def _stop(signum: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: a second one would cut the end short
    raise Stopped("somebody asked for it")


def _say(text: str) -> None:
    print(text, flush=True)


def pack_results(target: Path | None = None) -> Path:
    """Write one archive with everything that was measured here, by default beside it; return its path.

    LEFT_OUT.txt in it names what was too large. Records of other machines are not in it: at home they are there, and
    perhaps newer. A damaged record may be of this machine: it is packed under a name that replaces none at home.
    """
    source = experiments_dir()
    records = repository_root() / "labs" / "recorded"
    files = list(_files(source))
    if not files:
        raise FileNotFoundError(f"there is nothing in {source} to pack; run a lab first")
    target = target or source / f"{datetime.now(UTC):%Y-%m-%dT%H%M%S}-results.tar.gz"
    here = this_machine()
    taken = [path for path in files if not _is_left_out(path)]
    left = [path for path in files if _is_left_out(path)]
    temporary = target.with_name(f".{target.name}.part")
    try:
        with tarfile.open(temporary, "w:gz") as archive:
            for path in taken:
                archive.add(path, Path("distributed-experiments") / path.relative_to(source))
            for path in sorted(records.glob("*.json")):
                name = path.name
                try:
                    where = read_record(path).machine
                except (OSError, ValueError) as error:
                    name += ".damaged"
                    _say(f"{error}; packed as {name}")
                # A lab may have seen some of the GPUs, or none.
                if name != path.name or (where["cpu"] == here["cpu"] and set(where["gpus"]) <= set(here["gpus"])):
                    archive.add(path, Path("labs", "recorded", name))
            text = "".join(f"{path.stat().st_size}\t{path.relative_to(source)}\n" for path in left).encode()
            entry = tarfile.TarInfo("distributed-experiments/LEFT_OUT.txt")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _files(source: Path) -> Iterator[Path]:
    """Yield every file of the experiments; without locks and earlier archives."""
    for path in sorted(source.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.name != "lock" and not path.name.startswith("."):
            if path.parent == source and path.name.endswith(".tar.gz"):
                continue
            yield path


def _is_left_out(path: Path) -> bool:
    return path.name.endswith(SUFFIXES) or path.stat().st_size > LARGEST
