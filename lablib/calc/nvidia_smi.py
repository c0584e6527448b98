"""What `nvidia-smi` prints, read: the query as CSV, the head with the driver's CUDA, the matrix of links, clock reasons.

Only text comes in, so all of it can be tried on a machine without a GPU.

Beside it the driver's errors in the kernel's log, which are called Xid.

Sources: nvidia-smi's own help and manual page for fields and links; NVML API reference, NvmlClocksEventReasons, for bits.
Chapter: book/11_practical_fsdp.md
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

#: What `doctor --gpu` asks for. The older name of a field comes second, where there is one.
FIELDS = (
    "index",
    "uuid",
    "name",
    "driver_version",
    "memory.total",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "temperature.gpu",
    "power.draw",
    "power.limit",
    "power.default_limit",
    "clocks.sm",
    "clocks.max.sm",
    "ecc.errors.uncorrected.volatile.total",
)
REASONS = "clocks_event_reasons.active"
REASONS_BEFORE_535 = "clocks_throttle_reasons.active"

#: Bit to what it means, and whether it makes a measurement wrong. Power is the one that healthy cards show, too.
CLOCK_REASONS = {
    0x1: ("idle", False),
    0x2: ("clocks set by hand", True),
    0x4: ("power limit", False),
    0x8: ("hardware slowdown", True),
    0x10: ("sync boost", False),
    0x20: ("too hot, slowed by software", True),
    0x40: ("too hot, slowed by hardware", True),
    0x80: ("power brake", True),
    0x100: ("display clocks", False),
}

#: What a cell of the matrix says, from the best link to the worst.
LINKS = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the CPU's PCIe bridge",
    "NODE": "PCIe bridges of one NUMA node",
    "SYS": "the link between CPU sockets",
}
#: What the driver's errors that no program causes mean, by number. Others are a program's, as a rule.
#: Source: NVIDIA, Xid errors, the catalogue for Ampere and newer (docs.nvidia.com/deploy/xid-errors).
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
_MISSING = {"", "N/A", "[N/A]", "[Not Supported]", "[Unknown Error]", "[GPU requires reset]"}


def parse_query(text: str, fields: Sequence[str] = FIELDS) -> list[dict[str, str | None]]:
    """Read `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`: one dictionary a GPU.

    Args:
        text: What it printed.
        fields: The fields, in the order asked for.

    Returns:
        Values by field; None where the card does not have it.

    Raises:
        ValueError: If a line has another number of values than there are fields.
    """
    rows = []
    for line in csv.reader(io.StringIO(text), skipinitialspace=True):
        if not line:
            continue
        if len(line) != len(fields):
            raise ValueError(
                f"nvidia-smi printed {len(line)} values for {len(fields)} fields: {', '.join(line)}"
            )
        rows.append(
            {f: None if v.strip() in _MISSING else v.strip() for f, v in zip(fields, line, strict=True)}
        )
    return rows


def driver_cuda(text: str) -> tuple[int, int] | None:
    """Return the newest CUDA that the driver runs, from the head that plain `nvidia-smi` prints; None if it is not there.

    Args:
        text: What it printed.
    """
    found = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def clock_reasons(mask: str | None) -> list[tuple[str, bool]]:
    """Return why a card's clocks are where they are: text, and whether a measurement suffers from it.

    Args:
        mask: A bit mask as hexadecimal text, such as "0x0000000000000004"; None gives no reason.
    """
    if mask is None:
        return []
    bits = int(mask, 16)
    known = [meaning for bit, meaning in CLOCK_REASONS.items() if bits & bit]
    rest = bits & ~sum(CLOCK_REASONS)
    return [*known, (f"unknown reason {rest:#x}", True)] if rest else known


def parse_xids(log: str) -> dict[tuple[str, int], int]:
    """Read the driver's errors in the kernel's log: "NVRM: Xid (PCI:0000:3b:00): 79, pid=1896, GPU has fallen ...".

    Args:
        log: What `dmesg` printed.

    Returns:
        How often, by (PCI address, number).
    """
    found: dict[tuple[str, int], int] = {}
    for address, number in re.findall(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)", log):
        key = (address, int(number))
        found[key] = found.get(key, 0) + 1
    return found


@dataclass(frozen=True)
class Matrix:
    """The links between the GPUs of a machine.

    Attributes:
        links: Row by row the code of the link, "X" for the GPU itself: links[0][1] is "NV18", "PHB", ...
    """

    links: tuple[tuple[str, ...], ...]

    @property
    def gpus(self) -> int:
        """How many GPUs."""
        return len(self.links)

    def pairs(self) -> dict[tuple[int, int], str]:
        """Return the code of every pair (a, b) with a < b."""
        return {(a, b): self.links[a][b] for a in range(self.gpus) for b in range(a + 1, self.gpus)}

    def worst(self) -> str | None:
        """Return the code of the slowest pair, which a ring over all GPUs cannot avoid; None without pairs."""
        order = list(LINKS)

        def rank(code: str) -> tuple[int, int]:
            lanes = int(code[2:]) if code.startswith("NV") else 0
            return (order.index("NV" if lanes else code), -lanes)

        return max(self.pairs().values(), key=rank, default=None)


def parse_matrix(text: str) -> Matrix:
    """Read `nvidia-smi topo -m`: the links between GPUs; network cards and affinities are left aside.

    Args:
        text: What it printed, with or without the codes that underline the head.

    Raises:
        ValueError: If there is no such matrix, or a cell has an unknown link.
    """
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    head = next((line for line in lines if re.match(r"\s+GPU\d+\b", line)), "")
    names = [name for name in head.split() if re.fullmatch(r"GPU\d+", name)]
    rows = [line.split() for line in lines if re.match(r"GPU\d+\s", line)]
    if not names or len(rows) != len(names):
        raise ValueError(f"`nvidia-smi topo -m` printed {len(rows)} rows for {len(names)} GPUs")
    links = tuple(tuple(row[1 : 1 + len(names)]) for row in rows)
    for code in (code for row in links for code in row):
        if code not in LINKS and code != "X" and not re.fullmatch(r"NV[1-9]\d*", code):
            known = ", ".join(["X", "NV#", *list(LINKS)[1:]])
            raise ValueError(f"`nvidia-smi topo -m` printed the link {code!r}; known are {known}")
    return Matrix(links)


def link_text(code: str) -> str:
    """Return a link in words: "NV18" is "NVLink, 18 links".

    Args:
        code: A cell of the matrix.
    """
    return f"NVLink, {code[2:]} links" if code.startswith("NV") else LINKS[code]


def pcie_bandwidth(generation: int, lanes: int) -> float:
    """Return bytes per second of a PCIe link, per direction, before protocol overhead.

    8, 16 and 32 GT/s a lane at 128 of 130 bits for generations 3 to 5, 5 and 2.5 GT/s at 8 of 10 bits before.

    Args:
        generation: 1 to 5.
        lanes: 1 to 16.

    Raises:
        ValueError: For another generation.
    """
    rates = {1: 2.5e9 * 0.8, 2: 5e9 * 0.8, 3: 8e9 * 128 / 130, 4: 16e9 * 128 / 130, 5: 32e9 * 128 / 130}
    if generation not in rates:
        raise ValueError(f"PCIe generation {generation} is not in the table; it has 1 to 5")
    return rates[generation] * lanes / 8
