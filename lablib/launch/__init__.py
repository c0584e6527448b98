"""Real jobs: ranks from a notebook, measurements, records.

In a notebook an interrupt, and a name that a cell above defines, are one sentence. After a restart of the kernel
nothing of lablib is imported, so `make lab` has every kernel load this package as an extension of IPython before its
first cell (`tools/ipython_config.py`); elsewhere its first import does.
"""

import sys
import traceback
from pathlib import PurePath
from types import TracebackType
from typing import Any

_ABOVE = "If a cell above defines it, run the cells above first (Run > Run All Above Selected Cell)."
_HALF = "An import was cut short: if the cell fails when you run it again, restart the kernel."


def load_ipython_extension(shell: Any) -> None:
    """Show interrupts and missing names of cells as sentences; whoever chose a handler before keeps it."""
    if not shell.custom_exceptions:
        shell.set_custom_exc((KeyboardInterrupt, NameError), _show)


def _show(shell: Any, kind: type, error: BaseException, trace: TracebackType, tb_offset: int | None = None) -> None:
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace  # for %debug and %tb
    frames = traceback.extract_tb(trace)
    cells = [frame for frame in frames if shell.compile.format_code_name(frame.filename)]
    if issubclass(kind, KeyboardInterrupt):
        lines = [_interrupted(frames, cells)]
    elif kind is NameError and cells == frames[-len(cells) :] and all(frame.name[0] == "<" for frame in cells):
        text = "".join(traceback.TracebackException(kind, error, trace).format_exception_only()).strip()
        text += "" if text[-1] in ".?" else "."
        lines = [f"Line {cells[-1].lineno}: {text.removeprefix('NameError: ')} {_ABOVE}"]
    else:  # within a function the way to the name matters
        lines = shell.InteractiveTB.structured_traceback(kind, error, trace, tb_offset=tb_offset)
    shell._showtraceback(kind, error, lines)


def _interrupted(frames: list[traceback.FrameSummary], cells: list[traceback.FrameSummary]) -> str:
    where = f" in line {cells[0].lineno}: {cells[0].line}" if cells else ""
    if any(PurePath(frame.filename).parts[-3:] == ("launch", "ranks", "run.py") for frame in frames):
        return f"Interrupted{where}\nIts ranks have ended."
    if any(frame.name == "<module>" and frame not in cells for frame in frames):
        return f"Interrupted{where}\n{_HALF}"
    return f"Interrupted{where}"


if "ipykernel" in sys.modules:  # a notebook: the server of its ranks loads torch while the notebook still does
    from lablib.launch.rank_server import start_early

    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if getattr(shell, "kernel", None) is not None:
        load_ipython_extension(shell)
    start_early()
