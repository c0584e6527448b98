"""One archive to carry off a rented machine before it is stopped: experiments and records, without checkpoints.

Unpacked at home in the folder of the course, everything lies where labs and reports look for it.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from lablib.launch.experiments import experiments_dir, repository_root
from lablib.launch.machine import machine

#: What is larger stays behind, and is named in the archive: weights, not results.
LARGEST = 20 * 10**6
SUFFIXES = (".distcp", ".safetensors", ".pt", ".tar.gz")


def pack(target: Path | None = None) -> Path:
    """Write one archive with everything that was measured here.

    Args:
        target: The archive; by default in distributed-experiments/, with the moment in its name.

    Returns:
        The archive. Its distributed-experiments/LEFT_OUT.txt names what was too large. Records of other machines are
        not in it: at home they are there, and perhaps newer.

    Raises:
        FileNotFoundError: If there is nothing to pack.
    """
    source = experiments_dir()
    records = repository_root() / "labs" / "recorded"
    files = list(_files(source))
    if not files:
        raise FileNotFoundError(f"there is nothing in {source} to pack; run a lab first")
    target = target or source / f"{datetime.now(UTC):%Y-%m-%dT%H%M%S}-results.tar.gz"
    here = machine()
    taken = [path for path in files if not _is_left_out(path)]
    left = [path for path in files if _is_left_out(path)]
    temporary = target.with_name(f".{target.name}.part")
    try:
        with tarfile.open(temporary, "w:gz") as archive:
            for path in taken:
                archive.add(path, Path("distributed-experiments") / path.relative_to(source))
            for path in sorted(records.glob("*.json")):
                where = json.loads(path.read_text(encoding="utf-8"))["machine"]
                # A lab may have seen some of the GPUs, or none.
                if where["cpu"] == here["cpu"] and set(where["gpus"]) <= set(here["gpus"]):
                    archive.add(path, Path("labs", "recorded", path.name))
            text = "".join(f"{path.stat().st_size}\t{path.relative_to(source)}\n" for path in left).encode()
            entry = tarfile.TarInfo("distributed-experiments/LEFT_OUT.txt")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _files(source: Path) -> Iterator[Path]:
    """Yield every file of the experiments; locks and earlier archives are none."""
    for path in sorted(source.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.name != "lock" and not path.name.startswith("."):
            if path.parent == source and path.name.endswith(".tar.gz"):
                continue
            yield path


def _is_left_out(path: Path) -> bool:
    return path.name.endswith(SUFFIXES) or path.stat().st_size > LARGEST
