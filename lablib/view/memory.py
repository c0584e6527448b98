"""Pictures of memory: bars by term, curves, the largest model of a device, and the judged memory calculator.

Every function takes numbers that `lablib.calc` computed, or that a run measured, and returns a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, pairwise
from math import log10

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lablib.view.style import COLORS, HATCHES, figure, name_rows, note, with_legend

#: What a bar's segment is called in the legend, in drawing order.
TERMS = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer state", "activations": "activations"}


def stacked_bars(
    bars: Mapping[str, Mapping[str, float]],
    *,
    xlabel: str,
    limit: float | None = None,
    limit_label: str = "",
    number: str = "{:.0f}",
    terms: Mapping[str, str] = TERMS,
) -> Figure:
    """Draw one horizontal bar per case, its segments the terms of the memory."""
    fig, ax = figure(height=1.35 + 0.42 * len(bars))
    totals = []
    for row, parts in enumerate(bars.values()):
        left = 0.0
        for role in terms:
            value = parts.get(role, 0.0)
            if value:
                ax.barh(row, value, left=left, height=0.62, color=COLORS[role])
                left += value
        note(ax, number.format(left), (left, row), (4, 0), va="center")
        totals.append(left)
    name_rows(ax, bars)
    ax.set(xlim=(0, 1.14 * max([*totals, limit or 0.0])), xlabel=xlabel)
    if limit is not None:
        ax.axvline(limit, color=COLORS["backward"], linestyle="--", linewidth=1.5)
        note(
            ax,
            limit_label,
            (limit, 1),
            (0, 2),
            xycoords=("data", "axes fraction"),
            ha="center",
            color=COLORS["backward"],
        )
    used = [role for role in terms if any(parts.get(role) for parts in bars.values())]
    fig.legend(
        handles=[Patch(color=COLORS[role], label=terms[role]) for role in used],
        loc="outside lower center",
        ncols=min(len(used), 3),
    )
    return fig


def curves(
    x: Sequence[float],
    lines: Mapping[str, tuple[Sequence[float], str]],
    *,
    xlabel: str,
    ylabel: str,
    log: str = "",
    level: tuple[float, str] | None = None,
    points: Mapping[str, tuple[Sequence[float], Sequence[float], str]] | None = None,
    xticks: Mapping[float, str] | None = None,
) -> Figure:
    """Draw named curves over one axis, with measured points on top where there are any."""
    fig, ax = figure(height=3.4)
    dashes = ("-", "--", ":", "-.")
    for (name, (y, role)), style in zip(lines.items(), cycle(dashes), strict=False):  # apart without colour too
        ax.plot(x, y, style, color=COLORS[role], label=name)
    for name, (px, py, role) in (points or {}).items():
        ax.plot(px, py, "o", color=COLORS[role], markersize=6, label=name)
    if "x" in log:
        ax.set_xscale("log")
    if "y" in log:
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)
    if xticks:
        ax.set_xticks(list(xticks), labels=list(xticks.values()))
        ax.minorticks_off()
    if level:
        ax.axhline(level[0], color=COLORS["backward"], linestyle="--", linewidth=1.3)
        note(ax, level[1], (0.01, level[0]), (0, -11), xycoords=("axes fraction", "data"), color=COLORS["backward"])
    ax.set(xlabel=xlabel, ylabel=ylabel)
    return with_legend(fig, 2)


#: What a layer of the step is called in the legend, from the axis upwards, and its role in `COLORS`.
LAYERS = {
    "weights": ("weights", "weights"),
    "optimizer": ("optimizer state", "optimizer"),
    "gradients": ("gradients", "gradients"),
    "activations": ("activations", "activations"),
    "sharding": ("gathered weights, buffers", "communication"),
    "temporary": ("temporaries", "neutral"),
}
#: Kind of memory, as PyTorch's trackers name it, to the layer that it is drawn in.
LAYER_BY_KIND = {
    "weights": "weights",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "gradient buckets": "gradients",
    "unsharded gradients": "gradients",
    "activations": "activations",
    "gathered weights": "sharding",
    "all-gather buffers": "sharding",
    "reduce-scatter buffers": "sharding",
    "temporary": "temporary",
    "buffers": "temporary",
    "inputs": "temporary",
}


def error_strips(
    strips: Mapping[str, Sequence[float]],
    bounds: Mapping[str, float],
    *,
    named: Mapping[str, tuple[float, str]] | None = None,
    floor: float = 1e-10,
) -> Figure:
    """Draw one dot for each configuration, by how far it is off; those that are exact stand at the left."""
    fig, ax = figure(height=0.9 + 0.95 * len(strips))
    decade = 12  # dots that have room beside each other in a factor of ten
    for row, (name, errors) in enumerate(strips.items()):
        heights: dict[int, int] = {}
        xs, ys = [], []
        for count, error in enumerate(sorted(errors)):
            if error == 0:  # a block of dots, filled from below
                column, height = count // 10 - 3 * decade, count % 10
            else:
                column = round(decade * log10(max(error, floor) / floor))
                height = heights[column] = heights.get(column, -1) + 1
            xs.append(floor * 10 ** (column / decade))
            ys.append(row - 0.06 * height)
        ax.plot(xs, ys, "o", color=COLORS["activations"], markersize=4, markeredgewidth=0)
        if bounds[name]:
            ax.plot([bounds[name]] * 2, [row - 0.66, row + 0.12], color=COLORS["backward"], linewidth=1.6)
            note(
                ax,
                f"allowed: {bounds[name]:.0%}",
                (bounds[name], row - 0.66),
                (-4, -1),
                ha="right",
                va="top",
                color=COLORS["backward"],
            )
        if named and name in named:
            error, text = named[name]
            ax.annotate(text, (max(error, floor), row), (0, -6), textcoords="offset points", ha="right", va="top")
    ax.set(xscale="log", xlim=(floor / 10**3.4, 0.3), ylim=(len(strips) - 0.6, -0.9))
    ax.set_yticks(range(len(strips)), labels=list(strips))
    ax.grid(axis="y", visible=False)
    ticks = [floor / 10**2.75, 1e-9, 1e-6, 1e-3, 1e-2]
    ax.set_xticks(ticks, labels=["exact", "1 in 10⁹", "1 in 10⁶", "0.1 %", " 1 %"])
    ax.minorticks_off()
    ax.set_xlabel("off by, as a share of what was measured")
    return fig


def step_memory(
    layers: Mapping[str, Sequence[float]],
    *,
    phases: Sequence[tuple[str, int]],
    measured: Sequence[float],
    peak: tuple[int, str],
    ylabel: str,
) -> Figure:
    """Draw what a rank holds at each moment of a step: predicted in layers, measured as dots."""
    moments = sum(count for _, count in phases)
    if any(len(numbers) != moments for numbers in (*layers.values(), measured)):
        raise ValueError(f"the phases have {moments} moments: give as many numbers in every layer and measured")
    fig, ax = figure(height=3.9)
    below = [0.0] * moments
    edges = [i - 0.5 for i in range(moments + 1)]
    used = [key for key in LAYERS if any(layers.get(key, ()))]
    for key in used:
        above = [low + more for low, more in zip(below, layers[key], strict=True)]
        role = LAYERS[key][1]
        ax.stairs(above, edges, baseline=below, fill=True, color=COLORS[role], hatch=HATCHES.get(role), linewidth=0)
        below = above
    ink = ax.yaxis.label.get_color()  # the page's text colour
    ax.plot(range(moments), measured, "o", color=ink, markersize=2.6, markeredgewidth=0)
    where, text = peak
    top = max(*below, *measured)
    ax.annotate(
        text,
        (where, measured[where]),
        (-14 if where > moments / 3 else 14, 16),
        textcoords="offset points",
        ha="right" if where > moments / 3 else "left",
        arrowprops={"arrowstyle": "->", "color": COLORS["backward"], "linewidth": 1.4},
        color=COLORS["backward"],
    )
    ax.set(ylim=(0, 1.22 * top), xlim=(-0.5, moments - 0.5))
    starts = [sum(count for _, count in phases[:i]) for i in range(len(phases) + 1)]
    for start in starts[1:-1]:
        ax.axvline(start - 0.5, color=COLORS["neutral"], linewidth=0.8, linestyle=":")
    ax.set_xticks([(a + b - 1) / 2 for a, b in pairwise(starts)], labels=[name for name, _ in phases])
    ax.tick_params(axis="x", length=0)
    ax.grid(axis="x", visible=False)
    ax.set_ylabel(ylabel)
    legend = [
        Patch(facecolor=COLORS[role], hatch=HATCHES.get(role), label=label)
        for label, role in (LAYERS[key] for key in used)
    ]
    legend.append(Line2D([], [], marker="o", linestyle="", color=ink, markersize=4, label="measured, in all"))
    return with_legend(fig, 2, handles=legend)


#: What is judged, in drawing order, and its colour.
QUANTITY_ROLES = {"states": "weights", "activations": "activations", "total": "neutral"}
QUANTITY_TITLES = {"states": "model states", "activations": "kept activations", "total": "peak of a step"}
RATIO_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 50, 100)


def calculator_ratios(rows: Sequence[Mapping[str, object]], own: str = "this course") -> Figure:
    """Draw predicted over measured for every calculator: a line over all cases, a dot at the median, a diamond at the worst."""
    for row in rows:
        if row["quantity"] not in QUANTITY_ROLES:
            raise ValueError(f"quantity={row['quantity']!r} must be one of {', '.join(QUANTITY_ROLES)}")
    groups = {q: [row for row in rows if row["quantity"] == q] for q in QUANTITY_ROLES}
    groups = {q: found for q, found in groups.items() if found}
    lines = sum(len(found) + 1 for found in groups.values())
    fig, ax = figure(height=1.3 + 0.235 * lines)
    places, labels, at = [], [], 0.0
    for quantity, found in groups.items():
        note(
            ax,
            QUANTITY_TITLES[quantity],
            (0, at),
            (4, 0),
            xycoords=("axes fraction", "data"),
            va="center",
            fontweight="bold",
        )
        for row in found:
            at += 1
            color = COLORS["optimizer"] if row["calculator"] == own else COLORS[QUANTITY_ROLES[quantity]]
            ax.plot([row["low"], row["high"]], [at, at], color=color, linewidth=3, solid_capstyle="round", alpha=0.6)
            ax.plot(row["median"], at, "o", color=color, markersize=6)
            ax.plot(row["worst"], at, "D", color=color, markersize=6, markerfacecolor="none", markeredgewidth=1.3)
            places.append(at)
            labels.append(f"{row['calculator']} ({row['cases']})")
        at += 1
    ax.axvline(1, color=COLORS["neutral"], linestyle="--", linewidth=1)
    ax.set_xscale("log")
    left, right = ax.get_xlim()
    ticks = [tick for tick in RATIO_TICKS if left <= tick <= right]
    ax.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_yticks(places, labels=labels)
    ax.set_ylim(at - 0.4, -0.7)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("predicted / measured")
    marks = {"marker": "o", "linestyle": "none", "color": COLORS["neutral"]}
    fig.legend(
        handles=[
            Line2D([], [], label="median case", **marks),
            Line2D([], [], label="worst case", **marks | {"marker": "D", "markerfacecolor": "none"}),
        ],
        loc="outside lower center",
        ncols=2,
    )
    return fig
