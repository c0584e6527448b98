"""What one rank has to do for a micro-batch, in seconds at the hardware's full rates.

Three kinds of work, each limited by another part of the machine:

- **matmul**: FLOPs over the rate that large matrix products reach on the card;
- **memory**: bytes of everything between the products (norms, activations, dropout, softmax) over the memory's rate;
- **network**: bytes that a rank sends over the bandwidth of the link that its group uses.

How close a run comes to the three rates is left to `plan_time`: three constants, the same for every layout.

Bytes of a kernel are counted as its reads and writes: a norm 2 accesses a value; dropout and residual 3; an activation
function its inputs and output. Unfused attention writes, normalizes, drops and reads its scores: 6 accesses and a mask,
for every pair of tokens. Fused attention keeps them on chip and skips the masked half. Backward reads the incoming
gradient as well: 3 accesses for every 2 of forward. Every micro-batch also reads the weights, once forward and once
backward, and adds to their gradients, a read and a write: with few tokens a micro-batch this is what limits it.

Backward multiplies twice what forward does. Fused attention computes the scores again there: 5 products for 2
(Dao 2023, arXiv 2307.08691).

Left out: latency, stragglers, oversubscribed switches, experts that get more tokens than others. Every copy of a token
counts on its way to an expert; DeepSeek-V3 sends a token once to a node, and to at most four (arXiv 2412.19437),
so a layout like its own is predicted far too slow here.
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.models import ModelConfig
from lablib.calc.params import attention_matrices
from lablib.calc.plan_cluster import Cluster

BACKWARD_BYTES = 1.5  # three accesses for two
FUSED_BACKWARD = 2.5  # five products for two


@dataclass(frozen=True)
class Work:
    """Seconds of work at full rates: matrix products, memory traffic, and three kinds of collectives.

    Attributes:
        matmul: Matrix products.
        memory: Kernels that are limited by memory.
        tp: Collectives of tensor parallelism.
        cp: Collectives of context parallelism.
        ep: All-to-alls of expert parallelism.
    """

    matmul: float = 0.0
    memory: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.matmul + other.matmul,
            self.memory + other.memory,
            self.tp + other.tp,
            self.cp + other.cp,
            self.ep + other.ep,
        )

    def times(self, n: float) -> Work:
        """Return n times as much."""
        return Work(self.matmul * n, self.memory * n, self.tp * n, self.cp * n, self.ep * n)


@dataclass(frozen=True)
class Passes:
    """Forward and backward of something; backward holds what is recomputed.

    Attributes:
        forward: Work of the forward pass.
        backward: Work of the backward pass, recomputation included.
    """

    forward: Work
    backward: Work


def layer_work(
    model: ModelConfig,
    cluster: Cluster,
    *,
    layer: int,
    micro_batch: int,
    seq: int,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    recompute: str = "none",
    attention: str = "fused",
    sequence_parallel: bool = True,
    dropout: bool = False,
    value: int = 2,
    gradient: int = 2,
) -> Passes:
    """Return the work of one layer on one rank for one micro-batch.

    Args:
        model: The model.
        cluster: Where it runs.
        layer: Which layer, from 0; it matters where some have experts.
        micro_batch: Sequences.
        seq: Tokens in a sequence.
        tp: Tensor-parallel ranks.
        cp: Context-parallel ranks.
        ep: Expert-parallel ranks.
        recompute: "none", "selective" or "full".
        attention: "fused" or "plain".
        sequence_parallel: Whether tp splits what lies between the matrices.
        dropout: Whether there is dropout.
        value: Bytes of an activation and of a weight.
        gradient: Bytes of a weight's gradient where it is added up.
    """
    experts = model.has_experts(layer)
    tokens = micro_batch * seq / cp
    rate, hbm = cluster.gpu.peak(_dtype(cluster)) * cluster.achievable, cluster.gpu.memory_bandwidth
    dense = 2 * tokens * (attention_matrices(model) + _mlp_weights(model, experts)) / tp
    scores = 2 * tokens * seq * model.num_heads * (model.head_dim + model.value_dim) / tp
    fused = attention == "fused"
    if fused:
        scores /= 2
    flat, square = _layer_bytes(model, experts, tp, sequence_parallel, dropout, value)
    pairs = 0.0 if fused else square * tokens * seq * model.num_heads / tp
    weights = _local_weights(model, experts, tp, ep)
    kernels = (flat * tokens + pairs) / hbm
    forward = Work(
        matmul=(dense + scores) / rate,
        memory=kernels + value * weights / hbm,
        tp=4 * tokens * model.hidden * value * (tp - 1) / tp / cluster.bandwidth(tp),
        cp=_keys(model, micro_batch * seq, tp, value) * (cp - 1) / cp / cluster.bandwidth(cp, tp),
        ep=_all_to_all(model, experts, tokens, tp, ep, value) / cluster.bandwidth(ep, tp * cp),
    )
    backward = Work(
        matmul=(2 * dense + (FUSED_BACKWARD if fused else 2) * scores) / rate,
        memory=BACKWARD_BYTES * kernels + (value + 2 * gradient) * weights / hbm,
        tp=forward.tp,
        cp=forward.cp,
        ep=forward.ep,
    )
    if recompute == "full":
        backward = backward + forward
    elif recompute == "selective":
        backward = backward + Work(matmul=scores / rate, memory=pairs / hbm)
    return Passes(forward, backward)


def head_work(
    model: ModelConfig,
    cluster: Cluster,
    *,
    micro_batch: int,
    seq: int,
    tp: int = 1,
    cp: int = 1,
    value: int = 2,
    gradient: int = 2,
) -> Passes:
    """Return the work of the output head and the loss: one product, and the logits read and written in fp32.

    Args:
        model: The model.
        cluster: Where it runs.
        micro_batch: Sequences.
        seq: Tokens in a sequence.
        tp: Tensor-parallel ranks, which split the vocabulary.
        cp: Context-parallel ranks.
        value: Bytes of an activation and of a weight.
        gradient: Bytes of a weight's gradient where it is added up.
    """
    tokens, vocab = micro_batch * seq / cp, -(-model.vocab // tp)
    rate, hbm = cluster.gpu.peak(_dtype(cluster)) * cluster.achievable, cluster.gpu.memory_bandwidth
    product, loss, weights = (
        2 * tokens * model.hidden * vocab / rate,
        3 * 4 * tokens * vocab,
        model.hidden * vocab,
    )
    # One gather of the stream forward, one scatter of its gradient backward.
    sent = value * tokens * model.hidden * (tp - 1) / tp / cluster.bandwidth(tp)
    return Passes(
        Work(matmul=product, memory=(loss + value * weights) / hbm, tp=sent),
        Work(
            matmul=2 * product,
            memory=(BACKWARD_BYTES * loss + (value + 2 * gradient) * weights) / hbm,
            tp=sent,
        ),
    )


def _dtype(cluster: Cluster) -> str:
    return "bf16" if "bf16" in cluster.gpu.flops else "fp16"


def _mlp_weights(model: ModelConfig, experts: bool) -> int:
    """Weights that a token is multiplied with after attention."""
    matrices = (3 if model.gated_mlp else 2) * model.hidden
    if not experts:
        return matrices * model.ffn
    visited = model.experts_per_token + model.num_shared_experts
    return matrices * visited * model.expert_ffn + model.hidden * model.num_experts


def _local_weights(model: ModelConfig, experts: bool, tp: int, ep: int) -> float:
    """Weights of a layer's matrices on a rank."""
    matrices = (3 if model.gated_mlp else 2) * model.hidden
    if not experts:
        return (attention_matrices(model) + matrices * model.ffn) / tp
    held = model.num_experts / ep + model.num_shared_experts
    return (attention_matrices(model) + matrices * held * model.expert_ffn) / tp


def _layer_bytes(
    model: ModelConfig, experts: bool, tp: int, sequence_parallel: bool, dropout: bool, value: int
) -> tuple[float, float]:
    """Bytes of forward's memory-bound kernels: a token of this rank, and a pair of tokens and head if not fused."""
    mask = 1 if dropout else 0
    stream = model.hidden * (model.norms_per_layer * 2 * value + 2 * (3 * value + mask))
    inner_width = model.ffn
    if experts:
        inner_width = (model.experts_per_token + model.num_shared_experts) * model.expert_ffn
        stream += 4 * value * model.experts_per_token * model.hidden  # permuted to the experts, and back
    inner = (3 if model.gated_mlp else 2) * value * inner_width
    if not model.learned_positions:
        inner += 2 * value * (model.q_width + model.kv_width)  # rotary positions
    pair = (6 if dropout else 4) * value + mask
    return stream / (tp if sequence_parallel else 1) + inner / tp, pair


def _keys(model: ModelConfig, tokens: float, tp: int, value: int) -> float:
    """Bytes of keys and values of whole sequences on one tensor-parallel rank."""
    width = model.kv_lora_rank + model.qk_rope_head_dim if model.is_mla else 2 * model.kv_width / tp
    return tokens * width * value


def _all_to_all(model: ModelConfig, experts: bool, tokens: float, tp: int, ep: int, value: int) -> float:
    """Bytes that a rank sends to experts and back in forward."""
    if not experts or ep == 1:
        return 0.0
    return 2 * tokens / tp * model.experts_per_token * model.hidden * value * (ep - 1) / ep
