"""Pictures of scaling: Amdahl's curves and the cost of a compute-optimal run.

Every function takes numbers that `lablib.calc` computed and returns a matplotlib figure.

Chapter: book/01_why_distributed.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from lablib.view.style import COLORS, figure


def speedup_curves(ranks: Sequence[int], speedups: Mapping[str, Sequence[float]]) -> Figure:
    """Draw speedup over ranks, one line per case, each named at its right end.

    Args:
        ranks: Numbers of ranks, ascending.
        speedups: Text at the line's end to the speedup at each number of ranks.

    Returns:
        The figure, for `lablib.view.style.show`.
    """
    fig, ax = figure(height=3.4)
    ax.plot(ranks, ranks, "--", color=COLORS["neutral"], linewidth=1.3)
    ax.annotate("ideal", (ranks[-1], ranks[-1]), (5, 1), textcoords="offset points", fontsize=9)
    roles = ("forward", "optimizer", "gradients", "backward", "activations")
    for role, (text, values) in zip(roles, speedups.items(), strict=False):
        ax.plot(ranks, values, color=COLORS[role])
        ax.annotate(
            text, (ranks[-1], values[-1]), (5, -5), textcoords="offset points", color=COLORS[role], fontsize=9
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ticks = [rank for rank in ranks if rank & (rank - 1) == 0][::2]
    ax.set_xticks(ticks, labels=[f"{rank}" for rank in ticks])
    ax.set_yticks(ticks, labels=[f"{rank}" for rank in ticks])
    ax.set_xlabel("ranks")
    ax.set_ylabel("speedup")
    # Room for the names at the right end.
    ax.set_xlim(1, ranks[-1] * 3.2)
    return fig


def cost_curves(
    params: Sequence[float],
    years: Mapping[str, Sequence[float]],
    marks: Mapping[str, tuple[float, float]],
) -> Figure:
    """Draw the time one device would need over model size, with named models as points.

    Args:
        params: Parameters, ascending.
        years: Name of a rule for the tokens to years on one device.
        marks: Model name to (parameters, years).

    Returns:
        The figure, for `lablib.view.style.show`.
    """
    fig, ax = figure(height=3.4)
    for (name, values), role, dash in zip(years.items(), ("forward", "gradients"), ("-", "--"), strict=False):
        ax.plot(params, values, dash, color=COLORS[role], label=name)
    for name, (size, value) in marks.items():
        ax.plot(size, value, "o", color=COLORS["neutral"], markersize=5)
        ax.annotate(name, (size, value), (-5, 4), textcoords="offset points", ha="right", fontsize=9)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks([1e9, 1e10, 1e11, 1e12], labels=["1B", "10B", "100B", "1T"])
    ax.set_xlabel("parameters")
    ax.set_ylabel("years on one device")
    fig.legend(loc="outside lower center", ncols=1)
    return fig
