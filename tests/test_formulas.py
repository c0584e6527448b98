"""The list of formulas is what the chapters derive: each stands in its labelled equation, and its example is computed."""

import importlib
import re
from pathlib import Path

import pytest

from lablib.calc.formulas import FORMULAS, job
from lablib.calc.runs import STUDY_MINUTES
from lablib.view.formulas import formula_sheet, rung_card

BOOK = Path(__file__).resolve().parents[1] / "book"
ALL = [(rung, formula) for rung, formulas in FORMULAS.items() for formula in formulas]
IDS = [f"{rung}-{formula.label}" for rung, formula in ALL]
LABELLED = re.compile(r"(?ms)^\$\$\n?(.*?)\n?\$\$ \((eq-[\w-]+)\)[ ]*$")


def _page(rung, formula):
    stem = formula.page or next(BOOK.glob(f"{rung}_*.md")).stem
    return (BOOK / f"{stem}.md").read_text(encoding="utf-8")


def _bare(tex):
    """Return a formula without what only moves it on the page."""
    return re.sub(r"\\[,;!: ]|\\(?:left|right|quad|qquad|[bB]igg?[lr]?)(?![a-zA-Z])|[\s&~]|\\\\", "", tex).rstrip(".,")


@pytest.mark.parametrize("rung", STUDY_MINUTES)
def test_every_rung_has_its_formulas_at_its_head(rung):
    assert 4 <= len(FORMULAS[rung]) <= 12
    text = next(BOOK.glob(f"{rung}_*.md")).read_text(encoding="utf-8")
    head = text.split("\n## ")[0]
    assert "{admonition} Rung " + rung + "\n:class: rung" in head
    assert "**Question.**" in head
    assert "**What you need first.**" in head
    assert f'rung_card("{rung}")' in head


@pytest.mark.parametrize(("rung", "formula"), ALL, ids=IDS)
def test_a_formula_stands_in_its_labelled_equation(rung, formula):
    equations = {label: tex for tex, label in LABELLED.findall(_page(rung, formula))}
    assert formula.label.startswith(f"eq-{rung}-")
    assert _bare(formula.tex) in _bare(equations[formula.label])


@pytest.mark.parametrize(("rung", "formula"), ALL, ids=IDS)
def test_a_formula_names_the_function_that_computes_it(rung, formula):
    module, _, name = formula.code.rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize(("rung", "formula"), ALL, ids=IDS)
def test_an_example_is_computed_for_the_chosen_model(rung, formula):
    small, large = formula.example(job("llama-3-8b")), formula.example(job("llama-3.1-70b"))
    assert re.search(r"\d", small)
    assert re.search(r"\d", large)
    assert not re.search(r"\.\d{7}", small + large)  # a number for readers
    assert formula.symbols
    assert "$" not in formula.name + formula.symbols + small  # an explorer shows them without MathJax


def test_no_formula_stands_twice():
    names = [formula.name for _, formula in ALL]
    assert len(set(names)) == len(names)
    # One displayed equation may have several lines, a formula each.
    lines = [(formula.label, formula.tex) for _, formula in ALL]
    assert len(set(lines)) == len(lines)


@pytest.mark.parametrize("page", sorted(path.stem for path in BOOK.glob("[0-9][0-9]_*.md")))
def test_every_displayed_equation_has_a_label(page):
    text = (BOOK / f"{page}.md").read_text(encoding="utf-8")
    prose = re.sub(r"(?ms)^(`{3,}|:{3,})\{code-cell\}.*?^\1[ ]*$", "", text)
    closed = len(re.findall(r"(?m)^[ >]*\$\$|\$\$ \(eq-", prose))
    assert closed == 2 * len(re.findall(r"(?m)^[ >]*\$\$ \(eq-[\w-]+\)[ ]*$", prose))


@pytest.mark.parametrize("rung", FORMULAS)
def test_tables_show_every_formula(rung):
    card, sheet = rung_card(rung).data, formula_sheet(rung).data
    for formula in FORMULAS[rung]:
        assert formula.tex in card
        assert formula.tex in sheet
        assert formula.label in card
        assert formula.example(job()) in sheet
