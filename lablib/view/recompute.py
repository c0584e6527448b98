"""Pictures of recomputation: what a block keeps, what is kept when, which blocks run again, and the frontier.

Every function takes numbers that `lablib.calc` computed, or that a run measured, and returns a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lablib.view.style import COLORS, DASHES, doubling_axis, figure, name_rows, note, plot_lines, with_legend

#: Which colour a term of `layer_activations` has, and what the legend calls it.
TERM_COLORS = {
    "norms": ("neutral", "norms"),
    "attention": ("activations", "attention"),
    "scores": ("backward", "scores"),
    "mlp": ("forward", "MLP"),
}
#: What can become of a block's tensors: colour, fill and words.
FATE_COLORS = {
    "kept": ("activations", 1.0, "kept"),
    "again": ("backward", 0.45, "computed again"),
    "host": ("communication", 0.8, "on the host"),
}
_LINES = ("activations", "backward", "forward", "optimizer", "gradients")


def tensor_bars(tensors: Sequence[tuple[str, str, float]], *, xlabel: str, number: str = "{:.0f}") -> Figure:
    """Draw what one block keeps, one bar a tensor, from the first operator to the last."""
    fig, ax = figure(height=1.0 + 0.29 * len(tensors))
    for row, (_, kind, size) in enumerate(tensors):
        ax.barh(row, size, 0.7, color=COLORS[TERM_COLORS[kind][0]])
        note(ax, number.format(size), (size, row), (3, 0), va="center")
    name_rows(ax, [name for name, _, _ in tensors])
    ax.set(xlim=(0, 1.15 * max(size for _, _, size in tensors)), xlabel=xlabel)
    used = {kind for _, kind, _ in tensors}
    handles = [Patch(color=COLORS[role], label=label) for kind, (role, label) in TERM_COLORS.items() if kind in used]
    return with_legend(fig, 4, handles=handles)


def kept_over_time(
    lines: Mapping[str, Sequence[float]], *, forward: int, ylabel: str, xlabel: str = "blocks run"
) -> Figure:
    """Draw how much is kept after each block's run, forward and then backward; runs again count as runs."""
    fig, ax = figure(height=3.5)
    for (name, values), role, dash in zip(lines.items(), _LINES, DASHES, strict=False):
        ax.step(range(len(values)), values, where="post", color=COLORS[role], linestyle=dash, label=name)
    ax.axvline(forward, color=COLORS["neutral"], linewidth=1.0, linestyle=(0, (2, 3)))
    top = 1.2 * max(max(values) for values in lines.values())
    for text, side in (("forward ", "right"), (" backward", "left")):
        ax.text(forward, top, text, ha=side, va="top", fontsize=9)
    ax.set(ylim=(0, top), xlim=(0, None), xlabel=xlabel, ylabel=ylabel)
    return with_legend(fig, min(3, len(lines)))


def frontier_plot(
    points: Sequence[tuple[str, float, float, bool, bool]],
    *,
    xlabel: str,
    ylabel: str,
    measured: Sequence[tuple[float, float]] = (),
    places: Mapping[str, tuple[int, int]] | None = None,
) -> Figure:
    """Draw strategies on the plane of bytes saved and FLOPs paid; hollow where another one is better.

    Args:
        points: (name, bytes saved, extra FLOPs, uses the host, is beaten) of each strategy.
    """
    fig, ax = figure(height=3.9)
    for name, saved, paid, host, beaten in points:
        color = COLORS["communication" if host else "activations"]
        ax.plot(saved, paid, "s" if host else "o", color=color, markersize=8,
                markerfacecolor="none" if beaten else color, markeredgewidth=1.6)  # fmt: skip
        right, above = (places or {}).get(name, (8, 0))
        far = abs(above) > 16 or abs(right) > 16
        note(
            ax,
            name,
            (saved, paid),
            (right, above),
            ha="left" if right > 4 else "right" if right < -4 else "center",
            va="center",
            arrowprops={"arrowstyle": "-", "color": COLORS["neutral"], "linewidth": 0.7, "shrinkB": 4} if far else None,
        )
    if measured:
        ax.plot(*zip(*measured, strict=True), "+", color=COLORS["backward"], markersize=13, markeredgewidth=1.6)
    best = sorted((saved, paid) for _, saved, paid, host, beaten in points if not (host or beaten))
    ax.plot(*zip(*best, strict=True), "--", color=COLORS["activations"], linewidth=1.0, zorder=0)
    most = max(paid for _, _, paid, _, _ in points)
    ax.set_ylim(-0.12 * most, 1.65 * most)
    ax.margins(x=0.12)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    signs = [
        ("o", "activations", None, "device alone"),
        ("s", "communication", None, "needs the host"),
        ("o", "activations", "none", "another one is better"),
    ]
    handles = [
        Line2D(
            [], [], marker=marker, linestyle="", color=COLORS[role], markerfacecolor=face or COLORS[role], label=text
        )
        for marker, role, face, text in signs
    ]
    if measured:
        handles.append(Line2D([], [], marker="+", linestyle="", color=COLORS["backward"], label="measured"))
    return with_legend(fig, 2, handles=handles)


def segment_curves(lengths: Sequence[int], peaks: Mapping[str, Sequence[float]], *, ylabel: str) -> Figure:
    """Draw the peak against the blocks in a segment, one line a model, with a mark at each line's least value."""
    fig, ax = figure(height=3.4)
    plot_lines(ax, lengths, peaks, _LINES)
    for values, role in zip(peaks.values(), _LINES, strict=False):
        least = min(range(len(values)), key=values.__getitem__)
        ax.plot(lengths[least], values[least], "o", color=COLORS[role], markersize=7)
    doubling_axis(ax, [k for k in (1, 2, 4, 8, 16, 32, 64, 128) if k <= lengths[-1]])
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    rungs = [base * 10**power for power in range(-3, 7) for base in (1, 2, 5)]
    inside = [rung for rung in rungs if low <= rung <= high]
    ax.set_yticks(inside, labels=[f"{rung:g}" for rung in inside])
    ax.minorticks_off()
    ax.set(xlabel="blocks in a segment", ylabel=ylabel)
    return with_legend(fig, 2)
