"""The checks of rung 09: bytes that a block keeps, a checkpoint by hand, a policy, and what to recompute when.

The last one draws its situations from real models, with budgets around every border between two choices.
"""

from __future__ import annotations

import functools
import operator
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lablib.calc.memory.activations import layer_activations, recompute_cost
from lablib.calc.models import ModelConfig, preset
from lablib.checks.judging import Slip, Wrong, by_name, check, close, compare, refuse, whole
from lablib.launch.measure import LiveBytes
from lablib.launch.torch_private import TorchDispatchMode

__all__ = ["Job", "block_bytes", "checkpoint", "choose", "every_second", "job_of"]


# --- bytes of a block ---------------------------------------------------------------------------------------


def _config(hidden: int, heads: int, kv_heads: int, ffn: int, gated: bool) -> ModelConfig:
    return ModelConfig(
        name="drawn", family="llama" if gated else "gpt2", num_layers=1, hidden=hidden, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=hidden // heads, ffn=ffn, vocab=256, max_positions=1 << 20,
        norm="rmsnorm" if gated else "layernorm", gated_mlp=gated,
    )  # fmt: skip


_BLOCK = ("batch", "seq", "hidden", "heads", "kv_heads", "ffn", "gated", "dropout", "fused")


def _draw(dice: random.Random) -> tuple:
    kv_heads, groups, width = dice.randint(1, 8), dice.choice((1, 1, 2, 4)), dice.choice((8, 16, 64))
    heads = kv_heads * groups
    gated, fused = dice.random() < 0.5, dice.random() < 0.5
    ffn = dice.randint(2, 5) * heads * width + dice.randint(0, 9)
    dropout = not gated and dice.random() < 0.6
    return (dice.randint(1, 5), dice.randint(3, 400), heads * width, heads, kv_heads, ffn, gated, dropout, fused)


class _Sizes:
    """Sizes of one case, in bytes of 16-bit values: what the known mistakes add or leave out."""

    def __init__(self, batch, seq, hidden, heads, kv_heads, ffn, gated, dropout, fused) -> None:
        self.tokens = batch * seq
        self.stream, self.inner = 2 * self.tokens * hidden, 2 * self.tokens * ffn  # one tensor each
        self.key = self.stream // heads * kv_heads
        self.pairs = heads * batch * seq * seq  # scores, and the bytes of a mask on them
        self.gated, self.dropout, self.fused, self.plain = gated, dropout, fused, not fused
        self.masks = dropout * self.stream  # both of the stream
        self.mask = dropout * self.plain * self.pairs  # of the scores
        self.statistics = 4 * self.tokens * heads
        self.weights = 4 * hidden * (hidden + hidden // heads * kv_heads) + 2 * (2 + gated) * hidden * ffn


def _bytes(*case: Any) -> int:
    """Return what `layer_activations` counts."""
    b, s, *sizes, gated, dropout, fused = case
    how = {"attention": "fused" if fused else "plain", "dropout": 0.1 if dropout else 0.0}
    return sum(layer_activations(_config(*sizes, gated), batch=b, seq=s, **how).values())


def _offs(sentence: str, *changes: Callable[[_Sizes], float]) -> list[Slip]:
    """Return the rows of one sentence, from the bytes that the answers are off by."""
    return _rows(sentence, *(lambda *case, change=change: _bytes(*case) + change(_Sizes(*case)) for change in changes))


def _rows(sentence: str, *mistaken: Callable[..., Any]) -> list[Slip]:
    return [(sentence, each) for each in mistaken]


_PROBABILITIES = "Fused attention keeps no scores, but 4 bytes of statistics a token and query head"
_BLOCK_SLIPS: list[Slip] = [
    *_rows("Values have 16 bits, 2 bytes each", lambda *case: 2 * _bytes(*case), lambda *case: _bytes(*case) / 2),
    *_rows("34sbh + 5as²b is a GPT block with dropout, plain attention and ffn = 4h; count this one",
           lambda b, s, h, a, *_: 34 * s * b * h + 5 * a * s * s * b,
           lambda b, s, h, a, *_: 32 * s * b * h + (5 * _[-2] or 2) * (not _[-1]) * a * s * s * b + 2 * s * b * h * _[-2],
           lambda b, s, h, a, *_: 34 * s * b * h + 5 * (not _[-1]) * a * s * s * b,
           lambda b, s, h, *_: _bytes(b, s, h, *_[:2], 4 * h, *_[3:])),
    *_offs("A dropout mask has one byte a value, not two",
           lambda z: z.masks + z.mask, lambda z: z.masks, lambda z: z.mask),
    *_offs("There are two dropout masks in the stream, behind attention and behind the MLP, n h bytes each",
           lambda z: -z.masks, lambda z: -z.masks / 2, lambda z: z.masks / 2,
           lambda z: -z.masks - z.mask, lambda z: -z.masks - 3 * z.mask),
    *_offs("Fused attention draws its dropout inside of the kernel and keeps no mask: the exercise gives it none",
           *(lambda z, n=n: n * z.fused * z.dropout * z.pairs for n in (1, 2, 3))),
    *_offs("Keys and values have kv_heads heads, not heads", lambda z: 2 * (z.stream - z.key)),
    *_offs("Both products of attention need their factors: q, and k and v, kv_heads heads wide each",
           lambda z: -z.key, lambda z: -2 * z.key, lambda z: -2 * z.key - z.stream, lambda z: -z.key - z.stream),
    *_offs(_PROBABILITIES, *(lambda z, n=n: n * z.fused * z.statistics for n in (-1, -1 / 2, 1)),
           lambda z: z.fused * z.statistics * (z.key / z.stream - 1)),
    *_offs(_PROBABILITIES, *(lambda z, n=n: z.fused * (n * z.tokens - z.statistics) for n in (4, 2))),
    *_offs(_PROBABILITIES,
           lambda z: z.fused * ((2 + 3 * z.dropout) * z.pairs - z.statistics),
           lambda z: z.fused * (2 + 3 * z.dropout) * z.pairs, lambda z: z.fused * (5 * z.pairs - z.statistics)),
    *_offs("Attention's output is the input of the output projection: one tensor, kept once",
           lambda z: z.fused * z.stream, lambda z: z.plain * z.stream),
    *_offs("The scores are kept once without dropout, after softmax and in 16 bits: its derivative needs its output, not qkᵀ",
           lambda z: z.plain * 2 * z.pairs, lambda z: z.plain * (2 + 2 * z.dropout) * z.pairs,
           lambda z: z.plain * (not z.dropout) * 2 * z.pairs),
    *_offs("Without dropout there is no mask, and nothing that dropout makes of the scores",
           lambda z: z.plain * (not z.dropout) * 3 * z.pairs,
           lambda z: (not z.dropout) * (z.plain * 3 * z.pairs + z.stream), lambda z: (not z.dropout) * z.stream),
    *_offs("With dropout the scores are kept three times: after softmax, the mask, and what dropout makes of them",
           *(lambda z, n=n: -n * z.mask for n in (3, 2, 1))),
    *_offs("The softmax output itself is missing: a b s² values of 2 bytes", lambda z: -z.plain * 2 * z.pairs),
    *_offs("A gated MLP keeps three inner tensors: gate, up, and their product",
           lambda z: -z.gated * z.inner, lambda z: z.gated * z.inner),
    *_offs("An MLP keeps the input of its activation and the input of the down projection, ffn values a token each",
           lambda z: -(not z.gated) * z.inner, lambda z: -z.inner),
    *_offs("Each norm, the projections to q, k and v together, the output projection, and the MLP keep an input of h values "
           "a token; one or two are missing", lambda z: -z.stream, lambda z: -2 * z.stream),
    *_offs("Matrices that read the same tensor keep it once: q, k and v share theirs, and so do gate and up",
           lambda z: 2 * z.stream, lambda z: z.gated * z.stream, lambda z: (2 + z.gated) * z.stream),
    *_offs("A sum needs neither of its terms, and a block's output is the input of the next",
           *(lambda z, n=n: n * z.stream for n in (1, 3, 4))),
    *_offs("The paper leaves out the statistics of norms",
           lambda z: (8 if z.gated else 16) * z.tokens, lambda z: 16 * z.tokens, lambda z: 8 * z.tokens),
    *_offs("Weights are there anyway, and are no activations", lambda z: z.weights),
]  # fmt: skip


@check(
    idea="Go through the block operator by operator, and ask of each what its derivative needs.",
    section="What one block keeps, tensor by tensor",
    line="Sum the tensors: 2 bytes for each value, 1 for each value of a mask, a tensor that two operators read once, "
    "and k and v only kv_heads heads wide.",
)
def block_bytes(answer: Callable[..., float], seed: int = 9) -> str:
    """Judge `block_bytes(batch, seq, hidden, heads, kv_heads, ffn, gated, dropout, fused)`, to the byte."""
    dice = random.Random(seed)
    gpt3 = (1, 2048, 12288, 96, 96, 49152, False, True, False)
    llama = (1, 8192, 4096, 32, 8, 14336, True, False, True)
    cases = [(*gpt3[:7], False, False), gpt3, llama, (*llama[:8], False), *(_draw(dice) for _ in range(40))]
    compare(answer, cases, _bytes, _BLOCK_SLIPS, _words, right=functools.partial(close, rel=1e-12))
    return f"{len(cases)} blocks to the byte: GPT and Llama, grouped queries, plain and fused attention."


def _words(*case: Any) -> str:
    sizes = ", ".join(f"{name}={value}" for name, value in zip(_BLOCK[:6], case, strict=False))
    flags = [name for name, value in zip(_BLOCK[6:], case[6:], strict=True) if value]
    return f"{sizes}; {', '.join(flags) or 'no flag set'}"


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


class _Products(TorchDispatchMode):
    """Counts products by width; a counter of FLOPs would track modules, and backward inside backward cannot have that."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.widths[out.shape[-1]] += 1
        return out


def _step(run: Callable, make: Callable[[], nn.Module]) -> dict:
    """Two blocks, a loss that weighs every output differently, one backward pass."""
    torch.manual_seed(0)
    blocks = [make(), make()]
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    weigh = torch.randn(ROWS, WIDTH)
    inside = sum(8 * ROWS * WIDTH * 4 for _ in blocks)  # the wide middle, once a block
    torch.manual_seed(1)
    with LiveBytes() as live, _Products() as products:
        products.widths, y = Counter(), x
        for block in blocks:
            y = run(block, y)
            if not isinstance(y, Tensor):
                raise Wrong(f"Return what the block returns, a tensor; here {type(y).__name__} came back.")
        live.end_forward()
        kept = live.kept
        forward_runs, random_state = [block.runs for block in blocks], torch.get_rng_state()
        _backward((weigh * y).sum())
    return {
        "value": y.detach(),
        "functions": _functions(y),
        "kept": kept,
        "products": products.widths,
        "inside": inside,
        "runs": (forward_runs, [block.runs for block in blocks]),
        "input": x.grad,
        "weights": [p.grad for block in blocks for p in block.parameters()],
        "after": random_state,
        "next": torch.rand(3),
    }


def _functions(y: Tensor) -> list[type]:
    """Return the classes of the autograd.Functions in the graph of y."""
    found, open_nodes, seen = [], [y.grad_fn], set()
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            found.append(node._forward_cls)
        open_nodes += [before for before, _ in node.next_functions]
    return found


def _backward(loss: Tensor) -> None:
    if not loss.requires_grad:
        raise Wrong(
            "The output has no graph, so backward ends here. A checkpoint leaves one node in it: PyTorch's does, and "
            "yours as `YourFunction.apply(...)` on the input, with the block run inside of the Function's forward."
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
    "backward through the graph a second time": "The replay's backward went on past the block, through the graph that "
    "made its input. Start the replay from a detached copy of the input that needs a gradient, and stop there.",
    "does not require grad": "The replay left no graph to go back through: inside backward autograd is off. Run the "
    "block under torch.enable_grad(), on an input that needs a gradient.",
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
        _judge_checkpoint(got, right, dropout)
    return "Same outputs, gradients and random numbers, and nothing kept from inside of a block."


def _judge_checkpoint(got: dict, right: dict, dropout: float) -> None:
    first, in_all = got["runs"]
    more = ": draw its random numbers as the block does, and leave the random state behind them" if dropout else ""
    owners = {"torch": "PyTorch's", "lablib": "the course's"}
    ready_made = [owners[top] for made in got["functions"] if (top := made.__module__.partition(".")[0]) in owners]
    alike = _same(got["input"], right["input"]) and all(map(_same, got["weights"], right["weights"]))
    refuse(
        "",
        (f"Forward should return what the block returns{more}",
         got["value"].shape != right["value"].shape or not _same(got["value"], right["value"])),
        (f"Forward should run each block once, and runs it {first[0]} times", first != [1, 1]),
        ("After forward the values inside of the block are still alive. Run the block under no_grad, and keep its input "
         "alone: neither its output nor its graph", got["kept"] > right["kept"] - 0.75 * right["inside"]),
        ("The output comes from no autograd.Function: call `YourFunction.apply(...)` on the input",
         not got["functions"]),
        (f"This is {''.join(ready_made[:1])} own checkpoint; write yours", ready_made),
        ("Forward leaves other random numbers behind it than the block alone. It draws from the state that it finds: save "
         "that state, and seed nothing", not torch.equal(got["after"], right["after"])),
        (f"Backward should run each block once more, and runs it {in_all[0] - 1} times more", in_all != [2, 2]),
        ("The input gets no gradient: backward has to return one for every argument of forward", got["input"] is None),
        ("The block's weights get no gradient. They are no arguments of the Function: run backward through the replayed "
         "graph, so that it reaches them", any(gradient is None for gradient in got["weights"])),
        ("With dropout the gradients belong to another mask than the loss. The replay has to draw forward's random numbers, "
         "in forward's mode: save the random state before forward and put it back", dropout and not alike),
        ("Gradients differ from those without checkpoint. The replay starts from the same input, and its backward from the "
         "gradient that comes in; nothing is added twice", not alike),
        ("After backward the random numbers are others than without checkpoint: what was drawn for the replay has to be "
         "undone", not torch.equal(got["next"], right["next"])),
    )  # fmt: skip


# --- a policy -----------------------------------------------------------------------------------------------

#: Of a block's products: different, to tell which run again, and odd in number: a count that runs on is off by one.
WIDTHS = (72, 80, 96, 128, WIDTH)


class _Chain(nn.Module):
    """Products one after the other, with and without bias."""

    def __init__(self) -> None:
        super().__init__()
        sizes = enumerate(zip((WIDTH, *WIDTHS), WIDTHS, strict=False))
        self.layers = nn.ModuleList(nn.Linear(*size, bias=i % 3 > 0) for i, size in sizes)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream and what the chain adds."""
        self.runs += 1
        y = x
        for layer in self.layers:
            y = functional.dropout(torch.tanh(layer(y)), 0.5)
        return x + y


@check(
    idea="A policy is asked about every operator, save its output or compute it again, and may count what it is asked.",
    section="A policy in PyTorch: outputs that are saved",
    line="In a `context_fn`, make a policy that counts `aten.mm` and `aten.addmm`, forward's and a replay's apart, and answers "
    "MUST_SAVE for odd counts; return create_selective_checkpoint_contexts(policy).",
    lines=3_000,
)
def every_second(answer: Callable[[nn.Module, Tensor], Tensor]) -> str:
    """Judge `every_second(block, x)` by bytes kept, products repeated and gradients, beside the block and the solution."""
    got, whole = (_step(way, _Chain) for way in (answer, lambda block, x: block(x)))
    again, asked = got["products"] - whole["products"], Counter(2 * WIDTHS[1::2])
    most = 2 * (WIDTH + sum(WIDTHS[::2])) * 4 * ROWS  # of each block its output and these products'
    alike = _same(got["input"], whole["input"]) and all(map(_same, got["weights"], whole["weights"]))
    refuse(
        "",
        ("Return what the block returns", not _same(got["value"], whole["value"])),
        ("Nothing runs again: call torch.utils.checkpoint.checkpoint, with use_reentrant=False", got["runs"][1] == [1, 1]),
        ("No product runs again; every second one should", not again),
        (f"{again.total()} products run again in two blocks, not {asked.total()}: save the outputs of the first, the third and "
         "the fifth, with bias (aten.addmm) and without (aten.mm), and begin to count anew in each block",
         again.total() != asked.total()),
        ("Not the second and the fourth product run again: one count for those with and without bias, the odd ones saved",
         again != asked),
        ("More is kept than inputs and the products' outputs: all other operators run again", got["kept"] > 1.1 * most),
        ("The gradients belong to other masks than the loss: leave preserve_rng_state on", not alike),
    )  # fmt: skip
    return f"{asked.total()} of {2 * len(WIDTHS)} products run again, and nothing else is kept."


def _rest(layers: int, k: int) -> tuple[int, int]:
    """Return the number of segments, and the blocks of the last one."""
    segments = -(-layers // k)
    return segments, layers - (segments - 1) * k


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

    @property
    def words(self) -> str:
        """The situation in a few words."""
        return f"{self.name}, budget {self.budget:,} bytes"


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


_asks = False  # whether an answer is being asked, to which the check's own numbers are closed


def _only_for_the_check() -> None:
    if _asks:
        raise Wrong("These are the check's own numbers; write yours.")


def moments(job: Job, strategy: str) -> tuple[int, int]:
    """Return what is kept when forward ends, and at most in a replay, 0 without one."""
    _only_for_the_check()
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


def best_choice(job: Job) -> dict[str, Any] | None:
    """Return the choice that fits and computes least again, of equals the one of the least peak; None if none fits."""
    return _best(job)


@functools.lru_cache(maxsize=1024)
def _choices(job: Job, peak: Callable[[Job, str], int], extra: Callable[[Job, str], int]) -> list[tuple[str, int, int]]:
    """Return what every strategy keeps and computes again, whatever the budget."""
    return [(name, peak(job, name), extra(job, name)) for name in strategies(job)]


def _largest(job: Job, strategy: str) -> int:
    return max(moments(job, strategy))


def _best(
    job: Job,
    *,
    peak: Callable[[Job, str], int] = _largest,
    extra: Callable[[Job, str], int] = extra_flops,
    options: Callable[[str], bool] = lambda strategy: True,
    fits: Callable[[int, int], bool] = operator.le,
    order: Callable[[tuple], Any] = lambda choice: (choice[2], choice[1]),
) -> dict[str, Any] | None:
    """Return the choice of somebody who takes these for the peak, the FLOPs, the menu, what fits and what is best."""
    _only_for_the_check()
    found = [choice for choice in _choices(replace(job, budget=0, name=""), peak, extra) if options(choice[0])]
    fitting = [choice for choice in found if fits(choice[1], job.budget)]
    return dict(zip(("strategy", "peak", "extra"), min(fitting, key=order), strict=True)) if fitting else None


def jobs(dice: random.Random) -> list[Job]:
    """Return situations: some by hand, then real models, with budgets drawn and budgets just at, above and below a peak."""
    small = Job(4, 2, 20, 8, 3, 100, 5, head=1, name="4 blocks of 20 bytes, 2 of them input, 8 core, 3 behind; head 1")
    late = replace(small, behind=11, name=small.name.replace("3 behind", "11 behind"))
    loss = replace(small, head=30, name=small.name.replace("head 1", "head 30"))
    words = "6 blocks of 12 bytes, 10 of them input, 1 core, 1 behind; head 5"
    thin = Job(6, 10, 12, 1, 1, 100, 90, head=5, name=words)
    found = [replace(small, budget=budget) for budget in (81, 80, 53, 52, 45, 44, 27, 26, 25)]
    found += [replace(late, budget=budget) for budget in (49, 48)]
    found += [replace(loss, budget=budget) for budget in (110, 109, 78, 77, 56, 55, 38, 37)]
    found += [replace(thin, budget=budget) for budget in (67, 66, 65, 64, 44, 43)]
    real = [("gpt3-175b", 2048, "plain"), ("gpt2-xl", 1024, "plain"), ("llama-3-8b", 8192, "fused")]
    for model, seq, attention in (*real, ("llama-3-8b", 2048, "plain"), ("llama-2-7b", 4096, "fused")):
        job = job_of(model, seq, attention, batch=dice.choice((1, 1, 2, 3)))
        tried = ["none", "selective", f"first:{dice.randint(1, job.layers - 1)}"]
        least = min(max(moments(job, f"every:{k}")) for k in range(1, job.layers + 1))
        borders = [*(max(moments(job, name)) for name in tried), least]
        budgets = [border + step for border in borders for step in (-1, 0, 1)]
        budgets += [dice.randint(least, max(moments(job, f"first:{job.layers - 1}")))]
        budgets += [dice.randint(least, max(moments(job, "none"))) for _ in range(2)]
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


def _answer(**ideas: Callable) -> Callable[[Job], str]:
    return lambda job: _said(_best(job, **ideas))


def _said(choice: dict[str, Any] | None) -> str:
    if choice is None:
        return "None"
    return f"{choice['strategy']}, at most {choice['peak']:,} bytes, {choice['extra']:,} FLOPs again"


def _stored(job: Job) -> int:
    return job.layers * (job.block - job.core)


def _lengths(best: Callable[[Job], float]) -> Callable[[Job], str]:
    """Return the answer of somebody who tries one length of segments alone."""

    def answer(job: Job) -> str:
        only = f"every:{max(1, round(best(job)))}"
        return _answer(options=lambda name: name[:5] != "every" or name == only)(job)

    return answer


def _pays(change: Callable[[Job, dict], int]) -> Callable[[Job], str]:
    """Return the answer of somebody who chooses right and reports other FLOPs."""
    return lambda job: _said((best := _best(job)) and best | {"extra": change(job, best)})


def _forward(job: Job, strategy: str) -> int:
    return moments(job, strategy)[0]


def _late(job: Job, strategy: str) -> int:
    return moments(job, strategy)[1]


_ENDS = {name: lambda job, n, name=name: _forward(job, f"{name}:{n}") for name in ("first", "every")}
_CHOICE_SLIPS: list[Slip] = [
    *_rows("A replay brings bytes back, and the head's are gone by then: of the end of forward and the replays the larger "
           "counts",
           _answer(peak=_forward),
           _peak(**_ENDS),
           _peak(**_ENDS, selective=lambda job, n: _stored(job) + job.head + job.core - job.behind),
           _peak(every=_ENDS["every"]),
           _peak(selective=lambda job, n: _forward(job, "selective")),
           _peak(selective=lambda job, n: _late(job, "selective")),
           _answer(peak=lambda job, strategy: moments(job, strategy)[strategy != "none"]),
           _peak(every=lambda job, n: _late(job, f"every:{n}")),
           _answer(peak=lambda job, strategy: sum(moments(job, strategy)))),
    *_rows("The head's bytes are there when forward ends",
           lambda job: _answer()(replace(job, head=0)),
           _peak(selective=lambda job, n: _stored(job) + max(0, job.core - job.behind))),
    *_rows("The head's bytes are gone when the first replay starts",
           _answer(peak=lambda job, strategy: max(_forward(job, strategy), _late(job, strategy) + job.head))),
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
           _replay(lambda job, n: _late(job, f"every:{n}") + job.boundary),
           _replay(lambda job, n: job.layers / n * job.boundary + n * job.block)),
    *_rows("The replay brings back all blocks of a segment",
           _replay(lambda job, n: (_rest(job.layers, n)[0] - 1) * job.boundary + job.block)),
    *_rows("The last segment may be shorter, and the one before it is replayed when an input less is kept",
           _replay(lambda job, n: (_rest(job.layers, n)[0] - 1) * job.boundary + n * job.block)),
    *_rows("Selective recomputation is a choice, too", _answer(options=lambda name: name != "selective")),
    *_rows("Some blocks may run again, and the others not", _answer(options=lambda name: name[:5] != "first")),
    *_rows("All blocks may run again, in segments of any length", _answer(options=lambda name: name[:5] != "every")),
    *_rows("Segments cost the same FLOPs whatever their length, and which has the least peak depends on block and head: try all",
           _lengths(lambda job: 1),
           _lengths(lambda job: job.layers**0.5),
           _lengths(lambda job: (job.layers * job.boundary / job.block) ** 0.5)),
    *_rows("No replay is needed where everything fits", _answer(options=lambda name: name != "none")),
    *_rows("Full recomputation is the last resort, not the first", _answer(options=lambda name: name == "every:1")),
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
]  # fmt: skip


@check(
    idea="Each strategy has a price in bytes, its largest moment, and one in FLOPs: of those that fit, take the cheapest "
    "in FLOPs.",
    section="Which strategy for which job",
    line="List every choice with its peak, the larger of the end of forward and the largest replay, and its extra FLOPs; "
    "keep those whose peak is at most the budget, and return the one with the fewest FLOPs, or None.",
)
def choose(answer: Callable[[Job], dict[str, Any] | None], seed: int = 99) -> str:
    """Judge `choose(job)` on situations computed from real models, with budgets around every border."""
    cases = jobs(random.Random(seed))

    def asked(job: Job) -> object:
        global _asks
        _asks = True
        try:
            return answer(job)
        finally:
            _asks = False

    compare(asked, [(job,) for job in cases], _answer(), _CHOICE_SLIPS, lambda job: job.words, read=_read)
    truths = [(job, _best(job)) for job in cases]
    late = sum(found is not None and moments(job, found["strategy"])[1] == found["peak"] for job, found in truths)
    kinds = sorted({(found or {"strategy": "none fits"})["strategy"].split(":")[0] for _, found in truths})
    return f"{len(cases)} situations, {late} of them decided by a replay; right answers were of the kinds {', '.join(kinds)}."


def _read(got: object, job: Job) -> str:
    """Return a choice in words, those of the truth if it is as good."""
    if got is None:
        return "None"
    otherwise = "Return a dictionary with the keys strategy, peak and extra, or None."
    found = by_name(got, "strategy", "peak", "extra", otherwise=otherwise)
    name = str(found["strategy"]).replace(" ", "")
    name = "every:1" if name in ("full", f"first:{job.layers}") else name
    if name not in strategies(job):
        raise Wrong(
            f"{name[:40]!r} cannot be chosen: `strategy` is 'none', 'selective', 'first:n' with n below the "
            f"{job.layers} layers, or 'every:k' with k up to them."
        )
    peak, extra = whole(found["peak"], "The peak"), whole(found["extra"], "What is computed again")
    best = _best(job)
    equal = best is not None and (peak, extra) == (best["peak"], best["extra"])
    if equal and (peak, extra) == (max(moments(job, name)), extra_flops(job, name)):
        return _said(best)
    return _said({"strategy": name, "peak": peak, "extra": extra})
