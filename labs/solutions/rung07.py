"""Worked exercises of rung 07, 3D parallelism."""

from __future__ import annotations


def coordinates(rank, sizes):
    """Digits of the rank's number, the first axis changing fastest."""
    at = {}
    for axis, size in sizes.items():
        rank, at[axis] = divmod(rank, size)
    return at


def sketch(sizes, gpus_per_node):
    """Ranks that agree in every other coordinate are a group.

    An axis leaves a node if any of its groups does.
    """
    ranks = 1
    for size in sizes.values():
        ranks *= size
    groups, crossing = {}, []
    for axis in sizes:
        alike = {}
        for rank in range(ranks):
            others = coordinates(rank, sizes)
            del others[axis]
            alike.setdefault(tuple(others.values()), []).append(rank)
        groups[axis] = list(alike.values())
        for group in groups[axis]:
            nodes = {rank // gpus_per_node for rank in group}
            if len(nodes) > 1 and axis not in crossing:
                crossing.append(axis)
    return {"groups": groups, "crossing": crossing}


def group_traffic(layers, stream, gradients, tp, pp, dp, micro_batches):
    """Bytes of a rank in the middle of the pipeline, on rings."""
    passes = layers // pp * micro_batches
    held = gradients / (tp * pp)
    return {
        "tp": 4 * passes * 2 * (tp - 1) / tp * stream,
        "pp": 2 * micro_batches * stream if pp > 1 else 0,
        "dp": 2 * (dp - 1) / dp * held,
    }


def plan_cluster(case):
    """Fill the node with tp, let memory decide pp, replicate the rest."""
    layouts = {
        # 76B: 20 bytes a parameter over tp x pp = 32 are 49 GB;
        # ZeRO-1 leaves 11, and nothing need be recomputed.
        "gpt-76b": {
            "tp": 8,
            "pp": 4,
            "dp": 32,
            "zero": 1,
            "schedule": "interleaved",
            "virtual_stages": 5,
        },
        # 175B on 64: one replica on all of them. 64 micro-batches
        # are 8 a rank; only the scores are recomputed.
        "gpt-175b": {"tp": 8, "pp": 8, "dp": 1, "recompute": "selective"},
        # 405B: 2,048 sequences over 128 replicas are 16
        # micro-batches, one a rank, so each rank has many stages.
        # With eight, ZeRO-1 leaves no room; ZeRO-2 shards gradients.
        "llama-405b": {
            "tp": 8,
            "pp": 16,
            "dp": 128,
            "zero": 2,
            "schedule": "interleaved",
            "virtual_stages": 8,
        },
    }
    return layouts[case]
