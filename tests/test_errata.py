"""The errata page: every row says where its claim is made, and the rows it must have have the right numbers.

The numbers here were worked out by hand, from papers and by multiplying; the page computes its own with lablib.calc.
"""

import re
import sys
from pathlib import Path

import pytest

BOOK = Path(__file__).resolve().parents[1] / "book"
PAGE = (BOOK / "errata.md").read_text(encoding="utf-8")
EVAL = re.compile(r"\{eval\}`(.+?)`(?!`)")

#: A piece of a claim, and what its row must say: worked out by hand, from 16 = 2 + 2 + 12 bytes a parameter.
CLAIMS = {
    "Adam keeps 8 bytes": ("12", "16", "1,600 GB"),
    "Training with AdamW takes 8 bytes": ("16", "112 GB"),
    "7B takes 84 GB": ("112 GB",),
    "70B takes 840 GB": ("1,120 GB", "6,480 GB", "81"),
    "70B takes 500 to 700 GB": ("840 GB", "1,120 GB"),
    "1.3B takes almost 10.5 GB": ("15.6 GB", "20.8 GB"),
    "7B takes 104 to 124 GB": ("112 GB", "132 GB", "152 GB"),
    "28 GB in 8": ("56 GB", "14.2 GB"),
    "40 GB A100 fine-tunes": ("112 GB", "56 GB"),
    "keeps 2 GB of activations": ("9.1 GB", "36.5 GB", "30.6 GB"),
    "saves 60 to 80 percent": ("30.6 GB", "1.5 GB"),  # 2sbhL beside (34 + 5as/h) sbh of one block
    "ZeRO-1 saves about 4x": ("2.29x and 2.91x", "3.82x and 7.21x"),
    "70B takes 105 GB": ("140 GB",),
    "as little as 2 bytes": ("16/N", "2", "0.25"),
    "only the top-level model": ("40.4 GB", "107.8 GB"),  # 6.738B: 16/8 + 2 + 2 bytes, and 16
}
#: The same for the rest of the page: links count one way, a bubble has two fractions, 4 = 2 + 2 collectives a layer.
OTHERS = {
    "do not fit on a GPU": ("3.6 GB",),  # 12 x 12,288^2 x 2
    "NVLink 4 has 14 times": ("450", "63", "7.1", "300", "31.5"),
    "Every ZeRO stage costs": ("1.5",),
    "160 times a step": ("320",),
    "1F1B cuts": ("33", "28.5"),  # (8 + 3) 3 and (8 + 3/2) 3
    "3/16 = 18.75%": ("18.8%", "15.8%"),
    "active 2/N": ("25%",),
    "first rank attends to all": ("0.5, 1.5, 2.5 and 3.5",),
    "contiguous slice of the sequence": ("7",),
    # Keys and values of 131,072 tokens are 2 x 131,072 x 1,024 x 2 bytes = 537 MB; 7/8 of them travel.
    "point to point, in a ring": ("1,409 MB", "940 MB", "587 MB"),
    "every rank gathers all keys": ("294 MB", "470 MB"),
    "hide more of a ring": ("8,400",),  # 2 x 840 TFLOP/s over 50 GB/s, over 4 queries a key head
    "grows quadratically": ("16.0",),
    "the others can stay on disk": ("128", "2e-113"),  # 128 x (15/16)^4096
    "eight experts of 7B": ("46.7B", "12.9B"),
    "E4M3 is fp16 minus": ("5", "57,344", "65,504", "448"),
    "scaled linearly": ("2.8",),
}
#: The same for the memory in papers and manuals.
MISPRINTS = {
    "{cite}`rajbhandari2019`, table 1": ("4,011.7 GB",),
    "{cite}`rajbhandari2019`, section 6.1": ("33.6 billion", "67 GB"),  # 32 x 1024 x 8192 x 125
    "{cite}`korthikanti2022`, section 4.3": ("0.57%",),  # (p/L + 4/L (1 + v/h)) / (34 + 5as/h)
    "{cite}`korthikanti2022`, appendix B": ("2.94 GB", "2.73 GiB"),
    "{cite}`korthikanti2022`, section 5": ("2.7%", "0.9%"),  # s/6h over 1 + s/6h, and a third of it
    "DeepSpeed's documentation": ("15.93 GB", "11.28"),
    "Accelerate's documentation": ("108,310,272", "413.18"),
    "Transformer Math 101": ("4.4 GB", "35 GB"),
}
#: What a right-hand cell may say typed: what a claim assumes, what a data sheet says, what a paper prints.
GIVEN = (
    "The 7.5B columns",
    '"About 33 GB"',
    '"less than 0.01%"',
    "printed as 2.73 GB",
    "2.7 percent more FLOPs",
    "printed as 30.1 percent",
    "418.18 MB in one table and 413.18 in another",
)
#: Cells of a row: papers and manuals are their own source.
SHAPES = {"In papers and manuals": 2}
HEADS = ("| you read", "| where")
#: A link to a page, not to its site alone, or a citation.
SOURCE = re.compile(r"\[[^\]]+\]\(https?://[^/)]+/[^)\s]+\)|\{cite\}`\w+`")
BIB = (BOOK / "references.bib").read_text(encoding="utf-8")


def _rows(text):
    """Return (section, cells) of every row of every table."""
    section, rows = "", []
    for line in text.splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("| ") and not line.startswith(HEADS):
            rows.append((section, [cell.strip() for cell in line.strip("| ").split(" | ")]))
    return rows


ROWS = _rows(PAGE)
MEMORY = [cells for section, cells in ROWS if section.startswith("Memory")]
PAPERS = [cells for section, cells in ROWS if section.startswith("In papers")]
REST = [cells for section, cells in ROWS if not section.startswith("Memory") and section not in SHAPES]


@pytest.fixture(scope="module")
def names():
    """What the page's own code defines."""
    space = {}
    for cell in re.findall(r"^```\{code-cell\}[^\n]*\n(.*?)^```", PAGE, re.S | re.M):
        exec(re.sub(r"^:tags:.*\n", "", cell), space)
    return space


def _shown(cell, names):
    return EVAL.sub(lambda found: str(eval(found[1], names)), cell)


def test_the_page_computes_without_torch():
    modules = re.findall(r"^(?:from|import) ([\w.]+)", PAGE, re.M)
    assert modules
    assert all(name.startswith("lablib.calc.") or name in sys.stdlib_module_names for name in modules)


@pytest.mark.parametrize(
    ("table", "claims"), [(MEMORY, CLAIMS), (REST, OTHERS), (PAPERS, MISPRINTS)], ids=["memory", "others", "papers"]
)
def test_every_claim_has_its_row_and_the_row_its_numbers(table, claims, names):
    for claim, numbers in claims.items():
        found = [cells for cells in table if claim in cells[0]]
        assert len(found) == 1, f"{claim!r} has {len(found)} rows"
        shown = _shown(found[0][1], names)
        for number in numbers:
            assert re.search(rf"(?<![\w.,]){re.escape(number)}(?![\w]|[.,]\d)", shown), (claim, number, shown)


def test_every_expression_of_a_row_has_a_value(names):
    assert all(_shown(cell, names) for _, cells in ROWS for cell in cells)


def unsourced(section, cells):
    """Return what a row lacks, if it lacks anything: who says it, or the rung that derives it."""
    if len(cells) != SHAPES.get(section, 4):
        return f"{len(cells)} cells"
    source = cells[0] if section == "In papers and manuals" else cells[2]
    if not SOURCE.search(source) and "{cite}" not in source and section != "In papers and manuals":
        return "no link to a page and no citation"
    cited = re.findall(r"\{cite\}`([\w,]+)`", source)
    if section == "In papers and manuals" and not cited:
        return "no citation"
    return "".join(f"{key} is not in references.bib" for key in cited if f"{{{key}," not in BIB)


@pytest.mark.parametrize(("section", "cells"), ROWS, ids=lambda value: value[0][:32] if isinstance(value, list) else "")
def test_every_row_names_where_it_is_said(section, cells):
    assert unsourced(section, cells) == ""


def test_a_row_without_a_source_is_found():
    row = ["Adam keeps 8 bytes", "12", "[A blog](https://example.org/adam)", "[01](01_why_distributed.md)"]
    assert unsourced("Memory: states", row) == ""
    assert unsourced("Memory: states", [*row[:2], row[3]]) != ""
    assert unsourced("Memory: states", [*row[:2], "people", row[3]]) != ""
    assert unsourced("Memory: states", [*row[:2], "[A site](https://example.org/)", row[3]]) != ""
    assert unsourced("Memory: states", [*row[:2], "{cite}`nobody1999`", row[3]]) != ""
    assert unsourced("In papers and manuals", ["A paper, table 1", "12"]) != ""


def test_no_claim_stands_twice():
    claims = [cells[0] for _, cells in ROWS]
    assert len(set(claims)) == len(claims)


@pytest.mark.parametrize("cells", MEMORY, ids=lambda cells: cells[0][:32])
def test_a_row_about_memory_is_computed_and_short(cells, names):
    assert EVAL.search(cells[1]), "no number is computed"
    assert len(_shown(cells[1], names)) <= 260


@pytest.mark.parametrize(
    "cells", [cells for section, cells in ROWS if section != "In papers and manuals"], ids=lambda cells: cells[0][:32]
)
def test_a_row_leads_to_its_rung(cells):
    number, page = re.fullmatch(r"\[(\d\d)\]\(([\w.]+)\)", cells[-1]).groups()
    assert (BOOK / page).exists()
    beside = {"batch_size", "low_bits"}
    assert page.startswith(number) or page.removesuffix(".md") in beside


@pytest.mark.parametrize("cells", [cells for _, cells in ROWS], ids=lambda cells: cells[0][:32])
def test_no_result_is_typed_by_hand(cells):
    right = EVAL.sub("", cells[1])
    for given in GIVEN:
        right = right.replace(given, "")
    # A decimal, or a number of bytes, that the claim itself does not say.
    typed = re.findall(r"(?<![\w.])\d[\d,]*\.\d+|\b\d[\d,]* (?:GB|GiB|TB|bytes)\b", right)
    assert [number for number in typed if number not in cells[0]] == []


def test_what_is_given_is_on_the_page():
    assert [given for given in GIVEN if given not in PAGE] == []
