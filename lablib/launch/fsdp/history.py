"""FSDP1 and the snippets that circulate, run on two ranks: what happens, and what is sent.

Nothing here is for use. It exists so that the page about FSDP1 says what was seen and not what was remembered.

Source: Zhao et al. 2023, PyTorch FSDP (arXiv 2304.11277).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy

from lablib.launch.fsdp.sharding import shard
from lablib.launch.measure import record_comms
from lablib.launch.ranks import run_ranks
from lablib.toys.transformer import Block, Transformer, tiny_config


@dataclass(frozen=True)
class Seen:
    """The result of an experiment on rank 0."""

    name: str  # key in `EXPERIMENTS`
    error: str = ""  # type and text of what it raised, or ""
    warning: str = ""  # text of its first warning, or ""
    calls: dict[str, int] = field(default_factory=dict)  # collectives of one forward and backward, by operation
    bytes: dict[str, int] = field(default_factory=dict)  # bytes of their arrays
    parameters: int = 0  # parameters that the optimizer would see; 0 if no model ran


def _model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(tiny_config("llama", num_layers=4, hidden=64))


def _fsdp1(**options: object) -> nn.Module:
    return FullyShardedDataParallel(_model(), device_id=torch.device("cpu"), **options)


_BLOCKS = ModuleWrapPolicy({Block})

#: Name to a function that returns a model to run, or does what fails.
EXPERIMENTS: dict[str, Callable[[], object]] = {
    "FSDP2 per block": lambda: shard(_model(), wrap="block")[0],
    "no device_id": lambda: FullyShardedDataParallel(_model()),
    "no policy": _fsdp1,
    "wrapped by class": lambda: _fsdp1(auto_wrap_policy=_BLOCKS),
    "original parameters": lambda: _fsdp1(auto_wrap_policy=_BLOCKS, use_orig_params=True),
    "SHARD_GRAD_OP": lambda: _fsdp1(auto_wrap_policy=_BLOCKS, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "NO_SHARD": lambda: _fsdp1(auto_wrap_policy=_BLOCKS, sharding_strategy=ShardingStrategy.NO_SHARD),
    "policy called": lambda: transformer_auto_wrap_policy(transformer_layer_cls={Block}),
    "policy as partial": lambda: _fsdp1(
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    ),
    "policy of FSDP2": lambda: _fsdp1(mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "mixed precision": lambda: _fsdp1(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)),
    "prefetch policy": lambda: fsdp.PrefetchPolicy,
    "mesh without names": lambda: DeviceMesh("cpu", torch.arange(2).reshape(1, 2))["dp"],
    "mesh with names": lambda: init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))["dp"],
}


def _run(name: str) -> Seen:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            made = EXPERIMENTS[name]()
            calls, moved, parameters = _step(made) if isinstance(made, nn.Module) else ({}, {}, 0)
        except Exception as error:  # whatever it is, it is what the page shows
            return Seen(name, error=f"{type(error).__name__}: {_sentence(error)}")
    return Seen(name, "", str(caught[0].message) if caught else "", calls, moved, parameters)


def _sentence(error: Exception) -> str:
    text = str(error)
    return text if text.endswith((".", "!")) else f"{text}."


def _step(model: nn.Module) -> tuple[dict[str, int], dict[str, int], int]:
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    with record_comms() as log:
        model(tokens).float().square().mean().backward()
    return dict(log.calls), dict(log.bytes), len(list(model.parameters()))


def _run_all() -> list[Seen]:
    return [_run(name) for name in EXPERIMENTS]


def run_history() -> list[Seen]:
    """Run every experiment on two CPU ranks and return what rank 0 saw, in the order of `EXPERIMENTS`."""
    return run_ranks(_run_all, 2)[0]
