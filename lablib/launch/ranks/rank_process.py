"""The inside of one rank: join the process group, call the function, send back one report.

A rank is forked from a server process that holds torch and nothing of lablib (see `ranks`), so this module
is imported afresh by every rank and an edited lablib is always the one that runs.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import gc
import linecache
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import cloudpickle
import torch
import torch.distributed as dist

from lablib.launch.ranks.transport import BACKENDS, hide_gpus, pickle_result

_F_SETSIG = 10  # Linux: which signal says that a descriptor is ready

#: True in a rank, so that `run_ranks` can refuse to start ranks of ranks.
inside_rank = False


@dataclass(frozen=True)
class Job:
    """The settings that all ranks of one call share."""

    call: bytes  # the function and its arguments, pickled
    world_size: int  # number of ranks
    device: str  # "cpu" or "cuda"
    threads: int  # threads of each rank's CPU kernels
    timeout: float  # seconds after which the notebook gives up
    environ: dict[str, str]  # the full environment of a rank, rendezvous variables excluded
    meeting: str  # path of the file through which the ranks find each other
    cells: dict[str, list[str]]  # text of notebook cells by the file name in their code objects


def main(rank: int, job: Job, notebook: Connection, output: Connection, errors: Connection) -> None:
    """Run one rank from its first line to its last.

    The report is ("returned", bytes) or ("failed", monotonic seconds, text).
    """
    gc.freeze()  # what the server loaded is never garbage, and is not worth copying to find out
    gc.enable()
    leave_the_notebook()
    _redirect(output, errors)
    try:
        _set_environment(rank, job)
        fn, args = cloudpickle.loads(job.call)
        # The notebook's own timeout must strike first: it says where every rank stands, c10d's does not.
        limit = timedelta(seconds=2 * job.timeout + 60)
        store = dist.FileStore(job.meeting, job.world_size)
        dist.init_process_group(BACKENDS[job.device], store=store, rank=rank, world_size=job.world_size, timeout=limit)
        report = ("returned", pickle_result(fn(*args)))
    except BaseException as error:
        failed_at = time.monotonic()  # before formatting, which takes longer for some than for others
        below = error.__traceback__.tb_next if error.__traceback__ else None
        text = "".join(traceback.format_exception(type(error), error, below)).rstrip()
        _flush()
        notebook.send(("failed", failed_at, text))
        os._exit(1)  # destructors of process groups can wait for other ranks
    _flush()
    notebook.send(report)
    # A rank that closes its connections early would look to a slower one like a failure.
    notebook.recv()
    if dist.is_initialized():
        dist.destroy_process_group()


def leave_the_notebook() -> None:
    """Become a process group of its own that ends when the notebook ends."""
    global inside_rank
    inside_rank = True
    # Jupyter and Ctrl-C interrupt a whole process group; ranks are ended by the notebook instead.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    notebook = multiprocessing.parent_process()
    if sys.platform == "linux":
        # The kernel kills the process group when the notebook's end of a pipe is closed. A thread of Python could not,
        # while C++ waits with the GIL held, as it does for the file of a meeting whose folder is gone.
        fcntl.fcntl(notebook.sentinel, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(notebook.sentinel, _F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(notebook.sentinel, fcntl.F_GETFL)
        fcntl.fcntl(notebook.sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)

    def follow() -> None:  # elsewhere, and where it was closed before the kernel was asked
        notebook.join()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=follow, daemon=True, name="follow-the-notebook").start()


def _redirect(output: Connection, errors: Connection) -> None:
    """Send standard output to one pipe and standard error to another, those of C++ and of subprocesses included."""
    os.dup2(output.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    text = {"mode": "w", "buffering": 1, "encoding": "utf-8", "errors": "backslashreplace", "closefd": False}
    sys.stdout = open(1, **text)  # noqa: SIM115 (open until the rank ends)
    sys.stderr = open(2, **text)  # noqa: SIM115
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, 2, all_threads=True)


def _flush() -> None:
    """Write out what Python and C have kept in memory; a function may have closed or replaced its streams."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def _set_environment(rank: int, job: Job) -> None:
    """Give the rank the notebook's environment, the variables that torchrun would set, and its GPU."""
    os.environ.clear()
    os.environ.update(job.environ)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        OMP_NUM_THREADS=str(job.threads),
    )
    torch.set_num_threads(job.threads)
    if job.device == "cuda":
        torch.cuda.set_device(rank)  # the first touch of CUDA: the server has made none
    else:
        hide_gpus(os.environ)
    for name, lines in job.cells.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
