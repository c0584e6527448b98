"""The queue behind `rung labs`: labs run by papermill one after the other, each done once, within a budget.

    distributed-experiments/
      runs/<time>.json, .log          a queue: its command, its jobs in order, its state; what it printed
      <date>-<lab>-<key>/job.json     a job: lab, parameters, device, versions, status, every attempt
                          <lab>.ipynb the executed notebook, saved cell by cell
                          samples/    measurements kept one by one

A job's key is made of the lab's code, its parameters, the device and the versions; a job that is done is never run
again, and one that is not keeps its folder, and with it the samples and checkpoints that it continues from.
`worker` runs a queue.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from lablib import __version__
from lablib.calc.errors import parse_json, read_bounded
from lablib.launch.records import (
    experiments_dir,
    git_commit,
    repository_root,
    this_machine,
    utc_now,
    versions,
    write_json,
)

_JOB_FIELDS = {"attempts", "key", "lab", "status"}
_LOCK_S = 1  # whoever looks whether labs are running holds the lock for an instant


# Files


def runs_dir() -> Path:
    """Return the folder of the queues."""
    return experiments_dir() / "runs"


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file of ours: a dictionary."""
    try:
        content = parse_json(read_bounded(path))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): delete it") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged (it is no dictionary): delete it")
    return content


def read_job(path: Path) -> dict[str, Any]:
    """Return the content of a job.json."""
    content = read_json(path)
    if not content.keys() >= _JOB_FIELDS:
        raise ValueError(f"{path} is damaged (it is no description of a job): delete it")
    return content


def update(path: Path, **changes: Any) -> dict[str, Any]:
    """Change fields of a JSON file, atomically, and return its content."""
    content = read_json(path) | changes
    write_json(path, content)
    return content


def all_jobs() -> list[Path]:
    """Return the job.json of every job, oldest first."""
    return sorted(experiments_dir().glob("*/job.json"))


def find_job(key: str) -> Path | None:
    """Return the newest job.json with a key, or None."""
    for path in reversed(all_jobs()):
        with suppress(ValueError):  # a damaged one does not keep others from running
            if read_job(path)["key"] == key:
                return path
    return None


def latest_queue() -> Path | None:
    """Return the newest queue that can be read, or None."""
    for path in sorted(runs_dir().glob("*.json"), reverse=True):
        with suppress(ValueError):
            if "state" in read_json(path):
                return path
    return None


def progress(job: Path) -> tuple[int, int]:
    """Return how many cells of a job's notebook have been begun, and how many there are."""
    with suppress(OSError, ValueError):  # papermill may be writing it
        cells = read_json(job.parent / Path(read_job(job)["path"]).name)["cells"]
        states = [cell["metadata"].get("papermill", {}).get("status", "pending") for cell in cells]
        return sum(state != "pending" for state in states), len(cells)
    return 0, 0


def acquire_lock() -> TextIO:
    """Return the open lock file of the one queue that may run here, or raise a BlockingIOError.

    The lock belongs to the open file: a worker that inherits it holds it until it ends, however it ends.
    """
    runs_dir().mkdir(parents=True, exist_ok=True)
    file = (runs_dir() / "lock").open("w")
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() >= deadline:
                file.close()
                raise
            time.sleep(0.05)


def is_running() -> bool:
    """Say whether labs are being run here; nothing is written, so the folder may be read-only."""
    try:
        with (runs_dir() / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


# Labs and what they are given


def all_labs() -> list[Path]:
    """Return the paths of all labs, in order."""
    return sorted((repository_root() / "labs").glob("[0-9][0-9]_*.ipynb"))


def find_lab(name: str, *, mine: bool = False) -> Path:
    """Return the path of a lab given its number ("2", "02") or its stem; `mine` takes the copy in `work/`."""
    number = name.zfill(2) if name.isdigit() else None
    for path in all_labs():
        if path.stem == name or path.stem.split("_")[0] == number:
            copy = repository_root() / "work" / path.name
            if mine and not copy.exists():
                raise ValueError(f"{copy} is not there; `make lab` copies the labs, or leave out --mine")
            return copy if mine else path
    raise ValueError(f"no lab {name!r}; there are: {', '.join(path.stem for path in all_labs())}")


def lab_parameters(path: Path) -> dict[str, Any]:
    """Return the parameters of a lab and their defaults as text."""
    return {name: info["default"] for name, info in _inspect(path).items()}


def _inspect(path: Path) -> dict[str, dict[str, str]]:
    import papermill

    return papermill.inspect_notebook(str(path))


def assign_parameters(labs: Sequence[Path], given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parameters of each lab; a name may begin with a lab, "06.steps".

    Papermill only warns about a parameter that a notebook does not have; a paid hour spent on a misspelt one is lost,
    so unknown names and values of another type are refused here.
    """
    parameters = [_inspect(path) for path in labs]
    assigned: list[dict[str, Any]] = [{} for _ in labs]
    for text, value in given.items():
        number, dot, name = text.rpartition(".")
        chosen = [i for i, path in enumerate(labs) if not dot or find_lab(number).stem == path.stem]
        if not chosen:
            raise ValueError(f"{text}: lab {number} is not among the chosen labs")
        having = [i for i in chosen if name in parameters[i]]
        if not having:
            known = "; ".join(f"{labs[i].stem} has: {', '.join(parameters[i]) or 'none'}" for i in chosen)
            raise ValueError(f"no parameter {name}; {known}")
        for i in having:
            _check_type(labs[i].stem, name, value, parameters[i][name])
            assigned[i][name] = value
    return assigned


def _check_type(stem: str, name: str, value: object, parameter: Mapping[str, str]) -> None:
    try:
        default = ast.literal_eval(parameter["default"])
    except (ValueError, SyntaxError):
        return  # computed in the cell: anything may be right
    if default is None and parameter["inferred_type_name"] == "float":  # `steps: float = None`
        default = 0.0
    # An integer is a float, too; 2.5 steps are no steps.
    fits = isinstance(value, type(default)) or (isinstance(value, int) and isinstance(default, float))
    fits &= isinstance(value, bool) == isinstance(default, bool)
    fits &= not isinstance(value, float) or math.isfinite(value)
    if default is not None and value is not None and not fits:
        raise ValueError(f"{name}={value!r} is no {type(default).__name__}; {stem} has {name}={parameter['default']}")


def get_device(gpus: Sequence[int]) -> dict[str, Any]:
    """Return what a run runs on, as far as its results depend on it."""
    here = this_machine()
    if gpus:
        return {"gpus": [here["gpus"][number] for number in gpus]}
    return {"cpu": here["cpu"], "cpus": here["cpus"]}


def lab_key(path: Path, parameters: Mapping[str, Any], device: Mapping[str, Any], *, record: bool) -> str:
    """Return the key of a run: the same code of the lab, parameters, device and versions give the same one."""
    cells = read_json(path)["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    parts = [path.stem, code, dict(parameters), dict(device), versions(), __version__, record]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def parse_gpus(text: str, count: int) -> list[int]:
    """Return the numbers of the GPUs to use: "all", how many ("2"), "0" or "cpu" for none, "0,3" for these two."""
    if text == "all":
        return list(range(count))
    if text == "cpu":
        return []
    if re.fullmatch(r"\d+(,\d+)*,?", text) is None:
        raise ValueError(f'gpus={text!r} is neither "all", a number, "cpu", nor a list such as 0,3')
    chosen = [int(part) for part in text.split(",") if part] if "," in text else list(range(int(text)))
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"gpus={text} names a GPU twice")
    if any(number >= count for number in chosen):
        advice = "; --gpus all takes what there is" if count != 1 else ""
        raise ValueError(f"gpus={text}, but this machine has {count}{advice}")
    return chosen


def prepare_queue(
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
    """Check everything, write the queue and the jobs, and start nothing; return the queue's file.

    Args:
        parameters: Values by name; see `assign_parameters`. Where GPUs are used, a lab with a parameter `gpus` gets
            their number, and one with `only_gpu` runs its GPU section alone, unless a value is given here.
        gpus: Numbers of the GPUs to use; none means the CPU.
        budget_minutes: Minutes after which everything stops; None means never.
    """
    if budget_minutes is not None and not budget_minutes > 0:
        raise ValueError(f"budget_minutes={budget_minutes:g} must be above 0")
    if not labs:
        raise ValueError("no lab given; `rung labs list` shows them")
    paths = [find_lab(name, mine=mine) for name in labs]
    if len(set(paths)) != len(paths):
        raise ValueError(f"a lab is named twice: {', '.join(path.stem for path in paths)}")
    device, now, jobs = get_device(gpus), datetime.now(UTC), []
    for path, values in zip(paths, assign_parameters(paths, parameters or {}), strict=True):
        if gpus:
            usual = {"gpus": len(gpus), "only_gpu": True}
            values |= {n: usual[n] for n in usual if n in lab_parameters(path) and n not in values}
        key = lab_key(path, values, device, record=record)
        job = find_job(key)
        if job is None or (again and read_json(job)["status"] == "done"):
            name = f"{now:%Y-%m-%d}-{path.stem}-{key[:6]}" + (f"-{now:%H%M%S}" if job else "")
            content = {"lab": path.stem, "path": str(path), "parameters": values, "device": device}
            content |= {"versions": versions(), "commit": git_commit(), "record": record, "key": key}
            content |= {"command": command, "status": "waiting", "attempts": []}
            job = write_json(experiments_dir() / name / "job.json", content)
        jobs.append(str(job))
    settings = {"gpus": list(gpus), "record": record, "budget_minutes": budget_minutes, "pack": pack}
    queue = {"command": command, "made": utc_now(), "state": "waiting", **settings, "jobs": jobs}
    return write_json(runs_dir() / f"{now:%Y-%m-%dT%H%M%S-%f}.json", queue)
