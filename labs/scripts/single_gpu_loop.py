r"""The plain training loop on one device, alone or in turns with the FSDP2 trainer on the same card.

    python labs/scripts/single_gpu_loop.py --folder runs/plain --model gpt2-124m --seq 1024 --global-batch 32
    python labs/scripts/single_gpu_loop.py --folder runs/race --model gpt2-124m --seq 1024 --global-batch 32 \
        --compile --race 6

With --race the two take turns in one process and the last line is their ratio.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from lablib.launch.ranks import one_sentence
from lablib.launch.records import this_machine, write_json
from lablib.launch.runs import compare_loops, launched_ranks, plain_loop
from lablib.launch.training import config_from_args, train_parser


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = train_parser(
        "Train on one device without FSDP, or race FSDP on one rank against that."
    )
    parser.add_argument(
        "--race",
        type=int,
        default=0,
        help="turns of each of the two; 0 trains the plain loop",
    )
    parser.add_argument(
        "--turn", type=int, default=10, help="steps of a turn"
    )
    args = parser.parse_args(argv)
    try:
        args.config = config_from_args(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> None:
    args = arguments()
    with launched_ranks(args.device) as device:
        if not args.race:
            for step in plain_loop(args.config, device):
                if step["step"] % args.print_every == 0:
                    print(
                        f"step {step['step']:>5}  loss {step['loss']:.4f}  norm {step['grad_norm']:.2f}  "
                        f"{step['seconds']:.3f} s  {step['tokens_per_second']:,.0f} tokens/s",
                        flush=True,
                    )
            return
        samples = compare_loops(
            args.config, rounds=args.race, steps=args.turn
        )
    rates = {
        loop: [
            sample["tokens_per_second"]
            for sample in samples
            if sample["loop"] == loop
        ]
        for loop in ("plain", "trainer")
    }
    for loop, values in rates.items():
        print(
            f"{loop:>8}: {median(values):,.0f} tokens/s, {min(values):,.0f} to {max(values):,.0f}"
        )
    ratios = [
        fast / slow
        for fast, slow in zip(rates["trainer"], rates["plain"], strict=True)
    ]
    print(
        f"trainer / plain: {median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f} over {args.race} turns"
    )
    record = {
        "config": args.config.as_dict(),
        "machine": this_machine(),
        "samples": samples,
        "ratios": ratios,
    }
    print(write_json(Path(args.config.folder) / "race.json", record))


if __name__ == "__main__":
    with one_sentence():
        main()
