"""The checks of rung 09: bytes that a block keeps, a checkpoint by hand, segments, and what to recompute when.

The last one draws its situations from real models, with budgets around every border between two choices.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lablib.calc.memory.activations import layer_activations, recompute_cost
from lablib.calc.models import ModelConfig, preset
from lablib.checks.judging import Wrong, check, close
from lablib.launch.measure import LiveBytes

__all__ = ["Job", "block_bytes", "checkpoint", "choose", "job_of", "segment_peak"]


# --- bytes of a block ---------------------------------------------------------------------------------------


def _config(hidden: int, heads: int, kv_heads: int, ffn: int, gated: bool) -> ModelConfig:
    return ModelConfig(
        name="drawn",
        family="llama" if gated else "gpt2",
        num_layers=1,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        ffn=ffn,
        vocab=256,
        max_positions=1 << 20,
        norm="rmsnorm" if gated else "layernorm",
        gated_mlp=gated,
    )


_BLOCK = ("batch", "seq", "hidden", "heads", "kv_heads", "ffn", "gated", "dropout", "fused")


def _draw(dice: random.Random) -> tuple:
    kv_heads, groups, width = dice.randint(1, 8), dice.choice((1, 1, 2, 4)), dice.choice((8, 16, 64))
    heads = kv_heads * groups
    gated, fused = dice.random() < 0.5, dice.random() < 0.5
    ffn = dice.randint(2, 5) * heads * width + dice.randint(0, 9)
    dropout = not gated and dice.random() < 0.6
    return (dice.randint(1, 5), dice.randint(3, 400), heads * width, heads, kv_heads, ffn, gated, dropout, fused)


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
    for case in cases:
        named = dict(zip(_BLOCK, case, strict=True))
        config = _config(**{name: named[name] for name in ("hidden", "heads", "kv_heads", "ffn", "gated")})
        how = {"attention": "fused" if named["fused"] else "plain", "dropout": 0.1 if named["dropout"] else 0.0}
        terms = layer_activations(config, batch=named["batch"], seq=named["seq"], **how)
        got, truth = answer(*case), sum(terms.values())
        if not close(got, truth, rel=1e-12):
            _explain_block(float(got), truth, named)
    return f"{len(cases)} blocks to the byte: GPT and Llama, grouped queries, plain and fused attention."


def _explain_block(got: float, truth: int, named: dict[str, Any]) -> None:
    b, s, h, a, f = (named[key] for key in ("batch", "seq", "hidden", "heads", "ffn"))
    n, off = b * s, got - truth
    keys = 4 * n * (h - h // a * named["kv_heads"])
    pairs = a * b * s * s
    slips = {"Values have 16 bits, 2 bytes each.": [truth, -truth / 2]}
    if named["dropout"]:
        slips["A dropout mask has one byte a value, not two."] = [2 * n * h, 2 * n * h + pairs, pairs]
        slips["There are two dropout masks in the stream, n h bytes each."] = [
            -2 * n * h,
            -n * h,
            n * h,
            -2 * n * h - pairs,
            -2 * n * h - 3 * pairs,
        ]
    if keys:
        slips["Keys and values have kv_heads heads, not heads."] = [keys]
    if named["fused"]:
        statistics = 4 * n * a
        slips["Fused attention keeps no scores, but 4 bytes of statistics a token and query head."] = [
            -statistics,
            -2 * n * a,
            -statistics + 4 * b * s,
            -statistics + 2 * b * s,
            statistics,
            2 * pairs - statistics,
            2 * pairs,
            5 * pairs - statistics,
            5 * pairs,
        ]
    elif named["dropout"]:
        slips[
            "With dropout the scores are kept three times: after softmax, the mask, and what dropout makes of them."
        ] = [-3 * pairs, -2 * pairs, -pairs]
    else:
        slips["Without dropout the softmax output is kept once, and no mask."] = [
            3 * pairs,
            2 * pairs,
            3 * pairs + 2 * n * h,
        ]
    if not named["fused"]:
        slips["The softmax output itself is missing: a b s² values of 2 bytes."] = [-2 * pairs]
    if named["gated"]:
        slips["A gated MLP keeps three inner tensors: gate, up, and their product."] = [-2 * n * f, 2 * n * f]
    slips |= {
        "Each norm, the projections to q, k and v together, the output projection, and the MLP keep an input of h "
        "values a token; one or two are missing.": [-2 * n * h, -4 * n * h],
        "Matrices that read the same tensor keep it once: q, k and v share theirs, and so do gate and up.": [
            2 * n * h,
            4 * n * h,
            6 * n * h,
        ],
    }
    for sentence, offsets in slips.items():
        if off in offsets:
            raise Wrong(f"{sentence.removesuffix('.')} ({_words(named)}).")
    raise Wrong(
        f"No known mistake gives this number: this block keeps {truth:,} bytes, and yours {got:,.0f} ({_words(named)})."
    )


def _words(named: dict[str, Any]) -> str:
    sizes = ", ".join(f"{name}={named[name]}" for name in _BLOCK[:6])
    flags = [name for name in _BLOCK[6:] if named[name]]
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


def _step(run: Callable, dropout: float) -> dict:
    """Two blocks, a loss that weighs every output differently, one backward pass."""
    torch.manual_seed(0)
    blocks = [_Block(dropout), _Block(dropout)]
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    weigh = torch.randn(ROWS, WIDTH)
    inside = sum(8 * ROWS * WIDTH * 4 for _ in blocks)  # the wide middle, once a block
    torch.manual_seed(1)
    with LiveBytes() as live:
        y = x
        for block in blocks:
            y = run(block, y)
            if not isinstance(y, Tensor):
                raise Wrong(f"Return what the block returns, a tensor; here {type(y).__name__} came back.")
        live.end_forward()
        kept = live.kept
        forward_runs = [block.runs for block in blocks]
        _backward((weigh * y).sum())
    return {
        "value": y.detach(),
        "functions": _functions(y),
        "kept": kept,
        "inside": inside,
        "runs": (forward_runs, [block.runs for block in blocks]),
        "input": x.grad,
        "weights": [p.grad for block in blocks for p in block.parameters()],
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
            "The output has no graph, so backward ends here. Run the block inside of the Function's forward, which "
            "hides it from autograd and leaves one node, and call `YourFunction.apply(...)` on the input."
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
)
def checkpoint(answer: Callable[[nn.Module, Tensor], Tensor]) -> str:
    """Judge `checkpoint(block, x)` beside the same blocks without it, first without and then with dropout."""
    for dropout in (0.0, 0.5):
        got, right = _step(answer, dropout), _step(lambda block, x: block(x), dropout)
        _judge_checkpoint(got, right, dropout)
    return "Same outputs, gradients and random numbers, and nothing kept but the inputs."


def _judge_checkpoint(got: dict, right: dict, dropout: float) -> None:
    if got["value"].shape != right["value"].shape or not _same(got["value"], right["value"]):
        more = (
            ": draw its random numbers as the block alone does, and leave the random state behind them"
            if dropout
            else ""
        )
        raise Wrong(f"Forward should return what the block returns{more}.")
    first, in_all = got["runs"]
    if first != [1, 1]:
        raise Wrong(f"Forward should run each block once, and runs it {first[0]} times.")
    if got["kept"] > right["kept"] - 0.75 * right["inside"]:
        raise Wrong(
            "After forward the values inside of the block are still alive. Run the block under no_grad, and keep "
            "its input alone: neither its output nor its graph."
        )
    if not got["functions"]:
        raise Wrong(
            "The output does not come out of an autograd.Function; call `YourFunction.apply(...)` on the input."
        )
    ready_made = {"torch": "PyTorch's", "lablib": "the course's"}
    for function in got["functions"]:
        if owner := ready_made.get(function.__module__.partition(".")[0]):
            raise Wrong(f"This is {owner} own checkpoint; write yours.")
    if in_all != [2, 2]:
        raise Wrong(f"Backward should run each block once more, and runs it {in_all[0] - 1} times more.")
    if got["input"] is None:
        raise Wrong("The input gets no gradient: backward has to return one for every argument of forward.")
    if any(gradient is None for gradient in got["weights"]):
        raise Wrong(
            "The block's weights get no gradient. They are no arguments of the Function: run backward through the "
            "replayed graph, so that it reaches them."
        )
    if not (_same(got["input"], right["input"]) and all(map(_same, got["weights"], right["weights"]))):
        if dropout:
            raise Wrong(
                "With dropout the gradients belong to another mask than the loss. The replay has to draw forward's "
                "random numbers, in forward's mode: save the random state before forward and put it back."
            )
        raise Wrong(
            "Gradients differ from those without checkpoint. The replay starts from the same input, and its backward "
            "from the gradient that comes in; nothing is added twice."
        )
    if not torch.equal(got["next"], right["next"]):
        raise Wrong(
            "After backward the random numbers are others than without checkpoint: what was drawn for the replay has "
            "to be undone."
        )


# --- segments -----------------------------------------------------------------------------------------------


def _segment_peak(layers: int, boundary: int, block: int, k: int) -> int:
    lengths = [min(k, layers - first) for first in range(0, layers, k)]
    return max((i + 1) * boundary + length * block - boundary for i, length in enumerate(lengths))


def _segment_slips(layers: int, boundary: int, block: int, k: int) -> dict[str, list[float]]:
    """Return each known mistake with the numbers that it gives."""
    segments, rest = -(-layers // k), layers % k
    slips = {
        "That is kept when forward ends; the segment that runs again comes on top.": [
            segments * boundary,
            layers / k * boundary,
        ],
        "The segment's input is among what its first block keeps, and is counted once.": [
            segments * boundary + k * block,
            layers / k * boundary + k * block,
        ],
    }
    if segments > 1:
        slips["While a segment runs again, the inputs of those before it are still kept."] = [k * block]
    if k > 1:
        slips |= {
            "The replay brings back all blocks of a segment, not one.": [
                segments * boundary + block,
                (segments - 1) * boundary + block,
            ],
            f"Inside a segment every block brings back all of its {block} bytes, its own input included; only the first "
            "block's input was there already.": [
                segments * boundary + k * (block - boundary),
                (segments - 1) * boundary + k * (block - boundary),
            ],
            f"Only the inputs of segments are kept, {segments} of them.": [
                (layers - 1) * boundary + k * block,
                layers * boundary + k * block,
                (layers - 1) * boundary + block,
            ],
        }
    if rest:
        slips["The last segment is shorter, and the one before it is replayed when an input less is kept: look for the "
              "largest moment."] = [
            (segments - 1) * boundary + rest * block,
            (segments - 1) * boundary + k * block,
            (layers / k - 1) * boundary + k * block,
        ]  # fmt: skip
    return slips


#: By hand, the smallest first: no two mistakes give the same number in one of them.
_CHAINS = [(8, 10, 37, 2), (8, 10, 37, 1), (14, 10, 37, 3), (5, 10, 37, 5)]


@check(
    idea="Something is kept at every instant: the inputs of the segments that backward has not reached, and the segment "
    "that is back.",
    section="Segments of k blocks, and the square root of L",
    line="For segment i there are i inputs before it and its own blocks whole; take the largest of these sums, with the "
    "length that each segment really has.",
)
def segment_peak(answer: Callable[[int, int, int, int], float], seed: int = 90) -> str:
    """Judge `segment_peak(layers, boundary, block, k)`, by hand first, then on random chains."""
    dice = random.Random(seed)
    cases = list(_CHAINS)
    for _ in range(40):
        layers, boundary = dice.randint(1, 100), dice.randint(1, 50)
        cases.append((layers, boundary, dice.randint(boundary, 60 * boundary), dice.randint(1, layers)))
    for case in cases:
        got, truth = answer(*case), _segment_peak(*case)
        if close(got, truth, rel=1e-12):
            continue
        layers, boundary, block, k = case
        words = f"{layers} blocks of {block} bytes with inputs of {boundary}, segments of {k}"
        for sentence, values in _segment_slips(*case).items():
            if any(close(got, value, rel=1e-12) for value in values):
                raise Wrong(f"{sentence.removesuffix('.')} ({words}: {truth:,} bytes, not {float(got):,.0f}).")
        raise Wrong(
            f"No known mistake gives this number: the most that is kept is {truth:,} bytes, and yours is "
            f"{float(got):,.0f} ({words})."
        )
    return f"{len(cases)} chains, shorter last segments included."


# --- what to recompute, and when ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One micro-batch of a model on one device. Bytes and FLOPs are those of a single block.

    Attributes:
        layers: Blocks, all alike.
        boundary: Bytes of a block's input.
        block: Bytes that a block keeps when nothing runs again, its input included.
        core: Bytes of these that selective recomputation drops and the replay brings back.
        behind: Bytes that backward has released of a block by the time the replay of its core starts.
        block_flops: FLOPs of a block's forward pass.
        core_flops: FLOPs of its attention core.
        budget: Bytes that are left for what blocks keep.
        name: Model, sequence length and kind of attention.
    """

    layers: int
    boundary: int
    block: int
    core: int
    behind: int
    block_flops: int
    core_flops: int
    budget: int = 0
    name: str = ""

    @property
    def words(self) -> str:
        """The situation in a few words."""
        return f"{self.name}, budget {self.budget:,} bytes"


def job_of(model: str, seq: int, attention: str, *, batch: int = 1, budget: int = 0) -> Job:
    """Return the situation of a model: 16-bit values, the paper's counting."""
    config = preset(model)
    none, selective, full = (
        recompute_cost(config, strategy, batch=batch, seq=seq, attention=attention).units[0]
        for strategy in ("none", "selective", "full")
    )
    return Job(
        layers=config.num_layers,
        boundary=full.stored,
        block=none.stored,
        core=none.stored - selective.stored,
        behind=selective.released,
        block_flops=full.extra_flops,
        core_flops=selective.extra_flops,
        budget=budget,
        name=f"{model}, {batch} x {seq} tokens, {attention} attention",
    )


def selective_peak(job: Job) -> int:
    """Return the most that is kept when attention cores run again: at the end of forward, or in the last replay."""
    stored = job.layers * (job.block - job.core)
    return stored + max(0, job.core - job.behind)


def peaks_of_first(job: Job, n: int) -> tuple[int, int]:
    """Return what is kept at the end of forward and at the first replay, when the first n blocks run again."""
    return n * job.boundary + (job.layers - n) * job.block, (n - 1) * job.boundary + job.block


def best_choice(job: Job) -> dict[str, Any] | None:
    """Return the choice that fits and computes least again: strategy, peak bytes and extra FLOPs; None if none fits."""
    found = [("none", job.layers * job.block, 0)]
    found.append(("selective", selective_peak(job), job.layers * job.core_flops))
    found += [(f"first:{n}", max(peaks_of_first(job, n)), n * job.block_flops) for n in range(1, job.layers + 1)]
    fitting = [choice for choice in found if choice[1] <= job.budget]
    if not fitting:
        return None
    return dict(zip(("strategy", "peak", "extra"), min(fitting, key=lambda choice: choice[2]), strict=True))


def jobs(dice: random.Random) -> list[Job]:
    """Return situations: one by hand, then real models, with budgets drawn and budgets just at, above and below a strategy's peak."""
    small = Job(4, 2, 20, 8, 3, 100, 5, name="4 blocks of 20 bytes, 2 of them input, 8 core, 3 behind")
    found = [replace(small, budget=budget) for budget in (80, 79, 53, 52, 44, 43, 26, 25)]
    for model, seq, attention in (
        ("gpt3-175b", 2048, "plain"),
        ("gpt2-xl", 1024, "plain"),
        ("llama-3-8b", 8192, "fused"),
        ("llama-3-8b", 2048, "plain"),
        ("llama-2-7b", 4096, "fused"),
    ):
        job = job_of(model, seq, attention, batch=dice.choice((1, 1, 2, 3)))
        n = dice.randint(1, job.layers)
        borders = [job.layers * job.block, selective_peak(job), max(peaks_of_first(job, n))]
        borders.append(max(peaks_of_first(job, job.layers)))
        budgets = [border + step for border in borders for step in (-1, 0, 1)]
        budgets += [dice.randint(job.boundary, job.layers * job.block) for _ in range(4)]
        found += [replace(job, budget=budget) for budget in budgets]
    return found


@check(
    idea="Each strategy has a price in bytes, its largest moment, and one in FLOPs: of those that fit, take the cheapest "
    "in FLOPs.",
    section="Which strategy for which job",
    line="List every choice with its peak, the larger of the end of forward and the first replay, and its extra FLOPs; keep "
    "those whose peak is at most the budget, and return the one with the fewest FLOPs, or None.",
)
def choose(answer: Callable[[Job], dict[str, Any] | None], seed: int = 99) -> str:
    """Judge `choose(job)` on situations computed from real models, with budgets around every border."""
    cases = jobs(random.Random(seed))
    for job in cases:
        _judge_choice(answer(job), best_choice(job), job)
    kinds = sorted({(best_choice(job) or {"strategy": "none fits"})["strategy"].split(":")[0] for job in cases})
    return f"{len(cases)} situations; right answers were of the kinds {', '.join(kinds)}."


def _judge_choice(got: dict[str, Any] | None, truth: dict[str, Any] | None, job: Job) -> None:
    if got is not None and (not isinstance(got, dict) or set(got) != {"strategy", "peak", "extra"}):
        raise Wrong("Return a dictionary with the keys strategy, peak and extra, or None.")
    if got is None:
        if truth is None:
            return
        raise Wrong(f"{truth['strategy']!r} fits: it keeps {truth['peak']:,} bytes at most ({job.words}).")
    name, _, number = str(got["strategy"]).replace(" ", "").partition(":")
    known = name in ("none", "selective") and not number
    if not known and not (name == "first" and number.isdecimal() and 1 <= int(number) <= job.layers):
        raise Wrong(f"`strategy` is 'none', 'selective' or 'first:n' with n from 1 to the {job.layers} layers.")
    n = int(number or 0)
    peak, extra = _cost(job, name, n)
    if not close(got["peak"], peak, rel=1e-12):
        if slip := _peak_slip(float(got["peak"]), job, name, n):
            raise Wrong(f"{slip}: {got['strategy']!r} keeps {peak:,} bytes at most ({job.words}).")
        raise Wrong(
            f"{got['strategy']!r} keeps {peak:,} bytes at most, not {float(got['peak']):,.0f}. {_peaks(job, name, n)} "
            f"({job.words})."
        )
    if not close(got["extra"], extra, rel=1e-12):
        raise Wrong(
            f"{got['strategy']!r} computes {extra:,} FLOPs again, not {float(got['extra']):,.0f}: forward only, of "
            f"every block or core that is replayed ({job.words})."
        )
    if peak > job.budget:
        where = "Even this" if truth is None else "This"
        raise Wrong(f"{where} does not fit: {got['strategy']!r} keeps {peak:,} bytes at most, and the budget is "
                    f"{job.budget:,} ({job.words}).")  # fmt: skip
    if extra > truth["extra"]:
        raise Wrong(
            f"{got['strategy']!r} fits, but {truth['strategy']!r} keeps {truth['peak']:,} bytes at most, which fits "
            f"too, and computes less again ({job.words})."
        )


def _peak_slip(got: float, job: Job, name: str, n: int) -> str:
    """Return the mistake that gives this peak, if it is known."""
    known = {}
    if name == "selective":
        stored = job.layers * (job.block - job.core)
        known[stored] = "That is kept when forward ends; the replay of a core comes on top"
        known[stored + job.core] = "When a core comes back, `behind` bytes of its block are gone"
        known[stored + job.layers * job.core] = "The cores come back one at a time, not all at once"
    elif name == "first":
        forward, replay = peaks_of_first(job, n)
        inside = job.block - job.boundary
        known[n * job.boundary + (job.layers - n) * job.block + inside] = (
            "When a block comes back, the blocks that kept everything are gone already"
        )
        known[replay + job.boundary] = "The block that comes back starts from its input, which is counted already"
        known[(job.layers - n) * job.block] = "The blocks that run again keep their inputs"
        if replay > forward:
            known[forward] = "That is kept when forward ends; the first replay keeps more"
        else:
            known[replay] = "That is kept in the first replay; when forward ends it is more"
    truth, _ = _cost(job, name, n)
    return "" if got == truth else known.get(got, "")


def _peaks(job: Job, name: str, n: int) -> str:
    """Say which moments of a strategy compete for its peak."""
    if name == "none":
        return "Nothing is ever replayed: forward ends with all blocks kept"
    if name == "selective":
        return (
            "Forward ends with every block less its core; then the last block's core comes back, when `behind` bytes of "
            "that block are gone, and the larger moment counts"
        )
    forward, replay = peaks_of_first(job, n)
    return (
        f"Forward ends with {forward:,}; when block {n} comes back, the blocks after it are gone, and {replay:,} are "
        "kept: the larger moment counts"
    )


def _cost(job: Job, name: str, n: int) -> tuple[int, int]:
    if name == "none":
        return job.layers * job.block, 0
    if name == "selective":
        return selective_peak(job), job.layers * job.core_flops
    return max(peaks_of_first(job, n)), n * job.block_flops
