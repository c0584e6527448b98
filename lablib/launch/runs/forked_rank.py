"""A rank that torchrun forks off itself, made like the new process that a rank otherwise is.

    torchrun ... --run-path --start-method=fork forked_rank.py SCRIPT ARGUMENTS

torchrun has loaded PyTorch when it starts its ranks, so a fork is at work seconds before a new interpreter. But a fork
also has torchrun's handlers of signals, which a rank inside a collective would never get to run, and its session, so
that Ctrl-C in a terminal would reach the rank as well.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path


def reset_process() -> None:
    """Set signals that have a handler to Python's defaults, and begin a session, as a new interpreter does."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.setsid()


def main(script: str, *args: str) -> None:
    """Run a script as `python SCRIPT ARGUMENTS` does."""
    sys.argv, sys.path[0] = [script, *args], str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    reset_process()
    main(*sys.argv[1:])
