"""A schedule as a grid of text, ranks side by side and steps or times downwards, and as PyTorch's CSV.

    time  rank 0  rank 1        a forward takes 1, a backward 2
       0  0F0
       1  0F1     1F0
       2          1B0
       3          :
       4  0B0     1F1
       5  :       1B1

In the CSV a line is a rank and a cell an action. `torch.distributed.pipelining` reads such a file with
`_PipelineScheduleRuntime._load_csv(path)`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Sequence

from lablib.calc.schedules.actions import Overlap, Schedule

#: Rows and ranks around a mark that are shown when a schedule is larger than a screen.
_ROWS, _RANKS = 6, 4


class ScheduleError(ValueError):
    """A schedule that cannot run; the message ends with the grid, the wrong steps marked.

    Attributes:
        reason: What is wrong, without the grid.
        marks: The wrong places, as (rank, row of the grid).
    """

    def __init__(
        self, reason: str, rows: Sequence[Sequence[object]], marks: Collection[tuple[int, int]], unit: str = "step"
    ) -> None:
        super().__init__(f"{reason}\n\n{step_grid(rows, marks, unit)}")
        self.reason = reason
        self.marks = sorted(marks)
        self._given = (reason, rows, marks, unit)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self._given  # a rank must be able to send it home


def cell(step: object) -> str:
    """Return the text of one cell: an action as PyTorch writes it, an overlapped pair as `0F4+7B2`."""
    if step is None:
        return ""
    return "+".join(map(str, step)) if isinstance(step, Overlap) else str(step)


def step_grid(ranks: Sequence[Sequence[object]], marks: Collection[tuple[int, int]] = (), unit: str = "step") -> str:
    """Return the n-th step of every rank in the n-th row.

    Args:
        ranks: The steps of each rank; None is an empty cell.
        marks: Cells to mark, as (rank, step). A large grid is cut to what is near them.
    """
    steps = range(max([len(rank) for rank in ranks] + [step + 1 for _, step in marks], default=0))
    columns = range(len(ranks))
    if marks and len(steps) > 4 * _ROWS:
        near = [step for _, step in marks]
        steps = range(max(0, min(near) - _ROWS), min(len(steps), max(near) + _ROWS + 1))
    if marks and len(columns) > 3 * _RANKS:
        near = [rank for rank, _ in marks]
        columns = range(max(0, min(near) - _RANKS), min(len(columns), max(near) + _RANKS + 1))

    def at(rank: int, step: int) -> str:
        text = cell(ranks[rank][step]) if step < len(ranks[rank]) else ""
        return f">{text or 'end'}<" if (rank, step) in marks else text

    body = [[str(step), *(at(rank, step) for rank in columns)] for step in steps]
    wrong = {step for _, step in marks}
    notes = ["  <-- here" if step in wrong else "" for step in steps]
    return table(unit, [f"rank {rank}" for rank in columns], body, notes)


def table(corner: str, heads: Sequence[str], body: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """Return aligned columns; a note stands behind its row."""
    rows = [[corner, *heads], *body]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            [row[0].rjust(widths[0]), *(text.ljust(width) for text, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    return "\n".join((line + note).rstrip() for line, note in zip(lines, ["", *notes], strict=True))


def to_csv(schedule: Schedule) -> str:
    """Return the schedule as PyTorch's "compute_only" CSV."""
    buffer = io.StringIO()
    csv.writer(buffer).writerows(schedule.ranks)
    return buffer.getvalue()
