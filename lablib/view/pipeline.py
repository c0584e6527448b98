"""Pipelines over time: one lane a rank, one bar an action, the bubble in grey.

Every function takes events that somebody else computed or measured and returns a matplotlib figure.

Chapter: book/04_pipeline_parallelism.md
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lablib.calc.schedule_actions import Action, Step
from lablib.view.style import COLORS, figure

#: Legend and colour of each kind of action. An input half yields gradients of activations, a weight half of weights.
KINDS = {
    "F": ("forward", COLORS["forward"]),
    "B": ("backward", COLORS["backward"]),
    "I": ("backward: input", COLORS["activations"]),
    "W": ("backward: weight", COLORS["gradients"]),
}
_HEIGHT = 0.8
#: Points: what a digit of 9 pt takes, and the width of the axes in a figure 5.2 inches wide.
_DIGIT, _AXES_WIDTH = 5.8, 318


class Event(Protocol):
    """What `simulate` returns and what an executor records: an action of a rank, from start to end."""

    rank: int
    action: Step
    start: float
    end: float


class Message(Protocol):
    """What is on the wire from one rank to another, from start to end."""

    sender: int
    receiver: int
    start: float
    end: float


class _Bar(NamedTuple):
    """A piece of a lane: overlapped actions share its height, so `box` is the bottom and the height."""

    action: Action
    start: float
    width: float
    box: tuple[float, float]


def pipeline(
    panels: Mapping[str, Iterable[Event]],
    *,
    messages: Mapping[str, Iterable[Message]] | None = None,
    unit: str = "forward times",
    height: float | None = None,
) -> Figure:
    """Draw one panel per schedule over a common time axis.

    A bar carries the number of its micro-batch where there is room for it. On a rank with several stages, the later
    ones are darker. What no bar covers is idle, up to the panel's last end.

    Args:
        panels: Title to the events of the panel, for example `{"1F1B": timeline.events}`; time 0 is the step's begin.
        messages: Title to the messages of the panel, drawn as lines from rank to rank; left out by default.
        unit: Unit of the times, printed at the axis.
        height: Inches; by default enough for every rank.

    Returns:
        The figure, for `lablib.view.style.show`.

    Raises:
        ValueError: If there is nothing to draw, or there are messages for a panel that does not exist.
    """
    drawn = {title: list(events) for title, events in panels.items()}
    if not drawn or not all(drawn.values()):
        raise ValueError("a pipeline needs at least one panel, and an event in each")
    sent = {title: list(some) for title, some in (messages or {}).items()}
    if unknown := sorted(set(sent) - set(drawn)):
        raise ValueError(f"messages for {unknown[0]!r}, but the panels are {', '.join(map(repr, drawn))}")
    ranks = {title: 1 + max(event.rank for event in events) for title, events in drawn.items()}
    lane = 0.3 if max(ranks.values()) <= 8 else 0.16
    height = height or 1.05 + sum(lane * count + 0.3 for count in ranks.values())
    fig, axes = figure(
        height=height, nrows=len(drawn), sharex=True, squeeze=False, height_ratios=list(ranks.values())
    )
    longest = max(event.end for events in drawn.values() for event in events)
    for ax, (title, events) in zip(axes[:, 0], drawn.items(), strict=True):
        _panel(ax, events, ranks[title], longest)
        for message in sent.get(title, ()):
            ends = (message.start, message.end), (message.sender, message.receiver)
            ax.plot(*ends, color=COLORS["communication"], linewidth=1.2, solid_capstyle="round")
        ax.set_title(title, loc="left", fontsize=10)
    axes[-1, 0].set_xlim(0, longest)
    axes[-1, 0].set_xlabel(f"time ({unit})")
    kinds = {part.kind for events in drawn.values() for event in events for part in event.action.parts}
    handles = [Patch(color=color, label=label) for kind, (label, color) in KINDS.items() if kind in kinds]
    if any(sent.values()):
        handles.append(Line2D([], [], color=COLORS["communication"], label="communication"))
    handles.append(Patch(color=COLORS["idle"], alpha=0.35, label="idle"))
    fig.legend(handles=handles, loc="outside upper left", ncols=min(3, len(handles)), fontsize=9)
    return fig


def _panel(ax: Axes, events: Sequence[Event], ranks: int, longest: float) -> None:
    end = max(event.end for event in events)
    for rank in range(ranks):
        ax.broken_barh([(0, end)], (rank - _HEIGHT / 2, _HEIGHT), facecolor=COLORS["idle"], alpha=0.35)
        bars = [bar for event in events if event.rank == rank for bar in _bars(event)]
        stages = sorted({bar.action.stage for bar in bars})
        alike: dict[tuple, list[_Bar]] = {}  # drawn in one call: one by one takes several times as long
        for bar in bars:
            alike.setdefault((bar.action.kind, bar.action.stage, bar.box), []).append(bar)
        for (kind, stage, box), some in sorted(alike.items()):
            color = _darker(KINDS[kind][1], stages.index(stage) / max(1, len(stages) - 1))
            times = [(bar.start, bar.width) for bar in some]
            ax.broken_barh(times, box, facecolor=color, edgecolor="white", linewidth=0.4)
        for bar in bars:
            _number(ax, bar, longest)
    # Rank 0 on top, as every paper draws it.
    ax.set_ylim(ranks - 0.45, -0.55)
    every = 1 if ranks <= 8 else 8
    ax.set_yticks(range(0, ranks, every), labels=[f"rank {rank}" for rank in range(0, ranks, every)])
    ax.grid(visible=False)


def _bars(event: Event) -> list[_Bar]:
    parts = event.action.parts
    height = _HEIGHT / len(parts)
    top = event.rank - _HEIGHT / 2
    return [
        _Bar(part, event.start, event.end - event.start, (top + index * height, height))
        for index, part in enumerate(parts)
    ]


def _number(ax: Axes, bar: _Bar, longest: float) -> None:
    """Write the number of a bar's micro-batch into it if there is room."""
    label, (bottom, height) = str(bar.action.microbatch), bar.box
    if height == _HEIGHT and bar.width / longest * _AXES_WIDTH > _DIGIT * len(label) + 1:
        middle = (bar.start + bar.width / 2, bottom + height / 2)
        ax.text(*middle, label, ha="center", va="center", color="white", fontsize=9)


def _darker(color: str, depth: float) -> tuple[float, ...]:
    """Return the colour as it is at depth 0, and a third of the way to black at depth 1."""
    return tuple(channel * (1 - 0.35 * depth) for channel in to_rgb(color))
