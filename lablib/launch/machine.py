"""What a measurement was made on: processor, accelerators, their links, and every version that matters.

A number without its machine is worth nothing. `machine` and `topology` go into every record; `label` says in one line
what a reader must know, also that several ranks shared one GPU and so measured no scaling.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Identify the hardware and the versions that a measurement depends on.

    Returns:
        CPU model and count, memory in bytes, accelerators by name and in detail, operating system, and the versions
        of Python, torch, CUDA, NCCL and the driver; None where there is none.
    """
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
        "driver": smi("--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0] or None,
    }


def topology() -> dict[str, Any]:
    """Return what connects the GPUs of this machine: who reaches whom, and the driver's own matrix as text.

    Returns:
        gpus; peer_access, a list of rows of booleans; matrix, the output of `nvidia-smi topo -m`.
    """
    import torch

    count = torch.cuda.device_count()
    reach = [[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)]
    return {"gpus": count, "peer_access": reach, "matrix": smi("topo", "-m")}


def smi(*arguments: str) -> str:
    """Return what `nvidia-smi` prints, or nothing where there is none or it fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        return subprocess.run(
            [command, *arguments], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def label(where: Mapping[str, Any], samples: Iterable[Mapping[str, Any]] = ()) -> str:
    """Return one line on where something was measured.

    Args:
        where: As `machine` returns it.
        samples: Raw samples; if one has more `ranks` than there are GPUs, the line says that they shared them.
    """
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
