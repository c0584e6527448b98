"""Pictures of ZeRO: who holds what, what shrinks by how much, what is sent, and two ways to shard a model.

Every function takes numbers that `lablib.calc` computed, or that a run measured, and returns a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from lablib.view.style import COLORS, HATCHES, doubling_axis, figure, name_rows, plot_lines, with_legend

#: Rows of a stage's picture, from top to bottom.
_ROLES = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer state"}
#: One colour for each rank, or layer, where several are told apart.
_HUES = ("weights", "gradients", "optimizer", "activations", "forward", "backward")


def _cells(ax: Axes, left: float, row: float, held: Sequence[bool], color: str, height: float) -> None:
    for place, here in enumerate(held):
        look = {"facecolor": color} if here else {"facecolor": "none", "alpha": 0.45}
        ax.add_patch(Rectangle((left + place, row), 0.9, height, edgecolor=color, linewidth=0.8, **look))


def stage_grid(stages: Mapping[str, Sequence[Mapping[str, Sequence[bool]]]]) -> Figure:
    """Draw which parts of the states each rank holds, one row per stage: full is held, outlined is elsewhere."""
    ranks = len(next(iter(stages.values())))
    parts = len(next(iter(stages.values()))[0]["weights"])
    fig, ax = figure(height=0.75 + 1.0 * len(stages))
    step, tall = parts + 1.2, 4.6
    for line, (name, by_rank) in enumerate(stages.items()):
        top = -line * tall
        ax.text(-0.6, top + 1.45, name, ha="right", va="center", fontsize=10)
        for rank, held in enumerate(by_rank):
            for row, role in enumerate(_ROLES):
                _cells(ax, rank * step, top + 2.2 - 1.1 * row, held[role], COLORS[role], 0.9)
    for rank in range(ranks):
        ax.text(rank * step + parts / 2, 3.6, f"rank {rank}", ha="center", va="bottom", fontsize=10)
    ax.set(xlim=(-5.6, ranks * step - 1), ylim=(-tall * (len(stages) - 1) - 0.4, 4.8))
    ax.axis("off")
    fig.legend(
        handles=[Patch(color=COLORS[role], label=label) for role, label in _ROLES.items()],
        loc="outside lower center",
        ncols=3,
    )
    return fig


def reduction_curves(
    ranks: Sequence[int], factors: Mapping[str, Sequence[float]], limits: Mapping[str, float]
) -> Figure:
    """Draw how many times less memory a rank needs, over the number of ranks, and the limits that lines tend to."""
    fig, ax = figure(height=3.3)
    plot_lines(ax, ranks, factors, _HUES)
    for text, height in limits.items():
        ax.axhline(height, color=COLORS["neutral"], linewidth=1.0, linestyle=(0, (2, 3)))
        ax.text(ranks[-1], height * 1.04, text, ha="right", va="bottom", fontsize=9)
    doubling_axis(ax, ranks[::2])
    ax.set_yscale("log", base=2)
    heights = [2**k for k in range(0, 11, 2)]
    ax.set_yticks(heights, labels=[f"{height}x" for height in heights])
    ax.set(xlabel="ranks", ylabel="states: times less than DDP")
    return with_legend(fig, 3)


def traffic_bars(bars: Mapping[str, Sequence[tuple[str, str, float]]], *, xlabel: str) -> Figure:
    """Draw what a rank sends in a step, one bar per case, its segments the collectives in order."""
    fig, ax = figure(height=0.9 + 0.5 * len(bars))
    for row, segments in enumerate(bars.values()):
        left = 0.0
        for text, role, amount in segments:
            hatch = HATCHES["communication"] if role == "gradients" else None
            ax.barh(row, amount, 0.66, left, color=COLORS[role], edgecolor="white", hatch=hatch)
            plate = {"facecolor": COLORS[role], "edgecolor": "none", "pad": 1.2}
            ax.text(left + amount / 2, row, text, ha="center", va="center", color="white", fontsize=9, bbox=plate)
            left += amount
    name_rows(ax, bars)
    ax.set_xlabel(xlabel)
    return fig


def sharding(layers: Sequence[int], owners: Sequence[int], ranks: int) -> Figure:
    """Draw both ways to shard a model: whole layers with an owner, or a piece of every layer on every rank."""
    fig, axes = figure(height=3.0, ncols=2, sharey=True)
    most = 0.0
    for ax, title in zip(axes, ("a layer has an owner", "every layer is cut"), strict=True):
        for rank in range(ranks):
            bottom = 0.0
            for layer, size in enumerate(layers):
                own = size * (owners[layer] == rank) if ax is axes[0] else size / ranks
                if own:
                    color = COLORS[_HUES[layer % len(_HUES)]]
                    ax.bar(rank, own, 0.8, bottom, color=color, edgecolor="white", linewidth=0.8)
                    bottom += own
            most = max(most, bottom)
        ax.set_title(title, fontsize=10)
        ax.set_xticks(range(ranks), labels=[f"{rank}" for rank in range(ranks)])
        ax.set_xlabel("rank")
        ax.grid(axis="x", visible=False)
    axes[0].set_ylim(0, 1.08 * most)
    axes[0].set_ylabel("parameters held (M)")
    return fig


def stage_times(milliseconds: Mapping[str, Sequence[float]]) -> Figure:
    """Draw measured step times, one row per case: every sample a dot, the median a bar."""
    fig, ax = figure(height=0.9 + 0.45 * len(milliseconds))
    for row, samples in enumerate(milliseconds.values()):
        ordered = sorted(samples)
        ax.barh(row, ordered[len(ordered) // 2], 0.6, color=COLORS["forward"], alpha=0.55)
        ax.plot(samples, [row] * len(samples), "o", color=COLORS["backward"], markersize=4)
    name_rows(ax, milliseconds)
    ax.set_xlabel("one step (ms)")
    return fig
