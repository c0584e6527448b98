"""A lab as a page: how it is opened and downloaded, and what was measured folded behind its question.

The site shows labs as they run untouched. Who reads a chapter and then the page of its lab can still write a number down
before the answer: from the first `predict` of a section on, outputs are folded, but for those of predictions and checks.

A lab that is downloaded stands alone, so its first cell says how to get lablib. Where the build knows the repository's
public address (see `addresses`), that cell does it, and the page has a button for Binder, which needs environment.yml
alone. Colab opens notebooks from a branch: it has a button where $LABLIB_COLAB_BRANCH names the one with the downloads.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

import nbformat
from addresses import repository
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
    words += nodes.Text("The notebook that this page's button downloads says in its first cell how to get lablib. ")
    words += [how, nodes.Text(" has the rest.")]
    fold = "What was measured is folded behind its question: write your number down before you open it."
    return nodes.admonition(
        "", nodes.title("", "Do this lab"), words, nodes.paragraph("", fold), classes=["note", "do-this-lab"]
    )


#: Without an address of the repository; with one.
_IN_A_CLONE = """\
# This lab needs lablib, the package of the course. In a clone of the course `make install` installs it and
# `make lab` opens the labs. For another Python: pip install -e 'PATH_OF_THE_CLONE[labs,hf]'
import lablib"""
_FROM_REPOSITORY = """\
# This lab needs lablib, the package of the course, from {address}
# Where it is missing, as on Colab, this cell fetches and installs the course; elsewhere it does nothing.
import importlib.util
import sys

if importlib.util.find_spec("lablib") is None:
    !git clone --quiet --depth 1 --branch {branch} {address} distributed-training
    %pip install --quiet --editable "distributed-training[labs,hf]"
    sys.path.insert(0, "distributed-training")
import lablib"""


def downloaded(notebook: str, name: str, address: str | None, branch: str) -> str:
    """Return a lab with a first cell that says how to get lablib, as the JSON of a notebook.

    Args:
        notebook: The stored lab, JSON.
        name: Its name, "05_zero".
        address: The repository's, or None where the build knows none: links to the book then lead nowhere.
        branch: The repository's branch or tag.
    """
    lab = nbformat.reads(notebook, as_version=4)
    source = (_FROM_REPOSITORY if address else _IN_A_CLONE).format(address=address, branch=branch)
    lab.cells.insert(0, nbformat.v4.new_code_cell(source, id=f"r{name[:2]}-00"))
    for cell in lab.cells if address else []:
        cell.source = re.sub(r"\]\(\.\./(?=\w)", f"]({address}/blob/{branch}/", cell.source)
    nbformat.validate(lab)
    return nbformat.writes(lab) + "\n"


def _write_downloads(app: Sphinx, exception: Exception | None) -> None:
    """Put the labs where the theme's download button leads."""
    address, branch = repository()
    for page in app.env.found_docs if exception is None and app.builder.format == "html" else ():
        target = Path(app.outdir) / "_sources" / f"{page}.ipynb"
        if page.startswith("labs/") and target.exists():
            stored = Path(app.env.doc2path(page)).read_text(encoding="utf-8")
            target.write_text(downloaded(stored, target.stem, address, branch), encoding="utf-8")


def _offer_launch(app: Sphinx, page: str, template: str, context: dict, doctree: nodes.document | None) -> None:
    address, branch = repository()
    _, _, project = (address or "").partition("https://github.com/")
    if not project or not page.startswith("labs/"):
        return
    places = {"Binder": f"https://mybinder.org/v2/gh/{project}/{branch}?urlpath=lab/tree/{page}.ipynb"}
    if colab := os.environ.get("LABLIB_COLAB_BRANCH"):
        lab = page.removeprefix("labs/")
        places["Colab"] = f"https://colab.research.google.com/github/{project}/blob/{colab}/{lab}.ipynb"
    buttons = [
        {"type": "link", "url": url, "text": name, "tooltip": f"Start this lab on {name}", "icon": "fas fa-rocket"}
        for name, url in places.items()
    ]
    group = {"type": "group", "tooltip": "Start this lab", "icon": "fas fa-rocket", "label": "launch-buttons"}
    context["header_buttons"].append(group | {"buttons": buttons})


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to the build."""
    app.setup_extension("source_pages")
    # Before the code of the cells becomes HTML.
    app.connect("doctree-read", _show_lab, priority=400)
    # After the theme has made its own buttons.
    app.connect("html-page-context", _offer_launch, priority=900)
    app.connect("build-finished", _write_downloads)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
