"""The files of a scaling report: one record a run, and what each was made on.

distributed-experiments/<date>-<name>/runs/one-1.json, strong-8.json, weak-8.json    every raw line of every rank
metrics/one-1/metrics-rank0.jsonl, run.json    the run's own files
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lablib.launch.experiments import experiments_dir
from lablib.launch.lab_jobs import read_json
from lablib.launch.machine import label
from lablib.launch.train_metrics import read_metrics

Kind = Literal["one", "weak", "strong"]
KINDS = ("one", "weak", "strong")
#: A model with so many parameters is no toy: GPT-2's smallest has more, the laptop's models have not a tenth.
REAL_PARAMS = 100e6


def keep_metrics(run: str | Path, target: Path) -> None:
    """Copy the metrics of every rank and run.json of a run, and nothing large, to another folder."""
    target.mkdir(parents=True, exist_ok=True)
    for path in (*Path(run).glob("metrics-rank*.jsonl"), *Path(run).glob("run.json")):
        shutil.copy(path, target)


def read_run(run: str | Path) -> list[list[dict[str, Any]]]:
    """Return the steps of every rank of a run.

    Raises:
        ValueError: If the file of a rank is missing, or two of them disagree on the number of ranks.
    """
    first = read_metrics(run, 0)
    if not first:
        raise ValueError(f"{run} has no step in its metrics")
    ranks = first[-1]["world_size"]
    samples = [first, *(read_metrics(run, rank) for rank in range(1, ranks))]
    sizes = {line["world_size"] for lines in samples for line in lines}
    if sizes != {ranks}:
        raise ValueError(
            f"{run} changed its number of ranks from {sorted(sizes)}; a report needs a run on one number"
        )
    return samples


def records(folder: str | Path) -> list[dict[str, Any]]:
    """Return the records of a report: one rank first, then weak and strong, by ranks.

    Raises:
        ValueError: If there is no record, or none on one rank.
    """
    # Named as `add` names them: a folder `runs` may hold other things, such as the queues of the labs.
    paths = [p for kind in KINDS for p in sorted((Path(folder) / "runs").glob(f"{kind}-*.json"))]
    found = [_record(path) for path in paths]
    if not found:
        raise ValueError(f"{folder} holds no report: there is no runs/one-1.json")
    if not any(record["scaling"] == "one" for record in found):
        raise ValueError(f"{folder} has no run on one rank to compare with: runs/one-1.json is missing")
    return sorted(found, key=lambda record: (KINDS.index(record["scaling"]), record["ranks"]))


def _record(path: Path) -> dict[str, Any]:
    try:
        record = read_json(path)
    except ValueError:
        record = {}
    if not isinstance(record, dict) or not {"scaling", "ranks", "samples", "machine"} <= record.keys():
        raise ValueError(f"{path} is no record of a scaling report: delete it, and add the run again")
    return record


def on_gpus(record: Mapping[str, Any]) -> bool:
    """Say whether every rank of a run had a GPU of its own; CPU ranks on a machine with GPUs had none."""
    device = record.get("facts", {}).get("device", "cpu")
    return device.startswith("cuda") and record["ranks"] <= len(record["machine"]["gpus"])


def where_of(record: Mapping[str, Any]) -> str:
    """Return in one line what a run was made on."""
    on_cpu = record.get("facts", {}).get("device") == "cpu"
    return label(record["machine"] | ({"gpus": []} if on_cpu else {}), [record])


def gpu_report(experiments: Path | None = None) -> Path | None:
    """Return the newest report of a real model on two GPUs or more, or None; a small model's on GPUs is none.

    The run on several counts where there is the same batch on one to compare it with.

    Args:
        experiments: Where reports are; by default the learner's own.
    """
    found = []
    for path in (experiments or experiments_dir()).glob("*/runs/*-*.json"):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            real = record["ranks"] >= 2 and on_gpus(record) and record["facts"]["params"] >= REAL_PARAMS
            if real and record["scaling"] == "strong" and path.with_name("one-1.json").exists():
                found.append((record["date"], path.parent.parent))
        except (AttributeError, ValueError, KeyError, TypeError):
            continue  # a queue of the labs, or a torn file
    return max(found)[1] if found else None
