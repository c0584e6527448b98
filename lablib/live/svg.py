"""A small writer of SVG: stacked bars and stacked areas as text, for pages whose numbers change while you read.

The figures of the book are matplotlib's. An explorer is drawn twice by the same function, once when the book is built
and then in the reader's browser, where there is only Python's standard library. So this module writes SVG by hand.

Text and axes take the page's own colour, so a picture follows the light and the dark theme. Pictures are 400 units wide
and shrink with the page: 12 units are about 10 pixels on a telephone and 17 on a desk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 400
FONT = 12
#: One colour for one thing, the same as in every figure of the book (`lablib.view.style`).
COLORS = {
    "weights": "#3b7dbf",
    "gradients": "#d87e1e",
    "optimizer": "#1b9e77",
    "activations": "#b5629b",
    "buffers": "#7a828c",
    "forward": "#479ccf",
    "backward": "#cf5a3c",
    "backward: input": "#b5629b",
    "backward: weight": "#d87e1e",
    "idle": "#8c939c",
    "tp": "#3b7dbf",
    "cp": "#b5629b",
    "dp": "#d87e1e",
    "pp": "#1b9e77",
    "ep": "#cf5a3c",
    "edp": "#7a828c",
}
_GRID = "var(--figure-grid, rgba(128, 128, 128, 0.35))"


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar of stacked parts.

    Attributes:
        label: What it stands for, written before it.
        parts: Role in `COLORS` to value, in drawing order.
        text: What is written behind it.
        strong: Whether it is the one that the reader chose; the others are drawn pale.
    """

    label: str
    parts: Mapping[str, float]
    text: str
    strong: bool = True

    @property
    def total(self) -> float:
        """The sum of the parts."""
        return sum(self.parts.values())


def picture(shapes: Sequence[str], height: float, alt: str, *, role: str = "img") -> str:
    """Return shapes as one SVG that fills its column; its role is "group" if readers shall find cells in it."""
    return (
        f'<svg role="{role}" aria-label="{escape(alt, quote=True)}" viewBox="0 0 {WIDTH} {_n(height)}" '
        f'xmlns="http://www.w3.org/2000/svg" font-size="{FONT}" fill="currentColor">{"".join(shapes)}</svg>'
    )


def choices(name: str, cells: Iterable[str]) -> str:
    """Return cells of which one is chosen, in a group that a screen reader names so."""
    return f'<g role="radiogroup" aria-label="{escape(name, quote=True)}">{"".join(cells)}</g>'


def choice(setting: str, words: str, shapes: Iterable[str], *, chosen: bool) -> str:
    """Return shapes as a cell that sets a control when it is clicked, focused or pointed at, like "rank=5"."""
    words = escape(words, quote=True)
    return (
        f'<g role="radio" aria-checked="{str(chosen).lower()}" tabindex="{int(chosen) - 1}" data-set="{setting}" '
        f'aria-label="{words}"><title>{words}</title>{"".join(shapes)}</g>'
    )


def text(
    x: float, y: float, words: str, *, anchor: str = "start", bold: bool = False, role: str = "", white: bool = False
) -> str:
    """Return a line of text."""
    weight = ' font-weight="700"' if bold else ""
    fill = f' fill="{COLORS[role]}"' if role else ' fill="#fff"' if white else ""
    return f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}"{weight}{fill}>{escape(words)}</text>'


def rect(x: float, y: float, wide: float, tall: float, role: str, *, pale: bool = False, outline: float = 0) -> str:
    """Return a box in the colour of its role, or an outline in that of the text, so wide however it is scaled."""
    look = (
        f'fill="none" stroke="currentColor" stroke-width="{outline}" vector-effect="non-scaling-stroke"'
        if outline
        else f'fill="{COLORS[role]}"'
    )
    look += ' opacity="0.35"' if pale else ""
    return f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(wide)}" height="{_n(tall)}" {look}/>'


def line(x1: float, y1: float, x2: float, y2: float, *, role: str = "", dashed: bool = False) -> str:
    """Return a straight line."""
    dashes = ' stroke-dasharray="5 3"' if dashed else ""
    stroke = {"": _GRID, "mark": "currentColor"}.get(role) or COLORS[role]
    return (
        f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}" '
        f'stroke="{stroke}" stroke-width="{1.5 if role else 0.8}"{dashes}/>'
    )


def legend(roles: Iterable[str], *, top: float) -> tuple[list[str], float]:
    """Name colours, in as many lines as that takes.

    Returns:
        The shapes, and where they end.
    """
    shapes, x, y = [], 0.0, top
    for role in roles:
        wide = 12 + 0.56 * FONT * len(role)
        if x + wide > WIDTH:
            x, y = 0.0, y + 18
        shapes.append(f'<rect x="{_n(x)}" y="{_n(y)}" width="9" height="9" fill="{COLORS[role]}"/>')
        shapes.append(text(x + 12, y + 9, role))
        x += wide + 12
    return shapes, y + 9


def bars(
    rows: Sequence[Bar], *, top: float, title: str, labels: float = 60, limit: float | None = None, limit_text: str = ""
) -> tuple[list[str], float]:
    """Draw horizontal stacked bars over one scale, with a dashed line where a limit is.

    Returns:
        The shapes, and where they end.
    """
    tall, gap, behind = 18.0, 9.0, 74.0
    most = max([*(row.total for row in rows), limit or 0.0]) or 1.0
    scale = (WIDTH - labels - behind) / most
    start = top + (40 if limit is not None else 22)
    end = start + len(rows) * (tall + gap) - gap
    shapes = [text(0, top + FONT, title, bold=True)]
    for place, row in enumerate(rows):
        y = start + place * (tall + gap)
        if row.label:
            shapes.append(text(labels - 6, y + 13, row.label, anchor="end", bold=row.strong))
        x = labels
        for role, value in row.parts.items():
            pale = "" if row.strong else ' opacity="0.45"'
            shapes.append(
                f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(value * scale)}" height="{_n(tall)}" '
                f'fill="{COLORS[role]}"{pale}/>'
            )
            x += value * scale
        shapes.append(text(x + 5, y + 13, row.text, bold=row.strong))
    if limit is not None:
        x = labels + limit * scale
        shapes.append(line(x, start - 5, x, end + 5, role="mark", dashed=True))
        at, anchor = _beside(x, limit_text)
        shapes.append(text(at, start - 9, limit_text, anchor=anchor))
    return shapes, end + 5


def areas(
    layers: Mapping[str, Sequence[float]],
    *,
    at: Sequence[float],
    top: float,
    title: str,
    xlabel: str,
    limit: float,
    limit_text: str,
    marks: Sequence[tuple[float, str]],
    xticks: Sequence[tuple[float, str]] | None = None,
    far: bool = False,
) -> tuple[list[str], float]:
    """Draw stacked areas whose edges are straight between points.

    Args:
        layers: Role in `COLORS` to its value at each point.
        at: The points, from 0 on.
        marks: Vertical lines, each with words.
        xticks: What stands below the axis, and where; None means numbers.
        far: Whether a limit of more than three times what is drawn is left to its words.

    Returns:
        The shapes, and where they end.
    """
    left, right, tall = 46.0, WIDTH - 14.0, 150.0
    first = top + 44 + 17 * len(marks)
    base, span = first + tall, at[-1]
    most = max(map(sum, zip(*layers.values(), strict=True)))
    above = far and limit > 3 * most
    most = 1.06 * (most if above else max(limit, most))
    shapes = [text(0, top + FONT, title, bold=True)]
    # What the dashed line means stands beside a piece of it: words on coloured areas could not be read.
    shapes.append(line(0, top + 26, 26, top + 26, role="mark", dashed=True))
    shapes.append(text(32, top + 30, limit_text + (", above the picture" if above else "")))

    def across(value: float) -> float:
        return left + (right - left) * value / span

    def up(value: float) -> float:
        return base - tall * value / most

    for tick in ticks(most):
        shapes.append(line(left, up(tick), right, up(tick)))
        shapes.append(text(left - 5, up(tick) + 4, f"{tick:,g}", anchor="end"))
    low = [0.0] * len(at)
    for role, values in layers.items():
        high = [below + value for below, value in zip(low, values, strict=True)]
        edge = [*zip(at, high, strict=True), *reversed([*zip(at, low, strict=True)])]
        points = " ".join(f"{_n(across(x))},{_n(up(y))}" for x, y in edge)
        shapes.append(f'<polygon points="{points}" fill="{COLORS[role]}"/>')
        low = high
    for tick, words in [(tick, f"{tick:,g}") for tick in ticks(span)] if xticks is None else xticks:
        shapes.append(text(across(tick), base + 15, words, anchor="middle"))
    shapes.append(text((left + right) / 2, base + 31, xlabel, anchor="middle"))
    if not above:
        shapes.append(line(left, up(limit), right, up(limit), role="mark", dashed=True))
    for place, (value, words) in enumerate(marks):
        y = top + 50 + 17 * place
        x, anchor = _beside(across(value), words)
        shapes.append(line(across(value), y + 4, across(value), base, role="mark"))
        shapes.append(text(x, y, words, anchor=anchor))
    return shapes, base + 36


def ticks(most: float) -> list[float]:
    """Return 0 and up to five round numbers below a largest value: multiples of 1, 2 or 5 times a power of ten."""
    step = 1.0
    while step * 5 > most:
        step /= 10
    while step * 50 < most:
        step *= 10
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step * 5 >= most)
    return [step * k for k in range(int(most / step) + 1)]


def _n(value: float) -> str:
    """Write a coordinate with a tenth of a unit."""
    return f"{value:.1f}".removesuffix(".0")


def _beside(x: float, words: str) -> tuple[float, str]:
    """Return where text about a vertical line stands, and its anchor: centred, or away from the nearer edge."""
    half = 0.29 * FONT * len(words)
    if x - half < 0:
        return max(x - 4, 0.0), "start"
    return (min(x + 4, float(WIDTH)), "end") if x + half > WIDTH else (x, "middle")
