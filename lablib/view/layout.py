"""Pictures of a layout: what sits on which node, what each axis sends, and a rule of thumb with its price.

Every function takes what `lablib.calc` computed, or what a run measured, and returns a figure.

Chapter: book/07_3d_parallelism.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lablib.view.style import COLORS, HATCHES, figure

_ROLES = ("weights", "gradients", "optimizer", "activations", "forward", "backward")
_DASHES = ("-", "--", "-.", ":")


def node_map(panels: Mapping[str, Sequence[tuple[str, int]]], *, columns: int = 4) -> Figure:
    """Draw nodes as boxes, one panel a way to order the axes; the colour is the replica that a node works for.

    Args:
        panels: Title to one (text, colour number) per node, in the order of the nodes.
        columns: Nodes in a row.

    Returns:
        The figure, for `lablib.view.style.show`.
    """
    rows = max(-(-len(nodes) // columns) for nodes in panels.values())
    fig, axes = figure(height=(0.62 * rows + 0.35) * len(panels), nrows=len(panels), squeeze=False)
    for ax, (title, nodes) in zip(axes[:, 0], panels.items(), strict=True):
        for node, (text, color) in enumerate(nodes):
            x, y = node % columns, -(node // columns)
            fill = COLORS[_ROLES[color % len(_ROLES)]]
            ax.add_patch(Rectangle((x + 0.03, y + 0.06), 0.94, 0.86, facecolor=fill))
            ax.text(
                x + 0.5, y + 0.49, f"node {node}\n{text}", ha="center", va="center", fontsize=9, color="white"
            )
        ax.set_title(title, loc="left", fontsize=10)
        ax.set_xlim(0, columns)
        ax.set_ylim(1 - rows, 1)
        ax.axis("off")
    return fig


def axis_bars(values: Mapping[str, Mapping[str, float]], *, xlabel: str, number: str = "{:,.3g}") -> Figure:
    """Draw one number for every axis of every layout, on a log scale, each bar with its value.

    Args:
        values: Name of the layout to {axis: value}; zero is drawn as no bar.
        xlabel: Quantity and unit.
        number: Format of the values.

    Returns:
        The figure, for `lablib.view.style.show`.
    """
    known = list(dict.fromkeys(axis for parts in values.values() for axis in parts))
    fig, ax = figure(height=0.9 + 0.29 * sum(len(parts) + 0.6 for parts in values.values()))
    row, ticks = 0.0, []
    for parts in values.values():
        for axis, value in parts.items():
            color = COLORS[_ROLES[known.index(axis) % len(_ROLES)]]
            if value > 0:
                ax.barh(row, value, 0.8, color=color)
                ax.text(value * 1.08, row, number.format(value), va="center", fontsize=9)
            ticks.append((row, axis))
            row += 1
        row += 0.7
    starts, row = [], 0.0
    for name, parts in values.items():
        starts.append((row - 0.62, name))
        row += len(parts) + 0.7
    for height, name in starts:
        if len(values) > 1:
            ax.text(
                0.0, height, name, transform=ax.get_yaxis_transform(), va="center", fontsize=9, style="italic"
            )
    ax.set_yticks([at for at, _ in ticks], labels=[axis for _, axis in ticks])
    ax.set_ylim(row - 0.9, -1.05)
    ax.set_xscale("log")
    present = [v for parts in values.values() for v in parts.values() if v > 0]
    ax.set_xlim(min(present) / 3, max(present) * 9)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(xlabel)
    return fig


def predicted_and_measured(groups: Mapping[str, tuple[float, float]], *, ylabel: str) -> Figure:
    """Draw two bars for every group of ranks: what was predicted, and what was counted.

    Args:
        groups: Name of the group to (predicted, measured).
        ylabel: Quantity and unit.

    Returns:
        The figure, for `lablib.view.style.show`.
    """
    fig, ax = figure(height=2.9)
    for i, (name, role, hatch) in enumerate(
        (("predicted", "forward", None), ("measured", "communication", HATCHES["communication"]))
    ):
        heights = [pair[i] for pair in groups.values()]
        places = [place + 0.4 * i - 0.2 for place in range(len(groups))]
        ax.bar(
            places, heights, 0.38, color=COLORS[role], hatch=hatch, edgecolor="white", linewidth=0, label=name
        )
    ax.set_xticks(range(len(groups)), labels=list(groups))
    ax.grid(axis="x", visible=False)
    ax.set_ylabel(ylabel)
    fig.legend(loc="outside lower center", ncols=2)
    return fig


def curves(
    x: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    *,
    xlabel: str,
    ylabel: str,
    rule: tuple[float, str] | None = None,
) -> Figure:
    """Draw shares over a number that doubles from tick to tick, with a rule of thumb as a vertical line.

    Args:
        x: Ascending, on a log scale of base 2.
        lines: Name of the line to its shares, 0 to 1.
        xlabel: What x is.
        ylabel: What the shares are of.
        rule: (x, text) of the rule.

    Returns:
        The figure, for `lablib.view.style.show`.
    """
    fig, ax = figure(height=3.2)
    for (name, values), role, dash in zip(lines.items(), _ROLES, _DASHES, strict=False):
        ax.plot(x, [100 * value for value in values], dash, color=COLORS[role], label=name)
    if rule is not None:
        ax.axvline(rule[0], color=COLORS["neutral"], linewidth=1.0, linestyle=(0, (2, 3)))
        ax.text(rule[0] * 1.05, ax.get_ylim()[1] * 0.97, rule[1], va="top", fontsize=9)
    ax.set_xscale("log", base=2)
    ax.set_xticks(x, labels=[f"{value:g}" for value in x])
    ax.set_ylim(bottom=0)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    fig.legend(loc="outside lower center", ncols=2)
    return fig


def scores(clusters: Mapping[str, Mapping[str, float]], *, xlabel: str) -> Figure:
    """Draw, for every cluster, one bar a layout: yours, the published one, the planner's.

    Args:
        clusters: Name of the cluster to {who: value}.
        xlabel: Quantity and unit.

    Returns:
        The figure, for `lablib.view.style.show`.
    """
    who = list(dict.fromkeys(name for bars in clusters.values() for name in bars))
    fig, ax = figure(height=1.3 + 0.27 * sum(len(bars) + 1 for bars in clusters.values()))
    row, ticks = 0.0, []
    for cluster, bars in clusters.items():
        ticks.append((row + (len(bars) - 1) / 2, cluster))
        for name, value in bars.items():
            number = who.index(name)
            first = not any(text == name for text in ax.get_legend_handles_labels()[1])
            ax.barh(
                row, value, 0.85, color=COLORS[_ROLES[number % len(_ROLES)]], label=name if first else None
            )
            ax.text(value, row, f" {value:.2f}", va="center", fontsize=9)
            row += 1
        row += 0.8
    ax.set_yticks([at for at, _ in ticks], labels=[name for _, name in ticks])
    ax.invert_yaxis()
    ax.set_xlim(0, 1.16 * max(value for bars in clusters.values() for value in bars.values()))
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(xlabel)
    fig.legend(loc="outside lower center", ncols=3 if sum(map(len, who)) < 36 else 1)
    return fig
