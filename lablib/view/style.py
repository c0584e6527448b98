"""The house style of every figure: one palette, one shape, and an SVG that follows the page's theme.

A figure is emitted as one inline SVG whose text and axes take the page's own text colour.
So the same figure reads in the light theme, in the dark theme and in JupyterLab, without a second copy.
"""

from __future__ import annotations

import html
import io
import itertools
import re
from collections.abc import Collection, Mapping, Sequence

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

#: One colour for one thing, in the whole book.
#: Hues follow Okabe and Ito's palette, darkened or lightened to keep 3:1 contrast on white and on near-black.
COLORS = {
    "weights": "#3b7dbf",
    "gradients": "#d87e1e",
    "optimizer": "#1b9e77",
    "activations": "#b5629b",
    "forward": "#479ccf",
    "backward": "#cf5a3c",
    "communication": "#b4900a",
    "idle": "#8c939c",
    "neutral": "#7a828c",
    "tp": "#3b7dbf",
    "cp": "#b5629b",
    "dp": "#d87e1e",
    "pp": "#1b9e77",
    "ep": "#cf5a3c",
    "edp": "#7a828c",
}

#: A second sign beside colour for what is often drawn next to something similar.
HATCHES = {"communication": "///", "idle": "..."}

#: Lines that share a picture are told apart by their dashes, too.
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))

# Sentinel colours: matplotlib wants real ones, the SVG gets the page's.
_TEXT, _GRID = "#010203", "#040506"
_PAGE_COLORS = {_TEXT: "currentColor", _GRID: "var(--figure-grid, rgba(128, 128, 128, 0.35))"}

_RC = {
    "figure.facecolor": "none",
    "figure.constrained_layout.use": True,
    "savefig.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": _TEXT,
    "axes.labelcolor": _TEXT,
    "axes.titlecolor": _TEXT,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "font.size": 10,
    "font.family": ["DejaVu Sans"],
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "legend.labelcolor": _TEXT,
    "lines.linewidth": 2.0,
    "patch.linewidth": 0.0,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "path",
    "text.color": _TEXT,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "axes.prop_cycle": mpl.cycler(color=[COLORS[role] for role in list(COLORS)[:7]]),
}

_numbers = itertools.count(1)


def figure(width: float = 5.2, height: float = 3.0, **subplots: object) -> tuple[Figure, Axes]:
    """Open a figure in the house style."""
    with mpl.rc_context(_RC):
        return plt.subplots(figsize=(width, height), **subplots)


def note(ax: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **look: object) -> None:
    """Write a small text at a place, moved by some points."""
    ax.annotate(text, at, offset, textcoords="offset points", fontsize=9, **look)


def plot_lines(
    ax: Axes,
    x: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    roles: Sequence[str],
    *,
    scale: float = 1.0,
    **look: object,
) -> None:
    """Draw a line for each name, in the colours of `roles` and in `DASHES`, its values times `scale`."""
    for (name, values), role, dash in zip(lines.items(), roles, DASHES, strict=False):
        ax.plot(x, [scale * value for value in values], linestyle=dash, color=COLORS[role], label=name, **look)


def doubling_axis(ax: Axes, ticks: Sequence[float], labels: Sequence[str] | None = None) -> None:
    """Make the horizontal axis one of doublings, with a tick at each of these places and nowhere else."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks] if labels is None else labels)
    ax.set_xticks([], minor=True)


def cell(ax: Axes, x: float, y: float, width: float, height: float, text: str, color: str) -> None:
    """Draw a box from its lower left corner, with a white text in its middle."""
    ax.add_patch(Rectangle((x, y), width, height, facecolor=color))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", color="white", fontsize=9)


def name_rows(ax: Axes, names: Collection[str]) -> None:
    """Name the rows of a horizontal chart, the first at the top, without lines between them."""
    ax.set_yticks(range(len(names)), labels=list(names))
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)


def with_legend(fig: Figure, ncols: int, **legend: object) -> Figure:
    """Return the figure with a legend of so many columns below its axes."""
    fig.legend(loc="outside lower center", ncols=ncols, **legend)
    return fig


def themed_svg(fig: Figure, alt: str) -> str:
    """Return the figure as an SVG string that takes its text colour from the page."""
    # What is drawn after `figure` has returned takes matplotlib's defaults: black text, framed legends.
    for text in fig.findobj(mpl.text.Text):
        if text.get_color() in ("black", "k"):
            text.set_color(_TEXT)
    for legend in fig.findobj(mpl.legend.Legend):
        legend.set_frame_on(False)
    buffer = io.StringIO()
    with mpl.rc_context({**_RC, "svg.hashsalt": "lablib"}):
        fig.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    for sentinel, page_color in _PAGE_COLORS.items():
        svg = svg.replace(sentinel, page_color)
    # Ids must be unique on a page that holds several figures, or one figure's clip paths cut another's.
    prefix = f"fig{next(_numbers)}-"
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{prefix}", svg)
    width_pt = float(re.search(r'width="([\d.]+)pt"', svg)[1])
    svg = re.sub(r'<svg ([^>]*?)height="[\d.]+pt"', r"<svg \1", svg, count=1)
    svg = re.sub(r' width="[\d.]+pt"', "", svg, count=1)
    label = html.escape(alt, quote=True)
    # 1.75 px a point shows 10 pt text at 17 px on a wide page; on a narrow one the figure shrinks with the page.
    style = f"width: 100%; max-width: {width_pt * 1.75:.0f}px; height: auto"
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" style="{style}" ', 1)


class _Page:
    """The object that `show` displays: HTML where there is a page, one line of text elsewhere."""

    def __init__(self, markup: str, text: str) -> None:
        self.markup, self.text = markup, text

    def _repr_html_(self) -> str:
        return self.markup

    def __repr__(self) -> str:
        return self.text


def show(fig: Figure, *, caption: str, alt: str) -> None:
    """Show a figure with its caption, once, in the theme of the page."""
    if not caption.strip() or not alt.strip():
        raise ValueError("a figure needs a caption (its one message) and an alt text (what is drawn)")
    from IPython.display import display

    svg = themed_svg(fig, alt)
    plt.close(fig)
    markup = f'<figure class="house-figure">{svg}<figcaption>{html.escape(caption)}</figcaption></figure>'
    display(_Page(markup, f"[figure] {caption}"))


def show_steps(markup: str, *, caption: str) -> None:
    """Show a picture that is stepped through, from `lablib.live.mechanisms`, with its caption."""
    from IPython.display import display

    display(
        _Page(f'<figure class="house-figure">{markup}<figcaption>{html.escape(caption)}</figcaption></figure>', caption)
    )


def table(head: Sequence[object], *rows: Sequence[object], left: int = 1) -> str:
    """Return a table in Markdown; its first `left` columns begin at the left, the others end at the right."""
    rule = ["---" if column < left else "---:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (head, rule, *rows))


def show_table(head: Sequence[object], *rows: Sequence[object], left: int = 1) -> None:
    """Show a table, as `table` returns it."""
    from IPython.display import Markdown, display

    display(Markdown(table(head, *rows, left=left)))
