"""Bytes of device memory that one rank needs for a training step, term by term: `training_memory` and its formulas.

Three groups, in decreasing order of certainty:

- States live from step to step: `flat_states`, `fsdp2_states` or `per_tensor_states`. They follow from counting
  parameters and are exact.
- Activations live from forward to backward: `activation_terms`, what the tapes of `lablib.calc.memory.tape` keep.
- Buffers live for a part of the step: `rank_buffers`; weights that ZeRO-3 gathers, buckets on the wire, one layer being
  recomputed. They are estimates, and each term says what it assumes.

Every term counts at its full size, so the total is the most that can coexist. `lablib.calc.memory.timeline` walks
through the step instead, and adds what is short-lived: gradients of activations, of the logits, the optimizer's
temporaries. Left out, because they depend on GPU and libraries: the CUDA context, workspaces, NCCL's buffers, receive
buffers of pipeline stages, and what the allocator loses to fragmentation.

A vocabulary is padded to a multiple of tp, and a ZeRO shard is `ceil(n / ranks)` of all n parameters of a rank as one
flat array. FSDP2 splits each tensor by its first dimension. Heads, MLP width, layers and sequence must divide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from heapq import heapreplace
from math import prod
from os import PathLike

from lablib.calc.errors import check_stage
from lablib.calc.memory.config import RunConfig, run_config
from lablib.calc.memory.stage import Stage, joined_shapes, shard_params, unit_shapes
from lablib.calc.memory.tape import FP32, INT64, BlockSetting, ids_and_positions, kept_by_kind, run_setting
from lablib.calc.memory.terms import GRADIENT_TERMS, WEIGHT_TERMS, MemoryBreakdown, listed
from lablib.calc.models import ModelConfig
from lablib.calc.parallel import shard_size, state_terms

NF4_BLOCK, NF4_SECOND_BLOCK = 64, 256
ON_DEVICE = {"optimizer": WEIGHT_TERMS + GRADIENT_TERMS, "gradients": WEIGHT_TERMS, "parameters": ()}


def training_memory(
    model: RunConfig | ModelConfig | str | PathLike, *, stage: int | None = None, **settings: object
) -> MemoryBreakdown:
    """Return the bytes that one rank needs, by term.

    Args:
        model: A ModelConfig, the name of a preset, the path of a config.json, or a RunConfig.
        stage: Pipeline stage to describe; None means the one that needs most.
        **settings: Fields of `lablib.calc.memory.RunConfig`; `rung memory --help` explains them.

    Raises:
        ValueError: If a setting is unknown or out of range, sizes do not divide, or settings contradict each other.
    """
    run = run_config(model, **settings)
    if stage is None:
        return max((stage_memory(Stage(run, i)) for i in range(run.pp)), key=lambda memory: memory.total)
    check_stage(stage, run.pp)
    return stage_memory(Stage(run, stage))


def stage_memory(stage: Stage) -> MemoryBreakdown:
    """Return the bytes that a rank of this stage needs.

    Raises:
        ValueError: If the layers cannot be divided into stages.
    """
    run = stage.run
    on_device, on_host = stage_states(stage)
    return MemoryBreakdown(
        model=run.model.name,
        recipe=run.recipe.name,
        stage=stage.number,
        ranks=run.ranks,
        seq=run.seq,
        state_terms=listed(on_device),
        activation_terms=listed(activation_terms(stage)),
        buffer_terms=listed(rank_buffers(stage) | recomputed_layer(stage)),
        host_terms=listed(on_host),
    )


def stage_states(stage: Stage) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of a rank's states by term, on the device and on the host."""
    run = stage.run
    states = {"flat": flat_states, "fsdp2": fsdp2_states, "per-tensor": per_tensor_states}[run.sharding](stage)
    stays = ON_DEVICE.get(run.offload, tuple(states))
    on_device = {name: size for name, size in states.items() if name in stays}
    return on_device, {name: size for name, size in states.items() if name not in stays}


def flat_states(stage: Stage) -> dict[str, int]:
    """Return the bytes of a rank's states by term where ZeRO shards one flat array, before any offload.

    Terms of trained parameters are those of `zero.state_terms`. Frozen weights add to "weights", at the bytes of the
    recipe's weights, sharded at stage 3. QLoRA's are "quantized_weights" and "quantization_constants".
    """
    run, params = stage.run, stage.total_params
    terms: Counter[str] = Counter()
    tensors: list[int] = []  # that the optimizer has as they are, and not in a flat array
    for expert in (False, True):
        ranks = run.replicas(expert)
        trained = state_terms(params["trained", expert], ranks, run.zero, run.recipe, run.optimizer)
        if run.zero == 0 or ranks == 1:
            tensors += stage.sizes("trained", expert)
            trained |= dict.fromkeys(run.optimizer.moments, 0)
        sharers = ranks if weights_are_sharded(run) else 1
        trained["weights"] = shard_size(params["trained", expert], sharers) * run.recipe.weights
        terms.update(trained)
        terms["weights"] += shard_size(params["frozen", expert], sharers) * run.recipe.weights
        matrices = (
            stage.sizes("quantized", expert) if sharers == 1 else (shard_size(params["quantized", expert], sharers),)
        )
        for size in matrices:
            codes, constants = nf4_bytes(size)
            terms["quantized_weights"] += codes
            terms["quantization_constants"] += constants
    terms.update(run.optimizer.bytes_of_tensors(tensors, run.recipe.moment))
    return dict(terms)


def fsdp2_states(stage: Stage) -> dict[str, int]:
    """Return the bytes of a rank's states under FSDP2, which shards each tensor by its rows."""
    run = stage.run
    ranks = run.replicas(False)
    trained = frozen = 0
    sizes: list[int] = []
    for kind, tensors in stage.tensors.items():
        own, others = unit_shapes(run, tensors)
        sizes += [shard_params([shape], ranks) for shape in own] * stage.count[kind]
        trained += stage.count[kind] * shard_params(own, ranks)
        frozen += stage.count[kind] * shard_params(others, ranks)
    terms = state_terms(trained, 1, 0, run.recipe, run.optimizer)
    terms |= run.optimizer.bytes_of_tensors(sizes, run.recipe.moment)
    return terms | {"weights": (trained + frozen) * run.recipe.weights}


def weights_are_sharded(run: RunConfig) -> bool:
    """Return whether a rank stores only its shard of the weights.

    Stage 3 does. FSDP2 does at stage 2 too: `reshard_after_forward=False` keeps unsharded weights beside the shard.
    """
    return run.zero == 3 or (run.zero == 2 and (run.recipe.casts_when_gathered or run.sharding == "fsdp2"))


def all_reduces(run: RunConfig) -> bool:
    """Return whether DDP's all-reduce leaves full gradients on every rank, and its buckets hold a copy of them.

    ZeRO's flat arrays get theirs by reduce-scatter; `ZeroRedundancyOptimizer` works behind DDP.
    """
    return run.zero == 0 or run.sharding == "per-tensor"


def nf4_bytes(params: int) -> tuple[int, int]:
    """Return the bytes of NF4 codes and of their double-quantized constants.

    Half a byte a weight; one 8-bit constant per 64 weights; one fp32 constant per 256 of those: 0.127 bits a weight; and
    the mean of the constants, fp32. Dettmers et al. 2023 (arXiv 2305.14314), section 3; bitsandbytes, `quantize_4bit`.

    Args:
        params: Of one matrix.
    """
    blocks = -(-params // NF4_BLOCK)
    return -(-params // 2), blocks + 4 * -(-blocks // NF4_SECOND_BLOCK) + 4 * bool(params)


def greedy_partition(sizes: Iterable[int], ranks: int) -> list[list[int]]:
    """Return the sizes that each rank gets, as `torch.distributed.optim.ZeroRedundancyOptimizer` divides the optimizer.

    It cuts no tensor. The largest parameter goes to the rank that has least so far, then the next largest:

        sizes 10, 6, 5, 4, 3 on 2 ranks:   rank 0 gets 10, 4     rank 1 gets 6, 5, 3     both 14

    Source: torch/distributed/optim/zero_redundancy_optimizer.py, `_partition_parameters`.

    Raises:
        ValueError: If there is no rank.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]  # a heap: the least first, and of equal ones the lowest rank
    for size in sorted(sizes, reverse=True):
        load, least = loads[0]
        parts[least].append(size)
        heapreplace(loads, (load + size, least))
    return parts


def parts_of_ranks(stage: Stage) -> list[list[int]]:
    """Return the sizes of the parameters whose optimizer states each data-parallel rank holds."""
    return greedy_partition(stage.trained_sizes, stage.run.replicas(False))


def fullest_part(stage: Stage) -> list[int]:
    """Return the sizes on the rank that has most; the first one if several do."""
    return max(parts_of_ranks(stage), key=sum)


def per_tensor_states(stage: Stage) -> dict[str, int]:
    """Return the bytes of states of ZeRO-1 by whole tensors, on the fullest rank: all weights and gradients, its moments.

    A master copy stays unsharded too: it is what the optimizer updates, and every rank gets all of it.
    """
    run, params = stage.run, stage.total_params
    frozen = params["frozen", False] + params["frozen", True]
    trained = params["trained", False] + params["trained", True]
    terms = state_terms(trained, 1, 0, run.recipe, run.optimizer)
    terms["weights"] += frozen * run.recipe.weights
    return terms | run.optimizer.moment_bytes(sum(fullest_part(stage)), run.recipe.moment)


def activation_terms(stage: Stage) -> dict[str, int]:
    """Return the bytes that a stage keeps from forward to backward, by kind.

    A stage's peak holds `in_flight` micro-batches of each of its chunks; Korthikanti et al. (arXiv 2205.05198),
    equation 5 and section 4.2.3. The first stage adds the embedding's, the last the head's: norm, logits, loss.
    """
    run, counts = stage.run, stage.in_flight
    terms: Counter[str] = Counter()
    for chunk, count in zip(stage.chunks, counts, strict=True):
        for setting, alike in alike_settings(stage, chunk).items():
            for kind, size in kept_by_kind("block", setting).items():
                terms[f"activations.{kind}"] += count * alike * size
    ends = run_setting(run, 0, autocast=False)
    if stage.is_first:
        embedding = sum(ids_and_positions(ends).values()) + sum(kept_by_kind("embedding", ends).values())
        terms["activations.embedding"] += counts[0] * embedding
    if stage.is_last:
        for kind, size in kept_by_kind("head", ends).items():
            terms[f"activations.{kind}"] += counts[-1] * size
    return dict(terms)


def alike_settings(stage: Stage, chunk: range) -> Counter[BlockSetting]:
    """Return how the layers of a chunk run, autocast's casts left out, and how many run so."""
    run = stage.run
    dense = run.model.num_dense_layers if run.model.is_moe else run.model.num_layers  # the first ones
    behind = min(int(stage.is_first and run.tuning != "full"), chunk.stop)  # a frozen embedding, which asks no gradient
    found: Counter[BlockSetting] = Counter()
    for start, stop in ((0, behind), (behind, dense), (max(behind, dense), chunk.stop)):
        part = range(max(start, chunk.start), min(stop, chunk.stop))
        if part:
            found[run_setting(run, part[0], behind_embedding=stop == behind, autocast=False)] += len(part)
    return found


def fixed_activations(run: RunConfig, first: bool = True) -> dict[str, int]:
    """Return what a micro-batch keeps beside tapes: token ids, and position ids or rotary tables, shared by blocks."""
    kept = {"tokens": 0, "positions": 0} | ids_and_positions(run_setting(run, 0))
    tokens, positions = kept["tokens"], kept["positions"]
    if not first:
        tokens, positions = 0, 0 if run.model.learned_positions else positions
    if (
        run.model.family in run.implementation.wide_tables
        and run.sharding == "fsdp2"
        and run.recipe.casts_when_gathered
    ):
        # FSDP2 casts what enters a block, and each block keeps tables of its own.
        positions *= run.model.num_layers * run.recipe.gathered // FP32
    own_positions = run.implementation.checkpoints_positions and run.cp == 1  # else the batch has them
    if own_positions and run.recompute == "full" and not run.model.learned_positions:
        positions += run.seq * INT64  # an argument of every block, which a checkpoint holds
    return {"activations.tokens": tokens, "activations.embedding": positions}


def gradients_meet(stage: Stage) -> str:
    """Return how the gradients of earlier micro-batches meet the activations of later ones.

    "never" with one micro-batch; "always" if forwards go on behind the first backward, so that as many are in flight
    as before; "fewer" if all forwards come first, as in GPipe, so that one is gone when gradients are there.
    """
    micro_batches = stage.run.num_microbatches
    if micro_batches is None:
        return "never" if stage.run.pp == 1 else "always"
    if micro_batches == 1:
        return "never"
    return "always" if micro_batches * stage.run.virtual_stages > sum(stage.in_flight) else "fewer"


def rank_buffers(stage: Stage) -> dict[str, int]:
    """Return the bytes of short-lived buffers by term; each is an estimate.

    - gathered_weights: the largest units that ZeRO-3 has unsharded at one time, `1 + prefetch` of them
      (FSDP, arXiv 2304.11277, section 3.2: `K_low max ψ_i`); all of them if FSDP2 does not reshard after forward.
    - communication_buckets: DDP: a second copy of the gradients, unless they live in the buckets. Stages 1 and 2:
      two buckets. Stage 3: the gradients of the largest unit before their reduce-scatter.
    - weight_casts: autocast's low-precision copy of every matrix, kept by autograd until backward.
    - dequantized_weights: QLoRA: the largest matrix in the compute dtype, while it is multiplied.
    - rotary_tables: where they are buffers of the model, and each block has its own.
    - dummy_weight_gradients: where matrices add their gradients to a buffer themselves, what autograd gets in their place.
    """
    run = stage.run
    casts = quantized = 0
    for kind, tensors in stage.tensors.items():
        for tensor in tensors:
            if run.tuning == "qlora" and tensor.is_adapted:
                outputs, inputs = tensor.local_shape(run.tp, run.etp)
                quantized = max(quantized, outputs * inputs)
            elif tensor.inputs > 1 and tensor.component not in ("embedding", "positions"):
                casts += stage.count[kind] * tensor.local_params(run.tp, run.ep, run.etp)
    if run.model.tied and stage.is_last:  # the token table multiplies here, as the head
        own = "head" if run.pp > 1 else "embedding"
        table = next(tensor for tensor in stage.tensors[own] if tensor.component == "embedding")
        casts += table.local_params(run.tp, run.ep)
    return {
        "gathered_weights": _unsharded_weights(stage),
        "communication_buckets": _buckets(stage),
        "weight_casts": run.recipe.casts * casts,
        "dequantized_weights": (run.recipe.casts or run.recipe.gathered) * quantized,
        "dummy_weight_gradients": dummy_gradients(stage),
        # A table for each block, a complex number of fp32 for each pair.
        "rotary_tables": run.implementation.fused_norms * len(stage.layers) * run.seq * run.model.head_dim * FP32,
    }


def dummy_gradients(stage: Stage) -> int:
    """Return the bytes of the dummy gradients of a stage's matrices, of which one exists for every shape.

        Σ bytes of a weight · rows · columns    over the distinct shapes of the blocks' matrices

    Backward makes each of them once, and they stay. The head is no layer of Transformer Engine and makes its own each time.

    Source: transformer_engine/pytorch/module/base.py, `get_dummy_wgrad` and `_dummy_wgrads`, since version 2.3.
    """
    run = stage.run
    if not run.implementation.accumulates_in_kernel or run.tuning != "full":
        return 0
    blocks = [tensors for kind, tensors in stage.tensors.items() if kind.startswith("block")]
    shapes = set().union(*(joined_shapes(run, tensors) for tensors in blocks))
    return run.recipe.weights * sum(map(prod, shapes))


def _unsharded_weights(stage: Stage) -> int:
    run = stage.run
    kept = run.zero == 2 and weights_are_sharded(run)
    copied = run.offload == "parameters" or run.recipe.casts_when_gathered or kept
    if not copied and run.zero < 3:
        return 0
    sizes = {}
    for kind, params in stage.params.items():
        sizes[kind] = 0
        for expert in (False, True):
            if copied or run.replicas(expert) > 1:
                sizes[kind] += (params["trained", expert] + params["frozen", expert]) * run.recipe.gathered
                sizes[kind] += sum(nf4_bytes(params["quantized", expert]))
    units = [sizes[kind] for kind in stage.units]
    return sum(units if kept else sorted(units, reverse=True)[: 1 + run.units_ahead])


def _buckets(stage: Stage) -> int:
    """Gradients on their way to other ranks, or to the CPU."""
    run = stage.run
    to_host = run.offload in ("gradients", "parameters")
    travels = [expert for expert in (False, True) if to_host or run.replicas(expert) > 1]
    sizes = {
        kind: sum(params["trained", expert] for expert in travels) * run.reduced_bytes
        for kind, params in stage.params.items()
    }
    total = sum(sizes[kind] for kind in stage.units)
    if run.implementation.accumulates_in_kernel:
        return 0  # ranks reduce the buffer that the gradients are in
    if run.zero == 3 or weights_are_sharded(run) or run.offload == "parameters":
        return max(sizes.values())
    if all_reduces(run) and not to_host:
        return 0 if run.gradient_as_bucket_view else total
    return min(2 * run.bucket_bytes, total)


def recomputed_layer(stage: Stage) -> dict[str, int]:
    """Return what backward computes again for one layer before it can go through it: the largest layer's.

    It is what that layer would have kept without recomputation, less what it kept anyway. An estimate.
    """
    run = stage.run
    if run.recompute == "none":
        return {}
    recomputed = [
        sum(kept_by_kind("block", replace(setting, recompute="none")).values())
        - sum(kept_by_kind("block", setting).values())
        for chunk in stage.chunks
        for setting in alike_settings(stage, chunk)
    ]
    return {"recomputed_layer": max(recomputed, default=0)}


def autocast_activations(config: ModelConfig, *, batch: int, seq: int) -> dict[str, int]:
    """Return the bytes that autograd keeps under autocast, by term: more than half of fp32, because it casts at every matmul.

    - weight casts: every matrix is cast once in a step and the cast kept until backward.
    - fp32 norms: the stream between blocks is fp32 (fp32 + bf16 is fp32), and a norm keeps its fp32 input.
    - repeated casts: a norm's fp32 output is cast once for each matmul that reads it: q, k, v, and gate and up.
    - fp32 positions: cosines and sines have the dtype of the stream.

    Exact for `lablib.toys.transformer` with fused attention and no dropout on a CPU.

    Args:
        config: A model that the toy transformer can be built from.

    Raises:
        ValueError: If the toy transformer cannot be built from it.
    """
    low = 2  # bytes of a bf16 value
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
        "fp32 norms": (2 * layers + 1) * values_per_norm * (FP32 - low),
        "repeated casts": layers * readers * n * h * low,
        "fp32 positions": positions * (FP32 - low),
    }
