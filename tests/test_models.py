"""ModelConfig, presets and config.json: what is accepted, and what each refusal names."""

import pytest

from lablib.calc.models import ModelConfig, from_hf, preset, preset_names
from lablib.calc.models.config import FAMILIES

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
    "rope_theta": 500000.0, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_layer_freq": 1, "first_k_dense_replace": 3,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "vocab_size": 129280, "max_position_embeddings": 163840, "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257,
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "vocab_size": 151936, "max_position_embeddings": 40960,
}  # fmt: skip
TINY = {"num_layers": 2, "hidden": 12, "num_heads": 4, "ffn": 16, "vocab": 10}


def without(fields, *names):
    return {name: value for name, value in fields.items() if name not in names}


def test_at_least_twenty_presets_of_every_family():
    assert len(preset_names()) >= 20
    assert {preset(name).family for name in preset_names()} == set(FAMILIES)
    assert all(preset(name).name == name for name in preset_names())


def test_an_unknown_preset_suggests_close_names():
    with pytest.raises(ValueError, match="unknown model 'llama3-8b'; did you mean llama-3-8b"):
        preset("llama3-8b")
    with pytest.raises(ValueError, match=r"unknown model 'x'; did you mean .*gpt2"):
        preset("x")


@pytest.mark.parametrize(
    ("name", "fields"),
    [("llama-3-8b", LLAMA_3_8B), ("deepseek-v3", DEEPSEEK_V3), ("gpt2", GPT2), ("qwen3-30b-a3b", QWEN3_MOE)],
)
def test_a_published_config_json_is_its_preset(name, fields):
    assert from_hf(fields, name=name) == preset(name)


def test_the_architecture_may_be_named_by_its_class():
    assert from_hf(without(LLAMA_3_8B, "model_type")).family == "llama"


def test_the_text_part_of_an_image_and_text_gemma_is_read():
    text = {
        "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
        "max_position_embeddings": 32768,
    }  # fmt: skip
    assert from_hf({"model_type": "gemma3", "text_config": text}, name="gemma-3-1b") == preset("gemma-3-1b")


def test_derived_fields_may_be_missing_or_null():
    bare = without(LLAMA_3_8B, "num_key_value_heads", "attention_bias", "mlp_bias", "tie_word_embeddings")
    assert from_hf(bare).num_kv_heads == 32
    assert from_hf(LLAMA_3_8B | {"head_dim": None}).head_dim == 128
    assert from_hf(LLAMA_3_8B | {"head_dim": 64}).q_width == 2048
    assert from_hf(without(QWEN3_MOE, "head_dim")).head_dim == 64
    assert from_hf(GPT2 | {"n_inner": None}).ffn == 3072
    assert from_hf(DEEPSEEK_V3 | {"q_lora_rank": None}).q_lora_rank == 0


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(ValueError, match="cannot read"):
        from_hf(tmp_path / "none.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        from_hf(broken)
    broken.write_text("[1, 2]")
    with pytest.raises(ValueError, match="holds a list"):
        from_hf(broken)
    with pytest.raises(ValueError, match="int is neither a dictionary nor the path"):
        from_hf(8)


def test_mla_widths():
    config = preset("deepseek-v3")
    assert (config.head_dim, config.q_width, config.value_dim, config.attn_width) == (192, 24576, 128, 16384)
    assert [config.has_experts(layer) for layer in (0, 2, 3, 60)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 0}, "num_layers=0 must be at least 1"),
        ({"num_heads": 5}, "num_heads=5 does not divide hidden=12"),
        ({"family": "bert"}, "unknown family 'bert'"),
        (
            {"num_experts": 4, "expert_ffn": 8, "experts_per_token": 5},
            "experts_per_token=5 must be between 1 and num_experts=4",
        ),
        ({"num_shared_experts": 1}, "num_shared_experts=1 needs num_experts"),
        ({"q_lora_rank": 8}, "belong to latent attention"),
        (
            {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4, "num_kv_heads": 2},
            "num_kv_heads=2 must equal num_heads=4",
        ),
    ],
)
def test_contradictions_name_every_factor(fields, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**TINY | fields)
