"""What a rented machine really gives: disk, shared memory and limits anywhere; copies and clocks where there are GPUs.

Chapter: book/11_practical_fsdp.md
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHARED_MEMORY = Path("/dev/shm")  # where NCCL and data loaders put what processes of one machine share


def fastest(work: Callable[[], None], size: float, *, repeats: int = 5) -> float:
    """Return bytes per second of the fastest of several goes; the first one warms up and does not count.

    Args:
        work: Moves the bytes and returns when they have moved.
        size: Bytes.
        repeats: Goes that count.
    """
    best = float("inf")
    for go in range(repeats + 1):
        start = time.perf_counter()
        work()
        if go:
            best = min(best, time.perf_counter() - start)
    return size / best


def disk_rates(folder: Path, size: int = 256 * 2**20) -> dict[str, float]:
    """Return bytes per second of writing a file until it is on the disk, and of reading it again.

    Args:
        folder: Where.
        size: Bytes; less than the free space.

    Returns:
        write and read. Reading asks the system to forget its copy first; where it does not, memory is measured.
    """
    block = os.urandom(2**20)
    count = max(1, size // len(block))
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".speed-") as file:
        start = time.perf_counter()
        for _ in range(count):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - start
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        file.seek(0)
        while file.read(2**20):
            pass
        read = time.perf_counter() - start
    return {"write": count * len(block) / written, "read": count * len(block) / read}


def shared_memory_bytes(folder: Path = SHARED_MEMORY) -> int | None:
    """Return the size of the shared memory's file system in bytes, or None where there is none.

    Args:
        folder: Where it is mounted.
    """
    if not folder.is_dir():
        return None
    size = os.statvfs(folder)
    return size.f_blocks * size.f_frsize


def limits() -> dict[str, int | None]:
    """Return the limits of this process: open files, processes, and locked memory in bytes; None means unlimited."""

    def soft(which: int) -> int | None:
        value = resource.getrlimit(which)[0]
        return None if value == resource.RLIM_INFINITY else value

    return {
        "files": soft(resource.RLIMIT_NOFILE),
        "processes": soft(resource.RLIMIT_NPROC),
        "locked": soft(resource.RLIMIT_MEMLOCK),
    }


def host_rates(gpu: int, size: int = 256 * 2**20) -> dict[str, float]:
    """Return bytes per second from pinned host memory to a GPU and back.

    Args:
        gpu: Its number.
        size: Bytes of a copy.

    Returns:
        to_device and to_host.
    """
    import torch

    there = torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu}")
    here = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def copy(target: Any, source: Any) -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(gpu)

    return {
        "to_device": fastest(lambda: copy(there, here), size),
        "to_host": fastest(lambda: copy(here, there), size),
    }


def pair_rate(a: int, b: int, size: int = 256 * 2**20) -> float:
    """Return bytes per second of a copy from one GPU to another.

    Args:
        a: Number of the GPU that sends.
        b: Number of the GPU that receives.
        size: Bytes of a copy.
    """
    import torch

    source = torch.empty(size, dtype=torch.uint8, device=f"cuda:{a}")
    target = torch.empty(size, dtype=torch.uint8, device=f"cuda:{b}")

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize(a)
        torch.cuda.synchronize(b)

    return fastest(copy, size)


def while_busy(gpu: int, look: Callable[[], Any], seconds: float = 1.0) -> tuple[float, Any]:
    """Keep a GPU busy with matrix products and look at it meanwhile.

    Args:
        gpu: Its number.
        look: What to do while it works.
        seconds: How long it is kept busy before the look.

    Returns:
        FLOP/s that it reached, and what `look` returned.
    """
    import torch

    n = 8192
    x = torch.randn(n, n, device=f"cuda:{gpu}", dtype=torch.bfloat16)
    x @ x
    torch.cuda.synchronize(gpu)
    start, products = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(2):
            x @ x
        products += 2
        torch.cuda.synchronize(gpu)
    reached = products * 2 * n**3 / (time.perf_counter() - start)
    for _ in range(products):  # as much again, in flight while we look
        x @ x
    seen = look()
    torch.cuda.synchronize(gpu)
    return reached, seen
