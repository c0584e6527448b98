"""Accelerate's estimator, `accelerate estimate-memory`: training needs four times the model in fp32.

    fp32: weights, gradients and twice that for Adam: 4 M, M the model's size in fp32
    16 bits: the largest of M, 1.5 M and 2 M: 2 M

Activations are not in it, as its maintainers say. Here M is 4 bytes a parameter; the estimator itself, which
`lablib.launch.peers` calls, adds the model's buffers.

Source: Accelerate, commands/estimate.py, `estimate_training_usage`; huggingface/accelerate, issue 2910.

Chapter: book/memory_calculator.md
"""

from __future__ import annotations

from lablib.calc.memory_cases import Case
from lablib.calc.peer import MIXED, Peer, first_reason, only_full_tuning, parameters

NAME = "Accelerate"
CITATION = "Hugging Face Accelerate, accelerate estimate-memory"
LINK = ("https://huggingface.co/docs/accelerate/usage_guides/model_size_estimator", "acceleratememory")


def training_usage(model: float, *, mixed: bool) -> dict[str, float]:
    """Return the bytes of each moment that the estimator looks at; it prints the largest.

    Args:
        model: Bytes of the model in fp32.
        mixed: Whether it is trained in 16 bits.
    """
    gradients = 1.5 if mixed else 1
    step = 2 if mixed else 4
    return {"model": model, "gradients": gradients * model, "optimizer": 2 * model, "step": step * model}


def _covers(case: Case) -> str:
    return first_reason(
        only_full_tuning(case),
        (case.recipe not in (*MIXED, "fp32"), "it keeps fp32 weights beside 16-bit ones"),
        (case.optimizer != "adamw", "it has Adam only"),
        (not case.whole or case.tp * case.pp > 1, "it estimates one device"),
    )


def _terms(case: Case) -> dict[str, float]:
    usage = training_usage(4 * parameters(case), mixed=case.recipe in MIXED)
    if case.recipe in MIXED:
        return {"weights": 0, "gradients": 0, "moments": max(usage.values())}  # the largest of them alone
    return {"weights": usage["model"], "gradients": usage["gradients"], "moments": usage["optimizer"]}


PEERS = (Peer(NAME, "states", CITATION, _covers, _terms, *LINK),)
