"""The code behind the pages: every file of the repository as a page of the site, and links that lead there.

- A name in the prose such as `lablib.calc.parallel.zero.shard_size`, or a path such as `lablib/calc/parallel/zero.py`, written as code, is a
  link to where it is defined. One that does not exist is a warning, and warnings fail the build.
- Under a figure stands which function drew it. A cell tagged `hide-input` is folded below what it shows. In every
  cell, names of this repository are links.
- {codemap} lists figures, functions and modules, page by page.

Which functions draw and compute a figure is read from the page's own cells (see `sources`), so it is never out of date.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from html import escape, unescape
from pathlib import Path, PurePosixPath

from docutils import nodes
from jinja2 import Environment, FileSystemLoader
from livecalc import livecalc
from reading import chapter_prefix
from sources import NAME, Cells, Link, Place, Source, Sources, UnknownName, highlighted, read_cells
from sphinx.application import Sphinx
from sphinx.builders import Builder
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from lablib.live.explorer import find_explorer

_LOG = logging.getLogger(__name__)
#: What `show` of lablib.view.style writes.
_FIGURE, _CAPTION = '<figure class="house-figure">', "<figcaption>"
#: The page with the {codemap}, to which the pages of the sources lead back.
MAP = "book/where_is_the_code"


class block(nodes.General, nodes.Element):
    """An HTML element around its children: its tag, its classes and, of a fold, its summary."""


class code(nodes.General, nodes.Element):
    """Code as HTML that the search does not index."""


class drawn(nodes.General, nodes.Element):
    """What a cell drew, for the map: figures with anchor, name and caption; who drew and who computed them."""


class codemap(nodes.General, nodes.Element):
    """Where the map of one page stands until all pages are read."""


@functools.cache
def _sources(root: Path) -> Sources:
    return Sources(root)


@functools.cache
def _cells(root: Path, path: Path) -> Cells:
    return Cells(_sources(root), path.relative_to(root).as_posix(), read_cells(path))


def _cells_of(app: Sphinx, page: str) -> Cells:
    return _cells(Path(app.srcdir), Path(app.env.doc2path(page)))


def _address(builder: Builder, here: str, place: Place) -> str:
    address = builder.get_relative_uri(here, place.page)
    return f"{address}#{place.anchor}" if place.line else address


def _reference(builder: Builder, here: str, place: Place, shown: nodes.Node | None = None) -> nodes.reference:
    shown = shown or nodes.literal("", "", *_breakable(place.dotted))
    return nodes.reference("", "", shown, internal=True, refuri=_address(builder, here, place))


def _breakable(name: str) -> Iterator[nodes.Node]:
    """Yield a name that a narrow page may break after its dots."""
    first, *others = re.split(r"(?<=[./])", name)
    yield nodes.Text(first)
    for part in others:
        yield nodes.raw("", "<wbr>", format="html")
        yield nodes.Text(part)


def _listed(builder: Builder, here: str, places: Iterable[Place]) -> list[nodes.Node]:
    """Return links, with commas between them."""
    found = []
    for place in places:
        found += [nodes.Text(", "), _reference(builder, here, place)]
    return found[1:]


def _addressed(builder: Builder, here: str, links: Iterable[Link]) -> list[tuple[Link, str]]:
    return [(link, _address(builder, here, link.place)) for link in links]


def _link_names(app: Sphinx, doctree: nodes.document) -> None:
    """Make links of the names in the prose."""
    sources = _sources(Path(app.srcdir))
    for literal in list(doctree.findall(nodes.literal)):
        match = re.search(NAME, literal.astext())
        if not match or isinstance(literal.parent, nodes.reference):
            continue
        try:
            place = sources.resolve(match[0])
        except UnknownName as error:
            if not _is_output(literal):
                _LOG.warning("%s", error, location=literal)
            continue
        if app.builder.format == "html" and not isinstance(literal.parent, nodes.title):
            literal.replace_self(_reference(app.builder, app.env.docname, place, literal.deepcopy()))


def _is_output(node: nodes.Node | None) -> bool:
    """Return whether a cell printed it: a record keeps the command that made it, whatever its modules are called now."""
    while node is not None and node.get("nb_element") != "cell_code_output":
        node = node.parent
    return node is not None


def _show_code(app: Sphinx, doctree: nodes.document) -> None:
    """Link the names in the cells of a page, fold the cells that say so, and say who drew its figures."""
    here, figures, number = app.env.docname, 0, -1
    for container in list(doctree.findall(nodes.container)):
        parts = {child.get("nb_element"): child for child in container.children if isinstance(child, nodes.Element)}
        if (shown := parts.get("cell_code_source")) is None:
            continue
        cells = _cells_of(app, here)
        number = cells.number(shown.astext(), number + 1)
        below = block(tag="div", classes=["figure-code"])
        if found := _number_figures(parts.get("cell_code_output"), figures, chapter_prefix(here)):
            figures += len(found)
            makers = cells.drawn_by(number)
            below.append(drawn(figures=found, drawn_by=makers, computed_by=cells.computed_by(number)))
            below.append(_line("Drawn by ", _listed(app.builder, here, makers) or [nodes.Text("this cell")]))
        html = _cell_html(app.builder, here, cells, number)
        if container.attributes.pop("hide_mode", "") == "input":
            container.remove(shown)
            shown.children = [code(html=html)]
            below.append(_fold(app.builder, here, cells, number, shown))
        else:
            shown.children = [nodes.raw("", html, format="html")]
        if below.children:
            container.append(below)


def _cell_html(builder: Builder, here: str, cells: Cells, number: int) -> str:
    lines = highlighted(cells.text(number), _addressed(builder, here, cells.links(number)))
    # As Sphinx writes a block of code.
    return '<div class="notranslate"><div class="highlight"><pre>' + "\n".join(lines) + "\n</pre></div></div>\n"


def _number_figures(output: nodes.Element | None, before: int, chapter: str) -> list[tuple[str, str, str]]:
    """Number the figures that a cell shows, and return anchor, name and caption of each."""
    found = []
    for raw in output.findall(nodes.raw) if output else ():
        html = raw.astext()
        if _FIGURE in html:
            number = before + len(found) + 1
            anchor, name = f"figure-{number}", f"Figure {chapter}{number}."
            found.append((anchor, name, unescape(html.partition(_CAPTION)[2].partition("<")[0])))
            html = html.replace(_FIGURE, f'{_FIGURE[:-1]} id="{anchor}">')
            html = html.replace(_CAPTION, f'{_CAPTION}<span class="figure-number">{name}</span> ')
            raw.children = [nodes.Text(html)]
    return found


def _line(words: str, links: Iterable[nodes.Node]) -> nodes.paragraph:
    return nodes.paragraph("", "", nodes.Text(words), *links, classes=["figure-maker"])


def _fold(builder: Builder, here: str, cells: Cells, number: int, shown: nodes.Element) -> block:
    """Return the folded code of a cell, with what computes its numbers."""
    formulas = _listed(builder, here, cells.computed_by(number))
    end = [nodes.Text(". ")] if formulas else []
    page = _reference(builder, here, cells.place(number), nodes.Text("All code of this page"))
    line = _line("Computed by " if formulas else "", [*formulas, *end, page, nodes.Text(".")])
    return block("", shown, line, tag="details", classes=["code-fold"], summary="Show code")


def _name_explorers(app: Sphinx, doctree: nodes.document) -> None:
    """Say below an explorer which module it is."""
    for node in list(doctree.findall(livecalc)):
        place = _sources(Path(app.srcdir)).resolve(node["module"])
        explorer = find_explorer(node["module"])
        figure = (f"livecalc-{explorer.name}", "Explorer.", f"{explorer.title}.")
        below = block(tag="div", classes=["figure-code"])
        below.append(drawn(figures=[figure], drawn_by=[place], computed_by=[]))
        below.append(_line("Computed and drawn by ", _listed(app.builder, app.env.docname, [place])))
        node.parent.insert(node.parent.index(node) + 1, below)


def _load(app: Sphinx) -> None:
    """Read the repository before the processes part that read pages."""
    _sources(Path(app.srcdir))


def _read(app: Sphinx, doctree: nodes.document) -> None:
    _link_names(app, doctree)
    if app.builder.format == "html":
        _show_code(app, doctree)
        _name_explorers(app, doctree)


class CodeMap(SphinxDirective):
    """The directive {codemap}: a section for each page of book/ that draws something, labelled `code-NN_slug`."""

    def run(self) -> list[nodes.Node]:
        """Return the sections, which are filled when all pages are read."""
        sections = []
        for page, document in self.env.external_site_map.items():
            text = Path(self.env.doc2path(page)).read_text(encoding="utf-8")
            if page.startswith("book/") and ("{livecalc}" in text or _cells_of(self.env.app, page).draws()):
                title = document.title or re.search(r"(?m)^# (.+)$", text)[1]
                name = f"code-{PurePosixPath(page).name}".lower()
                section = nodes.section("", nodes.title("", title), codemap(page=page), names=[name])
                self.state.document.note_explicit_target(section, section)
                sections.append(section)
        return sections


def _fill_maps(app: Sphinx, doctree: nodes.document, here: str) -> None:
    for node in list(doctree.findall(codemap)):
        node.replace_self(_map_of(app, here, node["page"]) if app.builder.format == "html" else [])


def _map_of(app: Sphinx, here: str, page: str) -> list[nodes.Node]:
    """Return what a page draws, with links, and the modules that it and its lab use."""
    builder, figures, rooms = app.builder, nodes.bullet_list(), nodes.bullet_list()
    for node in app.env.get_doctree(page).findall(drawn):
        makers = [("Drawn by ", node["drawn_by"]), ("Computed by ", node["computed_by"])]
        lines = [_line(words, _listed(builder, here, places)) for words, places in makers if places]
        for anchor, name, caption in node["figures"]:
            address = f"{builder.get_relative_uri(here, page)}#{anchor}"
            title = nodes.reference("", name, internal=True, refuri=address)
            first = nodes.paragraph("", "", title, nodes.Text(f" {caption}"))
            figures.append(nodes.list_item("", first, *(line.deepcopy() for line in lines)))
    for room, places in _modules(app, page).items():
        rooms.append(nodes.list_item("", _line(f"{room}: ", _listed(builder, here, places))))
    return [figures, nodes.paragraph("", "Modules of the page and of its lab:"), rooms]


def _modules(app: Sphinx, page: str) -> dict[str, list[Place]]:
    """Return the files that a page and its lab use or name, by room."""
    sources, found, rooms = _sources(Path(app.srcdir)), set(), {}
    for name in {page, page.replace("book/", "labs/")} & app.env.found_docs:
        text = Path(app.env.doc2path(name)).read_text(encoding="utf-8")
        named = map(sources.find, re.findall(NAME, text))
        found |= {place.file for place in named if place} | _cells_of(app, name).files()
    for file in sorted(found):
        rooms.setdefault("/".join(file.split("/")[:2]), []).append(Place(file))
    return rooms


def _write_pages(app: Sphinx, exception: Exception | None) -> None:
    """Write a page for every file, and one for the cells of every page of the book."""
    if exception is not None or app.builder.format != "html":
        return
    sources, builder = _sources(Path(app.srcdir)), app.builder
    files = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    template = files.get_template("source_page.html")
    programs = [_cells_of(app, page).source for page in sorted(app.env.found_docs)]
    for source in [*sources.files.values(), *(program for program in programs if program.text)]:
        page = Place(source.file).page
        path = Path(app.outdir) / f"{page}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = highlighted(source.text, _addressed(builder, page, sources.links(source)))
        html = template.render(
            file=source.file,
            folders=_folders(sources, builder, source),
            name=PurePosixPath(source.file).name,
            lines=zip(_anchors(source), lines, strict=True),
            inside=[
                (_inside(source, inner), _address(builder, page, Place(inner.file)), _with_code(inner.summary))
                for inner in sources.inside(source)
            ],
            title=app.config.html_title,
            home=builder.get_relative_uri(page, "index"),
            map=builder.get_relative_uri(page, MAP),
            static=builder.get_relative_uri(page, "_static/x").removesuffix("x.html"),
        )
        path.write_text(html, encoding="utf-8")


def _inside(package: Source, inner: Source) -> str:
    """Return a file's path as its package's page lists it: `config.py`, or `tape/` for a package."""
    return inner.file.removeprefix(package.file.removesuffix("__init__.py")).removesuffix("__init__.py")


def _with_code(summary: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(summary))


def _folders(sources: Sources, builder: Builder, source: Source) -> list[tuple[str, str]]:
    """Return the folders above a file, each with the address of its package, if it is one."""
    page, found = Place(source.file).page, []
    for folder in reversed(PurePosixPath(source.file).parents[:-1]):
        package = sources.find(f"{folder}/")
        found.append((folder.name, _address(builder, page, package) if package else ""))
    return found


def _anchors(source: Source) -> list[list[str]]:
    """Return the ids on each line: its number, and the names that are defined there."""
    anchors = [[f"L{number}"] for number in range(1, len(source.text.splitlines()) + 1)]
    if source.file.endswith(".py"):
        for name, bound in source.defined.items():
            anchors[bound[-1][0] - 1].append(name)
    return anchors


def _visit_block(self: nodes.NodeVisitor, node: block) -> None:
    self.body.append(self.starttag(node, node["tag"]))
    if summary := node.get("summary"):
        self.body.append(f"<summary>{escape(summary)}</summary>\n")


def _depart_block(self: nodes.NodeVisitor, node: block) -> None:
    self.body.append(f"</{node['tag']}>\n")


def _visit_code(self: nodes.NodeVisitor, node: code) -> None:
    self.body.append(node["html"])
    raise nodes.SkipNode


def _skip(self: nodes.NodeVisitor, node: nodes.Node) -> None:
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to the build."""
    app.setup_extension("livecalc")
    others = dict.fromkeys(("latex", "text", "man", "texinfo"), (_skip, None))
    app.add_node(block, html=(_visit_block, _depart_block), **others)
    app.add_node(code, html=(_visit_code, None), **others)
    app.add_node(drawn, html=(_skip, None), **others)
    app.add_node(codemap, html=(_skip, None), **others)
    app.add_directive("codemap", CodeMap)
    app.connect("builder-inited", _load)
    app.connect("doctree-read", _read)
    app.connect("doctree-resolved", _fill_maps)
    app.connect("build-finished", _write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
