"""Megatron-LM's report of theoretical memory, which a run prints when it starts.

    bytes a parameter: 18 (2 weights, 4 fp32 gradients, 12 optimizer), or 6 + 12/d with its distributed optimizer
    most loaded stage: (blocks / p + embedding) / t, and the head where it is a table of its own and p = 1
    with sequence parallelism: sbh (18 + 4 f/h) L + 8sbp + sbhp, and for p = 1 4sbh (1 + v/h); all divided by t
    without it: (sbh (10 + 24/t) L + 8sbp + sbhp, and for p = 1 2 (sbv/t + sbh)) times 1.05

Both leave the scores out, as selective recomputation or a fused kernel does. f is the width of the MLP.

Source: NVIDIA/Megatron-LM, megatron/training/theoretical_memory_usage.py at commit 00caa53.

Chapter: book/memory_calculator.md
"""

from __future__ import annotations

from lablib.calc.memory_cases import Case
from lablib.calc.params import count_params
from lablib.calc.peer import (
    Peer,
    first_reason,
    keeps_scores,
    only_dense,
    only_full_tuning,
    only_megatron,
    only_published,
    only_sixteen_bits,
    only_with_peak,
    shape,
)

NAME = "Megatron-LM's report"
CITATION = "NVIDIA, Megatron-LM, megatron/training/theoretical_memory_usage.py"
LINK = (
    "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/theoretical_memory_usage.py",
    "megatronmemory",
)
OVERHEAD = 1.05  # "optimizer and miscellaneous temporaries", where there is no sequence parallelism


def shard_parameters(case: Case) -> float:
    """Return the parameters of the most loaded rank: biases are left out, norms are split like matrices.

    Args:
        case: The case.
    """
    x, model, count = shape(case), case.model, count_params(case.model)
    inside = 3 if model.gated_mlp else 2
    width = model.num_experts * model.expert_ffn if model.is_moe else model.ffn
    norm = 2 if model.norm == "layernorm" else 1
    one = inside * x.h * width + 2 * x.h * norm + 2 * x.h * (model.q_width + model.kv_width)
    tables = x.h * x.v * (2 if count.by_component["head"] and x.p == 1 else 1)
    return ((x.layers * one + norm * x.h) / x.p + tables) / x.t


def bytes_per_parameter(ranks: int | None = None) -> dict[str, float]:
    """Return bytes a parameter by term: 18, or 6 + 12/d.

    Args:
        ranks: Data-parallel ranks of the distributed optimizer, d; None: without it.
    """
    kept = ranks or 1
    return {"weights": 2, "fp32 copy": 4 / kept, "gradients": 4, "moments": 8 / kept}


def _covers_states(case: Case) -> str:
    return first_reason(
        only_full_tuning(case),
        only_megatron(case),
        (case.recipe not in ("mixed-bf16", "autocast-bf16"), "it counts bf16 with fp32 gradients only"),
        (case.optimizer != "adamw", "it has Adam only"),
        only_published(case),
        (case.shards, "its distributed optimizer does not shard the weights"),
    )


def _states(case: Case) -> dict[str, float]:
    params = shard_parameters(case)
    return {term: size * params for term, size in bytes_per_parameter().items()}


def _covers_activations(case: Case) -> str:
    return first_reason(
        only_full_tuning(case),
        only_dense(case),
        only_sixteen_bits(case),
        only_published(case),
        (case.recompute == "full", "it has no sum for full recomputation"),
        (keeps_scores(case), "it takes for granted that no scores are kept"),
    )


def activations(case: Case) -> dict[str, float]:
    """Return the bytes of a first stage by kind.

    Args:
        case: The case.
    """
    x = shape(case)
    ids, mask = 8 * x.s * x.b * x.p, x.sbh * x.p
    if case.sequence_parallel:
        wide = 4 * case.model.ffn / x.h
        own = {"norms": 4 * x.sbh * x.layers, "attention": 11 * x.sbh * x.layers}
        own |= {"mlp": (3 + wide) * x.sbh * x.layers, "embedding": ids + mask}
        own["head"] = 4 * x.sbh * (1 + x.v / x.h) if x.p == 1 else 0
        return {kind: size / x.t for kind, size in own.items()}
    own = {"norms": 4 * x.sbh * x.layers, "attention": (3 + 8 / x.t) * x.sbh * x.layers}
    own |= {"mlp": (3 + 16 / x.t) * x.sbh * x.layers, "embedding": ids + mask}
    own["head"] = 2 * (x.s * x.b * x.v / x.t + x.sbh) if x.p == 1 else 0
    return {kind: OVERHEAD * size for kind, size in own.items()}


def _covers_total(case: Case) -> str:
    return first_reason(only_with_peak(case)) or _covers_states(case) or _covers_activations(case)


def _total(case: Case) -> dict[str, float]:
    return {"states": sum(_states(case).values()), "activations": sum(activations(case).values())}


PEERS = (
    Peer(NAME, "states", CITATION, _covers_states, _states, *LINK),
    Peer(NAME, "activations", CITATION, _covers_activations, activations, *LINK),
    Peer(NAME, "total", CITATION, _covers_total, _total, *LINK),
)
