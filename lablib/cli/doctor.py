"""`rung doctor`: what this machine has, what will and will not run on it, and what to do about it.

With `--gpu` it measures what a rented machine gives. Each finding has a verdict and, where it is bad, a remedy.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lablib import course_folder
from lablib.calc.errors import json_text, read_json
from lablib.cli import doctor_gpu
from lablib.cli.doctor_gpu import LIMITED, MISSING, OK, Finding
from lablib.cli.room import site, writable_home

RENT = "rent GPUs, then make setup-gpu there"
DISK_GB = 5  # the environment with a CPU torch takes about 3 GB, the site and recorded runs the rest


def doctor(
    gpu: Annotated[bool, typer.Option("--gpu", help="Measure GPUs, links, disk and limits, too.")] = False,
    workshop: Annotated[
        bool, typer.Option("--workshop", help="One sentence: whether this machine is ready for a class, or what to do.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what this machine has, what will run here, and what to do where something will not."""
    if workshop:
        ready, sentence = workshop_verdict()
        typer.echo(sentence)
        raise typer.Exit(0 if ready else 1)
    findings = examine()
    if gpu and not any(finding.verdict == MISSING for finding in findings):
        findings += doctor_gpu.examine_gpu(Path.cwd())
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


def workshop_verdict() -> tuple[bool, str]:
    """Return whether this machine is ready for a class, and a sentence that names its Python.

    What the labs do is done once: ranks talk, a kernel runs a cell. A bundle's room.json names the room's Python.
    """
    here = "{}.{}.{}".format(*sys.version_info[:3])
    room = course_folder() / "room.json"
    try:
        wanted = str(read_json(room)["python"]) if room.exists() else ""
    except (ValueError, KeyError, TypeError):
        return False, f"Not ready: {room} is damaged: unpack it again"
    if wanted and not here.startswith(f"{wanted}."):
        return False, f"Not ready: this is Python {here} and the room's is {wanted}: python{wanted} install.py"
    broken = [finding for finding in examine() if finding.verdict == MISSING]
    broken += [finding for finding in [check_disk(Path.cwd()), check_tools()] if finding.verdict == LIMITED]
    if broken:
        fix = f": {broken[0].fix}" if broken[0].fix else ""
        return False, f"Not ready: Python {here}, {broken[0].name}: {broken[0].detail}{fix}"
    try:
        sums = _try_ranks()
        _try_kernel()
    except Exception as error:  # whatever it is, the instructor has a week to hear of it
        text = getattr(error, "traceback", "").strip().splitlines()[-1:] or str(error).strip().splitlines()
        first = (text or [type(error).__name__])[0]
        return False, f"Not ready: Python {here}, {first}: send this line to your instructor"
    book = "" if (site() / "index.html").exists() else ", without the book's pages"
    return True, f"Ready: Python {here}, torch {_torch_version()}, {len(sums)} ranks talk, notebooks run{book}."


def _try_ranks() -> list[float]:
    from lablib.launch.ranks import run_ranks

    def add_up() -> float:
        import torch
        import torch.distributed as dist

        mine = torch.full((1,), float(dist.get_rank() + 1))
        dist.all_reduce(mine)
        return mine.item()

    sums = run_ranks(add_up, 4, timeout=120)
    if sums != [10.0] * 4:
        raise ValueError(f"the sum over four ranks is {sums}")
    return sums


def _try_kernel() -> None:
    from lablib.launch.lab_runs import run_cells

    os.environ.update(writable_home())
    (cell,), stopped = run_cells(["import lablib.launch.ranks"], Path.cwd(), timeout=300)
    failed = [output for output in cell.get("outputs", []) if output["output_type"] == "error"]
    if stopped or failed:
        raise ValueError(f"a notebook's cell failed: {stopped or failed[0]['evalue']}")


def _torch_version() -> str:
    import torch

    return torch.__version__


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
            fix = "choose an image with a torch for the CUDA that nvidia-smi names, or a machine with a newer driver"
            return Finding("GPUs", LIMITED, f"torch is built for CUDA {built} and sees none", fix)
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
