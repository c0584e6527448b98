"""The checks of rung 09: a checkpoint by hand, a policy under a limit, what to recompute when, and a job with a fault."""

from __future__ import annotations

import functools
import operator
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lablib.calc.memory.activations import recompute_cost
from lablib.calc.models import preset
from lablib.checks.judging import (
    NEW,
    Sealed,
    Slip,
    Wrong,
    ask_ranks,
    by_name,
    check,
    compare,
    pair,
    refuse,
    refuse_peeking,
    whole,
)
from lablib.launch.measure import LiveBytes
from lablib.launch.torch_private import TorchDispatchMode

__all__ = ["Job", "TrainingJob", "checkpoint", "choose", "faulty_part", "job_of", "keep_within"]


# --- a checkpoint by hand -----------------------------------------------------------------------------------

ROWS, WIDTH = 96, 64


class _Block(nn.Module):
    """Two layers and a wide middle; counts its runs."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream and what the block adds."""
        self.runs += 1
        return x + self.down(self.dropout(torch.tanh(self.up(x))))


def _step(run: Callable, make: Callable[[], nn.Module]) -> dict:
    """Two blocks, a loss that weighs every output differently, one backward pass."""
    torch.manual_seed(0)
    blocks = [make(), make()]
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    weigh = torch.randn(ROWS, WIDTH)
    weights = [p for block in blocks for p in block.parameters()]
    for weight in weights:
        weight.grad = torch.ones_like(weight)  # of the micro-batch before
    torch.manual_seed(1)
    with LiveBytes() as live:
        y = x
        for block in blocks:
            y = _as_input(run(block, y), x)
        live.end_forward()
        kept = live.kept
        forward_runs, random_state = [block.runs for block in blocks], torch.get_rng_state()
        _backward((weigh * y).sum())
    return {
        "value": y.detach(),
        "nodes": _nodes(y),
        "kept": kept,
        "inside": 2 * 8 * ROWS * WIDTH * 4,  # the wide middle, once a block
        "runs": (forward_runs, [block.runs for block in blocks]),
        "input": x.grad,
        "weights": [p.grad for p in weights],
        "after": random_state,
        "next": torch.rand(3),
    }


def _as_input(y: Any, x: Tensor) -> Tensor:
    """Return y, if it is a tensor like x."""
    if not isinstance(y, Tensor) or (y.shape, y.dtype) != (x.shape, x.dtype):
        got = f"{tuple(y.shape)} of {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
        raise Wrong(f"Return a tensor like the input, of shape {tuple(x.shape)} and {x.dtype}; here {got} came back.")
    return y


def _nodes(y: Tensor) -> list[Any]:
    """Return the nodes in the graph of y."""
    found = [y.grad_fn] if y.grad_fn else []
    for node in found:
        found += [before for before, _ in node.next_functions if before and before not in found]
    return found


def _backward(loss: Tensor) -> None:
    if not loss.requires_grad:
        raise Wrong(
            "The output has no graph. `YourFunction.apply(...)` on the input gives it one: run the block in its forward."
        )
    try:
        loss.backward()
    except RuntimeError as error:
        for part, sentence in _REFUSED.items():
            if part in str(error):
                raise Wrong(sentence) from None
        raise


#: What autograd says to a backward that cannot work, and what is behind it.
_REFUSED = {
    "backward through the graph a second time": "Backward went twice through one graph: the replay's, or that which made "
    "its input. Start the replay from a detached copy of the input that needs a gradient, and go through it once.",
    "does not require grad": "Inside backward autograd is off, and a detached copy needs no gradient. Run the block, and "
    "all that you do with its output before backward, under torch.enable_grad(), on an input that needs a gradient.",
    "incorrect number of gradients": "Backward returns one value for every argument of forward, and None for those that "
    "are no tensors, such as the block.",
}


def _same(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@check(
    idea="Forward may forget what backward can bring back: it needs the input, the block, and the random state.",
    section="A checkpoint written out: autograd.Function and use_reentrant",
    line="Backward runs the block again with gradients enabled, on a detached input and under forward's random state, and "
    "then calls backward on the new output with the gradient that came in.",
    lines=1_000,  # a right answer takes a hundred
)
def checkpoint(answer: Callable[[nn.Module, Tensor], Tensor]) -> str:
    """Judge `checkpoint(block, x)` beside the same blocks without it, first without and then with dropout."""
    for dropout in (0.0, 0.5):
        got, right = (_step(way, lambda: _Block(dropout)) for way in (answer, lambda block, x: block(x)))  # noqa: B023
        _judge_checkpoint(got, right, dropout, [name[:11] for name in answer.called if name.endswith(".forward")])  # type: ignore[attr-defined]
    return "Same outputs, gradients and random numbers, and nothing kept from inside of a block."


def _judge_checkpoint(got: dict, right: dict, dropout: float, called: list[str]) -> None:
    first, in_all = (max(runs, key=lambda n, once=once: abs(n - once)) for once, runs in enumerate(got["runs"], 1))
    more = ": draw its random numbers as the block does, and leave the random state behind them" if dropout else ""
    functions = [node._forward_cls for node in got["nodes"] if hasattr(node, "_forward_cls")]
    owners = {"torch.utils": "PyTorch's", "lablib.toys": "the course's"}
    # By the methods: a class may inherit, borrow or call them.
    methods = [str(each.__module__)[:11] for made in functions for each in (made.forward, made.backward)]
    ready_made = [owners[module] for module in (*methods, *called) if module in owners]
    alike = _same(got["input"], right["input"]) and all(map(_same, got["weights"], right["weights"]))
    refuse(
        "",
        (f"Forward should return what the block returns{more}", not _same(got["value"], right["value"])),
        (f"Forward should run each block once, and runs one {first} times", first != 1),
        (f"After forward {got['kept']:,} bytes of what it made are alive. Run the block under no_grad, and keep its input alone: "
         "no graph, no copy, nothing from inside", got["kept"] > right["kept"] - 0.75 * right["inside"]),
        ("The output comes from no autograd.Function: call `YourFunction.apply(...)` on the input", not functions),
        ("The block's own operators are in the graph of the output: run the block inside of your Function's forward",
         any(node.name() == "TanhBackward0" for node in got["nodes"])),
        (f"This is {''.join(ready_made[:1])} own checkpoint; write yours", ready_made),
        ("Forward leaves other random numbers behind it than the block alone. It draws from the state that it finds: save "
         "that state, and seed nothing", not torch.equal(got["after"], right["after"])),
        (f"Backward should run each block once more, itself and no copy, and runs one {in_all - 1} times more", in_all != 2),
        ("The input gets no gradient: what backward returned for it was None, as is `.grad` of a copy that needs none",
         got["input"] is None),
        ("A weight of a block has no gradient of this step: it has to reach the block's own weights, and stay in `.grad`",
         any(each is None or (each == 1).all() for each in got["weights"])),
        ("The weights had gradients, of the micro-batch before, and have lost them: backward adds to `.grad`",
         all(map(_same, got["weights"], (each - 1 for each in right["weights"])))),
        ("With dropout the gradients belong to another mask than the loss. The replay has to draw forward's random numbers, "
         "in forward's mode: save the random state before forward and put it back", dropout and not alike),
        ("Gradients differ from those without checkpoint. The replay starts from the same input, and its backward from the "
         "gradient that comes in; nothing is added twice", not alike),
        ("After backward the random numbers are others than without checkpoint: what was drawn for the replay has to be "
         "undone", not torch.equal(got["next"], right["next"])),
    )  # fmt: skip


# --- a policy under a limit ----------------------------------------------------------------------------------

BATCH, SEQ, HIDDEN = 2, 48, 64
#: What an answer may compute again above the least, in shares of all products: outputs fit whole or not at all.
_NEAR = 0.1


class _Mlp(nn.Module):
    """Norm, one layer of a width of its own, and back; without the wide middle an adapter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, width), nn.Linear(width, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream and what the block adds."""
        return x + functional.dropout(self.down(torch.tanh(self.up(self.norm(x)))), 0.2)


class _Attention(nn.Module):
    """Attention that writes its scores down, with heads of a width of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.width = nn.LayerNorm(HIDDEN), width
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream and what the block adds."""
        q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        weights = functional.dropout((q @ k.transpose(-1, -2) / self.width**0.5).softmax(-1), 0.2)
        return x + functional.dropout(self.out((weights @ v).transpose(1, 2).flatten(-2)), 0.2)


class _Products(TorchDispatchMode):
    """Adds up the FLOPs of products; a counter that tracks modules cannot have backward inside backward."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            self.found.append((out.nbytes, 2 * out.numel() * args[-1].shape[-2]))  # bytes, FLOPs
        return out


PRODUCTS = tuple(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm"))


def _model(dice: random.Random) -> nn.Sequential:
    """Return a model whose blocks have drawn widths, in a drawn order."""
    torch.manual_seed(dice.randrange(100))
    widths = [dice.choice((8, 16)), *dice.sample((96, 160, 256, 384), 3)]
    blocks = [_Mlp(widths[0]), _Attention(16), *map(_Mlp, widths[1:])]
    return nn.Sequential(*dice.sample(blocks, len(blocks)))


def _train(run: Callable[..., Any], model: nn.Module, *limit: int) -> dict:
    """Run a step in bfloat16 by autocast; return gradients, bytes alive between its halves, and products of each half."""
    torch.manual_seed(3)
    x, weigh = (torch.randn(BATCH, SEQ, HIDDEN, requires_grad=need) for need in (True, False))
    model.zero_grad()
    with LiveBytes() as live, _Products() as products:
        products.found = []
        # Without its cache: a weight that a trial run has cast already would be cast in the replay alone.
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            y = run(model, x, *limit)
        if not _as_input(y, x).requires_grad:
            raise Wrong("Return what the model returns: a tensor with a graph behind it.")
        live.end_forward()
        kept, forward = live.kept - y.nbytes, products.found
        products.found = []
        (weigh * y).sum().backward()
    return {
        "value": y.detach(), "kept": kept, "forward": forward,
        "backward": sum(flops for _, flops in products.found), "gradients": [x.grad, *(p.grad for p in model.parameters())],
    }  # fmt: skip


def _least_again(products: list[tuple[int, int]], room: int) -> int:
    """Return the fewest FLOPs that run again if products' outputs of so many bytes may be kept."""
    best = {0: 0}  # FLOPs that are spared by the bytes they take
    for size, flops in products:
        best |= {b + size: max(f + flops, best.get(b + size, 0)) for b, f in best.items() if b + size <= room}
    return sum(flops for _, flops in products) - max(best.values())


@check(
    idea="Keeping an output takes its bytes and spares its product's FLOPs: products differ in what they spare a byte.",
    section="Selective recomputation: the attention core",
    line="Let a first run with a policy that saves nothing write down each product's FLOPs and bytes and each block's input, "
    "then answer MUST_SAVE for the products with the most FLOPs a byte, as many as fit.",
    kind="work",
)
def keep_within(answer: Callable[[nn.Sequential, Tensor, int], Tensor], seed: int = 197) -> str:
    """Judge `keep_within(model, x, limit)` by a step: bytes alive after forward, gradients, FLOPs that run again."""
    settings = _limits(seed) + _limits(NEW.randrange(1 << 30), models=1)[1:-1]  # no list has the last
    for model, plain, each, limit in settings:
        least = _least_again(plain["forward"], limit - each["kept"])
        _judge_within(_train(answer, model, limit), plain, each, limit, least)
    return f"{len(settings)} steps within their limits, with the gradients of no checkpoint, and at most a tenth of all FLOPs above the least."


@functools.cache
def _limits(seed: int, models: int = 2) -> list[tuple]:
    """Return models, their steps without checkpoints and with one on each block, and limits that mislead most."""
    dice, found = random.Random(seed), []
    each_block = functools.partial(functools.reduce, lambda x, block: torch_checkpoint(block, x, use_reentrant=False))
    for _ in range(models):
        model = _model(dice)
        plain, each = _train(lambda model, x: model(x), model), _train(each_block, model)
        products, room = plain["forward"], sum(size for size, _ in plain["forward"])
        most = 0.8 * _NEAR * sum(flops for _, flops in products)  # whichever of equals is kept first
        rooms = [int(dice.uniform(0.1, 0.7) * room) for _ in range(50)]
        rooms = [size for size in rooms if max(_too_many(products, order, False, size) for order in _RIGHT) < most]
        rooms = [max(rooms, key=functools.partial(_too_many, products, *order)) for order in _MISLED]
        found += [(model, plain, each, each["kept"] + size) for size in (0, *rooms, room)]
    return found


#: Orders of (bytes, FLOPs) that are right, and nearly right, these with whether they end at the first that does not fit.
_RIGHT = [lambda each, sign=sign: (-each[1] / each[0], sign * each[0]) for sign in (-1, 0, 1)]
_MISLED = ((lambda each: -each[1] / each[0] ** 2, False), (lambda each: -each[1], False), (_RIGHT[2], True),
           (lambda each: (each[0] > 2 * BATCH * SEQ * HIDDEN, -each[1] / each[0]), False), (None, False))  # fmt: skip


def _too_many(products: list[tuple[int, int]], order: Callable | None, ends: bool, room: int) -> int:
    """Return the FLOPs above the least that run again if outputs are kept in this order, or the last first."""
    again = -_least_again(products, room)
    for size, flops in sorted(products, key=order) if order else products[::-1]:
        room, again = (room - size, again) if size <= room else (room * (not ends), again + flops)
    return again


def _judge_within(got: dict, plain: dict, each: dict, limit: int, least: int) -> None:
    again, every = (step["backward"] - plain["backward"] for step in (got, each))
    most, used = least + _NEAR * every, got["kept"] - each["kept"]
    refuse(
        f"limit {limit:,} bytes, of {plain['kept']:,} without checkpoints",
        ("Return what the model returns; if a trial run drew random numbers, give them back first",
         not _same(got["value"], plain["value"])),
        (f"{got['kept']:,} bytes are alive when forward has ended, and no product runs again. Put a checkpoint around each block, "
         "with a policy that does not save all",
         limit < got["kept"] > 0.95 * plain["kept"] and not again),
        (f"{got['kept']:,} bytes are alive when forward has ended: the inputs of blocks count too, and so does each output "
         "that you save", got["kept"] > limit),
        ("Gradients are not those without checkpoints: mind the graph back to `x`, forward's random numbers and autocast",
         not all(map(_same, got["gradients"], plain["gradients"]))),
        (f"{got['kept']:,} bytes are alive and {again:,} FLOPs run again, where checkpoints of single blocks keep "
         f"{each['kept']:,} or more and repeat {least:,} or more: give each block one of its own",
         again < 0.98 * least or got["kept"] < 0.98 * each["kept"]),
        (f"All {again:,} FLOPs of the products run again, where {least:,} would do", again == every and again > most),
        (f"{again:,} FLOPs run again, {least:,} would do, and {limit - got['kept']:,} bytes are left",
         again > most and (used < 0.7 * (limit - each["kept"]) or again < _least_again(plain["forward"], used) + 0.02 * every)),
        (f"{limit - got['kept']:,} bytes are left, and {again:,} FLOPs run again where {least:,} would do: of two outputs of as "
         "many bytes keep the one that takes more FLOPs to make", again > most),
    )  # fmt: skip


def _rest(layers: int, k: int) -> tuple[int, int]:
    """Return the number of segments, and the blocks of the last one."""
    return -(-layers // k), (layers - 1) % k + 1


# --- what to recompute, and when ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One micro-batch of a model on one device. Bytes and FLOPs are those of a single block.

    Attributes:
        layers: Blocks, all alike.
        boundary: Bytes of a block's input.
        block: Bytes that a block keeps when nothing runs again, its input included.
        core: Bytes of these that selective recomputation drops and the replay brings back.
        behind: Bytes that backward has released of a block by the time the replay of its core starts: those of the
            output projection, the second norm and the MLP, which come behind the core.
        block_flops: FLOPs of a block's forward pass.
        core_flops: FLOPs of its attention core.
        head: Bytes of final norm, logits and loss, which are gone when backward reaches the last block.
        budget: Bytes that are left for what blocks and head keep.
        name: Model, sequence length and kind of attention.
    """

    layers: int
    boundary: int
    block: int
    core: int
    behind: int
    block_flops: int
    core_flops: int
    head: int = 0
    budget: int = 0
    name: str = ""


@functools.lru_cache(maxsize=64)
def job_of(model: str, seq: int, attention: str, *, batch: int = 1, budget: int = 0) -> Job:
    """Return the situation of a model: 16-bit values, the paper's counting."""
    config = preset(model)
    size = {"batch": batch, "seq": seq, "attention": attention}
    costs = [recompute_cost(config, strategy, **size) for strategy in ("none", "selective", "full")]
    none, selective, full = (cost.units[0] for cost in costs)
    return Job(
        layers=config.num_layers,
        boundary=full.stored,
        block=none.stored,
        core=none.stored - selective.stored,
        behind=selective.released,
        block_flops=full.extra_flops,
        core_flops=selective.extra_flops,
        head=costs[0].head,
        budget=budget,
        name=f"{model}, {batch} x {seq} tokens, {attention} attention",
    )


def moments(job: Job, strategy: str) -> tuple[int, int]:
    """Return what is kept when forward ends, and at most in a replay, 0 without one."""
    name, _, number = strategy.partition(":")
    layers, n = job.layers, int(number or 0)
    if name == "none":
        return layers * job.block + job.head, 0
    if name == "selective":
        stored = layers * (job.block - job.core)
        return stored + job.head, stored - job.behind + job.core
    if name == "first":
        return n * job.boundary + (layers - n) * job.block + job.head, (n - 1) * job.boundary + job.block
    segments, rest = _rest(layers, n)
    last, before = (segments - 1) * job.boundary + rest * job.block, (segments - 2) * job.boundary + n * job.block
    return segments * job.boundary + job.head, max(last, before) if segments > 1 else last


def extra_flops(job: Job, strategy: str) -> int:
    """Return the FLOPs that a strategy computes again."""
    name, _, number = strategy.partition(":")
    if name in ("none", "selective"):
        return 0 if name == "none" else job.layers * job.core_flops
    return (int(number) if name == "first" else job.layers) * job.block_flops


def strategies(job: Job) -> list[str]:
    """Return all that can be chosen."""
    several = [f"first:{n}" for n in range(1, job.layers)] + [f"every:{k}" for k in range(1, job.layers + 1)]
    return ["none", "selective", *several]


@functools.lru_cache(maxsize=1024)
def _choices(job: Job, peak: Callable[[Job, str], int], extra: Callable[[Job, str], int]) -> list[tuple[str, int, int]]:
    """Return what every strategy keeps and computes again, whatever the budget."""
    return [(name, peak(job, name), extra(job, name)) for name in strategies(job)]


def best_choice(
    job: Job,
    *,
    peak: Callable[[Job, str], int] = lambda job, strategy: max(moments(job, strategy)),
    extra: Callable[[Job, str], int] = extra_flops,
    options: Callable[[str], bool] = lambda strategy: True,
    fits: Callable[[int, int], bool] = operator.le,
    order: Callable[[tuple], Any] = lambda choice: (choice[2], choice[1]),
) -> dict[str, Any] | None:
    """Return the choice, None if none fits, of who takes these for the peak, the FLOPs, the menu, what fits and is best."""
    found = [choice for choice in _choices(replace(job, budget=0, name=""), peak, extra) if options(choice[0])]
    fitting = [choice for choice in found if fits(choice[1], job.budget)]
    return dict(zip(("strategy", "peak", "extra"), min(fitting, key=order), strict=True)) if fitting else None


def _by_hand(layers: int, boundary: int, block: int, core: int, behind: int, core_flops: int, head: int) -> Job:
    words = f"{layers} blocks of {block} bytes, {boundary} of them input, {core} core, {behind} behind; head {head}"
    return Job(layers, boundary, block, core, behind, 100, core_flops, head, name=words)


def jobs(dice: random.Random) -> list[Job]:
    """Return situations: by hand, of real models, and drawn, with budgets drawn and budgets just at, above and below a peak."""
    small, late, loss = (_by_hand(4, 2, 20, 8, behind, 5, head) for behind, head in ((3, 1), (11, 1), (3, 30)))
    thin = _by_hand(6, 10, 12, 1, 1, 90, 5)
    found = [replace(small, budget=budget) for budget in (81, 80, 53, 52, 45, 44, 27, 26, 25)]
    found += [replace(late, budget=budget) for budget in (49, 48)]
    found += [replace(loss, budget=budget) for budget in (110, 109, 78, 77, 56, 55, 38, 37)]
    found += [replace(thin, budget=budget) for budget in (67, 66, 65, 64, 44, 43)]
    real = [("gpt3-175b", 2048, "plain"), ("gpt2-xl", 1024, "plain"), ("llama-3-8b", 8192, "fused")]
    real += [("llama-3-8b", 2048, "plain"), ("llama-2-7b", 4096, "fused")]
    models = [job_of(*each, batch=dice.choice((1, 1, 2, 3))) for each in real]
    for head in (dice.randint(15, 25), dice.randint(150, 200)):  # best segments of 3 or 4 blocks, and of all
        models.append(_by_hand(dice.choice((7, 11)), 10, dice.randint(11, 13), 1, 1, 90, head))
    for job in models:
        tried = ["none", "selective", f"first:{dice.randint(1, job.layers - 1)}"]
        least = min(max(moments(job, f"every:{k}")) for k in range(1, job.layers + 1))
        borders = [*(max(moments(job, name)) for name in tried), least]
        budgets = [border + step for border in borders for step in (-1, 0, 1)]
        budgets += [dice.randint(least, max(moments(job, n))) for n in (f"first:{job.layers - 1}", "none", "none")]
        found += [replace(job, budget=budget) for budget in budgets]
    return found


def _peak(**of: Callable[[Job, int], int]) -> Callable[[Job], str]:
    """Return the answer of somebody who takes other peaks for these strategies, given the job and the number."""

    def peak(job: Job, strategy: str) -> int:
        name, _, number = strategy.partition(":")
        return of[name](job, int(number or 0)) if name in of else max(moments(job, strategy))

    return _answer(peak=peak)


def _replay(most: Callable[[Job, int], float]) -> Callable[[Job], str]:
    """Return the answer of somebody who takes this for the largest replay in segments of n blocks."""
    return _peak(every=lambda job, n: max(_forward(job, f"every:{n}"), most(job, n)))


def _rows(sentence: str, *mistaken: Callable[..., Any]) -> list[Slip]:
    return [(sentence, each) for each in mistaken]


def _answer(**ideas: Callable) -> Callable[[Job], str]:
    return lambda job: _said(best_choice(job, **ideas))


def _said(choice: dict[str, Any] | None) -> str:
    return "None" if choice is None else "{strategy}, at most {peak:,} bytes, {extra:,} FLOPs again".format(**choice)


def _stored(job: Job) -> int:
    return job.layers * (job.block - job.core)


def _alone(number: Callable[[Job], float], kind: str = "every") -> Callable[[Job], str]:
    """Return the answer of somebody who tries one length of segments alone, or one number of first blocks."""
    return lambda job: _answer(options=lambda name: name[:5] != kind or name[6:] == str(round(number(job))))(job)


def _pays(change: Callable[[Job, dict], int]) -> Callable[[Job], str]:
    """Return the answer of somebody who chooses right and reports other FLOPs."""
    return lambda job: _said((best := best_choice(job)) and best | {"extra": change(job, best)})


def _forward(job: Job, strategy: str) -> int:
    return moments(job, strategy)[0]


_ENDS = {name: lambda job, n, name=name: _forward(job, f"{name}:{n}") for name in ("first", "every")}
_CHOICE_SLIPS: list[Slip] = [
    *_rows("Segments cost the same FLOPs whatever their length, and which has the least peak depends on block and head: try all",
           lambda job: _answer(options=lambda name: name != f"every:{job.layers}")(job),
           lambda job: _answer(options=lambda name: name[:2] != "ev" or job.layers % int(name[6:]) == 0)(job),
           _alone(lambda job: 1), _alone(lambda job: job.layers**0.5),
           _alone(lambda job: max(1, (job.layers * job.boundary / job.block) ** 0.5))),
    *_rows("A replay brings bytes back, and the head's are gone by then: of the end of forward and the replays the larger "
           "counts",
           _answer(peak=_forward), _peak(**_ENDS),
           _peak(**_ENDS, selective=lambda job, n: _stored(job) + job.head + job.core - job.behind),
           _peak(every=_ENDS["every"]), _peak(selective=lambda job, n: _forward(job, "selective")),
           _peak(selective=lambda job, n: moments(job, "selective")[1]), _peak(every=lambda job, n: moments(job, f"every:{n}")[1]),
           _answer(peak=lambda job, strategy: moments(job, strategy)[strategy != "none"]),
           _answer(peak=lambda job, strategy: sum(moments(job, strategy))),
           lambda job: _said((best := best_choice(job)) and best | {"peak": _forward(job, best["strategy"])})),
    *_rows("The head's bytes are there when forward ends",
           lambda job: _answer()(replace(job, head=0)),
           _peak(selective=lambda job, n: _stored(job) + max(0, job.core - job.behind))),
    *_rows("The head's bytes are gone when the first replay starts",
           _answer(peak=lambda job, strategy: max(_forward(job, strategy), moments(job, strategy)[1] + job.head))),
    *_rows("When a core comes back, `behind` bytes of its block are gone",
           _peak(selective=lambda job, n: _stored(job) + max(job.head, job.core))),
    *_rows("The cores come back one at a time, not all at once",
           _peak(selective=lambda job, n: _stored(job) + max(job.head, job.layers * job.core)),
           _peak(selective=lambda job, n: _stored(job) + max(job.head, job.layers * job.core - job.behind))),
    *_rows("The blocks that run again keep their inputs",
           _peak(first=lambda job, n: max((job.layers - n) * job.block + job.head, job.block),
                 every=lambda job, n: max(job.head, n * job.block))),
    *_rows("While a segment is replayed, the inputs of those before it are still kept", _replay(lambda job, n: n * job.block)),
    *_rows("When a block comes back, the blocks behind it are gone already",
           _peak(first=lambda job, n: _forward(job, f"first:{n}") + job.block - job.boundary),
           _peak(first=lambda job, n: _forward(job, f"first:{n}") + max(0, job.block - job.boundary - job.head))),
    *_rows("The segment that comes back starts from its input, which is counted already",
           _replay(lambda job, n: moments(job, f"every:{n}")[1] + job.boundary),
           _replay(lambda job, n: job.layers / n * job.boundary + n * job.block)),
    *_rows("The replay brings back all blocks of a segment",
           _replay(lambda job, n: (_rest(job.layers, n)[0] - 1) * job.boundary + job.block)),
    *_rows("The last segment may be shorter, and the one before it is replayed when an input less is kept",
           _replay(lambda job, n: (_rest(job.layers, n)[0] - 1) * job.boundary + n * job.block)),
    *_rows("Selective recomputation is a choice, too", _answer(options=lambda name: name != "selective"),
           *(lambda job, most=most: _answer(options=lambda name: name in ("none", f"every:{most or job.layers}")
                                            or name[:5] == "first")(job) for most in (0, 1))),
    *_rows("Some blocks may run again, and the others not", _answer(options=lambda name: name[:5] != "first")),
    *_rows("All but the last may run again", lambda job: _answer(options=lambda name: name != f"first:{job.layers - 1}")(job)),
    *_rows("All blocks may run again, in segments of any length", _answer(options=lambda name: name[:5] != "every")),
    *_rows("No replay is needed where everything fits", _answer(options=lambda name: name != "none")),
    *_rows("Full recomputation is the last resort: take what costs less where that fits", _answer(options=lambda name: name == "every:1"),
           _answer(options=lambda name: name in ("none", "selective", "every:1"))),
    *_rows("The peak has to fit the budget", _answer(fits=lambda peak, budget: True)),
    *_rows("A peak that equals the budget fits", _answer(fits=operator.lt)),
    *_rows("Of what fits take what computes least again, not what keeps least or stands first",
           _answer(order=lambda choice: choice[1]), _answer(order=lambda choice: 0)),
    *_rows("Of choices that compute equally much, the one of the least peak is asked for",
           _answer(order=lambda choice: choice[2]), _answer(order=lambda choice: (choice[2], -choice[1]))),
    *_rows("A replay is forward alone: backward runs once in any case", _pays(lambda job, best: 3 * best["extra"]),
           _pays(lambda job, best: best["extra"] + 3 * job.layers * job.block_flops)),
    *_rows("Only blocks that are replayed cost FLOPs",
           _pays(lambda job, best: bool(best["extra"]) * job.layers * job.block_flops),
           _pays(lambda job, best: extra_flops(job, best["strategy"].replace("first", "every")))),
    *_rows("Every block's core runs again",
           _answer(extra=lambda job, name: job.core_flops if name == "selective" else extra_flops(job, name)),
           _pays(lambda job, best: job.core_flops if best["strategy"] == "selective" else best["extra"])),
    *_rows("A segment's input is kept and no more, so all of its blocks run again",
           _answer(extra=lambda job, name: extra_flops(job, name)
                   - (name[:5] == "every" and _rest(job.layers, int(name[6:]))[0] * job.block_flops))),
    *_rows("How many of the first blocks run again is a matter of what is left for blocks, without the head",
           _alone(lambda job: -((job.budget - job.layers * job.block) // (job.block - job.boundary)), "first")),
    *_rows("A block that runs again keeps its input, so it frees less than the whole block",
           _alone(lambda job: -((job.budget - job.layers * job.block - job.head) // job.block), "first")),
]  # fmt: skip


@check(
    idea="Each strategy has a price in bytes, its largest moment, and one in FLOPs: of those that fit, take the cheapest "
    "in FLOPs.",
    section="Which strategy for which job",
    line="List every choice with its peak, the larger of the end of forward and the largest replay, and its extra FLOPs; "
    "keep those whose peak is at most the budget, and return the one with the fewest FLOPs, or None.",
)
def choose(answer: Callable[[Job], dict[str, Any] | None], seed: int = 99) -> str:
    """Judge `choose(job)` on situations computed from real models, with budgets around borders."""
    cases = [(job,) for job in (*jobs(random.Random(seed)), *jobs(NEW))]
    compare(answer, cases, _answer(), _CHOICE_SLIPS, "{0.name}, budget {0.budget:,} bytes", read=_read)
    refuse_peeking(answer, *(f"{__name__}.{each}" for each in ("best_choice", "moments", "extra_flops")))
    return f"{len(cases)} situations, many of them new in each call."


def _name(given: object) -> str:
    return str(getattr(given, "value", given)).replace(" ", "").lower()  # an Enum's value


def _read(got: object, job: Job) -> str:
    """Return a choice in words, those of the truth if it is as good."""
    if got is None:
        return "None"
    otherwise = "Return a dictionary with the keys strategy, peak and extra, or None."
    found = by_name(got, "strategy", "peak", "extra", otherwise=otherwise)
    name = _name(found["strategy"])
    name = "every:1" if name in ("full", f"first:{job.layers}") else name
    if name not in strategies(job):
        raise Wrong(
            f"{name[:40]!r} cannot be chosen: `strategy` is 'none', 'selective', 'first:n' with n below the "
            f"{job.layers} layers, or 'every:k' with k up to them."
        )
    peak, extra = (min(whole(found[key], f"`{key}`"), 10**99) for key in ("peak", "extra"))  # more cannot be printed
    best = best_choice(job)
    if best and (peak, extra) == (best["peak"], best["extra"]) == (max(moments(job, name)), extra_flops(job, name)):
        return _said(best)
    return _said({"strategy": name, "peak": peak, "extra": extra})


# --- a job with a fault -------------------------------------------------------------------------------------

TOKENS, STREAM, RANKS, BLOCKS = 24, 16, 2, 4
_FAULTS = ("own", "later", "twice", "held", "")
_WHERE = {"own": ("drop",), "later": ("mask",), "twice": ("gate",), "held": ("norm", "gate", "up", "drop", "down")}


def _fault(number: int) -> tuple[str, int, int, str]:
    """Return a job's fault, "" for none, and the rank, block and part that have it."""
    kind, dice = _FAULTS[number % len(_FAULTS)], random.Random(number)
    return kind, dice.randrange(RANKS), dice.randrange(BLOCKS), dice.choice(_WHERE.get(kind, ("",)))


class Part(Sealed, nn.Module):
    """One step inside of a block, with a weight, a count and a mask where it needs them."""

    def __init__(self, does: Callable[..., Tensor], *shape: int) -> None:
        super().__init__()
        self._does, self.mask = does, None
        self.weight = nn.Parameter(torch.randn(shape) / shape[0] ** 0.5) if shape else None

    def forward(self, *args: Any) -> Tensor:
        """Return what the part makes of the stream."""
        return self._does(self, *args)


class ResidualBlock(Sealed, nn.Module):
    """An MLP behind a gate of two halves; its parts run under a checkpoint, its load is balanced between steps."""

    def __init__(self, fault: dict[str, str], seed: int, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed, inside = checkpointed, fault.get("gate") == "twice"
        own = torch.Generator().manual_seed(seed) if fault.get("drop") == "own" else None

        def gated(part: Part, x: Tensor) -> Tensor:
            share = (x @ part.weight + part.bias).softmax(-1)
            if inside:
                part.load += _count(share)
            return share

        def dropped(part: Part, x: Tensor) -> Tensor:
            return x * (torch.rand(x.shape, generator=own) > 0.2) / 0.8

        def masked(part: Part, x: Tensor, mask: Tensor) -> Tensor:
            return x * (part.mask if fault.get("mask") == "later" else mask)

        def add(name: str, does: Callable[..., Tensor], *shape: int) -> None:
            log: deque[Tensor] = deque(maxlen=2 * (fault.get(name) == "held"))

            def does_and_logs(part: Part, *args: Any) -> Tensor:
                log.append(y := does(part, *args))
                return y

            self.add_module(name, Part(does_and_logs, *shape))

        add("norm", lambda part, x: functional.layer_norm(x, x.shape[-1:]))
        add("gate", gated, STREAM, 2)
        add("up", lambda part, x: torch.tanh(x @ part.weight), STREAM, 4 * STREAM)
        add("drop", dropped)
        add("mask", masked)
        add("down", lambda part, x: x @ part.weight, 4 * STREAM, STREAM)
        for name in ("load", "bias"):
            self.gate.register_buffer(name, torch.zeros(2))
        self._counts = not inside

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the stream and what the block adds, and count which half of the gate each token takes."""
        self.mask.mask = mask
        how = {"use_reentrant": False}
        y, share = torch_checkpoint(self._inside, x, mask, **how) if self.checkpointed else self._inside(x, mask)
        if self._counts:
            self.gate.load += _count(share)
        return y

    def _inside(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(x)
        share = self.gate(h)
        return x + share[:, :1] * self.down(self.mask(self.drop(self.up(h)), mask)), share


def _count(share: Tensor) -> Tensor:
    return functional.one_hot(share.detach().argmax(-1), 2).sum(0)


class TrainingJob(Sealed):
    """A job on two ranks, one replica on each, which takes two micro-batches forward and then both backward."""

    def __init__(self, number: int) -> None:
        self._number = number

    def model(self, checkpointed: bool = True) -> nn.ModuleList:
        """Return this rank's replica, its blocks under checkpoints or not."""
        torch.manual_seed(self._number)
        kind, rank, block, part = _fault(self._number)
        mine = [{part: kind} if (rank, block) == (_rank(), i) else {} for i in range(BLOCKS)]
        return nn.ModuleList(ResidualBlock(fault, self._number, checkpointed) for fault in mine)

    def forward(self, model: nn.ModuleList, step: int = 0) -> list[Tensor]:
        """Return the losses of this rank's two micro-batches in a step: forward alone."""
        torch.manual_seed(1000 * step + _rank())
        losses = []
        for tokens in (TOKENS, TOKENS // 2):  # behind the last token a row is padding
            x = torch.randn(TOKENS, STREAM)
            mask, y = (torch.arange(TOKENS) < tokens)[:, None].float(), x
            for block in model:
                y = block(y, mask)
            losses.append(((y - x.roll(1, -1).cumsum(-1).sin()) * mask).square().sum() / tokens)
        return losses

    def update(self, model: nn.ModuleList, rate: float = 0.02) -> None:
        """Average gradients over the ranks and take a step; shift each gate towards its emptier half."""
        for block in model:
            for tensor in (*(p.grad for p in block.parameters()), block.gate.load):
                dist.all_reduce(tensor)
                tensor /= dist.get_world_size()
            for parameter in block.parameters():
                parameter.data -= rate * parameter.grad
            block.gate.bias -= rate / TOKENS * (block.gate.load - block.gate.load.mean())
            block.gate.load.zero_()
        model.zero_grad()

    def train(self, steps: int, checkpointed: bool = True) -> float:
        """Train; return the loss of the last step, the mean over ranks."""
        model = self.model(checkpointed)
        for step in range(steps):
            loss = sum(self.forward(model, step))
            loss.backward()
            self.update(model)
        dist.all_reduce(last := loss.detach())
        return last.item() / dist.get_world_size()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _read_part(got: Any) -> tuple[int, str] | None:
    if got is None:
        return None
    block, part = pair(got, "Return None, or the block's number and the name of its part.", "block", "part")
    return min(whole(block, "The block"), 10**99), _name(part)


_PASSED_OVER = {
    "own": "The replay of one rank makes other values than forward did, so its gradients belong to another loss",
    "later": "One rank's replay reads a value that the second micro-batch has changed since forward: with both forward before "
    "backward, as in the job, the first one's replay shows it",
    "twice": "One rank's gradients are right, and what a step leaves behind beside them is not: compare buffers with those of "
    "the model without checkpoints",
    "held": "One rank's gradients and buffers are right, and its memory is not: weigh what is alive when forward has ended",
}


def _misplaced(kind: str, rank: int, here: tuple[int, str], where: list) -> list[tuple[str, bool]]:
    why = ": a wrong gradient goes on into all blocks before it" * (kind in "own later" and 0 <= here[0] < where[0])
    return [
        (f"Rank {rank} it is, but not block {here[0]}{why}", here[0] != where[0]),
        (f"Rank and block are right, and the part is not {here[1]!r}: follow the block part by part, to the first that does "
         "not do what it did, or keeps what the others let go", here[1] != where[1]),
    ]  # fmt: skip


@check(
    idea="Under a checkpoint a step must leave all that it leaves without one, gradients, buffers and random numbers, and "
    "between its halves less bytes.",
    section="A checkpoint written out: autograd.Function and use_reentrant",
    line="Put a hook on every part that notes input, output and a weak reference to the output: look which outputs live when "
    "forward has ended, which part makes another output of the same input in a replay, and which buffer differs from that "
    "of the model without checkpoints; on this rank, before gradients are averaged.",
    kind="fault",
)
def faulty_part(answer: Callable[[TrainingJob], Any], seed: int = 90) -> str:
    """Judge `faulty_part(job)`, which every rank calls for several jobs, one of them healthy."""
    dice = random.Random(seed)
    drawn = [len(_FAULTS) * dice.randrange(100) + kind for kind in (*range(len(_FAULTS)), 0, 3)]
    dice.shuffle(drawn)
    drawn += [len(_FAULTS) * NEW.randrange(100, 100_000) + kind for kind in range(len(_FAULTS))]  # no list has these
    for number, said in zip(drawn, ask_ranks(answer, RANKS, drawn, make=TrainingJob), strict=True):
        kind, rank, *where = _fault(number)
        found = [_read_part(got) for got in said]
        here, there = found[rank], found[1 - rank]
        refuse(
            "",
            ("A job in which nothing is wrong is accused", not kind and (here or there)),
            ("Both ranks accuse themselves, and one of them is healthy: say of each what it has itself, not what is averaged or "
             "exchanged, or held by your own hooks", kind and here and there),
            ("The healthy rank is accused, the other is not", kind and there),
            (_PASSED_OVER.get(kind, ""), kind and here is None),
            *([] if here is None else _misplaced(kind, rank, here, where)),
        )  # fmt: skip
    return (
        f"{len(drawn)} jobs: a dropout with a generator of its own, which PyTorch's checkpoint does not restore; a mask left on the module, "
        "where the next micro-batch replaces it; a router's load counted again by the replay, as torchtitan's comments say of "
        "its own; an output kept for a log."
    )
