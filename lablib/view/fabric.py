"""Drawings of a network: the messages of a collective round by round, and the switches of a fabric.

Every function takes numbers that `lablib.calc` computed and returns a figure.

Chapter: book/10_communication.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from lablib.view.style import COLORS, figure

#: One colour for each leaf switch.
_HUES = ("communication", "forward", "gradients", "activations", "optimizer", "backward")


def message_rounds(panels: Mapping[str, Sequence[Sequence[tuple[int, int, float]]]], *, ranks: int) -> Figure:
    """Draw every message of an algorithm: time goes to the right, and an arrow is as thick as its message is large.

    Args:
        panels: Title to the rounds, each a list of (source, target, share of the array).
        ranks: n.

    Returns:
        The figure, for `lablib.view.style.show`.
    """
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
            ax.plot(
                range(len(rounds) + 1),
                [-rank] * (len(rounds) + 1),
                "o",
                color=COLORS["neutral"],
                markersize=4,
            )
            ax.text(-0.3, -rank, str(rank), ha="right", va="center", fontsize=10)
        ax.set_title(title, loc="left", fontsize=10)
        ax.set_xlim(-0.7, most + 0.2)
        ax.set_ylim(-ranks + 0.6, 0.4)
    return fig


def fabric(panels: Mapping[str, Sequence[Sequence[int]]]) -> Figure:
    """Draw which leaf switch each network card of each node is wired to; the spine joins the leaves.

    Args:
        panels: Title to `leaf[node][card]`, the number of the leaf switch.

    Returns:
        The figure, for `lablib.view.style.show`.
    """
    fig, axes = figure(height=2.5 * len(panels), nrows=len(panels), squeeze=False)
    for ax, (title, leaf) in zip(axes[:, 0], panels.items(), strict=True):
        cards = len(leaf[0])
        leaves = 1 + max(number for node in leaf for number in node)
        width = len(leaf) * (cards + 1) - 1
        middle = [(number + 0.5) * width / leaves for number in range(leaves)]
        for number, x in enumerate(middle):
            color = COLORS[_HUES[number % len(_HUES)]]
            ax.plot([x, width / 2], [3.4, 4.3], color=COLORS["neutral"], linewidth=1.4)
            ax.add_patch(Rectangle((x - 1.1, 2.8), 2.2, 0.6, facecolor=color))
            ax.text(x, 3.1, f"leaf {number}", ha="center", va="center", color="white", fontsize=9)
        ax.add_patch(Rectangle((width / 2 - 1.6, 4.3), 3.2, 0.6, facecolor=COLORS["neutral"]))
        ax.text(width / 2, 4.6, "spine", ha="center", va="center", color="white", fontsize=9)
        for node, numbers in enumerate(leaf):
            left = node * (cards + 1)
            ax.add_patch(Rectangle((left - 0.1, -0.35), cards, 1.3, facecolor=COLORS["idle"], alpha=0.25))
            ax.text(left + cards / 2 - 0.1, -0.4, f"node {node}", ha="center", va="top", fontsize=9)
            for card, number in enumerate(numbers):
                color, x = COLORS[_HUES[number % len(_HUES)]], left + card + 0.4
                ax.plot([x, middle[number]], [0.75, 2.8], color=color, linewidth=1.4)
                ax.add_patch(Rectangle((x - 0.33, 0.1), 0.66, 0.65, facecolor=color))
                ax.text(x, 0.42, str(card), ha="center", va="center", color="white", fontsize=9)
        ax.set_title(title, loc="left", fontsize=10)
        ax.set_xlim(-0.5, width + 0.3)
        ax.set_ylim(-1.2, 5)
        ax.axis("off")
    return fig
