"""Bytes of device memory that one rank needs for a training step, term by term.

Three groups, in decreasing order of certainty:

- States live from step to step: `rank_memory.rank_states`. They follow from counting parameters and are exact.
- Activations live from forward to backward: `run_activations.activation_terms`, formulas per operator.
- Buffers live for a part of the step: `rank_memory.rank_buffers`; weights that ZeRO-3 gathers, buckets on the wire,
  one layer being recomputed. They are estimates, and each term says what it assumes.

Every term counts at its full size, so the total is the most that can coexist: gradients appear while activations
go, but with more than one micro-batch in a step they do meet. `lablib.calc.memory.timeline.timeline` walks through the step
instead, and adds what is short-lived: gradients of activations, of the logits, the optimizer's temporaries.

Left out, because they depend on implementation and libraries: the CUDA context, workspaces, NCCL's buffers, receive buffers
of pipeline stages, gradients of activations (the logits' is the largest), and what the allocator loses to
fragmentation. Keep a few GiB for them, more with a large vocabulary.

What is assumed where sizes do not divide: a vocabulary is padded to a multiple of tp, and a ZeRO shard is
`ceil(n / ranks)` of all n parameters of a rank as one flat array. FSDP2 splits each tensor by its first dimension, so
its first ranks hold up to one row per tensor more: sharding="fsdp2" counts them. Heads, MLP width, layers and sequence must divide.

What autocast keeps for backward: more than half of fp32, and why, term by term.

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
"""

from __future__ import annotations

from os import PathLike

from lablib.calc.errors import check_stage
from lablib.calc.memory.config import RunConfig, run_config, takes_settings
from lablib.calc.memory.stage import Stage
from lablib.calc.memory.states import stage_memory
from lablib.calc.memory.terms import MemoryBreakdown
from lablib.calc.models import ModelConfig


@takes_settings
def training_memory(
    model: RunConfig | ModelConfig | str | PathLike, *, stage: int | None = None, **settings: object
) -> MemoryBreakdown:
    """Return the bytes that one rank needs, by term.

    Args:
        model: A ModelConfig, the name of a preset, the path of a config.json, or a RunConfig.
        stage: Pipeline stage to describe; None means the one that needs most.
        **settings: Fields of `lablib.calc.memory.RunConfig`, listed below.

    Raises:
        ValueError: If a setting is unknown or out of range, sizes do not divide, or settings contradict each other.
    """
    run = run_config(model, **settings)
    if stage is None:
        return max((stage_memory(Stage(run, i)) for i in range(run.pp)), key=lambda memory: memory.total)
    check_stage(stage, run.pp)
    return stage_memory(Stage(run, stage))


FP32_BYTES, LOW = 4, 2


def autocast_activations(config: ModelConfig, *, batch: int, seq: int) -> dict[str, int]:
    """Return the bytes that autograd keeps under autocast, by term; their sum is what is measured.

    Args:
        config: A model that the toy transformer can be built from.

    Raises:
        ValueError: If the toy transformer cannot be built from it.
    """
    memory = training_memory(config, recipe="autocast-bf16", micro_batch=batch, seq=seq, implementation="toy")
    n, h, layers = batch * seq, config.hidden, config.num_layers
    # LayerNorm keeps its input and two statistics a token; the written-out RMSNorm keeps fp32 inputs in any case,
    # and in the dtype of the stream what it multiplies with its weight.
    values_per_norm = n * (h + 2) if config.norm == "layernorm" else n * h
    readers = 2 + (1 if config.gated_mlp else 0)  # beyond the first: k and v, and the gate
    positions = 0 if config.learned_positions else 2 * seq * config.head_dim
    return {
        "bf16 activations": memory.activations,
        "weight casts": memory.terms["weight_casts"],
        "fp32 norms": (2 * layers + 1) * values_per_norm * (FP32_BYTES - LOW),
        "repeated casts": layers * readers * n * h * LOW,
        "fp32 positions": positions * (FP32_BYTES - LOW),
    }
