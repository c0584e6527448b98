"""The formulas of the course are what the chapters derive: each labelled equation gives what its function computes."""

import re
from dataclasses import replace
from functools import cache
from math import exp, log

import pytest
import torch

from lablib.calc.formulas import FORMULAS, job, symbol_values
from lablib.calc.runs import STUDY_MINUTES
from lablib.toys.context_parallel.softmax import Partial, merge
from lablib.toys.expert_parallel.router import load_balancing_loss
from lablib.view.formulas import BOOK, equation, formula_sheet, rung_formulas
from tests.tex_value import agrees, tokenized

IDS = [f"{formula.label}-{formula.line}" if formula.line else formula.label for formula in FORMULAS]
every_formula = pytest.mark.parametrize("formula", FORMULAS, ids=IDS)

#: What no number can be drawn for, and why.
NOT_EVALUATED = {
    "eq-03-column": "a definition, of matrices: test_tensor_parallel computes it",
    "eq-03-row": "a product of matrices: test_tensor_parallel computes it",
    "eq-03-loss": "needs ranks: test_tensor_parallel holds it to the loss of one",
    "eq-07-step": "names the parts of the planner's own sum: test_step_time holds it to schedules",
    "eq-14-weight": "needs groups: test_replica_groups holds their losses to those of one process",
    "eq-11-noise-scale": "defined by expectations: test_noise_scale estimates it from draws",
}

#: Jobs that differ in every number.
JOBS = [
    job(),
    replace(job("llama-3.1-70b", "b200"), ranks=256, tp=4, pp=2, chunks=3, microbatches=10, micro_batch=2, seq=4096),
    replace(job("llama-2-13b", "a100-80gb"), ranks=128, tp=2, pp=8, chunks=5, microbatches=32, micro_batch=3, seq=2048),
]


@every_formula
def test_a_formula_gives_what_the_function_computes(formula):
    if formula.label in NOT_EVALUATED:
        return
    tokens = tokenized(equation(formula))
    assert all(agrees(tokens, value, given, formula.within) for value, given in _computed(formula))


@every_formula
def test_another_number_in_the_equation_would_be_seen(formula):
    """Any number of an equation but an index, one larger, is no longer what the function gives."""
    if formula.label in NOT_EVALUATED:
        return
    tokens = tokenized(equation(formula))
    for at, token in enumerate(tokens):
        index = "_" in tokens[max(0, at - 4) : at] or tokens[at - 1] == r"\ge"
        bound = r"\le" in tokens[:at] and formula.label != "eq-08-window"  # a larger one is one as well
        if token.isdigit() and not index and not bound:
            other = [*tokens[:at], str(int(token) + 1), *tokens[at + 1 :]]
            seen = False
            for value, given in _computed(formula):
                try:
                    seen |= not agrees(other, value, given, formula.within)
                except (ArithmeticError, ValueError):
                    seen = True
            assert seen, f"{''.join(other)} agrees as well"


@cache
def _computed(formula):
    """What the function gives for each job, and the values of its symbols."""
    if formula.label in TOYS:
        return [TOYS[formula.label]()]
    given = [formula.given(symbol_values(formula.rung, each)) for each in JOBS]
    return [(formula.compute(**symbols), symbols) for symbols in given]


def _merged():
    symbols = {"ell_1": log(4.0), "ell_2": log(12.0), "o_1": 5.0, "o_2": 3.5}
    one, two = (
        Partial(
            torch.tensor([[[[symbols[f"o_{i}"]]]]], dtype=torch.float64),
            torch.tensor([[[symbols[f"ell_{i}"]]]], dtype=torch.float64),
        )
        for i in (1, 2)
    )
    return merge(one, two), symbols


def _lse():
    merged, symbols = _merged()
    return merged[1].item(), symbols


def _output():
    merged, symbols = _merged()
    return merged[0].item(), symbols | {"ell": log(exp(symbols["ell_1"]) + exp(symbols["ell_2"]))}


def _balance():
    scores = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]], dtype=torch.float64)
    chosen = torch.tensor([[0, 1], [1, 0]])
    shares = [None, 0.5, 0.5, 0.0]
    loss = load_balancing_loss(scores, chosen).item()
    return loss, {"alpha": 1.0, "E": 3, "f": shares, "P": [None, *scores.mean(0).tolist()]}


TOYS = {"eq-12-lse": _lse, "eq-12-merge": _output, "eq-13-balance": _balance}


@pytest.mark.parametrize(
    ("tex", "value", "symbols"),
    [
        (r"T = 2\,\frac{n-1}{n}\,\frac{S}{W} .", 15.0, {"n": 16, "S": 80, "W": 10}),
        (r"1 + \frac12 + \dots + \frac1n ,", 25 / 12, {"n": 4}),
        (r"\sqrt{2 + 3 + \dots + n} \approx \sqrt{\frac{n^2}{2}}", 5049**0.5, {"n": 100}),
        (r"\text{full: } 1 + 2U, \qquad \text{half: } 1 + U,", (9, 5), {"U": 4}),
        (r"w_0 + \max_{i\ge1}\,(2w_i + w_{i-1}) .", 9, {"w": [1, 2, 3]}),
        (
            r"\left\lfloor \frac{r}{n_1 \cdots n_{k-1}} \right\rfloor \bmod n_k",
            2,
            {"n": [None, 2, 3, 4], "k": 3, "r": 13},
        ),
        (r"\max_j n_j \Big/ \left( \frac{1}{e} \sum_j n_j \right)", 1.5, {"n": [3, 1], "e": 2}),
        (r"\frac{E}{k} \sum_{n > C} (n - C)\,\beta_n", 5, {"E": 2, "k": 2, "C": 1, "beta": [9, 9, 1, 2]}),
        (r"2^{\lceil \log_2 (\max \lvert x \rvert / 448) \rceil}", 2, {"x": [-500, 3]}),
        (r"\frac{1}{\phi} \le T_{\text{comm}}", 4, {"phi": 0.25, "T_comm": 4}),
        (r"m \ge \min(p, v) - 1", 3, {"p": 5, "v": 4}),
    ],
)
def test_equations_are_evaluated(tex, value, symbols):
    assert agrees(tokenized(tex), value, symbols)
    assert not agrees(tokenized(tex), (2, 3) if isinstance(value, tuple) else value * 1.001, symbols)


@pytest.mark.parametrize("rung", STUDY_MINUTES)
def test_every_rung_has_its_minutes_at_its_head_and_its_formulas_at_its_end(rung):
    assert 4 <= sum(formula.rung == rung for formula in FORMULAS) <= 12
    text = next(BOOK.glob(f"{rung}_*.md")).read_text(encoding="utf-8")
    head = text.split("\n## ")[0]
    assert "{admonition} Rung " + rung + "\n:class: rung" in head
    assert "**Question.**" in head
    assert "**What you need first.**" in head
    assert f'rung_card("{rung}")' in head
    assert f'rung_formulas("{rung}")' in text.split("\n## Done when\n")[1]


@every_formula
def test_an_example_is_computed_for_the_chosen_model(formula):
    small, large = formula.example(job("llama-3-8b")), formula.example(job("llama-3.1-70b"))
    assert re.search(r"\d", small)
    assert re.search(r"\d", large)
    assert not re.search(r"\.\d{7}", small + large)  # a number for readers
    assert formula.symbols
    assert "$" not in formula.name + formula.symbols + small  # an explorer shows them without MathJax


def test_no_formula_stands_twice():
    names = [formula.name for formula in FORMULAS]
    assert len(set(names)) == len(names)
    # One displayed equation may have several lines, a formula each.
    equations = [(formula.label, equation(formula)) for formula in FORMULAS]
    assert len(set(equations)) == len(equations)


@pytest.mark.parametrize("page", sorted(path.stem for path in BOOK.glob("[0-9][0-9]_*.md")))
def test_every_displayed_equation_has_a_label(page):
    text = (BOOK / f"{page}.md").read_text(encoding="utf-8")
    prose = re.sub(r"(?ms)^(`{3,}|:{3,})\{code-cell\}.*?^\1[ ]*$", "", text)
    closed = len(re.findall(r"(?m)^[ >]*\$\$|\$\$ \(eq-", prose))
    assert closed == 2 * len(re.findall(r"(?m)^[ >]*\$\$ \(eq-[\w-]+\)[ ]*$", prose))


@pytest.mark.parametrize("rung", STUDY_MINUTES)
def test_tables_show_every_formula(rung):
    card, sheet = rung_formulas(rung).data, formula_sheet(rung).data
    for formula in FORMULAS:
        if formula.rung == rung:
            assert equation(formula) in card
            assert equation(formula) in sheet
            assert formula.label in card
            assert formula.example(job()) in sheet
