"""A lab as a page: how it is opened, and what was measured folded behind its question.

The site shows labs as they run untouched. Who reads a chapter and then the page of its lab can still write a number down
before the answer: from the first `predict` of a section on, outputs are folded, but for those of predictions and checks.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from docutils import nodes
from source_pages import block
from sphinx.application import Sphinx

_PREDICT, _COMPARE, _CHECK = r"\bpredict\(", r"\bcompare\(", r"\brung\d\d\.\w+\("


def _show_lab(app: Sphinx, doctree: nodes.document) -> None:
    page = app.env.docname
    if app.builder.format != "html" or not page.startswith("labs/"):
        return
    for section in (part for top in doctree.findall(nodes.section) if top.parent is doctree for part in top.children):
        if isinstance(section, nodes.section):
            _fold_measured(section)
    promises = next(doctree.findall(nodes.bullet_list))
    promises.parent.insert(promises.parent.index(promises) + 1, _opening(app, page))


def _fold_measured(section: nodes.section) -> None:
    """Fold the outputs of a section that answer its questions; the search and the printed page have them all."""
    asked = False
    for cell in section.findall(nodes.container):
        parts = {child.get("nb_element"): child for child in cell.children if isinstance(child, nodes.Element)}
        if (shown := parts.get("cell_code_source")) is None:
            continue
        source, output = shown.astext(), parts.get("cell_code_output")
        asks = bool(re.search(_PREDICT, source))
        answers = re.search(_COMPARE, source) or (asked and not asks and not re.search(_CHECK, source))
        if answers and output is not None and output.children:
            # Inside of the output: what numbers figures and links names looks for outputs in their cells.
            fold = block("", *output.children, tag="details", classes=["measured"], summary="Show what was measured")
            output.children = []
            output += fold
        asked = asked or asks


def _opening(app: Sphinx, page: str) -> nodes.admonition:
    how = nodes.reference(
        "", "How to use this course", internal=True, refuri=app.builder.get_relative_uri(page, "book/how_to_use")
    )
    notebook = f"work/{PurePosixPath(page).name}.ipynb"
    words = nodes.paragraph("", "This page shows the lab as it runs untouched. ")
    words += [nodes.Text("In a clone of the course, "), nodes.literal("", "make lab")]
    words += [nodes.Text(" opens JupyterLab with "), nodes.literal("", notebook), nodes.Text(", your own copy. ")]
    words += nodes.Text("Without Python at hand, open the clone in an editor that knows devcontainers, or on Binder. ")
    words += [how, nodes.Text(" has the rest.")]
    fold = "What was measured is folded behind its question: write your number down before you open it."
    return nodes.admonition(
        "", nodes.title("", "Do this lab"), words, nodes.paragraph("", fold), classes=["note", "do-this-lab"]
    )


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to the build."""
    app.setup_extension("source_pages")
    # Before the code of the cells becomes HTML.
    app.connect("doctree-read", _show_lab, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
