"""The checks of rung 02: all-reduce by hand, a training loop on ranks, the bottleneck of DDP, a job with a fault.

`ddp_bottleneck` and `train_ddp` are the Done-when of the rung: formulas on drawn jobs and a recorded run, and a loop that runs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lablib.calc.communication import ring_all_reduce_bytes
from lablib.calc.models import preset
from lablib.calc.params import count_params
from lablib.checks.judging import (
    NEW,
    Row,
    Sealed,
    Slip,
    Wrong,
    as_float,
    ask_ranks,
    by_name,
    check,
    close,
    name_the_mistake,
    numbers,
    on_ranks,
    refuse,
    some,
    whole,
)
from lablib.launch.measure import medians, record_comms
from lablib.launch.records import recorded

__all__ = ["RECORDING", "StrangeJob", "all_reduce_mean", "ddp_bottleneck", "find_fault", "train_ddp"]

#: Name of the recorded run in labs/recorded/ that `ddp_bottleneck` is held to.
RECORDING = "02_ddp_step_time"


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
    for ranks, length in ((4, 8), (2, 6), (3, 12), (5, 5), (6, 6 * NEW.randint(1, 9))):
        # Powers of ten: the digits of every sum say which ranks are in it.
        gradients = [[float(10**rank * (k + 1)) for k in range(length)] for rank in range(ranks)]
        sent, got = _over_the_wire(answer, gradients)
        _judge_result(_rows(got, ranks, length), gradients)
        _judge_traffic(sent, ranks, length)
        try:
            _judge_wire(answer, gradients)
        except Exception as error:  # an answer that tests itself notices the cut wire
            if isinstance(error, Wrong):
                raise
        drawn = [[float(NEW.randrange(1, 100)) for _ in row] for row in gradients]
        mean = [sum(column) / ranks for column in zip(*drawn, strict=True)]
        rows = _rows(_over_the_wire(answer, drawn)[1], ranks, length)
        refuse("", ("The mean is right for 10^r times 1, 2, 3, ..., and not for other gradients: make it of the numbers that arrive",
                    not all(close(v, m) for row in rows for v, m in zip(row, mean, strict=True))))  # fmt: skip
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
        row = numbers(values, "What `send` takes")
        if any(isinstance(value, list | tuple) or getattr(value, "ndim", 0) for value in row):
            raise Wrong(f"What `send` takes is one list of numbers, and not a list of lists: {str(row)[:200]}.")
        sent[source] += len(row)
        return row

    return sent, answer([list(row) for row in gradients], send)


def _rows(got: object, ranks: int, length: int) -> list[list[float]]:
    """Return what each rank holds, from lists, tuples or arrays."""
    wanted = f"return one list of {length} numbers for each of the {ranks} ranks."
    if got is None:
        raise Wrong(f"Nothing is returned: {wanted}")
    rows = [] if isinstance(got, Mapping) or not hasattr(got, "__iter__") else numbers(got)
    rows = [numbers(row) if hasattr(row, "__len__") and not isinstance(row, str) else [] for row in rows]
    rows = [[as_float(value, "What a rank holds") for value in row] for row in rows]
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
        ("These are nearly the means, as where digits are cut off (divide as floats), or a rank with small numbers is added twice",
         not _absent_ranks(got[0][0], 0, ranks)
         and all(abs(v - s) <= max(1, s / 100) for row in got for v, s in zip(row, mean, strict=True))),
        ("Every sum is complete, and only some are divided by n: divide before the all-gather, or all of them after it",
         divided and all(close(v, s) or close(v, s / ranks) for row in got for v, s in zip(row, total, strict=True))),
        ("Unfinished elements hold more than the sum, as where the all-gather adds: what arrives there replaces the partial sum",
         lambda: partly and _all_gather_adds(got, total, divided)),
        ("The numbers are those of the mean, and stand in other places: a chunk goes back where it was cut",
         all(all(map(close, sorted(row), sorted(mean))) for row in got)),
        ("Each rank has only one chunk finished: an all-gather brings it the others, as they are",
         partly and all(sum(row) <= length // ranks for row in finished) and all(map(any, zip(*finished, strict=True)))),
        (lambda: f"Rank 0 has the {'mean' if divided else 'sum'} of all ranks in some elements, and not in element "
         f"{finished[0].index(False)}: each chunk is finished on one rank, and an all-gather brings it to all", partly),
        (f"Some ranks have the {'mean' if divided else 'sum'} of all ranks and others do not: each rank ends with the same mean",
         any(map(all, finished)) and not all(map(all, finished))),
        (lambda: f"Rank{'s' * (len(absent[1]) > 1)} {', '.join(map(str, absent[1]))} {'are' if len(absent[1]) > 1 else 'is'} "
         f"missing from element {absent[0]}: n - 1 steps bring a chunk past every rank, and what the all-gather hands round "
         "first is the chunk that a rank has finished", absent),
        ("The ranks hold different numbers at the end: the replicas drift apart", len({tuple(row) for row in got}) > 1),
        (f"All ranks are in the sum, and it is divided by {divisor:g}; the mean divides it once, by {ranks}",
         close(divisor, round(divisor)) and hold([total] * ranks, divisor)),
        ("The numbers are less than the sum, and not the mean: every rank goes in once, and n divides once",
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
        (f"The mean is right, but rank {sent.index(most)} sends {most} numbers, and {least} are enough: every rank finishes one "
         "chunk, and none sends more than another", most > least and fewest < most),
        (f"{every}: n - 1 chunks of 1/n of the gradient in each half of the all-reduce", fewest > least),
        (f"Only {fewest} numbers left a rank and {least} must: some numbers arrived without being sent", fewest < least),
    )  # fmt: skip


def _judge_wire(answer: Callable[..., list[list[float]]], gradients: list[list[float]]) -> None:
    """Deliver zeros: what a rank ends with may then depend on nothing but its own gradient."""

    def cut_off(held: list[list[float]]) -> list[list[float]]:
        zeros = answer([list(row) for row in held], lambda source, target, values: [v - v for v in numbers(values)])
        return _rows(zeros, len(held), len(held[0]))

    for rank, own in enumerate(gradients):  # what the others hold is so large that nothing of it can be overlooked
        others = [own if r == rank else [1e12 * v for v in row] for r, row in enumerate(gradients)]
        if max(map(abs, cut_off(others)[rank])) > 1e9:  # its own are less than 1e7
            raise Wrong(
                f"Rank {rank} ends with numbers that nobody has sent to it: the answer reads other ranks' gradients "
                f"directly, so use only what `send` returns."
            )


# --- a training loop on ranks -------------------------------------------------------------------------------

_VOCABULARY, _WIDTH = 16, 8


class _Practice(NamedTuple):
    """What `train_ddp` is asked to do."""

    ranks: int
    sequences: int
    micro_batch: int
    accumulate: int
    epochs: int = 2
    lr: float = 0.5

    def data(self) -> list[Tensor]:
        """Return sequences of unequal lengths, no two alike."""
        seeded = torch.Generator().manual_seed(self.sequences)
        lengths = [2 + 5 * i % 11 for i in range(self.sequences)]
        return [torch.cat([torch.tensor([i % 16, i // 16]), torch.randint(16, (n,), generator=seeded)])
                for i, n in enumerate(lengths)]  # fmt: skip


#: An epoch ends in fewer micro-batches, padded or not, and one of them in a smaller one. No two mistakes walk alike.
_PRACTICE = (_Practice(2, 17, 2, 3), _Practice(3, 17, 1, 4))


class _Scribe(nn.Module):
    """A language model that notes which sequences it is given, and with which weights it meets them."""

    def __init__(self, data: list[Tensor], seed: int, events: Sequence[object] = ()):
        super().__init__()
        seeded = torch.Generator().manual_seed(seed)
        self.embed, self.inner = nn.Embedding(_VOCABULARY, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCABULARY)
        self.double()
        for p in self.parameters():
            p.data.normal_(generator=seeded)
        self.number, self.events = {tuple(tokens.tolist()): i for i, tokens in enumerate(data)}, events
        self.seen: list[list[Any]] = []

    def forward(self, sequences: Sequence[Tensor]) -> Tensor:
        """Return the loss of every token of the sequences, one vector."""
        whole_ones = isinstance(sequences, list | tuple) and all(isinstance(each, Tensor) for each in sequences)
        known = [self.number.get(tuple(each.tolist())) for each in sequences] if whole_ones else [None]
        if None in known or not known:
            raise Wrong("`model` takes a list of sequences of `data`, as they are: `collate_fn=list` keeps them so.")
        read = torch.cat([torch.cat([tokens.new_zeros(1), tokens[:-1]]) for tokens in sequences])
        logits = self.head(torch.tanh(self.inner(self.embed(read))))
        if logits.requires_grad:  # taken when backward comes by: a loss may only be looked at
            self.seen.append(noted := [known, self.vector().tolist(), len(self.events), False])
            logits.register_hook(lambda _: noted.__setitem__(3, True))
        return nn.functional.cross_entropy(logits, torch.cat(list(sequences)), reduction="none")

    def vector(self) -> Tensor:
        """Return a copy of all weights."""
        return nn.utils.parameters_to_vector(self.parameters()).detach().clone()


class _Trained(NamedTuple):
    """What one rank did: `steps[step][micro_batch]` are the sequences that it took, `path[step]` the weights it began with.

    The path ends with the last weights. Messages, of more than a few counts, and bytes sent are those of step 2, a whole one.
    """

    steps: list[list[list[int]]]
    path: list[Tensor]
    messages: int
    sent: float


def _practise(answer: Callable[..., object], asked: _Practice) -> _Trained:
    data = asked.data()
    with record_comms() as log:
        model = _Scribe(data, dist.get_rank(), log.events)  # other weights on every rank, as after `manual_seed(rank)`
        answer(model, data, asked.epochs, asked.micro_batch, asked.accumulate, asked.lr)
    taken = [noted for noted in model.seen if noted[3]]
    begun = [[*step] for _, step in groupby(taken, lambda noted: noted[1])]  # those of a step begin with equal weights
    steps = [[known for known, *_ in step] for step in begun]
    first, end = [*(step[0][2] for step in begun), 0, 0, 0, 0][2:4]
    gradients = [event for event in log.events[first:end] if event.op not in ("broadcast", "scatter", "recv")
                 and event.bytes >= (128 * asked.ranks if event.op == "all_gather" else 64)]  # fmt: skip
    path = [*(torch.tensor(step[0][1], dtype=torch.float64) for step in begun), model.vector()]
    return _Trained(steps, path, len(gradients), sum(event.sent for event in gradients))


@check(
    idea="Every rank runs the same loop on its own examples, and what all ranks step with is the gradient of one mean over all "
    "tokens of the step.",
    section="Accumulation: no_sync until the last micro-batch",
    line="Wrap the model, let a DistributedSampler deal, cut the rank's micro-batches into groups, count the group's tokens over "
    "all ranks once, and keep all micro-batches but the last of a group under `no_sync`.",
    kind="work",
)
def train_ddp(answer: Callable[..., object]) -> str:
    """Judge `train_ddp(model, data, epochs, micro_batch, accumulate, lr)` on ranks, beside one process, by what is sent."""
    for asked, epochs in zip(_PRACTICE, NEW.sample((2, 3), 2), strict=True):
        asked = asked._replace(epochs=epochs, lr=NEW.uniform(0.3, 0.6))
        trained = on_ranks(_practise, asked.ranks, answer, asked)
        _judge_shares(trained, asked)
        _judge_steps(trained, asked)
        _judge_sent(trained, asked)
    return (
        "On 2 and on 3 ranks the weights are those of one process that takes the same examples, and gradients leave a rank "
        "once a step, in buckets."
    )


def _judge_shares(trained: list[_Trained], asked: _Practice) -> None:
    """Hold what each rank took to the sampler's promise: all examples, each once but for padding, in a new order."""
    ranks, m = len(trained), asked.micro_batch
    case = f"{ranks} ranks, {asked.sequences} sequences, micro_batch={m}, accumulate={asked.accumulate}, {asked.epochs} epochs"
    flat = [[i for step in rank.steps for micro in step for i in micro] for rank in trained]
    places = math.ceil(asked.sequences / ranks)
    wanted = asked.epochs * math.ceil(places / (m * asked.accumulate))
    taken = [len(rank.steps) for rank in trained]
    idle = [rank for rank in range(ranks) if not flat[rank]]
    still = [rank for rank, own in enumerate(trained) if own.path[-1].equal(own.path[0])]
    refuse(
        case,
        (f"Rank {idle[0] if idle else 0} has trained on nothing: every rank trains `model`, not a copy, on its share", idle),
        (f"On rank {still[0] if still else 0} no weight has changed: every rank steps, with what backward has left in `.grad`", still),
        (f"All {ranks} ranks take the same examples: together they do the work of one, {ranks} times",
         all(one == flat[0] for one in flat)),
        (f"The ranks take {sum(map(len, flat))} sequences, and {asked.epochs} epochs of {asked.sequences} are asked: shares are too "
         "large, or too many", sum(map(len, flat)) >= asked.epochs * (asked.sequences + ranks * m * asked.accumulate)),
        (f"A micro-batch has at most {m} sequences: more of them may not fit, which is why gradients accumulate",
         any(len(micro) > m for rank in trained for step in rank.steps for micro in step)),
        ("The optimizer steps after every micro-batch: gradients add up first, and the step comes after the last of a group",
         taken[0] == asked.epochs * math.ceil(places / m) != wanted),
        (f"Ranks go forward in {taken} steps, and {wanted} are asked: a step has {asked.accumulate} micro-batches, an epoch's last "
         "one or more; these are neither dropped nor carried into the next epoch", set(taken) != {wanted}),
    )  # fmt: skip
    each = wanted // asked.epochs
    epochs = [[[i for step in rank.steps[e * each : (e + 1) * each] for micro in step for i in micro] for rank in trained]
              for e in range(asked.epochs)]  # fmt: skip
    for epoch, taken_by in enumerate(epochs):
        left = sorted(set(range(asked.sequences)).difference(*taken_by))
        refuse(case, (f"Sequences {some(left)} are in no step of epoch {epoch}: its {each} steps take all of `data`, which is neither "
                      "left out nor carried into another epoch's step", left))  # fmt: skip
    shares = {str([sorted(set(own)) for own in taken_by]) for taken_by in epochs}
    steps = [{i for rank in trained for micro in rank.steps[number] for i in micro} for number in range(wanted)]
    refuse(case, ("Two epochs are dealt alike, to each rank or to each step the same examples: a sampler does not know the epoch, "
                  "so tell it with `set_epoch` before each, and let it shuffle all of `data`",
                  len(shares) < asked.epochs or steps[:each] == steps[each : 2 * each]))  # fmt: skip


def _step(trained: list[_Trained], asked: _Practice, number: int, weigh: Callable[..., float] = lambda n, total, *_: 1 / total,
          before: int = 0) -> Tensor:  # fmt: skip
    """Return rank 0's weights after a step of one process with all ranks' examples, a token weighed as `weigh` says.

    Args:
        before: Gradients of so many steps before this one are still there.
    """
    data = asked.data()
    model = _Scribe(data, seed=0)
    parameters = list(model.parameters())
    for each in range(number - before, number + 1):
        nn.utils.vector_to_parameters(trained[0].path[each], parameters)
        of_ranks = [rank.steps[each] for rank in trained]
        tokens = [[sum(len(data[i]) for i in micro) for micro in micros] for micros in of_ranks]
        total, count = sum(map(sum, tokens)), sum(map(len, tokens))
        loss = torch.zeros((), dtype=torch.float64)
        for own, micros in zip(tokens, of_ranks, strict=True):
            for place, (n, micro) in enumerate(zip(own, micros, strict=True)):
                column = sum(other[place] for other in tokens if place < len(other))
                weight = weigh(asked.ranks, total, sum(own), n, count, len(own), column)
                loss = loss + weight * model([data[i] for i in micro]).sum()
        loss.backward()
    grads = torch.cat([p.grad.flatten() for p in parameters])  # type: ignore[union-attr]
    return trained[0].path[number] - asked.lr * grads


#: What a token weighs if this mistake is made, given ranks, all tokens, those of the rank, of its micro-batch, the
#: micro-batches of all and of the rank, and the tokens in the same place on all ranks.
_WEIGHT_SLIPS: list[tuple[str, Callable[..., float]]] = [
    ("Tokens weigh equally, and n times too little: DDP divides by n what the ranks add",
     lambda ranks, total, own, n, micros, m, column: 1 / total / ranks),
    ("Tokens weigh equally, and n times too much: gradients are summed over ranks, or n is multiplied in once too often",
     lambda ranks, total, own, n, micros, m, column: ranks / total),
    ("Nothing is divided by the tokens: the step grows with their number",
     lambda ranks, total, own, n, micros, m, column: 1 / ranks),
    ("That is the mean of means: a token of a short micro-batch weighs more than one of a long one",
     lambda ranks, total, own, n, micros, m, column: 1 / n / m / ranks),
    ("The means of micro-batches add up: their number multiplies the step, and short ones weigh too much",
     lambda ranks, total, own, n, micros, m, column: 1 / n / ranks),
    ("Tokens weigh right among those of their rank, but a rank with few of them counts as much as one with many",
     lambda ranks, total, own, n, micros, m, column: 1 / own / ranks),
    ("Each micro-batch is weighed only among those of the same place on other ranks; the step is one mean over all of them, so "
     "count all tokens before you divide", lambda ranks, total, own, n, micros, m, column: 1 / column / m),
    ("The count is that of micro-batches; what weighs the same is every token",
     lambda ranks, total, own, n, micros, m, column: 1 / micros),
]  # fmt: skip


def _judge_steps(trained: list[_Trained], asked: _Practice) -> None:
    """Hold every step of every rank to the step of one process with the same weights and examples."""
    for number in range(len(trained[0].steps)):
        ends = [rank.path[number + 1] for rank in trained]
        right = _step(trained, asked, number)
        far = float((right - trained[0].path[number]).abs().max())
        if all(_near(end, right, far) for end in ends):
            continue
        left, part = trained[0].path[0], not all(_near(end, ends[0], far) for end in ends)
        refuse(
            f"step {number}",
            ("The replicas part. Broadcasts aside, less than one gradient leaves a rank in a step: backward averages where forward goes "
             "through the wrapped model, outside `no_sync`", part and max(each.sent for each in trained) < left.nbytes / 5),  # fp16: 1/4
            ("The replicas differ: each rank begins with weights of its own, and equal steps from there never meet. Rank 0's go to "
             "all first", any(not rank.path[0].equal(left) for rank in trained)),
            ("The replicas part: all step with the same gradient, in every step", part),
            *((sentence, _near(_step(trained, asked, number, slip), ends[0], far)) for sentence, slip in _WEIGHT_SLIPS),
            ("Gradients of the step before are still there: clear them after each step",
             number and _near(_step(trained, asked, number, before=1), ends[0], far)),
            (f"One process with the same examples and plain SGD steps elsewhere: its largest change is {far:.3g}, yours "
             f"{float((ends[0] - trained[0].path[number]).abs().max()):.3g}. The check does not know this mistake", True),
        )  # fmt: skip


def _near(one: Tensor, other: Tensor, far: float) -> bool:
    return float((one - other).abs().max()) < 1e-5 * far  # weights are fp64, and what a token weighs may be fp32


def _judge_sent(trained: list[_Trained], asked: _Practice) -> None:
    times = max(rank.sent for rank in trained) / ring_all_reduce_bytes(trained[0].path[0].nbytes, asked.ranks)
    messages = max(rank.messages for rank in trained)
    refuse(
        f"{asked.accumulate} micro-batches a step",
        (f"The weights are right, and as many bytes as the gradients have leave a rank {times:.1f} times a step: average once, and "
         "compare replicas by a checksum; DDP decides in forward, so all micro-batches but a group's last go forward and backward "
         "under `no_sync`", times > 1.9),  # pickled: 1.7
        (f"The weights are right, in {messages} messages a step, and each pays latency: three hold all gradients", messages > 3),
    )  # fmt: skip


# --- the bottleneck of DDP ----------------------------------------------------------------------------------


@check(
    idea="Set the bytes of the gradient over the link against the FLOPs of backward over the accelerator's speed.",
    section="Tokens per rank: where DDP's bottleneck is",
    line="Sent is 2(n-1)/n times the gradient's bytes; seconds are sent over bandwidth, and 4 FLOPs per parameter and "
    "token over FLOP/s; exposed is what the first has more than the second, of one micro-batch, and never below zero.",
)
def ddp_bottleneck(answer: Callable[..., Mapping[str, float]], seed: int = 2) -> str:
    """Judge `ddp_bottleneck(params, grad_bytes, tokens, micro_batches, ranks, flops, bandwidth)` on jobs and a record."""
    dice = random.Random(seed)
    gpt3 = count_params(preset("gpt3-175b")).total
    cases = [(gpt3, 4, 1024, 5, 6, 140e12, 200e9)]  # no slip gives the number of another one here
    cases += [
        (gpt3, 2, 2048, 1, 8, 140e12, 300e9),
        (gpt3, 2, 2048, 2, 64, 140e12, 200e9),
        (gpt3, 2, 256, 3, 64, 140e12, 25e9),
        (gpt3, 2, 256, 1, 2, 140e12, 300e9),  # it hides, as two ranks send half of what many do
    ]
    for each in [dice] * 27 + [NEW] * 3:
        job = int(10 ** each.uniform(7, 11)), 2 ** each.randint(6, 15), each.choice([2, 3, 8, 16, 100, 512])
        link = each.choice([2, 4]), each.uniform(40, 900) * 1e12, each.uniform(1, 450) * 1e9
        # So many parameters that the chunks of a ring are whole.
        cases.append((job[0] - job[0] % job[2], link[0], job[1], each.choice([1, 2, 5, 16]), job[2], *link[1:]))
    cases.append((10**9, 2, 1024, 4, 1, 140e12, 25e9))
    gots = [_ask_bottleneck(answer, *case) for case in cases]
    for key, slips in _BOTTLENECK_SLIPS.items():
        given = [as_float(got[key], f"`{key}`") for got in gots]
        rows = [Row(case, value, _bottleneck(*case)[key]) for case, value in zip(cases, given, strict=True)]
        wrong = [row for row in rows if not close(row.given, row.truth)]
        if key == "exposed":  # a difference of two times keeps their rounding
            wrong = [row for row in wrong if not abs(row.given - row.truth) <= 1e-6 * _bottleneck(*row.case)["step"]]
            refuse("", ("Exposed time cannot be negative: what hides costs nothing", any(r.given < 0 for r in wrong)))
        if wrong:
            name_the_mistake(rows, wrong, slips, _BOTTLENECK_CASE)
    for case, got in zip(cases, gots, strict=True):
        hides = bool(as_float(got["hides"], "`hides` (True or False)"))
        refuse(_BOTTLENECK_CASE.format(*case), (
            "`hides` says whether the all-reduce fits behind backward of one micro-batch, that is, nothing is exposed",
            hides != (_bottleneck(*case)["exposed"] == 0)))  # fmt: skip
    return _judge_against_record(answer)


_BOTTLENECK_CASE = "{0:.3g} parameters, {1}-byte gradients, {3} micro-batches of {2} tokens, {4} ranks"


def _bottleneck(
    params: int, grad_bytes: int, tokens: int, micro_batches: int, ranks: int, flops: float, bandwidth: float
) -> dict[str, float]:
    size = params * grad_bytes
    sent = ring_all_reduce_bytes(size, ranks)
    communication, backward = sent / bandwidth, 4 * params * tokens / flops
    compute, exposed = 1.5 * backward * micro_batches, max(0.0, communication - backward)
    found = {"size": size, "bytes_sent": sent, "communication": communication, "backward": backward, "exposed": exposed}
    found |= {"compute": compute, "step": compute + exposed}
    names = ("params", "grad_bytes", "tokens", "micro_batches", "ranks", "flops", "bandwidth")
    asked = (params, grad_bytes, tokens, micro_batches, ranks, flops, bandwidth)
    return found | dict(zip(names, asked, strict=True))


def _by(sentence: str, mistaken: Callable[[SimpleNamespace], float]) -> Slip:
    """A mistake as a function of what is asked and of the right answer, by name."""
    return sentence, lambda *case: mistaken(SimpleNamespace(**_bottleneck(*case)))


_REVERSED = "The other way round: exposed is what communication has more than backward"
_BOTTLENECK_SLIPS: dict[str, list[Slip]] = {
    "bytes_sent": [
        *(_by("A rank sends more than the gradient once: 2(n-1)/n times, nearly twice",
              lambda t, least=least: t.size * (t.ranks >= least)) for least in (1, 2)),
        _by("That is one half of an all-reduce; the all-gather sends as much again", lambda t: t.bytes_sent / 2),
        _by("The factor is 2(n-1)/n, and not yet 2; one rank has nobody to send to", lambda t: 2 * t.size),
        _by("Bytes on a ring do not grow with n: a rank sends chunks of 1/n", lambda t: t.bytes_sent * t.ranks),
        _by("Bytes on a ring do not grow with n, nor does the all-gather send all of it",
            lambda t: (t.ranks - 1) * t.size),
        _by("That is the gradient's share of one rank; each rank sends 2(n-1) such chunks", lambda t: t.size / t.ranks),
        _by("Communication does not grow with the tokens, gradients are as many", lambda t: t.bytes_sent * t.tokens),
        _by("Under `no_sync` the gradients leave once a step, however many micro-batches it has",
            lambda t: t.bytes_sent * t.micro_batches),
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
        _by("A rank's bytes go over its own link alone, whose bandwidth does not grow with n", lambda t: t.communication / t.ranks),
        _by("`bytes_sent` are those of the whole step already", lambda t: t.communication * t.micro_batches),
        _by("A rank does not send the gradient once: divide `bytes_sent` by the bandwidth", lambda t: t.size / t.bandwidth),
        _by("Seconds, not milliseconds", lambda t: t.communication * 1e3),
        _by("`bytes_sent` holds both halves of the all-reduce already", lambda t: t.communication * 2),
    ],
    "exposed": [
        _by("That is all of the communication, as if nothing overlapped", lambda t: t.communication),
        _by("Ideal overlap hides as much as backward covers, and not always all of it", lambda t: 0.0),
        _by("That is the part that hides; exposed is the other one", lambda t: min(t.communication, t.backward)),
        _by(_REVERSED, lambda t: max(0.0, t.backward - t.communication)),
        _by(_REVERSED, lambda t: abs(t.backward - t.communication)),
        _by("Communication hides behind backward only: no gradient exists during forward",
            lambda t: max(0.0, t.communication - 1.5 * t.backward)),
        _by("Communication hides behind backward, which takes twice as long as forward",
            lambda t: max(0.0, t.communication - t.backward / 2)),
        _by("Gradients are final in the last micro-batch's backward, and only this one can hide their all-reduce",
            lambda t: max(0.0, t.communication - t.micro_batches * t.backward)),
        _by("Gradients are final in backward of the last micro-batch: neither the others nor forward can hide anything",
            lambda t: max(0.0, t.communication - t.compute)),
        _by("Each rank has its own tokens: its backward does not get shorter with their number",
            lambda t: max(0.0, t.communication - t.backward / t.ranks)),
        _by("All or nothing is exposed only where nothing overlaps: what backward covers is hidden",
            lambda t: t.communication if t.exposed else 0.0),
        _by("That is the length of an overlapped step, not what backward leaves",
            lambda t: max(t.communication, t.backward)),
        _by("That is the length of a step without overlap, not what backward leaves",
            lambda t: t.communication + t.backward),
        _by("Exposed is in seconds, and not a share", lambda t: t.exposed / t.communication if t.communication else 0.0),
    ],
    "step": [
        _by("Forward computes too: 6 FLOPs per parameter and token, 4 of them backward",
            lambda t: t.backward * t.micro_batches + t.exposed),
        _by("A step computes all of its micro-batches", lambda t: 1.5 * t.backward + t.exposed),
        _by("What hides is not added: a step is computation and what is exposed", lambda t: t.compute + t.communication),
        _by("That is the computation alone; what is exposed comes on top", lambda t: t.compute),
        _by("All micro-batches compute, but only backward of the last has an all-reduce beside it",
            lambda t: max(t.compute, t.communication)),
        _by("What is exposed is exposed once a step, behind the last micro-batch",
            lambda t: t.compute + t.micro_batches * t.exposed),
        _by("`tokens` is already the share of one rank: do not divide it again", lambda t: t.compute / t.ranks + t.exposed),
        _by("Seconds, not milliseconds", lambda t: t.step * 1e3),
    ],
}  # fmt: skip


def _ask_bottleneck(answer: Callable[..., object], *case: float) -> Mapping[str, Any]:
    return by_name(answer(*case), "bytes_sent", "communication", "exposed", "step", "hides")


def _judge_against_record(answer: Callable[..., Mapping[str, float]]) -> str:
    """Predict the recorded steps that did not calibrate the link, and hold them to the measurement."""
    record = recorded(RECORDING)
    if record is None:
        return "Right for 36 models and links. No run is recorded yet to compare with."
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
        got = _ask_bottleneck(
            answer, row["params"], row["grad_bytes"], row["tokens"], 1, row["ranks"], flops, bandwidth
        )
        step = row["compute"] + as_float(got["communication"])  # a Decimal adds to no float
        errors.setdefault(row["params"], []).append(abs(step / row["after backward"] - 1))
    if (error := median(each for some in errors.values() for each in some)) > 0.35:
        raise Wrong(f"Computation plus communication misses the recorded steps by {error:.0%} in the median.")
    least, most = min(errors), max(errors)
    return (
        f"Recorded steps without overlap: with {most:,} parameters your communication beside the measured computation is "
        f"within {max(errors[most]):.0%}, which is good; with {least:,} it misses {median(errors[least]):.0%}: its messages "
        "took longer than their bytes say, which is a part of it."
    )


# --- a job with something wrong -----------------------------------------------------------------------------


class StrangeJob(Sealed):
    """A job on four ranks that trains, and may have a fault; which, where and from when is drawn.

    Attributes:
        ranks: How many it runs on.
        steps: How many it takes.
    """

    ranks, steps = 4, 6

    def __init__(self, number: int):
        self._number, dice = number, random.Random(number)
        self._late = dice.choice([name for name, _ in self._module().named_parameters()])
        self._from, self._odd = dice.randrange(1, self.steps - 1), dice.randrange(1, self.ranks)
        self._case = number % 5  # 0 is healthy

    def _module(self) -> nn.Module:
        seeded = torch.Generator().manual_seed(self._number)
        module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 5)).double()
        for p in module.parameters():
            p.data.normal_(0, 0.5, generator=seeded)
        return module

    def batch(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return the examples and targets that a rank takes in a step, as many on every rank."""
        seeded = torch.Generator().manual_seed(1000 * self._number + 10 * step + rank)
        x = torch.randn(8, 6, dtype=torch.float64, generator=seeded)
        return x, (torch.sin(2 * x[:, :5]) + x[:, 1:])

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean loss of a batch."""
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def train(self, look: Callable[[int, nn.Module, tuple[Tensor, Tensor]], object] | None = None) -> list[float]:
        """Train on this rank, and return its losses; all ranks must call it.

        Args:
            look: Called in every step as `look(step, module, batch)` with the bare module, whose `.grad` are what the optimizer
                is about to step with. It may compute what it likes, collectives too.
        """
        rank, losses, module = dist.get_rank(), [], self._module()
        groups = [dist.new_group(ranks) for ranks in self._halves()]
        late = module.get_parameter(self._late).requires_grad_(False)
        model, optimizer = DistributedDataParallel(module), torch.optim.SGD(module.parameters(), lr=0.3)
        for step in range(self.steps):
            if step == self._from:
                late.requires_grad_()
                model = DistributedDataParallel(module) if self._case in (0, 2) else model
            batch = self.batch(step, rank)
            loss = self.loss(model, batch)
            loss.backward()
            if step >= self._from:
                self._averaged(late.grad, groups)
            if look is not None:
                look(step, module, batch)
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    def _halves(self) -> list[list[int]]:
        return [[0, self._odd], [r for r in range(1, self.ranks) if r != self._odd]]

    def _averaged(self, grad: Tensor, groups: list[dist.ProcessGroup]) -> None:
        """Do with one parameter's gradient what the drawn program does, beside DDP."""
        rank = dist.get_rank()
        if self._case == 2:
            dist.all_reduce(grad)
        elif self._case == 3:
            dist.all_reduce(grad.div_(2), group=groups[rank not in self._halves()[0]])
        elif self._case == 4:
            dist.all_reduce(grad.mul_((rank != self._odd) / self.ranks))

    def alone(self) -> list[float]:
        """Return the losses of one process that takes all examples; it needs no ranks."""
        module, losses = self._module(), []
        late = module.get_parameter(self._late).requires_grad_(False)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
        for step in range(self.steps):
            late.requires_grad_(step >= self._from)
            loss = torch.stack([self.loss(module, self.batch(step, rank)) for rank in range(self.ranks)]).mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    def _truth(self, rank: int) -> tuple[str, int, list[float]] | None:
        n, half = self.ranks, next(half for half in self._halves() if rank in half)
        rows = {
            1: [float(r == rank) for r in range(n)],
            2: [1.0] * n,
            3: [(r in half) / 2 for r in range(n)],
            4: [(r != self._odd) / n for r in range(n)],
        }
        return (self._late, self._from, rows[self._case]) if self._case else None


#: The cases in the order in which they are judged, before one that is new in each call; 0 is healthy.
_CASES = (1, 0, 2, 3, 4)


@check(
    idea="Whatever has happened to a gradient on its way, it is made of the gradients that the ranks computed; these you can "
    "compute again, each by itself.",
    section="Silent faults: runs that work and are wrong",
    line="In `look`, take the own gradients of all ranks for each parameter with torch.autograd.grad and all_gather, and solve "
    "for the weights with which they make up `.grad`; all must be 1/n.",
    kind="fault",
)
def find_fault(answer: Callable[[StrangeJob], object], seed: int = 2) -> str:
    """Judge `find_fault(job)`, called on each of four ranks, on jobs drawn: what is wrong, where and from when, or nothing."""
    dice = random.Random(seed)
    jobs = [5 * dice.randrange(10**6) + case for case in _CASES] + [5 * NEW.randrange(10**6) + NEW.randrange(1, 5)]
    said = ask_ranks(answer, StrangeJob.ranks, jobs, f"{__name__}.StrangeJob._truth", make=StrangeJob)
    for number, got in zip(jobs, said, strict=True):
        _judge_finding(StrangeJob(number), [_finding(each, StrangeJob.ranks) for each in got])
    return (
        f"{len(jobs)} jobs. In each, a parameter was frozen when DDP wrapped the model and unfrozen later, as fine-tuning does, "
        "and DDP averages what trained when it wrapped. One wrapped again and was healthy; the others left it to each rank, "
        "averaged it by hand among half of the ranks, or without one of them, or summed it once more."
    )


def _finding(got: object, ranks: int) -> tuple[str, int, list[float]] | None:
    if got is None:
        return None
    otherwise = "Return a parameter's name, the first step and the weights, or None for a healthy job."
    parts = by_name(got, "name", "step", "weights", otherwise=otherwise)
    if not isinstance(parts["name"], str):
        raise Wrong(otherwise)
    row = [as_float(weight, "A weight") for weight in numbers(parts["weights"], "The weights")]
    if len(row) != ranks:
        raise Wrong(f"The weights are {ranks} numbers, one for each rank's own gradient in what this rank steps with.")
    return parts["name"], whole(parts["step"], "The first step"), row


def _judge_finding(job: StrangeJob, got: list[tuple[str, int, list[float]] | None]) -> None:
    n, truth = job.ranks, [job._truth(rank) for rank in range(job.ranks)]
    if None in truth:
        refuse("", (f"This job is healthy: {job._late} begins to train in step {job._from}, and every gradient is the mean of the "
                    "ranks' own. What changes, or differs between ranks, is not wrong by that", any(got)))  # fmt: skip
        return
    name, step, _ = truth[0]
    refuse(
        "",
        ("Some ranks return a fault and others None: exchange what each has seen, and let every rank answer for itself",
         None in got and any(got)),
        ("It has a fault, and every replica holds the same weights: a comparison between ranks cannot see it. Set the gradient "
         "beside the mean of what the ranks compute by themselves", job._case in (2, 4) and None in got),
        ("It has a fault that a comparison of replicas shows: they part, in one parameter", None in got),
    )  # fmt: skip
    found = [each for each in got if each is not None]
    rows, right = [each[2] for each in found], [each[2] for each in truth if each is not None]

    def same(one: list[list[float]], other: list[list[float]]) -> bool:
        return all(abs(a - b) < 0.02 for row, o in zip(one, other, strict=True) for a, b in zip(row, o, strict=True))

    if {each[:2] for each in found} == {(name, step)} and same(rows, right):
        return
    odd, steps = next((r for r in range(n) if not same([rows[r]], [right[r]])), 0), [each[1] for each in found]
    shown = [f"{weight:.3g}" for weight in right[odd]]
    refuse(
        "",
        ("The ranks name different parameters: exchange what each has seen before you decide", len({f[0] for f in found}) > 1),
        (f"In the job it is not {found[0][0]} that goes wrong: a large or unequal gradient is not wrong by that, and backward in "
         "`look` adds to `.grad`. Look for one whose gradient is not the mean of the ranks' own", found[0][0] != name),
        (f"The parameter is right, and the first step is {step}, not {max(steps)}: one way to be late is to look at weights, which "
         "show a gradient's fault one step later", max(steps) > step),
        ("The parameter is right, and the fault begins later: before, it was frozen and had no gradient at all",
         min(steps) < step),
        ("Place and step are right. The weights say in whose steps this rank's own gradient is: say whose are in this rank's step",
         same(list(zip(*rows, strict=True)), right)),
        ("Place and step are right. You give equal weights to all ranks, as the length of a gradient suggests; its direction says "
         "whose are in it: write it as a sum of the ranks' own", job._case != 2 and all(max(row) - min(row) < 0.02 for row in rows)),
        ("Place and step are right, and all ranks return the same weights, though not all step with the same gradient: answer for "
         "the rank that runs you", same(rows, [rows[0]] * n) and not same(right, [right[0]] * n)),
        (f"Place and step are right. Rank {odd} steps with the ranks' own gradients weighed {', '.join(shown)}", True),
    )  # fmt: skip
