"""`rung doctor`: what this machine has, what will and will not run on it, and what to do about it.

With `--gpu` it measures what a rented machine gives. Each finding has a verdict and, where it is bad, a remedy.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from lablib.calc.errors import json_text
from lablib.cli.nvidia_smi import (
    HARMFUL,
    POWER_LIMIT,
    QUERY_FIELDS,
    XIDS,
    driver_cuda,
    hardware_errors,
    link_text,
    parse_query,
    pcie_bandwidth,
    worst_link,
)

OK, LIMITED, MISSING = "ok", "limited", "missing"
RENT = "rent GPUs, then make setup-gpu there"
DISK_GB = 5  # the environment with a CPU torch takes about 3 GB, the site and recorded runs the rest


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


def doctor(
    gpu: Annotated[bool, typer.Option("--gpu", help="Measure GPUs, links, disk and limits, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what this machine has, what will run here, and what to do where something will not."""
    findings = examine()
    if gpu and not any(finding.verdict == MISSING for finding in findings):
        findings += examine_gpu(Path.cwd())
    if as_json:
        # `mend` is the older name of `fix`, for programs that read it.
        typer.echo(json_text([asdict(finding) | {"mend": finding.fix} for finding in findings]))
    else:
        for finding in findings:
            typer.echo(f"{finding.name:<14}{finding.verdict:<9}{_wrapped(finding.detail)}")
            if finding.fix:
                typer.echo(f"{'':<23}-> {_wrapped(finding.fix, 26)}")
    if any(finding.verdict == MISSING for finding in findings):
        raise typer.Exit(1)


def _wrapped(text: str, column: int = 23) -> str:
    """Break a text that begins at a column so that the terminal's 80 hold it."""
    return ("\n" + " " * column).join(textwrap.wrap(text, 80 - column))


def examine() -> list[Finding]:
    """Return every finding, in the order of what depends on what."""
    findings = [check_python(), check_machine(), check_host_name(), check_disk(Path.cwd())]
    torch_finding = check_torch()
    findings.append(torch_finding)
    if torch_finding.verdict != MISSING:
        findings += [check_gloo(), check_gpus(), check_nccl()]
    findings.append(check_tools())
    return [*findings, *verdicts(findings)]


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Finding:
    """Judge the Python version: 3.11 to 3.13."""
    text = ".".join(map(str, version))
    if (3, 11) <= version[:2] <= (3, 13):
        return Finding("Python", OK, text)
    return Finding("Python", MISSING, f"{text}; the course needs 3.11, 3.12 or 3.13", "make book PYTHON=python3.12")


def check_machine(system: str = platform.system()) -> Finding:
    """Judge the operating system: Linux and macOS run everything, Windows through WSL."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    detail = f"{system}, {cores} CPU cores"
    if system == "Windows":
        return Finding("machine", MISSING, detail, "use WSL or the devcontainer")
    if cores < 2:
        return Finding("machine", LIMITED, detail, "labs run, but overlap cannot be measured on one core")
    return Finding("machine", OK, detail)


def check_host_name() -> Finding:
    """Judge this machine's own name, at which the ranks of a torchrun that is started by hand meet."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        detail = f"{name} has no address: a torchrun started by hand waits for it until its timeout, the labs do not"
        return Finding(
            "host name", LIMITED, detail, f'torchrun --local-addr 127.0.0.1, or a line "127.0.1.1 {name}" in /etc/hosts'
        )
    return Finding("host name", OK, name)


def check_disk(folder: Path, free: int | None = None) -> Finding:
    """Judge the free disk space where labs write."""
    free = shutil.disk_usage(folder).free if free is None else free
    detail = f"{free / 1e9:.0f} GB free"
    if free < DISK_GB * 1e9:
        return Finding("disk", LIMITED, detail, f"free {DISK_GB} GB, or set LABLIB_EXPERIMENTS to another disk")
    return Finding("disk", OK, detail)


def check_torch() -> Finding:
    """Judge torch: there, new enough, and importable."""
    fix = "make book, or pip install -c constraints.txt -e '.[labs]'"
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", MISSING, "not installed: only the calculators run", fix)
    try:
        import torch
    except (ImportError, OSError) as error:  # a wheel for another CUDA or another CPU
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return Finding("torch", MISSING, f"does not import: {reason}", fix)
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < (2, 11):
        return Finding("torch", MISSING, f"{torch.__version__}; the course needs 2.11", fix)
    return Finding("torch", OK, torch.__version__)


def check_gloo() -> Finding:
    """Judge gloo by a real all-reduce of one rank, which needs a host name that resolves."""
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_gloo_available()):
        return Finding("gloo", MISSING, "this torch was built without it", "install a wheel from pytorch.org")
    try:
        group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        group.allreduce([torch.ones(1)]).wait()
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        return Finding("gloo", MISSING, first, "set GLOO_SOCKET_IFNAME=lo, or lo0 on macOS")
    return Finding("gloo", OK, "all-reduce works; ranks of the CPU labs talk through it")


def check_gpus() -> Finding:
    """Judge the CUDA devices: none, one, or several."""
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        if built and shutil.which("nvidia-smi"):
            return Finding("GPUs", LIMITED, f"torch is built for CUDA {built} and sees none", "update the driver")
        if shutil.which("nvidia-smi"):
            return Finding("GPUs", LIMITED, "there may be one, but this torch is for CPU", "make setup-gpu")
        return Finding("GPUs", LIMITED, "none", "rent some for rung 11; every other rung runs on CPU")
    names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    detail = ", ".join(f"{device.name} {device.total_memory / 2**30:.0f} GiB" for device in names)
    if len(names) == 1:
        return Finding("GPUs", OK, f"1: {detail}; scaling wants two")
    return Finding("GPUs", OK, f"{len(names)}: {detail}")


def check_nccl() -> Finding:
    """Judge NCCL, which GPU jobs use between ranks."""
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return Finding("NCCL", LIMITED, "not in this torch; GPU ranks cannot talk", "only GPU runs need it")
    if not torch.cuda.is_available():
        return Finding("NCCL", LIMITED, "there, but without a GPU it has nothing to do", "only GPU runs need it")
    return Finding("NCCL", OK, ".".join(map(str, torch.cuda.nccl.version())))


def check_tools() -> Finding:
    """Judge the packages that labs and their runner need."""
    needed = ("cloudpickle", "matplotlib", "ipykernel", "papermill", "accelerate", "jupyterlab")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        return Finding("packages", LIMITED, "missing: " + ", ".join(missing), "pip install -e '.[labs]'")
    return Finding("packages", OK, f"papermill {importlib.metadata.version('papermill')} and all others")


def verdicts(findings: list[Finding]) -> list[Finding]:
    """Return what will and will not run here, from the findings."""
    verdict = {finding.name: finding.verdict for finding in findings}
    broken = [name for name, value in verdict.items() if value == MISSING]
    repair = "fix " + ", ".join(broken) if broken else ""
    runs = [Finding("calculators", OK, "rung memory, rung models and the chapters' numbers")]
    if broken:
        runs.append(Finding("CPU labs", MISSING, "will not run", repair))
    elif verdict.get("packages") == LIMITED:
        runs.append(Finding("CPU labs", LIMITED, "lablib runs; notebooks need the packages above"))
    else:
        runs.append(Finding("CPU labs", OK, "every lab runs, with real ranks on this CPU"))
    several = verdict.get("GPUs") == OK and verdict.get("NCCL") == OK and not broken
    if several:
        runs.append(Finding("GPU labs", OK, "run, one rank per GPU"))
    else:
        runs.append(Finding("GPU labs", LIMITED, "replay recorded runs, where there are any", repair or RENT))
    return runs


NO_GPU = "no GPU here: what needs one was not looked at; every rung but the measured part of 11 runs without"
#: A copy that gets less than this share of its link's line rate has a cause worth finding.
GOOD = 0.6
#: NCCL on an A100 node gets 0.78 of NVLink's line rate in an all-reduce (see `lablib.calc.hardware`); PCIe gives less.
REDUCED = 0.4
FILES, SHARED, DISK_WRITE, HOT = 4096, 2**30, 200e6, 85
#: The model and the batch of lab 08's cell for a GPU; tests/test_doctor_gpu.py holds them to the lab.
FLOAT8_MODEL = {"num_layers": 4, "hidden": 4096, "max_positions": 2048}
FLOAT8_BATCH = {"micro_batch": 8, "seq": 2048}


def examine_gpu(folder: Path, *, disk_bytes: int = 256 * 2**20) -> list[Finding]:
    """Return every finding about the GPUs, and about what a GPU run needs besides them."""
    import torch

    from lablib.launch.records import disk_rate

    findings = _gpus() if torch.cuda.is_available() else [Finding("GPU", LIMITED, NO_GPU)]
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


def _gpus() -> list[Finding]:
    """Look at the GPUs; only here does anything touch them."""
    import torch

    from lablib.calc.hardware import known_accelerator
    from lablib.launch.precision import missing_for_float8
    from lablib.launch.records import gpu_topology, host_rates, kernel_log, while_busy
    from lablib.launch.records import nvidia_smi as smi

    count = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(i) for i in range(count)]
    uuids = [f"GPU-{one.uuid}" for one in properties]
    capabilities = [torch.cuda.get_device_capability(i) for i in range(count)]
    # nvidia-smi shows all GPUs; CUDA shows some of them, in an order of its own.
    rows = [query(smi).get(uuid, {}) for uuid in uuids]
    pcie = [pcie_rate(row) for row in rows]
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    findings = [
        judge_driver(rows[0].get("driver_version"), driver_cuda(smi()), torch.version.cuda),
        judge_arch(capabilities, torch.cuda.get_arch_list()),
        judge_nccl(nccl, count),
        judge_xids(kernel_log()),
    ]
    talks = None
    if count > 1:
        links = gpu_topology()
        try:
            worst = worst_link(links["matrix"])
        except ValueError:  # of a driver that prints otherwise
            worst = None
        gpu = known_accelerator(torch.cuda.get_device_name(0))
        line = min((rate for rate in pcie if rate), default=None)
        if worst and worst.startswith("NV"):
            line = gpu.neighbour_link().among(count) if gpu else None
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
    labs = judge_labs(Found(capabilities, memory, compiled.verdict == OK, talks, missing_for_float8()))
    return [*findings, compiled, *labs]


def tried(name: str, look: Callable[[], Finding]) -> Finding:
    """Return a finding, or that it could not be made: what fails here would fail in a lab."""
    try:
        return look()
    except (RuntimeError, ValueError, OSError) as error:
        from lablib.launch.ranks import own_line

        return Finding(name, MISSING, f"failed: {own_line(error)}", "return this machine, or use one GPU of it")


def query(smi: Callable[..., str]) -> dict[str, dict[str, str]]:
    """Ask `nvidia-smi` for the fields of every GPU, by its UUID; nothing from one that prints otherwise."""
    try:
        text = smi(f"--query-gpu={','.join(QUERY_FIELDS)}", "--format=csv,noheader,nounits")
        return {row["uuid"]: row for row in parse_query(text) if "uuid" in row}
    except ValueError:
        return {}


def pcie_rate(row: Mapping[str, str]) -> float | None:
    """Return bytes per second of a GPU's PCIe link, per direction, or None where it is not known."""
    try:
        return pcie_bandwidth(int(row["pcie.link.gen.max"]), int(row["pcie.link.width.current"]))
    except (KeyError, ValueError):
        return None


def all_reduces(count: int) -> dict[tuple[int, ...], float]:
    """Return bytes per second of an all-reduce by the GPUs that took part, as the slowest of them has it."""
    from lablib.launch.ranks import run_ranks
    from lablib.launch.records import all_reduce_rates

    seen: dict[tuple[int, ...], float] = {}
    with contextlib.redirect_stdout(sys.stderr):  # what it says about its ranks is no part of --json
        found = run_ranks(all_reduce_rates, count, device="cuda", timeout=300)
    for rates in found:
        for members, rate in rates.items():
            seen[members] = min(rate, seen.get(members, rate))
    return seen


def compiling() -> Finding:
    """Compile one function and judge what happens; `torch.compile` calls a C compiler and needs Python's header."""
    from lablib.launch.ranks import own_line
    from lablib.launch.records import compile_seconds, lacks_for_compile

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
        return Finding("driver", MISSING, "this torch is for the CPU", "make setup-gpu, with the image's own torch")
    if newest is None:
        detail = f"torch wants CUDA {built}; nvidia-smi does not say what the driver runs"
        return Finding("driver", LIMITED, detail)
    wanted = tuple(int(part) for part in built.split(".")[:2])
    detail = f"{driver} runs CUDA up to {newest[0]}.{newest[1]}; torch wants {built}"
    if newest[0] < wanted[0]:
        fix = f"choose an image with a torch for CUDA {newest[0]}, or a machine with a newer driver"
        return Finding("driver", MISSING, detail, fix)
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


def judge_topology(worst: str | None, reachable: bool) -> Finding:
    """Judge what connects the GPUs, by the slowest link and by whether all reach each other's memory."""
    access = f"{'every GPU reaches every other' if reachable else 'some GPUs do not reach each other'}'s memory"
    if worst is None:
        return Finding("topology", LIMITED, f"nvidia-smi shows no matrix; {access}")
    detail = f"the slowest pair is joined by {link_text(worst)} ({worst}); {access}"
    if worst.startswith("NV"):
        return Finding("topology", OK, detail)
    fix = "expect PCIe speed: accumulate gradients, or rent GPUs with NVLink"
    if worst == "SYS":
        fix = "choose GPUs of one socket with CUDA_VISIBLE_DEVICES, or rent GPUs with NVLink"
    if not reachable:
        fix = "copies go through host memory; set NCCL_P2P_DISABLE=1 if NCCL hangs, or rent another machine"
    return Finding("topology", LIMITED, detail, fix)


def judge_all_reduce(rates: Mapping[tuple[int, ...], float], line: float | None) -> Finding:
    """Judge what NCCL gets over the links, by the GPUs that took part, against the slowest link's line rate."""
    members, slowest = min(rates.items(), key=lambda item: item[1])
    among = " and ".join(map(str, members)) if len(members) == 2 else f"0 to {max(members)}"
    detail = f"all-reduce works; {slowest / 1e9:.1f} GB/s between GPU {among}, the slowest"
    detail += f"; the link has {line / 1e9:.0f}" if line else ""
    if line and slowest < REDUCED * line:
        fix = "NCCL_DEBUG=INFO says which way it goes; plan with the measured number"
        return Finding("NCCL links", LIMITED, detail, fix)
    return Finding("NCCL links", OK, detail)


def judge_host(rates: Sequence[tuple[float, float]], lines: Sequence[float | None]) -> Finding:
    """Judge copies to and from the host, by the slowest GPU, against its PCIe link."""
    number = min(range(len(rates)), key=lambda i: min(rates[i]))
    (there, back), line = rates[number], lines[number]
    detail = f"GPU {number}: {there / 1e9:.1f} GB/s to it, {back / 1e9:.1f} back"
    detail += f"; its PCIe link has {line / 1e9:.1f}" if line else ""
    if line and min(there, back) < GOOD * line:
        fix = "offload will be slow; check the lanes with nvidia-smi -q, or rent another machine"
        return Finding("host to GPU", LIMITED, detail, fix)
    return Finding("host to GPU", OK, detail)


def judge_load(number: int, row: Mapping[str, str], reached: float, peak: float | None) -> Finding:
    """Judge a GPU under load: its bf16 FLOP/s, and what nvidia-smi says of its clocks meanwhile."""
    name, detail = f"GPU {number} load", f"{reached / 1e12:.0f} TFLOP/s in bf16"
    detail += f", {reached / peak:.0%} of the peak" if peak else "; its peak is not known here, so no MFU is given"
    bits = int(row.get("clocks_event_reasons.active", "0"), 16)
    reasons = [text for bit, text in HARMFUL.items() if bits & bit]
    temperature = int(row.get("temperature.gpu", 0))
    limit, default = (float(row.get(key, 0)) for key in ("power.limit", "power.default_limit"))
    detail += f" at {row['clocks.sm']} MHz, {temperature} C" if "clocks.sm" in row else ""
    detail += f" ({', '.join(reasons)})" if reasons else ""
    if int(row.get("ecc.errors.uncorrected.volatile.total", 0)):
        return Finding(name, MISSING, detail + "; uncorrected memory errors", "return this machine")
    if reasons or temperature >= HOT:
        return Finding(name, LIMITED, detail, "its numbers are not the GPU's: wait for it to cool, or return it")
    if limit < default:
        fix = "its owner has capped it: plan with the measured rate, or rent another machine"
        return Finding(name, LIMITED, f"{detail}; its limit is {limit:.0f} of {default:.0f} W", fix)
    if peak and reached < 0.5 * peak and not bits & POWER_LIMIT:
        return Finding(name, LIMITED, detail, "look for another job on this GPU with nvidia-smi, or return it")
    return Finding(name, OK, detail)


def judge_xids(log: str | None) -> Finding:
    """Judge what the driver has written about errors since the machine was started; None cannot be read."""
    if log is None:
        fix = "where you are root on the host: dmesg | grep Xid"
        return Finding("Xid errors", LIMITED, "the kernel's log cannot be read here, so none was seen", fix)
    found = hardware_errors(log)
    if found:
        (address, number), times = max(found.items(), key=lambda item: item[1])
        detail = f"Xid {number} on {address}, {times} times: {XIDS[number]}"
        return Finding("Xid errors", MISSING, detail, "return this machine")
    return Finding("Xid errors", OK, "none of the hardware in the kernel's log")


def judge_disk(rate: float) -> Finding:
    """Judge how fast the disk is written: a checkpoint waits for it."""
    detail = f"writes {rate / 1e9:.2f} GB/s; {60 * rate / 1e9:.0f} GB of checkpoint a minute"
    if rate < DISK_WRITE:
        fix = "save in the background and less often, or set LABLIB_EXPERIMENTS to a local disk"
        return Finding("disk speed", LIMITED, detail, fix)
    return Finding("disk speed", OK, detail)


def judge_shared_memory(size: int | None) -> Finding:
    """Judge the shared memory: NCCL and the workers of a data loader use it."""
    if size is None:
        return Finding("shared memory", LIMITED, "there is no /dev/shm", "set NCCL_SHM_DISABLE=1")
    detail = f"{size / 2**30:.2f} GiB in /dev/shm"
    if size < SHARED:
        fix = "start the container with --ipc=host or --shm-size=8g; else NCCL_SHM_DISABLE=1, and no loader workers"
        return Finding("shared memory", LIMITED, detail, fix)
    return Finding("shared memory", OK, detail)


def judge_files(limit: int | None) -> Finding:
    """Judge how many files and sockets a process may open."""
    if limit is not None and limit < FILES:
        return Finding("limits", LIMITED, f"{limit:,} open files", f"ulimit -n {16 * FILES} before the run")
    return Finding("limits", OK, f"{'unlimited' if limit is None else f'{limit:,}'} open files")


@dataclass(frozen=True)
class Found:
    """Facts about the machine that the labs depend on.

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
    from lablib.calc.runs import LAB_BUDGETS

    return [_lab(budget.lab, found) for budget in LAB_BUDGETS]


def _lab(lab: str, found: Found) -> Finding:
    name, gpus = f"lab {lab}", len(found.capabilities)
    if lab in ("06", "11") and found.talks is False:
        fix = "CUDA_VISIBLE_DEVICES=0 before the command leaves one GPU, with which it runs"
        return Finding(name, MISSING, f"fails: the {gpus} GPUs cannot reduce together", fix)
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
    from lablib.calc.hardware import CUDA_CONTEXT
    from lablib.calc.memory.timeline import memory_timeline
    from lablib.toys.transformer import tiny_config

    if found.no_float8:
        return Finding(name, LIMITED, f"leaves FP8 out: {found.no_float8}")
    if not found.compiles:
        return Finding(name, LIMITED, "runs, and records that FP8 did not compile", "see torch.compile")
    model = tiny_config("llama", **FLOAT8_MODEL)
    how = {"recipe": "pure-bf16", "attention": "fused", "implementation": "toy"}
    need, usable = memory_timeline(model, **how, **FLOAT8_BATCH).peak_bytes, found.memory - CUDA_CONTEXT
    if need > usable:
        detail = f"runs, and records that FP8 takes about {need / 1e9:.0f} GB, more than the GPU's {usable / 1e9:.0f}"
        return Finding(name, LIMITED, detail, "rent a GPU with more memory")
    return Finding(name, OK, "runs")
