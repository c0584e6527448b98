"""`rung doctor --gpu`: what a rented machine gives, measured, with a verdict and a mend for each finding."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from lablib.cli.doctor import LIMITED, MISSING, OK, Finding
from lablib.cli.doctor_judges import (
    judge_all_reduce,
    judge_arch,
    judge_clocks,
    judge_disk,
    judge_driver,
    judge_host,
    judge_limits,
    judge_nccl,
    judge_pairs,
    judge_shared_memory,
    judge_topology,
    judge_xids,
)
from lablib.cli.doctor_labs import Found, judge_compile, judge_labs
from lablib.launch.known_failures import own_line

T = TypeVar("T")
NO_GPU = "no GPU here: what needs one was not looked at; every rung but the measured part of 11 runs without"


def examine_gpu(folder: Path, *, disk_bytes: int = 256 * 2**20) -> list[Finding]:
    """Return every finding about the GPUs and about what a GPU run needs besides them.

    Args:
        folder: Where runs will write.
        disk_bytes: Size of the file that measures the disk.
    """
    import torch

    findings = [Finding("GPU", LIMITED, NO_GPU)] if not torch.cuda.is_available() else _gpus()
    from lablib.launch.machine_probe import disk_rates, limits, shared_memory_bytes

    try:
        disk = judge_disk(disk_rates(folder, disk_bytes))
    except OSError as error:
        mend = "free some room, or set LABLIB_EXPERIMENTS to a folder that can be written"
        disk = Finding("disk speed", LIMITED, f"{folder} cannot be written: {error.strerror}", mend)
    return [
        *findings,
        disk,
        judge_shared_memory(shared_memory_bytes()),
        judge_limits(limits()),
    ]


def _gpus() -> list[Finding]:
    """Look at the GPUs; only here does anything touch them."""
    import torch

    from lablib.calc import nvidia_smi
    from lablib.calc.gpu_names import known_accelerator
    from lablib.launch.machine import smi, topology
    from lablib.launch.machine_probe import host_rates, kernel_log, pair_rate, while_busy

    count = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(i) for i in range(count)]
    names = [f"GPU-{one.uuid}" for one in properties]
    capabilities = [torch.cuda.get_device_capability(i) for i in range(count)]
    rows = in_order(query(smi), names)
    findings = [
        judge_driver(
            rows[0]["driver_version"] if rows else None, nvidia_smi.driver_cuda(smi()), torch.version.cuda
        ),
        judge_arch(capabilities, torch.cuda.get_arch_list()),
        judge_nccl(torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None, count),
        judge_xids(kernel_log()),
    ]
    talks = None
    if count > 1:
        links = topology()
        text = links["matrix"]
        matrix = understood(nvidia_smi.parse_matrix, text) if text else None
        card = known_accelerator(torch.cuda.get_device_name(0))
        scale_up, pcie = card.neighbour_link().bandwidth if card else None, _pcie(rows)
        findings.append(judge_topology(matrix, links["peer_access"]))
        pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
        findings.append(
            tried(
                "GPU to GPU",
                lambda: judge_pairs({pair: pair_rate(*pair) for pair in pairs}, matrix, scale_up, pcie),
            )
        )
        worst = matrix.worst() if matrix else None
        line = scale_up if worst and worst.startswith("NV") else pcie
        reduced = tried("NCCL links", lambda: judge_all_reduce(all_reduces(count), line))
        talks = reduced.verdict != MISSING
        findings.append(reduced)
    lines = [_pcie(rows[i : i + 1]) for i in range(count)]
    findings.append(tried("host to GPU", lambda: judge_host([host_rates(i) for i in range(count)], lines)))
    for number, name in enumerate(names):
        card = known_accelerator(torch.cuda.get_device_name(number))
        peak = card.flops.get("bf16") if card else None

        def load(number: int = number, name: str = name, peak: float | None = peak) -> Finding:
            reached, now = while_busy(number, lambda: in_order(query(smi), [name]))
            return judge_clocks(number, now[0] if now else None, reached, peak)

        findings.append(tried(f"GPU {number} load", load))
    compiled = compiling()
    memory = min(one.total_memory for one in properties)
    found = Found(capabilities, memory, compiled.verdict == OK, talks, missing_float8())
    return [*findings, compiled, *judge_labs(found)]


def tried(name: str, look: Callable[[], Finding]) -> Finding:
    """Return a finding, or that it could not be made: what fails here would fail in a lab.

    Args:
        name: What is looked at.
        look: Makes the finding.
    """
    try:
        return look()
    except (RuntimeError, ValueError, OSError) as error:
        return Finding(
            name, MISSING, f"failed: {own_line(error)}", "return this machine, or use one GPU of it"
        )


def all_reduces(count: int) -> dict[tuple[int, ...], float]:
    """Return bytes per second of an all-reduce by the GPUs that took part, as the slowest of them has it.

    Args:
        count: GPUs.
    """
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
    """Compile one function and judge what happens."""
    from lablib.launch.machine_probe import compile_seconds, lacks_for_compile

    try:
        return judge_compile([], compile_seconds())
    except Exception as error:  # a compiler raises whatever its parts raise
        return judge_compile(lacks_for_compile(), None, own_line(error))


def missing_float8() -> str | None:
    """Return why float8 does not train here, or None."""
    from lablib.launch.float8 import missing

    return missing()


def in_order(rows: list[dict[str, str | None]], uuids: Sequence[str]) -> list[dict[str, str | None]]:
    """Return the rows of these GPUs, in this order: nvidia-smi shows all of them, CUDA some, in an order of its own.

    Args:
        rows: From `query`.
        uuids: As nvidia-smi writes them.
    """
    by_uuid = {row["uuid"]: row for row in rows}
    return [by_uuid[uuid] for uuid in uuids if uuid in by_uuid]


def query(smi: Callable[..., str]) -> list[dict[str, str | None]]:
    """Ask `nvidia-smi` for the fields of every GPU; an older driver has another name for the clock reasons.

    Args:
        smi: Returns what `nvidia-smi` prints for arguments.
    """
    from lablib.calc.nvidia_smi import FIELDS, REASONS, REASONS_BEFORE_535, parse_query

    for reasons in (REASONS, REASONS_BEFORE_535):
        text = smi(f"--query-gpu={','.join([*FIELDS, reasons])}", "--format=csv,noheader,nounits")
        if text:
            return understood(lambda text: parse_query(text, [*FIELDS, "reasons"]), text) or []
    return []


def understood(parse: Callable[[str], T], text: str) -> T | None:
    """Return what a program printed, read, or None where it prints in a way that nobody has seen yet.

    Args:
        parse: Reads the text, or raises a ValueError.
        text: What was printed.
    """
    try:
        return parse(text)
    except ValueError:
        return None


def _pcie(rows: Sequence[Mapping[str, str | None]]) -> float | None:
    from lablib.calc.nvidia_smi import pcie_bandwidth

    rates = [
        pcie_bandwidth(int(row["pcie.link.gen.max"]), int(row["pcie.link.width.current"]))
        for row in rows
        if row["pcie.link.gen.max"]
        and row["pcie.link.width.current"]
        and 1 <= int(row["pcie.link.gen.max"]) <= 5
    ]
    return min(rates, default=None)
