"""Runs of labs as files: what was asked for, what is done, what is left, and one queue at a time.

    distributed-experiments/
      runs/<moment>.json, .log        a queue: its command, its jobs in order, its state; what it printed
      <date>-<lab>-<key>/job.json     a job: lab, parameters, device, versions, status, every attempt
                          <lab>.ipynb the executed notebook, saved cell by cell
                          samples/    measurements kept one by one

A job that is done is never run again: its key is made of the lab's code, its parameters, the device and the versions.
A job that is not done keeps its folder, and with it the samples and checkpoints that it goes on from.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lablib.launch.experiments import commit, experiments_dir, now, write_json
from lablib.launch.labs import (
    assign_parameters,
    device,
    find_lab,
    lab_key,
    lab_parameters,
    source_digest,
)
from lablib.launch.machine import versions

_LOOK_S = 0.05
_FIELDS = {"attempts", "key", "lab", "source", "status"}

#: What a job can be. "stopped" and "failed" are run again by the same command, "done" is not.
STATES = ("waiting", "running", "done", "failed", "stopped")


def runs_dir() -> Path:
    """Return the folder of the queues."""
    return experiments_dir() / "runs"


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file.

    Raises:
        ValueError: If it is no JSON, with its name.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): delete it") from None


def read_job(path: Path) -> dict[str, Any]:
    """Return the content of a job.json.

    Raises:
        ValueError: If it is damaged; the job can be run again without it.
    """
    content = read_json(path)
    if not isinstance(content, dict) or not content.keys() >= _FIELDS:
        raise ValueError(f"{path} is damaged (it is no description of a job): delete it")
    return content


def update(path: Path, **changes: Any) -> dict[str, Any]:
    """Change fields of a JSON file, whole or not at all, and return its content.

    Args:
        path: A job.json or a queue.
        **changes: New values.
    """
    content = read_json(path) | changes
    write_json(path, content)
    return content


def all_jobs() -> list[Path]:
    """Return the job.json of every job, oldest first."""
    return sorted(experiments_dir().glob("*/job.json"))


def find_job(key: str) -> Path | None:
    """Return the newest job.json with a key, or None.

    Args:
        key: From `lablib.launch.labs.lab_key`.
    """
    for path in reversed(all_jobs()):
        with suppress(ValueError):  # a damaged one keeps nobody from running others
            if read_job(path)["key"] == key:
                return path
    return None


def prepare(
    labs: Sequence[str],
    parameters: Mapping[str, Any] | None = None,
    *,
    gpus: Sequence[int] = (),
    record: bool = False,
    again: bool = False,
    budget_minutes: float | None = None,
    pack: bool = False,
    mine: bool = False,
    command: str = "",
) -> Path:
    """Check everything, write the queue and the jobs, and start nothing.

    Args:
        labs: Numbers or stems, in the order of running.
        parameters: Values by name; see `assign_parameters`. Where GPUs are used, a lab with a parameter `gpus` gets
            their number, and one with `only_gpu` runs its GPU section alone; a value given here counts more.
        gpus: Numbers of the GPUs to use; none means the CPU.
        record: Let the labs write to `labs/recorded/`.
        again: Run what is done, too.
        budget_minutes: Minutes after which everything stops; None means never.
        pack: Leave an archive at the end.
        mine: Run the learner's copies in work/.
        command: How this was asked for.

    Returns:
        The queue's file.

    Raises:
        ValueError: If a lab, a parameter or the budget makes no sense.
    """
    if budget_minutes is not None and not budget_minutes > 0:
        raise ValueError(f"budget_minutes={budget_minutes:g} must be above 0")
    if not labs:
        raise ValueError("no lab given; `rung labs list` shows them")
    paths = [find_lab(name, mine=mine) for name in labs]
    if len(set(paths)) != len(paths):
        raise ValueError(f"a lab is named twice: {', '.join(path.stem for path in paths)}")
    assigned = assign_parameters(paths, parameters or {})
    on = device(gpus)
    moment = datetime.now(UTC)
    jobs, new = [], []
    for path, values in zip(paths, assigned, strict=True):
        if gpus:
            usual = {"gpus": len(gpus), "only_gpu": True}
            values |= {n: usual[n] for n in usual if n in lab_parameters(path) and n not in values}
        key = lab_key(path, values, on, record=record)
        found = find_job(key)
        if found is None or (again and read_json(found)["status"] == "done"):
            name = f"{moment:%Y-%m-%d}-{path.stem}-{key[:6]}"
            folder = experiments_dir() / (name if found is None else f"{name}-{moment:%H%M%S}")
            found = write_json(
                folder / "job.json",
                {
                    "lab": path.stem,
                    "path": str(path),
                    "parameters": values,
                    "device": on,
                    "versions": versions(),
                    "commit": commit(),
                    "source": source_digest(),
                    "record": record,
                    "key": key,
                    "command": command,
                    "status": "waiting",
                    "attempts": [],
                },
            )
            new.append(str(found))
        jobs.append(str(found))
    return write_json(
        runs_dir() / f"{moment:%Y-%m-%dT%H%M%S-%f}.json",
        {
            "command": command,
            "made": now(),
            "state": "waiting",
            "gpus": list(gpus),
            "record": record,
            "budget_minutes": budget_minutes,
            "pack": pack,
            "jobs": jobs,
            "new": new,
        },
    )


def latest_queue() -> Path | None:
    """Return the newest queue, or None; one that was refused beside another never ran, and is none."""
    for path in sorted(runs_dir().glob("*.json"), reverse=True):
        with suppress(ValueError, KeyError, TypeError):  # damaged
            if read_json(path)["state"] != "refused":
                return path
    return None


def refuse(queue: Path) -> None:
    """Write down that a queue may not run beside another one; jobs that are its own wait for nothing then.

    Args:
        queue: From `prepare`.
    """
    for job in map(Path, update(queue, state="refused").get("new", [])):
        if read_job(job)["status"] == "waiting":
            update(job, status="stopped")


@contextmanager
def only_queue(patience: float = 0.0) -> Iterator[None]:
    """Hold the right to run labs here; two queues at a time would measure each other.

    The operating system takes it back when the process ends, however it ends.

    Args:
        patience: Seconds to wait for it. `is_running` takes it for a moment to look, and that must refuse nobody.

    Raises:
        BlockingIOError: If another process holds it.
    """
    runs_dir().mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + patience
    with (runs_dir() / "lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_LOOK_S)
        yield


def is_running() -> bool:
    """Say whether labs are being run here; nothing is written, so the folder may be one that can only be read."""
    try:
        with (runs_dir() / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
