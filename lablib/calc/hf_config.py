"""Reading a Hugging Face `config.json` into a ModelConfig.

A field that fixes a size must be there: a silent default would give a wrong count. Fields that transformers itself
derives may be missing or null, and get what transformers would use: `num_key_value_heads` (as many as query heads,
in the Llama family), `head_dim` (hidden size over heads), biases (none) and `tie_word_embeddings` (by family).

Chapter: book/01_why_distributed.md
"""

from __future__ import annotations

from lablib.calc.models import ModelConfig

_MISSING = object()


class _Fields:
    """The fields of one configuration; every complaint names the field."""

    def __init__(self, fields: dict, where: str) -> None:
        self.fields, self.where = fields, where

    def error(self, field: str, problem: str) -> ValueError:
        return ValueError(f"{self.where}: {field} {problem}")

    def whole(self, *names: str, default: object = _MISSING, least: int = 1) -> int:
        """A whole number under the first of these names that is there; null counts as missing."""
        name = next((name for name in names if self.fields.get(name) is not None), None)
        if name is None:
            if default is _MISSING:
                raise self.error(names[0], "is missing")
            return default
        value = self.fields[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(name, f"is {value!r} and must be a whole number, at least {least}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.fields.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"is {value!r} and must be true or false")
        return value

    def only(self, name: str, *allowed: object, why: str) -> None:
        """Refuse a field that changes the model in a way this module does not know."""
        if self.fields.get(name, allowed[0]) not in allowed:
            raise self.error(name, f"is {self.fields[name]!r}: {why}")


def _gpt2(f: _Fields) -> dict:
    f.only("add_cross_attention", False, None, why="cross-attention is not counted")
    hidden = f.whole("n_embd", "hidden_size")
    heads = f.whole("n_head", "num_attention_heads")
    if hidden % heads:
        raise f.error("n_head", f"is {heads} and does not divide n_embd={hidden}")
    return {
        "num_layers": f.whole("n_layer", "num_hidden_layers"),
        "hidden": hidden,
        "num_heads": heads,
        "ffn": f.whole("n_inner", default=4 * hidden),
        "vocab": f.whole("vocab_size"),
        "max_positions": f.whole("n_positions", "max_position_embeddings"),
        "learned_positions": True,
        "tied": f.flag("tie_word_embeddings", True),
        "norm": "layernorm",
        "gated_mlp": False,
        "qkv_bias": True,
        "attn_out_bias": True,
        "mlp_bias": True,
    }


def _decoder(f: _Fields, *, kv_heads: object = _MISSING, head_dim: object = 0, tied: bool = False) -> dict:
    """What every rotary family shares; the arguments are what a missing field means."""
    hidden, heads = f.whole("hidden_size"), f.whole("num_attention_heads")
    fields = {
        "num_layers": f.whole("num_hidden_layers"),
        "hidden": hidden,
        "num_heads": heads,
        "num_kv_heads": f.whole("num_key_value_heads", default=kv_heads) or heads,
        "head_dim": f.whole("head_dim", default=head_dim),
        "ffn": f.whole("intermediate_size"),
        "vocab": f.whole("vocab_size"),
        "max_positions": f.whole("max_position_embeddings", default=2048),
        "tied": f.flag("tie_word_embeddings", tied),
    }
    if heads % fields["num_kv_heads"]:
        raise f.error(
            "num_key_value_heads",
            f"is {fields['num_kv_heads']} and does not divide num_attention_heads={heads}",
        )
    if not fields["head_dim"] and hidden % heads:
        raise f.error(
            "head_dim", f"is missing, and num_attention_heads={heads} does not divide hidden_size={hidden}"
        )
    return fields


def _attention_bias(f: _Fields) -> dict:
    bias = f.flag("attention_bias", False)
    return {"qkv_bias": bias, "attn_out_bias": bias}


def _llama(f: _Fields) -> dict:
    return _decoder(f, kv_heads=0) | _attention_bias(f) | {"mlp_bias": f.flag("mlp_bias", False)}


def _mistral(f: _Fields) -> dict:
    return _decoder(f)


def _qwen2(f: _Fields) -> dict:
    return _decoder(f) | {"qkv_bias": True}


def _qwen3(f: _Fields) -> dict:
    return _decoder(f, head_dim=_MISSING) | _attention_bias(f) | {"qk_norm": True}


def _gemma2(f: _Fields) -> dict:
    return _decoder(f, head_dim=_MISSING, tied=True) | _attention_bias(f) | {"norms_per_layer": 4}


def _gemma3(f: _Fields) -> dict:
    return _gemma2(f) | {"qk_norm": True}


def _mixtral(f: _Fields) -> dict:
    return _decoder(f) | {
        "num_experts": f.whole("num_local_experts", "num_experts"),
        "experts_per_token": f.whole("num_experts_per_tok"),
        "expert_ffn": f.whole("intermediate_size"),
    }


def _qwen3_moe(f: _Fields) -> dict:
    f.only(
        "decoder_sparse_step", 1, why="only models with experts in every layer after the dense ones are known"
    )
    dense = f.fields.get("mlp_only_layers") or []
    if dense != list(range(len(dense))):
        raise f.error("mlp_only_layers", f"is {dense!r}: only the first layers may be dense")
    return (
        _decoder(f)
        | _attention_bias(f)
        | {
            "qk_norm": True,
            "num_experts": f.whole("num_experts", "num_local_experts"),
            "experts_per_token": f.whole("num_experts_per_tok"),
            "expert_ffn": f.whole("moe_intermediate_size"),
            "num_dense_layers": len(dense),
        }
    )


def _deepseek_v3(f: _Fields) -> dict:
    f.only(
        "moe_layer_freq",
        1,
        None,
        why="only models with experts in every layer after the dense ones are known",
    )
    if "q_lora_rank" not in f.fields:  # null is an answer: queries without a latent
        raise f.error("q_lora_rank", "is missing; null means queries without a latent")
    nope = f.whole("qk_nope_head_dim", least=0)
    rope = f.whole("qk_rope_head_dim")
    heads = f.whole("num_attention_heads")
    if f.whole("num_key_value_heads", default=heads) != heads:
        raise f.error("num_key_value_heads", f"must equal num_attention_heads={heads} with latent attention")
    return (
        _decoder(f, kv_heads=0)
        | _attention_bias(f)
        | {
            # Configurations carry a head_dim of their own here (the rotary part's); the parts decide.
            "head_dim": nope + rope,
            "num_experts": f.whole("n_routed_experts", "num_local_experts", "num_experts"),
            "experts_per_token": f.whole("num_experts_per_tok"),
            "expert_ffn": f.whole("moe_intermediate_size"),
            "num_shared_experts": f.whole("n_shared_experts", least=0),
            "num_dense_layers": f.whole("first_k_dense_replace", least=0),
            "q_lora_rank": f.whole("q_lora_rank", default=0),
            "kv_lora_rank": f.whole("kv_lora_rank"),
            "qk_nope_head_dim": nope,
            "qk_rope_head_dim": rope,
            "v_head_dim": f.whole("v_head_dim"),
        }
    )


# model_type, the class in `architectures`, the family here, and its reader.
_KNOWN = (
    ("gpt2", "GPT2LMHeadModel", "gpt2", _gpt2),
    ("llama", "LlamaForCausalLM", "llama", _llama),
    ("mistral", "MistralForCausalLM", "mistral", _mistral),
    ("qwen2", "Qwen2ForCausalLM", "qwen2", _qwen2),
    ("qwen3", "Qwen3ForCausalLM", "qwen3", _qwen3),
    ("gemma2", "Gemma2ForCausalLM", "gemma2", _gemma2),
    ("gemma3_text", "Gemma3ForCausalLM", "gemma3", _gemma3),
    ("mixtral", "MixtralForCausalLM", "mixtral", _mixtral),
    ("qwen3_moe", "Qwen3MoeForCausalLM", "qwen3-moe", _qwen3_moe),
    ("deepseek_v3", "DeepseekV3ForCausalLM", "deepseek-v3", _deepseek_v3),
)
_BY_TYPE = {model_type: (family, reader) for model_type, _, family, reader in _KNOWN}
_TYPE_OF = {architecture: model_type for model_type, architecture, _, _ in _KNOWN}


def read_config(source: object, *, name: str | None = None) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face configuration; see `lablib.calc.models.from_hf`.

    Args:
        source: The configuration as a dictionary, or the path of a config.json or of the folder that holds it.
        name: How to call it.

    Raises:
        ValueError: If the architecture is unknown, or a field is missing or strange; it names the field.
    """
    fields = source if isinstance(source, dict) else _load(source)
    model_type = fields.get("model_type")
    if model_type is None:
        architectures = fields.get("architectures") or [None]
        model_type = _TYPE_OF.get(architectures[0], architectures[0])
    if model_type is None:
        raise ValueError("model_type is missing, and architectures too: this is not a model's config.json")
    # An image-and-text Gemma 3 keeps its decoder one level down; the decoder is what is counted.
    if model_type == "gemma3" and isinstance(fields.get("text_config"), dict):
        fields, model_type = fields["text_config"], "gemma3_text"
    if model_type not in _BY_TYPE:
        raise ValueError(
            f"unknown architecture: model_type is {model_type!r}; known are {', '.join(_BY_TYPE)}"
        )
    family, reader = _BY_TYPE[model_type]
    f = _Fields(fields, f"config of model_type {model_type}")
    f.only("is_encoder_decoder", False, None, why="only decoders are known")
    sizes = reader(f)
    try:
        return ModelConfig(name=name or fields.get("_name_or_path") or model_type, family=family, **sizes)
    except ValueError as error:
        raise ValueError(f"{f.where}: {error}") from None


def _load(source: object) -> dict:
    import json
    from os import PathLike
    from pathlib import Path

    if not isinstance(source, str | PathLike):
        raise ValueError(f"{type(source).__name__} is neither a dictionary nor the path of a config.json")
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds a {type(fields).__name__} and not a dictionary of fields")
    return fields
