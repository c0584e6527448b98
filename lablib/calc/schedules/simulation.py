"""Run a schedule on paper: when each rank works, waits and finishes, and how many micro-batches it holds.

Four ranks, eight micro-batches, a forward takes 1 and a backward 2. Under 1F1B every rank works 24 and the step takes
33, so each idles 9: 9/24 = (p - 1)/m = 0.375 of the ideal time, 9/33 = (p - 1)/(m + p - 1) = 0.27 of the total time.

An action starts when its rank is free and what it needs has arrived. Communication runs beside computation;
each direction of a link carries one message at a time. Read `simulate` first.

A forward stores activations; the full backward frees them. A backward in two halves frees a part after the input half
(I) and the rest after the weight half (W), which needs the inputs of the matrix products and the gradients of their
outputs. Only the order of a rank's own actions matters there, not their times (`peak_activations`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm
from numbers import Real
from typing import NamedTuple

from lablib.calc.schedules.actions import Action, Schedule, Step
from lablib.calc.schedules.text import cell, table
from lablib.calc.schedules.validation import execution_order

Times = float | Sequence[float]
#: Of the longest action, and of any time, in any unit: sums and ratios of all of them stay finite.
SHORTEST, LONGEST = 1e-30, 1e30


class Event(NamedTuple):
    """One step of one rank: `action` runs on `rank` from `start` to `end`."""

    rank: int
    action: Step
    start: float
    end: float


class Message(NamedTuple):
    """A message to the next rank after `action`: on the wire from `start` to `end`."""

    action: Action
    sender: int
    receiver: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When everything happened; times in the unit of the times given to `simulate`.

    Attributes:
        ranks: The events of each rank, in order.
        messages: What went over the links; empty when communication takes no time.
    """

    schedule: Schedule
    ranks: tuple[tuple[Event, ...], ...]
    messages: tuple[Message, ...]

    @property
    def events(self) -> list[Event]:
        """All events, rank by rank."""
        return [event for events in self.ranks for event in events]

    @cached_property
    def makespan(self) -> float:
        """Time from the first start on any rank to the last end on any rank."""
        return max(events[-1].end for events in self.ranks if events)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time each rank works."""
        return tuple(sum(event.end - event.start for event in events) for events in self.ranks)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Time each rank does not work during the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_over_ideal(self) -> float:
        """Idle time of all ranks over the time they work: (p - 1)/m for GPipe and 1F1B."""
        return sum(self.idle) / sum(self.busy)

    @property
    def bubble_over_total(self) -> float:
        """Idle time of all ranks over p times the makespan: (p - 1)/(m + p - 1) for GPipe and 1F1B."""
        return sum(self.idle) / (len(self.ranks) * self.makespan)

    @cached_property
    def span(self) -> tuple[float, ...]:
        """Time from each rank's own first start to its own last end."""
        return tuple(events[-1].end - events[0].start if events else 0 for events in self.ranks)

    @property
    def span_idle(self) -> tuple[float, ...]:
        """Idle time of each rank within its own span: what ZB-H2 brings to zero."""
        return tuple(span - busy for span, busy in zip(self.span, self.busy, strict=True))

    @property
    def span_bubble_rate(self) -> float:
        """The Zero Bubble paper's bubble rate: idle time in the longest span over that span (section 5.3)."""
        span, busy = max(zip(self.span, self.busy, strict=True))
        return (span - busy) / span

    @cached_property
    def peak_in_flight(self) -> tuple[float, ...]:
        """Most micro-batches each rank holds at once, from F until B or W; one of v stages on a rank counts 1/v."""
        return peak_activations(self.schedule)

    @property
    def held(self) -> list[list[tuple[float, int]]]:
        """Points (time, micro-batches of a stage held) of each rank: one more as F starts, one less as B or W ends."""
        lines = []
        for events in self.ranks:
            actions = [(event, action) for event in events for action in event.action.parts if action.kind != "I"]
            changes = [(e.start, 1) if action.kind == "F" else (e.end, -1) for e, action in actions]
            points = [(0.0, 0)]
            for when, change in sorted(changes):
                count = points[-1][1] + change
                if points[-1][0] == when:  # one out, one in
                    points.pop()
                points.append((when, count))
            lines.append(points)
        return lines

    @cached_property
    def peak_in_flight_until_input(self) -> tuple[float, ...]:
        """The same, from F until B or I: as if the weight half needed nothing."""
        return peak_activations(self.schedule, after_input=0)


def simulate(
    schedule: Schedule,
    *,
    forward: Times = 1,
    backward: Times | None = None,
    input: Times | None = None,
    weight: Times | None = None,
    communication: Times = 0,
    overlapped: Times | None = None,
) -> Timeline:
    """Return when every action starts and ends.

    A single number is the time of one rank's full share of the model: on a rank that holds v stages, each stage
    takes 1/v of it. A sequence gives every stage its own time.

    Args:
        backward: Time of a full backward; by default input + weight, or 2 where neither is given.
        input: Time of an input half; by default what weight leaves of backward, or half of it.
        weight: Time of a weight half; by default the rest of backward.
        communication: Time of a message between two ranks, or one time for each boundary, between stage s and s + 1.
            Between stages on one rank nothing is sent.
        overlapped: Time of a forward and a backward run as one step (DualPipe), of the forward's stage; by default
            the sum of the two.

    Raises:
        ValueError: If a time is negative or there are not as many as stages.
        ScheduleError: If the schedule can not run to its end, a ValueError too.
    """
    times = _times(schedule, forward, backward, input, weight)
    if max(map(max, times.values())) < SHORTEST:
        raise ValueError(f"every time is 0 or below {SHORTEST:g}: forward, backward, input or weight must take some")
    together = None if overlapped is None else _per_stage(schedule, "overlapped", overlapped)
    wire = _checked("communication", communication, schedule.num_stages - 1, "boundary between stages")

    m, placement, last = schedule.num_microbatches, schedule.placement, schedule.num_stages - 1
    # When the input of stage s, micro-batch k is on its rank, for a forward and for a backward: index s m + k.
    ready_forward, ready_backward = [0.0] * (m * (last + 1)), [0.0] * (m * (last + 1))
    free = [0.0] * schedule.num_ranks
    events: list[list[Event]] = [[] for _ in schedule.ranks]
    messages: list[Message] = []
    link_free: dict[tuple[int, int], float] = {}

    def send(action: Action, to: int, end: float) -> float:
        """Put a message on the link to the rank of a stage and return when it arrives."""
        link = placement[action.stage], placement[to]
        time = wire[min(action.stage, to)]
        if not time or link[0] == link[1]:
            return end
        start = max(end, link_free.get(link, 0.0))
        link_free[link] = start + time
        messages.append(Message(action, *link, start, start + time))
        return start + time

    for rank, step in execution_order(schedule):
        if step.__class__ is Action:
            parts, duration = (step,), times[step[0]][step[1]]
        elif together is None:
            parts, duration = step.parts, sum(times[part.kind][part.stage] for part in step.parts)
        else:
            parts, duration = step.parts, together[step.forward.stage]
        start = free[rank]
        for kind, stage, k in parts:
            if kind != "W":
                start = max(start, (ready_forward if kind == "F" else ready_backward)[stage * m + k])
        end = free[rank] = start + duration
        events[rank].append(Event(rank, step, start, end))
        for action in parts:
            kind, stage, k = action
            if kind == "F":
                if stage < last:
                    ready_forward[(stage + 1) * m + k] = send(action, stage + 1, end)
            elif kind != "W" and stage:
                ready_backward[(stage - 1) * m + k] = send(action, stage - 1, end)
    return Timeline(schedule, tuple(map(tuple, events)), tuple(messages))


def _times(
    schedule: Schedule, forward: Times, backward: Times | None, input: Times | None, weight: Times | None
) -> dict[str, list[float]]:
    """Return the time of each kind on each stage, with what was not given worked out from what was."""
    given = {"F": ("forward", forward), "B": ("backward", backward), "I": ("input", input), "W": ("weight", weight)}
    if backward is None and (input is None or weight is None):
        given["B"] = ("backward", 2)
    t = {kind: _per_stage(schedule, name, value) for kind, (name, value) in given.items() if value is not None}
    if "B" not in t:
        t["B"] = [i + w for i, w in zip(t["I"], t["W"], strict=True)]
    if "I" not in t:
        t["I"] = [b - w for b, w in zip(t["B"], t["W"], strict=True)] if "W" in t else [b / 2 for b in t["B"]]
    if "W" not in t:
        t["W"] = [b - i for b, i in zip(t["B"], t["I"], strict=True)]
    if min(t["I"]) < 0 or min(t["W"]) < 0:
        half, value = ("weight", weight) if input is None else ("input", input)
        raise ValueError(
            f"{half}={value} is longer than the whole backward={given['B'][1]}; give input and weight, or a longer backward"
        )
    return t


def _per_stage(schedule: Schedule, name: str, value: Times) -> list[float]:
    times = _checked(name, value, schedule.num_stages, "stage")
    if isinstance(value, Real):
        times = [value / len(schedule.stages_of(rank)) for rank in schedule.placement]
    return times


def _checked(name: str, value: Times, count: int, what: str) -> list[float]:
    """Return `count` times; a single number is repeated."""
    times = [value] * count if isinstance(value, Real) else list(value)
    if len(times) != count:
        raise ValueError(f"{name} has {len(times)} times, not {count}; give a number, or one for each {what}")
    if not all(isinstance(time, Real) and 0 <= time < float("inf") for time in times):
        raise ValueError(f"{name}={value} must be 0 or more")
    if max(times, default=0) > LONGEST:
        raise ValueError(f"{name}={value} is out of bounds: a time is at most {LONGEST:g}, in any unit")
    return times


def time_grid(timeline: Timeline) -> str:
    """Return what every rank starts at each time; `:` where it is still at it, nothing where it waits.

    Rows are equally long where that does not need many more of them; otherwise a row is a time at which some rank
    starts or ends something.
    """
    # Parts of the makespan, as fractions: sums of floats differ in their last digits where the times are the same.
    makespan = timeline.makespan
    times = {time for event in timeline.events for time in (event.start, event.end)}
    exact = {time: Fraction(time / makespan).limit_denominator(10**6) for time in times}
    instants = sorted(set(exact.values()))
    scale = lcm(*(t.denominator for t in instants))
    step = Fraction(gcd(*(int(t * scale) for t in instants)), scale)
    if instants[-1] <= 2 * len(instants) * step:
        instants = [n * step for n in range(int(instants[-1] / step) + 1)]
    row_of = {instant: row for row, instant in enumerate(instants)}
    body = [[f"{float(instant) * makespan:g}", *[""] * len(timeline.ranks)] for instant in instants]
    for event in timeline.events:
        first = row_of[exact[event.start]]
        for row in range(first, row_of[exact[event.end]]):
            body[row][1 + event.rank] = cell(event.action) if row == first else ":"
    body.pop()  # the makespan: everything has ended
    return table("time", [f"rank {rank}" for rank in range(len(timeline.ranks))], body, [""] * len(body))


def peak_activations(
    schedule: Schedule, *, stage_size: Sequence[float] | None = None, after_input: float = 1
) -> tuple[float, ...]:
    """Return the most that each rank holds at once.

    With `after_input` = M_W / M_B, times M_B, it is the last column of Table 2 of the Zero Bubble paper (2401.10241):
    `(p - i) M_B + i M_W` on rank i of ZB-H1.

    Args:
        stage_size: What one micro-batch stores on each stage, in bytes or any unit; by default a rank's full share
            of the model counts 1, so a stage of a rank that holds v counts 1/v.
        after_input: Part of it that stays between the input half and the weight half, from 0 to 1.
    """
    if stage_size is not None and len(stage_size) != schedule.num_stages:
        raise ValueError(
            f"stage_size has {len(stage_size)} entries for num_stages={schedule.num_stages}; give one for each"
        )
    if not 0 <= after_input <= 1:
        raise ValueError(f"after_input={after_input} is a part of what F stored: from 0 to 1")
    stays = {"F": 1, "B": -1, "I": after_input - 1, "W": -after_input}
    peaks = []
    for rank in range(schedule.num_ranks):
        held = peak = 0.0
        for kind, stage, _ in schedule.actions(rank):
            held += stays[kind] * (1 if stage_size is None else stage_size[stage])
            peak = max(peak, held)
        # Dividing once, at the end, keeps counts exact.
        peaks.append(peak / max(1, len(schedule.stages_of(rank))) if stage_size is None else peak)
    return tuple(peaks)
