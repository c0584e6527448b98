"""Pictures of pipelines: one lane a rank, one bar an action, the bubble in grey; what ranks hold; bubbles as curves.

Every function takes numbers that `lablib.calc` computed, or that a run measured, and returns a figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lablib.calc.schedules import Action, Step
from lablib.view.style import COLORS, doubling_axis, figure, plot_lines, with_legend

#: Legend and colour of each kind of action. An input half yields gradients of activations, a weight half of weights.
ACTION_COLORS = {
    "F": ("forward", COLORS["forward"]),
    "B": ("backward", COLORS["backward"]),
    "I": ("backward: input", COLORS["activations"]),
    "W": ("backward: weight", COLORS["gradients"]),
}
_HEIGHT = 0.8
#: What a digit takes, in sizes of its font, and the points of the axes in a figure 5.2 inches wide.
_DIGIT, _AXES_WIDTH = 0.64, 318


class Event(Protocol):
    """An action that `simulate` returns or an executor records, of a rank, from start to end."""

    rank: int
    action: Step
    start: float
    end: float


class _Bar(NamedTuple):
    """A piece of a lane: overlapped actions share its height, so `box` is the bottom and the height."""

    action: Action
    start: float
    width: float
    box: tuple[float, float]


def pipeline(panels: Mapping[str, Iterable[Event]], *, unit: str = "forward times") -> Figure:
    """Draw one panel per schedule over a common time axis.

    A bar carries the number of its micro-batch where there is room for it. On a rank with several stages, the later
    ones are darker. What no bar covers is idle, up to the panel's last end.
    """
    drawn = {title: list(events) for title, events in panels.items()}
    if not drawn or not all(drawn.values()):
        raise ValueError("a pipeline needs at least one panel, and an event in each")
    ranks = {title: 1 + max(event.rank for event in events) for title, events in drawn.items()}
    lane = 0.3 if max(ranks.values()) <= 8 else 0.16
    height = 1.05 + sum(lane * count + 0.3 for count in ranks.values())
    fig, axes = figure(height=height, nrows=len(drawn), sharex=True, squeeze=False, height_ratios=list(ranks.values()))
    longest = max(event.end for events in drawn.values() for event in events)
    for ax, (title, events) in zip(axes[:, 0], drawn.items(), strict=True):
        _panel(ax, events, ranks[title], longest)
        ax.set_title(title, loc="left", fontsize=10)
    axes[-1, 0].set_xlim(0, longest)
    axes[-1, 0].set_xlabel(f"time ({unit})")
    kinds = {part.kind for events in drawn.values() for event in events for part in event.action.parts}
    handles = [Patch(color=color, label=label) for kind, (label, color) in ACTION_COLORS.items() if kind in kinds]
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
            color = _darker(ACTION_COLORS[kind][1], stages.index(stage) / max(1, len(stages) - 1))
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
    room = bar.width / longest * _AXES_WIDTH - 0.3
    size = next((size for size in (9, 7) if room > _DIGIT * size * len(label)), None)
    if height == _HEIGHT and size:
        middle = (bar.start + bar.width / 2, bottom + height / 2)
        ax.text(*middle, label, ha="center", va="center", color="white", fontsize=size)


def _darker(color: str, depth: float) -> tuple[float, ...]:
    """Return the colour as it is at depth 0, and a third of the way to black at depth 1."""
    return tuple(channel * (1 - 0.35 * depth) for channel in to_rgb(color))


_LINES = ("forward", "backward", "optimizer", "gradients")
_HALF = 0.4


def overlay(
    measured: Mapping[str, Iterable[Event]], simulated: Mapping[str, Iterable[Event]], *, unit: str = "ms"
) -> Figure:
    """Draw measured actions as bars, with a frame where the simulation puts each of them.

    Args:
        simulated: The same titles to the events of the simulation, in the same unit.
    """
    if set(measured) != set(simulated):
        raise ValueError(f"measured has {sorted(measured)}, simulated has {sorted(simulated)}: give the same")
    fig = pipeline(measured, unit=unit)
    frame = {"facecolor": "none", "edgecolor": COLORS["neutral"], "linewidth": 1.3}
    longest = fig.axes[-1].get_xlim()[1]
    for ax, title in zip(fig.axes, measured, strict=True):
        events = list(simulated[title])
        longest = max([longest, *(event.end for event in events)])
        for rank in {event.rank for event in events}:
            frames = [(event.start, event.end - event.start) for event in events if event.rank == rank]
            ax.broken_barh(frames, (rank - _HALF, 2 * _HALF), **frame)
    fig.axes[-1].set_xlim(0, longest)
    legend = fig.legends[0]
    handles = [*legend.legend_handles, Patch(**frame, label="simulated")]
    labels = [text.get_text() for text in legend.get_texts()] + ["simulated"]
    legend.remove()
    fig.legend(handles, labels, loc="outside upper left", ncols=min(3, len(handles)), fontsize=9)
    return fig


def bubble_curves(microbatches: Sequence[int], bubbles: Mapping[str, Sequence[float]], *, what: str) -> Figure:
    """Draw a bubble over the number of micro-batches, one line a pipeline."""
    fig, ax = figure(height=3.2)
    plot_lines(ax, microbatches, bubbles, _LINES)
    doubling_axis(ax, microbatches[::2])
    ax.set_ylim(0, None)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.set(xlabel="micro-batches m", ylabel=what)
    return with_legend(fig, 2)
