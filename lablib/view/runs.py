"""Pictures of a run: what each lane (a rank, a link, a stage) did and when, checkpoints, scaling, and a report's page.

Every function takes numbers that `lablib.calc` computed, or that a run measured, and returns a figure.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lablib.view.style import COLORS, DASHES, HATCHES, doubling_axis, figure, name_rows, note, plot_lines, with_legend

#: One colour for each line that shares a picture with others.
_HUES = ("forward", "backward", "optimizer", "gradients", "activations", "communication")


@dataclass(frozen=True)
class Span:
    """One bar of a timeline.

    Attributes:
        role: Its colour, a key of `lablib.view.style.COLORS`.
        start: Time at its left end, in the unit of the axis; `end` likewise.
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


def group_timeline(lines: Sequence[Mapping[str, Any]], title: str, stall: float = 0.3) -> Figure:
    """Draw when replica groups took steps together, when one took them alone, and when it stood still.

    Args:
        lines: Of a log, in the order of time: `group`, `event`, `time` in seconds; `groups`, those of a step.
        stall: Seconds between two steps of a group from which on it stood still, or was not there after "started".
    """
    spans: list[Span] = []
    for group in sorted({line["group"] for line in lines}):
        lane, last = f"group {'ABCDEFGH'[group]}", None
        for line in (line for line in lines if line["group"] == group):
            if line["event"] == "started":
                last = None
            elif line["event"] == "committed":
                if last is not None:
                    still = line["time"] - last > stall
                    role, label = (
                        ("idle", "waits")
                        if still
                        else ("forward", "all")
                        if line["groups"] > 1
                        else ("gradients", "alone")
                    )
                    if spans and (spans[-1].lane, spans[-1].role, spans[-1].end) == (lane, role, last):
                        spans[-1] = replace(spans[-1], end=line["time"])
                    else:
                        spans.append(Span(lane, role, last, line["time"], label))
                last = line["time"]
    return timeline({title: spans}, unit="s")


def rank_timeline(spans: Sequence[Span], shares: Mapping[str, str], *, header: str = "", unit: str = "ms") -> Figure:
    """Draw what every rank did over the same time axis, and at the right how its time splits."""
    if not spans:
        raise ValueError("a timeline needs at least one span")
    lanes = list(dict.fromkeys(span.lane for span in spans))
    longest = max(span.end for span in spans)
    fig, ax = figure(height=1.2 + 0.42 * len(lanes))
    _draw(ax, spans, lanes, longest)
    if header:
        ax.text(1.37 * longest, len(lanes) - 0.42, header, ha="right", va="bottom", fontsize=9)
    for lane, text in shares.items():
        row = len(lanes) - 1 - lanes.index(lane)
        ax.text(1.37 * longest, row, text, ha="right", va="center", fontsize=9)
    ax.set(xlim=(0, longest * (1.38 if shares else 1.01)), xlabel=f"time ({unit})")
    roles = dict.fromkeys(span.role for span in spans)
    handles = [
        ax.barh([0], [0], color=COLORS[role], edgecolor="white", hatch=HATCHES.get(role), label=_said(role))
        for role in roles
    ]
    return with_legend(fig, 3, handles=handles)


def _said(role: str) -> str:
    return {"forward": "computing", "backward": "computing", "idle": "waiting"}.get(role, role)


def loss_curves(
    runs: Mapping[str, Sequence[tuple[float, float]]], marks: Mapping[str, float], *, xlabel: str = "step"
) -> Figure:
    """Draw losses over steps, one line per run, and where something happened."""
    fig, ax = figure(height=3.2)
    for number, (name, points) in enumerate(runs.items()):
        steps, losses = zip(*points, strict=True)
        look = {"linewidth": 6.0, "alpha": 0.4} if number == 0 else {"linewidth": 1.6}
        ax.plot(steps, losses, color=COLORS[_HUES[number]], linestyle=DASHES[max(0, number - 1)], label=name, **look)
    top = max(loss for points in runs.values() for _, loss in points)
    for text, step in marks.items():
        ax.axvline(step, color=COLORS["neutral"], linewidth=1.0, linestyle=(0, (2, 3)))
        note(ax, text, (step, top), (4, -2), va="top")
    ax.set(xlabel=xlabel, ylabel="loss (nats)")
    return with_legend(fig, 2)


def memory_bars(
    predicted: Mapping[str, float], measured: Mapping[str, float | None], *, capacity: float, unit: str = "GB"
) -> Figure:
    """Draw predicted and measured memory side by side, and where the device ends."""
    fig, ax = figure(height=0.9 + 0.62 * len(predicted))
    for place, (name, value) in enumerate(predicted.items()):
        ax.barh(place - 0.19, value, 0.34, color=COLORS["neutral"])
        got = measured.get(name)
        if got is None:
            ax.text(0, place + 0.19, " does not fit", va="center", fontsize=9)
        else:
            ax.barh(place + 0.19, got, 0.34, color=COLORS["weights"])
    ax.axvline(capacity, color=COLORS["backward"], linewidth=1.2, linestyle="--")
    note(ax, "device", (capacity, len(predicted) - 0.6), (-4, 0), ha="right")
    name_rows(ax, predicted)
    ax.set_xlabel(f"peak memory ({unit})")
    handles = [
        ax.barh([0], [0], color=COLORS["neutral"], label="predicted"),
        ax.barh([0], [0], color=COLORS["weights"], label="measured"),
    ]
    return with_legend(fig, 2, handles=handles)


def checkpoint_interval(
    minutes: Sequence[float], shares: Mapping[str, Sequence[float]], marks: Mapping[str, float]
) -> Figure:
    """Draw the share of time that is lost over the interval between checkpoints, by cause."""
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
        note(ax, text, spot, (4, 0), va="top")
    ax.set_xscale("log")
    ticks = [m for m in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if minutes[0] <= m <= minutes[-1]]
    ax.set_xticks(ticks, labels=[f"{m:g}" for m in ticks])
    ax.set_xticks([], minor=True)
    ax.set_xlim(minutes[0], minutes[-1])
    ax.set_ylim(0, top)
    ax.set(xlabel="minutes of work between checkpoints", ylabel="lost time (%)")
    return with_legend(fig, 3)


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
    """Draw several lines over a quantity that grows by factors, such as a batch."""
    fig, ax = figure(height=3.3)
    plot_lines(ax, xs, lines, _HUES)
    ticks = xs[:: max(1, len(xs) // 6)]
    doubling_axis(ax, ticks, [_short(x) for x in ticks])
    if "y" in log:
        ax.set_yscale("log")
    elif bottom is not None:
        ax.set_ylim(bottom=bottom)
    for text, place in (marks or {}).items():
        ax.axvline(place, color=COLORS["neutral"], linewidth=1.0, linestyle=(0, (2, 3)))
        note(ax, text, (place, ax.get_ylim()[1]), (4, -3), va="top")
    ax.set(xlabel=xlabel, ylabel=ylabel)
    return with_legend(fig, 2)


def _short(x: float) -> str:
    for size, letter in ((2**20, "M"), (2**10, "K")):
        if x >= size and x % size == 0:
            return f"{x / size:g}{letter}"
    return f"{x:g}"


def speedup_curves(ranks: Sequence[int], speedups: Mapping[str, Sequence[float]]) -> Figure:
    """Draw speedup over ranks, one line per case, each named at its right end."""
    fig, ax = figure(height=3.4)
    ax.plot(ranks, ranks, "--", color=COLORS["neutral"], linewidth=1.3)
    note(ax, "ideal", (ranks[-1], ranks[-1]), (5, 1))
    roles = ("forward", "optimizer", "gradients", "backward", "activations")
    for role, (text, values) in zip(roles, speedups.items(), strict=False):
        ax.plot(ranks, values, color=COLORS[role])
        note(ax, text, (ranks[-1], values[-1]), (5, -5), color=COLORS[role])
    ticks = [rank for rank in ranks if rank & (rank - 1) == 0][::2]
    doubling_axis(ax, ticks)
    ax.set_yscale("log", base=2)
    ax.set_yticks(ticks, labels=[f"{rank}" for rank in ticks])
    ax.set(xlabel="ranks", ylabel="speedup")
    # Room for the names at the right end.
    ax.set_xlim(1, ranks[-1] * 3.2)
    return fig


def cost_curves(
    params: Sequence[float], years: Mapping[str, Sequence[float]], marks: Mapping[str, tuple[float, float]]
) -> Figure:
    """Draw the time one device would need over model size, with named models as points."""
    fig, ax = figure(height=3.4)
    for (name, values), role, dash in zip(years.items(), ("forward", "gradients"), ("-", "--"), strict=False):
        ax.plot(params, values, dash, color=COLORS[role], label=name)
    for name, (size, value) in marks.items():
        ax.plot(size, value, "o", color=COLORS["neutral"], markersize=5)
        note(ax, name, (size, value), (-5, 4), ha="right")
    ax.set(xscale="log", yscale="log")
    ax.set_xticks([1e9, 1e10, 1e11, 1e12], labels=["1B", "10B", "100B", "1T"])
    ax.set(xlabel="parameters", ylabel="years on one device")
    return with_legend(fig, 1)


#: Part of the loss to its colour and, beside colour, its hatch.
LOSS_PARTS = {
    "communication": ("communication", "///"),
    "imbalance": ("idle", "..."),
    "bubble": ("neutral", "xx"),
    "data": ("activations", "\\\\\\"),
    "compute": ("forward", ""),
}


def step_times(rows: Sequence[Mapping[str, object]]) -> Figure:
    """Draw the measured step of every run as a bar with its quartiles, and the predicted one as a line across it.

    Args:
        rows: With run, seconds (median, low, high) and predicted, in seconds or None.
    """
    fig, ax = figure(height=1.1 + 0.45 * len(rows))
    for place, row in enumerate(reversed(rows)):
        seconds = row["seconds"]
        middle = 1e3 * seconds["median"]
        around = [[middle - 1e3 * seconds["low"]], [1e3 * seconds["high"] - middle]]
        first = place == 0
        ax.barh(place, middle, 0.55, color=COLORS["forward"], label="measured" if first else None)
        ax.errorbar(middle, place, xerr=around, color=COLORS["neutral"], capsize=4, linewidth=1.5)
        if row.get("predicted"):
            at = 1e3 * row["predicted"]
            ax.plot([at, at], [place - 0.38, place + 0.38], color=COLORS["gradients"], linewidth=3)
    if any(row.get("predicted") for row in rows):
        ax.plot([], [], color=COLORS["gradients"], linewidth=3, label="predicted")
    ax.set_yticks(range(len(rows)), labels=[row["run"] for row in reversed(rows)])
    ax.grid(axis="y", visible=False)
    ax.set_xlim(left=0)
    ax.set_xlabel("ms a step: median and quartiles")
    return with_legend(fig, 2)


def loss_shares(rows: Sequence[Mapping[str, object]]) -> Figure:
    """Draw for every run on several ranks its efficiency and what took the rest, as parts of one bar.

    A part that was gained, not lost, is left out of the bar, which is then longer than 100 percent.
    """
    fig, ax = figure(height=1.3 + 0.45 * len(rows))
    for place, row in enumerate(reversed(rows)):
        kept = 100 * (1 - sum(row["loss"].values()))
        ax.barh(place, kept, 0.55, color=COLORS["optimizer"], label="kept" if place == 0 else None)
        left = kept
        for part, share in row["loss"].items():
            role, hatch = LOSS_PARTS[part]
            width = 100 * max(0.0, share)
            ax.barh(
                place, width, 0.55, left, color=COLORS[role], hatch=hatch, edgecolor="white",
                label=part if place == 0 else None,
            )  # fmt: skip
            left += width
    ax.set_yticks(range(len(rows)), labels=[row["run"] for row in reversed(rows)])
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("percent of the step")
    return with_legend(fig, 3)


def every_step(runs: Mapping[str, Sequence[float]], warm_up: int) -> Figure:
    """Draw the time of every step of every run, the warm-up in grey."""
    fig, ax = figure(height=2.6)
    for (name, seconds), role in zip(runs.items(), COLORS, strict=False):
        steps = range(1, len(seconds) + 1)
        ax.plot(steps, [1e3 * s for s in seconds], "o-", markersize=3, linewidth=1, color=COLORS[role], label=name)
    if warm_up:
        ax.axvspan(0.5, warm_up + 0.5, color=COLORS["idle"], alpha=0.25, hatch=HATCHES["idle"], label="warm-up")
    ax.set_ylim(bottom=0)
    ax.set(xlabel="step", ylabel="ms")
    return with_legend(fig, 3)


_STYLE = """
:root { color-scheme: light dark; --figure-grid: rgba(128, 128, 128, .35); }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
@media (prefers-color-scheme: dark) { body { background: #14181d; color: #e6e8ea; } }
figure { margin: 1.5rem 0; } figcaption { font-size: .9rem; opacity: .85; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--figure-grid); white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; } .said { white-space: normal; text-align: left; min-width: 18rem; }
th:first-child, td:first-child { text-align: left; } dt { font-weight: 600; } dd { margin: 0 0 .5rem 0; }
code { overflow-wrap: anywhere; }
"""


#: What a page puts side by side: a heading, or "" for none, the names of the columns, the rows.
PageTable = tuple[str, Sequence[str], Sequence[Sequence[str]]]


def page(
    title: str,
    *,
    sentences: Sequence[str],
    tables: Sequence[PageTable],
    figures: Sequence[tuple[str, str]],
    facts: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> str:
    """Return a report as one HTML page that needs no other file and follows the reader's light or dark theme."""

    def row(tag: str, texts: Sequence[str], long: set[int]) -> str:
        # A name breaks after its underscores, a sentence between its words.
        marks = [' class="said"' if column in long else "" for column in range(len(texts))]
        words = [html.escape(text).replace("_", "_<wbr>") for text in texts]
        return (
            "<tr>" + "".join(f"<{tag}{mark}>{text}</{tag}>" for mark, text in zip(marks, words, strict=True)) + "</tr>"
        )

    def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        long = {column for each in rows for column, text in enumerate(each) if len(text) > 40}
        body = "".join(row("td", each, long) for each in rows)
        return f"<table><thead>{row('th', head, long)}</thead><tbody>\n{body}\n</tbody></table>"

    def headed(name: str) -> str:
        return f"<h2>{html.escape(name)}</h2>\n" if name else ""

    side_by_side = "\n".join(
        f'{headed(name)}<div class="wide">{table(head, rows)}</div>' for name, head, rows in tables
    )
    drawn = "\n".join(
        f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>" for svg, caption in figures
    )
    known = "".join(
        f"<dt>{html.escape(k)}</dt><dd><code>{html.escape(v)}</code></dd>" for k, v in (facts or {}).items()
    )
    said = "".join(f"<li>{html.escape(text)}</li>" for text in notes)
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title><style>{_STYLE}</style></head>
<body>
<h1>{html.escape(title)}</h1>
{"".join(f"<p>{html.escape(text)}</p>" for text in sentences)}
{side_by_side}
{drawn}
{headed("How it was measured") + f"<dl>{known}</dl>" if known else ""}
{headed("What the numbers mean") + f"<ul>{said}</ul>" if said else ""}
</body>
</html>
"""


def guesses(lines: Mapping[str, Sequence[float]]) -> Figure:
    """Draw what a class predicted, over what was measured: a line a prediction, a dot a guess; far ones stand at the edge."""
    fig, ax = figure(height=0.9 + 0.28 * len(lines))
    most = 100.0
    for row, ratios in enumerate(lines.values()):
        held = [min(max(ratio, 1 / most), most) for ratio in ratios]
        ax.plot(held, [row] * len(held), "o", color=COLORS["activations"], alpha=0.5, clip_on=False)
    ax.axvline(1, color=COLORS["idle"], linewidth=1)
    ax.set_xscale("log")
    ax.set_xlim(1 / most, most)
    ax.set_xticks([0.01, 0.1, 1, 10, 100], labels=["1/100", "1/10", "1", "10", "100"])
    ax.set_xlabel("guess over measurement")
    name_rows(
        ax, [name if len(name) < 46 else f"{name[:44]}…" for name in (each.replace("$", r"\$") for each in lines)]
    )
    return fig
