"""The pipeline explorer: a schedule over time, its two bubbles, and what every rank holds.

A schedule of the reader's own is validated; where it cannot run, the wrong step is marked.
"""

from __future__ import annotations

from lablib.calc.errors import plural
from lablib.calc.schedules import (
    Schedule,
    ScheduleError,
    Step,
    Timeline,
    parse_schedule,
    schedule,
    schedule_names,
    simulate,
    validate,
)
from lablib.live.explorer import Answer, Control, Explorer, Value, number_options, table
from lablib.live.svg import WIDTH, Bar, bars, legend, picture, rect, text

KINDS = {"F": "forward", "B": "backward", "I": "backward: input", "W": "backward: weight"}
#: Of a schedule that the reader wrote; a longer chart could not be read.
MOST_STEPS = 600
LEFT, ROW = 54.0, 18.0
RANKS = (1, 2, 3, 4, 6, 8)
OWN = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"


def explore(name: str, p: int, m: int, v: int, backward: int, message: int, last: int, own: str) -> Answer:
    """Return a schedule over time, or where it is wrong."""
    if own.strip():
        made = parse_schedule(own, "your schedule")
        if sum(map(len, made.ranks)) > MOST_STEPS:
            raise ValueError(f"a chart of more than {MOST_STEPS} steps cannot be read")
        try:
            validate(made)
        except ScheduleError as error:
            return _wrong(made, error, own)
    else:
        made = schedule(name, p, m, v)
    times = _times(made, backward / 100, message / 100, last / 100)
    timeline = simulate(made, **times)
    held = timeline.peak_in_flight
    source = f'parse_schedule("""{own}""")' if own.strip() else f'schedule("{name}", {p}, {m}, {v})'
    return Answer(
        picture=_picture(timeline),
        caption=_caption(timeline),
        table=_table(timeline),
        call=_call(source, times, "own" if own.strip() else "schedule"),
        command=_command(name, p, m, v, backward, message) if not own.strip() and last == 100 else "",
        numbers={
            "makespan": round(1000 * timeline.makespan),
            "over_ideal": round(1e6 * timeline.bubble_over_ideal),
            "over_total": round(1e6 * timeline.bubble_over_total),
        }
        | {f"held_{rank}": round(1000 * most) for rank, most in enumerate(held)},
    )


def limits(name: str, p: int, m: int, v: int, own: str, **others: Value) -> dict[str, tuple[int, str]]:
    """Return the most stages on a rank, and then the most ranks, with which a schedule can be made."""
    if own.strip():
        return {}
    found: dict[str, tuple[int, str]] = {}
    if name != "interleaved" and v > 1:
        found["v"], v = (1, f"{name} has its own number; interleaved takes any"), 1
    for ranks in reversed([number for number in RANKS if number <= p]):
        try:
            schedule(name, ranks, m, v)
        except ValueError as error:
            found["p"] = ranks - 1, str(error)
        else:
            break
    return found


def _times(made: Schedule, backward: float, message: float, last: float) -> dict[str, object]:
    """Return the times of every stage: a rank's whole share takes 1 forward, and the last stage's so many times more."""
    share = [1 / len(made.stages_of(rank)) for rank in made.placement]
    share[-1] *= last
    return {"forward": share, "backward": [backward * time for time in share], "communication": message}


def _picture(timeline: Timeline) -> str:
    """Draw who works when, and below it what every rank holds at its fullest."""
    made = timeline.schedule
    scale = (WIDTH - LEFT - 4) / timeline.makespan
    shapes = [text(0, 12, f"{made.name}: who works when", bold=True)]
    for rank, events in enumerate(timeline.ranks):
        y = 22 + rank * (ROW + 4)
        shapes.append(text(LEFT - 6, y + 13, f"rank {rank}", anchor="end"))
        shapes.append(rect(LEFT, y, timeline.makespan * scale, ROW, "idle", pale=True))
        for event in events:
            x, wide = LEFT + event.start * scale, (event.end - event.start) * scale
            shapes += _box(event.action, x, y, wide)
    kinds = {part.kind for event in timeline.events for part in event.action.parts}
    names, below = legend(
        [*(words for kind, words in KINDS.items() if kind in kinds), "idle"], top=30 + len(made.ranks) * (ROW + 4)
    )
    rows = [
        Bar(label=f"rank {rank}", parts={"activations": most}, text=f"{most:.3g}")
        for rank, most in enumerate(timeline.peak_in_flight)
    ]
    rest, end = bars(rows, top=below + 16, title="Micro-batches whose activations a rank holds at most", labels=LEFT)
    more, end = legend(["activations"], top=end + 8)
    alt = (
        f"A chart of {made.name} on {len(made.ranks)} ranks with {made.num_microbatches} micro-batches: a row a rank, "
        f"idle {timeline.bubble_over_total:.0%} of the time. Below it bars: "
        + ", ".join(f"rank {rank} holds {most:.3g}" for rank, most in enumerate(timeline.peak_in_flight))
        + "."
    )
    return picture(shapes + names + rest + more, end + 4, alt)


def _box(step: Step, x: float, y: float, wide: float) -> list[str]:
    """Draw a step: an action, or two that overlap one above the other, with the micro-batch where there is room."""
    shapes, tall = [], ROW / len(step.parts)
    for place, part in enumerate(step.parts):
        shapes.append(rect(x, y + place * tall, max(wide - 0.6, 0.6), tall - 0.6, KINDS[part.kind]))
    words = str(step.parts[0].microbatch)
    if len(step.parts) == 1 and wide >= 3 + 6.7 * len(words):
        shapes.append(text(x + wide / 2, y + 13, words, anchor="middle", white=True))
    return shapes


def _wrong(made: Schedule, error: ScheduleError, own: str) -> Answer:
    """Draw the steps in the order of each rank, with what is wrong marked."""
    longest = max(map(len, made.ranks)) + 1
    wide = (WIDTH - LEFT - 4) / longest
    shapes = [text(0, 12, "Your schedule, step by step", bold=True)]
    for rank, steps in enumerate(made.ranks):
        y = 22 + rank * (ROW + 4)
        shapes.append(text(LEFT - 6, y + 13, f"rank {rank}", anchor="end"))
        for number, step in enumerate(steps):
            shapes += _box(step, LEFT + number * wide, y, wide)
    for rank, number in error.marks:
        shapes.append(rect(LEFT + number * wide, 21 + rank * (ROW + 4), wide - 0.6, ROW + 1, "", outline=2.5))
    kinds = {part.kind for steps in made.ranks for step in steps for part in step.parts}
    names, end = legend([words for kind, words in KINDS.items() if kind in kinds], top=30 + len(made.ranks) * (ROW + 4))
    where = " and ".join(f"rank {rank}, step {number}" for rank, number in error.marks)
    return Answer(
        picture=picture(shapes + names, end + 4, f"The steps of each rank in order; marked: {where}."),
        caption=f"It cannot run. {error.reason}",
        table=table({"Marked": {f"rank {rank}": ("", f"step {number}") for rank, number in error.marks}}),
        call=f'from lablib.calc.schedules import parse_schedule, validate\n\nvalidate(parse_schedule("""{own}"""))\n',
        numbers={"marks": len(error.marks)} | {f"step_{rank}": number for rank, number in error.marks},
    )


def _caption(timeline: Timeline) -> str:
    made, most = timeline.schedule, max(timeline.peak_in_flight)
    return (
        f"{made.name} on {plural(len(made.ranks), 'rank')} with {made.num_microbatches} micro-batch{'es' * (made.num_microbatches > 1)} "
        f"takes {timeline.makespan:.4g} times a forward of one rank. Idle over ideal time is {timeline.bubble_over_ideal:.1%}, idle over total time "
        f"{timeline.bubble_over_total:.1%}; the fullest rank holds {most:.3g} micro-batch{'es' * (most != 1)}."
    )


def _table(timeline: Timeline) -> str:
    ranks = range(len(timeline.ranks))
    return table(
        {
            "Of the step": {
                "makespan, in forwards of a rank": ("", f"{timeline.makespan:.4g}"),
                "idle over ideal time": ("", f"{timeline.bubble_over_ideal:.2%}"),
                "idle over total time": ("", f"{timeline.bubble_over_total:.2%}"),
                "idle within the longest span": ("", f"{timeline.span_bubble_rate:.2%}"),
            },
            "Idle within the makespan": {f"rank {rank}": ("", f"{timeline.idle[rank]:.4g}") for rank in ranks},
            "Micro-batches held at most": {
                f"rank {rank}": ("activations", f"{timeline.peak_in_flight[rank]:.3g}") for rank in ranks
            },
        }
    )


def _call(source: str, times: dict[str, object], kind: str) -> str:
    lines = "".join(f"    {name}={value!r},\n" for name, value in times.items())
    maker = "parse_schedule" if kind == "own" else "schedule"
    return (
        f"from lablib.calc.schedules import {maker}, simulate\n\n"
        f"timeline = simulate(\n    {source},\n{lines})\n"
        "print(timeline.makespan, timeline.bubble_over_ideal, timeline.bubble_over_total, timeline.peak_in_flight)\n"
    )


def _command(name: str, p: int, m: int, v: int, backward: int, message: int) -> str:
    words = f"rung schedule {name} --stages {p} --microbatches {m}"
    words += f" --virtual {v}" if name == "interleaved" else ""
    return f"{words} --backward {backward / 100:g} --communication {message / 100:g}"


EXPLORER = Explorer(
    name="pipeline",
    title="A pipeline schedule over time",
    controls=(
        Control(name="name", label="schedule", options=tuple((each, each) for each in schedule_names()), first="1f1b"),
        Control(name="p", label="ranks (p)", options=number_options(RANKS), first=4, slider=True),
        Control(
            name="m", label="micro-batches (m)", options=number_options((2, 3, 4, 6, 8, 12, 16)), first=8, slider=True
        ),
        Control(name="v", label="stages of a rank (v)", options=number_options((1, 2, 3, 4)), first=1, slider=True),
        Control(
            name="backward",
            label="backward, in forwards",
            options=tuple((n, f"{n / 100:g}") for n in (100, 150, 200, 250, 300)),
            first=200,
            slider=True,
        ),
        Control(
            name="message",
            label="a message, in forwards",
            options=tuple((n, f"{n / 100:g}") for n in (0, 5, 10, 25, 50, 100)),
            first=0,
            slider=True,
        ),
        Control(
            name="last",
            label="the last stage takes",
            options=tuple((n, f"{n / 100:g} times") for n in (100, 110, 125, 150, 200)),
            first=100,
            slider=True,
            fold=True,
        ),
        Control(
            name="own",
            label=f"or your own schedule, a rank a line, as {OWN.splitlines()[0]}",
            options=(("", ""),),
            first="",
            free=True,
            fold=True,
        ),
    ),
    compute=explore,
    limits=limits,
)
