"""The shape of a decoder transformer: everything that the calculators need to know about a model.

One class covers the common families, because they differ in few ways:

| family | positions | attention | MLP | norms a layer |
|---|---|---|---|---|
| gpt2 (GPT-2, GPT-3) | learned | biases | two matrices, biases | 2 LayerNorm |
| llama, mistral | rotary | grouped queries | three matrices (gated) | 2 RMSNorm |
| qwen2, qwen3 | rotary | biases on q, k, v; or norms on q and k | gated | 2 RMSNorm |
| olmo2 | rotary | norms on all of q and of k | gated | 2 RMSNorm, behind each half |
| phi3 | rotary | q, k, v one matrix in Hugging Face's class | gated, gate and up one matrix | 2 RMSNorm |
| glm4 | rotary, half of a head | biases on q, k, v | gated, gate and up one matrix | 4 RMSNorm |
| gemma, gemma2, gemma3 | rotary | grouped queries, gemma3 with norms on q and k | gated, tied output | 2 or 4 RMSNorm |
| starcoder2 | rotary | grouped queries, biases | two matrices, biases | 2 LayerNorm |
| gpt-neox (Pythia) | rotary, a quarter of a head | biases | two matrices, biases, beside attention | 2 LayerNorm |
| falcon | rotary | one key head, or groups | two matrices, beside attention | 1 or 2 LayerNorm |
| cohere, cohere2 | rotary | grouped queries | gated, beside attention | 1 LayerNorm without shift |
| mixtral, qwen3-moe | rotary | grouped queries | experts behind a router | 2 RMSNorm |
| gpt-oss | rotary | biases, a sink a head | experts with biases | 2 RMSNorm |
| deepseek-v2, deepseek-v3 | rotary | latent (MLA) | shared and routed experts, first layers dense | 2 RMSNorm |
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from lablib.calc.models.details import Rotary, Router

FAMILIES = (
    *("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "olmo2", "phi3", "glm4", "starcoder2"),
    *("gpt-neox", "falcon", "cohere", "cohere2", "mixtral", "qwen3-moe", "gpt-oss", "deepseek-v2", "deepseek-v3"),
)
NORMS = ("layernorm", "layernorm-no-bias", "rmsnorm")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The sizes of one decoder transformer; it checks itself when it is made.

    Sizes that are left 0 are filled in, and `dataclasses.replace` then keeps what was filled in.

    Attributes:
        family: One of `FAMILIES`. It names the architecture; every number comes from the fields below.
        num_layers: Transformer blocks, `L`.
        hidden: Width of the residual stream, `h`.
        num_heads: Query heads, `a`.
        num_kv_heads: Key and value heads, `a_kv`; 0 means as many as query heads.
        head_dim: Width of one head, `d`; 0 means `hidden / num_heads`. With MLA: nope plus rope width.
        ffn: Inner width of a dense MLP, `f`.
        vocab: Rows of the token embedding, `V`.
        max_positions: Longest sequence that the model was made for; a table's rows if positions are learned.
        learned_positions: Whether positions are a learned table (GPT-2) and not rotary.
        tied: Whether the output head reuses the token embedding.
        norm: "layernorm" (scale and shift), "layernorm-no-bias" or "rmsnorm" (scale only).
        gated_mlp: Three matrices (SwiGLU, GeGLU) and not two.
        qkv_bias: Biases on the query, key and value projections.
        attn_out_bias: Bias on the attention output projection.
        rotary_dim: Part of `head_dim` that rotary positions turn; 0 means all of it.
        qk_norm: Norm of the queries and of the keys.
        qk_norm_shared: Whether all heads share the scales of that norm; if not, every value has its own.
        attention_sinks: A learned score a head that takes its share of every softmax.
        window: Tokens that a query sees in `window_layers`, its own among them; 0 means all before it.
        window_layers: The layers with that window, from 0; a number that the model has no layer for means nothing.
        norms_per_layer: Norms over `hidden` in a layer: 2, or 4 where each half is normed before and after, or 1.
        post_norm: Whether the two norms come behind attention and MLP, and none before.
        parallel_block: Whether attention and MLP read the same stream and are added together.
        num_experts: Routed experts in a layer, 0 for a dense model.
        experts_per_token: Routed experts that one token visits.
        expert_ffn: Inner width of one expert.
        router_bias: Bias of the router.
        num_shared_experts: Experts that every token visits, each of width `expert_ffn`.
        num_dense_layers: First layers that keep a dense MLP in a model with experts.
        q_lora_rank: MLA: width of the query's latent; 0 projects queries directly.
        kv_lora_rank: MLA: width of the latent of keys and values; 0 means no MLA.
        qk_nope_head_dim: MLA: part of a query or key head without position.
        qk_rope_head_dim: MLA: part with rotary position, shared by all key heads.
        v_head_dim: MLA: width of a value head.
        norm_eps: Epsilon of the norms; 0 where it is not known.
        rotary: Rotary positions; None where they are not known, or learned.
        router: How a token finds its experts; None where it is not known, or there are none.
    """

    name: str = "custom"
    family: str = "llama"
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int = 0
    head_dim: int = 0
    ffn: int
    vocab: int
    max_positions: int = 2048
    learned_positions: bool = False
    tied: bool = False
    norm: str = "rmsnorm"
    gated_mlp: bool = True
    qkv_bias: bool = False
    attn_out_bias: bool = False
    mlp_bias: bool = False
    rotary_dim: int = 0
    qk_norm: bool = False
    qk_norm_shared: bool = True
    attention_sinks: bool = False
    window: int = 0
    window_layers: tuple[int, ...] = ()
    norms_per_layer: int = 2
    post_norm: bool = False
    parallel_block: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    router_bias: bool = False
    num_shared_experts: int = 0
    num_dense_layers: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    norm_eps: float = dataclasses.field(default=0.0, compare=False)  # these three change no size
    rotary: Rotary | None = dataclasses.field(default=None, compare=False)
    router: Router | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"unknown family {self.family!r}; use one of {', '.join(FAMILIES)}")
        if self.norm not in NORMS:
            raise ValueError(f"norm={self.norm!r} must be one of {', '.join(NORMS)}")
        self._check_numbers()
        self._fill_heads()
        self._check_experts()
        self._check_windows()

    def _check_numbers(self) -> None:
        positive = ("num_layers", "hidden", "num_heads", "ffn", "vocab", "max_positions", "norms_per_layer")
        for field, kind in self.__annotations__.items():
            value = getattr(self, field)
            if kind == "bool" and not isinstance(value, bool):
                raise ValueError(f"{field}={value!r} must be True or False")
            if kind != "int":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{field}={value!r} must be a whole number")
            least = 1 if field in positive else 0
            if value < least:
                raise ValueError(f"{field}={value} must be at least {least}")

    def _fill_heads(self) -> None:
        # A frozen dataclass completes itself through object.__setattr__, once, before anybody sees it.
        if self.num_kv_heads == 0:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.num_heads % self.num_kv_heads:
            *others, last = [str(n) for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            use = f"{', '.join(others)} or {last}" if others else last
            raise ValueError(f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}; use {use}")
        parts = (self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim)
        if self.kv_lora_rank:
            self._check_latent(parts)
        elif self.q_lora_rank or any(parts):
            raise ValueError(
                "q_lora_rank, qk_nope_head_dim, qk_rope_head_dim and v_head_dim belong to latent attention: "
                "set kv_lora_rank too, or leave them 0"
            )
        if self.head_dim == 0:
            if self.hidden % self.num_heads:
                raise ValueError(
                    f"num_heads={self.num_heads} does not divide hidden={self.hidden}: give head_dim, or change one"
                )
            object.__setattr__(self, "head_dim", self.hidden // self.num_heads)

    def _check_latent(self, parts: tuple[int, int, int]) -> None:
        nope, rope, value = parts
        if nope + rope == 0 or value == 0:
            raise ValueError(
                f"latent attention (kv_lora_rank={self.kv_lora_rank}) needs head widths: qk_nope_head_dim={nope}, "
                f"qk_rope_head_dim={rope}, v_head_dim={value}"
            )
        if self.head_dim not in (0, nope + rope):
            raise ValueError(f"head_dim={self.head_dim} contradicts qk_nope_head_dim={nope} + qk_rope_head_dim={rope}")
        if self.num_kv_heads != self.num_heads:
            raise ValueError(
                f"latent attention gives every query head its own key: num_kv_heads={self.num_kv_heads} "
                f"must equal num_heads={self.num_heads}"
            )
        object.__setattr__(self, "head_dim", nope + rope)

    def _check_experts(self) -> None:
        if self.num_experts == 0:
            for field in ("experts_per_token", "expert_ffn", "num_shared_experts", "num_dense_layers"):
                if getattr(self, field):
                    raise ValueError(f"{field}={getattr(self, field)} needs num_experts, which is 0")
            return
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token={self.experts_per_token} must be between 1 and num_experts={self.num_experts}"
            )
        if self.expert_ffn == 0:
            raise ValueError(f"expert_ffn=0 with num_experts={self.num_experts}: give the width of an expert")
        if self.num_dense_layers > self.num_layers:
            raise ValueError(f"num_dense_layers={self.num_dense_layers} is more than num_layers={self.num_layers}")

    def _check_windows(self) -> None:
        if bool(self.window) != bool(self.window_layers):
            raise ValueError(f"window={self.window} and window_layers={self.window_layers} need each other")
        numbers = all(isinstance(i, int) and i >= 0 for i in self.window_layers)
        if not numbers or list(self.window_layers) != sorted(set(self.window_layers)):
            raise ValueError(f"window_layers={self.window_layers} must be numbers of layers from 0 on, in order")
        if self.rotary_dim > self.head_dim:
            raise ValueError(f"rotary_dim={self.rotary_dim} is more than head_dim={self.head_dim}")

    @property
    def is_moe(self) -> bool:
        """Whether some layers have experts."""
        return self.num_experts > 0

    @property
    def is_mla(self) -> bool:
        """Whether attention is latent (DeepSeek's MLA)."""
        return self.kv_lora_rank > 0

    @property
    def norm_tensors(self) -> int:
        """Parameters of a norm for each value that it norms: scale, and shift."""
        return 2 if self.norm == "layernorm" else 1

    @property
    def ends_with_norm(self) -> bool:
        """Whether a norm comes behind the MLP, before its output is added to the stream."""
        return self.post_norm or self.norms_per_layer == 4

    @property
    def turned_dim(self) -> int:
        """Part of a head that rotary positions turn, 0 with learned ones."""
        return 0 if self.learned_positions else self.rotary_dim or self.head_dim

    @property
    def num_window_layers(self) -> int:
        """Layers with a sliding window."""
        return sum(layer < self.num_layers for layer in self.window_layers)

    @property
    def q_width(self) -> int:
        """Width of all query heads together, `a d`."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, `a_kv d`; the values' too, except with MLA."""
        return self.num_kv_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of one value head: `head_dim`, except with MLA."""
        return self.v_head_dim if self.is_mla else self.head_dim

    @property
    def attn_width(self) -> int:
        """Width of what enters the attention output projection: all heads' values."""
        return self.num_heads * self.value_dim

    def has_experts(self, layer: int) -> bool:
        """Return whether this layer (counted from 0) has experts in place of a dense MLP."""
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer={layer} is not in 0..{self.num_layers - 1} of {self.name}")
        return self.is_moe and layer >= self.num_dense_layers
