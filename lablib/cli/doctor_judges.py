"""What `rung doctor --gpu` makes of what it measured: a verdict for each finding, and a mend where it is bad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lablib.cli.doctor import LIMITED, MISSING, OK, Finding

if TYPE_CHECKING:
    from lablib.calc.nvidia_smi import Matrix

#: A copy that gets less than this share of its link's line rate has a cause worth finding.
GOOD = 0.6
#: NCCL on an A100 node gets 0.78 of NVLink's line rate in an all-reduce (see `lablib.calc.links`); PCIe gives less.
REDUCED = 0.4
FILES, SHARED, DISK_WRITE, HOT = 4096, 1 * 2**30, 200e6, 85
POWER = "power limit"  # as `lablib.calc.nvidia_smi.CLOCK_REASONS` has it


def judge_driver(driver: str | None, newest: tuple[int, int] | None, built: str | None) -> Finding:
    """Judge whether the driver runs the CUDA that torch was built for; within a major version it does.

    Args:
        driver: Its version.
        newest: The newest CUDA that it runs.
        built: CUDA of torch, such as "13.0".
    """
    if built is None:
        return Finding(
            "driver", MISSING, "this torch is for the CPU", "make setup-gpu, with the image's own torch"
        )
    wanted = tuple(int(part) for part in built.split(".")[:2])
    if newest is None:
        return Finding(
            "driver", LIMITED, f"torch wants CUDA {built}; nvidia-smi does not say what the driver runs"
        )
    detail = f"{driver} runs CUDA up to {newest[0]}.{newest[1]}; torch wants {built}"
    if newest[0] < wanted[0]:
        mend = f"choose an image with a torch for CUDA {newest[0]}, or a machine with a newer driver"
        return Finding("driver", MISSING, detail, mend)
    if newest < wanted:
        return Finding("driver", LIMITED, detail, "works within a major version; a newer driver is safer")
    return Finding("driver", OK, detail)


def judge_arch(capabilities: Sequence[tuple[int, int]], built: Sequence[str]) -> Finding:
    """Judge whether torch has kernels for these GPUs.

    Args:
        capabilities: Compute capability of every GPU.
        built: What torch was built for, such as "sm_90".
    """
    have = {int(name[3:].rstrip("af")) for name in built if name.startswith("sm_")}
    ahead = {int(name[8:].rstrip("af")) for name in built if name.startswith("compute_")}
    missing = [
        f"{major}.{minor}"
        for major, minor in capabilities
        # Code for 8.0 runs on 8.9; code for a newer generation does not, unless it can be compiled at start.
        if not any(arch // 10 == major and arch % 10 <= minor for arch in have)
        and not any(arch <= 10 * major + minor for arch in ahead)
    ]
    if missing:
        detail = f"torch has no kernels for capability {', '.join(missing)}: built for {', '.join(built)}"
        return Finding("kernels", MISSING, detail, "choose an image whose torch is built for this GPU")
    return Finding(
        "kernels", OK, f"torch has kernels for capability {capabilities[0][0]}.{capabilities[0][1]}"
    )


def judge_nccl(version: tuple[int, ...] | None, gpus: int) -> Finding:
    """Judge NCCL.

    Args:
        version: Its version, or None.
        gpus: Number of GPUs.
    """
    if version is None:
        return Finding(
            "NCCL", MISSING if gpus > 1 else LIMITED, "not in this torch", "use torch's own Linux wheels"
        )
    return Finding("NCCL", OK, ".".join(map(str, version)))


def judge_topology(matrix: Matrix | None, peers: Sequence[Sequence[bool]]) -> Finding:
    """Judge what connects the GPUs, by the worst pair: a ring over all of them uses it.

    Args:
        matrix: From `nvidia-smi topo -m`, or None.
        peers: Whether GPU a reaches the memory of GPU b.
    """
    from lablib.calc.nvidia_smi import link_text

    reach = all(all(row) for row in peers)
    access = (
        "every GPU reaches every other's memory" if reach else "some GPUs do not reach each other's memory"
    )
    if matrix is None:
        return Finding("topology", LIMITED, f"nvidia-smi shows no matrix; {access}")
    worst = matrix.worst()
    detail = f"the slowest pair is joined by {link_text(worst)} ({worst}); {access}"
    if worst.startswith("NV"):
        return Finding("topology", OK, detail)
    mend = "expect PCIe speed: accumulate gradients, or rent GPUs with NVLink"
    if worst == "SYS":
        mend = "choose GPUs of one socket with CUDA_VISIBLE_DEVICES, or rent GPUs with NVLink"
    if not reach:
        mend = "copies go through host memory; set NCCL_P2P_DISABLE=1 if NCCL hangs, or rent another machine"
    return Finding("topology", LIMITED, detail, mend)


def judge_pairs(
    rates: Mapping[tuple[int, int], float], matrix: Matrix | None, scale_up: float | None, pcie: float | None
) -> Finding:
    """Judge the measured copies between GPUs, by the slowest.

    Args:
        rates: Bytes per second from a to b.
        matrix: Says which link joins a pair.
        scale_up: Line rate of the GPU's link to its neighbours in bytes per second, or None.
        pcie: Line rate of its PCIe link, or None.
    """
    (a, b), slowest = min(rates.items(), key=lambda item: item[1])
    code = matrix.links[a][b] if matrix else ""
    line = scale_up if code.startswith("NV") else pcie
    detail = f"{slowest / 1e9:.1f} GB/s between GPU {a} and {b}, the slowest; {max(rates.values()) / 1e9:.1f} the fastest"
    if line is None:
        return Finding("GPU to GPU", OK, detail)
    detail += f"; the link has {line / 1e9:.0f}"
    if slowest < GOOD * line:
        mend = "look for virtualization (ACS, IOMMU) or a shared switch; plan with the measured number"
        return Finding("GPU to GPU", LIMITED, detail, mend)
    return Finding("GPU to GPU", OK, detail)


def judge_host(rates: Sequence[Mapping[str, float]], lines: Sequence[float | None]) -> Finding:
    """Judge copies between host and GPUs, by the slowest GPU.

    Args:
        rates: to_device and to_host of every GPU, in bytes per second.
        lines: Line rate of every GPU's PCIe link, or None.
    """
    number = min(range(len(rates)), key=lambda i: min(rates[i].values()))
    rate, line = rates[number], lines[number]
    detail = f"GPU {number}: {rate['to_device'] / 1e9:.1f} GB/s to it, {rate['to_host'] / 1e9:.1f} back"
    if line is None:
        return Finding("host to GPU", OK, detail)
    detail += f"; its PCIe link has {line / 1e9:.1f}"
    if min(rate.values()) < GOOD * line:
        mend = "offload will be slow; check the lanes with nvidia-smi -q, or rent another machine"
        return Finding("host to GPU", LIMITED, detail, mend)
    return Finding("host to GPU", OK, detail)


def judge_clocks(
    number: int, row: Mapping[str, str | None] | None, reached: float, peak: float | None
) -> Finding:
    """Judge a GPU under load: its rate, its clocks and what holds them down.

    Args:
        number: Of the GPU.
        row: What nvidia-smi said under load, or None.
        reached: FLOP/s of bf16 matrix products.
        peak: Dense bf16 peak of the GPU in FLOP/s, or None where it is unknown.
    """
    from lablib.calc.nvidia_smi import clock_reasons

    name, detail = f"GPU {number} load", f"{reached / 1e12:.0f} TFLOP/s in bf16"
    if peak:
        detail += f", {reached / peak:.0%} of the peak"
    else:
        detail += "; the course has no peak for this GPU, so no MFU is given"
    slow = bool(peak) and reached < 0.5 * peak
    another = "look for another job on this GPU with nvidia-smi, or return it"
    if row is None:
        return Finding(name, LIMITED, detail, another) if slow else Finding(name, OK, detail)
    reasons = clock_reasons(row["reasons"])
    if row["clocks.sm"]:
        detail += f" at {row['clocks.sm']} MHz"
    if row["temperature.gpu"]:
        detail += f", {row['temperature.gpu']} C"
    if reasons:
        detail += f" ({', '.join(text for text, _ in reasons)})"
    if int(row["ecc.errors.uncorrected.volatile.total"] or 0):
        return Finding(name, MISSING, detail + "; uncorrected memory errors", "return this machine")
    if any(harmful for _, harmful in reasons) or int(float(row["temperature.gpu"] or 0)) >= HOT:
        mend = "its numbers are not the GPU's: wait for it to cool, or return it"
        return Finding(name, LIMITED, detail, mend)
    limit, default = (float(row[key] or 0) for key in ("power.limit", "power.default_limit"))
    if limit:
        detail += f"; its limit is {limit:.0f} W"
    if limit < default:
        detail += f" of {default:.0f} W by default"
        mend = "its owner has capped it: plan with the measured rate, or rent another machine"
        return Finding(name, LIMITED, detail, mend)
    # A GPU that is sold with little power, such as A10 and L4, is slow under load and healthy.
    if slow and POWER not in [text for text, _ in reasons]:
        return Finding(name, LIMITED, detail, another)
    return Finding(name, OK, detail)


def judge_all_reduce(rates: Mapping[tuple[int, ...], float], line: float | None) -> Finding:
    """Judge what NCCL gets over the links: each pair of neighbours, and all GPUs together.

    Args:
        rates: Bytes per second that each rank sends, by the GPUs that took part.
        line: Line rate of the slowest link in bytes per second, or None.
    """
    members, slowest = min(rates.items(), key=lambda item: item[1])
    among = " and ".join(map(str, members)) if len(members) == 2 else f"0 to {max(members)}"
    detail = f"all-reduce works; {slowest / 1e9:.1f} GB/s between GPU {among}, the slowest"
    if line is None:
        return Finding("NCCL links", OK, detail)
    detail += f"; the link has {line / 1e9:.0f}"
    if slowest < REDUCED * line:
        mend = "NCCL_DEBUG=INFO says which way it goes; plan with the measured number"
        return Finding("NCCL links", LIMITED, detail, mend)
    return Finding("NCCL links", OK, detail)


def judge_xids(log: str | None) -> Finding:
    """Judge what the driver has written about errors since the machine was started.

    Args:
        log: The kernel's log, or None where it cannot be read.
    """
    from lablib.calc.nvidia_smi import XIDS, parse_xids

    if log is None:
        mend = "where you are root on the host: dmesg | grep Xid"
        return Finding("Xid errors", LIMITED, "the kernel's log cannot be read here, so none was seen", mend)
    found = parse_xids(log)
    hardware = {key: times for key, times in found.items() if key[1] in XIDS}
    if hardware:
        (address, number), times = max(hardware.items(), key=lambda item: item[1])
        detail = f"Xid {number} on {address}, {times} times: {XIDS[number]}"
        return Finding("Xid errors", MISSING, detail, "return this machine")
    if found:
        numbers = ", ".join(str(number) for number in sorted({number for _, number in found}))
        return Finding("Xid errors", OK, f"only such as a program causes: {numbers}")
    return Finding("Xid errors", OK, "none in the kernel's log")


def judge_disk(rates: Mapping[str, float]) -> Finding:
    """Judge the disk: a checkpoint waits for it.

    Args:
        rates: write and read in bytes per second.
    """
    minute = 60 * rates["write"] / 1e9
    detail = f"writes {rates['write'] / 1e9:.2f} GB/s, reads {rates['read'] / 1e9:.2f}; {minute:.0f} GB of checkpoint a minute"
    if rates["write"] < DISK_WRITE:
        mend = "save in the background and less often, or set LABLIB_EXPERIMENTS to a local disk"
        return Finding("disk speed", LIMITED, detail, mend)
    return Finding("disk speed", OK, detail)


def judge_shared_memory(size: int | None) -> Finding:
    """Judge the shared memory: NCCL and the workers of a data loader use it.

    Args:
        size: Bytes, or None where there is none.
    """
    if size is None:
        return Finding("shared memory", LIMITED, "there is no /dev/shm", "set NCCL_SHM_DISABLE=1")
    detail = f"{size / 2**30:.2f} GiB in /dev/shm"
    if size < SHARED:
        mend = "start the container with --ipc=host or --shm-size=8g; else NCCL_SHM_DISABLE=1, and no loader workers"
        return Finding("shared memory", LIMITED, detail, mend)
    return Finding("shared memory", OK, detail)


def judge_limits(found: Mapping[str, int | None]) -> Finding:
    """Judge the limits of a process: sockets and files of a job, memory that must not be swapped.

    Args:
        found: files, processes and locked; None means unlimited.
    """
    locked = "unlimited" if found["locked"] is None else f"{found['locked'] / 2**20:.0f} MiB"
    files = "unlimited" if found["files"] is None else f"{found['files']:,}"
    detail = f"{files} open files, {locked} of locked memory"
    if found["files"] is not None and found["files"] < FILES:
        return Finding("limits", LIMITED, detail, f"ulimit -n {16 * FILES} before the run")
    return Finding("limits", OK, detail + ("" if found["locked"] is None else "; InfiniBand wants unlimited"))
