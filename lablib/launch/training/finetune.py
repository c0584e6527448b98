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
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lablib.calc.errors import parse_json, read_bounded, read_json
from lablib.calc.flops import skipped_by_early_stop, step_flops
from lablib.calc.models import ModelConfig, from_hf
from lablib.launch.fsdp import own_rows, tied_parameters, write_safetensors_file
from lablib.launch.training.config import TrainConfig
from lablib.launch.training.data import IGNORE_INDEX, Task, TaskFlops
from lablib.launch.training.lora import TARGETS, LoRALinear, add_lora, load_adapters, merge
from lablib.toys.text import VOCAB

_LARGEST = 2**30  # bytes of a file of examples
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


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


def pair_of(example: Example, seq: int) -> tuple[list[int], list[int]]:
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
        self.pairs = [pair_of(example, config.seq) for example in examples]
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
        """Return padded inputs, and targets that are `IGNORE` in prompts and padding."""
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
        matrices = step.forward - step.by_component["scores"]
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
    """Allocate a model that is on the meta device and fill it from a folder of safetensors."""
    from safetensors import safe_open

    where = _files(Path(folder))
    owners: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, key, f"{name}.{key}".lstrip(".")))
    adapters = {id(p) for m in model.modules() if isinstance(m, LoRALinear) for p in (m.lora_A, m.lora_B)}
    named = {number: _stored(places, where) for number, places in owners.items() if number not in adapters}
    with ExitStack() as files:
        opened = {
            file: files.enter_context(safe_open(file, framework="pt", device="cpu"))
            for file in sorted(set(where.values()))
        }
        for number, name in named.items():
            module, key, _ = owners[number][0]
            stored, wanted = opened[where[name]].get_slice(name).get_shape(), module._parameters[key].shape
            if tuple(stored) != tuple(wanted):
                raise ValueError(f"{folder}: {name} is {tuple(stored)} there and {tuple(wanted)} in the model")
        # While the parameters are still on the meta device, where an initialisation of theirs does nothing.
        _fill_buffers(model, device)
        for number, name in named.items():
            old = owners[number][0][0]._parameters[owners[number][0][1]]
            stored = opened[where[name]].get_slice(name)
            rows = slice(*own_rows(old)) if isinstance(old, DTensor) else slice(None)
            _place(owners[number], old, stored[rows], device)
    generator = torch.Generator().manual_seed(seed)
    for number in owners:
        if number in adapters:
            module, key, _ = owners[number][0]
            _place(owners[number], module._parameters[key], _adapter(module, key, generator), device)
    return model


def write_safetensors(model: nn.Module, file: str | Path) -> Path:
    """Write an unsharded model as one safetensors file, of tied parameters the first name, as Hugging Face does."""
    again = {name for _, *others in tied_parameters(model) for name in others}
    tensors = {name: value.contiguous() for name, value in model.state_dict().items() if name not in again}
    return write_safetensors_file(tensors, file)


def _files(folder: Path) -> dict[str, Path]:
    """Return for each tensor's name the file that holds it."""
    from safetensors import safe_open

    if (folder / _INDEX).is_file():
        content = read_json(folder / _INDEX)
        return {name: folder / file for name, file in content["weight_map"].items()}
    if not (folder / _SINGLE).is_file():
        raise ValueError(f"{folder} has neither {_SINGLE} nor {_INDEX}: give a folder of safetensors")
    with safe_open(folder / _SINGLE, framework="pt", device="cpu") as file:
        return dict.fromkeys(file.keys(), folder / _SINGLE)


def _stored(places: list[tuple[nn.Module, str, str]], where: dict[str, Path]) -> str:
    """Return the name under which a parameter is stored; a tied one is stored once, under one of its names."""
    names = [name for _, _, name in places]
    found = next((name for name in names if name in where), None)
    if found is None:
        raise ValueError(f"the safetensors have no {' or '.join(names)}: they are of another model")
    return found


def _place(places: list[tuple[nn.Module, str, str]], old: Tensor, rows: Tensor, device: str | torch.device) -> None:
    """Put this rank's rows in the place of a parameter without memory, under all of its names."""
    value: Tensor = rows.to(device=device, dtype=old.dtype, copy=True)
    if isinstance(old, DTensor):
        value = DTensor.from_local(
            value, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
        )
    parameter = nn.Parameter(value, requires_grad=old.requires_grad)
    for module, key, _ in places:
        module._parameters[key] = parameter


def _adapter(layer: LoRALinear, key: str, generator: torch.Generator) -> Tensor:
    """Return this rank's rows of a new adapter; all ranks draw the same full one."""
    old = layer._parameters[key]
    full = torch.zeros(old.shape)
    if key == "lora_A":
        nn.init.kaiming_uniform_(full, a=5**0.5, generator=generator)
    return full[slice(*own_rows(old))] if isinstance(old, DTensor) else full


def _fill_buffers(model: nn.Module, device: str | torch.device) -> None:
    """Compute what no checkpoint holds, such as rotary frequencies, by the model's own initialisation."""
    for name, module in model.named_modules():
        buffers = {key: b for key, b in module._buffers.items() if b is not None and b.is_meta}
        if not buffers:
            continue
        for key, buffer in buffers.items():
            full = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
            module._buffers[key] = full.fill_(torch.nan) if full.is_floating_point() else full
        if hasattr(model, "_init_weights"):
            model._init_weights(module)
        if bad := [k for k in buffers if module._buffers[k].is_floating_point() and module._buffers[k].isnan().any()]:
            raise ValueError(f"{name} does not compute its buffers {', '.join(bad)} in _init_weights")


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
