"""Pictures of context parallelism: a causal mask cut among ranks, a ring over time, memory.

Every function takes numbers that `lablib.calc` computed and returns a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lablib.view.style import COLORS, doubling_axis, figure, plot_lines, with_legend

#: One colour a rank, or a line; numbers beside the rows say the same without hue.
_LINES = ("weights", "gradients", "optimizer", "activations")


def mask_cut(orders: Mapping[str, tuple[Sequence[int], Sequence[int]]]) -> Figure:
    """Draw a causal mask, one panel an order of the tokens, each row in the colour of the rank that computes it.

    Args:
        orders: By name, the rank of every token and the scores that every rank computes.
    """
    fig, axes = figure(height=2.2, ncols=len(orders), squeeze=False)
    for ax, (name, (owners, scores)) in zip(axes[0], orders.items(), strict=True):
        tokens = len(owners)
        for query, rank in enumerate(owners):
            for key in range(tokens):
                color = COLORS[_LINES[rank]] if key <= query else "none"
                corner = (key + 0.04, tokens - query - 0.96)
                ax.add_patch(Rectangle(corner, 0.92, 0.92, facecolor=color))
            ax.text(-0.25, tokens - query - 0.5, str(rank), ha="right", va="center", fontsize=9)
        ax.set_title(name, fontsize=10)
        ax.text(tokens / 2, -0.7, "  ".join(map(str, scores)), ha="center", va="center", fontsize=10)
        ax.set(xlim=(-1.0, tokens), ylim=(-1.2, tokens))
        ax.set_aspect("equal")
        ax.axis("off")
    return fig


def memory_by_length(
    lengths: Sequence[int], lines: Mapping[str, Sequence[float]], *, limit: tuple[float, str], unit: str
) -> Figure:
    """Draw what a GPU holds over the length of a sequence, both logarithmic, with the GPU's size as a line.

    Args:
        limit: Height of the line, in the unit of the axis, and its name.
    """
    fig, ax = figure(height=3.5)
    plot_lines(ax, lengths, lines, _LINES, marker="o", markersize=4)
    ax.axhline(limit[0], color=COLORS["neutral"], linewidth=1.2)
    ax.annotate(limit[1], (lengths[0], limit[0]), (0, 3), textcoords="offset points", fontsize=9)
    doubling_axis(ax, lengths, [f"{length // 1024}K" for length in lengths])
    ax.set_yscale("log")
    ax.set(xlabel="tokens of the sequence", ylabel=f"{unit} on a GPU")
    return with_legend(fig, 2)
