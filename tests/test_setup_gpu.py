"""The setup of a rented image keeps the image's torch: tried with images that are nothing but the names of packages."""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile

import pytest

from lablib.calc.torch_versions import SUPPORTED
from tests.scripts import ROOT, load

NGC = "2.11.0a0+eb65b36914.nv26.02"
TORCH = '__version__ = "{}"\nclass cuda:\n    device_count = staticmethod(lambda: 2)\n'


def _package(folder, name, version):
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(TORCH.format(version) if name == "torch" else "")
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("")


def _wheel(folder, name, version, *requires):
    needs = "".join(f"Requires-Dist: {text}\n" for text in requires)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", TORCH.format(version) if name == "torch" else "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


#: Builds what `pip install -e` asks for, without setuptools.
BACKEND = """
import zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(f"{folder}/lablib-1.0-py3-none-any.whl", "w") as wheel:
        info = "lablib-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: lablib\\nVersion: 1.0\\n"
            "Provides-Extra: labs\\nProvides-Extra: hf\\n" + "".join(f"Requires-Dist: {n}\\n" for n in NEEDS))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return "lablib-1.0-py3-none-any.whl"
"""
PINS = {"torch": "2.13.0", "numpy": "2.4.6", "seen": "2.5.0", "lacking": "1.5.0", "old": "3.5.0"}


@pytest.fixture
def course(tmp_path):
    """The course's tools in a folder of their own, with dependencies that are made up, but for its words about torch.

    To be had are the pinned versions and newer ones.
    """
    folder = tmp_path / "course"
    shutil.copytree(ROOT / "tools", folder / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (torch,) = (text for text in needs if text.startswith("torch"))
    needs = [torch, "numpy", "seen>=2", "lacking", "old>=3"]
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (folder / "backend.py").write_text(f"NEEDS = {needs}\n{BACKEND}")
    (folder / "constraints.txt").write_text("# Pins.\n" + "".join(f"{n}=={v}\n" for n, v in PINS.items()))
    (folder / "wheels").mkdir()
    for name, version in [*PINS.items(), *dict.fromkeys(PINS, "9.9.0").items()]:
        _wheel(folder / "wheels", name, version)
    return folder


@pytest.fixture
def image(tmp_path):
    """Return a function that makes an image's Python with packages, and with pip where it has no ensurepip."""

    def image(packages, *, ensurepip=True):
        folder = tmp_path / "image"
        venv.create(folder, with_pip=not ensurepip, symlinks=True)
        (site,) = folder.glob("lib/python3*/site-packages")
        for name, version in packages.items():
            _package(site, name, version)
        if not ensurepip:
            (site / "sitecustomize.py").write_text("import sys; sys.modules['ensurepip'] = None\n")
        return folder / "bin" / "python"

    return image


def _set_up(course, python, *options, **more):
    """Run the one line on the image, where pip finds the wheels and nothing else."""
    held = course / "held.txt"
    held.write_text("old==2.0.0\n")  # as NGC's images do: what they bring is held, whoever asks
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON", "VIRTUAL"))}
    ours |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(course / "wheels"), "PIP_CONSTRAINT": str(held)}
    ours |= {"PIP_CONFIG_FILE": os.devnull, "PYTHON": str(python)}
    command = [course / "tools" / "setup_gpu.sh", *options]
    return subprocess.run(command, env=ours | more, capture_output=True, text=True)


def _versions(course):
    """What a program in the environment imports."""
    ask = f"import importlib.metadata as m; print(*(m.version(n) for n in {list(PINS)}))"
    command = [course / ".venv" / "bin" / "python", "-c", ask]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def _driver(folder, printed):
    """A folder in front of PATH, with an nvidia-smi that prints this."""
    folder.mkdir()
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\necho '{printed}'\n")
    (folder / "nvidia-smi").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


IMAGE = {"numpy": "2.1.0", "seen": "2.2.0", "old": "2.0.0"}


@pytest.mark.drawn
def test_an_ngc_image_without_ensurepip_keeps_its_torch_and_gets_what_was_tried(course, image):
    python = image({"torch": NGC, **IMAGE}, ensurepip=False)
    dry = _set_up(course, python, "--dry-run")
    assert f"kept from the image: torch {NGC}, numpy 2.1.0" in dry.stdout, dry.stderr
    assert "pip would bring 3 packages: lablib==1.0, lacking==1.5.0, old==3.5.0" in dry.stdout
    assert not (course / ".venv").exists()
    run = _set_up(course, python)
    assert run.returncode == 0, run.stderr
    assert f"torch {NGC}, 2 GPU(s)" in run.stdout
    # Held, held, good enough as it is, the pin, and at most the pin.
    assert _versions(course) == [NGC, "2.1.0", "2.2.0", "1.5.0", "3.5.0"]


@pytest.mark.drawn
def test_an_image_whose_torch_is_too_old_gets_one_of_its_own_if_asked(course, image, tmp_path):
    python = image({"torch": "2.8.0a0+nv25.05", **IMAGE})
    refused = _set_up(course, python)
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert "need 2.11 or newer: choose a newer image, or bring the course's own torch" in refused.stderr
    assert not (course / ".venv").exists()
    run = _set_up(course, python, "--own-torch", PATH=_driver(tmp_path / "driver", "CUDA Version: 13.0"))
    assert run.returncode == 0, run.stderr
    assert "torch 2.13.0, 2 GPU(s)" in run.stdout
    assert _versions(course) == list(PINS.values())
    with pytest.raises(SystemExit, match="environment of another kind: rm -r"):
        load("tools/image_venv.py").make_venv(course / ".venv", sees_image=True)


@pytest.mark.parametrize(
    ("printed", "options"),
    [
        ("CUDA Version: 13.1", []),
        ("CUDA Version: 12.8", ["--extra-index-url", "https://download.pytorch.org/whl/cu126"]),
        ("CUDA Version: 11.8", "up to 11.8, and the course's torch needs 12 or newer"),
        ("NVIDIA-SMI has failed", "names no CUDA version"),
    ],
)
def test_the_torch_of_its_own_fits_the_driver(tmp_path, monkeypatch, printed, options):
    monkeypatch.setenv("PATH", _driver(tmp_path / "driver", printed))
    monkeypatch.setattr(sys, "path", list(sys.path))
    if isinstance(options, list):
        assert load("tools/image_venv.py").torch_index() == options
    else:
        with pytest.raises(SystemExit, match=options):
            load("tools/image_venv.py").torch_index()


def _missing(name):
    raise importlib.metadata.PackageNotFoundError(name)


def test_an_image_that_will_not_do_is_refused_in_one_sentence(monkeypatch, capsys):
    tool = load("tools/image_venv.py")
    for version, message in ((None, "has no torch"), ("2.8.0a0+nv25.05", "need 2.11 or newer: choose a newer image")):
        monkeypatch.setattr(tool.importlib.metadata, "version", lambda name, v=version: v or _missing(name))
        with pytest.raises(SystemExit, match=message) as refused:
            tool.held_versions()
        assert "OWN_TORCH=1" in str(refused.value)
    for version, warned in ((NGC, False), ("2.15.3", False), ("2.16.0", True)):
        monkeypatch.setattr(tool.importlib.metadata, "version", lambda name, v=version: v)
        assert tool.held_versions()["torch"] == version
        assert ("was tried with 2.11 to 2.15" in capsys.readouterr().err) == warned
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if "pip" in name else find(name, *more))
    with pytest.raises(SystemExit, match="neither pip nor ensurepip"):
        tool.check_python()
    monkeypatch.setattr(tool, "PYTHONS", ((4, 0), (4, 1)))
    with pytest.raises(SystemExit, match="choose another image"):
        tool.check_python()


# The shell script that finds the Python


def _script(folder, *words, **more):
    """Run it where only what the folder holds, and what a shell needs, can be found: no make, no git."""
    for name in ("dirname", "sh"):
        if not (folder / name).exists():
            (folder / name).symlink_to(shutil.which(name))
    return subprocess.run(
        [ROOT / "tools" / "setup_gpu.sh", *words],
        env={"PATH": str(folder), "HOME": str(folder), **more},
        capture_output=True,
        text=True,
    )


def _python(folder, name, *, torch, good):
    """A Python that has torch or not, that the check accepts or not, and that says what it was asked."""
    (folder / name).write_text(
        f'#!/bin/sh\ncase "$1 $2" in -c*) exit {0 if torch else 1};; *--check*) exit {0 if good else 1};; esac\n'
        f'echo {name} "$@"\n'
    )
    (folder / name).chmod(0o755)


def test_the_first_python_that_will_do_is_taken(tmp_path):
    # The two names that come before fixed places, where this machine may have a Python of its own.
    _python(tmp_path, "python3", torch=True, good=False)
    _python(tmp_path, "python", torch=True, good=True)
    assert _script(tmp_path, "--dry-run", VENV="x").stdout == "python tools/image_venv.py x --dry-run\n"
    # The one that was named is asked, also where another would do: its own sentence says what is wrong with it.
    named = _script(tmp_path, "--own-torch", PYTHON="python3")
    assert named.stdout == "python3 tools/image_venv.py .venv --own-torch\n"


def test_the_tool_knows_the_supported_versions():
    """It runs before anything is installed, with whatever Python an image has, and imports nothing of lablib for them."""
    tool = load("tools/image_venv.py")
    ends = [".".join(map(str, version)) for version in (tool.OLDEST, tool.NEWEST)]
    assert ends == [SUPPORTED[0], SUPPORTED[-1]]
