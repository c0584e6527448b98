"""The repository's Python as pages can show it: where a name is defined, and code as HTML in which names are links.

Everything is read with `ast`; nothing is imported. A name is followed to its definition: where a package's `__init__`
re-exports a function, the link goes to the function.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES

#: What becomes a page.
SHOWN = ("lablib/**/*.py", "labs/scripts/*.py", "labs/solutions/*.py")
#: A name of it in a text, as a dotted name or as a path.
NAME = r"(?<!\w)(?<!\w[./])(?:lablib|labs/(?:scripts|solutions))(?:[./]\w+)+"


class UnknownName(ValueError):
    """A name that the repository does not have."""


@dataclass(frozen=True)
class Place:
    """Where something is defined.

    Attributes:
        file: Its file, from the root of the repository, or the page of the book whose cells define it.
        name: Its name there, like `ZeRO3.forward`; empty for a whole file.
        kind: "module", "function", "class" or "value"; of a page of the book also "cell".
        line: The line on which its definition begins; 0 for a whole file.
    """

    file: str
    name: str = ""
    kind: str = "module"
    line: int = 0

    @property
    def page(self) -> str:
        """The page that shows it, without its suffix."""
        return f"code/{self.file.rpartition('.')[0]}"

    @property
    def anchor(self) -> str:
        """Its id on that page. Cells may bind a name again and again, so theirs is the line."""
        return self.name if self.file.endswith(".py") else f"L{self.line}"

    @property
    def dotted(self) -> str:
        """Its full name, as Python imports it; the path of a file that nothing imports."""
        if not self.file.startswith("lablib/"):
            return self.file
        module = self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return f"{module}.{self.name}" if self.name else module


@dataclass(frozen=True)
class Link:
    """A name that stands in a program, and where it is defined.

    Attributes:
        line: Its line, from 1.
        start: The column of its first character, from 0.
        end: The column after its last one.
        place: Its definition.
    """

    line: int
    start: int
    end: int
    place: Place


class Source:
    """One file, or the code cells of one page, as a program.

    Args:
        file: Its path from the root of the repository.
        text: The program.

    Attributes:
        defined: Line and kind of each binding of a name outside functions; in classes the name is `Class.method`.
        imported: What a name stands for that an import binds, as a dotted name.
        exported: The same without imports inside functions.
    """

    def __init__(self, file: str, text: str) -> None:
        self.file, self.text, self.tree = file, text, ast.parse(text)
        self.defined: dict[str, list[tuple[int, str]]] = {}
        self.imported: dict[str, str] = {}
        self.exported: dict[str, str] = {}
        self._note(self.tree.body, "")
        for node in ast.walk(self.tree):
            self.imported |= _imports(node, self.package)

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return (ast.get_docstring(self.tree) or "").partition("\n")[0]

    @property
    def package(self) -> str:
        """The package in which a relative import begins."""
        return self.file.rpartition("/")[0].replace("/", ".")

    def _note(self, body: list[ast.stmt], inside: str) -> None:
        """Note the names that statements bind, those in branches and classes included."""
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                self.defined.setdefault(inside + node.name, []).append((node.lineno, kind))
                if kind == "class":
                    self._note(node.body, f"{inside}{node.name}.")
                continue
            if not inside:
                self.exported |= _imports(node, self.package)
            for name in _assigned(node):
                self.defined.setdefault(inside + name, []).append((node.lineno, "value"))
            for part in ("body", "orelse", "finalbody"):
                self._note(getattr(node, part, []), inside)
            for handler in getattr(node, "handlers", []):
                self._note(handler.body, inside)


def _assigned(node: ast.stmt) -> set[str]:
    """Return the names that one statement assigns, without what is inside its blocks."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For):
        targets = [node.target]
    elif isinstance(node, ast.With):
        targets = [item.optional_vars for item in node.items if item.optional_vars]
    else:
        targets = []
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr) and node.value:
        targets += [part.target for part in ast.walk(node.value) if isinstance(part, ast.NamedExpr)]
    return {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}


def _origin(node: ast.AST, package: str) -> str:
    """Return the dotted name of the module from which an import takes names; "" for a plain import."""
    if not isinstance(node, ast.ImportFrom):
        return ""
    above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    return ".".join([*above, *filter(None, [node.module])])


def _imports(node: ast.AST, package: str) -> dict[str, str]:
    """Return what one statement imports: the bound name, and the dotted name that it stands for."""
    names, origin = {}, _origin(node, package)
    for alias in node.names if isinstance(node, ast.ImportFrom | ast.Import) else ():
        if origin:
            names[alias.asname or alias.name] = f"{origin}.{alias.name}"
        else:
            bound = alias.asname or alias.name.partition(".")[0]
            names[bound] = alias.name if alias.asname else bound
    return names


class Sources:
    """All files that are shown.

    Args:
        root: Folder of the repository.
    """

    def __init__(self, root: Path) -> None:
        paths = sorted({path for pattern in SHOWN for path in root.glob(pattern)})
        texts = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}
        self.files = {file: Source(file, text) for file, text in texts.items()}

    def resolve(self, name: str) -> Place:
        """Return where a name is defined.

        Args:
            name: `lablib.calc.parallel.zero.shard_size`, or the path of a file or folder.

        Raises:
            UnknownName: If there is no such thing.
        """
        if "/" in name:
            for file in (name, f"{name.rstrip('/')}/__init__.py"):
                if file in self.files:
                    return Place(file)
            raise UnknownName(f"there is no file {name}")
        package, *rest = name.split(".")
        file = self._file(package)
        if file is None:
            raise UnknownName(f"{package} is no package of this repository")
        return self._inside(file, rest, name, ())

    def _file(self, module: str) -> str | None:
        stem = module.replace(".", "/")
        return next((file for file in (f"{stem}.py", f"{stem}/__init__.py") if file in self.files), None)

    def _inside(self, file: str, rest: list[str], name: str, seen: tuple[tuple[str, str], ...]) -> Place:
        """Follow the parts of a dotted name from a file on, as Python's own import does."""
        source, whole = self.files[file], ".".join(rest)
        if not rest:
            return Place(file)
        if whole in source.defined:
            line, kind = source.defined[whole][-1]
            return Place(file, whole, kind, line)
        elsewhere = source.exported.get(rest[0], "")
        if elsewhere.startswith("lablib.") and (file, rest[0]) not in seen:
            package, *parts = elsewhere.split(".")
            return self._inside(self._file(package), [*parts, *rest[1:]], name, (*seen, (file, rest[0])))
        inner = self._file(f"{file.removesuffix('/__init__.py').replace('/', '.')}.{rest[0]}")
        if inner is None or not file.endswith("/__init__.py"):
            raise UnknownName(f"{file} has no {whole}, which {name} names")
        return self._inside(inner, rest[1:], name, seen)

    def inside(self, source: Source) -> list[Source]:
        """Return what is in the folder of a package: its modules, and the `__init__` of each package.

        Args:
            source: The package's `__init__`; anything else has nothing inside.
        """
        folder, _, name = source.file.rpartition("/")
        depth = folder.count("/") + 1
        return [
            other
            for file, other in self.files.items()
            if name == "__init__.py"
            and file.startswith(f"{folder}/")
            and other is not source
            and file.removesuffix("/__init__.py").count("/") == depth
        ]

    def find(self, name: str) -> Place | None:
        """Return where a name is defined, or None for names of other packages and for what only a run can tell.

        Args:
            name: A dotted name.
        """
        try:
            return self.resolve(name)
        except UnknownName:
            return None

    def links(self, source: Source) -> list[Link]:
        """Return each name in a program that is defined in the program itself or in another file.

        Args:
            source: The program.
        """
        return sorted(_Names(self, source).found(), key=lambda link: (link.line, link.start))


class _Names:
    """A walk through a program that knows which names are local to a function."""

    def __init__(self, sources: Sources, source: Source) -> None:
        self.sources, self.source = sources, source
        self.lines = source.text.splitlines()

    def found(self) -> Iterator[Link]:
        for node in self.source.tree.body:
            yield from self._walk(node, frozenset())

    def _walk(self, node: ast.AST, local: frozenset[str]) -> Iterator[Link]:
        if isinstance(node, ast.ImportFrom | ast.Import):
            yield from self._import(node)
            return
        if isinstance(node, ast.Attribute | ast.Name) and (place := self._place(node, local)):
            begin = node.col_offset
            if node.lineno != node.end_lineno:  # a chain over several lines: its last part
                begin = node.end_col_offset - len(node.attr.encode())
            yield self._link(node.end_lineno, begin, node.end_col_offset, place)
            return
        if isinstance(node, _SCOPES):
            local |= _bound(node)
        for child in ast.iter_child_nodes(node):
            yield from self._walk(child, local)

    def _import(self, node: ast.ImportFrom | ast.Import) -> Iterator[Link]:
        origin = _origin(node, self.source.package)
        if origin and not node.level and (place := self.sources.find(origin)):
            begin = node.col_offset + len("from ")
            yield self._link(node.lineno, begin, begin + len(origin), place)
        for alias in node.names:
            if place := self.sources.find(f"{origin}.{alias.name}" if origin else alias.name):
                yield self._link(alias.lineno, alias.col_offset, alias.col_offset + len(alias.name), place)

    def _link(self, line: int, start: int, end: int, place: Place) -> Link:
        """Return a link; ast counts bytes, Pygments characters."""
        text = self.lines[line - 1].encode()
        return Link(line, len(text[:start].decode()), len(text[:end].decode()), place)

    def _place(self, node: ast.expr, local: frozenset[str]) -> Place | None:
        """Return where a name or a chain of attributes is defined."""
        line, parts = node.lineno, []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or isinstance(node.ctx, ast.Store) or node.id in local:
            return None
        name = ".".join([node.id, *parts])
        # The latest before the use, as a cell that binds a name again wants it.
        if bound := self.source.defined.get(name):
            at, kind = max((b for b in bound if b[0] <= line), default=bound[0])
            return Place(self.source.file, name, kind, at)
        imported = self.source.imported.get(node.id)
        return self.sources.find(".".join([imported, *parts])) if imported else None


_SCOPES = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp,
)  # fmt: skip


def _bound(node: ast.AST) -> frozenset[str]:
    """Return the names that a function or a comprehension binds for itself."""
    parts = list(ast.walk(node))
    shared = {name for part in parts if isinstance(part, ast.Global) for name in part.names}
    stored = {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    arguments = {part.arg for part in parts if isinstance(part, ast.arg)}
    return frozenset((stored | arguments) - shared)


def highlighted(text: str, links: Iterable[tuple[Link, str]]) -> list[str]:
    """Return code as HTML, one string a line.

    Args:
        text: The code.
        links: Names in it with their addresses.
    """
    opens = {(link.line, link.start): (link.end, address) for link, address in links}
    done, parts, line, column, end = [], [], 1, 0, 0
    for kind, value in PythonLexer(stripnl=False, ensurenl=False).get_tokens(text):
        style = STANDARD_TYPES.get(kind, "")
        for piece in value.splitlines(keepends=True):
            shown = escape(piece.removesuffix("\n"), quote=False)
            if (line, column) in opens:
                end, address = opens[line, column]
                parts.append(f'<a href="{escape(address)}">')
            # Plain names and punctuation look like the text around them.
            parts.append(f'<span class="{style}">{shown}</span>' if style not in _PLAIN and shown else shown)
            column += len(piece)
            if end and column >= end:
                parts.append("</a>")
                end = 0
            if piece.endswith("\n"):
                done.append("".join(parts))
                parts, line, column = [], line + 1, 0
    return [*done, "".join(parts)] if parts else done


_PLAIN = {"", "n", "nn", "p", "w"}


#: The rooms whose functions draw.
VIEWS = ("lablib/view/", "lablib/live/")
#: Serves every figure and draws none.
STYLE = "lablib.view.style"
#: Serves every number and computes none.
UNITS = "lablib.calc.units"


class Cells:
    """The code cells of a page as one program, in which a cell's names can be followed.

    Args:
        sources: Where names of other files are defined.
        file: The page, from the root of the repository.
        cells: Section and code of each code cell.
    """

    def __init__(self, sources: Sources, file: str, cells: Iterable[tuple[str, str]]) -> None:
        text, self._ranges = "", []
        for section, cell in cells:
            text += f"# %% {section}".rstrip() + "\n"
            first = text.count("\n") + 1
            text += cell.strip("\n") + "\n\n"
            self._ranges.append((first, text.count("\n") - 1))
        self.source = Source(file, text)
        self._lines, self._links = text.splitlines(), sources.links(self.source)
        self._style, self._units = sources.resolve(STYLE).file, sources.resolve(UNITS).file

    def number(self, text: str, least: int = 0) -> int:
        """Return the number of the first cell, from `least` on, with this code.

        Args:
            text: Code of a cell.
            least: Where to begin.

        Raises:
            ValueError: If there is none.
        """
        for number in range(least, len(self._ranges)):
            if self.text(number) == text.strip("\n"):
                return number
        raise ValueError(f"{self.source.file} has no such cell: {text}")

    def text(self, number: int) -> str:
        """Return a cell's code.

        Args:
            number: The cell, from 0.
        """
        first, last = self._ranges[number]
        return "\n".join(self._lines[first - 1 : last])

    def place(self, number: int) -> Place:
        """Return where a cell begins in the program.

        Args:
            number: The cell, from 0.
        """
        return Place(self.source.file, "", "cell", self._ranges[number][0])

    def links(self, number: int) -> list[Link]:
        """Return the links in a cell, counting its lines from 1; those to the cell itself are left out.

        Args:
            number: The cell, from 0.
        """
        first, last = self._ranges[number]
        return [
            replace(link, line=link.line - first + 1)
            for link in self._within(first, last)
            if link.place.file != self.source.file or not first <= link.place.line <= last
        ]

    def _within(self, first: int, last: int) -> list[Link]:
        return [link for link in self._links if first <= link.line <= last]

    def files(self) -> set[str]:
        """Return the files of the repository that the cells use."""
        return {link.place.file for link in self._links} - {self.source.file}

    def uses(self, number: int) -> list[Place]:
        """Return the functions and classes that a cell uses, by itself and through names that other cells bind.

        Args:
            number: The cell, from 0.
        """
        ranges, seen, found = [self._ranges[number]], set(), {}
        while ranges:
            lines = ranges.pop(0)
            for link in self._within(*lines) if lines not in seen else ():
                if link.place.file == self.source.file:
                    ranges.append(self._statement(link.place.line))
                elif link.place.kind in ("function", "class"):
                    found[link.place] = None
            seen.add(lines)
        return list(found)

    def _statement(self, line: int) -> tuple[int, int]:
        """Return the first and the last line of the statement that binds a name on a line."""
        for node in self.source.tree.body:
            first = min([node.lineno, *(part.lineno for part in getattr(node, "decorator_list", []))])
            if first <= line <= node.end_lineno:
                return first, node.end_lineno
        raise ValueError(f"{self.source.file}: no statement on line {line} of its cells")

    def drawn_by(self, number: int) -> list[Place]:
        """Return the functions that draw what a cell shows.

        Args:
            number: The cell, from 0.
        """
        views = [place for place in self.uses(number) if place.file.startswith(VIEWS)]
        return [place for place in views if place.kind == "function" and place.file != self._style]

    def computed_by(self, number: int) -> list[Place]:
        """Return the functions and classes that compute what a cell shows.

        Args:
            number: The cell, from 0.
        """
        others = [place for place in self.uses(number) if not place.file.startswith(VIEWS)]
        return [place for place in others if place.file != self._units]

    def draws(self) -> bool:
        """Return whether some cell shows a figure."""
        return any(link.place.dotted == f"{STYLE}.show" for link in self._links)


def read_cells(path: Path) -> list[tuple[str, str]]:
    """Return section and code of each code cell of a page.

    Args:
        path: A notebook, or Markdown with {code-cell}s.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        kinds = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    else:
        parts = re.split(r"(?ms)^`{3,}\{code-cell\}[^\n]*\n((?::[^\n]*\n)*)(.*?)^`{3,}[ ]*$", text)
        kinds = [
            pair
            for prose, code in zip(parts[::3], [*parts[2::3], ""], strict=True)
            for pair in (("markdown", prose), ("code", code))
        ][:-1]
    cells, section = [], ""
    for kind, content in kinds:
        if kind == "code":
            cells.append((section, content))
        elif titles := re.findall(r"(?m)^#+ (.+)$", content):
            section = titles[-1]
    return cells
