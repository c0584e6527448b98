"""Every link inside the built site leads to a file that is there, and every fragment to an id on its page."""

import re
from urllib.parse import unquote, urlsplit

import pytest

from tests.built_site import PAGES, SITE, ids, parsed

pytestmark = pytest.mark.site


def _targets(page):
    for tag in parsed(page).select("a[href], link[href], img[src], script[src]"):
        yield tag.get("href") or tag.get("src")


def broken_links(page):
    """Return the links of a page that lead nowhere inside the site."""
    broken = []
    here = SITE / f"{page}.html"
    for target in set(_targets(page)):
        url = urlsplit(target)
        if url.scheme or url.netloc:
            continue
        path = (here.parent / unquote(url.path)).resolve() if url.path else here
        if path.is_dir():
            path /= "index.html"
        if not path.is_relative_to(SITE) or not path.is_file():
            broken.append(target)
            continue
        name = str(path.relative_to(SITE))[: -len(".html")]
        if url.fragment and path.suffix == ".html" and unquote(url.fragment) not in ids(name):
            broken.append(target)
    return sorted(broken)


@pytest.mark.parametrize("page", PAGES)
def test_links_inside_the_site_lead_somewhere(page):
    assert broken_links(page) == []


def test_a_page_leads_to_the_one_before_and_the_one_after():
    for page, before, after in zip(PAGES, ["", *PAGES], [*PAGES[1:], ""], strict=False):
        for name, other in (("left-prev", before), ("right-next", after)):
            links = parsed(page).select(f".prev-next-area a.{name}")
            leads = [str(((SITE / page).parent / link["href"]).resolve().relative_to(SITE)) for link in links]
            assert leads == ([f"{other}.html"] if other else []), page


def test_links_of_the_sources_lead_somewhere():
    broken, links = set(), 0
    for path in sorted((SITE / "code").rglob("*.html")):
        for target in set(re.findall(r'<a href="([^"]+)"', path.read_text(encoding="utf-8"))):
            file, _, fragment = unquote(target).partition("#")
            page = (path.parent / file).resolve() if file else path
            name = str(page.relative_to(SITE))[: -len(".html")]
            links += 1
            if not page.is_file() or (fragment and fragment not in ids(name)):
                broken.add((str(path.relative_to(SITE)), target))
    assert broken == set()
    assert links > 5000


def test_a_broken_link_is_found(tmp_path, monkeypatch):
    from tests import built_site as site

    # A name that no page of the site has: what is parsed already stays.
    (tmp_path / "alone.html").write_text(
        '<a href="b.html">b</a><a href="#x">x</a><a href="alone.html#here">a</a><p id="here">'
    )
    for module in (site, __import__("tests.test_links", fromlist=["SITE"])):
        monkeypatch.setattr(module, "SITE", tmp_path)
    monkeypatch.setattr(site, "ROOT", tmp_path)
    assert broken_links("alone") == ["#x", "b.html"]


def test_every_page_of_the_contents_can_be_reached_from_the_home_page():
    reached, queue = set(), [PAGES[0]]
    while queue:
        page = queue.pop()
        if page in reached:
            continue
        reached.add(page)
        parts = parsed(page).find_all(["nav", "article"])
        for target in {link["href"] for part in parts for link in part.find_all("a", href=True)}:
            url = urlsplit(target)
            path = ((SITE / f"{page}.html").parent / unquote(url.path)).resolve()
            if not url.netloc and path.suffix == ".html" and path.is_relative_to(SITE):
                name = str(path.relative_to(SITE))[: -len(".html")]
                queue += [name] if name in PAGES else []
    assert reached == set(PAGES)
