"""The worked exercises of rung 10."""

import itertools
import math


def ring_all_reduce(row, rank, ranks, exchange):
    """Reduce-scatter, then all-gather, one chunk in every step."""
    chunks = row.tensor_split(ranks)
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    for step in range(ranks - 1):
        mine = chunks[(rank - step) % ranks]
        coming = chunks[(rank - step - 1) % ranks]
        landing = coming.new_empty(coming.shape)
        exchange(mine, right, landing, left)
        coming += landing
    for step in range(ranks - 1):
        mine = chunks[(rank + 1 - step) % ranks]
        coming = chunks[(rank - step) % ranks]
        exchange(mine, right, coming, left)


def choose_algorithm(size, ranks, bandwidth, latency):
    """Two straight lines in the size, and where they cross."""
    ring_rounds, ring_passes = 2 * (ranks - 1), 2 * (ranks - 1) / ranks
    levels = math.ceil(math.log2(ranks))
    ring = ring_rounds * latency + ring_passes * size / bandwidth
    tree = 2 * levels * latency + 2 * levels * size / bandwidth
    added = (ring_rounds - 2 * levels) * latency
    saved = (2 * levels - ring_passes) / bandwidth
    best = "ring" if ring <= tree else "tree"
    return {
        "ring": ring,
        "tree": tree,
        "crossover": max(0.0, added / saved),
        "best": best,
    }


def place(axes, ranks_per_host):
    """Try every order, and count what leaves each host."""

    def leaving(order):
        ranks = math.prod(axes[name][0] for name in order)
        out = [0.0] * (ranks // ranks_per_host)
        stride = 1
        for name in order:
            size, kind, payload = axes[name]
            for rank in range(ranks):
                at = rank // stride % size
                host = rank // ranks_per_host
                steps = [s for s in (1, -1) if 0 <= at + s < size]
                sent = payload
                if kind == "all_reduce":
                    steps, sent = [1], 2 * (size - 1) / size * payload
                for step in steps:
                    target = rank + ((at + step) % size - at) * stride
                    if target // ranks_per_host != host:
                        out[host] += sent
            stride *= size
        return max(out)

    best = min(itertools.permutations(axes), key=leaving)
    return best, leaving(best)
