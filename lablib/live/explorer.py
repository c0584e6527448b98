"""An explorer: a calculator with controls, drawn once by the book and then by the reader's own browser.

An explorer is a module with an `EXPLORER`. Its function takes one value for each control and returns an `Answer`. The
directive {livecalc} calls it when the book is built, and Pyodide calls the same function in the page, so both show the
same numbers. A control offers a finite list of values: what the page may ask is known, and every state can be tested.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from urllib.parse import quote

from lablib.calc.errors import one_of
from lablib.calc.hardware import ACCELERATORS
from lablib.calc.models import preset
from lablib.calc.params import count_params
from lablib.calc.units import format_count
from lablib.live.svg import COLORS

Value = str | int
#: Of a page; the first says what a control could not take, and "reply" is empty until it is asked for.
PARTS = ("clipped", "picture", "caption", "table", "command", "call", "question", "reply", "files")


@dataclass(frozen=True, kw_only=True)
class Control:
    """One thing that the reader can change.

    Attributes:
        name: Argument of the explorer's function, and its key in the page's address.
        options: Every value, with what the reader sees for it, in order.
        first: The value that it has before the reader touches it.
        slider: Whether it is a slider over the options, which then grow; else a list to choose from.
        free: Whether it takes any text; its one option is the first value.
        fold: Whether it stands in a fold, with what few readers change.
        quick: Whether its touch is answered at once, of an explorer that waits for a button with the others.
    """

    name: str
    label: str
    options: tuple[tuple[Value, str], ...]
    first: Value
    slider: bool = False
    free: bool = False
    fold: bool = False
    quick: bool = False

    def read(self, given: object) -> Value:
        """Return the option that was meant; text is accepted for a number, since addresses and pages hold text."""
        if self.free:
            return str(given)
        known = {str(value): value for value, _ in self.options}
        return known[one_of(self.name, str(given), known)]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The parts of a page for one state.

    Attributes:
        caption: What it says, as a sentence or two.
        table: HTML of the numbers behind the picture.
        call: Python that computes the same numbers.
        numbers: The numbers as they were computed, by name, before they were rounded for the reader.
        command: A line for a shell that prints the same; empty where there is none.
        question: What a reader may ask on top, in words for a button, if the explorer has a `reply`; empty if nothing.
        files: What a reader may save, by name.
    """

    picture: str
    caption: str
    table: str
    call: str
    numbers: Mapping[str, int]
    command: str = ""
    question: str = ""
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Explorer:
    """A calculator with controls.

    Attributes:
        name: Prefix of its keys in the page's address.
        controls: What the reader can change.
        compute: Takes a value for each control by name, returns an `Answer`; raises ValueError for what cannot be.
        limits: Takes the same, returns for controls whose largest value depends on the others that value, and why.
        reply: Takes the same, returns HTML: what takes too long to follow every touch.
        button: Words of a button that the answer itself waits for, where it takes seconds; empty if it follows every touch.
    """

    name: str
    title: str
    controls: tuple[Control, ...]
    compute: Callable[..., Answer]
    limits: Callable[..., Mapping[str, tuple[int, str]]] = lambda **state: {}
    reply: Callable[..., str] = lambda **state: ""
    button: str = ""

    def state(self, given: Mapping[str, object] | None = None) -> dict[str, Value]:
        """Return a full state: the given values, and the first ones for all else."""
        given = dict(given or {})
        for name in given:
            one_of(f"control of the {self.name} explorer", name, [control.name for control in self.controls])
        return {control.name: control.read(given.get(control.name, control.first)) for control in self.controls}

    def clip(self, state: Mapping[str, Value]) -> tuple[dict[str, Value], str]:
        """Return a state with nothing above the most that its controls can take, and what that changed, in words."""
        taken, said = dict(state), []
        limits = self.limits(**state)
        for control in self.controls:
            limit, why = limits.get(control.name, (state[control.name], ""))
            if state[control.name] > limit:
                taken[control.name], words = [option for option in control.options if option[0] <= limit][-1]
                said.append(f"{control.label}: {words}, {why}.")
        return taken, " ".join(said)

    def answer(self, given: Mapping[str, object] | None = None) -> dict[str, object]:
        """Return what a page shows of a state: its parts as HTML, the bare numbers, and the state that was computed.

        Raises:
            ValueError: If a control or a value does not exist, or if settings contradict each other.
        """
        state, clipped = self.clip(self.state(given))
        found = self.compute(**state)
        return {
            "clipped": escape(clipped),
            "picture": found.picture,
            "caption": escape(found.caption),
            "table": found.table,
            "command": escape(found.command),
            "call": escape(found.call),
            "question": escape(found.question),
            "reply": "",
            "files": downloads(found.files),
            "numbers": dict(found.numbers),
            "state": state,
        }


def number_options(values: Iterable[int]) -> tuple[tuple[int, str], ...]:
    """Return numbers as options, each shown with its thousands apart."""
    return tuple((value, f"{value:,}") for value in values)


def model_options(names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return models as options, each shown with its parameters."""
    return tuple((name, f"{name} ({format_count(count_params(preset(name)).total)})") for name in names)


def device_options(*, clustered: bool = False) -> tuple[tuple[str, str], ...]:
    """Return the GPUs of the table that multiply in bf16, each shown with its capacity, in GB as all in an explorer.

    Args:
        clustered: Only those whose vendor joins them to neighbours by a link of their own, and to others by a network.
    """
    return tuple(
        (name, f"{card.name}, {card.memory_gb:.1f} GB")
        for name, card in sorted(ACCELERATORS.items(), key=lambda item: item[1].memory_bytes)
        if card.driver and "bf16" in card.flops and (not clustered or (card.scale_up and card.nic))
    )


def table(groups: Mapping[str, Mapping[str, tuple[str, str]]], *, prose: bool = False) -> str:
    """Return rows of numbers, or of words, under headings, each row with the colour that it has in the picture."""
    lines = []
    for heading, rows in groups.items():
        lines.append(f'<tr><th colspan="2" scope="colgroup">{escape(heading)}</th></tr>')
        for name, (role, words) in rows.items():
            chip = f'<span class="livecalc-chip" style="background:{COLORS[role]}"></span>' if role else ""
            lines.append(f'<tr><th scope="row">{chip}{escape(name)}</th><td>{escape(words)}</td></tr>')
    return f'<table class="livecalc-table{" livecalc-prose" * prose}"><tbody>{"".join(lines)}</tbody></table>'


def downloads(files: Mapping[str, str]) -> str:
    """Return files as text in folds, each with a link that saves it: the link holds the text, and needs no script."""
    return "".join(
        f"<details><summary>{escape(name)}</summary><code>{escape(text)}</code></details>"
        f'<a download="{escape(name)}" href="data:text/plain;charset=utf-8,{quote(text)}">Save {escape(name)}</a>'
        for name, text in files.items()
    )


def grid(columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """Return a table with a heading over each column; the first is the rows' own."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' if column else "<td></td>" for column in columns)
    lines = [
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, cells in rows.items()
    ]
    return f'<table class="livecalc-table"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def find_explorer(module: str) -> Explorer:
    """Return the explorer of a module."""
    found = getattr(importlib.import_module(module), "EXPLORER", None)
    if not isinstance(found, Explorer):
        raise ValueError(f"{module} has no EXPLORER")
    return found


def answer_json(module: str, state: str, *, reply: bool = False) -> str:
    """Return what `Explorer.answer` returns, or why there is no answer, from text to text: this is what the page calls.

    Args:
        reply: Whether the answer to its question is asked for.
    """
    explorer, given = find_explorer(module), json.loads(state)
    try:
        found = {"reply": explorer.reply(**explorer.state(given))} if reply else explorer.answer(given)
        return json.dumps(found)
    except ValueError as error:
        return json.dumps({"error": str(error)})
