"""The algorithms of `lablib.toys.collectives` as data: who sends which elements to whom in every round.

Where an array of `numel` elements is cut into chunks, they are as equal as can be, the larger ones first.
From the rounds follow the steps, messages and bytes of a rank (`traffic`) and the time on a cluster (`topology`). The
toys send and receive, count what they do, and return the same `Traffic`. `_ring` is the one to read first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Send(NamedTuple):
    """One message.

    Attributes:
        stop: One after the last element.
        adds: Whether the receiver adds it to what it has; otherwise it overwrites it.
    """

    source: int
    target: int
    start: int
    stop: int
    adds: bool


Round = list[Send]


def chunk_sizes(numel: int, parts: int) -> list[int]:
    """Return the elements of each chunk: as equal as can be, the larger ones first."""
    size, more = divmod(numel, parts)
    return [size + (chunk < more) for chunk in range(parts)]


def _bounds(numel: int, parts: int) -> list[tuple[int, int]]:
    ends = [0]
    for size in chunk_sizes(numel, parts):
        ends.append(ends[-1] + size)
    return list(itertools.pairwise(ends))


def _ring(numel: int, n: int, shift: int, adds: bool) -> Iterator[Round]:
    bounds = _bounds(numel, n)
    for step in range(n - 1):
        yield [Send(r, (r + 1) % n, *bounds[(r + shift - step) % n], adds) for r in range(n)]


def _folded(numel: int, n: int, inner: Callable[[int, Callable[[int], int]], Iterator[Round]]) -> Iterator[Round]:
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
            """Where the elements that a place still sums after so many halvings begin and end."""
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


def _naive_all_reduce(numel: int, n: int) -> Iterator[Round]:
    yield from ([Send(turn, 0, 0, numel, True)] for turn in range(1, n))
    yield from ([Send(0, turn, 0, numel, False)] for turn in range(1, n))


def _pairwise_all_to_all(numel: int, n: int) -> Iterator[Round]:
    bounds = _bounds(numel, n)
    for step in range(1, n):
        yield [Send(r, (r + step) % n, *bounds[(r + step) % n], False) for r in range(n)]


_ROUNDS: dict[str, Callable[[int, int], Iterator[Round]]] = {
    "ring_reduce_scatter": lambda numel, n: _ring(numel, n, -1, True),
    "ring_all_gather": lambda numel, n: _ring(numel, n, 0, False),
    "ring_all_reduce": lambda numel, n: itertools.chain(_ring(numel, n, -1, True), _ring(numel, n, 0, False)),
    "recursive_doubling_all_reduce": _recursive_doubling_all_reduce,
    "halving_doubling_all_reduce": _halving_doubling_all_reduce,
    "tree_broadcast": _tree_broadcast,
    "tree_reduce": _tree_reduce,
    "tree_all_reduce": lambda numel, n: itertools.chain(_tree_reduce(numel, n), _tree_broadcast(numel, n)),
    "naive_all_reduce": _naive_all_reduce,
    "pairwise_all_to_all": _pairwise_all_to_all,
}


#: Names of the algorithms, as the functions of `lablib.toys.collectives` are called.
ALGORITHMS = tuple(_ROUNDS)


def algorithm_rounds(algorithm: str, numel: int, ranks: int) -> list[Round]:
    """Return the messages of every round; the root of trees is rank 0, and empty messages are left out.

    In an all-to-all `start` and `stop` are those of the sender's input.
    """
    if algorithm not in _ROUNDS:
        raise ValueError(f"algorithm={algorithm!r} is unknown; use one of {', '.join(ALGORITHMS)}")
    if ranks < 1 or numel < 0:
        raise ValueError(f"ranks={ranks} must be at least 1 and numel={numel} not negative")
    return [[s for s in sends if s.stop > s.start] for sends in _ROUNDS[algorithm](numel, ranks)]


def hierarchical_rounds(numel: int, ranks: int, ranks_per_node: int) -> list[Round]:
    """Return the messages of a hierarchical all-reduce: inside the nodes, across them, inside again.

    Args:
        ranks: n, a multiple of `ranks_per_node`; node k has the ranks k·g to (k+1)·g - 1.
    """
    g = ranks_per_node
    if g < 1 or ranks % g:
        raise ValueError(f"ranks_per_node={g} does not divide ranks={ranks}")
    nodes, bounds = ranks // g, _bounds(numel, g)

    def inside(algorithm: str) -> list[Round]:
        shifts = range(0, ranks, g)
        return [
            [s._replace(source=s.source + at, target=s.target + at) for at in shifts for s in sends]
            for sends in algorithm_rounds(algorithm, numel, g)
        ]

    def across() -> list[Round]:
        rings = [algorithm_rounds("ring_all_reduce", stop - start, nodes) for start, stop in bounds]
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


class Traffic(NamedTuple):
    """Steps, messages and bytes of one rank in one collective.

    Attributes:
        messages: Messages that this rank sends.
    """

    steps: int
    messages: int
    bytes: int

    def __add__(self, other: Traffic) -> Traffic:
        """Return the traffic of one collective after the other."""
        return Traffic(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def traffic(algorithm: str, numel: int, ranks: int, *, rank: int = 0, itemsize: int = 4, root: int = 0) -> Traffic:
    """Return the steps, messages and bytes of one rank.

    In an all-reduce of S bytes a rank sends, where n divides `numel`: ring 2(n-1)/n · S; if n is a power of two,
    halving-doubling the same and recursive doubling log2(n) · S; naive S, and rank 0 (n-1) · S.

    Args:
        numel: Elements of the whole array: before a reduce-scatter, after an all-gather.
        root: Where a tree's broadcast starts and its reduction ends.
    """
    if ranks < 1 or not 0 <= rank < ranks or not 0 <= root < ranks:
        raise ValueError(f"rank={rank} and root={root} must be from 0 to ranks - 1, and ranks={ranks} at least 1")
    if numel < 0 or itemsize < 1:
        raise ValueError(f"numel={numel}, itemsize={itemsize}: too small")
    all_rounds = algorithm_rounds(algorithm, numel, ranks)
    # The rounds of a tree have their root at rank 0.
    place = (rank - root) % ranks if algorithm.startswith("tree") else rank
    mine = [send.stop - send.start for sends in all_rounds for send in sends if send.source == place]
    return Traffic(len(all_rounds), len(mine), sum(mine) * itemsize)


def hierarchical_traffic(
    numel: int, ranks: int, *, ranks_per_node: int, rank: int = 0, itemsize: int = 4
) -> tuple[Traffic, Traffic]:
    """Return what one rank does inside its node and across nodes in a hierarchical all-reduce.

    Reduce-scatter inside the node of g ranks, all-reduce of one chunk over the n/g nodes, all-gather inside:
    on average 2(g-1)/g · S stay inside, and 2(n/g - 1)/(n/g) · S/g leave.

    Args:
        ranks: n, a multiple of `ranks_per_node`; node k has the ranks k·g to (k+1)·g - 1.
    """
    if ranks_per_node < 1 or ranks % ranks_per_node:
        raise ValueError(f"ranks_per_node={ranks_per_node} does not divide ranks={ranks}")
    node, local = divmod(rank, ranks_per_node)
    inside = [
        traffic(half, numel, ranks_per_node, rank=local, itemsize=itemsize)
        for half in ("ring_reduce_scatter", "ring_all_gather")
    ]
    own = chunk_sizes(numel, ranks_per_node)[local]
    across = traffic("ring_all_reduce", own, ranks // ranks_per_node, rank=node, itemsize=itemsize)
    return inside[0] + inside[1], across
