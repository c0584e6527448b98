"""The runs of a room full of people on a few GPUs: one folder that all can write to, and one process that runs what is asked.

    ROOM/wanted/ada-06-1a2b3c.json    what a person asks for: a lab, its parameters, how many GPUs
    ROOM/people/ada/                  her jobs and queues, as `rung labs run` keeps them, and recorded/
    ROOM/answers/ada.tar.gz           handed back: executed notebooks and records, to unpack in her copy of the course
    ROOM/answers/ada.txt              what became of each request, and the minutes that are left

A request holds a lab and its parameters, no code: what runs is the course as shipped on the machine with the GPUs. The
person who has used least goes first, one run of each person at a time; who wants more GPUs than are free is waited for.
Minutes are those of her jobs' attempts, times their GPUs, so a process that starts again goes on where the last one stopped.
`share` is the one to read first.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lablib.launch.lab_runs.queue import assign_parameters, find_lab, read_json
from lablib.launch.records import RECORDED_SWITCH, TEXT, WHOLE, check_fields, utc_now, write_json

POLL_S = 0.5
LONGEST = 10_000  # letters of a request
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW  # a link could lead out of the room
_END_S = 30  # for a run that is asked to stop
_REQUEST = {"who": TEXT, "lab": TEXT, "parameters": {}, "gpus": WHOLE, "asked": TEXT}


def folder_name(who: str) -> str:
    """Return a name as files have it; raise a ValueError if nothing is left of it."""
    name = re.sub(r"[^\w-]+", "-", who.strip().lower()).strip("-")[:40]
    if not name:
        raise ValueError(f"name {who!r} has no letter or digit")
    return name


def ask(room: Path, who: str, lab: str, parameters: Mapping[str, Any], *, gpus: int = 1) -> Path:
    """Write a request into a room's folder, and return its file; the same request twice is one.

    Raises:
        ValueError: If there is no such lab, if it has no such parameter, or if no name is given.
    """
    if not room.is_dir():
        raise ValueError(f"there is no folder {room}; `rung labs share` makes a room")
    path = find_lab(lab)
    assign_parameters([path], parameters)  # refused here, and not an hour later
    content = {"who": who, "lab": path.stem, "parameters": dict(parameters), "gpus": gpus}
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:6]
    name = f"{folder_name(who)}-{path.stem[:2]}-{key}.json"
    return write_json(room / "wanted" / name, content | {"asked": utc_now()})


@dataclass
class _Run:
    """A request that runs."""

    request: dict[str, Any]
    file: Path
    gpus: list[int]
    process: subprocess.Popen


def share(
    room: Path, *, gpus: Sequence[int] = (), minutes: float = 10, until_empty: bool = False, say: Any = print
) -> None:
    """Run what the people of a room ask for, until interrupted, or until nothing is left to run.

    Args:
        gpus: Numbers of the GPUs; none means the CPU, for a rehearsal: one run at a time.
        minutes: For each person, over all runs.
    """
    if not minutes > 0:
        raise ValueError(f"minutes={minutes:g} must be above 0")
    for name in ("wanted", "done", "people", "answers"):
        (room / name).mkdir(parents=True, exist_ok=True)
    with (room / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{room} is shared already: end the other `rung labs share` first") from None
        for home in (room / "people").iterdir():  # runs of one that was killed live on, in sessions of their own
            subprocess.run(_rung("stop"), env=_environment(room, home.name), capture_output=True, timeout=_END_S)
        _serve(room, gpus, minutes, until_empty, say)


def _serve(room: Path, gpus: Sequence[int], minutes: float, until_empty: bool, say: Any) -> None:
    seats = list(gpus) or [-1]
    running: list[_Run] = []
    try:
        while True:
            for run in [run for run in running if run.process.poll() is not None]:
                running.remove(run)
                _hand_back(room, run, minutes, say)
            busy = {number for run in running for number in run.gpus}
            here = {run.file.name for run in running}
            for file, request in _waiting(room, here, minutes, len(seats), say):
                free = [number for number in seats if number not in busy]
                if folder_name(request["who"]) in {folder_name(run.request["who"]) for run in running}:
                    continue
                if len(free) < max(1, request["gpus"]):
                    break  # else a run on two GPUs would wait until nobody wants one
                chosen = free[: max(1, request["gpus"])]
                busy |= set(chosen)
                running.append(_start(room, file, request, chosen if gpus else [], minutes))
                say(f"{request['who']}: {request['lab']} on {_seats(chosen if gpus else [])}")
            if until_empty and not running and not _wanted(room):
                return
            time.sleep(POLL_S)
    finally:
        for run in running:  # their workers live in sessions of their own
            _stop(room, run)


def _stop(room: Path, run: _Run) -> None:
    """End a run; one that is just starting has nothing to stop yet, so it is asked again."""
    end = time.monotonic() + _END_S
    while run.process.poll() is None and time.monotonic() < end:
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                _rung("stop"), env=_environment(room, run.request["who"]), capture_output=True, timeout=_END_S
            )
        time.sleep(POLL_S)
    run.process.kill()
    run.process.wait()


def used_minutes(room: Path, who: str) -> float:
    """Return the minutes of a GPU that a person's runs took so far."""
    jobs = map(read_json, (room / "people" / folder_name(who)).glob("*/job.json"))
    return sum(attempt["seconds"] * _count(job["device"]) for job in jobs for attempt in job["attempts"]) / 60


def _count(device: Mapping[str, Any]) -> int:
    return max(1, len(device.get("gpus", ())))


def _waiting(room: Path, here: set[str], minutes: float, seats: int, say: Any) -> list[tuple[Path, dict[str, Any]]]:
    """Return the requests that may run, who has used least first; what cannot run is answered at once."""
    found = []
    for file in _wanted(room):
        if file.name in here:
            continue
        try:
            request = check_fields(read_json(file), _REQUEST, file)
            if len(json.dumps(request)) > LONGEST:
                raise ValueError(f"it has more than {LONGEST:,} letters")
            folder_name(request["who"])
            assign_parameters([find_lab(request["lab"])], request["parameters"])
            used = used_minutes(room, request["who"])
            if request["gpus"] > seats:
                raise ValueError(f"it asks for {request['gpus']} GPUs, and there are {seats}")
            if used >= minutes:
                raise ValueError(f"the budget of {minutes:g} minutes is used up")
        except (ValueError, KeyError, OSError) as error:
            _answer(room, folder_name(file.stem.rsplit("-", 2)[0]), file, f"not run: {error}", say)
            continue
        found.append((used, request["asked"], file.name, file, request))
    return [(file, request) for *_, file, request in sorted(found, key=lambda each: each[:3])]


def _wanted(room: Path) -> list[Path]:
    return [file for file in sorted((room / "wanted").glob("*.json")) if file.is_file() and not file.is_symlink()]


def _start(room: Path, file: Path, request: dict[str, Any], gpus: list[int], minutes: float) -> _Run:
    left = minutes - used_minutes(room, request["who"])
    chosen = ",".join(map(str, gpus)) + "," if gpus else "cpu"  # a comma at the end: a list, of one GPU too
    words = ["run", request["lab"], "--gpus", chosen, "--record", "--pack"]
    words += ["--budget-minutes", f"{left / max(1, len(gpus)):.2f}"]
    for name, value in request["parameters"].items():
        words += ["--parameter", f"{name}={json.dumps(value)}"]
    environment = _environment(room, request["who"])
    folder = Path(environment["LABLIB_EXPERIMENTS"])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("ab") as log:
        log.write(f"\n{utc_now()} {shlex.join(words)}\n".encode())
        log.flush()
        process = subprocess.Popen(
            _rung(*words), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    return _Run(request, file, gpus or [-1], process)


def _hand_back(room: Path, run: _Run, minutes: float, say: Any) -> None:
    """Put a person's archive and a line on the run where she finds them."""
    home = Path(_environment(room, run.request["who"])["LABLIB_EXPERIMENTS"])
    who = folder_name(run.request["who"])
    if archives := sorted(home.glob("*-results.tar.gz")):
        temporary = room / "answers" / f".{who}.part"
        shutil.copyfile(archives[-1], temporary)
        temporary.replace(room / "answers" / f"{who}.tar.gz")
        for old in archives:
            old.unlink()
    jobs = home.glob(f"*-{find_lab(run.request['lab']).stem}-*/job.json")
    attempts = sorted((each for job in jobs for each in read_json(job)["attempts"]), key=lambda each: each["began"])
    if run.process.returncode == 0:
        text = "done"
    elif attempts:
        text = f"failed: {attempts[-1]['failure']}" if attempts[-1]["failure"] else "stopped before its end"
    else:
        text = f"not run: {_last_line(home / 'log.txt')}"
    left = max(0.0, minutes - used_minutes(room, run.request["who"]))
    _answer(room, who, run.file, f"{text}; {left:.1f} of {minutes:g} minutes are left", say)


def _answer(room: Path, who: str, file: Path, text: str, say: Any) -> None:
    line = " ".join(f"{utc_now()} {file.stem}: {text}".split())
    with suppress(OSError), os.fdopen(os.open(room / "answers" / f"{who}.txt", _APPEND, 0o644), "a") as answers:
        answers.write(f"{line}\n")
    with suppress(FileNotFoundError):  # taken back meanwhile
        file.replace(room / "done" / file.name)
    say(f"{file.stem}: {text}")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _environment(room: Path, who: str) -> dict[str, str]:
    home = room.resolve() / "people" / folder_name(who)
    return os.environ | {"LABLIB_EXPERIMENTS": str(home), RECORDED_SWITCH: str(home / "recorded")}


def _rung(*words: str) -> list[str]:
    return [sys.executable, "-c", "from lablib.cli.main import app; app()", "labs", *words]


def _seats(gpus: Sequence[int]) -> str:
    return f"GPU {', '.join(map(str, gpus))}" if gpus else "the CPU"
