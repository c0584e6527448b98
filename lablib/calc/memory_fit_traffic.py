"""The bytes that one rank of a setup sends in a step, and those that cross to its CPU.

Bytes of data parallelism, for n = dp cp ranks, m micro-batches, W weights and T trained ones on a rank, with g and w
bytes a gradient and a gathered weight (ZeRO, arXiv 1910.02054, section 7):

    stage 0   2 g T          stage 2   m g T + w T
    stage 1   g T + w T      stage 3   m (2 w W + g T)            times (n - 1) / n

Chapter: book/07_3d_parallelism.md
"""

from __future__ import annotations

from functools import lru_cache

from lablib.calc.memory_fit_setup import Setup
from lablib.calc.models import ModelConfig
from lablib.calc.parallelism import pipeline_traffic, tensor_traffic
from lablib.calc.run_config import RunConfig
from lablib.calc.tensors import embedding_tensors, head_tensors, layer_tensors


def rank_params(run: RunConfig) -> tuple[float, float]:
    """Return (all, trained) parameters of a rank, the mean over pipeline stages.

    Args:
        run: The run.
    """
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


def data_bytes(have: Setup) -> float:
    """Return the bytes that a rank sends for data parallelism in a step, by the table above.

    FSDP2 with zero=2 gathers once for every micro-batch, since it keeps the weights until backward.

    Args:
        have: The setup.
    """
    run, m = have.run, have.micro_batches
    every, trained = rank_params(run)
    gradients, weights = run.recipe.gradients * trained, run.recipe.gathered * trained
    sent = {
        0: 2 * gradients,
        1: gradients + weights,
        2: m * gradients + weights,
        3: m * (2 * run.recipe.gathered * every + gradients),
    }[run.zero]
    if run.sharding == "fsdp2" and run.zero == 2:
        sent = m * (run.recipe.gathered * every + gradients)
    ranks = run.dp * run.cp
    return sent * (ranks - 1) / ranks


def tensor_bytes(have: Setup) -> float:
    """Return the bytes that a rank sends for tensor parallelism in a step; full recomputation repeats forward's half.

    Args:
        have: The setup.
    """
    run = have.run
    sent = tensor_traffic(run.model, run.tp, tokens=_tokens(have), bytes_per_value=run.recipe.activation)
    return sent.bytes_sent / run.pp * (1.5 if run.recompute == "full" else 1)


def pipeline_bytes(have: Setup) -> float:
    """Return the bytes that a middle stage sends in a step, per rank of its tensor-parallel group.

    Args:
        have: The setup.
    """
    run = have.run
    sent = pipeline_traffic(run.model, run.pp, tokens=_tokens(have), bytes_per_value=run.recipe.activation)
    return sent.bytes_sent * run.virtual_stages / run.tp


def context_bytes(have: Setup) -> float:
    """Return the bytes of keys and values, and of their gradients, that a rank sends in a step.

    Full recomputation gathers keys and values again.

    Args:
        have: The setup.
    """
    run = have.run
    keys_and_values = 2 * _tokens(have) * run.cp * run.model.kv_width / run.tp * run.recipe.activation
    times = 3 if run.recompute == "full" else 2
    return times * run.model.num_layers / run.pp * keys_and_values * (run.cp - 1) / run.cp


def host_bytes(have: Setup) -> float:
    """Return the bytes that cross between a rank's card and the CPU in a step, both ways together.

    Gradients go down and weights come up. Offloaded weights come up twice in every micro-batch, for forward and for
    backward; offloaded gradients go down in every micro-batch.

    Args:
        have: The setup.
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


def _tokens(have: Setup) -> int:
    """Tokens that one replica's rank of context parallelism sees in a step."""
    run = have.run
    return run.micro_batch * have.micro_batches * run.seq // run.cp
