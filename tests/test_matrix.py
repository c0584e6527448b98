"""`make matrix`: which combinations there are, what is written down of a run, and what the status page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lablib.calc.torch_versions import (
    COMBINATIONS,
    PARTS,
    PINNED,
    PYTHONS,
    RUNS,
    SUPPORTED,
    combination,
    last_runs,
    read_runs,
    release,
)
from tests.scripts import ROOT, load

tool = load("tools/matrix.py")

RUN = {"date": "2031-02-03T04:05:06+00:00", "commit": "0123456789", "changed": False, "python": "3.13.5"}
RUN |= {"torch": "2.14.0+cu130", "cpus": 2, "seconds": 9, "passed": 4321, "failed": 0, "skipped": 2}


def test_the_combinations_cover_every_python_and_every_release() -> None:
    listed = [combination(text) for text in COMBINATIONS]
    assert {each.python for each in listed} == set(PYTHONS)
    assert {release(each.torch) for each in listed} == set(SUPPORTED)
    assert {each.python for each in listed if release(each.torch) == PINNED} == set(PYTHONS)
    (pin,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    assert {each.torch for each in listed if release(each.torch) == PINNED} == {pin}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("3.13", "no combination"),
        ("3.13/2.14", "write it like 3.13/2.14.0"),
        ("3.14/2.14.0", "'3.14/2.14.0' is not supported: use Python 3.11 to 3.13 and torch 2.11 to 2.15"),
        ("3.13/2.10.0", "not supported"),
    ],
)
def test_other_combinations_are_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        combination(text)
    run = subprocess.run(
        [sys.executable, ROOT / "tools" / "matrix.py", text], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 2
    assert says in " ".join(run.stderr.split())


def test_what_was_run_is_shown_and_what_was_not_is_said(tmp_path: Path) -> None:
    path = tmp_path / "matrix.json"
    assert {row["tests"] for row in last_runs(read_runs(path))} == {"not yet run"}
    which = combination("3.13/2.14.0")
    tool.write_down(which, "unit", RUN | {"failed": 9}, path)
    tool.write_down(which, "unit", RUN, path)
    tool.write_down(which, "labs", RUN | {"failed": 1, "skipped": 0, "changed": True}, path)
    tool.write_down(combination("3.12/2.15.3"), "unit", RUN, path)
    rows = {f"{row['Python']}/{row['torch']}": row for row in last_runs(read_runs(path))}
    assert [*rows] == [*COMBINATIONS, "3.12/2.15.3"]
    assert rows["3.13/2.14.0"]["tests"] == (
        "2031-02-03: 4,321 passed, 2 skipped (Python 3.13.5, torch 2.14.0+cu130, 0123456)"
    )
    assert rows["3.13/2.14.0"]["labs"] == (
        "2031-02-03: 1 FAILED, 4,321 passed (Python 3.13.5, torch 2.14.0+cu130, 0123456 with changes)"
    )
    assert rows["3.12/2.15.3"]["labs"] == "not yet run"
    assert [*tmp_path.iterdir()] == [path]


def test_every_committed_run_is_of_what_it_says() -> None:
    for name, parts in read_runs(RUNS).items():
        which = combination(name)
        assert set(parts) <= set(PARTS)
        for run in parts.values():
            assert set(run) == set(RUN)
            assert run["torch"].partition("+")[0] == which.torch
            assert run["python"].startswith(f"{which.python}.")
            assert run["passed"] > 0


def test_pins_that_a_torch_refuses_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    site = tmp_path / "torch-2.11.0.dist-info"
    site.mkdir()
    site.joinpath("METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n"
        "Requires-Dist: setuptools<82\nRequires-Dist: filelock\nRequires-Dist: typing-extensions>=4.8\n"
    )
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("# pins\nfilelock==3.1\nsetuptools==84.2.1\ntyping_extensions==4.16.0\n")
    said = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{tool.REFUSED}", constraints],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split() == ["setuptools"]
    left = tool.pins({"torch", "setuptools"}).splitlines()
    assert not any(line.startswith(("torch==", "setuptools==")) for line in left)
    assert any(line.startswith("torchao==") for line in left)


@pytest.mark.drawn
def test_a_run_that_loses_a_worker_ends_and_names_the_test(tmp_path: Path) -> None:
    """While another file is still running, and the dead worker's file is given to nobody."""
    flags = " ".join(tool.WORKERS)
    assert f" {flags}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
    tmp_path.joinpath("test_dies.py").write_text(
        "import os\n\ndef test_first(): pass\n\ndef test_dies(): os.abort()\n\ndef test_after(): pass\n"
    )
    for other in "ab":
        tmp_path.joinpath(f"test_{other}.py").write_text("def test_one(): pass\n\ndef test_two(): pass\n")
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", *tool.WORKERS, "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, "-c", os.devnull, f"--rootdir={tmp_path}", f"--junitxml={report}", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 1
    assert "crashed while running 'test_dies.py::test_dies'" in run.stdout
    assert tool.lost(report) == "test_dies.py::test_dies"
