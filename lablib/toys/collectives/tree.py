"""All-reduce along a tree, by recursive doubling, by halving and doubling (Rabenseifner's algorithm), through rank 0.

A binomial tree counts ranks from the root. In round k of a broadcast the first 2^k ranks have the data and send it to
the next 2^k, as far as there are any. A reduction is the same tree, walked from the leaves to the root. If n = 2^p,
every rank meets, in rounds k = 0 to p - 1 of the next two, the rank whose number differs from its own in bit k:

    recursive doubling   both send all they have and add: p messages of S bytes.
    halving-doubling     both send the half that the other one keeps, then a quarter of the array, and so on, until
                         each has one finished chunk; the same way back collects the chunks: 2p messages,
                         and the ring's 2(n-1)/n · S bytes on average.

Where n lies between 2^p and 2^(p+1), the first 2·(n - 2^p) ranks pair up: the even ones hand their array to the odd
ones, wait, and get the result.

Paper: Thakur, Rabenseifner and Gropp 2005.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lablib.calc.communication import Traffic
from lablib.toys.collectives.ring import Wire, chunks, flat


def naive_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Traffic:
    """Replace the tensor by its sum over the ranks: rank 0 receives the others in turn, and sends the sum to each.

    Every byte passes through rank 0: 2(n-1) steps of S bytes, in each of which one other rank takes part.
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


# --- along a binomial tree ----------------------------------------------------------------------------------


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
    for left in reversed(_powers(wire.size)):  # afterwards the places below `left` have everything between them
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


def _powers(n: int) -> list[int]:
    """Return the powers of two below n."""
    return [1 << k for k in range((n - 1).bit_length())]


def _place(wire: Wire, root: int) -> int:
    """Return this rank's number, counted from the root."""
    if not 0 <= root < wire.size:
        raise ValueError(f"root={root} is not a rank of the group; use 0 to {wire.size - 1}")
    return (wire.rank - root) % wire.size


# --- between pairs ------------------------------------------------------------------------------------------


def recursive_doubling_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Traffic:
    """Replace the tensor by its sum over the ranks; whoever sends in a round sends the whole array.

    Two ranks that meet add the same two numbers, so all ranks end with the same bits.
    """
    row, wire = flat(tensor), Wire(group)
    theirs = torch.empty_like(row)

    def double(place: int | None, power: int, real: Callable[[int], int]) -> None:
        for bit in _bits(power):
            if place is None:
                wire.exchange()
                continue
            partner = real(place ^ bit)
            wire.exchange(send=row, to=partner, receive=theirs, source=partner)
            row.add_(theirs)

    _on_a_power_of_two(wire, row, double)
    return wire.traffic


def halving_doubling_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Traffic:
    """Replace the tensor by its sum over the ranks: a reduce-scatter by halving, an all-gather by doubling."""
    row, wire = flat(tensor), Wire(group)

    def halve_and_double(place: int | None, power: int, real: Callable[[int], int]) -> None:
        if place is None:
            for _ in range(2 * len(_bits(power))):
                wire.exchange()
            return
        starts = [0]
        for chunk in chunks(row, power):
            starts.append(starts[-1] + chunk.numel())
        low, high, meetings = 0, power, []  # this rank is still responsible for chunks low to high - 1
        for bit in _bits(power):
            middle = (low + high) // 2
            kept, given = ((middle, high), (low, middle)) if place & bit else ((low, middle), (middle, high))
            mine, other = (row[starts[a] : starts[b]] for a, b in (kept, given))
            meetings.append((real(place ^ bit), mine, other))
            low, high = kept
        for partner, mine, other in meetings:
            theirs = torch.empty_like(mine)
            wire.exchange(send=other, to=partner, receive=theirs, source=partner)
            mine.add_(theirs)
        for partner, mine, other in reversed(meetings):
            wire.exchange(send=mine, to=partner, receive=other, source=partner)

    _on_a_power_of_two(wire, row, halve_and_double)
    return wire.traffic


def _bits(power: int) -> list[int]:
    """Return 1, 2, 4 and so on below a power of two."""
    return [1 << k for k in range(power.bit_length() - 1)]


def _on_a_power_of_two(
    wire: Wire, row: Tensor, algorithm: Callable[[int | None, int, Callable[[int], int]], None]
) -> None:
    """Run an algorithm on the largest power of two that fits."""
    power = 1 << (wire.size.bit_length() - 1)
    extra = wire.size - power
    paired, waits = wire.rank < 2 * extra, wire.rank < 2 * extra and wire.rank % 2 == 0
    other = wire.rank ^ 1
    if extra:
        if waits:
            wire.exchange(send=row, to=other)
        elif paired:
            theirs = torch.empty_like(row)
            wire.exchange(receive=theirs, source=other)
            row.add_(theirs)
        else:
            wire.exchange()
    place = None if waits else wire.rank // 2 if paired else wire.rank - extra
    algorithm(place, power, lambda place: 2 * place + 1 if place < extra else place + extra)
    if extra:
        if waits:
            wire.exchange(receive=row, source=other)
        elif paired:
            wire.exchange(send=row, to=other)
        else:
            wire.exchange()
