"""A layout, the cluster it runs on, and whether the one can run on the other.

Four numbers of a `Layout` multiply to the ranks, `tp · cp · pp · dp`. Layers with experts see the `tp · cp · dp` ranks of
a stage as `etp · ep · edp` (Liu et al. 2025, arXiv 2504.14960, section 3). Where the layers do not go into
`pp · virtual_stages` equal chunks, embedding and head count as a layer each, as Llama 3's did, 126 + 2 over 16 stages; where
that is not enough, and a stage is one chunk, the first and the last stage hold what is left.

A group of ranks runs at the rate of the scale-up link only if all of it sits in one node. Out of it the ranks that it has
in a node use their network cards together, but never faster than the link inside; in an all-to-all each has its own.
`rails=False` moves a whole group at the rate of one card, as the DeepSpeed of 2021 did in Narayanan's ZeRO-3 rows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from math import gcd

from lablib.calc.errors import check_whole, must_divide, one_of
from lablib.calc.hardware import LINKS, NETWORKS, Accelerator, Link, accelerator, given_link
from lablib.calc.memory import OFFLOADS, RECOMPUTE, TUNINGS
from lablib.calc.models import ModelConfig, Tensor
from lablib.calc.parallel import check_degrees, check_schedule, check_shard
from lablib.calc.precision import OPTIMIZERS, Optimizer, find_optimizer
from lablib.calc.schedules import SCHEDULES, layers_per_stage

FIELDS = (
    "tp",
    "cp",
    "ep",
    "dp",
    "pp",
    "zero",
    "micro_batch",
    "recompute",
    "schedule",
    "virtual_stages",
    "etp",
    "shard",
)
CUTS = ("tp", "cp", "pp", "ep")  # what cuts a model, a sequence or its experts; dp cuts the batch alone


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a job is cut; `check_layout` says whether it can be.

    Attributes:
        tp: Tensor-parallel ranks, with sequence parallelism over the same ranks unless the plan says otherwise.
        ep: Expert-parallel ranks, taken from cp and dp together; with etp, from all ranks of a stage.
        zero: ZeRO stage over dp times cp ranks.
        micro_batch: Sequences in one forward pass of one replica.
        recompute: "none", "selective" or "full".
        schedule: "1f1b", "gpipe" or "interleaved".
        virtual_stages: Chunks of layers in each stage; more than 1 only when interleaved.
        etp: Ranks that split one expert; None: tp.
        shard: Ranks that share one copy of the sharded states; None: all dp times cp. Replicas all-reduce shards (HSDP).
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    zero: int = 0
    micro_batch: int = 1
    recompute: str = "none"
    schedule: str = "1f1b"
    virtual_stages: int = 1
    etp: int | None = None
    shard: int | None = None

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO shards a parameter that is no expert's."""
        return self.shard or self.dp * self.cp

    @property
    def expert_shards(self) -> int:
        """Ranks over which it shards a routed expert's."""
        return self.tp * self.shards // (self.ep * self.expert_split)

    @property
    def edp(self) -> int:
        """Copies of a routed expert: the ranks that its gradient is averaged over."""
        return self.tp * self.cp * self.dp // (self.ep * self.expert_split)

    @property
    def expert_split(self) -> int:
        """Ranks that split one expert: etp, or tp where nothing is said."""
        return self.tp if self.etp is None else self.etp

    @property
    def gpus(self) -> int:
        """Ranks of the job, `tp · cp · pp · dp`."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The layout as (tp, cp, pp, dp): what papers print."""
        return self.tp, self.cp, self.pp, self.dp

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of those of `CUTS` that are above 1."""
        return tuple(name for name in CUTS if getattr(self, name) > 1)

    def num_microbatches(self, global_batch: int) -> int:
        """Return the micro-batches that one replica runs in a step."""
        return global_batch // (self.dp * self.micro_batch)

    def as_dict(self) -> dict[str, int | str]:
        """Return the fields by name."""
        return asdict(self)

    def __str__(self) -> str:
        shown = [name for name in ("tp", "cp", "ep", "pp", "dp") if name != "ep" or self.ep > 1]
        if self.etp is not None:
            shown.insert(shown.index("pp"), "etp")
        parts = [f"{name}={getattr(self, name)}" for name in shown]
        pipeline = f" {self.schedule}" + (f" v={self.virtual_stages}" if self.virtual_stages > 1 else "")
        parts += [f"zero={self.zero}"] + ([f"shard={self.shard}"] if self.shard else [])
        return f"{' '.join(parts)} mb={self.micro_batch} recompute={self.recompute}" + (pipeline if self.pp > 1 else "")


def check_layout(
    layout: Layout, model: ModelConfig, *, gpus: int, seq: int, global_batch: int, sequence_parallel: bool = True,
    cp_way: str = "ring",
) -> None:  # fmt: skip
    """Raise a ValueError that names every factor unless the layout can run."""
    for name in ("tp", "cp", "ep", "dp", "pp", "micro_batch", "virtual_stages"):
        check_whole(name, getattr(layout, name), 1)
    if layout.zero not in (0, 1, 2, 3):
        raise ValueError(f"zero={layout.zero!r} does not exist: use 1, 2 or 3, or 0 for replicas")
    one_of("recompute", layout.recompute, RECOMPUTE)
    one_of("schedule", layout.schedule, SCHEDULES)
    t, c, p, d = layout.shape
    if layout.gpus != gpus:
        raise ValueError(
            f"tp={t} x cp={c} x pp={p} x dp={d} = {layout.gpus} ranks, but there are gpus={gpus}"
            + (f"; with dp={gpus // (t * c * p)} they would be {gpus}" if gpus % (t * c * p) == 0 else "")
        )
    if layout.etp is not None:
        check_whole("etp", layout.etp, 1)
    check_degrees(
        model,
        tp=t,
        cp=c,
        dp=d,
        ep=layout.ep,
        etp=layout.etp,
        seq=seq,
        sequence_parallel=sequence_parallel,
        cp_way=cp_way,
    )
    check_shard(layout.shard, zero=layout.zero, tp=t, cp=c, dp=d, ep=layout.ep, etp=layout.etp)
    must_divide("dp x micro_batch", d * layout.micro_batch, "global_batch", global_batch)
    layers_per_stage(model.num_layers, p, layout.virtual_stages)
    check_schedule(
        layout.schedule, pp=p, virtual_stages=layout.virtual_stages,
        num_microbatches=layout.num_microbatches(global_batch),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, by which optimizer, and what of its states is on the CPU; settings of `rung memory`.

    With LoRA gradients of adapters are sent, and adapters are updated; products are timed as if all weights were trained,
    an upper bound.
    """

    optimizer: Optimizer | str = OPTIMIZERS["adamw"]
    offload: str = "none"
    tuning: str = "full"
    lora_rank: int = 16
    lora_targets: str = "all"

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", find_optimizer(self.optimizer))
        one_of("offload", self.offload, OFFLOADS)
        one_of("tuning", self.tuning, TUNINGS)

    def trained(self, tensor: Tensor, layout: Layout) -> int:
        """Return the parameters of a rank that are trained: a tensor's own, or those of its adapters."""
        split = layout.tp, layout.ep, layout.etp
        if self.tuning == "full":
            return tensor.local_params(*split)
        adapted = tensor.is_adapted and self.lora_targets in ("all", tensor.component)
        return tensor.adapter_params(self.lora_rank, *split) if adapted else 0

    def settings(self) -> dict[str, object]:
        """Return the fields by name."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def as_dict(self) -> dict[str, object]:
        """Return those that are not as usual, the optimizer by its name: nothing of AdamW over all weights on the GPU."""
        usual = Training().settings()
        return {name: getattr(one, "name", one) for name, one in self.settings().items() if one != usual[name]}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.as_dict().items())


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal devices in equal nodes.

    Attributes:
        nic: A network card of a node, or None in one node that none was named for.
        nics_per_node: Network cards that the devices of a node share.
        achievable: Share of the peak that large matrix products reach.
        rails: Whether the ranks that a group has in a node use all their network cards together.
        given: Which of "intra" and "nic" the caller gave; the others are assumed from the accelerator.
    """

    gpu: Accelerator
    gpus: int
    gpus_per_node: int
    scale_up: Link
    nic: Link | None
    nics_per_node: int
    achievable: float
    rails: bool = True
    given: tuple[str, ...] = ()

    @property
    def nodes(self) -> int:
        """Nodes; a cluster smaller than a node has one."""
        return -(-self.gpus // self.gpus_per_node)

    @property
    def intra(self) -> float:
        """Bytes per second of one device to the others of its node, all of them together, per direction."""
        ranks = min(self.gpus, self.gpus_per_node)
        return self._inside(ranks).among(ranks)

    @property
    def inter(self) -> float | None:
        """Bytes per second of one device out of its node, per direction: its share of the cards."""
        return None if self.nic is None else self.nic.bandwidth * self.nics_per_node / self.gpus_per_node

    def bandwidth(self, size: int, stride: int = 1) -> float:
        """Return the bytes per second at which a rank of a ring sends."""
        if self._in_a_node(size, stride):
            return self._inside(size * stride).among(size)
        # A group whose span does not divide the node straddles two nodes somewhere: tp=6 in nodes of 8 leaves 2 of its
        # ranks in one of them, and what crosses goes over their cards.
        together = self.neighbours(size, stride)
        inside = self._inside(together * stride).among(together) if together > 1 else self.intra
        return min(inside, (together if self.rails else 1) * self.inter)

    def neighbours(self, size: int, stride: int = 1) -> int:
        """Return how many ranks of a group sit in one node, where they are fewest."""
        return size if self._in_a_node(size, stride) else max(1, gcd(size * stride, self.gpus_per_node) // stride)

    def exchange(self, size: int, stride: int = 1) -> float:
        """Return the bytes per second at which a rank of an all-to-all sends, to ranks of its node and out of it at once."""
        if size == 1 or self._in_a_node(size, stride):
            return self.bandwidth(size, stride)
        near = self.neighbours(size, stride)
        out = self.inter * (size - 1) / (size - near)
        return min(out, self._inside(near * stride).among(near) * (size - 1) / (near - 1)) if near > 1 else out

    def hop(self, size: int, stride: int = 1) -> float:
        """Return the bytes per second from one rank of a group to the next, the slowest of them."""
        inside = self._inside(size * stride).among(2)
        return inside if self._in_a_node(size, stride) else min(inside, self.inter)

    def links(self) -> dict[str, dict[str, object]]:
        """Return the link inside a node and, if the cluster has several, out of it: name, rate and where it is from.

        Rates are bytes per second of one device, per direction; "from" is "given" or "assumed". Where a pair of devices
        has another rate than all of a node, it is named.
        """
        found = {"intra": (self._inside(min(self.gpus, self.gpus_per_node)), self.intra, self.gpu.sources["links"])}
        if self.nodes > 1:
            found["nic"] = (self.nic, self.inter, self.gpu.sources.get("nic", ""))
        said = {
            name: {"link": one.name, "bytes_per_second": rate, "from": "given"}
            if name in self.given
            else {"link": one.name, "bytes_per_second": rate, "from": "assumed", "source": source}
            for name, (one, rate, source) in found.items()
        }
        pair = self._inside(2).among(2)
        if self.gpus > 1 and self.gpus_per_node > 1 and pair != self.intra:
            said["intra"]["pair_bytes_per_second"] = pair
        return said

    def links_text(self) -> str:
        """Return the links as a sentence: what every time that rests on them is said with."""
        where = {"intra": f"inside a node of {min(self.gpus, self.gpus_per_node)}", "nic": "a GPU out of it"}
        parts = []
        for name, one in self.links().items():
            pair = f", {one['pair_bytes_per_second'] / 1e9:.4g} a pair" if "pair_bytes_per_second" in one else ""
            parts.append(f"{one['link']}, {one['bytes_per_second'] / 1e9:.4g} GB/s {where[name]}{pair} ({one['from']})")
        return "Links: " + "; ".join(parts)

    def _in_a_node(self, size: int, stride: int) -> bool:
        return self.gpus <= self.gpus_per_node or self.gpus_per_node % (size * stride) == 0

    def _inside(self, span: int) -> Link:
        """The link inside a node over so many neighbours: more than a bridge joins talk over PCIe."""
        joins = self.scale_up.joins
        return self.scale_up if joins is None or span <= joins else LINKS[self.gpu.host]


def cluster(
    gpu: str | Accelerator,
    gpus: int,
    *,
    gpus_per_node: int | None = None,
    nic: str | float | None = None,
    intra: str | float | None = None,
    rails: bool = True,
    nics_per_node: int | None = None,
) -> Cluster:
    """Return a cluster by the names of its parts.

    Args:
        gpus: Devices in all; whole nodes, or less than one.
        nic: Link or bytes per second of a network card; None means that of the vendor's reference system.
        intra: Link or bytes per second inside a node; None means the accelerator's own.
        nics_per_node: Network cards of a node, shared by its devices; None means one for each.

    Raises:
        ValueError: If the devices are no whole nodes, or leave a node and have no network card in the table.
    """
    card = gpu if isinstance(gpu, Accelerator) else accelerator(gpu)
    node = card.gpus_per_node if gpus_per_node is None else gpus_per_node
    cards = node if nics_per_node is None else nics_per_node
    for name, value in (("gpus", gpus), ("gpus_per_node", node), ("nics_per_node", cards)):
        check_whole(name, value, 1)
    check_nodes(gpus, node)
    line = card.neighbour_link() if intra is None else given_link("intra", intra)
    network = None
    if nic is not None:
        network = given_link("nic", nic)
    elif card.nic is not None:
        network = LINKS[card.nic]
    elif gpus > node:
        raise ValueError(
            f"gpus={gpus} leave a node of gpus_per_node={node}, and the course knows no usual network card of "
            f"{card.name}: give nic, a rate like '40 GB/s' or one of {', '.join(NETWORKS)}"
        )
    return Cluster(
        gpu=card,
        gpus=gpus,
        gpus_per_node=node,
        scale_up=line,
        nic=network,
        nics_per_node=cards,
        achievable=card.achievable,
        rails=rails,
        given=tuple(name for name, value in (("intra", intra), ("nic", nic)) if value is not None),
    )


def check_nodes(gpus: int, gpus_per_node: int) -> None:
    """Raise a ValueError unless the devices are whole nodes, or less than one."""
    if gpus > gpus_per_node and gpus % gpus_per_node:
        whole = gpus // gpus_per_node * gpus_per_node
        raise ValueError(
            f"gpus={gpus} are not whole nodes of gpus_per_node={gpus_per_node}; use {whole} or {whole + gpus_per_node}, "
            "or give the gpus_per_node that the job gets"
        )
