"""The checks of rung 10: a ring from exchanges, the algorithm for a size, and the axes for a cluster.

The ranks of the ring are threads that run one at a time, each to its next exchange, so a check always plays the same
way and sees at once when everybody waits. Rank r holds 10^r times 1, 2, 3 and so on: the digits of a sum say whose
numbers are in it.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lablib.calc.communication import chunk_sizes, collective_time, crossover, ring_all_reduce_bytes, traffic
from lablib.checks.report import Wrong, check, close
from lablib.checks.turns import Turns

__all__ = ["choose_algorithm", "place", "ring_all_reduce"]


# --- a ring from exchanges ----------------------------------------------------------------------------------

#: Ranks and elements: even, odd, fewer elements than ranks, two ranks, and one.
_CASES = ((4, 8), (3, 10), (5, 7), (6, 31), (4, 3), (2, 9), (1, 5))


class _Message(NamedTuple):
    source: int
    target: int
    elements: int


class World(Turns):
    """Ranks whose only tool is an exchange: send to one rank while receiving from another."""

    def __init__(self, ranks: int):
        super().__init__(ranks)
        self.messages: list[_Message] = []
        self.mail: dict[tuple[int, int], collections.deque[Tensor]] = collections.defaultdict(collections.deque)
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
            raise Wrong("A message was sent that nobody received: all ranks must take the same number of steps.")

    def _exchange(self, rank: int, send: Tensor, to: int, receive: Tensor, source: int) -> None:
        for name, other in (("to", to), ("source", source)):
            if other not in range(self.ranks) or other == rank:
                raise Wrong(f"Rank {rank} of {self.ranks} calls exchange with {name}={other}: neighbours are counted "
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


# --- ring or tree -------------------------------------------------------------------------------------------

_KEYS = ("ring", "tree", "crossover", "best")

_ALGORITHM = {"ring": "ring_all_reduce", "tree": "tree_all_reduce"}


@check
def choose_algorithm(answer: Callable[..., Mapping[str, Any]], seed: int = 10) -> str:
    """Judge `choose_algorithm(size, ranks, bandwidth, latency)` by hand first, then on random links and sizes."""
    dice = random.Random(seed)
    cases = [(8, 4, 1.0, 7.0), (8, 2, 1.0, 7.0), (1000, 4, 1.0, 7.0), (2**20, 100, 25e9, 5e-6)]
    for _ in range(40):
        ranks = dice.choice((2, 3, 5, 8, 31, 100, 1024))
        link = {"bandwidth": 10 ** dice.uniform(7, 11), "latency": 10 ** dice.uniform(-6, -3)}
        # Around the crossover, where a slip changes the choice.
        near = crossover("tree_all_reduce", "ring_all_reduce", ranks, **link) or 2**20
        cases.append((int(near * 10 ** dice.uniform(-2, 2)) + 1, ranks, *link.values()))
    for case in cases:
        _judge_choice(answer(*case), *case)
    return f"{len(cases)} links and sizes: both times, where they cross, and which to take."


def _judge_choice(got: Mapping[str, Any], size: int, ranks: int, bandwidth: float, latency: float) -> None:
    if not isinstance(got, Mapping) or set(got) != set(_KEYS):
        raise Wrong(f"Return a dictionary with the keys {', '.join(_KEYS)}.")
    link = {"bandwidth": bandwidth, "latency": latency}
    case = f"{size:,} bytes, {ranks} ranks"
    truth = {name: collective_time(full, size, ranks, **link) for name, full in _ALGORITHM.items()}
    for name, right in truth.items():
        if not close(got[name], right):
            _explain_time(name, float(got[name]), size, ranks, bandwidth, latency, case)
    cross = crossover("tree_all_reduce", "ring_all_reduce", ranks, **link)
    if not close(got["crossover"], cross):
        if cross == 0:
            raise Wrong(f"On {ranks} ranks the ring takes no more rounds than the tree and sends less: it wins from the "
                        f"first byte, so the crossover is 0 ({case}).")  # fmt: skip
        raise Wrong(f"The times cross where the latencies that the ring adds equal the bytes that it saves, at {cross:,.0f} "
                    f"bytes and not at {float(got['crossover']):,.0f} ({case}).")  # fmt: skip
    best = min(truth, key=truth.get)
    if got["best"] != best and not close(truth["ring"], truth["tree"]):
        raise Wrong(f"The {best} takes less time here, so `best` is {best!r} ({case}).")


def _explain_time(name: str, got: float, size: int, ranks: int, bandwidth: float, latency: float, case: str) -> None:
    levels = math.ceil(math.log2(ranks))
    rounds = 2 * (ranks - 1) if name == "ring" else 2 * levels
    passes = 2 * (ranks - 1) / ranks if name == "ring" else 2 * levels
    slips = {
        (0, passes): "The latencies are missing: every round waits for one.",
        (rounds / 2, passes / 2): "An all-reduce has two halves, and this is one of them.",
        (2, passes): "Each round waits for the one before it, so their latencies add up.",
    }
    if name == "ring":
        slips |= {
            (rounds, rounds): "In a step a rank sends one chunk of S/n bytes, not the whole array.",
            (rounds, 2): "A rank has one chunk in n already: it sends 2(n-1)/n of the array, not twice all of it.",
        }
    else:
        real = 2 * math.log2(ranks)
        slips |= {
            (rounds, 2 * (ranks - 1) / ranks): "A tree does not cut the array: every round carries all S bytes.",
            (real, real): "Rounds are whole: on 5 ranks a tree has 3 levels.",
        }
    for (count, share), sentence in slips.items():
        if (count, share) != (rounds, passes) and close(got, count * latency + share * size / bandwidth):
            raise Wrong(f"{sentence} This is about the {name} ({case}).")
    raise Wrong(f"The {name} takes {rounds} rounds of α and sends {passes:.3f} times the array ({case}).")


# --- which axis goes inside the host ------------------------------------------------------------------------

Axes = Mapping[str, tuple[int, str, float]]


def _leaving(
    order: Sequence[str], axes: Axes, per_host: int, *, crossing_only: bool = True, all_hosts: bool = False
) -> float:
    """Return the bytes that leave the busiest host in a step; with `crossing_only` False all that are sent."""
    sizes = [axes[name][0] for name in order]
    strides = [math.prod(sizes[:i]) for i in range(len(sizes))]
    ranks = math.prod(sizes)
    out = [0.0] * (ranks // per_host)
    for name, size, stride in zip(order, sizes, strides, strict=True):
        _, kind, payload = axes[name]
        for rank in range(ranks):
            place = rank // stride % size
            right, left = (rank + ((place + step) % size - place) * stride for step in (1, -1))
            sends = [(right, ring_all_reduce_bytes(payload, size))] if kind == "all_reduce" else []
            if kind == "stages":
                sends = [(right, payload)] * (place < size - 1) + [(left, payload)] * (place > 0)
            for target, count in sends:
                if target // per_host != rank // per_host or not crossing_only:
                    out[rank // per_host] += count
    return sum(out) if all_hosts else max(out)


@check
def place(answer: Callable[..., tuple[Sequence[str], float]], seed: int = 101) -> str:
    """Judge `place(axes, ranks_per_host)` on a pair of hosts by hand, then on random axes and hosts."""
    dice = random.Random(seed)
    cases: list[tuple[Axes, int]] = [
        ({"dp": (2, "all_reduce", 80e6), "tp": (2, "all_reduce", 500e6)}, 2),
        ({"tp": (2, "all_reduce", 20e6), "dp": (2, "all_reduce", 80e6)}, 2),
        ({"tp": (2, "all_reduce", 64e6), "pp": (2, "stages", 4e6)}, 2),
        ({"pp": (4, "stages", 70e6), "dp": (2, "all_reduce", 100e6)}, 4),
    ]
    while len(cases) < 30:
        axes = {
            name: (dice.choice((2, 2, 3, 4)), kind, float(dice.randint(1, 400) * 10**6))
            for name, kind in (("tp", "all_reduce"), ("pp", "stages"), ("dp", "all_reduce"))
            if name == "dp" or dice.random() < 0.8
        }
        ranks = math.prod(size for size, _, _ in axes.values())
        hosts = [g for g in (2, 3, 4, 6, 8) if ranks % g == 0 and g < ranks]
        if len(axes) > 1 and hosts:
            cases.append((axes, dice.choice(hosts)))
    for axes, per_host in cases:
        _judge_place(answer(dict(axes), per_host), axes, per_host)
    return f"{len(cases)} clusters: the order that sends least out of a host, and how much that is."


def _judge_place(got: tuple[Sequence[str], float], axes: Axes, per_host: int) -> None:
    case = ", ".join(f"{name} {size} ({kind} {payload / 1e6:.0f} MB)" for name, (size, kind, payload) in axes.items())
    case += f", {per_host} ranks a host"
    if not isinstance(got, tuple) or len(got) != 2 or sorted(got[0]) != sorted(axes):
        raise Wrong("Return a pair: the names of all axes, innermost first, and the bytes that leave the busiest host.")
    order, count = list(got[0]), got[1]
    every = {names: _leaving(names, axes, per_host) for names in itertools.permutations(axes)}
    best = min(every, key=every.get)
    mine = every[tuple(order)]
    halved = {n: (s, k, p / 2 if k == "stages" else p) for n, (s, k, p) in axes.items()}
    if not close(mine, every[best]):
        one_way = _leaving(order, halved, per_host)
        if close(count, one_way) and not close(mine, one_way):
            raise Wrong(f"Stages send activations forward and gradients back: both ways count ({case}).")
        raise Wrong(f"With {' inside '.join(order)} {mine / 1e6:.0f} MB leave a host, with {' inside '.join(best)} "
                    f"{every[best] / 1e6:.0f} MB: count the bytes of every order ({case}).")  # fmt: skip
    if close(count, mine):
        return
    if close(count, _leaving(order, axes, per_host, crossing_only=False)):
        raise Wrong(f"The order is right, but messages that stay inside a host do not leave it ({case}).")
    if close(count, _leaving(order, halved, per_host)):
        raise Wrong(f"The order is right, but stages send activations forward and gradients back ({case}).")
    if close(count, _leaving(order, axes, per_host, all_hosts=True)):
        raise Wrong(
            f"The order is right, but this is what all hosts send together: each has a link of its own ({case})."
        )
    raise Wrong(f"The order is right, but {mine / 1e6:.1f} MB leave the busiest host and not {float(count) / 1e6:.1f}: on "
                f"a ring every rank sends 2(n-1)/n of its payload to the next, and rank r is on host r // {per_host} "
                f"({case}).")  # fmt: skip
