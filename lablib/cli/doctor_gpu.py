"""`rung doctor --gpu`: what a rented machine really gives, each with a verdict and what to do about it.

What is installed, from driver to libraries, is what `python -m torch.utils.collect_env` prints.

Sources: nvidia-smi's manual page; NVML API reference, NvmlClocksEventReasons.
"""

from __future__ import annotations

import contextlib
import csv
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
MIN_FILES, MIN_SHARED_BYTES, MAX_CELSIUS = 4096, 2**30, 85
QUERY_FIELDS = (
    "uuid", "pcie.link.gen.max", "pcie.link.width.current", "temperature.gpu", "power.limit",
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


def examine_gpu() -> list[Finding]:
    """Return every finding about the GPUs, and about what a GPU run needs besides them."""
    import torch

    findings = _examine_gpus() if torch.cuda.is_available() else [Finding("GPU", LIMITED, NO_GPU)]
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return [
        *findings,
        judge_shared_memory(shared and shared.f_blocks * shared.f_frsize),
        judge_files(None if files == resource.RLIM_INFINITY else files),
    ]


def _examine_gpus() -> list[Finding]:
    import torch

    from lablib.calc.hardware import known_accelerator
    from lablib.launch.records import gpu_topology, host_rates, while_busy

    count = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(i) for i in range(count)]
    gpu = known_accelerator(properties[0].name)
    # nvidia-smi shows all GPUs; CUDA shows some of them, in an order of its own.
    uuids = [f"GPU-{device.uuid}" for device in properties]
    rows = [query_gpus().get(uuid, {}) for uuid in uuids]
    pcie = [pcie_rate(row) for row in rows]
    findings = []
    if count > 1:
        line = min((rate for rate in pcie if rate), default=None)
        if gpu and gpu.scale_up not in (None, "nvlink-bridge"):  # a bridge is sold apart, and may not be there
            line = gpu.neighbour_link().among(count)
        findings.append(judge_peer_access(all(map(all, gpu_topology()["peer_access"]))))
        findings.append(attempt("NCCL links", lambda: judge_all_reduce(all_reduces(count), line)))
    findings.append(attempt("host to GPU", lambda: judge_host([host_rates(i) for i in range(count)], pcie)))
    for number, uuid in enumerate(uuids):
        known = known_accelerator(properties[number].name)

        def load(number: int = number, uuid: str = uuid, known: object = known) -> Finding:
            reached, row = while_busy(number, lambda: query_gpus().get(uuid, {}))
            return judge_load(number, row, reached, known.flops.get("bf16") if known else None)

        findings.append(attempt(f"GPU {number} load", load))
    return [*findings, check_compile()]


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
