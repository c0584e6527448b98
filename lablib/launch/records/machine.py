"""The machine behind a measurement: processor, accelerators, links and versions, and how fast they really are.

`this_machine` and `gpu_topology` go into every record; `machine_label` says in one line what a reader must know, also
that several ranks shared one GPU and so measured no scaling. The rates below them are for `rung doctor --gpu`: the
disk anywhere; copies, links and matrix products where there are GPUs.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any


def this_machine() -> dict[str, Any]:
    """Return the hardware and the versions that a measurement depends on; None for what this machine lacks."""
    import torch

    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [device.name for device in devices],
        "gpu_details": [
            {
                "name": device.name,
                "memory_bytes": device.total_memory,
                "capability": f"{device.major}.{device.minor}",
                "multiprocessors": device.multi_processor_count,
            }
            for device in devices
        ],
        "system": f"{platform.system()} {platform.release()}",
        **versions(),
    }


def versions() -> dict[str, str | None]:
    """Return the versions that a result depends on: Python, torch, CUDA, NCCL and the driver."""
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.is_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus and dist.is_nccl_available() else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "driver": nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0] or None,
    }


def gpu_topology() -> dict[str, Any]:
    """Return what connects the GPUs: their number, who reaches whom, and the matrix of `nvidia-smi topo -m`."""
    import torch

    count = torch.cuda.device_count()
    reach = [[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)]
    return {"gpus": count, "peer_access": reach, "matrix": nvidia_smi("topo", "-m")}


def nvidia_smi(*arguments: str) -> str:
    """Return what `nvidia-smi` prints, or "" where it is missing or fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        return subprocess.run([command, *arguments], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def machine_label(where: Mapping[str, Any], samples: Iterable[Mapping[str, Any]] = ()) -> str:
    """Return one line on where something was measured; it says when more `ranks` than GPUs had to share them."""
    gpus = list(where["gpus"])
    if not gpus:
        return f"{where['cpu']}, {where['cpus']} CPUs"
    kinds = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    most = max((int(sample.get("ranks", 0)) for sample in samples), default=0)
    if most > len(gpus):
        shared = f"{most} gloo ranks on {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}"
        return f"{' and '.join(kinds)} ({shared}: shows that it runs, not how it scales)"
    return " and ".join(kinds)


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


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

    from lablib.launch.ranks import rank_device

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


def missing_for_compile() -> list[str]:
    """Return the packages of Debian and Ubuntu that `torch.compile` needs and this machine has not."""
    compilers = [os.environ.get("CC", ""), "gcc", "cc", "clang"]
    missing = [] if any(shutil.which(name) for name in compilers if name) else ["gcc"]
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return missing if header.exists() else [*missing, f"python{sysconfig.get_python_version()}-dev"]


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
