"""Logs as lines of JSON that survive kill -9, one file a rank.

    log = RankLog("logs")
    log.write("step", step=7, loss=2.31, seconds=0.42)
    read_logs("logs")[0][-1]                # {"time": ..., "event": "step", "step": 7, ...}

Each line goes to its file in a single write. A process that is killed, or that meets a full disk, may leave half a
line, its last: the next writer begins a new line, and readers skip what is not JSON. After a restart the same file
goes on.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lablib.calc.errors import parse_json, read_bounded
from lablib.launch.ranks import own_rank

_LARGEST = 2**30  # bytes; a line of metrics has some 500


def digest(tensors: Iterable[Any]) -> str:
    """Return a checksum of tensors on the CPU, one after the other: equal bits have equal ones, for copies to compare."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()[:16]


class JsonLines:
    """Appends lines to a file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._file).st_size
        self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"

    def write(self, line: dict[str, Any]) -> None:
        """Append a line; it is with the operating system when this returns."""
        content = (("\n" if self._torn else "") + json.dumps(line) + "\n").encode()
        self._torn = True  # until all of it is there
        if os.write(self._file, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self._torn = False

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_json_lines(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a file, without any that was left torn."""
    lines = []
    for line in read_bounded(path, _LARGEST).split(b"\n"):
        try:
            content = parse_json(line)
        except ValueError:
            continue
        if isinstance(content, dict):
            lines.append(content)
    return lines


_NAME = "rank-{:05d}.jsonl"


class RankLog:
    """Writes the log of one rank, by default of this process, into a folder that is made when missing."""

    def __init__(self, folder: str | Path, rank: int | None = None, clock: Callable[[], float] = time.time) -> None:
        self._lines = JsonLines(Path(folder) / _NAME.format(own_rank() if rank is None else rank))
        self.path, self._clock = self._lines.path, clock

    def write(self, event: str, **values: Any) -> None:
        """Append one line.

        Args:
            **values: What JSON can write; NaN and infinity become text, since JSON has neither.
        """
        plain = {name: _plain(value) for name, value in values.items()}
        self._lines.write({"time": self._clock(), "event": event, **plain})

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_logs(folder: str | Path) -> dict[int, list[dict[str, Any]]]:
    """Return the logs of all ranks, by rank."""
    found = sorted(Path(folder).glob("rank-*.jsonl"))
    return {int(path.stem.removeprefix("rank-")): read_json_lines(path) for path in found}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value.item() if hasattr(value, "item") else value
