"""A mesh as text and as SVG: one row a node, one cell a rank, a label of its coordinates.

Chapter: book/07_3d_parallelism.md
"""

from __future__ import annotations

from lablib.calc.mesh import Mesh

#: Cells that a drawing may have; more cannot be read.
MOST = 1024


def _axes(mesh: Mesh) -> list[str]:
    return [axis for axis in mesh.order if mesh.size(axis) > 1] or [mesh.order[0]]


def label(mesh: Mesh, rank: int) -> str:
    """Return a rank's coordinates along the axes that have any: "t1 d0 p3".

    Args:
        mesh: The mesh.
        rank: The rank.
    """
    at = mesh.coordinates(rank)
    return " ".join(f"{axis[0]}{at[axis]}" for axis in _axes(mesh))


def mesh_text(mesh: Mesh, *, nodes: int | None = None) -> str:
    """Return the ranks node by node with their coordinates, and then what each axis's groups are.

    Args:
        mesh: The mesh.
        nodes: Nodes to draw; None means all, or the first 8 where there are more than 16.
    """
    shown = mesh.nodes if nodes is None and mesh.nodes <= 16 else min(mesh.nodes, nodes or 8)
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
    """Return one sentence on an axis's groups: how many, the first, and whether they leave a node.

    Args:
        mesh: The mesh.
        axis: The axis.
    """
    size, first = mesh.size(axis), mesh.group(0, axis)
    listed = ", ".join(map(str, first if size <= 6 else [*first[:3], "...", first[-1]]))
    where = (
        f"leave a node (the first touches {len(mesh.nodes_of(first))})"
        if mesh.crosses(axis)
        else "stay in a node"
    )
    return f"{axis}: {mesh.ranks // size:,} groups of {size}, like [{listed}]; they {where}"
