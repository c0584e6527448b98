"""The students' copy: no solution anywhere, one Python, packages that still resolve, refusals in one sentence."""

import json
import os
import platform
import subprocess
import sys
import zipfile

import pytest

from tests.scripts import ROOT, load

bundle = load("tools/bundle.py")
INSTALL = ROOT / "tools" / "room" / "install.py"


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    folder = tmp_path_factory.mktemp("a room") / "course"
    bundle.copy_course(folder)
    return folder


def test_the_copy_has_the_labs_and_no_solution(course):
    assert len(list((course / "labs").glob("[0-9]*.ipynb"))) == 14
    assert not (course / "labs" / "solutions").exists()
    assert (course / "lablib" / "toys" / "text.txt").exists()
    assert len(bundle.solution_lines()) > 200
    assert bundle.leaks(course) == []


def test_a_solution_is_found_in_notebooks_pages_programs_and_wheels(tmp_path):
    line = max(bundle.solution_lines(), key=len)
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [{"source": ["x = 1\n", f"    {line}\n"]}]}))
    colored = line.replace("&", "&amp;").replace("<", "&lt;").replace(" ", "</span> <span>")
    (tmp_path / "a.html").write_text(f"<pre><span>x</span>\n<span>{colored}</span>\n</pre>")
    (tmp_path / "a.py").write_text(f"def f():\n    {line}\n")
    with zipfile.ZipFile(tmp_path / "a-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a/__init__.py", "\n".join(sorted(bundle.solution_lines())[:3]))
        wheel.writestr("a/other.py", f"{line}\n")  # a line of everybody's
    assert [found.partition(":")[0] for found in bundle.leaks(tmp_path)] == [
        *["a-1-py3-none-any.whl/a/__init__.py"] * 3,
        *("a.html", "a.ipynb", "a.py"),
    ]


def test_a_page_loses_solutions_and_what_is_for_instructors(tmp_path):
    site = tmp_path / "site"
    (site / "code" / "labs" / "solutions").mkdir(parents=True)
    (site / "code" / "labs" / "solutions" / "rung05.html").write_text("x")
    solution = (
        '<div class="dropdown admonition">\n<p class="admonition-title">Solution: f</p>\n<div><div><pre>x\n</pre></div>\n'
        "</div>\n<div><div><pre>y\n</pre></div>\n</div>\n</div>\n"
    )
    note = '<div class="instructor admonition">\n<p>For the instructor</p>\n<ul class="simple">\n<li><p>z</p></li>\n</ul>\n</div>\n'
    link = 'In <a class="reference" href="../code/labs/solutions/rung05.html">\n<code>it</code></a>.'
    (site / "a.html").write_text(f"<p>a</p>\n{note}<p>b</p>\n{solution}<p>{link}</p>")
    bundle.copy_site(site, tmp_path / "copy")
    assert (tmp_path / "copy" / "a.html").read_text() == "<p>a</p>\n<p>b</p>\n<p>In \n<code>it</code>.</p>"
    assert not (tmp_path / "copy" / "code" / "labs" / "solutions").exists()


@pytest.mark.site
def test_the_site_of_the_copy_has_no_solution_and_no_note(tmp_path):
    bundle.copy_site(bundle.SITE, tmp_path / "site")
    assert bundle.leaks(tmp_path / "site") == []
    for page in (tmp_path / "site" / "book").glob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert "Solution: " not in text, page.name
        assert "instructor admonition" not in text, page.name
    size = sum(file.stat().st_size for file in (tmp_path / "site").rglob("*") if file.is_file())
    assert size < 56e6, "with labs and lablib the copy stays below 60 MB"


@pytest.mark.parametrize("target", bundle.PLATFORMS)
def test_every_package_that_a_platform_needs_has_a_version(target):
    found = bundle.needed(target)
    assert {"torch", "jupyterlab", "papermill", "transformers", "setuptools"} <= set(found)
    assert "lablib" not in found
    assert ("appnope" in found) == target.startswith("macos")
    assert not {"sphinx", "pytest"} & set(found)


@pytest.mark.drawn
def test_what_is_pinned_still_resolves():
    """Pip asks the registry for every wheel of another platform, and downloads none; the weekly job does so for all."""
    ask = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", os.devnull, "-q", "appnope==0.0.0.dev0"]
    there = subprocess.run(ask, capture_output=True, text=True).stderr
    if "from versions: 0." not in there:
        pytest.skip("no registry can be reached")
    found = bundle.resolve("macos-arm64")
    assert len(found) == len(bundle.needed("macos-arm64"))
    assert all(len(digest) == 64 for _, _, digest in found)


def test_a_version_that_is_gone_is_named(monkeypatch):
    monkeypatch.setattr(bundle, "needed", lambda target: {"appnope": "0.0.1"})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SystemExit, match=r"pip install: .*appnope==0\.0\.1"):
        bundle.resolve("macos-arm64")


def _install(folder, room, **variables):
    folder.mkdir(exist_ok=True)
    (folder / "room.json").write_text(json.dumps(room))
    (folder / "install.py").write_text(INSTALL.read_text())
    for name, text in variables.pop("files", {}).items():
        (folder / name).write_text(text)
    run = subprocess.run(
        [sys.executable, str(folder / "install.py")], capture_output=True, text=True, env=os.environ | variables
    )
    return run.returncode, run.stderr.strip()


def test_the_installer_names_the_python_that_it_wants(tmp_path):
    here = "{}.{}".format(*sys.version_info[:2])
    code, said = _install(tmp_path / "a b", {"python": "3.99"})
    assert (code, said) == (1, f"The room's Python is 3.99 and this is {here}: install Python 3.99")
    code, said = _install(tmp_path, {"python": here})
    assert code == 1
    assert said.startswith("There are no packages for ")


def test_windows_is_told_wsl_in_one_sentence(tmp_path, monkeypatch):
    install = load("tools/room/install.py")
    (tmp_path / "room.json").write_text('{"python": "3.11"}')
    monkeypatch.setattr(install, "HERE", str(tmp_path))
    monkeypatch.setattr(install, "os", type("nt", (), {"name": "nt", "path": os.path}))
    with pytest.raises(SystemExit, match=r"^On Windows the labs run in WSL: type  wsl --install [^.]*\.$"):
        install.main()


def test_the_installer_runs_offline_from_its_wheels(tmp_path):
    """With a wheel that is made here in place of all packages: pip is told no index, and hashes are held."""
    here = "{}.{}".format(*sys.version_info[:2])
    system = {"Linux": "linux", "Darwin": "macos"}[platform.system()]
    target = f"{system}-{platform.machine()}"
    (tmp_path / "wheels" / target).mkdir(parents=True)
    files = {f"requirements-{target}.txt": "nothing==1 --hash=sha256:" + 64 * "0" + "\n"}
    code, said = _install(tmp_path, {"python": here}, files=files, PIP_INDEX_URL="https://example.org/simple")
    assert code == 1
    assert "No matching distribution found for nothing==1" in said
    assert "example.org" not in said
