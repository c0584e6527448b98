"""What autocast keeps for backward: more than half of fp32, and why, term by term.

A model that is bf16 throughout keeps half of what fp32 keeps. Autocast casts at every matmul, and so keeps more:

| term | why |
|---|---|
| weight casts | every matrix is cast once in a step and the cast kept until backward |
| fp32 norms | the stream between blocks is fp32 (fp32 + bf16 is fp32), and a norm keeps its fp32 input |
| repeated casts | a norm's fp32 output is cast once for each matmul that reads it: q, k, v, and gate and up |
| fp32 positions | cosines and sines have the dtype of the stream |

Autocast's cache is for weights alone: it holds casts of fp32 leaves that need a gradient, until the region ends.
These are exact for `lablib.toys.transformer` with fused attention and no dropout on a CPU. Compare with
`lablib.launch.measure.saved_activations`.

Chapter: book/08_mixed_precision.md
"""

from __future__ import annotations

from lablib.calc.memory import training_memory
from lablib.calc.models import ModelConfig

FP32, LOW = 4, 2


def autocast_activations(config: ModelConfig, *, batch: int, seq: int) -> dict[str, int]:
    """Return the bytes that autograd keeps under autocast, by term; their sum is what is measured.

    Args:
        config: A model that the toy transformer can be built from.
        batch: Sequences in a micro-batch.
        seq: Tokens in a sequence.

    Raises:
        ValueError: If the toy transformer cannot be built from it.
    """
    memory = training_memory(config, recipe="autocast-bf16", micro_batch=batch, seq=seq, kernels="toy")
    n, h, layers = batch * seq, config.hidden, config.num_layers
    # LayerNorm keeps its input and two statistics a token; the written-out RMSNorm keeps fp32 inputs in any case,
    # and in the dtype of the stream what it multiplies with its weight.
    values_per_norm = n * (h + 2) if config.norm == "layernorm" else n * h
    readers = 2 + (1 if config.gated_mlp else 0)  # beyond the first: k and v, and the gate
    positions = 0 if config.learned_positions else 2 * seq * config.head_dim
    return {
        "bf16 activations": memory.activations,
        "weight casts": memory.terms["weight_casts"],
        "fp32 norms": (2 * layers + 1) * values_per_norm * (FP32 - LOW),
        "repeated casts": layers * readers * n * h * LOW,
        "fp32 positions": positions * (FP32 - LOW),
    }
