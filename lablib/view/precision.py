"""Pictures of precision: formats on one axis, gradients that vanish, losses side by side, errors of sums and of FP8.

Every function takes numbers that `lablib.calc` computed, or that a run measured, and returns a figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from lablib.view.style import COLORS, DASHES, doubling_axis, figure, name_rows, note, plot_lines, with_legend

#: Told apart by colour and by dash, in this order.
_HUES = ("neutral", "backward", "weights", "optimizer", "gradients", "activations")


def _power(exponent: float) -> str:
    return f"$2^{{{exponent:.0f}}}$"


def format_axis(rows: Mapping[str, tuple[float, float, float, int]], *, ticks: Sequence[int]) -> Figure:
    """Draw where formats lie on an axis of powers of two: full precision, and below it the subnormals."""
    fig, ax = figure(height=1.3 + 0.38 * len(rows))
    solid, light = COLORS["weights"], COLORS["gradients"]
    for row, (subnormal, normal, top, bits) in enumerate(rows.values()):
        ax.barh(row, top - normal, 0.6, normal, color=solid)
        ax.barh(row, normal - subnormal, 0.6, subnormal, color=light, alpha=0.75)
        note(ax, f"{bits} bits", (top, row), (4, 0), va="center")
    name_rows(ax, rows)
    ax.set_xticks(list(ticks), labels=[_power(tick) for tick in ticks])
    ax.set_xlim(min(row[0] for row in rows.values()) - 4, max(row[2] for row in rows.values()) + 50)
    ax.set_xlabel("magnitude of a number")
    handles = [Patch(color=solid, label="full precision"), Patch(color=light, alpha=0.75, label="subnormals")]
    return with_legend(fig, 2, handles=handles)


def gradient_histogram(
    counts: Mapping[int, int], *, floor: float, normal: float, name: str, top: float | None = None
) -> Figure:
    """Draw how many values lie in each power of two, and where a format loses them."""
    fig, ax = figure(height=3.0)
    spans = {
        "backward": (f"zero in {name}", [p for p in counts if p < floor]),
        "gradients": ("fewer bits", [p for p in counts if floor <= p < normal]),
        "weights": ("kept", [p for p in counts if normal <= p and (top is None or p < top)]),
        "activations": (f"infinite in {name}", [p for p in counts if top is not None and p >= top]),
    }
    for role, (label, powers) in spans.items():
        if powers:
            ax.bar(powers, [counts[p] for p in powers], 0.9, align="edge", color=COLORS[role], label=label)
    for edge in (floor, normal):
        ax.axvline(edge, color=COLORS["neutral"], linewidth=1.2, linestyle="--")
    # A few far-off values would make everything else narrow: bars too low to be seen do not set the limits.
    seen = [p for p, count in counts.items() if count >= max(counts.values()) / 200]
    left, right = min(*seen, floor) - 2, max(*seen, normal) + 3
    ticks = [p for p in range(-160, 160, 8) if left <= p <= right]
    ax.set_xticks(ticks, labels=[_power(tick) for tick in ticks])
    ax.set(xlim=(left, right), xlabel="magnitude of a gradient", ylabel="how many")
    return with_legend(fig, 4)


def shares(bars: Mapping[str, Mapping[str, float]], *, xlabel: str) -> Figure:
    """Draw shares side by side, a group of bars for each name, in percent."""
    names = list(next(iter(bars.values())))
    fig, ax = figure(height=1.2 + (0.16 + 0.16 * len(bars)) * len(names))
    tall = 0.8 / len(bars)
    for k, (case, values) in enumerate(bars.items()):
        places = [row + (k - (len(bars) - 1) / 2) * tall for row in range(len(names))]
        color = COLORS[_HUES[k + 1]]
        ax.barh(places, [100 * values[name] for name in names], 0.9 * tall, color=color, label=case)
    name_rows(ax, names)
    ax.set_xlim(0, 100)
    ax.set_xlabel(xlabel)
    if len(bars) > 1:
        return with_legend(fig, 2)


def curves(lines: Mapping[str, Sequence[float]], *, xlabel: str = "step", ylabel: str = "loss") -> Figure:
    """Draw runs side by side, over their steps; where a run is lost, a cross marks its last finite value."""
    fig, ax = figure(height=3.1)
    for k, (name, values) in enumerate(lines.items()):
        style = {"linewidth": 4.5, "alpha": 0.6} if k == 0 else {"linewidth": 1.8, "linestyle": DASHES[k - 1]}
        ax.plot(range(len(values)), values, color=COLORS[_HUES[k]], label=name, **style)
        finite = [step for step, value in enumerate(values) if math.isfinite(value)]
        if finite and len(finite) < len(values):
            cross = {"markersize": 9, "markeredgewidth": 2.5}
            ax.plot(finite[-1:], [values[finite[-1]]], "x", color=COLORS[_HUES[k]], **cross)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel=xlabel, ylabel=ylabel)
    return with_legend(fig, 2)


def loss_scale(exponents: Sequence[float], skipped: Sequence[int]) -> Figure:
    """Draw the loss scale of each step as a power of two, and the steps that were skipped."""
    fig, ax = figure(height=2.6)
    steps = range(len(exponents))
    ax.step(steps, exponents, where="mid", color=COLORS["weights"], label="loss scale")
    ax.plot(
        list(skipped),
        [exponents[k] for k in skipped],
        "x",
        color=COLORS["backward"],
        markersize=8,
        markeredgewidth=2,
        label="skipped step",
    )
    ticks = sorted({round(e) for e in exponents})[:: max(1, len(set(exponents)) // 5)]
    ax.set_yticks(ticks, labels=[_power(tick) for tick in ticks])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="step", ylabel="scale")
    return with_legend(fig, 2)


def sum_errors(
    ranks: Sequence[int], measured: Mapping[str, Sequence[float]], expected: Mapping[str, Sequence[float]]
) -> Figure:
    """Draw the error of a sum over ranks, measured as points and expected as lines, in percent."""
    fig, ax = figure(height=3.1)
    plot_lines(ax, ranks, {name: expected[name] for name in measured}, _HUES[1:], scale=100)
    for values, hue in zip(measured.values(), _HUES[1:], strict=False):
        ax.plot(ranks, [100 * e for e in values], "o", color=COLORS[hue])
    doubling_axis(ax, list(ranks))
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    marks = [m for m in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if low <= m <= high]
    ax.set_yticks(marks, labels=[f"{m:g}" for m in marks])
    ax.set_yticks([], minor=True)
    ax.set(xlabel="ranks", ylabel="error of the sum (%)")
    return with_legend(fig, 1)


def history(lines: Mapping[str, Sequence[float]], *, ylabel: str, marks: Sequence[int] = (), start: int = 0) -> Figure:
    """Draw values of every step on a logarithmic axis, and single out some steps."""
    fig, ax = figure(height=3.0)
    for k, (name, values) in enumerate(lines.items()):
        steps = range(start, start + len(values))
        ax.plot(steps, values, color=COLORS[_HUES[k + 1]], linestyle=DASHES[k], label=name)
    for step in marks:
        ax.axvline(step, color=COLORS["neutral"], linewidth=1.0, linestyle=":")
    ax.set_yscale("log")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="step", ylabel=ylabel)
    return with_legend(fig, 2)
