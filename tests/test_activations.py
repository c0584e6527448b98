"""Activation formulas: the paper's, exactly; beyond the paper, by hand; the toy's, against what autograd saves."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lablib.calc.memory.activations import embedding_activations, head_activations, layer_activations, model_activations
from lablib.calc.models import ModelConfig, preset, preset_names
from lablib.launch.measure import saved_activations
from lablib.toys.transformer import Transformer, tiny_config

SEED = 7


def gpt(hidden: int, heads: int, layers: int = 1, vocab: int = 51_200) -> ModelConfig:
    sizes = {"num_layers": layers, "hidden": hidden, "num_heads": heads, "ffn": 4 * hidden, "vocab": vocab}
    return tiny_config("gpt2", **sizes)


def total(config: ModelConfig, **arguments) -> int:
    return sum(layer_activations(config, attention="plain", **arguments).values())


# --- the paper ----------------------------------------------------------------------------------------------------


def test_the_papers_formulas_exactly():
    """Korthikanti et al., table 2, in drawn shapes."""
    dice = random.Random(SEED)
    print(f"seed {SEED}")
    for _ in range(50):
        t = dice.choice((1, 2, 4, 8))
        a, s, b = t * dice.randint(1, 12), t * dice.randint(1, 300), dice.randint(1, 8)
        h = a * dice.choice((64, 96, 128))
        sbh, scores = s * b * h, 5 * a * s * s * b
        shape = {"batch": b, "seq": s}
        split = shape | {"tp": t}
        both = split | {"sequence_parallel": True}
        config = gpt(h, a)
        assert total(config, **shape) == 34 * sbh + scores
        assert total(config, **split) == 10 * sbh + (24 * sbh + scores) // t
        assert total(config, **both) == (34 * sbh + scores) // t
        assert total(config, **split, recompute="selective") == 10 * sbh + 24 * sbh // t
        assert total(config, **both, recompute="selective") == 34 * sbh // t
        assert total(config, **split, recompute="full") == 2 * sbh
        assert layer_activations(config, attention="plain", **shape) == {
            "norms": 4 * sbh,
            "attention": 11 * sbh,
            "scores": scores,
            "mlp": 19 * sbh,
        }


def test_the_papers_extra_terms():
    """Section 4.3: sbh/t for each micro-batch's embedding dropout, and 4sbh/t (1 + v/h) at the end."""
    s, b, h, t, v = 2048, 4, 6144, 8, 51_200
    config = gpt(h, 64, vocab=v)
    split = {"batch": b, "seq": s, "tp": t, "sequence_parallel": True}
    assert sum(embedding_activations(config, **split).values()) == s * b * h // t
    assert sum(head_activations(config, **split).values()) == 4 * s * b * (h + v) // t
    alone = {"batch": b, "seq": s, "tp": t}
    assert sum(embedding_activations(config, **alone).values()) == s * b * h
    assert sum(head_activations(config, **alone).values()) == 4 * s * b * (h + v // t)
    # 50,257 rows do not divide by 8: the largest shard has 6,283.
    assert head_activations(replace(config, vocab=50_257), **alone)["logits"] == 4 * s * b * 6_283


@pytest.mark.parametrize(
    ("a", "h", "b", "percent"), [(64, 6144, 4, (66.8, 49.4, 16.1, 7.6)), (96, 12288, 1, (62.0, 56.5, 18.5, 8.7))]
)
def test_the_papers_percentages(a, h, b, percent):
    """Figure 7: each technique in percent of the tensor parallel baseline, for 22B and 175B with t = 8."""
    config, shape = gpt(h, a), {"batch": b, "seq": 2048, "tp": 8}
    parts = [
        {"sequence_parallel": True},
        {"recompute": "selective"},
        {"sequence_parallel": True, "recompute": "selective"},
        {"recompute": "full"},
    ]
    ratios = [100 * total(config, **shape, **part) / total(config, **shape) for part in parts]
    assert ratios == pytest.approx(percent, abs=0.06)


# --- beyond the paper: each term by hand ---------------------------------------------------------------------------


def test_without_dropout_masks_vanish_and_the_softmax_is_kept_once():
    s, b, h, a = 128, 3, 256, 4
    config, shape = gpt(h, a), {"batch": b, "seq": s, "dropout": 0.0}
    kinds = layer_activations(config, attention="plain", **shape)
    assert kinds["scores"] == 2 * a * s * s * b
    assert kinds["attention"] == 10 * s * b * h
    assert kinds["mlp"] == 18 * s * b * h
    assert sum(embedding_activations(config, **shape).values()) == 0


def test_fused_attention_keeps_statistics_and_no_scores():
    s, b, h, a = 128, 3, 256, 4
    plain = layer_activations(gpt(h, a), batch=b, seq=s, attention="plain")
    fused = layer_activations(gpt(h, a), batch=b, seq=s, attention="fused")
    assert fused == plain | {"scores": 0, "attention": plain["attention"] + 4 * a * s * b}
    again = layer_activations(gpt(h, a), batch=b, seq=s, attention="fused", recompute="selective")
    assert again == plain | {"scores": 0}


def test_llama_by_hand():
    """Llama 3 8B, one token of 16 bit: 4096 wide, 32 heads of 128, 8 of keys, 14336 inside, no dropout."""
    kinds = layer_activations(preset("llama-3-8b"), batch=1, seq=1, attention="fused")
    assert kinds["norms"] == 2 * 2 * 4096
    assert kinds["attention"] == 2 * (4096 + 4096 + 1024 + 1024 + 4096) + 4 * 32
    assert kinds["mlp"] == 2 * (4096 + 3 * 14336)
    assert kinds["scores"] == 0


def test_head_width_apart_from_hidden_and_norms_on_heads():
    config = tiny_config("llama", hidden=100, num_heads=6, num_kv_heads=2, head_dim=8)
    attention = layer_activations(config, batch=1, seq=1, attention="plain")["attention"]
    assert attention == 2 * (100 + 48 + 16 + 16 + 48)
    normed = layer_activations(replace(config, qk_norm=True), batch=1, seq=1, attention="plain")["attention"]
    assert normed - attention == 2 * (48 + 16)
    four = layer_activations(replace(config, norms_per_layer=4), batch=1, seq=1, attention="plain")["norms"]
    assert four == 4 * 2 * 100


def test_experts_by_hand():
    """Mixtral, one token: 4096 wide, 2 of 8 experts, each 14336 inside."""
    config = preset("mixtral-8x7b")
    kinds = layer_activations(config, batch=1, seq=1, attention="fused")
    assert kinds["mlp"] == 2 * 4096
    assert kinds["router"] == 4 * 8
    assert kinds["experts"] == 2 * 2 * (4096 + 3 * 14336 + 4096)


def test_latent_attention_and_dense_first_layers_by_hand():
    """DeepSeek-V3, one token: latents 1536 and 512 + 64, 128 heads of 192 (q, k) and 128 (v), 7168 wide."""
    config = preset("deepseek-v3")
    dense = layer_activations(config, batch=1, seq=1, layer=0, attention="fused")
    heads = 128 * (192 + 192 + 128 + 128)
    assert dense["attention"] == 2 * (7168 + heads + 2 * (1536 + 512) + 64) + 4 * 128
    assert dense["mlp"] == 2 * (7168 + 3 * config.ffn)
    sparse = layer_activations(config, batch=1, seq=1, attention="fused")
    assert sparse["mlp"] == 2 * (7168 + 3 * 2048)  # one shared expert
    assert sparse["experts"] == 2 * 8 * (7168 + 3 * 2048 + 7168)
    model = model_activations(config, batch=1, seq=1, attention="fused")
    assert model["layers"] == 3 * sum(dense.values()) + 58 * sum(sparse.values())


def test_context_parallelism_divides_tokens_and_one_side_of_the_scores():
    config = preset("llama-3-8b")
    whole = layer_activations(config, batch=2, seq=4096, attention="plain")
    part = layer_activations(config, batch=2, seq=4096, cp=4, attention="plain")
    assert {kind: 4 * size for kind, size in part.items()} == whole


def test_every_preset_in_every_way():
    for name in preset_names():
        config = preset(name)
        for recompute in ("none", "selective", "full"):
            for attention in ("plain", "fused"):
                how = {"recompute": recompute, "attention": attention}
                model = model_activations(config, batch=1, seq=64, **how)
                doubled = model_activations(config, batch=2, seq=64, **how)
                assert doubled == {part: 2 * size for part, size in model.items()}, name
                assert all(isinstance(size, int) for size in model.values())
        assert total(config, batch=1, seq=64) > total(config, batch=1, seq=64, recompute="selective")
        assert total(config, batch=1, seq=64, recompute="full") == 2 * 64 * config.hidden


# --- the toy, to the byte --------------------------------------------------------------------------------------------


def drawn(dice: random.Random, family: str) -> ModelConfig:
    kv_heads = dice.randint(1, 4)
    sizes = {
        "num_layers": dice.randint(1, 3),
        "hidden": dice.randint(3, 40),
        "num_heads": kv_heads * dice.randint(1, 3),
        "num_kv_heads": kv_heads,
        "head_dim": 2 * dice.randint(1, 9) - (1 if family == "gpt2" else 0),
        "ffn": dice.randint(1, 70),
        "vocab": dice.randint(2, 99),
        "max_positions": 40,
        "tied": dice.random() < 0.5,
        "norm": dice.choice(("layernorm", "rmsnorm")),
        "gated_mlp": dice.random() < 0.5,
    }
    return tiny_config(family, **sizes)


def measured(config: ModelConfig, batch: int, seq: int, dtype, recompute: str, attention: str, dropout: float):
    model = Transformer(config, dropout=dropout, attention=attention).to(dtype)
    for block in model.blocks:
        if recompute == "full":
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if recompute == "selective":
            block.attention.core = partial(checkpoint, block.attention.core, use_reentrant=False)
    windows = torch.randint(config.vocab, (batch, seq + 1))
    with saved_activations(model) as saved:
        model.loss(windows)
    return saved


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("attention", ["plain", "fused"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_toy_saves_what_the_formulas_say_to_the_byte(family, dtype, dropout, attention, recompute):
    dice = random.Random(SEED)
    print(f"seed {SEED}")
    for _ in range(4):
        config, batch, seq = drawn(dice, family), dice.choice((1, 2, 5)), dice.choice((1, 2, 7, 33))
        how = {"recompute": recompute, "attention": attention, "dropout": dropout}
        shape = {"batch": batch, "seq": seq, "implementation": "toy", "bytes_per_value": dtype.itemsize}
        predicted = sum(model_activations(config, **shape, **how).values())
        assert measured(config, batch, seq, dtype, **how).total == predicted, (config, shape)


@pytest.mark.parametrize("attention", ["plain", "fused"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_every_term_of_the_toy_is_where_it_says(family, dropout, attention):
    """Not the sum alone: norms, attention with its scores, MLP and head each match the modules that save them."""
    dice = random.Random(SEED + 1)
    print(f"seed {SEED + 1}")
    for _ in range(5):
        config = replace(drawn(dice, family), num_layers=2)
        saved = measured(config, 3, 11, torch.float32, "none", attention, dropout).by_module

        def bytes_in(prefix: str, saved=saved) -> int:
            return sum(size for name, size in saved.items() if name.startswith(prefix))

        shape = {"batch": 3, "seq": 11, "implementation": "toy", "bytes_per_value": 4}
        layer = layer_activations(config, **shape, attention=attention, dropout=dropout)
        masks = saved["blocks.1.dropout"]
        assert masks == (2 * 3 * 11 * config.hidden * 4 if dropout else 0)
        # The second block, since the first one is charged with the rotary tables that all share.
        assert bytes_in("blocks.1.norm") == layer["norms"]
        assert bytes_in("blocks.1.attention") + masks // 2 == layer["attention"] + layer["scores"]
        assert bytes_in("blocks.1.mlp") + masks // 2 == layer["mlp"]
        head = head_activations(config, **shape)
        assert saved["norm"] == head["norms"]
        assert saved["head"] == head["head"]
        assert saved["(outside)"] == head["logits"] + head["loss"]
        embedding = embedding_activations(config, **shape, dropout=dropout)
        assert saved["dropout"] == embedding["dropout"]
        rotary = 0 if config.learned_positions else bytes_in("blocks.0") - bytes_in("blocks.1")
        assert saved["embed"] == embedding["tokens"]
        assert saved["positions"] + rotary == embedding["positions"]


def test_the_toys_terms_vanish_with_their_causes():
    config = tiny_config("llama")
    base = {"batch": 2, "seq": 8, "implementation": "toy", "bytes_per_value": 4}
    n, h, f = 16, config.hidden, config.ffn
    dropped = layer_activations(config, **base, dropout=0.1)
    plain = layer_activations(config, **base)
    fused = layer_activations(config, **base, attention="fused")
    assert dropped["mlp"] - plain["mlp"] == 4 * n * h
    assert dropped["scores"] == 3 * plain["scores"]
    assert fused["scores"] == 0
    ungated = layer_activations(replace(config, gated_mlp=False), **base)
    assert plain["mlp"] - ungated["mlp"] == 2 * 4 * n * f
    assert layer_activations(config, **base, recompute="full") == {"input": 4 * n * h}
    untied, tied = (model_activations(replace(config, tied=tied), **base) for tied in (False, True))
    assert untied == tied


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tp": 16}, "tp=16 does not divide num_kv_heads=8; use 1, 2, 4 or 8"),
        ({"tp": 4, "cp": 32, "sequence_parallel": True}, "tp=4 does not divide seq / cp=2"),
        ({"batch": 0}, "batch=0"),
        ({"seq": 2.5}, "seq=2.5"),
        ({"tp": True}, "tp=True"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"dropout": -0.1}, "dropout=-0.1"),
        ({"implementation": "real"}, "unknown implementation 'real'"),
        ({"attention": "flash"}, "unknown attention 'flash'"),
        ({"bytes_per_value": 3}, "bytes_per_value=3 must be one of 2, 4"),
        ({"layer": 32}, "layer=32"),
        (
            {"implementation": "torchtitan", "cp": 2},
            "implementation='torchtitan' with cp=2 is not known with cp_way='ring'; use cp=1",
        ),
        ({"implementation": "torchtitan", "attention": "plain"}, "torchtitan' is not known with attention='plain'"),
        ({"implementation": "toy", "tp": 2, "cp": 2}, "toy' with tp=2 is not known with cp=2"),
    ],
)
def test_bad_input_is_named(change, words):
    with pytest.raises(ValueError, match=words):
        layer_activations(preset("llama-3-8b"), **({"batch": 1, "seq": 64} | change))


def test_the_toy_says_which_models_it_has():
    for name, words in (("mixtral-8x7b", "'mixtral'"), ("qwen2.5-7b", "'qwen2'")):
        with pytest.raises(ValueError, match=words):
            model_activations(preset(name), batch=1, seq=8, implementation="toy", attention="plain")
    with pytest.raises(ValueError, match="head_dim=7 must be even"):
        model_activations(tiny_config("llama", head_dim=7), batch=1, seq=8, implementation="toy", attention="plain")
