"""A structured log of each rank: one JSON object a line, written at once, so that it survives kill -9.

    log = RankLog("logs")
    log.write("step", step=7, loss=2.31, seconds=0.42)
    read_logs("logs")[0][-1]                # {"time": ..., "event": "step", "step": 7, ...}

A line goes to the file in a single write. A rank that is killed leaves at most one torn line, its last; after a
restart the same file goes on, on a new line.

Chapter: book/11_practical_fsdp.md
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lablib.launch.together import own_rank

_NAME = "rank-{:05d}.jsonl"


class RankLog:
    """Writes the log of one rank.

    Args:
        folder: Where the logs of all ranks lie; made when missing.
        rank: Number in the file's name; by default this process's rank.
        clock: Seconds for the field "time".

    Attributes:
        path: The file.
    """

    def __init__(
        self, folder: str | Path, rank: int | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / _NAME.format(own_rank() if rank is None else rank)
        self._clock = clock
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n") and self.path.stat().st_size
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if torn:
            os.write(self._file, b"\n")

    def write(self, event: str, **values: Any) -> None:
        """Append one line.

        Args:
            event: What happened.
            **values: What JSON can write; NaN and infinity become text, since JSON has neither.
        """
        line = {"time": self._clock(), "event": event, **{name: _plain(v) for name, v in values.items()}}
        os.write(self._file, (json.dumps(line) + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of one log, without any that a killed rank left torn.

    Args:
        path: A file that `RankLog` writes, perhaps at this moment.
    """
    lines = []
    for line in Path(path).read_bytes().split(b"\n"):
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict):
            lines.append(content)
    return lines


def read_logs(folder: str | Path) -> dict[int, list[dict[str, Any]]]:
    """Return the logs of all ranks, by rank.

    Args:
        folder: As given to `RankLog`.
    """
    found = sorted(Path(folder).glob("rank-*.jsonl"))
    return {int(path.stem.removeprefix("rank-")): read_log(path) for path in found}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value.item() if hasattr(value, "item") else value
