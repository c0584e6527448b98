"""The ring toys against gloo's own collectives: 64 MiB where they must keep up, small messages where they lose.

Ours and gloo's of one collective run right after each other in the same ranks, so that a slow moment of the machine
meets both; which of them is first, and the order of the collectives, is drawn anew each round, the same on every
rank. A collective takes as long as its slowest rank. Tensors are made once. Small messages have a wide limit: their rows show what
Python costs per message.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from lablib.launch.ranks import run_ranks
from tests.bench.bench_ddp import slowest
from tests.bench.harness import Result, median

LAUNCHES = 5  # the ranks are started anew; what is pooled are the rounds of all
ROUNDS = 7
WARMUP = 2
RANKS = (2, 4)
#: Ours over gloo's, at most, by size in bytes. Below 1: faster.
ALLOWED = {
    "all_reduce": {64 * 2**20: 1.05, 64 * 2**10: 10, 1024: 10},
    "reduce_scatter": {64 * 2**20: 1.0},
    "all_gather": {64 * 2**20: 1.0},
}
SMALL_REPEATS = 20  # a short message is timed so many times in a row


def collectives(seed: int) -> dict[str, list[float]]:
    """Time every collective on this rank, in seconds each."""
    import torch
    import torch.distributed as dist

    from lablib.toys.collective_names import all_gather, reduce_scatter
    from lablib.toys.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter

    variants: dict[str, tuple[Callable[[], object], int]] = {}
    for operation, sizes in ALLOWED.items():
        for size in sizes:
            whole = torch.ones(size // 4)
            chunk = torch.ones(size // 4 // dist.get_world_size())
            calls = {
                "all_reduce": (lambda x, _: ring_all_reduce(x), lambda x, _: dist.all_reduce(x)),
                "reduce_scatter": (lambda x, c: ring_reduce_scatter(c, x), lambda x, c: reduce_scatter(c, x)),
                "all_gather": (lambda x, c: ring_all_gather(x, c), lambda x, c: all_gather(x, c)),
            }[operation]
            for who, call in zip(("ours", "gloo"), calls, strict=True):
                repeats = SMALL_REPEATS if size < 2**20 else 1
                bound = (lambda call=call, x=whole, c=chunk: call(x, c)), repeats
                variants[f"{operation} {size} {who}"] = bound
    order, pairs = random.Random(seed), list(dict.fromkeys(name.rpartition(" ")[0] for name in variants))
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(WARMUP + ROUNDS):
        order.shuffle(pairs)
        for name in [f"{pair} {who}" for pair in pairs for who in order.sample(("ours", "gloo"), 2)]:
            call, repeats = variants[name]
            dist.barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            if turn >= WARMUP:
                seconds[name].append((time.perf_counter() - start) / repeats)
    return seconds


def results() -> list[Result]:
    """Measure at 2 and 4 ranks."""
    rows = []
    for ranks in RANKS:
        samples: dict[str, list[float]] = {}
        for launch in range(LAUNCHES):
            seconds = slowest(run_ranks(collectives, ranks, 100 * ranks + launch, timeout=600, threads=1))
            for name, times in seconds.items():
                samples.setdefault(name, []).extend(times)
        for operation, sizes in ALLOWED.items():
            for size, allowed in sizes.items():
                ours, gloo = (samples[f"{operation} {size} {who}"] for who in ("ours", "gloo"))
                long = size >= 2**20
                name = f"{size // 2**20} MiB" if long else f"{size // 2**10} KiB"
                rows.append(
                    Result(
                        name=f"ring {operation}, {name}, {ranks} ranks",
                        ours=(1e3 if long else 1e6) * median(ours),
                        reference=(1e3 if long else 1e6) * median(gloo),
                        unit="ms" if long else "us",
                        against="gloo",
                        at_most=allowed,
                        samples={"ours": ours, "gloo": gloo},
                    )
                )
                print(f"{rows[-1].name}: {rows[-1].ratio:.3f} of gloo's time", flush=True)
    return rows
