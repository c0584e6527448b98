"""Predicted against measured time of the ring all-reduce between two hosts, over a throttled link.

The hosts are network namespaces. The prediction is 2(n-1)/n · S over what TCP can carry, with nothing fitted.
"""

from __future__ import annotations

import time

from lablib.calc.collective_times import collective_time
from lablib.calc.topology import tcp_bandwidth
from lablib.calc.units import parse_bandwidth
from lablib.launch.cluster import Cluster, throttle, why_not
from tests.bench.bench_toys import slowest
from tests.bench.harness import Result, median

LAUNCHES = 3  # the hosts are made anew; what is pooled are the rounds of all
ROUNDS = 5
#: Bytes of the array by the links' bandwidth.
SIZES = {"500 Mb/s": [2**20, 2**22, 2**24], "100 Mb/s": [2**20, 2**22]}


def missing() -> str:
    """Return what keeps this machine from having two hosts, or ""."""
    return f"network: {refused}" if (refused := why_not()) else ""


def throttled() -> dict[str, list[float]]:
    """Time the ring on this rank at each bandwidth and size, in seconds."""
    import torch
    import torch.distributed as dist

    from lablib.toys.collectives import ring_all_reduce

    seconds: dict[str, list[float]] = {}
    # A slow moment of the machine lasts for seconds: bandwidths and sizes take turns, so that it meets one round of each.
    for turn in range(ROUNDS + 1):
        for rate, sizes in SIZES.items():
            dist.barrier()
            if dist.get_rank() == 0:
                throttle(rate)
            dist.barrier()
            ring_all_reduce(torch.ones(2**18))  # TCP finds the new bandwidth
            for size in sizes:
                array = torch.ones(size // 4)
                dist.barrier()
                start = time.perf_counter()
                ring_all_reduce(array)
                if turn:
                    seconds.setdefault(f"{rate} {size}", []).append(time.perf_counter() - start)
    return seconds


def results() -> list[Result]:
    """Measure on two hosts."""
    samples: dict[str, list[float]] = {}
    for _ in range(LAUNCHES):
        with Cluster(2) as cluster:
            for name, times in slowest(cluster.run_ranks(throttled, timeout=300)).items():
                samples.setdefault(name, []).extend(times)
    rows = []
    for rate, sizes in SIZES.items():
        for size in sizes:
            measured = samples[f"{rate} {size}"]
            told = collective_time("ring_all_reduce", size, 2, bandwidth=tcp_bandwidth(parse_bandwidth(rate)))
            name = f"ring all_reduce, {size // 2**20} MiB, 2 hosts, {rate}"
            seen, told = 1e3 * median(measured), 1e3 * told
            rows.append(
                Result(name, seen, told, "ms", "predicted", at_most=None, samples={"measured": measured})
            )
    return rows
