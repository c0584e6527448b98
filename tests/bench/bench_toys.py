"""How fast the ring is beside gloo's own collectives: reported and not bounded, since toys are plain.

Both live in the same ranks and take turns in an order drawn anew each round, the same on every rank, so that a slow
moment of the machine meets both. A round takes as long as its slowest rank.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from lablib.launch.ranks import run_ranks
from tests.bench.harness import Result, median

LAUNCHES = 3  # the ranks are started anew; what is pooled are the rounds of all
ROUNDS, WARMUP = 7, 3
RANKS = (2, 4)
MIB = 2**20


def ring_all_reduce(size: int) -> dict[str, Callable[[], object]]:
    """All-reduce of an array of so many bytes."""
    import torch
    import torch.distributed as dist

    from lablib.toys.collectives.ring import ring_all_reduce

    x = torch.zeros(size // 4)
    return {"toy": lambda: ring_all_reduce(x), "gloo": lambda: dist.all_reduce(x)}


def ring_halves(half: str) -> dict[str, Callable[[], object]]:
    """Reduce-scatter or all-gather of 64 MiB."""
    import torch
    import torch.distributed as dist

    from lablib.toys.collectives.ring import ring_all_gather, ring_reduce_scatter
    from lablib.toys.torch_names import all_gather, reduce_scatter

    full = torch.zeros(64 * MIB // 4)
    chunk = torch.zeros(full.numel() // dist.get_world_size())
    if half == "reduce_scatter":
        return {"toy": lambda: ring_reduce_scatter(chunk, full), "gloo": lambda: reduce_scatter(chunk, full)}
    return {"toy": lambda: ring_all_gather(full, chunk), "gloo": lambda: all_gather(full, chunk)}


#: What is compared: name, what makes the two, its arguments.
RACES: tuple[tuple[str, Callable[..., dict[str, Callable[[], object]]], tuple], ...] = (
    ("ring all_reduce, 64 MiB", ring_all_reduce, (64 * MIB,)),
    ("ring all_reduce, 1 KiB", ring_all_reduce, (1024,)),
    ("ring reduce_scatter, 64 MiB", ring_halves, ("reduce_scatter",)),
    ("ring all_gather, 64 MiB", ring_halves, ("all_gather",)),
)


def timed(seed: int, make: Callable[..., dict[str, Callable[[], object]]], *arguments: object) -> dict:
    """Time both on this rank, in seconds."""
    import torch.distributed as dist

    variants = make(*arguments)
    order, names = random.Random(seed), list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(WARMUP + ROUNDS):
        order.shuffle(names)
        for name in names:
            dist.barrier()
            start = time.perf_counter()
            variants[name]()
            if turn >= WARMUP:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def slowest(by_rank: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Return for every round the time of the slowest rank."""
    return {name: [max(times) for times in zip(*(rank[name] for rank in by_rank), strict=True)] for name in by_rank[0]}


def results() -> list[Result]:
    """Measure at 2 and 4 ranks."""
    rows = []
    for title, make, arguments in RACES:
        for ranks in RANKS:
            samples: dict[str, list[float]] = {}
            for launch in range(LAUNCHES):
                seed = 100 * ranks + launch
                for name, times in slowest(
                    run_ranks(timed, ranks, seed, make, *arguments, timeout=600, threads=1)
                ).items():
                    samples.setdefault(name, []).extend(times)
            theirs = next(name for name in samples if name != "toy")
            ours, reference = (1e3 * median(samples[name]) for name in ("toy", theirs))
            rows.append(Result(f"{title}, {ranks} ranks", ours, reference, "ms", theirs, at_most=None, samples=samples))
            print(f"{rows[-1].name}: {rows[-1].ratio:.2f} of {theirs}", flush=True)
    return rows
