"""The memory of one rank in one pipeline stage: states, activations and buffers of a `RunConfig`.

The parameters of a rank come in units: the embedding, each block, the head. A unit is what FSDP gathers at a time.
In a unit each parameter is trained, frozen (LoRA) or quantized (QLoRA), and belongs to a routed expert or not.

Chapter: book/01_why_distributed.md
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from lablib.calc.breakdown import GRADIENT_TERMS, WEIGHT_TERMS, MemoryBreakdown
from lablib.calc.fsdp_shards import shard_params, unit_shapes
from lablib.calc.run_activations import activation_terms, recomputed_layer
from lablib.calc.run_config import RunConfig
from lablib.calc.stages import layers_of_stage
from lablib.calc.tensors import Tensor, embedding_tensors, head_tensors, layer_tensors
from lablib.calc.zero import shard, state_terms
from lablib.calc.zero_whole import whole_states

Unit = Counter  # (kind, expert) -> parameters of this rank; kind is "trained", "frozen" or "quantized"

NF4_BLOCK, NF4_SECOND_BLOCK = 64, 256


def stage_memory(run: RunConfig, stage: int) -> MemoryBreakdown:
    """Return the bytes that a rank of this stage needs.

    Args:
        run: The run.
        stage: Pipeline stage, from 0.

    Raises:
        ValueError: If the layers cannot be divided into stages.
    """
    chunks = layers_of_stage(run.model.num_layers, run.pp, run.virtual_stages, run.layers_per_stage, stage)
    tensors = stage_tensors(run, stage, chunks)
    params = {id(members): unit_params(run, members) for members in {id(m): m for m in tensors}.values()}
    units = [params[id(members)] for members in tensors]  # equal blocks are one list, counted once
    if run.sharding == "fsdp2":
        states = fsdp2_states(run, tensors)
    elif run.sharding == "whole":
        states = whole_states(run, tensors, total_params(units))
    else:
        states = rank_states(run, units)
    stays = {
        "none": tuple(states),
        "optimizer": WEIGHT_TERMS + GRADIENT_TERMS,
        "gradients": WEIGHT_TERMS,
        "parameters": (),
    }[run.offload]
    return MemoryBreakdown(
        model=run.model.name,
        recipe=run.recipe.name,
        stage=stage,
        ranks=run.ranks,
        seq=run.seq,
        state_terms=_listed({name: size for name, size in states.items() if name in stays}),
        activation_terms=_listed(activation_terms(run, stage, chunks)),
        buffer_terms=_listed(rank_buffers(run, units, tensors) | recomputed_layer(run, chunks)),
        host_terms=_listed({name: size for name, size in states.items() if name not in stays}),
    )


def _listed(terms: dict[str, int]) -> tuple[tuple[str, int], ...]:
    # A term that this run does not have is left out.
    return tuple((name, size) for name, size in terms.items() if size)


def stage_tensors(run: RunConfig, stage: int, chunks: list[range]) -> list[list[Tensor]]:
    """Return the tensors of a stage, unit by unit: embedding on the first stage, blocks, head on the last.

    With tied embeddings and several stages the last stage holds a copy of the token table, as Megatron-LM does.

    Args:
        run: The run.
        stage: Pipeline stage, from 0.
        chunks: The layers of the stage.
    """
    config = run.model
    kinds = {config.has_experts(layer): layer for chunk in chunks for layer in chunk}
    blocks = {kind: layer_tensors(config, layer) for kind, layer in kinds.items()}
    units = [blocks[config.has_experts(layer)] for chunk in chunks for layer in chunk]
    if stage == 0:
        # Hugging Face's plan splits the head's vocabulary, and not the embedding's.
        whole = run.kernels != "paper"
        units.insert(0, [replace(t, split="") if whole else t for t in embedding_tensors(config)])
    if stage == run.pp - 1:
        copy = embedding_tensors(config)[:1] if config.tied and run.pp > 1 else []
        units.append(head_tensors(config) + copy)
    return units


def unit_params(run: RunConfig, tensors: list[Tensor]) -> Unit:
    """Return the parameters of one unit on this rank, by kind and by whether they belong to an expert.

    Args:
        run: The run.
        tensors: The tensors of the unit.
    """
    unit = Unit()
    for tensor in tensors:
        params = tensor.local_params(run.tp, run.ep)
        if run.tuning == "full":
            unit["trained", tensor.is_expert] += params
            continue
        kind = "quantized" if run.tuning == "qlora" and tensor.is_adapted else "frozen"
        unit[kind, tensor.is_expert] += params
        if tensor.is_adapted and run.lora_targets in ("all", tensor.component):
            unit["trained", tensor.is_expert] += tensor.adapter_params(run.lora_rank, run.tp, run.ep)
    return unit


def total_params(units: list[Unit]) -> Unit:
    """Return the parameters of all units together.

    Args:
        units: Those that are one and the same object are counted, not added one by one.
    """
    alike, total = Counter(map(id, units)), Unit()
    for unit in {id(unit): unit for unit in units}.values():
        for kind, params in unit.items():
            total[kind] += alike[id(unit)] * params
    return total


def rank_states(run: RunConfig, units: list[Unit]) -> dict[str, int]:
    """Return the bytes of a rank's states by term, before any offload.

    Terms of trained parameters are those of `zero.state_terms`. Frozen weights add to "weights", at the bytes of the
    recipe's weights, sharded at stage 3. QLoRA's are "quantized_weights" and "quantization_constants".

    Args:
        run: The run.
        units: The stage's parameters.
    """
    params = total_params(units)
    terms: Counter[str] = Counter()
    for expert in (False, True):
        ranks = run.replicas(expert)
        trained = state_terms(params["trained", expert], ranks, run.zero, run.recipe, run.optimizer)
        holds = ranks if weights_are_sharded(run) else 1
        trained["weights"] = shard(params["trained", expert], holds) * run.recipe.weights
        terms.update(trained)
        terms["weights"] += shard(params["frozen", expert], holds) * run.recipe.weights
        codes, constants = nf4_bytes(shard(params["quantized", expert], holds))
        terms["quantized_weights"] += codes
        terms["quantization_constants"] += constants
    return dict(terms)


def fsdp2_states(run: RunConfig, tensors: list[list[Tensor]]) -> dict[str, int]:
    """Return the bytes of a rank's states under FSDP2, which shards each tensor by its rows.

    Args:
        run: The run.
        tensors: The stage's tensors, unit by unit.
    """
    ranks = run.replicas(False)
    parts = [unit_shapes(run, unit) for unit in tensors]
    trained, frozen = (sum(shard_params(part[i], ranks) for part in parts) for i in (0, 1))
    terms = state_terms(trained, 1, 0, run.recipe, run.optimizer)
    return terms | {"weights": (trained + frozen) * run.recipe.weights}


def weights_are_sharded(run: RunConfig) -> bool:
    """Return whether a rank stores only its shard of the weights.

    Stage 3 does. FSDP2 does at stage 2 too: `reshard_after_forward=False` keeps gathered weights beside the shard.

    Args:
        run: The run.
    """
    return run.zero == 3 or (run.zero == 2 and (run.recipe.casts_when_gathered or run.sharding == "fsdp2"))


def all_reduces(run: RunConfig) -> bool:
    """Return whether DDP's all-reduce leaves whole gradients on every rank, and its buckets hold a copy of them.

    ZeRO's flat arrays get theirs by reduce-scatter; `ZeroRedundancyOptimizer` works behind DDP.

    Args:
        run: The run.
    """
    return run.zero == 0 or run.sharding == "whole"


def nf4_bytes(params: int) -> tuple[int, int]:
    """Return the bytes of NF4 codes and of their double-quantized constants.

    Half a byte a weight; one 8-bit constant per 64 weights; one fp32 constant per 256 of those: 0.127 bits a weight.
    Dettmers et al. 2023 (arXiv 2305.14314), section 3.

    Args:
        params: Quantized weights, as one flat array.
    """
    blocks = -(-params // NF4_BLOCK)
    return -(-params // 2), blocks + 4 * -(-blocks // NF4_SECOND_BLOCK)


def rank_buffers(run: RunConfig, units: list[Unit], tensors: list[list[Tensor]]) -> dict[str, int]:
    """Return the bytes of short-lived buffers by term; each is an estimate.

    - gathered_weights: the largest units that ZeRO-3 has whole at one moment, `1 + prefetch` of them
      (FSDP, arXiv 2304.11277, section 3.2: `K_low max ψ_i`); all of them if FSDP2 does not reshard after forward.
    - communication_buckets: DDP: a second copy of the gradients, unless they live in the buckets. Stages 1 and 2:
      two buckets. Stage 3: the gradients of the largest unit before their reduce-scatter.
    - weight_casts: autocast's low-precision copy of every matrix, kept by autograd until backward.
    - dequantized_weights: QLoRA: the largest matrix in the compute dtype, while it is multiplied.

    Args:
        run: The run.
        units: The stage's parameters.
        tensors: The stage's tensors, for what is per matrix.
    """
    alike = Counter(map(id, tensors))
    flat = [(t, alike[i]) for i, unit in {id(unit): unit for unit in tensors}.items() for t in unit]
    matrices = [(t, n) for t, n in flat if t.inputs > 1 and t.component not in ("embedding", "positions")]
    if run.model.tied and any(t.component == "final_norm" for t, _ in flat):
        tables = [(t, n) for t, n in flat if t.component == "embedding"]
        matrices += tables[:1]  # it multiplies here, as the head
    quantized = [t for t, _ in flat if t.is_adapted] if run.tuning == "qlora" else []
    compute = run.recipe.casts or run.recipe.gathered
    return {
        "gathered_weights": _gathered_weights(run, units),
        "communication_buckets": _buckets(run, units),
        "weight_casts": run.recipe.casts
        * sum(
            n * t.local_params(run.tp, run.ep)
            for t, n in matrices
            if run.tuning != "qlora" or not t.is_adapted
        ),
        "dequantized_weights": compute
        * max((o * i for o, i in (t.shape(run.tp) for t in quantized)), default=0),
    }


def _gathered_weights(run: RunConfig, units: list[Unit]) -> int:
    kept = run.zero == 2 and weights_are_sharded(run)
    whole = run.offload == "parameters" or run.recipe.casts_when_gathered or kept
    if not whole and run.zero < 3:
        return 0
    found = {}
    for unit in {id(unit): unit for unit in units}.values():
        size = 0
        for expert in (False, True):
            if whole or run.replicas(expert) > 1:
                size += (unit["trained", expert] + unit["frozen", expert]) * run.recipe.gathered
                size += sum(nf4_bytes(unit["quantized", expert]))
        found[id(unit)] = size
    sizes = [found[id(unit)] for unit in units]
    return sum(sizes if kept else sorted(sizes, reverse=True)[: 1 + run.prefetch])


def _buckets(run: RunConfig, units: list[Unit]) -> int:
    """Gradients on their way to other ranks, or to the CPU."""
    to_host = run.offload in ("gradients", "parameters")
    travels = [expert for expert in (False, True) if to_host or run.replicas(expert) > 1]
    alike = {id(unit): unit for unit in units}
    found = {i: sum(unit["trained", expert] for expert in travels) for i, unit in alike.items()}
    per_unit = [found[id(unit)] * run.recipe.gradients for unit in units]
    if run.zero == 3 or weights_are_sharded(run) or run.offload == "parameters":
        return max(per_unit)
    if all_reduces(run) and not to_host:
        return 0 if run.gradient_as_bucket_view else sum(per_unit)
    return min(2 * run.bucket_bytes, sum(per_unit))
