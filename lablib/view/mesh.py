"""Pictures of a mesh and of a plan: ranks in their nodes, one axis's groups, and where a step's time goes.

Every function takes what `lablib.calc` computed and returns a figure.

Chapter: book/07_3d_parallelism.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator

from lablib.view.style import COLORS, HATCHES, figure

_FILLS = tuple(COLORS[role] for role in ("weights", "gradients", "optimizer", "activations"))

#: Parts of a step and how they are drawn.
_PARTS = {
    "matmul": ("matrix products", COLORS["forward"], None),
    "memory": ("memory-bound kernels", COLORS["optimizer"], None),
    "tp": ("tensor parallelism", COLORS["communication"], HATCHES["communication"]),
    "cp": ("context parallelism", COLORS["gradients"], HATCHES["communication"]),
    "ep": ("expert parallelism", COLORS["activations"], HATCHES["communication"]),
    "pp": ("pipeline sends", COLORS["weights"], HATCHES["communication"]),
    "dp": ("exposed data parallelism", COLORS["backward"], HATCHES["communication"]),
    "bubble": ("bubble", COLORS["idle"], HATCHES["idle"]),
    "optimizer": ("optimizer", COLORS["neutral"], None),
}


def mesh_figure(groups: Mapping[str, Sequence[Sequence[int]]], *, gpus_per_node: int) -> Figure:
    """Draw all ranks once for every axis, coloured and lettered by the group they belong to; a row is a node.

    Args:
        groups: Axis to its process groups, as `Mesh.groups` lists them; the same ranks for every axis.
        gpus_per_node: Ranks of a node.

    Returns:
        The figure, for `lablib.view.style.show`.
    """
    ranks = sum(len(group) for group in next(iter(groups.values())))
    rows = -(-ranks // gpus_per_node)
    fig, axes = figure(height=(0.42 * rows + 0.45) * len(groups), nrows=len(groups), squeeze=False)
    for ax, (axis, found) in zip(axes[:, 0], groups.items(), strict=True):
        for number, group in enumerate(found):
            for rank in group:
                _cell(ax, rank, number, gpus_per_node)
        for node in range(rows):
            ax.text(-0.15, -node + 0.45, f"node {node}", ha="right", va="center", fontsize=9)
        ax.set_title(f"{axis}: {len(found)} groups of {len(found[0])}", loc="left", fontsize=10)
        ax.set_xlim(-1.3, min(ranks, gpus_per_node))
        ax.set_ylim(-rows + 0.95, 1.0)
        ax.axis("off")
    return fig


def _cell(ax: Axes, rank: int, group: int, gpus_per_node: int) -> None:
    x, y = rank % gpus_per_node, -(rank // gpus_per_node)
    ax.add_patch(Rectangle((x + 0.03, y + 0.05), 0.94, 0.86, facecolor=_FILLS[group % len(_FILLS)]))
    letter = chr(ord("A") + group % 26) + (str(group // 26) if group >= 26 else "")
    ax.text(x + 0.5, y + 0.47, f"{rank} {letter}", ha="center", va="center", fontsize=9, color="white")


def step_parts(steps: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw predicted steps as stacked bars, one a layout, parts in the order of `plan_time.PARTS`.

    Args:
        steps: Label of a layout to its seconds by part.

    Returns:
        The figure, for `lablib.view.style.show`.
    """
    fig, ax = figure(height=0.5 * len(steps) + 1.9)
    for row, parts in enumerate(steps.values()):
        start = 0.0
        for part, (name, color, hatch) in _PARTS.items():
            width = parts.get(part, 0.0)
            if width:
                first = not any(earlier.get(part) for earlier in list(steps.values())[:row])
                ax.barh(
                    row, width, left=start, color=color, hatch=hatch, edgecolor="white", linewidth=0,
                    label=name if first else None,
                )  # fmt: skip
            start += width
    ax.set_yticks(range(len(steps)), list(steps))
    ax.invert_yaxis()
    ax.set_xlabel("predicted seconds of a step")
    fig.legend(loc="outside lower center", ncols=2)
    return fig


def predicted_against_published(rows: Sequence[tuple[str, float, float]]) -> Figure:
    """Draw published rates against predicted ones on log scales, one colour a paper, with lines of 10 and 25 percent.

    Args:
        rows: (paper, published, predicted) in TFLOP/s per device.

    Returns:
        The figure, for `lablib.view.style.show`.
    """
    fig, ax = figure(height=3.6)
    rates = [rate for _, *pair in rows for rate in pair]
    ends = [min(rates) / 1.25, max(rates) * 1.25]
    for share, dash in ((0.0, "-"), (0.1, "--"), (0.25, ":")):
        for sign in {share, -share}:
            line = [end * (1 + sign) for end in ends]
            ax.plot(ends, line, dash, color=COLORS["neutral"], linewidth=0.9)
    for number, paper in enumerate(dict.fromkeys(paper for paper, _, _ in rows)):
        points = [(published, predicted) for name, published, predicted in rows if name == paper]
        ax.plot(
            *zip(*points, strict=True),
            "os^D"[number % 4],
            color=_FILLS[number % 4],
            label=paper,
            markersize=5,
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ticks = [tick for tick in (25, 50, 100, 200, 400, 800, 1600) if ends[0] <= tick <= ends[1]]
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_ticks(ticks, labels=[str(tick) for tick in ticks])
    ax.set_xlim(ends)
    ax.set_ylim(ends)
    ax.set_xlabel("published TFLOP/s per device")
    ax.set_ylabel("predicted")
    ax.legend(loc="upper left")
    return fig
