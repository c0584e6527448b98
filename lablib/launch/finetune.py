"""Supervised fine-tuning of a local Hugging Face model: examples of prompt and answer, loss on the answer alone.

    task = FineTuning(config, "models/qwen2", examples, lora_rank=8)
    trainer = Trainer(config, task=task)

An example is one sequence, prompt and answer and an end, padded on the right to `seq`:

    ids       p1  p2  p3  a1  a2  end pad pad
    targets   --  --  a1  a2  end --  --              (each position is asked for the next id; -- has no loss)

The prompt is read and not learned. The causal mask keeps every position from the padding after it, so no attention
mask is needed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lablib.calc.flops import step_flops
from lablib.calc.models import ModelConfig, from_hf
from lablib.launch.lora import TARGETS, add_lora, load_adapters, merge
from lablib.launch.pretrained import load_pretrained, write_safetensors
from lablib.launch.train_config import TrainConfig
from lablib.launch.train_tasks import IGNORE, Task, TaskFlops


@dataclass(frozen=True)
class Example:
    """One prompt and the answer that is to be learned, as token ids.

    Attributes:
        prompt: Ids that are read.
        answer: Ids that have a loss; with the end of text, if the model shall learn to stop.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def encode(prompt: str, answer: str, tokenizer: Any = None, *, end: int = 0) -> Example:
    """Return an example of two texts.

    Args:
        prompt: What is read.
        answer: What is learned.
        tokenizer: A Hugging Face tokenizer, whose end of text is added; None takes bytes.
        end: The end of text where there is no tokenizer; byte 0 is in no text.
    """
    if tokenizer is None:
        return Example(tuple(prompt.encode()), (*answer.encode(), end))
    ids = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, answer)]
    return Example(tuple(ids[0]), (*ids[1], tokenizer.eos_token_id))


def read_examples(path: str | Path, tokenizer: Any = None) -> list[Example]:
    """Return the examples of a file with one JSON object a line, {"prompt": ..., "answer": ...}.

    Args:
        path: The file.
        tokenizer: As in `encode`.

    Raises:
        ValueError: If the file cannot be read, or a line is not such an object; it names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    examples = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            examples.append(encode(fields["prompt"], fields["answer"], tokenizer))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(
                f'{path}, line {number}: expected {{"prompt": "...", "answer": "..."}}, got {line[:60]!r}'
            ) from None
    return examples


def pair_of(example: Example, seq: int) -> tuple[list[int], list[int]]:
    """Return inputs and targets of one example, each of length `seq`.

    Raises:
        ValueError: If the example is longer, or has no prompt or no answer.
    """
    ids = [*example.prompt, *example.answer]
    if not example.prompt or not example.answer:
        raise ValueError(
            "an example needs a prompt and an answer: the first answer is asked of the prompt's end"
        )
    if len(ids) > seq + 1:
        raise ValueError(
            f"an example has {len(ids)} tokens and seq={seq} takes {seq + 1}: cut it, or raise seq"
        )
    rest = seq + 1 - len(ids)
    inputs = (ids + [0] * rest)[:-1]
    masked = [IGNORE] * len(example.prompt) + list(example.answer) + [IGNORE] * rest
    return inputs, masked[1:]


class FineTuning(Task):
    """Fine-tune a local pretrained model on examples, whole or by adapters.

    Args:
        config: The run; its `model` is "".
        folder: The pretrained model: config.json and safetensors.
        examples: At least one.
        lora_rank: Inner width of the adapters; 0 trains all weights.
        lora_alpha: Their scale.
        targets: Layers that get adapters.
        frozen_dtype: Of the frozen weights, with adapters.

    Raises:
        ValueError: If the configuration, an example or the folder does not suit; before the model is built.
    """

    uneven = True

    def __init__(
        self,
        config: TrainConfig,
        folder: str | Path,
        examples: Sequence[Example],
        *,
        lora_rank: int = 0,
        lora_alpha: float = 16.0,
        targets: Sequence[str] = TARGETS,
        frozen_dtype: torch.dtype = torch.float32,
    ) -> None:
        if config.model:
            raise ValueError(
                f"model={config.model!r}: a fine-tuned model comes from its folder, so give model=''"
            )
        if config.recompute not in ("none", "full"):
            raise ValueError(f"recompute={config.recompute!r}: a Hugging Face model takes 'none' or 'full'")
        if not examples:
            raise ValueError("there are no examples to learn from")
        self.config, self.folder = config, Path(folder)
        self.shape: ModelConfig = from_hf(self.folder)
        self.pairs = [pair_of(example, config.seq) for example in examples]
        largest = max(max(max(inputs), max(targets)) for inputs, targets in self.pairs)
        if largest >= self.shape.vocab:
            raise ValueError(f"token {largest} is not in the model's vocabulary of {self.shape.vocab}")
        if config.seq > self.shape.max_positions:
            raise ValueError(
                f"seq={config.seq} is longer than the model's {self.shape.max_positions} positions"
            )
        self.lora = {"rank": lora_rank, "alpha": lora_alpha, "targets": targets} if lora_rank else None
        self.frozen_dtype = frozen_dtype

    def build(self) -> nn.Module:
        """Return the Hugging Face model on the meta device, with adapters if asked for."""
        from transformers import AutoConfig, AutoModelForCausalLM

        settings = AutoConfig.from_pretrained(self.folder, local_files_only=True)
        settings.use_cache = False
        with torch.device("meta"):
            # The file's own dtype would make bf16 the dtype of trained weights, too.
            model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
        if self.lora is not None:
            add_lora(model.to(self.frozen_dtype), **self.lora)
            self.adapter_params = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return model

    def fill(self, model: nn.Module, device: torch.device) -> None:
        """Read the pretrained weights: each rank its own rows."""
        load_pretrained(model, self.folder, device, seed=self.config.seed)

    def __len__(self) -> int:
        return len(self.pairs)

    def read(self, samples: list[int]) -> tuple[Tensor, Tensor]:
        """Return padded inputs, and targets that are `IGNORE` in prompts and padding."""
        inputs, targets = zip(*(self.pairs[i] for i in samples), strict=True)
        return torch.tensor(inputs), torch.tensor(targets)

    def logits(self, model: nn.Module, inputs_BS: Tensor) -> Tensor:
        """Return the Hugging Face model's logits."""
        return model(input_ids=inputs_BS).logits

    def flops(self, batch: int, recompute: str) -> TaskFlops:
        """Return the FLOPs of a step, padding included: it is computed, too.

        A frozen matrix needs the gradient of its input and none of its own, so it costs two products and not three.
        The first layer's input needs no gradient either; that is not subtracted.
        """
        step = step_flops(
            self.shape, batch=batch, seq=self.config.seq, recompute=recompute, selective_passes=1
        )
        if self.lora is None:
            return TaskFlops(step.model, step.hardware)
        matrices = step.forward - step.by_component["scores"]
        model = step.model - matrices + 6 * step.tokens * self.adapter_params
        again = 2 * step.tokens * self.adapter_params if recompute == "full" else 0
        return TaskFlops(model, model + step.recompute + again)


def export_merged(pretrained: str | Path, adapters: str | Path, target: str | Path) -> Path:
    """Write a pretrained model with adapters merged into it, as a folder that Hugging Face reads; in one process.

    The whole model must fit into memory. Its dtype stays.

    Args:
        pretrained: The folder of the pretrained model.
        adapters: The folder of `lablib.launch.lora.save_adapters`.
        target: Folder to write to; it gets the tokenizer's files, too.

    Raises:
        ValueError: If the adapters are of another model, or the target is the pretrained model itself.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    pretrained, target = Path(pretrained), Path(target)
    if target.resolve() == pretrained.resolve():
        raise ValueError(f"{target} is the pretrained model: merge into another folder")
    settings = AutoConfig.from_pretrained(pretrained, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, dtype=settings.dtype or torch.float32)
    merge(load_adapters(load_pretrained(model, pretrained), adapters))
    copy_settings(pretrained, target)
    write_safetensors(model, target / "model.safetensors")
    return target


def copy_settings(pretrained: str | Path, target: str | Path) -> None:
    """Copy what a pretrained model has besides its weights: its settings and its tokenizer."""
    Path(target).mkdir(parents=True, exist_ok=True)
    for file in Path(pretrained).glob("*"):
        if file.is_file() and ".safetensors" not in file.name:
            shutil.copy2(file, target)
