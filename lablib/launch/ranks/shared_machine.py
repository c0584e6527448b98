"""A machine that several people share: whose ranks run now, and whether late ones are slow or hang.

On a JupyterHub, thirty people's ranks at once would make every time that a lab measures a measurement of the others. Where
$LABLIB_TURNS names a folder that all can write to, a job of ranks waits for a place: as many run at once as the machine has
times `CORES_EACH` cores. A place belongs to an open file, so a kernel that is killed leaves it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

#: The variable that names the folder.
TURNS = "LABLIB_TURNS"
CORES_EACH = 4
_LOOK_S = 0.05
_SAY_S = 3.0
_LOOKS = 10
_IDLE_S = 0.02  # what a rank that waits may use of a core meanwhile
_held = False  # by this process


def any_at_work(pids: Iterable[int]) -> bool:
    """Say whether one of these processes computes, reads, or waits for a core; if none does, they wait for each other."""
    try:
        import psutil
    except ModuleNotFoundError:  # it comes with the labs
        return False
    processes = []
    for pid in pids:
        with suppress(psutil.Error):
            processes.append(psutil.Process(pid))

    def seconds() -> dict[int, float]:
        found = {}
        for process in processes:
            with suppress(psutil.Error):
                found[process.pid] = sum(process.cpu_times()[:2])
        return found

    before = seconds()
    for _ in range(_LOOKS):
        time.sleep(_LOOK_S)
        for process in processes:
            with suppress(psutil.Error):
                if process.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP):
                    return True
    return any(after > before.get(pid, after) + _IDLE_S for pid, after in seconds().items())


@contextmanager
def place() -> Iterator[None]:
    """Hold one of the machine's places for a block, where they are counted; a block inside it has it already."""
    global _held
    folder = os.environ.get(TURNS)
    if not folder or _held:
        yield
        return
    with _wait_for_one(Path(folder)):
        _held = True
        try:
            yield
        finally:
            _held = False


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _open(path: Path) -> TextIO:
    try:
        with suppress(FileExistsError), path.open("x") as file:
            os.chmod(file.fileno(), 0o666)  # whoever makes it lets the others hold it
        return path.open()
    except OSError as error:
        raise ValueError(
            f"{TURNS}={path.parent}: {error.strerror}; it must be a folder that all can write to"
        ) from None


def _wait_for_one(folder: Path) -> TextIO:
    places = max(1, _cores() // CORES_EACH)
    began, told = time.monotonic(), False
    while True:
        for number in range(places):
            file = _open(folder / f"place-{number}")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except BlockingIOError:
                file.close()
        if not told and time.monotonic() - began > _SAY_S:
            told = True
            print(f"waiting for a turn: {places} of this machine's jobs run at once", flush=True)
        time.sleep(_LOOK_S)
