"""The checks of rung 05: bytes by stage, a ZeRO-2 step on real ranks, ZeRO-3's gather and release, the tradeoffs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from lablib.calc.comm import ring_all_gather_bytes, ring_reduce_scatter_bytes
from lablib.calc.zero import state_terms
from lablib.checks.report import Wrong, check, close
from lablib.checks.sharded_steps import zero2_step, zero3_step

#: What the lab and the tests use from here; the checks of whole steps have their own module.
__all__ = ["state_bytes", "zero2_step", "zero3_step", "zero_tradeoffs"]

# --- bytes by stage ----------------------------------------------------------------------------------------

_FIRST_STAGE = {"optimizer": 1, "gradients": 2, "weights": 3}


def _truth(params: int, ranks: int, stage: int) -> dict[str, int]:
    terms = state_terms(params, ranks, stage)
    truth = {name: terms.pop(name) for name in ("weights", "gradients")}
    return truth | {"optimizer": sum(terms.values())}


@check
def state_bytes(answer: Callable[[int, int, int], dict[str, int]], seed: int = 5) -> str:
    """Judge `state_bytes(params, ranks, stage)` by hand first, then on random models, ranks and stages."""
    dice = random.Random(seed)
    cases = [(8, 4, stage) for stage in range(4)] + [(10, 4, stage) for stage in range(4)]
    cases += [(dice.randint(10**6, 10**11), dice.randint(1, 600), dice.randint(0, 3)) for _ in range(40)]
    for params, ranks, stage in cases:
        got, truth = answer(params, ranks, stage), _truth(params, ranks, stage)
        if not isinstance(got, dict) or set(got) != set(truth):
            raise Wrong(f"Return a dictionary with the keys {', '.join(truth)}.")
        for name, right in truth.items():
            if not close(got[name], right, rel=0):
                _explain_bytes(name, float(got[name]), right, params, ranks, stage)
    return f"{len(cases)} cases to the byte."


def _explain_bytes(name: str, got: float, right: int, params: int, ranks: int, stage: int) -> None:
    case = f"{params:,} parameters, {ranks} ranks, stage {stage}"
    each = {"weights": 2, "gradients": 2, "optimizer": 12}[name]
    sharded = stage >= _FIRST_STAGE[name]
    if got == each * params / ranks and sharded:
        raise Wrong(f"A shard is a whole number of parameters, rounded up: the padding is held too ({case}).")
    if got == each * (params // ranks) and sharded:
        raise Wrong(f"Rounded down, the last parameters belong to nobody: a shard is rounded up ({case}).")
    if got == each * params and sharded:
        raise Wrong(f"Stage {stage} shards the {name}: a rank holds one part in {ranks} ({case}).")
    if got == each * -(-params // ranks) and not sharded:
        raise Wrong(f"Stage {stage} leaves the {name} whole; stage {_FIRST_STAGE[name]} is the first to shard them "
                    f"({case}).")  # fmt: skip
    if name == "optimizer" and close(got, right * 8 / 12, rel=1e-3):
        raise Wrong(
            "The fp32 master weights belong to the optimizer state and are sharded with it: 12 bytes, not 8."
        )
    raise Wrong(f"The {name} of one rank have {right:,} bytes, not {got:,.0f} ({case}).")


# --- the tradeoffs -----------------------------------------------------------------------------------------


def _sent(params: int, ranks: int, stage: int, micro_batches: int) -> float:
    gather, scatter = ring_all_gather_bytes(2 * params, ranks), ring_reduce_scatter_bytes(2 * params, ranks)
    if stage == 3:
        return micro_batches * (2 * gather + scatter)
    return gather + (micro_batches if stage == 2 else 1) * scatter


@check
def zero_tradeoffs(answer: Callable[[int, int, int, int], dict[str, Any]], seed: int = 55) -> str:
    """Judge `zero_tradeoffs(params, ranks, micro_batches, budget)` on random models, ranks and budgets."""
    dice = random.Random(seed)
    cases = [(8, 4, 1, 60), (175 * 10**9, 16, 1, 80 * 10**9), (175 * 10**9, 64, 1, 80 * 10**9)]
    for _ in range(40):
        params, ranks = dice.randint(10**8, 2 * 10**11), dice.randint(2, 512)
        held = [sum(state_terms(params, ranks, stage).values()) for stage in range(4)]
        budget = dice.choice(held) + dice.choice((-1, 0, 1, 10**9))
        cases.append((params, ranks, dice.choice((1, 1, 2, 4, 8)), max(1, budget)))
    for case in cases:
        _judge_tradeoffs(answer(*case), *case)
    return f"{len(cases)} jobs: what is held, what is sent, and which stage to take."


def _judge_tradeoffs(got: dict[str, Any], params: int, ranks: int, micro_batches: int, budget: int) -> None:
    if not isinstance(got, dict) or set(got) != {"held", "sent", "best"}:
        raise Wrong("Return a dictionary with the keys held, sent and best.")
    if any(not isinstance(got[name], list | tuple) or len(got[name]) != 4 for name in ("held", "sent")):
        raise Wrong("`held` and `sent` are lists of four numbers, for the stages 0 to 3.")
    held = [sum(state_terms(params, ranks, stage).values()) for stage in range(4)]
    sent = [_sent(params, ranks, stage, micro_batches) for stage in range(4)]
    case = f"{params:,} parameters, {ranks} ranks, {micro_batches} micro-batches"
    for stage in range(4):
        if not close(got["held"][stage], held[stage], rel=1e-12):
            raise Wrong(
                f"Stage {stage} holds {held[stage]:,} bytes, not {float(got['held'][stage]):,.0f} ({case})."
            )
        if not close(got["sent"][stage], sent[stage]):
            _explain_sent(float(got["sent"][stage]), sent[stage], stage, params, ranks, micro_batches, case)
    fits = [stage for stage in range(4) if held[stage] <= budget]
    best = min(fits, key=lambda stage: sent[stage], default=None)
    if got["best"] == best:
        return
    if best is None:
        raise Wrong(
            f"No stage fits in {budget:,} bytes: the smallest holds {min(held):,}. Then `best` is None ({case})."
        )
    if got["best"] not in fits:
        raise Wrong(f"Stage {got['best']} does not fit in {budget:,} bytes ({case}).")
    raise Wrong(
        f"Stage {got['best']} fits, but stage {best} fits too and is the lowest of those that send least ({case})."
    )


def _explain_sent(
    got: float, right: float, stage: int, params: int, ranks: int, micro_batches: int, case: str
) -> None:
    if close(got, right * ranks / (ranks - 1)):
        raise Wrong(
            f"A rank has its own shard already and need not send it to itself: times (N-1)/N ({case})."
        )
    if close(got, 2 * right) and stage < 3:
        raise Wrong(f"An all-reduce is a reduce-scatter and an all-gather: 2 psi in all, not 4 ({case}).")
    if stage in (1, 2) and got > right and close(got, _sent(params, ranks, 3, 1)):
        raise Wrong(
            f"Stage {stage} has no third transfer: the all-gather of weights replaces that of gradients ({case})."
        )
    if stage == 2 and close(got, _sent(params, ranks, 1, micro_batches)):
        raise Wrong(
            f"Stage 2 has no room for whole gradients: it reduces them after every micro-batch ({case})."
        )
    if stage == 3 and close(got, _sent(params, ranks, 3, 1)):
        raise Wrong(f"Stage 3 releases the weights, and gathers them again in every micro-batch ({case}).")
    raise Wrong(f"In stage {stage} a rank sends {right:,.0f} bytes, not {got:,.0f} ({case}).")
