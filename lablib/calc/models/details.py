"""What changes no size and yet makes another model: rotary positions, the router, the epsilon of norms.

The calculators do without these; an exporter that leaves them to a framework's defaults trains another model in silence.
Read `Rotary` and `Router` first.

`DETAILS` repeats the models' own config.json as public repositories hold copies of it (secondary; one size of each row
was looked up), and for DeepSeek-V3 its paper (arXiv 2412.19437, sections 4.2 and 4.3: positions, routing, and a balance
loss of 0.0001 in a sequence).
A preset that is not listed has none of them, and an exporter that needs one says so.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary positions.

    Attributes:
        base: The base of the frequencies, `rope_theta`.
        scaling: "none", "llama3", "yarn", or another `rope_type` of transformers.
        factor: How far `scaling` stretches positions.
        original: Longest sequence before it was stretched; 0 where nothing is scaled.
        low, high: Llama 3: `low_freq_factor` and `high_freq_factor`. YaRN: `beta_slow` and `beta_fast`.
        mscale: YaRN with latent attention: `mscale` and `mscale_all_dim`.
        share: Share of a head that is rotated, `partial_rotary_factor`.
    """

    base: float
    scaling: str = "none"
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 1.0
    mscale: tuple[float, float] = (1.0, 0.0)
    share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Router:
    """How a token finds its experts.

    Attributes:
        score: "softmax" or "sigmoid" of the router's logits.
        normalized: Whether the weights of the chosen experts sum to one.
        groups: Groups of experts of which a token visits `group_topk`; 0: no groups.
        scale: What the weights are multiplied with.
        bias: Whether a bias for each expert, updated outside of backward, balances their load.
        balance: "aux_loss" over a batch or "seq_aux_loss" over a sequence.
        coefficient: Of the balance loss; None where the configuration does not say.
    """

    score: str = "softmax"
    normalized: bool = True
    groups: int = 0
    group_topk: int = 0
    scale: float = 1.0
    bias: bool = False
    balance: str = "aux_loss"
    coefficient: float | None = None


def _llama3(factor: float) -> Rotary:
    return Rotary(base=500_000.0, scaling="llama3", factor=factor, original=8192, low=1.0, high=4.0)


_LLAMA_2 = {"norm_eps": 1e-5, "rotary": Rotary(base=10_000.0)}
_LLAMA_3 = {"norm_eps": 1e-5, "rotary": Rotary(base=500_000.0)}
_LLAMA_31 = {"norm_eps": 1e-5, "rotary": _llama3(8.0)}
_LLAMA_32 = {"norm_eps": 1e-5, "rotary": _llama3(32.0)}
_QWEN = {"norm_eps": 1e-6, "rotary": Rotary(base=1_000_000.0)}
_GPT = {"norm_eps": 1e-5}

DETAILS: dict[str, dict] = {
    **dict.fromkeys(("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt3-6.7b", "gpt3-175b"), _GPT),
    **dict.fromkeys(("llama-2-7b", "llama-2-13b", "llama-2-70b"), _LLAMA_2),
    **dict.fromkeys(("llama-3-8b", "llama-3-70b"), _LLAMA_3),
    "mistral-7b-v0.1": _LLAMA_2,
    **dict.fromkeys(("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"), _LLAMA_31),
    **dict.fromkeys(("llama-3.2-1b", "llama-3.2-3b"), _LLAMA_32),
    **dict.fromkeys(("qwen2-0.5b", "qwen2-7b", "qwen2.5-0.5b", "qwen2.5-7b"), _QWEN),
    **dict.fromkeys(("qwen3-0.6b", "qwen3-8b"), _QWEN),
    "mixtral-8x7b": {"norm_eps": 1e-5, "rotary": Rotary(base=1_000_000.0), "router": Router(coefficient=0.02)},
    **dict.fromkeys(("qwen3-30b-a3b", "qwen3-235b-a22b"), _QWEN | {"router": Router(coefficient=0.001)}),
    "deepseek-v3": {
        "norm_eps": 1e-6,
        "rotary": Rotary(
            base=10_000.0, scaling="yarn", factor=40.0, original=4096, low=1.0, high=32.0, mscale=(1.0, 1.0)
        ),
        "router": Router(
            score="sigmoid", groups=8, group_topk=4, scale=2.5, bias=True, balance="seq_aux_loss", coefficient=1e-4
        ),
    },
}


def read_details(fields: dict, family: str) -> dict:
    """Return what a Hugging Face configuration says of these; what is missing or strange is left out.

    Args:
        family: One of `FAMILIES`.
    """
    found = {}
    epsilon = _number(fields.get("rms_norm_eps", fields.get("layer_norm_epsilon")))
    if epsilon:
        found["norm_eps"] = epsilon
    rotary = _read_rotary(fields)
    if rotary:
        found["rotary"] = rotary
    router = _read_router(fields, family)
    if router:
        found["router"] = router
    return found


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _read_rotary(fields: dict) -> Rotary | None:
    """Rotary positions of transformers 5 (`rope_parameters`), or before it (`rope_theta` and `rope_scaling`)."""
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    given = given if isinstance(given, dict) else {}
    base = _number(given.get("rope_theta", fields.get("rope_theta")))
    if base is None:
        return None
    kind = given.get("rope_type", given.get("type", "default"))
    share = _number(given.get("partial_rotary_factor", fields.get("partial_rotary_factor"))) or 1.0
    if kind in ("default", None):
        return Rotary(base=base, share=share)
    low, high = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ("beta_slow", "beta_fast")
    return Rotary(
        base=base,
        scaling=str(kind),
        factor=_number(given.get("factor")) or 1.0,
        original=int(_number(given.get("original_max_position_embeddings")) or 0),
        low=_number(given.get(low)) or 1.0,
        high=_number(given.get(high)) or (32.0 if kind == "yarn" else 1.0),
        mscale=(_number(given.get("mscale")) or 1.0, _number(given.get("mscale_all_dim")) or 0.0),
        share=share,
    )


def _read_router(fields: dict, family: str) -> Router | None:
    coefficient = _number(fields.get("router_aux_loss_coef"))
    if family == "mixtral":
        return Router(coefficient=coefficient)
    normalized = fields.get("norm_topk_prob")
    if not isinstance(normalized, bool):
        return None
    if family == "qwen3-moe":
        return Router(normalized=normalized, coefficient=coefficient)
    groups, chosen, scale = (_number(fields.get(n)) for n in ("n_group", "topk_group", "routed_scaling_factor"))
    if family != "deepseek-v3" or groups is None or chosen is None or scale is None:
        return None
    return Router(
        score="sigmoid",
        normalized=normalized,
        groups=int(groups),
        group_topk=int(chosen),
        scale=scale,
        bias=True,
        balance="seq_aux_loss",
        coefficient=_number(fields.get("aux_loss_alpha")),
    )
