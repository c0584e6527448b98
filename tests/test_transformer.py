"""The toy transformer against its parameter count, against Hugging Face's models, and against its own variants."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lablib.calc.models import ModelConfig, preset
from lablib.calc.params import count_params
from lablib.toys.transformer import Transformer, loss, tiny_config

SEED = 20


def drawn(dice: random.Random, family: str) -> ModelConfig:
    """A config with odd sizes, and every field that the model reads drawn by itself."""
    kv_heads = dice.randint(1, 4)
    return ModelConfig(
        family=family,
        num_layers=dice.randint(1, 3),
        hidden=dice.randint(3, 33),
        num_heads=kv_heads * dice.randint(1, 3),
        num_kv_heads=kv_heads,
        head_dim=2 * dice.randint(1, 7),
        ffn=dice.randint(1, 50),
        vocab=dice.randint(2, 70),
        max_positions=dice.randint(9, 20),
        learned_positions=dice.random() < 0.5,
        tied=dice.random() < 0.5,
        norm=dice.choice(("layernorm", "rmsnorm")),
        gated_mlp=dice.random() < 0.5,
        qkv_bias=dice.random() < 0.5,
        attn_out_bias=dice.random() < 0.5,
        mlp_bias=dice.random() < 0.5,
    )


def randomised(model: nn.Module, seed: int) -> nn.Module:
    """Weights of a size at which every part of the model shows in the logits, biases and norms included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.3 * noise + (1 if parameter.dim() == 1 else 0))
    return model.eval()


def tokens_of(config: ModelConfig, batch: int, seq: int) -> torch.Tensor:
    return torch.randint(config.vocab, (batch, seq), generator=torch.Generator().manual_seed(SEED))


def agree(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """The same sums in another order: each of the some 100 roundings on the way moves a logit by about eps."""
    return (ours - theirs).abs().max() <= 100 * torch.finfo(ours.dtype).eps * theirs.abs().max()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_parameters_are_what_the_calculator_counts(family):
    dice = random.Random(SEED)
    print(f"seed {SEED}")
    for _ in range(40):
        config = drawn(dice, family)
        counted = sum(p.numel() for p in Transformer(config).parameters())
        assert counted == count_params(config).total, config


@pytest.mark.parametrize(("name", "total"), [("gpt2", 124_439_808), ("llama-3.2-1b", 1_235_814_400)])
def test_published_models_have_their_published_size(name, total):
    with torch.device("meta"):
        model = Transformer(preset(name))
    assert sum(p.numel() for p in model.parameters()) == total


def gpt2_pair(config: ModelConfig) -> tuple[Transformer, nn.Module]:
    ours = randomised(Transformer(config), SEED)
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab,
            n_positions=config.max_positions,
            n_embd=config.hidden,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_inner=config.ffn,
            tie_word_embeddings=config.tied,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).eval()
    weights = {
        "transformer.wte.weight": ours.embed.weight,
        "transformer.wpe.weight": ours.positions.weight,
        "transformer.ln_f.weight": ours.norm.weight,
        "transformer.ln_f.bias": ours.norm.bias,
        "lm_head.weight": ours.head.weight,
    }
    for i, block in enumerate(ours.blocks):
        at = block.attention
        stack = [torch.cat([getattr(m, part) for m in (at.q, at.k, at.v)]) for part in ("weight", "bias")]
        pairs = {"c_attn": stack, "c_proj": (at.out.weight, at.out.bias)}
        parts = {f"attn.{name}": pair for name, pair in pairs.items()}
        parts |= {
            "mlp.c_fc": (block.mlp.up.weight, block.mlp.up.bias),
            "mlp.c_proj": (block.mlp.down.weight, block.mlp.down.bias),
        }
        for name, (weight, bias) in parts.items():
            weights[f"transformer.h.{i}.{name}.weight"] = weight.T  # theirs is stored input by output
            weights[f"transformer.h.{i}.{name}.bias"] = bias
        for theirs_name, norm in (("ln_1", block.norm1), ("ln_2", block.norm2)):
            weights[f"transformer.h.{i}.{theirs_name}.weight"] = norm.weight
            weights[f"transformer.h.{i}.{theirs_name}.bias"] = norm.bias
    theirs.load_state_dict(weights, strict=True)
    return ours, theirs


def llama_pair(config: ModelConfig) -> tuple[Transformer, nn.Module]:
    ours = randomised(Transformer(config), SEED)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab,
            hidden_size=config.hidden,
            intermediate_size=config.ffn,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=config.tied,
            attention_bias=config.qkv_bias,
            mlp_bias=config.mlp_bias,
        )
    ).eval()
    renamed = {
        "attention.out": "self_attn.o_proj",
        "attention.": "self_attn.",
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
    }
    weights = {}
    for name, parameter in ours.state_dict().items():
        for our_part, their_part in renamed.items():
            name = name.replace(our_part, their_part)
        if name.startswith("blocks"):
            name = name.replace("blocks", "model.layers")
            for projection in ("q", "k", "v", "up", "gate", "down"):
                name = name.replace(f".{projection}.", f".{projection}_proj.")
        elif name.startswith("head"):
            name = f"lm_{name}"
        else:
            name = f"model.{name.replace('embed.', 'embed_tokens.')}"
        weights[name] = parameter
    theirs.load_state_dict(weights, strict=True)
    return ours, theirs


@pytest.mark.parametrize("attention", ["fused", "plain"])
@pytest.mark.parametrize("tied", [True, False])
def test_forward_equals_hugging_face_gpt2(tied, attention):
    config = tiny_config("gpt2", hidden=36, num_heads=3, ffn=50, vocab=61, tied=tied, num_layers=3)
    ours, theirs = gpt2_pair(config)
    for block in ours.blocks:
        block.attention.fused = attention == "fused"
    tokens = tokens_of(config, 3, 29)
    with torch.no_grad():
        assert agree(ours(tokens), theirs(tokens).logits)


@pytest.mark.parametrize("attention", ["fused", "plain"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (6, 1)])
def test_forward_equals_hugging_face_llama(heads, tied, attention):
    num_heads, kv_heads = heads
    biases = dict.fromkeys(("qkv_bias", "attn_out_bias", "mlp_bias"), tied)
    sizes = {"hidden": 36, "num_heads": num_heads, "num_kv_heads": kv_heads, "head_dim": 10, "ffn": 50}
    config = tiny_config("llama", **sizes, **biases, vocab=61, tied=tied, num_layers=3)
    ours, theirs = llama_pair(config)
    for block in ours.blocks:
        block.attention.fused = attention == "fused"
    tokens = tokens_of(config, 3, 29)
    with torch.no_grad():
        assert agree(ours(tokens), theirs(tokens).logits)


def test_loss_is_the_mean_over_next_tokens():
    config = tiny_config("gpt2", num_layers=1)
    model = randomised(Transformer(config), SEED)
    windows = tokens_of(config, 3, 9)
    with torch.no_grad():
        logits = model(windows[:, :-1])
        by_hand = 0.0
        for row in range(3):
            for i in range(8):
                by_hand -= logits[row, i].log_softmax(0)[windows[row, i + 1]].item() / 24
        assert model.loss(windows).item() == pytest.approx(by_hand, rel=1e-5)
    with pytest.raises(ValueError, match="windows of 9"):
        loss(logits, windows[:, :-1])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_training_starts_at_a_uniform_guess_and_learns(family):
    torch.manual_seed(SEED)
    config = tiny_config(family, num_layers=2)
    model = Transformer(config, dropout=0.1)
    windows = tokens_of(config, 2, 33)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        value = model.loss(windows)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[0] == pytest.approx(math.log(256), rel=0.02)
    assert losses[-1] < 0.8 * losses[0]


def test_bf16_stays_bf16_and_the_loss_is_fp32():
    for family in ("gpt2", "llama"):
        model = Transformer(tiny_config(family, num_layers=1)).bfloat16()
        windows = tokens_of(model.config, 2, 9)
        assert model(windows).dtype == torch.bfloat16
        assert model.loss(windows).dtype == torch.float32


def test_dropout_acts_in_training_only():
    config = tiny_config("gpt2", num_layers=1)
    torch.manual_seed(SEED)
    model = Transformer(config, dropout=0.5)
    windows = tokens_of(config, 2, 9)
    assert not torch.equal(model(windows), model(windows))
    model.eval()
    assert torch.equal(model(windows), model(windows))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Transformer(preset("mixtral-8x7b")), "gpt2 or llama, not from family 'mixtral'"),
        (lambda: Transformer(replace(tiny_config("llama"), norms_per_layer=4)), "4 norms a layer"),
        (lambda: Transformer(tiny_config("gpt2"), dropout=1.0), "dropout=1.0"),
        (
            lambda: Transformer(tiny_config("gpt2", max_positions=4))(torch.zeros(1, 5, dtype=torch.int64)),
            "5 tokens, but max_positions=4",
        ),
    ],
)
def test_bad_input_is_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_init_weights_fills_every_parameter(family):
    """After `to_empty` a parameter has nothing that it could keep."""
    with torch.device("meta"):
        model = Transformer(tiny_config(family))
    model.to_empty(device="cpu")
    with torch.no_grad():
        _ = [parameter.fill_(torch.nan) for parameter in model.parameters()]
    model.init_weights()
    assert not [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
