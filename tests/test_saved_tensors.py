"""Named saved tensors: measured and computed, name by name, to the byte."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from lablib.calc.memory.activations import block_tensors
from lablib.launch.measure import saved_activations
from lablib.launch.recompute import bytes_by_name, named_saved_tensors
from lablib.toys.transformer import Transformer, tiny_config

SEED = 19


@pytest.mark.parametrize("attention", ["plain", "fused"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_every_tensor_of_a_block_by_name(family, attention):
    dice = random.Random(SEED)
    print(f"seed {SEED}")
    for dropout in (0.0, 0.1):
        for dtype in (torch.float32, torch.bfloat16):
            heads = 2 * dice.randint(1, 3)
            config = tiny_config(
                family,
                num_layers=2,
                num_heads=heads,
                hidden=2 * heads * dice.randint(1, 5),
                ffn=dice.randint(1, 40),
                norm=dice.choice(("layernorm", "rmsnorm")),
                gated_mlp=dice.random() < 0.5,
                vocab=11,
            )
            batch, seq = dice.randint(1, 3), dice.randint(2, 9)
            model = Transformer(config, dropout=dropout, attention=attention).to(dtype)
            windows = torch.randint(config.vocab, (batch, seq + 1))
            kept = named_saved_tensors(model, windows)
            expected = block_tensors(
                config,
                batch=batch,
                seq=seq,
                implementation="toy",
                bytes_per_value=dtype.itemsize,
                attention=attention,
                dropout=dropout,
            )
            for block in (0, 1):
                assert bytes_by_name(kept, block) == bytes_by_name(expected)
            assert [t.name for t in kept if ":" in t.name] == []
            copies = {t.name: t.copies for t in kept if t.block == 1}
            assert all(copies[t.name] == len(t.keepers) for t in expected)
            with saved_activations(model) as saved:
                model.loss(windows)
            assert sum(t.bytes for t in kept) == saved.total


def test_other_models_get_module_and_operator():
    model = nn.Sequential(nn.Linear(3, 4), nn.Softmax(dim=-1))
    x = torch.ones(5, 3)
    kept = named_saved_tensors(model, lambda: model(x).exp().sum())
    assert bytes_by_name(kept) == {"0: linear": 60, "1: softmax": 80, "(outside): exp": 80}
    assert [t.block for t in kept] == [None] * 3
    assert kept[0].shape == (5, 3)
