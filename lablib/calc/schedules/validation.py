"""Can this schedule run? Every action once, in an order in which no rank waits for ever.

Three rules, for micro-batch k on stage s:

    sFk  after the forward of stage s - 1
    sBk  after sFk, and after the backward (B or I) of stage s + 1; sIk likewise
    sWk  after sIk

A schedule breaks them in one of three ways: an action is missing or runs twice, a rank runs two of its own actions in
the wrong order, or ranks wait for each other in a circle (a deadlock). Read `validate` first.

A drawn chart must do more (`check_chart`): one cell is a time slot, so what an action needs must stand in an earlier
column. Many charts show a backward in the very slot in which the stage behind it is still at its forward:

    0F0 0F1 0B0 0B1         rank 0 runs 0B0 in slot 2,
    .   1F0 1B0 1F1 1B1     where rank 1 is still at 1B0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lablib.calc.schedules.actions import KINDS, Action, Overlap, Schedule, Step, from_steps, parse_action
from lablib.calc.schedules.text import ScheduleError

IDLE, GOES_ON = (".", "-", "_", ""), ":"


def check_chart(rows: Sequence[str | Sequence[str | Action | None]], name: str = "chart") -> Schedule:
    """Return the schedule of a chart if every action stands to the right of what it needs.

    Args:
        rows: One row a rank: a string of cells with spaces between, or a list of cells. `.` is a slot in which the
            rank idles, `:` one in which its last action goes on.

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
                        reason = f"rank {rank}, slot {column}: {action} needs {needed}, which ends with {when}"
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


# What a stage has done with a micro-batch, as bits.
_BIT = {"F": 1, "B": 2, "I": 4, "W": 8}
# The only steps forward: (action, bits before) to bits after. F B and F I W are complete.
_AFTER = {("F", 0): 1, ("B", 1): 3, ("I", 1): 5, ("W", 5): 13}
_COMPLETE = (3, 13)


def validate(schedule: Schedule) -> None:
    """Raise unless the schedule can run to its end and does all the work of a training step.

    Args:
        schedule: What to check. It must say for every stage and micro-batch F and B, or F, I and W.

    Raises:
        ScheduleError: If it does not; the message names the wrong step and shows it in the grid.
    """
    for _ in execution_order(schedule):
        pass


def execution_order(schedule: Schedule) -> Iterator[tuple[int, Step]]:
    """Return all steps as (rank, step), one by one, in an order in which they can run: each after what it needs.

    Raises:
        ScheduleError: If there is none, as for `validate`; a deadlock shows after the steps that can run.
    """
    _check_ranks(schedule)
    return _run(schedule)


def _check_ranks(schedule: Schedule) -> None:
    """Check each rank by itself: known actions, on the right rank, once, in order, none missing."""
    m = schedule.num_microbatches
    done = bytearray(schedule.num_stages * m)
    for rank, steps in enumerate(schedule.ranks):
        row = {stage: stage * m for stage in schedule.stages_of(rank)}
        for number, step in enumerate(steps):
            parts = (step,) if step.__class__ is Action else _parts(schedule, rank, number)
            for kind, stage, k in parts:
                if stage in row and k.__class__ is int and 0 <= k < m:
                    index = row[stage] + k
                    if after := _AFTER.get((kind, done[index])):
                        done[index] = after
                        continue
                    problem = _out_of_order(schedule, Action(kind, stage, k), done[index])
                else:
                    problem = _unknown(schedule, Action(kind, stage, k))
                raise ScheduleError(f"rank {rank}, step {number}: {problem}", schedule.ranks, [(rank, number)])
    for index, state in enumerate(done):
        if state not in _COMPLETE:
            _raise_missing(schedule, *divmod(index, m), state, done)


def _parts(schedule: Schedule, rank: int, number: int) -> tuple[Action, ...]:
    """Return the two actions of an overlap, or raise if the step is none or they cannot run together."""
    step = schedule.ranks[rank][number]
    if not isinstance(step, Overlap):
        problem = f"{step!r} is not an action; lablib.calc.schedules.parse_schedule reads text"
    elif step.forward.kind != "F" or step.backward.kind not in ("B", "I"):
        problem = f"{step} must overlap a forward with a backward, in this order"
    elif step.forward[1:] == step.backward[1:]:
        problem = f"{step.backward} needs {step.forward}, which runs in the same step"
    else:
        return step.parts
    raise ScheduleError(f"rank {rank}, step {number}: {problem}", schedule.ranks, [(rank, number)])


def _unknown(schedule: Schedule, action: Action) -> str:
    """Say what is wrong with an action that is not one of its rank's."""
    if action.stage not in range(schedule.num_stages):
        return f"{action} is of stage {action.stage!r}; num_stages={schedule.num_stages}"
    if action.microbatch not in range(schedule.num_microbatches) or not isinstance(action.microbatch, int):
        return f"{action} is of micro-batch {action.microbatch!r}; num_microbatches={schedule.num_microbatches}"
    return f"{action} is of stage {action.stage}, which lives on rank {schedule.placement[action.stage]}"


def _out_of_order(schedule: Schedule, action: Action, state: int) -> str:
    """Say what is wrong with an action after what its stage has done with the micro-batch, or nothing."""
    kind, stage, microbatch = action
    if kind not in KINDS:
        return f"{action} has the kind {kind!r}; the kinds are {', '.join(KINDS)}"
    if state & _BIT[kind]:
        return f"{action} runs a second time"
    if (kind == "B" and state & (_BIT["I"] | _BIT["W"])) or (kind == "I" and state & _BIT["B"]):
        other = Action("I" if kind == "B" else "B", stage, microbatch)
        return f"{action} repeats work of {other}: B is the whole backward, I and W are its halves"
    first = {"F": "", "B": "F", "I": "F", "W": "I"}[kind]
    if first and not state & _BIT[first]:
        if kind == "W" and state & _BIT["B"]:
            return f"{action} repeats work of {Action('B', stage, microbatch)}: B is the whole backward, I and W its halves"
        needed = Action(first, stage, microbatch)
        place = _find(schedule, needed)
        when = f"which rank {place[0]} runs later, in step {place[1]}" if place else "which never runs"
        return f"{action} needs {needed}, {when}"
    return ""


def _raise_missing(schedule: Schedule, stage: int, microbatch: int, state: int, done: bytearray) -> None:
    """Raise for a stage that has not done all its work on a micro-batch."""
    m, rank = schedule.num_microbatches, schedule.placement[stage]
    if not state & _BIT["F"]:
        kind, what = "F", "forwards"
    elif state & _BIT["I"]:
        kind, what = "W", "weight halves"
    else:
        kind, what = "B", "backwards"
    bits = _BIT[kind] | (_BIT["I"] if kind == "B" else 0)
    count = sum(bool(state & bits) for state in done[stage * m : (stage + 1) * m])
    expected = sum(bool(state & _BIT["I"]) for state in done[stage * m : (stage + 1) * m]) if kind == "W" else m
    missing = Action(kind, stage, microbatch)
    # The step that would wait for it for ever is the one to look at; without one, the end of the rank.
    waits = [Action("F", stage + 1, microbatch)] if kind == "F" else []
    if kind == "B":
        waits = [Action("B", stage - 1, microbatch), Action("I", stage - 1, microbatch)]
    marks = [place for action in waits if (place := _find(schedule, action))]
    waiting = "".join(f"; rank {r} waits for it in step {n}" for r, n in marks)
    reason = f"{missing} is missing: stage {stage} on rank {rank} runs {count} of {expected} {what}{waiting}"
    raise ScheduleError(reason, schedule.ranks, marks or [(rank, len(schedule.ranks[rank]))])


def _run(schedule: Schedule) -> Iterator[tuple[int, Step]]:
    """Let every rank run as far as it can; what one rank does wakes the rank that waits for it."""
    m, last = schedule.num_microbatches, schedule.num_stages - 1
    # Whether a forward, or the backward that passes a gradient on, has run. Forward k of stage s is number s m + k;
    # its backward comes `backward` numbers later.
    backward = (last + 1) * m
    done = bytearray(2 * backward)
    sleepers: dict[int, int] = {}
    at = [0] * schedule.num_ranks
    awake = list(range(schedule.num_ranks))
    while awake:
        rank = awake.pop()
        steps = schedule.ranks[rank]
        for number in range(at[rank], len(steps)):
            step = steps[number]
            parts = (step,) if step.__class__ is Action else step.parts
            need = -1
            for kind, stage, k in parts:
                if kind == "F":
                    if stage and not done[(stage - 1) * m + k]:
                        need = (stage - 1) * m + k
                elif kind != "W" and stage < last and not done[backward + (stage + 1) * m + k]:
                    need = backward + (stage + 1) * m + k
            if need >= 0:
                sleepers[need] = rank
                break
            at[rank] += 1
            yield rank, step
            for kind, stage, k in parts:
                if kind != "W":
                    output = stage * m + k if kind == "F" else backward + stage * m + k
                    done[output] = 1
                    if output in sleepers:
                        awake.append(sleepers.pop(output))
    if sleepers:
        _raise_deadlock(schedule, at, {rank: divmod(need, backward) for need, rank in sleepers.items()})


def _raise_deadlock(schedule: Schedule, at: list[int], needs: dict[int, tuple[int, int]]) -> None:
    """Raise with the circle: each rank in it waits for an action that the next one runs later."""
    m = schedule.num_microbatches
    rank = min(needs)
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        rank = schedule.placement[needs[rank][1] // m]
    circle = path[path.index(rank) :]
    lines = []
    for rank in circle:
        is_backward, index = needs[rank]
        stage, microbatch = divmod(index, m)
        options = [Action(kind, stage, microbatch) for kind in ("BI" if is_backward else "F")]
        needed, place = next((a, place) for a in options if (place := _find(schedule, a)))
        step = schedule.ranks[rank][at[rank]]
        lines.append(
            f"rank {rank}, step {at[rank]}: {step} needs {needed}, which rank {place[0]} runs in step {place[1]}"
        )
    who = "a rank waits for itself" if len(circle) == 1 else f"{len(circle)} ranks wait for each other"
    reason = "deadlock, " + who + "".join(f"\n  {line}" for line in lines)
    raise ScheduleError(reason, schedule.ranks, [(rank, at[rank]) for rank in circle])


def _find(schedule: Schedule, action: Action) -> tuple[int, int] | None:
    """Return rank and step of an action."""
    for rank, steps in enumerate(schedule.ranks):
        for number, step in enumerate(steps):
            if isinstance(step, Action | Overlap) and action in step.parts:
                return rank, number
    return None
