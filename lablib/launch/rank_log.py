"""A structured log of each rank: what happened to it and when, one JSON object a line.

    log = RankLog("logs")
    log.write("step", step=7, loss=2.31, seconds=0.42)
    read_logs("logs")[0][-1]                # {"time": ..., "event": "step", "step": 7, ...}

After a restart the same file goes on; `lablib.launch.json_lines` says what a kill can leave in it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lablib.launch.json_lines import JsonLines, read_json_lines
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
        self._lines = JsonLines(Path(folder) / _NAME.format(own_rank() if rank is None else rank))
        self.path, self._clock = self._lines.path, clock

    def write(self, event: str, **values: Any) -> None:
        """Append one line.

        Args:
            event: What happened.
            **values: What JSON can write; NaN and infinity become text, since JSON has neither.
        """
        told = {name: _plain(value) for name, value in values.items()}
        self._lines.write({"time": self._clock(), "event": event, **told})

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_logs(folder: str | Path) -> dict[int, list[dict[str, Any]]]:
    """Return the logs of all ranks, by rank.

    Args:
        folder: As given to `RankLog`.
    """
    found = sorted(Path(folder).glob("rank-*.jsonl"))
    return {int(path.stem.removeprefix("rank-")): read_json_lines(path) for path in found}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value.item() if hasattr(value, "item") else value
