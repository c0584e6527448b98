"""The server that ranks are forked from: a process that has loaded torch and done nothing with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker, util
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

    Only a kernel does this, and not before its first cell: an open notebook that nobody runs needs no server. A
    command, a test or a rank that imports `ranks` may never start any. What starts is a new interpreter, not a fork, so
    it does not matter which threads the kernel already has; it ends with the kernel.
    """
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive else None
    if getattr(shell, "kernel", None) is None or sys.platform == "win32":
        return
    if len(shell.user_ns["In"]) > 1:  # the first entry is empty
        _start()
    else:
        shell.events.register("pre_run_cell", _start)


def _start(*_: object) -> None:
    with uninterrupted(), no_main_module():
        ensure_server(multiprocessing.get_context("forkserver"))


def ensure_server(context: BaseContext) -> None:
    """Start the server if there is none; garbage collection would be a quarter of its loading time."""
    context.set_forkserver_preload(_PRELOAD)
    _shorten_sockets()
    spawn = util.spawnv_passfds

    def without_collection(path: bytes, args: list[str], fds: list[int]) -> int:
        if "forkserver" in args[-1]:
            args = [*args[:-1], f"import gc; gc.disable(); {args[-1]}"]
        return spawn(path, args, fds)

    resource_tracker.ensure_running()  # leaves SIGINT unblocked
    util.spawnv_passfds = without_collection
    # Ctrl-C goes to the whole process group: the server begins with SIGINT blocked, and ignores it once it is loaded.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        util.spawnv_passfds = spawn


def server_pid() -> int | None:
    """Return the number of the server's process, or None before the first call."""
    return forkserver._forkserver._forkserver_pid


def _shorten_sockets() -> None:
    """Have multiprocessing choose its folder, once: under /tmp where TMPDIR is too long for the path of a socket."""
    if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_TMPDIR:
        before, tempfile.tempdir = tempfile.tempdir, "/tmp"
        try:
            util.get_temp_dir()
        finally:
            tempfile.tempdir = before


class Interrupts:
    """The interrupts that `uninterrupted` has put off.

    Attributes:
        noted: When each came, in monotonic seconds.
    """

    def __init__(self) -> None:
        self.noted: list[float] = []
        # Python calls handlers in the main thread: nothing can interrupt another one, whichever got the signal.
        main = threading.current_thread() is threading.main_thread()
        self._usual = signal.getsignal(signal.SIGINT) if main else None

    def listen(self, only_note: bool) -> None:
        """Choose what an interrupt does from now on."""
        if not callable(self._usual):  # not the main thread, or interrupts are ignored
            return
        signal.signal(signal.SIGINT, self._note if only_note else self._usual)
        if self.noted and not only_note:
            self.noted.clear()
            signal.raise_signal(signal.SIGINT)

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """Let interrupts raise inside of the block."""
        try:
            self.listen(only_note=False)
            yield
        finally:
            self.listen(only_note=True)

    def _note(self, number: int, frame: object) -> None:
        self.noted.append(time.monotonic())


@contextmanager
def uninterrupted() -> Iterator[Interrupts]:
    """Put off interrupts until the end of the block, whichever thread the system hands them to."""
    interrupts = Interrupts()
    try:
        interrupts.listen(only_note=True)
        yield interrupts
    finally:
        interrupts.listen(only_note=False)


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
