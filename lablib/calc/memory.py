"""Bytes of device memory that one rank needs for a training step, term by term.

Three groups, in decreasing order of certainty:

- States live from step to step: `rank_memory.rank_states`. They follow from counting parameters and are exact.
- Activations live from forward to backward: `run_activations.activation_terms`, formulas per operator.
- Buffers live for a part of the step: `rank_memory.rank_buffers`; weights that ZeRO-3 gathers, buckets on the wire,
  one layer being recomputed. They are estimates, and each term says what it assumes.

Every term counts at its full size, so the total is the most that can coexist: gradients appear while activations
go, but with more than one micro-batch in a step they do meet. `lablib.calc.memory_timeline` walks through the step
instead, and adds what is short-lived: gradients of activations, of the logits, the optimizer's temporaries.

Left out, because they depend on kernels and libraries: the CUDA context, workspaces, NCCL's buffers, receive buffers
of pipeline stages, gradients of activations (the logits' is the largest), and what the allocator loses to
fragmentation. Keep a few GiB for them, more with a large vocabulary.

What is assumed where sizes do not divide: a vocabulary is padded to a multiple of tp, and a ZeRO shard is
`ceil(n / ranks)` of all n parameters of a rank as one flat array. FSDP2 splits each tensor by its first dimension, so
its first ranks hold up to one row per tensor more: sharding="fsdp2" counts them. Heads, MLP width, layers and sequence must divide.
"""

from __future__ import annotations

from os import PathLike

from lablib.calc.breakdown import MemoryBreakdown
from lablib.calc.choices import check_stage
from lablib.calc.memory_stage import Stage
from lablib.calc.models import ModelConfig
from lablib.calc.rank_memory import stage_memory
from lablib.calc.run_config import RunConfig, run_config, takes_settings
from lablib.calc.zero import max_params, zero_state_bytes

__all__ = ["MemoryBreakdown", "RunConfig", "max_params", "run_config", "training_memory", "zero_state_bytes"]


@takes_settings
def training_memory(
    model: RunConfig | ModelConfig | str | PathLike, *, stage: int | None = None, **settings: object
) -> MemoryBreakdown:
    """Return the bytes that one rank needs, by term.

    Args:
        model: A ModelConfig, the name of a preset, the path of a config.json, or a RunConfig.
        stage: Pipeline stage to describe; None means the one that needs most.
        **settings: Fields of `lablib.calc.run_config.RunConfig`, listed below.

    Raises:
        ValueError: If a setting is unknown or out of range, sizes do not divide, or settings contradict each other.
    """
    run = run_config(model, **settings)
    if stage is None:
        return max((stage_memory(Stage(run, i)) for i in range(run.pp)), key=lambda memory: memory.total)
    check_stage(stage, run.pp)
    return stage_memory(Stage(run, stage))
