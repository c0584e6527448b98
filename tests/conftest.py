"""What every test gets: one thread for torch, and no process left behind."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest

# Read when torch loads, which is after this: two cores are shared by the tests and the ranks they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _one_thread():
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="module")
def _seed() -> int:
    from tests.processes import new_seed

    return new_seed()


@pytest.fixture
def seed(_seed: int) -> int:
    """A new seed for every module of every run; LABLIB_SEED repeats an old one."""
    print(f"LABLIB_SEED={_seed}")  # in the report of every test that fails
    return _seed


@pytest.fixture(autouse=True)
def _no_rank_left():
    """Fail a test that leaves a process of multiprocessing behind, and end that process."""
    yield
    left = multiprocessing.active_children()
    for process in left:
        process.kill()
        process.join()
    assert not left, f"the test left {left}"


@pytest.fixture(autouse=True)
def _no_child_left():
    """Fail the test that leaves a process behind, and not the one in which the garbage collector finds it."""
    before = _children()
    yield
    end, pause = time.monotonic() + 30, threading.Event()  # one that was killed may take a moment to go
    while (left := _children() - before - _servers()) and time.monotonic() < end:
        pause.wait(0.02)
    names = []
    for pid in left:
        with suppress(OSError):  # it has ended since
            names.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
            os.kill(pid, signal.SIGKILL)
    assert not left, f"the test left {names}"


def _children():
    """The processes that this one has started and that still run, by what Linux says; elsewhere nobody is asked."""
    found = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found |= {int(pid) for pid in task.read_text().split()}
    return {pid for pid in found if _runs(pid)}


def _runs(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _servers():
    """What multiprocessing starts once and keeps."""
    return {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
