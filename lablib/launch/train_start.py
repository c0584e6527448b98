"""Become a rank of whatever started this process: torchrun, accelerate launch, or nobody."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def launched_ranks(device: str = "auto") -> Iterator[torch.device]:
    """Start the process group for a block, and end it after the block.

    torchrun and `accelerate launch` both say by environment variables which rank a process is. A process that nobody
    launched is the only rank of a group of one.

    Args:
        device: "cuda" with NCCL, "cpu" with gloo, or "auto": CUDA where every rank of this machine has a GPU.

    Raises:
        ValueError: If the launcher started something that would train apart, or the GPUs do not suffice.
    """
    where = choose_device(device)
    backend = "gloo"
    if where.type == "cuda":
        torch.cuda.set_device(where)
        backend = "nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        check_alone()
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield where
    finally:
        dist.destroy_process_group()


def choose_device(device: str) -> torch.device:
    """Return the device of this process.

    Args:
        device: As of `launched_ranks`.

    Raises:
        ValueError: If it is unknown, or CUDA is asked for and there are fewer GPUs than ranks on this machine.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={device!r} must be 'auto', 'cpu' or 'cuda'")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus < here:
        raise ValueError(
            f"{here} ranks on this machine need {here} GPUs, and there are {gpus}: use --nproc-per-node {gpus}"
            if gpus
            else "device='cuda', and PyTorch sees no GPU here: `rung doctor` says why"
        )
    if device == "cpu" or gpus < here:
        if device == "auto" and gpus and os.environ.get("RANK", "0") == "0":
            print(
                f"{here} ranks and {gpus} GPUs here: NCCL wants a GPU for each rank, so this run is on the CPU"
            )
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def check_alone() -> None:
    """Raise a ValueError where several processes were started and none was told its rank."""
    tasks = int(os.environ.get("SLURM_NTASKS", "1"))
    if tasks > 1 and "SLURM_STEP_ID" in os.environ:
        raise ValueError(
            f"srun started {tasks} tasks, and none knows its rank: let srun start torchrun, one task a node, "
            "as labs/scripts/train_fsdp.sbatch does"
        )
    if any(name.startswith("ACCELERATE_") for name in os.environ):
        raise ValueError(
            "accelerate launch started one process without ranks, as it does with --cpu whatever --num_processes says; "
            "use torchrun --nproc-per-node on a CPU"
        )
