"""Collectives from send and receive: the names in one place, and which algorithm is for what.

    all-reduce                      steps               bytes a rank sends       for
    ring_all_reduce                 2(n-1)              2(n-1)/n · S             long messages
    halving_doubling_all_reduce     2 log2 n            2(n-1)/n · S             long messages, n a power of two
    recursive_doubling_all_reduce   log2 n              log2 n · S               short messages
    tree_all_reduce                 2 ⌈log2 n⌉          up to ⌈log2 n⌉ · S        short messages too
    naive_all_reduce                2(n-1)              S, rank 0: (n-1) · S     comparison
    hierarchical_all_reduce         2(g-1) + 2(n/g-1)   across nodes: 2(n/g-1)/(n/g) · S/g   nodes of g ranks

A log2 n is that of a power of two. Where chunks are not equally long the bytes are means over the ranks;
`lablib.calc.communication.algorithms` has the exact counts. Read `ring` first; its `Wire` sends and counts. `tree` has
broadcast, reduce and the other all-reduces of one group, `hierarchy` what knows about nodes, and all-to-all.

A ValueError refuses a tensor that is not contiguous before anything is sent. `group` is the process group, None for all
ranks, and a root is a rank in it. A collective returns the `Traffic` that this rank sent, the hierarchical one two.
"""

from __future__ import annotations

from lablib.calc.communication import Traffic
from lablib.toys.collectives.hierarchy import NodeGroups, hierarchical_all_reduce, node_groups, pairwise_all_to_all
from lablib.toys.collectives.ring import Wire, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from lablib.toys.collectives.tree import (
    halving_doubling_all_reduce,
    naive_all_reduce,
    recursive_doubling_all_reduce,
    tree_all_reduce,
    tree_broadcast,
    tree_reduce,
)

__all__ = [
    "NodeGroups",
    "Traffic",
    "Wire",
    "halving_doubling_all_reduce",
    "hierarchical_all_reduce",
    "naive_all_reduce",
    "node_groups",
    "pairwise_all_to_all",
    "recursive_doubling_all_reduce",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "tree_all_reduce",
    "tree_broadcast",
    "tree_reduce",
]
