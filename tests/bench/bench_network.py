"""Predicted against measured time of the ring all-reduce: on throttled links by the formula, on loopback by a fit.

On a link of 500 Mb/s between two hosts (network namespaces) the time is 2(n-1)/n · S over what TCP can carry, with
nothing fitted. On loopback no single line fits: three lines are fitted to every other size and judged on the rest.
"""

from __future__ import annotations

import time

from lablib.calc.collective_times import collective_time
from lablib.calc.line_fit import fit_line, fit_pieces
from lablib.calc.topology import tcp_bandwidth
from lablib.calc.units import parse_bandwidth
from lablib.launch.cluster import Cluster, throttle, why_not
from lablib.launch.ranks import run_ranks
from tests.bench.bench_ddp import slowest
from tests.bench.harness import Result, median

LAUNCHES = 3  # the hosts are made anew; what is pooled are the rounds of all
ROUNDS = 5
LOOPBACK_ROUNDS = 14
#: Bytes of the array by the links' bandwidth.
SIZES = {"500 Mb/s": [2**20, 2**22, 2**24], "100 Mb/s": [2**20, 2**22]}
ALLOWED_PERCENT = 10.0  # between predicted and measured on a throttled link
LOOPBACK = [2**k for k in range(8, 27)]
PIECES = 3


def throttled() -> dict[str, list[float]]:
    """Time the ring on this rank at each bandwidth and size, in seconds."""
    import torch
    import torch.distributed as dist

    from lablib.toys.collectives import ring_all_reduce

    seconds: dict[str, list[float]] = {}
    arrays = {
        size: torch.ones(size // 4) for size in sorted({size for sizes in SIZES.values() for size in sizes})
    }
    # A slow moment of the machine lasts for seconds: bandwidths and sizes take turns within a round, so that it meets
    # one round of each and not all rounds of one.
    for turn in range(ROUNDS + 1):
        for rate, sizes in SIZES.items():
            dist.barrier()
            if dist.get_rank() == 0:
                throttle(rate)
            dist.barrier()
            ring_all_reduce(arrays[2**20])  # TCP finds the new bandwidth
            for size in sizes:
                dist.barrier()
                start = time.perf_counter()
                ring_all_reduce(arrays[size])
                if turn:
                    seconds.setdefault(f"{rate} {size}", []).append(time.perf_counter() - start)
    return seconds


def loopback() -> dict[str, list[float]]:
    """Time the ring on this rank at each size between processes of one machine, in seconds."""
    import torch
    import torch.distributed as dist

    from lablib.toys.collectives import ring_all_reduce

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


def results() -> list[Result]:
    """Measure on two hosts, if this machine may have them, and on loopback."""
    rows = []
    if refused := why_not():
        print(f"no throttled links: {refused}", flush=True)
    else:
        samples: dict[str, list[float]] = {}
        for _ in range(LAUNCHES):
            with Cluster(2) as cluster:
                for name, times in slowest(cluster.run_ranks(throttled, timeout=300)).items():
                    samples.setdefault(name, []).extend(times)
        for rate, sizes in SIZES.items():
            for size in sizes:
                measured = samples[f"{rate} {size}"]
                bandwidth = tcp_bandwidth(parse_bandwidth(rate))
                predicted = collective_time("ring_all_reduce", size, 2, bandwidth=bandwidth)
                error = 100 * abs(median(measured) / predicted - 1)
                rows.append(_error(f"ring all_reduce, {size // 2**20} MiB, 2 hosts, {rate}", error, measured))
                print(
                    f"{rate}, {size // 2**20} MiB: {1e3 * predicted:.1f} ms predicted, {1e3 * median(measured):.1f} measured"
                )
    samples = slowest(run_ranks(loopback, 2, timeout=300))
    times = {size: median(samples[str(size)]) for size in LOOPBACK}
    fitted = {size: t for size, t in times.items() if LOOPBACK.index(size) % 2 == 0}
    one, several = (
        fit_line(list(fitted), list(fitted.values())),
        fit_pieces(list(fitted), list(fitted.values()), PIECES),
    )
    for size, t in times.items():
        line, pieces = (100 * (fit.seconds(size) / t - 1) for fit in (one, several))
        held = "" if size in fitted else ", held back"
        print(
            f"loopback {size} B: {1e6 * t:.0f} us; one line {line:+.0f} %, {PIECES} lines {pieces:+.0f} %{held}"
        )
    errors = {
        name: median(
            [100 * abs(fit.seconds(size) / t - 1) for size, t in times.items() if size not in fitted]
        )
        for name, fit in (("one", one), ("several", several))
    }
    rows.append(
        Result(
            name=f"loopback, {PIECES} lines, median error on held-back sizes",
            ours=errors["several"],
            reference=errors["one"],
            unit="%",
            against="one line",
            samples=samples,
        )
    )
    return rows


def _error(name: str, percent: float, measured: list[float]) -> Result:
    return Result(
        name=f"{name}, error of the prediction",
        ours=percent,
        reference=ALLOWED_PERCENT,
        unit="%",
        samples={"measured": measured},
    )
