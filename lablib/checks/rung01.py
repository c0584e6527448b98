"""The checks of rung 01: bytes per parameter, steps within a device's memory, a job that holds too much, a whole run.

The first and the last compare an answer with the truth on many cases, and a wrong one with what each known mistake would
give; the others run it.
"""

from __future__ import annotations

import functools
import gc
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lablib.calc.memory.activations import layer_activations
from lablib.calc.models import ModelConfig
from lablib.calc.params import count_params
from lablib.checks.judging import (
    NEW,
    Sealed,
    Wrong,
    as_float,
    ask_ranks,
    check,
    close,
    in_answer,
    name_the_mistake,
    numbers,
    recognize,
    refuse,
    whole,
)
from lablib.launch.measure import LiveBytes

__all__ = ["Device", "Model", "TrainingJob", "bytes_per_parameter", "find_surplus", "run_memory", "train_within"]

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
#: Bytes of optimizer moments per parameter; the 8-bit one keeps one fp32 scale per block of 256 values.
MOMENT_BYTES = {"sgd": 0.0, "sgd-momentum": 4.0, "adamw": 8.0, "adamw-8bit": 2 * (1 + 4 / 256)}
#: Optimizers of a run in mixed precision: bytes of moments a parameter, and of roots that its step makes.
#: One moment comes first, because there a missing master copy and 16-bit moments are different numbers.
RUN_OPTIMIZERS = {"sgd-momentum": (4, 0), "adamw": (8, 4), "adamw-fused": (8, 0), "sgd": (0, 0)}
#: Bytes a logit at the loss: eager PyTorch holds log-probabilities and two gradients in fp32, Megatron one fp32 and one bf16.
RUN_LOSSES = {"eager": 12, "megatron": 6}
TERMS = ("parameters", "weights", "gradients", "optimizer", "activations", "logits", "peak")
#: What counts in a learner's place.
_COUNTING = ("lablib.calc.memory.", "lablib.calc.params.", "lablib.calc.precision.", "lablib.checks.rung01.")


def _dice(seed: int) -> random.Random:
    print(f"drawing cases with seed {seed}")
    return random.Random(seed)


@check(
    idea="Every copy of a parameter that is held between backward and the optimizer's step costs its own bytes.",
    section="Model states: 16 bytes a parameter",
    line="Add weights, each gradient buffer, 4 bytes for a master copy if there is one, and the optimizer's moments.",
)
def bytes_per_parameter(answer: Callable[..., float], seed: int = 1) -> str:
    """Judge `bytes_per_parameter(weights, gradients, master, optimizer)` on every combination, and four buffers drawn anew."""
    half, plain = DTYPE_BYTES.get, ("sgd-momentum", "adamw")
    buffers = (*zip(DTYPE_BYTES), ("bf16", "fp32"), ("fp16", "fp32"), tuple(NEW.choices([*DTYPE_BYTES], k=4)))
    cases = list(product(("bf16", "fp16", "fp32"), buffers, (True, False), MOMENT_BYTES))
    _dice(seed).shuffle(cases)

    def right(w: str, g: tuple[str, ...], m: bool, o: str) -> float:
        return half(w) + sum(map(half, g)) + 4 * m + MOMENT_BYTES[o]

    def but(**changed: Callable[..., float]) -> Callable[..., float]:
        """The truth with some of its four parts counted otherwise."""
        parts = {
            "weights": lambda w, g, m, o: half(w), "gradients": lambda w, g, m, o: sum(map(half, g)),
            "master": lambda w, g, m, o: 4 * m, "moments": lambda w, g, m, o: MOMENT_BYTES[o],
        } | changed  # fmt: skip
        return lambda *case: sum(part(*case) for part in parts.values())

    def moments(of: Callable[..., float]) -> Callable[..., float]:
        return but(moments=lambda w, g, m, o: MOMENT_BYTES[o] * (of(w, g) / 4 if o in plain else 1))

    slips = [
        ("Plain moments are fp32, 4 bytes each, whatever the dtype of the weights", moments(lambda w, g: half(w))),
        ("Plain moments are fp32, 4 bytes each, whatever the dtype of the gradients", moments(lambda w, g: half(g[0]))),
        ("Plain moments are fp32, 4 bytes each, and not 2", moments(lambda w, g: 2)),
        ("An fp32 master copy costs 4 bytes beside the working weights", but(master=lambda *_: 0)),
        *(("Where there is no master copy it costs 0", but(master=lambda w, g, m, o, no=no: 4 * (w != no))) for no in ("", "fp32")),
        ("Count the master copy beside fp32 weights too", but(master=lambda w, g, m, o: 4 * (m and w != "fp32"))),
        *(("A master copy is fp32, 4 bytes, whatever the dtype of the weights", but(master=lambda w, g, m, o, of=of: m * of(w)))
          for of in (half, lambda w: 2, lambda w: 6, lambda w: 4 + half(w))),
        *(("The working weights have bytes of their own, beside a master copy too",
           but(weights=lambda w, g, m, o, of=of: of * (not m) * half(w))) for of in (0, 1)),
        ("Backward fills a gradient for every parameter before the optimizer steps", but(gradients=lambda *_: 0)),
        ("A gradient has its own dtype, not that of the weights", but(gradients=lambda w, g, m, o: half(w) * len(g))),
        *((f"A gradient has its own dtype, and is not always {n} bytes", but(gradients=lambda w, g, m, o, n=n: n * len(g))) for n in (4, 2)),
        *((f"A weight has its own dtype, and is not always {n} bytes", but(weights=lambda *_, n=n: n)) for n in (2, 4)),
        *(("Every gradient buffer that stays allocated counts, the fp32 sum beside the bf16 gradient too",
           but(gradients=lambda w, g, m, o, of=of: sum(map(half, of(g)))))
          for of in (lambda g: g[:1], lambda g: g[-1:], lambda g: g[:2], set, lambda g: [max(g, key=half)], lambda g: [min(g, key=half)])),
        *(("AdamW keeps two fp32 moments, 8 bytes", but(moments=lambda w, g, m, o, n=n: MOMENT_BYTES[o] - n * (o == "adamw"))) for n in (4, 8)),
        *(("SGD with momentum keeps one fp32 buffer, 4 bytes, and plain SGD none",
           but(moments=lambda w, g, m, o, of=of: of.get(o, MOMENT_BYTES[o]))) for of in ({"sgd": 4, "sgd-momentum": 8}, {"sgd-momentum": 0})),
        ("A master copy counts once, and fp32 gradients that the step makes not at all", but(master=lambda w, g, m, o: 8 * m)),
        *(("The step makes fp32 gradients and lets them go: count the buffers that are listed", but(gradients=lambda w, g, m, o, i=i:
           sum(map(half, g)) + 4 * (m and "fp32" not in g, g == ("fp16",), "fp32" not in g)[i])) for i in range(3)),
        ("A gradient of the weights' dtype has bytes of its own", but(gradients=lambda w, g, m, o: sum(half(d) for d in g if d != w))),
        ("Moments depend on the optimizer: not every one is AdamW", but(moments=lambda *_: 8)),
        ("16 bytes are one recipe's: add up what this one has", lambda *case: 16 if case[3] == "adamw" else right(*case)),
        *(("AdamW's moments are two: K = 12 has the master copy in it, and the roots of the step are no model states",
           but(moments=lambda w, g, m, o, of=of: MOMENT_BYTES[o] + 4 * (o in of))) for of in (("adamw",), ("adamw", "adamw-8bit"))),
        *(("Moments are kept with and without a master copy, and by every optimizer but plain SGD",
           but(moments=lambda w, g, m, o, of=of: of * m * MOMENT_BYTES[o])) for of in (0, 1)),
        *(("Block-wise 8-bit AdamW keeps two moments of 1 byte, each with a 4-byte scale per 256 values",
           but(moments=lambda w, g, m, o, n=n: n if o == "adamw-8bit" else MOMENT_BYTES[o]))
          for n in (0, 4, 2, 1 + 1 / 64, 2 + 1 / 64, 2 + 2 / 256, 10 + 1 / 32, 10, 2 * (1 + 4 / 2048))),
        ("The number is in bits, and the answer is asked in bytes", lambda *case: 8 * right(*case)),
    ]  # fmt: skip
    rows = [(case, answer(*case), right(*case)) for case in cases]
    if wrong := [row for row in rows if not close(row[1], row[2], rel=0.006 / row[2])]:  # two decimals are fine
        name_the_mistake(rows, wrong, slips, "weights {0}, gradients {1}, master {2}, {3}")
    if any(name.startswith(_COUNTING) for name in getattr(answer, "called", ())):
        raise Wrong("The numbers are right, and a function of lablib was called: add the four parts without it.")
    return f"{len(cases)} recipes from plain SGD to 8-bit AdamW are right."


# --- steps within the memory of a device ---------------------------------------------------------------------------

MOST_PASSES = 1_000  # ten times what it takes to try all choices in all steps
SEQUENCES, VOCAB, BATCHES = 6, 64, 3


@contextmanager
def _untraced() -> Iterator[None]:
    """Run lines that are not the learner's, uncounted: ten times as fast."""
    before = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(before)


class Device(LiveBytes):
    """The memory of a small GPU: it counts the tensors that are alive, and stops like one when they are too many.

    Attributes:
        capacity: Bytes that it holds, weights among them.
        live: Bytes held now.
        peak: The most that were held at once; you may set it back.
    """

    def __init__(self, capacity: float, weights: int) -> None:
        super().__init__()
        self.capacity, self.live, self.peak, self._aside = capacity, weights, weights, False

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; raise `Wrong` if an answer sets another than the peak."""
        if name != "peak" and in_answer():
            raise Wrong("A device has the memory that it has: of its attributes only `peak` may be set, to `live`.")
        super().__setattr__(name, value)

    def __torch_dispatch__(self, *call: Any, **more: Any) -> Any:
        with _untraced():
            return super().__torch_dispatch__(*call, **more)

    def _add(self, storage: torch.UntypedStorage, own: bool = True) -> None:
        super()._add(storage, own and not self._aside)
        if self.live > self.capacity and not self._aside:
            gc.collect()  # an attempt that stopped in a replay leaves cycles
        if self.live > self.capacity and not self._aside:
            raise torch.OutOfMemoryError(f"{self.live:,} bytes, and the device has {self.capacity:,}")


class Block(nn.Module):
    """Up, an activation function, down, and the stream beside them."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, width), nn.Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream and what the block adds."""
        return x + self.down(functional.gelu(self.up(x)))


class Model(nn.Module):
    """A small language model: a table of tokens, blocks, a head."""

    def __init__(self, hidden: int, width: int, layers: int, vocab: int = VOCAB) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab, bias=False)
        self.blocks = nn.ModuleList(Block(hidden, width) for _ in range(layers))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return the logits, (B, S, vocab)."""
        x = self.tokens(tokens_BS)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, tokens_BS: Tensor) -> Tensor:
        """Return the mean loss of predicting each token but the first."""
        return functional.cross_entropy(self(tokens_BS[:, :-1]).flatten(0, 1), tokens_BS[:, 1:].flatten())


@dataclass(frozen=True)
class _Task:
    """A model, its batches, the bytes of a device, and what a step needs there."""

    shape: tuple[int, int, int]
    seq: int
    capacity: float = math.inf
    passes: int = 1
    again: bool = False

    def run(self, train: Callable, batches: int = BATCHES) -> SimpleNamespace:
        """Train, and return losses, weights, and by step gradients; of the last step passes and replays."""
        torch.manual_seed(7)
        model = Model(*self.shape)
        data = list(torch.randint(VOCAB, (BATCHES, SEQUENCES, self.seq + 1)))[:batches]
        device = Device(self.capacity, sum(p.nbytes for p in model.parameters()))
        found = SimpleNamespace(gradients=[], in_step=0, cut=0, full="", settings=set(), passes=0, last=[], ran=[])

        def counted(number: int, module: nn.Module, args: tuple) -> None:
            found.ran.append((number, sum(map(Tensor.numel, args)) // (module.weight.shape[1] if number else 1)))
            found.passes += not number
            if found.passes > MOST_PASSES:
                raise Wrong(f"It never ends: {MOST_PASSES} passes, and all choices in all steps are fewer than 100.")

        def before(optimizer: torch.optim.Optimizer, args: tuple, more: dict) -> tuple[tuple, dict]:
            losses = [closure() for closure in (*args[1:], *more.values()) if closure]  # before the step itself
            device._aside, found.cut, found.in_step = True, found.cut or found.in_step, True
            found.gradients += [torch.cat([(p * 0 if p.grad is None else p.grad).ravel() for p in model.parameters()])]
            found.settings |= {(g["eps"], g["weight_decay"], *g["betas"]) for g in optimizer.param_groups}
            found.last, found.ran = found.ran, []
            device._aside = False
            return (optimizer, *(lambda: losses[0] for _ in losses)), {}

        def adamw(parameters: Iterable, **how: object) -> torch.optim.Optimizer:
            optimizer = torch.optim.AdamW(parameters, **{"foreach": not how.get("fused")} | how)
            optimizer.register_step_pre_hook(before)
            optimizer.register_step_post_hook(lambda *_: setattr(found, "in_step", False))
            return optimizer

        for number, module in enumerate([model.tokens, *(block.up for block in model.blocks)]):
            module.register_forward_pre_hook(functools.partial(counted, number))
        gc.freeze()  # what is there already need not be looked at when the device is full
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # tensors are small, and threads would wait for each other
        try:
            with device:
                found.losses = train(model, data, adamw, device)
        except torch.OutOfMemoryError as error:
            found.full, found.losses = str(error), None
        finally:
            gc.unfreeze()
            torch.set_num_threads(threads)
        found.weights, found.peak = torch.cat([p.detach().flatten() for p in model.parameters()]), device.peak
        embedded, *blocks = ([n for one, n in found.last if one == number] for number in range(1 + self.shape[2]))
        found.again = sum(map(sum, blocks)) > len(blocks) * max(sum(embedded), SEQUENCES * self.seq)
        found.passes = max(len(embedded), len(blocks[0]) // (1 + found.again))
        return found


def _in_parts(size: int, again: bool = False, **how: object) -> Callable:
    """Return somebody who trains with so many sequences at a time."""

    def train(model: Model, batches: list[Tensor], adamw: Callable, device: Device) -> list[float]:
        optimizer, losses = adamw(model.parameters(), **how or {"fused": True}), []
        for block in model.blocks if again else ():
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        for batch in batches:
            losses.append(0.0)
            for part in batch.split(size):
                loss = model.loss(part) * (len(part) / len(batch))
                loss.backward()
                losses[-1] += loss.item()
            del loss
            optimizer.step()
            optimizer.zero_grad()
        return losses

    return train


@functools.cache
def _tasks(seed: int) -> list[tuple[_Task, SimpleNamespace]]:
    """Return tasks, with the truth of each: the step is the fullest; three at a time fit, two, one, two that recompute."""
    dice, found = random.Random(seed), []

    def draw(tokens: int, hidden: int) -> _Task:
        return _Task((hidden, dice.choice((4, 5)) * hidden, dice.choice((5, 6))), tokens)

    def add(task: _Task, right: SimpleNamespace, least: int, *more: int, **needs: Any) -> None:
        found.append((replace(task, capacity=(least + min(more)) // 2, **needs), right))

    def peak(task: _Task, size: int, **how: Any) -> int:
        return task.run(_in_parts(size, **how), batches=2).peak  # from the second step on all moments are there

    few, many = draw(2, 40), draw(dice.randrange(40, 56), 24)
    rights = [task.run(_in_parts(SEQUENCES)) for task in (few, many)]
    add(few, rights[0], *(peak(few, SEQUENCES, foreach=foreach) for foreach in (False, True)))
    one, two, three, four = (peak(many, size) for size in (1, 2, 3, 4))
    for passes, *least in ((2, three, rights[1].peak), (3, two, three, four), (6, one, two)):
        add(many, rights[1], *least, passes=passes)
    add(many, rights[1], *(peak(many, size, again=True) for size in (2, 3, 4)), one, passes=3, again=True)
    return dice.sample(found, len(found))


@check(
    idea="What is too much is held at an instant: at the loss, where fewer sequences or recomputation help, or in the step.",
    section="What one GPU can still do: recomputation, 8-bit moments, offload, LoRA",
    line="Make AdamW with fused=True; catch torch.OutOfMemoryError around the passes of a batch, and behind the except clause "
    "drop the gradients that are there and take the next choice: one sequence fewer, and recomputation last.",
    kind="work",
    lines=20_000,  # a right answer takes a thousand, and each attempt is a step
)
def train_within(answer: Callable[..., Iterable[float]], seed: int = 1) -> str:
    """Judge `train_within(model, batches, adamw, device)` by running it on devices that stop like a GPU."""
    for number in (seed, NEW.randrange(10**6)):
        with _untraced():
            tasks = _tasks(number)
        for task, right in tasks:
            _judge_within(task, task.run(answer), right)
    return f"{2 * len(tasks)} devices held their runs, which have the gradients of whole batches, and no pass or replay is too many."


_LATER = "right at first, and not here: keep one AdamW, its moments, its default lr; train all weights; clear gradients"


def _judge_within(task: _Task, got: SimpleNamespace, right: SimpleNamespace) -> None:
    case = f"{sum(right.weights.shape) * 4:,} bytes of weights, {task.seq} tokens, {task.capacity:,} bytes"
    done = len(got.gradients)
    refuse(
        case,
        ("The device is full inside of the optimizer's step, where no activation has to be left. AdamW's default makes roots of "
         "all parameters at once there, and what else is kept or copied counts too", got.in_step),
        (f"The device is full, {got.full}, after {done} of {BATCHES} steps{', and since the first moments are there too' * (done > 0)}. Catch "
         "the error and take less, or measure before. What an attempt made is alive while a name such as `loss` has it, and inside of "
         "the except clause its frames do", got.full),
        (f"The optimizer of `adamw` begins {done} steps for {BATCHES} batches{'; one that stops halfway has changed moments' * got.cut}", done != BATCHES),
        ("Leave betas, `eps` and `weight_decay` of AdamW at their defaults, for all weights", got.settings != {(1e-8, 0.01, 0.9, 0.999)}),
    )  # fmt: skip
    for step, (mine, true) in enumerate(zip(map(Tensor.float, got.gradients), right.gradients, strict=True)):
        ratio = (mine @ true / (true @ true)).item()
        refuse(
            case,
            (f"The gradients of step {step} are {ratio:.2f} times those of the whole batch. The loss of a micro-batch is a mean "
             "over its sequences, and nothing clips", abs(ratio - 1) > 0.01 and (mine - ratio * true).norm() < 0.01 * mine.norm()),
            ("The gradients of the first step are not those of the whole batch, in fp32. Every weight has some, a micro-batch counts by "
             "its sequences, and what an attempt that stopped has left goes", not step and (mine - true).norm() > 1e-3 * true.norm()),
            (f"Step {step}: {_LATER}", (mine - true).norm() > 0.02 * true.norm()),
        )  # fmt: skip
    losses = numbers(got.losses, "The losses")
    refuse(
        case,
        ("Return the loss of each batch, the mean over its sequences, as it was before the step",
         len(losses) != BATCHES or not all(close(mine, true, rel=1e-3) for mine, true in zip(losses, right.losses, strict=True))),
        (f"The weights at the end: {_LATER}", (got.weights - right.weights).abs().mean() > 1e-4),
        (f"Blocks run again, and without that it fits, {SEQUENCES // task.passes} of {SEQUENCES} at a time, which costs no FLOPs more", got.again and not task.again),
        (f"The last batch takes {got.passes} passes, and {task.passes} fit", got.passes > task.passes),
    )  # fmt: skip


# --- a job that holds too much ----------------------------------------------------------------------------------

RANKS, STEPS = 2, 6
_FAULTS = ("graph", "outputs", "copies", "roots", "zeros", "")
_PARTS = dict(zip(_FAULTS, ("forward", "backward", "backward", "update", "clear", ""), strict=True))
_GROWING = ("graph", "outputs")


def _fault(number: int) -> tuple[str, int, int]:
    """Return a job's fault, "" for none, the rank that has it, and the step from which on."""
    dice = random.Random(number)
    return _FAULTS[number % len(_FAULTS)], dice.randrange(RANKS), dice.randrange(1, 4)


class TrainingJob(Sealed):
    """A job on two ranks: `start()`, then for each of `steps` the four `parts`, each a method of the step's number."""

    steps = STEPS
    parts = ("forward", "backward", "update", "clear")

    def __init__(self, number: int) -> None:
        self._number = number

    def _has(self, kind: str, step: int) -> bool:
        found, rank, since = _fault(self._number)
        return (kind, _rank()) == (found, rank) and step >= since

    def start(self) -> None:
        """Make this rank's replica and its optimizer."""
        torch.manual_seed(self._number)
        self.model = Model(16, 48, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self._lengths = random.Random(self._number).sample(range(12, 60, 4), STEPS)
        self._log, self._copies = [], []
        # Gloo's thread lets go of what it has summed a moment later: a gradient would be alive after it is let go, or not.
        self._bucket = torch.zeros(max(parameter.numel() for parameter in self.model.parameters()))

    def forward(self, step: int) -> None:
        """Run a batch forward, to its loss; how long its sequences are depends on the step, and not on the rank."""
        torch.manual_seed(100 * step + _rank())
        tokens = torch.randint(VOCAB, (4, self._lengths[step]))
        x = self.model.tokens(tokens[:, :-1])
        for block in self.model.blocks:
            x = block(x)
            if self._has("outputs", step):
                self._log.append(x.detach())
        logits = self.model.head(x)
        if self._has("graph", step):
            self._log.append(logits.logsumexp(-1).square().mean())
        self.loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def backward(self, step: int) -> None:
        """Run it backward."""
        self.loss.backward()
        self.loss = self.loss.detach()
        if self._has("copies", step):
            self._copies = [p.grad.clone() for p in self.model.parameters()]

    def update(self, step: int) -> None:
        """Average the gradients over the ranks, and step."""
        for parameter in self.model.parameters():
            total = self._bucket[: parameter.numel()].copy_(parameter.grad.flatten())
            if dist.is_initialized():
                dist.all_reduce(total)
            parameter.grad.copy_(total.view_as(parameter) / RANKS)
        self.optimizer.param_groups[0]["foreach"] = self._has("roots", step)
        self.optimizer.step()

    def clear(self, step: int) -> None:
        """Let go of the gradients."""
        self.optimizer.zero_grad(set_to_none=not self._has("zeros", step))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _read_surplus(got: Any) -> tuple[str, int, bool] | None:
    if got is None:
        return None
    named = numbers(got, "The diagnosis")
    if len(named) != 3:
        raise Wrong("Return None, or three things: the part, the step, and whether every step adds to it.")
    part, step, grows = named
    if part not in TrainingJob.parts or grows not in (True, False):
        raise Wrong(f"The part is one of {', '.join(TrainingJob.parts)}, and the last value True or False.")
    return part, whole(step, "The step"), bool(grows)


_ROOTS = "One rank holds more for a moment inside of a step, and not after it: read the peak of each part"
_LEFT = "One rank holds more from some step on: count what is alive after each part, what autograd saved too"


@check(
    idea="Memory is held from a part of a step on, for a moment, until the end, or more of it every step.",
    section="The peak of a step: loss or optimizer",
    line="Around all steps count live bytes, after each part and at its most; give them to the other rank, and look for the "
    "first part in which yours are more, and whether every later step leaves more of it.",
    kind="fault",
)
def find_surplus(answer: Callable[[TrainingJob], Any], seed: int = 1) -> str:
    """Judge `find_surplus(job)`, which every rank calls for several jobs, one of them healthy."""
    dice = random.Random(seed)
    drawn = [len(_FAULTS) * dice.randrange(1000) + kind for kind in range(len(_FAULTS))]
    dice.shuffle(drawn)
    drawn.append(len(_FAULTS) * NEW.randrange(1000) + NEW.randrange(len(_FAULTS) - 1))  # ill
    for number, said in zip(drawn, ask_ranks(answer, RANKS, drawn, make=TrainingJob), strict=True):
        kind, rank, since = _fault(number)
        found = [_read_surplus(got) for got in said]
        here, there = found[rank], found[1 - rank]
        refuse(
            "",
            ("A job in which both ranks hold what they have to is accused: longer sequences hold more, and what you send counts",
             not kind and (here or there)),
            ("Both ranks accuse themselves, and one of them holds what it has to", kind and here and there),
            ("The rank that holds less is accused", kind and there),
            (_ROOTS if kind == "roots" else _LEFT, kind and here is None),
        )  # fmt: skip
        if here:
            _judge_surplus(kind, since, *here)
    return (
        f"{len(drawn)} jobs: a number for a log that holds its graph every step; outputs that a hook keeps; copies of gradients; "
        "a step that takes all roots at once; gradients that are set to zero and not let go, and meet the activations."
    )


def _judge_surplus(kind: str, since: int, part: str, step: int, grows: bool) -> None:
    refuse(
        "",
        (f"The rank is right, and it holds more from step {since} on, not from {step}"
         + ": the first step has the number 0" * (step == since + 1), step != since),
        (f"Rank and step are right, and it is not {part!r} in which this rank first holds more, at its end or at its most"
         + ". What forward makes is alive until backward anyway" * ((kind, part) == ("outputs", "forward")), part != _PARTS[kind]),
        ("Every step adds to it: what the steps leave gets more and more", kind in _GROWING and not grows),
        ("It does not grow: what the steps that follow leave is no more, or nothing", kind not in _GROWING and grows),
    )  # fmt: skip


# --- the memory of a run ---------------------------------------------------------------------------------------


@check(
    idea="Count the parameters, then ask for two instants, the loss and the optimizer's step: the larger is the peak.",
    section="The peak of a step: loss or optimizer",
    line="At the loss weights, optimizer, activations and 12sbV or 6sbV are held; in the step weights, optimizer and 4 or 8 "
    "bytes a parameter.",
)
def run_memory(answer: Callable[..., Mapping[str, float]], seed: int = 1) -> str:
    """Judge `run_memory(shape, optimizer, seq, batch, recompute, loss)`: bytes by term, for Llama shapes drawn at random."""
    for shape, optimizer, seq, batch, recompute, loss, truth in _draw_runs(_dice(seed)):
        given = _terms_of(answer, shape, optimizer, seq, batch, recompute, loss)
        case = f"{shape['layers']} layers, hidden {shape['hidden']}, {optimizer}, recompute {recompute}, {loss} loss"
        _judge_run(given, truth, shape, optimizer, seq, batch, recompute, loss, case)
        print(f"  {case}, s={seq}, b={batch}:\n    {truth['peak'] / 1e9:.1f} GB at the {truth['at']}")
    if used := [name for name in getattr(answer, "called", ()) if name.startswith(_COUNTING)]:
        raise Wrong(f"The numbers are right, and {used[0].rpartition('.')[2]} of lablib was called: count without it.")
    return "You can compute the memory of a training run from model size and optimizer choice."


def _draw_runs(dice: random.Random) -> list[tuple]:
    """Draw a run for each optimizer and recomputation; the number of tokens alone does not say where the peak is."""
    while True:
        runs, tokens = [], {"loss": [], "step": []}
        kinds = [*product(RUN_OPTIMIZERS, ("none", "full"))]  # one comes again, with its peak at the other instant
        for i, other, of in [*((i, 0, dice) for i in range(len(kinds))), (NEW.randrange(len(kinds)), 1, NEW)]:
            (optimizer, recompute), at = kinds[i], ("loss", "step")[(i + i // 2 + other) % 2]
            loss = ("eager", "megatron")[(i + i // 4) % 2]  # both at both instants
            shape, seq, batch, truth = _draw_run(of, optimizer, recompute, loss, at)
            runs.append((shape, optimizer, seq, batch, recompute, loss, truth))
            tokens[truth["at"]] += [seq * batch] * (of is dice)
        if min(tokens["loss"]) < max(tokens["step"]):
            return runs


def _draw_run(dice: random.Random, optimizer: str, recompute: str, loss: str, at: str) -> tuple[dict, int, int, dict]:
    """Draw a run whose peak is at that instant, whoever's loss it is, and in AdamW's step also if its roots are forgotten."""
    margin = 1.35 if at == "step" and optimizer == "adamw" else 1.1
    while True:
        kv_heads, group, head_dim = dice.choice((2, 4, 8)), dice.choice((2, 4, 8)), dice.choice((64, 128))
        hidden = 256 * dice.randrange(4, 25)
        shape = {
            "layers": dice.randrange(9, 65), "hidden": hidden, "heads": kv_heads * group, "kv_heads": kv_heads,
            "head_dim": head_dim, "ffn": 64 * dice.randrange(hidden // 32, hidden // 16),
            "vocab": dice.randrange(30_000, 260_000), "tied": dice.choice((True, False)),
        }  # fmt: skip
        seq, batch = dice.choice((512, 1024, 2048, 4096, 8192)), dice.choice((3, 5, 7, 8))
        least, most = (true_run(shape, optimizer, seq, batch, recompute, of) for of in ("megatron", "eager"))
        truth = most if loss == "eager" else least
        other = truth["step"] + truth["last"] if at == "loss" else most["loss"]
        if truth["at"] == at and least[at] > margin * other and hidden != kv_heads * group * head_dim:
            return shape, seq, batch, truth


def true_run(shape: Mapping, optimizer: str, seq: int, batch: int, recompute: str, loss: str) -> dict:
    """Return the bytes of a run by term, and the two instants of which the larger is the peak."""
    config = ModelConfig(
        name="drawn", num_layers=shape["layers"], hidden=shape["hidden"], num_heads=shape["heads"],
        num_kv_heads=shape["kv_heads"], head_dim=shape["head_dim"], ffn=shape["ffn"], vocab=shape["vocab"],
        tied=shape["tied"],
    )  # fmt: skip
    n, (moments, roots) = count_params(config).total, RUN_OPTIMIZERS[optimizer]
    block = layer_activations(config, batch=batch, seq=seq, recompute=recompute, attention="fused")
    found = {"parameters": n, "weights": 2 * n, "gradients": 2 * n, "optimizer": (4 + moments) * n}
    found |= {"activations": shape["layers"] * sum(block.values()), "logits": 4 * seq * batch * shape["vocab"]}
    states = found["weights"] + found["optimizer"]
    a_token = RUN_LOSSES[loss] * shape["vocab"] + 4 * shape["hidden"]
    found["loss"] = states + found["activations"] + seq * batch * a_token
    found["step"] = states + (4 + roots) * n
    found["last"] = 2 * shape["vocab"] * shape["hidden"]  # the last one in bf16, which an answer may count
    return found | {"peak": max(found["loss"], found["step"]), "at": max(("loss", "step"), key=found.get)}


def _terms_of(answer: Callable[..., object], shape: Mapping, *case: object) -> Mapping[str, float]:
    """Return the learner's dictionary, or raise `Wrong` if it is not one of bytes."""
    try:
        given = answer(dict(shape), *case)  # a copy, so that an answer may take its entries out
    except (TypeError, AttributeError) as error:
        if "ModelConfig" not in str(error) and "'dict' object has no attribute" not in str(error):
            raise
        raise Wrong("`shape` is a dictionary of sizes, and the parameters are yours to count: the chapter's equation "
                    "has them term by term.") from None  # fmt: skip
    if not isinstance(given, Mapping):
        raise Wrong(f"Return a dictionary with {', '.join(TERMS)} and at, and not {type(given).__name__}.")
    missing = [term for term in (*TERMS, "at") if term not in given]
    if missing:
        raise Wrong(f"The dictionary has no {', '.join(missing)}.")
    return given


def _judge_run(
    given: Mapping, truth: Mapping, shape: Mapping, optimizer: str, s: int, b: int, recompute: str, loss: str, case: str
) -> None:
    tokens, layers, h, vocab, f = s * b, shape["layers"], shape["hidden"], shape["vocab"], shape["ffn"]
    q, k = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    widths = (h // shape["heads"], h / shape["heads"])  # what `head_dim` would be if the heads filled the hidden size
    cut = [(shape["heads"] * d, shape["kv_heads"] * d) for d in widths]
    n, table, block = truth["parameters"], vocab * h, truth["activations"] / layers
    states, rows = truth["weights"] + truth["optimizer"], 4 * layers * shape["heads"] * tokens
    statistics, ends = rows if recompute == "none" else 0, 4 * tokens * h
    left_out = {"activations": (0, rows, 2 * rows, -rows), "peak": (0, ends, rows, rows + ends)}
    near = {"activations": rows, "peak": rows + ends}
    moments, roots = RUN_OPTIMIZERS[optimizer]
    slips = {
        "parameters": [
            ("Tied embeddings are one table, and the head is that table", n + table * shape["tied"]),
            ("Embedding and head are two tables where they are not tied", n - table * (not shape["tied"])),
            ("The tables of embedding and head are missing", n - table * (1 if shape["tied"] else 2)),
            ("The norms are missing: 2h a block, and h at the end", n - (2 * layers + 1) * h),
            ("The norm at the end is missing, h parameters", n - h),
            ("A block has two norms of h parameters", n - layers * h),
            ("Keys and values have fewer heads than queries", n + 2 * layers * h * (q - k)),
            ("Heads times their width need not be the hidden size", n + 2 * layers * h * (h - q)),
            *(("`head_dim` is given, and heads times it need not be the hidden size: it is not hidden // heads",
               n + 2 * layers * h * (all_q - q + all_k - k)) for all_q, all_k in cut),
            ("A gated MLP has three matrices", n - layers * h * f),
            ("The output projection is missing, h by q", n - layers * h * q),
            *(("12h² a block is a GPT's: this shape has other widths", 12 * layers * h * h + of * table) for of in (0, 1, 2)),
        ],
        "weights": [("Weights are bf16, 2 bytes each", 4 * n)],
        "gradients": [("Gradients are bf16 when backward ends; only the step makes fp32 ones of them", 4 * n),
                      ("Every trained parameter has a gradient", 0)],
        "optimizer": [
            *((f"A parameter has 4 bytes of fp32 master copy and {moments} of this optimizer's fp32 moments, not {of:g} in all", of * n)
              for of in (moments, 4 + moments / 2, 12)),
        ],
        "activations": [
            ("Full recomputation keeps the input of every block" if recompute == "full" else "Blocks keep what backward needs", 0),
            ("This is one layer; every layer keeps its own activations", block),
            ("Every sequence of the micro-batch keeps its own activations", truth["activations"] / b),
            ("Under full recomputation a block keeps its input alone", _llama(tokens, h, q, k, f) * layers * (recompute == "full")),
            ("Keys and values are narrower than queries", _llama(tokens, h, q, q, f) * layers),
            ("The width of all query heads need not be the hidden size", _llama(tokens, h, h, k, f) * layers),
            *(("`head_dim` is given, and is not hidden // heads", _llama(tokens, h, *both, f) * layers) for both in cut),
            ("A gated MLP keeps three tensors of width f, gate, up, product",
             _llama(tokens, h, q, k, f * 2 / 3) * layers),
            ("A gated MLP keeps three tensors of width f, because a fused kernel applies the activation function again",
             _llama(tokens, h, q, k, f * 4 / 3) * layers),
            ("Values have 2 bytes", truth["activations"] / 2),
            ("A block keeps its input alone, in bf16" if recompute == "full" else "Values are bf16, 2 bytes each", 2 * layers * block),
            ("34sbh is a GPT block's; a Llama block has other widths and no dropout", 34 * tokens * h * layers),
        ],
        "logits": [
            ("The loss keeps logits in fp32, 4 bytes each", 2 * tokens * vocab),
            *(("The loss keeps 4 bytes of a logit, no bf16 value and no gradient", of * tokens * vocab) for of in (6, 12)),
            ("Every token has logits, of all sequences of the micro-batch", 4 * s * vocab),
        ],
        "peak": [
            *(("No instant holds all: gradients come while activations go",
               states + truth["gradients"] + truth["activations"] + logits) for logits in (truth["logits"], 0)),
            ("The peak is the larger of two instants, and this is the smaller", min(truth["loss"], truth["step"])),
            *((f"{sentence}: at the loss a logit has {RUN_LOSSES[loss]} bytes here, and this is {of}",
               truth["loss"] + (of - RUN_LOSSES[loss]) * tokens * vocab) for sentence, of in _LOGITS),
            ("The optimizer's state stays on the device at the loss too", truth["loss"] - truth["optimizer"]),
            *(("At the loss no weight has a gradient, and Megatron's buffer is not asked", truth["loss"] + of * n) for of in (2, 4)),
            ("In the step fp32 gradients take the place of the bf16 ones", truth["step"] + 2 * n),
            ("The step holds bf16 weights, the optimizer's state, fp32 gradients and its roots if it makes some, and this is 2 bytes "
             "a parameter less", truth["step"] - 2 * n),
            ("AdamW's default takes all roots at once, 4 bytes a parameter", truth["step"] - roots * n),
            ("In the step gradients are fp32, and AdamW's default makes roots beside them", states + 2 * n),
            ("This optimizer makes no roots: the fused kernel keeps them in registers, and SGD needs none",
             truth["step"] + (4 - roots) * n),
        ],
    }  # fmt: skip
    # What a kernel keeps beside the table is right with it and without it, and so are the inputs of norm and head, to six digits.
    below = {"activations": statistics, "peak": (statistics + ends) * (truth["at"] == "loss")}
    norms = 8 * (layers + 1) * tokens * (recompute == "none")  # 4 bytes of statistics a norm and token
    above = {"activations": norms, "peak": truth["last"] if truth["at"] == "step" else norms}
    for term in TERMS:
        value, right = as_float(given[term]), truth[term]
        if close(value, right, rel=1e-7 if term == "parameters" else 2e-4):
            continue
        if term in below and right - below[term] <= value * (1 + 1e-6) and value * (1 - 1e-6) <= right + above[term]:
            continue
        for unit, size in (("GB", 1e9), ("GiB", 2**30), ("MB", 1e6), ("MiB", 2**20)):
            if term != "parameters" and close(value, right / size, rel=1e-4 + near.get(term, 0) / right):
                raise Wrong(f"{term}: Return bytes, not {unit} ({case}).")
        mistakes = ((f"{term}: {sentence}", mistaken - each) for sentence, mistaken in slips[term] if mistaken != right
                    for each in (left_out.get(term, (0,)) if mistaken else (0,)))  # fmt: skip
        recognize(value, case, mistakes, functools.partial(close, rel=1e-9))
        raise Wrong(
            f"{term}: this mistake is not one that the check knows. {shape}, {optimizer}, s={s}, b={b}, recompute "
            f"{recompute}, {loss} loss gives {value:,.0f}, and should give {right:,.0f}."
        )
    said = given["at"].lower() if isinstance(given["at"], str) else ""
    if truth["at"] not in said or all(word in said for word in ("loss", "step")):
        raise Wrong(f"at: say 'loss' or 'step', where the peak is; here it is not {given['at']!r} ({case}).")


_LOGITS = [
    ("Logits are held at the loss", 0),
    ("The gradient of the logits stands beside what the loss keeps", 4),
    *(("It matters whose loss it is, eager PyTorch's log-probabilities and two gradients, all in fp32, or Megatron's "
       "probabilities in fp32 and a gradient in bf16", of) for of in (2, 6, 8, 10, 12, 14, 16)),
]  # fmt: skip


def _llama(tokens: int, h: float, q: float, k: float, f: float) -> float:
    return tokens * (8 * h + 4 * q + 4 * k + 6 * f)
