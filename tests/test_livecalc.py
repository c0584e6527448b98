"""The directive {livecalc}: what it writes into a page, which pages load its script, and what it refuses."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

from lablib.live.zero import EXPLORER

ROOT = Path(__file__).resolve().parents[1]
CONF = f"import sys\nsys.path.insert(0, {str(ROOT / '_ext')!r})\nextensions = ['livecalc']\nhtml_theme = 'basic'\n"


@pytest.fixture
def build(tmp_path):
    """Build a page with the given directive, and a page without one."""

    def run(directive):
        source, site = tmp_path / "source", tmp_path / "site"
        source.mkdir()
        (source / "conf.py").write_text(CONF)
        (source / "index.rst").write_text(f"One\n===\n\n{directive}\n\n.. toctree::\n\n   other\n")
        (source / "other.rst").write_text("Other\n=====\n\nText.\n")
        done = subprocess.run(
            [sys.executable, "-m", "sphinx", "-q", "-W", str(source), str(site)], capture_output=True, text=True
        )
        return done, site

    return run


def test_a_page_has_the_first_state_and_alone_loads_the_script(build):
    done, site = build(".. livecalc:: lablib.live.zero\n\n   ranks: 16\n   stage: 3\n")
    assert done.returncode == 0, done.stderr
    page = BeautifulSoup((site / "index.html").read_text(), "html.parser")
    box = page.select_one(".livecalc")
    answer = EXPLORER.answer({"ranks": 16, "stage": 3})
    assert box.select_one("figcaption").decode_contents() == answer["caption"]
    assert box.select_one("svg")["aria-label"] in answer["picture"]
    assert box.select_one("select[name=stage] option[selected]")["value"] == "3"
    assert box.select_one("input[name=ranks]")["aria-valuetext"] == "16"
    assert [tag["type"] for tag in page.select("script[src*='livecalc.mjs']")] == ["module"]
    assert "livecalc" not in (site / "other.html").read_text()
    # What the browser will ask for lies where the page says.
    archive = site / "_static" / box["data-package"].partition("?")[0]
    names = zipfile.ZipFile(archive).namelist()
    assert {"lablib/live/zero.py", "lablib/live/zero.pyc"} & set(names)  # compiled where node is
    assert all(name.startswith(("lablib/__init__.py", "lablib/calc/", "lablib/live/")) for name in names)
    assert box["data-pyodide"].startswith("https://") or (site / "_static" / box["data-pyodide"]).is_dir()


@pytest.mark.parametrize(
    ("directive", "sentence"),
    [
        (".. livecalc:: lablib.calc.units", "index: livecalc lablib.calc.units: lablib.calc.units has no EXPLORER"),
        (".. livecalc:: lablib.live.zero\n\n   rank 7", "'rank 7' is not a setting: write it like 'seq: 4096'"),
    ],
)
def test_what_cannot_be_drawn_fails_the_build_by_name(build, directive, sentence):
    done, _ = build(directive)
    assert done.returncode != 0
    assert sentence in " ".join(done.stderr.split())
