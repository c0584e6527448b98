"""`rung doctor --gpu`: what a rented machine gives, measured, with a verdict and a mend for each finding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lablib.cli.doctor import LIMITED, Finding
from lablib.cli.doctor_judges import (
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
)

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
    from lablib.launch.machine_probe import host_rates, pair_rate, while_busy

    count = torch.cuda.device_count()
    names = [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(count)]
    rows = in_order(query(smi), names)
    findings = [
        judge_driver(
            rows[0]["driver_version"] if rows else None, nvidia_smi.driver_cuda(smi()), torch.version.cuda
        ),
        judge_arch([torch.cuda.get_device_capability(i) for i in range(count)], torch.cuda.get_arch_list()),
        judge_nccl(torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None, count),
    ]
    if count > 1:
        links = topology()
        text = links["matrix"]
        matrix = nvidia_smi.parse_matrix(text) if text else None
        rates = {(a, b): pair_rate(a, b) for a in range(count) for b in range(count) if a != b}
        card = known_accelerator(torch.cuda.get_device_name(0))
        findings += [
            judge_topology(matrix, links["peer_access"]),
            judge_pairs(rates, matrix, card.neighbour_link().bandwidth if card else None, _pcie(rows)),
        ]
    findings.append(
        judge_host([host_rates(i) for i in range(count)], [_pcie(rows[i : i + 1]) for i in range(count)])
    )
    for number, name in enumerate(names):
        card = known_accelerator(torch.cuda.get_device_name(number))
        reached, now = while_busy(number, lambda name=name: in_order(query(smi), [name]))
        peak = card.flops.get("bf16") if card else None
        findings.append(judge_clocks(number, now[0] if now else None, reached, peak))
    return findings


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
            return parse_query(text, [*FIELDS, "reasons"])
    return []


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
