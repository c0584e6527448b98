"""On a rented CUDA image: install the labs around the torch that the image brings, and nothing of the book.

The image's torch matches its driver; a second one would cost gigabytes and may not. So .venv sees the image's packages,
and pip is held to the versions that the image has of everything compiled against torch. What the image lacks comes in
the versions of constraints.txt, and nothing comes newer than those or the image's own.

With --own-torch the image's torch is left alone, and the torch of constraints.txt is installed with its CUDA libraries.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LABS = ("-e", f"{ROOT}[labs,hf]")
HELD = (
    "torch",
    "torchvision",
    "torchaudio",
    "triton",
    "pytorch-triton",
    "numpy",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
OLDEST, NEWEST = (2, 11), (2, 15)
PYTHONS = ((3, 11), (3, 13))
#: Where pip finds the pinned torch for a driver that runs CUDA 12; a driver for CUDA 13 takes PyPI's.
CUDA_12 = "https://download.pytorch.org/whl/cu126"
PLAN_B = (
    "or bring the course's own torch, some gigabytes, with make setup-gpu OWN_TORCH=1 (tools/setup_gpu.sh --own-torch)"
)


def release(version: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version: (2, 11, 0) of "2.11.0a0+eb65b36914.nv26.02".

    Args:
        version: As packages write it.
    """
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def check_python() -> None:
    """Refuse a Python that is too old or too new, or that cannot install into an environment.

    Raises:
        SystemExit: With the reason in one sentence.
    """
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        version = ".".join(map(str, sys.version_info[:2]))
        raise SystemExit(
            f"{sys.executable} is Python {version}; the labs need 3.11, 3.12 or 3.13: choose another image, "
            "or name another Python with PYTHON=/path/to/python."
        )
    if not (importlib.util.find_spec("ensurepip") or importlib.util.find_spec("pip")):
        raise SystemExit(
            f"{sys.executable} has neither pip nor ensurepip: apt-get install python3-pip, "
            "or name another Python with PYTHON=/path/to/python."
        )


def held_versions() -> dict[str, str]:
    """Return the image's version of each package that must stay as it is.

    Raises:
        SystemExit: If the image has no torch, or one that is too old.
    """
    versions = {}
    for name in HELD:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    if "torch" not in versions:
        raise SystemExit(
            f"{sys.executable} has no torch: name the image's Python with PYTHON=/path/to/python, {PLAN_B}."
        )
    if release(versions["torch"])[:2] < OLDEST:
        raise SystemExit(
            f"The image has torch {versions['torch']}; the labs need {oldest} or newer: choose a newer image, {PLAN_B}."
        )
    if release(versions["torch"])[:2] > NEWEST:
        print(
            f"The image has torch {versions['torch']}; the course was tried with {oldest} to {newest}, "
            "so a lab may stop at a name that has moved.",
            file=sys.stderr,
        )
    return versions


def constraint_lines(held: dict[str, str], present: dict[str, str], pins: str) -> list[str]:
    """Return what keeps pip from bringing a second torch, or a version that nobody has tried.

    Args:
        held: From `held_versions`.
        present: Every package of the image with its version; lower-case names with dashes.
        pins: The text of constraints.txt.

    Returns:
        For what is held the image's version, for what else the image has a ceiling, for the rest the pin.
    """
    lines = [f"{name}=={version}" for name, version in held.items()]
    for name, pin in re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", pins, re.MULTILINE):
        name = normal(name)
        if name in held:
            continue
        if name in present:
            # Its own version stays if the labs can use it; a newer one is at most the tried one.
            lines.append(f"{name}<={max(present[name], pin, key=release)}")
        else:
            lines.append(f"{name}=={pin}")
    return lines


def normal(name: str) -> str:
    """Return a package's name as indexes compare it.

    Args:
        name: Of a package.
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def make_venv(venv: Path, *, sees_image: bool) -> None:
    """Make an environment, with or without the image's packages in sight.

    Args:
        venv: Where.
        sees_image: Whether the image's packages are to be seen.

    Raises:
        SystemExit: If an environment of another kind is there.
    """
    told = venv / "pyvenv.cfg"
    if told.exists():
        sees = "include-system-site-packages = true" in told.read_text(encoding="utf-8")
        if sees != sees_image or (venv / "installed").exists():
            raise SystemExit(f"{venv} is an environment of another kind: rm -r {venv} first.")
    # Debian and Ubuntu ship Python without ensurepip, PyTorch's own images among them; the image's pip can then
    # install into the environment.
    options = [] if importlib.util.find_spec("ensurepip") else ["--without-pip"]
    options += ["--system-site-packages"] if sees_image else []
    subprocess.run([sys.executable, "-m", "venv", *options, venv], check=True)
    if sees_image:
        ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
        asked = subprocess.run([venv / "bin" / "python", "-c", ask], check=True, capture_output=True, text=True)
        # An image may keep torch in a venv of its own, which --system-site-packages does not reach.
        folders = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (Path(asked.stdout.strip()) / "image.pth").write_text("\n".join(folders) + "\n", encoding="utf-8")


def pip_install(venv: Path, *arguments: str) -> None:
    """Install into the environment under the constraints that lie in it.

    Args:
        venv: The environment.
        *arguments: Of `pip install`.

    Raises:
        SystemExit: If pip fails; its own words are above.
    """
    python = venv / "bin" / "python"
    pip = [python, "-m", "pip"]
    if subprocess.run([python, "-c", "import pip"], capture_output=True).returncode:
        pip = [sys.executable, "-m", "pip", "--python", python]
    # NGC's images hold every package that they bring through PIP_CONSTRAINT. This environment does not change them.
    ours = {k: v for k, v in os.environ.items() if k not in ("PIP_CONSTRAINT", "PIP_USER", "PIP_TARGET")}
    constraints = venv / "image-constraints.txt"
    command = [*pip, "install", "--disable-pip-version-check", "-c", constraints, *arguments]
    if subprocess.run(command, env=ours).returncode:
        raise SystemExit("pip could not install the labs; its words are above.")


def would_bring(venv: Path, *arguments: str) -> list[str]:
    """Return what an installation would bring, without installing it.

    Args:
        venv: The environment.
        *arguments: Of `pip install`.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip_install(venv, "--quiet", "--dry-run", "--report", str(report), *arguments)
        items = json.loads(report.read_text(encoding="utf-8"))["install"]
    return sorted(f"{item['metadata']['name']}=={item['metadata']['version']}" for item in items)


def _capabilities() -> list[str]:
    """Return the compute capability of each GPU, "9.0", as nvidia-smi says it; nothing where it says none."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    return re.findall(r"(?m)^\s*(\d+\.\d+)\s*$", told)


def torch_index() -> list[str]:
    """Return the pip options with which the pinned torch comes for this driver.

    Raises:
        SystemExit: If there is no driver, or one that is too old for any CUDA build of it.
    """
    try:
        head = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        head = ""
    found = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", head)
    if found is None:
        raise SystemExit("nvidia-smi names no CUDA version, so no torch with CUDA would find a GPU here.")
    newest = (int(found[1]), int(found[2]))
    if newest[0] < 12:
        raise SystemExit(
            f"The driver runs CUDA up to {newest[0]}.{newest[1]}, and the course's torch needs 12 or newer: "
            "choose a machine with a newer driver."
        )
    if newest[0] == 12 and any(float(major) >= 10 for major in _capabilities()):
        raise SystemExit(
            "The driver runs CUDA 12, whose builds of the course's torch have no kernels for this GPU: choose a machine "
            "with a driver for CUDA 13, or an image with a torch of its own."
        )
    return ["--extra-index-url", CUDA_12] if newest[0] == 12 else []


def main() -> None:
    """Make the environment named on the command line and say what it holds."""
    parser = argparse.ArgumentParser(description="Install the labs around the torch of this Python.")
    parser.add_argument("venv", type=Path)
    parser.add_argument("--check", action="store_true", help="say whether this Python will do, and stop")
    parser.add_argument("--dry-run", action="store_true", help="say what pip would bring, and leave nothing")
    parser.add_argument("--own-torch", action="store_true", help="install the torch of constraints.txt with CUDA")
    given = parser.parse_args()
    check_python()
    held = {} if given.own_torch else held_versions()
    if given.check:
        return
    options = [*LABS, *(torch_index() if given.own_torch else [])]
    present = {normal(d.name): d.version for d in importlib.metadata.distributions() if d.name and d.version}
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    lines = constraint_lines(held, {} if given.own_torch else present, pins)
    with tempfile.TemporaryDirectory() as folder:
        venv = Path(folder) / "venv" if given.dry_run else given.venv
        make_venv(venv, sees_image=not given.own_torch)
        (venv / "image-constraints.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        if given.dry_run:
            brought = would_bring(venv, *options)
            print(f"kept from the image: {', '.join(f'{n} {v}' for n, v in held.items()) or 'nothing'}")
            print(f"pip would bring {len(brought)} packages: {', '.join(brought)}")
            return
        pip_install(venv, "--quiet", *options)
    ask = "import torch; print(torch.__file__); print(f'torch {torch.__version__}, {torch.cuda.device_count()} GPU(s)')"
    asked = subprocess.run([given.venv / "bin" / "python", "-c", ask], check=True, stdout=subprocess.PIPE, text=True)
    where, what = asked.stdout.splitlines()
    if (given.venv.resolve() in Path(where).resolve().parents) != given.own_torch:
        raise SystemExit(f"The torch of {where} is not the one that was wanted: rm -r {given.venv} and begin again.")
    print(what)
    if not given.own_torch:
        print(
            "Where pip named conflicts above: they are of the image's own programs, which do not see this environment."
        )
    print(f"The labs are installed in {given.venv}. Next: {given.venv}/bin/rung doctor --gpu")


if __name__ == "__main__":
    main()
