r"""Train a language model with FSDP2, from a laptop to several machines.

    python labs/scripts/train_fsdp.py --folder runs/one --model tiny --steps 20                     # one process
    torchrun --standalone --nproc-per-node 2 labs/scripts/train_fsdp.py --folder runs/two           # one machine
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        labs/scripts/train_fsdp.py --folder /shared/runs/three --model llama-3.2-1b                 # on both machines
    accelerate launch --num_processes 8 labs/scripts/train_fsdp.py --folder runs/four --model qwen2-7b --recompute full
    sbatch labs/scripts/train_fsdp.sbatch --folder /shared/runs/five --model qwen2-7b               # Slurm
    sky launch labs/scripts/train_fsdp.sky.yaml                                                     # a rented machine

Every step goes to FOLDER/metrics-rank0.jsonl and its brothers; `lablib.launch.training.metrics` explains each number.
With --save-every the run survives: start it again, with as many ranks as you like, and it continues from its newest
checkpoint. SIGTERM, SIGHUP or Ctrl-C then ends it after the current step with a checkpoint and exit code 143.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lablib.launch.fsdp import latest_checkpoint
from lablib.launch.ranks import one_sentence
from lablib.launch.runs import launched_ranks
from lablib.launch.training import (
    Callback,
    LogEvents,
    PrintSteps,
    SaveEvery,
    StopOnSignal,
    Trainer,
    Validate,
    config_from_args,
    exit_code,
    resume,
    train_parser,
)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = train_parser("Train a language model with FSDP2.")
    parser.add_argument(
        "--save-every",
        type=int,
        default=0,
        help="steps between checkpoints; 0 saves none",
    )
    parser.add_argument(
        "--validate-every",
        type=int,
        default=0,
        help="steps between two looks at --held-out sequences",
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="never resume: refuse a folder with checkpoints",
    )
    args = parser.parse_args(argv)
    try:
        args.config = config_from_args(args)
    except ValueError as error:
        parser.error(str(error))
    if args.save_every < 0:
        parser.error(f"--save-every {args.save_every} must not be negative")
    if args.validate_every < 0 or bool(args.validate_every) != bool(
        args.config.held_out
    ):
        parser.error(
            f"--validate-every {args.validate_every} and --held-out {args.config.held_out}: give both, above 0, or none"
        )
    return args


def callbacks(args: argparse.Namespace) -> list[Callback]:
    """Return what the run does besides training."""
    chosen: list[Callback] = [PrintSteps(args.print_every)]
    if args.validate_every:
        chosen.append(Validate(args.validate_every))
    if args.save_every:
        chosen += [SaveEvery(args.save_every), StopOnSignal()]
    return [*chosen, LogEvents()]


def train(args: argparse.Namespace) -> int:
    """Train, and return the exit code of this rank."""
    # After a restart by torchrun the checkpoints are this run's own.
    fresh = (
        args.fresh
        and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    )
    folder = Path(args.config.folder)
    if (
        fresh
        and args.save_every
        and latest_checkpoint(folder / "checkpoints")
    ):
        raise ValueError(
            f"--fresh: {folder} has checkpoints of an earlier run; give another folder, or delete them"
        )
    with launched_ranks(args.device):
        trainer = Trainer(args.config, callbacks(args))
        if args.save_every:
            for sentence in resume(trainer):
                if trainer.rank == 0:
                    print(sentence, flush=True)
        trainer.run()
        return exit_code(trainer)


def main() -> int:
    args = arguments()
    try:
        return train(args)
    except (
        ValueError
    ) as error:  # what was asked for cannot be: one sentence says so
        print(f"train_fsdp.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    with one_sentence():
        sys.exit(main())
