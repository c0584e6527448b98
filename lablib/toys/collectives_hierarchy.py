"""An all-reduce that knows about nodes: most bytes stay on the fast links inside, few cross the slow ones.

With g ranks a node, each rank's share of a node's sum is S/g bytes, and only that leaves the node:

    reduce-scatter inside   rank i of every node has chunk i of its node's sum
    all-reduce across       the ranks i of all nodes add their chunks up; g such rings run side by side
    all-gather inside       every rank gets the other chunks
"""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from lablib.calc.collective_costs import Traffic
from lablib.toys.collectives_ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from lablib.toys.wire import Wire, chunks, flat


class NodeGroups(NamedTuple):
    """The two groups that a rank belongs to.

    Attributes:
        inside: The ranks of its node.
        across: The ranks with its place on all nodes.
    """

    inside: dist.ProcessGroup
    across: dist.ProcessGroup


class NodeTraffic(NamedTuple):
    """What one rank sent to its own node, and to others."""

    inside: Traffic
    across: Traffic


def node_groups(ranks_per_node: int) -> NodeGroups:
    """Return this rank's groups when node k has the ranks k·g to (k+1)·g - 1. Call it on all ranks, once.

    Raises:
        ValueError: If g does not divide the number of ranks.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if ranks_per_node < 1 or ranks % ranks_per_node:
        raise ValueError(f"ranks_per_node={ranks_per_node} does not divide the {ranks} ranks")
    nodes = [list(range(first, first + ranks_per_node)) for first in range(0, ranks, ranks_per_node)]
    inside, _ = dist.new_subgroups_by_enumeration(nodes)
    across, _ = dist.new_subgroups_by_enumeration([list(place) for place in zip(*nodes, strict=True)])
    assert rank in dist.get_process_group_ranks(inside)
    return NodeGroups(inside, across)


def hierarchical_all_reduce(tensor: Tensor, groups: NodeGroups) -> NodeTraffic:
    """Replace the tensor by its sum over all ranks of all nodes.

    Inside a rank sends 2(g-1)/g · S bytes, across 2(m-1)/m · S/g for m nodes.

    Args:
        tensor: Any shape, contiguous, the same on all ranks.
        groups: As `node_groups` returns them.

    Returns:
        What this rank sent inside its node and across nodes.

    Raises:
        ValueError: If the tensor is not contiguous.
    """
    row, place = flat(tensor), Wire(groups.inside).rank
    own = chunks(row, dist.get_world_size(groups.inside))[place]
    share = own.new_empty(own.shape)
    scattered = ring_reduce_scatter(share, row, groups.inside)
    across = ring_all_reduce(share, groups.across)
    gathered = ring_all_gather(row, share, groups.inside)
    return NodeTraffic(scattered + gathered, across)
