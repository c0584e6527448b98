"""A map of the kinds of parallelism: what each one cuts, for four ranks.

Chapter: book/01_why_distributed.md
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lablib.view.style import COLORS, figure

#: One colour per rank; the numbers in the boxes say the same for readers who see no hue.
_RANKS = (COLORS["weights"], COLORS["gradients"], COLORS["optimizer"], COLORS["activations"])


def _box(ax: Axes, x: float, y: float, width: float, height: float, rank: int | None) -> None:
    color = COLORS["idle"] if rank is None else _RANKS[rank]
    ax.add_patch(Rectangle((x, y), width, height, facecolor=color, alpha=0.85))
    text = "all" if rank is None else str(rank)
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", color="white", fontsize=9)


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

    Returns:
        The figure, for `lablib.view.style.show`.
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
        ax.set_xlim(-0.25, 4.6)
        ax.set_ylim(-0.75, 2.1)
        ax.set_aspect("equal")
        ax.axis("off")
    return fig
