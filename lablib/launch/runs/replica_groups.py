"""Replica groups as real processes: start them, kill one with signal 9, let it come back, and read what all of them say.

    with Groups(heartbeat_timeout=1.0) as groups:           # the toy; Groups(Torchft(), ...) is the library
        groups.wait(lambda: groups.together() >= 5)
        blow = groups.kill(1)                               # kill -9, from outside, in whatever it does
        groups.start(1)
        groups.wait(lambda: groups.together(since=blow) >= 5)
    stall(groups.log(0), blow)                              # seconds without a step for the one that lives

Groups are forks of the server that has loaded PyTorch (`lablib.launch.ranks`), so that one is back in a second. Each
writes its log line by line, and a log survives its writer. Whatever ends the block ends all of them.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lablib.launch.rank_server import ensure_server, no_main_module, uninterrupted
from lablib.launch.ranks import environment, hide_gpus, leave_the_notebook, place
from lablib.launch.records import RankLog, digest, read_logs
from lablib.toys.replica_groups import Job, Lighthouse, Member, train

_LOOK_S = 0.02
_PHASES = ("asks", "quorum", "computed", "reduced", "committed")
_LOGGED = ("started", "healed", "committed", "void")


@dataclass(frozen=True)
class Toy:
    """What runs in a group: `lablib.toys.replica_groups`. `Torchft` in `torchft_group` is the other one."""

    job: Job = field(default_factory=Job)
    beat_every: float = 0.1  # seconds
    patience: float = 5.0  # seconds
    pace: float = 0.01  # seconds that a step takes at least: a small model would fill the log

    name = "toy"

    def lighthouse(self, report: Callable[[str], None], heartbeat_timeout: float, first: int) -> None:
        """Be the lighthouse until the process ends; `report` says where it is."""
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        report(str(store.port))
        Lighthouse(dist.TCPStore("127.0.0.1", store.port), heartbeat_timeout, first=first).run(threading.Event())

    def group(self, number: int, address: str, log: Callable[..., None]) -> None:
        """Be a group until it has taken all steps."""
        wait = timedelta(days=1)  # for the answer to an ask; the driver ends what takes too long

        def connect() -> dist.Store:
            return dist.TCPStore("127.0.0.1", int(address), is_master=False, timeout=wait)

        def watch(event: str, state: Any = None, **values: Any) -> None:
            if event == "computed":
                time.sleep(self.pace)
            log(event, **values, **({"digest": digest(state.weights)} if state else {}))

        train(Member(connect, self.beat_every, self.patience), self.job, watch)


@dataclass(frozen=True)
class Blow:
    """A kill: which group, when (seconds of the monotonic clock), and after which step of it."""

    group: int
    time: float
    step: int


class Groups:
    """A job of replica groups on this machine.

    Args:
        kind: What runs in a group.
        count: Groups at the start.
        heartbeat_timeout: Seconds without a heartbeat after which the lighthouse counts a group as dead.
        die: For a group the (phase, step) in which it kills itself, once: phases are "asks", "quorum", "computed",
            "reduced" and "committed". Only the toy has them all; torchft has "computed" and "committed".
        deadline: Seconds that one `wait` may take.
    """

    def __init__(
        self,
        kind: Any = None,
        *,
        count: int = 2,
        heartbeat_timeout: float = 1.0,
        die: dict[int, tuple[str, int]] | None = None,
        deadline: float = 60.0,
    ) -> None:
        self.kind = kind or Toy()
        if count < 1 or not heartbeat_timeout > 0 or not deadline > 0:
            raise ValueError(
                f"count={count} must be at least 1, heartbeat_timeout={heartbeat_timeout} and deadline={deadline} s above 0"
            )
        for phase, _ in (die or {}).values():
            if phase not in _PHASES:
                raise ValueError(f"phase={phase!r} must be one of {', '.join(_PHASES)}")
        self.count, self.heartbeat_timeout, self.deadline = count, heartbeat_timeout, deadline
        self._die = dict(die or {})
        self._processes: dict[int | None, BaseProcess] = {}

    # --- processes ---

    def __enter__(self) -> Groups:
        """Start the lighthouse and all groups."""
        with ExitStack() as stack:
            stack.enter_context(place())
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="groups-")))
            stack.callback(self._end)
            self._begin(None, _lighthouse, self.kind, self.heartbeat_timeout, self.count)
            self.wait(lambda: (self.folder / "address").exists(), "the lighthouse has an address")
            self.address = (self.folder / "address").read_text(encoding="utf-8")
            for group in range(self.count):
                self.start(group)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """End all processes; nothing stays."""
        self._logs = self.logs()
        self._stack.close()

    def start(self, group: int) -> None:
        """Start a group, the first time or again."""
        if group not in range(self.count):
            raise ValueError(f"group={group} must be one of {self.count}, 0 to {self.count - 1}")
        if group in self._processes and self._processes[group].is_alive():
            raise ValueError(f"group {group} lives: kill it first")
        again = group in self._processes
        self._begin(group, _group, self.kind, group, self.address, None if again else self._die.get(group))

    def kill(self, group: int) -> Blow:
        """Kill a group with signal 9, wherever it is, and return when."""
        self._check_alive(group)
        taken = self.log(group, "committed")
        when = time.monotonic()
        self._processes[group].kill()
        self._processes[group].join()
        return Blow(group, when, taken[-1]["step"] if taken else 0)

    def pause(self, group: int, seconds: float) -> None:
        """Stop a group for so long: its process lives, and neither computes nor sends a heartbeat."""
        self._check_alive(group)
        os.kill(self._processes[group].pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(self._processes[group].pid, signal.SIGCONT)

    def alive(self, group: int) -> bool:
        """Say whether a group's process is there."""
        return self._processes[group].is_alive()

    def _check_alive(self, group: int) -> None:
        if group not in self._processes or not self._processes[group].is_alive():
            raise ValueError(f"group={group} does not live")

    def _begin(self, name: int | None, target: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        with uninterrupted(), no_main_module():
            ensure_server(context)
            process = context.Process(target=target, args=(str(self.folder), environment(), *args), daemon=True)
            process.start()
            self._processes[name] = process

    def _end(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()

    # --- what they say ---

    def wait(self, condition: Callable[[], Any], what: str = "the condition") -> None:
        """Look until a condition holds; a process that failed, or the deadline, is an error that shows the last lines."""
        until = time.monotonic() + self.deadline
        while not condition():
            for name, process in self._processes.items():
                if process.exitcode not in (None, 0, -signal.SIGKILL) or (
                    name is None and process.exitcode is not None
                ):
                    who = "the lighthouse" if name is None else f"group {name}"
                    raise RuntimeError(f"{who} has failed, waiting for: {what}\n{self._tail()}")
            if time.monotonic() > until:
                raise TimeoutError(f"{what}: not after {self.deadline:g} s.\n{self._tail()}")
            time.sleep(_LOOK_S)

    def _tail(self) -> str:
        output = self.folder / "output"
        lines = output.read_text(errors="replace").splitlines() if output.exists() else []
        states = [
            f"group {g}: {'lives' if p.is_alive() else p.exitcode}" for g, p in self._processes.items() if g is not None
        ]
        return "\n".join([*states, *lines[-12:]])

    def logs(self) -> dict[int, list[dict[str, Any]]]:
        """Return what each group has written, by group; after the block as it was at its end."""
        return read_logs(self.folder) if self.folder.exists() else self._logs

    def log(self, group: int, *events: str) -> list[dict[str, Any]]:
        """Return a group's lines, of some events or all."""
        return [line for line in self.logs().get(group, []) if not events or line["event"] in events]

    def together(self, since: Blow | None = None) -> int:
        """Return how many steps all groups have committed together, since a kill or from the start."""
        return len(common_steps(self.logs(), self.count, since))


def common_steps(
    logs: dict[int, list[dict[str, Any]]], count: int, since: Blow | None = None
) -> dict[tuple[int | None, int], list[dict[str, Any]]]:
    """Return the lines of the steps that `count` groups committed in one quorum, by its number, if it has one, and step."""
    steps: dict[tuple[int | None, int], list[dict[str, Any]]] = {}
    for lines in logs.values():
        for line in lines:
            if (
                line["event"] == "committed"
                and line["groups"] == count
                and (since is None or line["time"] > since.time)
            ):
                steps.setdefault((line.get("number"), line["step"]), []).append(line)
    return {step: lines for step, lines in steps.items() if len(lines) == count}


def equal_weights(logs: dict[int, list[dict[str, Any]]]) -> tuple[int, int]:
    """Return how many steps were taken by two groups or more in one quorum, and after how many the weights' bits differ."""
    seen: dict[Any, list[str]] = {}
    for lines in logs.values():
        for line in lines:
            if line["event"] == "committed" and line["groups"] > 1:
                seen.setdefault((line.get("number"), line["groups"], line["step"]), []).append(line["digest"])
    shared = [digests for digests in seen.values() if len(digests) > 1]
    return len(shared), sum(len(set(digests)) > 1 for digests in shared)


def stall(lines: list[dict[str, Any]], blow: Blow) -> float:
    """Return the longest time between two commits of a survivor from the last one before a kill on, in seconds.

    Looked at until the survivor has taken a few steps again; a kill that hits nobody else's step stalls as long as a
    step takes.
    """
    times = [line["time"] for line in lines if line["event"] == "committed"]
    before = [t for t in times if t <= blow.time][-1:]
    after = [t for t in times if t > blow.time][:3]
    return max((b - a for a, b in zip([*before, *after], after, strict=False)), default=float("nan"))


@dataclass(frozen=True)
class Survived:
    """One kill of a storm. All times in seconds.

    Attributes:
        step: The last one that the killed group had committed.
        stall: Longest gap between two commits of a survivor around the kill.
        back: From the new start to the first step that the group commits in the full quorum.
        void: Steps that survivors asked for and did not commit.
        common: The first steps that all groups committed together after it came back.
        unequal: Those of them after which the groups' weights differ in a bit.
    """

    group: int
    step: int
    stall: float
    back: float
    void: int
    common: int
    unequal: int


def storm(
    kind: Any = None,
    *,
    kills: int,
    seed: int = 0,
    count: int = 2,
    heartbeat_timeout: float = 1.0,
    deadline: float = 60.0,
) -> list[Survived]:
    """Kill groups one after the other, at moments and in an order that the seed draws, and let each come back.

    Raises:
        TimeoutError: If a survivor, or a group that came back, takes no step before the deadline.
    """
    dice, found = random.Random(seed), []
    with Groups(kind, count=count, heartbeat_timeout=heartbeat_timeout, deadline=deadline) as groups:
        groups.wait(lambda: groups.together() > 5, "all groups take steps together")
        for _ in range(kills):
            time.sleep(dice.random() * 0.3)
            blow = groups.kill(dice.randrange(count))
            others = [group for group in range(count) if group != blow.group]

            def steps(group: int, blow: Blow = blow) -> int:
                return sum(line["time"] > blow.time for line in groups.log(group, "committed"))

            groups.wait(lambda: all(steps(o) > 3 for o in others), "the survivors go on")  # noqa: B023 (called at once)
            started = time.monotonic()
            groups.start(blow.group)
            groups.wait(lambda: groups.together(blow) > 5, "the group is back")  # noqa: B023
            logs = groups.logs()
            common = common_steps(logs, count, blow)
            first = min(line["time"] for lines in common.values() for line in lines)
            found.append(
                Survived(
                    group=blow.group,
                    step=blow.step,
                    stall=median(stall(logs[o], blow) for o in others),
                    back=first - started,
                    void=sum(line["event"] == "void" and line["time"] > blow.time for o in others for line in logs[o]),
                    common=len(common),
                    unequal=sum(len({line["digest"] for line in lines}) > 1 for lines in common.values()),
                )
            )
    return found


# --- the inside of a process ------------------------------------------------------------------------------------------


def _enter(folder: str, environ: dict[str, str]) -> None:
    gc.freeze()
    leave_the_notebook()
    os.environ.update(environ)
    hide_gpus(os.environ)
    torch.set_num_threads(1)
    output = os.open(Path(folder, "output"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115


def _lighthouse(folder: str, environ: dict[str, str], kind: Any, heartbeat_timeout: float, first: int) -> None:
    _enter(folder, environ)

    def report(address: str) -> None:
        written = Path(folder, "address.new")
        written.write_text(address, encoding="utf-8")
        written.rename(Path(folder, "address"))

    kind.lighthouse(report, heartbeat_timeout, first)


def _group(
    folder: str, environ: dict[str, str], kind: Any, number: int, address: str, die: tuple[str, int] | None
) -> None:
    _enter(folder, environ)
    log, step = RankLog(folder, number, time.monotonic), 0

    def write(event: str, **values: Any) -> None:
        nonlocal step
        step = values.get("step", step)
        if event in _LOGGED:
            log.write(event, **values)
        if (event, step) == die:
            os.kill(os.getpid(), signal.SIGKILL)

    write("started", pid=os.getpid())
    kind.group(number, address, write)
    os._exit(0)  # destructors of process groups can wait for others
