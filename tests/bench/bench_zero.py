"""The ZeRO-3 toy against fully_shard: a training step of one 20M GPT-like model, and the memory it takes.

Both gather the same units, the blocks and the root, and release all of them after forward. In the timing both live
in the same ranks and take turns in an order drawn anew each round, the same on every rank. A step is forward,
backward, AdamW and zero_grad; its time is that of the slowest rank. 64 tokens per rank keep the computation small.

Memory is measured in ranks of their own, above what the process had before the model, as the kernel counts it. By
default glibc keeps freed buffers of such sizes for later, which would hide every release: so each rank tells it to
return what is larger than 128 KiB (`mallopt`, as MALLOC_MMAP_THRESHOLD_ does), and resets the high-water mark
(5 to clear_refs) after the warm-up.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import random
import sys
import time
from pathlib import Path

from lablib.calc.units import MiB
from lablib.launch.ranks import run_ranks
from tests.bench.bench_ddp import slowest
from tests.bench.harness import Result, median

LAUNCHES = 3  # the ranks are started anew; what is pooled are the rounds of all
ROUNDS = 12
WARMUP = 3
#: Our step over theirs, at most, by ranks.
ALLOWED = {2: 0.9, 4: 1.0}
ALLOWED_PEAK = 1.1
OURS, THEIRS = "ZeRO3", "fully_shard"
_M_MMAP_THRESHOLD = -3  # malloc.h


def build(name: str, module: object) -> object:
    """Return a function that runs one training step of the module, sharded in place.

    Args:
        name: OURS or THEIRS.
        module: The transformer, unsharded.
    """
    import torch
    from torch.distributed.fsdp import fully_shard

    from lablib.toys.zero import ZeRO3

    tokens_BT = torch.randint(0, 256, (1, 65))

    def loss_of(model: torch.nn.Module) -> torch.Tensor:
        logits_BSV = model(tokens_BT[:, :-1])
        return torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), tokens_BT[:, 1:].flatten())

    if name == OURS:
        ours = ZeRO3(module, lambda shards: torch.optim.AdamW(shards, lr=1e-3))

        def step() -> None:
            ours.backward(loss_of(ours))
            ours.step()

        return step
    for block in module.blocks:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(module, reshard_after_forward=True)  # by default the root stays gathered
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def step() -> None:
        loss_of(module).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def transformer() -> object:
    """Return the model of the bench, the same on every rank."""
    import torch

    from lablib.toys.transformer import Transformer, tiny_config

    torch.manual_seed(0)
    return Transformer(tiny_config("gpt2", num_layers=11, hidden=384, num_heads=6, max_positions=64))


def steps(seed: int) -> dict[str, list[float]]:
    """Time the step of both on this rank, in seconds."""
    import torch.distributed as dist

    module = transformer()
    variants = {name: build(name, copy.deepcopy(module)) for name in (THEIRS, OURS)}
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


def resident(field: str) -> float:
    """Return a field of this process's status, VmRSS or VmHWM, in MiB.

    Args:
        field: Its name.
    """
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024 / MiB


def peak(name: str) -> float:
    """Return the most memory of a step on this rank, in MiB above the process without a model."""
    import torch
    import torch.distributed as dist

    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 128 * 1024)
    dist.all_reduce(torch.zeros(1))  # the group's own buffers belong to the base
    before = resident("VmRSS")
    step = build(name, transformer())
    for _ in range(WARMUP):
        step()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(3):
        step()
    return resident("VmHWM") - before


def results() -> list[Result]:
    """Measure at 2 and 4 ranks."""
    rows = []
    for ranks, allowed in ALLOWED.items():
        samples: dict[str, list[float]] = {}
        for launch in range(LAUNCHES):
            seconds = slowest(run_ranks(steps, ranks, 100 * ranks + launch, timeout=600, threads=1))
            for name, times in seconds.items():
                samples.setdefault(name, []).extend(times)
            ratio = median(seconds[OURS]) / median(seconds[THEIRS])
            print(
                f"ZeRO-3 step, {ranks} ranks, launch {launch + 1} of {LAUNCHES}: {ratio:.3f}",
                flush=True,
            )
        rows.append(
            Result(
                name=f"ZeRO-3 step, 20M GPT, {ranks} ranks",
                ours=1e3 * median(samples[OURS]),
                reference=1e3 * median(samples[THEIRS]),
                unit="ms",
                against=THEIRS,
                at_most=allowed,
                samples=samples,
            )
        )
        if not sys.platform.startswith("linux"):
            print("ZeRO-3 peak memory: not measured, it needs Linux's /proc", flush=True)
            continue
        peaks: dict[str, list[float]] = {OURS: [], THEIRS: []}
        for _ in range(LAUNCHES):
            for name in peaks:
                peaks[name].append(max(run_ranks(peak, ranks, name, timeout=600, threads=1)))
        rows.append(
            Result(
                name=f"ZeRO-3 peak bytes a rank, {ranks} ranks",
                ours=median(peaks[OURS]),
                reference=median(peaks[THEIRS]),
                unit="MiB",
                against=THEIRS,
                at_most=ALLOWED_PEAK,
                samples=peaks,
            )
        )
    return rows
