"""Pictures of a layout: a mesh in its nodes, what each axis sends, the parts of a step, and what each parallelism cuts.

Every function takes numbers that `lablib.calc` computed, or that a run measured, and returns a figure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import exp, log

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from lablib.view.style import COLORS, HATCHES, cell, doubling_axis, figure, name_rows, plot_lines, with_legend

#: One colour per rank; the numbers in the boxes say the same for readers who see no hue.
_RANKS = (COLORS["weights"], COLORS["gradients"], COLORS["optimizer"], COLORS["activations"])


def _box(ax: Axes, x: float, y: float, width: float, height: float, rank: int | None) -> None:
    color = COLORS["idle"] if rank is None else _RANKS[rank]
    cell(ax, x, y, width, height, "all" if rank is None else str(rank), color)


def _grid(ax: Axes, x: float, rows: list[int | None], columns: list[int | None], label: str) -> None:
    """Draw a 2 by 2 square cut into `rows` or `columns`, one entry a piece; None means every rank."""
    gap = 0.06
    if len(rows) > 1:
        height = 2 / len(rows)
        for i, rank in enumerate(rows):
            _box(ax, x, 2 - (i + 1) * height + gap / 2, 2, height - gap, rank)
    else:
        width = 2 / len(columns)
        for i, rank in enumerate(columns):
            _box(ax, x + i * width + gap / 2, 0, width - gap, 2, rank)
    ax.text(x + 1, -0.42, label, ha="center", va="center", fontsize=9)


def parallelism_map() -> Figure:
    """Draw, for six kinds of parallelism, which rank holds which piece of the tokens and of the model.

    Tokens are drawn as sequences (rows) of positions (columns).
    The model is drawn as layers (rows), each as wide as the hidden size (columns).
    A piece marked "all" is held by every rank.
    """
    every: list[int | None] = [None]
    ranks: list[int | None] = [0, 1, 2, 3]
    cuts = {
        "data": ((ranks, every), (every, every)),
        "tensor": ((every, every), (every, ranks)),
        "pipeline": ((every, every), (ranks, every)),
        "sequence": ((every, ranks), (every, ranks)),
        "context": ((every, ranks), (every, every)),
        "expert": ((ranks, every), (every, ranks)),
    }
    notes = {
        "sequence": "(with tensor)",
        "expert": "(experts only)",
        "pipeline": "(by depth)",
        "tensor": "(inside a layer)",
        "data": "(by sequence)",
        "context": "(by position)",
    }
    fig, axes = figure(width=5.2, height=5.4, nrows=3, ncols=2)
    for ax, (kind, (tokens, model)) in zip(axes.flat, cuts.items(), strict=True):
        _grid(ax, 0.0, *tokens, label="tokens")
        _grid(ax, 2.35, *model, label="model")
        ax.set_title(f"{kind} {notes[kind]}", fontsize=10)
        ax.set(xlim=(-0.25, 4.6), ylim=(-0.75, 2.1))
        ax.set_aspect("equal")
        ax.axis("off")
    return fig


_ROLES = ("weights", "gradients", "optimizer", "activations", "forward", "backward")


def axis_bars(values: Mapping[str, Mapping[str, float]], *, xlabel: str, number: str = "{:,.3g}") -> Figure:
    """Draw one number for every axis of every layout, on a log scale, each bar with its value."""
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
            ax.text(0.0, height, name, transform=ax.get_yaxis_transform(), va="center", fontsize=9, style="italic")
    ax.set_yticks([at for at, _ in ticks], labels=[axis for _, axis in ticks])
    ax.set(ylim=(row - 0.9, -1.05), xscale="log")
    present = [v for parts in values.values() for v in parts.values() if v > 0]
    ax.set_xlim(min(present) / 3, max(present) * 9)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(xlabel)
    return fig


def predicted_and_measured(groups: Mapping[str, tuple[float, float]], *, ylabel: str) -> Figure:
    """Draw two bars for every group of ranks: what was predicted, and what was counted."""
    fig, ax = figure(height=2.9)
    for i, (name, role, hatch) in enumerate(
        (("predicted", "forward", None), ("measured", "communication", HATCHES["communication"]))
    ):
        heights = [pair[i] for pair in groups.values()]
        places = [place + 0.4 * i - 0.2 for place in range(len(groups))]
        ax.bar(places, heights, 0.38, color=COLORS[role], hatch=hatch, edgecolor="white", linewidth=0, label=name)
    ax.set_xticks(range(len(groups)), labels=list(groups))
    ax.grid(axis="x", visible=False)
    ax.set_ylabel(ylabel)
    return with_legend(fig, 2)


def curves(
    x: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    *,
    xlabel: str,
    ylabel: str,
    rule: tuple[float, str] | None = None,
) -> Figure:
    """Draw shares over a number that doubles from tick to tick, with a rule of thumb as a vertical line."""
    fig, ax = figure(height=3.2)
    plot_lines(ax, x, lines, _ROLES, scale=100)
    if rule is not None:
        ax.axvline(rule[0], color=COLORS["neutral"], linewidth=1.0, linestyle=(0, (2, 3)))
        ax.text(rule[0] * 1.05, ax.get_ylim()[1] * 0.97, rule[1], va="top", fontsize=9)
    doubling_axis(ax, x)
    ax.set_ylim(bottom=0)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    return with_legend(fig, 2)


def scores(clusters: Mapping[str, Mapping[str, float]], *, xlabel: str) -> Figure:
    """Draw, for every cluster, one bar a layout: yours, the published one, the planner's."""
    who = list(dict.fromkeys(name for bars in clusters.values() for name in bars))
    fig, ax = figure(height=1.3 + 0.27 * sum(len(bars) + 1 for bars in clusters.values()))
    row, ticks = 0.0, []
    for cluster, bars in clusters.items():
        ticks.append((row + (len(bars) - 1) / 2, cluster))
        for name, value in bars.items():
            number = who.index(name)
            first = not any(text == name for text in ax.get_legend_handles_labels()[1])
            ax.barh(row, value, 0.85, color=COLORS[_ROLES[number % len(_ROLES)]], label=name if first else None)
            ax.text(value, row, f" {value:.2f}", va="center", fontsize=9)
            row += 1
        row += 0.8
    ax.set_yticks([at for at, _ in ticks], labels=[name for _, name in ticks])
    ax.invert_yaxis()
    ax.set_xlim(0, 1.16 * max(value for bars in clusters.values() for value in bars.values()))
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(xlabel)
    return with_legend(fig, 3 if sum(map(len, who)) < 36 else 1)


#: Parts of a step and how they are drawn.
_PARTS = {
    "matmul": ("matrix products", COLORS["forward"], None),
    "attention": ("attention", COLORS["activations"], None),
    "memory": ("memory-bound kernels", COLORS["optimizer"], None),
    "latency": ("launches and latency", COLORS["weights"], None),
    "tp": ("tensor parallelism", COLORS["communication"], HATCHES["communication"]),
    "cp": ("context parallelism", COLORS["gradients"], HATCHES["communication"]),
    "ep": ("expert parallelism", COLORS["activations"], HATCHES["communication"]),
    "pp": ("pipeline sends", COLORS["weights"], HATCHES["communication"]),
    "dp": ("exposed data parallelism", COLORS["backward"], HATCHES["communication"]),
    "bubble": ("bubble", COLORS["idle"], HATCHES["idle"]),
    "optimizer": ("optimizer", COLORS["neutral"], None),
    "step": ("waiting for the slowest", COLORS["backward"], None),
}


def mesh_figure(groups: Mapping[str, Sequence[Sequence[int]]], *, gpus_per_node: int) -> Figure:
    """Draw all ranks once for every axis, coloured and lettered by the group they belong to; a row is a node."""
    ranks = sum(len(group) for group in next(iter(groups.values())))
    rows = -(-ranks // gpus_per_node)
    fig, axes = figure(height=(0.42 * rows + 0.45) * len(groups), nrows=len(groups), squeeze=False)
    for ax, (axis, found) in zip(axes[:, 0], groups.items(), strict=True):
        for number, group in enumerate(found):
            for rank in group:
                _rank_cell(ax, rank, number, gpus_per_node)
        for node in range(rows):
            ax.text(-0.15, -node + 0.45, f"node {node}", ha="right", va="center", fontsize=9)
        ax.set_title(f"{axis}: {len(found)} groups of {len(found[0])}", loc="left", fontsize=10)
        ax.set(xlim=(-1.3, min(ranks, gpus_per_node)), ylim=(-rows + 0.95, 1.0))
        ax.axis("off")
    return fig


def _rank_cell(ax: Axes, rank: int, group: int, gpus_per_node: int) -> None:
    x, y = rank % gpus_per_node, -(rank // gpus_per_node)
    letter = chr(ord("A") + group % 26) + (str(group // 26) if group >= 26 else "")
    cell(ax, x + 0.03, y + 0.05, 0.94, 0.86, f"{rank} {letter}", _RANKS[group % len(_RANKS)])


def step_parts(steps: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw predicted steps as stacked bars, one a layout, the parts in their usual order."""
    fig, ax = figure(height=0.5 * len(steps) + 1.9)
    for row, parts in enumerate(steps.values()):
        start = 0.0
        for part, (name, color, hatch) in _PARTS.items():
            width = parts.get(part, 0.0)
            if width:
                first = not any(earlier.get(part) for earlier in list(steps.values())[:row])
                ax.barh(
                    row, width, left=start, color=color, hatch=hatch, edgecolor="white", linewidth=0,
                    label=name if first else None,
                )  # fmt: skip
            start += width
    ax.set_yticks(range(len(steps)), list(steps))
    ax.invert_yaxis()
    ax.set_xlabel("predicted seconds of a step")
    return with_legend(fig, 2)


def predicted_over_measured(strips: Mapping[str, Sequence[float]], *, unseen: Collection[str]) -> Figure:
    """Draw one dot for every measured run, a strip a source, on bands of 10 and 25 percent; those of `unseen` stand out."""
    fig, ax = figure(height=0.31 * len(strips) + 1.2)
    for share in (0.25, 0.1):
        ax.axvspan(1 - share, 1 + share, color=COLORS["neutral"], alpha=0.2, linewidth=0)
    ax.axvline(1, color=COLORS["neutral"], linewidth=0.9)
    for row, (source, ratios) in enumerate(strips.items()):
        columns: dict[int, int] = {}
        at = []
        for ratio in sorted(ratios):
            column = round(80 * log(ratio))  # dots that have room beside each other
            height = columns[column] = columns.get(column, -1) + 1
            at.append((exp(column / 80), (height + 1) // 2 * (-1) ** height))  # 0, -1, 1, -2, 2, ...
        step = 0.4 / max(4, *(abs(height) for _, height in at))
        xs, ys = zip(*((x, row + step * height) for x, height in at), strict=True)
        new = source in unseen
        look = {"marker": "D", "color": COLORS["backward"]} if new else {"marker": "o", "color": COLORS["forward"]}
        label = "a source that nothing is fitted to" if new else "by constants fitted to the other sources"
        first = label not in ax.get_legend_handles_labels()[1]
        ax.plot(xs, ys, linestyle="", markersize=2.6, label=label if first else None, **look)
    name_rows(ax, list(strips))
    ax.set(xscale="log", ylim=(len(strips) - 0.4, -0.6))
    ax.xaxis.set_minor_locator(NullLocator())
    ticks = (0.5, 0.6, 0.75, 0.9, 1, 1.1, 1.25, 1.5)
    ax.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    ax.set_xlabel("predicted over measured seconds")
    return with_legend(fig, 1)
