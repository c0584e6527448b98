"""The cluster that a layout runs on: how many devices of which kind, and what connects them.

Two bandwidths matter to a plan. Inside a node devices talk over the scale-up link; out of it every device has its
share of the node's network cards. A group of ranks runs at the first only if all of it sits in one node.

By default a ring that leaves the node moves at the rate of one card, whoever else of the group sits in the node.
`rails=True` lets the r ranks that a group has in a node use their r cards together, as rings that are laid one per
card can: never more than the link inside the node. Which of the two a run sees depends on its library and on how
the ranks are placed; the published ZeRO-3 rows of Narayanan et al. fit the first, those of the FSDP paper the second.
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.hardware import ACCELERATORS, Accelerator, accelerator
from lablib.calc.links import link_rate

#: Share of the peak that large bf16 matrix products reach on the card, as measured by Stas Bekman (Machine Learning
#: Engineering, maximum achievable matmul FLOPS). The H100's share stands for its kin, and for cards without a figure.
ACHIEVABLE = {"a100": 0.87, "h100": 0.80, "b200": 0.78, "mi300x": 0.51}
DEFAULT_ACHIEVABLE = ACHIEVABLE["h100"]

#: Network card of one device: DGX A100 has 8 x HDR, DGX H100 8 x NDR (see `links`), DeepSeek-V3's H800 nodes 50 GB/s a
#: card (arXiv 2412.19437, section 3). The others are assumptions: give `nic` for your cluster.
NICS = {"a100": "ib-hdr", "h100": "ib-ndr", "h800": "ib-ndr", "h200": "ib-ndr", "b200": "ib-ndr"}
DEFAULT_NIC = "100gbe"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal devices in equal nodes.

    Attributes:
        gpu: The accelerator.
        gpus: Devices in all.
        gpus_per_node: Devices that the scale-up link connects.
        intra: Bytes per second of one device inside a node, per direction.
        inter: Bytes per second of one device out of its node, per direction.
        achievable: Share of the peak that large matrix products reach.
        rails: Whether the ranks that a group has in a node use all their network cards together.
    """

    gpu: Accelerator
    gpus: int
    gpus_per_node: int
    intra: float
    inter: float
    achievable: float
    rails: bool = False

    @property
    def nodes(self) -> int:
        """Nodes; a cluster smaller than a node has one."""
        return -(-self.gpus // self.gpus_per_node)

    def bandwidth(self, size: int, stride: int = 1) -> float:
        """Return the bytes per second at which a rank of a ring sends."""
        # A group whose span does not divide the node straddles two nodes somewhere: tp=6 in nodes of 8.
        if self.gpus <= self.gpus_per_node or self.gpus_per_node % (size * stride) == 0:
            return self.intra
        inside = max(1, self.gpus_per_node // stride) if self.rails else 1
        return min(self.intra, inside * self.inter)


def cluster(
    gpu: str | Accelerator,
    gpus: int,
    *,
    gpus_per_node: int = 8,
    nic: str | float | None = None,
    intra: str | float | None = None,
    rails: bool = False,
) -> Cluster:
    """Return a cluster by the names of its parts.

    Args:
        gpu: Accelerator or its name.
        gpus: Devices in all; whole nodes, or less than one.
        gpus_per_node: Devices of one node.
        nic: Link or bytes per second of one device out of the node; None means what `NICS` lists.
        intra: Link or bytes per second inside a node; None means the accelerator's own.
        rails: As in `Cluster`.

    Raises:
        ValueError: If a name is unknown, or the devices do not fill whole nodes.
    """
    for name, value in (("gpus", gpus), ("gpus_per_node", gpus_per_node)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
    if gpus > gpus_per_node and gpus % gpus_per_node:
        whole = gpus // gpus_per_node * gpus_per_node
        raise ValueError(
            f"gpus={gpus} are not whole nodes of gpus_per_node={gpus_per_node}; "
            f"use {whole} or {whole + gpus_per_node}"
        )
    card = gpu if isinstance(gpu, Accelerator) else accelerator(gpu)
    key = _key(card)
    return Cluster(
        gpu=card,
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        intra=card.neighbour_link().bandwidth if intra is None else link_rate("intra", intra),
        inter=link_rate("nic", NICS.get(key.split("-")[0], DEFAULT_NIC) if nic is None else nic),
        achievable=ACHIEVABLE.get(key.split("-")[0], DEFAULT_ACHIEVABLE),
        rails=rails,
    )


def _key(card: Accelerator) -> str:
    return next((key for key, known in ACCELERATORS.items() if known == card), card.name.lower())
