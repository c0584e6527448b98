"""The checks of rung 04: a 1F1B that runs, one that beats it, a model cut and trained, a wrong action, and what changed.

Two of them run an answer on real ranks. One hands out a model that nobody has cut yet, `uneven_model`, whose layers say how
they were run; the other a pipeline that may do one action wrongly, `suspect`.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
import re
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lablib.calc.schedules import (
    Action,
    Schedule,
    ScheduleError,
    Timeline,
    one_f_one_b,
    parse_action,
    parse_schedule,
    peak_activations,
    schedule,
    simulate,
    validate,
    zb_h1,
)
from lablib.checks.judging import (
    NEW,
    Sealed,
    Wrong,
    by_name,
    check,
    close,
    numbers,
    on_ranks,
    recognize,
    refuse,
    refuse_peeking,
)
from lablib.launch.measure import record_comms
from lablib.toys import transformer
from lablib.toys.pipeline import PipelineExecutor, split_stages
from lablib.toys.transformer import Transformer, tiny_config

UNIT = {"forward": 1, "input": 1, "weight": 1}


def _by_rank(got: object) -> object:
    """Return the values of a dictionary in the order of their ranks, whose keys are 2 or "rank 2"; else what it is."""
    if not isinstance(got, Mapping):
        return got
    return [got[rank] for rank in sorted(got, key=lambda rank: int(re.sub(r"\D", "", str(rank)) or -1))]


def _case(p: int, m: int) -> str:
    return f"p={p}, m={m}"


def _text(action: object) -> str:
    """Return an action or a name as text: a tuple of its three parts, named or not, unless it has a text of its own."""
    action = action.tolist() if hasattr(action, "tolist") else action
    if isinstance(action, list | tuple) and type(action).__str__ is object.__str__:
        action = "".join(_text(part).removesuffix(".0") for part in action)
    return (str.__str__(action) if isinstance(action, str) else f"{action}").strip("'\" ").upper()


def _refuse_lablibs(answer: Callable, *names: str) -> None:
    ready = rf"lablib\.(cli\.schedule\.schedule_text|calc\.schedules\.generators\.(schedule|{'|'.join(names)}))"
    for name in filter(re.compile(ready).fullmatch, getattr(answer, "called", ())):
        raise Wrong(f"`{name}` makes orders ready-made: write this one yourself, or let a program of yours search.")


# --- 1F1B --------------------------------------------------------------------------------------------------

_IDLE = {"", ".", "-", "_", ":", "NONE"}


def _rows(answer: object, p: int) -> list[list[str]]:
    """Return the cells of an answer: a text, PyTorch's CSV, or rows of text or of actions; cells that idle are dropped."""
    if isinstance(answer, Timeline):
        answer = answer.schedule
    if isinstance(answer, Schedule):
        answer = answer.ranks
    if isinstance(answer, str):
        answer = [line for line in answer.splitlines() if line.strip()]
    answer = _by_rank(answer)
    if isinstance(answer, set | frozenset) or not hasattr(answer, "__iter__"):
        raise Wrong(f"Return a list with one row of actions for each of the {p} ranks; you return {str(answer)[:80]}.")
    rows = []
    for row in answer:
        if "OVERLAP" in str(row):
            raise Wrong("A rank runs one action at a time here: a forward and a backward as one step are DualPipe's.")
        if isinstance(row, str):
            row = re.split(r"[\s,;|>]+", re.sub(r"^\s*(rank\s*)?\d+\s*:", "", row.strip("[]() "), flags=re.IGNORECASE))
        elif isinstance(row, set | frozenset | bytes) or not hasattr(row, "__iter__"):
            raise Wrong(f'A row is text, such as "0F0 0F1 0B0 0B1", or a list of actions, and not {row!r}.')
        rows.append([text for text in map(_text, row) if text not in _IDLE])
    if len(rows) != p:
        raise Wrong(f"Return one row of actions for each of the {p} ranks; you return {len(rows)}.")
    return rows


def _valid(answer: object, p: int, m: int) -> Schedule:
    """Return the learner's schedule, or say which idea keeps it from running."""
    rows = _rows(answer, p)
    told = [int(found[1]) for row in rows for cell in row if (found := re.search(r"F(-?\d+)$", cell))]
    beyond = m < p and any(number not in range(m) for number in told)
    few = f"A step of {m} micro-batches has fewer than the p - 1 - i = {p - 1} forwards that rank 0 would warm up with"
    refuse(_case(p, m), (f"{few}: it takes min(m, p - 1 - i), and no more follow", beyond))
    try:
        mine = parse_schedule(rows)
        if (mine.num_stages, mine.num_microbatches) != (p, m):
            raise Wrong(f"There are p={p} stages and m={m} micro-batches, counted from 0; yours has {mine.num_stages} and "
                        f"{mine.num_microbatches}.")  # fmt: skip
        elsewhere = next((i for i, rank in enumerate(mine.placement) if rank != i), 0)
        told = f"Stage i belongs to rank i; in your rows stage {elsewhere} runs on rank {mine.placement[elsewhere]}"
        refuse(_case(p, m), (told, mine.placement[elsewhere] != elsewhere))
        validate(mine)
    except ScheduleError as error:
        reason = "; ".join(line.strip() for line in error.reason.splitlines())
        raise Wrong(f"It cannot run (p={p}, m={m}): {reason[:250]}.") from None
    except ValueError as error:
        raise Wrong(f"It cannot be read (p={p}, m={m}): {str(error).splitlines()[0][:250]}.") from None
    return mine


@check(
    idea="A rank warms up with as many forwards as there are ranks behind it, so that the last one never runs dry.",
    section="1F1B: GPipe's bubble with less memory",
    line="Take min(m, p - 1 - i) forwards, then a forward and a backward in turn, then the backwards that are left.",
)
def one_f_one_b_schedule(answer: Callable[[int, int], object]) -> str:
    """Judge `one_f_one_b_schedule(p, m)`: a valid schedule, no slower than 1F1B and no fuller."""
    cases = [(2, 3), (3, 5), (1, 3), (4, 4), (4, 8), (4, 2), (6, 13), (NEW.randint(5, 9), NEW.randint(90, 200))]
    for p, m in cases:
        _judge_1f1b(answer(p, m), p, m)
    _refuse_lablibs(answer, "one_f_one_b", "interleaved", "zb_h1")
    return f"{len(cases)} pipelines; p=4, m=8 takes 33, as GPipe does, and holds 4, 3, 2, 1."


def _judge_1f1b(answer: object, p: int, m: int) -> None:
    mine = _valid(answer, p, m)
    held, right = peak_activations(mine), peak_activations(one_f_one_b(p, m))
    fuller = next((i for i in range(p) if held[i] > right[i]), 0)
    took, needed = simulate(mine).makespan, simulate(one_f_one_b(p, m)).makespan
    refuse(
        _case(p, m),
        ("1F1B runs whole backwards, B; I and W are what zero bubble adds",
         any(action.kind in "IW" for rank in range(p) for action in mine.actions(rank))),
        (f"It runs, and it is GPipe: all forwards first, so every rank holds m={m}; start a backward as soon as there is one",
         m > p and all(count == m for count in held)),
        (f"It runs, but rank {fuller} holds {held[fuller]:g} micro-batches where 1F1B holds {right[fuller]:g}: there "
         f"forwards are at most p - i = {p - fuller} ahead of backwards", held[fuller] > right[fuller]),
    )  # fmt: skip
    if took <= needed + 1e-9:
        return
    slow = f"It runs, but takes {took:g} forward times where 1F1B takes {needed:g}"
    for rank in range(p):
        forwards, backwards = ([a.microbatch for a in mine.actions(rank) if a.kind == kind] for kind in "FB")
        told = f"rank {rank} goes forward in the order {forwards[:4]} and backward in the order {backwards[:4]}, ..."
        refuse(_case(p, m), (
            f"{slow}: {told}; the oldest has its gradient first, a queue and not a stack", forwards != backwards))  # fmt: skip
        refuse(_case(p, m), (
            f"{slow}: rank {rank} holds {held[rank]:g} micro-batches at most, and 1F1B {right[rank]:g}; with fewer forwards "
            "in front of its first backward it waits for a gradient in every round", held[rank] < right[rank]))  # fmt: skip
    raise Wrong(f"{slow} ({_case(p, m)}).")


# --- better than 1F1B --------------------------------------------------------------------------------------


@check(
    idea="The rank before you waits only for the gradient of your input, which is half of your backward.",
    section="Zero bubble: the backward in two halves",
    line="Write I and then W where 1F1B has B; for ZB-H1 let the W of a micro-batch follow the I of the one i later on rank i.",
)
def beat_1f1b(answer: Callable[[int, int], object]) -> str:
    """Judge `beat_1f1b(p, m)`: shorter than 1F1B where F, I and W take 1 each, and at most p held on any rank."""
    score = ""
    for p, m in ((2, 4), (4, 2), (3, 6), (4, 8), (5, 10), (NEW.randint(3, 7), NEW.randint(50, 90))):
        mine, rival = _within_memory(answer(p, m), p, m), simulate(one_f_one_b(p, m), **UNIT)
        whole = any(event.action.kind == "B" for event in mine.events)
        told = "let the rank before you have its gradient first, and do your weights after it" if whole else (
            "its backwards are in halves, and its ranks wait as long or longer")  # fmt: skip
        slow = f"It takes {mine.makespan:g}, no less than the {rival.makespan:g} of 1F1B: {told}"
        refuse(_case(p, m), (slow, mine.makespan >= rival.makespan))
        if (p, m) == (4, 8):
            best = simulate(zb_h1(p, m), **UNIT).makespan
            more = "" if mine.makespan <= best else (
                ". In ZB-H1 the last ranks keep weight halves for their wait at the end")  # fmt: skip
            score = f"p=4, m=8: {mine.makespan:g} against {rival.makespan:g} of 1F1B and {best:g} of ZB-H1{more}."
    _refuse_lablibs(answer, "zb_h1")
    return score


def _within_memory(answer: object, p: int, m: int) -> Timeline:
    mine = simulate(_valid(answer, p, m), **UNIT)
    fullest = max(mine.peak_in_flight)
    if fullest > p:
        raise Wrong(
            f"It takes {mine.makespan:g}, but rank {mine.peak_in_flight.index(fullest)} holds {fullest:g} micro-batches "
            f"from F until W, and may hold at most {p} ({_case(p, m)})."
        )
    return mine


# --- a model, cut and trained ------------------------------------------------------------------------------

_HIDDEN, _WORDS, _SEQ = 8, 24, 6


class Layer(nn.Module):
    """An MLP that remembers how it was run.

    Attributes:
        rows: Sequences of the largest forward; 0 if it has not run.
        most: Most forwards whose gradient was still to come.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(_HIDDEN), nn.Linear(_HIDDEN, width), nn.Linear(width, _HIDDEN)
        self.rows = self.most = self._later = 0
        self._held: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream with what this layer adds."""
        call, told = nn.Identity(), str(x.detach())  # lives with this forward's graph; the same where it is run again
        self._held[told] = call
        graph = torch.is_grad_enabled()
        self._later -= graph and self._later > 0  # a forward without a graph is run again for its backward
        self.rows, self.most = max(self.rows, len(x)), max(self.most, len(self._held) + self._later)
        self._later += not graph
        y = x + self.down(functional.gelu(self.up(self.norm(x))))
        if y.requires_grad:
            y.register_hook(lambda _, call=call: self._held.pop(told, None) and None)
        return y


class UnevenModel(nn.Module):
    """Layers of unequal width; a tied head has the words' matrix."""

    def __init__(self, widths: Sequence[int], tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _HIDDEN)
        self.places = nn.Parameter(torch.randn(_SEQ, _HIDDEN) / 2)
        self.layers = nn.ModuleList(Layer(width) for width in widths)
        self.norm = nn.LayerNorm(_HIDDEN)
        self.head = nn.Linear(_HIDDEN, _WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, (batch, seq, words)."""
        x = self.words(tokens) + self.places[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def uneven_model(seed: int, p: int = 3) -> tuple[UnevenModel, dict]:
    """Return a model, tied if `seed` is even, and the forward times of its parts, for which equal cuts are bad on p ranks.

    Returns:
        The model; {"words": ms, "layers": [ms, ...], "head": ms}.
    """
    dice = random.Random(seed)
    while True:
        layers = [dice.choice((1, 2, 2, 3, 5, 6)) for _ in range(dice.randint(7, 9))]
        times = {"words": dice.choice((1, 2, 3)), "layers": layers, "head": dice.choice((4, 5, 7))}
        cuts = _cuts(times, p)
        best, *others = (_longest(times, sizes) for sizes in cuts)
        if min(others) > 1.1 * best and cuts[1] != cuts[2]:
            torch.manual_seed(seed)
            return UnevenModel([4 * each for each in layers], tied=seed % 2 == 0), times


def _cuts(times: Mapping, p: int) -> list[list[int]]:
    """Return the numbers of layers of p stages: the best, equal ones, and the luckiest of those that forget the head."""
    count = len(times["layers"])
    cuts = itertools.combinations(range(1, count), p - 1)
    every = [[b - a for a, b in itertools.pairwise((0, *cut, count))] for cut in cuts]
    best, no_head = (
        min(every, key=lambda sizes: (_longest(times | told, sizes), _longest(times, sizes)))
        for told in ({}, {"head": 0})
    )
    return [best, [(r + 1) * count // p - r * count // p for r in range(p)], no_head]


def _longest(times: Mapping, sizes: Sequence[int]) -> float:
    layers, stages = iter(times["layers"]), []
    for size in sizes:
        stages.append(sum(itertools.islice(layers, size)))
    stages[0] += times["words"]
    stages[-1] += times["head"]
    return max(stages)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _batch(seed: int, m: int) -> tuple[Tensor, Tensor]:
    windows = torch.randint(_WORDS, (2 * m, _SEQ + 1), generator=torch.Generator().manual_seed(seed))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@check(
    idea="A stage is some of the model's own modules, each of which runs on one rank; the slowest stage sets the pace.",
    section="torch.distributed.pipelining: the same schedules in PyTorch",
    line="Count the words into the first stage and the head into the last, try all cuts, hand the stage to PipelineStage and "
    "Schedule1F1B, and sum the gradients of a tied weight over the two ends.",
    kind="work",
)
def train_in_stages(answer: Callable[..., object]) -> str:
    """Judge `train_in_stages(model, times, tokens, targets, m, loss)`: one step of 1F1B on three ranks, beside one process."""
    cases, p = [(6, 4), (7, 6), (8, 5), (2 * NEW.randrange(50, 10**6), 4)], 3
    by_rank, longest = on_ranks(_train, p, answer, cases), []
    for (seed, m), runs in zip(cases, zip(*by_rank, strict=True), strict=True):
        ran, gradients, losses, talks = zip(*runs, strict=True)
        times = uneven_model(seed, p)[1]
        longest.append(_judge_cut(ran, times, m, talks))
        _judge_gradients(ran, gradients, losses[-1], seed, m)
    told = ", ".join(f"{mine:g} ms for {best:g}" for mine, best in longest)
    return f"Gradients of one process from three ranks, for models that nobody had cut; the longest stage takes {told}."


def _train(answer: Callable[..., object], cases: Sequence) -> list[tuple]:
    """Return for each case what a rank ran of each layer, its gradients, its loss, and whether it spoke with others."""
    found, run = [], threading.Thread.run
    for seed, m in cases:
        model, times = uneven_model(seed, dist.get_world_size())
        layers, named = list(model.layers), dict(model.named_parameters())  # an answer may delete some
        with record_comms() as log, mock.patch.object(threading.Thread, "run", record_comms(log)(run)):
            loss = answer(model, times, *_batch(seed, m), m, mean_loss)
        ran = {k: (layer.rows, layer.most) for k, layer in enumerate(layers) if layer.rows}
        try:
            loss = float(loss)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError):  # None, or several
            loss = None
        gradients = {name: w.grad for name, w in named.items() if w.grad is not None}
        found.append((ran, gradients, loss, bool(log.events)))
    return found


def _judge_cut(ran: Sequence[Mapping], times: Mapping, m: int, talks: Sequence[bool]) -> tuple[float, float]:
    """Return the longest stage and the best one, if every layer ran on one rank, by micro-batches, as in 1F1B."""
    p, count = len(ran), len(times["layers"])
    where, homes = f"{p} ranks, m={m}", [[rank for rank in range(p) if k in ran[rank]] for k in range(count)]
    held = [max((most for _, most in layers.values()), default=p - rank) for rank, layers in enumerate(ran)]
    odd = next((rank for rank in range(p) if held[rank] != p - rank), 0)
    why = "its forwards run too far ahead of backwards" if held[odd] > p - odd else "with fewer it waits in every round"
    largest = max((rows for layers in ran for rows, _ in layers.values()), default=0)
    shared = max(range(count), key=lambda k: len(homes[k]))
    lost = min(range(count), key=lambda k: len(homes[k]))
    order = [ranks[0] for ranks in homes if ranks]
    refuse(
        where,
        (f"Layer {lost} of `model` runs on no rank: it is left out, or a copy runs in its place, and a stage takes the model's "
         "own modules", not homes[lost]),
        (f"Layer {shared} runs on {len(homes[shared])} ranks: in a pipeline a layer lives on one rank, and the next rank gets "
         "what it computed as a message", len(homes[shared]) > 1),
        (f"Layers 0 to {count - 1} run on ranks {order}: a stage is neighbouring layers, and rank 0 has the first of them",
         order != sorted(order)),
        ("A rank sends and gets nothing, and in a pipeline stages hand on what they computed", not all(talks)),
        (f"The largest piece that a rank computes has {largest} sequences, and each of the m micro-batches has 2: in larger "
         "pieces stages wait longer, in smaller ones they send more messages", largest != 2),
        ("One micro-batch is finished before the next begins, so one rank works at a time", max(held) == 1),
        (f"Rank {odd} holds {held[odd]} micro-batches at most, and 1F1B p - i = {p - odd}: {why}", held[odd] != p - odd),
    )  # fmt: skip
    sizes, (best, equal, no_head) = [len(layers) for layers in ran], _cuts(times, p)
    mine, right = _longest(times, sizes), _longest(times, best)
    told = f"Stages of {', '.join(map(str, sizes))} layers take {mine:g} ms at most, and {right:g} can be had"
    refuse(
        where,
        (f"{told}: equal numbers of layers are not equal times", (late := mine > 1.05 * right) and sizes == equal),
        (f"{told}: the head is work of the last stage, and the words are of the first",
         late and _longest(times | {"head": 0}, sizes) == _longest(times | {"head": 0}, no_head)),
        (f"{told}: every rank waits for the slowest stage in every round", late),
    )  # fmt: skip
    return mine, right


def _judge_gradients(
    ran: Sequence[Mapping], gradients: Sequence[Mapping], loss: float | None, seed: int, m: int
) -> None:
    right, halves, right_loss = _alone(seed, m)
    p, where = len(ran), f"{len(ran)} ranks, m={m}"
    for name, whole in right.items():
        layer = int(name.split(".")[1]) if name.startswith("layers.") else None
        tied = name in halves
        homes = (0, p - 1) if tied else [next(r for r in range(p) if layer in ran[r])] if layer is not None else [
            0 if name in ("words.weight", "places") else p - 1]  # fmt: skip
        for rank in homes:
            mine = gradients[rank].get(name)
            if mine is None:
                may = "it may have been left out or copied, or its gradient cleared"
                raise Wrong(f"`{name}` has no gradient on rank {rank}, whose stage needs it: {may} ({where}).")
            refuse(
                where,
                (f"The one matrix of words and head has half of its gradient on rank {rank}: each end of the pipeline has a "
                 "copy, and without the sum of both they drift apart", tied and any(_alike(mine, h) for h in halves[name])),
                ("The copies of the tied matrix get the sum of both ends, not their mean", tied and _alike(2 * mine, whole)),
                (f"The gradients of rank {rank} are divided by m once too often; PyTorch's schedule divides those of a loss that "
                 "is a mean over a micro-batch", _alike(m * mine, whole)),
                (f"The gradients of rank {rank} are sums over the micro-batches, and the step needs their mean",
                 _alike(mine / m, whole)),
                (f"`{name}` on rank {rank} has another gradient than in one process", not _alike(mine, whole)),
            )  # fmt: skip
    refuse(
        where,
        ("The last rank knows the losses of the micro-batches: return their mean there", loss is None),
        ("That is the sum of the losses of the micro-batches; return their mean", lambda: close(loss, m * right_loss, rel=1e-4)),
        ("The loss is not that of one process", lambda: not close(loss, right_loss, rel=1e-4)),
    )  # fmt: skip


def _alone(seed: int, m: int) -> tuple[dict, dict, float]:
    """Return one process's gradients, the halves of those that are tied, and the loss."""
    model, _ = uneven_model(seed)
    tied = model.head.weight is model.words.weight
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    tokens_BS, targets_BS = _batch(seed, m)
    loss = mean_loss(model(tokens_BS), targets_BS)
    loss.backward()
    right = {name: weight.grad for name, weight in model.named_parameters()}
    halves = {"words.weight": (right["words.weight"], right.pop("head.weight"))} if tied else {}
    return right | {name: sum(both) for name, both in halves.items()}, halves, loss.item()


def _alike(mine: Tensor, right: Tensor) -> bool:
    """Say whether two gradients agree but for the rounding of fp32 sums in another order."""
    return bool((mine - right).abs().max() <= 1e-4 * right.abs().max())


# --- an action that goes wrong -----------------------------------------------------------------------------


class _Slipping(PipelineExecutor):
    """A pipeline, one action of which reads or adds something else than it should.

    Attributes:
        slips: How the action `where` goes wrong, a key of `SLIPS`.
    """

    slips, where = "", Action("F", 0, 0)

    def _run(self, action: Action, message: Tensor | None) -> Tensor | None:
        k, batch, before = action.microbatch, self.microbatches, None
        if self.slips and action == self.where:
            before = [None if weight.grad is None else weight.grad.clone() for weight in self.parameters()]
            if self.slips == "target" or (self.slips == "reads" and message is None):
                self.microbatches = [*batch[:k], batch[k - 1], *batch[k + 1 :]]
            elif self.slips == "reads":
                message = self.earlier
        elif message is not None and action.kind == self.where.kind:
            self.earlier = message.detach().clone()
        result = super()._run(action, message)
        self.microbatches = batch
        if before and self.slips == "adds":
            for weight, grad in zip(self.parameters(), before, strict=True):
                weight.grad = grad
        return result


#: What a pipeline that slips does, for the reveal.
SLIPS = {
    "": "every action does what it should",
    "reads": "{0} reads what was meant for micro-batch {1}",
    "target": "{0} has the targets of micro-batch {1}",
    "adds": "{0} adds nothing to the weights of its stage",
}


class Suspect(Sealed):
    """This rank's part of a pipeline of one stage a rank, which may do one action of every step wrongly.

    Attributes:
        model: The whole model, with the weights that the stages have, for one process.
        stage: The module of this rank's stage, from `split_stages`.
        microbatches: What `step` trains on, windows_BT, the same on every rank.
    """

    def __init__(self, seed: int, p: int, m: int) -> None:
        dice, torch_dice = random.Random(seed), torch.Generator().manual_seed(seed)
        slips, kind = (("reads", "F"), ("adds", "B"), ("", "F"), ("target", "F"), ("reads", "B"), ("adds", "B"))[
            seed % 6
        ]
        # The gradient that the last stage starts from is no message, so it reads no other one.
        stage = p - 1 if slips == "target" else dice.randrange(p - ((slips, kind) == ("reads", "B")))
        torch.manual_seed(seed)
        whole = Transformer(tiny_config("gpt2", num_layers=p, hidden=16, tied=False))
        self.model = copy.deepcopy(whole)
        self.microbatches = [torch.randint(whole.config.vocab, (1, 9), generator=torch_dice) for _ in range(m)]
        self._pipeline = _Slipping(split_stages(whole, p), one_f_one_b(p, m))
        self._pipeline.slips, self._pipeline.where = slips, Action(kind, stage, dice.randrange(1, m))
        self.stage = self._pipeline.stages[dist.get_rank()]

    def step(self) -> list[float]:
        """Run one step, leave its gradients in `stage`, and return the micro-batches' losses on the last rank, [] elsewhere."""
        self.stage.zero_grad()
        self._pipeline.step(self.microbatches)
        return [len(self.microbatches) * loss.item() for loss in self._pipeline.losses]

    def alone(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what every action reads in one process, and what every backward adds to its stage's weights, flat.

        Keys are actions, as in "2F5". A backward reads the gradient of its stage's output, the last one that of the logits.
        """
        stages, reads, adds = split_stages(self.model, len(self._pipeline.schedule.ranks)), {}, {}
        for k, windows_BT in enumerate(self.microbatches):
            x = windows_BT[:, :-1]
            for number, stage in enumerate(stages):
                reads[f"{number}F{k}"] = x.detach()
                reads[f"{number}B{k}"] = x = stage(x)
                x.retain_grad()
            self.model.zero_grad()
            (transformer.loss(x, windows_BT) * (1 / len(self.microbatches))).backward()
            for number, stage in enumerate(stages):
                reads[f"{number}B{k}"] = reads[f"{number}B{k}"].grad
                adds[f"{number}B{k}"] = torch.cat([weight.grad.flatten() for weight in stage.parameters()])
        return reads, adds

    def reveal(self) -> str:
        """Return what this pipeline does wrongly, for whoever has found it."""
        where = self._pipeline.where
        return SLIPS[self._pipeline.slips].format(where, where.microbatch - 1) + "."


def suspect(seed: int, m: int = 6) -> Suspect:
    """Return this rank's part of a pipeline over all ranks; call it on each of them."""
    return Suspect(seed, dist.get_world_size(), m)


@check(
    idea="What goes wrong is handed on, so compare what every action reads and adds with one process, and ask which was first.",
    section="Stage boundaries: messages, balance, tied weights",
    line="Note with hooks what each forward and each backward of the stage reads, gather what differs, take the lowest stage of "
    "forwards, else the highest of backwards, else the micro-batch whose gradient a stage's weights lack.",
    kind="fault",
)
def find_wrong_action(answer: Callable[[Suspect], object]) -> str:
    """Judge `find_wrong_action(pipeline)`, called on each of four ranks: the first wrong action, None in a healthy pipeline."""
    seeds, p, m = [*range(30, 36), 6 * NEW.randrange(10**5) + NEW.choice((0, 1, 3, 4, 5))], 4, 5  # no healthy one
    by_rank = on_ranks(_search, p, answer, seeds, m)
    for found in zip(*by_rank, strict=True):
        _judge_found({said for said, *_ in found if said}, *found[0][1:], p)
    return (
        f"{len(seeds)} pipelines. You meet them as a buffer that is written again before its message was read, as a micro-batch "
        "whose gradients are skipped, and as two data loaders, one at each end, that are out of step."
    )


def _search(answer: Callable[[Suspect], object], seeds: Sequence[int], m: int) -> list[tuple[str, str, str]]:
    found = []
    for seed in seeds:
        pipeline = suspect(seed, m)
        said = _text(answer(pipeline))
        found.append(("" if said == "NONE" else said, str(pipeline._pipeline.where), pipeline._pipeline.slips))
    refuse_peeking(answer, f"{__name__}.Suspect.reveal")
    return found


def _judge_found(said: set[str], truth: str, slips: str, p: int) -> None:
    if said == ({truth} if slips else set()):
        return
    strange = next((each for each in said if not re.fullmatch(r"\d+[FB]\d+", each)), "")
    refuse(
        "",
        (f"Return a forward or a whole backward, such as '2F5', or None; {strange[:40]!r} is neither", strange),
        (f"Two ranks name two actions, {' and '.join(sorted(said)[:2])}: what goes wrong on one is handed to its neighbours, so "
         "the ranks have to compare what they saw", len(said) > 1),
        ("You name an action of a healthy pipeline: what its actions read and add is one process's, but for rounding", not slips),
        (f"You find nothing where {truth} goes wrong. A loss says nothing of the backwards of its step, and what a stage reads "
         "nothing of what it adds to its weights: look at all three", not said),
    )  # fmt: skip
    (mine,) = said
    (kind, stage, k), right = parse_action(mine), parse_action(truth)
    refuse(
        "",
        (f"Micro-batch {k} is not the one that goes wrong; {right.microbatch} is", k != right.microbatch),
        (f"{mine} follows from an earlier mistake: the loss belongs to the last stage's forward, and the gradient at the logits "
         "is wrong because of it", (kind, stage, right.kind, right.stage) == ("B", p - 1, "F", p - 1)),
        (f"{mine} did what it should: the value that its neighbour read is not the one that it computed, so the neighbour's "
         "action is the first wrong one", (slips, kind, stage - right.stage) == ("reads", right.kind, -1 if kind == "F" else 1)),
        (f"{mine} is not it: every action reads what it should, and one adds nothing to its stage's weights", slips == "adds"),
        (f"{mine} did what it should: a wrong value is handed on, forward down the pipeline and backward up, and not to it",
         right.kind == "B" or stage < right.stage if kind == "F" else right.kind == "B" and stage > right.stage),
        (f"{mine} is not the first wrong action: a wrong value is handed on, forward down the pipeline and backward up", True),
    )  # fmt: skip


# --- Done when ---------------------------------------------------------------------------------------------

#: What was changed, and what one sees of it.
CHANGES = {
    "1f1b for gpipe": "the ranks work and wait as long as before and hold less, so only the order of the same work changed",
    "more micro-batches": "the ranks work longer and wait as long as before: filling and draining the pipeline takes what it took",
    "smaller micro-batches": "the work is the same in more pieces: twice the messages, half the wait, and no rank holds more",
    "more stages a rank": "a micro-batch crosses more boundaries, the waits are shorter, and rank 0 holds more than before",
    "backward in halves": "the waits are shorter with the same work and the same messages, and it is the late ranks that hold more",
    "more ranks": "there are more ranks, each with fewer layers, and a longer way to the last one",
}


@check(
    idea="Ask of each number what it depends on: work on m, idle time on the way through the pipeline, memory on the order.",
    section="Choosing p, m and v",
    line="Compare the ranks, the work, the idle time, the messages and what rank 0 holds, in this order, and name the change.",
)
def explain_1f1b(answer: Callable[[Mapping, Mapping], Mapping[str, object]], seed: int = 11) -> str:
    """Judge `explain_1f1b(before, after)`: what one change did to a run, and what twice the micro-batches would do."""
    cases = _changed(seed) + NEW.sample(_changed(NEW.randrange(10**6)), 6)
    for change, before, after, name, more in cases:
        asked = "changed", "schedule", "idle_over_total", "held"
        got = by_name(answer(copy.deepcopy(before), copy.deepcopy(after)), *asked)
        seen = f"with {len(before['busy'])} ranks of {before['schedule']}"
        said = " ".join(_text(got["changed"]).lower().replace("_", " ").split())
        if said not in CHANGES:
            raise Wrong(f"`changed` is one of {', '.join(map(repr, CHANGES))}, and not {got['changed']!r}.")
        if said != change:
            raise Wrong(f"{seen.capitalize()} you say {got['changed']!r}, but {CHANGES[change]}.")
        said = re.sub(r"[\W_]", "", _text(got["schedule"]).lower())
        if said.replace("interleaved1f1b", "interleaved") != name.replace("-", ""):
            raise Wrong(f"After {change!r} {seen} the schedule is {name}, and you say {got['schedule']!r}.")
        _judge_more(got, after, name, more)
    return f"{len(cases)} changes explained, and what each run would do with twice the micro-batches."


@functools.lru_cache(maxsize=4)
def _changed(seed: int) -> list[tuple]:
    dice = random.Random(seed)
    names = ["gpipe", "1f1b", "interleaved"]
    only = {"1f1b for gpipe": "gpipe", "more stages a rank": "1f1b", "backward in halves": "1f1b"}
    cases = [_observed(change, only.get(change, name), dice) for change in CHANGES for name in names]
    return dice.sample(cases, len(cases))


def _observed(change: str, name: str, dice: random.Random) -> tuple[str, dict, dict, str, Timeline]:
    """Return a change, what one sees of a run before and after it, its schedule, and the run with twice the micro-batches."""
    p = dice.randint(2, 6)
    m = 2 * p * dice.randint(1, 2)
    forward, size = dice.randint(4, 40) / 256, dice.randint(2, 16) / 4  # sums of such numbers are exact
    before = _run(name, p, m, forward, size)
    if change == "1f1b for gpipe":
        after = _run("1f1b", p, m, forward, size)
    elif change == "more micro-batches":
        after = _run(name, p, 2 * m, forward, size)
    elif change == "smaller micro-batches":
        after = _run(name, p, 2 * m, forward / 2, size / 2)
    elif change == "more stages a rank":
        after = _run("interleaved", p, m, forward, size)
    elif change == "backward in halves":
        after = _run("zb-h1", p, m, forward, size)
    else:
        after = _run(name, 2 * p, 2 * m, forward / 2, size / 2)
        before = _run(name, p, 2 * m, forward, size)
    return change, before[0] | {"schedule": name}, after[0], after[1], after[2]


def _run(name: str, p: int, m: int, forward: float, size: float) -> tuple[dict, str, Timeline]:
    """Return what one sees of a step, its schedule, and the step with twice the micro-batches of the same size."""
    v = 2 if name == "interleaved" else 1
    times = {"forward": forward, "input": 1.25 * forward, "weight": 0.75 * forward}
    once, twice = (simulate(schedule(name, p, count, v), **times) for count in (m, 2 * m))
    # Between I and W a part of a micro-batch stays, as chapter 04 counts it.
    held = [size * count for count in peak_activations(once.schedule, after_input=0.5)]
    seen = {"busy": list(once.busy), "idle": list(once.idle), "held": held, "messages": 2 * m * (p * v - 1)}
    return seen, name, twice


def _judge_more(got: Mapping[str, object], after: Mapping, name: str, more: Timeline) -> None:
    idle, held = got["idle_over_total"], numbers(_by_rank(got["held"]), "held")
    busy, waits, right = after["busy"][0], after["idle"][0], more.bubble_over_total
    if not close(idle, right):
        what = f"Idle time over total time with twice the micro-batches ({name})"
        slips = [
            ("that is percent; return a share, so that one is all of the time", 100 * right),
            ("that is the share of `after` as it is; the work doubles, the wait does not", waits / (busy + waits)),
            ("you have it over the ideal time: the total time has the wait in it, too", waits / (2 * busy)),
        ]
        rounded = close(idle, right, rel=2e-3) or any(close(idle, round(right, digits)) for digits in (2, 3))
        recognize(idle, "", [(f"{what}: {why}", value) for why, value in slips])
        refuse("", (f"{what}: right but for rounding; return the number as it is", rounded))
        raise Wrong(f"{what}: a rank works twice the {busy:.4g} s and waits the same {waits:.4g} s.")
    grows = 2 if name == "gpipe" else 1
    if len(held) != len(after["held"]):
        raise Wrong(f"`held` has one number for each of the {len(after['held'])} ranks; yours has {len(held)}.")
    wrong = [(i, seen) for i, seen in enumerate(after["held"]) if not close(held[i], grows * seen)]
    if wrong:
        what, (i, seen) = "What the ranks hold with twice the micro-batches of the same size", wrong[0]
        other = not all(close(mine, (3 - grows) * seen) for mine, seen in zip(held, after["held"], strict=True))
        refuse("", (f"{what}: rank {i} has {seen:g} GB now and would have {grows * seen:g}, not {held[i]}", other))
        refuse("", (f"{what}: GPipe holds every micro-batch of the step, so twice as many", name == "gpipe"))
        raise Wrong(f"{what}: under {name} a rank goes backward as soon as it can, so it holds what it held.")
