"""States and buffers of one rank: weights, gradients and optimizer under ZeRO and FSDP2, and what collectives need."""

from __future__ import annotations

from collections import Counter

from lablib.calc.breakdown import GRADIENT_TERMS, WEIGHT_TERMS, MemoryBreakdown
from lablib.calc.fsdp_shards import shard_params, unit_shapes
from lablib.calc.memory_stage import Stage
from lablib.calc.run_activations import activation_terms, recomputed_layer
from lablib.calc.run_config import RunConfig
from lablib.calc.zero import shard, state_terms
from lablib.calc.zero_whole import whole_states

NF4_BLOCK, NF4_SECOND_BLOCK = 64, 256
ON_DEVICE = {"optimizer": WEIGHT_TERMS + GRADIENT_TERMS, "gradients": WEIGHT_TERMS, "parameters": ()}


def stage_memory(stage: Stage) -> MemoryBreakdown:
    """Return the bytes that a rank of this stage needs.

    Raises:
        ValueError: If the layers cannot be divided into stages.
    """
    run = stage.run
    states = {"flat": flat_states, "fsdp2": fsdp2_states, "whole": whole_states}[run.sharding](stage)
    stays = ON_DEVICE.get(run.offload, tuple(states))
    return MemoryBreakdown(
        model=run.model.name,
        recipe=run.recipe.name,
        stage=stage.number,
        ranks=run.ranks,
        seq=run.seq,
        state_terms=_listed({name: size for name, size in states.items() if name in stays}),
        activation_terms=_listed(activation_terms(stage)),
        buffer_terms=_listed(rank_buffers(stage) | recomputed_layer(stage)),
        host_terms=_listed({name: size for name, size in states.items() if name not in stays}),
    )


def _listed(terms: dict[str, int]) -> tuple[tuple[str, int], ...]:
    # A term that this run does not have is left out.
    return tuple((name, size) for name, size in terms.items() if size)


def flat_states(stage: Stage) -> dict[str, int]:
    """Return the bytes of a rank's states by term where ZeRO shards one flat array, before any offload.

    Terms of trained parameters are those of `zero.state_terms`. Frozen weights add to "weights", at the bytes of the
    recipe's weights, sharded at stage 3. QLoRA's are "quantized_weights" and "quantization_constants".
    """
    run, params = stage.run, stage.total_params
    terms: Counter[str] = Counter()
    for expert in (False, True):
        ranks = run.replicas(expert)
        trained = state_terms(params["trained", expert], ranks, run.zero, run.recipe, run.optimizer)
        sharers = ranks if weights_are_sharded(run) else 1
        trained["weights"] = shard(params["trained", expert], sharers) * run.recipe.weights
        terms.update(trained)
        terms["weights"] += shard(params["frozen", expert], sharers) * run.recipe.weights
        codes, constants = nf4_bytes(shard(params["quantized", expert], sharers))
        terms["quantized_weights"] += codes
        terms["quantization_constants"] += constants
    return dict(terms)


def fsdp2_states(stage: Stage) -> dict[str, int]:
    """Return the bytes of a rank's states under FSDP2, which shards each tensor by its rows."""
    run = stage.run
    ranks = run.replicas(False)
    trained = frozen = 0
    for kind, tensors in stage.tensors.items():
        own, others = unit_shapes(run, tensors)
        trained += stage.count[kind] * shard_params(own, ranks)
        frozen += stage.count[kind] * shard_params(others, ranks)
    terms = state_terms(trained, 1, 0, run.recipe, run.optimizer)
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
    return run.zero == 0 or run.sharding == "whole"


def nf4_bytes(params: int) -> tuple[int, int]:
    """Return the bytes of NF4 codes and of their double-quantized constants.

    Half a byte a weight; one 8-bit constant per 64 weights; one fp32 constant per 256 of those: 0.127 bits a weight.
    Dettmers et al. 2023 (arXiv 2305.14314), section 3.
    """
    blocks = -(-params // NF4_BLOCK)
    return -(-params // 2), blocks + 4 * -(-blocks // NF4_SECOND_BLOCK)


def rank_buffers(stage: Stage) -> dict[str, int]:
    """Return the bytes of short-lived buffers by term; each is an estimate.

    - gathered_weights: the largest units that ZeRO-3 has unsharded at one time, `1 + prefetch` of them
      (FSDP, arXiv 2304.11277, section 3.2: `K_low max ψ_i`); all of them if FSDP2 does not reshard after forward.
    - communication_buckets: DDP: a second copy of the gradients, unless they live in the buckets. Stages 1 and 2:
      two buckets. Stage 3: the gradients of the largest unit before their reduce-scatter.
    - weight_casts: autocast's low-precision copy of every matrix, kept by autograd until backward.
    - dequantized_weights: QLoRA: the largest matrix in the compute dtype, while it is multiplied.
    """
    run = stage.run
    casts = quantized = 0
    for kind, tensors in stage.tensors.items():
        for tensor in tensors:
            if run.tuning == "qlora" and tensor.is_adapted:
                outputs, inputs = tensor.shape(run.tp)
                quantized = max(quantized, outputs * inputs)
            elif tensor.inputs > 1 and tensor.component not in ("embedding", "positions"):
                casts += stage.count[kind] * tensor.local_params(run.tp, run.ep)
    if run.model.tied and stage.is_last:  # the token table multiplies here, as the head
        own = "head" if run.pp > 1 else "embedding"
        table = next(tensor for tensor in stage.tensors[own] if tensor.component == "embedding")
        casts += table.local_params(run.tp, run.ep)
    return {
        "gathered_weights": _unsharded_weights(stage),
        "communication_buckets": _buckets(stage),
        "weight_casts": run.recipe.casts * casts,
        "dequantized_weights": (run.recipe.casts or run.recipe.gathered) * quantized,
    }


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
    return sum(units if kept else sorted(units, reverse=True)[: 1 + run.prefetch])


def _buckets(stage: Stage) -> int:
    """Gradients on their way to other ranks, or to the CPU."""
    run = stage.run
    to_host = run.offload in ("gradients", "parameters")
    travels = [expert for expert in (False, True) if to_host or run.replicas(expert) > 1]
    sizes = {
        kind: sum(params["trained", expert] for expert in travels) * run.recipe.gradients
        for kind, params in stage.params.items()
    }
    total = sum(sizes[kind] for kind in stage.units)
    if run.zero == 3 or weights_are_sharded(run) or run.offload == "parameters":
        return max(sizes.values())
    if all_reduces(run) and not to_host:
        return 0 if run.gradient_as_bucket_view else total
    return min(2 * run.bucket_bytes, total)
