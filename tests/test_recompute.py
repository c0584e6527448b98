"""The toy checkpoint against torch's own, bit for bit: values, gradients, random state, autocast."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lablib.launch.recompute.saved_tensors import (
    WAYS,
    changed_function,
    compiled,
    dropout_error,
    frozen_input,
    split_backward,
)
from lablib.toys.recompute import checkpoint
from lablib.toys.transformer import Transformer, tiny_config

plain_torch = partial(torch_checkpoint, use_reentrant=False)


def without(function, *args):
    return function(*args)


def run(way, build, seed=3):
    """Return output, gradients of inputs and parameters, and the random state after forward and after backward."""
    torch.manual_seed(seed)
    function, modules, args = build()
    output = way(function, *args)
    after_forward = torch.get_rng_state()
    outputs = output if isinstance(output, tuple) else (output,)
    sum(o.float().pow(2).sum() for o in outputs if o.requires_grad).backward()
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    parameters = [p for module in modules for p in module.parameters()]
    grads = [t.grad for t in (*tensors, *parameters)]
    return [*outputs, *grads, after_forward, torch.get_rng_state()]


def same(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b))


def dropped():
    layer = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.4), nn.GELU(), nn.Linear(7, 5))
    return layer, [layer], [torch.randn(3, 5, requires_grad=True)]


def nested():
    inner, outer = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.3)), nn.Linear(5, 5)
    return (lambda x: outer(checkpoint(inner, torch.tanh(x))), [inner, outer], [torch.randn(4, 5, requires_grad=True)])


def mixed_arguments():
    layer = nn.Linear(5, 5)

    def function(x, scale, frozen, name, y):
        assert name == "kept"
        return layer(x) * scale + frozen, (x * y).exp()

    args = [
        torch.randn(2, 5, requires_grad=True),
        1.5,
        torch.randn(2, 5),
        "kept",
        torch.randn(2, 5, requires_grad=True),
    ]
    return function, [layer], args


def twice():
    x = torch.randn(2, 5, requires_grad=True)
    return lambda a, b: a.sin() * b.cos(), [], [x, x]


def part_without_gradient():
    layer = nn.Linear(5, 5)
    return lambda x: (layer(x), x.detach().argmax(dim=-1)), [layer], [torch.randn(2, 5, requires_grad=True)]


@pytest.mark.parametrize("build", [dropped, nested, mixed_arguments, twice, part_without_gradient])
def test_the_toy_equals_torch_and_no_recomputation(build):
    mine = run(checkpoint, build)
    same(mine, run(plain_torch, build))
    same(mine, run(without, build))


def test_autocast_is_as_it_was_in_forward():
    dtypes = []

    def build():
        layer = nn.Linear(5, 7)

        def function(x):
            dtypes.append(layer(x).dtype)
            return F.gelu(layer(x)) @ torch.ones(7, 5)

        return function, [layer], [torch.randn(3, 5, requires_grad=True)]

    def inside(way):
        def within(function, *args):
            with torch.autocast("cpu", torch.bfloat16):
                return way(function, *args)  # backward runs outside of it

        return within

    mine = run(inside(checkpoint), build)
    assert dtypes == [torch.bfloat16] * 2
    same(mine, run(inside(plain_torch), build))
    same(mine, run(inside(without), build))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_whole_transformer_bit_for_bit(family):
    def build(way):
        torch.manual_seed(0)
        model = Transformer(tiny_config(family, hidden=24, num_layers=3, vocab=31), dropout=0.2, attention="plain")
        for block in model.blocks:
            block.forward = partial(way, block.forward)
        return model

    models = [build(way) for way in (checkpoint, plain_torch, without)]
    tokens = torch.randint(31, (2, 12))
    losses = []
    for model in models:
        torch.manual_seed(5)
        losses.append(model.loss(tokens))
        losses[-1].backward()
    assert losses[0] == losses[1] == losses[2]
    for mine, theirs, right in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
        assert torch.equal(mine.grad, right.grad)


def test_a_change_in_place_is_noticed():
    x = torch.ones(3, requires_grad=True)
    y = x * 1
    out = checkpoint(torch.sin, y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", list(WAYS))
def test_dropout_needs_its_random_state_back(way):
    assert dropout_error(way) == 0
    assert dropout_error(way, preserve_rng_state=False) > 0.1


def test_a_function_that_changes_is_noticed_by_shapes_alone():
    assert "different metadata" in changed_function("torch").error
    for way in WAYS:
        silent = changed_function(way, shape_changes=False)
        assert silent.error == ""
        assert silent.gradient_error > 0.01
    for way in ("torch-reentrant", "toy"):
        assert changed_function(way).error == ""


def test_backward_in_two_parts():
    whole = split_backward("torch")
    assert (whole.error, whole.replays, whole.gradient_error) == ("", 2, 0)
    assert "incompatible with .grad()" in split_backward("torch-reentrant").error
    assert "not have been used" in split_backward("toy").error


def test_a_frozen_input():
    for way in ("torch", "toy"):
        assert frozen_input(way).gradient_error == 0
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        assert "no graph" in frozen_input("torch-reentrant").error


def test_compile_sees_a_marked_operator_or_a_plain_layer():
    error, seen = compiled("compile outside")
    assert error == 0
    assert "tag_activation_checkpoint" in seen
    error, seen = compiled("checkpoint outside")
    assert error == 0
    assert "tag_activation_checkpoint" not in seen
    assert sum("linear" in name for name in seen) == 2
