"""One link measured: exchanges of many sizes, and every all-reduce of ours against message size.

Runs inside a job on the cluster, `lablib.launch.network_study`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lablib.calc.units import parse_bandwidth
from lablib.launch.cluster import burst
from lablib.launch.network_clock import Sample, timed
from lablib.toys import collectives
from lablib.toys.wire import Wire

#: What the study compares: few rounds, few bytes, or as few bytes as possible over the slow link.
ALGORITHMS = (
    "ring_all_reduce",
    "tree_all_reduce",
    "recursive_doubling_all_reduce",
    "halving_doubling_all_reduce",
    "hierarchical_all_reduce",
)


def exchanges(rate: str | None, sizes: Sequence[int], *, turns: int, other_host: int) -> list[Sample]:
    """Time one round of messages: each rank that takes part sends one and receives one at the same time.

    "inside" are ranks 0 and 1, "across" rank 0 and the first rank of the other host, and "ring" all ranks, each
    sending to its right neighbour. What the link itself does is seen best by two ranks alone; what a round costs
    when all ranks take part, and share the machine's processors, only by all of them.

    Args:
        rate: What the link is throttled to; only noted.
        sizes: Bytes of a message.
        turns: Samples of each size.
        other_host: Its first rank.
    """
    samples, rank, ranks = [], dist.get_rank(), dist.get_world_size()
    rings = {"inside": [0, 1], "across": [0, other_host], "ring": list(range(ranks))}
    for where, ring in rings.items():
        for size in sizes:
            here, there, wire = torch.ones(size // 4), torch.empty(size // 4), Wire()
            place = ring.index(rank) if rank in ring else None

            def exchange(here=here, there=there, wire=wire, ring=ring, place=place) -> None:
                if place is not None:
                    to, source = ring[(place + 1) % len(ring)], ring[place - 1]
                    wire.exchange(send=here, to=to, receive=there, source=source)

            conditions = {"part": "link", "where": where, "rate": rate, "bytes": size}
            runs = {"lead": leading(rate, size), "repeats": in_a_row(size)}
            samples += timed(exchange, turns=turns, warm=0, **runs, **conditions)
    return samples


def all_reduces(
    rate: str | None, sizes: Sequence[int], groups: collectives.NodeGroups, *, turns: int
) -> list[Sample]:
    """Time every algorithm of `ALGORITHMS` over all ranks; they take turns within each round.

    Args:
        rate: What the link is throttled to; only noted.
        sizes: Bytes of the whole array.
        groups: For the hierarchical one.
        turns: Samples of each.
    """
    samples = []
    for size in sizes:
        x = torch.zeros(size // 4)
        for turn in range(turns):
            for name in ALGORITHMS:
                call = getattr(collectives, name)
                more = (groups,) if name == "hierarchical_all_reduce" else ()
                conditions = {"part": "all-reduce", "rate": rate, "algorithm": name, "bytes": size}
                [sample] = timed(
                    lambda call=call, more=more, x=x: call(x, *more),
                    turns=1,
                    warm=0,
                    lead=leading(rate, size),
                    repeats=in_a_row(size, 4),
                    **conditions,
                )
                samples.append({**sample, "turn": turn})
    return samples


def in_a_row(size: int, most: int = 20) -> int:
    """Return how often a message of this size is sent in one sample: about 256 KiB in all.

    Args:
        size: Bytes.
        most: Upper limit; small messages take as long as their latency.
    """
    return max(1, min(most, 2**18 // max(1, size)))


def leading(rate: str | None, size: int) -> int:
    """Return how many messages of this size use up what a link lets through at once; small ones never do."""
    saved = 2 * burst(parse_bandwidth(rate)) if rate else 0  # the cards at both ends save as much
    return min(4, -(-saved // size)) if size >= 2**14 else 1
