"""A tensor parallel Llama block, forward and backward, against DTensor's parallelize_module.

Both have the same weights and the same split, live in the same ranks and take turns in an order drawn anew each
round. A round's time is that of the slowest rank. DTensor lets q, k and v (and up and gate) each reduce the
gradient of their common input, 7 all-reduces a block; the toy reduces the sum once a half, 4. The counts are
printed with every launch.
"""

from __future__ import annotations

import copy
import random
import time

from lablib.launch.ranks import run_ranks
from tests.bench.bench_ddp import slowest
from tests.bench.harness import Result, median

LAUNCHES = 3
ROUNDS = 20
WARMUP = 4
RANKS = (2, 4)
ALLOWED = 0.9
OURS, THEIRS = "toys.tensor_parallel", "DTensor"


def blocks(seed: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Time forward and backward of both on this rank, in seconds, and count their all-reduces."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from lablib.launch.recorder import record_comms
    from lablib.toys.tp_blocks import ParallelBlock, Plan
    from lablib.toys.transformer import Block, rotary, tiny_config

    torch.manual_seed(0)
    config = tiny_config("llama", hidden=256, num_heads=8, ffn=704)  # 8 divides it, as DTensor wants
    whole = Block(config, 0.0, "fused")
    names = ("attention.q", "attention.k", "attention.v", "mlp.up", "mlp.gate")
    plan = {name: ColwiseParallel() for name in names}
    plan |= {name: RowwiseParallel() for name in ("attention.out", "mlp.down")}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    models = {
        OURS: ParallelBlock(whole, Plan(config, dist.group.WORLD)),
        THEIRS: parallelize_module(copy.deepcopy(whole), mesh, plan),
    }
    x_BSH = torch.randn(2, 128, config.hidden, requires_grad=True)
    rope_2SD = rotary(128, config.head_dim, device=x_BSH.device, dtype=x_BSH.dtype)

    def step(name: str) -> None:
        models[name](x_BSH, rope_2SD).sum().backward()
        models[name].zero_grad()
        x_BSH.grad = None

    calls = {}
    for name in models:
        with record_comms() as log:
            step(name)
        calls[name] = log.calls["all_reduce"]
    order, turns = random.Random(seed), list(models)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(WARMUP + ROUNDS):
        order.shuffle(turns)
        for name in turns:
            dist.barrier()
            start = time.perf_counter()
            step(name)
            if turn >= WARMUP:
                seconds[name].append(time.perf_counter() - start)
    return seconds, calls


def results() -> list[Result]:
    """Measure at 2 and 4 ranks."""
    rows = []
    for ranks in RANKS:
        samples: dict[str, list[float]] = {OURS: [], THEIRS: []}
        for launch in range(LAUNCHES):
            by_rank = run_ranks(blocks, ranks, 100 * ranks + launch, timeout=600, threads=1)
            seconds = slowest([times for times, _ in by_rank])
            for name, times in seconds.items():
                samples[name].extend(times)
            calls = by_rank[0][1]
            print(
                f"TP block, {ranks} ranks, launch {launch + 1} of {LAUNCHES}: "
                f"{median(seconds[OURS]) / median(seconds[THEIRS]):.3f} of {THEIRS}, "
                f"all-reduces {calls[OURS]} against {calls[THEIRS]}",
                flush=True,
            )
        rows.append(
            Result(
                name=f"TP Llama block, forward and backward, {ranks} ranks",
                ours=1e3 * median(samples[OURS]),
                reference=1e3 * median(samples[THEIRS]),
                unit="ms",
                against=THEIRS,
                at_most=ALLOWED,
                samples=samples,
            )
        )
    return rows
