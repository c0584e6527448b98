"""The checks of rung 05: bytes by stage, a ZeRO-2 step on real ranks, ZeRO-3's gather and release, the tradeoffs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lablib.calc.communication import ring_all_gather_bytes, ring_reduce_scatter_bytes
from lablib.calc.parallel import state_terms
from lablib.checks.report import Wrong, check, close
from lablib.launch.measure import record_comms
from lablib.launch.ranks import RankError, run_ranks

__all__ = ["state_bytes", "zero2_step", "zero3_step", "zero_tradeoffs"]


# --- bytes by stage -----------------------------------------------------------------------------------------

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
        raise Wrong("The fp32 master weights belong to the optimizer state and are sharded with it: 12 bytes, not 8.")
    raise Wrong(f"The {name} of one rank have {right:,} bytes, not {got:,.0f} ({case}).")


# --- a ZeRO-2 step ------------------------------------------------------------------------------------------

_STEPS, _LR = 3, 0.125


def _zero2_rank(answer: Callable[..., None], width: int) -> dict[str, Any]:
    """Run the answer on this rank; the gradients of step s depend on rank and step, and anybody can compute them."""
    n, rank = dist.get_world_size(), dist.get_rank()
    size = n * width
    weights = torch.arange(size, dtype=torch.float64) / size
    momentum = torch.zeros(width, dtype=torch.float64)
    sent, calls, steps = [], set(), []
    try:
        for step in range(_STEPS):
            gradient = _gradients(n, size)[step, rank].clone()
            with record_comms() as log:
                answer(weights, gradient, momentum, _LR)
            sent.append(log.ring_bytes_sent())
            calls |= set(log.calls)
            steps.append(weights.clone())
    except NotImplementedError:
        return {"stub": True}
    return {"weights": steps, "momentum": momentum, "sent": sent, "calls": calls, "stub": False}


def _gradients(ranks: int, size: int) -> torch.Tensor:
    """Return gradients of shape (steps, ranks, size): whole numbers, so that a mean is exact in any order."""
    generator = torch.Generator().manual_seed(ranks)
    return torch.randint(-64, 64, (_STEPS, ranks, size), generator=generator).double() * ranks


def _one_process(gradients: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    size = gradients.shape[-1]
    weights, momentum = torch.arange(size, dtype=torch.float64) / size, torch.zeros(size, dtype=torch.float64)
    steps = []
    for gradient in gradients:
        momentum = 0.9 * momentum + gradient
        weights = weights - _LR * momentum
        steps.append(weights)
    return steps, momentum


@check
def zero2_step(answer: Callable[..., None]) -> str:
    """Judge `zero2_step(weights, gradient, momentum, lr)` on 2 and on 4 real ranks, over three steps."""
    for ranks, width in ((4, 2), (2, 7)):
        try:
            results = run_ranks(_zero2_rank, ranks, answer, width, timeout=30)
        except RankError as error:
            last = error.traceback.strip().splitlines()[-1]
            raise Wrong(f"Rank {error.rank} stopped: {last.rstrip('.')}.") from None
        except TimeoutError:
            raise Wrong("The ranks wait for each other: all must issue the same collectives in the same order.") from None  # fmt: skip
        if results[0]["stub"]:
            raise NotImplementedError
        _judge_step(results, ranks, width)
    return "The step of one process, and no byte more than DDP sends."


def _judge_step(results: list[dict[str, Any]], ranks: int, width: int) -> None:
    gradients = _gradients(ranks, ranks * width)
    right, moments = _one_process(gradients.mean(1))
    first = [result["weights"][0] for result in results]
    same = all(torch.equal(each, first[0]) for each in first)
    if not same:
        own = [each.chunk(ranks)[rank] for rank, each in enumerate(first)]
        if _alike(torch.cat(own), right[0]):
            raise Wrong("Each rank updated its own shard, but nobody told the others: the all-gather is missing.")
        raise Wrong("After the step the ranks hold different weights: the replicas drift apart.")
    if torch.equal(first[0], torch.arange(ranks * width, dtype=torch.float64) / (ranks * width)):
        raise Wrong("The weights did not change: update the tensor that you are given, in place.")
    if _alike(first[0], _one_process(gradients.sum(1))[0][0]):
        raise Wrong(f"The gradients are summed, not averaged: every step is {ranks} times too long.")
    if _alike(first[0], _one_process(gradients.mean(1) / ranks)[0][0]):
        raise Wrong(f"Divided by {ranks} twice: the mean is taken once, before or in the reduce-scatter.")
    local = torch.cat([gradients[:, rank].chunk(ranks, 1)[rank] for rank in range(ranks)], 1)
    if _alike(first[0], _one_process(local)[0][0]):
        raise Wrong("Each shard moved along its owner's gradient alone: other ranks' samples must count too.")
    if not _alike(first[0], right[0]):
        raise Wrong("After one step the weights are not those of one process: rank r must update shard r.")
    if not _alike(results[0]["weights"][-1], right[-1]):
        raise Wrong("The first step is right and later ones are not: momentum must be kept, in place, between steps.")
    if not _alike(torch.cat([result["momentum"] for result in results]), moments):
        raise Wrong("The weights are right, but a rank's momentum is not the part of the optimizer state it owns.")
    least = 2 * (ranks - 1) / ranks * 8 * ranks * width
    most = max(sent for result in results for sent in result["sent"])
    if most > 1.001 * least:
        how = ("An all-reduce brings the whole mean gradient to every rank, which stage 2 must not hold" if
               "all_reduce" in results[0]["calls"] else "Some of it is sent more than once")  # fmt: skip
        raise Wrong(f"The numbers are right, but a rank sends {most:.0f} bytes where {least:.0f} do. {how}.")
    if most < 0.999 * least:
        raise Wrong("Fewer bytes left a rank than a mean over ranks needs: some arrived without being sent.")


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    # Gradients are small whole numbers in float64: what is right is right to the last digits.
    return torch.allclose(a, b, rtol=1e-9, atol=1e-9)


# --- ZeRO-3: gather and release -----------------------------------------------------------------------------


class _Model:
    """Layers y = w x, element by element, whose weights exist only between gather and release."""

    def __init__(self, layers: int, width: int, ranks: int, seed: int):
        dice = random.Random(seed)
        self.weights = [[dice.randint(1, 5) for _ in range(width)] for _ in range(layers)]
        self.x = [float(dice.randint(1, 5)) for _ in range(width)]
        self.ranks, self.live, self.most = ranks, {}, 0
        self.gathers, self.scattered = [0] * layers, {}
        self.tally: list[tuple[str, int]] = []

    def gather(self, k: int) -> list[float]:
        if k in self.live:
            raise Wrong(f"Layer {k} is gathered while it is there already: those bytes are sent twice.")
        self.gathers[k] += 1
        self.live[k] = [float(w) for w in self.weights[k]]
        self.most = max(self.most, len(self.live))
        return self.live[k]

    def release(self, k: int) -> None:
        if k not in self.live:
            raise Wrong(f"Layer {k} is released, and was not there.")
        gone = self.live.pop(k)
        gone[:] = [math.nan] * len(gone)  # whoever kept the list finds its memory gone

    def _use(self, k: int, weights: list[float], when: str) -> None:
        if k not in self.live:
            raise Wrong(f"Layer {k} runs {when} without its weights: they were released, or never gathered.")
        if weights is not self.live[k]:
            raise Wrong(f"Layer {k} runs {when} with weights that are not its gathered ones.")
        self.tally.append((when, k))

    def forward(self, k: int, weights: list[float], x: list[float]) -> list[float]:
        self._use(k, weights, "forward")
        return [w * v for w, v in zip(weights, x, strict=True)]

    def backward(self, k: int, weights: list[float], x: list[float], dy: list[float]) -> tuple[list, list]:
        self._use(k, weights, "backward")
        return [w * d for w, d in zip(weights, dy, strict=True)], [v * d for v, d in zip(x, dy, strict=True)]

    def scatter(self, k: int, gradient: list[float]) -> list[float]:
        if k in self.scattered:
            raise Wrong(f"The gradient of layer {k} is reduce-scattered twice in a step.")
        self.scattered[k] = list(gradient)
        return self.scattered[k][: len(gradient) // self.ranks]  # every rank has the same samples: the mean is it

    def truth(self) -> list[list[float]]:
        """Return the gradient of every layer: the product of the input and of all other layers."""
        columns = [math.prod(column) * x for *column, x in zip(*self.weights, self.x, strict=True)]
        return [[c / w for c, w in zip(columns, row, strict=True)] for row in self.weights]


@check
def zero3_step(answer: Callable[..., list[list[float]]]) -> str:
    """Judge `zero3_step(layers, x, gather, release, forward, backward, scatter)`: values, order, and what is live."""
    for layers, width, ranks, seed in ((4, 8, 4, 1), (3, 6, 2, 2), (6, 12, 3, 3)):
        model = _Model(layers, width, ranks, seed)
        got = answer(layers, list(model.x), model.gather, model.release, model.forward, model.backward, model.scatter)
        _judge_zero3(model, got, layers, width // ranks)
    return "Never more than two layers gathered, each gathered twice and scattered once: 3 psi."


def _judge_zero3(model: _Model, got: object, layers: int, own: int) -> None:
    ran = {when: [k for each, k in model.tally if each == when] for when in ("forward", "backward")}
    if ran["forward"] != list(range(layers)) or ran["backward"] != list(reversed(range(layers))):
        raise Wrong("Every layer runs once forward, from the first to the last, and once backward, the other way.")
    if model.live:
        raise Wrong(f"After the step {len(model.live)} of {layers} layers are still gathered: between steps a rank "
                    "holds its shards only.")  # fmt: skip
    if model.most > 2:
        raise Wrong(f"{model.most} of {layers} layers were gathered at one moment; that is the memory of stage 2. Release "
                    "a layer when it has run; one more may be there ahead of its use.")  # fmt: skip
    if set(model.scattered) != set(range(layers)):
        raise Wrong("Some gradients are never reduce-scattered: this rank would keep them whole, of its samples only.")
    truth = model.truth()
    if any(not close(a, b) for k in range(layers) for a, b in zip(model.scattered[k], truth[k], strict=True)):
        raise Wrong("The gradients are wrong: backward of a layer needs that layer's input, and the gradient of its "
                    "output.")  # fmt: skip
    if not isinstance(got, list) or [len(row) for row in got] != [own] * layers:
        raise Wrong(f"Return what `scatter` gave for each layer, first layer first: {layers} shards of {own} numbers.")
    if any(not close(a, b) for k in range(layers) for a, b in zip(got[k], truth[k], strict=False)):
        raise Wrong("The shards are right but not in the order of the layers: backward made the last one first.")
    if any(count > 2 for count in model.gathers):
        raise Wrong("A layer is gathered more than twice: once forward and once backward are enough.")


# --- the tradeoffs ------------------------------------------------------------------------------------------


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
            raise Wrong(f"Stage {stage} holds {held[stage]:,} bytes, not {float(got['held'][stage]):,.0f} ({case}).")
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


def _explain_sent(got: float, right: float, stage: int, params: int, ranks: int, micro_batches: int, case: str) -> None:
    if close(got, right * ranks / (ranks - 1)):
        raise Wrong(f"A rank has its own shard already and need not send it to itself: times (N-1)/N ({case}).")
    if close(got, 2 * right) and stage < 3:
        raise Wrong(f"An all-reduce is a reduce-scatter and an all-gather: 2 psi in all, not 4 ({case}).")
    if stage in (1, 2) and got > right and close(got, _sent(params, ranks, 3, 1)):
        raise Wrong(
            f"Stage {stage} has no third transfer: the all-gather of weights replaces that of gradients ({case})."
        )
    if stage == 2 and close(got, _sent(params, ranks, 1, micro_batches)):
        raise Wrong(f"Stage 2 has no room for whole gradients: it reduces them after every micro-batch ({case}).")
    if stage == 3 and close(got, _sent(params, ranks, 3, 1)):
        raise Wrong(f"Stage 3 releases the weights, and gathers them again in every micro-batch ({case}).")
    raise Wrong(f"In stage {stage} a rank sends {right:,.0f} bytes, not {got:,.0f} ({case}).")
