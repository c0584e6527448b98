"""What a rented machine really gives: the disk anywhere; copies, links and matrix products where there are GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def fastest(work: Callable[[], None], size: float, *, repeats: int = 5) -> float:
    """Return bytes per second of the fastest of several goes; the first one warms up and does not count."""
    best = float("inf")
    for go in range(repeats + 1):
        start = time.perf_counter()
        work()
        if go:
            best = min(best, time.perf_counter() - start)
    return size / best


def disk_rate(folder: Path, size: int = 256 * 2**20) -> float:
    """Return bytes per second of writing a file until it is on the disk."""
    block = os.urandom(2**20)
    count = max(1, size // len(block))
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".speed-") as file:
        start = time.perf_counter()
        for _ in range(count):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return count * len(block) / (time.perf_counter() - start)


def host_rates(gpu: int, size: int = 256 * 2**20) -> tuple[float, float]:
    """Return bytes per second from pinned host memory to a GPU, and back."""
    import torch

    there = torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu}")
    here = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def copy(target: Any, source: Any) -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(gpu)

    return fastest(lambda: copy(there, here), size), fastest(lambda: copy(here, there), size)


def while_busy(gpu: int, look: Callable[[], Any], seconds: float = 1.0) -> tuple[float, Any]:
    """Keep a GPU busy with matrix products; return its FLOP/s, and what `look` returned meanwhile."""
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
    """Return the bytes that this rank sends a second in an all-reduce, by the ranks that take part.

    For `run_ranks`: over each pair of neighbours, then over all ranks. A rank of n sends 2 (n - 1) / n of the bytes,
    so the numbers can be held to the line rate of a link.
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
    """Return the packages of Debian and Ubuntu that `torch.compile` needs and this machine has not."""
    compilers = [os.environ.get("CC", ""), "gcc", "cc", "clang"]
    lacks = [] if any(shutil.which(name) for name in compilers if name) else ["gcc"]
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return lacks if header.exists() else [*lacks, f"python{sysconfig.get_python_version()}-dev"]


def compile_seconds(device: str = "cuda") -> float:
    """Return how long `torch.compile` takes for one small function, its first call included."""
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
