"""The Ultra-Scale Playbook: weights, gradients, Adam, and an activation formula in h, s and heads.

    N = hv + L (12h² + 13h) + 2h                     parameters of a simple transformer, where they are not given
    fp32: 4N + 4N + 8N         bf16: 2N + 2N + 4N (fp32 copy) + 8N         ZeRO divides as in ZeRO's paper
    activations: L s b h (34 + 5as/h)      without scores (FlashAttention, selective): L s b h 34      full: 2 L s b h

Its pictures split parameters, gradients and optimizer evenly over t, and use the formula for Llama models.

Source: Tazi et al. 2025, The Ultra-Scale Playbook (Hugging Face), "Memory usage in Transformers", and the numbers
behind its pictures (memusage_activations, memory-recomputation, tp_sp_memoryusage).

Chapter: book/memory_calculator.md
"""

from __future__ import annotations

from lablib.calc.memory_cases import Case
from lablib.calc.peer import (
    MIXED,
    Peer,
    first_reason,
    keeps_scores,
    only_dense,
    only_even,
    only_four_times,
    only_full_tuning,
    only_megatron,
    only_published,
    only_sixteen_bits,
    only_with_peak,
    parameters,
    shape,
    split_tiny,
)
from lablib.calc.peer_korthikanti import blocks

CITATION = "Tazi et al. 2025, The Ultra-Scale Playbook"
LINK = ("https://huggingface.co/spaces/nanotron/ultrascale-playbook", "tazi2025")
NAME = "Ultra-Scale Playbook"


def simple_parameters(hidden: int, layers: int, vocab: int) -> int:
    """Return N = hv + L (12h² + 13h) + 2h.

    Args:
        hidden: h.
        layers: L.
        vocab: v.
    """
    return hidden * vocab + layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden


def model_states(params: float, *, ranks: int = 1, stage: int = 0, mixed: bool = True) -> dict[str, float]:
    """Return the states of one rank with Adam by term.

    Args:
        params: N.
        ranks: Data-parallel ranks.
        stage: ZeRO's, 0 to 3.
        mixed: bf16 with an fp32 copy of the weights; otherwise fp32.
    """
    weights, gradients, kept = (ranks if stage >= least else 1 for least in (3, 2, 1))
    value = 2 if mixed else 4
    return {
        "weights": value * params / weights,
        "fp32 copy": 4 * params / kept if mixed else 0,
        "gradients": value * params / gradients,
        "moments": 8 * params / kept,
    }


def _covers_states(case: Case) -> str:
    return first_reason(
        only_full_tuning(case),
        only_megatron(case),
        only_even(case),
        (case.recipe not in (*MIXED, "fp32"), "it keeps moments in fp32"),
        (case.optimizer != "adamw", "it has Adam only"),
        split_tiny(case),
        (case.pp > 1, "it gives no sum for a stage"),
    )


def _states_of(case: Case, params: float) -> dict[str, float]:
    stage = 3 if case.shards else 0
    return model_states(params / case.tp, ranks=case.dp, stage=stage, mixed=case.recipe in MIXED)


def _states(case: Case) -> dict[str, float]:
    return _states_of(case, parameters(case))


def _covers_own_count(case: Case) -> str:
    families = case.family not in ("gpt2", "llama")
    return _covers_states(case) or first_reason(
        only_published(case),
        (families, "it counts parameters of a simple transformer and, in its pictures, of Llama models"),
        only_four_times(case),
    )


def _own_count(case: Case) -> dict[str, float]:
    model = case.model
    return _states_of(case, simple_parameters(model.hidden, model.num_layers, model.vocab))


def _covers_activations(case: Case) -> str:
    return first_reason(
        only_full_tuning(case),
        only_dense(case),
        only_four_times(case),
        only_sixteen_bits(case),
        only_published(case),
        (case.tp * case.pp > 1, "its formula is of one device"),
    )


def _activations(case: Case) -> dict[str, float]:
    return blocks(shape(case), scores=keeps_scores(case), full=case.recompute == "full")


def _covers_total(case: Case) -> str:
    return first_reason(only_with_peak(case)) or _covers_states(case) or _covers_activations(case)


def _total(case: Case) -> dict[str, float]:
    return {"states": sum(_states(case).values()), "activations": sum(_activations(case).values())}


PEERS = (
    Peer(NAME, "states", CITATION, _covers_states, _states, *LINK),
    Peer(f"{NAME}, its N", "states", CITATION, _covers_own_count, _own_count, *LINK),
    Peer(NAME, "activations", CITATION, _covers_activations, _activations, *LINK),
    Peer(NAME, "total", CITATION, _covers_total, _total, *LINK),
)
