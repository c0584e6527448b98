r"""Before a long job: is every sum right, how fast is the link, and is one GPU slower than the others?

    torchrun --standalone --nproc-per-node 8 labs/scripts/preflight.py
    srun ... torchrun --nnodes 16 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        labs/scripts/preflight.py --expect 40

It ends with code 1 if a sum is wrong, if a rank sends less than `--expect` GB/s in an all-reduce over all ranks, or if
a rank multiplies the same matrices `--slow` times as long as the median rank.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from lablib.calc.communication import ring_all_reduce_bytes
from lablib.launch.ranks import one_sentence
from lablib.launch.runs import launched_ranks


def fastest(
    work: Callable[[], object], device: torch.device, repeats: int = 5
) -> float:
    """Return the seconds of the fastest of some runs, after one to warm up: what the hardware can do."""
    seconds = []
    for _ in range(repeats + 1):
        dist.barrier()
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return min(seconds[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--mb", type=int, default=256, help="megabytes of the all-reduce"
    )
    parser.add_argument(
        "--side",
        type=int,
        default=0,
        help="of the matrices; by default 8192 on a GPU, 512 on a CPU",
    )
    parser.add_argument(
        "--expect",
        type=float,
        default=0.0,
        help="least GB/s that a rank should send",
    )
    parser.add_argument(
        "--slow",
        type=float,
        default=1.15,
        help="a rank that takes this many times as long is slow",
    )
    options = parser.parse_args()
    with launched_ranks() as device:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        data = torch.full((options.mb * 250_000,), float(rank), device=device)
        dist.all_reduce(data)
        right = bool((data == ranks * (ranks - 1) / 2).all())
        rate = (
            ring_all_reduce_bytes(4 * data.numel(), ranks)
            / fastest(lambda: dist.all_reduce(data), device)
            / 1e9
        )
        side, dtype = (
            (8192, torch.bfloat16)
            if device.type == "cuda"
            else (512, torch.float32)
        )
        a = torch.rand(
            options.side or side,
            options.side or side,
            device=device,
            dtype=dtype,
        )
        own = (
            socket.gethostname(),
            right,
            rate,
            fastest(lambda: a @ a, device),
        )
        found: list[tuple[str, bool, float, float]] = [own] * ranks
        dist.all_gather_object(found, own)
        if rank:
            return 0
    usual, sent = (
        median(each[3] for each in found),
        min(each[2] for each in found),
    )
    wrong = [r for r, each in enumerate(found) if not each[1]]
    slow = [
        r for r, each in enumerate(found) if each[3] > options.slow * usual
    ]
    print(
        f"{options.mb} MB over {ranks} ranks: each sends {sent:.2f} GB/s; a product takes {1e3 * usual:.2f} ms"
    )
    for r in wrong:
        print(
            f"rank {r} on {found[r][0]} has a wrong sum: leave this machine out"
        )
    for r in slow:
        print(
            f"rank {r} on {found[r][0]} takes {found[r][3] / usual:.2f} times as long as the median"
        )
    if short := ranks > 1 and sent < options.expect:
        print(
            f"that is below the {options.expect:g} GB/s that you expect: NCCL_DEBUG=INFO says which way it goes"
        )
    return int(bool(wrong or slow or short))


if __name__ == "__main__":
    with one_sentence():
        sys.exit(main())
