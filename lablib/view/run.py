"""Pictures of a real run: what every rank did, what a restart changed, what it held, and when it should save.

Every function takes numbers that `lablib.calc` computed, or that a run measured, and returns a figure.
What of its efficiency a run lost is drawn by `lablib.view.scaling_report`.

Chapter: book/11_practical_fsdp.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from lablib.view.style import COLORS, HATCHES, figure
from lablib.view.timeline import Span

#: One colour and one dash for each line that shares a picture with others.
_HUES = ("forward", "backward", "optimizer", "gradients", "activations", "communication")
_DASHES = ("-", "--", "-.", ":", (0, (4, 1, 1, 1, 1, 1)), (0, (1, 1)))


def rank_timeline(
    spans: Sequence[Span], shares: Mapping[str, str], *, header: str = "", unit: str = "ms"
) -> Figure:
    """Draw what every rank did over the same time axis, and at the right how its time splits.

    Args:
        spans: One lane per rank; roles are keys of `COLORS`, idle time is a role of its own or simply left empty.
        shares: Text beside each lane, such as "70% / 20%".
        header: Text above those, such as "computing / waiting".
        unit: Of the spans' times.

    Returns:
        The figure, for `lablib.view.style.show`.

    Raises:
        ValueError: If there is nothing to draw.
    """
    if not spans:
        raise ValueError("a timeline needs at least one span")
    lanes = list(dict.fromkeys(span.lane for span in spans))
    longest = max(span.end for span in spans)
    fig, ax = figure(height=1.2 + 0.42 * len(lanes))
    for span in spans:
        row = len(lanes) - 1 - lanes.index(span.lane)
        ax.barh(
            row,
            span.end - span.start,
            0.72,
            span.start,
            color=COLORS[span.role],
            edgecolor="white",
            hatch=HATCHES.get(span.role),
        )
    if header:
        ax.text(1.37 * longest, len(lanes) - 0.42, header, ha="right", va="bottom", fontsize=9)
    for lane, text in shares.items():
        row = len(lanes) - 1 - lanes.index(lane)
        ax.text(1.37 * longest, row, text, ha="right", va="center", fontsize=9)
    ax.set_yticks(range(len(lanes)), labels=list(reversed(lanes)))
    ax.set_xlim(0, longest * (1.38 if shares else 1.01))
    ax.set_ylim(-0.55, len(lanes) - 0.45)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(f"time ({unit})")
    roles = dict.fromkeys(span.role for span in spans)
    handles = [
        ax.barh([0], [0], color=COLORS[role], edgecolor="white", hatch=HATCHES.get(role), label=_said(role))
        for role in roles
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=3)
    return fig


def _said(role: str) -> str:
    return {"forward": "computing", "backward": "computing", "idle": "waiting"}.get(role, role)


def loss_curves(
    runs: Mapping[str, Sequence[tuple[float, float]]], marks: Mapping[str, float], *, xlabel: str = "step"
) -> Figure:
    """Draw losses over steps, one line per run, and where something happened.

    Args:
        runs: Name of the run to its (step, loss) points. The first is drawn broad and pale, so that a run that
            coincides with it stays visible on top of it.
        marks: Text beside a vertical line to its step.
        xlabel: Quantity of the steps.

    Returns:
        The figure, for `lablib.view.style.show`.
    """
    fig, ax = figure(height=3.2)
    for number, (name, points) in enumerate(runs.items()):
        steps, losses = zip(*points, strict=True)
        look = {"linewidth": 6.0, "alpha": 0.4} if number == 0 else {"linewidth": 1.6}
        ax.plot(
            steps,
            losses,
            color=COLORS[_HUES[number]],
            linestyle=_DASHES[max(0, number - 1)],
            label=name,
            **look,
        )
    top = max(loss for points in runs.values() for _, loss in points)
    for text, step in marks.items():
        ax.axvline(step, color=COLORS["neutral"], linewidth=1.0, linestyle=(0, (2, 3)))
        ax.annotate(text, (step, top), (4, -2), textcoords="offset points", fontsize=9, va="top")
    ax.set_xlabel(xlabel)
    ax.set_ylabel("loss (nats)")
    fig.legend(loc="outside lower center", ncols=2)
    return fig


def memory_bars(
    predicted: Mapping[str, float], measured: Mapping[str, float | None], *, capacity: float, unit: str = "GB"
) -> Figure:
    """Draw predicted and measured memory side by side, and where the device ends.

    Args:
        predicted: Name of the case to what was predicted.
        measured: The same names to what was measured; None where it did not fit.
        capacity: Of the device, in the same unit.
        unit: Printed at the axis.

    Returns:
        The figure, for `lablib.view.style.show`.
    """
    fig, ax = figure(height=0.9 + 0.62 * len(predicted))
    for place, (name, value) in enumerate(predicted.items()):
        ax.barh(place - 0.19, value, 0.34, color=COLORS["neutral"])
        got = measured.get(name)
        if got is None:
            ax.text(0, place + 0.19, " does not fit", va="center", fontsize=9)
        else:
            ax.barh(place + 0.19, got, 0.34, color=COLORS["weights"])
    ax.axvline(capacity, color=COLORS["backward"], linewidth=1.2, linestyle="--")
    ax.annotate(
        "device",
        (capacity, len(predicted) - 0.6),
        (-4, 0),
        textcoords="offset points",
        ha="right",
        fontsize=9,
    )
    ax.set_yticks(range(len(predicted)), labels=list(predicted))
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(f"peak memory ({unit})")
    handles = [
        ax.barh([0], [0], color=COLORS["neutral"], label="predicted"),
        ax.barh([0], [0], color=COLORS["weights"], label="measured"),
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    return fig


def checkpoint_interval(
    minutes: Sequence[float],
    shares: Mapping[str, Sequence[float]],
    marks: Mapping[str, float],
) -> Figure:
    """Draw the share of time that is lost over the interval between checkpoints, by cause.

    Args:
        minutes: Intervals, ascending.
        shares: Cause to its share at every interval, 0 to 1; they are stacked.
        marks: Text beside a vertical line to its interval.

    Returns:
        The figure, for `lablib.view.style.show`.
    """
    fig, ax = figure(height=3.3)
    roles = {"checkpoints": "optimizer", "work done again": "backward", "restarts": "idle"}
    ax.stackplot(
        minutes,
        *[[100 * share for share in values] for values in shares.values()],
        colors=[COLORS[roles.get(name, "neutral")] for name in shares],
        labels=list(shares),
        alpha=0.85,
    )
    top = 100 * max(sum(values) for values in zip(*shares.values(), strict=True))
    for row, (text, place) in enumerate(marks.items()):
        ax.axvline(place, color=COLORS["neutral"], linewidth=1.2, linestyle="--")
        spot = (place, top * (0.97 - 0.1 * row))
        ax.annotate(text, spot, (4, 0), textcoords="offset points", fontsize=9, va="top")
    ax.set_xscale("log")
    ticks = [m for m in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if minutes[0] <= m <= minutes[-1]]
    ax.set_xticks(ticks, labels=[f"{m:g}" for m in ticks])
    ax.set_xticks([], minor=True)
    ax.set_xlim(minutes[0], minutes[-1])
    ax.set_ylim(0, top)
    ax.set_xlabel("minutes of work between checkpoints")
    ax.set_ylabel("lost time (%)")
    fig.legend(loc="outside lower center", ncols=3)
    return fig


def curves(
    xs: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    *,
    xlabel: str,
    ylabel: str,
    marks: Mapping[str, float] | None = None,
    log: str = "x",
    bottom: float | None = None,
) -> Figure:
    """Draw several lines over a quantity that grows by factors, such as a batch.

    Args:
        xs: Where, ascending.
        lines: Name of the line to its values.
        xlabel: Quantity and unit.
        ylabel: Quantity and unit.
        marks: Text beside a vertical line to its place.
        log: "x", or "xy" where the values grow by factors, too.
        bottom: Lower end of a linear vertical axis.

    Returns:
        The figure, for `lablib.view.style.show`.
    """
    fig, ax = figure(height=3.3)
    for (name, values), role, dash in zip(lines.items(), _HUES, _DASHES, strict=False):
        ax.plot(xs, values, color=COLORS[role], linestyle=dash, label=name)
    ax.set_xscale("log", base=2)
    step = max(1, len(xs) // 6)
    ax.set_xticks(xs[::step], labels=[_short(x) for x in xs[::step]])
    ax.set_xticks([], minor=True)
    if "y" in log:
        ax.set_yscale("log")
    elif bottom is not None:
        ax.set_ylim(bottom=bottom)
    for text, place in (marks or {}).items():
        ax.axvline(place, color=COLORS["neutral"], linewidth=1.0, linestyle=(0, (2, 3)))
        ax.annotate(
            text, (place, ax.get_ylim()[1]), (4, -3), textcoords="offset points", fontsize=9, va="top"
        )
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    fig.legend(loc="outside lower center", ncols=2)
    return fig


def _short(x: float) -> str:
    for size, letter in ((2**20, "M"), (2**10, "K")):
        if x >= size and x % size == 0:
            return f"{x / size:g}{letter}"
    return f"{x:g}"
