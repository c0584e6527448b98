"""The extras are the only list of dependencies, and every other file that names one agrees with them."""

import importlib.metadata
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from lablib.calc.torch_versions import SUPPORTED, release

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
DIRECT = [Requirement(text) for group in [PROJECT["dependencies"], *EXTRAS.values()] for text in group]
PYTHONS = ["3.11", "3.12", "3.13"]
#: Extras outside `all`. Few environments have them, so what each brings by itself, besides what `all` has, is
#: written down here: pins are held to it everywhere, and it is held to the packages wherever they are installed.
OPTIONAL = {
    "bnb": {"bitsandbytes"},
    "deepspeed": {"deepspeed", "einops", "hjson", "msgpack", "ninja", "py-cpuinfo"},
    "fp8": {"torchao"},
    "peft": {"peft"},
    "torchft": {
        "googleapis-common-protos",
        "opentelemetry-api",
        "opentelemetry-exporter-http-transport",
        "opentelemetry-exporter-otlp-common",
        "opentelemetry-exporter-otlp-proto-common",
        "opentelemetry-exporter-otlp-proto-http",
        "opentelemetry-proto",
        "opentelemetry-sdk",
        "opentelemetry-semantic-conventions",
        "protobuf",
        "torchft",
    },
}
BY_CHOICE = set().union(*OPTIONAL.values())
#: What a CUDA build of torch brings: which of them, and whether any, is the index's choice.
ACCELERATORS = ("nvidia", "cuda", "triton")


def _pins():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


PINS = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in _pins()}


def _installed(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requires(name, extras):
    """What a package asks for; lablib is asked in its source, which is newer than what was installed of it."""
    if name != "lablib":
        return importlib.metadata.requires(name) or []
    return [*PROJECT["dependencies"], *(text for extra in extras for text in EXTRAS[extra])]


def _closure(environment, *start):
    """Every installed package that these extras of lablib lead to, by the metadata of the packages themselves."""
    found, queue = set(), [("lablib", frozenset(start))]
    while queue:
        package = queue.pop()
        if package in found or _installed(package[0]) is None:
            continue
        found.add(package)
        name, extras = package
        for text in _requires(name, extras):
            requirement = Requirement(text)
            marker = requirement.marker
            if requirement.name.startswith(ACCELERATORS):
                continue
            if marker is None or any(marker.evaluate(environment | {"extra": e}) for e in extras | {""}):
                queue.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return {name for name, _ in found} - {"lablib"}


def test_every_pin_is_exact_sorted_and_free_of_build_tags():
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line) for line in _pins())
    assert _pins() == sorted(_pins(), key=str.lower)
    assert len(PINS) == len(_pins())


def test_no_pin_chooses_an_accelerator():
    assert not [name for name in PINS if name.startswith(ACCELERATORS)]


@pytest.mark.parametrize("requirement", [r for r in DIRECT if r.name != "lablib"], ids=str)
def test_what_the_extras_name_is_pinned_within_its_bounds(requirement):
    assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)])


def test_what_the_extras_bring_is_pinned():
    assert sorted(_closure({}, "all") - set(PINS)) == []


@pytest.mark.parametrize("extra", OPTIONAL)
def test_what_an_optional_extra_brings_is_pinned(extra):
    assert sorted(OPTIONAL[extra] - set(PINS)) == []
    direct = {canonicalize_name(Requirement(text).name) for text in EXTRAS[extra]}
    assert direct <= OPTIONAL[extra]
    if all(map(_installed, direct)):  # then the packages themselves say what they bring
        assert _closure({}, extra) - _closure({}, "all") == OPTIONAL[extra]


def test_nothing_is_pinned_that_the_extras_do_not_bring():
    environments = [
        {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": platform}
        for python in PYTHONS
        for platform in ("linux", "darwin")
    ]
    needed = BY_CHOICE.union(*(_closure(environment, "all") for environment in environments))
    # A pin that is not installed here belongs to another Python version, whose tests judge it.
    assert sorted(name for name in set(PINS) - needed if _installed(name)) == []


def test_this_environment_is_the_one_that_the_pins_describe():
    # torch may be any that is supported, and what it refuses of the pins is not installed either.
    refused = {
        canonicalize_name(r.name)
        for r in map(Requirement, importlib.metadata.requires("torch"))
        if not r.specifier.contains(PINS.get(canonicalize_name(r.name), "0"), prereleases=True)
    }
    different = {
        name: (pin, _installed(name))
        for name, pin in PINS.items()
        if name not in refused | {"torch"}
        and _installed(name)
        and Version(_installed(name)).public != Version(pin).public
    }
    assert different == {}, "make install"
    assert _installed("torch").split(".")[:2] == release(_installed("torch")).split("."), SUPPORTED


@pytest.mark.parametrize("python", PYTHONS)
def test_no_pin_refuses_the_first_release_of_a_supported_python(python):
    # Debian 12 still ships 3.11.2: a package that wants 3.11.5 cannot be installed there.
    allowed = {
        name: SpecifierSet(importlib.metadata.metadata(name).get("Requires-Python") or "")
        for name in PINS
        if _installed(name)
    }
    assert {name: str(spec) for name, spec in allowed.items() if f"{python}.0" not in spec} == {}


def test_all_is_every_extra_but_the_optional_ones():
    everything = Requirement(EXTRAS["all"][0])
    assert len(EXTRAS["all"]) == 1
    assert everything.name == "lablib"
    assert everything.extras == set(EXTRAS) - {"all"} - set(OPTIONAL)
    assert _closure({}, "all").isdisjoint(BY_CHOICE)


def test_conda_and_binder_hold_no_list_of_their_own():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    conda = [item for item in environment["dependencies"] if isinstance(item, str)]
    (pip,) = [item["pip"] for item in environment["dependencies"] if isinstance(item, dict)]
    assert [item.split("=")[0] for item in conda] == ["python", "pip"]
    assert conda[0].split("=")[1] in PYTHONS
    assert [line for line in pip if not line.startswith("-")] == []
    assert "-c constraints.txt" in pip
    assert "-e .[all]" in pip


def test_python_versions_agree_everywhere():
    assert PROJECT["requires-python"] == ">=3.11,<3.14"
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert matrix["jobs"]["test"]["strategy"]["matrix"]["python"] == PYTHONS
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    assert container["image"].split(":")[1] in PYTHONS
    assert "(3, 11) <= sys.version_info[:2] <= (3, 13)" in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_workflows_install_nothing_by_themselves(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert set(commands) <= {".ci/run", "make book", "make linkcheck", "make release", "make bundle"}
