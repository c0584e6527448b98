"""Supervised fine-tuning of a local Hugging Face model: examples of prompt and answer, loss on the answer alone.

    task = FineTuning(config, "models/qwen2", examples, lora_rank=8)
    trainer = Trainer(config, task=task)

An example is one sequence, prompt and answer and an end, padded on the right to `seq`:

    ids       p1  p2  p3  a1  a2  end pad pad
    targets   --  --  a1  a2  end --  --              (each position is asked for the next id; -- has no loss)

The causal mask keeps every position from the padding after it, so no attention mask is needed.

`load_pretrained` fills a sharded model from safetensors: each rank reads the rows that it keeps, and none ever holds
the full model. `tiny_qwen2` and `addition_examples` are a model and a dataset that need no download.
"""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor

from lablib.calc.errors import parse_json, read_bounded
from lablib.calc.flops import skipped_by_early_stop, step_flops
from lablib.calc.models import ModelConfig, from_hf
from lablib.launch.fsdp import materialize, tied_parameters, write_safetensors_file
from lablib.launch.training.lora import TARGETS, LoRALinear, add_lora, load_adapters, merge
from lablib.launch.training.token_data import IGNORE_INDEX, Task, TaskFlops
from lablib.launch.training.train_config import TrainConfig
from lablib.toys.text import VOCAB

_LARGEST = 2**30  # bytes of a file of examples


@dataclass(frozen=True)
class Example:
    """One prompt and the answer that is to be learned, as token ids."""

    prompt: tuple[int, ...]  # ids that are read
    answer: tuple[int, ...]  # ids that have a loss; with the end of text, if the model shall learn to stop


def encode(prompt: str, answer: str, tokenizer: Any = None, *, end: int = 0) -> Example:
    """Return an example of two texts."""
    if tokenizer is None:
        return Example(tuple(prompt.encode()), (*answer.encode(), end))
    ids = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, answer)]
    return Example(tuple(ids[0]), (*ids[1], tokenizer.eos_token_id))


def read_examples(path: str | Path, tokenizer: Any = None) -> list[Example]:
    """Return the examples of a file with one JSON object a line, {"prompt": ..., "answer": ...}."""
    try:
        lines = read_bounded(path, _LARGEST).decode().splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    examples = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = parse_json(line)
            examples.append(encode(fields["prompt"], fields["answer"], tokenizer))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(
                f'{path}, line {number}: expected {{"prompt": "...", "answer": "..."}}, got {line[:60]!r}'
            ) from None
    return examples


def pad_example(example: Example, seq: int) -> tuple[list[int], list[int]]:
    """Return inputs and targets of one example, each of length `seq`."""
    ids = [*example.prompt, *example.answer]
    if not example.prompt or not example.answer:
        raise ValueError("an example needs a prompt and an answer: the first answer is asked of the prompt's end")
    if len(ids) > seq + 1:
        raise ValueError(f"an example has {len(ids)} tokens and seq={seq} takes {seq + 1}: cut it, or raise seq")
    rest = seq + 1 - len(ids)
    inputs = (ids + [0] * rest)[:-1]
    masked = [IGNORE_INDEX] * len(example.prompt) + list(example.answer) + [IGNORE_INDEX] * rest
    return inputs, masked[1:]


class FineTuning(Task):
    """Fine-tune a local pretrained model on examples, in full or by adapters.

    Args:
        config: The run; its `model` is "".
        folder: The pretrained model: config.json and safetensors.
        lora_rank: Inner width of the adapters; 0 trains all weights.
        frozen_dtype: Of the frozen weights, with adapters.
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
            raise ValueError(f"model={config.model!r}: a fine-tuned model comes from its folder, so give model=''")
        if config.recompute not in ("none", "full"):
            raise ValueError(f"recompute={config.recompute!r}: a Hugging Face model takes 'none' or 'full'")
        if not examples:
            raise ValueError("there are no examples to learn from")
        self.config, self.folder = config, Path(folder)
        self.shape: ModelConfig = from_hf(self.folder)
        self.pairs = [pad_example(example, config.seq) for example in examples]
        largest = max(max(max(inputs), max(targets)) for inputs, targets in self.pairs)
        if largest >= self.shape.vocab:
            raise ValueError(f"token {largest} is not in the model's vocabulary of {self.shape.vocab}")
        if config.seq > self.shape.max_positions:
            raise ValueError(f"seq={config.seq} is longer than the model's {self.shape.max_positions} positions")
        self.lora = {"rank": lora_rank, "alpha": lora_alpha, "targets": targets} if lora_rank else None
        self.frozen_dtype = frozen_dtype
        self.drops = False  # behind its MLPs; `build` reads it

    def build(self) -> nn.Module:
        """Return the Hugging Face model on the meta device, with adapters if asked for."""
        from transformers import AutoConfig, AutoModelForCausalLM

        settings = AutoConfig.from_pretrained(self.folder, local_files_only=True)
        settings.use_cache = False
        self.drops = bool(getattr(settings, "resid_pdrop", 0.0))
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
        """Return padded inputs, and targets that are `IGNORE_INDEX` in prompts and padding."""
        inputs, targets = zip(*(self.pairs[i] for i in samples), strict=True)
        return torch.tensor(inputs), torch.tensor(targets)

    def logits(self, model: nn.Module, inputs_BS: Tensor) -> Tensor:
        """Return the Hugging Face model's logits."""
        return model(input_ids=inputs_BS).logits

    def flops(self, batch: int, recompute: str) -> TaskFlops:
        """Return the FLOPs of a step, padding included: it is computed, too."""
        step = step_flops(self.shape, batch=batch, seq=self.config.seq, recompute=recompute, dropout=self.drops)
        if self.lora is None:
            return TaskFlops(step.model, step.hardware)
        matrices = step.forward - step.forward_by_component["scores"]
        model = step.model - matrices + 6 * step.tokens * self.adapter_params
        again = 2 * step.tokens * self.adapter_params if recompute == "full" else 0
        if recompute == "full" and not self.drops:
            # A replay ends at the second matrix of the last adapter, which comes behind the frozen down projection.
            again += self.shape.num_layers * skipped_by_early_stop(self.shape, step.tokens)
        return TaskFlops(model, model + step.recompute + again)


def export_merged(pretrained: str | Path, adapters: str | Path, target: str | Path) -> Path:
    """Write a pretrained model with adapters merged into it, as a folder that Hugging Face reads; in one process.

    The full model must fit into memory. Its dtype stays, and the tokenizer's files are copied.
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


@torch.no_grad()
def load_pretrained(
    model: nn.Module, folder: str | Path, device: str | torch.device = "cpu", *, seed: int = 0
) -> nn.Module:
    """Allocate a model that is on the meta device and fill it from a folder of safetensors; where sharded, every rank must."""
    if not any(Path(folder).glob("*.safetensors")):
        raise ValueError(f"{folder} has no safetensors: give the folder of a pretrained model")
    reader = HuggingFaceStorageReader(str(folder))
    stored = {name: tuple(tensor.size) for name, tensor in reader.read_metadata().state_dict_metadata.items()}
    names: dict[int, list[str]] = {}  # of each parameter; a tied one is stored once, under one of them
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not name.endswith(("lora_A", "lora_B")):
            names.setdefault(id(parameter), []).append(name)
    chosen = []
    for several in names.values():
        name = next((name for name in several if name in stored), None)
        if name is None:
            raise ValueError(f"the safetensors have no {' or '.join(several)}: they are of another model")
        if stored[name] != (shape := tuple(model.get_parameter(name).shape)):
            raise ValueError(f"{folder}: {name} is {stored[name]} there and {shape} in the model")
        chosen.append(name)

    def fill(name: str, module: nn.Module) -> None:
        """Draw adapters, compute what no file holds, such as rotary frequencies, and leave the rest to the reader."""
        for parameter in module.parameters(recurse=False):
            parameter.zero_()
        if isinstance(module, LoRALinear):
            module.reset_adapter()
        elif list(module.buffers(recurse=False)):
            model._init_weights(module)

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(seed)
        materialize(model, fill, device)
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        found = {name: model.get_parameter(name).detach() for name in chosen}
        # A rank that fills a model of its own, as rank 0 does to merge, must not wait for others.
        dcp.load(found, storage_reader=reader, no_dist=not any(isinstance(each, DTensor) for each in found.values()))
    return model


def write_safetensors(model: nn.Module, file: str | Path) -> Path:
    """Write an unsharded model as one safetensors file, of tied parameters the first name, as Hugging Face does."""
    again = {name for _, *others in tied_parameters(model) for name in others}
    tensors = {name: value.contiguous() for name, value in model.state_dict().items() if name not in again}
    return write_safetensors_file(tensors, file)


def tiny_qwen2(folder: str | Path, *, hidden: int = 32, layers: int = 2, tied: bool = False, seed: int = 0) -> Path:
    """Write a small Qwen2 with random weights as a pretrained model would lie on disk: config.json and safetensors.

    Its tokens are bytes. It knows nothing, so what it learns later is seen at once.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    if hidden % 8:
        raise ValueError(f"hidden={hidden} must be a multiple of 8: 4 heads of an even width")
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    write_safetensors(Qwen2ForCausalLM(config), Path(folder) / "model.safetensors")
    return Path(folder)


def addition_examples(count: int, *, largest: int = 20, seed: int = 0) -> list[Example]:
    """Return examples such as prompt "12+7=" and answer "19", as bytes."""
    draw = random.Random(seed)
    pairs = [(draw.randint(0, largest), draw.randint(0, largest)) for _ in range(count)]
    return [encode(f"{a}+{b}=", str(a + b)) for a, b in pairs]
