"""Predicted against measured time of the ring all-reduce: between two hosts over a throttled link, and on loopback.

The hosts are network namespaces. The prediction is 2(n-1)/n · S over what TCP can carry, with nothing fitted.
On loopback no single line fits: what is left is how far one line and three are off, fitted to every other size and
judged on the rest.
"""

from __future__ import annotations

import time

from lablib.calc.communication import collective_time, fit_line, fit_pieces, tcp_bandwidth
from lablib.calc.units import parse_bandwidth
from lablib.launch.ranks import run_ranks
from tests.bench.bench_toys import slowest
from tests.bench.harness import Result, median
from tests.scripts import lab_script

two_hosts = lab_script("two_hosts")

LAUNCHES = 3  # the hosts are made anew; what is pooled are the rounds of all
ROUNDS = 5
#: Bytes of the array by the links' bandwidth.
SIZES = {"500 Mb/s": [2**20, 2**22, 2**24], "100 Mb/s": [2**20, 2**22]}
LOOPBACK = [2**k for k in range(8, 27)]
LOOPBACK_ROUNDS, PIECES = 14, 3


def missing() -> str:
    """Return what keeps this machine from having two hosts, or ""."""
    return f"network: {refused}" if (refused := two_hosts.why_not()) else ""


def throttled() -> dict[str, list[float]]:
    """Time the ring on this rank at each bandwidth and size, in seconds."""
    import torch
    import torch.distributed as dist

    from lablib.toys.collectives.ring import ring_all_reduce

    seconds: dict[str, list[float]] = {}
    # A slow moment of the machine lasts for seconds: bandwidths and sizes take turns, so that it meets one round of each.
    for turn in range(ROUNDS + 1):
        for rate, sizes in SIZES.items():
            dist.barrier()
            if dist.get_rank() == 0:
                two_hosts.throttle(rate)
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


def loopback() -> dict[str, list[float]]:
    """Time the ring on this rank at each size between processes of one machine, in seconds."""
    import torch
    import torch.distributed as dist

    from lablib.toys.collectives.ring import ring_all_reduce

    seconds: dict[str, list[float]] = {}
    arrays = {size: torch.zeros(size // 4) for size in LOOPBACK}
    for turn in range(LOOPBACK_ROUNDS + 1):
        for size, x in arrays.items():
            repeats = 10 if size < 2**20 else 1
            dist.barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                ring_all_reduce(x)
            if turn:
                seconds.setdefault(str(size), []).append((time.perf_counter() - start) / repeats)
    return seconds


def fitted() -> Result:
    """Measure on loopback, and fit lines to every other size."""
    samples = slowest(run_ranks(loopback, 2, timeout=300))
    times = [median(samples[str(size)]) for size in LOOPBACK]
    fits = fit_pieces(LOOPBACK[::2], times[::2], PIECES), fit_line(LOOPBACK[::2], times[::2])
    several, one = (
        median([100 * abs(fit.seconds(size) / t - 1) for size, t in zip(LOOPBACK[1::2], times[1::2], strict=True)])
        for fit in fits
    )
    name = f"loopback, {PIECES} lines, median error on held-back sizes"
    return Result(name, several, one, "%", "one line", at_most=None, samples=samples)


def results() -> list[Result]:
    """Measure on two hosts and on loopback."""
    samples: dict[str, list[float]] = {}
    for _ in range(LAUNCHES):
        with two_hosts.Cluster(2) as cluster:
            for name, times in slowest(cluster.run_ranks(throttled, timeout=300)).items():
                samples.setdefault(name, []).extend(times)
    rows = []
    for rate, sizes in SIZES.items():
        for size in sizes:
            measured = samples[f"{rate} {size}"]
            told = collective_time("ring_all_reduce", size, 2, bandwidth=tcp_bandwidth(parse_bandwidth(rate)))
            name = f"ring all_reduce, {size // 2**20} MiB, 2 hosts, {rate}"
            seen, told = 1e3 * median(measured), 1e3 * told
            rows.append(Result(name, seen, told, "ms", "predicted", at_most=None, samples={"measured": measured}))
    return [*rows, fitted()]
