"""Questions of a chapter: a guess before the figure that answers it, and five questions at the end.

Both are Markdown around HTML that `_static/questions.js` wakes: it judges, says the error and remembers in the browser.
Without a script, and on paper, the answer is in a fold below its question.
"""

from __future__ import annotations

import hashlib
import html
import itertools
from collections.abc import Mapping

from IPython.display import Markdown, display

#: A number of the reader's this close to a known mistake's is that mistake.
SAME = 0.02


def guess(
    name: str,
    asked: str,
    answer: float | str,
    *,
    why: str = "",
    unit: str = "",
    within: float = 0.1,
    factor: float | None = None,
    digits: int = 3,
    mistakes: Mapping[float, str] | None = None,
    choices: Mapping[str, str] | None = None,
    covers: int = 1,
) -> None:
    """Show a question before what answers it, which stays folded until the reader has guessed.

    Args:
        name: Unique in its chapter, such as "states-of-7b".
        asked: The question; like all other texts Markdown in one paragraph.
        answer: The right number, or the right one of `choices`.
        why: The reason, shown after a guess of a number.
        unit: Unit of the number, such as "GB".
        within: A guess this close is right, as a share of the answer; 0 for a count.
        factor: In its place, for an order of magnitude: right is what is off by this factor at most.
        digits: Significant digits in which the answer is shown.
        mistakes: What a known misunderstanding answers, and its sentence.
        choices: In place of a number: each choice, and why it is right or wrong.
        covers: Blocks of the page after this cell that are folded until the guess.
    """
    if choices is not None:
        _choose("guess", name, asked, answer, choices, covers)
        return
    low, high = sorted((answer * (1 - within), answer * (1 + within)))
    if factor is not None:
        low, high = answer / factor, answer * factor
    values, shown = sorted(mistakes or {}), _written(answer, digits)
    _hold(name, why, "has no reason: why=...")
    _hold(name, unit != "percent", 'asks for "percent", where a reader types "%": unit="%"')
    _hold(name, all(not low <= value <= high for value in values), f"judges a mistake right: {low:g} to {high:g} is")
    near = [b for a, b in itertools.pairwise(values) if abs(a - b) <= 2 * SAME * abs(b)]
    _hold(name, not near, f"cannot tell the mistakes at {near} from those below")
    judge = {"answer": answer, "low": low, "high": high, "shown": shown, "unit": unit, "same": SAME, "covers": covers}
    label = f"Your guess, in {unit}" if unit else "Your guess"
    parts = [
        _form("guess", name, (asked, unit, shown), judge),
        f'**Guess first.** <span id="ask-{name}">{asked}</span>',
        f'<p class="ask" hidden><label>{html.escape(label)} <input type="text" inputmode="decimal" size="9" '
        f'aria-describedby="ask-{name}"></label> <button>Guess</button></p>',
    ]
    reasons = [f"**{f'{shown} {unit}'.strip()}**. {why}"]
    for value in values:
        said = f"{_written(value, digits)} {unit}".strip()
        reasons.append(f'<span class="mistake" data-value="{float(value)}">Not {said}: {mistakes[value]}</span>')
    display(Markdown("\n\n".join([*parts, *_fold(reasons)])))


def question(name: str, asked: str, answer: str, choices: Mapping[str, str]) -> None:
    """Show one of the five questions at the end of a chapter: each choice, and why it is right or wrong."""
    _choose("question", name, asked, answer, choices)


def _choose(kind: str, name: str, asked: str, answer: str, choices: Mapping[str, str], covers: int = 0) -> None:
    _hold(name, len(choices) >= (3 if kind == "question" else 2), "has too few choices")
    _hold(name, answer in choices, f"has no choice {answer!r}")
    _hold(name, all(choices.values()), "has a choice without its reason")
    letters = dict(zip(choices, "abcdef", strict=False))
    fields = [
        f'<label><input type="radio" name="{name}" value="{letter}"> **{letter}** {choice}</label>'
        for choice, letter in letters.items()
    ]
    whys = [
        f"**{letter}**{' is right.' if choice == answer else '.'} {choices[choice]}"
        for choice, letter in letters.items()
    ]
    verb = "Guess" if kind == "guess" else "Check"
    parts = [
        _form(kind, name, (asked, answer, *choices), {"answer": letters[answer], "covers": covers}),
        f'<fieldset aria-labelledby="ask-{name}">',
        ("**Guess first.** " if kind == "guess" else "") + f'<span id="ask-{name}">{asked}</span>',
        *fields,
        f'<p class="ask" hidden><button>{verb}</button></p></fieldset>',
        *_fold(whys),
    ]
    display(Markdown("\n\n".join(parts)))


def _form(kind: str, name: str, asked: tuple[str, ...], judge: Mapping[str, object]) -> str:
    # An edited question has another name in the reader's browser, and is asked again.
    digest = hashlib.sha256("\n".join(asked).encode()).hexdigest()[:6]
    data = " ".join(f'data-{key}="{html.escape(str(value))}"' for key, value in judge.items())
    return f'<form class="asked {kind}" data-name="{name}@{digest}" {data} autocomplete="off" novalidate>'


def _fold(paragraphs: list[str]) -> list[str]:
    head = '<p class="result" role="status"></p><details class="measured answer"><summary>Show the answer</summary>'
    return [head, *paragraphs, "</details></form>"]


def _written(value: float, digits: int) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{float(f'{value:.{digits}g}'):,}".removesuffix(".0")


def _hold(name: str, holds: object, sentence: str) -> None:
    if not holds:
        raise ValueError(f"the question {name!r} {sentence}")
