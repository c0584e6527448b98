"""What a release has to be: one version everywhere, a wheel with all it needs, licences beside what is not ours."""

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import lablib
from lablib.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
STATIC = ROOT / "_build" / "html" / "_static"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SKILL = ROOT / "skills" / "rung-calculators" / "SKILL.md"


def _text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_version_and_date_are_the_same_everywhere():
    cited = yaml.safe_load(_text("CITATION.cff"))
    released = re.search(r"(?m)^## \[(\d.*)\] - (\S+)$", _text("CHANGELOG.md")).groups()
    assert (cited["version"], str(cited["date-released"])) == released
    assert lablib.__version__ == PROJECT["version"] == cited["version"]
    assert cited["title"] == yaml.safe_load(_text("_config.yml"))["title"]


def test_the_changelog_has_the_form_that_it_names():
    headings = re.findall(r"(?m)^(##+) (.+)$", _text("CHANGELOG.md"))
    versions = [title for level, title in headings if level == "##"]
    assert versions[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", title) for title in versions[1:])
    kinds = {title for level, title in headings if level != "##"}
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed here")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build leaves folders beside the sources
    shutil.copytree(ROOT / "lablib", source / "lablib", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests", "labs", "tools"):  # what lies beside the package stays outside
        shutil.copytree(ROOT / name, source / name, ignore=lambda _, names: [n for n in names if not n.endswith(".py")])
    for name in ("pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]):
        shutil.copy(ROOT / name, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--disable-pip-version-check",
        "--no-index",
        "--no-deps",
    ]
    done = subprocess.run([*command, "--no-build-isolation", "-w", folder, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_a_wheel_has_the_package_and_nothing_else(wheel):
    names = wheel.namelist()
    assert {name.split("/")[0] for name in names} == {"lablib", f"lablib-{lablib.__version__}.dist-info"}
    data = {path for path in names if path.startswith("lablib/") and not path.endswith(".py")}
    assert data == {"lablib/py.typed", "lablib/toys/text.txt", "lablib/calc/layouts/planner/measured.json"}
    ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / "lablib").rglob("*.py")}
    assert ours <= set(names)


def test_a_wheel_says_what_it_is(wheel):
    folder = f"lablib-{lablib.__version__}.dist-info"
    said = Parser().parsestr(wheel.read(f"{folder}/METADATA").decode())
    assert (said["Version"], said["License-Expression"]) == (lablib.__version__, "MIT AND CC-BY-4.0")
    assert said.get_all("License-File") == PROJECT["license-files"]
    assert {f"{folder}/licenses/{name}" for name in PROJECT["license-files"]} <= set(wheel.namelist())
    classifiers = said.get_all("Classifier")
    assert not [one for one in classifiers if one.startswith("License")]  # PEP 639: the expression says it
    minors = {one.rpartition(" ")[2] for one in classifiers if re.search(r"Python :: 3\.\d+$", one)}
    assert minors == {"3.11", "3.12", "3.13"}


def _third_party():
    """Return the rows of THIRD_PARTY.md: patterns of files below _static, and the licence's text."""
    rows = [line.split("|")[1:-1] for line in _text("THIRD_PARTY.md").splitlines() if line.startswith("| ")][1:]
    assert {len(row) for row in rows} == {5}
    return [(re.findall(r"`([^`]+)`", files), *re.findall(r"`([^`]+)`", text)) for _, files, _, _, text in rows]


@pytest.mark.site
def test_every_third_party_file_of_the_site_is_listed_and_its_licence_is_there():
    files = {path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file()}
    ours = {path.relative_to(ROOT / "_static").as_posix() for path in (ROOT / "_static").rglob("*") if path.is_file()}
    made = re.findall(r"`([^`]+)`", re.search(r"makes from the course's own.*", _text("THIRD_PARTY.md"))[0])
    rows = _third_party()
    patterns = [*made, *(pattern for row in rows for pattern in row[0])]
    assert sorted(f for f in files - ours if not any(fnmatchcase(f, pattern) for pattern in patterns)) == []
    for wanted, text in rows:
        if any(fnmatchcase(file, pattern) for file in files for pattern in wanted):  # Pyodide is not there without npm
            assert text in files, f"the site has {wanted} without its licence: make site"
            assert len((STATIC / text).read_text(encoding="utf-8")) > 500


def test_every_licence_that_is_kept_here_belongs_to_something():
    kept = {f"licences/{path.name}" for path in (ROOT / "_static" / "licences").iterdir()}
    assert kept <= {text for _, text in _third_party()}


def test_the_skill_has_the_form_that_assistants_read():
    _, head, body = SKILL.read_text(encoding="utf-8").split("---\n", 2)
    front = yaml.safe_load(head)
    assert front["name"] == SKILL.parent.name
    assert 0 < len(front["description"]) <= 1024
    assert len(front["compatibility"]) <= 500
    assert len(body.splitlines()) <= 120
    assert set(re.findall(r"`rung ([a-z-]+)", body)) >= {
        "memory",
        "fit",
        "plan",
        "cost",
        "schedule",
        "models",
        "doctor",
    }


@pytest.mark.parametrize("line", re.findall(r"(?m)^rung .+$", SKILL.read_text(encoding="utf-8")))
def test_a_command_of_the_skill_runs(line):
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert result.exit_code == 0, result.output
