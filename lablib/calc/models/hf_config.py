"""Reading a Hugging Face `config.json` into a ModelConfig; every complaint names the field. Read `from_hf` first.

A field that fixes a size must be there: a silent default would give a wrong count. Fields that transformers itself
derives may be missing or null, and get what transformers would use: `num_key_value_heads` (as many as query heads,
in the Llama family), `head_dim` (hidden size over heads), `n_inner` (four times the width). Missing biases are none,
and a missing `tie_word_embeddings` is what the family does. JSON is not typed, so a number may come as text, as null,
as 4096.0 or as true; none of these is taken for a size.

An image-and-text Gemma 3 keeps its decoder under `text_config` and leaves out what is the class's default there; the
decoder is what is counted, without the part that sees.

What changes the model in a way that is not counted is refused: cross-attention, experts in every other layer, another
head. What changes no size is read by `details` where an exporter needs it, and passed over otherwise: sliding windows
(`flops` counts full attention), softcaps, activation functions, dtypes, `quantization_config` (how a checkpoint is
stored; the recipe says how it is trained), and DeepSeek's `num_nextn_predict_layers`, which its published 671B leave
out too.
"""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path

from lablib.calc.models.config import ModelConfig
from lablib.calc.models.details import read_details

#: A default that says: the field must be there.
REQUIRED = object()


#: Larger numbers are mistakes, and layers are counted one by one.
LARGEST, MOST_LAYERS = 2**40, 100_000


class Fields:
    """The fields of one configuration."""

    def __init__(self, fields: dict, where: str, defaults: dict[str, object] | None = None) -> None:
        self.fields, self.where, self.defaults = fields, where, defaults or {}

    def error(self, field: str, problem: str) -> ValueError:
        """Return the error that says what is wrong with a field."""
        return ValueError(f"{self.where}: {field} {problem}")

    def whole(self, *names: str, default: object = REQUIRED, least: int = 1, most: int = LARGEST) -> int:
        """Return the whole number under the first of these names that is there; null counts as missing."""
        there = [name for name in names if self.fields.get(name) is not None]
        if not there:
            default = self.defaults.get(names[0], default)
            if default is REQUIRED:
                state = "is null" if any(name in self.fields for name in names) else "is missing"
                raise self.error(names[0], f"{state} and must be a whole number")
            return default
        for name in there:
            value = self.fields[name]
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                large = isinstance(value, int) and value > most
                end = f" and at most {most:,}" if large or most != LARGEST else ""
                raise self.error(name, f"is {shown(value)} and must be a whole number, at least {least}{end}")
            if value != self.fields[there[0]]:
                first = f"{there[0]}={self.fields[there[0]]}"
                raise self.error(name, f"is {value} and contradicts {first}, which is the same field")
        return self.fields[there[0]]

    def needed(self, name: str, *, null: bool) -> None:
        """Refuse a field that is missing, or one that is null, where only the other of the two means something."""
        if null and name not in self.fields and name not in self.defaults:
            raise self.error(name, "is missing; null has a meaning, but a missing field has none")
        if not null and name in self.fields and self.fields[name] is None:
            raise self.error(name, "is null and must be a whole number")

    def flag(self, name: str, default: bool) -> bool:
        """Return a field that is true or false; only a missing one means the default."""
        value = self.fields.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"is {shown(value)} and must be true or false")
        return value

    def only(self, name: str, *allowed: object, why: str) -> None:
        """Refuse a field that changes the model in a way that is not counted."""
        value = self.fields.get(name, allowed[0])
        if not any(value is one or (type(value) is type(one) and value == one) for one in allowed):
            raise self.error(name, f"is {shown(value)}: {why}")

    def divides(self, name: str, value: int, of: str, size: int) -> None:
        """Refuse a number that does not divide another one."""
        if size % value:
            raise self.error(name, f"is {value} and does not divide {of}={size}")

    def at_most(self, name: str, value: int, of: str, size: int) -> None:
        """Refuse a number that is larger than another one."""
        if value > size:
            raise self.error(name, f"is {value} and more than {of}={size}")


def shown(value: object) -> str:
    """Return a value as Python writes it, cut short."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def load(source: object) -> dict:
    """Return the fields of a file."""
    if not isinstance(source, str | PathLike):
        raise ValueError(f"{type(source).__name__} is neither a dictionary nor the path of a config.json")
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except RecursionError:
        raise ValueError(f"{path} is not a config.json: it is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds a {type(fields).__name__} and not a dictionary of fields")
    return fields


def _gpt2(f: Fields) -> dict:
    f.only("add_cross_attention", False, None, why="cross-attention is not counted")
    hidden = f.whole("n_embd", "hidden_size")
    heads = f.whole("n_head", "num_attention_heads")
    f.divides("n_head", heads, "n_embd", hidden)
    return {
        "num_layers": f.whole("n_layer", "num_hidden_layers", most=MOST_LAYERS),
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


def _decoder(
    f: Fields, *, positions: int, kv_heads: object = REQUIRED, head_dim: object = 0, tied: bool = False
) -> dict:
    """What every rotary family shares; the arguments are what a missing field means."""
    hidden, heads = f.whole("hidden_size"), f.whole("num_attention_heads")
    f.needed("max_position_embeddings", null=False)
    fields = {
        "num_layers": f.whole("num_hidden_layers", most=MOST_LAYERS),
        "hidden": hidden,
        "num_heads": heads,
        "num_kv_heads": f.whole("num_key_value_heads", default=kv_heads) or heads,
        "head_dim": f.whole("head_dim", default=head_dim),
        "ffn": f.whole("intermediate_size"),
        "vocab": f.whole("vocab_size"),
        "max_positions": f.whole("max_position_embeddings", default=positions),
        "tied": f.flag("tie_word_embeddings", tied),
    }
    f.divides("num_key_value_heads", fields["num_kv_heads"], "num_attention_heads", heads)
    if not fields["head_dim"] and hidden % heads:
        raise f.error("head_dim", f"is missing, and num_attention_heads={heads} does not divide hidden_size={hidden}")
    return fields


def _attention_bias(f: Fields) -> dict:
    bias = f.flag("attention_bias", False)
    return {"qkv_bias": bias, "attn_out_bias": bias}


def _llama(f: Fields) -> dict:
    return _decoder(f, positions=2048, kv_heads=0) | _attention_bias(f) | {"mlp_bias": f.flag("mlp_bias", False)}


def _mistral(f: Fields) -> dict:
    return _decoder(f, positions=131072)


def _qwen2(f: Fields) -> dict:
    return _decoder(f, positions=32768) | {"qkv_bias": True}


def _qwen3(f: Fields) -> dict:
    return _decoder(f, positions=32768, head_dim=REQUIRED) | _attention_bias(f) | {"qk_norm": True}


def _gemma2(f: Fields, positions: int = 8192) -> dict:
    return _decoder(f, positions=positions, head_dim=REQUIRED, tied=True) | _attention_bias(f) | {"norms_per_layer": 4}


def _gemma3(f: Fields) -> dict:
    return _gemma2(f, positions=131072) | {"qk_norm": True}


def _experts(f: Fields, *names: str) -> dict:
    """Routed experts under one of these names, and how many of them a token visits."""
    experts, visited = f.whole(*names), f.whole("num_experts_per_tok")
    f.at_most("num_experts_per_tok", visited, names[0], experts)
    return {"num_experts": experts, "experts_per_token": visited}


def _mixtral(f: Fields) -> dict:
    return _decoder(f, positions=131072) | {
        **_experts(f, "num_local_experts", "num_experts"),
        "expert_ffn": f.whole("intermediate_size"),
    }


def _qwen3_moe(f: Fields) -> dict:
    f.only("decoder_sparse_step", 1, why="only models with experts in every layer after the dense ones are known")
    dense = f.fields.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise f.error("mlp_only_layers", f"is {shown(dense)} and must be a list: only the first layers may be dense")
    f.at_most("mlp_only_layers", len(dense), "num_hidden_layers", f.whole("num_hidden_layers"))
    return (
        _decoder(f, positions=32768)
        | _attention_bias(f)
        | {
            "qk_norm": True,
            **_experts(f, "num_experts", "num_local_experts"),
            "expert_ffn": f.whole("moe_intermediate_size"),
            "num_dense_layers": len(dense),
        }
    )


def _deepseek_v3(f: Fields) -> dict:
    f.only("moe_layer_freq", 1, None, why="only models with experts in every layer after the dense ones are known")
    f.needed("q_lora_rank", null=True)  # null: queries without a latent
    f.needed("num_key_value_heads", null=True)  # null: as many as query heads
    nope = f.whole("qk_nope_head_dim", least=0)
    rope = f.whole("qk_rope_head_dim")
    heads = f.whole("num_attention_heads")
    dense = f.whole("first_k_dense_replace", least=0)
    f.at_most("first_k_dense_replace", dense, "num_hidden_layers", f.whole("num_hidden_layers"))
    if f.whole("num_key_value_heads", default=heads) != heads:
        raise f.error("num_key_value_heads", f"must equal num_attention_heads={heads} with latent attention")
    return (
        _decoder(f, positions=4096, kv_heads=0)
        | _attention_bias(f)
        | {
            # Configurations carry a head_dim of their own here (the rotary part's); the parts decide.
            "head_dim": nope + rope,
            **_experts(f, "n_routed_experts", "num_local_experts", "num_experts"),
            "expert_ffn": f.whole("moe_intermediate_size"),
            "num_shared_experts": f.whole("n_shared_experts", least=0),
            "num_dense_layers": dense,
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


#: What transformers 5 takes for fields that an image-and-text Gemma 3 leaves out under `text_config`.
_GEMMA3_TEXT = {
    "hidden_size": 2304,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "vocab_size": 262208,
}


#: Heads that are not a language model's, by the end of their class's name.
_OTHER_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "RewardModel")


def from_hf(source: object, *, name: str | None = None) -> ModelConfig:
    """Return the ModelConfig of a Hugging Face configuration.

    Args:
        source: The dictionary, or the path of a config.json or of its folder.
        name: What to call the model; by default what the configuration calls itself.

    Raises:
        ValueError: If the architecture is unknown, or a field is missing or strange; it names the field.
    """
    fields = source if isinstance(source, dict) else load(source)
    own_name = fields.get("_name_or_path")
    model_type = _model_type(fields)
    where, defaults = f"config of model_type {model_type}", {}
    if model_type == "gemma3":
        fields, model_type, defaults = _text_part(fields), "gemma3_text", _GEMMA3_TEXT
        where += ", text_config"
    family, reader = _BY_TYPE[model_type]
    f = Fields(fields, where, defaults)
    f.only("is_encoder_decoder", False, None, why="only decoders are known")
    sizes = reader(f)
    if name is None:
        usable = isinstance(own_name, str) and own_name.strip() and own_name.isprintable()
        name = own_name if usable else model_type
    try:
        return ModelConfig(name=name, family=family, **sizes, **read_details(fields, family))
    except ValueError as error:
        raise ValueError(f"{f.where}: {error}") from None


def _model_type(fields: dict) -> str:
    """The model type, or what the class in `architectures` says."""
    architectures = fields.get("architectures")
    if architectures is None:
        architectures = []
    if not isinstance(architectures, list) or not all(isinstance(one, str) for one in architectures):
        raise ValueError(f"architectures is {shown(architectures)} and must be a list of names of classes")
    for one in architectures:
        if one.endswith(_OTHER_HEADS):
            raise ValueError(f"architectures is {shown(architectures)}: only the head of a language model is counted")
    model_type = fields.get("model_type")
    if model_type is None:
        if not architectures:
            raise ValueError("model_type is missing, and architectures too: this is not a model's config.json")
        model_type = _TYPE_OF.get(architectures[0], architectures[0])
    if isinstance(model_type, str) and (model_type in _BY_TYPE or model_type == "gemma3"):
        return model_type
    message = f"unknown architecture: model_type is {shown(model_type)}; known are {', '.join(_BY_TYPE)}"
    inside = fields.get("text_config")
    if isinstance(inside, dict):
        message += f"; its text_config has model_type {shown(inside.get('model_type'))}: give that part alone"
    raise ValueError(message)


def _text_part(fields: dict) -> dict:
    """The decoder of an image-and-text Gemma 3, with the tie that the whole model declares."""
    where = "config of model_type gemma3"
    text = fields.get("text_config")
    if not isinstance(text, dict):
        problem = "is missing" if text is None else f"is {shown(text)}"
        raise ValueError(f"{where}: text_config {problem} and must be an object with the decoder's fields")
    if text.get("model_type", "gemma3_text") != "gemma3_text":
        raise ValueError(f"{where}, text_config: model_type is {shown(text['model_type'])}, not 'gemma3_text'")
    tie = "tie_word_embeddings"
    if tie in fields and text.get(tie, fields[tie]) != fields[tie]:
        raise ValueError(f"{where}: {tie} is {shown(fields[tie])}, and {shown(text[tie])} in text_config")
    return {tie: fields[tie]} | text if tie in fields else text
