"""Ranks as points of a mesh: coordinates, process groups, which groups leave a node, and what they send. Chapter 07.

A rank is the sum of its coordinates times the strides, and the stride of an axis is the product of the sizes before it:
rank = c_1 + n_1 (c_2 + n_2 (c_3 + ...)). Ranks of a node are neighbours, so the fastest axes stay inside nodes: by default
tp, cp, ep, dp, pp, Megatron-LM's order (`--use-tp-pp-dp-mapping` swaps the last two); Llama 3 has tp, cp, pp, dp
(arXiv 2407.21783, section 3.3.2).

Experts are sharded over ep ranks *out of* the dp replicas, and dp is then two axes of the grid, ep and edp = dp / ep.
Gradients of what is no routed expert are summed over `groups("dp", "cp")`, those of a routed expert over
`groups("edp", "cp")`; all are divided by dp cp.

What a rank holds follows from one coordinate each: samples from dp, tokens from cp, layers from pp, query heads from tp,
experts from ep. So ranks that differ in tp, cp or pp alone read the same samples, and a step has dp times those of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lablib.calc.communication import ring_all_gather_bytes, ring_all_reduce_bytes
from lablib.calc.errors import check_whole, one_of
from lablib.calc.layouts.planner import Layout
from lablib.calc.memory import resolve_model
from lablib.calc.models import ModelConfig
from lablib.calc.parallel import check_degrees, expert_groups, rank_experts, rank_samples, rank_tokens, split_heads
from lablib.calc.params import count_params
from lablib.calc.schedules import stage_layers

AXES = ("tp", "cp", "ep", "dp", "pp")


DEFAULT_ORDER = "tp-cp-ep-dp-pp"


@dataclass(frozen=True)
class Mesh:
    """Ranks on a grid.

    Attributes:
        sizes: Ranks along every axis of the order.
        gpus_per_node: Ranks that share a node.
    """

    sizes: tuple[int, ...]
    order: tuple[str, ...]
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        for name, size in (*zip(self.order, self.sizes, strict=True), ("gpus_per_node", self.gpus_per_node)):
            check_whole(name, size, 1)

    @cached_property
    def ranks(self) -> int:
        """Ranks in all, the product of the sizes."""
        return math.prod(self.sizes)

    @cached_property
    def strides(self) -> dict[str, int]:
        """Distance in rank numbers between neighbours along every axis."""
        found, stride = {}, 1
        for axis, size in zip(self.order, self.sizes, strict=True):
            found[axis] = stride
            stride *= size
        return found

    @property
    def nodes(self) -> int:
        """Nodes that the ranks need; the last may be partly empty."""
        return -(-self.ranks // self.gpus_per_node)

    def size(self, axis: str) -> int:
        """Return the ranks along an axis; dp is ep times edp where there are experts."""
        if self._parts(axis) != (axis,):
            return self.size("ep") * self.size("edp")
        return self.sizes[self.order.index(one_of("axis", axis, self.order))]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return where a rank is along every axis."""
        self._check_rank(rank)
        return {axis: rank // self.strides[axis] % self.size(axis) for axis in self.order}

    def rank(self, coordinates: Mapping[str, int] | None = None, /, **more: int) -> int:
        """Return the rank at these coordinates; an axis that is not given counts as 0."""
        at = dict(coordinates or {}) | more
        for axis, position in at.items():
            if not 0 <= position < self.size(axis):
                raise ValueError(f"{axis}={position} is not in 0..{self.size(axis) - 1}")
        return sum(position * self.strides[axis] for axis, position in at.items())

    def group(self, rank: int, *axes: str) -> list[int]:
        """Return the ranks that differ from this one along these axes only, itself included, in order."""
        self._check_rank(rank)
        if not axes:
            raise ValueError(f"name at least one axis of {', '.join(self.order)}")
        here = self.coordinates(rank)
        parts = {part for axis in axes for part in self._parts(axis)}
        members = [rank - sum(here[axis] * self.strides[axis] for axis in parts if self.size(axis))]
        for axis in parts:
            members = [first + i * self.strides[axis] for first in members for i in range(self.size(axis))]
        return sorted(members)

    def groups(self, *axes: str) -> list[list[int]]:
        """Return every process group along these axes; each rank is in exactly one."""
        seen: set[int] = set()
        found = []
        for rank in range(self.ranks):
            if rank not in seen:
                members = self.group(rank, *axes)
                seen.update(members)
                found.append(members)
        return found

    def node(self, rank: int) -> int:
        """Return the node of a rank."""
        self._check_rank(rank)
        return rank // self.gpus_per_node

    def nodes_of(self, group: Sequence[int]) -> list[int]:
        """Return the nodes that a group touches, in order."""
        return sorted({self.node(rank) for rank in group})

    def crossing(self, *axes: str) -> list[list[int]]:
        """Return the groups along these axes that leave a node."""
        return [group for group in self.groups(*axes) if len(self.nodes_of(group)) > 1]

    def crosses(self, *axes: str) -> bool:
        """Return whether any group along these axes leaves a node; for one axis without listing the groups."""
        if len(axes) > 1 or self._parts(axes[0]) != axes:
            return bool(self.crossing(*axes))
        span = self.strides[one_of("axis", axes[0], self.order)] * self.size(axes[0])
        return self.size(axes[0]) > 1 and self.ranks > self.gpus_per_node and self.gpus_per_node % span != 0

    def _parts(self, axis: str) -> tuple[str, ...]:
        """The axes of the grid that an axis is made of."""
        return ("ep", "edp") if axis == "dp" and "edp" in self.order else (axis,)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank={rank} is not in 0..{self.ranks - 1}")


def mesh(
    *, tp: int = 1, cp: int = 1, ep: int = 1, dp: int = 1, pp: int = 1,
    order: str | Sequence[str] = DEFAULT_ORDER, gpus_per_node: int = 8, gpus: int | None = None,
) -> Mesh:  # fmt: skip
    """Return the mesh of a layout.

    Args:
        ep: Ranks out of dp that share the experts; it divides dp, and leaves edp = dp / ep copies of each expert.
        dp: Replicas of what is no expert, as in `Layout`.
        order: The five axes, fastest first, as a sequence or joined by "-".
        gpus: Ranks that there must be, or None.
    """
    axes = tuple(order.split("-") if isinstance(order, str) else order)
    if sorted(axes) != sorted(AXES):
        raise ValueError(f"order={'-'.join(axes)!r} must name each of {', '.join(AXES)} once, like {DEFAULT_ORDER!r}")
    given = {"tp": tp, "cp": cp, "ep": ep, "dp": dp, "pp": pp}
    for axis, size in given.items():
        check_whole(axis, size, 1)
    if dp % ep:
        raise ValueError(f"ep={ep} does not divide dp={dp}: experts are sharded over ranks out of the replicas")
    grid = given | ({"edp": dp // ep} if ep > 1 else {})
    axes = tuple("edp" if axis == "dp" and ep > 1 else axis for axis in axes)
    found = Mesh(tuple(grid[axis] for axis in axes), axes, gpus_per_node)
    if gpus is not None and found.ranks != gpus:
        named = [axis for axis in AXES if axis != "ep" and given[axis] > 1]
        factors = " x ".join(f"{axis}={given[axis]}" for axis in named) or "all axes 1"
        rest = found.ranks // dp
        hint = f"; dp={gpus // rest} would fill them" if gpus % rest == 0 else f"; {rest} does not divide {gpus}"
        raise ValueError(f"{factors} = {found.ranks} ranks, but there are gpus={gpus}{hint}")
    return found


def mesh_text(mesh: Mesh) -> str:
    """Return the ranks of the nodes, or of the first 8 of more than 16, with coordinates, and what each axis's groups are."""
    shown = mesh.nodes if mesh.nodes <= 16 else 8
    ranks = range(min(mesh.ranks, shown * mesh.gpus_per_node))
    width = max(len(label(mesh, rank)) for rank in ranks)
    wide = max(width, len(str(ranks[-1])))
    lines = []
    for node in range(shown):
        members = [rank for rank in ranks if mesh.node(rank) == node]
        lines.append(f"node {node:<4}" + " ".join(f"{rank:>{wide}}" for rank in members))
        lines.append(" " * 9 + " ".join(f"{label(mesh, rank):>{wide}}" for rank in members))
    if shown < mesh.nodes:
        lines.append(f"... and {mesh.nodes - shown:,} more nodes")
    return "\n".join(lines + [""] + [group_line(mesh, axis) for axis in _axes(mesh)])


def group_line(mesh: Mesh, axis: str) -> str:
    """Return one sentence on an axis's groups: how many, the first, and how many leave a node."""
    size, first, out = mesh.size(axis), mesh.group(0, axis), len(mesh.crossing(axis))
    listed = ", ".join(map(str, first if size <= 6 else [*first[:3], "...", first[-1]]))
    where = f"{out:,} leave a node (the first touches {len(mesh.nodes_of(first))})" if out else "they stay in a node"
    return f"{axis}: {mesh.ranks // size:,} groups of {size}, like [{listed}]; {where}"


def label(mesh: Mesh, rank: int) -> str:
    """Return a rank's coordinates along the axes that have any: "t1 d0 p3"."""
    at = mesh.coordinates(rank)
    return " ".join(f"{axis.removesuffix('p')}{at[axis]}" for axis in _axes(mesh))


def _axes(mesh: Mesh) -> list[str]:
    return [axis for axis in mesh.order if mesh.size(axis) > 1] or [mesh.order[0]]


def axis_bytes(
    model: ModelConfig | str, layout: Layout, *, seq: int, global_batch: int, value: int = 2
) -> dict[str, float]:
    """Return the bytes that a rank of a middle stage sends over tp, cp, pp and dp in a step.

    Keys and values are all-gathered; a stage sends its output on and a gradient back, each rank its part in tp.
    Gradients are all-reduced, or scattered and gathered under ZeRO-1, over dp and cp together; ψ/(tp · pp) of them.

    Args:
        layout: tp, cp, pp, dp, micro_batch and virtual_stages are used; ep must be 1.
        value: Bytes of a number on the wire.
    """
    if layout.ep > 1:
        raise ValueError(f"ep={layout.ep}: experts' tokens are counted by dispatch_bytes, a layer at a time")
    config = resolve_model(model)
    t, c, p, d = layout.shape
    m = layout.num_microbatches(global_batch)
    tokens = layout.micro_batch * seq * value
    layers = config.num_layers / p * m
    keys = 2 * tokens * config.kv_width / t
    held = count_params(config).total * value / (t * p)
    return {
        "tp": 4 * layers * ring_all_reduce_bytes(tokens * config.hidden / c, t),
        "cp": 2 * layers * ring_all_gather_bytes(keys, c),
        "pp": 2 * m * layout.virtual_stages * tokens * config.hidden / (c * t) if p > 1 else 0.0,
        "dp": ring_all_reduce_bytes(held, d * c),
    }


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What one rank holds.

    Attributes:
        groups: Its process groups as in `expert_groups`, those of experts only in a model that has any.
        samples: Of the global batch, for each micro-batch.
        tokens: Of each of these samples, a range for each chunk.
        layers: Of its pipeline stage, counted from 0.
        heads: Query heads of these layers.
        experts: Routed experts of each of these layers that has experts; none where no layer has.
        embedding: Whether its stage is the first.
        head: Whether its stage is the last, with the output head.
    """

    groups: dict[str, list[int]]
    samples: list[range]
    tokens: list[range]
    layers: range
    heads: range
    experts: range
    embedding: bool
    head: bool


def holdings(
    model: ModelConfig | str, ranks: Mesh, *, ep: int = 1, etp: int | None = None, seq: int, micro_batch: int = 1,
    rounds: int = 1, sampler: str = "contiguous", tokens: str = "zigzag",
) -> list[Holding]:  # fmt: skip
    """Return what every rank holds.

    Args:
        ranks: The mesh of attention: its own ep is 1.
        ep: Ranks that share the experts, folded over the ranks of a stage.
        etp: Ranks that split each expert; None means tp.
        seq: Tokens of a sample.
        rounds: Micro-batches of a step.
        sampler: One of `SAMPLERS`.
        tokens: "contiguous" or "zigzag", how cp cuts a sequence.

    Raises:
        ValueError: If the model cannot be split so.
    """
    config = resolve_model(model)
    if "edp" in ranks.order:
        raise ValueError("ranks has ep of its own: experts are folded over the stages of a mesh without it")
    tp, cp, dp, pp = (ranks.size(axis) for axis in ("tp", "cp", "dp", "pp"))
    check_degrees(config, tp=tp, cp=cp, dp=dp, ep=ep, etp=etp, seq=seq)
    found = expert_groups(
        tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=tp if etp is None else etp, order="-".join(ranks.order)
    )
    if not config.is_moe:
        found = {name: groups for name, groups in found.items() if name not in ("etp", "ep", "edp")}
    of_rank: list[dict[str, list[int]]] = [{} for _ in range(ranks.ranks)]
    for name, groups in found.items():
        for group in groups:
            for rank in group:
                of_rank[rank][name] = group
    stages, heads = stage_layers(config.num_layers, pp), split_heads(config.num_heads, config.num_kv_heads, tp)
    held = []
    for rank, groups in enumerate(of_rank):
        at = ranks.coordinates(rank)
        (layers,) = stages[at["pp"]]
        routed = config.is_moe and layers.stop > config.num_dense_layers
        held.append(
            Holding(
                groups=groups,
                samples=rank_samples(dp, at["dp"], micro_batch=micro_batch, rounds=rounds, sampler=sampler),
                tokens=rank_tokens(cp, at["cp"], tokens, seq),
                layers=layers,
                heads=heads[at["tp"]].queries,
                experts=rank_experts(config.num_experts, ep, groups["ep"].index(rank)) if routed else range(0),
                embedding=at["pp"] == 0,
                head=at["pp"] == pp - 1,
            )
        )
    return held
