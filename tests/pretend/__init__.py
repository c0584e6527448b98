"""Machines that pretend to have GPUs, for tests and for whole labs; `sitecustomize` says what is pretended."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
_HERE = Path(__file__).parent


def environment(gpus: int, log: Path, folder: Path) -> dict[str, str]:
    """Return the environment of a machine with so many pretended GPUs.

    Args:
        gpus: How many.
        log: Takes a line for each thing that needed a kernel.
        folder: For what the labs write.
    """
    paths = [str(_HERE), str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PATH": f"{_HERE / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PRETEND_GPUS": str(gpus),
        "PRETEND_LOG": str(log),
        "LABLIB_EXPERIMENTS": str(folder),
        "OMP_NUM_THREADS": "1",
    }
