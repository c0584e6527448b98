"""How pages are read: a lab as nbval has just run it, several pages at a time, equations numbered by chapter.

Columns that a cell printed are known as such. A page tells browsers and search engines its name as the table of contents has it, and what it asks.
"""

from __future__ import annotations

import json
import os
import re
from html import escape
from pathlib import Path
from textwrap import shorten

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError
from sphinx.util import logging

_LOG = logging.getLogger(__name__)


def _show_executed(app: Sphinx, docname: str, source: list[str]) -> None:
    """Take a lab as nbval has just run it, under `make test`; the build runs all others."""
    folder, stem = os.environ.get("EXECUTED_LABS"), Path(docname).name
    path = Path(folder or "", f"{stem}.ipynb")
    if not folder or docname != f"labs/{stem}" or not path.exists():
        return
    executed = path.read_text(encoding="utf-8")
    if _cells(executed) != _cells(source[0]):
        raise ExtensionError(f"{path} is not the run of {docname}.ipynb as it is now")
    source[0] = executed
    _LOG.info("%s: shown as nbval ran it", docname)


def _cells(notebook: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(notebook)["cells"]]


def _allow_parallel(app: Sphinx, config: Config) -> None:
    # It comes with sphinx_external_toc and says nothing about parallel reading, so Sphinx would do none. All that it
    # does is to number sections, when all pages are read.
    if "sphinx_multitoc_numbering" in app.extensions:
        app.extensions["sphinx_multitoc_numbering"].parallel_read_safe = True


def _deal(app: Sphinx, env: BuildEnvironment, docnames: list[str]) -> None:
    """Deal the pages round to the processes that read them, or one would run the cells of all chapters.

    Labs measure times. Where the build runs them, one process gets them all, and one waits for the other.
    """
    labs = [] if os.environ.get("EXECUTED_LABS") else [name for name in docnames if name.startswith("labs/")]
    others = [name for name in docnames if name not in labs]
    docnames[:] = labs + [name for process in range(app.parallel) for name in others[process :: app.parallel]]


def chapter_prefix(docname: str) -> str:
    """Return what stands before a number of a chapter, "5." in book/05_zero; nothing on other pages."""
    match = re.match(r"book/(\d+)_", docname)
    return f"{int(match[1])}." if match else ""


def _number_equations(app: Sphinx, doctree: nodes.document) -> None:
    """Write the chapter before the number of an equation, and into the references to it."""
    equations = app.env.get_domain("math").data["objects"]
    for node in doctree.findall(nodes.math_block):
        if node.get("label") in equations:
            node["number"] = f"{chapter_prefix(app.env.docname)}{node['number']}"
            equations[node["label"]] = (app.env.docname, node["number"])


def _mark_columns(app: Sphinx, doctree: nodes.document) -> None:
    """Give what a cell printed in columns a class: on a telephone its lines scroll, where a sentence goes on below."""
    for output in doctree.findall(lambda node: isinstance(node, nodes.container)):
        if output.get("nb_element") == "cell_code_output":
            for printed in output.findall(nodes.literal_block):
                if sum(bool(re.search(r"\S {2,}\S", line)) for line in printed.astext().splitlines()) >= 2:
                    printed["classes"].append("columns")


def _describe(app: Sphinx, page: str, template: str, context: dict, doctree: nodes.document | None) -> None:
    """Give a page the title that the table of contents has, and its question, or else its first paragraph, as text."""
    if doctree is None:
        return
    document = app.env.external_site_map.get(page)
    context["title"] = (document and document.title) or context["title"]
    if page == "index":
        context["docstitle"] = ""  # it is the book's own, which would stand there twice
    texts = [" ".join(node.astext().split()) for node in doctree.findall(nodes.paragraph)]
    asked = [match[1] for text in texts if (match := re.match(r"(?:The question of this page|Question)\. (.+)", text))]
    # Without a question: paragraphs until something is said, as "By the end of this lab you have" alone is nothing.
    enough = next((n for n in range(1, len(texts)) if len(" ".join(texts[:n])) >= 120), len(texts))
    if said := escape(shorten((asked or [" ".join(texts[:enough])])[0], 300, placeholder=" ..."), quote=True):
        title = escape(context["title"], quote=True)
        context["metatags"] += (
            f'<meta name="description" content="{said}" />'
            f'<meta property="og:title" content="{title}" /><meta property="og:description" content="{said}" />'
        )


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to the build."""
    app.connect("config-inited", _allow_parallel)
    app.connect("env-before-read-docs", _deal)
    app.connect("source-read", _show_executed)
    app.connect("doctree-read", _number_equations)
    app.connect("doctree-read", _mark_columns)
    app.connect("html-page-context", _describe)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
