"""Read what `nvidia-smi` and the driver print. Only text comes in, so all of it is tested on machines without a GPU.

Sources: nvidia-smi's own help and manual page; NVML API reference, NvmlClocksEventReasons; NVIDIA's catalogue of Xid
errors (docs.nvidia.com/deploy/xid-errors).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence

#: What `rung doctor --gpu` asks for.
QUERY_FIELDS = (
    "uuid", "driver_version", "pcie.link.gen.max", "pcie.link.width.current", "temperature.gpu", "power.limit",
    "power.default_limit", "clocks.sm", "ecc.errors.uncorrected.volatile.total", "clocks_event_reasons.active",
)  # fmt: skip

#: What holds clocks down and makes a measurement wrong, by bit. Others, such as idle, are a healthy GPU's.
HARMFUL = {
    0x2: "clocks set by hand",
    0x8: "hardware slowdown",
    0x20: "too hot, slowed by software",
    0x40: "too hot, slowed by hardware",
    0x80: "power brake",
}
#: At its own power limit a GPU that is sold with little of it, such as A10 and L4, is slow and healthy.
POWER_LIMIT = 0x4

#: What a cell of the matrix of links says, from the best link to the worst.
LINKS = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the CPU's PCIe bridge",
    "NODE": "PCIe bridges of one NUMA node",
    "SYS": "the link between CPU sockets",
}
#: The driver's errors that no program causes, by number.
XIDS = {
    48: "uncorrectable memory error",
    62: "its controller halted",
    64: "a bad memory row could not be replaced",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    95: "memory error that was not contained",
    119: "its controller does not answer",
    120: "its controller failed",
}


def parse_query(text: str, fields: Sequence[str] = QUERY_FIELDS) -> list[dict[str, str]]:
    """Read `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`: values by field for every GPU.

    A field that a GPU does not have, such as "[N/A]", is left out.
    """
    rows = []
    for line in csv.reader(io.StringIO(text), skipinitialspace=True):
        if line and len(line) != len(fields):
            raise ValueError(f"nvidia-smi printed {len(line)} values for {len(fields)} fields: {', '.join(line)}")
        if line:
            row = {field: value.strip() for field, value in zip(fields, line, strict=True)}
            rows.append({f: v for f, v in row.items() if v and not v.startswith(("[", "N/A"))})
    return rows


def driver_cuda(text: str) -> tuple[int, int] | None:
    """Return the newest CUDA that the driver runs, from the head that plain `nvidia-smi` prints."""
    found = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def hardware_errors(log: str) -> dict[tuple[str, int], int]:
    """Count the Xid errors of the hardware in the kernel's log, by PCI address and number.

    A line is "NVRM: Xid (PCI:0000:3b:00): 79, pid=1896, GPU has fallen off the bus".
    """
    found: dict[tuple[str, int], int] = {}
    for address, number in re.findall(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)", log):
        if int(number) in XIDS:
            found[address, int(number)] = found.get((address, int(number)), 0) + 1
    return found


def worst_link(text: str) -> str | None:
    """Return the slowest link between two GPUs in `nvidia-smi topo -m`, such as "NV18" or "PHB"; None for one GPU.

    A ring over all GPUs cannot avoid it.
    """
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    head = next((line for line in lines if re.match(r"\s+GPU\d+\b", line)), "")
    count = sum(bool(re.fullmatch(r"GPU\d+", name)) for name in head.split())
    rows = [line.split()[1 : 1 + count] for line in lines if re.match(r"GPU\d+\s", line)]
    if not count or len(rows) != count:
        raise ValueError(f"`nvidia-smi topo -m` printed {len(rows)} rows for {count} GPUs")

    def slowness(code: str) -> tuple[int, int]:
        lanes = re.fullmatch(r"NV([1-9]\d*)", code)
        if not lanes and (code == "NV" or code not in LINKS):
            raise ValueError(
                f"`nvidia-smi topo -m` printed the link {code!r}; known are NV#, {', '.join(list(LINKS)[1:])}"
            )
        return list(LINKS).index("NV" if lanes else code), -int(lanes[1]) if lanes else 0

    codes = [code for a, row in enumerate(rows) for b, code in enumerate(row) if a != b]
    return max(codes, key=slowness, default=None)


def link_text(code: str) -> str:
    """Return a link in words: "NV18" is "NVLink, 18 links"."""
    return f"NVLink, {code[2:]} links" if code.startswith("NV") else LINKS[code]


def pcie_bandwidth(generation: int, lanes: int) -> float:
    """Return bytes per second of a PCIe link, per direction, before protocol overhead.

    8, 16 and 32 GT/s a lane at 128 of 130 bits for generations 3 to 5, 5 and 2.5 GT/s at 8 of 10 bits before.
    """
    rates = {1: 2.5e9 * 0.8, 2: 5e9 * 0.8, 3: 8e9 * 128 / 130, 4: 16e9 * 128 / 130, 5: 32e9 * 128 / 130}
    if generation not in rates:
        raise ValueError(f"PCIe generation {generation} is not in the table; it has 1 to 5")
    return rates[generation] * lanes / 8
