"""The built site, as its tests see it: pages in the order of the table of contents, parsed once."""

import functools
import re
from pathlib import Path

import pytest
import yaml
from bs4 import BeautifulSoup

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "_build" / "html"
#: Copied there by the build when npm had it; pages load it from its CDN otherwise.
MATHJAX_IS_LOCAL = (SITE / "_static" / "mathjax" / "tex-chtml-nofont.js").exists()
MATHJAX_CDN = ("https://cdn.jsdelivr.net/npm/mathjax@4", "https://cdn.jsdelivr.net/npm/@mathjax/")


def _files(entry):
    if isinstance(entry, dict):
        if "file" in entry:
            yield entry["file"]
        for value in entry.values():
            yield from _files(value)
    elif isinstance(entry, list):
        for item in entry:
            yield from _files(item)


CONTENTS = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
#: Every page of the table of contents, without its suffix.
PAGES = [CONTENTS["root"], *_files(CONTENTS["parts"])]
CHAPTERS = [page for page in PAGES if page.startswith("book/") and page[5:7].isdigit()]
LABS = [page for page in PAGES if page.startswith("labs/")]
#: Lists every figure with its code.
MAP = "book/where_is_the_code"


def source(page):
    """Return the HTML of a page."""
    path = SITE / f"{page}.html"
    if not path.exists():
        pytest.fail(f"{path.relative_to(ROOT)} is not built: make site", pytrace=False)
    return path.read_text(encoding="utf-8")


@functools.cache
def parsed(page):
    """Return a page parsed."""
    return BeautifulSoup(source(page), "html.parser")


@functools.cache
def ids(page):
    """Return the ids on a page."""
    if page.startswith("code/"):  # a page of a source is long, and has ids on lines alone
        return frozenset(re.findall(r' id="([^"]+)"', source(page)))
    return frozenset(tag["id"] for tag in parsed(page).find_all(id=True))
