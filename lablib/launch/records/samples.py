"""Results that need GPUs: measured where there are some, replayed where there are none, and never made up.

    found = gpu_samples("11_throughput", measure, gpus=2)
    if found:
        ...                         # found.samples, found.where

A record belongs to a number of GPUs, `NN_name-2gpu.json`. Asked for a number that nobody recorded, the lab says so and
names those that there are.

`SampleCache` keeps samples one by one, so that a lab that was interrupted repeats nothing. Under `rung labs run` each
sample is a file in the folder of that run; in a notebook of your own nothing is kept: re-running a cell measures again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lablib.calc.errors import read_json
from lablib.launch.records.experiments import (
    FOLDER_SWITCH,
    RECORD_SWITCH,
    Record,
    git_commit,
    read_record,
    recorded,
    repository_root,
    save_record,
    utc_now,
    write_json,
)
from lablib.launch.records.machine import gpu_topology, this_machine


def lab_folder() -> Path | None:
    """Return the folder of the run that this notebook belongs to, for samples and checkpoints; None outside one."""
    folder = os.environ.get(FOLDER_SWITCH)
    return Path(folder) if folder else None


class SampleCache:
    """The samples of one measurement."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._folder = lab_folder()

    def sample(self, case: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the sample of a case, with what tells it from the others: the one that is kept, or a new one."""
        if self._folder is None:
            return {**case, **measure()}
        text = json.dumps(case, sort_keys=True)
        path = self._folder / "samples" / f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
        if path.exists():
            kept = read_json(path)
            print(f"kept from {kept['date']}: {text}")
            return kept["sample"]
        sample = {**case, **measure()}
        write_json(path, {"date": utc_now(), "sample": sample})
        return sample


#: The numbers of GPUs that a page asks about.
COUNTS = (1, 2, 4, 8)


def gpu_record_name(name: str, gpus: int) -> str:
    """Return the file stem of a record made on a number of GPUs."""
    return f"{name}-{gpus}gpu"


def recorded_counts(name: str) -> list[int]:
    """Return the numbers of GPUs for which there is a record, ascending."""
    pattern = re.compile(re.escape(name) + r"-(\d+)gpu")
    files = (repository_root() / "labs" / "recorded").glob(f"{name}-*gpu.json")
    return sorted(int(found[1]) for path in files if (found := pattern.fullmatch(path.stem)))


def recorded_on_gpus() -> list[str]:
    """Return the names of all records that were made on GPUs; none means that no line of the GPU path ever ran."""
    files = sorted((repository_root() / "labs" / "recorded").glob("*.json"))
    return [path.stem for path in files if read_record(path).machine["gpus"]]


def gpu_samples(name: str, measure: Callable[[], list[dict[str, Any]]], *, gpus: int | None = None) -> Record | None:
    """Measure on this machine's GPUs, or replay a record, or say that there is none.

    On a machine with GPUs `measure` runs; under `rung labs run --record` its samples become the record for this
    number of GPUs. Without a GPU the record is replayed.

    Args:
        gpus: Whose record to replay where there is no GPU; None means the most that were recorded.

    Returns:
        The record, or None where nothing was measured or recorded.
    """
    import torch

    here = torch.cuda.device_count()
    if here:
        samples = measure()
        command = os.environ.get("LABLIB_RECORD_COMMAND", shlex.join(sys.argv))
        # Failures alone must not take the place of an earlier record.
        if os.environ.get(RECORD_SWITCH) == "1" and not all("failed" in sample for sample in samples):
            return save_record(gpu_record_name(name, here), samples, command, device="cuda")
        return Record(name, samples, this_machine(), command, git_commit(), utc_now(), topology=gpu_topology())
    counts = recorded_counts(name)
    wanted = gpus if gpus is not None else (counts[-1] if counts else None)
    if wanted not in counts:
        print(not_recorded(name, wanted, counts))
        return None
    record = recorded(gpu_record_name(name, wanted))
    print(f"replaying {record.name}, recorded {record.date[:10]}\n  on {record.where}, torch {record.machine['torch']}")
    return record


def not_recorded(name: str, gpus: int | None, counts: Sequence[int]) -> str:
    """Return the sentence for a number of GPUs that nobody recorded."""
    wanted = "a GPU" if gpus is None else _gpus(gpus)
    there_are = f"; there are records on {', '.join(_gpus(n) for n in counts)}" if counts else ""
    return f"{name}: not yet recorded on {wanted}{there_are}"


def coverage(names: Sequence[str], counts: Sequence[int] = COUNTS) -> list[dict[str, str]]:
    """Return one row per measurement: for each number of GPUs the date of its record, or "not yet recorded"."""
    rows = []
    for name in names:
        row = {"name": name}
        for gpus in counts:
            record = recorded(gpu_record_name(name, gpus))
            row[_gpus(gpus)] = f"{record.date[:10]}, {record.where}" if record else "not yet recorded"
        rows.append(row)
    return rows


def _gpus(count: int) -> str:
    return f"{count} GPU" + ("s" if count != 1 else "")
