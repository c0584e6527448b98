"""Pictures of the judged memory calculator: all of its errors, one training step, and a peak by term.

Every function takes numbers that `lablib.calc` computed, or that PyTorch counted, and returns a matplotlib figure.

Chapter: book/memory_calculator.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import log10

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lablib.view.style import COLORS, HATCHES, figure

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
LAYER_OF = {
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
    """Draw one dot for each configuration, by how far it is off; those that are exact stand at the left.

    Args:
        strips: What is compared to the error of each configuration, as shares without sign.
        bounds: The same names to the largest error allowed; 0 for none.
        named: The same names to an error and what is written at it.
        floor: The smallest error other than 0 that has a place of its own.

    Returns:
        The figure, for `lablib.view.style.show`.
    """
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
            ax.annotate(
                f"allowed: {bounds[name]:.0%}",
                (bounds[name], row - 0.66),
                (-4, -1),
                textcoords="offset points",
                ha="right",
                va="top",
                color=COLORS["backward"],
                fontsize=9,
            )
        if named and name in named:
            error, text = named[name]
            ax.annotate(
                text, (max(error, floor), row), (0, -6), textcoords="offset points", ha="right", va="top"
            )
    ax.set_xscale("log")
    ax.set_xlim(floor / 10**3.4, 0.3)
    ax.set_ylim(len(strips) - 0.6, -0.9)
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
    notes: Mapping[str, tuple[str, str]] | None = None,
) -> Figure:
    """Draw what a rank holds at each moment of a step: predicted in layers, measured as dots.

    Args:
        layers: Keys of `LAYERS` to a number for each moment.
        phases: The step's parts in the order of time: name, and how many moments it has.
        measured: The sum that was measured at each moment.
        peak: The moment of the peak, counted from 0, and what is written at it.
        ylabel: Quantity and unit.
        notes: Unused layers' names replaced: key of `LAYERS` to legend text and role.

    Returns:
        The figure, for `lablib.view.style.show`.

    Raises:
        ValueError: If the numbers are not one for each moment.
    """
    moments = sum(count for _, count in phases)
    if any(len(numbers) != moments for numbers in (*layers.values(), measured)):
        raise ValueError(
            f"the phases have {moments} moments: give as many numbers in every layer and measured"
        )
    names = LAYERS | dict(notes or {})
    fig, ax = figure(height=3.9)
    below = [0.0] * moments
    edges = [i - 0.5 for i in range(moments + 1)]
    used = [key for key in names if any(layers.get(key, ()))]
    for key in used:
        above = [low + more for low, more in zip(below, layers[key], strict=True)]
        role = names[key][1]
        ax.stairs(
            above, edges, baseline=below, fill=True, color=COLORS[role], hatch=HATCHES.get(role), linewidth=0
        )
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
    ax.set_ylim(0, 1.22 * top)
    ax.set_xlim(-0.5, moments - 0.5)
    starts = [sum(count for _, count in phases[:i]) for i in range(len(phases) + 1)]
    for start in starts[1:-1]:
        ax.axvline(start - 0.5, color=COLORS["neutral"], linewidth=0.8, linestyle=":")
    ax.set_xticks(
        [(a + b - 1) / 2 for a, b in pairwise(starts)],
        labels=[name for name, _ in phases],
    )
    ax.tick_params(axis="x", length=0)
    ax.grid(axis="x", visible=False)
    ax.set_ylabel(ylabel)
    legend = [
        Patch(facecolor=COLORS[names[key][1]], hatch=HATCHES.get(names[key][1]), label=names[key][0])
        for key in used
    ]
    legend.append(Line2D([], [], marker="o", linestyle="", color=ink, markersize=4, label="measured, in all"))
    fig.legend(handles=legend, loc="outside lower center", ncols=2)
    return fig
