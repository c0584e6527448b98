"""Pictures of expert parallelism: tokens by hand, parameters, bytes by degree, what is dropped, and the experts' load.

Every function takes numbers that `lablib.calc` computed, or that a run measured, and returns a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from lablib.view.style import COLORS, doubling_axis, figure, plot_lines, with_legend

_LINES = ("communication", "forward", "gradients", "activations", "optimizer")


def bytes_by_degree(
    degrees: Sequence[int], panels: Mapping[str, Mapping[str, Sequence[float]]], *, ylabel: str
) -> Figure:
    """Draw what a rank sends over the degree of expert parallelism, one panel a kind of link, one line a way to send."""
    fig, axes = figure(height=2.1 * len(panels) + 0.9, nrows=len(panels), sharex=True, squeeze=False)
    for ax, (title, lines) in zip(axes[:, 0], panels.items(), strict=True):
        plot_lines(ax, degrees, lines, _LINES)
        ax.set_title(title, loc="left", fontsize=10)
        ax.set_ylim(bottom=0)
        ax.set_ylabel(ylabel)
    doubling_axis(axes[-1, 0], degrees)
    axes[-1, 0].set_xlabel("ranks that share the experts, ep")
    return with_legend(fig, 2, handles=axes[0, 0].lines)


def balance_runs(violations: Mapping[str, Sequence[float]], loads: Mapping[str, Sequence[float]]) -> Figure:
    """Draw the busiest expert over the mean, step by step, and below it the load of every expert at the end."""
    fig, (top, bottom) = figure(height=4.8, nrows=2)
    plot_lines(top, range(1, len(next(iter(violations.values()))) + 1), violations, _LINES)
    top.set(xlabel="optimizer steps", ylabel="busiest over mean")
    top.set_ylim(bottom=0)
    experts = len(next(iter(loads.values())))
    width = 0.8 / len(loads)
    for i, (shares, role, hatch) in enumerate(zip(loads.values(), _LINES, ("///", None, "..."), strict=False)):
        places = [expert + (i - (len(loads) - 1) / 2) * width for expert in range(experts)]
        bottom.bar(places, [100 * share for share in shares], width, color=COLORS[role], hatch=hatch, edgecolor="white")
    bottom.axhline(100 / experts, color=COLORS["neutral"], linewidth=1.2)
    bottom.set_xticks(range(experts))
    bottom.grid(axis="x", visible=False)
    bottom.set(xlabel="expert", ylabel="share of choices (%)")
    return with_legend(fig, 3)
