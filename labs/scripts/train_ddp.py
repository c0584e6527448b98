"""A complete DDP job: one small language model, real text, any number of ranks.

    torchrun --standalone --nproc-per-node 2 labs/scripts/train_ddp.py --losses loss.jsonl --checkpoint run.pt

The global batch is fixed, so 1 rank and 2 ranks take the same steps. DistributedSampler shuffles all samples
with seed + epoch, the same list on every rank, and gives rank r of n the places r, r+n, r+2n, ... In one step
the n ranks together take the next `global_batch` places of that list, whatever n is: the same samples, divided
in another way. The gradients then differ by rounding only, and so do the loss curves.

SIGTERM (a preempted machine) ends the run after the current step with a checkpoint; ranks exit with 0, torchrun with 1.
`--resume` continues from the checkpoint on as many ranks as you like; on several machines the file must lie
where all of them see it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
from lablib.toys.data_parallel import OverlappedDDP
from lablib.toys.text import text, tokens, windows
from lablib.toys.transformer import Transformer, tiny_config
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

# A resumed run must agree on these.
SAME_RUN = [
    "global_batch",
    "seq",
    "layers",
    "hidden",
    "lr",
    "seed",
    "dtype",
    "text",
    "max_tokens",
]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small language model with data parallelism."
    )
    parser.add_argument(
        "--steps", type=int, default=40, help="optimizer steps in all"
    )
    parser.add_argument(
        "--global-batch",
        type=int,
        default=16,
        help="samples in a step, over all ranks",
    )
    parser.add_argument(
        "--accumulate",
        type=int,
        default=1,
        help="micro-batches in a step, on each rank",
    )
    parser.add_argument(
        "--seq", type=int, default=64, help="tokens in a sample"
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the first weights and of the shuffle",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "float64"), default="float32"
    )
    parser.add_argument(
        "--text",
        type=Path,
        help="train on this file; by default on the course's own prose",
    )
    parser.add_argument(
        "--max-tokens", type=int, help="use only the beginning of the text"
    )
    parser.add_argument(
        "--toy",
        action="store_true",
        help="lablib's OverlappedDDP instead of PyTorch's DDP",
    )
    parser.add_argument(
        "--losses", type=Path, help="one JSON line for each step"
    )
    parser.add_argument("--checkpoint", type=Path, help="where to save")
    parser.add_argument(
        "--checkpoint-every",
        type=int,
        default=20,
        help="steps between two checkpoints",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the checkpoint if there is one",
    )
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "start it with torchrun: torchrun --standalone --nproc-per-node 2 "
            + parser.prog
        )
    ranks = int(os.environ["WORLD_SIZE"])
    for name in (
        "steps",
        "global_batch",
        "accumulate",
        "seq",
        "checkpoint_every",
    ):
        if getattr(args, name) < 1:
            parser.error(
                f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1"
            )
    if args.global_batch % (ranks * args.accumulate):
        parser.error(
            f"ranks={ranks} x accumulate={args.accumulate} does not divide --global-batch {args.global_batch}"
        )
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint")
    return args


def save_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write beside the target, force it to disk, then rename: a reader finds the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def schedule(
    loader: DataLoader,
    sampler: DistributedSampler,
    start: int,
    per_epoch: int,
    accumulate: int,
) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Yield (epoch, micro-batches of a step), from `start` on."""
    for epoch in itertools.count(start // per_epoch):
        sampler.set_epoch(epoch)  # or all epochs have the same order
        batches = iter(loader)
        for step in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            micro_batches = list(itertools.islice(batches, accumulate))
            if step >= start:
                yield epoch, micro_batches


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: list[torch.Tensor],
) -> torch.Tensor:
    """Train on this rank's samples; return their mean loss."""
    device, count = micro_batches[0].device, len(micro_batches)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for number, windows_BT in enumerate(micro_batches, start=1):
        last = number == count
        with contextlib.nullcontext() if last else model.no_sync():
            logits_BSV = model(windows_BT[:, :-1])
            loss = nn.functional.cross_entropy(
                logits_BSV.flatten(0, 1), windows_BT[:, 1:].flatten()
            )
            # DDP averages over ranks, nobody over micro-batches.
            (loss / count).backward()
        total += loss.detach()  # .item() would wait for it here
    if isinstance(model, OverlappedDDP):
        model.sync()  # PyTorch's DDP does so at the end of backward
    optimizer.step()
    optimizer.zero_grad()
    return total / count


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train to `args.steps`, or until some rank gets SIGTERM."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    asked_to_stop = []
    signal.signal(signal.SIGTERM, lambda *_: asked_to_stop.append(True))

    data = windows(tokens(text(args.text))[: args.max_tokens], args.seq)
    sampler = DistributedSampler(
        data, num_replicas=ranks, rank=rank, seed=args.seed, drop_last=True
    )
    loader = DataLoader(
        data,
        args.global_batch // (ranks * args.accumulate),
        sampler=sampler,
        drop_last=True,
    )
    steps_per_epoch = len(data) // args.global_batch
    if not steps_per_epoch:
        raise ValueError(
            f"{len(data)} samples in the text, less than --global-batch {args.global_batch}"
        )

    torch.manual_seed(args.seed)
    config = tiny_config(
        "gpt2",
        num_layers=args.layers,
        hidden=args.hidden,
        max_positions=args.seq,
    )
    module = Transformer(config).to(device, getattr(torch, args.dtype))
    optimizer = torch.optim.AdamW(module.parameters(), lr=args.lr)
    start, settings = 0, {name: str(getattr(args, name)) for name in SAME_RUN}
    if args.resume and args.checkpoint.exists():
        saved = torch.load(
            args.checkpoint, map_location=device, weights_only=True
        )
        if wrong := [
            name
            for name in SAME_RUN
            if saved["settings"][name] != settings[name]
        ]:
            raise ValueError(
                f"the checkpoint is of another run: {', '.join(wrong)} differ"
            )
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    model = (
        OverlappedDDP(module) if args.toy else DistributedDataParallel(module)
    )

    writes_log = rank == 0 and args.losses
    if writes_log:  # a resumed run takes the steps after its checkpoint again, so it forgets their losses
        old = (
            args.losses.read_text().splitlines()
            if start and args.losses.exists()
            else []
        )
        save_atomically(
            args.losses,
            lambda file: file.write(
                "".join(f"{line}\n" for line in old[:start]).encode()
            ),
        )

    steps = schedule(loader, sampler, start, steps_per_epoch, args.accumulate)
    for step, (epoch, micro_batches) in zip(
        range(start + 1, args.steps + 1), steps, strict=False
    ):
        begun = time.perf_counter()
        loss = take_step(
            model,
            optimizer,
            [windows_BT.to(device) for windows_BT in micro_batches],
        )
        # The mean loss over the ranks. And if one rank was asked to stop, all stop, after the same step.
        report = torch.stack(
            [loss / ranks, torch.full_like(loss, len(asked_to_stop))]
        )
        dist.all_reduce(report)
        loss, stop = report.tolist()  # the host waits here, once a step
        if writes_log:
            line = {
                "step": step,
                "epoch": epoch,
                "loss": loss,
                "seconds": time.perf_counter() - begun,
            }
            with args.losses.open("a") as log:
                log.write(json.dumps({**line, "ranks": ranks}) + "\n")
        due = stop or step == args.steps or step % args.checkpoint_every == 0
        if rank == 0 and args.checkpoint and due:
            state = {"step": step, "settings": settings}
            state |= {
                "model": module.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            save_atomically(
                args.checkpoint, functools.partial(torch.save, state)
            )
        if stop:
            break


def main() -> None:
    args = arguments()
    cuda = torch.cuda.device_count() >= int(
        os.environ["LOCAL_WORLD_SIZE"]
    )  # NCCL wants a GPU for each rank
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if cuda
        else torch.device("cpu")
    )
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        train(args, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
