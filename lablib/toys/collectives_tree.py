"""Broadcast and reduction along a binomial tree, and what you would write first: everything through one rank.

Ranks are counted from the root. In round k of a broadcast the 2^k ranks that have the data send it to the next 2^k:
after ⌈log2 n⌉ rounds all have it. A reduction is the same tree, walked from the leaves to the root.

A tree sends whole arrays, so it is the choice for short messages, where the number of rounds is all that counts.

Paper: Thakur, Rabenseifner and Gropp 2005.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lablib.calc.collective_costs import Traffic
from lablib.toys.wire import Wire, flat


def tree_broadcast(tensor: Tensor, root: int = 0, group: dist.ProcessGroup | None = None) -> Traffic:
    """Give the root's tensor to all ranks, in ⌈log2 n⌉ rounds."""
    row, wire = flat(tensor), Wire(group)
    place = _place(wire, root)
    for have in _powers(wire.size):  # the places below `have` have the data
        if place < have and place + have < wire.size:
            wire.exchange(send=row, to=(place + have + root) % wire.size)
        elif have <= place < 2 * have:
            wire.exchange(receive=row, source=(place - have + root) % wire.size)
        else:
            wire.exchange()
    return wire.traffic


def tree_reduce(tensor: Tensor, root: int = 0, group: dist.ProcessGroup | None = None) -> Traffic:
    """Leave the sum over the ranks on the root, in ⌈log2 n⌉ rounds; the others keep sums of a part of the ranks."""
    row, wire = flat(tensor), Wire(group)
    place, theirs = _place(wire, root), None
    for left in reversed(_powers(wire.size)):  # afterwards the places below `left` have everything
        if left <= place < 2 * left:
            wire.exchange(send=row, to=(place - left + root) % wire.size)
        elif place < left and place + left < wire.size:
            theirs = torch.empty_like(row) if theirs is None else theirs
            wire.exchange(receive=theirs, source=(place + left + root) % wire.size)
            row.add_(theirs)
        else:
            wire.exchange()
    return wire.traffic


def tree_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Traffic:
    """Replace the tensor by its sum over the ranks: a reduction to rank 0, then a broadcast from there."""
    return tree_reduce(tensor, 0, group) + tree_broadcast(tensor, 0, group)


def naive_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Traffic:
    """Replace the tensor by its sum over the ranks: rank 0 receives all arrays in turn, and sends the sum to all.

    Every byte passes through rank 0: 2(n-1) steps of S bytes, while the other ranks wait.
    """
    row, wire = flat(tensor), Wire(group)
    theirs = torch.empty_like(row) if wire.rank == 0 else None
    for turn in range(1, wire.size):
        if wire.rank == 0:
            wire.exchange(receive=theirs, source=turn)
            row.add_(theirs)
        elif wire.rank == turn:
            wire.exchange(send=row, to=0)
        else:
            wire.exchange()
    for turn in range(1, wire.size):
        if wire.rank == 0:
            wire.exchange(send=row, to=turn)
        elif wire.rank == turn:
            wire.exchange(receive=row, source=0)
        else:
            wire.exchange()
    return wire.traffic


def _powers(n: int) -> list[int]:
    """Return the powers of two below n."""
    return [1 << k for k in range((n - 1).bit_length())]


def _place(wire: Wire, root: int) -> int:
    """Return this rank's number, counted from the root."""
    if not 0 <= root < wire.size:
        raise ValueError(f"root={root} is not a rank of the group; use 0 to {wire.size - 1}")
    return (wire.rank - root) % wire.size
