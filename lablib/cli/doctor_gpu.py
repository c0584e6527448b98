"""`rung doctor --gpu`: what a rented machine gives, measured, with a verdict and a remedy for each finding."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lablib.calc import nvidia_smi
from lablib.cli.doctor import LIMITED, MISSING, OK, Finding
from lablib.launch.known_failures import own_line

NO_GPU = "no GPU here: what needs one was not looked at; every rung but the measured part of 11 runs without"
#: A copy that gets less than this share of its link's line rate has a cause worth finding.
GOOD = 0.6
#: NCCL on an A100 node gets 0.78 of NVLink's line rate in an all-reduce (see `lablib.calc.links`); PCIe gives less.
REDUCED = 0.4
FILES, SHARED, DISK_WRITE, HOT = 4096, 2**30, 200e6, 85
#: The model and the batch of lab 08's cell for a GPU; tests/test_doctor_gpu.py holds them to the lab.
FLOAT8_MODEL = {"num_layers": 4, "hidden": 4096, "max_positions": 2048}
FLOAT8_BATCH = {"micro_batch": 8, "seq": 2048}


def examine_gpu(folder: Path, *, disk_bytes: int = 256 * 2**20) -> list[Finding]:
    """Return every finding about the GPUs, and about what a GPU run needs besides them.

    Args:
        folder: Where runs will write.
        disk_bytes: Size of the file that measures the disk.
    """
    import torch

    from lablib.launch.machine_probe import disk_rate

    findings = _gpus() if torch.cuda.is_available() else [Finding("GPU", LIMITED, NO_GPU)]
    try:
        disk = judge_disk(disk_rate(folder, disk_bytes))
    except OSError as error:
        mend = "free some room, or set LABLIB_EXPERIMENTS to a folder that can be written"
        disk = Finding("disk speed", LIMITED, f"{folder} cannot be written: {error.strerror}", mend)
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return [
        *findings,
        disk,
        judge_shared_memory(shared and shared.f_blocks * shared.f_frsize),
        judge_files(None if files == resource.RLIM_INFINITY else files),
    ]


def _gpus() -> list[Finding]:
    """Look at the GPUs; only here does anything touch them."""
    import torch

    from lablib.calc.gpu_names import known_accelerator
    from lablib.launch.float8 import missing
    from lablib.launch.machine import smi, topology
    from lablib.launch.machine_probe import host_rates, kernel_log, while_busy

    count = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(i) for i in range(count)]
    uuids = [f"GPU-{one.uuid}" for one in properties]
    capabilities = [torch.cuda.get_device_capability(i) for i in range(count)]
    # nvidia-smi shows all GPUs; CUDA shows some of them, in an order of its own.
    rows = [query(smi).get(uuid, {}) for uuid in uuids]
    pcie = [pcie_rate(row) for row in rows]
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    findings = [
        judge_driver(rows[0].get("driver_version"), nvidia_smi.driver_cuda(smi()), torch.version.cuda),
        judge_arch(capabilities, torch.cuda.get_arch_list()),
        judge_nccl(nccl, count),
        judge_xids(kernel_log()),
    ]
    talks = None
    if count > 1:
        links = topology()
        try:
            worst = nvidia_smi.worst_link(links["matrix"])
        except ValueError:  # of a driver that prints otherwise
            worst = None
        gpu = known_accelerator(torch.cuda.get_device_name(0))
        line = min((rate for rate in pcie if rate), default=None)
        if worst and worst.startswith("NV"):
            line = gpu.neighbour_link().bandwidth if gpu else None
        reduced = tried("NCCL links", lambda: judge_all_reduce(all_reduces(count), line))
        talks = reduced.verdict != MISSING
        findings += [judge_topology(worst, all(map(all, links["peer_access"]))), reduced]
    findings.append(tried("host to GPU", lambda: judge_host([host_rates(i) for i in range(count)], pcie)))
    for number, uuid in enumerate(uuids):
        gpu = known_accelerator(torch.cuda.get_device_name(number))

        def load(number: int = number, uuid: str = uuid, gpu: object = gpu) -> Finding:
            reached, row = while_busy(number, lambda: query(smi).get(uuid, {}))
            return judge_load(number, row, reached, gpu.flops.get("bf16") if gpu else None)

        findings.append(tried(f"GPU {number} load", load))
    compiled = compiling()
    memory = min(one.total_memory for one in properties)
    labs = judge_labs(Found(capabilities, memory, compiled.verdict == OK, talks, missing()))
    return [*findings, compiled, *labs]


def tried(name: str, look: Callable[[], Finding]) -> Finding:
    """Return a finding, or that it could not be made: what fails here would fail in a lab."""
    try:
        return look()
    except (RuntimeError, ValueError, OSError) as error:
        return Finding(
            name, MISSING, f"failed: {own_line(error)}", "return this machine, or use one GPU of it"
        )


def query(smi: Callable[..., str]) -> dict[str, dict[str, str]]:
    """Ask `nvidia-smi` for the fields of every GPU, by its UUID; nothing from one that prints otherwise."""
    try:
        text = smi(f"--query-gpu={','.join(nvidia_smi.FIELDS)}", "--format=csv,noheader,nounits")
        return {row["uuid"]: row for row in nvidia_smi.parse_query(text) if "uuid" in row}
    except ValueError:
        return {}


def pcie_rate(row: Mapping[str, str]) -> float | None:
    """Return bytes per second of a GPU's PCIe link, per direction, or None where it is not known."""
    try:
        return nvidia_smi.pcie_bandwidth(int(row["pcie.link.gen.max"]), int(row["pcie.link.width.current"]))
    except (KeyError, ValueError):
        return None


def all_reduces(count: int) -> dict[tuple[int, ...], float]:
    """Return bytes per second of an all-reduce by the GPUs that took part, as the slowest of them has it."""
    from lablib.launch.machine_probe import all_reduce_rates
    from lablib.launch.ranks import run_ranks

    seen: dict[tuple[int, ...], float] = {}
    with contextlib.redirect_stdout(sys.stderr):  # what it says about its ranks is no part of --json
        found = run_ranks(all_reduce_rates, count, device="cuda", timeout=300)
    for rates in found:
        for members, rate in rates.items():
            seen[members] = min(rate, seen.get(members, rate))
    return seen


def compiling() -> Finding:
    """Compile one function and judge what happens; `torch.compile` calls a C compiler and needs Python's header."""
    from lablib.launch.machine_probe import compile_seconds, lacks_for_compile

    try:
        return Finding("torch.compile", OK, f"compiles a function, in {compile_seconds():.1f} s")
    except Exception as error:  # a compiler raises whatever its parts raise
        if lacks := lacks_for_compile():
            detail = f"fails: {' and '.join(lacks)} is missing"
            return Finding("torch.compile", LIMITED, detail, f"apt-get install -y {' '.join(lacks)}")
        return Finding("torch.compile", LIMITED, f"fails: {own_line(error)}", "choose an image of kind devel")


def judge_driver(driver: str | None, newest: tuple[int, int] | None, built: str | None) -> Finding:
    """Judge whether the driver runs the CUDA that torch was built for; within a major version it does."""
    if built is None:
        mend = "make setup-gpu, with the image's own torch"
        return Finding("driver", MISSING, "this torch is for the CPU", mend)
    if newest is None:
        detail = f"torch wants CUDA {built}; nvidia-smi does not say what the driver runs"
        return Finding("driver", LIMITED, detail)
    wanted = tuple(int(part) for part in built.split(".")[:2])
    detail = f"{driver} runs CUDA up to {newest[0]}.{newest[1]}; torch wants {built}"
    if newest[0] < wanted[0]:
        mend = f"choose an image with a torch for CUDA {newest[0]}, or a machine with a newer driver"
        return Finding("driver", MISSING, detail, mend)
    if newest < wanted:
        return Finding("driver", LIMITED, detail, "works within a major version; a newer driver is safer")
    return Finding("driver", OK, detail)


def judge_arch(capabilities: Sequence[tuple[int, int]], built: Sequence[str]) -> Finding:
    """Judge whether torch, built for such as "sm_90", has kernels for GPUs of these compute capabilities."""
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
    major, minor = capabilities[0]
    return Finding("kernels", OK, f"torch has kernels for capability {major}.{minor}")


def judge_nccl(version: tuple[int, ...] | None, gpus: int) -> Finding:
    """Judge NCCL, without which several GPUs cannot talk."""
    if version is None:
        verdict = MISSING if gpus > 1 else LIMITED
        return Finding("NCCL", verdict, "not in this torch", "use torch's own Linux wheels")
    return Finding("NCCL", OK, ".".join(map(str, version)))


def judge_topology(worst: str | None, peers: bool) -> Finding:
    """Judge what connects the GPUs, by the slowest link and by whether all reach each other's memory."""
    access = f"{'every GPU reaches every other' if peers else 'some GPUs do not reach each other'}'s memory"
    if worst is None:
        return Finding("topology", LIMITED, f"nvidia-smi shows no matrix; {access}")
    detail = f"the slowest pair is joined by {nvidia_smi.link_text(worst)} ({worst}); {access}"
    if worst.startswith("NV"):
        return Finding("topology", OK, detail)
    mend = "expect PCIe speed: accumulate gradients, or rent GPUs with NVLink"
    if worst == "SYS":
        mend = "choose GPUs of one socket with CUDA_VISIBLE_DEVICES, or rent GPUs with NVLink"
    if not peers:
        mend = "copies go through host memory; set NCCL_P2P_DISABLE=1 if NCCL hangs, or rent another machine"
    return Finding("topology", LIMITED, detail, mend)


def judge_all_reduce(rates: Mapping[tuple[int, ...], float], line: float | None) -> Finding:
    """Judge what NCCL gets over the links, by the GPUs that took part, against the slowest link's line rate."""
    members, slowest = min(rates.items(), key=lambda item: item[1])
    among = " and ".join(map(str, members)) if len(members) == 2 else f"0 to {max(members)}"
    detail = f"all-reduce works; {slowest / 1e9:.1f} GB/s between GPU {among}, the slowest"
    detail += f"; the link has {line / 1e9:.0f}" if line else ""
    if line and slowest < REDUCED * line:
        mend = "NCCL_DEBUG=INFO says which way it goes; plan with the measured number"
        return Finding("NCCL links", LIMITED, detail, mend)
    return Finding("NCCL links", OK, detail)


def judge_host(rates: Sequence[tuple[float, float]], lines: Sequence[float | None]) -> Finding:
    """Judge copies to and from the host, by the slowest GPU, against its PCIe link."""
    number = min(range(len(rates)), key=lambda i: min(rates[i]))
    (there, back), line = rates[number], lines[number]
    detail = f"GPU {number}: {there / 1e9:.1f} GB/s to it, {back / 1e9:.1f} back"
    detail += f"; its PCIe link has {line / 1e9:.1f}" if line else ""
    if line and min(there, back) < GOOD * line:
        mend = "offload will be slow; check the lanes with nvidia-smi -q, or rent another machine"
        return Finding("host to GPU", LIMITED, detail, mend)
    return Finding("host to GPU", OK, detail)


def judge_load(number: int, row: Mapping[str, str], reached: float, peak: float | None) -> Finding:
    """Judge a GPU under load: its bf16 FLOP/s, and what nvidia-smi says of its clocks meanwhile."""
    name, detail = f"GPU {number} load", f"{reached / 1e12:.0f} TFLOP/s in bf16"
    detail += (
        f", {reached / peak:.0%} of the peak" if peak else "; its peak is not known here, so no MFU is given"
    )
    bits = int(row.get("clocks_event_reasons.active", "0"), 16)
    reasons = [text for bit, text in nvidia_smi.HARMFUL.items() if bits & bit]
    temperature = int(row.get("temperature.gpu", 0))
    limit, default = (float(row.get(key, 0)) for key in ("power.limit", "power.default_limit"))
    detail += f" at {row['clocks.sm']} MHz, {temperature} C" if "clocks.sm" in row else ""
    detail += f" ({', '.join(reasons)})" if reasons else ""
    if int(row.get("ecc.errors.uncorrected.volatile.total", 0)):
        return Finding(name, MISSING, detail + "; uncorrected memory errors", "return this machine")
    if reasons or temperature >= HOT:
        mend = "its numbers are not the GPU's: wait for it to cool, or return it"
        return Finding(name, LIMITED, detail, mend)
    if limit < default:
        mend = "its owner has capped it: plan with the measured rate, or rent another machine"
        return Finding(name, LIMITED, f"{detail}; its limit is {limit:.0f} of {default:.0f} W", mend)
    if peak and reached < 0.5 * peak and not bits & nvidia_smi.POWER_LIMIT:
        return Finding(
            name, LIMITED, detail, "look for another job on this GPU with nvidia-smi, or return it"
        )
    return Finding(name, OK, detail)


def judge_xids(log: str | None) -> Finding:
    """Judge what the driver has written about errors since the machine was started; None cannot be read."""
    if log is None:
        mend = "where you are root on the host: dmesg | grep Xid"
        return Finding("Xid errors", LIMITED, "the kernel's log cannot be read here, so none was seen", mend)
    found = nvidia_smi.hardware_errors(log)
    if found:
        (address, number), times = max(found.items(), key=lambda item: item[1])
        detail = f"Xid {number} on {address}, {times} times: {nvidia_smi.XIDS[number]}"
        return Finding("Xid errors", MISSING, detail, "return this machine")
    return Finding("Xid errors", OK, "none of the hardware in the kernel's log")


def judge_disk(rate: float) -> Finding:
    """Judge how fast the disk is written: a checkpoint waits for it."""
    detail = f"writes {rate / 1e9:.2f} GB/s; {60 * rate / 1e9:.0f} GB of checkpoint a minute"
    if rate < DISK_WRITE:
        mend = "save in the background and less often, or set LABLIB_EXPERIMENTS to a local disk"
        return Finding("disk speed", LIMITED, detail, mend)
    return Finding("disk speed", OK, detail)


def judge_shared_memory(size: int | None) -> Finding:
    """Judge the shared memory: NCCL and the workers of a data loader use it."""
    if size is None:
        return Finding("shared memory", LIMITED, "there is no /dev/shm", "set NCCL_SHM_DISABLE=1")
    detail = f"{size / 2**30:.2f} GiB in /dev/shm"
    if size < SHARED:
        mend = "start the container with --ipc=host or --shm-size=8g; else NCCL_SHM_DISABLE=1, and no loader workers"
        return Finding("shared memory", LIMITED, detail, mend)
    return Finding("shared memory", OK, detail)


def judge_files(limit: int | None) -> Finding:
    """Judge how many files and sockets a process may open."""
    if limit is not None and limit < FILES:
        return Finding("limits", LIMITED, f"{limit:,} open files", f"ulimit -n {16 * FILES} before the run")
    return Finding("limits", OK, f"{'unlimited' if limit is None else f'{limit:,}'} open files")


@dataclass(frozen=True)
class Found:
    """What the labs depend on.

    Attributes:
        capabilities: Compute capability of every GPU.
        memory: Bytes of the smallest one.
        compiles: Whether `torch.compile` works.
        talks: Whether an all-reduce over all GPUs works; None with one GPU.
        no_float8: Why float8 does not train here, or None.
    """

    capabilities: Sequence[tuple[int, int]]
    memory: int
    compiles: bool
    talks: bool | None
    no_float8: str | None


def judge_labs(found: Found) -> list[Finding]:
    """Return what will become of each lab that has something to measure on a GPU."""
    from lablib.calc.cost_sheet import LABS

    return [_lab(budget.lab, found) for budget in LABS]


def _lab(lab: str, found: Found) -> Finding:
    name, gpus = f"lab {lab}", len(found.capabilities)
    if lab in ("06", "11") and found.talks is False:
        mend = "CUDA_VISIBLE_DEVICES=0 before the command leaves one GPU, with which it runs"
        return Finding(name, MISSING, f"fails: the {gpus} GPUs cannot reduce together", mend)
    if lab == "08":
        return _lab_08(name, found)
    if lab in ("09", "11") and min(found.capabilities) < (8, 0):
        detail = "runs, and its times say little: before capability 8.0 a GPU has no matrix units for bf16"
        return Finding(name, LIMITED, detail, "rent an A10, an L4 or something newer")
    if lab == "11" and not found.compiles:
        return Finding(name, LIMITED, "runs, and records that its compiled cases did not compile")
    if lab == "11" and gpus == 1:
        return Finding(name, LIMITED, "measures memory, MFU and recomputation; scaling wants two GPUs")
    return Finding(name, OK, "runs")


def _lab_08(name: str, found: Found) -> Finding:
    from lablib.calc.memory import training_memory
    from lablib.toys.transformer import tiny_config

    if found.no_float8:
        return Finding(name, LIMITED, f"leaves FP8 out: {found.no_float8}")
    if not found.compiles:
        return Finding(name, LIMITED, "runs, and records that FP8 did not compile", "see torch.compile")
    model = tiny_config("llama", **FLOAT8_MODEL)
    need = training_memory(model, recipe="pure-bf16", attention="fused", **FLOAT8_BATCH).total
    if need > found.memory:
        detail = f"runs, and records that FP8 takes about {need / 1e9:.0f} GB, more than the GPU's {found.memory / 1e9:.0f}"
        return Finding(name, LIMITED, detail, "rent a GPU with more memory")
    return Finding(name, OK, "runs")
