"""Pictures and page of a scaling report: step times beside their prediction, what was lost, every single step.

Every function takes numbers that somebody else measured or computed.

Chapter: book/11_practical_fsdp.md
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from lablib.view.style import COLORS, HATCHES, figure

#: Part of the loss to its colour and, beside colour, its hatch.
PARTS = {
    "communication": ("communication", "///"),
    "imbalance": ("idle", "..."),
    "bubble": ("neutral", "xx"),
    "data": ("activations", "\\\\\\"),
    "compute": ("forward", ""),
}


def step_times(rows: Sequence[Mapping[str, object]]) -> Figure:
    """Draw the measured step of every run as a bar with its quartiles, and the predicted one as a line across it.

    Args:
        rows: With run, seconds (median, low, high) and predicted, in seconds or None.

    Returns:
        The figure, for `lablib.view.style.show`.
    """
    fig, ax = figure(height=1.1 + 0.45 * len(rows))
    for place, row in enumerate(reversed(rows)):
        seconds = row["seconds"]
        middle = 1e3 * seconds["median"]
        around = [[middle - 1e3 * seconds["low"]], [1e3 * seconds["high"] - middle]]
        first = place == 0
        ax.barh(place, middle, 0.55, color=COLORS["forward"], label="measured" if first else None)
        ax.errorbar(middle, place, xerr=around, color=COLORS["neutral"], capsize=4, linewidth=1.5)
        if row.get("predicted"):
            at = 1e3 * row["predicted"]
            ax.plot([at, at], [place - 0.38, place + 0.38], color=COLORS["gradients"], linewidth=3)
    if any(row.get("predicted") for row in rows):
        ax.plot([], [], color=COLORS["gradients"], linewidth=3, label="predicted")
    ax.set_yticks(range(len(rows)), labels=[row["run"] for row in reversed(rows)])
    ax.grid(axis="y", visible=False)
    ax.set_xlim(left=0)
    ax.set_xlabel("ms a step: median and quartiles")
    fig.legend(loc="outside lower center", ncols=2)
    return fig


def loss_shares(rows: Sequence[Mapping[str, object]]) -> Figure:
    """Draw for every run on several ranks its efficiency and what took the rest, as parts of one bar.

    A part that was gained, not lost, is left out of the bar, which is then longer than 100 percent.

    Args:
        rows: With run, efficiency and loss, a mapping of parts to shares.

    Returns:
        The figure, for `lablib.view.style.show`.
    """
    fig, ax = figure(height=1.3 + 0.45 * len(rows))
    for place, row in enumerate(reversed(rows)):
        kept = 100 * (1 - sum(row["loss"].values()))
        ax.barh(place, kept, 0.55, color=COLORS["optimizer"], label="kept" if place == 0 else None)
        left = kept
        for part, share in row["loss"].items():
            role, hatch = PARTS[part]
            width = 100 * max(0.0, share)
            ax.barh(
                place, width, 0.55, left, color=COLORS[role], hatch=hatch, edgecolor="white",
                label=part if place == 0 else None,
            )  # fmt: skip
            left += width
    ax.set_yticks(range(len(rows)), labels=[row["run"] for row in reversed(rows)])
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("percent of the step")
    fig.legend(loc="outside lower center", ncols=3)
    return fig


def every_step(runs: Mapping[str, Sequence[float]], warm_up: int) -> Figure:
    """Draw the time of every step of every run, the warm-up in grey.

    Args:
        runs: Name of a run to the seconds of its steps, from the first one on.
        warm_up: Steps that do not count.

    Returns:
        The figure, for `lablib.view.style.show`.
    """
    fig, ax = figure(height=2.6)
    for (name, seconds), role in zip(runs.items(), COLORS, strict=False):
        steps = range(1, len(seconds) + 1)
        ax.plot(
            steps, [1e3 * s for s in seconds], "o-", markersize=3, linewidth=1, color=COLORS[role], label=name
        )
    if warm_up:
        ax.axvspan(
            0.5, warm_up + 0.5, color=COLORS["idle"], alpha=0.25, hatch=HATCHES["idle"], label="warm-up"
        )
    ax.set_ylim(bottom=0)
    ax.set_xlabel("step")
    ax.set_ylabel("ms")
    fig.legend(loc="outside lower center", ncols=3)
    return fig


_STYLE = """
:root { color-scheme: light dark; --figure-grid: rgba(128, 128, 128, .35); }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
@media (prefers-color-scheme: dark) { body { background: #14181d; color: #e6e8ea; } }
figure { margin: 1.5rem 0; } figcaption { font-size: .9rem; opacity: .85; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--figure-grid); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } dt { font-weight: 600; } dd { margin: 0 0 .5rem 0; }
code { overflow-wrap: anywhere; }
"""


def page(
    title: str,
    *,
    sentences: Sequence[str],
    head: Sequence[str],
    table: Sequence[Sequence[str]],
    figures: Sequence[tuple[str, str]],
    facts: Mapping[str, str],
    notes: Sequence[str],
) -> str:
    """Return a report as one HTML page that needs no other file and follows the reader's light or dark theme.

    Args:
        title: Of the page.
        sentences: What the report says, first.
        head: Titles of the table's columns.
        table: Its rows.
        figures: (SVG, caption) pairs; the SVG goes in as it is.
        facts: How and where it was measured.
        notes: What the numbers mean.
    """

    def cells(tag: str, texts: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>"

    drawn = "\n".join(
        f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>" for svg, caption in figures
    )
    known = "".join(
        f"<dt>{html.escape(k)}</dt><dd><code>{html.escape(v)}</code></dd>" for k, v in facts.items()
    )
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title><style>{_STYLE}</style></head>
<body>
<h1>{html.escape(title)}</h1>
{"".join(f"<p>{html.escape(text)}</p>" for text in sentences)}
<div class="wide"><table><thead>{cells("th", head)}</thead><tbody>
{"".join(cells("td", row) for row in table)}
</tbody></table></div>
{drawn}
<h2>How it was measured</h2>
<dl>{known}</dl>
<h2>What the numbers mean</h2>
<ul>{"".join(f"<li>{html.escape(text)}</li>" for text in notes)}</ul>
</body>
</html>
"""
