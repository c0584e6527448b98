"""On a rented CUDA image: install the labs around the torch that the image brings, and nothing of the book.

The image's torch matches its driver; a second one would cost gigabytes and may not. So .venv sees the
image's packages, and pip is held to the versions that the image has of everything compiled against torch.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HELD = ("torch", "torchvision", "torchaudio", "triton", "numpy", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
OLDEST = (2, 11)
PYTHONS = ((3, 11), (3, 13))


def held_versions() -> dict[str, str]:
    """Return the image's version of each package that must stay as it is.

    Raises:
        SystemExit: If the image's Python is too old or too new, or has no torch, or one that is too old.
    """
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        version = ".".join(map(str, sys.version_info[:2]))
        raise SystemExit(
            f"The image's Python is {version}; the labs need 3.11, 3.12 or 3.13: choose another image."
        )
    versions = {}
    for name in HELD:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "torch" not in versions:
        raise SystemExit(
            f"{sys.executable} has no torch: name the image's Python with make setup-gpu PYTHON=/path/to/python, "
            "or use make install, which brings a torch of its own."
        )
    if tuple(int(part) for part in versions["torch"].split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise SystemExit(
            f"The image has torch {versions['torch']}; the labs need {oldest} or newer: choose a newer image."
        )
    return versions


def make_venv(venv: Path, versions: dict[str, str]) -> Path:
    """Make an environment that sees the image's packages, and the constraints that keep them.

    Args:
        venv: Where.
        versions: From `held_versions`.

    Returns:
        The constraints, beside the environment's own files.
    """
    # Debian and Ubuntu ship Python without ensurepip; the image's own pip can then install into the environment.
    bare = [] if importlib.util.find_spec("ensurepip") else ["--without-pip"]
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", *bare, venv], check=True)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    asked = subprocess.run([venv / "bin" / "python", "-c", ask], check=True, capture_output=True, text=True)
    own = Path(asked.stdout.strip())
    # An image may keep torch in a venv of its own, which --system-site-packages does not reach.
    folders = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (own / "image.pth").write_text("\n".join(folders) + "\n", encoding="utf-8")
    constraints = venv / "image-constraints.txt"
    constraints.write_text("".join(f"{n}=={v}\n" for n, v in versions.items()), encoding="utf-8")
    return constraints


def pip_install(venv: Path, constraints: Path, *arguments: str) -> None:
    """Install into the environment under the constraints.

    Args:
        venv: The environment.
        constraints: From `make_venv`.
        *arguments: Of `pip install`.

    Raises:
        SystemExit: If pip fails; its own words are above.
    """
    python = venv / "bin" / "python"
    pip = [python, "-m", "pip"]
    if subprocess.run([python, "-c", "import pip"], capture_output=True).returncode:
        pip = [sys.executable, "-m", "pip", "--python", python]
    command = [*pip, "install", "--disable-pip-version-check", "-c", constraints, *arguments]
    if subprocess.run(command).returncode:
        raise SystemExit("pip could not install the labs around the image's torch; its words are above.")


def would_bring(venv: Path, constraints: Path, *arguments: str) -> list[str]:
    """Return what an installation would bring, without installing it.

    Args:
        venv: The environment.
        constraints: From `make_venv`.
        *arguments: Of `pip install`.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip_install(venv, constraints, "--quiet", "--dry-run", "--report", str(report), *arguments)
        items = json.loads(report.read_text(encoding="utf-8"))["install"]
    return sorted(f"{item['metadata']['name']}=={item['metadata']['version']}" for item in items)


def main() -> None:
    """Make the environment named on the command line and say what it holds."""
    parser = argparse.ArgumentParser(description="Install the labs around the torch of this Python.")
    parser.add_argument("venv", type=Path)
    parser.add_argument(
        "--dry-run", action="store_true", help="say what pip would bring, and install nothing"
    )
    given = parser.parse_args()
    versions = held_versions()
    constraints = make_venv(given.venv, versions)
    if given.dry_run:
        brought = would_bring(given.venv, constraints, "-e", ".[labs,hf]")
        print(f"kept from the image: {', '.join(f'{n} {v}' for n, v in versions.items())}")
        print(f"pip would bring {len(brought)} packages: {', '.join(brought)}")
        return
    pip_install(given.venv, constraints, "--quiet", "-e", ".[labs,hf]")
    check = (
        "import sys, torch; from pathlib import Path; "
        "sys.exit('pip installed a second torch') if Path(sys.prefix) in Path(torch.__file__).parents else "
        "print(f'torch {torch.__version__} of the image, {torch.cuda.device_count()} GPU(s)')"
    )
    subprocess.run([given.venv / "bin" / "python", "-c", check], check=True)
    print(f"The labs are installed in {given.venv}. Next: {given.venv}/bin/rung doctor --gpu")


if __name__ == "__main__":
    main()
