"""The tensors of a decoder transformer, and what one rank of tensor or expert parallelism holds of each.

`params` counts; this module lists. It knows which dimension tensor parallelism splits:

| tensor | split |
|---|---|
| token embedding, output head | vocabulary, padded to a multiple of tp |
| query, key, value, MLP input | outputs (column-parallel), with their biases, sinks, and norms with scales for each head |
| attention output, MLP output | inputs (row-parallel); their biases are replicated |
| norms, positions, router, projections into MLA's latents | not split |

Expert parallelism gives each rank `num_experts / ep` routed experts, split over `etp` ranks where that is not tp.

Sources: Shoeybi et al. 2019 (arXiv 1909.08053), section 3; Narayanan et al. 2021 (arXiv 2104.04473), section 2.3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lablib.calc.models.config import ModelConfig

ADAPTED = ("attention", "mlp", "experts", "shared_experts")


@dataclass(frozen=True)
class Tensor:
    """One parameter tensor of the model, or several equal ones.

    Attributes:
        component: Its name in `count_params(...).by_component`.
        outputs: Rows: what it produces; for a vector its length.
        inputs: Columns: what it reads; 1 for a vector.
        split: "outputs", "inputs" or "" for what tensor parallelism divides.
        copies: How many equal ones there are.
    """

    component: str
    outputs: int
    inputs: int = 1
    split: str = ""
    copies: int = 1

    @property
    def is_expert(self) -> bool:
        """Whether expert parallelism divides the copies."""
        return self.component == "experts"

    @property
    def is_adapted(self) -> bool:
        """Whether it is a matrix of a block that LoRA adapts and QLoRA quantizes: all but the router."""
        return self.component in ADAPTED and self.inputs > 1

    def shape(self, tp: int = 1) -> tuple[int, int]:
        """Return (outputs, inputs) on one tensor-parallel rank."""
        outputs = -(-self.outputs // tp) if self.split == "outputs" else self.outputs
        return outputs, self.inputs // tp if self.split == "inputs" else self.inputs

    def local_copies(self, ep: int = 1) -> int:
        """Return how many of the equal tensors one expert-parallel rank holds."""
        return self.copies // ep if self.is_expert else self.copies

    def local_shape(self, tp: int = 1, etp: int | None = None) -> tuple[int, int]:
        """Return (outputs, inputs) on one rank: routed experts are split over etp ranks; None means tp."""
        return self.shape(etp if self.is_expert and etp is not None else tp)

    def local_params(self, tp: int = 1, ep: int = 1, etp: int | None = None) -> int:
        """Return the parameters that one rank holds."""
        outputs, inputs = self.local_shape(tp, etp)
        return outputs * inputs * self.local_copies(ep)

    def adapter_params(self, rank: int, tp: int = 1, ep: int = 1, etp: int | None = None) -> int:
        """Return the parameters of its LoRA adapter on one rank: `r (inputs + outputs)`.

        The adapter is `B A` with A of shape (r, inputs) and B of shape (outputs, r); each is split as the matrix is.
        Hu et al. 2021 (arXiv 2106.09685), section 4.1.

        Args:
            rank: `r`.
        """
        return rank * sum(self.local_shape(tp, etp)) * self.local_copies(ep)


def embedding_tensors(config: ModelConfig) -> list[Tensor]:
    """Return what the first pipeline stage has before its blocks: token table and learned positions."""
    tensors = [Tensor("embedding", config.vocab, config.hidden, "outputs")]
    if config.learned_positions:
        tensors.append(Tensor("positions", config.max_positions, config.hidden))
    return tensors


def head_tensors(config: ModelConfig) -> list[Tensor]:
    """Return what the last pipeline stage has after its blocks: final norm and, if not tied, the output head."""
    tensors = [_norm("final_norm", config, config.hidden)]
    if not config.tied:
        tensors.append(Tensor("head", config.vocab, config.hidden, "outputs"))
    return tensors


def layer_tensors(config: ModelConfig, layer: int) -> list[Tensor]:
    """Return the tensors of one block."""
    tensors = _latent_attention(config) if config.is_mla else _attention(config)
    tensors.append(_norm("norms", config, config.hidden, config.norms_per_layer))
    if not config.has_experts(layer):
        return tensors + _mlp("mlp", config, config.ffn, 1)
    tensors.append(Tensor("router", config.num_experts, config.hidden))
    if config.router_bias:
        tensors.append(Tensor("router", config.num_experts))
    tensors += _mlp("experts", config, config.expert_ffn, config.num_experts)
    if config.num_shared_experts:
        tensors += _mlp("shared_experts", config, config.expert_ffn, config.num_shared_experts)
    return tensors


def _norm(component: str, config: ModelConfig, width: int, copies: int = 1) -> Tensor:
    return Tensor(component, width, copies=config.norm_tensors * copies)


def _qk_norms(config: ModelConfig) -> list[Tensor]:
    if config.qk_norm_shared:
        return [_norm("attention", config, config.head_dim, 2)]
    tensors = [_norm("attention", config, width) for width in (config.q_width, config.kv_width)]
    return [replace(tensor, split="outputs") for tensor in tensors]


def _attention(config: ModelConfig) -> list[Tensor]:
    h, q, kv = config.hidden, config.q_width, config.kv_width
    tensors = [
        Tensor("attention", q, h, "outputs"),
        Tensor("attention", kv, h, "outputs", copies=2),
        Tensor("attention", h, q, "inputs"),
    ]
    if config.qkv_bias:
        tensors += [Tensor("attention", q, split="outputs"), Tensor("attention", kv, split="outputs", copies=2)]
    if config.attn_out_bias:
        tensors.append(Tensor("attention", h))
    if config.qk_norm:
        tensors += _qk_norms(config)
    if config.attention_sinks:
        tensors.append(Tensor("attention", config.num_heads, split="outputs"))
    return tensors


def _latent_attention(config: ModelConfig) -> list[Tensor]:
    h, heads, r_q, r_kv = config.hidden, config.num_heads, config.q_lora_rank, config.kv_lora_rank
    into_latent = r_kv + config.qk_rope_head_dim
    keys_values = heads * (config.qk_nope_head_dim + config.v_head_dim)
    tensors = [
        Tensor("attention", into_latent, h),
        Tensor("attention", keys_values, r_kv, "outputs"),
        Tensor("attention", h, config.attn_width, "inputs"),
        Tensor("attention", config.q_width, r_q or h, "outputs"),
        _norm("attention", config, r_kv),
    ]
    if r_q:
        tensors += [Tensor("attention", r_q, h), _norm("attention", config, r_q)]
    if config.qkv_bias:
        tensors.append(Tensor("attention", r_q + into_latent))
    if config.attn_out_bias:
        tensors.append(Tensor("attention", h))
    return tensors


def _mlp(component: str, config: ModelConfig, ffn: int, copies: int) -> list[Tensor]:
    inputs = 2 if config.gated_mlp else 1
    tensors = [
        Tensor(component, ffn, config.hidden, "outputs", inputs * copies),
        Tensor(component, config.hidden, ffn, "inputs", copies),
    ]
    if config.mlp_bias:
        tensors.append(Tensor(component, ffn, split="outputs", copies=inputs * copies))
        tensors.append(Tensor(component, config.hidden, copies=copies))
    return tensors
