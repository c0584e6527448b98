"""Pictures of tensor parallelism: a product by hand, half a layer in three variants, heads, links and memory.

Every function takes numbers that `lablib.calc` computed, or that a run measured, and returns a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lablib.view.style import COLORS, HATCHES, cell, doubling_axis, figure, plot_lines, with_legend

#: One colour per rank; numbers beside them say the same without hue.
_RANKS = (COLORS["weights"], COLORS["gradients"], COLORS["optimizer"], COLORS["activations"])
_LINES = ("communication", "forward", "gradients", "activations")

Matrix = Sequence[Sequence[float]]


def _matrix(ax: Axes, x: float, values: Matrix, name: str, colors: Sequence[Sequence[str]], top: float = 0) -> float:
    """Draw a matrix with its upper left corner at (x, top) and return its right end."""
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            cell(ax, x + j, top - i - 1, 0.94, 0.94, f"{value:g}", colors[i][j])
    ax.text(x + len(values[0]) / 2, top + 0.2, name, ha="center", va="bottom", fontsize=9)
    return x + len(values[0])


def column_then_row(x: Matrix, up: Matrix, inner: Matrix, down: Matrix, partial: Sequence[Matrix]) -> Figure:
    """Draw a column-parallel product, what it leaves and a row-parallel product, on the ranks that own them."""
    ranks, width = len(partial), len(up[0])
    owner = [_RANKS[j * ranks // width] for j in range(width)]
    fig, ax = figure(height=3.1)
    end = _matrix(ax, 0, x, "x", [[COLORS["idle"]] * len(x[0])] * len(x))
    end = _matrix(ax, end + 0.7, up, "up", [owner] * len(up))
    end = _matrix(ax, end + 0.7, inner, "relu(x up)", [owner] * len(inner))
    _matrix(ax, end + 0.7, down, "down", [[owner[i]] * len(down[0]) for i in range(width)])
    left = 1.2
    for rank, values in enumerate(partial):
        end = _matrix(ax, left, values, f"rank {rank} adds", [[_RANKS[rank]] * len(row) for row in values], -5.6)
        ax.text(end + 0.35, -5.6 - len(values) / 2, "+" if rank + 1 < ranks else "=", ha="center", va="center")
        left = end + 0.8
    total = [[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*partial, strict=True)]
    _matrix(ax, left, total, "one all-reduce", [[COLORS["idle"]] * len(total[0])] * len(total), -5.6)
    ax.set(xlim=(-0.2, len(x[0]) + 2 * width + len(down[0]) + 2.3), ylim=(-5.8 - len(total), 1.2))
    ax.set_aspect("equal")
    ax.axis("off")
    return fig


def half_layers(variants: Mapping[str, Sequence[tuple[str, str]]], *, ranks: int = 2) -> Figure:
    """Draw how half a layer lies on the ranks, one panel per variant, forward from left to right."""
    look = {"whole": COLORS["idle"], "tokens": COLORS["optimizer"], "inner": COLORS["weights"]}
    fig, axes = figure(height=1.35 * len(variants) + 0.5, nrows=len(variants), squeeze=False)
    for ax, (title, steps) in zip(axes[:, 0], variants.items(), strict=True):
        for i, (name, kind) in enumerate(steps):
            if kind == "communication":
                hatched = {"edgecolor": "white", "hatch": HATCHES["communication"]}
                ax.add_patch(Rectangle((i + 0.08, 0), 0.84, ranks - 0.1, facecolor=COLORS[kind], **hatched))
                plate = {"facecolor": COLORS[kind], "edgecolor": "none", "pad": 3.0}
                middle = (ranks - 0.1) / 2
                ax.text(i + 0.5, middle, name, ha="center", va="center", fontsize=9, color="white", bbox=plate)
                continue
            for rank in range(ranks):
                cell(ax, i + 0.03, rank, 0.94, 0.9, name, look[kind])
        for rank in range(ranks):
            ax.text(-0.08, ranks - rank - 0.55, f"{rank}", ha="right", va="center", fontsize=9)
        ax.set_title(title, loc="left", fontsize=10)
        ax.set(xlim=(-0.3, len(steps)), ylim=(-0.05, ranks))
        ax.axis("off")
    names = {"whole": "the same on every rank", "tokens": "this rank's tokens", "inner": "this rank's columns"}
    boxes = [Rectangle((0, 0), 1, 1, facecolor=look[kind]) for kind in names]
    fig.legend(boxes, names.values(), loc="outside lower center", ncols=2)
    return fig


def heads_on_ranks(layouts: Mapping[str, Sequence[tuple[Sequence[int], Sequence[int]]]]) -> Figure:
    """Draw which query heads and which key and value heads every rank holds, one panel per degree."""
    fig, axes = figure(height=1.0 * len(layouts) + 0.4, nrows=len(layouts), squeeze=False)
    for ax, (title, ranks) in zip(axes[:, 0], layouts.items(), strict=True):
        heads = sum(len(queries) for queries, _ in ranks)
        at = 0.0
        for rank, (queries, keys) in enumerate(ranks):
            width = heads / len(ranks)
            for row, (name, held, role) in enumerate((("k", keys, "gradients"), ("q", queries, "weights"))):
                for i, head in enumerate(held):
                    each = width / len(held)
                    cell(ax, at + i * each + 0.04, row, each - 0.08, 0.88, f"{name}{head}", COLORS[role])
            at += width
            if rank + 1 < len(ranks):
                ax.plot([at, at], [-0.1, 2.0], color=COLORS["neutral"], linewidth=1.6)
        ax.set_title(title, loc="left", fontsize=10)
        ax.set(xlim=(-0.1, heads + 0.1), ylim=(-0.15, 2.05))
        ax.axis("off")
    return fig


def share_curves(degrees: Sequence[int], shares: Mapping[str, Sequence[float]], *, domain: int) -> Figure:
    """Draw the share of communication in a layer over the tensor parallel degree, one line per link."""
    fig, ax = figure(height=3.4)
    plot_lines(ax, degrees, shares, _LINES, scale=100)
    ax.axvline(domain, color=COLORS["neutral"], linewidth=1.2)
    ax.text(domain * 1.06, 97, "end of the node", va="top", fontsize=9)
    doubling_axis(ax, degrees)
    ax.set(ylim=(0, 100), xlabel="tensor parallel degree", ylabel="communication in a layer (%)")
    return with_legend(fig, 1)


def kept_bars(
    labels: Sequence[str], parts: Mapping[str, Sequence[float]], *, unit: str, measured: Sequence[float] = ()
) -> Figure:
    """Draw what a rank keeps for backward as stacked bars, with a mark where it was measured."""
    roles = ("activations", "weights", "gradients", "optimizer")
    fig, ax = figure(height=0.9 + 0.32 * len(labels))
    rows = range(len(labels) - 1, -1, -1)
    left = [0.0] * len(labels)
    for (name, values), role in zip(parts.items(), roles, strict=False):
        ax.barh(rows, values, 0.7, left=left, color=COLORS[role], edgecolor="white", linewidth=0.5, label=name)
        left = [a + b for a, b in zip(left, values, strict=True)]
    if measured:
        ax.plot(measured, rows, "D", color=COLORS["neutral"], markersize=6, label="measured")
    ax.set_yticks(rows, labels=labels)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(f"kept on one rank ({unit})")
    return with_legend(fig, 2)


def loss_gap(steps: Sequence[int], lines: Mapping[str, Sequence[float]], *, ylabel: str) -> Figure:
    """Draw losses, or differences of losses, over optimizer steps."""
    fig, ax = figure(height=3.0)
    plot_lines(ax, steps, lines, _LINES)
    ax.set(xlabel="optimizer steps", ylabel=ylabel)
    return with_legend(fig, 1)
