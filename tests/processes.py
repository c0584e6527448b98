"""What tests of processes share: they end with the test that started them, and ranks start once; seeds and distances."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache

from torch import Tensor

from lablib.launch.ranks import run_ranks
from lablib.launch.runs.elastic import descendants


@contextmanager
def ended(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """Hand out a process, and see that nothing of it is left at the end of the block.

    Ranks are in sessions of their own, so a signal to a process group would not reach them all.

    Args:
        process: As `Popen` made it; its pipes are closed, too.
    """
    with process:
        try:
            yield process
        finally:
            end(process)


def end(process: subprocess.Popen) -> None:
    """Kill a process that has not ended, and whatever it has started."""
    if process.poll() is None:
        for pid in (process.pid, *descendants(process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    """Return a port that is free on this machine, and that no outgoing connection takes meanwhile.

    The system hands out ports from 32768 (Linux) or 49152 (macOS) to whoever asks for any. One below stays free until
    somebody asks for it by number.
    """
    while True:
        port = random.randrange(20_000, 32_768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def new_seed() -> int:
    """A new seed for every run, printed so that a failure can be repeated with LABLIB_SEED."""
    seed = int(os.environ.get("LABLIB_SEED", random.SystemRandom().randrange(10**6)))
    print(f"LABLIB_SEED={seed}")
    return seed


@cache
def on_ranks(fn: Callable, ranks: int, *args: object) -> list:
    """One start of the ranks for all tests that read its results; see `run_ranks`."""
    return run_ranks(fn, ranks, *args, timeout=120)


def far(a: Tensor | None, b: Tensor | None) -> float:
    """The largest difference of two tensors of one shape."""
    if a is None or b is None:  # the gradient of a frozen weight
        return 0.0 if a is b else float("inf")
    assert a.shape == b.shape
    return (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
