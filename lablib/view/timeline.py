"""Timelines: what each lane (a rank, a link, a stage) does, and when.

Every function takes spans that somebody else computed or measured and returns a matplotlib figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lablib.view.style import COLORS, HATCHES, figure


@dataclass(frozen=True)
class Span:
    """One bar of a timeline.

    Attributes:
        lane: The row it is drawn in.
        role: Its colour, a key of `lablib.view.style.COLORS`.
        start: Time at its left end, in the unit of the axis.
        end: Time at its right end.
        label: Text inside the bar; left out where the bar is too short for it.
    """

    lane: str
    role: str
    start: float
    end: float
    label: str = ""


def _draw(ax: Axes, spans: Sequence[Span], lanes: Sequence[str], longest: float) -> None:
    for span in spans:
        row = len(lanes) - 1 - lanes.index(span.lane)
        width = span.end - span.start
        hatch = HATCHES.get(span.role)
        # A white edge keeps neighbours apart; the hatch says "communication" without hue.
        ax.barh(row, width, 0.72, span.start, color=COLORS[span.role], edgecolor="white", hatch=hatch)
        if span.label and width > 0.035 * len(span.label) * longest:
            middle = span.start + width / 2
            # The plate keeps the hatch out of the text.
            plate = {"facecolor": COLORS[span.role], "edgecolor": "none", "pad": 1.2}
            ax.text(middle, row, span.label, ha="center", va="center", color="white", fontsize=9, bbox=plate)
    ax.set_yticks(range(len(lanes)), labels=list(reversed(lanes)))
    ax.set_ylim(-0.55, len(lanes) - 0.45)
    ax.grid(axis="y", visible=False)


def timeline(panels: Mapping[str, Sequence[Span]], *, unit: str = "ms", height: float | None = None) -> Figure:
    """Draw one panel per case over a common time axis."""
    if not panels or not all(panels.values()):
        raise ValueError("a timeline needs at least one panel, and a span in each")
    lanes = {title: list(dict.fromkeys(span.lane for span in spans)) for title, spans in panels.items()}
    rows = [len(names) for names in lanes.values()]
    height = height or 0.6 + sum(0.34 * count + 0.42 for count in rows)
    fig, axes = figure(height=height, nrows=len(panels), sharex=True, squeeze=False, height_ratios=rows)
    longest = max(span.end for spans in panels.values() for span in spans)
    for ax, (title, spans) in zip(axes[:, 0], panels.items(), strict=True):
        _draw(ax, spans, lanes[title], longest)
        ax.set_title(title, loc="left", fontsize=10)
    axes[-1, 0].set_xlim(0, longest * 1.01)
    axes[-1, 0].set_xlabel(f"time ({unit})")
    return fig
