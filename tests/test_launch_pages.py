"""Labs as they are downloaded and started elsewhere, and the pages that are printed: what needs no built site."""

import sys
from types import SimpleNamespace

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

from tests.built_site import LABS as BUILT
from tests.built_site import SITE, parsed
from tests.scripts import ROOT, load

LABS = sorted((ROOT / "labs").glob("[0-9][0-9]_*.ipynb"))
ADDRESS = "https://github.com/someone/course"


@pytest.fixture(scope="module")
def lab_pages():
    sys.path.insert(0, str(ROOT / "_ext"))
    yield load("_ext/lab_pages.py")
    sys.path.remove(str(ROOT / "_ext"))


@pytest.mark.parametrize("address", [None, ADDRESS])
@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_a_downloaded_lab_is_the_stored_one_behind_one_cell(lab_pages, path, address):
    stored = nbformat.read(path, as_version=4)
    text = lab_pages.downloaded(path.read_text(encoding="utf-8"), path.stem, address, "main")
    lab = nbformat.reads(text, as_version=4)
    nbformat.validate(lab)
    assert [cell.id for cell in lab.cells] == [f"r{path.stem[:2]}-00", *(cell.id for cell in stored.cells)]
    assert [cell.source for cell in lab.cells[1:] if cell.cell_type == "code"] == [
        cell.source for cell in stored.cells if cell.cell_type == "code"
    ]
    assert ("](../" in text) == (address is None and "](../" in path.read_text(encoding="utf-8"))
    assert ADDRESS in lab.cells[0].source or ("make install" in lab.cells[0].source and not address)


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("address", [None, ADDRESS])
def test_the_first_cell_fetches_lablib_where_it_is_missing_and_the_address_known(
    lab_pages, monkeypatch, address, missing
):
    lab = nbformat.reads(lab_pages.downloaded(LABS[0].read_text(encoding="utf-8"), "01_x", address, "v1"), as_version=4)
    done = []
    shell = SimpleNamespace(system=done.append, run_line_magic=lambda name, words: done.append(f"{name} {words}"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    if missing:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    exec(TransformerManager().transform_cell(lab.cells[0].source), {"get_ipython": lambda: shell})
    assert len(done) == (2 if missing and address else 0)
    if done:
        assert f"--branch v1 {ADDRESS} distributed-training" in done[0]
        assert done[1].startswith("pip install")
        assert sys.path[0] == "distributed-training"


@pytest.mark.parametrize(
    ("address", "branch", "page", "places"),
    [
        (None, "", "labs/05_zero", []),
        (None, "colab", "labs/05_zero", []),
        (ADDRESS, "", "book/05_zero", []),
        (ADDRESS, "", "labs/05_zero", ["https://mybinder.org/v2/gh/someone/course/main?urlpath=lab/tree/labs/05_zero.ipynb"]),
        (ADDRESS, "colab", "labs/05_zero", [None, "https://colab.research.google.com/github/someone/course/blob/colab/05_zero.ipynb"]),
    ],
)  # fmt: skip
def test_a_lab_starts_elsewhere_only_from_a_public_address(lab_pages, monkeypatch, address, branch, page, places):
    monkeypatch.setenv("LABLIB_COLAB_BRANCH", branch)
    monkeypatch.setenv("GITHUB_REPOSITORY", address.partition("github.com/")[2] if address else "")
    monkeypatch.setenv("GITHUB_REF_NAME", "main")
    context = {"header_buttons": []}
    lab_pages._offer_launch(None, page, "", context, None)
    urls = [button["url"] for group in context["header_buttons"] for button in group["buttons"]]
    assert len(urls) == len(places)
    assert all(place in (None, url) for url, place in zip(urls, places, strict=True))


@pytest.mark.site
@pytest.mark.parametrize("page", BUILT)
def test_the_site_offers_what_its_build_knows(lab_pages, page):
    stored = (ROOT / f"{page}.ipynb").read_text(encoding="utf-8")
    expected = lab_pages.downloaded(stored, page.removeprefix("labs/"), *lab_pages.repository())
    link = parsed(page).select_one("a.btn-download-source-button")
    assert (SITE / page).parent.joinpath(link["href"]).read_text(encoding="utf-8") == expected
    assert bool(parsed(page).select(".dropdown-launch-buttons")) == (lab_pages.repository()[0] is not None)


def test_articles_keep_their_ids_and_links_apart_in_one_document(tmp_path):
    print_book = load("tools/print_book.py")
    body = (
        '<svg><path id="p"/><use xlink:href="#p" clip-path="url(#p)"/></svg><a href="#p">here</a>'
        '<a href="b.html#x">there</a><a href="../labs/a.html">lab</a><a href="https://x.org/#y">out</a>'
        '<a class="headerlink" href="#p">#</a><img src="../_images/a.png">'
    )
    html = f'<head></head><nav class="bd-links"><a class="reference internal" href="book/a.html">A</a><a class="reference internal" href="labs/a.html">A</a></nav><article class="bd-article">{body}</article>'
    (tmp_path / "index.html").write_text(html, encoding="utf-8")
    assert print_book.contents(tmp_path) == ["index", "book/a"]
    found = print_book.article(html, "book/a", ["book/a", "book/b"])
    assert 'id="book-a--p"' in found
    assert 'xlink:href="#book-a--p" clip-path="url(#book-a--p)"' in found
    assert '<a href="#book-a--p">here' in found
    assert '<a href="#book-b--x">there' in found
    assert "<a>lab" in found
    assert 'href="https://x.org/#y"' in found
    assert "headerlink" not in found
    assert 'src="../_images/a.png"' in found
