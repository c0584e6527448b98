"""Scaling measured: runs of the trainer on one rank and on many, kept one by one, and what they say together.

    report = ScalingReport("first-run")
    report.add("runs/one", scaling="one")
    report.add("runs/two", scaling="strong", predicted={"step": 0.21}, yours={"speedup": 1.8})
    rows(report.folder)                     # speedup, efficiency and what took the rest
    # `rung report` draws the figures and the page from the same files, again and again

A record has every raw line of every rank, so a report can be computed anew when the way to compute it gets better.
Two predictions may stand beside it: lablib's and yours.

The trainer's clock does not tell transfer from computation. A rank is therefore taken to compute as long as the run on
one rank did for the same work (for strong scaling the n-th part of it); what it took longer is communication or
waiting. Lines with `communication_seconds`, from a profiler, are believed instead.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from lablib import __version__
from lablib.calc.scaling import speedup
from lablib.calc.scaling_loss import Loss, Phases, scaling_loss, spread
from lablib.launch.experiments import commit, experiments_dir, now, write_json
from lablib.launch.lab_jobs import read_json
from lablib.launch.machine import machine, topology
from lablib.launch.scaling_records import KINDS, Kind, keep_metrics, read_run, records, where_of

#: What may be predicted: seconds of a step, throughput over that of one rank, bytes of a rank at most.
PREDICTED = ("step", "speedup", "memory_bytes")


class ScalingReport:
    """A folder of records: `distributed-experiments/<date>-<name>/`.

    Args:
        name: Of the report; letters, digits and dashes.
        folder: Another folder.

    Raises:
        ValueError: If the name cannot be a folder's.
    """

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
        predicted: Mapping[str, float] | None = None,
        yours: Mapping[str, float] | None = None,
    ) -> Path:
        """Keep one run, its metrics included; a run of the same kind on as many ranks is replaced.

        Args:
            run: Folder of the trainer: metrics of every rank, and run.json.
            scaling: "one" (one rank, to compare with), "weak" (batch per rank as there) or "strong" (global batch).
            warm_up: Steps at the beginning that do not count.
            predicted: What lablib predicts, by the names in `PREDICTED` and others; `step` at least.
            yours: What you predicted before the run, by the names in `PREDICTED`.

        Returns:
            The record.

        Raises:
            ValueError: If metrics are missing, ranks disagree, or the run has no step after its warm-up.
        """
        if warm_up < 0:
            raise ValueError(f"warm_up={warm_up} must not be negative")
        if scaling not in KINDS:
            raise ValueError(f"scaling={scaling!r} is unknown; use one of {', '.join(KINDS)}")
        samples = read_run(run)
        ranks = len(samples)
        if (scaling == "one") != (ranks == 1):
            raise ValueError(
                f"scaling={scaling!r} does not go with {ranks} ranks; one rank is 'one', more are not"
            )
        steps = min(map(len, samples))
        if steps <= warm_up:
            raise ValueError(f"the run in {run} has {steps} steps, and warm_up={warm_up} leaves none")
        if predicted is not None and not predicted.get("step", 0) > 0:
            raise ValueError(f"predicted={dict(predicted)} needs a step above 0 seconds")
        if wrong := {k: v for k, v in (yours or {}).items() if k not in PREDICTED or not v > 0}:
            raise ValueError(f"yours={wrong} must be above 0 and one of {', '.join(PREDICTED)}")
        facts = Path(run) / "run.json"
        known = read_json(facts) if facts.exists() else {}
        here = known.get("machine") or machine()
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
                "topology": topology() if here["gpus"] else {},
                "command": os.environ.get("LABLIB_RECORD_COMMAND", shlex.join(sys.argv)),
                "commit": commit(),
                "lablib": __version__,
                "date": now(),
            },
        )


def loss_of(record: Mapping[str, Any], one: Mapping[str, Any]) -> Loss:
    """Return what a run lost against the run on one rank."""
    scaling = record["scaling"]
    alone = [[_phases(line, None)] for line in _counted(one)[0]]
    share = 1.0 if scaling == "weak" else 1 / record["ranks"]
    compute = share * median(step[0]["compute"] for step in alone)
    steps = [[_phases(line, compute) for line in step] for step in zip(*_counted(record), strict=True)]
    return scaling_loss(alone, steps, scaling=scaling)


def rows(folder: str | Path) -> list[dict[str, Any]]:
    """Return one row per run: times with their spread, prediction, speedup, efficiency and the loss by part."""
    found = records(folder)
    one = found[0]
    base = spread(_seconds(one))
    table = []
    for record in found:
        measured = spread(_seconds(record))
        told = record["predicted"] or {}
        predicted = told.get("step")
        row = {
            "run": f"{record['ranks']} rank{'s' if record['ranks'] > 1 else ''}"
            + ("" if record["scaling"] == "one" else f", {record['scaling']}"),
            "scaling": record["scaling"],
            "ranks": record["ranks"],
            "seconds": asdict(measured),
            "tokens_per_second": median(_values(record, "tokens_per_second")),
            "mfu": _median_or_none(_values(record, "mfu")),
            "memory_bytes": max(_values(record, "memory_bytes"), default=None),
            "predicted": predicted,
            "predicted_memory": told.get("memory_bytes"),
            "error": predicted / measured.median - 1 if predicted else None,
            "yours": record.get("yours") or {},
            "where": where_of(record),
            "date": record["date"],
        }
        if record["scaling"] != "one":
            faster = speedup(base.median, measured.median, record["ranks"], scaling=record["scaling"])
            loss = loss_of(record, one)
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
    """The largest difference of the losses of two runs on the same samples, or None where a step has other targets."""
    pairs = list(zip(one["samples"][0], record["samples"][0], strict=False))
    if any(a.get("targets") != b.get("targets") for a, b in pairs):
        return None
    return max(abs(a["loss"] - b["loss"]) for a, b in pairs)


def _counted(record: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """The steps of every rank after the warm-up, cut to those that all ranks wrote."""
    steps = min(map(len, record["samples"]))
    return [lines[record["warm_up"] : steps] for lines in record["samples"]]


def _seconds(record: Mapping[str, Any]) -> list[float]:
    """The time of each step: that of its slowest rank."""
    return [max(line["seconds"] for line in step) for step in zip(*_counted(record), strict=True)]


def _values(record: Mapping[str, Any], key: str) -> list[float]:
    return [line[key] for lines in _counted(record) for line in lines if line.get(key) is not None]


def _median_or_none(values: list[float]) -> float | None:
    return median(values) if values else None


def _phases(line: Mapping[str, Any], compute: float | None) -> Phases:
    """The phases of one rank's step; without `compute` all that is not data is computation."""
    data = line.get("data_seconds", 0.0)
    # On a GPU the parts come from events and the whole from the host's clock; they differ by microseconds.
    seconds = max(line["seconds"], data)
    rest = seconds - data
    sent = line.get("communication_seconds")
    if sent is None:
        sent = 0.0 if compute is None else max(0.0, rest - compute)
    return {
        "seconds": seconds,
        "data": data,
        "compute": max(0.0, rest - sent),
        "communication": min(sent, rest),
    }
