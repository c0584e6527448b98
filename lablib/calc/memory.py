"""Bytes of device memory that one rank needs for a training step, term by term.

Three groups, in decreasing order of certainty:

- States live from step to step. They follow from counting parameters and are exact.
- Activations live from forward to backward. Formulas per operator, in `activations`.
- Buffers live for a moment: weights that ZeRO-3 gathers, buckets on the wire, one layer being recomputed.
  They are estimates, and each term says what it assumes.

Every term counts at its full size, so the total is the most that can coexist: gradients appear while activations
go, but with more than one micro-batch in a step they do meet. `lablib.calc.memory_timeline` walks through the step
instead, and adds what lives for a moment: gradients of activations, of the logits, the optimizer's temporaries.

Left out, because they depend on kernels and libraries: the CUDA context, workspaces, NCCL's buffers, receive buffers
of pipeline stages, gradients of activations (the logits' is the largest), and what the allocator loses to
fragmentation. Keep a few GiB for them, more with a large vocabulary.

What is assumed where sizes do not divide: a vocabulary is padded to a multiple of tp, and a ZeRO shard is
`ceil(n / ranks)` of all n parameters of a rank as one flat array. FSDP2 splits each tensor by its first dimension, so
its first ranks hold up to one row per tensor more: sharding="fsdp2" counts them. Heads, MLP width, layers and sequence must divide.

Chapter: book/01_why_distributed.md
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

from lablib.calc.breakdown import MemoryBreakdown
from lablib.calc.choices import check_stage, one_of
from lablib.calc.models import ModelConfig
from lablib.calc.rank_memory import stage_memory
from lablib.calc.recipes import Optimizer, Recipe
from lablib.calc.run_config import RunConfig
from lablib.calc.torch_versions import PINNED
from lablib.calc.units import MiB
from lablib.calc.zero import max_params, zero_state_bytes

__all__ = ["MemoryBreakdown", "max_params", "training_memory", "zero_state_bytes"]


def training_memory(
    model: ModelConfig | str | PathLike,
    *,
    recipe: str | Recipe = "mixed-bf16",
    optimizer: str | Optimizer = "adamw",
    tuning: str = "full",
    lora_rank: int = 16,
    lora_targets: str = "all",
    micro_batch: int = 1,
    seq: int | None = None,
    dp: int = 1,
    zero: int = 0,
    tp: int = 1,
    sequence_parallel: bool = False,
    pp: int = 1,
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    num_microbatches: int | None = None,
    layers_per_stage: Sequence[int] | None = None,
    stage: int | None = None,
    cp: int = 1,
    ep: int = 1,
    recompute: str = "none",
    attention: str = "fused",
    kernels: str = "paper",
    dropout: float | None = None,
    offload: str = "none",
    gradient_as_bucket_view: bool = False,
    bucket_bytes: int = 25 * MiB,
    prefetch: int = 0,
    sharding: str = "flat",
    torch: str = PINNED,
) -> MemoryBreakdown:
    """Return the bytes that one rank needs, by term.

    Args:
        model: A ModelConfig, the name of a preset, or the path of a config.json.
        recipe: Dtypes of weights, gradients and optimizer; see `recipes`.
        optimizer: "adamw", "sgd", "sgd-momentum" or "adamw-8bit".
        tuning: "full"; "lora": frozen weights and trained adapters; "qlora": the same with the matrices of blocks in NF4,
            and the recipe for all else.
        lora_rank: Rank of the adapters.
        lora_targets: Which matrices of a block get one: "all" (QLoRA's advice) or those of "attention".
        micro_batch: Sequences in one forward pass of one replica.
        seq: Tokens in a sequence, before cp divides it; None means the model's `max_positions`.
        dp: Replicas that see different data.
        zero: ZeRO stage: 1 shards the optimizer, 2 gradients too, 3 weights too, over dp times cp ranks.
        tp: Tensor-parallel ranks. With kernels "hf" and "toy" it is PyTorch's `parallelize_module` with Hugging Face's
            plan: embedding and norms stay whole, logits are gathered.
        sequence_parallel: Whether norms and residuals are split over tp too.
        pp: Pipeline stages.
        schedule: "1f1b", "gpipe" or "interleaved".
        virtual_stages: Chunks of layers in each stage when interleaved.
        num_microbatches: Micro-batches in a step; None means enough to fill the pipeline.
        layers_per_stage: Layers of each stage, where pp does not divide them.
        stage: Pipeline stage to describe; None means the one that needs most.
        cp: Context-parallel ranks, which split every sequence and hold the same weights.
        ep: Expert-parallel ranks, taken from dp times cp.
        recompute: "none", "selective" (the attention core runs again) or "full" (all but each block's input).
        attention: "fused" never stores scores; "plain" does.
        kernels: How activations are counted: "paper" as Korthikanti et al., "toy" as `lablib.toys.transformer` runs,
            "hf" as Hugging Face's eager classes do.
        dropout: Probability; None means what `kernels` assumes.
        offload: What lives on the CPU: "optimizer" (master weights and moments), "gradients" (them too, ZeRO-Offload)
            or "parameters" (all states; weights are gathered unit by unit).
        gradient_as_bucket_view: DDP's option: gradients live in its buckets, which otherwise are a second copy.
        bucket_bytes: Size of a gradient bucket of ZeRO stages 1 and 2, of which two exist.
        prefetch: Units that ZeRO-3 gathers ahead of the one in use.
        sharding: "flat": a shard is `ceil(n / ranks)` of one flat array. "fsdp2": each tensor by its rows, as
            `fully_shard` does, with zero=3 (reshards after forward) or zero=2 (does not). "whole": each tensor's
            optimizer states on one rank, as `ZeroRedundancyOptimizer` has them behind DDP, with zero=1; the fullest
            rank is described.
        torch: Version of PyTorch whose FSDP2 it is; see `torch_versions`. It moves moments of a step, and no states.

    Raises:
        ValueError: If a setting is unknown or out of range, sizes do not divide, or settings contradict each other.
    """
    run = run_config(
        model,
        recipe=recipe,
        optimizer=optimizer,
        tuning=tuning,
        lora_rank=lora_rank,
        lora_targets=lora_targets,
        micro_batch=micro_batch,
        seq=seq,
        dp=dp,
        zero=zero,
        tp=tp,
        sequence_parallel=sequence_parallel,
        pp=pp,
        schedule=schedule,
        virtual_stages=virtual_stages,
        num_microbatches=num_microbatches,
        layers_per_stage=layers_per_stage,
        cp=cp,
        ep=ep,
        recompute=recompute,
        attention=attention,
        kernels=kernels,
        dropout=dropout,
        offload=offload,
        gradient_as_bucket_view=gradient_as_bucket_view,
        bucket_bytes=bucket_bytes,
        prefetch=prefetch,
        sharding=sharding,
        torch=torch,
    )
    if stage is None:
        return max((stage_memory(run, i) for i in range(pp)), key=lambda memory: memory.total)
    check_stage(stage, pp)
    return stage_memory(run, stage)


def run_config(model: ModelConfig | str | PathLike, **settings: object) -> RunConfig:
    """Return the checked settings of a run; those not given are `training_memory`'s defaults.

    Args:
        model: A ModelConfig, the name of a preset, or the path of a config.json.
        **settings: Arguments of `training_memory`, all but `stage`.

    Raises:
        ValueError: If a setting does not exist, or as `training_memory`.
    """
    defaults = {
        name: value for name, value in (training_memory.__kwdefaults__ or {}).items() if name != "stage"
    }
    for name in settings:
        one_of("setting", name, defaults)
    return RunConfig(model=model, **(defaults | settings))
