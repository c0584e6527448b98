"""How lablib is laid out: folders of a dozen entries, doors with a docstring, a README that names what is there."""

import ast
import importlib
import re
from pathlib import Path

import pytest

LABLIB = Path(__file__).resolve().parents[1] / "lablib"
ROOMS = sorted(path for path in LABLIB.iterdir() if (path / "__init__.py").exists())
PACKAGES = sorted(path.parent for room in ROOMS for path in room.rglob("__init__.py") if path.parent != room)


def _name(path):
    return ".".join(path.relative_to(LABLIB.parent).parts)


def test_an_addition_pays_with_a_removal():
    """The package is read by learners. Raise a ceiling with a reason in the commit's message, and lower it after a cut."""
    files = list(LABLIB.rglob("*.py"))
    assert len(files) <= 292
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= 65_690


def test_no_folder_shows_more_than_about_a_dozen_entries():
    """The modules of `checks` are one entry: one a rung, by its number."""
    entries = {
        _name(folder): sum(
            path.name not in ("__init__.py", "__pycache__") and not re.match(r"\.|rung\d\d\.py", path.name)
            for path in folder.iterdir()
        )
        for folder in [LABLIB, *ROOMS, *PACKAGES]
    }
    assert {name: count for name, count in entries.items() if count > 15} == {}


@pytest.mark.parametrize("package", PACKAGES, ids=_name)
def test_a_door_says_what_is_inside_and_what_to_read_first(package):
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    text = ast.get_docstring(tree) or ""
    assert len(text.splitlines()) >= 3
    assert re.search(r"\bRead `", text), "which module to read first"
    # Every name in backticks after "Read" is a module in there.
    first = re.search(r"\bRead `([a-z_0-9.]+)`", text)[1].split(".")[0]
    assert (package / f"{first}.py").exists() or (package / first).is_dir()
    exported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lablib")
        for alias in node.names
    }
    listed = [
        element.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        for element in node.value.elts
    ]
    assert len(set(listed)) == len(listed)
    assert exported <= set(listed), "what a door imports, it exports"
    door = importlib.import_module(_name(package))
    assert [name for name in listed if not hasattr(door, name)] == [], "what a door exports, it has"
    # A name that is also a module's would hide that module.
    assert not {name for name in listed if (package / f"{name}.py").exists() or (package / name).is_dir()}


def test_the_readme_names_every_subject_and_nothing_that_is_gone():
    text = (LABLIB / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:calc|live|toys|launch|checks|view|cli)(?:\.[a-z_0-9]+)*)`", text))
    gone = {
        n
        for n in named
        if not (LABLIB / n.replace(".", "/")).is_dir() and not (LABLIB / f"{n.replace('.', '/')}.py").exists()
    }
    assert gone == set()
    subjects = {f"{room}.{p.name}" for room in ("calc", "toys") for p in PACKAGES if p.parent.name == room}
    assert {s for s in subjects if not any(n == s or n.startswith(f"{s}.") for n in named)} == set()
    assert len(text.splitlines()) <= 48, "one screen"
