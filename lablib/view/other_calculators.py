"""How far off memory calculators are: one line per calculator, from its lowest to its highest ratio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lablib.view.style import COLORS, figure

#: What is judged, in drawing order, and its colour.
ROLES = {"states": "weights", "activations": "activations", "total": "neutral"}
TITLES = {"states": "model states", "activations": "kept activations", "total": "peak of a step"}
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 50, 100)


def calculator_ratios(rows: Sequence[Mapping[str, object]], own: str = "this course") -> Figure:
    """Draw predicted over measured for every calculator: a line over all cases, a dot at the median, a diamond at the worst.

    Args:
        rows: The summary of `other_calculators.json`: "calculator", "quantity", "cases", "median", "low", "high",
            "worst", in the order in which they are drawn.
        own: The calculator that has a colour of its own.
    """
    for row in rows:
        if row["quantity"] not in ROLES:
            raise ValueError(f"quantity={row['quantity']!r} must be one of {', '.join(ROLES)}")
    groups = {q: [row for row in rows if row["quantity"] == q] for q in ROLES}
    groups = {q: found for q, found in groups.items() if found}
    lines = sum(len(found) + 1 for found in groups.values())
    fig, ax = figure(height=1.3 + 0.235 * lines)
    places, labels, at = [], [], 0.0
    for quantity, found in groups.items():
        ax.annotate(
            TITLES[quantity],
            (0, at),
            (4, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            fontsize=9,
            fontweight="bold",
        )
        for row in found:
            at += 1
            color = COLORS["optimizer"] if row["calculator"] == own else COLORS[ROLES[quantity]]
            ax.plot(
                [row["low"], row["high"]],
                [at, at],
                color=color,
                linewidth=3,
                solid_capstyle="round",
                alpha=0.6,
            )
            ax.plot(row["median"], at, "o", color=color, markersize=6)
            ax.plot(
                row["worst"], at, "D", color=color, markersize=6, markerfacecolor="none", markeredgewidth=1.3
            )
            places.append(at)
            labels.append(f"{row['calculator']} ({row['cases']})")
        at += 1
    ax.axvline(1, color=COLORS["neutral"], linestyle="--", linewidth=1)
    ax.set_xscale("log")
    left, right = ax.get_xlim()
    ticks = [tick for tick in TICKS if left <= tick <= right]
    ax.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_yticks(places, labels=labels)
    ax.set_ylim(at - 0.4, -0.7)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("predicted / measured")
    marks = {"marker": "o", "linestyle": "none", "color": COLORS["neutral"]}
    fig.legend(
        handles=[
            Line2D([], [], label="median case", **marks),
            Line2D([], [], label="worst case", **marks | {"marker": "D", "markerfacecolor": "none"}),
        ],
        loc="outside lower center",
        ncols=2,
    )
    return fig
