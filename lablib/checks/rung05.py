"""The checks of rung 05: a ZeRO-2 step, ZeRO-3, training within a budget, one bad shard, the tradeoffs."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lablib.calc.parallel import StageChoice, least_sent, shard_size, zero_choices, zero_state_bytes
from lablib.checks.judging import (
    NEW,
    Sealed,
    Wrong,
    ask_ranks,
    by_name,
    check,
    close,
    numbers,
    on_ranks,
    recognize,
    refuse,
    whole,
)
from lablib.launch.measure import LiveBytes, record_comms
from lablib.toys.zero import FlatShards, ZeRO2

__all__ = ["Job", "find_bad_shard", "jobs", "train", "zero2_step", "zero3_step", "zero_tradeoffs"]


# --- a ZeRO-2 step ------------------------------------------------------------------------------------------

_STEPS = 3
#: What multiplies the shard of momentum between steps. Who keeps all of the momentum elsewhere does not notice.
_BETWEEN = -2.0


def _zero2_rank(answer: Callable[..., None], widths: tuple[int, ...], lr: float, seed: int) -> dict[str, Any]:
    """Run the answer on this rank; the gradients depend on rank, step and seed, and anybody can compute them."""
    n, rank = dist.get_world_size(), dist.get_rank()
    size, memory = n * sum(widths), torch.empty(n * max(widths), dtype=torch.float64)
    weights = _buckets(torch.arange(size, dtype=torch.float64) / size, n, widths)
    momenta = [torch.zeros(width, dtype=torch.float64) for width in widths]
    sent, all_reduced, steps, kept, over, beside = [], False, [], [], False, [0]
    given = {bucket.data_ptr(): bucket for bucket in weights}  # with the buckets, or their memory is used again
    kinds = _kinds(weights, momenta)

    def anew() -> int:  # a bucket that takes the place of another is no gradient
        return sum(w.nbytes for w in weights if w.data_ptr() not in given)

    class Live(LiveBytes):  # until it has taken that place it counts
        def _add(self, *args: Any, **how: Any) -> None:
            super()._add(*args, **how)
            beside.append(self.live - anew())

    for step in range(_STEPS):
        gradients = _buckets(_gradients(n, size, seed)[step, rank], n, widths)
        moments = []

        def backward(gradients: list[torch.Tensor] = gradients, moments: list[tuple] = moments) -> Iterator[tuple]:
            if moments:
                raise Wrong("Backward runs once a step: its gradients come again only with a second forward pass.")
            moments.append((live.live - anew(), log.ring_bytes_sent()))
            for k in reversed(range(len(widths))):
                yield k, memory[: n * widths[k]].copy_(gradients[k])
                memory.fill_(math.nan)  # it is the next bucket's
                moments.append((live.live - anew(), log.ring_bytes_sent()))

        with record_comms() as log, Live() as live:
            answer(weights, backward, momenta, lr)
        if _kinds(weights, momenta) != kinds:
            raise Wrong("`weights` and `momenta` are lists of float64 tensors, whose number and lengths stay.")
        over |= max(beside) > 8 * (3 * sum(widths) + 2 * n * max(widths))  # less than all weights on four ranks
        for i, (now, left) in enumerate(moments):  # of i buckets all but two have left by then
            # Beside gradients a rank may have a copy of its pieces of the weights.
            over |= now > 8 * (sum(widths) + sum(widths[len(widths) - i :]) + 2 * n * max(widths))
            over |= left < 0.999 * 8 * (n - 1) * sum(widths[len(widths) - i + 2 :] if i > 2 else ())
        sent.append(log.ring_bytes_sent())
        all_reduced |= log.bytes["all_reduce"] > 4 * size  # half of the gradients
        steps.append(torch.cat([bucket.view(n, -1) for bucket in weights], 1).flatten())
        kept.append(torch.cat(momenta))
        for momentum in momenta:
            momentum *= _BETWEEN
    return {"weights": steps, "momentum": kept, "sent": sent, "all_reduced": all_reduced, "over": over}


def _kinds(*lists: list[Any]) -> list[list[tuple]]:
    return [[(getattr(tensor, "shape", None), getattr(tensor, "dtype", None)) for tensor in each] for each in lists]


def _buckets(flat: torch.Tensor, ranks: int, widths: tuple[int, ...]) -> list[torch.Tensor]:
    """Cut an array whose chunk r is rank r's into buckets whose chunks r are."""
    return [part.flatten().clone() for part in flat.view(ranks, -1).split(widths, 1)]


def _gradients(ranks: int, size: int, seed: int) -> torch.Tensor:
    """Return gradients of shape (steps, ranks, size), of 35 bits: a mean is exact in any order, and not in float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**34), 2**34, (_STEPS, ranks, size), generator=generator).double() * ranks / 2**28


def _one_process(gradients: torch.Tensor, lr: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return weights and momentum after each step."""
    size = gradients.shape[-1]
    weights, momentum = torch.arange(size, dtype=torch.float64) / size, torch.zeros(size, dtype=torch.float64)
    steps, moments = [], []
    for gradient in gradients:
        momentum = 0.9 * momentum + gradient
        weights = weights - lr * momentum
        steps.append(weights)
        moments.append(momentum)
        momentum = _BETWEEN * momentum
    return steps, moments


@check(
    idea="Stage 2 is the all-reduce of DDP with the optimizer between its halves, and no full gradient waits for the end.",
    section="Stage 2: shard the gradients too",
    line="Reduce-scatter each bucket over the number of ranks when it comes, into a buffer as long as its momentum.",
)
def zero2_step(answer: Callable[..., None]) -> str:
    """Judge `zero2_step(weights, backward, momenta, lr)` on 2 and on 4 real ranks, over three steps: numbers, bytes, memory."""
    for ranks, widths in ((2, (7, 5, 6, 4, 7, 3, 6, 5)), (4, 2 * (2, 3, 1, 3, 2, 3, 3, 1))):  # most mistakes show on 2
        lr, seed = 2.0 ** -NEW.randint(3, 5), NEW.randrange(10**6)
        results = on_ranks(_zero2_rank, ranks, answer, widths, lr, seed)
        _judge_step(results, _gradients(ranks, ranks * sum(widths), seed), lr)
    return "The step of one process, no byte more than DDP sends, and a rank holds its pieces and at most two buckets."


def _judge_step(results: list[dict[str, Any]], gradients: torch.Tensor, lr: float) -> None:
    (right, moments), (_, ranks, size) = _one_process(gradients.mean(1), lr), gradients.shape
    first, start = [result["weights"][0] for result in results], torch.arange(size, dtype=torch.float64) / size
    own = torch.cat([each.chunk(ranks)[rank] for rank, each in enumerate(first)])
    apart, unmoved = not all(torch.equal(each, first[0]) for each in first), torch.equal(first[0], start)
    refuse(
        "",
        ("Weights are NaN, as a gradient is once the next is asked for", any(each.isnan().any() for each in first)),
        ("Each rank has its own new shard, and not the others': an all-gather of the new weights brings them", apart and _alike(own, right[0])),
        ("After the step the ranks hold different weights: the replicas drift apart", apart),
        ("The first step moves no weight, and a later one does: a step goes by the momentum that has its own gradient",
         unmoved and not torch.equal(results[0]["weights"][-1], start)),
        ("The weights did not change: update the tensors that you are given, in place", unmoved),
    )  # fmt: skip
    if not _alike(first[0], right[0]):
        _explain_step(first[0], start, right[0], gradients, lr)
    kept = [torch.cat([result["momentum"][step] for result in results]) for step in range(_STEPS)]
    least = 2 * (ranks - 1) / ranks * 8 * size
    most = max(sent for result in results for sent in result["sent"])
    later = [weights for result in results for weights in result["weights"]] + kept
    alone = right[0] - lr * (0.9 * moments[0] + gradients[1].mean(0))  # of a momentum that the check cannot change
    all_reduced, over = (any(result[what] for result in results) for what in ("all_reduced", "over"))
    how = "An all-reduce brings all to every rank: of the mean gradient stage 2 must not hold it, for weights an all-gather does"
    twice = "Something may go twice, or pickled, or whole gradients where shards of their mean are asked"
    refuse(
        "",
        ("The first step is right, and `momenta` are as before: keep them, in place, between steps", not kept[0].any()),
        ("The momentum that is kept has the learning rate in it: lr multiplies momentum where a weight moves",
         _alike(kept[0], lr * moments[0])),
        ("The weights are right, and `momenta` are not this rank's pieces of the momentum", not _alike(kept[0], moments[0])),
        ("The old momentum counts in full: 0.9 damps it before the new gradient is added",
         _alike(kept[1], _BETWEEN * moments[0] + gradients[1].mean(0))),
        ("The first step is right, and later ones do not go on from the shards in `momenta`, which the check changes between "
         "steps: a momentum that is kept elsewhere; one of all weights is data parallelism and not stage 2",
         _alike(results[0]["weights"][1], alone)),
        ("The first step is right and a later one is not: it takes 0.9 of what `momenta` have by then, and the mean gradient",
         not all(_alike(a, b) for a, b in zip(later, right * ranks + moments, strict=True))),
        (f"The numbers are right, but a rank sends {most:.0f} bytes where {least:.0f} do. "
         f"{how if all_reduced else twice}", most > 1.001 * least),
        ("Fewer bytes left a rank than a mean over ranks needs: some arrived without being sent", most < 0.999 * least),
        (how, all_reduced),
        ("Numbers and bytes are right, and at one moment a rank holds more than its pieces and two buckets, or a bucket has not "
         "left two later: gradients that wait for the end of backward are stage 1, and copies take room too", over),
    )  # fmt: skip


def _explain_step(got: Tensor, start: Tensor, right: Tensor, gradients: Tensor, lr: float) -> None:
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
        ("The step has no learning rate: momentum times lr is what moves a weight", mean / lr),
        ("The new gradient is damped by 0.1: momentum is 0.9 of the old one plus all of the gradient", 0.1 * mean),
        ("The new gradient is damped by 0.9: only the old momentum is, the gradient counts in full", 0.9 * mean),
        ("That is Nesterov's step: plain momentum moves a weight by lr times momentum", 1.9 * mean),
    ]
    recognize(moved, "", slips, lambda given, gradient: _alike(given, lr * gradient))
    starts, steps = start.chunk(ranks), (lr * mean).chunk(ranks)
    wrong = [rank for rank, part in enumerate(got.chunk(ranks)) if not _alike(part, starts[rank] - steps[rank])]
    others = [a - b for a in starts for b in (*steps, torch.zeros_like(steps[0]))]
    at = int((got - right).abs().argmax())
    refuse(
        "",
        (f"Shards {wrong} are not where they should be: rank r must update shard r, with the gradient of shard r",
         all(any(_alike(got.chunk(ranks)[rank], other) for other in others) for rank in wrong)),
        ("The weights are right to single precision only: they are in float64, and so is all that is computed and sent",
         torch.allclose(got, right, rtol=1e-6, atol=1e-5)),
        (f"After one step on {ranks} ranks weight {at} should go from {start[at]:.3f} to {right[at]:.6g}, and goes to "
         f"{got[at]:.6g}. What is wrong here the check does not know", True),
    )  # fmt: skip


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=1e-9)  # means are exact: what is right is right to the last digits


# --- ZeRO-3: gather and release -----------------------------------------------------------------------------


class _Gathered(list):
    """The weights of a layer, which a rank reads: what it writes there could come from a copy that it kept."""

    def _refuse(self, *_: object) -> None:
        raise Wrong("Something is written into the weights that `gather` returned: they are read, and not written.")

    __setitem__ = __delitem__ = __iadd__ = __imul__ = append = extend = insert = pop = remove = clear = _refuse
    sort = reverse = _refuse

    def free(self) -> None:
        """Lose the values: whoever kept the list finds its memory gone."""
        super().__setitem__(slice(None), [math.nan] * len(self))


class _Model(Sealed):
    """Layers y = s w x whose weights exist between gather and release; who kept them lacks the layer's slope s."""

    def __init__(self, layers: int, width: int, ranks: int, seed: int):
        dice = random.Random(seed)
        self._weights = [[dice.randint(1, 5) for _ in range(width)] for _ in range(layers)]
        self._slopes = [dice.randint(2, 5) for _ in range(layers)]
        self.x = [float(dice.randint(1, 5)) for _ in range(width)]
        self.ranks, self.live, self.most = ranks, {}, 0
        self.gathers, self.scattered = [0] * layers, {}
        self.full: dict[int, list[float]] = {}  # gradients that are there in full
        self.tally: list[tuple[str, int]] = []
        self.turns = 0

    def _turn(self) -> None:
        self.turns += 1
        if self.turns > 100 * len(self._weights):
            raise Wrong(f"After {self.turns - 1} calls the step of {len(self._weights)} layers has no end: a loop "
                        "waits for something that nobody does.")  # fmt: skip

    def gather(self, k: int) -> list[float]:
        self._turn()
        k = self._known(k)
        if k in self.live:
            raise Wrong(f"Layer {k} is gathered while it is there already: those bytes are sent twice.")
        self.gathers[k] += 1
        self.live[k] = _Gathered(map(float, self._weights[k]))
        self.most = max(self.most, len(self.live))
        return self.live[k]

    def _known(self, k: int) -> int:
        k = whole(k, "The number of a layer")
        if k not in range(len(self._weights)):
            raise Wrong(f"There is no layer {k}: the layers are 0 to {len(self._weights) - 1}.")
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
        slope = self._slopes[self._use(k, weights, "forward")]
        return [slope * w * v for w, v in zip(weights, x, strict=True)]

    def backward(self, k: int, weights: list[float], x: list[float], dy: list[float]) -> tuple[list, list]:
        k = self._use(k, weights, "backward")
        dy = [self._slopes[k] * d for d in dy]
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

    def _truth(self) -> list[list[float]]:
        """Return the gradient of every layer: the product of the input, all slopes and all other layers."""
        slope = math.prod(self._slopes)
        columns = [slope * math.prod(column) * x for *column, x in zip(*self._weights, self.x, strict=True)]
        return [[c / w for c, w in zip(columns, row, strict=True)] for row in self._weights]


@check(
    idea="Weights exist only while their layer runs: forward needs each layer's once, and backward needs them again.",
    section="Stage 3: shard the weights too",
    line="For each layer, last first: gather, backward with the input that this layer had in forward, release, scatter.",
)
def zero3_step(answer: Callable[..., list[list[float]]]) -> str:
    """Judge `zero3_step(layers, x, gather, release, forward, backward, scatter)`: values, order, and what is live."""
    for layers, width, ranks, seed in ((4, 8, 4, 1), (3, 6, 2, 2), (6, 12, 3, NEW.randrange(10**6))):
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
        (f"{model.most} of {layers} layers were gathered at one moment, and stage 2 holds all: release a layer when it has run; "
         "one more may be there ahead of its use", model.most > 2),
        ("Some gradients are never reduce-scattered: this rank would keep them in full, of its samples only",
         set(model.scattered) != set(range(layers))),
    )  # fmt: skip
    truth, scattered = model._truth(), [model.scattered[k] for k in range(layers)]
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
        ("Too small by the number of ranks, and `scatter` takes the mean itself", _rows_close(got, truth, model.ranks)),
        ("That is the gradient of the layer's input: `backward` returns it first, and that of the weights second",
         _rows_close(got[-1:], [[model._slopes[-1] * w for w in model._weights[-1]]])),
        ("The last layer's gradient is right and earlier ones are not: the next `dy` is the gradient of the input, the first "
         "of the pair that backward returns, and `x` the input of that layer", _rows_close(got[-1:], truth[-1:])),
        (f"The last layer's gradient should be {truth[-1]}, and is {got[-1]}: its backward takes the input that the layer had in "
         "forward, and a gradient of ones", True),
    )  # fmt: skip


# --- training within a budget, with PyTorch's own sharding ------------------------------------------------------

_TRAIN_RANKS, _LAYERS, _MICRO_BATCHES, _TRAIN_STEPS = 3, 6, 4, 2
#: From where to where a budget for states is drawn, in bytes of the weights, and the stage that then fits and sends least.
_BUDGETS = ((3.35, 3.6, 1), (2.72, 2.9, 2), (2.1, 2.3, 3))


class _Block(nn.Module):
    """A layer that tells the check when its forward runs, and when its backward begins."""

    def __init__(self, width: int, look: Callable[[], None]) -> None:
        super().__init__()
        self.linear, self.look = nn.Linear(width, width, bias=False), look
        self.register_full_backward_pre_hook(lambda *_: look())

    def forward(self, x: Tensor) -> Tensor:
        self.look()
        return x + torch.tanh(self.linear(x))


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    own = [t.to_local() if hasattr(t, "to_local") else t for t in tensors if t is not None]
    return sum(t.numel() * t.element_size() for t in own if t.untyped_storage().nbytes())


def _train_rank(answer: Callable[..., Any], budgets: list[float], widths: Sequence[int]) -> list[dict[str, Any]]:
    return [_trained(answer, budget, width) for budget, width in zip(budgets, widths, strict=True)]


def _trained(answer: Callable[..., Any], budget: float, width: int) -> dict[str, Any]:
    """Train within a budget on this rank; weigh what lies there, and count what is sent from the first micro-batch on."""
    torch.manual_seed(0)
    n, rank = dist.get_world_size(), dist.get_rank()
    held, starts, marks = dict.fromkeys(("weights", "gradients", "moments"), 0), [], [0]

    def weigh(kind: str, tensors: Iterable[Tensor | None]) -> None:
        held[kind] = max(held[kind], _bytes(tensors))
        marks.append(len(log.events))

    model = nn.Sequential(*[_Block(width, lambda: weigh("weights", model.parameters())) for _ in range(_LAYERS)])
    size, alone = _bytes(model.double().parameters()), copy.deepcopy(model)
    batches = torch.randn(_TRAIN_STEPS, _MICRO_BATCHES, n, 5, width, dtype=torch.float64)

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        starts.append(len(log.events))
        return model(batch).square().mean()

    def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(list(params), lr=0.1, eps=0.1)  # eps as large as gradients: factors do not cancel
        optimizer.register_step_pre_hook(
            lambda *_: weigh("gradients", [p.grad for group in optimizer.param_groups for p in group["params"]])
        )
        optimizer.register_step_post_hook(
            lambda *_: weigh("moments", [v for own in optimizer.state.values() for k, v in own.items() if k != "step"])
        )
        return optimizer

    with record_comms() as log:
        answer(model, [list(step[:, rank]) for step in batches], loss_of, adamw, int(budget * size))
    events = [e for i, e in enumerate(log.events) if starts and (i >= starts[0] or e.op == "all_gather")]
    reduced = [sum(e.bytes for e in log.events[a:b] if "reduce" in e.op) for a, b in itertools.pairwise(starts)]
    lag = max((size - bytes_ for bytes_ in reduced[: _MICRO_BATCHES - 1]), default=0)  # whole, until it is reduced
    held["gradients"] = max(held["gradients"], lag + (size - lag) // n, *(e.bytes for e in events if "reduce" in e.op))
    moved = {op: sum(e.bytes for e in events if e.op == op) / size / _TRAIN_STEPS for op in {e.op for e in events}}
    runs = [sum(e.bytes for e in log.events[a:b] if e.op == "all_gather") for a, b in itertools.pairwise(marks)]
    held["weights"] = max(held["weights"], size * (max(runs, default=0) >= size))  # all on their way before one is used
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    held["weights"] += sharded * max(0, held["weights"] - size // n) // (n - 1)  # pieces beside the whole
    found = {"held": {kind: bytes_ / size for kind, bytes_ in held.items()}, "moved": moved, "runs": len(starts)}
    found |= {"sharded": sharded, "sent": sum(e.sent for e in events) / (size * (n - 1) / n) / _TRAIN_STEPS}
    found["weights"] = [getattr(p.detach(), "full_tensor", p.detach().clone)() for p in model.parameters()]
    return found | {"alone": _trained_alone(alone, batches), "start": [p.detach().clone() for p in alone.parameters()]}


def _trained_alone(start: nn.Module, batches: Tensor) -> dict[str, list[Tensor]]:
    """Return the weights of one process, and of one with a mistake, by its sentence; "" is the right one."""
    m, found = _MICRO_BATCHES, {}
    for why, factor, first in (
        ("", 1, 0),
        ("The gradients of a step's micro-batches add up: each loss counts a part of the mean", m, 0),
        ("Divided by the ranks too: FSDP and DDP take the mean over ranks themselves", 1 / _TRAIN_RANKS, 0),
        ("The gradients of an earlier step count again: set them to zero after the optimizer's", 1, 0),
        ("Only the last micro-batch of a step counts: the others' gradients were dropped", 1 / m, m - 1),
        ("Only the last micro-batch of a step counts: the others' gradients were dropped", 1, m - 1),
    ):
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=0.1)
        for step in batches:
            if "again" not in why:
                optimizer.zero_grad()
            (factor * model(step[first:].flatten(0, 2)).square().mean()).backward()
            optimizer.step()
        found[why + " " * sum(w.startswith(why) for w in found if why)] = [p.detach() for p in model.parameters()]
    return found


@check(
    kind="work",
    idea="A stage is a choice of what stays whole between its uses: gradients until the step's end, weights until the next "
    "forward, or nothing.",
    section="The three stages in PyTorch: what stays whole",
    line="Keep weights gathered, and gradients unreduced, until the last micro-batch of a step where the budget allows it, "
    "and let the last one reduce and release.",
)
def train(answer: Callable[..., Any]) -> str:
    """Judge `train(model, steps, loss_of, adamw, budget)` on 3 real ranks, with room for each of the stages."""
    budgets = [round(NEW.uniform(low, high), 3) for low, high, _ in _BUDGETS]  # others each time
    widths = NEW.choice(((12, 15, 18), (15, 12, 18), (12, 18, 15)))  # a budget's bytes alone decide nothing
    results = on_ranks(_train_rank, _TRAIN_RANKS, answer, budgets, widths)
    for budget, (*_, stage), found in zip(budgets, _BUDGETS, zip(*results, strict=True), strict=True):
        _judge_trained(found, f"a budget of {budget:g} times the weights")
        _judge_room(found[0], budget, stage)
    return "Three budgets, each with the weights of one process: a rank sends at most 2, then 5, then 12 transfers."


def _judge_trained(found: Sequence[dict[str, Any]], case: str) -> None:
    got, start, alone = found[0]["weights"], found[0]["start"], found[0]["alone"]

    def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
        # Float64, and an eps of 0.1: what is right is right to ten digits, and a mistake moves the third.
        return all(torch.allclose(x, y, rtol=1e-7, atol=1e-7) for x, y in zip(a, b, strict=True))

    runs, shapes = _MICRO_BATCHES * _TRAIN_STEPS, [p.shape for p in start]
    refuse(case, ("At the end the model has parameters of other shapes: asked is `fully_shard`, which leaves their shapes",
                  any([p.shape for p in each["weights"]] != shapes for each in found)))  # fmt: skip
    refuse(
        case,
        (f"`loss_of` is called {found[0]['runs']} times on a rank, which has {runs} micro-batches", found[0]["runs"] != runs),
        ("The ranks hold different weights at the end, as where each trains on its own samples alone",
         not all(same(each["weights"], got) for each in found)),
        ("No gradient is ever reduced: the last micro-batch of a step has to, until then a rank has the sum of its samples",
         found[0]["sharded"] and not any("reduce" in kind for kind in found[0]["moved"])),
        ("The weights at the end are those of the start, as of an optimizer made before `fully_shard` puts others in, of "
         "gradients set to zero before the step, or of weights that stay gathered beside its pieces", same(got, start)),
    )  # fmt: skip
    if same(got, alone[""]):
        return
    recognize(got, case, [(why.strip(), weights) for why, weights in alone.items() if why], same)
    raise Wrong("The weights are not those of one process. Where they are right after one step and wrong after two, it may be that "
                f"weights were gathered before the optimizer's step, or the optimizer was made anew ({case}).")  # fmt: skip


def _judge_room(found: dict[str, Any], budget: float, stage: int) -> None:
    held, moved, sent, least = found["held"], found["moved"], found["sent"], _units(stage, _MICRO_BATCHES)
    total, gathered = sum(held.values()), moved.get("all_gather", 0) > 1.1  # a block of six more than once
    case = f"a budget of {budget:g} times the weights, which themselves count 1"
    lies = ", ".join(f"{kind} {part:.2f}" for kind, part in held.items())
    too_much, wasted = total > budget, f"It fits, and sends {sent:.3g} transfers a step where {least} do"
    refuse(
        case,
        ("There are no moments: the optimizer is the one that `adamw` returns", not held["moments"]),
        (f"Too much lies on a rank: {lies}. The moments lie whole on every rank, which no stage of ZeRO does",
         too_much and held["moments"] > 1.5),
        (f"Too much lies on a rank: {lies}. Gradients that no reduce-scatter has cut lie whole: reduce after each micro-batch, and make "
         "each block a unit", too_much and held["gradients"] > 0.9),
        (f"Too much lies on a rank: {lies}. Most weights are there, or on their way, at one moment: make each block a unit, gather "
         "it for its use, and release it after", too_much and held["weights"] > 0.9),
        (f"Too much lies on a rank: {lies}", too_much),
        (f"{wasted}. An all-reduce brings the whole mean gradient to every rank, and only the owner of a piece uses it",
         sent > 1.01 * least and moved.get("all_reduce", 0) > 0.5),
        (f"{wasted}. There is room for whole gradients: reduce them once, after the last micro-batch",
         sent > 1.01 * least and stage == 1 and moved.get("reduce_scatter", 0) > 1.01),
        (f"{wasted}. There is room for whole weights, which change once a step: gather them once, and release them in the last "
         "micro-batch's backward", sent > 1.01 * least and stage < 3 and gathered),
        (wasted, sent > 1.01 * least),
        (f"A rank sends {sent:.3g} transfers a step where 2 are needed: something arrived unsent, or in fewer bytes a value", sent < 1.98),
        ("It fits, and sends no more than it must; asked is PyTorch's sharding, `fully_shard`", not found["sharded"]),
    )  # fmt: skip


# --- one bad shard ----------------------------------------------------------------------------------------------

_PARTS = ("reduce-scatter", "update", "all-gather")
#: What can be wrong, and the part of the step in which it is.
_ILLS = {"shifted": 0, "own": 0, "local norm": 1, "no momentum": 1, "stale": 2, "turned": 2}


class Job(Sealed):
    """A training in stage 2 on three ranks; something in it may be wrong.

    Attributes:
        ranks: On how many ranks it runs.
        steps: How many steps it is watched.
        max_norm: To which norm it clips.
    """

    ranks, steps, max_norm = 3, 5, 0.05

    def __init__(self, seed: int, ill: str | None = None, rank: int = 0, name: str = "", step: int = 0) -> None:
        self.seed, self._ill = seed, (ill, rank, name, step)

    def build(self) -> tuple[ZeRO2, nn.Module]:
        """Return the sharded model, each parameter a bucket, and one with the same weights that is this rank's alone."""
        torch.manual_seed(self.seed)
        module = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        return _IllZeRO2(copy.deepcopy(module), self.optimizer, self._ill), module

    @staticmethod
    def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of this job, for any parameters."""
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)

    def batch(self, step: int) -> Tensor:
        """Return all samples of a step; rank r takes the r-th of `ranks` chunks."""
        return torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * self.seed + step))

    @staticmethod
    def loss(model: nn.Module, samples: Tensor) -> Tensor:
        """Return the mean loss over samples."""
        return (model(samples) - samples[:, 1:].cumsum(1)).square().mean()

    @staticmethod
    def pieces(flat: FlatShards, value: Tensor) -> tuple[Tensor, ...]:
        """Return the pieces that the ranks should have of a parameter's value, or of its gradient: padding is zero."""
        padded = torch.zeros_like(flat.full)
        padded[: flat.numel] = value.detach().flatten()
        return padded.chunk(flat.world_size)


class _IllZeRO2(Sealed, ZeRO2):
    """Stage 2, wrong in one thing, on one rank, in one parameter, from one step on."""

    def __init__(self, module: nn.Module, optimizer: Callable, ill: tuple[str | None, int, str, int]) -> None:
        super().__init__(module, optimizer, bucket_bytes=1)
        self._what, self._who, name, self._when = ill
        self._bad = self.flat_of.get(dict(module.named_parameters()).get(name))
        self._now = 0

    def _here(self, *ills: str, on_others: bool = False) -> FlatShards | None:
        """Return the bad bucket if one of these is wrong now, on this rank."""
        mine = (dist.get_rank() == self._who) != on_others
        return self._bad if mine and self._what in ills and self._now >= self._when else None

    def _send_next(self) -> None:
        flat = self.trained[self._sent]
        if flat is self._here("own"):
            self._own = flat.unsharded_grad.chunk(flat.world_size)[flat.rank] * flat.world_size
        super()._send_next()

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        if flat := self._here("shifted"):
            flat.sharded_grad.copy_(flat.sharded_grad.roll(1))
        if flat := self._here("own"):
            flat.sharded_grad.copy_(self._own)

    def _clip(self, max_norm: float) -> Tensor:
        if flat := self._here("local norm"):
            norms = torch.stack([each.sharded_grad.norm() for each in self.trained])
            clipped = flat.sharded_grad * (max_norm / norms.norm()).clamp(max=1)
        total = super()._clip(max_norm)
        if flat:
            flat.sharded_grad.copy_(clipped)
        return total

    def _update_shards(self, max_norm: float | None) -> Tensor | None:
        if flat := self._here("no momentum"):
            self.optimizer.state.pop(flat.sharded_param, None)
        return super()._update_shards(max_norm)

    def _gather_weights(self) -> None:
        if flat := self._here("stale", on_others=True):
            before = flat.full.chunk(flat.world_size)[self._who].clone()
        super()._gather_weights()
        if flat:
            flat.full.chunk(flat.world_size)[self._who].copy_(before)
        if flat := self._here("turned", on_others=True):
            piece = flat.full.chunk(flat.world_size)[self._who]
            piece.copy_(piece.roll(1))
        self._now += 1


def jobs(seed: int) -> list[Job]:
    """Return jobs in an order that is drawn: a healthy one, and one for each thing that can be wrong."""
    dice = random.Random(seed)
    # Parameters of 28, 7, 35, 5 and 15 values: in three pieces each has two values or more, but for the last of 5 and 7.
    places = [(rank, name) for name in ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight") for rank in range(2)]
    places += [(2, "0.weight"), (2, "2.weight"), (2, "4.weight")]
    first = dice.randrange(4)  # A momentum is there to be lost from the second step on.
    found = [Job(dice.randrange(1000), ill, *dice.choice(places), 1 + (k + first) % 4) for k, ill in enumerate(_ILLS)]
    found.append(Job(dice.randrange(1000)))
    dice.shuffle(found)
    return found


@check(
    kind="fault",
    idea="The first difference from one process says where: before the optimizer, in a rank's own piece, or in what others "
    "have of it.",
    section="Rounding: how equal ZeRO is to one process",
    line="In each step compare three things with one process: the pieces of the mean gradient, each rank's own piece of the new "
    "weights, and its copies of others' pieces; and let the ranks tell each other.",
)
def find_bad_shard(answer: Callable[[Job], Any]) -> str:
    """Judge `find_bad_shard(job)`, which runs on each of a job's ranks: (rank, parameter, part of the step) or None."""
    some = jobs(NEW.randrange(10**6))
    every = zip(some, ask_ranks(answer, Job.ranks, some), strict=True)
    for job, said in sorted(every, key=lambda pair: [None, *_ILLS].index(pair[0]._ill[0])):  # the healthy one first
        _judge_found(job, [None if _nothing(each) else each for each in said])
    return ("Six sick jobs and a healthy one: a gradient's piece shifted by one, one that was never reduced, a clip by the norm of "
            "a rank's own pieces, a momentum lost, a piece that others did not get, one that they got shifted. Such errors come "
            "from offsets of padded buckets, `clip_grad_norm_` over shards, and optimizer states that one rank did not load.")  # fmt: skip


def _judge_found(job: Job, said: Sequence[Any]) -> None:
    ill, rank, name, step = job._ill
    got = next((each for each in said if each is not None), None)
    refuse("", ("The ranks do not agree on what is wrong: let them tell each other before they answer",
                any(each is not None and each != got for each in said) or (ill and None in said and got is not None)))  # fmt: skip
    where, which, how = (-1, "", "") if got is None else _read_found(got)
    refuse("", ("A healthy job is called sick: its last digits differ, because sums are grouped otherwise; if more does, the "
                "one process may take other steps: its clipping, its momentum, its samples", ill is None and got is not None))  # fmt: skip
    if ill is None:
        return
    part = _PARTS[_ILLS[ill]]
    sign = "the ranks do not hold the same weights" if part == "all-gather" else (
        "all ranks hold the same weights, and not those of one process that clips as they do: compare gradients and own pieces")  # fmt: skip
    refuse(
        "",
        (f"A sick job passes for healthy: from step {step} on {sign}", got is None),
        (f"`{how}` is no part of the step: {', '.join(_PARTS)}", how not in _PARTS),
        ("A job is accused of the wrong part: in the first step that differs, pieces of the mean gradient are compared before "
         "the update, a rank's own piece of the weights after it, and what others have of it last", how != part),
        (f"Right is the part of the step, and wrong the parameter, `{which}`: names are those in `model.module`, and one step later "
         "nearly all differ", which != name),
        ("Right is the parameter, and wrong the rank: it is the one whose piece it is, not the one that sees it", where != rank),
    )  # fmt: skip


def _read_found(got: Any) -> tuple[int, str, str]:
    """Read an answer: a rank, the name of a parameter, a part of the step."""
    try:
        rank, name, part = got
        return whole(rank, "The rank"), "".join(name), "".join(part)  # also members of a str Enum
    except (TypeError, ValueError):
        raise Wrong("Return (rank, name of the parameter, part of the step), or None for a healthy job.") from None


# --- the tradeoffs ------------------------------------------------------------------------------------------

_KEYS = ("held", "micro_batches", "sent", "best")
_Case = tuple[int, int, int, int, int]


@check(
    idea="A higher stage leaves more room for activations: its micro-batches are larger, so that it needs fewer of them.",
    section="Larger micro-batches can pay for a higher stage",
    line="Of the stages in which one sequence fits take the one with the least bytes sent, the lowest of several.",
)
def zero_tradeoffs(answer: Callable[[int, int, int, int, int], dict[str, Any]], seed: int = 55) -> str:
    """Judge `zero_tradeoffs(params, ranks, sequences, activations, budget)` by hand first, then on random jobs."""
    cases = [*_BY_HAND, *_drawn(seed), *_drawn(NEW.randrange(10**6))[:6]]
    for case in cases:
        _judge_tradeoffs(answer(*case), case)
    used = [n.rpartition(".")[2] for n in getattr(answer, "called", ()) if n.startswith("lablib.calc.parallel.zero.")]
    refuse("", *((f"`{name}` of lablib has answered: count what each stage holds and sends, and compare, in your own lines",
                  name != "shard_size") for name in used))  # fmt: skip
    crossed = sum(_crossed(case) for case in cases)
    return f"{len(cases)} jobs; in {crossed} of them a stage sends less than a lower one that fits."


#: Small jobs. In the first everything fits, and no two mistakes give the same number; then stage 3 beats stage 2, both
#: tie, stage 2 beats stage 3, a shard is padded, stage 1 beats both, nothing fits, exactly one sequence fits.
_BY_HAND: list[_Case] = [
    (8, 4, 380, 6, 147),
    (8, 4, 24, 3, 50),
    (8, 4, 16, 3, 50),
    (8, 4, 40, 3, 54),
    (10, 4, 20, 5, 73),
    (8, 4, 40, 6, 80),
    (8, 4, 8, 4, 33),
    (8, 4, 8, 4, 36),
]


def _crossed(case: _Case) -> bool:
    choices = zero_choices(*case)
    return least_sent(choices) != next((c.stage for c in choices if c.sent is not None), None)


@functools.lru_cache(maxsize=4)
def _drawn(seed: int) -> list[_Case]:
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


def _judge_tradeoffs(got: object, case: _Case) -> None:
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
    except (TypeError, OverflowError):  # a text, or more than a float has
        return False


#: What a rank holds as mistakes have it: bytes of weights, gradients and optimizer, the stages that shard them first.
_SLIPS_OF_HELD: list[tuple[str, tuple[int, int, int], tuple[int, int, int]]] = [
    ("Gradients have 16 bits here: 2 bytes, not 4", (2, 4, 12), (3, 2, 1)),
    ("Weights have 16 bits, and their fp32 copy is in the 12 bytes of the optimizer", (4, 2, 12), (3, 2, 1)),
    ("The master weights are optimizer state too: 12 bytes, not 8", (2, 2, 8), (3, 2, 1)),
    ("The optimizer state is missing: 12 bytes for each parameter of the shard", (2, 2, 0), (3, 2, 1)),
    ("The gradients are missing: 2 bytes for each parameter", (2, 0, 12), (3, 2, 1)),
    ("Stage 1 shards the optimizer alone; gradients wait for stage 2", (2, 2, 12), (3, 1, 1)),
    ("The weights are missing: 2 bytes for each parameter", (0, 2, 12), (3, 2, 1)),
    ("Stage 3 shards the weights as well", (2, 2, 12), (4, 2, 1)),
    ("Stage 2 leaves the weights in full", (2, 2, 12), (2, 2, 1)),
]


def _judge_held(held: list, choices: list[StageChoice], case: _Case, text: str) -> None:
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
    if first:  # what stage 0 holds is a sum, which tells no term from another
        recognize(got[first], where, [(why, values[first]) for why, values in slips], lambda a, b: a == b)
    raise Wrong(f"Stage {first} holds {choices[first].held:,} bytes, not {got[first]:,.0f} ({text}).")


def _explain_fit(choice: StageChoice, case: _Case, text: str) -> NoReturn:
    stage, budget, need = choice.stage, case[4], choice.held + case[3]
    exactly = "exactly " if need == budget else ""
    refuse(
        text,
        (f"Stage {stage} holds {choice.held:,} of {budget:,} bytes, and one sequence needs {case[3]:,} more: it does not fit, "
         "and the entry of `micro_batches` is None", choice.micro_batches is None),
        (f"Stage {stage} fits: states and one sequence need {need:,} bytes, {exactly}what the budget of {budget:,} has", True),
    )  # fmt: skip


def _explain_count(row: list, choice: StageChoice, choices: list[StageChoice], case: _Case, text: str) -> NoReturn:
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
    ("Stage 2 gathers its updated weights once, after the last micro-batch", _in(2, lambda m: 2 * m)),
    ("Stage 2 has no room for a full gradient: it reduces after every micro-batch", _in(2, lambda m: 2)),
    ("Stage 2 reduce-scatters its gradients: half of an all-reduce is enough", _in(2, lambda m: 2 * m + 1)),
    ("Stage 3 has three transfers: weights for forward, weights for backward, gradients", _in(3, lambda m: 2 * m)),
    ("Stage 3 reduces the gradient of every micro-batch as well: it has no room to add them up", _in(3, lambda m: 2 * m + 1)),
    ("Stage 3 has three transfers: its gradients need a reduce-scatter, no all-reduce", _in(3, lambda m: 4 * m)),
    ("Stage 3 releases the weights after use, and gathers them again in every micro-batch", _in(3, lambda m: 3)),
    ("Stage 3 gathers in every micro-batch, not once a step", _in(3, lambda m: m + 2)),
    ("After a step of stage 3 nothing is gathered: the next forward does it anyway", _in(3, lambda m: 3 * m + 1)),
    ("An all-reduce is a reduce-scatter and an all-gather: 2 psi in all, not 4", _in(0, lambda m: 4)),
]  # fmt: skip

#: Those of several stages; of one stage alone such a number says nothing.
_SLIPS_OF_ALL: list[tuple[str, _Units]] = [
    ("What keeps full gradients reduces them once a step: DDP and stage 1 do not send in every micro-batch",
     lambda k, m: (2 * m, m + 1, m + 1, 3 * m)[k]),
    ("Only what has no room for full weights or gradients sends in every micro-batch: stages 0 and 1 send once",
     lambda k, m: (2 * m, 2 * m, 2 * m, 3 * m)[k]),
    ("Accumulation is not free: stages 2 and 3 send in every micro-batch", lambda k, m: (2, 2, 2, 3)[k]),
    ("Stages 1 and 2 have no third transfer: weights are gathered, not gradients",
     lambda k, m: _units(k, m) + (k in (1, 2))),
    ("No stage but 3 sends more than DDP: weights are gathered, not gradients", lambda k, m: (2, 3, 3, 4)[k]),
    ("Twice too much: values have 2 bytes here, not 4; and what arrives is not sent", lambda k, m: 2 * _units(k, m)),
    ("Gradients are sent in 16 bits: 2 bytes a value, not 4", lambda k, m: (4, 3, 2 * m + 1, 4 * m)[k]),
    ("These are values; each has 2 bytes", lambda k, m: _units(k, m) / 2),
]  # fmt: skip


def _judge_sent(sent: list, choices: list[StageChoice], case: _Case, text: str) -> None:
    params, ranks = case[:2]
    unit, wrong = 2 * params * (ranks - 1) / ranks, {}
    for choice, value in zip(choices, sent, strict=True):
        stage, none = choice.stage, choice.sent is None
        refuse(text, (f"In stage {stage} nothing fits, so nothing is sent: its entry of `sent` is None", none and not _nothing(value)),
               (f"Stage {stage} fits, and its entry of `sent` is no number of bytes", not none and _nothing(value)))  # fmt: skip
        if not (none or close(value, choice.sent) or abs(float(value) - choice.sent) < 1):  # a whole byte
            wrong[stage] = float(value) / unit
    if not wrong:
        return
    fits = {choice.stage: choice.micro_batches for choice in choices if choice.sent is not None}
    got = {stage: wrong.get(stage, _units(stage, m)) for stage, m in fits.items()}
    first, padded = min(wrong), shard_size(params, ranks) * ranks / params
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
        where = f"stage {first}, {fits[first]} micro-batches; {text}"
        recognize(stages, where, slips, lambda of, units: all(close(got[k], units(k, fits[k])) for k in of))
    raise Wrong(f"In stage {first} a rank sends {choices[first].sent:,.0f} bytes in {fits[first]} micro-batches, not "
                f"{wrong[first] * unit:,.0f} ({text}).")  # fmt: skip


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
