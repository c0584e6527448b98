"""Ring reduce-scatter, all-gather and all-reduce from send and receive.

n ranks stand in a ring and the array is cut into n chunks. In every step each rank sends one chunk to its right
neighbour and receives one from its left: all links are busy all the time, and no rank sends a number twice that it
could have added first. That is why a ring sends as little as is possible.

    reduce-scatter   the chunk that arrives is added to this rank's own, and the sum goes on: n - 1 steps
    all-gather       the chunk that arrives is kept, and goes on as it is: n - 1 steps
    all-reduce       one after the other

Chunks travel in segments. While one segment is added, the next is on its way, and the buffer that a segment lands in
is small enough to be used again at once: memory that is touched for the first time costs more than the addition.

Chapter: book/10_communication.md. Paper: Patarasuk and Yuan 2009.
"""

from __future__ import annotations

import collections
import itertools
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lablib.calc.collective_costs import Traffic, segment_elements
from lablib.toys.wire import Message, Wire, chunks, flat, same_size

SEGMENT_BYTES = 2 * 2**20  # smaller ones are too many messages; larger ones wait for each other
AHEAD = 4  # receives that are ready before their segment is needed


def ring_reduce_scatter(
    output: Tensor,
    input: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    segment_bytes: int | None = SEGMENT_BYTES,
) -> Traffic:
    """Add the inputs of all ranks up and leave chunk r of the sum on rank r: (n-1)/n · S bytes sent.

    Args:
        output: This rank's chunk, `input.numel() / n` elements; where that is no whole number, the first ranks have
            one element more.
        input: The whole array, contiguous; not changed.
        group: The process group; None is all ranks.
        segment_bytes: How large a segment may be; None sends chunks in one piece, and so does NCCL.

    Returns:
        What this rank sent.

    Raises:
        ValueError: If `output` has another size or dtype than its chunk, or a tensor is not contiguous.
    """
    wire = Wire(group)
    ring, own = _Ring(wire, input, segment_bytes), chunks(flat(input), wire.size)
    same_size(output, own[wire.rank], "output", f"chunk {wire.rank} of input")
    if wire.size == 1:
        output.copy_(input.view(output.shape))
        return wire.traffic
    # One buffer holds the sum of every step in turn; the last one is the output.
    room = max(own, key=Tensor.numel)
    passing = flat(output) if output.numel() == room.numel() else torch.empty_like(room)
    totals = [passing[: chunk.numel()] for chunk in own]
    totals[wire.rank] = flat(output)
    ring.travel(own[(wire.rank - 1) % wire.size], ring.reductions(own, totals))
    wire.count_steps(wire.size - 1)
    return wire.traffic


def ring_all_gather(
    output: Tensor,
    input: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    segment_bytes: int | None = SEGMENT_BYTES,
) -> Traffic:
    """Put the inputs of all ranks one after the other on every rank: (n-1)/n · S bytes sent.

    Args:
        output: The whole array, contiguous.
        input: This rank's chunk of it, cut as in `ring_reduce_scatter`; may be the view inside `output`.
        group: The process group; None is all ranks.
        segment_bytes: As there.

    Returns:
        What this rank sent.

    Raises:
        ValueError: If `input` has another size or dtype than its chunk, or a tensor is not contiguous.
    """
    wire = Wire(group)
    ring, pieces = _Ring(wire, output, segment_bytes), chunks(flat(output), wire.size)
    same_size(input, pieces[wire.rank], "input", f"chunk {wire.rank} of output")
    if input.data_ptr() != pieces[wire.rank].data_ptr():
        pieces[wire.rank].copy_(flat(input))
    ring.travel(pieces[wire.rank], ring.copies(pieces))
    wire.count_steps(wire.size - 1)
    return wire.traffic


def ring_all_reduce(
    tensor: Tensor, group: dist.ProcessGroup | None = None, *, segment_bytes: int | None = SEGMENT_BYTES
) -> Traffic:
    """Replace the tensor by its sum over the ranks: 2(n-1)/n · S bytes sent, 2(n-1) steps.

    Args:
        tensor: Any shape, contiguous, the same on all ranks.
        group: The process group; None is all ranks.
        segment_bytes: As in `ring_reduce_scatter`.

    Returns:
        What this rank sent.

    Raises:
        ValueError: If the tensor is not contiguous.
    """
    wire = Wire(group)
    ring, pieces = _Ring(wire, tensor, segment_bytes), chunks(flat(tensor), wire.size)
    # The last sum of the reduce-scatter is what this rank sends first in the all-gather: one journey in two halves.
    first = pieces[(wire.rank - 1) % wire.size]
    ring.travel(first, ring.reductions(pieces, pieces) + ring.copies(pieces))
    wire.count_steps(2 * (wire.size - 1))
    return wire.traffic


class _Stop(NamedTuple):
    """One segment that comes from the left: where it lands, and what goes on to the right."""

    landing: Tensor
    own: Tensor | None  # to be added; None if it is only passed on
    onward: Tensor


class _Ring:
    """One rank's place in the ring, and how chunks are cut into segments."""

    def __init__(self, wire: Wire, array: Tensor, segment_bytes: int | None) -> None:
        self.wire, self.n = wire, wire.size
        self.segment = segment_elements(array.element_size(), None if wire.batched else segment_bytes)
        self.ahead = 1 if wire.batched else AHEAD

    def cut(self, chunk: Tensor) -> list[Tensor]:
        return list(chunk.split(self.segment or chunk.numel())) if chunk.numel() else []

    def reductions(self, own: list[Tensor], totals: list[Tensor]) -> list[list[_Stop]]:
        """Return the stops of a reduce-scatter, step by step: in step k chunk r - 2 - k arrives."""
        arriving = [(self.wire.rank - 2 - step) % self.n for step in range(self.n - 1)]
        largest = max([segment.numel() for chunk in own for segment in self.cut(chunk)], default=0)
        room = own[0].new_empty(self.ahead, largest)
        landings = itertools.cycle(room)  # a place is free again when its segment has been added
        return [
            [
                _Stop(next(landings)[: mine.numel()], mine, total)
                for mine, total in zip(self.cut(own[c]), self.cut(totals[c]), strict=True)
            ]
            for c in arriving
        ]

    def copies(self, chunks: list[Tensor]) -> list[list[_Stop]]:
        """Return the stops of an all-gather: in step k chunk r - 1 - k arrives, and lands where it belongs."""
        arriving = [(self.wire.rank - 1 - step) % self.n for step in range(self.n - 1)]
        return [[_Stop(segment, None, segment) for segment in self.cut(chunks[c])] for c in arriving]

    def travel(self, first: Tensor, steps: list[list[_Stop]]) -> None:
        """Send a chunk, then pass on every segment that arrives, except those of the last step."""
        right, left = (self.wire.rank + 1) % self.n, (self.wire.rank - 1) % self.n
        stops = [stop for step in steps for stop in step]
        passed_on = len(stops) - len(steps[-1]) if steps else 0
        sends = [Message(segment, right) for segment in self.cut(first)] if steps else []
        waiting, arrivals, room = collections.deque(stops), collections.deque(), self.ahead
        for number in range(-1, len(stops)):
            if number >= 0:
                stop = stops[number]
                arrivals.popleft().wait()
                if stop.own is not None:
                    self.wire.sent(stop.onward)  # an earlier sum may still be leaving from there
                    torch.add(stop.own, stop.landing, out=stop.onward)
                    room += 1
                sends = [Message(stop.onward, right)] if number < passed_on else []
            receives = []
            # A sum needs a free landing; what is only kept has its own, so all of it may come when it will.
            while waiting and (room or waiting[0].own is None) and not (self.wire.batched and receives):
                room -= waiting[0].own is not None
                receives.append(Message(waiting.popleft().landing, left))
            arrivals.extend(self.wire.start(sends, receives))
        self.wire.finish()
