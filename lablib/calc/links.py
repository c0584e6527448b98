"""Links between devices: bandwidth per direction, latency where it is published, and the source.

NVIDIA adds both directions: its "900 GB/s" for NVLink 4 are 450 GB/s each way, and 450 is what a ring can use.
Network cards are sold in bits: 400 Gb/s are 50 GB/s.
These are line rates. A large all-reduce on an A100 node gets 235 of NVLink's 300 GB/s, 78 percent, and a copy
between two H200s 396 of 450 (Stas Bekman, Machine Learning Engineering, network benchmarks).

Where a number was read in secondary copies only, its source says so.

Chapter: book/01_why_distributed.md
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.units import PB, parse_bandwidth

FASTEST = PB  # a second: what is more is a slip of the unit
STAS = "Stas Bekman, Machine Learning Engineering (github.com/stas00/ml-engineering)"


@dataclass(frozen=True, kw_only=True)
class Link:
    """One link of one device, in one direction.

    Attributes:
        name: How tables call it.
        bandwidth: Bytes per second, per direction.
        latency_s: Seconds before the first byte of a message arrives, or None where none is published.
        source: Where the numbers come from.
    """

    name: str
    bandwidth: float
    latency_s: float | None = None
    source: str

    @property
    def both_ways(self) -> float:
        """Bytes per second of both directions together, the number that vendors print."""
        return 2 * self.bandwidth


def _link(name: str, gigabytes: float, source: str, latency_s: float | None = None) -> Link:
    return Link(name=name, bandwidth=round(gigabytes * 1e9), latency_s=latency_s, source=source)


_PCIE = f"{STAS}, network chapter, PCIe table; 16 lanes"
_NVLINK = f"{STAS}, network chapter, NVLink table"
_INFINIBAND = f"{STAS}, network chapter, InfiniBand tables; one 4x port"

LINKS: dict[str, Link] = {
    "pcie3-x16": _link("PCIe 3 x16", 15.75, "8 GT/s a lane, 128b/130b coding: 8 · 16 · (128 / 130) / 8"),
    "pcie4-x16": _link("PCIe 4 x16", 31.5, _PCIE),
    "pcie5-x16": _link("PCIe 5 x16", 63, _PCIE),
    "pcie6-x16": _link("PCIe 6 x16", 121, _PCIE),
    "nvlink2": _link(
        "NVLink 2 (V100)", 150, "NVIDIA V100 datasheet: 6 links, 300 GB/s both ways (secondary)"
    ),
    "nvlink3": _link("NVLink 3 (A100)", 300, _NVLINK + ": 12 links, 600 GB/s both ways"),
    "nvlink4": _link("NVLink 4 (H100, H200)", 450, _NVLINK + ": 18 links, 900 GB/s both ways"),
    "nvlink4-h800": _link(
        "NVLink 4 (H800)",
        200,
        "400 GB/s both ways in secondary reports, which do not all agree; DeepSeek-V3 (arXiv 2412.19437), "
        "section 3.2, states 160 GB/s in use",
    ),
    "nvlink5": _link("NVLink 5 (B200, GB200)", 900, _NVLINK + ": 18 links, 1,800 GB/s both ways"),
    "nvlink-bridge": _link(
        "NVLink bridge (PCIe cards, in pairs)",
        300,
        "NVIDIA A100 and H100 PCIe: 600 GB/s both ways (secondary)",
    ),
    "nvlink-c2c": _link(
        "NVLink-C2C (GH200, GPU to CPU)", 450, "NVIDIA GH200 datasheet: 900 GB/s both ways (secondary)"
    ),
    "infinity-fabric": _link(
        "Infinity Fabric (MI300X)",
        448,
        f"{STAS}, network chapter: 64 GB/s to each of 7 peers; one pair gets 64",
    ),
    "ib-edr": _link("InfiniBand EDR, 100 Gb/s", 12.5, _INFINIBAND, 0.5e-6),
    "ib-hdr": _link("InfiniBand HDR, 200 Gb/s", 25, _INFINIBAND, 0.6e-6),
    "ib-ndr": _link("InfiniBand NDR, 400 Gb/s", 50, _INFINIBAND),
    "ib-xdr": _link("InfiniBand XDR, 800 Gb/s", 100, _INFINIBAND),
    "100gbe": _link("Ethernet, 100 Gb/s", 12.5, "line rate, 100 / 8"),
    "200gbe": _link("Ethernet, 200 Gb/s", 25, "line rate, 200 / 8"),
    "400gbe": _link("Ethernet, 400 Gb/s", 50, "line rate, 400 / 8"),
    "dgx-a100": _link("DGX A100 node, 8 x HDR", 200, "Narayanan et al. 2021 (arXiv 2104.04473), section 5"),
    "dgx-h100": _link("DGX H100 node, 8 x NDR", 400, f"{STAS}, network chapter: 8 ports of 400 Gb/s"),
    "dgx-b300": _link("DGX B300 node, 8 x XDR", 800, f"{STAS}, network chapter: 8 ports of 800 Gb/s"),
}


def link(name: str) -> Link:
    """Return a link by name.

    Args:
        name: A key of `LINKS`, for example "nvlink4".

    Raises:
        ValueError: If the name is unknown; it lists the known ones.
    """
    key = str(name).lower().replace("_", "-")
    if key not in LINKS:
        raise ValueError(f"unknown link {name!r}; known are {', '.join(LINKS)}")
    return LINKS[key]


def link_rate(name: str, value: str | float) -> float:
    """Return the bytes per second, per direction, of a link by name or of a rate.

    Args:
        name: What it is for, as messages call it: "nic" or "intra".
        value: A key of `LINKS`, a rate as text ("40 GB/s", "400 Gb/s"), or bytes per second.

    Raises:
        ValueError: If there is no such link, or the rate is no number above 0 that a link can have.
    """
    rate = value
    if isinstance(value, str):
        text = value.strip()
        if text.lower().replace("_", "-") in LINKS or (
            text[:1].isalpha() and text.lower()[:3] not in ("nan", "inf")
        ):
            try:
                return link(text).bandwidth
            except ValueError as error:
                raise ValueError(f"{name}: {error}; or give a rate, like '40 GB/s'") from None
        try:
            rate = parse_bandwidth(text)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0:
        raise ValueError(f"{name}={value!r} must be above 0 bytes per second")
    if rate > FASTEST:
        raise ValueError(
            f"{name}={value!r} is more than 1 PB/s, and no link is so fast: give bytes per second"
        )
    return float(rate)
