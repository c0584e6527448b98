"""The server that ranks are forked from: a process that has loaded torch and done nothing with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, util
from multiprocessing.context import BaseContext

# torch._dynamo is what the first optimizer of a process loads, with FSDP and DTensor; in the server it is loaded
# once. Checkpoints and pipelines are small beside it, and would be loaded by every rank of every call.
_PRELOAD = [
    "torch",
    "torch.distributed",
    "cloudpickle",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
]

#: A socket's path has at most 103 bytes on macOS and 107 on Linux; multiprocessing adds 32 to TMPDIR.
_LONGEST_TMPDIR = 103 - len("/pymp-12345678/listener-12345678")

_one_at_a_time = threading.Lock()


def start_early() -> None:
    """In a notebook, start the server now: it loads torch while the cells before the first ranks run.

    Only a kernel does this. A command, a test or a rank that imports `ranks` may never start any. What starts is
    a new interpreter, not a fork, so it does not matter which threads the kernel already has; it ends with the
    kernel.
    """
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive else None
    if getattr(shell, "kernel", None) is None or sys.platform == "win32":
        return
    with uninterrupted(), no_main_module():
        ensure_server(multiprocessing.get_context("forkserver"))


def ensure_server(context: BaseContext) -> None:
    """Start the server if there is none; garbage collection would be a quarter of its loading time.

    The ranks turn collection on again.
    """
    context.set_forkserver_preload(_PRELOAD)
    _shorten_sockets()
    spawn = util.spawnv_passfds

    def without_collection(path: bytes, args: list[str], fds: list[int]) -> int:
        if "forkserver" in args[-1]:
            args = [*args[:-1], f"import gc; gc.disable(); {args[-1]}"]
        return spawn(path, args, fds)

    util.spawnv_passfds = without_collection
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn


def _shorten_sockets() -> None:
    """Have multiprocessing choose its folder, once: under /tmp where TMPDIR is too long for the path of a socket."""
    if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_TMPDIR:
        before, tempfile.tempdir = tempfile.tempdir, "/tmp"
        try:
            util.get_temp_dir()
        finally:
            tempfile.tempdir = before


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off an interrupt until the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def no_main_module() -> Iterator[None]:
    """Hide the main script, which multiprocessing would otherwise run again in every rank."""
    with _one_at_a_time:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
