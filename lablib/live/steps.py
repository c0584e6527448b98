"""A picture that is stepped through: pieces that stand still, pieces that move, and a sentence for each step.

A mechanism is a list of steps that a calculator or a toy made; a function here or in an explorer turns it into pieces with a
place for each step. The page moves them (`_static/steps.mjs`); without JavaScript, and in print, one step is drawn and all
sentences stand below it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from lablib.live.svg import picture

#: x and y, or x, y and how many times as wide and as high as it was drawn; None where it is not there.
Place = tuple[float, ...] | None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Something that moves.

    Attributes:
        shape: SVG, drawn at the origin.
        at: Its place in each step.
    """

    shape: str
    at: Sequence[Place]


def stepped(
    still: Sequence[str], pieces: Sequence[Piece], sentences: Sequence[str], *, height: float, alt: str, first: int = 0
) -> str:
    """Return a picture with controls to step through it.

    Args:
        still: Shapes that do not move, below all pieces.
        sentences: What happens in each step.
        first: The step that is drawn before anything is touched, and in print.

    Raises:
        ValueError: If a piece has not as many places as there are sentences.
    """
    for piece in pieces:
        if len(piece.at) != len(sentences):
            raise ValueError(f"a piece has {len(piece.at)} places for {len(sentences)} steps")
    moving = [
        f"<g data-at='{json.dumps([_short(place) for place in piece.at], separators=(',', ':'))}' "
        f'style="{_style(piece.at[first])}">{piece.shape}</g>'
        for piece in pieces
    ]
    listed = "".join(f"<li>{escape(words)}</li>" for words in sentences)
    last, place = len(sentences) - 1, f"{first + 1} of {len(sentences)}"
    return (
        f'<step-through>{picture([*still, *moving], height, alt)}<div class="steps-controls">'
        '<button type="button" data-step="-1" aria-label="step back">&#9664;</button>'
        '<button type="button" data-play="" aria-label="play">Play</button>'
        '<button type="button" data-step="1" aria-label="step on">&#9654;</button>'
        f'<input type="range" min="0" max="{last}" value="{first}" aria-label="step" '
        f'aria-valuetext="step {place}"/></div>'
        f'<p class="steps-words" aria-live="polite" data-step="{place}">{escape(sentences[first])}</p>'
        f'<details class="steps-all"><summary>All {last + 1} steps in words</summary><ol>{listed}</ol></details>'
        "</step-through>"
    )


def _short(place: Place) -> list[float] | None:
    return None if place is None else [float(f"{value:.4g}") for value in place]


def _style(place: Place) -> str:
    """Return what `_static/steps.mjs` writes for a place."""
    if place is None:
        return "opacity: 0"
    x, y, *times = (f"{value:g}" for value in _short(place))
    return f"transform: translate({x}px, {y}px)" + (f" scale({times[0]}, {times[1]})" if times else "")
