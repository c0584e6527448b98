"""On a rented CUDA image: install the labs around the torch that the image brings, and nothing of the book.

The image's torch matches its driver; a second one would cost gigabytes and may not. So .venv sees the
image's packages, and pip is held to the versions that the image has of everything compiled against torch.
"""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

HELD = ("torch", "torchvision", "torchaudio", "triton", "numpy", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
OLDEST = (2, 11)


def held_versions() -> dict[str, str]:
    """Return the image's version of each package that must stay as it is.

    Raises:
        SystemExit: If the image's Python has no torch, or one that is too old.
    """
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


def main() -> None:
    """Make the environment named on the command line and say what it holds."""
    venv = Path(sys.argv[1])
    versions = held_versions()
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", venv], check=True)
    python = venv / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip())
    # An image may keep torch in a venv of its own, which --system-site-packages does not reach.
    folders = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (own / "image.pth").write_text("\n".join(folders) + "\n", encoding="utf-8")
    constraints = venv / "image-constraints.txt"
    constraints.write_text("".join(f"{n}=={v}\n" for n, v in versions.items()), encoding="utf-8")
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "-c", constraints, "-e", ".[labs,hf]"], check=True
    )
    check = (
        "import sys, torch; from pathlib import Path; "
        "sys.exit('pip installed a second torch') if Path(sys.prefix) in Path(torch.__file__).parents else "
        "print(f'torch {torch.__version__} of the image, {torch.cuda.device_count()} GPU(s)')"
    )
    subprocess.run([python, "-c", check], check=True)
    print(f"The labs are installed in {venv}. Next: {venv}/bin/rung doctor")


if __name__ == "__main__":
    main()
