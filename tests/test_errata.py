"""The errata page: every claim about memory that it must settle has a row, and the row's numbers are the right ones.

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
    "Adam keeps 8 bytes": ("12", "16", "16 GB", "1,600 GB"),
    "A parameter costs 6, 8, 10 or 12": ("16", "18", "20", "12"),
    "70B is 140 GB in fp16": ("140 GB", "840 GB", "6 times", "1,120 GB", "8 times"),
    "7B takes 84 GB": ("112 GB", "40%"),
    "optimizer of 7B takes 56 GB": ("28 GB", "84 GB"),
    "1.5B is a good first run": ("24.9 GB", "23.1 GB"),
    "7B keeps 8 GB of activations": ("9.1 GB", "8.5 GiB", "30.6 GB", "0.54 GB"),
    "no activations are stored": ("4.8 GB", "7.7 GB"),
    "because of the KV cache": ("1.1 GB",),
    "save 4x, 8x and 16x": ("2.29x, 2.91x and 4.00x", "3.82x, 7.21x and 64.00x"),
    "84, 42, 31.5 and 21 GB": ("112, 49, 38.5 and 28 GB",),
    "175B takes 350 + 700/N": ("700 + 2,100/N", "350 + 2,450/N", "2,800/N", "733, 388 and 44"),
    "FSDP shards parameters": ("14 GB", "100 GB"),
    "without a wrap policy": ("13.5 GB", "0.9 GB"),
    "Tensor parallelism divides memory": ("20%", "12.5%"),
    "1F1B keeps as many micro-batches": ("4, 3, 2 and 1", "5.5, 4.5, 3.5 and 2.5"),
    "On 80 GB cards: 7B with DDP 8": ("112, 104, 60, 35 and 43.75 GB",),
    "GPT-3 as 8 x 8 x 16": ("45.1 GB", "55.8 GB", "34.5 GB", "10.3 GB"),
    "An 8-bit optimizer halves": ("8 bytes", "2.03", "12", "6.03"),
}
#: The same for the memory in papers and manuals.
MISPRINTS = {
    "{cite}`rajbhandari2019`, table 1": ("4,011.7 GB",),
    "{cite}`rajbhandari2019`, section 6.1": ("33.6 billion", "67 GB"),  # 32 x 1024 x 8192 x 125
    "{cite}`korthikanti2022`, section 4.3": ("0.57%",),  # (p/L + 4/L (1 + v/h)) / (34 + 5as/h)
    "{cite}`korthikanti2022`, appendix B": ("2.94 GB", "2.73 GiB"),
    "DeepSpeed's documentation": ("15.93 GB", "11.28"),
    "Accelerate's documentation": ("108,310,272", "413.18"),
    "Transformer Math 101": ("4.4 GB", "35 GB"),
    "Ultra-Scale Playbook": ("6.97B", "8.03B"),
}
#: What a right-hand cell may say typed: what a claim assumes, what a data sheet says, what a paper prints.
GIVEN = (
    "32 GB of activations that the claim assumes",
    "300 GB of activations",
    "even 1,140 GB",
    "on a 48 GB GPU",
    "on 80 GB",
    "80 GB GPUs",
    "on 96 GB GPUs",
    "The 7.5B columns",
    '"About 33 GB"',
    '"around 60 GB" of section 3.2',
    '"less than 0.01%"',
    "printed as 2.73 GB",
    "printed as 30.1 percent",
    "418.18 MB in one table and 413.18 in another",
)


def _rows(text):
    """Return (section, cells) of every row of every table."""
    section, rows = "", []
    for line in text.splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("| ") and not line.startswith(("| you read", "| where")):
            rows.append((section, [cell.strip() for cell in line.strip("| ").split(" | ")]))
    return rows


ROWS = _rows(PAGE)
MEMORY = [cells for section, cells in ROWS if section.startswith("Memory")]
PAPERS = [cells for section, cells in ROWS if section.startswith("In papers")]


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


@pytest.mark.parametrize(("table", "claims"), [(MEMORY, CLAIMS), (PAPERS, MISPRINTS)], ids=["claims", "papers"])
def test_every_claim_has_its_row_and_the_row_its_numbers(table, claims, names):
    for claim, numbers in claims.items():
        found = [cells for cells in table if claim in cells[0]]
        assert len(found) == 1, f"{claim!r} has {len(found)} rows"
        shown = _shown(found[0][1], names)
        for number in numbers:
            assert re.search(rf"(?<![\w.,]){re.escape(number)}(?![\w]|[.,]\d)", shown), (claim, number, shown)


@pytest.mark.parametrize("cells", MEMORY, ids=lambda cells: cells[0][:32])
def test_a_row_about_memory_is_computed_short_and_leads_to_its_rung(cells, names):
    _, right, rung = cells
    assert EVAL.search(right), "no number is computed"
    assert len(_shown(right, names)) <= 260
    number, page = re.fullmatch(r"\[(\d\d)\]\(([\w.]+)\)", rung).groups()
    assert (BOOK / page).exists()
    assert page.startswith(number) or page in {"choosing_parallelism.md", "fsdp1_history.md"}


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
