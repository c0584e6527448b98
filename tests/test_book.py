"""The built pages: nothing unevaluated, nothing unformatted, every figure readable, every lab run as shipped."""

import copy
import re
from urllib.parse import urlparse

import pytest

from tests.built_site import CHAPTERS, LABS, MATHJAX_CDN, MATHJAX_IS_LOCAL, PAGES, SITE, parsed, source

pytestmark = pytest.mark.site


def _prose(page):
    """Return the text of a page's article without its code, its outputs and its formulas."""
    article = copy.copy(parsed(page).select_one("article.bd-article"))
    for part in article.select("pre, code, .math, svg, script, style"):
        part.decompose()
    return article.get_text(" ")


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
        number
        for number in re.findall(r"\b\d+\.\d{7,}", text)
        if abs(float(number) - round(float(number), 6)) > 1e-12
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


@pytest.mark.parametrize("page", PAGES)
def test_no_id_is_used_twice_by_figures(page):
    ids = [tag["id"] for tag in parsed(page).select("figure.house-figure [id]")]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("page", LABS)
def test_a_lab_ran_as_shipped(page):
    outputs = " ".join(tag.get_text() for tag in parsed(page).select(".cell_output"))
    assert len(re.findall(r": not attempted", outputs)) >= 2
    assert "(predicted " in outputs
    assert ": wrong" not in outputs


@pytest.mark.parametrize("page", PAGES)
def test_a_page_asks_no_other_host_for_anything(page):
    asked = [
        tag[name] for name in ("src", "href") for tag in parsed(page).select(f"script[{name}], img[{name}]")
    ]
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
