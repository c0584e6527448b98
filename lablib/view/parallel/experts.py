"""Pictures of expert parallelism: tokens by hand, parameters, bytes by degree, what is dropped, and the experts' load.

Every function takes numbers that `lablib.calc` computed, or that a run measured, and returns a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from lablib.view.style import COLORS, cell, doubling_axis, figure, plot_lines, with_legend

#: One colour for each expert; the letters say the same for readers who see no hue.
_EXPERTS = (COLORS["weights"], COLORS["gradients"], COLORS["optimizer"], COLORS["activations"])
LETTERS = "ABCD"
_LINES = ("communication", "forward", "gradients", "activations", "optimizer")


def route_by_hand(chosen: Sequence[Sequence[int]], *, ranks: int, experts: int) -> Figure:
    """Draw tokens on their ranks, their copies at the experts, and the tokens again.

    Args:
        chosen: The experts of every token, in order; the first tokens are those of rank 0.
    """
    each, held = len(chosen) // ranks, experts // ranks
    copies = [[token for token, picks in enumerate(chosen) if expert in picks] for expert in range(experts)]
    arrived = [sum(len(copies[e]) for e in range(r * held, (r + 1) * held)) for r in range(ranks)]
    wide = max(*arrived, len(chosen[0]) * each) + 0.3 * held
    fig, axes = figure(height=2.3 * ranks + 0.2, nrows=ranks)
    for rank, ax in enumerate(axes):
        for i in range(each):
            token = rank * each + i
            for j, expert in enumerate(chosen[token]):
                cell(ax, 2 * i + j + 0.04, 4.04, 0.92, 0.92, LETTERS[expert], _EXPERTS[expert])
            for row in (5, 0):
                cell(ax, 2 * i + 0.04, row + 0.04, 1.92, 0.92, str(token), COLORS["idle"])
        x = 0.0
        for expert in range(rank * held, (rank + 1) * held):
            for token in copies[expert]:
                cell(ax, x + 0.04, 2.04, 0.92, 0.92, str(token), _EXPERTS[expert])
                x += 1
            x += 0.3
        holds = " and ".join(LETTERS[rank * held : (rank + 1) * held])
        for y, text in ((5.5, "tokens"), (4.5, "choose"), (2.5, f"{holds} get"), (0.5, "sums")):
            ax.text(-0.3, y, text, ha="right", va="center", fontsize=9)
        ax.text(0, 3.45, "dispatch", va="center", fontsize=9, style="italic")
        ax.text(0, 1.45, "combine", va="center", fontsize=9, style="italic")
        ax.set_title(f"rank {rank}: {arrived[rank]} copies to compute", loc="left", fontsize=10)
        ax.set(xlim=(-2.6, wide), ylim=(-0.1, 6.1))
        ax.axis("off")
    return fig


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
