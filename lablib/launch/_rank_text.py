"""Text about ranks that a reader can use: cells by their number, stacks in one line."""

from __future__ import annotations

import linecache
import os
import re
import sys

from lablib.launch._rank_pickle import is_installed

_ENTRY = "_rank_process.py"  # the outermost frame of ours on a rank's main thread
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)$')


def cells() -> dict[str, list[str]]:
    """Return the text of this notebook's cells by file name, for tracebacks in the ranks."""
    entries = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4}
    return {name: entry[2] for name, entry in entries.items() if not os.path.exists(name)}


def readable(traceback: str) -> str:
    """Replace the file names of notebook cells in a traceback by "Cell In[3]".

    Args:
        traceback: Text with lines of the form `File "...", line 3`.
    """
    return re.sub(r'File "(.*?)"', lambda found: _cell(found[1]) or found[0], traceback)


def standing(stacks: str) -> str | None:
    """Say in one line where a rank stands.

    Args:
        stacks: What faulthandler wrote for all threads, innermost frame first.

    Returns:
        The innermost line that is not a library's, and the function of the library that it waits in.
        None if there is no stack.
    """
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
