"""Measured bytes: states exact, saved tensors counted by storage, each where its cause is."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lablib.calc.params import count_params
from lablib.launch.measure import measure_states, saved_activations
from lablib.toys.transformer import Transformer, tiny_config

SEED = 11


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, vocab: int) -> None:
    model.loss(torch.randint(vocab, (2, 9))).backward()
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_states_are_exact(family, dtype):
    dice = random.Random(SEED)
    print(f"seed {SEED}")
    for tied in (True, False):
        heads = dice.randint(1, 4)
        sizes = {"hidden": heads * 2 * dice.randint(1, 9), "num_heads": heads, "vocab": dice.randint(2, 90)}
        config = tiny_config(family, **sizes, num_layers=2, tied=tied)
        weights = count_params(config).total * dtype.itemsize
        model = Transformer(config).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters())
        assert measure_states(model, optimizer) == {"parameters": weights, "gradients": 0}
        stepped(model, optimizer, config.vocab)
        expected = dict.fromkeys(("parameters", "gradients", "exp_avg", "exp_avg_sq"), weights)
        assert measure_states(model, optimizer) == expected
        tensors = len(list(model.parameters()))
        assert measure_states(model, optimizer, counters=True) == expected | {"counters": 4 * tensors}


def test_states_of_sgd():
    config = tiny_config("gpt2", num_layers=1)
    weights = 4 * count_params(config).total
    for momentum, states in ((0.0, {}), (0.9, {"momentum_buffer": weights})):
        model = Transformer(config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        stepped(model, optimizer, config.vocab)
        assert measure_states(model, optimizer) == {"parameters": weights, "gradients": weights} | states


def test_states_with_a_master_copy_and_frozen_parameters():
    model = nn.Linear(6, 5).bfloat16()
    master = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(master)
    model(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
    for copy, parameter in zip(master, model.parameters(), strict=True):
        copy.grad = parameter.grad.float()
    optimizer.step()
    expected = {"parameters": 70, "gradients": 70 + 140, "master": 140, "exp_avg": 140, "exp_avg_sq": 140}
    assert measure_states(model, optimizer) == expected

    frozen = nn.Linear(6, 5)
    frozen.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([frozen.bias])
    frozen(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    expected = {"parameters": 140, "gradients": 20, "exp_avg": 20, "exp_avg_sq": 20}
    assert measure_states(frozen, optimizer) == expected


class Two(nn.Module):
    """Two projections of one input, and a product of both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(3, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) * self.b(x) * self.scale


def test_saved_activations_by_hand():
    model = Two()
    # 5 rows of 3: the input, kept by a and b, is one storage; the product keeps both factors; the buffer exists anyway.
    with saved_activations(model) as saved:
        result = model(torch.ones(5, 3)).sum()
    assert saved.by_module == {"a": 5 * 3 * 4, "": 2 * 5 * 4 * 4}
    assert saved.by_kind == {"linear": 5 * 3 * 4, "mul": 2 * 5 * 4 * 4}
    assert saved.total == 220
    result.backward()  # what was kept is still good for backward
    assert model.a.weight.grad is not None


def test_without_a_model_the_outermost_module_gives_the_names():
    model = nn.Sequential(Two(), nn.Softmax(dim=-1))
    with saved_activations() as saved:
        model(torch.ones(5, 3)).exp().sum()
    assert saved.by_module == {"0.a": 60, "0": 160, "1": 80, "(outside)": 80}
    assert saved.by_kind == {"linear": 60, "mul": 160, "softmax": 80, "exp": 80}
    with saved_activations(model) as named:
        model(torch.ones(5, 3)).exp().sum()
    assert named == saved


def test_a_view_keeps_its_whole_storage_alive():
    x = torch.ones(10, 3, requires_grad=True)
    with saved_activations() as saved:
        (x[:2] * x[4:6]).sum()
    assert saved.total == 10 * 3 * 4


def test_recomputation_keeps_the_input_and_what_it_saves_later_is_counted_later():
    model = Two()
    x = torch.ones(5, 3, requires_grad=True)
    with saved_activations(model) as saved:
        result = checkpoint(model, x, use_reentrant=False)
    assert saved.total == 5 * 3 * 4
    result.sum().backward()
    assert saved.total == 5 * 3 * 4
