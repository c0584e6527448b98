"""Judge an answer by a table: what each known mistake would answer, beside the sentence that names it.

A check gives its cases, the truth and the table. Which mistake it can have been is found here, in the same way for every
check; another that gives the same answers cannot be told from it, and the verdict says so:

1. the mistake that gives the answer in every case, right cases too, to the digit, then to four digits;
2. none, because the answer is the same in every case;
3. none: one wrong case is shown. A mistake that explains some cases alone is not shown to be the cause, nor are
   two whose errors add up.

`refuse` is for what one answer shows by itself: the sentence of the first sign that is there.
`recognize` is for one value: the sentence of the first mistake that gives it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from numbers import Number
from typing import Any, NamedTuple, NoReturn

from lablib.checks.judging.guard import Wrong
from lablib.checks.judging.values import close

#: A sentence without its full stop, and what who makes this mistake answers to a case.
Slip = tuple[str, Callable[..., Any]]


class Row(NamedTuple):
    """One case, what was answered to it, and the truth."""

    case: tuple
    given: Any
    truth: Any


def compare(
    answer: Callable,
    cases: Iterable[tuple],
    truth: Callable[..., Any],
    slips: Sequence[Slip],
    words: str | Callable[..., str],
    *,
    read: Callable[..., Any] = lambda got, *case: got,
    right: Callable[[Any, Any], bool] | None = None,
    unknown: Callable[[Row], str] | None = None,
) -> list[Row]:
    """Ask for every case, and raise `Wrong` with the mistake that was made, if one is wrong.

    Args:
        truth: The right answer to a case.
        words: The case in words: a text with fields for its values, or a function of them.
        read: Makes plain values, those of the truth's type, of what was returned; gets the case too.
        right: Whether a given value is the truth; equal, and for numbers to six digits, where it is None.
        unknown: The sentence on a wrong case that no known mistake explains, without a full stop.
    """
    right = right or alike
    rows = []
    for case in cases:
        given = read(answer(*copy.deepcopy(case)), *case)  # a copy: an answer may take its lists apart
        rows.append(Row(case, given, truth(*case)))
    if wrong := [row for row in rows if not right(row.given, row.truth)]:
        name_the_mistake(rows, wrong, slips, words, unknown)
    return rows


def name_the_mistake(
    rows: Sequence[Row],
    wrong: Sequence[Row],
    slips: Sequence[Slip],
    words: str | Callable[..., str],
    unknown: Callable[[Row], str] | None = None,
) -> NoReturn:
    """Raise `Wrong` with the mistake that gives all answers, or with one wrong case.

    Args:
        rows: All cases.
        wrong: Those whose answer is wrong, in the same order.
        words: As for `compare`, and so is `unknown`.
    """
    describe = words.format if isinstance(words, str) else words
    rows, wrong = [Row(*row) for row in rows], [Row(*row) for row in wrong]
    for rel in (1e-9, 1e-4):
        for sentence, mistaken in slips:
            # To four digits a slip may be the truth, and explains nothing then.
            apart = (not alike(row.truth, mistaken(*row.case), rel=rel) for row in wrong)
            if all(alike(row.given, mistaken(*row.case), rel=rel) for row in rows) and all(apart):
                counted = f"all {len(wrong)} wrong answers" if len(wrong) > 1 else "the wrong answer"
                raise Wrong(
                    f"{sentence} ({describe(*wrong[0].case)}). This explains {counted}, as another mistake might."
                )
    if len(rows) > 1 and all(alike(row.given, rows[0].given) for row in rows):
        raise Wrong(f"The answer is the same in every case, and depends on what is asked ({describe(*wrong[0].case)}).")
    row = min(wrong, key=lambda row: row.truth) if isinstance(wrong[0].truth, Number) else wrong[0]
    if unknown is not None:
        raise Wrong(f"{unknown(row)} ({describe(*row.case)}).")
    raise Wrong(
        f"This mistake is not one that the check knows. One wrong case: {describe(*row.case)} gives "
        f"{_short(row.given)}, and should give {_short(row.truth)}."
    )


def refuse(case: str, *signs: tuple[str | Callable[[], str], Any]) -> None:
    """Raise `Wrong` with the sentence of the first sign that is there, and the case in brackets behind it.

    Args:
        case: What was asked, in words; "" for none.
        signs: A sentence without its full stop, and whether it is true of the answer; either may be a function, which is
            called only if no sign before it was there.
    """
    for sentence, there in signs:
        if there() if callable(there) else there:
            text = sentence() if callable(sentence) else sentence
            raise Wrong(f"{text} ({case})." if case else f"{text}.")


def recognize(
    given: Any, case: str, slips: Iterable[tuple[str, Any]], same: Callable[[Any, Any], bool] | None = None
) -> None:
    """Raise `Wrong` with the sentence of the first mistake that gives this value.

    Args:
        case: As for `refuse`.
        slips: A sentence without its full stop, and what this mistake gives.
        same: Whether a given value is the mistake's; `alike` where it is None.
    """
    for sentence, value in slips:
        if (same or alike)(given, value):
            raise Wrong(f"{sentence}{f' ({case})' if case else ''}. Another mistake may give the same.")


def alike(given: Any, truth: Any, *, rel: float = 1e-6) -> bool:
    """Say whether two answers are the same: numbers to a relative tolerance, all else equal."""
    if isinstance(truth, Number) and not isinstance(truth, bool):
        return close(given, truth, rel=rel)  # type: ignore[arg-type]
    return bool(given == truth)


def _short(value: Any) -> str:
    if isinstance(value, Number) and not isinstance(value, bool):
        return f"{float(value):,.0f}" if abs(float(value)) >= 1e6 else f"{float(value):.6g}"  # type: ignore[arg-type]
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
