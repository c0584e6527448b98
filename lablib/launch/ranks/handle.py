"""The notebook's end of one rank: its process, its report, what it printed, and where it stands if it hangs."""

from __future__ import annotations

import linecache
import os
import re
import signal
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext

from lablib.launch.ranks import rank_process
from lablib.launch.ranks.transport import is_installed

_ENTRY = "rank_process.py"  # the outermost frame of ours on a rank's main thread
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)$')
_REAP_S = 1.0  # between the end of a process and the news of its exit code
_END_S = 5.0  # for a killed process to end; a driver can hold it longer, and must not hold the notebook
_UNKNOWN = 255  # what multiprocessing says of a process when the server that knows its exit code is gone
_NO_SERVER = "the server that ranks are forked from was ended, so nobody can say how they do; call again"
_QUIET_S = 0.05  # a stack is complete when nothing has come for so long
#: What gloo prints whenever a group is made.
_GREETING = re.compile(r"\[Gloo\] Rank \d+ is connected to .*\n?")


class Rank:
    """Starts one rank and listens to it.

    Attributes:
        report: What the rank sent at its end, or None.
        failure: None, or (0 if it died without a word and 1 if it raised, monotonic seconds, text).
    """

    def __init__(self, context: BaseContext, number: int, job: rank_process.Job, live: bool) -> None:
        self.number = number
        self.report: tuple | None = None
        self.failure: tuple[int, float, str] | None = None
        self._live = live
        self._printed = b""
        self._stderr = b""
        self._notebook, notebook = context.Pipe()
        self._output, output = context.Pipe(duplex=False)
        self._errors, errors = context.Pipe(duplex=False)
        self.process = context.Process(target=rank_process.main, args=(number, job, notebook, output, errors))
        self.process.start()
        for end in (notebook, output, errors):
            end.close()  # the rank holds the only copy, so its end is seen here
        self._open = [self._output, self._errors]
        for end in self._open:
            os.set_blocking(end.fileno(), False)

    def sources(self) -> list[object]:
        """Return what to wait for."""
        return [self._notebook, *self._open, self.process.sentinel]

    def receive(self) -> None:
        """Take in whatever has come."""
        ended = bool(wait([self.process.sentinel], 0))  # asked first: a report sent before the end is not lost
        try:
            if self._notebook.poll():
                self.report = self._notebook.recv()
        except (EOFError, OSError):
            self.process.join(_REAP_S)
            ended = True
        self._drain()
        if self.report and self.report[0] == "failed":
            self.failure = (1, self.report[1], self.report[2])
        elif ended and not self.report:
            self.report = ("died",)
            code = self.process.exitcode
            # An abort can be the answer of a library to a lost rank. Nothing else ends a rank from within
            # without a report, so it comes before whatever the others say about lost connections.
            order = 1 if code == -signal.SIGABRT else 0
            text = _NO_SERVER if code == _UNKNOWN and self._lives() else f"its process {ending(code)}"
            self.failure = (order, time.monotonic(), text)

    def _lives(self) -> bool:
        try:
            os.kill(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def dismiss(self) -> None:
        """Let the rank leave."""
        with suppress(OSError):
            self._notebook.send(None)

    def kill(self) -> None:
        """End the rank and whatever it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.is_alive():
            self.process.kill()

    def finish(self) -> str:
        """Wait for the end, close the pipes and return the lines not yet printed."""
        self.process.join(_END_S)
        self._drain()
        for end in (self._notebook, self._output, self._errors):
            end.close()
        if self.process.exitcode is not None:
            self.process.close()
        return self._marked(self._printed)

    def ask_for_stack(self) -> None:
        """Ask for the Python stacks of the rank's threads."""
        self._drain()
        self._asked_at = len(self._stderr)
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)

    def read_stack(self, deadline: float) -> str:
        """Return what came after `ask_for_stack`, empty if the rank does not answer by the deadline."""
        patience = max(0.0, deadline - time.monotonic())
        while self._errors in self._open and wait([self._errors], patience):
            self._drain()
            patience = _QUIET_S
        return self._stderr[self._asked_at :].decode(errors="replace")

    def stderr(self) -> str:
        """Return what the rank wrote to standard error, C++ log lines included."""
        return self._stderr.decode(errors="replace")

    def _drain(self) -> None:
        """Read the pipes until they are empty."""
        self._printed += self._read(self._output)
        self._stderr += self._read(self._errors)
        if self._live:
            whole, newline, self._printed = self._printed.rpartition(b"\n")
            print(self._marked(whole + newline), end="", flush=True)

    def _read(self, pipe: Connection) -> bytes:
        chunks = []
        with suppress(BlockingIOError):
            while pipe in self._open:
                chunks.append(os.read(pipe.fileno(), 1 << 16))
                if not chunks[-1]:
                    self._open.remove(pipe)
        return b"".join(chunks)

    def _marked(self, printed: bytes) -> str:
        text = _GREETING.sub("", printed.decode(errors="replace"))
        if not text:
            return ""
        lines = text.removesuffix("\n").split("\n")
        return "".join(f"[rank {self.number}] {line}\n" for line in lines)


def cells() -> dict[str, list[str]]:
    """Return the text of this notebook's cells by file name, for tracebacks in the ranks."""
    entries = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4}
    return {name: entry[2] for name, entry in entries.items() if not os.path.exists(name)}


def readable(traceback: str) -> str:
    """Replace the file names of notebook cells in a traceback by "Cell In[3]"."""
    return re.sub(r'File "(.*?)"', lambda found: _cell(found[1]) or found[0], traceback)


def find_waiting_line(stacks: str) -> str | None:
    """Return the innermost line that is not a library's, and the function that it waits in; None without a stack."""
    threads = re.split(r"^(?:Current thread|Thread) .*$", stacks, flags=re.MULTILINE)
    main_thread = next((text for text in reversed(threads) if _ENTRY in text), "")
    frames = [found for line in main_thread.splitlines() if (found := _FRAME.match(line))]
    if not frames:
        return None
    own = next((frame for frame in frames if not _is_library(frame["file"])), frames[0])
    where = _cell(own["file"]) or own["file"]
    text = linecache.getline(own["file"], int(own["line"])).strip()
    inside = "" if own is frames[0] else f"  (inside {frames[0]['function']})"
    return f"{where}, line {own['line']}, in {own['function']}: {text}{inside}"


def enumerate_ranks(numbers: list[int]) -> str:
    """Return "rank 2" or "ranks 0, 1 and 3"."""
    *before, last = map(str, sorted(numbers))
    return f"ranks {', '.join(before)} and {last}" if before else f"rank {last}"


def _is_library(file: str) -> bool:
    return is_installed(file) or file.startswith(("<frozen ", "<string>"))


def _cell(file: str) -> str | None:
    """Return what IPython calls a cell, or None for a file."""
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive else None
    label = shell.compile.format_code_name(file) if shell else None
    return " ".join(label) if label else None


def ending(code: int | None) -> str:
    """Say how a process without a result ended, by its exit code or the negative number of a signal."""
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = ", perhaps for want of memory" if name == "SIGKILL" else ""
        return f"was ended by {name}{hint}"
    return f"exited with code {code} before the function returned"
