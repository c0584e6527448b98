"""Local safetensors into a sharded model that has no memory yet: each rank reads the rows that it keeps.

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model, report = shard(model)
    load_pretrained(model, folder, device)

No rank ever holds the whole model, or a whole matrix of it.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lablib.launch.lora import LoRALinear
from lablib.launch.safetensors_file import write_safetensors_file
from lablib.launch.shard_rows import own_rows
from lablib.launch.wrapping import tied_parameters

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@torch.no_grad()
def load_pretrained(
    model: nn.Module, folder: str | Path, device: str | torch.device = "cpu", *, seed: int = 0
) -> nn.Module:
    """Allocate a model that is on the meta device and fill it from a folder of safetensors.

    Args:
        model: On the meta device, sharded or not; with adapters of `lablib.launch.lora` or without.
        folder: As `save_pretrained` of Hugging Face writes it, in one file or several.
        device: Where the model will be.
        seed: Of the adapters, which no checkpoint has.

    Returns:
        The same model.

    Raises:
        ValueError: If the folder has no safetensors, lacks a parameter, or has it in another shape; before anything
            is allocated.
    """
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
                raise ValueError(
                    f"{folder}: {name} is {tuple(stored)} there and {tuple(wanted)} in the model"
                )
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
    """Write a whole model as one safetensors file, of tied parameters the first name, as Hugging Face does.

    Args:
        model: Not sharded.
        file: Target; an older file is replaced when the new one is complete.
    """
    again = {name for _, *others in tied_parameters(model) for name in others}
    tensors = {name: value.contiguous() for name, value in model.state_dict().items() if name not in again}
    return write_safetensors_file(tensors, file)


def _files(folder: Path) -> dict[str, Path]:
    """Return for each tensor's name the file that holds it."""
    from safetensors import safe_open

    if (folder / _INDEX).is_file():
        content = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
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


def _place(
    places: list[tuple[nn.Module, str, str]], old: Tensor, rows: Tensor, device: str | torch.device
) -> None:
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
    """Return this rank's rows of a new adapter; all ranks draw the same whole one."""
    old = layer._parameters[key]
    whole = torch.zeros(old.shape)
    if key == "lora_A":
        nn.init.kaiming_uniform_(whole, a=5**0.5, generator=generator)
    return whole[slice(*own_rows(old))] if isinstance(old, DTensor) else whole


def _fill_buffers(model: nn.Module, device: str | torch.device) -> None:
    """Compute what no checkpoint holds, such as rotary frequencies, by the model's own initialisation."""
    for name, module in model.named_modules():
        buffers = {key: b for key, b in module._buffers.items() if b is not None and b.is_meta}
        if not buffers:
            continue
        for key, buffer in buffers.items():
            whole = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
            module._buffers[key] = whole.fill_(torch.nan) if whole.is_floating_point() else whole
        if hasattr(model, "_init_weights"):
            model._init_weights(module)
        if bad := [
            k for k in buffers if module._buffers[k].is_floating_point() and module._buffers[k].isnan().any()
        ]:
            raise ValueError(f"{name} does not compute its buffers {', '.join(bad)} in _init_weights")
