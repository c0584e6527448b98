"""A storm: replica groups are killed with signal 9 again and again, at moments that a seed draws, and come back.

    python -m tests.evidence storm              20 kills of the toy and of torchft, as the lab starts them
    python -m tests.evidence storm --write      other timeouts, pauses and torchft's own wrapper too, and keep all of it
                                                in labs/recorded/14_storm.json, and the lines of one kill, which
                                                lab 14 shows without torchft, in 14_torchft.json

torchft must be installed: .venv/bin/pip install -c constraints.txt -e '.[torchft]'. A storm fails if a survivor or the
group that comes back takes no step before the deadline, or if weights of groups differ in a bit.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

from lablib.launch.records.experiments import save_record
from lablib.launch.runs import Groups, Torchft, Toy, storm
from lablib.toys.replica_groups import Job

KILLS, SEED, TIMEOUT = 20, 14, 1.0
TIMEOUTS = (0.3, 0.6, 2.0, 4.0)  # seconds, beside TIMEOUT
#: Seconds of the heartbeat timeout and of the join timeout, for three groups of torchft.
JOINS = ((4.0, 0.2), (4.0, 1.0), (4.0, 2.0), (1.0, 3.0))
PAUSES = (0.2, 0.5, 1.5, 3.0)  # seconds
FEW = 5  # kills for each other timeout, and pauses of each length
FOREVER = Job(steps=10**9)
NAME = "14_storm"


def storms() -> Iterator[dict[str, Any]]:
    """Yield a sample for each kill of the storms."""
    for kind in (Toy(FOREVER), Torchft(FOREVER)):
        for count in (2, 3):
            yield from _killed("storm", kind, count, TIMEOUT, KILLS)


def sweep() -> Iterator[dict[str, Any]]:
    """Yield a sample for each kill under other timeouts."""
    for timeout in TIMEOUTS:
        for kind in (Toy(FOREVER), Torchft(FOREVER)):
            yield from _killed("sweep", kind, 2, timeout, FEW)
    for timeout, join in JOINS:
        for seed in range(FEW):  # a job for each: who died lately still counts as living, and makes a majority larger
            yield from _killed("joins", Torchft(FOREVER, join_timeout=join), 3, timeout, 1, seed)


def _killed(what: str, kind: Any, count: int, timeout: float, kills: int, seed: int = SEED) -> Iterator[dict[str, Any]]:
    if kind.name == "torchft":
        kind = replace(kind, shards=count)
    for one in storm(kind, kills=kills, seed=seed, count=count, heartbeat_timeout=timeout):
        join = getattr(kind, "join_timeout", None)
        yield {"what": what, "kind": kind.name, "groups": count, "timeout": timeout, "join": join, **asdict(one)}


def pauses() -> Iterator[dict[str, Any]]:
    """Yield for each pause of a living group of the toy whether the others went on without it."""
    with Groups(Toy(FOREVER, patience=0.2), heartbeat_timeout=TIMEOUT) as groups:
        for length in PAUSES:
            for _ in range(FEW):
                before = len(groups.log(0, "committed"))
                groups.wait(lambda b=before: any(l["groups"] == 2 for l in groups.log(0, "committed")[b + 3 :]))
                seen = len(groups.log(0, "committed"))
                groups.pause(1, length)
                groups.wait(lambda s=seen: len(groups.log(0, "committed")) > s + 5)
                alone = any(line["groups"] == 1 for line in groups.log(0, "committed")[seen:])
                yield {"what": "pause", "kind": "toy", "timeout": TIMEOUT, "pause": length, "left_out": alone}


def own_wrapper() -> Iterator[dict[str, Any]]:
    """Yield whether the survivor lives that uses torchft's DistributedDataParallel, for a few kills in the all-reduce."""
    for kill in range(FEW):
        with Groups(Torchft(FOREVER, ddp=True), die={1: ("computed", 20 + kill)}, heartbeat_timeout=TIMEOUT) as groups:
            groups.wait(lambda: not groups.alive(1), "the victim dies")
            before = len(groups.log(0, "committed"))
            try:
                groups.wait(lambda b=before: len(groups.log(0, "committed")) > b + 3, "the survivor goes on")
                why = ""
            except RuntimeError as error:
                why = str(error).splitlines()[-1]
            yield {"what": "own wrapper", "kind": "torchft", "survived": not why, "why": why}


def one_kill() -> Iterator[dict[str, Any]]:
    """Yield the lines of two groups of torchft of which one is killed, and comes back; times from the first line."""
    with Groups(Torchft(FOREVER), heartbeat_timeout=TIMEOUT) as groups:
        groups.wait(lambda: groups.together() > 20)
        blow = groups.kill(1)
        groups.wait(lambda: sum(line["groups"] == 1 for line in groups.log(0, "committed")[-60:]) > 20)
        groups.start(1)
        groups.wait(lambda: groups.together(blow) > 20)
    lines = [{"group": group, **line} for group, lines in groups.logs().items() for line in lines]
    lines.append({"group": blow.group, "time": blow.time, "event": "killed", "step": blow.step})
    first = min(line["time"] for line in lines)
    for line in sorted(lines, key=lambda line: line["time"]):
        line.pop("pid", None)
        yield line | {"time": round(line["time"] - first, 4)}


def make(*, write: bool, say: Callable[[str], None]) -> list[str]:
    """Measure, print, and return what is wrong."""
    samples = []
    for part in (storms, sweep, pauses, own_wrapper) if write else (storms,):
        for sample in part():
            samples.append(sample)
            say("  ".join(f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in sample.items()))
    kept = [sample for sample in samples if sample["what"] == "storm"]
    say(
        f"{len(kept)} kills survived; median stall {statistics.median(s['stall'] for s in kept):.2f} s, median time back "
        f"{statistics.median(s['back'] for s in kept):.2f} s"
    )
    if write:
        command = "python -m tests.evidence storm --write"
        save_record(NAME, samples, command)
        save_record("14_torchft", list(one_kill()), command)
    return [f"weights differ after {s['unequal']} steps of a kill: {s}" for s in samples if s.get("unequal")]
