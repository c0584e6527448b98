"""What a setup costs beside memory: the predicted step, and the states that it surely holds.

The step is the planner's: `plan_time` with the constants of `plan_fit`, for the same sequences in every step. What the
planner does not know is added: states on the CPU cross the host link twice and are updated there, at no more than the
host link's rate, and nothing hides either. LoRA is timed as if all weights were trained, an upper bound.
"""

from __future__ import annotations

from functools import lru_cache

from lablib.calc.breakdown import GRADIENT_TERMS, WEIGHT_TERMS
from lablib.calc.links import LINKS
from lablib.calc.memory import training_memory
from lablib.calc.memory_fit_setup import Setup
from lablib.calc.models import ModelConfig
from lablib.calc.offload import CPU_ADAM_BYTES
from lablib.calc.plan_cluster import Cluster, cluster
from lablib.calc.plan_fit import EFFICIENCY
from lablib.calc.plan_job import Workload
from lablib.calc.plan_layout import Layout
from lablib.calc.plan_time import step_time
from lablib.calc.rank_memory import weights_are_sharded
from lablib.calc.recipes import Recipe
from lablib.calc.run_config import RunConfig
from lablib.calc.tensors import embedding_tensors, head_tensors, layer_tensors
from lablib.calc.zero import state_terms


def rank_params(run: RunConfig) -> tuple[float, float]:
    """Return (all, trained) parameters of a rank, the mean over pipeline stages."""
    every, adapters = _model_params(run.model, run.tp, run.ep, run.lora_rank, run.lora_targets)
    return every / run.pp, (every if run.tuning == "full" else adapters) / run.pp


@lru_cache(maxsize=256)
def _model_params(model: ModelConfig, tp: int, ep: int, lora_rank: int, lora_targets: str) -> tuple[int, int]:
    """(All parameters, those of adapters) of a rank that has all layers."""
    dense = model.num_dense_layers if model.is_moe else model.num_layers
    parts = [(embedding_tensors(model) + head_tensors(model), 1)]
    for first, layers in ((0, dense), (dense, model.num_layers - dense)):  # two kinds of block at most
        parts += [(layer_tensors(model, first), layers)] if layers else []
    every = sum(times * tensor.local_params(tp, ep) for part, times in parts for tensor in part)
    adapters = sum(
        times * tensor.adapter_params(lora_rank, tp, ep)
        for part, times in parts
        for tensor in part
        if tensor.is_adapted and lora_targets in ("all", tensor.component)
    )
    return every, adapters


def host_bytes(have: Setup) -> float:
    """Return the bytes that cross between a rank's card and the CPU in a step, both ways together.

    Gradients go down and weights come up. Offloaded weights come up twice in every micro-batch, for forward and for
    backward; offloaded gradients go down in every micro-batch.
    """
    run, m = have.run, have.micro_batches
    every, trained = rank_params(run)
    ranks = run.dp * run.cp
    own = trained / (ranks if run.zero else 1)
    stored = every / (ranks if run.zero == 3 else 1)
    down, up = run.recipe.gradients * own, run.recipe.weights * own
    return {
        "none": 0.0,
        "optimizer": down + up,
        "gradients": m * down + up,
        "parameters": m * (down + 2 * run.recipe.weights * stored),
    }[run.offload]


def host_seconds(have: Setup) -> float:
    """Return the seconds that offload adds to a step if nothing hides them: the link, and AdamW on the CPU.

    The CPU's memory is taken to serve one rank at the rate of its host link, which is about what a node's channels give
    each of its GPUs. ValueError if something is offloaded and the GPU has no host link in the table.
    """
    run = have.run
    if run.offload == "none":
        return 0.0
    if have.card.host is None:
        raise ValueError(f"offload={run.offload!r}: {have.card.name} has no link to the CPU in the table")
    own = rank_params(run)[1] / (run.dp * run.cp if run.zero else 1)
    return (host_bytes(have) + CPU_ADAM_BYTES * own) / LINKS[have.card.host].bandwidth


def step_seconds(have: Setup) -> float:
    """Return the predicted seconds of a step of `have.sequences` sequences.

    Raises:
        ValueError: If the GPU has no link in the table and none was given, or the layers are cut in a way that the
            planner does not know.
    """
    run = have.run
    layout = Layout(
        tp=run.tp, cp=run.cp, ep=run.ep, dp=run.dp, pp=run.pp, zero=run.zero, micro_batch=run.micro_batch,
        recompute=run.recompute, schedule=run.schedule, virtual_stages=run.virtual_stages,
    )  # fmt: skip
    job = _workload(
        run.model, _cluster(have), run.seq, have.sequences, run.recipe, run.attention, run.sequence_parallel
    ).job(layout)
    return sum(step_time(job, EFFICIENCY).values()) + host_seconds(have)


def predicted_seconds(have: Setup) -> float | None:
    """Return `step_seconds`, or None where the planner has no answer."""
    try:
        return step_seconds(have)
    except ValueError:
        return None  # no link of this card in the table, or stages that the planner does not know


def state_bytes(run: RunConfig, params: int, ranks: int, zero: int) -> int:
    """Return the bytes of states on the card for so many parameters, gradients left out: they come and go.

    Args:
        run: The run; its recipe, optimizer and offload count.
        params: Parameters of a rank before ZeRO.
        ranks: Ranks over which ZeRO shards.
        zero: The stage.
    """
    if run.offload == "parameters":
        return 0
    if run.tuning != "full":  # the frozen weights: NF4 codes are half a byte, and nothing is less
        share = params // (ranks if zero and weights_are_sharded(run) else 1)
        return share * run.recipe.weights if run.tuning == "lora" else share // 2
    terms = state_terms(params, ranks, zero, run.recipe, run.optimizer)
    weights = params // (ranks if zero and weights_are_sharded(run) else 1) * run.recipe.weights
    others = sum(terms.values()) - sum(
        terms.get(name, 0) for name in (*WEIGHT_TERMS, *GRADIENT_TERMS, "gradient_copy")
    )
    return weights + (others if run.offload == "none" else 0)


def least_states(have: Setup) -> int:
    """Return bytes that some rank surely needs: its states, if the stages were equal and gradients were gone.

    Where a timeline would be walked through, what forward keeps is added, which costs little to ask: it is all there
    when forward ends. (With adapters `training_memory` gives an upper bound of that, so it is left out.)
    """
    run = have.run
    least = state_bytes(run, int(rank_params(run)[0]), run.dp * run.cp, run.zero)
    if not run.kernels.eager or run.tuning != "full" or least > have.budget:
        return least
    return least + _kept(run)


@lru_cache(maxsize=4096)
def _kept(run: RunConfig) -> int:
    return min(training_memory(run, stage=stage).activations for stage in range(run.pp))


def _cluster(have: Setup) -> Cluster:
    # One GPU sends nothing: any rate will do where the table has no link.
    alone = have.gpus == 1 and (have.card.scale_up or have.card.host) is None
    intra = 1.0 if alone and have.intra is None else have.intra
    return cluster(have.card, have.gpus, gpus_per_node=have.gpus_per_node, nic=have.nic, intra=intra)


_WORKLOADS: dict[tuple, Workload] = {}


def _workload(
    model: ModelConfig,
    machine: Cluster,
    seq: int,
    sequences: int,
    dtypes: Recipe,
    attention: str,
    sequence_parallel: bool,
) -> Workload:
    """Return a Workload that remembers what layouts share; only the last few are kept."""
    key = (
        model, machine.gpu.name, machine.gpus, machine.gpus_per_node, machine.intra, machine.inter,
        seq, sequences, dtypes, attention, sequence_parallel,
    )  # fmt: skip
    if key not in _WORKLOADS:
        if len(_WORKLOADS) >= 8:
            _WORKLOADS.clear()
        _WORKLOADS[key] = Workload(model, machine, seq, sequences, dtypes, attention, sequence_parallel)
    return _WORKLOADS[key]
