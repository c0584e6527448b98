"""The memory calculator against PyTorch: states of real optimizers, shards of FSDP2, casts of autocast."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from lablib.calc.memory import training_memory
from lablib.launch.ranks import run_ranks
from lablib.toys.transformer import Transformer, tiny_config

OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "sgd-momentum": partial(torch.optim.SGD, momentum=0.9),
}


def _size(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, config) -> None:
    tokens = torch.randint(config.vocab, (2, 16))
    nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
    optimizer.step()


def _moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = list(optimizer.state.values())
    return [value for state in states for name, value in state.items() if name != "step" and value is not None]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize(("recipe", "dtype"), [("fp32", torch.float32), ("pure-bf16", torch.bfloat16)])
def test_states_are_what_the_optimizer_holds(family: str, optimizer: str, recipe: str, dtype: torch.dtype) -> None:
    config = tiny_config(family)
    model = Transformer(config).to(dtype)
    updates = OPTIMIZERS[optimizer](model.parameters(), lr=1e-3)
    _step(model, updates, config)
    predicted = training_memory(config, recipe=recipe, optimizer=optimizer, seq=16)
    assert predicted.terms["weights"] == _size(model.parameters())
    assert predicted.terms["gradients"] == _size(p.grad for p in model.parameters())
    assert predicted.optimizer == _size(_moments(updates))


def _fsdp2_states(zero: int) -> tuple[int, int]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    config = tiny_config("llama", vocab=256, ffn=352)
    model = Transformer(config)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mp_policy=policy, reshard_after_forward=zero == 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _step(model, optimizer, config)
    held = list(model.parameters())
    held += [p.grad for p in model.parameters()] + _moments(optimizer)
    return _size(tensor.to_local() for tensor in held), _size(held)


@pytest.mark.parametrize("zero", [2, 3])
def test_fsdp2_shards_are_what_the_recipe_says(zero: int) -> None:
    config = tiny_config("llama", vocab=256, ffn=352)
    held = run_ranks(_fsdp2_states, 2, zero)
    predicted = training_memory(config, recipe="fsdp2-mixed", dp=2, zero=zero, seq=16).states
    # Every tensor's first dimension is even here, so per-tensor shards and one flat shard agree.
    assert [local for local, _ in held] == [predicted, predicted]
    assert held[0][1] == training_memory(config, recipe="fsdp2-mixed", seq=16).states
