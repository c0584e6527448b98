"""The checks of rung 05: bytes by stage, ZeRO-2, ZeRO-3 and Muon on ranks, moments in few bits, the tradeoffs."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from lablib.calc.parallel import StageChoice, least_sent, shard_size, zero_choices, zero_state_bytes
from lablib.calc.precision import LEAST_QUANTIZED as LEAST
from lablib.checks.judging import Wrong, by_name, check, close, numbers, on_ranks, recognize, refuse, whole
from lablib.launch.measure import record_comms

__all__ = ["lean_muon", "moments_recipe", "state_bytes", "zero2_step", "zero3_step", "zero_tradeoffs"]


# --- bytes by stage -----------------------------------------------------------------------------------------

_FIRST_STAGE = {"optimizer": 1, "gradients": 2, "weights": 3}
_EACH = {"weights": 2, "gradients": 2, "optimizer": 12}


@check(
    idea="Ask of each of the three terms which stage is the first to shard it; before that stage it is held in full.",
    section="Bytes per parameter in each stage",
    line="A sharded term has its bytes per parameter times the parameters over the ranks, rounded up.",
)
def state_bytes(answer: Callable[[int, int, int], dict[str, int]], seed: int = 5) -> str:
    """Judge `state_bytes(params, ranks, stage)` by hand first, then on random models, ranks and stages."""
    dice = random.Random(seed)
    cases = [(params, 4, stage) for params in (8, 10) for stage in range(4)] + [(3, 7, 3), (9, 1, 2)]
    cases += [(dice.randint(10**6, 10**11), dice.randint(1, 600), dice.randint(0, 3)) for _ in range(40)]
    for params, ranks, stage in cases:
        got = by_name(answer(params, ranks, stage), *_EACH)
        for name, each in _EACH.items():
            right = each * (shard_size(params, ranks) if stage >= _FIRST_STAGE[name] else params)
            if not close(got[name], right, rel=0):
                _explain_bytes(name, float(got[name]), right, params, ranks, stage)
    return f"{len(cases)} cases to the byte."


def _explain_bytes(name: str, got: float, right: int, params: int, ranks: int, stage: int) -> NoReturn:
    case = f"{params:,} parameters, {ranks} ranks, stage {stage}"
    each, first = _EACH[name], _FIRST_STAGE[name]
    own, sharded = shard_size(params, ranks), stage >= first
    last = params - (ranks - 1) * own
    slips = [  # whether it can be made here, its sentence, and what it gives
        (sharded and each * last != right,
         "That is the last rank, whose shard is padded: it holds as much as the others", each * last),
        (sharded, "Where the ranks divide the parameters nothing is left over: round up, add no 1",
         each * (params // ranks + 1)),
        (True, f"Return bytes, not bits: {right:,} for the {name}", 8 * right),
        (True, f"Those are parameters; for the {name} each has {each} bytes", right / each),
        (sharded, "A shard is a whole number of parameters, rounded up: the padding is held too", each * params / ranks),
        (sharded, "Rounded down, the last parameters belong to nobody: a shard is rounded up", each * (params // ranks)),
        (sharded, "Parameters are dealt out, not bytes: round the shard up before you weigh it", -(-each * params // ranks)),
        (sharded, f"Stage {stage} shards the {name}: a rank holds one part in {ranks}", each * params),
        (True, "That is what all ranks hold together; asked is one of them", ranks * right),
        (not sharded, f"Stage {stage} leaves the {name} in full; stage {first} is the first to shard them", each * own),
        *((True, why, wrong * (own if sharded else params)) for wrong, why in _OTHER_WEIGHTS[name].items()),
    ]  # fmt: skip
    recognize(got, case, [(why, value) for possible, why, value in slips if possible], lambda a, b: a == b)
    refuse(
        case,
        (f"Return bytes, not GB: {right:,} for the {name}", close(got, right / 1e9) or close(got, right / 2**30)),
        (f"Each term counts alone, and none disappears: for the {name} there are {each} bytes a parameter",
         got in (0, 16 * own, 16 * params)),
        (f"For the {name} one rank has {right:,} bytes, not {got:,.0f}", True),
    )  # fmt: skip


#: Other bytes per parameter than those of mixed precision with AdamW, and what was thought.
_OTHER_WEIGHTS = {
    "weights": {6: "The fp32 master weights count with the optimizer, which is sharded first: here 2 bytes",
                4: "The weights that the model computes with are in 16 bits: the fp32 copy belongs to the optimizer"},
    "gradients": {4: "Gradients have 16 bits here, as the weights that they belong to: 2 bytes, not 4",
                  6: "Gradients are counted once, in 16 bits: 2 bytes"},
    "optimizer": {8: "The fp32 master weights belong to the optimizer state and are sharded with it: 12 bytes, not 8",
                  4: "AdamW keeps two moments, and mixed precision master weights: 12 bytes, not 4",
                  6: "Moments and master weights are in fp32: 12 bytes, not 6",
                  16: "The gradients have a term of their own, in 16 bits: 12 bytes, without an fp32 copy of them"},
}  # fmt: skip


# --- a ZeRO-2 step ------------------------------------------------------------------------------------------

_STEPS, _LR = 3, 0.125
#: What multiplies the shard of momentum between steps. Who keeps all of the momentum elsewhere does not notice.
_BETWEEN = -2.0


def _zero2_rank(answer: Callable[..., None], width: int) -> dict[str, Any]:
    """Run the answer on this rank; the gradients of step s depend on rank and step, and anybody can compute them."""
    n, rank = dist.get_world_size(), dist.get_rank()
    size = n * width
    weights = torch.arange(size, dtype=torch.float64) / size
    momentum = torch.zeros(width, dtype=torch.float64)
    sent, calls, steps, kept = [], set(), [], []
    for step in range(_STEPS):
        gradient = _gradients(n, size)[step, rank].clone()
        with record_comms() as log:
            answer(weights, gradient, momentum, _LR)
        sent.append(log.ring_bytes_sent())
        calls |= set(log.calls)
        steps.append(weights.clone())
        kept.append(momentum.clone())
        momentum *= _BETWEEN
    return {"weights": steps, "momentum": kept, "sent": sent, "calls": calls}


def _gradients(ranks: int, size: int) -> torch.Tensor:
    """Return gradients of shape (steps, ranks, size): whole numbers, so that a mean is exact in any order."""
    generator = torch.Generator().manual_seed(ranks)
    return torch.randint(-64, 64, (_STEPS, ranks, size), generator=generator).double() * ranks


def _one_process(gradients: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return weights and momentum after each step."""
    size = gradients.shape[-1]
    weights, momentum = torch.arange(size, dtype=torch.float64) / size, torch.zeros(size, dtype=torch.float64)
    steps, moments = [], []
    for gradient in gradients:
        momentum = 0.9 * momentum + gradient
        weights = weights - _LR * momentum
        steps.append(weights)
        moments.append(momentum)
        momentum = _BETWEEN * momentum
    return steps, moments


@check(
    idea="Stage 2 is the all-reduce of DDP with the optimizer between its halves: scatter, update, gather.",
    section="Stage 2: shard the gradients too",
    line="Reduce-scatter the gradient over the number of ranks into a buffer as long as momentum, then update one chunk.",
)
def zero2_step(answer: Callable[..., None]) -> str:
    """Judge `zero2_step(weights, gradient, momentum, lr)` on 2 and on 4 real ranks, over three steps."""
    for ranks, width in ((2, 7), (4, 2)):  # the cheaper one first: most answers that are wrong are wrong on two ranks
        results = on_ranks(_zero2_rank, ranks, answer, width)
        _judge_step(results, ranks, width)
    return "The step of one process, and no byte more than DDP sends."


def _judge_step(results: list[dict[str, Any]], ranks: int, width: int) -> None:
    gradients = _gradients(ranks, ranks * width)
    right, moments = _one_process(gradients.mean(1))
    first = [result["weights"][0] for result in results]
    start = torch.arange(ranks * width, dtype=torch.float64) / (ranks * width)
    own = torch.cat([each.chunk(ranks)[rank] for rank, each in enumerate(first)])
    apart, unmoved = not all(torch.equal(each, first[0]) for each in first), torch.equal(first[0], start)
    refuse(
        "",
        ("After the step weights are NaN", any(each.isnan().any() for each in first)),
        ("Each rank updated its own shard: the all-gather of the new weights is missing", apart and _alike(own, right[0])),
        ("After the step the ranks hold different weights: the replicas drift apart", apart),
        ("The first step moves no weight: update the momentum first, and move the weights by the new one",
         unmoved and not torch.equal(results[0]["weights"][-1], start)),
        ("The weights did not change: update the tensor that you are given, in place", unmoved),
    )  # fmt: skip
    if not _alike(first[0], right[0]):
        _explain_step(first[0], start, right[0], gradients)
    kept = [torch.cat([result["momentum"][step] for result in results]) for step in range(_STEPS)]
    least = 2 * (ranks - 1) / ranks * 8 * ranks * width
    most = max(sent for result in results for sent in result["sent"])
    later = [weights for result in results for weights in result["weights"]] + kept
    alone = right[0] - _LR * (0.9 * moments[0] + gradients[1].mean(0))  # of a momentum that the check cannot change
    all_reduced = "all_reduce" in results[0]["calls"]
    how = "An all-reduce brings the whole mean gradient to every rank, which stage 2 must not hold"
    twice = "Something is sent twice, or pickled, or whole gradients where a shard of their mean is asked"
    refuse(
        "",
        ("The first step is right, and `momentum` is as before: keep it, in place, between steps", not kept[0].any()),
        ("The momentum that is kept has the learning rate in it: lr multiplies momentum where a weight moves",
         _alike(kept[0], _LR * moments[0])),
        ("The weights are right, and `momentum` is not this rank's part of it", not _alike(kept[0], moments[0])),
        ("The old momentum counts in full: 0.9 damps it before the new gradient is added",
         _alike(kept[1], _BETWEEN * moments[0] + gradients[1].mean(0))),
        ("The first step is right, and later ones do not go on from the shard in `momentum`, which the check changes between "
         "steps: a momentum that is kept elsewhere; one of all weights is data parallelism and not stage 2",
         _alike(results[0]["weights"][1], alone)),
        ("The first step is right and a later one is not: it takes 0.9 of what `momentum` has by then, and the mean gradient",
         not all(_alike(a, b) for a, b in zip(later, right * ranks + moments, strict=True))),
        (f"The numbers are right, but a rank sends {most:.0f} bytes where {least:.0f} do. "
         f"{how if all_reduced else twice}", most > 1.001 * least),
        ("Fewer bytes left a rank than a mean over ranks needs: some arrived without being sent", most < 0.999 * least),
        (how, all_reduced),
    )  # fmt: skip


def _explain_step(got: torch.Tensor, start: torch.Tensor, right: torch.Tensor, gradients: torch.Tensor) -> None:
    """Raise the sentence about the first step, whose momentum is the gradient itself: what moved, and how far."""
    ranks, mean = gradients.shape[1], gradients[0].mean(0)
    moved, local = start - got, torch.cat([gradients[0, rank].chunk(ranks)[rank] for rank in range(ranks)])
    alone = "Each shard moved along its owner's gradient alone: other ranks' samples must count too"
    slips = [
        (f"The gradients are summed, not averaged: every step is {ranks} times too long", mean * ranks),
        (f"Divided by {ranks} twice: the mean is taken once, before or in the reduce-scatter", mean / ranks),
        (alone, local),
        (alone, local / ranks),
        ("The weights went up the gradient: a step subtracts", -mean),
        ("The step has no learning rate: momentum times lr is what moves a weight", mean / _LR),
        ("The new gradient is damped by 0.1: momentum is 0.9 of the old one plus all of the gradient", 0.1 * mean),
        ("The new gradient is damped by 0.9: only the old momentum is, the gradient counts in full", 0.9 * mean),
        ("That is Nesterov's step: plain momentum moves a weight by lr times momentum", 1.9 * mean),
    ]
    recognize(moved, "", slips, lambda given, gradient: _alike(given, _LR * gradient))
    starts, steps = start.chunk(ranks), (_LR * mean).chunk(ranks)
    wrong = [rank for rank, part in enumerate(got.chunk(ranks)) if not _alike(part, starts[rank] - steps[rank])]
    others = [a - b for a in starts for b in (*steps, torch.zeros_like(steps[0]))]
    at = int((got - right).abs().argmax())
    refuse(
        "",
        (f"Shards {wrong} moved as they should not: rank r must update shard r, with the gradient of shard r",
         all(any(_alike(got.chunk(ranks)[rank], other) for other in others) for rank in wrong)),
        ("The weights are right to single precision only: they are in float64, and so must be all that is sent",
         torch.allclose(got, right, rtol=1e-6)),
        (f"After one step on {ranks} ranks weight {at} should go from {start[at]:.3f} to {right[at]:.3f}, and goes to "
         f"{got[at]:.3f}. What is wrong here the check does not know", True),
    )  # fmt: skip


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    # Gradients are small whole numbers in float64: what is right is right to the last digits.
    return torch.allclose(a, b, rtol=1e-9, atol=1e-9)


# --- ZeRO-3: gather and release -----------------------------------------------------------------------------


class _Gathered(list):
    """The weights of a layer, which a rank reads: what it writes there would come from a copy that it kept."""

    def _refuse(self, *_: object) -> None:
        raise Wrong("Something is written into the weights that `gather` returned: they are read, and whoever writes "
                    "there has kept a copy, which stage 3 has no room for.")  # fmt: skip

    __setitem__ = __delitem__ = __iadd__ = __imul__ = append = extend = insert = pop = remove = clear = _refuse
    sort = reverse = _refuse

    def free(self) -> None:
        """Lose the values: whoever kept the list finds its memory gone."""
        super().__setitem__(slice(None), [math.nan] * len(self))


class _Model:
    """Layers y = s w x whose weights exist between gather and release; who kept them lacks the layer's slope s."""

    def __init__(self, layers: int, width: int, ranks: int, seed: int):
        dice = random.Random(seed)
        self.weights = [[dice.randint(1, 5) for _ in range(width)] for _ in range(layers)]
        self.slopes = [dice.randint(2, 5) for _ in range(layers)]
        self.x = [float(dice.randint(1, 5)) for _ in range(width)]
        self.ranks, self.live, self.most = ranks, {}, 0
        self.gathers, self.scattered = [0] * layers, {}
        self.full: dict[int, list[float]] = {}  # gradients that are there in full
        self.tally: list[tuple[str, int]] = []
        self.turns = 0

    def _turn(self) -> None:
        self.turns += 1
        if self.turns > 100 * len(self.weights):
            raise Wrong(f"After {self.turns - 1} calls the step of {len(self.weights)} layers has no end: a loop "
                        "waits for something that nobody does.")  # fmt: skip

    def gather(self, k: int) -> list[float]:
        self._turn()
        k = self._known(k)
        if k in self.live:
            raise Wrong(f"Layer {k} is gathered while it is there already: those bytes are sent twice.")
        self.gathers[k] += 1
        self.live[k] = _Gathered(map(float, self.weights[k]))
        self.most = max(self.most, len(self.live))
        return self.live[k]

    def _known(self, k: int) -> int:
        k = whole(k, "The number of a layer")
        if k not in range(len(self.weights)):
            raise Wrong(f"There is no layer {k}: the layers are 0 to {len(self.weights) - 1}.")
        return k

    def release(self, k: int) -> None:
        self._turn()
        k = self._known(k)
        if k not in self.live:
            raise Wrong(f"Layer {k} is released, and was not there.")
        self.live.pop(k).free()

    def _use(self, k: int, weights: list[float], when: str) -> int:
        self._turn()
        k = self._known(k)
        if k not in self.live:
            raise Wrong(f"Layer {k} runs {when} without its weights: they were released, or never gathered.")
        if weights is not self.live[k]:
            raise Wrong(f"Layer {k} runs {when} with other weights than `gather({k})` returned last: those of another "
                        "layer, or a copy, which would outlive the release.")  # fmt: skip
        self.tally.append((when, k))
        return k

    def forward(self, k: int, weights: list[float], x: list[float]) -> list[float]:
        slope = self.slopes[self._use(k, weights, "forward")]
        return [slope * w * v for w, v in zip(weights, x, strict=True)]

    def backward(self, k: int, weights: list[float], x: list[float], dy: list[float]) -> tuple[list, list]:
        k = self._use(k, weights, "backward")
        dy = [self.slopes[k] * d for d in dy]
        full = self.full[k] = [v * d for v, d in zip(x, dy, strict=True)]
        if len(self.full) > 2:
            raise Wrong(f"{len(self.full)} full gradients are there at one moment, which stage 2 had already sharded: "
                        "reduce-scatter a layer's gradient when backward has made it; one more may be on its way.")  # fmt: skip
        return [w * d for w, d in zip(weights, dy, strict=True)], full

    def scatter(self, k: int, gradient: list[float]) -> list[float]:
        self._turn()
        k = self._known(k)
        if k in self.scattered:
            raise Wrong(f"The gradient of layer {k} is reduce-scattered twice in a step.")
        self.scattered[k] = numbers(gradient, f"The gradient of layer {k}")
        full = self.full.pop(k, [])
        full[:] = [math.nan] * len(full)  # its memory is the next layer's
        if len(self.scattered[k]) != len(self.x):
            raise Wrong(f"The gradient of layer {k} has {len(self.x)} numbers; `scatter` got {len(self.scattered[k])}.")
        return self.scattered[k][: len(self.x) // self.ranks]  # every rank has the same samples: the mean is it

    def truth(self) -> list[list[float]]:
        """Return the gradient of every layer: the product of the input, all slopes and all other layers."""
        slope = math.prod(self.slopes)
        columns = [slope * math.prod(column) * x for *column, x in zip(*self.weights, self.x, strict=True)]
        return [[c / w for c, w in zip(columns, row, strict=True)] for row in self.weights]


@check(
    idea="Weights exist only while their layer runs: forward needs each layer's once, and backward needs them again.",
    section="Stage 3: shard the weights too",
    line="For each layer, last first: gather, backward with the input that this layer had in forward, release, scatter.",
)
def zero3_step(answer: Callable[..., list[list[float]]]) -> str:
    """Judge `zero3_step(layers, x, gather, release, forward, backward, scatter)`: values, order, and what is live."""
    for layers, width, ranks, seed in ((4, 8, 4, 1), (3, 6, 2, 2), (6, 12, 3, 3)):
        model = _Model(layers, width, ranks, seed)
        calls = model.gather, model.release, model.forward, model.backward, model.scatter
        got = answer(layers, list(model.x), *calls)
        _judge_zero3(model, got, layers, width // ranks)
    twice = "each gathered twice and scattered once: 3 psi"
    if (gathers := sum(model.gathers)) < 2 * layers:
        twice = f"{gathers} gathers and {layers} scatters for {layers} layers; releasing after each use takes 3 psi"
    return f"Never more than two layers gathered, {twice}."


def _judge_zero3(model: _Model, got: object, layers: int, own: int) -> None:
    ran = [[k for each, k in model.tally if each == when] for when in ("forward", "backward")]
    refuse(
        "",
        ("Every layer runs once forward, from the first to the last, and once backward, the other way",
         ran != [list(range(layers)), list(reversed(range(layers)))]),
        (f"After the step {len(model.live)} of {layers} layers are still gathered: hold shards only", model.live),
        (f"{model.most} of {layers} layers were gathered at one moment; that is the memory of stage 2. Release a layer when it "
         "has run; one more may be there ahead of its use", model.most > 2),
        ("Some gradients are never reduce-scattered: this rank would keep them in full, of its samples only",
         set(model.scattered) != set(range(layers))),
    )  # fmt: skip
    truth, scattered = model.truth(), [model.scattered[k] for k in range(layers)]
    if not _rows_close(scattered, truth):
        _explain_gradients(model, scattered, truth)
    rows = [numbers(row, "A shard") for row in numbers(got)]
    if [len(row) for row in rows] != [own] * layers:
        raise Wrong(f"Return what `scatter` gave for each layer, first layer first: {layers} shards of {own} numbers.")
    shards = [row[:own] for row in truth]
    refuse(
        "",
        ("The shards are right but not in the order of the layers: backward made the last one first",
         not _rows_close(rows, shards) and _rows_close(rows, shards[::-1])),
        ("The gradients were right, and what is returned is not what `scatter` gave", not _rows_close(rows, shards)),
        ("A layer is gathered more than twice, forward and backward", any(count > 2 for count in model.gathers)),
    )  # fmt: skip


def _rows_close(rows: list[list[float]], truth: list[list[float]], times: float = 1) -> bool:
    return all(
        close(times * a, b) for row, right in zip(rows, truth, strict=True) for a, b in zip(row, right, strict=True)
    )


def _explain_gradients(model: _Model, got: list[list[float]], truth: list[list[float]]) -> NoReturn:
    refuse(
        "",
        ("Right gradients are scattered under the number of another layer",
         any(_rows_close(rows, truth) for rows in (got[::-1], [*got[1:], got[0]], [got[-1], *got[:-1]]))),
        ("Divided once too often: `scatter` takes the mean itself", _rows_close(got, truth, model.ranks)),
        ("That is the gradient of the layer's input: `backward` returns it first, and that of the weights second",
         _rows_close(got[-1:], [[model.slopes[-1] * w for w in model.weights[-1]]])),
        ("The last layer's gradient is right and earlier ones are not: the next `dy` is the gradient of the input, the first "
         "of the pair that backward returns, and `x` the input of that layer", _rows_close(got[-1:], truth[-1:])),
        ("The gradients are wrong from the last layer on: its backward needs the input that it had in forward, not its "
         "output, and a gradient of ones", True),
    )  # fmt: skip


# --- Muon on the shards of FSDP2 ----------------------------------------------------------------------------

Shapes = tuple[tuple[int, int], ...]
#: Ranks, and the matrices whose rows they share. On two ranks gathering sends no more than it should; on four it does.
_MUON_JOBS: tuple[tuple[int, Shapes], ...] = ((2, ((8, 4), (4, 8)) * 2), (4, (*((8, 4), (4, 12)) * 4, (4, 4))))


def _muon_rank(answer: Callable[..., None], shapes: Shapes) -> dict[str, Any]:
    """Run two steps of the answer on this rank; count what it sends, and the factors that it asks for, in the last."""
    start, *gradients = (
        [m.chunk(dist.get_world_size())[dist.get_rank()].clone() for m in ms] for ms in _matrices(shapes)
    )
    momenta, asked, steps = [torch.zeros_like(rows) for rows in start], [], []
    padding = 0

    def factor(matrix: torch.Tensor) -> torch.Tensor:
        nonlocal padding
        each = matrix.reshape(-1, *matrix.shape[-2:])
        asked.extend(tuple(one.shape) for one in each if one.any())
        padding += sum(not one.any() for one in each)
        return _polar(matrix)

    for mine in gradients:
        asked.clear()
        padding = 0
        with record_comms() as log:  # lists of its own: what is put into them moves no parameter
            answer(list(start), mine, list(momenta), _LR, factor)
        steps.append([[rows.clone() for rows in kept] for kept in (start, momenta)])
    return {"steps": steps, "asked": asked, "padding": padding, "sent": log.ring_bytes_sent(), "calls": set(log.calls)}


def _polar(matrix: torch.Tensor) -> torch.Tensor:
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    return u @ v


def _matrices(shapes: Shapes) -> list[list[torch.Tensor]]:
    """Return weights, and the mean gradients of two steps."""
    generator = torch.Generator().manual_seed(len(shapes))
    return [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes] for _ in range(3)]


@check(
    idea="A factor needs one rank that has the whole matrix, and each rank needs back the rows that it holds.",
    section="Muon and Shampoo: optimizers that need whole matrices",
    line="Give each matrix a home, bring its momentum together there, and send every rank its rows of the factor.",
)
def lean_muon(answer: Callable[..., None]) -> str:
    """Judge `lean_muon(weights, gradients, momenta, lr, factor)` on 2 and on 4 real ranks, over two steps."""
    for ranks, shapes in _MUON_JOBS:
        results = on_ranks(_muon_rank, ranks, answer, shapes)
        _judge_muon_numbers(results, ranks, shapes)
        _judge_muon_waste(results, ranks, shapes)
    return "The step of one process, each factor computed once, and no matrix sent where it is not needed."


def _judge_muon_numbers(results: list[dict[str, Any]], ranks: int, shapes: Shapes) -> None:
    start, first, second = _matrices(shapes)
    (new, momenta), (last, last_momenta) = (
        [[torch.cat(parts) for parts in zip(*(r["steps"][step][k] for r in results), strict=True)] for k in (0, 1)]
        for step in (0, 1)
    )
    moved, factors = [(a - b) / _LR for a, b in zip(start, new, strict=True)], [_polar(m) for m in first]
    if not _all_alike(moved, factors):
        alone = [torch.cat([_polar(part) for part in matrix.chunk(ranks)]) for matrix in first]
        turned = [[f.roll(k * len(f) // ranks, 0) for f in factors] for k in range(1, ranks)]
        slips = [
            ("The weights did not change: update the tensors that you are given, in place", [0 * f for f in factors]),
            ("Each rank computed the factor of its rows, and the factor of a part is not the part of the factor", alone),
            ("That is the momentum itself, not its factor: Muon moves weights by the factor", first),
            ("The step has no learning rate: the factor times lr is what moves a weight", [f / _LR for f in factors]),
            ("The weights went up the gradient: a step subtracts", [-f for f in factors]),
            *(("A rank got rows of the factor that are another rank's: rank r has rows of chunk r", rows) for rows in turned),
        ]  # fmt: skip
        recognize(moved, "", slips, _all_alike)
        nearly = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(moved, factors, strict=True))
        shape = next(shape for shape, a, b in zip(shapes, moved, factors, strict=True) if not _alike(a, b))
        refuse(
            "",
            ("The weights are right to single precision only: they are in float64, and so must be all that is sent", nearly),
            (f"On {ranks} ranks the matrix of shape {shape} did not move along lr times the factor of all its rows", True),
        )  # fmt: skip
    right = [0.9 * m + g for m, g in zip(first, second, strict=True)]
    refuse(
        "",
        ("The first step is right, and `momenta` is not this rank's rows of the momentum: 0.9 times what it was, plus the "
         "gradient, in place", not _all_alike(momenta, first)),
        ("The first step is right and the second is not: the factor is that of 0.9 times the momentum plus the new gradient",
         not _all_alike(last, [w - _LR * _polar(m) for w, m in zip(new, right, strict=True)])),
        ("The weights are right in both steps, and `momenta` is not: it is updated once a step",
         not _all_alike(last_momenta, right)),
    )  # fmt: skip


def _judge_muon_waste(results: list[dict[str, Any]], ranks: int, shapes: Shapes) -> None:
    each, sent = [len(result["asked"]) for result in results], sum(result["sent"] for result in results)
    part = any(shape not in shapes and shape[::-1] not in shapes for result in results for shape in result["asked"])
    least = 8 * 2 * (ranks - 1) / ranks * sum(rows * columns for rows, columns in shapes)  # in and out, whoever is home
    spread = {"all_gather", "broadcast", "all_reduce"} & set().union(*(result["calls"] for result in results))
    stacks = sum(-(-shapes.count(shape) // ranks) for shape in set(shapes))  # of padded stacks, dealt out evenly
    zeros = max(result["padding"] + len(result["asked"]) for result in results) > max(stacks, *each)
    told = f"The ranks send {sent:,.0f} bytes where {least:,.0f} do"
    refuse(
        "",
        ("Call `factor` for each whole matrix: the check counts by it which rank computes what", not any(each) or part),
        (f"{sum(each)} factors of {len(shapes)} matrices are computed on {ranks} ranks: the numbers are right and most of "
         "the work is waste. One rank computes it once for all, its home", sum(each) > len(shapes)),
        ("Factors of zeros cost as much as others: a rank calls `factor` for the matrices whose home it is", zeros),
        (f"One rank computes {max(each)} of {len(shapes)} factors, and another none: deal the homes out",
         max(each) > 1 and not min(each)),
        (f"{told}. Matrices go to ranks that need no more of them than their rows: only the home needs a whole momentum, "
         "and nobody else a whole factor", sent > 1.2 * least and spread),
        (f"{told}. Momentum in, rows of the factor out: more need not travel, as weights and gradients are there",
         sent > 1.2 * least),
        ("Fewer bytes left the ranks than two exchanges need: some arrived without being sent", sent < 0.999 * least),
    )  # fmt: skip


def _all_alike(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(_alike(left, right) for left, right in zip(a, b, strict=True))


# --- the tradeoffs ------------------------------------------------------------------------------------------

_KEYS = ("best", "held", "micro_batches", "sent")
Job = tuple[int, int, int, int, int]


@check(
    idea="A higher stage leaves more room for activations: its micro-batches are larger, so that it needs fewer of them.",
    section="Larger micro-batches can pay for a higher stage",
    line="Of the stages in which one sequence fits take the one with the least bytes sent, the lowest of several.",
)
def zero_tradeoffs(answer: Callable[[int, int, int, int, int], dict[str, Any]], seed: int = 55) -> str:
    """Judge `zero_tradeoffs(params, ranks, sequences, activations, budget)` by hand first, then on random jobs."""
    cases = [*_BY_HAND, *_drawn(seed)]
    for case in cases:
        _judge_tradeoffs(answer(*case), case)
    crossed = sum(_crossed(case) for case in cases)
    return f"{len(cases)} jobs; in {crossed} of them a stage sends less than a lower one that fits."


#: Small jobs. In the first everything fits, and no two mistakes give the same number; then stage 3 beats stage 2, both
#: tie, stage 2 beats stage 3, a shard is padded, stage 1 beats both, nothing fits, exactly one sequence fits.
_BY_HAND: list[Job] = [
    (8, 4, 380, 6, 147),
    (8, 4, 24, 3, 50),
    (8, 4, 16, 3, 50),
    (8, 4, 40, 3, 54),
    (10, 4, 20, 5, 73),
    (8, 4, 40, 6, 80),
    (8, 4, 8, 4, 33),
    (8, 4, 8, 4, 36),
]


def _crossed(case: Job) -> bool:
    choices = zero_choices(*case)
    return least_sent(choices) != next((c.stage for c in choices if c.sent is not None), None)


@functools.lru_cache(maxsize=4)
def _drawn(seed: int) -> list[Job]:
    """Return random jobs: in half of them the lowest stage that fits is not the one that sends least."""
    dice, found = random.Random(seed), {True: [], False: []}
    while min(map(len, found.values())) < 20:
        params, ranks = dice.randint(10**8, 2 * 10**11), dice.randint(2, 512)
        held = [zero_state_bytes(params, ranks, stage) for stage in range(4)]
        activations = max(1, held[2] // dice.randint(3, 40))
        budget = dice.choice(held) + dice.randint(0, 6) * activations + dice.choice((-1, 0, 0, activations // 2))
        case = (params, ranks, ranks * dice.randint(1, 48), activations, max(1, budget))
        found[_crossed(case)].append(case)
    return [case for both in zip(*found.values(), strict=False) for case in both]


def _judge_tradeoffs(got: object, case: Job) -> None:
    got = by_name(got, *_KEYS)
    rows = {name: numbers(got[name], f"`{name}`") for name in ("held", "micro_batches", "sent")}
    if any(len(row) != 4 for row in rows.values()):
        raise Wrong("`held`, `micro_batches` and `sent` are lists of four, for the stages 0 to 3.")
    params, ranks, sequences, activations, budget = case
    choices = zero_choices(*case)
    text = f"{params:,} parameters, {ranks} ranks, {sequences} sequences of {activations:,} bytes, budget {budget:,}"
    _judge_held(rows["held"], choices, case, text)
    for choice, count in zip(choices, rows["micro_batches"], strict=True):
        if _nothing(count) != (choice.micro_batches is None):
            _explain_fit(choice, case, text)
        if choice.micro_batches is not None and not close(count, choice.micro_batches, rel=0):
            _explain_count(rows["micro_batches"], choice, choices, case, text)
    _judge_sent(rows["sent"], choices, case, text)
    _judge_best(got["best"], rows["sent"], choices, text)


def _nothing(value: object) -> bool:
    try:
        return value is None or not math.isfinite(value)
    except TypeError:  # a text, for one
        return False


#: What a rank holds as mistakes have it: bytes of weights, gradients and optimizer, the stages that shard them first.
_SLIPS_OF_HELD: list[tuple[str, tuple[int, int, int], tuple[int, int, int]]] = [
    ("Gradients have 16 bits here: 2 bytes, not 4", (2, 4, 12), (3, 2, 1)),
    ("Weights have 16 bits, and their fp32 copy is in the 12 bytes of the optimizer", (4, 2, 12), (3, 2, 1)),
    ("The master weights are optimizer state too: 12 bytes, not 8", (2, 2, 8), (3, 2, 1)),
    ("The optimizer state is missing: 12 bytes for each parameter of the shard", (2, 2, 0), (3, 2, 1)),
    ("The gradients are missing: 2 bytes for each parameter", (2, 0, 12), (3, 2, 1)),
    ("Stage 1 shards the optimizer alone; gradients wait for stage 2", (2, 2, 12), (3, 1, 1)),
    ("Stage 2 shards gradients and stage 3 weights, not the other way", (2, 2, 12), (2, 3, 1)),
    ("Stage 3 shards the weights as well", (2, 2, 12), (4, 2, 1)),
    ("Stage 2 leaves the weights in full", (2, 2, 12), (2, 2, 1)),
]


def _judge_held(held: list, choices: list[StageChoice], case: Job, text: str) -> None:
    params, ranks, _, activations, _ = case
    wrong = [c.stage for c in choices if not close(held[c.stage], c.held, rel=0)]
    if not wrong:
        return
    own, got, first = shard_size(params, ranks), [float(value) for value in held], wrong[0]
    where = f"stage {first}; {text}"

    def slip(each: tuple[int, ...], first: tuple[int, ...], part: float = own) -> list[float]:
        return [sum(b * (part if k >= f else params) for b, f in zip(each, first, strict=True)) for k in range(4)]

    in_gb = all(close(a, choice.held / 1e9, rel=1e-3) for a, choice in zip(got, choices, strict=True))
    refuse(text, ("Return bytes, not GB", in_gb))
    together = [
        ("That is what all ranks hold together; asked is one rank", [ranks * c.held for c in choices]),
        ("These are the states alone, without activations", [c.held + activations for c in choices]),
    ]
    slips = [
        ("A shard is a whole number of parameters, rounded up: the padding is held too",
         slip((2, 2, 12), (3, 2, 1), params / ranks)),
        ("Rounded down, the last parameters belong to nobody: a shard is rounded up",
         slip((2, 2, 12), (3, 2, 1), params // ranks)),
        *((why, slip(*how)) for why, *how in _SLIPS_OF_HELD),
    ]  # fmt: skip
    recognize(got, where, together + slips)  # a mistake explains all stages, or failing that the first that is wrong
    recognize(got[first], where, [(why, values[first]) for why, values in slips], lambda a, b: a == b)
    raise Wrong(f"Stage {first} holds {choices[first].held:,} bytes, not {got[first]:,.0f} ({text}).")


def _explain_fit(choice: StageChoice, case: Job, text: str) -> NoReturn:
    stage, budget, need = choice.stage, case[4], choice.held + case[3]
    exactly = "exactly " if need == budget else ""
    refuse(
        text,
        (f"Stage {stage} holds {choice.held:,} of {budget:,} bytes, and one sequence needs {case[3]:,} more: it does not fit, "
         "and the entry of `micro_batches` is None", choice.micro_batches is None),
        (f"Stage {stage} fits: states and one sequence need {need:,} bytes, {exactly}what the budget of {budget:,} has", True),
    )  # fmt: skip


def _explain_count(row: list, choice: StageChoice, choices: list[StageChoice], case: Job, text: str) -> NoReturn:
    _, ranks, sequences, activations, budget = case
    got, room, own = float(row[choice.stage]), budget - choice.held, sequences // ranks
    fit = room // activations
    even = {
        c.stage: next(m for m in range(c.micro_batches, own + 1) if own % m == 0) for c in choices if c.micro_batches
    }
    where = f"stage {choice.stage}; {text}"
    left_over = "The sequences that are left over need a micro-batch too: round up"
    refuse(where, ("Micro-batches need not be equal: the last one of a step may be smaller",
                   all(not _nothing(row[k]) and float(row[k]) == m for k, m in even.items())))  # fmt: skip
    slips = [
        (left_over, own // fit),
        (left_over, own / fit),
        (f"The sequences of a step are those of all ranks: this one has {own} of them", -(-sequences // fit)),
        ("That is how many sequences a micro-batch has; asked is how many micro-batches the step needs", fit),
        ("The states take their part of the budget, activations the rest", -(-own // (budget // activations))),
        ("That is one sequence at a time: as many as fit go through together", own),
        ("A micro-batch that fills the room to the last byte fits", -(-own // max(1, (room - 1) // activations))),
        ("Micro-batches are counted in whole sequences: floor what fits, then round up", own * activations / room),
        ("Whole sequences fit, not parts of one: floor what fits before you divide", -(-own * activations // room)),
        ("Not all sequences of a rank fit at once: activations of one micro-batch must fit beside the states", 1),
    ]
    recognize(got, where, slips, lambda a, b: a == b)
    raise Wrong(f"Stage {choice.stage} has room for {fit} of this rank's {own} sequences at once, which makes "
                f"{choice.micro_batches} micro-batches, not {got:g} ({text}).")  # fmt: skip


def _units(stage: int, m: int) -> int:
    """Return what a stage sends with m micro-batches, in units of psi (N-1)/N values."""
    return (2, 2, m + 1, 3 * m)[stage]


def _in(stage: int, units: Callable[[int], float]) -> Callable[[int, int], float]:
    """Return the units of somebody who counts one stage otherwise."""
    return lambda k, m: units(m) if k == stage else _units(k, m)


_Units = Callable[[int, int], float]
_SLIPS: list[tuple[str, _Units]] = [
    ("DDP keeps a full gradient (`no_sync`) and reduces it once a step, not in every micro-batch",
     _in(0, lambda m: 2 * m)),
    ("DDP keeps a full gradient: both halves of its all-reduce come once a step", _in(0, lambda m: m + 1)),
    ("Stage 1 keeps a full gradient and reduces it once a step, not in every micro-batch", _in(1, lambda m: m + 1)),
    ("Stage 1 reduces its gradient and gathers its weights once a step, not in every micro-batch", _in(1, lambda m: 2 * m)),
    ("What keeps full gradients reduces them once a step: DDP and stage 1 do not send in every micro-batch",
     lambda k, m: (2 * m, m + 1, m + 1, 3 * m)[k]),
    ("Only what has no room for full weights or gradients sends in every micro-batch: stages 0 and 1 send once",
     lambda k, m: (2 * m, 2 * m, 2 * m, 3 * m)[k]),
    ("Stage 2 gathers its updated weights once, after the last micro-batch", _in(2, lambda m: 2 * m)),
    ("Stage 2 has no room for a full gradient: it reduces after every micro-batch", _in(2, lambda m: 2)),
    ("Stage 2 reduce-scatters its gradients: half of an all-reduce is enough", _in(2, lambda m: 2 * m + 1)),
    ("Stage 3 has three transfers: weights for forward, weights for backward, gradients", _in(3, lambda m: 2 * m)),
    ("Stage 3 reduces the gradient of every micro-batch as well: it has no room to add them up", _in(3, lambda m: 2 * m + 1)),
    ("Stage 3 has three transfers: its gradients need a reduce-scatter, no all-reduce", _in(3, lambda m: 4 * m)),
    ("Stage 3 releases the weights after use, and gathers them again in every micro-batch", _in(3, lambda m: 3)),
    ("Stage 3 gathers in every micro-batch, not once a step", _in(3, lambda m: m + 2)),
    ("Accumulation is not free: stages 2 and 3 send in every micro-batch", lambda k, m: (2, 2, 2, 3)[k]),
    ("Stages 1 and 2 have no third transfer: weights are gathered, not gradients",
     lambda k, m: _units(k, m) + (k in (1, 2))),
    ("No stage but 3 sends more than DDP: weights are gathered, not gradients", lambda k, m: (2, 3, 3, 4)[k]),
    ("After a step of stage 3 nothing is gathered: the next forward does it anyway", _in(3, lambda m: 3 * m + 1)),
    ("An all-reduce is a reduce-scatter and an all-gather: 2 psi in all, not 4", _in(0, lambda m: 4)),
]  # fmt: skip

#: Those that no stage escapes; of one stage alone such a number says nothing.
_SLIPS_OF_ALL: list[tuple[str, _Units]] = [
    ("Gradients and weights have 2 bytes here, not 4", lambda k, m: 2 * _units(k, m)),
    ("Gradients are sent in 16 bits: 2 bytes a value, not 4", lambda k, m: (4, 3, 2 * m + 1, 4 * m)[k]),
    ("These are values; each has 2 bytes", lambda k, m: _units(k, m) / 2),
]


def _judge_sent(sent: list, choices: list[StageChoice], case: Job, text: str) -> None:
    params, ranks = case[:2]
    unit, wrong = 2 * params * (ranks - 1) / ranks, {}
    for choice, value in zip(choices, sent, strict=True):
        if choice.sent is None:
            refuse(text, (f"In stage {choice.stage} nothing fits, so nothing is sent: its entry of `sent` is None",
                          not _nothing(value)))  # fmt: skip
        elif _nothing(value) or not (close(value, choice.sent) or abs(float(value) - choice.sent) < 1):  # a whole byte
            wrong[choice.stage] = math.nan if _nothing(value) else float(value) / unit
    if not wrong:
        return
    fits = {choice.stage: choice.micro_batches for choice in choices if choice.sent is not None}
    got = {stage: wrong.get(stage, _units(stage, m)) for stage, m in fits.items()}
    first = min(wrong)
    padded = shard_size(params, ranks) * ranks / params
    parts = [
        ("A rank has its own shard already and need not send it to itself: times (N-1)/N", ranks / (ranks - 1)),
        ("That is one of the N - 1 steps of the ring: each of them sends a shard", 1 / (ranks - 1)),
        ("That is what all ranks send together; asked is one rank", ranks),
        ("Those are units of psi (N-1)/N values; asked are bytes", 1 / unit),
        ("Those are GB; asked are bytes", 1e-9),
        ("The padding counts in what a rank holds; what it sends is asked without", padded),
    ]
    in_all = [(why, lambda k, m, part=part: part * _units(k, m)) for why, part in parts] + _SLIPS + _SLIPS_OF_ALL
    # A mistake explains all stages, or failing that the first that is wrong.
    for stages, slips in ((list(fits), in_all), ([first], _SLIPS)):
        shown = [(why, all(_same(got[k], units(k, fits[k])) for k in stages)) for why, units in slips]
        refuse(f"stage {first}, {fits[first]} micro-batches; {text}", *shown)
    raise Wrong(f"In stage {first} a rank sends {choices[first].sent:,.0f} bytes in {fits[first]} micro-batches, not "
                f"{wrong[first] * unit:,.0f} ({text}).")  # fmt: skip


def _same(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * max(abs(b), 1e-12)


def _judge_best(got: object, sent: list, choices: list[StageChoice], text: str) -> None:
    best = least_sent(choices)
    fits = {choice.stage: choice for choice in choices if choice.sent is not None}
    stage = None if _nothing(got) else whole(got, "`best`") if best is not None else -1
    if stage == best:
        return
    refuse(
        text,
        ("In no stage does one sequence fit beside the states. Then `best` is None", best is None),
        (f"`best` is None, but stage {best} fits", stage is None),
        (f"Stage {stage} does not fit", stage not in fits),
    )
    mine, other = fits[stage], fits[best]
    equal = close(mine.sent, other.sent, rel=1e-9)
    if equal and sent[stage] != sent[best]:
        return  # the last bits of the answer's own numbers decided, and they have no meaning
    refuse(
        text,
        (f"Stages {best} and {stage} send the same; take the lower one", equal),
        (f"Stage {stage} fits, but not the lowest that fits is asked: stage {best} has room for larger micro-batches, "
         f"{other.micro_batches} instead of {mine.micro_batches} in a step, and sends {other.sent / mine.sent:.2f} times as "
         "much", stage < best),
        (f"Stage {stage} fits, but sends {mine.sent / other.sent:.2f} times as much as stage {best}", True),
    )  # fmt: skip


# --- moments in few bits --------------------------------------------------------------------------------------

_STATES = {"fp32": (32, 0), "8bit": (8, 256), "4bit": (4, 128)}  # bits, and values that share a scale
_Tensors = list[tuple[int, int]]  # rows, columns
_Moments = tuple[_Tensors, int, int, int, set[str]]


def _held(
    sizes: list[int], states: str, *, least: int = LEAST, scale: int = 4, blocks: bool = True, moments: int = 2
) -> float:
    """Return the bytes of both moments of shards, by the rules or by what a mistake makes of them."""
    bits, block = _STATES[states]
    total = 0.0
    for size in sizes:
        if block and size >= least and not (blocks and size % block):
            total += size * bits / 8 + scale * math.ceil(size / block)
        else:
            total += 4 * size
    return moments * total


def _shards(shapes: _Tensors, ranks: int) -> list[int]:
    return [shard_size(rows, ranks) * columns for rows, columns in shapes]


def _room(case: _Moments) -> dict[str, float]:
    """Return what each needs at its fullest: moments, and the step's temporaries of the largest shard."""
    shapes, ranks, _, step, _ = case
    sizes = _shards(shapes, ranks)
    return {states: _held(sizes, states) + (step * max(sizes) if states != "fp32" else 0) for states in _STATES}


def _best(case: _Moments) -> str | None:
    return next((states for states, room in _room(case).items() if states not in case[4] and room <= case[2]), None)


def _moment_jobs(seed: int) -> list[_Moments]:
    """Return jobs by hand first: whole blocks, half a block, too small, blocks of 128 where 256 do not fit."""
    dice = random.Random(seed)
    shapes = [[(64, 130), (64, 126)], [(64, 128), (6, 10)], [(66, 256), (64, 130)], [(96, 320)], [(48, 352), (64, 1)]]
    jobs: list[tuple[_Tensors, int, int, set[str]]] = [
        (shapes[0], 2, 0, set()), (shapes[1], 4, 0, set()), (shapes[2], 2, 0, set()), (shapes[3], 3, 20, set()),
        (shapes[4], 3, 0, {"4bit"}), ([(90, 352), *[(128, 96)] * 16], 2, 20, set()),
    ]  # fmt: skip
    for _ in range(40):
        some = [(dice.choice((64, 90, 96, 128, 200, 256)), dice.choice((1, 64, 96, 130, 352, 384))) for _ in range(3)]
        step, diverges = dice.choice((0, 20)), dice.choice((set(), set(), {"4bit"}, {"8bit"}))
        # In a deep model the largest tensor is a small part, so that its temporaries can pay.
        jobs.append((some * (6 if step else 1), dice.choice((1, 2, 3, 4, 8)), step, diverges))
    made = []
    for some, ranks, step, diverges in jobs:
        rooms = _room((some, ranks, 0, step, diverges))
        first, second, third = sorted(rooms.values())
        budgets = [first - 1, first, second, (second + third) / 2, third]
        if step:  # between what the largest shard adds and what other readings of "the largest" would
            budgets = [need - less for need in (rooms["4bit"], rooms["8bit"]) for less in (0, 1)]
        made.append((some, ranks, round(dice.choice(budgets)), step, diverges))
    return made


@check(
    idea="A rank quantizes its own shard, tensor by tensor: what is small there, or not in whole blocks, stays in fp32.",
    section="Moments in 8 and 4 bits",
    line="A shard has the rows of a tensor over the ranks, rounded up; a moment of n values in whole blocks takes n bits / 8 bytes "
    "and 4 for each block, any other 4 n.",
)
def moments_recipe(answer: Callable[..., Any], seed: int = 505) -> str:
    """Judge `moments_recipe(shapes, ranks, budget, step, diverges)`: bytes of both moments, and the states to take."""
    cases = _moment_jobs(seed)
    for case in cases:
        shapes, ranks, budget, step, diverges = case
        text = f"{shapes[:3]}{' and more' * (len(shapes) > 3)} on {ranks} ranks, {budget:,} bytes"
        got = by_name(answer(list(shapes), ranks, budget, step, set(diverges)), "held", "best")
        held = by_name(got["held"], *_STATES)
        wrong = {states for states in _STATES if not close(held[states], _held(_shards(shapes, ranks), states), rel=0)}
        if wrong:
            _explain_moments({states: float(held[states]) for states in _STATES}, case, text)
        _judge_states(got["best"], case, f"{text}, {step} bytes a value in the step, {sorted(diverges)} diverge")
    return f"{len(cases)} models and GPUs, to the byte."


def _explain_moments(held: dict[str, float], case: _Moments, text: str) -> NoReturn:
    shapes, ranks = case[:2]
    sizes, whole = _shards(shapes, ranks), [rows * columns for rows, columns in shapes]

    def of(sizes: list[int], **how: Any) -> dict[str, float]:
        return {states: _held(sizes, states, **how) for states in _STATES}

    flat = -(-sum(whole) // ranks)
    slips = [
        ("That is one moment; AdamW has two", of(sizes, moments=1)),
        ("That is what one rank held if nothing were sharded", of(whole)),
        ("All parameters are taken as one flat array over the ranks: FSDP2 cuts each tensor by its rows, and torchao "
         "quantizes tensor by tensor", of([flat], least=0, blocks=False)),
        ("A last block that is not full is no block here: such a shard stays in fp32", of(sizes, blocks=False)),
        (f"A shard of fewer than {LEAST:,} values stays in fp32", of(sizes, least=0)),
        (f"From {LEAST:,} values on a shard is quantized, {LEAST:,} included", of(sizes, least=LEAST + 1)),
        ("Rounded down, the last rows belong to nobody: a shard's rows are rounded up",
         of([rows // ranks * columns for rows, columns in shapes])),
        ("Every shard is quantized here; small ones, and those without whole blocks, stay in fp32",
         of(sizes, least=0, blocks=False)),
        ("Every block has a scale in fp32, 4 bytes", of(sizes, scale=0)),
        ("A scale is fp32, 4 bytes and not 2", of(sizes, scale=2)),
        ("It is decided for the whole tensor: a rank sees its shard, and decides for that",
         {s: sum(_held([n], s) if _held([w], s) != 8 * w else 8 * n for n, w in zip(sizes, whole, strict=True)) for s in _STATES}),
    ]  # fmt: skip
    recognize(
        held, text, slips, lambda given, made: all(close(given[states], made[states], rel=1e-9) for states in made)
    )
    right = of(sizes)
    first = next(states for states in _STATES if held[states] != right[states])
    raise Wrong(f"Both moments in {first} take {right[first]:,.0f} bytes on a rank whose shards have {sizes} values, not "
                f"{held[first]:,.0f} ({text}).")  # fmt: skip


def _judge_states(got: object, case: _Moments, text: str) -> None:
    best, room, (shapes, ranks, budget, step, diverges) = _best(case), _room(case), case
    if got == best or (best is None and _nothing(got)):
        return
    sizes = _shards(shapes, ranks)
    bare = next((s for s in _STATES if s not in diverges and _held(sizes, s) <= budget), None)
    refuse(
        text,
        ("Nothing that does not diverge fits: then `best` is None", best is None and got not in _STATES),
        (f"`best` is one of {', '.join(_STATES)}, or None", not _nothing(got) and got not in _STATES),
        (f"`best` is None, but {best} fits", _nothing(got)),
        (f"{got} diverges on this model: it is no choice, whatever it saves", got in diverges),
        (f"Without a compiler the step of quantized moments holds {step} bytes for each value of the largest shard: with that {got} "
         f"needs {room.get(str(got), 0):,.0f}", step and got == bare),
        (f"{got} needs {room.get(str(got), 0):,.0f} bytes, and does not fit", room.get(str(got), 0) > budget),
        (f"{best} fits as well, and keeps more bits than {got}", True),
    )  # fmt: skip
