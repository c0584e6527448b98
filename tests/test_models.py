"""ModelConfig, presets and config.json: what is accepted, and what each refusal names."""

import pytest
import torch
import transformers

from lablib.calc.models import ModelConfig, from_hf, preset, preset_names
from lablib.calc.models.config import FAMILIES
from lablib.calc.models.details import DETAILS
from lablib.calc.params import count_params

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
#: The fields of published config.json files that say something about sizes.
PUBLISHED = {
    "pythia-410m": {
        "model_type": "gpt_neox", "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
        "num_hidden_layers": 24, "rotary_pct": 0.25, "max_position_embeddings": 2048, "tie_word_embeddings":
        False, "use_parallel_residual": True, "vocab_size": 50304,
    },
    "pythia-1.4b": {
        "model_type": "gpt_neox", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16,
        "num_hidden_layers": 24, "rotary_pct": 0.25, "max_position_embeddings": 2048, "tie_word_embeddings":
        False, "use_parallel_residual": True, "vocab_size": 50304,
    },
    "olmo-2-7b": {
        "model_type": "olmo2", "attention_bias": False, "hidden_size": 4096, "intermediate_size": 11008,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "tie_word_embeddings": False, "vocab_size": 100352,
    },
    "phi-3-mini": {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings":
        4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "sliding_window": 2047, "tie_word_embeddings": False, "vocab_size": 32064,
    },
    "glm-4-9b-0414": {
        "model_type": "glm4", "attention_bias": True, "head_dim": 128, "hidden_size": 4096,
        "intermediate_size": 13696, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_hidden_layers": 40, "num_key_value_heads": 2, "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False, "vocab_size": 151552,
    },
    "starcoder2-3b": {
        "model_type": "starcoder2", "hidden_size": 3072, "intermediate_size": 12288,
        "max_position_embeddings": 16384, "num_attention_heads": 24, "num_hidden_layers": 30,
        "num_key_value_heads": 2, "sliding_window": 4096, "use_bias": True, "vocab_size": 49152,
    },
    "starcoder2-7b": {
        "model_type": "starcoder2", "hidden_size": 4608, "intermediate_size": 18432,
        "max_position_embeddings": 16384, "num_attention_heads": 36, "num_hidden_layers": 32,
        "num_key_value_heads": 4, "sliding_window": 4096, "use_bias": True, "vocab_size": 49152,
    },
    "falcon-7b": {
        "model_type": "falcon", "alibi": False, "bias": False, "hidden_size": 4544, "multi_query": True,
        "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32,
        "num_kv_heads": 71, "parallel_attn": True, "max_position_embeddings": 2048, "vocab_size": 65024,
    },
    "command-r": {
        "model_type": "cohere", "attention_bias": False, "hidden_size": 8192, "intermediate_size": 22528,
        "logit_scale": 0.0625, "max_position_embeddings": 8192, "num_attention_heads": 64,
        "num_hidden_layers": 40, "num_key_value_heads": 64, "vocab_size": 256000,
    },
    "command-r7b": {
        "model_type": "cohere2", "attention_bias": False, "head_dim": 128, "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 8192, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rotary_pct": 1.0, "sliding_window": 4096,
        "sliding_window_pattern": 4, "vocab_size": 256000, "use_parallel_block": True,
    },
    "gemma-7b": {
        "model_type": "gemma", "attention_bias": False, "head_dim": 256, "hidden_size": 3072,
        "intermediate_size": 24576, "max_position_embeddings": 8192, "num_attention_heads": 16,
        "num_hidden_layers": 28, "num_key_value_heads": 16, "vocab_size": 256000,
    },
    "gemma-2b": {
        "model_type": "gemma", "attention_bias": False, "head_dim": 256, "hidden_size": 2048,
        "intermediate_size": 16384, "max_position_embeddings": 8192, "num_attention_heads": 8,
        "num_hidden_layers": 18, "num_key_value_heads": 1, "vocab_size": 256000,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "attention_bias": True, "head_dim": 64, "hidden_size": 2880,
        "intermediate_size": 2880, "max_position_embeddings": 131072, "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts":
        32, "sliding_window": 128, "vocab_size": 201088, "tie_word_embeddings": False, "layer_types":
        ["sliding_attention", "full_attention"] * 12,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2", "attention_bias": False, "first_k_dense_replace": 1, "hidden_size":
        2048, "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6,
        "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 102400, "topk_group": 1,
    },
}  # fmt: skip
TINY = {"num_layers": 2, "hidden": 12, "num_heads": 4, "ffn": 16, "vocab": 10}


def without(fields, *names):
    return {name: value for name, value in fields.items() if name not in names}


def test_at_least_twenty_presets_of_every_family():
    assert len(preset_names()) >= 20
    assert {preset(name).family for name in preset_names()} == set(FAMILIES)
    assert all(preset(name).name == name for name in preset_names())
    assert set(DETAILS) <= set(preset_names()), "details of a model that has another name"


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


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_parameters_of_transformers_at_their_published_size(name):
    fields = PUBLISHED[name]
    assert from_hf(fields, name=name) == preset(name)
    tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.AutoConfig.for_model(**fields | tokens)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert count_params(preset(name)).total == sum(p.numel() for p in model.parameters())


def test_the_architecture_may_be_named_by_its_class():
    assert from_hf(without(LLAMA_3_8B, "model_type")).family == "llama"


def test_the_text_part_of_an_image_and_text_gemma_is_read():
    text = {
        "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
        "max_position_embeddings": 32768, "sliding_window": 512,
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
