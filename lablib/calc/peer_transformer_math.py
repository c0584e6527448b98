"""Transformer Math 101: the sums that EleutherAI plans with.

    total = model + optimizer + gradients + activations          ZeRO-3: the first three divided by N

Bytes a parameter: the model 4 in fp32 and 2 in mixed precision; AdamW 12 and SGD with momentum 8, of which 4 are an
fp32 copy of the weights (in fp32 training the weights themselves, so it is not counted twice); gradients as the model.

Activations: sbhL (10 + 24/t + 5as/(ht)); selective recomputation leaves the last term out; full: 2sbhL.

Source: Anthony, Biderman and Schoelkopf 2023, Transformer Math 101 (EleutherAI blog), section Training.

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
    only_published,
    only_sixteen_bits,
    only_with_peak,
    parameters,
    shape,
)
from lablib.calc.peer_korthikanti import blocks

CITATION = "Anthony, Biderman, Schoelkopf 2023, Transformer Math 101"
LINK = ("https://blog.eleuther.ai/transformer-math/", "anthony2023")
LIVE = "its total under ZeRO-3 has live parameters, a setting of DeepSpeed that these runs have not"
#: Bytes a parameter, the fp32 copy of the weights included.
OPTIMIZERS = {"adamw": 12, "adamw-8bit": 6, "sgd-momentum": 8}


def model_states(
    params: float, *, ranks: int = 1, stage: int = 0, optimizer: str = "adamw", mixed: bool = True
) -> dict[str, float]:
    """Return the states of one rank by term.

    Args:
        params: P.
        ranks: GPUs that shard.
        stage: ZeRO's, 0 to 3.
        optimizer: "adamw", "adamw-8bit" or "sgd-momentum".
        mixed: Mixed precision; otherwise fp32.
    """
    value = 2 if mixed else 4
    weights, gradients, kept = (ranks if stage >= least else 1 for least in (3, 2, 1))
    return {
        "weights": value * params / weights,
        "fp32 copy": 4 * params / kept if mixed else 0,
        "gradients": value * params / gradients,
        "moments": (OPTIMIZERS[optimizer] - 4) * params / kept,
    }


def _covers_states(case: Case) -> str:
    return first_reason(
        only_full_tuning(case),
        only_even(case),
        (case.recipe not in (*MIXED, "fp32"), "it keeps moments in fp32"),
        (case.optimizer not in OPTIMIZERS, "it has Adam and SGD with momentum only"),
        (case.tp * case.pp > 1, "its sum for a split model belongs to ZeRO-1"),
    )


def _states(case: Case) -> dict[str, float]:
    how = {"ranks": case.dp, "stage": 3 if case.shards else 0, "optimizer": case.optimizer}
    return model_states(parameters(case), mixed=case.recipe in MIXED, **how)


def _covers_activations(case: Case) -> str:
    return first_reason(
        only_full_tuning(case),
        only_dense(case),
        only_four_times(case),
        only_sixteen_bits(case),
        only_published(case),
        (case.sequence_parallel, "it has no sequence parallelism"),
        (case.pp > 1, "its formula is of one stage"),
    )


def _activations(case: Case) -> dict[str, float]:
    return blocks(shape(case), scores=keeps_scores(case), full=case.recompute == "full")


def _covers_total(case: Case) -> str:
    reason = first_reason(only_with_peak(case)) or _covers_states(case) or _covers_activations(case)
    # The same for its authors' script, `peer_cookbook`, which has a number for them.
    return reason or (LIVE if case.shards else "")


def _total(case: Case) -> dict[str, float]:
    return {"states": sum(_states(case).values()), "activations": sum(_activations(case).values())}


NAME = "Transformer Math 101"
PEERS = (
    Peer(NAME, "states", CITATION, _covers_states, _states, *LINK),
    Peer(NAME, "activations", CITATION, _covers_activations, _activations, *LINK),
    Peer(NAME, "total", CITATION, _covers_total, _total, *LINK),
)
