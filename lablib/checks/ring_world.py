"""The check of a ring all-reduce: any number of ranks that take turns, and every message counted.

Ranks are threads that run one at a time, each to its next exchange, so a check plays always the same way and sees at
once when everybody waits. Rank r holds 10^r times 1, 2, 3 and so on: the digits of a sum say whose numbers are in it.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lablib.calc.collective_costs import chunk_sizes, traffic
from lablib.checks.report import Wrong, check
from lablib.checks.turns import Turns

#: Ranks and elements: even, odd, fewer elements than ranks, two ranks, and one.
_CASES = ((4, 8), (3, 10), (5, 7), (6, 31), (4, 3), (2, 9), (1, 5))


class _Message(NamedTuple):
    source: int
    target: int
    elements: int


class World(Turns):
    """Ranks whose only tool is an exchange: send to one rank while receiving from another.

    Args:
        ranks: How many.

    Attributes:
        messages: Every message, in the order in which they were sent; empty ones too.
    """

    def __init__(self, ranks: int):
        super().__init__(ranks)
        self.messages: list[_Message] = []
        self.mail: dict[tuple[int, int], collections.deque[Tensor]] = collections.defaultdict(
            collections.deque
        )
        self.waits: dict[int, int] = {}  # a rank, and whose message it needs

    def able(self) -> list[int]:
        """Return who waits for no message, or whose message has come."""
        left = [rank for rank in range(self.ranks) if rank not in self.done]
        return [r for r in left if r not in self.waits or self.mail[self.waits[r], r]]

    def run(self, act: Callable[[int, Callable[..., None]], None]) -> None:
        """Run `act(rank, exchange)` on every rank to its end; raise what a rank raised first."""
        if not self.play(lambda rank: act(rank, functools.partial(self._exchange, rank))):
            raise Wrong("The ranks wait for each other for ever: in every step each rank sends to its right neighbour "
                        "and receives from its left one, and all take as many steps.")  # fmt: skip
        if any(self.mail.values()):
            raise Wrong(
                "A message was sent that nobody received: all ranks must take the same number of steps."
            )

    def _exchange(self, rank: int, send: Tensor, to: int, receive: Tensor, source: int) -> None:
        for name, peer in (("to", to), ("source", source)):
            if peer not in range(self.ranks) or peer == rank:
                raise Wrong(f"Rank {rank} of {self.ranks} calls exchange with {name}={peer}: neighbours are counted "
                            "round the ring, so after the last rank comes rank 0.")  # fmt: skip
        self.messages.append(_Message(rank, to, send.numel()))
        self.mail[rank, to].append(send.detach().clone().flatten())
        self.waits[rank] = source
        self.pause(rank)
        del self.waits[rank]
        arrived = self.mail[source, rank].popleft()
        if arrived.numel() != receive.numel():
            raise Wrong(f"Rank {rank} makes room for {receive.numel()} elements and {arrived.numel()} arrive: in a step "
                        "the chunk that comes has another number than the one that goes.")  # fmt: skip
        receive.copy_(arrived.view(receive.shape))


@check
def ring_all_reduce(answer: Callable[..., None]) -> str:
    """Judge `ring_all_reduce(row, rank, ranks, exchange)` by its sums, its steps, its messages and its bytes."""
    for ranks, numel in _CASES:
        world = World(ranks)
        rows = [10.0**rank * torch.arange(1, numel + 1, dtype=torch.float64) for rank in range(ranks)]
        world.run(lambda rank, exchange, n=ranks, rows=rows: answer(rows[rank], rank, n, exchange))
        _judge_sums(rows, ranks, numel)
        _judge_traffic(world.messages, ranks, numel)
    return (f"{len(_CASES)} rings of 1 to 6 ranks, odd sizes too: 2(n-1) steps, 2(n-1)/n · S bytes from every rank, and "
            "no chunk longer than it must be.")  # fmt: skip


def _judge_sums(rows: list[Tensor], ranks: int, numel: int) -> None:
    units = torch.arange(1, numel + 1, dtype=torch.float64)
    # counts[rank][element][r]: how often rank r's number is in it.
    counts = [[_digits(value, ranks) for value in (row / units).tolist()] for row in rows]
    whole = [[set(each) == {1} for each in row] for row in counts]
    if all(map(all, whole)):
        return
    case = f"{ranks} ranks, {numel} elements"
    if any(max(each) > 1 for row in counts for each in row):
        raise Wrong(f"Some numbers are added twice: in the all-gather the chunk that arrives is complete and replaces "
                    f"what is there ({case}).")  # fmt: skip
    complete = {element for row in whole for element, done in enumerate(row) if done}
    if complete == set(range(numel)):
        raise Wrong(f"Every chunk is complete on some rank and not on all: after the reduce-scatter the complete chunks "
                    f"must go round once more, n - 1 steps ({case}).")  # fmt: skip
    element = min(set(range(numel)) - complete)
    if all(sum(row[element]) == row[element][rank] == 1 for rank, row in enumerate(counts)):
        raise Wrong(
            f"Element {element} is never sent: the chunks must hold all elements, whatever is left over too ({case})."
        )
    raise Wrong(f"No rank has the sum of element {element}: what a rank passes on in the next step is the chunk that has "
                f"just arrived, with its own numbers added ({case}).")  # fmt: skip


def _digits(value: float, ranks: int) -> list[int]:
    number = round(value)
    return [number // 10**rank % 10 for rank in range(ranks)]


def _judge_traffic(messages: list[_Message], ranks: int, numel: int) -> None:
    case = f"{ranks} ranks, {numel} elements"
    sent = [[m for m in messages if m.source == rank] for rank in range(ranks)]
    elements = [sum(m.elements for m in mine) for mine in sent]
    sizes = chunk_sizes(numel, ranks)
    right = sum(traffic("ring_all_reduce", numel, ranks, rank=r, itemsize=1).bytes for r in range(ranks))
    if any(len({m.target for m in mine}) > 1 for mine in sent):
        raise Wrong(f"The sums are right, but a rank sends to several others: on a ring it has one right neighbour "
                    f"({case}).")  # fmt: skip
    if sum(elements) > right:
        raise Wrong(f"The sums are right, but the ranks send {sum(elements)} elements where {right} do: only a chunk "
                    f"leaves in a step, never the whole array ({case}).")  # fmt: skip
    if any(len(mine) != 2 * (ranks - 1) for mine in sent):
        raise Wrong(f"The sums are right, but rank 0 takes {len(sent[0])} steps and 2(n-1) = {2 * (ranks - 1)} do: all "
                    f"chunks travel at the same time ({case}).")  # fmt: skip
    longest = max((m.elements for m in messages), default=0)
    if ranks > 1 and longest > max(sizes):
        raise Wrong(f"A chunk of {longest} elements travels where {max(sizes)} do: in every step all ranks wait for the "
                    f"longest chunk, so cut as evenly as can be ({case}).")  # fmt: skip
