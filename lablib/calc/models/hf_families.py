"""What each family's fields mean, as its class in transformers reads them: one function a `model_type`.

`_decoder` has what rotary families share; a reader adds what its own family has. Read `_llama` first, then `KNOWN`.

Source: transformers 5, models/*/configuration_*.py and modeling_*.py.
"""

from __future__ import annotations

from lablib.calc.errors import shown
from lablib.calc.models.hf_fields import MOST_LAYERS, REQUIRED, Fields


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


#: Values of `layer_types`, and whether such a layer has the window.
_LAYER_TYPES = {"full_attention": False, "sliding_attention": True}


def _windows(f: Fields, default: int | None, layers: list[bool] | None = None) -> dict:
    """The sliding window and the layers that have it.

    Args:
        default: What a missing `sliding_window` means.
        layers: Which layers have it where `layer_types` says nothing; None: all, and `layer_types` is not asked.
    """
    window = f.whole("sliding_window", default=0) if "sliding_window" in f.fields else default or 0
    number = f.whole("num_hidden_layers", most=MOST_LAYERS)
    has = [True] * number if layers is None else layers
    types = f.get("layer_types") if layers is not None else None
    if types is not None:
        known = isinstance(types, list) and all(isinstance(one, str) and one in _LAYER_TYPES for one in types)
        if not known or len(types) != number:
            raise f.error(
                "layer_types", f"is {shown(types)} and must be a list of {number} of {', '.join(_LAYER_TYPES)}"
            )
        has = [_LAYER_TYPES[one] for one in types]
    found = tuple(i for i, one in enumerate(has) if one) if window else ()
    return {"window": window if found else 0, "window_layers": found}


def _switched_windows(f: Fields) -> dict:
    """Qwen's: off unless `use_sliding_window` says so, and then in the layers behind the first `max_window_layers`."""
    on, number = f.flag("use_sliding_window", False), f.whole("num_hidden_layers", most=MOST_LAYERS)
    first = f.whole("max_window_layers", default=28, least=0)
    found = _windows(f, 4096, [i >= first for i in range(number)])  # refuses kinds of layers that nobody counts
    return found if on else {}


def _every(f: Fields, pattern: int) -> list[bool]:
    """Windows in all layers but every so many, from which on `pattern` counts; `sliding_window_pattern` if it is there."""
    pattern = f.whole("sliding_window_pattern", default=pattern)
    return [bool((i + 1) % pattern) for i in range(f.whole("num_hidden_layers", most=MOST_LAYERS))]


def _rotary_part(f: Fields, head_dim: int, *names: str, default: float = 1.0) -> dict:
    """The part of a head that is turned: `partial_rotary_factor`, alone or among the rotary parameters."""
    places = [f.get("rope_parameters"), f.get("rope_scaling"), f.fields]
    found = [
        (name, place[name])
        for place in places
        if isinstance(place, dict)
        for name in ("partial_rotary_factor", *names)
        if place.get(name) is not None
    ]
    name, part = found[0] if found else ("", default)
    if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= 1:
        raise f.error(name, f"is {shown(part)} and must be a number above 0 and at most 1")
    turned = int(head_dim * part)
    return {"rotary_dim": turned if turned != head_dim else 0}


def _plain_mlp(bias: bool) -> dict:
    """LayerNorm, two matrices in an MLP, and biases everywhere or nowhere."""
    biases = dict.fromkeys(("qkv_bias", "attn_out_bias", "mlp_bias"), bias)
    return {"norm": "layernorm", "gated_mlp": False} | biases


def _llama(f: Fields) -> dict:
    return _decoder(f, positions=2048, kv_heads=0) | _attention_bias(f) | {"mlp_bias": f.flag("mlp_bias", False)}


def _mistral(f: Fields) -> dict:
    return _decoder(f, positions=131072) | _windows(f, 4096)


def _qwen2(f: Fields) -> dict:
    f.get("attention_bias")  # q, k and v have biases whatever it says
    return _decoder(f, positions=32768) | {"qkv_bias": True} | _switched_windows(f)


def _qwen3(f: Fields) -> dict:
    sizes = _decoder(f, positions=32768, head_dim=REQUIRED)
    return sizes | _attention_bias(f) | {"qk_norm": True} | _switched_windows(f)


def _gemma(f: Fields, positions: int = 8192) -> dict:
    f.only("use_bidirectional_attention", False, None, why="only models that look back alone are counted")
    return _decoder(f, positions=positions, head_dim=REQUIRED, tied=True) | _attention_bias(f)


def _gemma2(f: Fields, positions: int = 8192, pattern: int = 2) -> dict:
    return _gemma(f, positions) | {"norms_per_layer": 4} | _windows(f, 4096, _every(f, pattern))


def _gemma3(f: Fields) -> dict:
    return _gemma2(f, positions=131072, pattern=6) | {"qk_norm": True}


def _olmo2(f: Fields) -> dict:
    more = {"post_norm": True, "qk_norm": True, "qk_norm_shared": False}
    return _decoder(f, positions=2048, kv_heads=0) | _attention_bias(f) | more


def _phi3(f: Fields) -> dict:
    sizes = _decoder(f, positions=4096, kv_heads=0)
    head_dim = sizes["head_dim"] or sizes["hidden"] // sizes["num_heads"]
    return sizes | _rotary_part(f, head_dim) | _windows(f, None)


def _glm4(f: Fields) -> dict:
    sizes = _decoder(f, positions=131072, head_dim=REQUIRED)
    more = {"qkv_bias": f.flag("attention_bias", True), "norms_per_layer": 4}
    return sizes | more | _rotary_part(f, sizes["head_dim"], default=0.5)


def _starcoder2(f: Fields) -> dict:
    sizes = _decoder(f, positions=4096, tied=True)
    return sizes | _plain_mlp(f.flag("use_bias", True)) | _windows(f, None)


def _gpt_neox(f: Fields) -> dict:
    sizes = _decoder(f, positions=2048, kv_heads=0)
    if sizes["num_kv_heads"] != sizes["num_heads"] or sizes["head_dim"]:
        name = "head_dim" if sizes["head_dim"] else "num_key_value_heads"
        raise f.error(name, "is not a field of this family: every head has its own key, and hidden_size is divided")
    bias = f.flag("attention_bias", True)
    return (
        sizes
        | _plain_mlp(True)
        | {"qkv_bias": bias, "attn_out_bias": bias, "parallel_block": f.flag("use_parallel_residual", True)}
        | _rotary_part(f, sizes["hidden"] // sizes["num_heads"], "rotary_pct", default=0.25)
    )


def _falcon(f: Fields) -> dict:
    hidden, heads = f.whole("hidden_size"), f.whole("num_attention_heads")
    f.divides("num_attention_heads", heads, "hidden_size", hidden)
    grouped, single = f.flag("new_decoder_architecture", False), f.flag("multi_query", True)
    # The older form has one key head or as many as query heads, whatever num_kv_heads says.
    groups = f.whole("num_kv_heads", default=heads)
    groups = groups if grouped else 1 if single else heads
    f.divides("num_kv_heads", groups, "num_attention_heads", heads)
    parallel = f.flag("parallel_attn", True)
    f.needed("max_position_embeddings", null=False)
    norms = f.whole("num_ln_in_parallel_attn", default=2 if grouped else 1)
    f.at_most("num_ln_in_parallel_attn", norms, "the norms of a parallel block", 2)
    f.only("alibi", False, None, why="only rotary positions are counted")
    return _plain_mlp(f.flag("bias", False)) | {
        "num_layers": f.whole("num_hidden_layers", most=MOST_LAYERS),
        "hidden": hidden,
        "num_heads": heads,
        "num_kv_heads": groups,
        "ffn": f.whole("ffn_hidden_size", default=4 * hidden),
        "vocab": f.whole("vocab_size"),
        "max_positions": f.whole("max_position_embeddings", default=2048),
        "tied": f.flag("tie_word_embeddings", True),
        "parallel_block": parallel,
        "norms_per_layer": norms if parallel else 2,
    }


def _cohere(f: Fields) -> dict:
    norm = {"norm": "layernorm-no-bias", "norms_per_layer": 1, "parallel_block": True}
    qk = {"qk_norm": True, "qk_norm_shared": False} if f.flag("use_qk_norm", False) else {}
    return _decoder(f, positions=8192, kv_heads=0, tied=True) | _attention_bias(f) | norm | qk


def _cohere2(f: Fields) -> dict:
    f.only("use_qk_norm", False, None, why="this family has no norms on q and k")
    return _cohere(f) | _windows(f, 4096, _every(f, 4))


def _experts(f: Fields, *names: str) -> dict:
    """Routed experts under one of these names, and how many of them a token visits."""
    experts, visited = f.whole(*names), f.whole("num_experts_per_tok")
    f.at_most("num_experts_per_tok", visited, names[0], experts)
    return {"num_experts": experts, "experts_per_token": visited}


def _mixtral(f: Fields) -> dict:
    return _decoder(f, positions=131072) | {
        **_experts(f, "num_local_experts", "num_experts"),
        "expert_ffn": f.whole("intermediate_size"),
        **_windows(f, None),
    }


def _gpt_oss(f: Fields) -> dict:
    bias = f.flag("attention_bias", True)
    return _decoder(f, positions=131072, head_dim=REQUIRED) | {
        **_experts(f, "num_local_experts", "num_experts"),
        "expert_ffn": f.whole("intermediate_size"),
        **dict.fromkeys(("qkv_bias", "attn_out_bias"), bias),
        **dict.fromkeys(("mlp_bias", "router_bias", "attention_sinks"), True),
        **_windows(f, 128, _every(f, 2)),
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
            **(_windows(f, 4096) if f.flag("use_sliding_window", False) else {}),
        }
    )


def _deepseek_v2(f: Fields) -> dict:
    f.only("mlp_bias", False, None, why="biases of DeepSeek-V2's MLPs and not of its experts are not counted")
    return _deepseek_v3(f, positions=2048)


def _deepseek_v3(f: Fields, positions: int = 4096) -> dict:
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
        _decoder(f, positions=positions, kv_heads=0)
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
KNOWN = (
    ("gpt2", "GPT2LMHeadModel", "gpt2", _gpt2),
    ("llama", "LlamaForCausalLM", "llama", _llama),
    ("mistral", "MistralForCausalLM", "mistral", _mistral),
    ("qwen2", "Qwen2ForCausalLM", "qwen2", _qwen2),
    ("qwen3", "Qwen3ForCausalLM", "qwen3", _qwen3),
    ("gemma", "GemmaForCausalLM", "gemma", _gemma),
    ("gemma2", "Gemma2ForCausalLM", "gemma2", _gemma2),
    ("gemma3_text", "Gemma3ForCausalLM", "gemma3", _gemma3),
    ("olmo2", "Olmo2ForCausalLM", "olmo2", _olmo2),
    ("phi3", "Phi3ForCausalLM", "phi3", _phi3),
    ("glm4", "Glm4ForCausalLM", "glm4", _glm4),
    ("starcoder2", "Starcoder2ForCausalLM", "starcoder2", _starcoder2),
    ("gpt_neox", "GPTNeoXForCausalLM", "gpt-neox", _gpt_neox),
    ("falcon", "FalconForCausalLM", "falcon", _falcon),
    ("cohere", "CohereForCausalLM", "cohere", _cohere),
    ("cohere2", "Cohere2ForCausalLM", "cohere2", _cohere2),
    ("mixtral", "MixtralForCausalLM", "mixtral", _mixtral),
    ("qwen3_moe", "Qwen3MoeForCausalLM", "qwen3-moe", _qwen3_moe),
    ("gpt_oss", "GptOssForCausalLM", "gpt-oss", _gpt_oss),
    ("deepseek_v2", "DeepseekV2ForCausalLM", "deepseek-v2", _deepseek_v2),
    ("deepseek_v3", "DeepseekV3ForCausalLM", "deepseek-v3", _deepseek_v3),
)


BY_TYPE = {model_type: (family, reader) for model_type, _, family, reader in KNOWN}


TYPE_OF = {architecture: model_type for model_type, architecture, _, _ in KNOWN}


#: Fields with which other families have other parameters, or a block of another shape. A class that does not read one
#: ignores it; a checkpoint that has it was not made by that class, and is refused.
UNREAD = (
    *("add_cross_attention", "alibi", "attention_sinks", "bias", "use_bias", "qkv_bias", "lm_head_bias"),
    *("kv_lora_rank", "q_lora_rank", "n_routed_experts", "n_shared_experts", "num_experts", "num_local_experts"),
    *(
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "multi_query",
        "new_decoder_architecture",
        "num_ln_in_parallel_attn",
        "num_kv_heads",
    ),
    *("parallel_attn", "qk_layernorm", "qk_norm", "use_qk_norm", "use_parallel_residual", "post_norm"),
    *("use_post_attn_norm", "use_post_ffn_norm", "multi_latent_attention", "attention_bias", "mlp_bias"),
)


#: What transformers 5 takes for fields that an image-and-text Gemma 3 leaves out under `text_config`.
GEMMA3_TEXT = {
    "hidden_size": 2304,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "vocab_size": 262208,
}
