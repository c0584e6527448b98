"""How many parameters a model has, by component, exact to the unit.

A GPT block has `12 h² + 13 h` parameters: `4 h²` in attention, `8 h²` in the MLP, and biases and norms.
Every other family is the same sum with other matrices (`a` query heads, `a_kv` key and value heads of width `d`):

    attention   h a d + 2 h a_kv d + a d h                           (+ biases, + norms on q and k, + sinks)
    MLA         h r_q + r_q a d + h (r_kv + d_rope) + r_kv a (d_nope + d_v) + a d_v h
    MLP         2 h f, or 3 h f when gated
    experts     h E for the router, E times one expert, and the shared ones

"Active" means: the parameters that one token's forward pass goes through. It is the total less the routed experts
that the token does not visit. The token embedding counts in full, as it does in the total.
Buffers are not parameters: DeepSeek-V3's routing biases, which no gradient reaches, are left out.
So is its module for multi-token prediction, which is dropped after training.

Sources: Narayanan et al. 2021 (arXiv 2104.04473), equation 2, for the GPT sum; DeepSeek-AI 2024 (arXiv 2412.19437),
section 2.1, for MLA and shared experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.models import ModelConfig

COMPONENTS = (
    "embedding",
    "positions",
    "attention",
    "mlp",
    "router",
    "experts",
    "shared_experts",
    "norms",
    "final_norm",
    "head",
)


@dataclass(frozen=True)
class ParamCount:
    """Parameters of a model.

    Attributes:
        by_component: Parameters by the names in `COMPONENTS`; a tied head has 0, the embedding has them.
        active_by_component: The same for the parameters that one token visits.
    """

    by_component: dict[str, int]
    active_by_component: dict[str, int]

    @property
    def total(self) -> int:
        """All parameters, each counted once."""
        return sum(self.by_component.values())

    @property
    def active(self) -> int:
        """Parameters that one token visits; equal to `total` for a dense model."""
        return sum(self.active_by_component.values())


def embedding_params(config: ModelConfig) -> int:
    """Return the parameters of the token embedding, `V h`."""
    return config.vocab * config.hidden


def position_params(config: ModelConfig) -> int:
    """Return the parameters of a learned position table, `max_positions h`, or 0 with rotary positions."""
    return config.max_positions * config.hidden if config.learned_positions else 0


def norm_params(config: ModelConfig, width: int = 0) -> int:
    """Return the parameters of one norm: scale and shift with LayerNorm, scale with RMSNorm.

    Args:
        width: What it norms; `hidden` if 0.
    """
    return config.norm_tensors * (width or config.hidden)


def head_params(config: ModelConfig) -> int:
    """Return the parameters of the output head: 0 when it is tied to the token embedding, else `V h`."""
    return 0 if config.tied else embedding_params(config)


def attention_matrices(config: ModelConfig) -> int:
    """Return the weights of one layer's attention projections, without biases: what its matmuls multiply with."""
    h, heads, d = config.hidden, config.num_heads, config.head_dim
    if not config.is_mla:
        return h * config.q_width + 2 * h * config.kv_width + config.q_width * h
    r_q, r_kv = config.q_lora_rank, config.kv_lora_rank
    query = h * r_q + r_q * heads * d if r_q else h * heads * d
    key_value = h * (r_kv + config.qk_rope_head_dim) + r_kv * heads * (config.qk_nope_head_dim + config.v_head_dim)
    return query + key_value + config.attn_width * h


def attention_params(config: ModelConfig) -> int:
    """Return the parameters of one layer's attention: projections, biases, and norms inside it.

    With MLA, `qkv_bias` puts biases on the two projections into the latents, as DeepSeek's `attention_bias` does.
    """
    count = attention_matrices(config)
    if config.qkv_bias:
        latents = config.q_lora_rank + config.kv_lora_rank + config.qk_rope_head_dim
        count += latents if config.is_mla else config.q_width + 2 * config.kv_width
    if config.attn_out_bias:
        count += config.hidden
    if config.qk_norm:
        shared = 2 * config.head_dim
        count += norm_params(config, shared if config.qk_norm_shared else config.q_width + config.kv_width)
    if config.attention_sinks:
        count += config.num_heads
    if config.is_mla:
        count += norm_params(config, config.kv_lora_rank)
        count += norm_params(config, config.q_lora_rank) if config.q_lora_rank else 0
    return count


def mlp_params(config: ModelConfig, ffn: int = 0) -> int:
    """Return the parameters of one MLP: two matrices, or three when gated, and their biases.

    Args:
        ffn: Inner width; the model's dense `ffn` if 0.
    """
    f = ffn or config.ffn
    inputs = 2 if config.gated_mlp else 1
    biases = inputs * f + config.hidden if config.mlp_bias else 0
    return (inputs + 1) * config.hidden * f + biases


def layer_params(config: ModelConfig, layer: int, *, active: bool = False) -> dict[str, int]:
    """Return the parameters of one block by component.

    Args:
        active: Count only the routed experts that one token visits.
    """
    count = {"attention": attention_params(config), "norms": config.norms_per_layer * norm_params(config)}
    if not config.has_experts(layer):
        return count | {"mlp": mlp_params(config)}
    visited = config.experts_per_token if active else config.num_experts
    return count | {
        "router": (config.hidden + config.router_bias) * config.num_experts,
        "experts": visited * mlp_params(config, config.expert_ffn),
        "shared_experts": config.num_shared_experts * mlp_params(config, config.expert_ffn),
    }


def count_params(config: ModelConfig) -> ParamCount:
    """Return how many parameters a model has, by component, in total, and active for one token.

    GPT: `ψ = L (12 h² + 13 h) + V h + s_max h + 2 h`.
    """
    counts = []
    for active in (False, True):
        count = dict.fromkeys(COMPONENTS, 0)
        count["embedding"] = embedding_params(config)
        count["positions"] = position_params(config)
        count["final_norm"] = norm_params(config)
        count["head"] = head_params(config)
        # At most two kinds of layer exist: the first ones, dense, and the rest.
        dense = config.num_dense_layers if config.is_moe else config.num_layers
        for first, layers in ((0, dense), (dense, config.num_layers - dense)):
            if layers:
                for component, params in layer_params(config, first, active=active).items():
                    count[component] += layers * params
        counts.append(count)
    return ParamCount(*counts)
