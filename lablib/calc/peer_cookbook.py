"""EleutherAI's calculator, a script with a switch for most settings of GPT-NeoX.

    parameters: 2vh + hs + 8hL + 2h + 2 (1 + a_kv/a) L h² + n L h f          n matrices of an MLP, f wide, for each expert
    bytes each: weights 2 (4 without mixed precision), gradients as told, optimizer 12; ZeRO divides by the GPUs
    activations: sbhL (16w + 2 + (2w + 1) as/h), w bytes a value; checkpointing leaves the scores out
    buffers: with ZeRO a bucket of 5e8 parameters, with ZeRO-3 1e9 parameters that are live

Both buffers are DeepSpeed's defaults; a model that is smaller cannot fill them, so they are at most the model.

Source: EleutherAI/cookbook, calc/calc_transformer_mem.py at commit 069ae2e.

Chapter: book/memory_calculator.md
"""

from __future__ import annotations

from lablib.calc.memory_cases import Case
from lablib.calc.peer import (
    MIXED,
    Peer,
    first_reason,
    keeps_scores,
    only_full_tuning,
    only_megatron,
    only_published,
    only_with_peak,
    shape,
)
from lablib.calc.recipes import recipe

NAME = "EleutherAI's calculator"
CITATION = "EleutherAI, cookbook, calc/calc_transformer_mem.py"
LINK = ("https://github.com/EleutherAI/cookbook/blob/main/calc/calc_transformer_mem.py", "eleuthercookbook")
BUCKET, LIVE = 5e8, 1e9


def counted_parameters(
    hidden: int, layers: int, vocab: int, seq: int, *, width: int, matrices: int = 2, kv_ratio: float = 1.0
) -> float:
    """Return the parameters that it counts: two tables, positions, and four norms a block whatever the model has.

    Args:
        hidden: h.
        layers: L.
        vocab: v.
        seq: s: it takes positions to be as many as tokens.
        width: Of an MLP, all experts together.
        matrices: Of an MLP.
        kv_ratio: Key and value heads for each query head.
    """
    block = 2 * (1 + kv_ratio) * hidden**2 + matrices * hidden * width
    return 2 * vocab * hidden + hidden * seq + 8 * hidden * layers + 2 * hidden + layers * block


def model_parameters(case: Case) -> float:
    """Return the parameters that it counts in a case.

    Args:
        case: The case.
    """
    x, model = shape(case), case.model
    width = model.num_experts * model.expert_ffn if model.is_moe else model.ffn
    how = {"matrices": 3 if model.gated_mlp else 2, "kv_ratio": model.num_kv_heads / x.a}
    return counted_parameters(x.h, x.layers, x.v, x.s, width=width, **how)


def _covers_states(case: Case) -> str:
    return first_reason(
        only_full_tuning(case),
        only_megatron(case),
        (case.recipe not in (*MIXED, "fp32"), "its optimizer keeps fp32 states"),
        (case.optimizer != "adamw", "it has Adam only"),
        only_published(case),
    )


def _states(case: Case) -> dict[str, float]:
    split = case.tp * case.pp
    # ZeRO divides by all GPUs, tensor-parallel ones too.
    params, shards = model_parameters(case), case.dp * case.tp if case.shards else 1
    weights = 2 if case.recipe in MIXED else 4
    # Only the weights are divided by tensor and pipeline parallelism.
    return {
        "weights": weights * params / split / shards,
        "gradients": recipe(case.recipe).gradients * params / shards,
        "fp32 copy": 4 * params / shards,
        "moments": 8 * params / shards,
    }


def _covers_activations(case: Case) -> str:
    return first_reason(
        only_full_tuning(case),
        only_published(case),
        (case.recompute == "full", "it has one kind of checkpointing, which keeps 34 bytes"),
    )


def _activations(case: Case) -> dict[str, float]:
    x, w = shape(case), recipe(case.recipe).activation
    # Norms, attention and MLP as in Korthikanti et al., of which this is a sum for any width of a value.
    kept = {"norms": 2 * w, "attention": 5 * w + 1, "mlp": 9 * w + 1}
    terms = {kind: size * x.sbh * x.layers for kind, size in kept.items()}
    if keeps_scores(case):
        terms["attention"] += (2 * w + 1) * x.a * x.s * x.s * x.b * x.layers
    split = case.tp if case.sequence_parallel else 1
    return {kind: size / split for kind, size in terms.items()}


def _covers_total(case: Case) -> str:
    return first_reason(only_with_peak(case)) or _covers_states(case) or _covers_activations(case)


def _total(case: Case) -> dict[str, float]:
    weights, params = 2 if case.recipe in MIXED else 4, model_parameters(case)
    buffers = weights * (min(BUCKET, params) + min(LIVE, params)) if case.shards else 0
    kept = {"states": sum(_states(case).values()), "activations": sum(_activations(case).values())}
    return kept | {"buffers": buffers}


PEERS = (
    Peer(NAME, "states", CITATION, _covers_states, _states, *LINK),
    Peer(NAME, "activations", CITATION, _covers_activations, _activations, *LINK),
    Peer(NAME, "total", CITATION, _covers_total, _total, *LINK),
)
