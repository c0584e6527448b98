"""The files of a checkpoint: written aside, published by one rename, verified before they are read.

    checkpoints/
        step-00000020/          complete: it got its name when everything was on disk
            training.json       step, data position, tied names, and size and checksum of every file
            .metadata           which tensor lies where (DCP)
            __0_0.distcp, ...   the shards of each rank (DCP)
        .writing-00000030-ab12/ a save that is under way, or one that died

A rename within a file system happens or does not happen. So a crash in the middle of a save leaves a folder that
`latest` never looks at, and the next save removes it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lablib.launch.experiments import write_json
from lablib.launch.together import agree, count_ranks, own_rank

INFO = "training.json"
_NAME = re.compile(r"step-(\d{8,})")
_ASIDE = ".writing-"
_CHUNK = 1 << 24  # bytes of a file read at a time


def latest(folder: str | Path) -> Path | None:
    """Return the newest complete checkpoint in a folder, or None where there is none.

    Args:
        folder: As given to `save`.
    """
    found = complete(Path(folder))
    return found[-1] if found else None


def name_of(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step will be."""
    return folder / f"step-{step:08d}"


def begin(folder: Path, step: int, token: str) -> Path:
    """Return the folder to write to; leftovers of saves that died are removed.

    Raises:
        ValueError: If the step is saved already.
    """
    if (target := name_of(folder, step)).exists():
        raise ValueError(f"{target} is there already: delete it, or save to another folder")
    for dead in folder.glob(f"{_ASIDE}*"):
        shutil.rmtree(dead)
    aside = folder / f"{_ASIDE}{step:08d}-{token}"
    aside.mkdir(parents=True)
    return aside


def publish(aside: Path, info: dict[str, Any], keep: int | None) -> Path:
    """Give a finished checkpoint its name, and remove all but the newest.

    Args:
        aside: From `begin`, with all files in it.
        info: Goes into training.json, with the sizes and checksums of the files.
        keep: Checkpoints to keep, this one included; None keeps all.
    """
    files = sorted(aside.iterdir())
    sizes = {path.name: path.stat().st_size for path in files}
    write_json(aside / INFO, {**info, "files": sizes, "crc32": {path.name: _crc32(path) for path in files}})
    _sync(aside)
    target = name_of(aside.parent, info["step"])
    aside.rename(target)
    _sync(aside.parent)
    for old in complete(aside.parent)[: -keep if keep else 0]:
        # Renamed first: a removal that is cut short must not leave half a checkpoint under a good name.
        dying = old.rename(old.with_name(f"{_ASIDE}old-{old.name}"))
        shutil.rmtree(dying)
    return target


def read_info(path: str | Path) -> dict[str, Any]:
    """Return what training.json says, once every file is seen to have its full size.

    Raises:
        ValueError: If it is no checkpoint, or a file is missing or cut short.
    """
    if path is None:
        raise ValueError("there is no checkpoint to read: `latest` returns None for a folder without one")
    path = Path(path)
    if not (path / INFO).is_file():
        newest = latest(path) if path.is_dir() else None
        use = f"; did you mean {newest}?" if newest else ""
        raise ValueError(f"{path} is no complete checkpoint: it has no {INFO}{use}")
    try:
        info = json.loads((path / INFO).read_text(encoding="utf-8"))
        files = info["files"].items()
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"checkpoint {path} is damaged: {INFO} cannot be read; use an older one") from None
    for name, size in files:
        file = path / name
        if not file.exists():
            raise ValueError(f"checkpoint {path} is damaged: {name} is missing; use an older one")
        if file.stat().st_size != size:
            raise ValueError(
                f"checkpoint {path} is damaged: {name} has {file.stat().st_size} bytes and was written with {size}; "
                "use an older one"
            )
    return info


def check_content(path: str | Path, info: dict[str, Any], part: slice = slice(None)) -> None:
    """Read files of a checkpoint and compare their checksums; checkpoints of older versions have none.

    Args:
        path: A checkpoint.
        info: From `read_info`.
        part: Of the files, in order of their names: ranks share the work.

    Raises:
        ValueError: If a file is not what was written, or cannot be read.
    """
    for name, written in sorted(info.get("crc32", {}).items())[part]:
        try:
            same = _crc32(Path(path) / name) == written
        except OSError as error:
            text = f"{name} cannot be read ({error.strerror})"
            raise ValueError(f"checkpoint {path} is damaged: {text}; use an older one") from None
        if not same:
            text = f"the content of {name} is not what was written"
            raise ValueError(f"checkpoint {path} is damaged: {text}; use an older one")


def check_whole(path: str | Path) -> dict[str, Any]:
    """Return what training.json says, once all files are seen to be what was written; every rank must call.

    Every file is read by one of the ranks.

    Raises:
        ValueError: If it is no checkpoint, or damaged; on every rank.
    """
    info: dict[str, Any] = {}

    def look() -> None:
        info.update(read_info(path))
        check_content(path, info, slice(own_rank(), None, count_ranks()))

    agree(look, f"reading {path} failed")
    return info


@contextmanager
def alone_is_fine() -> Iterator[None]:
    """Keep DCP from warning that there are no ranks, where one process is what is wanted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
        yield


def complete(folder: Path) -> list[Path]:
    """Return the published checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path / INFO).is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def _sync(folder: Path) -> None:
    """Force the entries of a folder to disk: a rename that is only in memory is lost with the power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
