"""The built pages: nothing unevaluated, nothing unformatted, every figure readable, every lab run as shipped."""

import functools
import re
from urllib.parse import urlparse

import pytest

from tests.built_site import CHAPTERS, LABS, MAP, MATHJAX_CDN, MATHJAX_IS_LOCAL, PAGES, SITE, parsed, source

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


@pytest.mark.parametrize("page", PAGES)
def test_no_page_shows_a_traceback_or_a_warning_of_a_cell(page):
    text = parsed(page).get_text()
    assert "Traceback (most recent call last)" not in text
    assert not re.findall(r"\b\w*Warning: ", text)
    assert "TqdmWarning" not in text


@pytest.mark.parametrize("page", CHAPTERS)
def test_a_chapter_draws_two_figures_or_more(page):
    assert len(parsed(page).select("figure.house-figure svg")) >= 2


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_has_its_message_and_its_description(page):
    for figure in parsed(page).select("figure.house-figure"):
        assert figure.select_one("figcaption").get_text().strip()
        assert figure.select_one("svg[role=img]")["aria-label"].strip()
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
    for cell in soup.select("div.cell:has(.cell_input):has(.cell_output .output)"):
        compares = re.search(r"\bcompare\(", cell.select_one(".cell_input").get_text())
        for output in cell.select(".cell_output .output"):
            folded = output.find_parent("details", class_="measured")
            assert folded or not compares, output
            # A check says "not attempted" beside its exercise.
            assert not folded or ": not attempted" not in output.get_text()
    assert len(soup.select("details.measured")) >= 6


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
