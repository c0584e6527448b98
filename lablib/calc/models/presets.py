"""Published models as ModelConfig fields.

Each row repeats the model's own `config.json`, or the table of its paper where there is none.
The counts that `lablib.calc.params` makes of them are held to the published totals by tests.
"""

from __future__ import annotations

from lablib.calc.errors import shown
from lablib.calc.models.config import ModelConfig
from lablib.calc.models.details import DETAILS


def _gpt(layers: int, hidden: int, heads: int, *, positions: int = 1024) -> dict:
    """GPT-2 (Radford et al. 2019) and GPT-3 (2005.14165, table 2.1): MLP of width 4h, tied output."""
    return {
        "family": "gpt2",
        "num_layers": layers,
        "hidden": hidden,
        "num_heads": heads,
        "ffn": 4 * hidden,
        "vocab": 50257,
        "max_positions": positions,
        "learned_positions": True,
        "tied": True,
        "norm": "layernorm",
        "gated_mlp": False,
        "qkv_bias": True,
        "attn_out_bias": True,
        "mlp_bias": True,
    }


_SIZES = ("num_layers", "hidden", "num_heads", "num_kv_heads", "ffn", "vocab", "max_positions")


def _rotary(family: str, *sizes: int, **more: object) -> dict:
    """The Llama shape: RMSNorm, rotary positions, gated MLP, no biases; `sizes` as in `_SIZES`, `more` what differs."""
    return {"family": family, **dict(zip(_SIZES, sizes, strict=True)), **more}


def _window(window: int, layers: int, every: int = 0) -> dict:
    """A sliding window in all layers, or in all but every so many."""
    return {"window": window, "window_layers": tuple(i for i in range(layers) if not every or (i + 1) % every)}


def _gemma(family: str, *sizes: int, **more: object) -> dict:
    """Gemma 1 (2403.08295, table 1), 2 (2408.00118, table 1) and 3 (2503.19786): tied; last the head's width."""
    norms = 2 if family == "gemma" else 4  # before and after each half
    same = {"tied": True, "norms_per_layer": norms, "qk_norm": family == "gemma3"}
    return _rotary(family, *sizes[:-1], head_dim=sizes[-1], **same, **more)


def _pythia(layers: int, hidden: int, heads: int) -> dict:
    """Pythia (2304.01373, table 1): MLP of width 4h beside attention, a quarter of each head turned."""
    head = {"rotary_dim": hidden // heads // 4, "parallel_block": True}
    return _rotary("gpt-neox", layers, hidden, heads, heads, 4 * hidden, 50304, 2048, **_PLAIN, **_BIASES, **head)


#: LayerNorm and two matrices in an MLP; biases on every matrix.
_PLAIN = {"norm": "layernorm", "gated_mlp": False}
_BIASES = {"qkv_bias": True, "attn_out_bias": True, "mlp_bias": True}
#: Command R: one LayerNorm without shift, read by attention and MLP alike.
_COHERE = {"tied": True, "norm": "layernorm-no-bias", "norms_per_layer": 1, "parallel_block": True}
#: Qwen3's mixtures of experts (2505.09388, table 2).
_QWEN3_MOE = {"head_dim": 128, "qk_norm": True, "num_experts": 128, "experts_per_token": 8}


def _gpt_oss(layers: int, experts: int) -> dict:
    """GPT-OSS: biases, a sink a head, every other layer in a window of 128."""
    more = {"num_experts": experts, "experts_per_token": 4, "expert_ffn": 2880, "router_bias": True}
    sizes = (layers, 2880, 64, 8, 2880, 201088, 131072)
    return _rotary("gpt-oss", *sizes, head_dim=64, attention_sinks=True, **_BIASES, **more, **_window(128, layers, 2))


PRESETS: dict[str, dict] = {
    "gpt2": _gpt(12, 768, 12),
    "gpt2-medium": _gpt(24, 1024, 16),
    "gpt2-large": _gpt(36, 1280, 20),
    "gpt2-xl": _gpt(48, 1600, 25),
    "gpt3-6.7b": _gpt(32, 4096, 32, positions=2048),
    "gpt3-175b": _gpt(96, 12288, 96, positions=2048),
    # Llama 1 (2302.13971), 2 (2307.09288), 3 (2407.21783, table 3).
    "llama-1-65b": _rotary("llama", 80, 8192, 64, 64, 22016, 32000, 2048),
    "llama-2-7b": _rotary("llama", 32, 4096, 32, 32, 11008, 32000, 4096),
    "llama-2-13b": _rotary("llama", 40, 5120, 40, 40, 13824, 32000, 4096),
    "llama-2-70b": _rotary("llama", 80, 8192, 64, 8, 28672, 32000, 4096),
    "llama-3-8b": _rotary("llama", 32, 4096, 32, 8, 14336, 128256, 8192),
    "llama-3-70b": _rotary("llama", 80, 8192, 64, 8, 28672, 128256, 8192),
    "llama-3.1-8b": _rotary("llama", 32, 4096, 32, 8, 14336, 128256, 131072),
    "llama-3.1-70b": _rotary("llama", 80, 8192, 64, 8, 28672, 128256, 131072),
    "llama-3.1-405b": _rotary("llama", 126, 16384, 128, 8, 53248, 128256, 131072),
    "llama-3.2-1b": _rotary("llama", 16, 2048, 32, 8, 8192, 128256, 131072, tied=True),
    "llama-3.2-3b": _rotary("llama", 28, 3072, 24, 8, 8192, 128256, 131072, tied=True),
    "mistral-7b-v0.1": _rotary("mistral", 32, 4096, 32, 8, 14336, 32000, 32768, **_window(4096, 32)),
    "qwen2-0.5b": _rotary("qwen2", 24, 896, 14, 2, 4864, 151936, 131072, tied=True, qkv_bias=True),
    "qwen2-7b": _rotary("qwen2", 28, 3584, 28, 4, 18944, 152064, 131072, qkv_bias=True),
    "qwen2.5-0.5b": _rotary("qwen2", 24, 896, 14, 2, 4864, 151936, 32768, tied=True, qkv_bias=True),
    "qwen2.5-7b": _rotary("qwen2", 28, 3584, 28, 4, 18944, 152064, 131072, qkv_bias=True),
    "qwen2.5-72b": _rotary("qwen2", 80, 8192, 64, 8, 29568, 152064, 131072, qkv_bias=True),
    "qwen3-0.6b": _rotary("qwen3", 28, 1024, 16, 8, 3072, 151936, 40960, head_dim=128, tied=True, qk_norm=True),
    "qwen3-8b": _rotary("qwen3", 36, 4096, 32, 8, 12288, 151936, 40960, head_dim=128, qk_norm=True),
    "gemma-2b": _gemma("gemma", 18, 2048, 8, 1, 16384, 256000, 8192, 256),
    "gemma-7b": _gemma("gemma", 28, 3072, 16, 16, 24576, 256000, 8192, 256),
    "gemma-2-2b": _gemma("gemma2", 26, 2304, 8, 4, 9216, 256000, 8192, 256, **_window(4096, 26, 2)),
    "gemma-2-9b": _gemma("gemma2", 42, 3584, 16, 8, 14336, 256000, 8192, 256, **_window(4096, 42, 2)),
    "gemma-3-1b": _gemma("gemma3", 26, 1152, 4, 1, 6912, 262144, 32768, 256, **_window(512, 26, 6)),
    "pythia-410m": _pythia(24, 1024, 16),
    "pythia-1.4b": _pythia(24, 2048, 16),
    # OLMo 2 (2501.00656), Phi-3 (2404.14219), StarCoder 2 (2402.19173), Falcon (2311.16867): the models' config.json.
    "olmo-2-7b": _rotary(
        "olmo2", 32, 4096, 32, 32, 11008, 100352, 4096, post_norm=True, qk_norm=True, qk_norm_shared=False
    ),
    "olmo-2-13b": _rotary(
        "olmo2", 40, 5120, 40, 40, 13824, 100352, 4096, post_norm=True, qk_norm=True, qk_norm_shared=False
    ),
    "phi-3-mini": _rotary("phi3", 32, 3072, 32, 32, 8192, 32064, 4096, **_window(2047, 32)),
    "glm-4-9b-0414": _rotary(
        "glm4", 40, 4096, 32, 2, 13696, 151552, 32768, head_dim=128, qkv_bias=True, norms_per_layer=4, rotary_dim=64
    ),
    "starcoder2-3b": _rotary(
        "starcoder2", 30, 3072, 24, 2, 12288, 49152, 16384, tied=True, **_PLAIN, **_BIASES, **_window(4096, 30)
    ),
    "starcoder2-7b": _rotary(
        "starcoder2", 32, 4608, 36, 4, 18432, 49152, 16384, tied=True, **_PLAIN, **_BIASES, **_window(4096, 32)
    ),
    "falcon-7b": _rotary(
        "falcon", 32, 4544, 71, 1, 18176, 65024, 2048, tied=True, **_PLAIN, norms_per_layer=1, parallel_block=True
    ),
    "command-r": _rotary("cohere", 40, 8192, 64, 64, 22528, 256000, 8192, **_COHERE),
    "command-r7b": _rotary("cohere2", 32, 4096, 32, 8, 14336, 256000, 8192, **_COHERE, **_window(4096, 32, 4)),
    "mixtral-8x7b": _rotary(
        "mixtral", 32, 4096, 32, 8, 14336, 32000, 32768, num_experts=8, experts_per_token=2, expert_ffn=14336
    ),
    "mixtral-8x22b": _rotary(
        "mixtral", 56, 6144, 48, 8, 16384, 32000, 65536, num_experts=8, experts_per_token=2, expert_ffn=16384
    ),
    "qwen3-30b-a3b": _rotary("qwen3-moe", 48, 2048, 32, 4, 6144, 151936, 40960, **_QWEN3_MOE, expert_ffn=768),
    "qwen3-235b-a22b": _rotary("qwen3-moe", 94, 4096, 64, 4, 12288, 151936, 40960, **_QWEN3_MOE, expert_ffn=1536),
    # GPT-OSS (2508.10925, table 1).
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    # DeepSeek-V2-Lite (2405.04434, appendix B).
    "deepseek-v2-lite": _rotary(
        "deepseek-v2",
        27,
        2048,
        16,
        16,
        10944,
        102400,
        163840,
        num_experts=64,
        experts_per_token=6,
        expert_ffn=1408,
        num_shared_experts=2,
        num_dense_layers=1,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
    # DeepSeek-V3 (2412.19437, section 4.2), without its multi-token prediction module.
    "deepseek-v3": _rotary(
        "deepseek-v3",
        61,
        7168,
        128,
        128,
        18432,
        129280,
        163840,
        num_experts=256,
        experts_per_token=8,
        expert_ffn=2048,
        num_shared_experts=1,
        num_dense_layers=3,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
}


def nearest_presets(name: str) -> list[str]:
    """Return the presets that a name may mean, also one of a Hub: "meta-llama/Meta-Llama-3-8B-Instruct"."""
    import difflib  # 10 ms that only a mistake should pay

    text = name.lower().rpartition("/")[2].removeprefix("meta-")
    inside = [key for key in PRESETS if f"{text}-".startswith(f"{key}-")]
    return [max(inside, key=len)] if inside else difflib.get_close_matches(text, PRESETS, n=3)


def preset(name: str) -> ModelConfig:
    """Return a published model by name, for example "llama-3-8b"; ValueError suggests close names."""
    if name not in PRESETS:
        text = str(name)
        hint = f"did you mean {', '.join(nearest_presets(text) or sorted(PRESETS))}?"
        if "/" in text:
            hint += " Nothing is fetched from a Hub: of any other model give the path of its config.json"
        raise ValueError(f"unknown model {shown(name)}; {hint}")
    return ModelConfig(name=name, **PRESETS[name], **DETAILS.get(name, {}))


def preset_names() -> list[str]:
    """Return the names that `preset` knows, in the order of the table."""
    return list(PRESETS)
