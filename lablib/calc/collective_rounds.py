"""Every algorithm as data: who sends which elements to whom in every round, without processes.

From this list a round's time on any network follows (`lablib.calc.topology`), and a test can follow every number
from rank to rank. The toys do the same by send and receive.

Chapter: book/10_communication.md. Paper: Thakur, Rabenseifner and Gropp 2005.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from lablib.calc.collective_costs import ALGORITHMS, chunk_sizes


class Send(NamedTuple):
    """One message.

    Attributes:
        source: The rank that sends.
        target: The rank that receives.
        start: First element.
        stop: One after the last element.
        adds: Whether the receiver adds it to what it has; otherwise it overwrites it.
    """

    source: int
    target: int
    start: int
    stop: int
    adds: bool


Round = list[Send]


def _bounds(numel: int, parts: int) -> list[tuple[int, int]]:
    ends = [0]
    for size in chunk_sizes(numel, parts):
        ends.append(ends[-1] + size)
    return list(itertools.pairwise(ends))


def _ring(numel: int, n: int, shift: int, adds: bool) -> Iterator[Round]:
    bounds = _bounds(numel, n)
    for step in range(n - 1):
        yield [Send(r, (r + 1) % n, *bounds[(r + shift - step) % n], adds) for r in range(n)]


def _ring_reduce_scatter(numel: int, n: int) -> Iterator[Round]:
    yield from _ring(numel, n, -1, True)


def _ring_all_gather(numel: int, n: int) -> Iterator[Round]:
    yield from _ring(numel, n, 0, False)


def _ring_all_reduce(numel: int, n: int) -> Iterator[Round]:
    yield from _ring_reduce_scatter(numel, n)
    yield from _ring_all_gather(numel, n)


def _folded(
    numel: int, n: int, inner: Callable[[int, Callable[[int], int]], Iterator[Round]]
) -> Iterator[Round]:
    power = 1 << (n.bit_length() - 1)
    extra = n - power
    if extra:
        yield [Send(2 * k, 2 * k + 1, 0, numel, True) for k in range(extra)]
    yield from inner(power, lambda place: 2 * place + 1 if place < extra else place + extra)
    if extra:
        yield [Send(2 * k + 1, 2 * k, 0, numel, False) for k in range(extra)]


def _recursive_doubling_all_reduce(numel: int, n: int) -> Iterator[Round]:
    def inner(power: int, real: Callable[[int], int]) -> Iterator[Round]:
        for level in range(power.bit_length() - 1):
            yield [Send(real(p), real(p ^ 1 << level), 0, numel, True) for p in range(power)]

    yield from _folded(numel, n, inner)


def _halving_doubling_all_reduce(numel: int, n: int) -> Iterator[Round]:
    def inner(power: int, real: Callable[[int], int]) -> Iterator[Round]:
        bounds, levels = _bounds(numel, power), power.bit_length() - 1

        def kept(place: int, level: int) -> tuple[int, int]:
            """The elements that a place still has after so many halvings."""
            low, high = 0, power
            for bit in range(level):
                middle = (low + high) // 2
                low, high = (middle, high) if place >> bit & 1 else (low, middle)
            return bounds[low][0], bounds[high - 1][1]

        for level in range(levels):
            meet = [(p, p ^ 1 << level) for p in range(power)]
            yield [Send(real(p), real(q), *kept(q, level + 1), True) for p, q in meet]
        for level in reversed(range(levels)):
            meet = [(p, p ^ 1 << level) for p in range(power)]
            yield [Send(real(p), real(q), *kept(p, level + 1), False) for p, q in meet]

    yield from _folded(numel, n, inner)


def _tree_broadcast(numel: int, n: int) -> Iterator[Round]:
    for level in range((n - 1).bit_length()):
        have = 1 << level
        yield [Send(p, p + have, 0, numel, False) for p in range(min(have, n - have))]


def _tree_reduce(numel: int, n: int) -> Iterator[Round]:
    for level in reversed(range((n - 1).bit_length())):
        left = 1 << level
        yield [Send(p + left, p, 0, numel, True) for p in range(min(left, n - left))]


def _tree_all_reduce(numel: int, n: int) -> Iterator[Round]:
    yield from _tree_reduce(numel, n)
    yield from _tree_broadcast(numel, n)


def _naive_all_reduce(numel: int, n: int) -> Iterator[Round]:
    yield from ([Send(turn, 0, 0, numel, True)] for turn in range(1, n))
    yield from ([Send(0, turn, 0, numel, False)] for turn in range(1, n))


def _pairwise_all_to_all(numel: int, n: int) -> Iterator[Round]:
    bounds = _bounds(numel, n)
    for step in range(1, n):
        yield [Send(r, (r + step) % n, *bounds[(r + step) % n], False) for r in range(n)]


_ROUNDS: dict[str, Callable[[int, int], Iterator[Round]]] = {
    "ring_reduce_scatter": _ring_reduce_scatter,
    "ring_all_gather": _ring_all_gather,
    "ring_all_reduce": _ring_all_reduce,
    "recursive_doubling_all_reduce": _recursive_doubling_all_reduce,
    "halving_doubling_all_reduce": _halving_doubling_all_reduce,
    "tree_broadcast": _tree_broadcast,
    "tree_reduce": _tree_reduce,
    "tree_all_reduce": _tree_all_reduce,
    "naive_all_reduce": _naive_all_reduce,
    "pairwise_all_to_all": _pairwise_all_to_all,
}


def rounds(algorithm: str, numel: int, ranks: int) -> list[Round]:
    """Return the messages of every round; the root of trees is rank 0, and empty messages are left out.

    In an all-to-all `start` and `stop` are those of the sender's input.

    Args:
        algorithm: One of `lablib.calc.collective_costs.ALGORITHMS`.
        numel: Elements of the whole array.
        ranks: n, at least 1.

    Raises:
        ValueError: If the algorithm is unknown or a number makes no sense.
    """
    if algorithm not in _ROUNDS:
        raise ValueError(f"algorithm={algorithm!r} is unknown; use one of {', '.join(ALGORITHMS)}")
    if ranks < 1 or numel < 0:
        raise ValueError(f"ranks={ranks} must be at least 1 and numel={numel} not negative")
    return [[s for s in sends if s.stop > s.start] for sends in _ROUNDS[algorithm](numel, ranks)]


def hierarchical_rounds(numel: int, ranks: int, ranks_per_node: int) -> list[Round]:
    """Return the messages of a hierarchical all-reduce: inside the nodes, across them, inside again.

    Args:
        numel: Elements of the array.
        ranks: n, a multiple of `ranks_per_node`; node k has the ranks k·g to (k+1)·g - 1.
        ranks_per_node: g.

    Raises:
        ValueError: If g does not divide n.
    """
    g = ranks_per_node
    if g < 1 or ranks % g:
        raise ValueError(f"ranks_per_node={g} does not divide ranks={ranks}")
    nodes, bounds = ranks // g, _bounds(numel, g)

    def inside(algorithm: str) -> list[Round]:
        shifts = range(0, ranks, g)
        return [
            [s._replace(source=s.source + at, target=s.target + at) for at in shifts for s in sends]
            for sends in rounds(algorithm, numel, g)
        ]

    def across() -> list[Round]:
        rings = [rounds("ring_all_reduce", stop - start, nodes) for start, stop in bounds]
        return [
            [
                Send(
                    s.source * g + place,
                    s.target * g + place,
                    s.start + bounds[place][0],
                    s.stop + bounds[place][0],
                    s.adds,
                )
                for place, sends in enumerate(together)
                for s in sends
            ]
            for together in zip(*rings, strict=True)
        ]

    return inside("ring_reduce_scatter") + across() + inside("ring_all_gather")
