"""An all-reduce that knows about nodes, and all-to-all.

Few bytes of an all-reduce should cross the slow links between nodes. With g ranks a node, each rank has S/g bytes of
its node's sum, and only those are added up across nodes:

    reduce-scatter inside   rank i of every node has chunk i of its node's sum
    all-reduce across       the ranks i of all nodes add their chunks up; g such rings run side by side
    all-gather inside       every rank gets the other chunks

In step k of the all-to-all every rank sends to the rank k places to its right and receives from the one k places to its
left: nobody takes two messages at once, and every piece goes straight to where it belongs. Its paper: Thakur,
Rabenseifner and Gropp 2005.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from lablib.calc.communication import Traffic
from lablib.calc.errors import must_divide
from lablib.toys.collectives.ring import (
    Wire,
    chunks,
    flat,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    same_size,
)


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
    """Return this rank's groups when node k has the ranks k·g to (k+1)·g - 1. Call it on all ranks."""
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

    Inside a rank sends 2(g-1)/g · S bytes on average, across 2(m-1)/m · S/g for m nodes.
    """
    row, place = flat(tensor), Wire(groups.inside).rank
    own = chunks(row, dist.get_world_size(groups.inside))[place]
    share = own.new_empty(own.shape)
    scattered = ring_reduce_scatter(share, row, groups.inside)
    across = ring_all_reduce(share, groups.across)
    gathered = ring_all_gather(row, share, groups.inside)
    return NodeTraffic(scattered + gathered, across)


def pairwise_all_to_all(output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None) -> Traffic:
    """Exchange equal pieces between all pairs of ranks in n - 1 steps: a rank sends (n-1)/n · S bytes.

    Args:
        output: What comes, one piece of each rank after the other.
        input: What leaves, one piece for each rank after the other; contiguous, like `output`.
    """
    wire = Wire(group)
    must_divide("ranks", wire.size, "input", input.numel())
    same_size(output, input, "the output", "the input")
    coming, leaving = chunks(flat(output), wire.size), chunks(flat(input), wire.size)
    coming[wire.rank].copy_(leaving[wire.rank])
    for step in range(1, wire.size):
        to, source = (wire.rank + step) % wire.size, (wire.rank - step) % wire.size
        wire.exchange(send=leaving[to], to=to, receive=coming[source], source=source)
    return wire.traffic
