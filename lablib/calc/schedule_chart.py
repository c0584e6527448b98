"""Check a drawn chart: one cell a time slot, so that what an action needs must stand in an earlier column.

A list of actions per rank can be in a possible order while the picture is not possible: a stage that shows its
backward in the very slot in which the stage behind it is still at its forward. This is what many charts get wrong.

    0F0 0F1 0B0 0B1         rank 0 runs 0B0 in slot 2,
    .   1F0 1B0 1F1 1B1     where rank 1 is still at 1B0
"""

from __future__ import annotations

from collections.abc import Sequence

from lablib.calc.schedule_actions import Action, Schedule, Step, from_steps, parse_action
from lablib.calc.schedule_grid import ScheduleError
from lablib.calc.schedule_validate import validate

IDLE, GOES_ON = (".", "-", "_", ""), ":"


def check_chart(rows: Sequence[str | Sequence[str | Action | None]], name: str = "chart") -> Schedule:
    """Return the schedule of a chart if every action stands to the right of what it needs.

    Args:
        rows: One row a rank: a string of cells with spaces between, or a list of cells. `.` is a slot in which the
            rank idles, `:` one in which its last action goes on.
        name: What to call the schedule.

    Raises:
        ValueError: If a cell cannot be read.
        ScheduleError: If a needed action ends in the same column or further right, or as for `validate`.
    """
    texts = [row.split() if isinstance(row, str) else list(row) for row in rows]
    cells = [[_read(text) for text in row] for row in texts]
    schedule = from_steps([[step for step in row if step] for row in cells], name)
    ends: dict[Action, int] = {}
    for row, written in zip(cells, texts, strict=True):
        running: tuple[Action, ...] = ()
        for column, step in enumerate(row):
            if step:
                running = step.parts
            elif written[column] != GOES_ON:
                running = ()
            for action in running:
                # Of an action that stands twice the first counts here; `validate` refuses the second.
                if step is None or action not in ends:
                    ends[action] = column
    for column in range(max(map(len, cells))):
        for rank, row in enumerate(cells):
            step = row[column] if column < len(row) else None
            for action in step.parts if step else ():
                for needed in needs(action):
                    if needed in ends and ends[needed] >= column:
                        when = "this slot" if ends[needed] == column else f"slot {ends[needed]}"
                        reason = (
                            f"rank {rank}, slot {column}: {action} needs {needed}, which ends with {when}"
                        )
                        raise ScheduleError(reason, cells, [(rank, column)], unit="slot")
    validate(schedule)
    return schedule


def needs(action: Action) -> list[Action]:
    """Return every action that must be over before this one starts, if the schedule has it."""
    kind, stage, microbatch = action
    if kind == "F":
        return [Action("F", stage - 1, microbatch)]
    if kind == "W":
        return [Action("I", stage, microbatch)]
    return [Action("F", stage, microbatch), *(Action(half, stage + 1, microbatch) for half in "BI")]


def _read(text: str | Action | None) -> Step | None:
    if text is None or str(text).strip() in (*IDLE, GOES_ON):
        return None
    return parse_action(str(text))
