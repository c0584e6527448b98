r"""Schedules as PyTorch's CSV: one line a rank, one action a cell, an empty cell where the rank idles.

    0F0,0F1,,0B0,0B1
    ,1F0,1B0,1F1,1B1

`torch.distributed.pipelining` reads such a file with `_PipelineScheduleRuntime._load_csv(path)` and writes one with
`_dump_csv(path)`.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from lablib.calc.schedule_actions import Schedule, from_steps, parse_action

# What PyTorch adds when it prepares a schedule for running; it adds them anew to the schedule that it reads. From 2.15
# it writes the waits, too.
_DERIVED = re.compile(r"-?\d+(WAIT_)?(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def to_csv(schedule: Schedule, path: str | Path | None = None) -> str:
    """Return the schedule as PyTorch's "compute_only" CSV."""
    buffer = io.StringIO()
    csv.writer(buffer).writerows(schedule.ranks)
    text = buffer.getvalue()
    if path is not None:
        Path(path).write_text(text, encoding="utf-8", newline="")
    return text


def from_csv(source: str | Path, name: str = "csv") -> Schedule:
    """Read a schedule from PyTorch's CSV, "compute_only" or "compute_comms".

    Idle cells are dropped, because they follow from the order, and so are sends, receives and the actions of FSDP,
    because they follow from the stages.

    Args:
        source: The text, or the `Path` of a file.
        name: What to call the schedule.

    Raises:
        ValueError: If a cell is no action, or a stage is missing or on two ranks.
    """
    text = source.read_text() if isinstance(source, Path) else source
    rows = list(csv.reader(io.StringIO(text)))
    while rows and not rows[-1]:
        rows.pop()
    ranks = []
    for rank, row in enumerate(rows):
        try:
            cells = [cell.strip() for cell in row]
            ranks.append([parse_action(cell) for cell in cells if cell and not _DERIVED.fullmatch(cell)])
        except ValueError as error:
            raise ValueError(f"line {rank + 1} of the CSV: {error}") from None
    return from_steps(ranks, name)
