"""Accelerators and links: capacity, bandwidth and peak rates, each with its source, and the names that drivers give.

    accelerator("h100").usable_bytes
    known_accelerator("NVIDIA H100 80GB HBM3")  # the row "h100"; None where the course has no figures

Links are in bytes per second **per direction**. NVIDIA adds both directions: its "900 GB/s" for NVLink 4 are 450 GB/s
each way, and 450 is what a ring can use. Network cards are sold in bits: 400 Gb/s are 50 GB/s. These are line rates: a
large all-reduce on an A100 node gets 235 of NVLink's 300 GB/s, 78 percent, and a copy between two H200s 396 of 450
(Stas Bekman, Machine Learning Engineering, network benchmarks).

Capacity: vendors print "80 GB" for 80 GiB of memory, of which `nvidia-smi` shows 79.65 on an H100 and CUDA gives out
79.11. So capacities here are GiB, and `memory_gb` says the same in GB. `cuda_bytes` is what a program sees
(`torch.cuda.mem_get_info()[1]`), as PyTorch's out-of-memory messages print it; drivers differ by up to 0.2 GiB, and
the least that was found is taken. `usable_bytes` is that less the CUDA context, and is what a run is judged by.

Peak rates are for dense matrices. Datasheets often print twice that, with structured sparsity.
A peak is never reached: large bf16 matmuls get 87 percent of it on A100, 80 on H100, 78 on B200, 51 on MI300X, 60
on MI325X (Stas Bekman, Machine Learning Engineering, maximum achievable matmul FLOPS), where 1,565 TFLOP/s were
measured on MI355X, 62 percent of the row here.

A driver's name is only taken for a row that it certainly is: a slice of a GPU, a laptop's or a cut-down variant has
another peak, and an MFU against the wrong peak is worse than none. Where a number was read in secondary copies only,
its source says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from lablib.calc.errors import one_of
from lablib.calc.units import GB, PB, GiB, parse_bandwidth

#: What a process takes from a GPU beside PyTorch's allocator: the driver's context and the kernels that were loaded.
#: Out-of-memory messages name it as the memory of the process less what PyTorch has allocated and reserved: 0.13 GiB on
#: T4, 0.22 on A10, 0.41 and 0.48 on L40S, 0.48 on RTX 4090, 0.49 on A100, 0.58 on RTX 5090, 0.66 on H100 NVL
#: (the messages in `ACCELERATORS`). Before kernels were loaded when first used, with CUDA 11.7, it was more than 1 GB
#: (github.com/pytorch/pytorch/issues/107667).
CUDA_CONTEXT = GiB // 2

FASTEST = PB  # a second: what is more is a slip of the unit
STAS = "Stas Bekman, Machine Learning Engineering (github.com/stas00/ml-engineering)"


@dataclass(frozen=True, kw_only=True)
class Link:
    """One link of one device, in one direction.

    Attributes:
        bandwidth: Bytes per second, per direction.
        latency_s: Seconds before the first byte of a message arrives, or None where none is published.
        joins: Most devices that it joins, 2 for a bridge; None where it joins all of a node.
        peers: Devices that the bandwidth is divided over, where each has a link of its own; 1 where a switch takes all.
        source: Where the numbers come from.
    """

    name: str
    bandwidth: float
    latency_s: float | None = None
    joins: int | None = None
    peers: int = 1
    source: str

    def among(self, ranks: int) -> float:
        """Return the bytes per second that one of so many devices sends to the others: links to outsiders are idle."""
        return self.bandwidth * min(max(ranks - 1, 1), self.peers) / self.peers

    @property
    def both_ways(self) -> float:
        """Bytes per second of both directions together, the number that vendors print."""
        return 2 * self.bandwidth


def _link(name: str, gigabytes: float, source: str, latency_s: float | None = None, **wiring: int) -> Link:
    return Link(name=name, bandwidth=round(gigabytes * 1e9), latency_s=latency_s, source=source, **wiring)


_PCIE = f"{STAS}, network chapter, PCIe table; 16 lanes"
_NVLINK = f"{STAS}, network chapter, NVLink table"
_INFINIBAND = f"{STAS}, network chapter, InfiniBand tables; one 4x port"

LINKS: dict[str, Link] = {
    "pcie3-x16": _link("PCIe 3 x16", 15.75, "8 GT/s a lane, 128b/130b coding: 8 · 16 · (128 / 130) / 8"),
    "pcie4-x16": _link("PCIe 4 x16", 31.5, _PCIE),
    "pcie5-x16": _link("PCIe 5 x16", 63, _PCIE),
    "pcie6-x16": _link("PCIe 6 x16", 121, _PCIE),
    "nvlink2": _link("NVLink 2 (V100)", 150, "NVIDIA V100 datasheet: 6 links, 300 GB/s both ways (secondary)"),
    "nvlink3": _link("NVLink 3 (A100)", 300, _NVLINK + ": 12 links, 600 GB/s both ways"),
    "nvlink4": _link("NVLink 4 (H100, H200)", 450, _NVLINK + ": 18 links, 900 GB/s both ways"),
    "nvlink4-h800": _link(
        "NVLink 4 (H800)",
        200,
        "400 GB/s both ways in secondary reports, which do not all agree; DeepSeek-V3 (arXiv 2412.19437), "
        "section 3.2, states 160 GB/s in use",
    ),
    "nvlink5": _link("NVLink 5 (B200, GB200, GB300)", 900, _NVLINK + ": 18 links, 1,800 GB/s both ways"),
    "nvlink-bridge": _link(
        "NVLink bridge (PCIe cards, in pairs)",
        300,
        "NVIDIA A100 and H100 PCIe: 600 GB/s both ways (secondary)",
        joins=2,
    ),
    "nvlink-c2c": _link(
        "NVLink-C2C (GH200, GPU to CPU)", 450, "NVIDIA GH200 datasheet: 900 GB/s both ways (secondary)"
    ),
    "infinity-fabric": _link(
        "Infinity Fabric (MI300X)",
        448,
        f"{STAS}, network chapter: 64 GB/s to each of 7 peers; one pair gets 64",
        peers=7,
    ),
    "infinity-fabric-mi350": _link(
        "Infinity Fabric (MI350X, MI355X)", 535.5, f"{STAS}, network chapter: 76.5 GB/s to each of 7 peers", peers=7
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


#: What is no link of one rate, and what to give instead (for EFA: the network chapter of `STAS`, table of nodes).
_SEVERAL_RATES = {
    "efa": "a GPU gets 6.25 GB/s on AWS P4d, 50 GB/s on P5, P5e, P5en and P6-B200, 100 GB/s on P6-B300",
    "roce": "its cards are Ethernet's, 100gbe, 200gbe or 400gbe",
}


def link(name: str) -> Link:
    """Return a link by name.

    Args:
        name: A key of `LINKS`, for example "nvlink4".
    """
    key = str(name).lower().replace("_", "-")
    if key in _SEVERAL_RATES:
        raise ValueError(f"{name!r} has several rates: {_SEVERAL_RATES[key]}")
    return LINKS[one_of("link", key, LINKS)]


#: Share of PCIe between GeForce cards, which have no peer access. NVIDIA on its developers' forum, February 2023: "Peer to
#: Peer is not supported on 4090" (secondary); the same was seen of RTX 3090 (github.com/NVIDIA/nccl/issues/1127) and of RTX
#: 5090 (github.com/tinygrad/open-gpu-kernel-modules/issues/29). NCCL then goes through host memory (its SHM transport, user guide,
#: NCCL_SHM_DISABLE): a ring's rank copies out and in at the same time. Eight RTX 4090 copy 24 to 27 GB/s one way, and 11 to
#: 16 while the other way is busy (github.com/NVIDIA/nvbandwidth/issues/15): half of the line rate is the most that was seen
#: there. On eight RTX 5090 an all-reduce reached 28 of PCIe 5's 63 GB/s, on four 35 (github.com/NVIDIA/nccl/issues/1639).
THROUGH_HOST = 0.5

#: The links that leave a node, one card's.
NETWORKS = tuple(key for key in LINKS if key.startswith("ib-") or key.endswith("gbe"))


def given_link(name: str, value: str | float) -> Link:
    """Return a link by name, or one of a rate: a rate holds for every group of devices.

    Args:
        name: What it is for, as messages call it: "nic" or "intra".
        value: As `link_rate` takes it.
    """
    rate = link_rate(name, value)
    key = str(value).strip().lower().replace("_", "-")
    return LINKS.get(key) or Link(name=f"{rate / GB:g} GB/s", bandwidth=rate, source="given")


def link_rate(name: str, value: str | float) -> float:
    """Return the bytes per second, per direction, of a link by name or of a rate.

    Args:
        name: What it is for, as messages call it: "nic" or "intra".
        value: A key of `LINKS`, a rate as text ("40 GB/s", "400 Gb/s"), or bytes per second.
    """
    rate = value
    if isinstance(value, str):
        text = value.strip()
        if text.lower().replace("_", "-") in LINKS or (text[:1].isalpha() and text.lower()[:3] not in ("nan", "inf")):
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
        raise ValueError(f"{name}={value!r} is more than 1 PB/s, and no link is so fast: give bytes per second")
    if rate < 1:
        raise ValueError(f"{name}={value!r} is less than 1 B/s, and no link is so slow: give bytes per second")
    return float(rate)


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One accelerator.

    Attributes:
        memory_bytes: What the vendor prints.
        cuda_bytes: What CUDA or HIP reports as the total; None where nobody has looked, or there is neither.
        context_bytes: What a process takes of it before its first tensor.
        flops: Dense peak in FLOP/s by dtype: "bf16", "fp16", "fp8", "tf32", "fp32". A dtype that is missing has no
            matrix units there, or no figure with a source.
        scale_up: Key in `LINKS` of the link to its neighbours, or None where there is only PCIe.
        host: Key in `LINKS` of the link to the CPU, or None where the table has none.
        nic: Key in `LINKS` of its network card in the vendor's reference system, or None where none is published.
        gpus_per_node: Devices that talk without a network: those of a server, or of a rack behind NVLink switches.
        gpus_per_host: Devices under one operating system.
        driver: Pattern of the name that CUDA or HIP has for it, in capitals, with spaces for dashes and underscores; it
            matches no other row's names. None where there is neither CUDA nor HIP.
        capability: CUDA's compute capability, from which `lablib.calc.precision.support` has the formats.
        formats: What it multiplies in matrix units where it has no compute capability.
        peer_access: Whether such devices reach each other's memory; if not, what they send goes through the host's.
        generation: The GPU whose measured runs it is like, "a100", "h100" or "b200", and whose fitted constants
            `lablib.calc.layouts.planner` takes; None where no runs like its own were measured.
        achievable: Share of the peak that large bf16 matrix products reach (Stas Bekman, see above). The H100's where
            there is no figure.
        sources: Where the numbers come from, by "memory", "cuda", "memory_bandwidth", "flops", "links" and "nic".
    """

    name: str
    memory_bytes: int
    memory_note: str
    cuda_bytes: int | None
    context_bytes: int = CUDA_CONTEXT
    memory_bandwidth: float
    flops: dict[str, float]
    scale_up: str | None
    host: str | None
    nic: str | None = None
    gpus_per_node: int = 8
    gpus_per_host: int = 8
    driver: str | None = None
    capability: tuple[int, int] | None = None
    formats: tuple[str, ...] = ()
    peer_access: bool = True
    generation: str | None = None
    achievable: float = 0.80
    sources: dict[str, str]

    @property
    def memory_gb(self) -> float:
        """Nominal capacity in GB, 1e9 bytes."""
        return self.memory_bytes / GB

    @property
    def memory_gib(self) -> float:
        """Nominal capacity in GiB, 2**30 bytes."""
        return self.memory_bytes / GiB

    @property
    def usable_bytes(self) -> int:
        """Bytes that tensors, libraries and fragments of a run may fill: of an unknown total `least_share` is taken."""
        if self.driver is None:
            return self.memory_bytes
        total = self.memory_bytes * least_share() if self.cuda_bytes is None else self.cuda_bytes
        return int(total) - self.context_bytes

    def peak(self, dtype: str = "bf16") -> float:
        """Return the dense peak in FLOP/s.

        Args:
            dtype: A key of `flops`.
        """
        if dtype not in self.flops:
            raise ValueError(f"{self.name} has no {dtype} peak in the table; it has {', '.join(self.flops)}")
        return self.flops[dtype]

    def neighbour_link(self) -> Link:
        """Return the link to the other accelerators of the node: scale-up where there is one, else PCIe.

        Without peer access it is PCIe through host memory, `THROUGH_HOST` of its rate.
        """
        key = self.scale_up or self.host
        if key is None:
            raise ValueError(f"{self.name} has no link in the table: give intra, a rate like '40 GB/s'")
        line = LINKS[key]
        if self.peer_access:
            return line
        name = f"{line.name} through host memory ({self.name} has no peer access)"
        return replace(line, name=name, bandwidth=THROUGH_HOST * line.bandwidth)


def _card(
    name: str,
    gib: int,
    memory_note: str,
    terabytes: float,
    peaks: dict[str, float],
    *,
    scale_up: str | None = None,
    host: str | None,
    nic: str | None = None,
    nic_source: str = "",
    gpus_per_node: int = 8,
    gpus_per_host: int = 8,
    cuda: float | None,
    seen: str = "",
    driver: str | None = None,
    capability: tuple[int, int] | None = None,
    formats: tuple[str, ...] = (),
    peer_access: bool = True,
    generation: str | None = None,
    achievable: float = 0.80,
    source: str,
    **sources: str,
) -> Accelerator:
    """A row of the table: memory in GiB, and as CUDA reports it where it was seen; bandwidth in TB/s, peaks in TFLOP/s."""
    return Accelerator(
        name=name,
        memory_bytes=gib * GiB,
        memory_note=memory_note,
        cuda_bytes=None if cuda is None else round(cuda * GiB),
        memory_bandwidth=round(terabytes * 1e12),
        flops={dtype: round(rate * 1e12) for dtype, rate in peaks.items()},
        scale_up=scale_up,
        host=host,
        nic=nic,
        gpus_per_node=gpus_per_node,
        gpus_per_host=gpus_per_host,
        driver=driver,
        capability=capability,
        formats=formats,
        peer_access=peer_access,
        generation=generation,
        achievable=achievable,
        sources=dict.fromkeys(("memory", "memory_bandwidth", "flops", "links"), source)
        | {key: text for key, text in (("cuda", seen), ("nic", nic_source)) if text}
        | sources,
    )


def _tpu(
    name: str, gib: int, memory_note: str, terabytes: float, peaks: dict[str, float], **sources: str
) -> Accelerator:
    """A TPU: no CUDA, and no link, because a torus between chips is not a link of one bandwidth.

    For v5p and v6e Google prints one peak for bf16 and FP8: FP8 gains nothing there and is left out.
    """
    source = "Google Cloud TPU documentation, TPU7x (Ironwood), table of v5p, v6e and TPU7x"
    return _card(
        name, gib, memory_note, terabytes, peaks, host=None, cuda=None, formats=tuple(peaks),
        links="left out: a torus between chips is not a link of one bandwidth", **{"source": source} | sources,
    )  # fmt: skip


_A100 = {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}
_H100 = {"bf16": 989.4, "fp16": 989.4, "fp8": 1978.9, "tf32": 494.7, "fp32": 66.9}
_A100_SOURCE = "NVIDIA A100 datasheet and Ampere whitepaper; A100 columns agree with " + STAS
_H100_SOURCE = "NVIDIA H100 datasheet and Hopper whitepaper, dense rates; bf16, fp8 and memory agree with " + STAS
_DGX_A100 = {"nic": "ib-hdr", "nic_source": "DGX A100: 8 cards of 200 Gb/s, " + LINKS["dgx-a100"].source}
_DGX_H100 = {
    "nic": "ib-ndr",
    "nic_source": "NVIDIA DGX BasePOD reference architecture, DGX H100 and H200: 8 ConnectX-7 of 400 Gb/s",
}

ACCELERATORS: dict[str, Accelerator] = {
    "t4": _card(
        "T4", 16, "GDDR6", 0.320, {"fp16": 65, "fp32": 8.1}, host="pcie3-x16",
        source="NVIDIA T4 product brief (memory, PCIe); rates secondary. No bf16 matrix units",
        cuda=14.56, seen="github.com/Zheng-Chong/CatVTON/issues/133; 14.75 in older messages",
        driver=r"\bT4\b", capability=(7, 5),
    ),
    "v100": _card(
        "V100 SXM2 32 GB", 32, "HBM2", 0.900, {"fp16": 125, "fp32": 15.7}, scale_up="nvlink2", host="pcie3-x16",
        source="NVIDIA V100 datasheet (secondary). No bf16 matrix units",
        cuda=31.74, seen="github.com/haotian-liu/LLaVA/issues/812",
        driver=r"\bV100\b(?!.*PCIE)", capability=(7, 0),
    ),
    "a10": _card(
        "A10", 24, "GDDR6", 0.600, {"bf16": 125, "fp16": 125}, host="pcie4-x16",
        source="NVIDIA A10 datasheet, as quoted elsewhere (secondary)",
        cuda=21.99, seen="github.com/zai-org/CogVLM/issues/236",
        driver=r"\bA10\b", capability=(8, 6),
    ),
    "a10g": _card(
        "A10G", 24, "GDDR6", 0.600, {"bf16": 70, "fp16": 70, "tf32": 35, "fp32": 35}, host="pcie4-x16",
        source="NVIDIA A10G datasheet for AWS, February 2022, dense rates (secondary)",
        cuda=21.98, seen="messages from g5 instances, the least; 22.20 in "
        "github.com/XavierXiao/Dreambooth-Stable-Diffusion/issues/18",
        driver=r"\bA10G\b", capability=(8, 6),
    ),
    "l4": _card(
        "L4", 24, "GDDR6", 0.300, {"bf16": 121, "fp16": 121, "fp8": 242, "tf32": 60, "fp32": 30.3}, host="pcie4-x16",
        source="NVIDIA L4 datasheet, which prints sparse rates: half of them (secondary)",
        cuda=22.03, seen="messages from L4 machines in public logs; of 23,034 MiB that nvidia-smi shows, "
        "github.com/modal-labs/modal-client/pull/2797",
        driver=r"\bL4\b", capability=(8, 9),
    ),
    "rtx-a6000": _card(
        "RTX A6000", 48, "GDDR6 with ECC", 0.768, {"bf16": 154.8, "fp16": 154.8, "tf32": 77.4, "fp32": 38.7},
        host="pcie4-x16", source="NVIDIA Ampere GA102 whitepaper, RTX A6000, dense rates (secondary)",
        links="PCIe; a bridge that joins two of them is sold apart and left out",
        cuda=47.53, seen="48,676 MiB in published torch device properties, ECC off",
        driver=r"\bRTX A6000\b", capability=(8, 6),
    ),
    "rtx-6000-ada": _card(
        "RTX 6000 Ada", 48, "GDDR6 with ECC", 0.960,
        {"bf16": 364.2, "fp16": 364.2, "fp8": 728.5, "tf32": 182.1, "fp32": 91.1}, host="pcie4-x16",
        source="NVIDIA RTX 6000 Ada datasheet and Ada whitepaper, dense rates (secondary)",
        cuda=47.37, seen="messages in public logs, ECC off; with ECC 44.43 (github.com/DINGYANB/MTVCrafter/issues/21)",
        driver=r"\bRTX 6000 ADA\b", capability=(8, 9),
    ),
    "rtx-3090": _card(
        "RTX 3090", 24, "GDDR6X", 0.936, {"bf16": 71, "fp16": 71, "tf32": 35.6, "fp32": 35.6}, host="pcie4-x16",
        source="NVIDIA Ampere GA102 whitepaper, dense rates with fp32 accumulation, as quoted elsewhere (secondary)",
        links="PCIe without peer access, see THROUGH_HOST; the bridge of two is sold apart and left out", peer_access=False,
        cuda=23.56, seen="messages in public logs; of older drivers 24,259 MiB, in published torch device properties",
        driver=r"\bRTX 3090$", capability=(8, 6),
    ),
    "rtx-4090": _card(
        "RTX 4090", 24, "GDDR6X", 1.008, {"bf16": 165.2, "fp16": 165.2, "fp32": 82.6}, host="pcie4-x16",
        source="NVIDIA Ada whitepaper, appendix A, with fp32 accumulation, as quoted elsewhere (secondary)",
        links="PCIe without peer access, see THROUGH_HOST", peer_access=False,
        cuda=23.52, seen="github.com/pytorch/torchchat/issues/1341; 23.64 and more with older drivers",
        driver=r"\bRTX 4090$", capability=(8, 9),
    ),
    "rtx-5090": _card(
        "RTX 5090", 32, "GDDR7", 1.792, {"bf16": 209.5, "fp16": 209.5, "fp8": 419, "tf32": 104.8, "fp32": 104.8},
        host="pcie5-x16",
        source="NVIDIA RTX Blackwell whitepaper, dense, with fp32 accumulation: a quarter of the 838 (secondary)",
        links="PCIe without peer access, see THROUGH_HOST", peer_access=False,
        cuda=31.36, seen="messages in public logs; 31.37 in github.com/Wan-Video/Wan2.1/issues/465",
        driver=r"\bRTX 5090$", capability=(12, 0),
    ),
    "l40s": _card(
        "L40S", 48, "GDDR6 with ECC", 0.864,
        {"bf16": 362, "fp16": 362, "fp8": 733, "tf32": 183, "fp32": 91.6}, host="pcie4-x16",
        source=f"NVIDIA L40S datasheet; {STAS}",
        cuda=44.39, seen="messages from g6e instances, the least; 44.42 in github.com/stepfun-ai/Step-Video-T2V/issues/8, "
        "44.53 in github.com/Wan-Video/Wan2.1/issues/205",
        driver=r"\bL40S\b", capability=(8, 9),
    ),
    "a100-40gb": _card(
        "A100 SXM 40 GB", 40, "HBM2", 1.555, _A100,
        scale_up="nvlink3", host="pcie4-x16", source=_A100_SOURCE, **_DGX_A100,
        cuda=39.39, seen="messages in public logs; 39.50 in github.com/TianheWu/CoSeR/issues/10",
        driver=r"\bA100\b(?!.*\bPCIE\b).*\b40GB\b", capability=(8, 0), generation="a100", achievable=0.87,
    ),
    "a100-40gb-pcie": _card(
        "A100 PCIe 40 GB", 40, "HBM2", 1.555, _A100,
        scale_up="nvlink-bridge", host="pcie4-x16", source=_A100_SOURCE,
        cuda=39.39, seen="as the SXM module",
        driver=r"\bA100\b(?=.*\bPCIE\b)(?=.*\b40GB\b)", capability=(8, 0), generation="a100", achievable=0.87,
    ),
    "a100-80gb": _card(
        "A100 SXM 80 GB", 80, "HBM2e", 2.039, _A100, scale_up="nvlink3", host="pcie4-x16",
        source=_A100_SOURCE, **_DGX_A100,
        cuda=79.14, seen="github.com/lianqi1008/Control-GIC/issues/6; 79.25 with older drivers",
        driver=r"\bA100\b(?!.*\bPCIE\b).*\b80GB\b", capability=(8, 0), generation="a100", achievable=0.87,
    ),
    "a100-80gb-pcie": _card(
        "A100 PCIe 80 GB", 80, "HBM2e", 1.935, _A100, scale_up="nvlink-bridge", host="pcie4-x16",
        source=_A100_SOURCE,
        cuda=79.14, seen="as the SXM module",
        driver=r"\bA100\b(?=.*\bPCIE\b)(?=.*\b80GB\b)", capability=(8, 0), generation="a100", achievable=0.87,
    ),
    "h100": _card(
        "H100 SXM", 80, "HBM3", 3.35, _H100, scale_up="nvlink4", host="pcie5-x16",
        source=_H100_SOURCE, **_DGX_H100,
        cuda=79.11, seen="github.com/vllm-project/vllm/issues/27508",
        driver=r"\bH100\b.*\b(80GB HBM3|SXM5)\b", capability=(9, 0), generation="h100",
    ),
    "h100-pcie": _card(
        "H100 PCIe", 80, "HBM2e (secondary; other tables say HBM3)", 2.0,
        {"bf16": 756, "fp16": 756, "fp8": 1513, "tf32": 378, "fp32": 51},
        scale_up="nvlink-bridge", host="pcie5-x16", source=_H100_SOURCE,
        flops="NVIDIA H100 datasheet, PCIe column, which prints sparse rates of matrix units: half of them (secondary)",
        cuda=79.11, seen="81,008 MiB in published torch device properties",
        driver=r"\bH100\b.*\b(PCIE|HBM2E)\b", capability=(9, 0), generation="h100",
    ),
    "h100-nvl": _card(
        "H100 NVL", 94, "HBM3", 3.9, {"bf16": 835.5, "fp16": 835.5, "fp8": 1670.5, "tf32": 417.5, "fp32": 60},
        scale_up="nvlink-bridge", host="pcie5-x16",
        source="NVIDIA H100 datasheet, NVL column, which prints sparse rates: half of them (secondary)",
        cuda=93.0, seen="github.com/ali-vilab/VACE/issues/56",
        driver=r"\bH100 NVL\b", capability=(9, 0), generation="h100",
    ),
    "gh200": _card(
        "GH200 96 GB", 96, "HBM3", 4.0, _H100, scale_up="nvlink4", host="nvlink-c2c",
        source=f"NVIDIA GH200 datasheet: an H100 beside a Grace CPU, rates of the H100; memory {STAS}",
        links="NVIDIA GH200 datasheet; a machine with one of them has no NVLink to another",
        cuda=94.5, seen="96,768 MiB, github.com/stas00/ml-engineering/pull/60",
        driver=r"\bGH200\b", capability=(9, 0), generation="h100",
    ),
    "h800": _card(
        "H800 SXM", 80, "HBM3", 3.35, _H100, scale_up="nvlink4-h800", host="pcie5-x16",
        source="an H100 with slower NVLink: H100 figures; DeepSeek-V3 (arXiv 2412.19437), section 3",
        nic="ib-ndr", nic_source="DeepSeek-V3 (arXiv 2412.19437), section 3: 50 GB/s a GPU",
        cuda=79.11, seen="as the H100",
        driver=r"\bH800\b", capability=(9, 0), generation="h100",
    ),
    "h200": _card(
        "H200 SXM", 141, "HBM3e", 4.8, _H100, scale_up="nvlink4", host="pcie5-x16",
        source=f"NVIDIA H200 datasheet; rates of the H100; {STAS}", **_DGX_H100,
        cuda=139.8, seen="143,156 MiB in published torch device properties; "
        "139.81 in github.com/vllm-project/vllm/issues/34553",
        driver=r"\bH200\b", capability=(9, 0), generation="h100",
    ),
    "h20": _card(
        "H20", 96, "HBM3", 4.0, {"bf16": 148, "fp16": 148, "fp8": 296, "tf32": 74, "fp32": 44},
        scale_up="nvlink4", host="pcie5-x16",
        source="NVIDIA HGX H20 datasheet, dense rates, as quoted elsewhere (secondary)",
        cuda=95.0, seen="97,285 MiB in published torch device properties",
        driver=r"\bH20\b(?! 3E)", capability=(9, 0),
    ),
    "b200": _card(
        "B200", 180, "HBM3e of DGX and HGX; 192 GB are built in, 180 are for use", 7.67,
        {"bf16": 2250, "fp16": 2250, "fp8": 4500}, scale_up="nvlink5", host="pcie5-x16",
        source=f"NVIDIA Blackwell architecture brief, HGX B200 at 1,000 W, dense rates; {STAS}",
        nic="ib-ndr", nic_source="NVIDIA DGX B200 user guide, hardware overview: 8 ConnectX-7 of 400 Gb/s",
        memory_bandwidth="7,680 bits at 3,996 MHz, both edges, as the driver reports (github.com/pytorch/ao/pull/4002)",
        cuda=178.35, seen="github.com/pytorch/ao/pull/4002",
        driver=r"\bB200\b", capability=(10, 0), generation="b200", achievable=0.78,
    ),
    "gb200": _card(
        "GB200", 186, "HBM3e; of one of the GPUs", 8.0, {"bf16": 2500, "fp16": 2500, "fp8": 5000}, scale_up="nvlink5", host=None,
        source=f"NVIDIA Blackwell architecture brief, GB200 at 1,200 W, dense rates; {STAS}",
        links="NVIDIA multi-node NVLink tuning guide, GB200 72x1: 18 trays of 4 GPUs behind NVLink switches",
        gpus_per_node=72, gpus_per_host=4, nic="ib-ndr",
        nic_source="Azure ND GB200 v6: 4 ConnectX-7 of 400 Gb/s for the 4 GPUs of a tray (secondary)",
        cuda=184.31, seen="github.com/vllm-project/vllm/issues/43951",
        driver=r"\bGB200\b", capability=(10, 0), generation="b200",
    ),
    "b300": _card(
        "B300", 270, "HBM3e of DGX and HGX; 288 GB are built in, 270 are for use", 8.0,
        {"bf16": 2250, "fp16": 2250, "fp8": 4500, "tf32": 1125}, scale_up="nvlink5", host="pcie6-x16",
        source="NVIDIA HGX B300 datasheet, an eighth of the board, half of its sparse rates (secondary)",
        nic="ib-xdr", nic_source=LINKS["dgx-b300"].source,
        cuda=267.69, seen="messages of training jobs on 2 x 8 B300 in public logs",
        driver=r"\bB300\b", capability=(10, 3), generation="b200",
    ),
    "gb300": _card(
        "GB300", 279, "HBM3e; of one of the GPUs", 8.0, {"bf16": 2500, "fp16": 2500, "fp8": 5000, "tf32": 1250},
        scale_up="nvlink5", host=None,
        source=f"NVIDIA GB300 NVL72 specifications; {STAS}",
        memory="Google Cloud, A4X Max machines: 20 TB for 72 GPUs, roughly 279 GB each",
        memory_bandwidth=f"{STAS}, memory table, of the B300",
        links="as the GB200: 18 trays of 4 GPUs behind NVLink switches",
        gpus_per_node=72, gpus_per_host=4, nic="ib-xdr",
        nic_source=f"{STAS}, network chapter: Quantum-X800, 800 Gb/s a port, in GB300 NVL72",
        cuda=276.5, seen=f"{STAS}, debugging PyTorch, of a DGX Station",
        driver=r"\bGB300\b", capability=(10, 3), generation="b200",
    ),
    "mi300x": _card(
        "MI300X", 192, "HBM3", 5.3, {"bf16": 1307, "fp16": 1307, "fp8": 2610}, scale_up="infinity-fabric",
        host="pcie5-x16", source=f"AMD Instinct MI300X datasheet, dense rates; {STAS}", nic="ib-ndr",
        nic_source="Azure ND MI300X v5, specifications (github.com/MicrosoftDocs/azure-docs): 8 x 400 Gb/s for 8 GPUs",
        cuda=191.98, seen="github.com/ROCm/vllm/issues/375",
        driver=r"\bMI300X\b", achievable=0.51, formats=("fp16", "bf16", "tf32", "fp8"),
    ),
    "mi325x": _card(
        "MI325X", 256, "HBM3e", 6.0, {"bf16": 1307, "fp16": 1307, "fp8": 2610}, scale_up="infinity-fabric",
        host="pcie5-x16", source=f"AMD Instinct MI325X specifications: the MI300X with more memory; {STAS}",
        cuda=255.69, seen="messages of PyTorch's own tests; 255.98 in vLLM's issues",
        driver=r"\bMI325X\b", achievable=0.60, formats=("fp16", "bf16", "tf32", "fp8"),
    ),
    "mi350x": _card(
        "MI350X", 288, "HBM3e", 8.0, {"bf16": 2307, "fp16": 2307, "fp8": 4614}, scale_up="infinity-fabric-mi350",
        host="pcie5-x16", source=f"{STAS}, accelerator chapter",
        flops=f"the MI355X's at 2,200 of its 2,400 MHz, with which {STAS} scales them",
        nic="400gbe", nic_source="as the MI355X",
        cuda=287.98, seen="as the MI355X; virtual machines have less",
        driver=r"\bMI350X\b", achievable=0.62, formats=("fp16", "bf16", "fp8", "mxfp8", "fp4"),
    ),
    "mi355x": _card(
        "MI355X", 288, "HBM3e", 8.0, {"bf16": 2517, "fp16": 2517, "fp8": 5033}, scale_up="infinity-fabric-mi350",
        host="pcie5-x16", source=f"{STAS}, accelerator chapter",
        flops=f"1,024 matrix cores of 512 multiply-adds at 2,400 MHz; AMD prints 2.5 and 5 PFLOP/s; {STAS}",
        nic="400gbe", nic_source="ROCm documentation, distributed inference on MI355X: 8 cards of 400 Gb/s for 8 GPUs",
        cuda=287.98, seen="messages in public logs",
        driver=r"\bMI355X\b", achievable=0.62, formats=("fp16", "bf16", "fp8", "mxfp8", "fp4"),
    ),
    "tpu-v4": _tpu(
        "TPU v4", 32, "HBM2", 1.2, {"bf16": 275},
        source=f"{STAS}, memory table", flops="Chowdhery et al. 2022 (arXiv 2204.02311), appendix B",
    ),
    "tpu-v5p": _tpu("TPU v5p", 95, "HBM2e", 2.765, {"bf16": 459}),
    "tpu-v6e": _tpu("TPU v6e", 32, "HBM; Trillium", 1.638, {"bf16": 918}),
    "tpu-v7": _tpu("TPU v7", 192, "HBM; Ironwood, of Google's TPU7x", 7.38, {"bf16": 2307, "fp8": 4614}),
}  # fmt: skip

ALIASES = {
    "a100": "a100-80gb",
    "a100-sxm": "a100-80gb",
    "a100-pcie": "a100-80gb-pcie",
    "h100-sxm": "h100",
    "h200-sxm": "h200",
    "h100-80gb": "h100",
    "h100-80gb-pcie": "h100-pcie",
    "trillium": "tpu-v6e",
    "ironwood": "tpu-v7",
    "4090": "rtx-4090",
}


def least_share() -> float:
    """Return the least share of the printed capacity that CUDA or HIP reports, of the rows where it was seen."""
    return min(card.cuda_bytes / card.memory_bytes for card in ACCELERATORS.values() if card.cuda_bytes)


def accelerator(name: str) -> Accelerator:
    """Return an accelerator by name.

    Args:
        name: A key of `ACCELERATORS` or `ALIASES`, for example "h100" or "a100-80gb".
    """
    key = str(name).lower().replace("_", "-").replace(" ", "-")
    key = ALIASES.get(key, key)
    return ACCELERATORS[one_of("accelerator", key, ACCELERATORS)]


#: A part of a GPU (MIG, or a vGPU such as "A10-8Q"), a laptop's, and variants that are sold under the name of another.
_OTHER = re.compile(r"\b(MIG|LAPTOP|MOBILE|MAX Q|[459]090 D|\d+[QCAB]|GH200 144G|[AH]\d+X?M)\b|^QUADRO|H200 NVL")


def known_accelerator(name: str) -> Accelerator | None:
    """Return the accelerator that the driver calls by this name, such as "NVIDIA H100 80GB HBM3".

    Args:
        name: From `torch.cuda.get_device_name`, or as `nvidia-smi` prints it.

    Returns:
        None where the course has no figures for it.
    """
    text = re.sub(r"[-_ ]+", " ", name.upper()).strip()
    if _OTHER.search(text):
        return None
    return next((card for card in ACCELERATORS.values() if card.driver and re.search(card.driver, text)), None)


def no_figures(name: str) -> str:
    """Return the sentence for a GPU that is not in the table."""
    return f"the course has no peak for {name}, so no MFU is given; peak_flops=... takes the datasheet's dense rate"
