"""Pictures of communication: what a size costs, how well a fit does, messages round by round, a fabric's switches.

Each public function returns a figure of the numbers that it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from lablib.view.style import COLORS, cell, doubling_axis, figure, name_rows, plot_lines, with_legend

#: Colours of lines, and of leaf switches.
_ROLES = ("communication", "forward", "gradients", "activations", "optimizer", "backward")


def _size(value: float) -> str:
    """Name a size in bytes at a tick."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= unit:
            return f"{value / unit:g} {name}"
    return f"{value:g} B"


def _bytes_axis(ax: Axes, sizes: Sequence[float]) -> None:
    ticks: list[float] = []
    for size in sorted(sizes, reverse=True):  # names need room: about a fifth of the axis for each
        if not ticks or ticks[-1] / size >= (max(sizes) / min(sizes)) ** 0.19:
            ticks.append(size)
    doubling_axis(ax, ticks, [_size(size) for size in ticks])


def _plain_log(axis: Axis) -> None:
    axis.set_major_locator(LogLocator(subs=(1, 3)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def time_curves(
    sizes: Sequence[float],
    seconds: Mapping[str, Sequence[float]],
    *,
    points: Mapping[str, Sequence[float]] | None = None,
    marks: Mapping[str, float] | None = None,
    height: float = 3.6,
) -> Figure:
    """Draw times over the array's size, one line per algorithm, and measured points in the colour of their line."""
    fig, ax = figure(height=height)
    plot_lines(ax, sizes, seconds, _ROLES, scale=1e3)
    for name, role in zip(seconds, _ROLES, strict=False):
        if name in (points or {}):
            ax.plot(sizes, [value * 1e3 for value in points[name]], "o", color=COLORS[role], markersize=5)
    ax.set_yscale("log")
    _plain_log(ax.yaxis)
    _bytes_axis(ax, sizes)
    for text, size in (marks or {}).items():
        ax.axvline(size, color=COLORS["neutral"], linewidth=1.2)
        ax.text(size * 1.15, 0.03, text, va="bottom", fontsize=9, transform=ax.get_xaxis_transform())
    ax.set(xlabel="size of the array", ylabel="time (ms)")
    return with_legend(fig, 2)


def fit_and_residuals(sizes: Sequence[float], seconds: Sequence[float], fits: Mapping[str, Sequence[float]]) -> Figure:
    """Draw measured times with one or more fits, and below them how far each fit is off."""
    fig, (top, bottom) = figure(height=4.4, nrows=2, sharex=True, height_ratios=[3, 2])
    top.plot(sizes, [t * 1e3 for t in seconds], "o", color=COLORS["neutral"], markersize=5, label="measured")
    plot_lines(top, sizes, fits, _ROLES, scale=1e3)
    off = {name: [fit / t - 1 for fit, t in zip(values, seconds, strict=True)] for name, values in fits.items()}
    plot_lines(bottom, sizes, off, _ROLES, scale=100, marker="o", linewidth=1.2, markersize=4)
    bottom.axhline(0, color=COLORS["neutral"], linewidth=1.0)
    top.set_yscale("log")
    _plain_log(top.yaxis)
    _bytes_axis(bottom, sizes)
    top.set_ylabel("time (ms)")
    bottom.set(ylabel="fit is off by (%)", xlabel="size of the array")
    return with_legend(fig, 3, handles=top.lines)


def efficiency_over_links(names: Sequence[str], predicted: Sequence[float], measured: Sequence[float]) -> Figure:
    """Draw scaling efficiency link by link, in the order given: the predicted curve and what was seen."""
    fig, ax = figure(height=3.1)
    places = range(len(names))
    ax.plot(places, [100 * e for e in predicted], "--", color=COLORS["communication"], label="predicted")
    ax.plot(places, [100 * e for e in measured], "o", color=COLORS["backward"], markersize=7, label="measured")
    ax.set_xticks(places, labels=names)
    ax.set(ylim=(0, 105), xlabel="link between the hosts", ylabel="scaling efficiency (%)")
    return with_legend(fig, 2)


def predicted_and_measured(
    rows: Mapping[str, tuple[float, float]], *, xlabel: str, height: float | None = None
) -> Figure:
    """Draw measured values as bars, with a mark where each was predicted."""
    fig, ax = figure(height=height or 1.1 + 0.4 * len(rows))
    places = range(len(rows))
    predicted, measured = ([row[part] for row in rows.values()] for part in (0, 1))
    ax.barh(places, measured, 0.66, color=COLORS["forward"], label="measured")
    ax.plot(predicted, places, "D", color=COLORS["neutral"], markersize=7, label="predicted")
    name_rows(ax, rows)
    ax.set_xlabel(xlabel)
    return with_legend(fig, 2)


def message_rounds(panels: Mapping[str, Sequence[Sequence[tuple[int, int, float]]]], *, ranks: int) -> Figure:
    """Draw every message of algorithms: time goes to the right, and the larger a message, the thicker its arrow."""
    columns = 2
    rows = -(-len(panels) // columns)
    fig, axes = figure(height=2.05 * rows, nrows=rows, ncols=columns, squeeze=False)
    most = max(len(rounds) for rounds in panels.values())
    for ax in axes.flat:
        ax.axis("off")
    for ax, (title, rounds) in zip(axes.flat, panels.items(), strict=False):
        for number, sends in enumerate(rounds):
            for source, target, share in sends:
                ax.add_patch(
                    FancyArrowPatch(
                        (number + 0.06, -source),
                        (number + 0.94, -target),
                        arrowstyle="-|>",
                        mutation_scale=9,
                        linewidth=0.8 + 3.2 * share,
                        color=COLORS["communication"],
                        shrinkA=0,
                        shrinkB=0,
                    )
                )
        for rank in range(ranks):
            ax.plot(range(len(rounds) + 1), [-rank] * (len(rounds) + 1), "o", color=COLORS["neutral"], markersize=4)
            ax.text(-0.3, -rank, str(rank), ha="right", va="center", fontsize=10)
        ax.set_title(title, loc="left", fontsize=10)
        ax.set(xlim=(-0.7, most + 0.2), ylim=(-ranks + 0.6, 0.4))
    return fig


def fabric(panels: Mapping[str, Sequence[Sequence[int]]]) -> Figure:
    """Draw which leaf switch each network card of each node is wired to; the spine joins the leaves.

    Args:
        panels: Title to `leaf[node][card]`, the number of the leaf switch.
    """
    fig, axes = figure(height=2.5 * len(panels), nrows=len(panels), squeeze=False)
    for ax, (title, leaf) in zip(axes[:, 0], panels.items(), strict=True):
        cards = len(leaf[0])
        leaves = 1 + max(number for node in leaf for number in node)
        width = len(leaf) * (cards + 1) - 1
        middle = [(number + 0.5) * width / leaves for number in range(leaves)]
        for number, x in enumerate(middle):
            color = COLORS[_ROLES[number % len(_ROLES)]]
            ax.plot([x, width / 2], [3.4, 4.3], color=COLORS["neutral"], linewidth=1.4)
            cell(ax, x - 1.1, 2.8, 2.2, 0.6, f"leaf {number}", color)
        cell(ax, width / 2 - 1.6, 4.3, 3.2, 0.6, "spine", COLORS["neutral"])
        for node, numbers in enumerate(leaf):
            left = node * (cards + 1)
            ax.add_patch(Rectangle((left - 0.1, -0.35), cards, 1.3, facecolor=COLORS["idle"], alpha=0.25))
            ax.text(left + cards / 2 - 0.1, -0.4, f"node {node}", ha="center", va="top", fontsize=9)
            for card, number in enumerate(numbers):
                color, x = COLORS[_ROLES[number % len(_ROLES)]], left + card + 0.4
                ax.plot([x, middle[number]], [0.75, 2.8], color=color, linewidth=1.4)
                cell(ax, x - 0.33, 0.1, 0.66, 0.65, str(card), color)
        ax.set_title(title, loc="left", fontsize=10)
        ax.set(xlim=(-0.5, width + 0.3), ylim=(-1.2, 5))
        ax.axis("off")
    return fig
