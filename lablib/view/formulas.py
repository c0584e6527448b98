"""The formulas of the course as tables: at the head of each chapter, and all on one sheet."""

from __future__ import annotations

from IPython.display import Markdown

from lablib.calc.formulas import FORMULAS, Formula, job
from lablib.calc.runs import STUDY_MINUTES, hours_text


def rung_card(rung: str) -> Markdown:
    """Return the minutes of a rung and its formulas, each with a link to its derivation."""
    chapter, lab = (hours_text(minutes) for minutes in STUDY_MINUTES[rung])
    rows = [f"| {each.name} | $\\displaystyle {each.tex}$ | {_derived(each)} |" for each in FORMULAS[rung]]
    return Markdown(
        "\n".join(
            [
                f"**Time.** {chapter} for the chapter, {lab} for the lab.",
                "",
                "| of this rung | formula | derived |",
                "|---|---|---|",
                *rows,
            ]
        )
    )


def formula_sheet(rung: str) -> Markdown:
    """Return the formulas of a rung with their symbols, an example each, and links to derivation and code."""
    chosen = job()
    blocks = []
    for each in FORMULAS[rung]:
        blocks += [
            f"**{each.name}.** Derived as {_derived(each)}.",
            "",
            f"$${each.tex}$$",
            "",
            f"{each.symbols.rstrip('.')}. Example: **{each.example(chosen)}**, by `{each.code}`.",
            "",
        ]
    return Markdown("\n".join(blocks))


def _derived(formula: Formula) -> str:
    there = f" of [{formula.page.replace('_', ' ')}]({formula.page}.md)" if formula.page else ""
    return f"{{eq}}`{formula.label}`{there}"
