"""Room for a checkpoint, asked for before it is written."""

from __future__ import annotations

import shutil
from pathlib import Path

from lablib.calc.units import format_bytes
from lablib.launch.checkpoint_files import latest
from lablib.launch.together import agree, own_rank


def check_room(folder: str | Path) -> None:
    """See to it that another checkpoint of the same size fits; every rank must call.

    A checkpoint is written beside the old ones, so `keep` of them and one more must fit. The first one is of unknown
    size, and passes.

    Raises:
        ValueError: If it does not fit, on all ranks, before anything is written.
    """
    agree(lambda: _check(Path(folder)) if own_rank() == 0 else None, "looking at the disk failed")


def _check(folder: Path) -> None:
    newest = latest(folder)
    if newest is None:
        return
    size = sum(path.stat().st_size for path in newest.iterdir())
    free = shutil.disk_usage(folder).free
    if free < size:
        raise ValueError(
            f"the disk of {folder} has {format_bytes(free)} left, and a checkpoint takes {format_bytes(size)}: free "
            f"some room or keep fewer checkpoints; {newest.name} is whole, and the run resumes from there"
        )
