"""Pictures of memory: stacked bars by term, activation curves, and the largest model that a card holds.

Every function takes numbers that `lablib.calc` computed and returns a matplotlib figure.

Chapter: book/01_why_distributed.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lablib.view.style import COLORS, figure

#: What a bar's segment is called in the legend, in drawing order.
TERMS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
}


def stacked_bars(
    bars: Mapping[str, Mapping[str, float]],
    *,
    xlabel: str,
    limit: float | None = None,
    limit_label: str = "",
    number: str = "{:.0f}",
    terms: Mapping[str, str] = TERMS,
) -> Figure:
    """Draw one horizontal bar per case, its segments the terms of the memory.

    Args:
        bars: Case to {role: value}; the roles are keys of `COLORS` and of `terms`.
        xlabel: Quantity and unit.
        limit: Where a dashed line is drawn, in the same unit.
        limit_label: What the line means, written above it.
        number: Format of the total written at the end of each bar.
        terms: Role to legend text, in drawing order.

    Returns:
        The figure, for `lablib.view.style.show`.
    """
    fig, ax = figure(height=1.35 + 0.42 * len(bars))
    totals = []
    for row, parts in enumerate(bars.values()):
        left = 0.0
        for role in terms:
            value = parts.get(role, 0.0)
            if value:
                ax.barh(row, value, left=left, height=0.62, color=COLORS[role])
                left += value
        ax.annotate(
            number.format(left), (left, row), (4, 0), textcoords="offset points", va="center", fontsize=9
        )
        totals.append(left)
    ax.set_yticks(range(len(bars)), labels=list(bars))
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set_xlim(0, 1.14 * max([*totals, limit or 0.0]))
    ax.set_xlabel(xlabel)
    if limit is not None:
        ax.axvline(limit, color=COLORS["backward"], linestyle="--", linewidth=1.5)
        ax.annotate(
            limit_label,
            (limit, 1),
            (0, 2),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            color=COLORS["backward"],
            fontsize=9,
        )
    used = [role for role in terms if any(parts.get(role) for parts in bars.values())]
    fig.legend(
        handles=[Patch(color=COLORS[role], label=terms[role]) for role in used],
        loc="outside lower center",
        ncols=min(len(used), 3),
    )
    return fig


def curves(
    x: Sequence[float],
    lines: Mapping[str, tuple[Sequence[float], str]],
    *,
    xlabel: str,
    ylabel: str,
    log: str = "",
    level: tuple[float, str] | None = None,
    points: Mapping[str, tuple[Sequence[float], Sequence[float], str]] | None = None,
    xticks: Mapping[float, str] | None = None,
) -> Figure:
    """Draw named curves over one axis, with measured points on top where there are any.

    Args:
        x: Abscissae, shared by the lines.
        lines: Name to (ordinates, role in `COLORS`). Lines of one role get different dashes.
        xlabel: Quantity and unit.
        ylabel: Quantity and unit.
        log: "", "x", "y" or "xy".
        level: A horizontal line as (height, text).
        points: Name to (abscissae, ordinates, role): what was measured.
        xticks: Position to text.

    Returns:
        The figure, for `lablib.view.style.show`.
    """
    fig, ax = figure(height=3.4)
    dashes, seen = ("-", "--", ":", "-."), {}
    for name, (y, role) in lines.items():
        style = dashes[seen.setdefault(role, 0) % len(dashes)]
        seen[role] += 1
        ax.plot(x, y, style, color=COLORS[role], label=name)
    for name, (px, py, role) in (points or {}).items():
        ax.plot(px, py, "o", color=COLORS[role], markersize=6, label=name)
    if "x" in log:
        ax.set_xscale("log")
    if "y" in log:
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)
    if xticks:
        ax.set_xticks(list(xticks), labels=list(xticks.values()))
        ax.minorticks_off()
    if level:
        ax.axhline(level[0], color=COLORS["backward"], linestyle="--", linewidth=1.3)
        ax.annotate(
            level[1],
            (0.01, level[0]),
            (0, -11),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            color=COLORS["backward"],
            fontsize=9,
        )
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    fig.legend(loc="outside lower center", ncols=2)
    return fig


def capacity_curve(
    capacities: Sequence[float],
    lines: Mapping[str, tuple[Sequence[float], str]],
    cards: Mapping[str, tuple[float, float]],
) -> Figure:
    """Draw the largest model whose states fit, over a device's memory, with real cards on the first line.

    Args:
        capacities: GB of device memory, shared by the lines.
        lines: Name to (largest model in billions of parameters, role in `COLORS`).
        cards: Name to (GB, billions of parameters): one point each.

    Returns:
        The figure, for `lablib.view.style.show`.
    """
    fig, ax = figure(height=3.9)
    dashes = ("-", "--", ":", "-.")
    for dash, (name, (sizes, role)) in zip(dashes * len(lines), lines.items(), strict=False):
        ax.plot(capacities, sizes, dash, color=COLORS[role], label=name)
    for name, (capacity, size) in cards.items():
        ax.plot(capacity, size, "o", color=COLORS["weights"], markersize=5)
        # The names hang below the lowest line, where nothing else is drawn.
        ax.annotate(
            name,
            (capacity, size),
            (0, -7),
            textcoords="offset points",
            rotation=90,
            ha="center",
            va="top",
            fontsize=9,
        )
    ax.set_yscale("log")
    ax.set_ylim(bottom=0.3)
    ax.set_xlabel("device memory (GB)")
    ax.set_ylabel("largest model (billion parameters)")
    fig.legend(loc="outside lower center", ncols=2)
    return fig
