"""The checks of rung 08: what breaks in 16 bits, a training step in fp16, ranks that lose bits, and a recipe of formats.

The step and the job with a fault run on real ranks. `Network` is what the step trains, and `LowPrecisionJob` may have a fault:
both are for the lab.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lablib.calc.precision import FORMATS, quantized_bytes
from lablib.checks.judging import (
    NEW,
    Sealed,
    Wrong,
    as_float,
    ask_ranks,
    by_name,
    check,
    chosen,
    close,
    on_ranks,
    pair,
    recognize,
    refuse,
)
from lablib.launch.measure import record_comms
from lablib.launch.precision import product_error, through

__all__ = ["LowPrecisionJob", "Network", "block_recipe", "lost_bits", "train_step", "what_breaks"]


# --- what breaks --------------------------------------------------------------------------------------------

_FAILURES = {"overflow", "underflow", "stall"}
_ACTIVATIONS = (300.0, 6e4, 7e4, 1e6, 3e38, 4e38)
_GRADIENTS = (1e-2, 1e-4, 1e-6, 4e-8, 2e-8, 1e-10, 6e-41, 3e-41, 1e-45)
_Case = tuple[str, float, tuple[float, float], float, float, float, bool]


def _truth(case: _Case) -> set[str]:
    name, activation, (small, large), scale, weight, update, master = case
    fmt, found = FORMATS[name], set()
    if math.isinf(fmt.round(activation)) or math.isinf(fmt.round(scale * large)):
        found.add("overflow")
    if fmt.round(scale * small) == 0:
        found.add("underflow")
    if not master and not fmt.moves(weight, update):
        found.add("stall")
    return found


def _near_an_edge(case: _Case) -> bool:
    """Whether a difference of five percent would change the answer: such cases teach nothing."""
    name, activation, (small, large), scale, *_ = case
    fmt = FORMATS[name]
    edges = [(activation, fmt.max), (scale * large, fmt.max), (scale * small, fmt.min_subnormal / 2)]
    return any(abs(math.log(value / edge)) < 0.05 for value, edge in edges)


def _situations(dice: random.Random, count: int) -> list[_Case]:
    made: list[_Case] = [
        ("fp16", 300.0, (1e-10, 1e-3), 1.0, 1.0, 1e-2, True),
        ("bf16", 300.0, (1e-10, 1e-3), 1.0, 1.0, 1e-2, True),
        ("bf16", 1e5, (1e-10, 1e-3), 1.0, 1.0, 1e-2, True),
        ("bf16", 300.0, (1e-10, 1e-3), 1.0, 1.0, 1e-3, False),
        ("fp16", 300.0, (1e-10, 1e-3), 2.0**16, 1.0, 1e-3, True),
        ("fp16", 1e5, (1e-6, 1e-3), 1.0, 1.0, 1e-2, True),
        ("bf16", 300.0, (1e-10, 1e-3), 1.0, 1.5, -3e-2, False),  # four gaps, downwards
    ]
    while len(made) < count:
        name = dice.choice(("fp16", "bf16"))
        small = dice.choice(_GRADIENTS) * dice.uniform(0.96, 1.04)
        large = small * 10.0 ** dice.uniform(1, 7)
        held = dice.choice(("fp16", "bf16"))
        # Exact in both formats, and with neighbours on both sides that are as far away as the gap says.
        weight = dice.choice((1, -1)) * dice.randint(132, 250) / 128 * 2.0 ** dice.randint(-6, 2)
        update = dice.choice((1, -1)) * dice.choice((0.3, 0.7, 3.0)) * FORMATS[held].ulp(weight)
        scale = dice.choice((1.0, 1.0, 2.0**10, 2.0**16, 2.0**24))
        activation = dice.choice(_ACTIVATIONS) * dice.uniform(0.96, 1.04)
        case = (name, activation, (small, large), scale, weight, update, dice.random() < 0.4)
        if not _near_an_edge(case):
            made.append(case)
    return made


@check(
    idea="Range above, range below and precision are three questions, and each has its own number to compare with.",
    section="bf16 against fp16: range or precision",
    line="Round the activation, both scaled gradients and the moved weight to the format, and look for infinity, zero and "
    "the old weight.",
)
def what_breaks(answer: Callable[..., set[str]], seed: int = 88) -> str:
    """Judge `what_breaks(name, activation, gradients, scale, weight, update, master)` on random training steps."""
    cases = _situations(random.Random(seed), 250) + _situations(NEW, 27)[7:]
    for case in cases:
        got, truth = _named(answer(*case)), _truth(case)
        for failure in sorted(got ^ truth):
            _explain_failure(failure, failure in truth, case)
    return f"{len(cases)} steps: fp16 breaks by its range, bf16 by its precision."


def _named(got: Any) -> set[str]:
    otherwise = 'Return a set with some of "overflow", "underflow" and "stall", empty if nothing breaks.'
    return chosen(None if isinstance(got, str) else got, _FAILURES, otherwise)


def _explain_failure(failure: str, breaks: bool, case: _Case) -> NoReturn:
    name, activation, (small, large), scale, weight, update, master = case
    fmt = FORMATS[name]
    gap, least = fmt.ulp(weight), f"{fmt.min_subnormal:.3g}"
    signs = {
        ("overflow", True): [
            (f"An activation of {activation:.3g} is beyond the largest number of {name}, {fmt.max:.4g}",
             math.isinf(fmt.round(activation))),
            (f"The loss scale multiplies the large gradients too: {scale:g} times {large:.3g} is beyond the largest number of "
             f"{name}, {fmt.max:.4g}", True),
        ],
        ("overflow", False): [
            (f"{name} reaches {fmt.max:.4g}: an activation of {activation:.3g}, which the loss scale is not for, and gradients "
             f"up to {large:.3g}, which it makes {scale * large:.3g}, are within", True)],
        ("underflow", True): [
            (f"{scale:g} times {small:.3g} is less than half of {name}'s smallest subnormal, {least}, and becomes zero", True)],
        ("underflow", False): [
            (f"{scale:g} times {small:.3g} does not become zero in {name}: subnormals reach down to {least}, more than "
             "half of that rounds up, and loss scaling counts", True)],
        ("stall", True): [
            (f"A {name} weight of {weight:g} has its next neighbour {gap:.3g} away, and an update of size {abs(update):.3g} "
             "is less than half of that: nothing moves", True)],
        ("stall", False): [
            ("With a master copy the update is added in fp32, and small updates are not lost", master),
            (f"An update of size {abs(update):.3g}, up or down, is over half of the gap at {weight:g} in {name}, {gap:.3g}: it "
             "moves", True),
        ],
    }  # fmt: skip
    refuse("", *signs[failure, breaks])


# --- a step in fp16 -----------------------------------------------------------------------------------------

_RANKS, _MICRO_BATCHES, _MAX_NORM, _START, _INTERVAL = 2, 3, 1.0, 2.0**12, 2

#: What each step meets: gradients that fp16 would lose, that are clipped, or that overflow on one rank in one micro-batch.
_STEPS = ("plain", "tiny", "large", "rank 1 overflows", "plain", "rank 0 overflows", "tiny", "large")
_THEN = ("plain", "tiny", "rank 0 overflows", "rank 1 overflows")  # in another order in each call


class Network(nn.Module):
    """Two layers and a loss; writes down the dtype of its second product, or of a copy's, when backward comes to it."""

    dtypes: ClassVar[set[torch.dtype]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean squared error of a micro-batch."""
        found = self.down(torch.tanh(self.up(x)))
        if found.requires_grad:
            found.register_hook(lambda g: self.dtypes.add(g.dtype))  # a loss that is only logged may be fp32
        return functional.mse_loss(found.float(), y)


def _micro_batches(seed: int, step: int, kind: str) -> list[list[tuple[Tensor, Tensor]]]:
    """Return the micro-batches of each rank."""
    dice = torch.Generator().manual_seed(100 * seed + step)
    inputs, targets = {"tiny": (1e-3, 1e-3), "large": (1.0, 10.0)}.get(kind, (1.0, 1.0))
    made = []
    for rank in range(_RANKS):
        mine = [[inputs * torch.randn(16, 8, generator=dice), targets * torch.randn(16, 4, generator=dice)]
                for _ in range(_MICRO_BATCHES)]  # fmt: skip
        if kind.startswith(f"rank {rank}"):
            mine[-rank][1] *= 1e5  # the last of rank 1, the first of rank 0
        made.append([(x, y) for x, y in mine])
    return made


def _flat(tensors: Iterable[Tensor | None]) -> Tensor:
    return torch.cat([torch.zeros(1) if each is None else each.detach().float().flatten() for each in tensors])


def _train_on_a_rank(answer: Callable, seed: int, steps: tuple[str, ...]) -> list[dict]:
    """Run the steps on this rank; return what the optimizer was given, and the gradients of all micro-batches in fp32."""
    torch.manual_seed(seed)
    model, given, found = Network(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.register_step_pre_hook(lambda *_: given.append(_flat(p.grad for p in model.parameters())))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: 0.9**steps)
    scaler = torch.amp.GradScaler("cpu", init_scale=_START, growth_interval=_INTERVAL)
    for step, kind in enumerate(steps):
        parts, mine = _micro_batches(seed, step, kind), dist.get_rank()
        exact = torch.stack([
            torch.stack([_flat(torch.autograd.grad(model(x, y), list(model.parameters()))) for x, y in own]) for own in parts
        ])  # fmt: skip
        before = scaler.get_scale(), schedule.last_epoch
        model.dtypes.clear()
        with record_comms() as log:
            answer(model, optimizer, schedule, scaler, parts[mine], _MAX_NORM)
        found.append({
            "given": list(given), "exact": exact, "scale": before[0], "became": scaler.get_scale(),
            "counted": schedule.last_epoch - before[1], "dtypes": set(model.dtypes), "sent": log.ring_bytes_sent(),
            "weights": _flat(model.parameters()), "kept": {p.dtype for p in model.parameters()},
        })  # fmt: skip
        given.clear()
        if found[-1]["kept"] != {torch.float32}:
            break
    return found


def _clipped(gradient: Tensor) -> Tensor:
    return gradient * min(1.0, _MAX_NORM / gradient.norm().item())


@check(
    idea="A step is one decision of all ranks: gradients of the scaled loss are averaged while an infinity is still in them, then "
    "divided, clipped, and used or dropped.",
    section="torch.autocast: which operators are cast",
    line="Clear gradients; for each micro-batch run the model under autocast and backward on the scaled loss over their number; "
    "average over ranks in fp32; unscale_, clip, step, update; move the schedule if the scale did not fall.",
    kind="work",
)
def train_step(answer: Callable[..., Any], seed: int = 80) -> str:
    """Judge `train_step(model, optimizer, schedule, scaler, micro_batches, max_norm)` by steps of it on two ranks."""
    kinds, good, before = (*_STEPS, *NEW.sample(_THEN, len(_THEN))), 0, None
    by_rank = on_ranks(_train_on_a_rank, _RANKS, answer, seed, kinds)
    for step, (kind, *here) in enumerate(zip(kinds, *by_rank, strict=False)):
        good = 0 if "overflows" in kind else good + 1
        _judge_step(here, kind, f"step {step + 1}, {kind}", good == _INTERVAL, before)
        good, before = good % _INTERVAL, here[0]["given"]
    # fp16's products are off by 0.04 to 0.065 percent, measured. bf16 rounds by 0.4 of 2**-8 of a norm: 0.11 to 0.16 on two ranks.
    exact = [(each["given"][0], _clipped(each["exact"].mean((0, 1)))) for each in by_rank[0] if each["given"]]
    off = torch.stack([(given - mean).norm() / mean.norm() for given, mean in exact]).median().item()
    refuse("", (f"The gradients lose bits on their way: in half of the steps they are {off:.2%} or more from the mean in fp32, and "
                "products in fp16 explain 0.06%. Add up and average in fp32, and round nothing", off > 9e-4))  # fmt: skip
    return f"{len(kinds)} steps on {_RANKS} ranks, {sum('overflows' in k for k in kinds)} of them skipped by both, though one saw no overflow."


def _judge_step(here: list[dict], kind: str, case: str, grows: bool, before: list[Tensor] | None) -> None:
    first, scale, became = here[0], here[0]["scale"], " and ".join(f"{each['became']:g}" for each in here)
    steps, dtypes = [len(each["given"]) for each in here], set().union(*(each["dtypes"] for each in here))
    overflow, ran = "overflows" in kind, ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes)) or "no dtype"
    wanted, full = scale / 2 if overflow else 2 * scale if grows else scale, 4 * first["weights"].numel()
    refuse(
        case,
        (f"Backward came to products of the model in {ran}, and should to float16 alone: run it under autocast, as the scaler is for fp16",
         dtypes != {torch.float16}),
        ("The weights have no longer the bits of fp32: autocast casts at operators, and small updates need them",
         any(each["kept"] != {torch.float32} or torch.equal(each["weights"], each["weights"].half().float()) for each in here)),
        (f"The ranks took {steps[0]} and {steps[1]} steps, and all take a step or skip it: an average that comes first brings "
         "the infinity of one rank to all before the scaler looks", steps[0] != steps[1]),
        ("A gradient overflowed, and the step was taken: such a step is skipped, by `scaler.step` if the infinity is still there",
         overflow and steps[0]),
        ("No step was taken, though gradients of the scaled loss fit in fp16 here: `scaler.step` takes it, unless an infinity of "
         "a step before is still in them, or they were scaled twice", not overflow and not steps[0]),
        (f"The optimizer stepped {steps[0]} times: once a step, when all micro-batches have added their gradient", steps[0] > 1),
    )  # fmt: skip
    if not overflow:
        for rank, each in enumerate(here):
            _judge_gradient(each, rank, case, before)
    refuse(
        case,
        (f"The scale of the ranks went from {scale:g} to {became}, and should be {wanted:g}: `update()` once a step, skipped "
         "or not, counts good steps in a row or, if its rank's scaler saw an infinity, halves it", any(each["became"] != wanted for each in here)),
        ("The step was skipped, and the schedule moved: the learning rate counts steps that were taken",
         overflow and any(each["counted"] for each in here)),
        ("In a step that was taken each rank's schedule moves once", not overflow and any(each["counted"] != 1 for each in here)),
        ("The weights of the two ranks differ", not torch.equal(first["weights"], here[1]["weights"])),
        (f"Right, but not for the price: {first['sent']:,.0f} bytes a rank, and one average of all gradients in fp32 takes "
         f"{full:,}, when the last micro-batch is done", first["sent"] >= 2 * full),
        ("The gradients lose bits on their way, though the mean is right to two percent: a rank sends less than four bytes for "
         "each weight, or what the optimizer gets fits in fp16. Average in fp32, and round nothing",
         not overflow and (0 < first["sent"] < full or (kind != "tiny"  # whose gradients may be small multiples of fp16's least
                           and _coarse(x := first["given"][0] * scale, torch.float16).equal(x)))),
    )  # fmt: skip


def _judge_gradient(step: dict, rank: int, case: str, before: list[Tensor] | None) -> None:
    (given,), exact, scale = step["given"], step["exact"], step["scale"]
    mean, own = exact.mean((0, 1)), exact[rank].mean(0)
    refuse(case, ("A weight has no gradient when the optimizer steps", given.shape != mean.shape))
    if _near(given, _clipped(mean)):
        refuse(case, ("These are the gradients of fp32 to five digits: the products whose gradients the step uses must run in float16",
                      (given - _clipped(mean)).norm() < 1e-5 * given.norm()))  # fmt: skip
        return
    recognize(
        given,
        case,
        [
            ("The gradients were clipped while they carried the scale, and came out far too small: unscale before you clip",
             _clipped(scale * mean) / scale),
            ("The gradients still carry the scale: nobody divided them", scale * mean),
            ("Gradients of norm 1, though the mean is shorter: nobody divided them, or the clip lengthens", _clipped(scale * mean)),
            ("The gradients were divided by a scale that the loss was not multiplied by, or twice", _clipped(mean / scale)),
            ("The norm is not clipped", mean),
            ("The micro-batches are summed: their losses need the factor one over their number", _clipped(exact.mean(0).sum(0))),
            ("The ranks are summed; replicas need their mean", _clipped(exact.mean(1).sum(0))),
            ("Micro-batches and ranks are summed; the step needs the mean over all of them", _clipped(exact.sum((0, 1)))),
            ("This rank used its own gradient: replicas average over ranks", _clipped(own)),
            ("Each rank clipped its own gradient before the average: the norm is that of the average",
             sum(_clipped(each) for each in exact.mean(1)) / _RANKS),
            ("Each micro-batch was clipped by itself: clip the sum that the step uses",
             torch.stack([_clipped(each) for each in exact.flatten(0, 1)]).mean(0)),
            ("The last micro-batch alone is in there: each runs backward on its scaled loss, and the gradients add up",
             _clipped(exact[:, -1].mean(0))),
            ("The last micro-batch alone counts, divided by their number: each runs backward on its scaled loss, and all add up",
             _clipped(exact[:, -1].mean(0) / _MICRO_BATCHES)),
            *([("The gradients of the step before are still in there: clear them", _clipped(mean + before[0] / scale))]
              if before else []),
        ],
        _near,
    )  # fmt: skip
    off = (given - _clipped(mean)).norm() / _clipped(mean).norm()
    raise Wrong(
        f"The optimizer of rank {rank} was given another gradient than the clipped mean in fp32, by {off:.0%}, and fp16 explains "
        f"less than one percent where losses are scaled ({case})."
    )


def _near(a: Tensor, b: Tensor) -> bool:
    """Half an ulp of fp16 is 0.05 percent, a gradient passes few roundings, and a slip changes it by tenths."""
    return bool((a - b).norm() <= 0.02 * b.norm())


# --- a job that loses bits ------------------------------------------------------------------------------------

WIDTH, TOKENS, BLOCKS, RATE = 16, 24, 3, 1e-3
_PARTS = ("norm", "router", "up", "down")
_PHASES = ("forward", "backward", "average", "update")


def _fault(number: int) -> tuple[str, str, list[int]]:
    """Return the phase of a job's fault, "" for none, the module that has it, and the ranks."""
    dice = random.Random(f"bits {number}")
    phase = ("", *_PHASES)[number % 5]
    part = dice.choice({"forward": _PARTS[:2], "backward": _PARTS[2:]}.get(phase, _PARTS))
    ranks = [0, 1] if phase == "average" or number // 5 % 2 else [dice.randrange(2)]
    return phase, f"{dice.randrange(BLOCKS)}.{part}", ranks


def _coarse(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return x.to(dtype).float()


class _Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _coarse(gradient, torch.float16)


class Part(Sealed, nn.Module):
    """A weight, and what it does to its input."""

    def __init__(self, weight: Tensor, does: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self._does = nn.Parameter(_coarse(weight)), does

    def forward(self, x: Tensor) -> Tensor:
        """Return what the part makes of its input."""
        return self._does(x, self.weight)


class GatedBlock(nn.Module):
    """A norm, a router of two, and an MLP whose share the router decides."""

    def __init__(self, exact: bool, narrow: str, coarse: str) -> None:
        super().__init__()

        def add(name: str, shape: tuple[int, ...], does: Callable[[Tensor, Tensor], Tensor]) -> None:
            def passed(x: Tensor, weight: Tensor) -> Tensor:
                y = does(x, _Narrow.apply(weight) if name == narrow else weight)
                return _coarse(y) if name == coarse else y

            start = torch.randn(shape) / WIDTH**0.5 if len(shape) > 1 else 1 + 0.1 * torch.randn(shape)
            self.add_module(name, Part(start, passed))

        def product(x: Tensor, weight: Tensor) -> Tensor:
            return x @ weight if exact else (x.bfloat16() @ weight.bfloat16()).float()

        add("norm", (WIDTH,), lambda x, weight: functional.rms_norm(x, (WIDTH,), weight))
        add("router", (WIDTH, 2), torch.matmul)
        add("up", (WIDTH, 4 * WIDTH), product)
        add("down", (4 * WIDTH, WIDTH), product)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream and what the block adds."""
        h = self.norm(x)
        return x + self.router(h).softmax(-1)[:, :1] * self.down(torch.tanh(self.up(h)))


class LowPrecisionJob(Sealed):
    """A job on two ranks, one replica on each: `up` and `down` multiply in bf16, and all else is meant to be fp32.

    A step is `loss`, backward, `average` and `update`, and `average` waits for all ranks.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def model(self, exact: bool = False) -> nn.ModuleList:
        """Return this rank's replica; an exact one is fp32 everywhere, and has no fault."""
        torch.manual_seed(random.Random(f"weights {self._number}").randrange(2**32))
        phase, module, ranks = _fault(self._number)
        here = module if dist.get_rank() in ranks and not exact else ""

        def of(i: int, of_phase: str) -> str:
            return here.partition(".")[2] if phase == of_phase and here.startswith(f"{i}.") else ""

        return nn.ModuleList(GatedBlock(exact, of(i, "backward"), of(i, "forward")) for i in range(BLOCKS))

    def loss(self, model: nn.ModuleList, step: int = 0) -> Tensor:
        """Return the loss of this rank's tokens, which are few of the 2**24 tokens of a step."""
        dice = torch.Generator().manual_seed(2 * step + dist.get_rank())
        y = x = torch.randn(TOKENS, WIDTH, generator=dice)
        for block in model:
            y = block(y)
        return (y - x.roll(1, -1).cumsum(-1).sin()).square().sum() / 2**24

    def average(self, model: nn.ModuleList) -> None:
        """Average the gradients over the ranks; both must be in the same job."""
        dist.all_gather(jobs := [torch.zeros(1).long() for _ in range(2)], torch.tensor([self._number]))
        refuse("", ("One rank averages, and the other has returned and is in the next job: go through all phases on every rank, "
                    "and return then", jobs[0] != jobs[1]))  # fmt: skip
        phase, module, _ = _fault(self._number)
        for name, parameter in model.named_parameters():
            narrow = (phase, f"{module}.weight") == ("average", name)
            total = parameter.grad.bfloat16() if narrow else parameter.grad
            dist.all_reduce(total)
            parameter.grad = total.float() / dist.get_world_size()

    def update(self, model: nn.ModuleList) -> None:
        """Move each weight by RATE times its gradient, over the gradients' root mean square; clear the gradients."""
        phase, module, ranks = _fault(self._number)
        for name, parameter in model.named_parameters():
            moved = parameter.data - RATE * parameter.grad / parameter.grad.square().mean().sqrt()
            absorbs = phase == "update" and dist.get_rank() in ranks and name == f"{module}.weight"
            parameter.data, parameter.grad = _coarse(moved) if absorbs else moved, None

    def train(self, steps: int, exact: bool = False) -> float:
        """Train; return the loss of a token in the last step, the mean over ranks."""
        model = self.model(exact)
        for step in range(steps):
            loss = self.loss(model, step)
            loss.backward()
            self.average(model)
            self.update(model)
        dist.all_reduce(last := loss.detach())
        return last.item() * 2**24 / TOKENS / dist.get_world_size()


def _read_loss(got: Any) -> tuple[str, str] | None:
    if got is None:
        return None
    told = f'Return None where a rank is well, or the name of the module, as "0.norm", and one of {", ".join(_PHASES)}.'
    module, phase = pair(got, told, "module", "phase")
    if phase not in _PHASES:
        raise Wrong(told)
    return str(module).removesuffix(".weight"), _PHASES[_PHASES.index(phase)]


_OVERLOOKED = {
    "forward": "a value that is meant to be fp32 comes out of a module with the bits of bf16, whatever its dtype says",
    "backward": "a gradient has zeros that the exact model's has not, before anything is averaged",
    "average": "an average over ranks has fewer bits than the mean of what went in",
    "update": "a weight lands where bf16 has a number, so that small updates do not move it; both ranks may do so and agree",
}


@check(
    idea="Bits are lost at one place, and the dtype behind it does not tell: a tensor that went through bf16 has sixteen zeros at the "
    "end of each value.",
    section="reduce_dtype: sums over ranks in bf16",
    line="Run all four phases on every rank; after each ask which tensors stay the same when they are cast to bf16 and back, or to "
    "fp16 for gradients before the average, leave out what is meant to be bf16, and return the first.",
    kind="fault",
)
def lost_bits(answer: Callable[[LowPrecisionJob], Any], seed: int = 88) -> str:
    """Judge `lost_bits(job)`, which both ranks call for fixed jobs, one of them healthy, and for one new one of each fault."""
    dice = random.Random(seed)
    drawn = [5 * (2 * dice.randrange(100) + on_all) + kind for kind in range(1, 5) for on_all in (0, 1)]
    drawn.append(5 * dice.randrange(100))
    dice.shuffle(drawn)
    new = {(_fault(n)[0], _fault(n)[1][2:]): n for n in NEW.sample(range(2500, 10**7), 500) if _fault(n)[0]}
    drawn += new.values()
    asked = ask_ranks(answer, 2, drawn, make=LowPrecisionJob)
    for number, said in zip(drawn, asked, strict=True):
        phase, module, ranks = _fault(number)
        for rank, found in enumerate(map(_read_loss, said)):
            _judge_loss(found, rank, phase, module, ranks if phase else [])
    return (
        f"{len(drawn)} jobs: a norm or a router in bf16, as in many a MoE model's router; a module in fp16 without a scale, as a "
        "checkpoint's dtype leaves it; gradients summed in bf16, which trained well on 96 GPUs and not on 384; weights that an "
        "optimizer in bf16 rounds."
    )


def _judge_loss(found: tuple[str, str] | None, rank: int, phase: str, module: str, ranks: list[int]) -> None:
    if found is None:
        refuse("", (f"You find nothing on a rank that loses bits: {_OVERLOOKED.get(phase)}", rank in ranks))
        return
    name, theirs = found
    refuse(
        "",
        (f"You accuse {name} of a job that is healthy, in {theirs}: products of `up` and `down` are meant to be bf16, and so are "
         "their weights' gradients until they are averaged; before the first update all weights have the bits of bf16", not phase),
        (f"Rank {rank} is healthy, and you accuse its {name}; the other rank is not: look at what a rank has of its own, and expect "
         "noise in all that comes through `up` and `down`", rank not in ranks),
        (f"The bits are lost in {phase}, and you say {theirs}: what was lost stays lost in what follows, and what is meant to be "
         "bf16 has lost nothing", theirs != phase),
        (f"The phase is right, and the module is not {name}", name != module),
    )  # fmt: skip


# --- a recipe -------------------------------------------------------------------------------------------------

#: Fewest bits first, and the scaling by which `quantized_bytes` counts what is kept.
_FORMATS = {"nvfp4": "nvfp4", "fp8": "tensor", "mxfp8": "mx32"}


def _errors(name: str, layer: tuple[Tensor, Tensor, Tensor], error: Callable = product_error) -> tuple[float, ...]:
    """Return the errors of x wᵀ, g w and gᵀ x, each factor quantized along the dim of its sum."""
    x, w, g = layer
    return (
        error(through(name, x) @ through(name, w).T, x @ w.T),
        error(through(name, g, gradient=True) @ through(name, w.T).T, g @ w),
        error(through(name, g.T, gradient=True) @ through(name, x.T).T, g.T @ x),
    )


_Layers = dict[str, tuple[Tensor, Tensor, Tensor]]


def _layers(seed: int) -> _Layers:
    """Return layers whose three matmuls suffer from different things."""
    generator = torch.Generator().manual_seed(seed)

    def layer(columns: int = 64, outputs: int = 96) -> tuple[Tensor, Tensor, Tensor]:
        shapes = ((128, columns), (outputs, columns), (128, outputs))
        x, w, g = (torch.randn(shape, generator=generator) for shape in shapes)
        return x, 0.05 * w, 1e-6 * g

    names = ("plain", "one large token", "tokens of all sizes", "outputs of all sizes", "inputs", "outputs", "idle tokens")  # fmt: skip
    found = {name: layer() for name in names}
    mixed = 10.0 ** (-7.5 * torch.randperm(96, generator=generator) / 95)
    found["one large token"][0][5] *= 3e5  # takes the scale of the tensor: the others vanish in forward
    found["one large token"][2][::4] *= 1e-9  # vanish in g w beside the large ones of other tokens
    found["tokens of all sizes"][2].mul_(10.0 ** torch.linspace(0, -5.6, 128)[:, None])  # so do small gradients in g w
    found["outputs of all sizes"][2].mul_(mixed)  # and these in gᵀ x, or next to large ones
    # Every eighth term of a sum has a large factor and a tiny one: it adds next to nothing, and takes the scale of the others.
    (x, w, _), (_, v, g), (y, _, h) = found["inputs"], found["outputs"], found["idle tokens"]
    w[:, ::8], x[:, ::8] = 1e6 * w[:, ::8], 1e-9 * x[:, ::8]  # in x wᵀ
    v[::8], g[:, ::8] = 1e6 * v[::8], 1e-9 * g[:, ::8]  # in g w
    y[::8], h[::8] = 1e6 * y[::8], 1e-9 * h[::8]  # in gᵀ x
    return found


def _recipe(units: set[str], layers: _Layers, limit: float, errors: Callable = _errors) -> dict[str, str]:
    """Return the format of fewest bits of each layer whose error is within the limit."""
    return {
        name: next((f for f in _FORMATS if f in units and max(errors(f, layer)) <= limit), "bf16")
        for name, layer in layers.items()
    }


def _kept(layers: _Layers, chosen: Mapping[str, str]) -> float:
    """Return the bytes of all inputs as backward reads them, quantized along tokens."""
    sizes = {name: layer[0].T.shape for name, layer in layers.items()}
    return sum(
        2 * math.prod(size) if chosen[name] == "bf16" else quantized_bytes(*size, _FORMATS[chosen[name]])
        for name, size in sizes.items()
    )


#: What the GPU multiplies, and the error that a layer may have.
_JOBS = (
    ({"fp8"}, 0.07),  # E5M2 for both factors of gᵀ x is above it
    ({"mxfp8", "nvfp4"}, 0.12),
    ({"mxfp8", "nvfp4"}, 0.16),
    ({"fp8", "mxfp8"}, 0.07),
    ({"mxfp8"}, 0.08),
    (set(), 0.2),
    ({"nvfp4"}, 0.181),  # between an error and the same by what came out
)


@check(
    idea="A layer has three matmuls, and each sums over another dim: a format serves the layer if it serves the worst of them.",
    section="Scale granularity: tensor, row, block",
    line="For x w-transposed, g w and g-transposed x, quantize both factors with rows along the summed dim, and take the largest "
    "of the three errors.",
)
def block_recipe(answer: Callable[..., Any], seed: int = 8080) -> str:
    """Judge `block_recipe(units, layers, limit)` on eight GPUs and limits: the format of each layer, and bytes kept."""
    fixed, count, new = _layers(seed), 0, NEW
    turn = new.randrange(1, len(fixed))  # other names for what the layers are: no table has them
    renamed = dict(zip([*fixed][turn:] + [*fixed][:turn], _layers(new.randrange(10**6)).values(), strict=True))
    for (units, limit), layers in [*((job, fixed) for job in _JOBS), (_JOBS[2], renamed)]:
        given = {name: tuple(matrix.clone() for matrix in layer) for name, layer in layers.items()}
        got = by_name(answer(set(units), given, limit), "formats", "kept")
        formats = by_name(got["formats"], *layers)
        right = _recipe(units, layers, limit)
        where = f"matrix units for {', '.join(sorted(units)) or 'none of the three'}, limit {limit:g}"
        for name, layer in layers.items():
            if formats[name] != right[name]:
                _explain_recipe(formats, name, layer, units, limit, where, layers)
            count += 1
        kept, truth = as_float(got["kept"], "`kept`"), _kept(layers, right)
        bf16 = sum(2 * layer[0].numel() for layer in layers.values())
        refuse(
            where,
            ("`kept` is in bf16: backward reads the inputs in the format of their layer",
             truth != bf16 and close(kept, bf16)),
            ("Scales are kept too: 8 bits for 32 values of MXFP8, 8 bits for 16 of NVFP4, and a scale of 32 bits for a tensor "
             "of NVFP4 or FP8",
             set(right.values()) != {"bf16"}
             and close(kept, sum(x.numel() * {"bf16": 2, "nvfp4": 0.5}.get(right[n], 1) for n, (x, *_) in layers.items()))),
            (f"All inputs together take {truth:,.0f} bytes as they are kept, not {kept:,.0f}", not close(kept, truth)),
        )  # fmt: skip
    return f"{count} layers on {len(_JOBS) + 1} GPUs: what the hardware has, and the worst of three matmuls."


def _explain_recipe(
    formats: Mapping[str, Any], name: str, layer: tuple[Tensor, Tensor, Tensor], units: set[str], limit: float,
    where: str, layers: _Layers,
) -> NoReturn:  # fmt: skip
    got, right = formats[name], _recipe(units, layers, limit)[name]
    products = ("x wᵀ", "g w", "gᵀ x")

    def with_(errors: Callable) -> bool:
        return all(formats[n] == f for n, f in _recipe(units, layers, limit, errors).items())

    def along_rows(form: str, each: tuple[Tensor, Tensor, Tensor]) -> tuple[float, ...]:
        x, w, g = each
        a, b, c = through(form, x), through(form, w), through(form, g, gradient=True)
        return product_error(a @ b.T, x @ w.T), product_error(c @ b, g @ w), product_error(c.T @ a, g.T @ x)

    def of_factors(form: str, each: tuple[Tensor, Tensor, Tensor]) -> tuple[float, ...]:
        return tuple(product_error(through(form, m, gradient=k == 2), m) for k, m in enumerate(each))

    refuse("", (f"{got!r} is none of nvfp4, mxfp8, fp8 and bf16", got not in ["bf16", *_FORMATS]))
    worst = {f: max(zip(_errors(f, layer), products, strict=True)) for f in {got, right} if f in _FORMATS}
    shown = {f: f"{error:.3f} in {product}" for f, (error, product) in worst.items()}
    refuse(
        f"layer {name!r}; {where}",
        (f"This GPU has no matrix units for {got}", got != "bf16" and got not in units),
        ("These are the formats that forward alone would get: the gradients g w and gᵀ x are matmuls of the layer too",
         with_(lambda f, each: _errors(f, each)[:1])),
        ("These are the formats that x wᵀ and g w would get: the weight's gradient sums over tokens, and quantizes x along them",
         with_(lambda f, each: _errors(f, each)[:2])),
        ("These are the formats if each matrix is quantized once, along its rows: a matmul that sums over the other dim needs its "
         "factors quantized along that one", with_(along_rows)),
        ("These are the formats by `product_error(exact, found)`: an error is a share of the exact product, which comes second",
         with_(lambda f, each: _errors(f, each, lambda found, exact: product_error(exact, found)))),
        ("One of these gives this: x wᵀ is left out (alone or not) or quantizes w along its outputs, or errors of single matrices",
         with_(of_factors) or any(with_(lambda f, each, k=k: _errors(f, each)[k:]) for k in (1, 2))
         or with_(lambda f, each: _errors(f, each)[1:2])),
        ("One of these gives this: g w is left out or quantizes w along its inputs, or the mean of three errors hides the worst: one "
         "matmul that fails spoils the step", with_(lambda f, each: _errors(f, each)[::2]) or with_(lambda f, each: (sum(_errors(f, each)) / 3,))),
        (f"{got} has an error of {shown.get(got)}, and {limit:g} is allowed; {right} is right", got in worst and worst[got][0] > limit),
        (f"{right} is within the limit, with {shown.get(right)}, and has fewer bits than {got}", True),
    )  # fmt: skip
