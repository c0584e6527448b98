"""`rung doctor --gpu`: what a rented machine really gives, each with a verdict and what to do about it.

Sources: nvidia-smi's manual page; NVML API reference, NvmlClocksEventReasons; NVIDIA's catalogue of Xid errors.
"""

from __future__ import annotations

import contextlib
import csv
import os
import re
import resource
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

OK, LIMITED, MISSING = "ok", "limited", "missing"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        verdict: "ok", "limited" (something will not run) or "missing" (the labs will not run).
        fix: What to do about it; empty when there is nothing to do.
    """

    name: str
    verdict: str
    detail: str
    fix: str = ""


NO_GPU = "no GPU here: what needs one was not looked at; every rung but the measured part of 11 runs without"
#: A copy that gets less than this share of its link's line rate has a cause worth finding.
MIN_COPY_SHARE = 0.6
#: NCCL on an A100 node gets 0.78 of NVLink's line rate in an all-reduce (see `lablib.calc.hardware`); PCIe gives less.
MIN_ALL_REDUCE_SHARE = 0.4
MIN_FILES, MIN_SHARED_BYTES, MIN_DISK_RATE, MAX_CELSIUS = 4096, 2**30, 200e6, 85
#: The model and the batch of lab 08's cell for a GPU; tests/test_doctor_gpu.py holds them to the lab.
FLOAT8_MODEL = {"num_layers": 4, "hidden": 4096, "max_positions": 2048}
FLOAT8_BATCH = {"micro_batch": 8, "seq": 2048}

QUERY_FIELDS = (
    "uuid", "driver_version", "pcie.link.gen.max", "pcie.link.width.current", "temperature.gpu", "power.limit",
    "power.default_limit", "clocks.sm", "ecc.errors.uncorrected.volatile.total", "clocks_event_reasons.active",
)  # fmt: skip
#: What holds clocks down and makes a measurement wrong, by bit (NVML, NvmlClocksEventReasons); idle does not.
THROTTLE_REASONS = {
    0x2: "clocks set by hand",
    0x8: "hardware slowdown",
    0x20: "too hot, slowed by software",
    0x40: "too hot, slowed by hardware",
    0x80: "power brake",
}
#: At its own power limit a GPU that is sold with little of it, such as A10 and L4, is slow and healthy.
POWER_LIMIT = 0x4
#: The driver's errors that no program causes, by number (docs.nvidia.com/deploy/xid-errors).
HARDWARE_XIDS = {
    48: "uncorrectable memory error",
    62: "its controller halted",
    64: "a bad memory row could not be replaced",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    95: "memory error that was not contained",
    119: "its controller does not answer",
    120: "its controller failed",
}


def examine_gpu(folder: Path, *, disk_bytes: int = 256 * 2**20) -> list[Finding]:
    """Return every finding about the GPUs, and about what a GPU run needs besides them."""
    import torch

    from lablib.launch.records import disk_rate

    findings = _examine_gpus() if torch.cuda.is_available() else [Finding("GPU", LIMITED, NO_GPU)]
    try:
        disk = judge_disk(disk_rate(folder, disk_bytes))
    except OSError as error:
        fix = "free some room, or set LABLIB_EXPERIMENTS to a folder that can be written"
        disk = Finding("disk speed", LIMITED, f"{folder} cannot be written: {error.strerror}", fix)
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return [
        *findings,
        disk,
        judge_shared_memory(shared and shared.f_blocks * shared.f_frsize),
        judge_files(None if files == resource.RLIM_INFINITY else files),
    ]


def _examine_gpus() -> list[Finding]:
    import torch

    from lablib.calc.hardware import known_accelerator
    from lablib.launch.precision import missing_for_float8
    from lablib.launch.records import gpu_topology, host_rates, kernel_log, while_busy

    count = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(i) for i in range(count)]
    gpu = known_accelerator(properties[0].name)
    # nvidia-smi shows all GPUs; CUDA shows some of them, in an order of its own.
    uuids = [f"GPU-{device.uuid}" for device in properties]
    rows = [query_gpus().get(uuid, {}) for uuid in uuids]
    pcie = [pcie_rate(row) for row in rows]
    driver = rows[0].get("driver_version", "unknown to nvidia-smi")
    findings = [
        Finding("driver", OK, f"{driver}; torch is built for CUDA {torch.version.cuda}"),
        judge_kernel_log(kernel_log()),
    ]
    reduces = None
    if count > 1:
        line = min((rate for rate in pcie if rate), default=None)
        if gpu and gpu.scale_up not in (None, "nvlink-bridge"):  # a bridge is sold apart, and may not be there
            line = gpu.neighbour_link().among(count)
        reduced = attempt("NCCL links", lambda: judge_all_reduce(all_reduces(count), line))
        reduces = reduced.verdict != MISSING
        findings += [judge_peer_access(all(map(all, gpu_topology()["peer_access"]))), reduced]
    findings.append(attempt("host to GPU", lambda: judge_host([host_rates(i) for i in range(count)], pcie)))
    for number, uuid in enumerate(uuids):
        known = known_accelerator(properties[number].name)

        def load(number: int = number, uuid: str = uuid, known: object = known) -> Finding:
            reached, row = while_busy(number, lambda: query_gpus().get(uuid, {}))
            return judge_load(number, row, reached, known.flops.get("bf16") if known else None)

        findings.append(attempt(f"GPU {number} load", load))
    compiled = check_compile()
    machine = GPUMachine(
        [torch.cuda.get_device_capability(i) for i in range(count)],
        min(device.total_memory for device in properties),
        compiled.verdict == OK,
        reduces,
        missing_for_float8(),
    )
    return [*findings, compiled, *judge_labs(machine)]


def attempt(name: str, measure: Callable[[], Finding]) -> Finding:
    """Return a finding, or that it could not be made: what fails here would fail in a lab."""
    try:
        return measure()
    except (RuntimeError, ValueError, OSError) as error:
        from lablib.launch.ranks import own_line

        fix = "return this machine, or use one GPU of it"
        if "no kernel image" in str(error):
            fix = "choose an image whose torch is built for this GPU"
        return Finding(name, MISSING, f"failed: {own_line(error)}", fix)


def query_gpus() -> dict[str, dict[str, str]]:
    """Return `QUERY_FIELDS` of every GPU that nvidia-smi shows, by its UUID, without what a GPU does not have."""
    from lablib.launch.records import nvidia_smi

    text = nvidia_smi(f"--query-gpu={','.join(QUERY_FIELDS)}", "--format=csv,noheader,nounits")
    found = {}
    for values in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(values) == len(QUERY_FIELDS):  # a driver of another age may print otherwise
            row = dict(zip(QUERY_FIELDS, values, strict=True))
            found[row["uuid"]] = {f: v for f, v in row.items() if v and not v.startswith(("[", "N/A"))}
    return found


def pcie_rate(row: Mapping[str, str]) -> float | None:
    """Return bytes per second of a GPU's PCIe link, per direction, or None where it is not known."""
    from lablib.calc.hardware import link

    try:
        sixteen_lanes = link(f"pcie{int(row['pcie.link.gen.max'])}-x16").bandwidth
        return sixteen_lanes * int(row["pcie.link.width.current"]) / 16
    except (KeyError, ValueError):
        return None


def all_reduces(count: int) -> dict[tuple[int, ...], float]:
    """Return bytes per second of an all-reduce by the GPUs that took part, as the slowest of them has it."""
    from lablib.launch.ranks import run_ranks
    from lablib.launch.records import all_reduce_rates

    slowest: dict[tuple[int, ...], float] = {}
    with contextlib.redirect_stdout(sys.stderr):  # what it says about its ranks is no part of --json
        found = run_ranks(all_reduce_rates, count, device="cuda", timeout=300)
    for rates in found:
        for members, rate in rates.items():
            slowest[members] = min(rate, slowest.get(members, rate))
    return slowest


def check_compile() -> Finding:
    """Compile one function and judge what happens; `torch.compile` calls a C compiler and needs Python's header."""
    from lablib.launch.ranks import own_line
    from lablib.launch.records import compile_seconds, missing_for_compile

    try:
        return Finding("torch.compile", OK, f"compiles a function, in {compile_seconds():.1f} s")
    except Exception as error:  # a compiler raises whatever its parts raise
        if missing := missing_for_compile():
            detail = f"fails: {' and '.join(missing)} is missing"
            return Finding("torch.compile", LIMITED, detail, f"apt-get install -y {' '.join(missing)}")
        return Finding("torch.compile", LIMITED, f"fails: {own_line(error)}", "choose an image of kind devel")


def judge_peer_access(reachable: bool) -> Finding:
    """Judge whether all GPUs reach each other's memory."""
    if reachable:
        return Finding("peer access", OK, "every GPU reaches every other's memory")
    fix = "copies go through host memory; set NCCL_P2P_DISABLE=1 if NCCL hangs, or rent another machine"
    return Finding("peer access", LIMITED, "some GPUs do not reach each other's memory", fix)


def judge_all_reduce(rates: Mapping[tuple[int, ...], float], line: float | None) -> Finding:
    """Judge what NCCL gets over the links, by the GPUs that took part, against the slowest link's line rate."""
    members, slowest = min(rates.items(), key=lambda item: item[1])
    among = " and ".join(map(str, members)) if len(members) == 2 else f"0 to {max(members)}"
    detail = f"all-reduce works; {slowest / 1e9:.1f} GB/s between GPU {among}, the slowest"
    detail += f"; the link has {line / 1e9:.0f}" if line else ""
    if line and slowest < MIN_ALL_REDUCE_SHARE * line:
        fix = "NCCL_DEBUG=INFO and nvidia-smi topo -m say which way it goes; plan with the measured number"
        return Finding("NCCL links", LIMITED, detail, fix)
    return Finding("NCCL links", OK, detail)


def judge_host(rates: Sequence[tuple[float, float]], lines: Sequence[float | None]) -> Finding:
    """Judge copies to and from the host, by the slowest GPU, against its PCIe link."""
    number = min(range(len(rates)), key=lambda i: min(rates[i]))
    (there, back), line = rates[number], lines[number]
    detail = f"GPU {number}: {there / 1e9:.1f} GB/s to it, {back / 1e9:.1f} back"
    detail += f"; its PCIe link has {line / 1e9:.1f}" if line else ""
    if line and min(there, back) < MIN_COPY_SHARE * line:
        fix = "offload will be slow; check the lanes with nvidia-smi -q, or rent another machine"
        return Finding("host to GPU", LIMITED, detail, fix)
    return Finding("host to GPU", OK, detail)


def judge_load(number: int, row: Mapping[str, str], reached: float, peak: float | None) -> Finding:
    """Judge a GPU under load: its bf16 FLOP/s, and what nvidia-smi says of its clocks meanwhile."""
    name, detail = f"GPU {number} load", f"{reached / 1e12:.0f} TFLOP/s in bf16"
    detail += f", {reached / peak:.0%} of the peak" if peak else "; its peak is not known here, so no MFU is given"
    bits = int(row.get("clocks_event_reasons.active", "0"), 16)
    reasons = [text for bit, text in THROTTLE_REASONS.items() if bits & bit]
    temperature = int(row.get("temperature.gpu", 0))
    limit, default = (float(row.get(key, 0)) for key in ("power.limit", "power.default_limit"))
    detail += f" at {row['clocks.sm']} MHz, {temperature} C" if "clocks.sm" in row else ""
    detail += f" ({', '.join(reasons)})" if reasons else ""
    if int(row.get("ecc.errors.uncorrected.volatile.total", 0)):
        return Finding(name, MISSING, detail + "; uncorrected memory errors", "return this machine")
    if reasons or temperature >= MAX_CELSIUS:
        return Finding(name, LIMITED, detail, "its numbers are not the GPU's: wait for it to cool, or return it")
    if limit < default:
        fix = "its owner has capped it: plan with the measured rate, or rent another machine"
        return Finding(name, LIMITED, f"{detail}; its limit is {limit:.0f} of {default:.0f} W", fix)
    if peak and reached < 0.5 * peak and not bits & POWER_LIMIT:
        return Finding(name, LIMITED, detail, "look for another job on this GPU with nvidia-smi, or return it")
    return Finding(name, OK, detail)


def judge_kernel_log(log: str | None) -> Finding:
    """Judge the driver's errors in the kernel's log, where it may be read: "NVRM: Xid (PCI:0000:3b:00): 79, pid=7"."""
    if log is None:
        fix = "where you are root on the host: dmesg | grep Xid"
        return Finding("Xid errors", LIMITED, "the kernel's log cannot be read here, so none was seen", fix)
    found = Counter(re.findall(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)", log))
    hardware = Counter({key: times for key, times in found.items() if int(key[1]) in HARDWARE_XIDS})
    if hardware:
        ((address, number), times), *_ = hardware.most_common(1)
        detail = f"Xid {number} on {address}, {times} times: {HARDWARE_XIDS[int(number)]}"
        return Finding("Xid errors", MISSING, detail, "return this machine")
    return Finding("Xid errors", OK, "none of the hardware in the kernel's log")


def judge_disk(rate: float) -> Finding:
    """Judge how fast the disk is written: a checkpoint waits for it."""
    detail = f"writes {rate / 1e9:.2f} GB/s; {60 * rate / 1e9:.0f} GB of checkpoint a minute"
    if rate < MIN_DISK_RATE:
        fix = "save in the background and less often, or set LABLIB_EXPERIMENTS to a local disk"
        return Finding("disk speed", LIMITED, detail, fix)
    return Finding("disk speed", OK, detail)


def judge_shared_memory(size: int | None) -> Finding:
    """Judge the shared memory: NCCL and the workers of a data loader use it."""
    if size is None:
        return Finding("shared memory", LIMITED, "there is no /dev/shm", "set NCCL_SHM_DISABLE=1")
    detail = f"{size / 2**30:.2f} GiB in /dev/shm"
    if size < MIN_SHARED_BYTES:
        fix = "start the container with --ipc=host or --shm-size=8g; else NCCL_SHM_DISABLE=1, and no loader workers"
        return Finding("shared memory", LIMITED, detail, fix)
    return Finding("shared memory", OK, detail)


def judge_files(limit: int | None) -> Finding:
    """Judge how many files and sockets a process may open."""
    if limit is not None and limit < MIN_FILES:
        return Finding("limits", LIMITED, f"{limit:,} open files", f"ulimit -n {16 * MIN_FILES} before the run")
    return Finding("limits", OK, f"{'unlimited' if limit is None else f'{limit:,}'} open files")


@dataclass(frozen=True)
class GPUMachine:
    """Facts about the machine that the labs depend on.

    Attributes:
        capabilities: Compute capability of every GPU.
        memory: Bytes of the smallest one.
        compiles: Whether `torch.compile` works.
        reduces: Whether an all-reduce over all GPUs works; None with one GPU.
        no_float8: Why float8 does not train here, or None.
    """

    capabilities: Sequence[tuple[int, int]]
    memory: int
    compiles: bool
    reduces: bool | None
    no_float8: str | None


def judge_labs(machine: GPUMachine) -> list[Finding]:
    """Return what will become of each lab that has something to measure on a GPU."""
    from lablib.calc.runs import LAB_BUDGETS

    return [_lab(budget.lab, machine) for budget in LAB_BUDGETS]


def _lab(lab: str, machine: GPUMachine) -> Finding:
    name, gpus = f"lab {lab}", len(machine.capabilities)
    if lab in ("06", "11") and machine.reduces is False:
        fix = "CUDA_VISIBLE_DEVICES=0 before the command leaves one GPU, with which it runs"
        return Finding(name, MISSING, f"fails: the {gpus} GPUs cannot reduce together", fix)
    if lab == "08":
        return _lab_08(name, machine)
    if lab in ("09", "11") and min(machine.capabilities) < (8, 0):
        detail = "runs, and its times say little: before capability 8.0 a GPU has no matrix units for bf16"
        return Finding(name, LIMITED, detail, "rent an A10, an L4 or something newer")
    if lab == "11" and not machine.compiles:
        return Finding(name, LIMITED, "runs, and records that its compiled cases did not compile")
    if lab == "11" and gpus == 1:
        return Finding(name, LIMITED, "measures memory, MFU and recomputation; scaling wants two GPUs")
    return Finding(name, OK, "runs")


def _lab_08(name: str, machine: GPUMachine) -> Finding:
    from lablib.calc.hardware import CUDA_CONTEXT
    from lablib.calc.memory.timeline import memory_timeline
    from lablib.toys.transformer import tiny_config

    if machine.no_float8:
        return Finding(name, LIMITED, f"leaves FP8 out: {machine.no_float8}")
    if not machine.compiles:
        return Finding(name, LIMITED, "runs, and records that FP8 did not compile", "see torch.compile")
    model = tiny_config("llama", **FLOAT8_MODEL)
    how = {"recipe": "pure-bf16", "attention": "fused", "implementation": "toy"}
    need, usable = memory_timeline(model, **how, **FLOAT8_BATCH).peak_bytes, machine.memory - CUDA_CONTEXT
    if need > usable:
        detail = f"runs, and records that FP8 takes about {need / 1e9:.0f} GB, more than the GPU's {usable / 1e9:.0f}"
        return Finding(name, LIMITED, detail, "rent a GPU with more memory")
    return Finding(name, OK, "runs")
