"""Pictures of data parallelism: when backward hides an all-reduce, and what is left of it.

Every function takes numbers that `lablib.calc` computed, or that a run measured, and returns a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from lablib.view.style import COLORS, DASHES, HATCHES, figure, plot_lines, with_legend

_LINES = ("communication", "forward", "gradients", "activations")


def hiding_curves(tokens: Sequence[float], ratios: Mapping[str, Sequence[float]]) -> Figure:
    """Draw communication over backward time, over the tokens of one rank, one line per link."""
    fig, ax = figure(height=3.8)
    plot_lines(ax, tokens, ratios, _LINES)
    ax.axhline(1, color=COLORS["neutral"], linewidth=1.2)
    ax.set(xscale="log", yscale="log")
    ax.text(0.98, 0.95, "part of it is exposed", ha="right", va="top", fontsize=9, transform=ax.transAxes)
    ax.text(0.02, 0.05, "all of it can hide", ha="left", va="bottom", fontsize=9, transform=ax.transAxes)
    ax.set(xlabel="tokens of one rank in one backward pass", ylabel="all-reduce / backward")
    return with_legend(fig, 1)


def bucket_curve(mib: Sequence[float], exposed: Mapping[str, Sequence[float]], *, default: float) -> Figure:
    """Draw the exposed communication of one step over the bucket size."""
    fig, ax = figure(height=3.3)
    plot_lines(ax, mib, exposed, _LINES, scale=1e3)
    ax.axvline(default, color=COLORS["neutral"], linewidth=1.2)
    ax.set(xscale="log", yscale="log")
    ax.text(default * 1.15, ax.get_ylim()[1] * 0.8, f"{default:g} MiB", va="top", fontsize=9)
    ticks = [size for size in (0.1, 1, 10, 100, 1000) if mib[0] <= size <= mib[-1]]
    ax.set_xticks(ticks, labels=[f"{size:g}" for size in ticks])
    ax.set(xlabel="bucket size (MiB)", ylabel="exposed communication (ms)")
    return with_legend(fig, 1)


def step_split(
    labels: Sequence[str], compute: Sequence[float], exposed: Sequence[float], predicted: Sequence[float]
) -> Figure:
    """Draw measured steps as compute plus exposed communication, with a mark where each was predicted."""
    fig, ax = figure(height=0.9 + 0.34 * len(labels))
    rows = range(len(labels) - 1, -1, -1)
    compute_ms, exposed_ms = [1e3 * x for x in compute], [max(1e3 * x, 0) for x in exposed]
    ax.barh(rows, compute_ms, 0.7, color=COLORS["backward"], label="compute")
    look = {"color": COLORS["communication"], "hatch": HATCHES["communication"], "edgecolor": "white"}
    ax.barh(rows, exposed_ms, 0.7, left=compute_ms, label="exposed communication", **look)
    ax.plot([1e3 * x for x in predicted], rows, "D", color=COLORS["neutral"], markersize=6, label="predicted step")
    ax.set_yticks(rows, labels=labels)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("one step (ms)")
    return with_legend(fig, 3)


def loss_curves(losses: Mapping[str, Sequence[float]]) -> Figure:
    """Draw training losses over steps; later lines are thinner, so that lines that agree both show."""
    fig, ax = figure(height=2.9)
    for (name, values), role, dash in zip(losses.items(), _LINES, DASHES, strict=False):
        look = {"linewidth": 6, "alpha": 0.45} if dash == "-" else {"linewidth": 2}
        ax.plot(range(1, len(values) + 1), values, linestyle=dash, color=COLORS[role], label=name, **look)
    ax.set(xlabel="optimizer step", ylabel="loss of the global batch (nats)")
    return with_legend(fig, 2)
