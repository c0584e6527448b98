"""What a rented machine really gives: disk, shared memory and limits anywhere; copies and clocks where there are GPUs.

Chapter: book/11_practical_fsdp.md
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sysconfig
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


def all_reduce_rates(size: int = 256 * 2**20) -> dict[tuple[int, ...], float]:
    """Return what this rank sends a second in an all-reduce, over each pair of neighbours and over all ranks.

    For `run_ranks`. A rank of n sends 2 (n - 1) / n of the bytes, so the numbers can be held to the line rate of a link.

    Args:
        size: Bytes.

    Returns:
        Bytes per second by the ranks that took part, this one among them.
    """
    import torch
    import torch.distributed as dist

    from lablib.launch.devices import rank_device

    rank, ranks, device = dist.get_rank(), dist.get_world_size(), rank_device()
    data = torch.zeros(size // 4, device=device)
    pairs = {tuple(sorted((a, (a + 1) % ranks))) for a in range(ranks)}
    rates = {}
    for members in sorted(pairs) + [tuple(range(ranks))] * (ranks > 2):
        group = dist.new_group(list(members))  # every rank must call, also one that does not take part

        def work(group: Any = group) -> None:
            dist.all_reduce(data, group=group)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        if rank in members:
            rates[members] = fastest(work, size * 2 * (len(members) - 1) / len(members))
        dist.all_reduce(torch.zeros(1))  # by gloo: nobody measures while others do
    return rates


def lacks_for_compile() -> list[str]:
    """Return what `torch.compile` needs and this machine has not, as the package that brings it on Debian and Ubuntu."""
    compilers = [os.environ.get("CC", ""), "gcc", "cc", "clang"]
    lacks = [] if any(shutil.which(name) for name in compilers if name) else ["gcc"]
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return lacks if header.exists() else [*lacks, f"python{sysconfig.get_python_version()}-dev"]


def compile_seconds(device: str = "cuda") -> float:
    """Return how long `torch.compile` takes for one small function, its first call included.

    Args:
        device: Where the function computes.

    Raises:
        Exception: As the compiler raises it.
    """
    import torch

    start = time.perf_counter()
    x = torch.ones(1024, device=device)
    torch.compile(lambda x: (x * 2).sin().sum())(x).item()
    return time.perf_counter() - start


def kernel_log() -> str | None:
    """Return the kernel's log, or None where an ordinary user or a container may not read it."""
    try:
        found = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout if found.returncode == 0 and found.stdout else None
