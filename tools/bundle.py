"""Make the copy of the course that the people of a workshop get: `make bundle`.

    rung-by-rung-DATE/
      START-HERE.md, install.py      what they read and run first
      room.json                      its date, the room's Python, the platforms and what was done for each
      labs/, lablib/                 without solutions
      _build/html/                   the site, without solutions and without instructor's notes
      requirements-PLATFORM.txt      every package with its hash
      wheels/linux-x86_64/           the packages themselves, for the platform that this runs on; others with --wheels

The room's Python is the one that runs this. Packages for other platforms are resolved and hashed by pip, which downloads none.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "_build" / "html"
PYTHON = "{}.{}".format(*sys.version_info[:2])
#: What markers say of a platform, and the tags of wheels that it takes.
PLATFORMS = {
    "linux-x86_64": ("linux", "Linux", "x86_64", [f"manylinux_2_{n}_x86_64" for n in (28, 27, 26, 24, 17, 12, 5)]),
    "linux-aarch64": ("linux", "Linux", "aarch64", [f"manylinux_2_{n}_aarch64" for n in (28, 27, 26, 24, 17)]),
    "macos-arm64": ("darwin", "Darwin", "arm64", ["macosx_14_0_arm64"]),
}
HERE = f"linux-{platform.machine()}" if sys.platform == "linux" else "macos-arm64"
EXTRAS = ("labs", "hf")
COPIED = (
    "lablib", "labs", "book/data/matrix.json", "tools/jupyterlab.json", "tools/ipython_config.py",
    "tools/room/jupyterhub_config.py", "pyproject.toml", "README.md", "LICENSE", "LICENSE-PROSE", "THIRD_PARTY.md",
    "constraints.txt",
)  # fmt: skip
ACCELERATORS = ("nvidia", "cuda", "triton")
LEFT_OUT = shutil.ignore_patterns("solutions", "__pycache__", ".ipynb_checkpoints", "_template.ipynb", "ruff.toml")
_SOLUTION = re.compile(
    r'<div class="dropdown admonition">\n<p class="admonition-title">Solution: .*?</pre></div>\n</div>\n</div>\n',
    re.DOTALL,
)
_NOTE = re.compile(r'<div class="instructor admonition">.*?\n</div>\n', re.DOTALL)
_LINK = re.compile(r'<a [^>]*href="[^"]*labs/solutions/[^"]*"[^>]*>(.*?)</a>', re.DOTALL)


def needed(target: str) -> dict[str, str]:
    """Return the packages of the labs on a platform, with their versions in constraints.txt.

    The list follows what the packages that are installed here say of themselves; markers are read for the platform.
    """
    system, name, machine, _ = PLATFORMS[target]
    here = default_environment() | {"sys_platform": system, "platform_system": name, "platform_machine": machine}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if re.match(r"[\w.-]+==", line))
    pins = {canonicalize_name(package): version for package, version in pins.items()}
    found: dict[str, set[str]] = {}
    left = [("lablib", set(EXTRAS)), ("setuptools", set())]  # setuptools: lablib is installed from its folder
    while left:
        package, extras = left.pop()
        if package in found and extras <= found[package]:
            continue
        found[package] = found.get(package, set()) | extras
        try:
            wanted = metadata.requires(package) or []
        except metadata.PackageNotFoundError:  # of another platform
            continue
        for one in map(Requirement, wanted):
            if package == "torch" and one.name.startswith(ACCELERATORS):
                continue  # of a CUDA build, which pip took where it found no other; a room's is for CPUs
            if one.marker is None or any(one.marker.evaluate(here | {"extra": extra}) for extra in ("", *extras)):
                left.append((canonicalize_name(one.name), one.extras))
    if missing := sorted(set(found) - set(pins) - {"lablib"}):
        raise SystemExit(f"constraints.txt has no version of {', '.join(missing)}, which {target} needs")
    return {package: pins[package] for package in sorted(found) if package != "lablib"}


def resolve(target: str) -> list[tuple[str, str, str]]:
    """Return (package, version, sha256) of the wheels of a platform for the room's Python, as the registry has them now.

    Raises:
        SystemExit: If pip finds no wheel of a version; it names the package.
    """
    with tempfile.TemporaryDirectory(prefix="resolve-") as folder:
        listed, report = Path(folder, "requirements.txt"), Path(folder, "report.json")
        listed.write_text("".join(f"{name}=={version}\n" for name, version in needed(target).items()), encoding="utf-8")
        pip("install", "--dry-run", "--ignore-installed", "--target", f"{folder}/x", "--report", str(report),
            *_for(target), "-r", str(listed))  # fmt: skip
        wheels = json.loads(report.read_text(encoding="utf-8"))["install"]
    return [
        (
            wheel["metadata"]["name"],
            wheel["metadata"]["version"],
            wheel["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for wheel in wheels
    ]


def fetch(target: str, folder: Path) -> list[tuple[str, str, str]]:
    """Download the wheels of a platform, and return (package, version, sha256) of each."""
    folder.mkdir(parents=True)
    pins = [f"{name}=={version}" for name, version in needed(target).items()]
    index = subprocess.run([sys.executable, ROOT / "tools" / "torch_index.py"], capture_output=True, text=True).stdout
    pip("download", "--dest", str(folder), *(index.split() if target == HERE else _for(target)), *pins)
    found = []
    for wheel in sorted(folder.glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        found.append((name, version.replace("%2B", "+"), hashlib.sha256(wheel.read_bytes()).hexdigest()))
    return found


def _for(target: str) -> list[str]:
    """Return pip's options for wheels of another platform."""
    tags = [word for tag in PLATFORMS[target][3] for word in ("--platform", tag)]
    return [*tags, "--python-version", PYTHON, "--implementation", "cp"]


def pip(command: str, *words: str) -> None:
    """Run pip for wheels alone, and without their requirements: the list is complete."""
    line = [sys.executable, "-m", "pip", "--disable-pip-version-check", command, "--quiet", "--no-deps"]
    done = subprocess.run([*line, "--only-binary=:all:", *words], capture_output=True, text=True)
    if done.returncode:
        errors = [text.removeprefix("ERROR: ") for text in done.stderr.splitlines() if text.startswith("ERROR")]
        raise SystemExit(f"pip {command}: {'; '.join(errors) or done.stderr}")


def copy_course(target: Path) -> None:
    """Copy what learners need, without solutions."""
    for name in COPIED:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=LEFT_OUT)
        else:
            shutil.copy(ROOT / name, target / name)


def copy_site(site: Path, target: Path) -> None:
    """Copy the built site without the solutions and their pages, and without what is for instructors."""
    shutil.copytree(site, target, ignore=shutil.ignore_patterns("solutions", "locales", "*.map", ".buildinfo"))
    for page in target.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        kept = _LINK.sub(r"\1", _NOTE.sub("", _SOLUTION.sub("", text)))
        if kept != text:
            page.write_text(kept, encoding="utf-8")


def solution_lines() -> set[str]:
    """Return the lines by which a solution is known: long ones that stand nowhere else in the course."""
    lines = {
        line.strip()
        for path in (ROOT / "labs" / "solutions").glob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if len(line.strip()) >= 40
    }
    for path in [
        *(ROOT / "lablib").rglob("*.py"),
        *(ROOT / "labs" / "scripts").glob("*.py"),
        *(ROOT / "book").glob("*.md"),
    ]:
        lines -= {line.strip() for line in path.read_text(encoding="utf-8").splitlines()}
    for path in (ROOT / "labs").glob("*.ipynb"):
        lines -= set(_lines(path))
    return lines


def leaks(folder: Path) -> list[str]:
    """Return "FILE: LINE" for each line of a solution in the notebooks, pages, programs and wheels of a folder.

    A file of a wheel is others' work, which has a line or two of everybody's; it is named from the third on.
    """
    known, found = solution_lines(), []
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".ipynb", ".html", ".py", ".md", ".txt"):
            found += [f"{path.relative_to(folder)}: {line}" for line in known.intersection(_lines(path))]
        elif path.suffix in (".whl", ".zip"):
            with zipfile.ZipFile(path) as wheel:
                for name in wheel.namelist():
                    if name.endswith((".py", ".ipynb", ".md")):
                        lines = wheel.read(name).decode(errors="replace").splitlines()
                        hits = known.intersection(line.strip() for line in lines)
                        found += [f"{path.name}/{name}: {line}" for line in hits if len(hits) > 2]
    return found


def _lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    elif path.suffix == ".html":
        text = html.unescape(re.sub(r"<[^>]*>", "", text))
    return [line.strip() for line in text.splitlines()]


def main() -> None:
    """Make the bundle, and an archive of it beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=ROOT / "_build" / "bundle", help="folder; default: _build/bundle")
    parser.add_argument("--site", type=Path, default=SITE, help="a built site; default: _build/html")
    parser.add_argument("--wheels", nargs="*", default=[HERE], choices=PLATFORMS, help=f"default: {HERE}")
    parser.add_argument("--resolve", nargs="*", default=list(PLATFORMS), choices=PLATFORMS, help="default: all")
    given = parser.parse_args()
    if not (given.site / "index.html").exists():
        raise SystemExit(f"there is no book at {given.site}: make site")
    now = datetime.now(UTC)
    bundle = given.to / f"rung-by-rung-{now:%Y-%m-%d}"
    shutil.rmtree(bundle, ignore_errors=True)
    copy_course(bundle)
    copy_site(given.site, bundle / "_build" / "html")
    (bundle / "START-HERE.md").write_text(
        (ROOT / "tools" / "room" / "START-HERE.md").read_text(encoding="utf-8").replace("PYTHON", PYTHON),
        encoding="utf-8",
    )
    shutil.copy(ROOT / "tools" / "room" / "install.py", bundle)
    done = {}
    for target in PLATFORMS:
        if target in given.wheels:
            found, done[target] = fetch(target, bundle / "wheels" / target), "wheels"
        elif target in given.resolve:
            found, done[target] = resolve(target), "resolved and hashed, not downloaded and not installed"
        else:
            continue
        lines = [f"{name}=={version} --hash=sha256:{digest}\n" for name, version, digest in found]
        (bundle / f"requirements-{target}.txt").write_text("".join(lines), encoding="utf-8")
    room = {"made": f"{now:%Y-%m-%dT%H:%MZ}", "python": PYTHON, "lablib": metadata.version("lablib"), "platforms": done}
    (bundle / "room.json").write_text(json.dumps(room, indent=1) + "\n", encoding="utf-8")
    if found := leaks(bundle):
        raise SystemExit(f"{len(found)} lines of solutions are in {bundle}, such as {found[0]}")
    wheels = sum(file.stat().st_size for file in (bundle / "wheels").rglob("*.whl")) if given.wheels else 0
    size = sum(file.stat().st_size for file in bundle.rglob("*") if file.is_file()) - wheels
    archive = bundle.with_suffix(".tar.gz")
    with tarfile.open(archive, "w:gz", compresslevel=6) as packed:
        packed.add(bundle, bundle.name, filter=lambda each: None if f"{bundle.name}/wheels" in each.name else each)
    print(f"{bundle}: {size / 1e6:.0f} MB, and {wheels / 1e6:.0f} MB of wheels for Python {PYTHON}")
    print(f"{archive}: {os.path.getsize(archive) / 1e6:.0f} MB, without wheels")
    for target, what in done.items():
        print(f"  {target}: {what}")


if __name__ == "__main__":
    main()
