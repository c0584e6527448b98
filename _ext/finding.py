"""The search: an index of the book's sections, made by Pagefind when all pages are written, and the glossary's terms.

A section is a record of its own, so that a result is a section, with its anchor. Without Pagefind (tools/pagefind.sh)
there is the search of Sphinx, which finds pages.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from html import escape, unescape
from pathlib import Path
from typing import NamedTuple

from addresses import fetched
from docutils import nodes
from sphinx.addnodes import glossary
from sphinx.application import Sphinx

#: What the search in a page needs of all that Pagefind writes.
_NEEDED = (
    r"pagefind(-worker)?\.js|pagefind-entry\.json|pagefind\..*\.pf_meta|wasm\.en\.pagefind|.*\.pf_(index|fragment)"
)
#: What a section is, PAGE#ANCHOR, to the field that its heading is searched in, with the weight of its text; the first
#: that fits. _static/search.mjs has the weights of the fields.
_KINDS = {
    r".*#(problems|exercise|claims-you-will|done-when|reading-guide|where-to-go)": ("list", 0.5),
    r"book/\d\d_": ("title", 1.0),
    r"labs/": ("lab", 0.5),
    r"book/glossary#.": ("term", 1.0),
    "": ("reference", 0.7),
}


class Section(NamedTuple):
    """A section without the sections in it, or an entry of the glossary; the page's name, and the section around it."""

    anchor: str
    title: str
    page: str
    above: str
    texts: list[str]


#: Of every page, filled while pages are written: Sphinx resolves them in its main process.
_PAGES: dict[str, list[Section]] = {}


def _collect(app: Sphinx, doctree: nodes.document, page: str) -> None:
    document = app.env.external_site_map.get(page)
    name = (document and document.title) or _words(app.env.titles[page])
    _PAGES[page] = []
    for node in doctree.findall(nodes.section):
        if node.parent is doctree:
            _PAGES[page].append(Section("", name, "", "", list(_texts(node))))
        elif "summary" not in node["classes"]:
            above = "" if node.parent.parent is doctree else _words(node.parent[0])
            _PAGES[page].append(Section(node["ids"][0], _words(node[0]), name, above, list(_texts(node))))
    for entry in (item for terms in doctree.findall(glossary) for item in terms.findall(nodes.definition_list_item)):
        term = next(entry.findall(nodes.term))
        _PAGES[page].append(Section(term["ids"][0], _words(term), name, "", list(_texts(entry[-1]))))


def _words(node: nodes.Element) -> str:
    """Return a text as a list of results can show it: without comments, and with three dots for a formula in TeX."""
    said = [text for text in node.findall(nodes.Text) if not isinstance(text.parent, nodes.raw | nodes.comment)]
    return " ".join("".join("..." if isinstance(t.parent, nodes.math) and "\\" in t else t for t in said).split())


def _texts(node: nodes.Element) -> Iterator[str]:
    """Yield the paragraphs of a section and the captions of its figures: no code, no output, no displayed formula."""
    for child in node.children:
        if isinstance(child, nodes.Element) and "instructor" in child.get("classes", ()):
            continue  # learners do not see it, and do not find it
        if isinstance(child, nodes.raw):
            for caption in re.findall(r"<figcaption>(.*?)</figcaption>", child.astext(), re.DOTALL):
                yield unescape(re.sub(r"<[^>]+>", "", caption))
        elif isinstance(child, nodes.TextElement):
            if not isinstance(child, nodes.FixedTextElement | nodes.math_block | nodes.title):
                yield _words(child)
        elif not isinstance(child, nodes.section | glossary | nodes.Invisible) and isinstance(child, nodes.Element):
            yield from _texts(child)


def _record(page: str, section: Section) -> str:
    """Return a section as the page that Pagefind reads."""
    heading, weight = next(of for kind, of in _KINDS.items() if re.match(kind, f"{page}#{section.anchor}"))
    texts = "".join(f"<p>{escape(text)}</p>" for text in section.texts)
    return (
        f'<html lang="en"><body data-pagefind-body data-pagefind-weight="{weight}">'
        f'<p data-pagefind-ignore data-pagefind-meta="{heading}">{escape(section.title)}</p>'
        f'<p data-pagefind-ignore data-pagefind-meta="page">{escape(section.page)}</p>'
        f'<p data-pagefind-ignore data-pagefind-meta="above">{escape(section.above)}</p>{texts}</body></html>'
    )


def _write_index(app: Sphinx, exception: Exception | None) -> None:
    """Index the sections, below addresses that _static/search.mjs makes links of: PAGE/ANCHOR.html."""
    pagefind = fetched(Path(app.srcdir), "pagefind")
    if not pagefind or exception is not None or app.builder.format != "html":
        return
    for page in app.env.found_docs - _PAGES.keys():  # not written anew by this build
        app.env.get_and_resolve_doctree(page, app.builder)
    found = Path(app.outdir) / "_static" / "found"
    with tempfile.TemporaryDirectory() as records:
        for page in sorted(app.env.found_docs):
            folder = Path(records, page)
            folder.mkdir(parents=True)
            for section in _PAGES[page]:
                record = _record(page, section)
                (folder / f"{section.anchor or 'index'}.html").write_text(record, encoding="utf-8")
        shutil.rmtree(found, ignore_errors=True)
        command = [pagefind / "pagefind", "--silent", "--site", records, "--output-path", found]
        subprocess.run(command, check=True)
    for file in found.rglob("*"):
        if file.is_file() and not re.fullmatch(_NEEDED, file.name):
            file.unlink()
    shutil.copy(pagefind / "LICENSE", found)
    terms = [(s.title, s.anchor, " ".join(s.texts)) for s in _PAGES.get("book/glossary", []) if s.anchor]
    (found / "terms.json").write_text(json.dumps(terms), encoding="utf-8")


def _offer(app: Sphinx) -> None:
    if fetched(Path(app.srcdir), "pagefind"):
        app.add_js_file("search.mjs", type="module")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to the build."""
    app.connect("builder-inited", _offer)
    app.connect("doctree-resolved", _collect)
    app.connect("build-finished", _write_index)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
