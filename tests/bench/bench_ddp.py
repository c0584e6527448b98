"""The overlapped DDP toy against DistributedDataParallel: a training step of one 20M GPT-like model.

All variants live in the same ranks and take turns in an order drawn anew each round, the same on every rank. A
step is forward, backward with its all-reduce, SGD and zero_grad; its time is that of the slowest rank. 64 tokens
per rank keep the computation small, so that the gradients' way weighs as much as it can.
"""

from __future__ import annotations

import copy
import random
import time
from functools import partial

from lablib.launch.ranks import run_ranks
from tests.bench.harness import Result, median

LAUNCHES = 3  # the ranks are started anew; what is pooled are the rounds of all
ROUNDS = 15
WARMUP = 3  # PyTorch's DDP builds its final buckets in the second step
RANKS = (2, 4)
#: Our step over theirs, at most.
ALLOWED = {"DistributedDataParallel": 1.0, "same, gradient_as_bucket_view=True": 1.05}
OURS = "OverlappedDDP"


def steps(seed: int) -> dict[str, list[float]]:
    """Time the step of every variant on this rank, in seconds."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from lablib.toys.ddp import OverlappedDDP
    from lablib.toys.transformer import Transformer, tiny_config

    torch.manual_seed(0)
    config = tiny_config("gpt2", num_layers=11, hidden=384, num_heads=6, max_positions=64)
    module, tokens_BT = Transformer(config), torch.randint(0, 256, (1, 65))
    plain, view = ALLOWED
    wrappers = {
        plain: DistributedDataParallel,
        view: partial(DistributedDataParallel, gradient_as_bucket_view=True),
        OURS: OverlappedDDP,
    }
    models = {name: wrapper(copy.deepcopy(module)) for name, wrapper in wrappers.items()}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=1e-3) for name, model in models.items()}

    def step(name: str) -> None:
        logits_BSV = models[name](tokens_BT[:, :-1])
        torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), tokens_BT[:, 1:].flatten()).backward()
        if name == OURS:
            models[name].sync()
        optimizers[name].step()
        optimizers[name].zero_grad()

    order, names = random.Random(seed), list(models)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(WARMUP + ROUNDS):
        order.shuffle(names)
        for name in names:
            dist.barrier()
            start = time.perf_counter()
            step(name)
            if turn >= WARMUP:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def slowest(by_rank: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Return for every step the time of the slowest rank."""
    return {
        name: [max(times) for times in zip(*(rank[name] for rank in by_rank), strict=True)]
        for name in by_rank[0]
    }


def results() -> list[Result]:
    """Measure at 2 and 4 ranks."""
    rows = []
    for ranks in RANKS:
        samples: dict[str, list[float]] = {}
        for launch in range(LAUNCHES):
            seconds = slowest(run_ranks(steps, ranks, 100 * ranks + launch, timeout=600, threads=1))
            for name, times in seconds.items():
                samples.setdefault(name, []).extend(times)
            ratios = ", ".join(
                f"{median(seconds[OURS]) / median(seconds[name]):.3f} of {name}" for name in ALLOWED
            )
            print(f"DDP step, {ranks} ranks, launch {launch + 1} of {LAUNCHES}: {ratios}", flush=True)
        for name, allowed in ALLOWED.items():
            rows.append(
                Result(
                    name=f"DDP step, 20M GPT, {ranks} ranks",
                    ours=1e3 * median(samples[OURS]),
                    reference=1e3 * median(samples[name]),
                    unit="ms",
                    against=name,
                    at_most=allowed,
                    samples={OURS: samples[OURS], name: samples[name]},
                )
            )
    return rows
