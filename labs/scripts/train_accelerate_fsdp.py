"""A small Qwen2 trained through Accelerate, which must prove that it got what was asked for.

    accelerate launch --config_file labs/scripts/accelerate_fsdp2.yaml labs/scripts/train_accelerate_fsdp.py
    torchrun --standalone --nproc-per-node 2 labs/scripts/train_accelerate_fsdp.py          # CPU: DDP

Accelerate has no FSDP on a CPU, and does not say so: with an FSDP config it trains with DDP, or starts processes
that know nothing of each other, and ends with exit code 0. This script therefore counts its ranks, looks at its
model, and stops when either is not what was asked for. On a CPU it says so, and asks for DDP.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from lablib.toys.text import VOCAB, batches, text, tokens
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config, Qwen2ForCausalLM

FALLBACK = (
    "No accelerator here: Accelerate runs no FSDP on a CPU, and would train something else without a word. "
    "This run asks for DDP over gloo instead. FSDP itself does run on a CPU: see lablib.launch.fsdp.sharding."
)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small Qwen2 with Accelerate and FSDP2."
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--global-batch",
        type=int,
        default=8,
        help="samples in a step, over all ranks",
    )
    parser.add_argument(
        "--seq", type=int, default=64, help="tokens in a sample"
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--losses", type=Path, help="write the losses here, as JSON"
    )
    args = parser.parse_args(argv)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    for name in ("steps", "global_batch", "seq", "layers"):
        if getattr(args, name) < 1:
            parser.error(
                f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1"
            )
    if args.hidden < 8 or args.hidden % 8:
        parser.error(
            f"--hidden {args.hidden} must be a multiple of 8: 4 heads of an even width"
        )
    if args.global_batch % ranks:
        parser.error(
            f"ranks={ranks} does not divide --global-batch {args.global_batch}"
        )
    return args


def make_accelerator() -> Accelerator:
    """Return an Accelerator that is what was asked for, or stop with one sentence."""
    if torch.cuda.is_available():
        accelerator = Accelerator()
        check(accelerator, DistributedType.FSDP)
        return accelerator
    if "WORLD_SIZE" not in os.environ:
        raise SystemExit(
            f"{FALLBACK}\nThis is a single process, without ranks; `accelerate launch --cpu` starts one whatever "
            "--num_processes says. Start it with: "
            "torchrun --standalone --nproc-per-node 2 labs/scripts/train_accelerate_fsdp.py"
        )
    if os.environ.get("RANK", "0") == "0":
        print(FALLBACK, flush=True)
    for name in (
        "ACCELERATE_USE_FSDP",
        "ACCELERATE_MIXED_PRECISION",
    ):  # left by `accelerate launch`
        os.environ.pop(name, None)
    accelerator = Accelerator(cpu=True)
    check(
        accelerator,
        DistributedType.MULTI_CPU
        if int(os.environ["WORLD_SIZE"]) > 1
        else DistributedType.NO,
    )
    return accelerator


def check(accelerator: Accelerator, wanted: DistributedType) -> None:
    """Stop unless Accelerate runs in the wanted way, on as many ranks as were started."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    got = accelerator.distributed_type
    if got != wanted:
        raise SystemExit(
            f"asked for {wanted.value}, but Accelerate runs {got.value}: check --config_file"
        )
    if accelerator.num_processes != started:
        raise SystemExit(
            f"{started} ranks were started, but Accelerate counts {accelerator.num_processes}: they train apart"
        )
    if wanted == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise SystemExit(
            "this is FSDP1: set fsdp_version: 2 in the config file"
        )


def check_sharded(model: torch.nn.Module) -> int:
    """Stop unless every block is a unit and every parameter a shard; return the number of units."""
    units = [
        module for module in model.modules() if isinstance(module, FSDPModule)
    ]
    blocks = model.model.layers
    whole = [
        name
        for name, p in model.named_parameters()
        if not isinstance(p, DTensor)
    ]
    if not all(isinstance(block, FSDPModule) for block in blocks):
        raise SystemExit(
            f"{len(blocks)} blocks, but not each is a unit: check fsdp_transformer_layer_cls_to_wrap"
        )
    if whole:
        raise SystemExit(
            f"{len(whole)} parameters are not sharded, such as {whole[0]}"
        )
    return len(units)


def train(args: argparse.Namespace, accelerator: Accelerator) -> list[float]:
    """Take the steps and return the mean loss over all ranks of each."""
    torch.manual_seed(args.seed)  # the same weights on every rank
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=args.seq,
        use_cache=False,
    )
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    # Together: Accelerate hands the optimizer the shards in place of the whole parameters.
    model, optimizer = accelerator.prepare(model, optimizer)
    if accelerator.distributed_type == DistributedType.FSDP:
        accelerator.print(
            f"FSDP2 with {check_sharded(model)} units on {accelerator.num_processes} ranks"
        )
    rank, ranks = accelerator.process_index, accelerator.num_processes
    stream = batches(
        tokens(text()), batch=args.global_batch, seq=args.seq, seed=args.seed
    )
    losses = []
    for step, windows_BT in zip(
        range(1, args.steps + 1), stream, strict=False
    ):
        begun = time.perf_counter()
        own_BS = windows_BT[rank::ranks, :-1].to(
            accelerator.device
        )  # the model shifts the labels itself
        loss = model(input_ids=own_BS, labels=own_BS).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(
            accelerator.reduce(loss.detach(), reduction="mean").item()
        )
        accelerator.print(
            f"step {step}: loss {losses[-1]:.4f}, {time.perf_counter() - begun:.3f} s",
            flush=True,
        )
    return losses


def main() -> None:
    args = arguments()
    accelerator = make_accelerator()
    try:
        losses = train(args, accelerator)
        accelerator.print(
            f"{accelerator.distributed_type.value} on {accelerator.num_processes} ranks"
        )
        if args.losses and accelerator.is_main_process:
            args.losses.write_text(json.dumps(losses), encoding="utf-8")
    finally:
        accelerator.end_training()  # destroys the process group


if __name__ == "__main__":
    main()
