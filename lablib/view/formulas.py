"""The formulas of the course as tables: at the end of each chapter, and all on one sheet."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from IPython.display import Markdown

from lablib.calc.formulas import FORMULAS, Formula, job
from lablib.calc.runs import STUDY_MINUTES, hours_text

BOOK = Path(__file__).resolve().parents[2] / "book"
_LABELLED = re.compile(r"(?ms)^\$\$\n?(.*?)\n?\$\$ \((eq-[\w-]+)\)[ ]*$")


def equation(formula: Formula) -> str:
    """Return the TeX of a formula on one line: that of its labelled equation, or of one line of it."""
    tex = _equations(formula.page or next(BOOK.glob(f"{formula.rung}_*.md")).stem)[formula.label]
    lines = re.sub(r"\\(?:begin|end)\{aligned\}", "", tex).replace("&", "").split(r"\\")
    chosen = lines if formula.line is None else lines[formula.line : formula.line + 1]
    return " ".join(" ".join(chosen).split()).rstrip(" .,")


@cache
def _equations(page: str) -> dict[str, str]:
    """The labelled equations of a page, by label."""
    return {label: tex for tex, label in _LABELLED.findall((BOOK / f"{page}.md").read_text(encoding="utf-8"))}


def rung_card(rung: str) -> Markdown:
    """Return the minutes of a rung, with a link to the rule that counts them."""
    chapter, lab = (hours_text(minutes) for minutes in STUDY_MINUTES[rung])
    return Markdown(
        f"**Time**, by a [rule](how_to_use.md#how-long-it-takes): {chapter} for the chapter, {lab} for the lab."
    )


def rung_formulas(rung: str) -> Markdown:
    """Return the formulas of a rung, each with a link to its derivation."""
    rows = [f"| {each.name} | $\\displaystyle {equation(each)}$ | {_derived(each)} |" for each in _of(rung)]
    return Markdown("\n".join(["| of this rung | formula | derived |", "|---|---|---|", *rows]))


def formula_sheet(rung: str) -> Markdown:
    """Return the formulas of a rung with their symbols, an example each, and links to derivation and code."""
    chosen = job()
    blocks = []
    for each in _of(rung):
        blocks += [
            f"**{each.name}.** Derived as {_derived(each)}.",
            "",
            f"$${equation(each)}$$",
            "",
            f"{each.symbols.rstrip('.')}. Example: **{each.example(chosen)}**, by `{each.code}`.",
            "",
        ]
    return Markdown("\n".join(blocks))


def _derived(formula: Formula) -> str:
    there = f" of [{formula.page.replace('_', ' ')}]({formula.page}.md)" if formula.page else ""
    return f"{{eq}}`{formula.label}`{there}"


def _of(rung: str) -> list[Formula]:
    return [formula for formula in FORMULAS if formula.rung == rung]
