"""Where a name is defined, what a cell uses, and code as HTML: what the site's pages of the sources are made of."""

import ast
import builtins
import html
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _extension(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "_ext" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sources = _extension("sources")
FILES = {
    "lablib/__init__.py": "",
    "lablib/calc/__init__.py": "",
    "lablib/calc/flour.py": "GB = 10**9\n\n\ndef gb(size):\n    return size / GB\n",
    "lablib/calc/cake/__init__.py": "from lablib.calc.cake.states import plan, shard\n\nSTAGES = 4\n",
    "lablib/calc/cake/states.py": (
        "from ..flour import GB as billion\n\n\ndef shard(params, ranks):\n    return params // ranks * billion\n\n\n"
        "class plan:\n    size: int = 0\n\n    def best(self, shard):\n        return shard(self.size, 2)\n"
    ),
    "lablib/calc/cake/plan.py": "",
    "lablib/view/__init__.py": "",
    # These two are known by name.
    "lablib/calc/units.py": "",
    "lablib/view/style.py": "def show(figure):\n    pass\n",
    "lablib/view/cake.py": "def bars(sizes):\n    pass\n",
}


@pytest.fixture(scope="module")
def course():
    """Return the sources of the course; to read them takes seconds."""
    return sources.Sources(ROOT)


@pytest.fixture
def repository(tmp_path):
    """A small repository in which a package passes on what its modules define."""
    for file, text in FILES.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    return sources.Sources(tmp_path)


@pytest.mark.parametrize(
    ("name", "file", "defined", "line"),
    [
        ("lablib.calc.flour.gb", "lablib/calc/flour.py", "gb", 4),
        ("lablib.calc.flour.GB", "lablib/calc/flour.py", "GB", 1),
        ("lablib.calc.cake.shard", "lablib/calc/cake/states.py", "shard", 4),
        ("lablib.calc.cake.states.billion", "lablib/calc/flour.py", "GB", 1),
        ("lablib.calc.cake.STAGES", "lablib/calc/cake/__init__.py", "STAGES", 3),
        # As in Python, what a package's __init__ imports hides a module of the same name.
        ("lablib.calc.cake.plan", "lablib/calc/cake/states.py", "plan", 8),
        ("lablib.calc.cake.plan.best", "lablib/calc/cake/states.py", "plan.best", 11),
        ("lablib/calc/cake/plan.py", "lablib/calc/cake/plan.py", "", 0),
        ("lablib.calc.cake", "lablib/calc/cake/__init__.py", "", 0),
        ("lablib/calc/cake", "lablib/calc/cake/__init__.py", "", 0),
    ],
)
def test_a_name_leads_to_its_definition(repository, name, file, defined, line):
    place = repository.resolve(name)
    assert (place.file, place.name, place.line) == (file, defined, line)


@pytest.mark.parametrize(
    "name",
    [
        "lablib.calc.one",
        "lablib.calc.cake.shards",
        "lablib.calc.cake.shard.size",
        "lablib.calc.flour.cake",
        "lablib/calc/cake/shard.py",
        "torch.nn",
    ],
)
def test_a_name_that_does_not_exist_is_refused(repository, name):
    with pytest.raises(sources.UnknownName, match="no "):
        repository.resolve(name)
    assert repository.find(name) is None


def _linked(repository, source):
    lines = source.text.splitlines()
    return [(lines[link.line - 1][link.start : link.end], link.place.dotted) for link in repository.links(source)]


def test_names_of_a_source_are_links_and_local_names_are_none(repository):
    assert _linked(repository, repository.files["lablib/calc/cake/states.py"]) == [
        ("GB", "lablib.calc.flour.GB"),
        ("billion", "lablib.calc.flour.GB"),
    ]


def test_a_link_counts_characters_not_bytes(repository):
    text = "from lablib.calc import cake\nψ = cake.shard(8, 2)\n'ψψ', ψ, [ψ for ψ in (1, cake.STAGES)]\n"
    assert _linked(repository, sources.Source("book/a.md", text))[1:] == [
        ("cake", "lablib.calc.cake"),
        ("cake.shard", "lablib.calc.cake.states.shard"),
        ("ψ", "book/a.md"),
        ("cake.STAGES", "lablib.calc.cake.STAGES"),
    ]


CELLS = [
    (
        "",
        "from lablib.calc.flour import GB\nfrom lablib.calc.cake import shard\nfrom lablib.view import cake as draw\n",
    ),
    ("", "from lablib.view.style import show\n\ndef size(ranks):\n    return shard(8, ranks) / GB\n"),
    ("First", "show(draw.bars([size(n) for n in (1, 2)]))\n"),
    ("Second", "size = 5\nshow(draw.bars([size]))\n"),
]


def test_what_a_cell_uses_is_followed_through_earlier_cells(repository):
    cells = sources.Cells(repository, "book/a.md", CELLS)
    first = cells.number("show(draw.bars([size(n) for n in (1, 2)]))")
    assert [place.dotted for place in cells.drawn_by(first)] == ["lablib.view.cake.bars"]
    assert [place.dotted for place in cells.computed_by(first)] == ["lablib.calc.cake.states.shard"]
    # The last cell binds the name again, to a number.
    assert [place.dotted for place in cells.drawn_by(first + 1)] == ["lablib.view.cake.bars"]
    assert cells.computed_by(first + 1) == []
    assert cells.draws()
    assert not sources.Cells(repository, "book/a.md", CELLS[:1]).draws()


def test_a_cell_leads_to_other_cells_by_their_line(repository):
    cells = sources.Cells(repository, "book/a.md", CELLS)
    place = next(link.place for link in cells.links(2) if link.place.name == "size")
    assert cells.source.text.splitlines()[place.line - 1] == "def size(ranks):"
    assert (place.page, place.anchor) == ("code/book/a", f"L{place.line}")


def test_cells_of_markdown_and_notebooks_are_read_with_their_sections(tmp_path):
    page = tmp_path / "a.md"
    page.write_text(
        "# A\n\n```{code-cell} python\n:tags: [hide-input]\none = 1\n```\n\n## B\n\n````{code-cell}\ntwo\n````\n"
    )
    assert sources.read_cells(page) == [("A", "one = 1\n"), ("B", "two\n")]
    lab = tmp_path / "a.ipynb"
    cells = [("markdown", ["# A\n", "text"]), ("code", ["one = 1\n", "two"])]
    lab.write_text(json.dumps({"cells": [{"cell_type": kind, "source": source} for kind, source in cells]}))
    assert sources.read_cells(lab) == [("A", "one = 1\ntwo")]


def test_highlighted_code_is_the_code(course):
    toys = [file for file in course.files if file.startswith("lablib/toys/")]
    assert len(toys) > 20
    for file in toys:
        source = course.files[file]
        links = [(link, f"#{link.place.name}") for link in course.links(source)]
        lines = sources.highlighted(source.text, links)
        assert [html.unescape(re.sub(r"<[^>]+>", "", line)) for line in lines] == source.text.splitlines(), file
        assert "".join(lines).count("<a href=") == "".join(lines).count("</a>") == len(links), file


def _prose():
    """Yield the prose of each page, without its cells and blocks of code."""
    for path in [*ROOT.glob("*.md"), *sorted((ROOT / "book").glob("*.md"))]:
        if path.name not in ("CHANGELOG.md", "CONTRIBUTING.md"):  # the past, and what is still to be written
            yield path, re.sub(r"(?ms)^(`{3,})\{?code-cell.*?^\1$", "", path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "labs").glob("[0-9]*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        yield path, "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


@pytest.mark.parametrize(("path", "prose"), [pytest.param(*pair, id=pair[0].stem) for pair in _prose()])
def test_names_in_the_prose_exist(course, path, prose):
    codes = re.findall(r"`([^`\n]+)`", prose)
    names = [name for code in codes for name in re.findall(sources.NAME, code)]
    assert [name for name in names if course.find(name) is None] == []
    # A file's name alone is no link, and nobody notices when the file goes.
    files = {file.rpartition("/")[2] for file in course.files}
    assert [code for code in codes if code in files] == []
    imports = re.findall(r"(?m)^from (lablib[\w.]*) import ([\w, ]+)$", prose)
    names = [f"{module}.{name.split(' as ')[0]}" for module, found in imports for name in found.split(", ")]
    assert [name for name in names if course.find(name) is None] == []


@pytest.mark.parametrize("path", sorted((ROOT / "book").glob("*.md")), ids=lambda path: path.stem)
def test_an_inline_number_uses_names_that_the_cells_of_its_page_bind(path):
    text = path.read_text(encoding="utf-8")
    cells = "\n".join(code for _, code in sources.read_cells(path))
    inline = "\n".join(f"({code})" for code in re.findall(r"\{eval\}`([^`]+)`", text))
    bound = set(dir(builtins)) | set(sources.Source("", f"{cells}\n{inline}").defined)
    for node in ast.walk(ast.parse(f"{cells}\n{inline}")):
        if isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    used = {node.id for node in ast.walk(ast.parse(inline)) if isinstance(node, ast.Name)}
    assert used - bound == set()


@pytest.mark.parametrize("path", sorted((ROOT / "book").glob("*.md")), ids=lambda path: path.stem)
def test_a_cell_that_shows_something_shows_its_code(path):
    # The formulas at the end of a chapter name their functions themselves, in the sheet.
    table = r":tags: \[remove-input\]\n(?:rung_card|rung_formulas|formula_sheet)\(\"\d\d\"\)\n"
    text = re.sub(table, "", path.read_text(encoding="utf-8"))
    # A guess would be answered by its own code; what the code computes is said with the answer.
    asking = r"(?ms)^```\{code-cell\} \w+\n:tags: \[remove-input\]\n(?=(?:(?!^```).)*^(?:guess|question)\().*?^```$"
    text = re.sub(asking, "", text)
    tags = re.findall(r"(?m)^:tags: \[(.*)\]$", text)
    assert {tag for tag in tags if "remove-input" in tag} <= {"remove-input, remove-output"}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("lablib.calc.cake.shard", 'href="code/lablib/calc/cake/states.html#shard"'),
        ("lablib/calc/flour.py", 'href="code/lablib/calc/flour.html"'),
        ("lablib.calc.flour.TB", "lablib/calc/flour.py has no TB"),
    ],
)
def test_a_name_in_a_page_is_a_link_or_fails_the_build(repository, tmp_path, name, sentence):
    paths = [str(ROOT), str(ROOT / "_ext")]
    (tmp_path / "conf.py").write_text(
        f"import sys\nsys.path[:0] = {paths}\nextensions = ['source_pages']\nhtml_theme = 'basic'\n"
    )
    (tmp_path / "index.rst").write_text(f"One\n===\n\nSee ``{name}``.\n")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", str(tmp_path), str(site)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        assert sentence in done.stderr
        return
    page = (site / "index.html").read_text()
    assert sentence in page
    file, _, anchor = sentence.partition('"')[2].rstrip('"').partition("#")
    assert f'id="{anchor or "L1"}"' in (site / file).read_text()
    assert "code/" not in (site / "searchindex.js").read_text()
