"""lablib: the calculators, toys and launchers behind *Distributed Training, Rung by Rung*.

Importing this package loads nothing: no torch, no numpy, no matplotlib.
"""

from pathlib import Path

__version__ = "1.0.0"


def course_folder() -> Path:
    """Return the folder of the course, wherever a notebook or a command runs.

    Raises:
        ValueError: If this lablib was installed without it, from a wheel: the calculators need none.
    """
    folder = Path(__file__).resolve().parents[1]
    if not (folder / "pyproject.toml").exists():
        raise ValueError(
            "labs, records and pages are in the course's folder, and this lablib is of none: its own rung has them"
        )
    return folder
