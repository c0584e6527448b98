"""config.json files: what transformers writes reads back, and what is strange is named, field by field."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from typer.testing import CliRunner

from lablib.calc.models import ModelConfig, from_hf, preset
from lablib.calc.models.details import read_details
from lablib.calc.models.hf_families import GEMMA3_TEXT, KNOWN
from lablib.calc.params import count_params
from lablib.cli.main import app

ROTARY = {
    "vocab_size": 97, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2}
#: Heads whose width is the hidden size over their number.
DIVIDED = {name: value for name, value in ROTARY.items() if name != "head_dim"}
LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 6, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 7, "kv_lora_rank": 6, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1,
}  # fmt: skip
#: One small model of each family: every field that fixes a size.
SMALL = {
    "gpt2": {"vocab_size": 97, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_inner": 40, "n_positions": 64},
    "llama": ROTARY,
    "mistral": ROTARY,
    "qwen2": ROTARY,
    "qwen3": ROTARY,
    "gemma2": ROTARY,
    "gemma3_text": ROTARY,
    "mixtral": ROTARY | EXPERTS | {"num_local_experts": 4},
    "qwen3_moe": ROTARY | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 6},
    "gemma": ROTARY,
    "olmo2": DIVIDED,
    "phi3": DIVIDED | {"pad_token_id": 0},
    "glm4": ROTARY | {"pad_token_id": 0},
    "starcoder2": DIVIDED,
    "gpt_neox": {name: value for name, value in DIVIDED.items() if name != "num_key_value_heads"},
    "falcon": {
        "vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_hidden_size": 40,
        "max_position_embeddings": 64,
    },
    "cohere": DIVIDED,
    "cohere2": DIVIDED,
    "gpt_oss": ROTARY | EXPERTS | {"num_local_experts": 4},
    "deepseek_v2": DIVIDED | EXPERTS | LATENT,
    "deepseek_v3": DIVIDED | EXPERTS | LATENT,
}  # fmt: skip
NO_SIZE = ("n_group", "topk_group", "pad_token_id")
FLAGS = {
    "gpt2": ("tie_word_embeddings",),
    "llama": ("tie_word_embeddings", "attention_bias", "mlp_bias"),
    "mistral": ("tie_word_embeddings",),
    "qwen2": ("tie_word_embeddings",),
    "mixtral": ("tie_word_embeddings",),
    "gemma": ("tie_word_embeddings", "attention_bias"),
    "olmo2": ("tie_word_embeddings", "attention_bias"),
    "phi3": ("tie_word_embeddings",),
    "glm4": ("tie_word_embeddings", "attention_bias"),
    "starcoder2": ("tie_word_embeddings", "use_bias"),
    "gpt_neox": ("tie_word_embeddings", "attention_bias", "use_parallel_residual"),
    "falcon": ("tie_word_embeddings", "bias", "multi_query", "new_decoder_architecture", "parallel_attn"),
    "cohere": ("tie_word_embeddings", "attention_bias", "use_qk_norm"),
    "cohere2": ("tie_word_embeddings", "attention_bias"),
    "gpt_oss": ("tie_word_embeddings", "attention_bias"),
    "deepseek_v2": ("tie_word_embeddings", "attention_bias"),
}
REMOVED = object()
STRANGE = {"removed": REMOVED, "text": "8", "null": None, "-1": -1, "0": 0, "1.5": 1.5, "2.0": 2.0, "true": True,
           "list": [4], "huge": 10**15}  # fmt: skip
MUTATIONS = [(kind, field) for kind, fields in SMALL.items() for field in fields if field not in NO_SIZE]


def written(model_type: str, **changed: object) -> transformers.PretrainedConfig:
    return transformers.AutoConfig.for_model(model_type, **SMALL[model_type] | changed)


def parameters(config: transformers.PretrainedConfig) -> int:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())


def read(fields: dict) -> ModelConfig | str:
    """The model, or the text of the ValueError; anything else that is raised fails the test."""
    try:
        return from_hf(fields)
    except ValueError as error:
        return str(error)


def test_every_family_is_here() -> None:
    assert set(SMALL) == {model_type for model_type, *_ in KNOWN}


@pytest.mark.parametrize("model_type", SMALL)
def test_what_transformers_writes_into_a_folder_reads_back(model_type, tmp_path) -> None:
    config = written(model_type)
    config.save_pretrained(tmp_path)
    truth = parameters(config)
    assert count_params(from_hf(tmp_path)).total == truth
    assert count_params(from_hf(str(tmp_path / "config.json"))).total == truth
    assert from_hf(config.to_dict()) == from_hf(SMALL[model_type] | {"model_type": model_type}), "every default"
    # The other head or another size would be seen.
    other = written(model_type, vocab_size=98)
    assert count_params(from_hf(other.to_dict())).total == parameters(other) != truth


@pytest.mark.parametrize(("model_type", "field"), MUTATIONS, ids=[f"{m}-{f}" for m, f in MUTATIONS])
def test_a_strange_size_is_named_or_means_what_transformers_means(model_type, field) -> None:
    for what, value in STRANGE.items():
        fields = {name: old for name, old in SMALL[model_type].items() if name != field}
        if value is not REMOVED:
            fields[field] = value
        found = read(fields | {"model_type": model_type})
        if isinstance(found, str):
            assert field in found, (what, found)
            continue
        # Accepted: then transformers accepts it too, and makes the same sizes of it.
        assert found == from_hf(transformers.AutoConfig.for_model(model_type, **fields).to_dict()), what


#: Fields that change the parameters, or the shape of a block, in families that have them.
VARIANTS = [
    ("olmo2", {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    ("phi3", {"tie_word_embeddings": True, "partial_rotary_factor": 0.75}),
    ("glm4", {"attention_bias": False}),
    ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    ("gpt_neox", {"attention_bias": False, "use_parallel_residual": False}),
    ("falcon", {"multi_query": False}),
    ("falcon", {"bias": True, "tie_word_embeddings": False}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "parallel_attn": False}),
    ("falcon", {"parallel_attn": False}),
    ("cohere", {"use_qk_norm": True, "attention_bias": True}),
    ("cohere2", {"attention_bias": True, "tie_word_embeddings": False}),
    ("gemma", {"attention_bias": True, "tie_word_embeddings": False}),
    ("gpt_oss", {"attention_bias": False}),
    ("deepseek_v2", {"q_lora_rank": None, "attention_bias": True}),
]


@pytest.mark.parametrize(("model_type", "changed"), VARIANTS, ids=str)
def test_a_field_that_changes_parameters_changes_the_count(model_type, changed) -> None:
    config = written(model_type, **changed)
    assert count_params(from_hf(config.to_dict())).total == parameters(config)


@pytest.mark.parametrize(
    ("model_type", "field"),
    [
        ("llama", "qk_layernorm"),
        ("mistral", "n_routed_experts"),
        ("gpt_neox", "multi_query"),
        ("cohere2", "use_qk_norm"),
    ],
)
def test_a_field_that_its_family_does_not_have_is_refused_by_name(model_type, field) -> None:
    plain = SMALL[model_type] | {"model_type": model_type}
    assert isinstance(read(plain | {field: False}), ModelConfig)
    assert f"{field} is True" in read(plain | {field: True})


def test_windows_are_those_of_transformers() -> None:
    """`layer_types` where the class has them, and otherwise every layer."""
    asked = {
        "mistral": {}, "phi3": {"sliding_window": 8}, "starcoder2": {"sliding_window": 8}, "mixtral": {"sliding_window": 8},
        "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        "qwen3": {"use_sliding_window": True, "max_window_layers": 2}, "qwen3_moe": {"use_sliding_window": True},
        "gemma2": {}, "gemma3_text": {"sliding_window_pattern": 2}, "cohere2": {}, "gpt_oss": {},
    }  # fmt: skip
    for model_type, fields in asked.items():
        config = written(model_type, **fields)
        types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        layers = tuple(i for i, one in enumerate(types) if one == "sliding_attention")
        for source in (config.to_dict(), SMALL[model_type] | fields | {"model_type": model_type}):
            found = from_hf(source)
            assert (found.window, found.window_layers) == (config.sliding_window, layers), model_type
    for model_type, fields in (("qwen2", {}), ("mistral", {"sliding_window": None}), ("llama", {"sliding_window": 8})):
        assert from_hf(SMALL[model_type] | fields | {"model_type": model_type}).window == 0
    chunked = SMALL["gpt_oss"] | {"model_type": "gpt_oss", "layer_types": ["chunked_attention"] * 3}
    assert "layer_types is ['chunked_attention'" in read(chunked)
    linear = SMALL["qwen2"] | {
        "model_type": "qwen2",
        "use_sliding_window": False,
        "layer_types": ["linear_attention"] * 3,
    }
    assert "layer_types is ['linear_attention'" in read(linear)


def test_missing_sizes_are_not_made_up() -> None:
    derived = {"gpt2": {"n_inner"}, "falcon": {"ffn_hidden_size"}}
    derived |= {one: {"num_key_value_heads"} for one in ("llama", "olmo2", "phi3", "cohere", "cohere2")}
    for model_type, sizes in SMALL.items():
        for field in sizes:
            if field in NO_SIZE:
                continue
            found = read({"model_type": model_type} | {n: v for n, v in sizes.items() if n != field})
            made_up = derived.get(model_type, set()) | {"max_position_embeddings"}
            if model_type not in ("qwen3", "gemma", "gemma2", "gemma3_text", "glm4", "gpt_oss"):
                made_up |= {"head_dim"}
            assert isinstance(found, ModelConfig) == (field in made_up), (model_type, field, found)


@pytest.mark.parametrize("model_type", FLAGS)
def test_a_strange_flag_is_named(model_type) -> None:
    for field in FLAGS[model_type]:
        for value in ("no", None, 0, 1, 1.5, []):
            found = read(SMALL[model_type] | {"model_type": model_type, field: value})
            assert isinstance(found, str), (field, value)
            assert f"{field} is {value!r} and must be true or false" in found
        assert isinstance(read(SMALL[model_type] | {"model_type": model_type, field: True}), ModelConfig)


@pytest.mark.parametrize("model_type", SMALL)
def test_no_value_in_any_field_does_anything_but_a_sentence(model_type) -> None:
    fields = written(model_type).to_dict() | {"architectures": None, "text_config": None, "auto_map": None}
    values = (None, True, False, 0, -3, 7, 10**30, 0.5, float("nan"), "", "x", [], [None], [0, 1], {}, {"a": 1})
    for field in fields:
        for value in values:
            found = read(fields | {field: value})
            assert isinstance(found, ModelConfig) or ("\n" not in found and len(found) < 400), (field, value)
    assert isinstance(read(fields), ModelConfig)


def test_fields_that_change_no_size_are_passed_over() -> None:
    plain = SMALL["llama"] | {"model_type": "llama"}
    for more in (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "rope_theta": 5e5},
        {"sliding_window": 4096, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 3},
        {"quantization_config": {"quant_method": "fp8"}, "torch_dtype": "float8_e4m3fn"},
        {"architectures": ["LlamaForCausalLM"], "auto_map": {"AutoModel": "a.b"}, "transformers_version": "9"},
        {"architectures": ["LlamaModel"], "_name_or_path": 7, "hidden_act": "gelu", "pretraining_tp": 2},
    ):
        assert from_hf(plain | more) == from_hf(plain), more
    deepseek = SMALL["deepseek_v3"] | {"model_type": "deepseek_v3"}
    assert from_hf(deepseek | {"num_nextn_predict_layers": 1, "head_dim": 64}) == from_hf(deepseek)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": ["llama"]}, "model_type is ['llama']; known are gpt2"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM' and must be a list"),
        ({"architectures": [1]}, "architectures is [1] and must be a list"),
        ({"model_type": "llava", "text_config": {"model_type": "llama"}}, "text_config has model_type 'llama'"),
        ({"model_type": "gemma3", "text_config": 3}, "text_config is 3"),
        ({"model_type": "gemma3", "text_config": {"model_type": "llama"}}, "model_type is 'llama', not 'gemma3_text'"),
        (
            {"model_type": "gemma3", "tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}},
            "tie_word_embeddings is True, and False in text_config",
        ),
        (SMALL["qwen3_moe"] | {"model_type": "qwen3_moe", "mlp_only_layers": 0}, "mlp_only_layers is 0 and must be a list"),
        (SMALL["qwen3_moe"] | {"model_type": "qwen3_moe", "mlp_only_layers": [0, 1, 2, 3]}, "mlp_only_layers is 4 and more"),
        (SMALL["llama"] | {"model_type": "llama", "num_hidden_layers": 10**7}, "num_hidden_layers is 10000000"),
    ],
)  # fmt: skip
def test_what_is_not_counted_is_refused_by_name(fields, message) -> None:
    assert message in read(fields)


def test_an_image_and_text_gemma_leaves_out_what_is_the_default(tmp_path) -> None:
    defaults = transformers.Gemma3TextConfig()
    assert {name: getattr(defaults, name) for name in GEMMA3_TEXT} == GEMMA3_TEXT
    # As the files of gemma-3-4b-it and larger ones are: no heads and no vocabulary under text_config.
    text = {"model_type": "gemma3_text", "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    config = transformers.Gemma3Config(text_config=text)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    decoder = sum(p.numel() for p in model.model.language_model.parameters())
    assert count_params(from_hf(tmp_path)).total == decoder
    assert from_hf(config.to_dict()) == from_hf(tmp_path)


def test_a_byte_order_mark_is_read_and_deep_nesting_is_not(tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL["llama"] | {"model_type": "llama"}), encoding="utf-8-sig")
    assert isinstance(from_hf(path), ModelConfig)
    path.write_text("[" * 100_000)
    assert "nested too deep" in str(read(path)) or "not JSON" in str(read(path))
    path.write_bytes(b"\xff\xfe\x00")
    assert "is not JSON" in read(path)
    twice = json.dumps(SMALL["llama"] | {"model_type": "llama"})[:-1] + ', "num_hidden_layers": 1}'
    path.write_text(twice)
    assert "'num_hidden_layers' stands there twice" in read(path)


@pytest.mark.parametrize(
    "command", [["memory"], ["fit", "--gpu", "h100"], ["plan", "--gpus", "8", "--global-batch", "8"]]
)
def test_the_command_line_reads_files_and_says_one_sentence(command, tmp_path) -> None:
    path = tmp_path / "config.json"
    good = SMALL["llama"] | {"model_type": "llama"}

    def rung() -> tuple[int, str, str]:
        result = CliRunner().invoke(app, [command[0], str(path), *command[1:]])
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result.exit_code, result.stdout, result.stderr

    path.write_text(json.dumps(good))
    assert rung()[0] == 0
    for text, said in (
        ("{", "is not JSON"),
        ("[]", "holds a list and not a dictionary of fields"),
        (json.dumps(good | {"hidden_size": None}), "hidden_size is null"),
        (json.dumps(good | {"model_type": "mamba"}), "model_type is 'mamba'; known are gpt2"),
        (json.dumps(good | {"num_key_value_heads": 3}), "num_key_value_heads is 3 and does not divide"),
    ):
        path.write_text(text)
        code, out, err = rung()
        assert (code, out) == (2, "")
        assert err.startswith("rung: ")
        assert said in err
        assert err.count("\n") == 1


def test_positions_and_router_that_transformers_writes_are_read() -> None:
    scaled = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 8192}  # fmt: skip
    llama = from_hf(transformers.LlamaConfig(rope_parameters=scaled, rms_norm_eps=1e-5).to_dict())
    assert (llama.rotary, llama.norm_eps) == (preset("llama-3.1-8b").rotary, preset("llama-3.1-8b").norm_eps)
    deepseek = from_hf(transformers.DeepseekV3Config(aux_loss_alpha=1e-4).to_dict())
    assert deepseek.router == preset("deepseek-v3").router
    for normalized in (True, False):
        config = transformers.Qwen3MoeConfig(norm_topk_prob=normalized, router_aux_loss_coef=0.5).to_dict()
        router = from_hf(config).router
        assert (router.score, router.normalized, router.coefficient) == ("softmax", normalized, 0.5)


def test_deepseeks_older_spelling_of_its_positions_is_read() -> None:
    yarn = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096}  # fmt: skip
    found = read_details({"rope_theta": 10000, "rope_scaling": yarn, "rms_norm_eps": 1e-6}, "deepseek-v3")
    assert found == {"rotary": preset("deepseek-v3").rotary, "norm_eps": 1e-6}
    # Strange types are not taken for numbers; what needs them says that they are not known.
    assert read_details({"rope_theta": "10000", "rope_scaling": [], "rms_norm_eps": True}, "llama") == {}
