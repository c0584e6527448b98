"""More pictures of pipelines: measured over simulated, what ranks hold over time, bubbles as curves.

Every function takes numbers that somebody else computed or measured and returns a matplotlib figure.

Chapter: book/04_pipeline_parallelism.md
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, MultipleLocator

from lablib.view.pipeline import Event, pipeline
from lablib.view.style import COLORS, figure

_LINES = (("forward", "-"), ("backward", "--"), ("optimizer", "-."), ("gradients", ":"))
_HALF = 0.4


def overlay(
    measured: Mapping[str, Iterable[Event]], simulated: Mapping[str, Iterable[Event]], *, unit: str = "ms"
) -> Figure:
    """Draw measured actions as bars, with a frame where the simulation puts each of them.

    Args:
        measured: Title of the panel to the events of a real step.
        simulated: The same titles to the events of the simulation, in the same unit.
        unit: Of the times.

    Returns:
        The figure, for `lablib.view.style.show`.

    Raises:
        ValueError: If the titles differ.
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


def held_over_time(
    panels: Mapping[str, Sequence[Sequence[tuple[float, float]]]], *, unit: str = "forward times"
) -> Figure:
    """Draw how many micro-batches each rank holds, one panel a schedule, one line a rank.

    Args:
        panels: Title to, for each rank, the points (time, micro-batches held from then on).
        unit: Of the times.

    Returns:
        The figure, for `lablib.view.style.show`.
    """
    fig, axes = figure(
        height=0.9 + 1.5 * len(panels), nrows=len(panels), sharex=True, sharey=True, squeeze=False
    )
    for ax, (title, ranks) in zip(axes[:, 0], panels.items(), strict=True):
        for rank, (points, (role, dash)) in enumerate(zip(ranks, _LINES, strict=False)):
            times, counts = zip(*points, strict=True)
            ax.step(times, counts, dash, where="post", color=COLORS[role], label=f"rank {rank}")
        ax.set_title(title, loc="left", fontsize=10)
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_locator(MaxNLocator(4, integer=True, steps=[1, 2, 4, 5, 10]))
        ax.set_ylabel("held")
    axes[-1, 0].set_xlabel(f"time ({unit})")
    handles = [
        Line2D([], [], color=COLORS[role], linestyle=dash, label=f"rank {rank}")
        for rank, (role, dash) in enumerate(_LINES[: max(map(len, panels.values()))])
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=4)
    return fig


def bubble_curves(
    microbatches: Sequence[int], bubbles: Mapping[str, Sequence[float]], *, what: str
) -> Figure:
    """Draw a bubble over the number of micro-batches, one line a pipeline.

    Args:
        microbatches: Ascending.
        bubbles: Name of the line to the bubble at each number of micro-batches.
        what: Which bubble it is, for the axis.

    Returns:
        The figure, for `lablib.view.style.show`.
    """
    fig, ax = figure(height=3.2)
    for (name, values), (role, dash) in zip(bubbles.items(), _LINES, strict=False):
        ax.plot(microbatches, values, dash, color=COLORS[role], label=name)
    ax.set_xscale("log", base=2)
    ax.set_xticks(microbatches[::2], labels=[f"{m}" for m in microbatches[::2]])
    ax.set_ylim(0, None)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.set_xlabel("micro-batches m")
    ax.set_ylabel(what)
    fig.legend(loc="outside lower center", ncols=2)
    return fig


def trade_offs(points: Mapping[str, tuple[float, float]], *, right: Sequence[str] = ()) -> Figure:
    """Draw every schedule as a point: what its fullest rank holds, and how long it idles.

    Args:
        points: Name to (micro-batches held, idle over ideal time).
        right: Names to write to the left of their points, where the right has no room.

    Returns:
        The figure, for `lablib.view.style.show`.
    """
    fig, ax = figure(height=3.2)
    for name, (held, bubble) in points.items():
        ax.plot([held], [bubble], "o", color=COLORS["backward"], markersize=8)
        left = name in right
        ax.annotate(
            name,
            (held, bubble),
            (-8 if left else 8, 4),
            textcoords="offset points",
            ha="right" if left else "left",
            fontsize=9,
        )
    ax.set_xlim(0, 1.15 * max(held for held, _ in points.values()))
    ax.set_ylim(0, 1.2 * max(bubble for _, bubble in points.values()))
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.yaxis.set_major_locator(MultipleLocator(0.05))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.set_xlabel("micro-batches held by the fullest rank")
    ax.set_ylabel("idle over ideal time")
    return fig
