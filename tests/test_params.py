"""Parameter counts: exact to the unit, against published totals and against transformers on the meta device."""

import random

import pytest
import torch
import transformers

from lablib.calc.models import ModelConfig, from_hf, preset, preset_names
from lablib.calc.params import COMPONENTS, count_params
from tests.test_models import PUBLISHED as CONFIGURATIONS

# Totals of the released checkpoints. Where "active" is published only in words, tests below give it a tolerance.
PUBLISHED = {
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328, "llama-1-65b": 65_285_660_672, "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192, "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496, "llama-3.1-405b": 405_853_388_800, "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824, "mistral-7b-v0.1": 7_241_732_096, "qwen2-0.5b": 494_032_768,
    "qwen2-7b": 7_615_616_512, "qwen2.5-72b": 72_706_203_648, "qwen3-8b": 8_190_735_360,
    "gemma-2-2b": 2_614_341_888, "gemma-2-9b": 9_241_705_984, "gemma-3-1b": 999_885_952,
    "mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_620_634_112, "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v3": 671_026_404_352,
    # Hugging Face's API, safetensors.total of the model's repository.
    "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496, "olmo-2-13b": 13_716_198_400,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-7b": 7_615_616_512, "qwen3-0.6b": 596_049_920,
    "qwen3-235b-a22b": 235_093_634_560, "gpt-oss-120b": 116_829_156_672,
}  # fmt: skip
#: In billions, where the paper has no more digits: Brown et al. 2020 (arXiv 2005.14165), table 2.1.
ROUNDED = {"gpt3-6.7b": 6.7}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals_are_exact(name):
    assert count_params(preset(name)).total == PUBLISHED[name]


def test_every_preset_has_a_total_or_a_configuration_that_is_not_its_own():
    """A new preset comes with its source: an exact total above, or its config.json in test_models."""
    assert set(preset_names()) == set(PUBLISHED) | set(ROUNDED) | set(CONFIGURATIONS)
    assert {name: round(count_params(preset(name)).total / 1e9, 1) for name in ROUNDED} == ROUNDED


@pytest.mark.parametrize("name", preset_names())
def test_components_sum_to_the_total_and_active_is_never_more(name):
    count = count_params(preset(name))
    assert set(count.by_component) == set(COMPONENTS)
    assert count.total == sum(count.by_component.values())
    assert (count.active == count.total) == (not preset(name).is_moe)
    assert all(count.active_by_component[part] <= count.by_component[part] for part in COMPONENTS)


def test_active_parameters_of_mixtral_and_deepseek():
    assert count_params(preset("mixtral-8x7b")).active == 12_879_925_248
    # DeepSeek-V3's report says 37B, Qwen3's 3.3B: with and without the embedding, both round to that.
    deepseek = count_params(preset("deepseek-v3"))
    assert round(deepseek.active / 1e9, 2) == 37.55
    assert round((deepseek.active - deepseek.by_component["embedding"]) / 1e9) == 37
    qwen = count_params(preset("qwen3-30b-a3b"))
    assert qwen.active / 1e9 == pytest.approx(3.3, rel=0.02)
    assert (round(qwen.active / 1e9, 1), round((qwen.active - qwen.by_component["embedding"]) / 1e9, 1)) == (3.4, 3.0)


def test_gpt_closed_form():
    # ψ = L(12h² + 13h) + Vh + s h + 2h: four attention matrices, MLP of 8h², biases and norms.
    layers, h, vocab, positions = 7, 48, 101, 33
    config = ModelConfig(
        family="gpt2", num_layers=layers, hidden=h, num_heads=6, ffn=4 * h, vocab=vocab, max_positions=positions,
        learned_positions=True, tied=True, norm="layernorm", gated_mlp=False,
        qkv_bias=True, attn_out_bias=True, mlp_bias=True,
    )  # fmt: skip
    count = count_params(config)
    assert count.total == layers * (12 * h**2 + 13 * h) + vocab * h + positions * h + 2 * h


def _heads(draw):
    """Query heads, key and value heads that divide them, and a width that is not tied to the hidden size."""
    kv = draw.choice([1, 2, 3, 5])
    return kv * draw.choice([1, 2, 3]), kv, 2 * draw.randint(2, 20)


def _rotary(draw, **more):
    heads, kv, head_dim = _heads(draw)
    return {
        "vocab_size": draw.randint(50, 999),
        # Some families check that heads divide the hidden size, even where head_dim is a field of its own.
        "hidden_size": heads * draw.randint(2, 20),
        "intermediate_size": draw.randint(7, 300),
        "num_hidden_layers": draw.randint(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        "max_position_embeddings": draw.randint(16, 4096),
        "tie_word_embeddings": draw.random() < 0.5,
        **more,
    }


def _bias(draw):
    return {"attention_bias": draw.random() < 0.5}


def _gpt2(draw):
    heads = draw.choice([1, 2, 3, 5])
    return {
        "vocab_size": draw.randint(50, 999),
        "n_positions": draw.randint(16, 512),
        "n_embd": heads * draw.randint(3, 20),
        "n_layer": draw.randint(1, 4),
        "n_head": heads,
        "n_inner": draw.choice([None, draw.randint(5, 200)]),
        "tie_word_embeddings": draw.random() < 0.5,
    }


def _llama(draw):
    config = _rotary(draw, **_bias(draw), mlp_bias=draw.random() < 0.5)
    if draw.random() < 0.3:  # the derived head_dim, and Llama 1 without a field for key and value heads
        config["hidden_size"] = config["num_attention_heads"] * 2 * draw.randint(2, 9)  # rotary widths are even
        config["head_dim"] = None
    if draw.random() < 0.3:
        del config["num_key_value_heads"]
    return config


def _experts(draw):
    experts = draw.randint(2, 9)
    return experts, draw.randint(1, experts)


def _mixtral(draw):
    experts, visited = _experts(draw)
    return _rotary(draw, num_local_experts=experts, num_experts_per_tok=visited)


def _qwen3_moe(draw):
    experts, visited = _experts(draw)
    config = _rotary(
        draw, **_bias(draw), num_experts=experts, num_experts_per_tok=visited,
        moe_intermediate_size=draw.randint(3, 60),
    )  # fmt: skip
    config["mlp_only_layers"] = list(range(draw.randint(0, config["num_hidden_layers"])))
    return config


def _deepseek_v3(draw):
    experts, visited = _experts(draw)
    config = _rotary(
        draw, **_bias(draw), n_routed_experts=experts, num_experts_per_tok=visited, n_group=1, topk_group=1,
        moe_intermediate_size=draw.randint(3, 60), n_shared_experts=draw.randint(1, 3),
        q_lora_rank=draw.choice([None, draw.randint(4, 40)]), kv_lora_rank=draw.randint(4, 40),
        qk_nope_head_dim=draw.randint(2, 30), qk_rope_head_dim=2 * draw.randint(1, 8), v_head_dim=draw.randint(2, 30),
    )  # fmt: skip
    del config["head_dim"]
    config["num_key_value_heads"] = config["num_attention_heads"]
    config["first_k_dense_replace"] = draw.randint(0, config["num_hidden_layers"])
    return config


FAMILIES = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _rotary,
    "qwen2": _rotary,
    "qwen3": lambda draw: _rotary(draw, **_bias(draw)),
    "gemma2": lambda draw: _rotary(draw, **_bias(draw)),
    "gemma3_text": lambda draw: _rotary(draw, **_bias(draw)),
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
}


def build_on_meta(model_type, fields):
    config = transformers.AutoConfig.for_model(model_type, **fields)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_odd_configs_of_every_family_agree_with_transformers(model_type):
    # parameters() leaves out buffers, so DeepSeek-V3's routing biases are in neither count.
    draw = random.Random(f"params {model_type}")
    for _ in range(12):
        fields = FAMILIES[model_type](draw)
        model = build_on_meta(model_type, fields)
        truth = sum(p.numel() for p in model.parameters())
        assert count_params(from_hf({"model_type": model_type, **fields})).total == truth, fields
        # What transformers itself writes into config.json reads back the same.
        assert count_params(from_hf(model.config.to_dict())).total == truth, fields


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "deepseek_v3"])
def test_components_agree_with_the_modules_of_transformers(model_type):
    fields = FAMILIES[model_type](random.Random(f"components {model_type}"))
    fields |= {"tie_word_embeddings": False, "num_hidden_layers": 3}
    if model_type == "deepseek_v3":
        fields["first_k_dense_replace"] = 1
    model = build_on_meta(model_type, fields)
    count = count_params(from_hf({"model_type": model_type, **fields})).by_component

    def numel(module):
        return sum(p.numel() for p in module.parameters())

    layers = model.model.layers
    assert count["embedding"] == numel(model.model.embed_tokens)
    assert count["head"] == numel(model.lm_head)
    assert count["final_norm"] == numel(model.model.norm)
    assert count["attention"] == sum(numel(layer.self_attn) for layer in layers)
    mlps = count["mlp"] + count["router"] + count["experts"] + count["shared_experts"]
    assert mlps == sum(numel(layer.mlp) for layer in layers)
    if model_type == "deepseek_v3":
        assert count["shared_experts"] == sum(numel(layer.mlp.shared_experts) for layer in layers[1:])
        assert count["router"] == sum(numel(layer.mlp.gate) for layer in layers[1:])
