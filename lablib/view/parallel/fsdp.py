"""Pictures of FSDP: who holds which rows, what is gathered when, and what the size of a unit decides.

Every function takes numbers that `lablib.calc` computed, or that a run measured, and returns a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lablib.view.style import COLORS, DASHES, HATCHES, cell, figure, with_legend

#: One colour for each case that shares a picture with others.
_HUES = ("weights", "gradients", "optimizer", "activations", "communication")

#: One tensor, one colour, in the pictures of cells.
_TENSORS = ("weights", "gradients", "optimizer", "activations")


def layouts(pictures: Mapping[str, Sequence[Sequence[tuple[str, int | None]]]]) -> Figure:
    """Draw what each rank holds, a cell for a number, one picture for each way to cut."""
    ranks = max(len(rows) for rows in pictures.values())
    fig, axes = figure(height=0.7 + 0.36 * ranks, ncols=len(pictures), squeeze=False)
    most = max(len(row) for rows in pictures.values() for row in rows)
    for ax, (title, rows) in zip(axes[0], pictures.items(), strict=True):
        for rank, cells in enumerate(rows):
            ax.text(-0.25, rank + 0.45, f"rank {rank}", ha="right", va="center", fontsize=9)
            for place, (text, tensor) in enumerate(cells):
                color = COLORS["idle"] if tensor is None else COLORS[_TENSORS[tensor % len(_TENSORS)]]
                look = {"facecolor": "none", "hatch": HATCHES["idle"], "linewidth": 0.8}
                look = look if tensor is None else {"facecolor": color}
                ax.add_patch(Rectangle((place, rank), 0.92, 0.9, edgecolor=color, **look))
                if text:
                    ax.text(place + 0.46, rank + 0.45, text, ha="center", va="center", color="white", fontsize=9)
        ax.set(xlim=(-1.6, most), ylim=(ranks, -0.1))
        ax.set_title(title, fontsize=10)
        ax.axis("off")
    return fig


def gathered(
    curves: Mapping[str, Sequence[tuple[float, float]]], *, unit: str, xlabel: str, what: str = "gathered"
) -> Figure:
    """Draw what a rank holds unsharded over a step, one stepped line per case."""
    fig, ax = figure(height=3.2)
    for (name, points), role, dash in zip(curves.items(), _HUES, DASHES, strict=False):
        times, amounts = zip(*points, strict=True)
        ax.step(times, amounts, where="post", color=COLORS[role], linestyle=dash, label=name, linewidth=1.8)
    ax.set_ylim(bottom=0)
    ax.set_xlim(left=0)
    ax.set(xlabel=xlabel, ylabel=f"{what} ({unit})")
    return with_legend(fig, 2)


def mesh(shards: Sequence[Sequence[int]], *, rows: str, columns: str) -> Figure:
    """Draw a 2-d mesh of ranks: those of a row share the model, those of a column hold the same shard."""
    wide, tall = len(shards[0]), len(shards)
    fig, ax = figure(height=1.0 + 0.62 * tall)
    for y, row in enumerate(shards):
        for x, shard in enumerate(row):
            color = COLORS[_TENSORS[shard % len(_TENSORS)]]
            cell(ax, x + 0.05, y + 0.1, 0.9, 0.8, f"rank {y * wide + x}\nshard {shard}", color)
    ax.text(wide / 2, -0.12, rows, ha="center", va="bottom", fontsize=10)
    ax.text(-0.1, tall / 2, columns, ha="right", va="center", rotation=90, fontsize=10)
    ax.set(xlim=(-0.55, wide), ylim=(tall, -0.55))
    ax.axis("off")
    return fig
