"""The built pages: nothing unevaluated, nothing unformatted, every figure readable, every lab run as shipped."""

import functools
import re
from math import comb
from urllib.parse import urlparse

import pytest

from tests.built_site import CHAPTERS, LABS, MAP, MATHJAX_CDN, MATHJAX_IS_LOCAL, PAGES, ROOT, SITE, parsed, source
from tests.evidence.facts import read_facts
from tests.scripts import load

pytestmark = pytest.mark.site


@functools.cache
def _prose(page):
    """Return the text of a page's article without its code, its outputs and its formulas."""
    article = parsed(page).select_one("article.bd-article")
    others = {id(part) for part in article.select("pre, code, .math, svg, script, style")}
    texts = (text for text in article.strings if not others & {id(parent) for parent in text.parents})
    return " ".join(texts)


def test_the_site_is_built():
    # The tests of its pages are left out where it is not: see conftest.py.
    assert (SITE / "index.html").exists(), "make site"


@pytest.mark.parametrize("page", PAGES)
def test_no_expression_is_left_unevaluated(page):
    # MyST leaves {eval} as it stands inside formulas, raw HTML and split table cells, without a warning.
    assert "{eval}" not in source(page)
    assert not re.findall(r"\{(?:term|cite\w*|ref|numref|doc|eq)\}", _prose(page))
    assert not parsed(page).select(".problematic, .system-message")


@pytest.mark.parametrize("page", PAGES)
def test_numbers_are_written_for_readers(page):
    text = _prose(page)
    # A short number that rounding missed by a hair is shown on purpose: it is what floating point does to a sum.
    long = [
        number for number in re.findall(r"\b\d+\.\d{7,}", text) if abs(float(number) - round(float(number), 6)) > 1e-12
    ]
    assert long == []
    assert not re.findall(r"np\.float\d+\([^)]*\)|\btensor\(|\bnan\b", text)


#: Shares by the words before them, "…" for a number: (the part, the whole), worked by hand in the same passes.
F, NIC, S, H = 140e12, 25e9, 131_072, 16_384  # what an A100 reaches; bytes/s; Llama 3 405B's long sequence and width
LAYER_8B = 2 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4 * 8192 * 4096  # FLOPs a token, forward
STEP_8B = 3 * (32 * LAYER_8B + 2 * 4096 * 128_256)
LAYER_405B = 2 * S * (2 * H**2 + 2 * H * 1024 + 3 * H * 53_248) + 4 * H * S * (S + 1) / 2
SHARES = {
    "scaling_laws": {
        "8,192 tokens they are": (12 * 32 * 8192 * 4096, 6 * 8.03e9),
        "and not the look-up, is": (12 * 32 * 8192 * 4096 - 6 * 128_256 * 4096, 6 * 8.03e9),
    },
    "map_of_parallelism": {"Twice the GPUs buy": (1 / (0.02 + 0.98 / 128) - 1 / (0.02 + 0.98 / 64), 1 / (0.02 + 0.98 / 64))},
    "02_data_parallelism": {
        "tokens per rank,": (2 * F / (6 * 174.6e9), 2048),
        "ranks it grows by": (63 / 64 - 7 / 8, 7 / 8),
    },
    "05_zero": {"times its computation, so": (15 / 16 * F / NIC - 2048, 15 / 16 * F / NIC)},
    "09_activation_checkpointing": {
        ", of which": (5 * 96 * 2048, 34 * 12288 + 5 * 96 * 2048),
        "fused kernel it drops": (4 * 32, 12 * 4096 + 4 * 1024 + 4 * 32 + 8 * 14336),
        "it drops …% of the bytes for": (4 * 32 * 8192 * 4096, STEP_8B),
    },
    "11_practical_fsdp": {"… of … are": (148, 419)},
    "rented_hour": {"same memory and": (70, 125)},
    "12_context_parallelism": {
        "of the peak:": (2 * 2 * 128 * S * 15 / 16 / 50e9, LAYER_405B / 128 / (0.4 * 989.4e12)),
    },
    "13_expert_parallelism": {
        # One expert of width 2,048; dispatch and combine, there and back, of 7,168 bf16 values to each other node of
        # those four of eight in which one of eight choices lies.
        ", which every token visits, covers": (
            18 * 7168 * 2048 / (0.4 * 989.4e12),
            4 * 4 * (1 - comb(96, 8) / comb(128, 8)) * 7 / 8 * 7168 * 2 / 50e9,
        ),
    },
}  # fmt: skip


@pytest.mark.parametrize("page", SHARES)
def test_a_quoted_share_of_the_whole_is_the_part(page):
    prose = " ".join(_prose(f"book/{page}").split())
    for words, (part, whole) in SHARES[page].items():
        pattern = re.escape(words).replace("…", r"[\d,.]+")
        [shown] = {found.rstrip(".") for found in re.findall(rf"{pattern} ([\d.]+)%", prose)}
        half_a_digit = 0.5 * 10.0 ** -len(shown.partition(".")[2]) / 100
        assert part / whole == pytest.approx(float(shown) / 100, abs=half_a_digit * 1.0001), words


def test_every_share_on_a_page_of_flops_is_worked_by_hand():
    expression = re.compile(r"\{eval\}`(.+?)`(?!`)")
    for path in sorted((ROOT / "book").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        # tests/test_errata.py works out the rows of the errata.
        if "from lablib.calc.flops import" not in text or path.stem == "errata":
            continue
        for found in expression.finditer(text):
            if "/" in found[1] and ("%}" in found[1] or "pct(" in found[1]):
                before = expression.sub("…", text[: found.start()]).rstrip()
                assert before.endswith(tuple(SHARES[path.stem])), (path.stem, before[-60:])


@pytest.mark.parametrize("page", PAGES)
def test_no_page_shows_a_traceback_or_a_warning_of_a_cell(page):
    text = parsed(page).get_text()
    assert "Traceback (most recent call last)" not in text
    assert not re.findall(r"\b\w*Warning: ", text)
    assert "TqdmWarning" not in text


@pytest.mark.parametrize("page", CHAPTERS)
def test_a_chapter_draws_two_figures_or_more(page):
    assert len(parsed(page).select("figure.house-figure svg")) >= 2


def test_every_page_says_what_it_is_about():
    said = {page: parsed(page).select_one("meta[name=description]")["content"] for page in PAGES}
    assert len(set(said.values())) == len(PAGES)
    for page, text in said.items():
        assert 60 <= len(text) <= 300, page
        assert "question of this page" not in text, page


@pytest.mark.parametrize("page", CHAPTERS)
def test_a_chapter_ends_with_its_takeaways_and_the_way_on(page):
    boxes = [box for box in parsed(page).select(".admonition.tip") if box.p.get_text() == "Takeaway"]
    *_, summary = parsed(page).select("article section[id]")
    assert summary["id"] == "takeaways"
    items = summary.select(":scope > ul > li")
    assert len(items) == len(boxes) > 0
    for item, box in zip(items, boxes, strict=True):
        *said, link = item.find_all("p", recursive=False)
        texts = [text.get_text() for text in box.find_all("p", recursive=False)[1:]]
        assert [text.get_text() for text in said] == texts
        assert link.a["href"] == f"#{box.find_parents('section')[-2]['id']}"
    ways = [link["href"] for link in summary.find_all("p", recursive=False)[-1]("a")]
    later = [f"{other.removeprefix('book/')}.html" for other in CHAPTERS[CHAPTERS.index(page) + 1 :][:1]]
    assert ways == ["#done-when", *later]


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_has_its_message_and_its_description(page):
    for figure in parsed(page).select("figure.house-figure"):
        assert figure.select_one("figcaption").get_text().strip()
        assert figure.select_one("svg[role]")["aria-label"].strip()  # a group where its cells are chosen
    for image in parsed(page).select("article img"):
        assert image.get("alt", "").strip(), image


def _made_by(page, link):
    """Return the line of the source to which a link on a page leads."""
    file, _, anchor = link["href"].partition("#")
    text = (SITE / page).parent.joinpath(file).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if f'id="{anchor}"' in line]
    return re.sub(r"<[^>]+>", "", lines[0])


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("book/")])
def test_a_figure_leads_to_the_function_that_drew_it_and_the_map_has_both(page):
    figures = parsed(page).select("div.cell figure.house-figure")
    assert [figure["id"] for figure in figures] == [f"figure-{n}" for n in range(1, len(figures) + 1)]
    for figure in figures:
        cell = figure.find_parent(class_="cell")
        makers = cell.select(".figure-code > .figure-maker a")
        assert makers, figure["id"]
        for link in makers:
            assert f"def {link.get_text().rpartition('.')[2]}(" in _made_by(page, link)
        assert cell.select(".code-fold pre") or cell.select(".cell_input")
        number = figure.select_one(".figure-number").get_text()
        [entry] = parsed(MAP).select(f"a[href='{page.removeprefix('book/')}.html#{figure['id']}']")
        item = entry.find_parent("li").get_text()
        assert number in item
        assert figure.select_one("figcaption").get_text().partition(". ")[2] in item
        assert all(link.get_text() in item for link in makers)


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("book/")])
def test_the_map_has_every_explorer(page):
    for explorer in parsed(page).select(".livecalc"):
        [entry] = parsed(MAP).select(f"a[href='{page.removeprefix('book/')}.html#{explorer['id']}']")
        assert explorer["data-module"] in entry.find_parent("li").get_text()


@pytest.mark.parametrize("page", CHAPTERS)
def test_the_map_has_the_modules_of_a_chapter(page):
    label = page.removeprefix("book/").replace("_", "-")
    section = parsed(MAP).find(id=f"code-{label}")
    named = {link.get_text() for link in section.select("ul:last-of-type a")}
    assert f"lablib.checks.rung{label[:2]}" in named
    assert f"labs/solutions/rung{label[:2]}.py" in named
    assert any(name.startswith("lablib.calc.") for name in named)


def test_the_search_knows_no_source():
    assert '"code/' not in (SITE / "searchindex.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_no_id_is_used_twice_by_figures(page):
    ids = [tag["id"] for tag in parsed(page).select("figure.house-figure [id]")]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("page", LABS)
def test_what_a_lab_asks_its_chapter_does_not_print(page):
    """Four digits that are computed and measured are no coincidence, nor are five; a time may have any four.

    Smaller numbers stand everywhere, and a reader has to look.
    """
    outputs = "\n".join(tag.get_text() for tag in parsed(page).select(".cell_output pre"))
    asked = re.findall(r"yours [^|]*\| lablib (\S+)[^|]*\| measured (\S+)", outputs)
    chapter = parsed(page.replace("labs/", "book/")).select_one("article").get_text(" ")
    printed = set(re.findall(r"\d[\d,]*(?:\.\d+)?(?!\d| GPUs)", chapter))
    digits = {number: len(re.sub(r"\D|^0\.0*", "", number)) for row in asked for number in row}
    long = {number for row in asked for number in row if digits[number] >= 5 - (row[0] == row[1])}
    assert long & printed == set()


@pytest.mark.parametrize("page", LABS)
def test_a_lab_ran_as_shipped(page):
    outputs = " ".join(tag.get_text() for tag in parsed(page).select(".cell_output"))
    assert len(re.findall(r": not attempted", outputs)) >= 2
    assert "no guess" in outputs
    assert "Nothing is guessed and nothing is solved" in " ".join(outputs.split())
    assert re.search(r"yours - \| lablib \S+(?: \([^)]+\))? \| measured \S+", outputs)
    assert ": wrong" not in outputs
    assert "Verdict(" not in outputs
    # The column of a page has some 78 characters at the width of a desk.
    lines = [line for tag in parsed(page).select(".cell pre") for line in tag.get_text().splitlines()]
    assert [line for line in lines if len(line) > 78] == []


@pytest.mark.parametrize("page", LABS)
def test_a_lab_says_how_it_is_opened_and_folds_what_answers_its_questions(page):
    soup = parsed(page)
    box = soup.select_one(".do-this-lab").get_text()
    assert "make lab" in box
    assert f"work/{page.removeprefix('labs/')}.ipynb" in box
    assert not soup.select("details.measured[open]")
    compared = 0
    for cell in soup.select("div.cell:has(.cell_input):has(.cell_output .output)"):
        compares = re.search(r"\bcompare\(", cell.select_one(".cell_input").get_text())
        compared += bool(compares)
        for output in cell.select(".cell_output .output"):
            folded = output.find_parent("details", class_="measured")
            assert folded or not compares, output
            # A check says "not attempted" beside its exercise.
            assert not folded or ": not attempted" not in output.get_text()
    assert len(soup.select("details.measured")) >= compared >= 3  # one for each cell that compares


@pytest.mark.parametrize("page", PAGES)
def test_a_link_has_words(page):
    # A formula has none for a screen reader.
    for link in parsed(page).select("article a[href]"):
        formulas = link.select(".math")
        words = [text for text in link.strings if not any(formula in text.parents for formula in formulas)]
        assert "".join(words).strip() or link.select("img[alt]"), link


@pytest.mark.parametrize("page", PAGES)
def test_a_page_asks_no_other_host_for_anything(page):
    asked = [tag[name] for name in ("src", "href") for tag in parsed(page).select(f"script[{name}], img[{name}]")]
    asked += [tag["href"] for tag in parsed(page).select("link[rel=stylesheet], link[rel=preload]")]
    foreign = {url for url in asked if urlparse(url).netloc}
    assert foreign <= (set() if MATHJAX_IS_LOCAL else {url for url in foreign if url.startswith(MATHJAX_CDN)})


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_it_is(page):
    soup = parsed(page)
    assert soup.html["lang"] == "en"
    assert "Distributed Training, Rung by Rung" in soup.title.get_text()
    assert soup.select_one("meta[name=viewport]")
    assert len(soup.select("article h1")) == 1


@pytest.mark.parametrize("page", sorted({fact.page for fact in read_facts()}))
def test_a_page_shows_in_which_release_its_facts_were_read(page):
    (shown,) = (fold for fold in parsed(f"book/{page}").select("div.admonition.dropdown") if "was read" in fold.p.text)
    facts = [fact for fact in read_facts() if fact.page == page]
    short = load("_ext/framework_facts.py").short
    assert {strong.text for strong in shown.select("strong")} == {
        f"{fact.project} {short(fact.version)}" for fact in facts
    }
    assert sorted(code.text for code in shown.select("li code")) == sorted(fact.file for fact in facts)
