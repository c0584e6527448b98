"""Scaling reports: runs of the trainer on one rank and on many, kept one by one, and what they say together.

    report = ScalingReport("first-run")
    report.add("runs/one", scaling="one")
    report.add("runs/two", scaling="strong", predicted={"step": 0.21}, yours={"speedup": 1.8})
    report_rows(report.folder)              # speedup, efficiency and what took the rest
    compare_reports(report.folder, other)   # what got faster, and whether by more than the spread

A report is a folder, `distributed-experiments/<date>-<name>/`:

    runs/one-1.json, strong-8.json, weak-8.json    every raw line of every rank
    metrics/one-1/metrics-rank0.jsonl, run.json    the run's own files

so it can be computed anew when the way to compute it gets better. `rung report` draws figures and a page from it.

The trainer's clock does not tell transfer from computation. A rank is therefore taken to compute as long as the run on
one rank did for the same work (for strong scaling the n-th part of it); what it took longer is communication or
waiting. Lines with `communication_seconds`, from a profiler, are believed instead.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Literal

from lablib import __version__
from lablib.calc.communication import speedup
from lablib.calc.errors import read_json, shown
from lablib.calc.runs import ScalingLoss, scaling_loss, spread
from lablib.launch.records import (
    FLOAT,
    NUMBER,
    POSITIVE,
    TEXT,
    WHOLE,
    check_fields,
    experiments_dir,
    git_commit,
    gpu_topology,
    machine_label,
    this_machine,
    utc_now,
    write_json,
)
from lablib.launch.training import read_metrics

Kind = Literal["one", "weak", "strong"]
SCALINGS = ("one", "weak", "strong")
#: A model with so many parameters is no toy: GPT-2's smallest has more, the laptop's models have not a tenth.
REAL_PARAMS = 100e6
#: What may be predicted: seconds of a step, throughput over that of one rank, bytes of a rank at most.
PREDICTED = ("step", "speedup", "memory_bytes")


class ScalingReport:
    """A folder of records: `distributed-experiments/<date>-<name>/`."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        if not name or not all(letter.isalnum() or letter in "-_" for letter in name):
            raise ValueError(f"name={name!r} must be letters, digits, dashes and underscores")
        self.name = name
        self.folder = folder or experiments_dir() / f"{datetime.now(UTC):%Y-%m-%d}-{name}"

    def add(
        self,
        run: str | Path,
        *,
        scaling: Kind,
        warm_up: int = 2,
        predicted: Mapping[str, Any] | None = None,
        yours: Mapping[str, float] | None = None,
    ) -> Path:
        """Keep one run, its metrics included; a run of the same kind on as many ranks is replaced.

        Args:
            run: Folder of the trainer: metrics of every rank, and run.json.
            scaling: "one" (one rank, to compare with), "weak" (batch per rank as there) or "strong" (global batch).
            predicted: What lablib predicts, by the names in `PREDICTED` and others; `step` at least.
            yours: What you predicted before the run, by the names in `PREDICTED`.
        """
        if warm_up < 0:
            raise ValueError(f"warm_up={warm_up} must not be negative")
        if scaling not in SCALINGS:
            raise ValueError(f"scaling={scaling!r} is unknown; use one of {', '.join(SCALINGS)}")
        samples = read_run(run)
        ranks = len(samples)
        if (scaling == "one") != (ranks == 1):
            raise ValueError(f"scaling={scaling!r} does not go with {ranks} ranks; one rank is 'one', more are not")
        steps = min(map(len, samples))
        if steps <= warm_up:
            raise ValueError(f"the run in {run} has {steps} steps, and warm_up={warm_up} leaves none")
        if predicted is not None and not predicted.get("step", 0) > 0:
            raise ValueError(f"predicted={dict(predicted)} needs a step above 0 seconds")
        if wrong := {k: v for k, v in (yours or {}).items() if k not in PREDICTED or not v > 0}:
            raise ValueError(f"yours={wrong} must be above 0 and one of {', '.join(PREDICTED)}")
        facts = Path(run) / "run.json"
        known = check_fields(read_json(facts), {"machine?": _RECORD["machine"]}, facts) if facts.exists() else {}
        here = known.get("machine") or this_machine()
        keep_metrics(run, self.folder / "metrics" / f"{scaling}-{ranks}")
        return write_json(
            self.folder / "runs" / f"{scaling}-{ranks}.json",
            {
                "report": self.name,
                "scaling": scaling,
                "ranks": ranks,
                "warm_up": warm_up,
                "predicted": dict(predicted) if predicted else None,
                "yours": dict(yours) if yours else None,
                "samples": samples,
                "facts": {key: value for key, value in known.items() if key not in ("machine", "keys")},
                "machine": here,
                "topology": gpu_topology() if here["gpus"] else {},
                "command": os.environ.get("LABLIB_RECORD_COMMAND", shlex.join(sys.argv)),
                "commit": git_commit(),
                "lablib": __version__,
                "date": utc_now(),
            },
        )


def keep_metrics(run: str | Path, target: Path) -> None:
    """Copy the metrics of every rank and run.json of a run, and nothing large, to another folder."""
    target.mkdir(parents=True, exist_ok=True)
    for path in (*Path(run).glob("metrics-rank*.jsonl"), *Path(run).glob("run.json")):
        shutil.copy(path, target)


def read_run(run: str | Path) -> list[list[dict[str, Any]]]:
    """Return the steps of every rank of a run."""
    first = read_metrics(run, 0)
    if not first:
        raise ValueError(f"{run} has no step in its metrics")
    ranks = first[-1]["world_size"]
    samples = [first, *(read_metrics(run, rank) for rank in range(1, ranks))]
    sizes = {line["world_size"] for lines in samples for line in lines}
    if sizes != {ranks}:
        raise ValueError(f"{run} changed its number of ranks from {sorted(sizes)}; a report needs a run on one number")
    return samples


def scaling_records(folder: str | Path) -> list[dict[str, Any]]:
    """Return the records of a report: one rank first, then weak and strong, by ranks."""
    # Named as `add` names them: a folder `runs` may hold other things, such as the queues of the labs.
    paths = [p for kind in SCALINGS for p in sorted((Path(folder) / "runs").glob(f"{kind}-*.json"))]
    found = [_record(path) for path in paths]
    if not found:
        raise ValueError(f"{folder} holds no report: there is no runs/one-1.json")
    if not any(record["scaling"] == "one" for record in found):
        raise ValueError(f"{folder} has no run on one rank to compare with: runs/one-1.json is missing")
    return sorted(found, key=lambda record: (SCALINGS.index(record["scaling"]), record["ranks"]))


_STEP = {"seconds": POSITIVE, "tokens_per_second": NUMBER, "loss?": FLOAT} | dict.fromkeys(
    ("mfu?", "memory_bytes?", "data_seconds?", "communication_seconds?"), NUMBER
)
_RECORD = dict.fromkeys(("report", "scaling", "commit", "date", "command"), TEXT) | {
    "ranks": WHOLE,
    "warm_up": WHOLE,
    "predicted?": {"step?": POSITIVE, "memory_bytes?": NUMBER, "links?": TEXT, "step_error?": TEXT},
    "yours?": dict.fromkeys((f"{name}?" for name in PREDICTED), POSITIVE),
    "samples": [[_STEP]],
    "facts": {"device?": TEXT, "params?": NUMBER, "config?": {}},
    "machine": {"cpu": TEXT, "cpus": WHOLE, "gpus": [TEXT]},
}


def _record(path: Path) -> dict[str, Any]:
    """Return a record whose fields are what the rest of this module takes them for."""
    record = {"predicted": None, "yours": None} | check_fields(read_json(path), _RECORD, path)
    ranks, steps = len(record["samples"]), min(map(len, record["samples"]), default=0)
    if record["scaling"] not in SCALINGS:
        raise ValueError(f"{path}: scaling is {shown(record['scaling'])} and must be one of {', '.join(SCALINGS)}")
    if record["ranks"] != ranks or (ranks == 1) != (record["scaling"] == "one"):
        raise ValueError(f"{path}: ranks is {record['ranks']}, with samples of {ranks} and scaling {record['scaling']}")
    if steps <= record["warm_up"]:
        raise ValueError(f"{path}: samples has {steps} steps of a rank, and warm_up={record['warm_up']} leaves none")
    return record


def on_gpus(record: Mapping[str, Any]) -> bool:
    """Say whether every rank of a run had a GPU of its own; CPU ranks on a machine with GPUs had none."""
    device = record["facts"].get("device") or "cpu"
    return device.startswith("cuda") and record["ranks"] <= len(record["machine"]["gpus"])


def describe_machine(record: Mapping[str, Any]) -> str:
    """Return in one line what a run was made on."""
    on_cpu = record["facts"].get("device") == "cpu"
    return machine_label(record["machine"] | ({"gpus": []} if on_cpu else {}), [record])


def gpu_report(experiments: Path | None = None) -> Path | None:
    """Return the newest report of a real model on two GPUs or more, or None; a small model does not count."""
    found = []
    for path in (experiments or experiments_dir()).glob("*/runs/*-*.json"):
        try:
            record = _record(path)
        except ValueError:
            continue  # a queue of the labs, or a torn file
        real = record["ranks"] >= 2 and on_gpus(record) and (record["facts"].get("params") or 0) >= REAL_PARAMS
        if real and record["scaling"] == "strong" and path.with_name("one-1.json").exists():
            found.append((record["date"], path.parent.parent))
    return max(found)[1] if found else None


def get_scaling_loss(record: Mapping[str, Any], one: Mapping[str, Any]) -> ScalingLoss:
    """Return what a run lost against the run on one rank."""
    scaling = record["scaling"]
    alone = [[_phases(line, None)] for line in _counted(one)[0]]
    share = 1.0 if scaling == "weak" else 1 / record["ranks"]
    compute = share * median(step[0]["compute"] for step in alone)
    steps = [[_phases(line, compute) for line in step] for step in zip(*_counted(record), strict=True)]
    return scaling_loss(alone, steps, scaling=scaling)


def report_rows(folder: str | Path) -> list[dict[str, Any]]:
    """Return one row per run: times with their spread, prediction, speedup, efficiency and the loss by part."""
    found = scaling_records(folder)
    one = found[0]
    base = spread(_seconds(one))
    table = []
    for record in found:
        measured = spread(_seconds(record))
        prediction = record["predicted"] or {}
        predicted = prediction.get("step")
        row = {
            "run": f"{record['ranks']} rank{'s' if record['ranks'] > 1 else ''}"
            + ("" if record["scaling"] == "one" else f", {record['scaling']}"),
            "scaling": record["scaling"],
            "ranks": record["ranks"],
            "seconds": asdict(measured),
            "tokens_per_second": median(_values(record, "tokens_per_second")),
            "mfu": median(mfu) if (mfu := _values(record, "mfu")) else None,
            "memory_bytes": max(_values(record, "memory_bytes"), default=None),
            "predicted": predicted,
            "predicted_memory": prediction.get("memory_bytes"),
            "predicted_links": prediction.get("links"),
            "predicted_error": prediction.get("step_error"),
            "error": predicted / measured.median - 1 if predicted else None,
            "yours": record.get("yours") or {},
            "where": describe_machine(record),
            "date": record["date"],
        }
        if record["scaling"] != "one":
            faster = speedup(base.median, measured.median, record["ranks"], scaling=record["scaling"])
            loss = get_scaling_loss(record, one)
            alone = (one["predicted"] or {}).get("step")
            row |= {
                "speedup": faster,
                "predicted_speedup": speedup(alone, predicted, record["ranks"], scaling=record["scaling"])
                if alone and predicted
                else None,
                "efficiency": faster / record["ranks"],
                "loss": loss.shares,
                "loss_seconds": loss.parts,
                "largest": loss.largest,
            }
        if record["scaling"] == "strong":
            row["loss_apart"] = _apart(one, record)
        table.append(row)
    return table


def _apart(one: Mapping[str, Any], record: Mapping[str, Any]) -> float | None:
    """The largest difference of the losses of two runs on the same samples; None where a step has other targets or none."""
    pairs = list(zip(one["samples"][0], record["samples"][0], strict=False))
    losses = [(a.get("loss"), b.get("loss")) for a, b in pairs]
    if any(a.get("targets") != b.get("targets") for a, b in pairs) or any(None in pair for pair in losses):
        return None
    apart = max(abs(a - b) for a, b in losses)
    return apart if math.isfinite(apart) else None


def _counted(record: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """The steps of every rank after the warm-up, cut to those that all ranks wrote."""
    steps = min(map(len, record["samples"]))
    return [lines[record["warm_up"] : steps] for lines in record["samples"]]


def _seconds(record: Mapping[str, Any]) -> list[float]:
    """The time of each step: that of its slowest rank."""
    return [max(line["seconds"] for line in step) for step in zip(*_counted(record), strict=True)]


def _values(record: Mapping[str, Any], key: str) -> list[float]:
    return [line[key] for lines in _counted(record) for line in lines if line.get(key) is not None]


def _phases(line: Mapping[str, Any], compute: float | None) -> dict[str, float]:
    """The phases of one rank's step; without `compute` all that is not data is computation."""
    data = line.get("data_seconds") or 0.0
    # On a GPU the parts come from events and the sum from the host's clock; they differ by microseconds.
    seconds = max(line["seconds"], data)
    rest = seconds - data
    sent = line.get("communication_seconds")
    if sent is None:
        sent = 0.0 if compute is None else max(0.0, rest - compute)
    return {"seconds": seconds, "data": data, "compute": max(0.0, rest - sent), "communication": min(sent, rest)}


def compare_reports(a: str | Path, b: str | Path) -> list[dict[str, Any]]:
    """Return one row per run that both reports have: times, their ratio, and whether their quartiles overlap."""
    first, second = ({row["run"]: row for row in report_rows(folder)} for folder in (a, b))
    both = [name for name in first if name in second]
    if not both:
        raise ValueError(f"no run in common: {', '.join(first)} and {', '.join(second)}")
    table = []
    for name in both:
        one, two = first[name]["seconds"], second[name]["seconds"]
        table.append(
            {
                "run": name,
                "a": one["median"],
                "b": two["median"],
                "ratio": two["median"] / one["median"],
                "apart": one["high"] < two["low"] or two["high"] < one["low"],
                "efficiency_a": first[name].get("efficiency"),
                "efficiency_b": second[name].get("efficiency"),
            }
        )
    return table


def report_differences(a: str | Path, b: str | Path) -> list[str]:
    """Return what two reports do not have in common: settings, versions, machines, commits; one line each."""
    lines = []
    first, second = scaling_records(a)[0], scaling_records(b)[0]
    for part in ("machine", "facts"):
        one, two = _flat(first[part]), _flat(second[part])
        for key in sorted(set(one) | set(two)):
            if one.get(key) != two.get(key) and key not in ("config.folder", "sharding"):
                lines.append(f"{key}: {one.get(key)} and {two.get(key)}")
    if first.get("topology") != second.get("topology"):
        lines.append("links: `nvidia-smi topo -m`, or which GPUs reach each other")
    if first["commit"] != second["commit"]:
        lines.append(f"commit: {first['commit'][:10]} and {second['commit'][:10]}")
    return lines


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat
