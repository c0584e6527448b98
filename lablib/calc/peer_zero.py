"""ZeRO's paper: 2 + 2 + K bytes a parameter in mixed precision, and 12 values a token and layer.

| stage | bytes a rank |
|---|---|
| none | (2 + 2 + K) ψ |
| 1 | (2 + 2 + K/N) ψ |
| 2 | (2 + (2 + K)/N) ψ |
| 3 | (2 + 2 + K) ψ/N |

K is what the optimizer keeps: an fp32 copy of the weights and its moments, 12 with Adam. Model parallelism divides ψ.
For GPT-2 it puts activations at 12 h b s L values: the example of 1.5 billion parameters needs 60 GB.

Source: Rajbhandari et al. 2019 (arXiv 1910.02054), sections 3.1, 3.2 and 5, figure 1 and table 1.

Chapter: book/memory_calculator.md
"""

from __future__ import annotations

from lablib.calc.memory_cases import Case
from lablib.calc.peer import (
    MIXED,
    Peer,
    first_reason,
    moments,
    only_even,
    only_four_times,
    only_full_tuning,
    only_megatron,
    only_published,
    parameters,
    shape,
    split_tiny,
)
from lablib.calc.recipes import recipe

CITATION = "Rajbhandari et al. 2019, ZeRO (arXiv 1910.02054)"
LINK = ("https://arxiv.org/abs/1910.02054", "rajbhandari2019")


def model_states(params: float, *, ranks: int = 1, stage: int = 0, k: float = 12) -> dict[str, float]:
    """Return the states of one rank by term.

    Args:
        params: ψ.
        ranks: Data-parallel ranks, N.
        stage: 0 to 3.
        k: Bytes a parameter of optimizer states, K: 4 of an fp32 copy of the weights, the rest moments.
    """
    weights, gradients, optimizer = (ranks if stage >= least else 1 for least in (3, 2, 1))
    return {
        "weights": 2 * params / weights,
        "fp32 copy": 4 * params / optimizer,
        "gradients": 2 * params / gradients,
        "moments": (k - 4) * params / optimizer,
    }


def gpt_activations(hidden: int, batch: int, seq: int, layers: int, value: int = 2) -> int:
    """Return the bytes of 12 values a token, unit of width and layer.

    Args:
        hidden: Width of the stream.
        batch: Sequences.
        seq: Tokens in each.
        layers: Blocks.
        value: Bytes of a value.
    """
    return value * 12 * hidden * batch * seq * layers


def _covers_states(case: Case) -> str:
    return first_reason(
        only_full_tuning(case),
        only_megatron(case),
        only_even(case),
        (case.recipe not in MIXED, "it counts mixed precision only"),
        split_tiny(case),
        (case.pp > 1, "it has no pipeline stages"),
    )


def _states(case: Case) -> dict[str, float]:
    stage = 3 if case.shards else 0
    return model_states(parameters(case) / case.tp, ranks=case.dp, stage=stage, k=4 + 4 * moments(case))


def _covers_activations(case: Case) -> str:
    return first_reason(
        only_full_tuning(case),
        (case.family != "gpt2", "it counts activations of GPT-2's architecture only"),
        only_four_times(case),
        only_published(case),
        (case.recompute != "none", "its 12 values are without recomputation"),
        (case.tp * case.pp > 1, "its 12 values are on one device"),
    )


def _activations(case: Case) -> dict[str, float]:
    x = shape(case)
    return {"blocks": gpt_activations(x.h, x.b, x.s, x.layers, recipe(case.recipe).activation)}


PEERS = (
    Peer("ZeRO", "states", CITATION, _covers_states, _states, *LINK),
    Peer("ZeRO", "activations", CITATION, _covers_activations, _activations, *LINK),
)
