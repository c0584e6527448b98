"""LoRA: train two thin matrices beside each frozen one, under FSDP2 too.

    y = x Wᵀ + (alpha / rank) * (x Aᵀ) Bᵀ          W (out, in) frozen;  A (rank, in), B (out, rank) trained

B begins as zeros, so that the first forward is the pretrained model's. Afterwards W + (alpha / rank) * B A takes the
place of W, and nothing is left of the adapters but what they learned.

The layer keeps the names `weight` and `bias`, so a pretrained checkpoint fits it as it is.

Source: Hu et al. 2021, LoRA (arXiv 2106.09685), section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lablib.calc.errors import read_json
from lablib.launch.fsdp import write_safetensors_file
from lablib.launch.ranks import agree, own_rank
from lablib.launch.records import write_json

#: Linear layers of Llama, Qwen2 and Mistral; attention alone, as in the paper, is the first four.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


class LoRALinear(nn.Module):
    """A frozen linear layer with an adapter beside it."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight.requires_grad_(False), linear.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)
        device = linear.weight.device
        # fp32 whatever the base is: the updates of a small learning rate vanish in bf16.
        self.lora_A = nn.Parameter(torch.empty(rank, linear.in_features, device=device))
        self.lora_B = nn.Parameter(torch.empty(linear.out_features, rank, device=device))
        self.scale = alpha / rank
        self.reset_adapter()

    def reset_adapter(self) -> None:
        """Draw A as nn.Linear draws its weight, and set B to zero."""
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B)

    def forward(self, x: Tensor) -> Tensor:
        """Return the frozen layer's output with the adapter's added."""
        inner = F.linear(x, self.lora_A.to(x.dtype))
        return F.linear(x, self.weight, self.bias) + self.scale * F.linear(inner, self.lora_B.to(x.dtype))


def add_lora(model: nn.Module, *, rank: int = 8, alpha: float = 16.0, targets: Sequence[str] = TARGETS) -> list[str]:
    """Freeze a model and put adapters beside its linear layers, before it is sharded; return the layers' names."""
    if rank < 1 or not alpha > 0:
        raise ValueError(f"rank={rank} must be at least 1 and alpha={alpha} above 0")
    found = [
        name
        for name, module in model.named_modules()
        if name.rsplit(".", 1)[-1] in targets and isinstance(module, nn.Linear)
    ]
    if not found:
        linear = {n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        raise ValueError(f"no linear layer is called {', '.join(targets)}; there are {', '.join(sorted(linear))}")
    model.requires_grad_(False)
    for name in found:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, LoRALinear(model.get_submodule(name), rank, alpha))
    return found


def adapters(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """Yield name and module of every layer with an adapter."""
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            yield name, module


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """Return the model with every adapter added to its weight and taken away, in place.

    The sum is made in fp32 or better and rounded once to the weight's dtype.
    """
    for name, layer in list(adapters(model)):
        if isinstance(layer.weight, DTensor):
            raise ValueError("the model is sharded: save its adapters, and merge them in one process")
        wide = torch.promote_types(layer.weight.dtype, torch.float32)
        added = layer.scale * (layer.lora_B.to(wide) @ layer.lora_A.to(wide))
        layer.weight.copy_(layer.weight.to(wide) + added)
        linear = nn.Linear(layer.weight.shape[1], layer.weight.shape[0], bias=False, device="meta")
        linear.weight, linear.bias = layer.weight, layer.bias
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, linear)
    return model


def save_adapters(model: nn.Module, folder: str | Path, *, base: str = "") -> Path:
    """Write the adapters as the package peft does: a safetensors file and adapter_config.json; every rank must call."""
    layers = dict(adapters(model))
    if not layers:
        raise ValueError("the model has no adapters: call add_lora first")
    tensors = {
        f"base_model.model.{name}.{part}.weight": _whole(getattr(layer, part)).cpu().contiguous()
        for name, layer in layers.items()
        for part in ("lora_A", "lora_B")
    }
    first = next(iter(layers.values()))
    rank = first.lora_A.shape[0]
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": first.scale * rank,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in layers}),
        "bias": "none",
        "inference_mode": True,
    }
    folder = Path(folder)

    def write() -> None:
        if own_rank() == 0:
            write_safetensors_file(tensors, folder / _WEIGHTS)
            write_json(folder / _CONFIG, settings)

    agree(write, "the adapters could not be saved")
    return folder


@torch.no_grad()
def load_adapters(model: nn.Module, folder: str | Path) -> nn.Module:
    """Put adapters beside a plain model's layers and fill them from a folder of `save_adapters` or of peft."""
    from safetensors.torch import load_file

    folder = Path(folder)
    if not (folder / _CONFIG).exists():
        raise ValueError(f"{folder} holds no adapters: it has no {_CONFIG}")
    settings = read_json(folder / _CONFIG)
    tensors = load_file(folder / _WEIGHTS)
    add_lora(model, rank=settings["r"], alpha=settings["lora_alpha"], targets=settings["target_modules"])
    for name, layer in adapters(model):
        for part in ("lora_A", "lora_B"):
            key = f"base_model.model.{name}.{part}.weight"
            value = tensors.pop(key, None)
            if value is None or value.shape != getattr(layer, part).shape:
                raise ValueError(f"{folder} is of another model: {key} is missing or has another shape")
            getattr(layer, part).copy_(value)
    if tensors:
        raise ValueError(f"{folder} is of another model: it has {next(iter(tensors))}")
    return model


def _whole(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()
