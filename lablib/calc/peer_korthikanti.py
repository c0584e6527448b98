"""Korthikanti et al.: what the blocks of a GPT keep for backward, in 16 bits, with dropout.

| what | bytes of one layer |
|---|---|
| nothing done | sbh (34 + 5as/h): norms 4, attention 11 + 5as/h, MLP 19 |
| tensor parallelism | sbh (10 + 24/t + 5as/(ht)) |
| + sequence parallelism | sbh (34 + 5as/h) / t |
| + selective recomputation | the same without the term in as |
| full recomputation | 2sbh |

A first pipeline stage holds p micro-batches of L/p layers: all L. The embedding's dropout adds sbhp/t; without a
pipeline the final norm, the head and fp32 logits add 4sbh/t (1 + v/h).

Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 4 and table 2.

Chapter: book/memory_calculator.md
"""

from __future__ import annotations

from lablib.calc.memory_cases import Case
from lablib.calc.peer import (
    Peer,
    Shape,
    first_reason,
    keeps_scores,
    only_four_times,
    only_full_tuning,
    only_published,
    only_sixteen_bits,
    shape,
)

CITATION = "Korthikanti et al. 2022 (arXiv 2205.05198)"
LINK = ("https://arxiv.org/abs/2205.05198", "korthikanti2022")


def layer(
    x: Shape, *, sequence_parallel: bool = False, scores: bool = True, full: bool = False
) -> dict[str, float]:
    """Return the bytes of one layer by kind.

    Args:
        x: The letters.
        sequence_parallel: Whether the stream is split over t too.
        scores: Whether scores are kept: neither selective recomputation nor a fused kernel.
        full: Whether all but the layer's input is computed again.
    """
    if full:
        return {"inputs": 2 * x.sbh}
    stream = x.sbh / x.t if sequence_parallel else x.sbh
    inner = x.sbh / x.t
    return {
        "norms": 4 * stream,
        "attention": 3 * stream + 8 * inner + (5 * x.a * x.s * x.s * x.b / x.t if scores else 0),
        "mlp": 3 * stream + 16 * inner,
    }


def ends(x: Shape) -> dict[str, float]:
    """Return the bytes of the embedding and, without a pipeline, of the head and the loss.

    Args:
        x: The letters.
    """
    head = 4 * x.sbh / x.t * (1 + x.v / x.h) if x.p == 1 else 0
    return {"embedding": x.sbh * x.p / x.t, "head": head}


def blocks(x: Shape, **how: bool) -> dict[str, float]:
    """Return the bytes of all blocks that a first stage holds, by kind.

    Args:
        x: The letters.
        how: As in `layer`.
    """
    return {kind: x.layers * size for kind, size in layer(x, **how).items()}


def _covers(case: Case) -> str:
    return first_reason(
        only_full_tuning(case),
        (case.family != "gpt2", "it counts GPT blocks only"),
        only_four_times(case),
        only_sixteen_bits(case),
        only_published(case),
    )


def _terms(case: Case) -> dict[str, float]:
    x = shape(case)
    how = {"sequence_parallel": case.sequence_parallel, "scores": keeps_scores(case)}
    return blocks(x, full=case.recompute == "full", **how) | ends(x)


PEERS = (Peer("Korthikanti et al.", "activations", CITATION, _covers, _terms, *LINK),)
