"""Bytes and seconds of ring collectives, and speedup and efficiency on more ranks. Chapter 10.

`size` is S, the bytes of the whole array, cut into equal chunks: what a rank holds before a reduce-scatter, and after
an all-gather. `bandwidth` is W, bytes that a rank sends per second and per direction, `latency` α, seconds per message,
`flops` F, the FLOP/s that a rank reaches. A message of s bytes takes α + s/W. Read `ring_all_reduce_time` first.
"""

from __future__ import annotations

import math
from typing import Literal


def check_link(ranks: int, **numbers: float) -> None:
    """Refuse ranks that are no whole number above 0, and negative numbers; bandwidth, flops and seconds of 0 too."""
    if ranks < 1 or ranks != int(ranks):
        raise ValueError(f"ranks={ranks} must be a whole number, at least 1")
    for name, value in numbers.items():
        above_zero = name in ("bandwidth", "flops", "seconds")
        if not (value > 0 if above_zero else value >= 0):
            raise ValueError(f"{name}={value} must {'be above 0' if above_zero else 'not be negative'}")


#: Which part of the array messages must carry at the busiest of n > 1 ranks; busbw = algbw x this (nccl-tests).
_FACTOR = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "send_recv": lambda n: 1.0,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
}


def ring_reduce_scatter_bytes(size: float, ranks: int) -> float:
    """Return the bytes that each rank sends in a ring reduce-scatter, (n-1)/n · S."""
    check_link(ranks, size=size)
    return size * _FACTOR["reduce_scatter"](ranks)


def ring_all_gather_bytes(size: float, ranks: int) -> float:
    """Return the bytes that each rank sends in a ring all-gather, (n-1)/n · S."""
    check_link(ranks, size=size)
    return size * _FACTOR["all_gather"](ranks)


def ring_all_reduce_bytes(size: float, ranks: int) -> float:
    """Return the bytes that each rank sends in a ring all-reduce, 2(n-1)/n · S.

    As long as only ranks add, no algorithm needs less on its busiest rank (Patarasuk and Yuan 2009).
    """
    return ring_reduce_scatter_bytes(size, ranks) + ring_all_gather_bytes(size, ranks)


def in_switch_all_reduce_bytes(size: float, ranks: int) -> float:
    """Return the bytes that each rank sends in an all-reduce by NVLS, (1 + 1/n) · S for n > 1 (NVIDIA/nccl#1083)."""
    check_link(ranks, size=size)
    return size * (1 + 1 / ranks) if ranks > 1 else 0.0


def dispatch_nodes(nodes: int, experts: int) -> float:
    """Return how many of m nodes other than its own a token with k experts meets on average, (m-1)(1 - (1 - 1/m)^k).

    Each expert lies on any node with the same chance, independently of the others.
    """
    check_link(nodes, experts=experts)
    return (nodes - 1) * (1 - (1 - 1 / nodes) ** experts)


def ring_reduce_scatter_time(size: float, ranks: int, *, bandwidth: float, latency: float = 0.0) -> float:
    """Return the seconds of a ring reduce-scatter, (n-1)α + (n-1)/n · S/W; adding the numbers up is free."""
    check_link(ranks, size=size, bandwidth=bandwidth, latency=latency)
    return (ranks - 1) * latency + ring_reduce_scatter_bytes(size, ranks) / bandwidth


def ring_all_gather_time(size: float, ranks: int, *, bandwidth: float, latency: float = 0.0) -> float:
    """Return the seconds of a ring all-gather, (n-1)α + (n-1)/n · S/W."""
    check_link(ranks, size=size, bandwidth=bandwidth, latency=latency)
    return (ranks - 1) * latency + ring_all_gather_bytes(size, ranks) / bandwidth


def ring_all_reduce_time(size: float, ranks: int, *, bandwidth: float, latency: float = 0.0) -> float:
    """Return the seconds of a ring all-reduce, 2(n-1)α + 2(n-1)/n · S/W."""
    link = {"bandwidth": bandwidth, "latency": latency}
    return ring_reduce_scatter_time(size, ranks, **link) + ring_all_gather_time(size, ranks, **link)


def algorithm_bandwidth(size: float, seconds: float) -> float:
    """Return algbw in bytes per second, S/t: how fast the caller sees the array done."""
    check_link(1, size=size, seconds=seconds)
    return size / seconds


def bus_bandwidth(collective: str, size: float, ranks: int, seconds: float) -> float:
    """Return busbw in bytes per second: what messages must carry at the busiest rank, over the time (nccl-tests)."""
    if collective not in _FACTOR:
        raise ValueError(f"collective={collective!r} is unknown; use one of {', '.join(_FACTOR)}")
    check_link(ranks)
    return algorithm_bandwidth(size, seconds) * _FACTOR[collective](ranks)


def data_parallel_bytes(size: float, ranks: int, *, stage: int = 0) -> float:
    """Return the bytes that each rank sends in a step of data parallelism, where weights and gradients have S bytes each.

    Stages 0 to 2: 2(n-1)/n · S. Stage 3 gathers weights twice: 3(n-1)/n · S. ZeRO (1910.02054), section 7.2.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage} is unknown; use 0, 1, 2 or 3")
    gathers = 2 if stage == 3 else 1
    return gathers * ring_all_gather_bytes(size, ranks) + ring_reduce_scatter_bytes(size, ranks)


def hybrid_shard_bytes(size: float, ranks: int, *, shard: int) -> float:
    """Return the bytes that each rank sends out of its node when the weights are sharded within it only, 2(n-G)/(nG) · S.

    The FSDP paper (2304.11277), section 3.2.2, has 2(n-1)/(nG) · S.

    Args:
        ranks: n, a multiple of `shard`.
        shard: G, the ranks of one node, over which weights are sharded.
    """
    check_link(ranks, size=size)
    if shard < 1 or ranks % shard:
        raise ValueError(f"shard={shard} does not divide ranks={ranks}")
    return ring_all_reduce_bytes(size / shard, ranks // shard)


def hiding_tokens(ranks: int, *, flops: float, bandwidth: float, bytes_per_gradient: float = 2) -> float:
    """Return the tokens per rank at which backward can just hide the all-reduce, g/2 · (n-1)/n · F/W.

    Backward takes 4ψ FLOPs per token, and the size ψ cancels: the Ultra-Scale Playbook's appendix A3, with the bytes g of a
    gradient written out.
    """
    check_link(ranks, flops=flops, bandwidth=bandwidth, bytes_per_gradient=bytes_per_gradient)
    return bytes_per_gradient / 2 * (ranks - 1) / ranks * flops / bandwidth


Scaling = Literal["strong", "weak"]


def speedup(seconds_one: float, seconds_many: float, ranks: int, *, scaling: Scaling) -> float:
    """Return throughput on n ranks over throughput on one, from two step times: T_1/T_n, or n · T_1/T_n for weak scaling.

    Strong scaling keeps the global batch, weak scaling the batch per rank.
    """
    check_link(ranks)
    for name, value in (("seconds_one", seconds_one), ("seconds_many", seconds_many)):
        if not value > 0:
            raise ValueError(f"{name}={value} must be above 0")
    if scaling not in ("strong", "weak"):
        raise ValueError(f'scaling={scaling!r} is unknown; use "strong" or "weak"')
    return seconds_one / seconds_many * (ranks if scaling == "weak" else 1)


def efficiency(seconds_one: float, seconds_many: float, ranks: int, *, scaling: Scaling) -> float:
    """Return the speedup over n: 1.0 is perfect. A speedup of 1.6 on 2 ranks is an efficiency of 0.8."""
    return speedup(seconds_one, seconds_many, ranks, scaling=scaling) / ranks


def amdahl_speedup(ranks: int, serial_fraction: float) -> float:
    """Return Amdahl's bound on the speedup, 1 / (f + (1 - f)/n), which never passes 1/f.

    Args:
        serial_fraction: f, the share of the one-rank time that more ranks do not divide; 0 to 1.
    """
    check_link(ranks)
    if not 0 <= serial_fraction <= 1:
        raise ValueError(f"serial_fraction={serial_fraction} must be between 0 and 1")
    return 1 / (serial_fraction + (1 - serial_fraction) / ranks)


def chance_of_any(ranks: int, chance: float) -> float:
    """Return the chance that at least one of n ranks is slow, 1 - (1 - p)^n; each is by itself, with chance p."""
    check_link(ranks, chance=chance)
    if chance > 1:
        raise ValueError(f"chance={chance} must be from 0 to 1")
    return 1.0 if chance == 1 else -math.expm1(ranks * math.log1p(-chance))


def expected_slowest(ranks: int, *, base: float, jitter: float) -> float:
    """Return the mean time of the slowest of n ranks, T + j · (1 + 1/2 + ... + 1/n).

    Every rank takes T and a delay of its own, exponentially distributed with mean j.
    """
    check_link(ranks, base=base, jitter=jitter)
    return base + jitter * math.fsum(1 / k for k in range(1, ranks + 1))


def ring_states(ranks: int) -> list[list[list[tuple[int, ...]]]]:
    """Return who is summed in every chunk on every rank, at the start and after each of 2(n-1) steps.

    In step k of the reduce-scatter rank r sends chunk (r - k) mod n, so that rank r ends with chunk
    (r + 1) mod n finished. In step k of the all-gather it sends chunk (r + 1 - k) mod n.

    Returns:
        `states[step][rank][chunk]`, the ranks summed there in the order in which they were added.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    held = [[(rank,) for _ in range(ranks)] for rank in range(ranks)]
    states = [[list(chunks) for chunks in held]]
    for step in range(2 * (ranks - 1)):
        reducing = step < ranks - 1
        shift = -step if reducing else 1 - (step - (ranks - 1))
        sent = {rank: ((rank + shift) % ranks) for rank in range(ranks)}
        before = states[-1]
        for rank, chunk in sent.items():
            right = (rank + 1) % ranks
            arriving = before[rank][chunk]
            held[right][chunk] = arriving + before[right][chunk] if reducing else arriving
        states.append([list(chunks) for chunks in held])
    return states


def summation_orders(ranks: int) -> list[tuple[int, ...]]:
    """Return, for every chunk, the order in which the ring of `ring_states` adds the ranks' numbers."""
    return list(ring_states(ranks)[-1][0])
