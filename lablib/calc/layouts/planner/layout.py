"""A layout, the cluster it runs on, and whether the one can run on the other.

A layout is ten numbers and names (`Layout`). Four multiply to the ranks: `tp · cp · pp · dp`; ep is taken out of dp.
The layers go into `pp · virtual_stages` equal chunks. Where they do not, the embedding and the head count as a layer
each: the first and the last chunk hold one layer less, as Llama 3's did, 126 + 2 over 16 stages. Where that is not
enough either, and a stage is one chunk, the first and the last stage hold what is left: 61 layers are 3 + 14 x 4 + 2.

Two bandwidths of a `Cluster` matter: inside a node devices talk over the scale-up link; out of it each has its share of
the node's network cards. A group of ranks runs at the first only if all of it sits in one node. By default a ring that
leaves the node moves at the rate of one card, whoever else of the group sits in the node. `rails=True` lets the r ranks
that a group has in a node use their r cards together, but never faster than the link inside. Which of the two a run
sees depends on its library and on the placement of ranks; the published ZeRO-3 rows of Narayanan et al. fit the first,
those of the FSDP paper the second.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from lablib.calc.errors import check_whole, either, must_divide, one_of
from lablib.calc.hardware import ACCELERATORS, Accelerator, accelerator, link_rate
from lablib.calc.memory import RECOMPUTE
from lablib.calc.models import ModelConfig
from lablib.calc.schedules import SCHEDULES

FIELDS = ("tp", "cp", "ep", "dp", "pp", "zero", "micro_batch", "recompute", "schedule", "virtual_stages")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a job is cut; `check_layout` says whether it can be.

    Attributes:
        tp: Tensor-parallel ranks, with sequence parallelism over the same ranks unless the plan says otherwise.
        ep: Expert-parallel ranks, taken from dp.
        zero: ZeRO stage over dp times cp ranks.
        micro_batch: Sequences in one forward pass of one replica.
        recompute: "none", "selective" or "full".
        schedule: "1f1b", "gpipe" or "interleaved".
        virtual_stages: Chunks of layers in each stage; more than 1 only when interleaved.
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

    @property
    def gpus(self) -> int:
        """Ranks of the job, `tp · cp · pp · dp`."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The layout as (tp, cp, pp, dp): what papers print."""
        return self.tp, self.cp, self.pp, self.dp

    def num_microbatches(self, global_batch: int) -> int:
        """Return the micro-batches that one replica runs in a step."""
        return global_batch // (self.dp * self.micro_batch)

    def as_dict(self) -> dict[str, int | str]:
        """Return the fields by name."""
        return asdict(self)

    def __str__(self) -> str:
        parts = [
            f"{name}={getattr(self, name)}" for name in ("tp", "cp", "ep", "pp", "dp") if name != "ep" or self.ep > 1
        ]
        pipeline = f" {self.schedule}" + (f" v={self.virtual_stages}" if self.virtual_stages > 1 else "")
        return f"{' '.join(parts)} zero={self.zero} mb={self.micro_batch} recompute={self.recompute}" + (
            pipeline if self.pp > 1 else ""
        )


def chunk_layers(num_layers: int, pp: int, virtual_stages: int = 1) -> tuple[int, int, int] | None:
    """Return the layers of the first, every middle and the last chunk, or None if they cannot be cut so."""
    chunks = pp * virtual_stages
    if num_layers % chunks == 0:
        return (num_layers // chunks,) * 3
    middle = -(-(num_layers + 2) // chunks)
    short = chunks * middle - num_layers
    if chunks == 1 or short > 2 * middle or (virtual_stages > 1 and short != 2):
        return None
    return middle - short // 2, middle, middle - (short - short // 2)


def layers_per_stage(num_layers: int, pp: int, virtual_stages: int = 1) -> list[int]:
    """Return the layers of each stage, all its chunks together."""
    cut = chunk_layers(num_layers, pp, virtual_stages)
    if cut is None:
        usable = [n for n in range(1, num_layers + 1) if chunk_layers(num_layers, n, virtual_stages)]
        near = sorted(sorted(usable, key=lambda n: abs(n - pp))[:6])
        times = f" times virtual_stages={virtual_stages}" if virtual_stages > 1 else ""
        raise ValueError(
            f"pp={pp}{times} does not cut num_layers={num_layers}, nor {num_layers} + 2 (embedding and head as a "
            f"layer each), into even chunks; use pp={either(near) if near else 1}"
        )
    first, middle, last = cut
    sizes = [middle * virtual_stages] * pp
    sizes[0] -= middle - first
    sizes[-1] -= middle - last
    return sizes


def check_layout(
    layout: Layout, model: ModelConfig, *, gpus: int, seq: int, global_batch: int, sequence_parallel: bool = True
) -> None:
    """Raise a ValueError that names every factor unless the layout can run."""
    for name in ("tp", "cp", "ep", "dp", "pp", "micro_batch", "virtual_stages"):
        check_whole(name, getattr(layout, name), 1)
    if layout.zero not in (0, 1, 2, 3):
        raise ValueError(f"zero={layout.zero} does not exist: use 1, 2 or 3, or 0 for replicas")
    one_of("recompute", layout.recompute, RECOMPUTE)
    one_of("schedule", layout.schedule, SCHEDULES)
    t, c, p, d = layout.shape
    if layout.gpus != gpus:
        raise ValueError(
            f"tp={t} x cp={c} x pp={p} x dp={d} = {layout.gpus} ranks, but there are gpus={gpus}"
            + (f"; with dp={gpus // (t * c * p)} they would be {gpus}" if gpus % (t * c * p) == 0 else "")
        )
    check_split(model, tp=t, cp=c, seq=seq, sequence_parallel=sequence_parallel)
    if layout.ep > 1:
        if not model.is_moe:
            raise ValueError(f"ep={layout.ep} needs a model with experts and {model.name} has none; use ep=1")
        must_divide("ep", layout.ep, "num_experts", model.num_experts)
        must_divide("ep", layout.ep, "dp", d)
    must_divide("dp x micro_batch", d * layout.micro_batch, "global_batch", global_batch)
    layers_per_stage(model.num_layers, p, layout.virtual_stages)
    if layout.schedule == "interleaved":
        if p == 1 or layout.virtual_stages == 1:
            raise ValueError(
                f"schedule='interleaved' needs pp and virtual_stages of at least 2; they are pp={p} and "
                f"virtual_stages={layout.virtual_stages}"
            )
        if layout.num_microbatches(global_batch) % p:
            raise ValueError(
                f"global_batch={global_batch} / (dp={d} x micro_batch={layout.micro_batch}) = "
                f"{layout.num_microbatches(global_batch)} micro-batches, which pp={p} must divide when interleaved"
            )
    elif layout.virtual_stages > 1:
        raise ValueError(f"virtual_stages={layout.virtual_stages} needs schedule='interleaved'")


def check_split(model: ModelConfig, *, tp: int, cp: int, seq: int, sequence_parallel: bool) -> None:
    """Raise a ValueError unless tp divides heads and widths, and cp and tp the sequence."""
    widths = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "ffn": model.ffn}
    if model.is_moe:
        widths["expert_ffn"] = model.expert_ffn
    for name, size in widths.items():
        must_divide("tp", tp, name, size)
    # Causal attention is balanced by giving each context-parallel rank a chunk from each end of the sequence.
    must_divide("2 x cp" if cp > 1 else "cp", 2 * cp if cp > 1 else 1, "seq", seq)
    if sequence_parallel and tp > 1:
        must_divide("tp", tp, "seq / cp", seq // cp)
    if model.learned_positions and seq > model.max_positions:
        raise ValueError(f"seq={seq} is more than the {model.max_positions} learned positions of {model.name}")


#: Share of the peak that large bf16 matrix products reach, as measured by Stas Bekman (Machine Learning
#: Engineering, maximum achievable matmul FLOPS). The H100's share stands for its kin, and for GPUs without a figure.
ACHIEVABLE = {"a100": 0.87, "h100": 0.80, "b200": 0.78, "mi300x": 0.51}


DEFAULT_ACHIEVABLE = ACHIEVABLE["h100"]


#: Network card of one device: DGX A100 has 8 x HDR, DGX H100 8 x NDR (see `hardware.LINKS`), DeepSeek-V3's H800 nodes 50 GB/s a
#: card (arXiv 2412.19437, section 3). The others are assumptions: give `nic` for your cluster.
NICS = {"a100": "ib-hdr", "h100": "ib-ndr", "h800": "ib-ndr", "h200": "ib-ndr", "b200": "ib-ndr"}


DEFAULT_NIC = "100gbe"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal devices in equal nodes.

    Attributes:
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
        gpus: Devices in all; whole nodes, or less than one.
        nic: Link or bytes per second of one device out of the node; None means what `NICS` lists.
        intra: Link or bytes per second inside a node; None means the accelerator's own.
    """
    for name, value in (("gpus", gpus), ("gpus_per_node", gpus_per_node)):
        check_whole(name, value, 1)
    if gpus > gpus_per_node and gpus % gpus_per_node:
        whole = gpus // gpus_per_node * gpus_per_node
        raise ValueError(
            f"gpus={gpus} are not whole nodes of gpus_per_node={gpus_per_node}; use {whole} or {whole + gpus_per_node}"
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
