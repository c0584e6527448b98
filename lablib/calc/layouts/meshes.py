"""Ranks as points of a mesh: coordinates, process groups, which groups leave a node, and what they send. Chapter 07.

A rank is the sum of its coordinates times the strides, and the stride of an axis is the product of the sizes before it:
rank = c_1 + n_1 (c_2 + n_2 (c_3 + ...)). Ranks of a node are neighbours, so the fastest axes stay inside nodes: by default
tp, cp, ep, dp, pp, Megatron-LM's order (`--use-tp-pp-dp-mapping` swaps the last two); Llama 3 has tp, cp, pp, dp
(arXiv 2407.21783, section 3.3.2).

Experts are sharded over ep ranks *out of* the dp replicas, and dp is then two axes of the grid, ep and edp = dp / ep.
Gradients of what is no routed expert are summed over `groups("dp", "cp")`, those of a routed expert over
`groups("edp", "cp")`; all are divided by dp cp.
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
from lablib.calc.params import count_params

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
    """Return one sentence on an axis's groups: how many, the first, and whether they leave a node."""
    size, first = mesh.size(axis), mesh.group(0, axis)
    listed = ", ".join(map(str, first if size <= 6 else [*first[:3], "...", first[-1]]))
    where = f"leave a node (the first touches {len(mesh.nodes_of(first))})" if mesh.crosses(axis) else "stay in a node"
    return f"{axis}: {mesh.ranks // size:,} groups of {size}, like [{listed}]; they {where}"


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
