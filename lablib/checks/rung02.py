"""The checks of rung 02: unequal token counts, all-reduce by hand, buckets, the bottleneck of DDP, faults.

`ddp_bottleneck` is the Done-when of the rung: formulas on drawn models and links first, then a recorded run.
"""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor

from lablib.calc.communication import ring_all_reduce_bytes
from lablib.calc.models import preset
from lablib.calc.parallel import bucket_sizes
from lablib.calc.params import count_params
from lablib.checks.judging import (
    Row,
    Slip,
    Wrong,
    as_float,
    by_name,
    check,
    close,
    name_the_mistake,
    numbers,
    recognize,
    refuse,
    whole,
)
from lablib.launch.measure import medians
from lablib.launch.ranks import Endless, Turns, run_ranks
from lablib.launch.records import recorded
from lablib.toys.data_parallel import DIAGNOSES, Chart, diagnosis, train_regression

__all__ = ["RECORDING", "all_reduce_mean", "ddp_bottleneck", "diagnose", "make_buckets", "token_losses"]

#: Name of the recorded run in labs/recorded/ that `ddp_bottleneck` is held to.
RECORDING = "02_ddp_step_time"


# --- unequal token counts -----------------------------------------------------------------------------------

#: Tokens of the micro-batches of each rank. In the first, no two mistakes give a token the same weight.
_BATCHES = ([[5, 2], [1, 8], [4, 9]], [[3], [1]], [[2, 6, 3], [4], [1, 1]], [[4, 0], [2, 3]])


class _Ranks(Turns):
    """Ranks whose only tool is a sum of one number over all of them."""

    def __init__(self, ranks: int):
        super().__init__(ranks)
        self.given: list[list[float]] = [[] for _ in range(ranks)]

    def able(self) -> list[int]:
        """Return who has not called yet, or whose sum is complete."""
        left = [rank for rank in range(self.ranks) if rank not in self.done]
        return [r for r in left if all(len(other) >= len(self.given[r]) for other in self.given)]

    def all_reduce(self, rank: int, value: object) -> float:
        try:
            number = float(value.detach() if isinstance(value, Tensor) else value)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError):
            raise Wrong("`all_reduce` adds one number over the ranks: give it the count that all ranks need.") from None
        if len(self.given[rank]) == 1000:
            raise Wrong("`all_reduce` is called again and again: a loop in your answer never ends.")
        self.given[rank].append(number)
        call = len(self.given[rank])
        self.pause(rank)
        return sum(given[call - 1] for given in self.given)


@check(
    idea="DDP takes the mean over ranks of what you give it, so every token must come out with the same weight.",
    section="Unequal shares: weigh tokens, not ranks",
    line="Count the tokens of all your micro-batches, add the count over ranks once, and divide the sum of each "
    "micro-batch's losses by it, times the number of ranks.",
)
def token_losses(answer: Callable[[list[Tensor], int, Callable[[float], float]], Sequence[Tensor]]) -> str:
    """Judge `token_losses(micro_batches, ranks, all_reduce)` by the weight that each token gets in the mean gradient."""
    for batch in _BATCHES:
        _judge_weights(batch, *_token_weights(answer, batch))
    tokens = sum(map(sum, _BATCHES[0]))
    return f"Every token weighs 1/{tokens} of the first step, whoever held it and in whichever micro-batch."


def _token_weights(answer: Callable, batch: list[list[int]]) -> tuple[list[list[float]], int]:
    """Return the weight of one token of each micro-batch in DDP's mean gradient, by rank."""
    world = _Ranks(len(batch))
    weights: list[list[float]] = [[] for _ in batch]

    def act(rank: int) -> None:
        losses = [torch.rand(n, dtype=torch.float64).add_(1).requires_grad_() for n in batch[rank]]
        # What the model made has a history, and its gradient is not kept: only a leaf's is.
        got = answer([loss * 1 for loss in losses], len(batch), functools.partial(world.all_reduce, rank))
        iterable = hasattr(got, "__iter__") and not isinstance(got, str | Mapping)
        got = list(got) if iterable and not (isinstance(got, Tensor) and got.dim() != 1) else []
        if len(got) != len(losses):
            raise Wrong(
                f"Return a list with one loss for each of the {len(losses)} micro-batches: backward runs once for each."
            )
        if any(loss.grad is not None for loss in losses):
            raise Wrong("Backward has run already: return the losses, on which the training loop will start it.")
        for loss, start in zip(losses, got, strict=True):
            _backward(loss, start)
        weights[rank] = [_weight(loss, len(batch)) for loss in losses]  # after all: any order of the list is right

    try:
        ended = world.play(act)
    except Endless as endless:
        raise Wrong(str(endless)) from None
    if not ended or len({len(given) for given in world.given}) > 1:
        counts = ", ".join(f"rank {rank}: {len(given)}" for rank, given in enumerate(world.given))
        raise Wrong(
            f"The ranks call `all_reduce` unequally often ({counts}), and one waits for ever: ranks may have "
            f"different numbers of micro-batches, so add up your own tokens first."
        )
    return weights, len(world.given[0])


def _backward(loss: Tensor, start: object) -> None:
    """Start backward on what was returned in the place of a micro-batch's losses."""
    lost = not isinstance(start, Tensor) or start.grad_fn is None  # a leaf of its own leads to no parameter either
    refuse(
        "",
        ("The loss of a micro-batch without tokens has no graph: backward starts on it, too, because the other ranks wait for "
         "this rank's all-reduce. The `sum()` of no losses is 0 and has one", lost and not len(loss)),
        ("A loss has lost its graph, and backward cannot start there: only the count goes through `all_reduce`, the losses "
         "stay tensors", lost),
        ("Backward starts from one number: add up the losses of a micro-batch's tokens", lambda: start.numel() != 1),
    )  # fmt: skip
    try:
        start.sum().backward()
    except RuntimeError as error:
        if "second time" not in str(error):
            raise
        raise Wrong(
            "The losses of two micro-batches hang together in one graph, which the first backward frees: make each "
            "from its own micro-batch."
        ) from None
    padding = not len(loss) and not bool(torch.isfinite(start.detach()).all())
    refuse("", ("A micro-batch of padding has no tokens, and its loss is not a number: the mean of nothing is 0/0, the sum of "
                "nothing is 0", padding))  # fmt: skip


def _weight(loss: Tensor, ranks: int) -> float:
    """Return what one token of a micro-batch weighs in the mean over ranks of the gradients."""
    grad = loss.new_zeros(len(loss)) if loss.grad is None else loss.grad
    if len(grad) and float(grad.max() - grad.min()) > 1e-9 * float(grad.abs().max()):
        raise Wrong("Tokens of one micro-batch weigh differently: each loss enters the sum once.")
    return float(grad[0]) / ranks if len(grad) else 0.0


#: What a token weighs if this mistake is made, given ranks, all tokens, those of the rank and of its micro-batch, and the
#: micro-batches of all and of the rank.
_WEIGHT_SLIPS: list[tuple[str, Callable[..., float]]] = [
    ("The weights are equal and n times too small: DDP divides the sum over ranks by n once more",
     lambda ranks, total, own, n, micros, m: 1 / total / ranks),
    ("The weights are equal and n times too large: the sum over ranks is divided by n once, not multiplied twice",
     lambda ranks, total, own, n, micros, m: ranks / total),
    ("Nothing is divided by the tokens: the step grows with their number", lambda ranks, total, own, n, micros, m: 1.0),
    ("Nothing is divided by the tokens: n cancels DDP's division alone",
     lambda ranks, total, own, n, micros, m: 1 / ranks),
    ("That is the mean of means: a token of a short micro-batch weighs more than one of a long one",
     lambda ranks, total, own, n, micros, m: 1 / n / m / ranks),
    ("The means of micro-batches add up: their number multiplies the step, and short ones weigh too much",
     lambda ranks, total, own, n, micros, m: 1 / n / ranks),
    ("Your own tokens weigh right among themselves, but a rank with few of them counts as much as one with many",
     lambda ranks, total, own, n, micros, m: 1 / own / ranks),
    ("Your own count divides, and n is multiplied in: `all_reduce` returns the sum, it does not change what it gets",
     lambda ranks, total, own, n, micros, m: 1 / own),
    ("A mean has divided by the tokens of its micro-batch already, and the count of all tokens divides once more",
     lambda ranks, total, own, n, micros, m: 1 / n / total),
    ("The count is that of micro-batches; what weighs the same is every token, so count tokens",
     lambda ranks, total, own, n, micros, m: 1 / micros),
    ("A token's weight depends on how many micro-batches its rank has: the count of all tokens divides for them, too",
     lambda ranks, total, own, n, micros, m: 1 / total / m),
    ("Nothing is left of the losses: no token has a weight", lambda ranks, total, own, n, micros, m: 0.0),
]  # fmt: skip


def _judge_weights(batch: list[list[int]], weights: list[list[float]], calls: int) -> None:
    ranks, total, micros = len(batch), sum(map(sum, batch)), sum(map(len, batch))
    given = [  # a row for each micro-batch that has tokens
        ((ranks, total, sum(micro), n, micros, len(micro)), weight)
        for micro, found in zip(batch, weights, strict=True)
        for n, weight in zip(micro, found, strict=True) if n
    ]  # fmt: skip
    case = f"tokens by rank and micro-batch: {batch}"
    if all(close(weight, 1 / total) for _, weight in given):
        return
    shown = [(sentence, all(close(weight, slip(*row)) for row, weight in given)) for sentence, slip in _WEIGHT_SLIPS]
    refuse(case, *shown)
    if calls > 1 and all(len(micro) == len(batch[0]) for micro in batch):
        columns = [sum(column) for column in zip(*batch, strict=True)]
        shared = [weights[rank][i] * columns[i] for rank in range(ranks) for i in range(len(columns)) if batch[rank][i]]
        refuse(case, (
            "Each micro-batch is weighed only among those of the same place on other ranks; the step is one mean over all of "
            "them, so count all tokens before you divide", max(shared) - min(shared) < 1e-9 * max(shared),
        ))  # fmt: skip
    rank, i = next(
        (r, i) for r in range(ranks) for i, n in enumerate(batch[r]) if n and not close(weights[r][i], 1 / total)
    )
    raise Wrong(
        f"This mistake is none that the check knows. With tokens {batch}, by rank and micro-batch, a token of rank {rank}, "
        f"micro-batch {i}, weighs {weights[rank][i]:.4g} in the mean gradient, and 1/{total} = {1 / total:.4g} in a single "
        "process."
    )


# --- all-reduce by hand -------------------------------------------------------------------------------------

Send = Callable[[int, int, Sequence[float]], list[float]]


@check(
    idea="An all-reduce is a reduce-scatter, after which each rank has one finished chunk, and an all-gather of those.",
    section="Ring all-reduce: a reduce-scatter and an all-gather",
    line="In n - 1 steps every rank sends one chunk of 1/n to its right neighbour, which adds it; in n - 1 more steps "
    "finished chunks go on, and replace what was there.",
    lines=100_000,  # a slow answer takes some thousands
)
def all_reduce_mean(answer: Callable[[list[list[float]], Send], list[list[float]]]) -> str:
    """Judge `all_reduce_mean(gradients, send)`: 4 ranks with 8 numbers first, then other sizes."""
    for ranks, length in ((4, 8), (2, 6), (3, 12), (5, 5)):
        # Powers of ten: the digits of every sum say which ranks are in it.
        gradients = [[float(10**rank * (k + 1)) for k in range(length)] for rank in range(ranks)]
        sent, got = _over_the_wire(answer, gradients)
        _judge_result(_rows(got, ranks, length), gradients)
        _judge_traffic(sent, ranks, length)
        _judge_wire(answer, gradients)
    return "Each rank sends 12 numbers where the obvious way sends 24 from rank 0."


def _over_the_wire(answer: Callable[..., list[list[float]]], gradients: list[list[float]]) -> tuple[list[int], object]:
    sent = [0] * len(gradients)

    def send(source: int, target: int, values: Sequence[float]) -> list[float]:
        source, target = whole(source, "The rank that sends"), whole(target, "The rank that receives")
        for rank in (source, target):
            if rank not in range(len(gradients)):
                raise Wrong(f"There is no rank {rank} of {len(gradients)}: after the last rank of a ring comes rank 0.")
        if source == target:
            raise Wrong(f"Rank {source} sends to itself; what a rank has, it need not send.")
        if not hasattr(values, "__len__"):
            raise Wrong(f"`send` takes a list of numbers, and gets {values!r}: send a chunk at once.")
        sent[source] += len(values)
        return numbers(values)

    return sent, answer([list(row) for row in gradients], send)


def _rows(got: object, ranks: int, length: int) -> list[list[float]]:
    """Return what each rank holds, from lists, tuples or arrays."""
    wanted = f"return one list of {length} numbers for each of the {ranks} ranks."
    if got is None:
        raise Wrong(f"Nothing is returned: {wanted}")
    rows = [] if isinstance(got, Mapping) or not hasattr(got, "__iter__") else numbers(got)
    rows = [numbers(row) if hasattr(row, "__len__") and not isinstance(row, str) else [] for row in rows]
    if [len(row) for row in rows] != [length] * ranks:
        raise Wrong(f"{wanted.capitalize()}")
    odd = not all(math.isfinite(value) for row in rows for value in row)
    refuse("", ("Some of the numbers are infinite, or no numbers: only finite ones went in", odd))
    return rows


def _judge_result(got: list[list[float]], gradients: list[list[float]]) -> None:
    ranks, length = len(gradients), len(gradients[0])
    total = [sum(column) for column in zip(*gradients, strict=True)]
    mean = [s / ranks for s in total]

    def hold(rows: Sequence[Sequence[float]], times: float = 1) -> bool:
        """Say whether the ranks hold these rows."""
        pairs = zip(got, rows, strict=True)
        return all(close(v * times, other) for row, others in pairs for v, other in zip(row, others, strict=True))

    if hold([mean] * ranks):
        return
    divided = any(close(v, s) for row in got for v, s in zip(row, mean, strict=True))
    finished = [[close(v, s) for v, s in zip(row, mean if divided else total, strict=True)] for row in got]
    partly = all(any(row) and not all(row) for row in finished)
    absent = next(
        ((column, r) for column, value in enumerate(got[0]) if (r := _absent_ranks(value, column, ranks))), None
    )
    divisor = total[0] / got[0][0] if got[0][0] else 0.0
    first, should = (", ".join(f"{value:g}" for value in row[:4]) for row in (got[0], mean))
    refuse(
        "",
        (f"The gradients are summed, not averaged: every step would be {ranks} times too long", hold([total] * ranks)),
        ("Every rank ends with its own gradient, and nothing of what the others have", hold(gradients)),
        ("The all-gather adds: a finished chunk that arrives must replace the partial one",
         lambda: partly and _all_gather_adds(got, total, divided)),
        ("Each rank has only one chunk finished: that is a reduce-scatter, the all-gather is missing",
         partly and all(sum(row) <= length // ranks for row in finished)),
        ("Some finished chunks do not reach every rank: the all-gather takes n - 1 steps, too", partly),
        ("Some ranks have the mean and others do not: the replicas would drift apart from here on",
         any(map(all, finished)) and not all(map(all, finished))),
        (lambda: f"Rank{'s' * (len(absent[1]) > 1)} {', '.join(map(str, absent[1]))} {'are' if len(absent[1]) > 1 else 'is'} "
         f"missing from element {absent[0]}: n - 1 steps bring a chunk past every rank, and what the all-gather hands round "
         "first is the chunk that a rank has finished", absent),
        ("The ranks hold different numbers at the end: the replicas drift apart", len({tuple(row) for row in got}) > 1),
        (f"All ranks are in the sum, and it is divided by {divisor:g}; the mean divides it once, by {ranks}",
         hold([total] * ranks, divisor)),
        ("The ranks do not enter with equal weight: add all of them first, then divide once by n",
         all(0 < v < s for row in got for v, s in zip(row, total, strict=True))),
        (f"This mistake is none that the check knows: with {ranks} ranks, rank r holding 10^r times 1, 2, 3, ..., rank 0 ends "
         f"with {first}, ... and not {should}, ..", True),
    )  # fmt: skip


def _all_gather_adds(got: list[list[float]], total: list[float], divided: bool) -> bool:
    """Say whether what is unfinished holds the finished sum and partial sums, and is no partial sum itself."""
    ranks, beyond = len(got), []
    for row in got:
        for column, (value, full) in enumerate(zip(row, total, strict=True)):
            more = (value * (ranks if divided else 1) - full) / (column + 1)
            if not close(value, full / ranks if divided else full):
                beyond.append(more > 0.5 and close(more, round(more)) and not _absent_ranks(value, column, ranks))
    return all(beyond)


def _absent_ranks(value: float, column: int, ranks: int) -> list[int]:
    """Read from the digits which ranks are not in the sum; none if it is no plain sum."""
    for divisor in (1, ranks, ranks - 1):
        digits = round(value * divisor / (column + 1), 6)
        text = f"{int(digits):0{ranks}d}"
        if digits == int(digits) and len(text) == ranks and set(text) == {"0", "1"}:
            return [rank for rank in range(ranks) if text[ranks - 1 - rank] == "0"]
    return []


def _judge_traffic(sent: list[int], ranks: int, length: int) -> None:
    least, most, fewest = round(ring_all_reduce_bytes(length, ranks)), max(sent), min(sent)
    every = f"The mean is right, but every rank sends {fewest} numbers and {least} are enough"
    refuse(
        "",
        (f"The mean is right, but rank {sent.index(most)} sends {most} numbers and the least is {least}: one rank's link is "
         "the bottleneck. Let every rank finish one chunk instead", most > least and fewest < most),
        (f"{every}: each half takes n - 1 steps of one chunk", least < fewest < (ranks - 1) * length),
        (f"{every}: send chunks of the gradient, not all of it", fewest > least),
        (f"Only {fewest} numbers left a rank and {least} must: some numbers arrived without being sent", fewest < least),
    )  # fmt: skip


def _judge_wire(answer: Callable[..., list[list[float]]], gradients: list[list[float]]) -> None:
    """Deliver zeros: what a rank ends with may then depend on nothing but its own gradient."""

    def cut_off(held: list[list[float]]) -> list[list[float]]:
        zeros = answer([list(row) for row in held], lambda source, target, values: [0.0] * len(values))
        return _rows(zeros, len(held), len(held[0]))

    alone = cut_off(gradients)
    for rank, row in enumerate(alone):
        others = [own if r == rank else [-3.0 * v for v in own] for r, own in enumerate(gradients)]
        if not all(close(value, before) for value, before in zip(cut_off(others)[rank], row, strict=True)):
            raise Wrong(
                f"Rank {rank} ends with numbers that nobody has sent to it: the answer reads other ranks' gradients "
                f"directly, so use only what `send` returns."
            )


# --- buckets ------------------------------------------------------------------------------------------------


@check(
    idea="Follow backward: it makes the last gradient first, and a bucket leaves when it is full.",
    section="Bucket sizes: bucket_cap_mb and the first MiB",
    line="Go through the indices from the last to the first, append to the open bucket, and open the next one once the "
    "open one holds its limit: `first` for the first bucket, `cap` for all others.",
)
def make_buckets(answer: Callable[[list[int], int, int], list[list[int]]], seed: int = 2) -> str:
    """Judge `make_buckets(sizes, first, cap)` on a hand-made model and on random ones."""
    dice = random.Random(seed)
    cases = [([8] * 9, 16, 24), ([4, 4, 40, 4, 4, 4], 4, 12)]
    drawn = [([dice.randint(1, 40) for _ in range(dice.randint(3, 30))], 10, 50) for _ in range(20)]
    cases += sorted(drawn, key=lambda case: len(case[0]))  # the smallest that fails is shown
    for sizes, first, cap in cases:
        got, truth = answer(list(sizes), first, cap), bucket_sizes(sizes, first=first, cap=cap)
        if got is None:
            raise Wrong("Nothing is returned: return a list of buckets, each a list of indices into `sizes`.")
        found = [[whole(index, "An index") for index in _bucket(bucket)] for bucket in numbers(got)]
        # The order inside a bucket is nobody's: all of it leaves at once.
        if list(map(sorted, found)) != list(map(sorted, truth)):
            _explain_buckets(found, truth, sizes, first, cap)
    return f"{len(cases)} models cut as DDP cuts them."


def _bucket(bucket: object) -> list:
    if not hasattr(bucket, "__iter__") or isinstance(bucket, str | Mapping):
        raise Wrong("Return a list of buckets, and each bucket is a list of indices into `sizes`.")
    return numbers(sorted(bucket) if isinstance(bucket, set | frozenset) else bucket)


def _explain_buckets(got: list[list[int]], truth: list[list[int]], sizes: list[int], first: int, cap: int) -> NoReturn:
    case = f"sizes {sizes[:6]}{'...' if len(sizes) > 6 else ''}, first {first}, cap {cap}"
    flat = [index for bucket in got for index in bucket]
    held = list(map(sorted, got))
    last = len(sizes) - 1

    def cut(first: int, cap: int, sizes: list[int] = sizes) -> list[list[int]]:
        return bucket_sizes(sizes, first=first, cap=cap)

    strange = [index for index in flat if index not in range(len(sizes))]
    missing = sorted(set(range(len(sizes))) - set(flat))
    half = " The last bucket leaves half full" if 0 in missing else " Begin with the last index"
    refuse(
        case,
        ("A bucket lists which gradients are in it, not their sizes: indices, please",
         held == [sorted(sizes[index] for index in bucket) for bucket in truth]),
        ("The buckets are right, in the wrong order: the last gradient comes first",
         sorted(held) == sorted(map(sorted, truth))),
        (lambda: f"{strange[0]} is no index: the {len(sizes)} gradients are numbered from 0", strange),
        ("A gradient is in two buckets: it would be averaged twice", len(flat) != len(set(flat))),
        (f"Gradients {missing[:4]} are in no bucket: those parameters would never be averaged.{half}", missing),
        ("One bucket for everything is ready when backward ends: nothing overlaps", len(got) == 1 < len(truth)),
        ("Backward makes the last layer's gradient first: in registration order the first bucket is ready only at the end of "
         "backward, and nothing overlaps", flat == sorted(flat) and len(flat) > 1),
        ("An empty bucket costs a message and carries nothing", not all(got)),
        ("One message per gradient pays the latency once per parameter",
         all(len(bucket) == 1 for bucket in got) and any(len(bucket) > 1 for bucket in truth)),
    )  # fmt: skip
    closes = "A bucket starts at zero, takes gradients until it holds at least its limit, and closes then"
    above = f"{closes}, even if it is now above it: the gradient that reaches the limit still goes in"
    slips = [
        ("The first bucket has its own, smaller limit, so that the link starts early", cut(cap, cap)),
        ("The limits have changed places: `first` is that of the first bucket, `cap` of all others", cut(cap, first)),
        ("Only the first bucket has the small limit; the others close at the cap", cut(first, first)),
        ("A bucket that holds exactly its limit is full: at least, not more than", cut(first + 1, cap + 1)),
        ("After the first bucket each gradient leaves by itself: a new bucket counts from zero",
         [truth[0], *([index] for index in reversed(range(len(sizes) - len(truth[0]))))]),
        ("The buckets are cut from the first gradient on and then sent in reverse: what backward makes first fills the first "
         "bucket", [[last - i for i in bucket] for bucket in reversed(cut(first, cap, sizes[::-1]))]),
        (above, _closed_before(sizes, first, cap)),
        (above, _closed_before(sizes, first - 1, cap - 1)),
        ("What a bucket holds beyond its limit left with it: the next one starts at zero", _carried_on(sizes, first, cap)),
    ]  # fmt: skip
    recognize(held, case, slips, lambda mine, other: mine == list(map(sorted, other)))
    raise Wrong(
        f"{closes} ({case}). Yours begin {got[:3]}, DDP's {truth[:3]}; which idea differs is not clear from that."
    )


def _closed_before(sizes: Sequence[int], first: int, cap: int) -> list[list[int]]:
    buckets: list[list[int]] = [[]]
    for index in reversed(range(len(sizes))):
        limit = first if len(buckets) == 1 else cap
        if buckets[-1] and sum(sizes[i] for i in buckets[-1]) + sizes[index] > limit:
            buckets.append([])
        buckets[-1].append(index)
    return buckets


def _carried_on(sizes: Sequence[int], first: int, cap: int) -> list[list[int]]:
    buckets: list[list[int]] = [[]]
    room = first
    for index in reversed(range(len(sizes))):
        if room <= 0:
            buckets, room = [*buckets, []], room + cap
        buckets[-1].append(index)
        room -= sizes[index]
    return buckets


# --- the bottleneck of DDP ----------------------------------------------------------------------------------


@check(
    idea="Set the bytes of the gradient over the link against the FLOPs of backward over the accelerator's speed.",
    section="Tokens per rank: where DDP's bottleneck is",
    line="Sent is 2(n-1)/n times the gradient's bytes; seconds are sent over bandwidth, and 4 FLOPs per parameter and "
    "token over FLOP/s; exposed is what the first has more than the second, and never below zero.",
)
def ddp_bottleneck(answer: Callable[..., Mapping[str, float]], seed: int = 2) -> str:
    """Judge `ddp_bottleneck(params, grad_bytes, tokens, ranks, flops, bandwidth)` on models, links and a record."""
    dice = random.Random(seed)
    gpt3 = count_params(preset("gpt3-175b")).total
    cases = [(gpt3, 4, 2048, 6, 140e12, 300e9)]  # no slip gives the number of another one here
    cases += [(gpt3, 2, 2048, 8, 140e12, 300e9), (gpt3, 2, 2048, 64, 140e12, 200e9), (gpt3, 2, 256, 64, 140e12, 25e9)]
    for _ in range(30):
        job = int(10 ** dice.uniform(7, 11)), 2 ** dice.randint(6, 15), dice.choice([2, 3, 8, 16, 100, 512])
        link = dice.choice([2, 4]), dice.uniform(40, 900) * 1e12, dice.uniform(1, 450) * 1e9
        cases.append((job[0], link[0], *job[1:], *link[1:]))
    cases.append((10**9, 2, 1024, 1, 140e12, 25e9))
    gots = [_ask_bottleneck(answer, *case) for case in cases]
    for key, slips in _BOTTLENECK_SLIPS.items():
        given = [as_float(got[key], f"`{key}`") for got in gots]
        rows = [Row(case, value, _bottleneck(*case)[key]) for case, value in zip(cases, given, strict=True)]
        if key == "exposed" and any(row.given < 0 and not close(row.given, row.truth) for row in rows):
            raise Wrong("Exposed time cannot be negative: what hides completely costs nothing.")
        if wrong := [row for row in rows if not close(row.given, row.truth)]:
            name_the_mistake(rows, wrong, slips, _BOTTLENECK_CASE)
    for case, got in zip(cases, gots, strict=True):
        refuse("", ("`hides` is True or False: any text counts as true", isinstance(got["hides"], str)))
        hides = "`hides` says whether the all-reduce fits behind backward, that is, nothing is exposed"
        wrong = bool(got["hides"]) != (_bottleneck(*case)["exposed"] == 0)
        refuse(_BOTTLENECK_CASE.format(*case), (hides, wrong))
    return _judge_against_record(answer)


_BOTTLENECK_CASE = "{0:.3g} parameters, {1}-byte gradients, {2} tokens, {3} ranks"


def _bottleneck(
    params: int, grad_bytes: int, tokens: int, ranks: int, flops: float, bandwidth: float
) -> dict[str, float]:
    size = params * grad_bytes
    sent = ring_all_reduce_bytes(size, ranks)
    communication, backward = sent / bandwidth, 4 * params * tokens / flops
    exposed = max(0.0, communication - backward)
    found = {"size": size, "bytes_sent": sent, "communication": communication, "backward": backward, "exposed": exposed}
    return found | dict(zip(_BOTTLENECK_ASKED, (params, grad_bytes, tokens, ranks, flops, bandwidth), strict=True))


_BOTTLENECK_ASKED = ("params", "grad_bytes", "tokens", "ranks", "flops", "bandwidth")


def _by(sentence: str, mistaken: Callable[[SimpleNamespace], float]) -> Slip:
    """A mistake as a function of what is asked and of the right answer, by name."""
    return sentence, lambda *case: mistaken(SimpleNamespace(**_bottleneck(*case)))


_REVERSED = "The other way round: exposed is what communication has more than backward"
_BOTTLENECK_SLIPS: dict[str, list[Slip]] = {
    "bytes_sent": [
        _by("A rank sends more than the gradient once: 2(n-1)/n times, nearly twice", lambda t: t.size),
        _by("That is one half of an all-reduce; the all-gather sends as much again", lambda t: t.bytes_sent / 2),
        _by("The factor is 2(n-1)/n, and not yet 2; one rank has nobody to send to", lambda t: 2 * t.size),
        _by("Bytes on a ring do not grow with n: a rank sends chunks of 1/n", lambda t: t.bytes_sent * t.ranks),
        _by("Bytes on a ring do not grow with n, nor does the all-gather send all of it",
            lambda t: (t.ranks - 1) * t.size),
        _by("That is the gradient's share of one rank; each rank sends 2(n-1) such chunks", lambda t: t.size / t.ranks),
        _by("Communication does not grow with the tokens, gradients are as many", lambda t: t.bytes_sent * t.tokens),
        _by("Count bytes, not parameters", lambda t: t.bytes_sent / t.grad_bytes),
        _by("Bytes, not GB", lambda t: t.bytes_sent / 1e9),
        _by("Bytes, not bits", lambda t: t.bytes_sent * 8),
        _by("That is what a rank sends and what it receives; count what it sends", lambda t: t.bytes_sent * 2),
        *(_by(f"A gradient has the bytes that `grad_bytes` says, and not {n}", lambda t, n=n: t.bytes_sent / t.grad_bytes * n)
          for n in (4, 2)),
        _by("That is 16 bytes per parameter: the model states stay home, only gradients travel",
            lambda t: t.bytes_sent / t.grad_bytes * 16),
    ],
    "communication": [
        _by("Bandwidth is per direction here, and a ring sends in one: do not halve the time", lambda t: t.communication / 2),
        _by("Bandwidth is in bytes per second, not bits", lambda t: t.communication * 8),
        _by("Bandwidth is in bytes per second already", lambda t: t.communication / 8),
        _by("All ranks send at the same time, each its bytes over its link", lambda t: t.communication * t.ranks),
        _by("A rank does not send the gradient once: divide `bytes_sent` by the bandwidth", lambda t: t.size / t.bandwidth),
        _by("Seconds, not milliseconds", lambda t: t.communication * 1e3),
        _by("`bytes_sent` holds both halves of the all-reduce already", lambda t: t.communication * 2),
    ],
    "backward": [
        _by("That is forward too; gradients exist during backward, 4 of the 6 FLOPs", lambda t: t.backward * 1.5),
        _by("That is the forward pass; backward takes twice as many FLOPs", lambda t: t.backward / 2),
        _by("`tokens` is already the share of one rank: do not divide it again", lambda t: t.backward / t.ranks),
        _by("Each rank has its own tokens and FLOP/s: the ranks' number drops out", lambda t: t.backward * t.ranks),
        _by("Computation grows with parameters times tokens", lambda t: t.backward / t.tokens),
        _by("Seconds, not milliseconds", lambda t: t.backward * 1e3),
    ],
    "exposed": [
        _by("That is all of the communication, as if nothing overlapped", lambda t: t.communication),
        _by("That is the part that hides; exposed is the other one", lambda t: min(t.communication, t.backward)),
        _by(_REVERSED, lambda t: max(0.0, t.backward - t.communication)),
        _by(_REVERSED, lambda t: abs(t.backward - t.communication)),
        _by("Communication hides behind backward only: no gradient exists during forward",
            lambda t: max(0.0, t.communication - 1.5 * t.backward)),
        _by("Communication hides behind backward, which takes twice as long as forward",
            lambda t: max(0.0, t.communication - t.backward / 2)),
        _by("All or nothing is exposed only where nothing overlaps: what backward covers is hidden",
            lambda t: t.communication if t.exposed else 0.0),
        _by("That is the length of an overlapped step, not what backward leaves",
            lambda t: max(t.communication, t.backward)),
        _by("That is the length of a step without overlap, not what backward leaves",
            lambda t: t.communication + t.backward),
        _by("Exposed is in seconds, and not a share", lambda t: t.exposed / t.communication if t.communication else 0.0),
    ],
}  # fmt: skip


def _ask_bottleneck(answer: Callable[..., object], *case: float) -> Mapping[str, Any]:
    return by_name(answer(*case), *_BOTTLENECK_KEYS)


_BOTTLENECK_KEYS = ("bytes_sent", "communication", "backward", "exposed", "hides")


def _judge_against_record(answer: Callable[..., Mapping[str, float]]) -> str:
    """Predict the recorded steps that did not calibrate the link, and hold them to the measurement."""
    record = recorded(RECORDING)
    if record is None:
        return "Right for 35 drawn models and links. No run is recorded yet to compare with."
    rows = [row for row in medians(record.samples) if row["ranks"] > 1]
    errors: dict[int, list[float]] = {}  # by parameters
    for row in rows:
        # The link is calibrated on one message of the largest model for each number of ranks.
        largest = max((r for r in rows if r["ranks"] == row["ranks"]), key=lambda r: r["params"])
        if row is largest:
            continue
        moved = ring_all_reduce_bytes(largest["params"] * largest["grad_bytes"], largest["ranks"])
        flops = 6 * row["params"] * row["tokens"] / row["compute"]
        bandwidth = moved / largest["communication"]
        got = _ask_bottleneck(answer, row["params"], row["grad_bytes"], row["tokens"], row["ranks"], flops, bandwidth)
        step = row["compute"] + float(got["communication"])  # a Decimal adds to no float
        errors.setdefault(row["params"], []).append(abs(step / row["after backward"] - 1))
    if (error := median(each for some in errors.values() for each in some)) > 0.35:
        raise Wrong(f"Computation plus communication misses the recorded steps by {error:.0%} in the median.")
    least, most = min(errors), max(errors)
    return (
        f"Recorded steps without overlap: with {most:,} parameters your communication beside the measured computation is "
        f"within {max(errors[most]):.0%}, which is good; with {least:,} it misses {median(errors[least]):.0%}, because a "
        "small message costs more than its bytes, and latency is left out."
    )


# --- faults -------------------------------------------------------------------------------------------------

_EVIDENCE = {
    "healthy": "nothing is wrong with this run: replicas equal, samples distinct over ranks, a new order in every "
    "epoch, and the gradient norm of one process",
    "gradients summed instead of averaged": "the gradients were summed: compare the norm of the first step with one "
    "process, which took the same samples from the same weights",
    "replicas start from different weights": "the ranks hold different weights before the first step, and DDP never "
    "compares them again",
    "same data on every rank": "in each step all ranks take the same samples: collect the indices over ranks and "
    "count the distinct ones",
    "set_epoch is missing": "the order of the second epoch is that of the first: compare the indices of two epochs "
    "on one rank",
}


@functools.cache
def _train_runs(ranks: int, seed: int) -> tuple[dict[str, list[Chart]], Chart]:
    """Train every faulty run on `ranks` ranks, and the healthy one in a single process too."""
    names = {diagnosis(name): name for name in "ABCDE"}
    long = {"timeout": 600}  # a busy machine is no mistake of the learner's
    by_rank = run_ranks(_train_all, ranks, tuple(names.values()), seed, **long)
    charts = {fault: [results[name] for results in by_rank] for fault, name in names.items()}
    return charts, run_ranks(_train_all, 1, (names["healthy"],), seed, **long)[0][names["healthy"]]


def _train_all(names: tuple[str, ...], seed: int) -> dict[str, Chart]:
    return {name: train_regression(name, seed=seed) for name in names}


@check(
    idea="A falling loss proves nothing; compare things that must be equal, or must differ.",
    section="Silent faults: runs that work and are wrong",
    line="Compare first weights and first samples over ranks, the samples of two epochs on one rank, and the first "
    "gradient norm with that of one process.",
)
def diagnose(answer: Callable[[list[Chart], Chart], str]) -> str:
    """Judge `diagnose(charts, alone)` on all five runs, with other ranks and seeds than the lab's."""
    seen = 0
    for ranks, seed in ((2, 11), (4, 12)):
        charts, alone = _train_runs(ranks, seed)
        for fault in sorted(charts, key=lambda name: (len(name) * seed) % 7):
            said = answer(copy.deepcopy(charts[fault]), copy.deepcopy(alone))
            said = said.strip() if isinstance(said, str) else said
            if said not in DIAGNOSES:
                raise Wrong(f"{said!r} is no diagnosis; answer one of {', '.join(DIAGNOSES)}.")
            if said != fault:
                raise Wrong(f"You say {said!r} on {ranks} ranks, but {_EVIDENCE[fault]}.")
            seen += 1
    return f"All {seen} runs diagnosed, on 2 and on 4 ranks."
