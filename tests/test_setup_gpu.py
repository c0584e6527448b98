"""The setup of a rented image keeps the image's torch: tried with a torch that is nothing but its name."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TORCH = "2.12.1+cu129"


def _tool():
    spec = importlib.util.spec_from_file_location("image_venv", ROOT / "tools" / "image_venv.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _package(folder, name, version):
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(f"__version__ = {version!r}\n")
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("")


def _wheel(folder, name, version, *requires):
    needs = "".join(f"Requires-Dist: {text}\n" for text in requires)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def image(tmp_path, monkeypatch):
    """An image's Python: its packages in a folder of their own, torch among them, and a newer torch to be had."""
    site = tmp_path / "image" / "site-packages"
    _package(site, "torch", TORCH)
    _package(site, "numpy", "2.2.0")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    _wheel(wheels, "torch", "9.9.0")
    _wheel(wheels, "labs", "1.0", "torch>=2.11", "numpy")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    tool = _tool()
    versions = {"torch": TORCH, "numpy": "2.2.0"}
    monkeypatch.setattr(tool.importlib.metadata, "version", lambda name: versions.get(name) or _missing(tool))
    return tool, wheels, versions


def _missing(tool):
    raise tool.importlib.metadata.PackageNotFoundError


def test_pip_leaves_the_image_its_torch(image, tmp_path, monkeypatch):
    tool, wheels, versions = image
    assert tool.held_versions() == versions
    # As Debian and Ubuntu ship it: the image's own pip has to install into the environment.
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: name != "ensurepip" and find(name, *more)
    )
    venv = tmp_path / "venv"
    constraints = tool.make_venv(venv, tool.held_versions())
    assert constraints.read_text() == f"torch=={TORCH}\nnumpy==2.2.0\n"
    options = ("--no-index", "--find-links", str(wheels), "labs")
    # Even asked to upgrade everything, pip may not bring the newer torch; without the constraints it would.
    eager = ("--upgrade", "--upgrade-strategy", "eager", *options)
    assert tool.would_bring(venv, constraints, *eager) == ["labs==1.0"]
    constraints.write_text("")
    assert tool.would_bring(venv, constraints, *eager) == ["labs==1.0", "torch==9.9.0"]
    say = "import torch; print(torch.__version__)"
    found = subprocess.run([venv / "bin" / "python", "-c", say], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == TORCH


def test_an_image_without_torch_or_with_an_old_one_is_refused(monkeypatch):
    tool = _tool()
    for version, message in ((None, "has no torch"), ("2.4.0", "choose a newer image")):
        monkeypatch.setattr(tool.importlib.metadata, "version", lambda name, v=version: v or _missing(tool))
        with pytest.raises(SystemExit, match=message):
            tool.held_versions()
    monkeypatch.setattr(tool, "PYTHONS", ((4, 0), (4, 1)))
    with pytest.raises(SystemExit, match="choose another image"):
        tool.held_versions()


def test_the_one_line_finds_the_python_that_has_torch(tmp_path):
    log = tmp_path / "log"
    for name, code in (("python3", 1), ("python3.12", 0)):
        script = f'#!/bin/sh\ncase "$1" in -c) exit {code};; *) echo {name} "$@" >>{log};; esac\n'
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    # Only these two, and what a shell needs.
    path = os.pathsep.join([str(tmp_path), "/usr/bin", "/bin"])
    for name in ("python", "python3.11", "python3.13"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    run = subprocess.run(
        [ROOT / "tools" / "setup_gpu.sh", "--dry-run"],
        env={"PATH": path, "VENV": "x"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert log.read_text() == "python3.12 tools/image_venv.py x --dry-run\n"
    (tmp_path / "python3.12").write_text("#!/bin/sh\nexit 1\n")
    none = subprocess.run(
        [ROOT / "tools" / "setup_gpu.sh"], env={"PATH": path}, capture_output=True, text=True
    )
    assert none.returncode == 1
    assert none.stderr.startswith("No Python here has torch.")
