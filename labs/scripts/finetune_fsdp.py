r"""Fine-tune a local Hugging Face model with FSDP2: prompts are read, answers are learned.

    torchrun --standalone --nproc-per-node 2 labs/scripts/finetune_fsdp.py --folder runs/demo --demo
    torchrun --standalone --nproc-per-node 8 labs/scripts/finetune_fsdp.py --folder runs/sft \
        --pretrained models/Qwen2-7B --examples data.jsonl --lora-rank 16 --frozen-dtype bf16 --seq 1024

An example is a line {"prompt": "...", "answer": "..."}. With --lora-rank only adapters are trained, and
FOLDER/adapters holds them in the format of the package peft; FOLDER/merged is the model with them merged into it.
Without, FOLDER/merged is the fine-tuned model. --demo makes a tiny random Qwen2 and a dataset of sums.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from lablib.launch.fsdp import export_safetensors, latest_checkpoint
from lablib.launch.ranks import agree, one_sentence, own_rank
from lablib.launch.runs import launched_ranks
from lablib.launch.training import (
    FineTuning,
    PrintSteps,
    SaveEvery,
    StopOnSignal,
    Trainer,
    addition_examples,
    config_from_args,
    copy_settings,
    exit_code,
    export_merged,
    read_examples,
    resume,
    save_adapters,
    tiny_qwen2,
    train_parser,
)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = train_parser(
        "Fine-tune a local Hugging Face model with FSDP2.",
        model="",
        lr=1e-4,
        weight_decay=0.0,
    )
    parser.add_argument(
        "--pretrained",
        type=Path,
        help="folder with config.json and safetensors",
    )
    parser.add_argument(
        "--examples",
        type=Path,
        help="file of JSON lines with prompt and answer",
    )
    parser.add_argument(
        "--bytes",
        action="store_true",
        help="tokens are bytes; by default the folder's tokenizer",
    )
    parser.add_argument(
        "--lora-rank",
        type=int,
        default=0,
        help="inner width of adapters; 0 trains all weights",
    )
    parser.add_argument(
        "--lora-alpha",
        type=float,
        default=16.0,
        help="adapters are scaled by alpha / rank",
    )
    parser.add_argument(
        "--frozen-dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="of frozen weights",
    )
    parser.add_argument(
        "--save-every",
        type=int,
        default=0,
        help="steps between checkpoints; 0 saves at the end",
    )
    parser.add_argument(
        "--demo",
        action="store_true",
        help="train a tiny random Qwen2 on sums; no files needed",
    )
    args = parser.parse_args(argv)
    try:
        args.config = config_from_args(args)
    except ValueError as error:
        parser.error(str(error))
    if args.demo == bool(args.pretrained or args.examples) or bool(
        args.pretrained
    ) != bool(args.examples):
        parser.error("give --pretrained and --examples, or --demo")
    return args


def make_task(args: argparse.Namespace) -> FineTuning:
    """Return model and examples; the demo's are made by rank 0 first."""
    if args.demo:
        args.pretrained = Path(args.config.folder) / "pretrained"
        agree(
            lambda: tiny_qwen2(args.pretrained) if own_rank() == 0 else None,
            "the demo could not be written",
        )
        examples = addition_examples(256)
    else:
        if not args.pretrained.is_dir():
            raise ValueError(f"--pretrained {args.pretrained} is no folder")
        tokenizer = None
        if not args.bytes:
            from transformers import AutoTokenizer

            try:
                tokenizer = AutoTokenizer.from_pretrained(
                    args.pretrained, local_files_only=True
                )
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"{args.pretrained} has no tokenizer that can be read: {str(error).splitlines()[0]}"
                ) from None
        examples = read_examples(args.examples, tokenizer)
    return FineTuning(
        args.config,
        args.pretrained,
        examples,
        lora_rank=args.lora_rank,
        lora_alpha=args.lora_alpha,
        frozen_dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[
            args.frozen_dtype
        ],
    )


def write_model(args: argparse.Namespace, trainer: Trainer) -> None:
    """Write the adapters and the model; every rank must call."""
    folder = trainer.folder
    if args.lora_rank:
        save_adapters(
            trainer.model, folder / "adapters", base=str(args.pretrained)
        )
    else:
        trainer.save()

    def write() -> None:
        if trainer.rank:
            return
        if args.lora_rank:
            export_merged(
                args.pretrained, folder / "adapters", folder / "merged"
            )
        else:
            export_safetensors(
                latest_checkpoint(trainer.checkpoints),
                folder / "merged" / "model.safetensors",
            )
            copy_settings(args.pretrained, folder / "merged")
        print(f"the model is in {folder / 'merged'}", flush=True)

    agree(write, "the model could not be written")


def train(args: argparse.Namespace) -> int:
    """Fine-tune, and return the exit code of this rank."""
    with launched_ranks(args.device):
        saving = (
            [SaveEvery(args.save_every), StopOnSignal()]
            if args.save_every
            else []
        )
        trainer = Trainer(
            args.config,
            [PrintSteps(args.print_every), *saving],
            make_task(args),
        )
        if args.save_every:
            for sentence in resume(trainer):
                if trainer.rank == 0:
                    print(sentence, flush=True)
        trainer.run()
        if trainer.outcome == "finished":
            write_model(args, trainer)
        return exit_code(trainer)


def main() -> int:
    args = arguments()
    try:
        return train(args)
    except ValueError as error:
        print(f"finetune_fsdp.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    with one_sentence():
        sys.exit(main())
