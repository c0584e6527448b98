"""Give a sharded model on the meta device its memory and its first values.

On the meta device a parameter has a shape and no memory, so a model of any size can be built and sharded on every
rank. Only then does each rank allocate its own shards.

The values: each module's parameters are made whole for a moment, filled, cut, and freed again. All ranks draw the
same whole parameters from the same seed, so the result does not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lablib.calc.models import ModelConfig
from lablib.toys.transformer import INIT_STD

#: Fills the parameters and buffers that a module holds itself; gets the module's name and the module.
InitFn = Callable[[str, nn.Module], None]


def materialize(
    model: nn.Module, init_fn: InitFn | None = None, device: str | torch.device = "cpu"
) -> nn.Module:
    """Allocate a model that is on the meta device, and fill it module by module.

    Seed torch the same on every rank before.

    Args:
        model: Sharded or not, all of it on the meta device.
        init_fn: Called in the order of `named_modules` for each module that holds parameters or buffers, which
            are whole and on `device` then. By default `model._init_weights(module)` (Hugging Face) or the
            module's own `reset_parameters()`.
        device: Where the model will be.

    Returns:
        The same model.

    Raises:
        ValueError: If a part of the model is not on the meta device, or a module cannot fill itself.
    """
    home: dict[int, list[tuple[nn.Module, str]]] = {}
    for name, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and not tensor.is_meta:
                raise ValueError(
                    f"{name}.{key} is on {tensor.device}: build the model under torch.device('meta')"
                )
        for key, parameter in module._parameters.items():
            if parameter is not None:
                home.setdefault(id(parameter), []).append((module, key))
    filled: set[int] = set()
    for name, module in list(model.named_modules()):
        old = {key: p for key, p in module._parameters.items() if p is not None}
        buffers = {key: b for key, b in module._buffers.items() if b is not None}
        if not buffers and all(id(p) in filled for p in old.values()):
            continue  # nothing of its own, or tied to what is there
        for key, parameter in old.items():
            module._parameters[key] = nn.Parameter(_empty(parameter, device), parameter.requires_grad)
        for key, buffer in buffers.items():
            module._buffers[key] = _empty(buffer, device)
        with torch.no_grad():
            (init_fn or partial(_default, model))(name, module)
        _check_filled(name, module)
        for key, parameter in old.items():
            if id(parameter) not in filled:
                value = _cut(module._parameters[key], parameter)
                for owner, its_key in home[id(parameter)]:
                    owner._parameters[its_key] = value
                filled.add(id(value))
            else:
                module._parameters[key] = parameter
    return model


def init_transformer(config: ModelConfig) -> InitFn:
    """Return an init function for `lablib.toys.transformer`: bit for bit the values of `Transformer.init_weights`."""

    def fill(name: str, module: nn.Module) -> None:
        adds_to_stream = name.endswith(("attention.out", "mlp.down"))
        shrink = math.sqrt(2 * config.num_layers) if adds_to_stream else 1
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=INIT_STD / shrink)
            else:
                nn.init.constant_(parameter, 0.0 if key == "bias" else 1.0)

    return fill


def _empty(tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """Return memory for the whole of a tensor; NaN shows what is never filled."""
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return whole.fill_(math.nan) if whole.is_floating_point() else whole


def _default(model: nn.Module, name: str, module: nn.Module) -> None:
    if hasattr(model, "_init_weights"):
        model._init_weights(module)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()
    else:
        raise ValueError(
            f"{name} ({type(module).__name__}) has no reset_parameters(): pass an init_fn that fills it"
        )


def _check_filled(name: str, module: nn.Module) -> None:
    for key, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and tensor.is_floating_point() and tensor.isnan().any():
            raise ValueError(f"init_fn left {name}.{key} without values")


def _cut(whole: nn.Parameter, old: nn.Parameter) -> nn.Parameter:
    """Return this rank's shard of a whole parameter, as the old one was sharded."""
    value = whole.detach()
    if isinstance(old, DTensor):
        # Every rank has drawn the same whole tensor, so each cuts its own piece and nothing is sent.
        value = distribute_tensor(value, old.device_mesh, old.placements, src_data_rank=None)
    return nn.Parameter(value, requires_grad=old.requires_grad)
