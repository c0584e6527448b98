"""What every test gets: one thread for torch, and no rank left behind."""

import multiprocessing
import os
import sys

import pytest

# Read when torch loads, which is after this: two cores are shared by the tests and the ranks they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _one_thread():
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_rank_left():
    """Fail a test that leaves a process of multiprocessing behind, and end that process."""
    yield
    left = multiprocessing.active_children()
    for process in left:
        process.kill()
        process.join()
    assert not left, f"the test left {left}"
