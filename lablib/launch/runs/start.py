"""The beginning of a training script: become a rank of what started the process; and a plain loop to compare with.

`launched_ranks` works under torchrun, under accelerate launch, and alone. `plain_loop` is the loop that everybody
writes first: one device, one model, nothing sharded. The trainer is held to it: the same samples, the same losses. It
shares the trainer's data order and learning rates, and none of its mechanism.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lablib.launch.training import (
    SampleOrder,
    TokenWindows,
    TrainConfig,
    Trainer,
    open_tokens,
    text_tokens,
    train_model,
)
from lablib.toys.transformer import Transformer


@contextmanager
def launched_ranks(device: str = "auto") -> Iterator[torch.device]:
    """Start the process group for a block, and end it after the block.

    torchrun and `accelerate launch` both say by environment variables which rank a process is. A process that nobody
    launched is the only rank of a group of one. "auto" is CUDA with NCCL where every rank of this machine has a GPU,
    and otherwise the CPU with gloo.
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
    """Return the device of this process."""
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
            print(f"{here} ranks and {gpus} GPUs here: NCCL wants a GPU for each rank, so this run is on the CPU")
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


def plain_loop(config: TrainConfig, device: str | torch.device = "cpu") -> Iterator[dict[str, float]]:
    """Take one step after the other on one device and yield its metrics, as many as `config.steps`."""
    device = torch.device(device)
    shape = train_model(config.model)
    path = config.tokens or text_tokens(config.folder, config.text)
    data = TokenWindows(open_tokens(path), seq=config.seq, vocab=shape.vocab)
    order = SampleOrder(len(data), config.seed)
    with device:
        model = Transformer(shape)
    torch.manual_seed(config.seed)  # here: building its layers drew numbers of its own
    model.init_weights()
    if config.compile:
        backend = config.compile if isinstance(config.compile, str) else "inductor"
        model.loss = torch.compile(model.loss, backend=backend)
    decay = [p for p in model.parameters() if p.dim() > 1]
    other = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": other, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps, fused=device.type == "cuda")
    cast = torch.autocast(device.type, torch.bfloat16) if config.precision == "bf16" else nullcontext()
    micro, count = config.split_batch(1)
    for step in range(1, config.steps + 1):
        begun = time.perf_counter()
        samples, total = order.take((step - 1) * config.global_batch, config.global_batch), 0.0
        for first in range(0, config.global_batch, micro):
            windows_BT = data.read(samples[first : first + micro])
            if device.type == "cuda":
                windows_BT = windows_BT.pin_memory().to(device, non_blocking=True)
            with cast:
                loss = model.loss(windows_BT) / count
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate(step)
        optimizer.step()
        optimizer.zero_grad()
        total, norm = float(total), float(norm)  # waits for the device
        seconds = time.perf_counter() - begun
        yield {
            "step": step,
            "loss": total,
            "grad_norm": norm,
            "lr": config.learning_rate(step),
            "seconds": seconds,
            "tokens_per_second": config.global_batch * config.seq / seconds,
        }


def compare_loops(config: TrainConfig, *, rounds: int = 4, steps: int = 10, warmup: int = 5) -> list[dict[str, Any]]:
    """Time the trainer on one rank and the plain loop in turns, on the same device in the same process.

    Args:
        warmup: Steps of each before the first turn: compilation, caches, the allocator.

    Returns:
        One sample a turn: loop ("trainer" or "plain"), round, seconds of each step, tokens_per_second of the median.
    """
    if min(rounds, steps, warmup) < 1:
        raise ValueError(f"rounds={rounds}, steps={steps} and warmup={warmup} must be at least 1")
    config = replace(config, steps=warmup + rounds * steps, lr_steps=max(config.lr_steps, warmup + rounds * steps))
    trainer = Trainer(config)
    plain = plain_loop(config, trainer.device)
    tokens, samples = config.global_batch * config.seq, []
    turns = {"trainer": trainer.train_step, "plain": lambda: next(plain)}
    for take in turns.values():
        for _ in range(warmup):
            take()
    for number in range(rounds):
        # Who goes first alternates, so that a drift of the clock favours neither.
        for loop in sorted(turns, reverse=bool(number % 2)):
            seconds = [turns[loop]()["seconds"] for _ in range(steps)]
            samples.append(
                {"loop": loop, "round": number, "seconds": seconds, "tokens_per_second": tokens / median(seconds)}
            )
    return samples
