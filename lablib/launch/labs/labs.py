"""Labs and their runs as files: parameters checked before anything starts, jobs that are never done twice, one queue.

    distributed-experiments/
      runs/<time>.json, .log          a queue: its command, its jobs in order, its state; what it printed
      <date>-<lab>-<key>/job.json     a job: lab, parameters, device, versions, status, every attempt
                          <lab>.ipynb the executed notebook, saved cell by cell
                          samples/    measurements kept one by one

A job's key is made of the lab's code, its parameters, the device and the versions; a job that is done is never run
again. One that is not done keeps its folder, and with it the samples and checkpoints that it continues from.

Papermill only warns about a parameter that a notebook does not have; a paid hour spent on a misspelt one is lost, so
unknown names and values of another type are refused here.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

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

_LOOK_S = 0.05
_FIELDS = {"attempts", "key", "lab", "source", "status"}

#: What a job can be. "stopped" and "failed" are run again by the same command, "done" is not.
STATES = ("waiting", "running", "done", "failed", "stopped")


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
    if not content.keys() >= _FIELDS:
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
        with suppress(ValueError):  # a damaged one keeps nobody from running others
            if read_job(path)["key"] == key:
                return path
    return None


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
            their number, and one with `only_gpu` runs its GPU section alone; a value given here counts more.
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
    assigned = assign_parameters(paths, parameters or {})
    on = device(gpus)
    now = datetime.now(UTC)
    jobs, new = [], []
    for path, values in zip(paths, assigned, strict=True):
        if gpus:
            usual = {"gpus": len(gpus), "only_gpu": True}
            values |= {n: usual[n] for n in usual if n in lab_parameters(path) and n not in values}
        key = lab_key(path, values, on, record=record)
        found = find_job(key)
        if found is None or (again and read_json(found)["status"] == "done"):
            name = f"{now:%Y-%m-%d}-{path.stem}-{key[:6]}"
            folder = experiments_dir() / (name if found is None else f"{name}-{now:%H%M%S}")
            asked = {"lab": path.stem, "path": str(path), "parameters": values, "device": on, "versions": versions()}
            made_by = {"commit": git_commit(), "source": source_digest(), "record": record, "key": key}
            state = {"command": command, "status": "waiting", "attempts": []}
            found = write_json(folder / "job.json", asked | made_by | state)
            new.append(str(found))
        jobs.append(str(found))
    settings = {"gpus": list(gpus), "record": record, "budget_minutes": budget_minutes, "pack": pack}
    queue = {"command": command, "made": utc_now(), "state": "waiting", **settings, "jobs": jobs, "new": new}
    return write_json(runs_dir() / f"{now:%Y-%m-%dT%H%M%S-%f}.json", queue)


def latest_queue() -> Path | None:
    """Return the newest queue, or None; one that was refused beside another never ran, and does not count."""
    for path in sorted(runs_dir().glob("*.json"), reverse=True):
        with suppress(ValueError, KeyError, TypeError):  # damaged
            if read_json(path)["state"] != "refused":
                return path
    return None


def refuse(queue: Path) -> None:
    """Write down that a queue may not run beside another one; jobs that are its own wait for nothing then."""
    for job in map(Path, update(queue, state="refused").get("new", [])):
        if read_job(job)["status"] == "waiting":
            update(job, status="stopped")


@contextmanager
def only_queue(patience: float = 0.0) -> Iterator[None]:
    """Hold the right to run labs here, or raise a BlockingIOError: two queues at a time would measure each other.

    The operating system takes it back when the process ends, however it ends.
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


def all_labs() -> list[Path]:
    """Return the paths of all labs, in order."""
    return sorted((repository_root() / "labs").glob("[0-9][0-9]_*.ipynb"))


def find_lab(name: str, *, mine: bool = False) -> Path:
    """Return the path of a lab given its number ("2", "02") or its stem."""
    number = name.zfill(2) if name.isdigit() else None
    for path in all_labs():
        if path.stem == name or path.stem.split("_")[0] == number:
            copy = repository_root() / "work" / path.name
            if mine and not copy.exists():
                raise ValueError(f"{copy} is not there; `make lab` copies the labs, or leave out --mine")
            return copy if mine else path
    known = ", ".join(path.stem for path in all_labs())
    raise ValueError(f"no lab {name!r}; there are: {known}")


def lab_parameters(path: Path) -> dict[str, Any]:
    """Return the parameters of a lab and their defaults as text."""
    import papermill

    return {name: info["default"] for name, info in papermill.inspect_notebook(str(path)).items()}


def _kinds(path: Path) -> dict[str, str]:
    """Return the kind of each parameter that the cell names one for: `steps: float = None`."""
    import papermill

    inspected = papermill.inspect_notebook(str(path)).items()
    return {name: info["inferred_type_name"] for name, info in inspected}


def assign_parameters(labs: Sequence[Path], given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parameters of each lab."""
    defaults, kinds = [lab_parameters(path) for path in labs], [_kinds(path) for path in labs]
    assigned: list[dict[str, Any]] = [{} for _ in labs]
    for text, value in given.items():
        number, dot, name = text.rpartition(".")
        meant = [i for i, path in enumerate(labs) if not dot or find_lab(number).stem == path.stem]
        if not meant:
            raise ValueError(f"{text}: lab {number} is not among the chosen labs")
        having = [i for i in meant if name in defaults[i]]
        if not having:
            known = "; ".join(f"{labs[i].stem} has: {', '.join(defaults[i]) or 'none'}" for i in meant)
            raise ValueError(f"no parameter {name}; {known}")
        for i in having:
            _check_kind(labs[i].stem, name, value, defaults[i][name], kinds[i][name])
            assigned[i][name] = value
    return assigned


def _check_kind(stem: str, name: str, value: object, default: str, kind: str) -> None:
    try:
        usual = ast.literal_eval(default)
    except (ValueError, SyntaxError):
        return  # computed in the cell: anything may be right
    if usual is None and kind == "float":
        usual = 0.0
    # An integer is a float, too; 2.5 steps are no steps.
    alike = isinstance(value, type(usual)) or (isinstance(value, int) and isinstance(usual, float))
    if isinstance(value, float) and not math.isfinite(value):
        alike = False
    if usual is not None and value is not None and (not alike or isinstance(value, bool) != isinstance(usual, bool)):
        kind = type(usual).__name__
        raise ValueError(f"{name}={value!r} is no {kind}; {stem} has {name}={default}")


def device(gpus: Sequence[int]) -> dict[str, Any]:
    """Return what a run runs on, as far as its results depend on it."""
    here = this_machine()
    if gpus:
        return {"gpus": [here["gpus"][number] for number in gpus]}
    return {"cpu": here["cpu"], "cpus": here["cpus"]}


def lab_key(path: Path, parameters: Mapping[str, Any], on: Mapping[str, Any], *, record: bool) -> str:
    """Return the key of a run: the same lab, parameters, device and versions give the same one.

    Prose and outputs play no part; the code of the cells does.
    """
    cells = read_json(path)["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    parts = [path.stem, code, dict(parameters), dict(on), versions(), __version__, record]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def source_digest() -> str:
    """Return a digest of the code that measures: lablib's calculators, toys and launchers."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for room in ("calc", "toys", "launch"):
        for path in sorted((package / room).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def parse_gpus(text: str, here: int) -> list[int]:
    """Return the numbers of the GPUs to use: "all", how many ("2"), "0" or "cpu" for none, "0,3" for these two."""
    if text == "all":
        return list(range(here))
    if text == "cpu":
        return []
    if re.fullmatch(r"\d+(,\d+)*,?", text) is None:
        raise ValueError(f'gpus={text!r} is neither "all", a number, "cpu", nor a list such as 0,3')
    chosen = [int(part) for part in text.split(",") if part] if "," in text else list(range(int(text)))
    there_are = f"this machine has {here}" + ("; --gpus all takes what there is" if here != 1 else "")
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"gpus={text} names a GPU twice")
    if any(number >= here for number in chosen):
        raise ValueError(f"gpus={text}, but {there_are}")
    return chosen
