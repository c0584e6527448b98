"""Random modules, optimizers and habits, thrown at the data-parallel toys and held to one process in float64.

    found = attack([draw(seed, number) for number in range(100)], ranks=2)
    failures(found)         # {} if every case was equal to one process, or refused in a sentence that may refuse it

A case is drawn from a seed and its number, so `draw(seed, number)` brings it back. Ranks start once for many cases; where
one of them ends or hangs, that case has failed, and new ranks take the cases after it.

Tolerance. Both sides start from the same weights and see the same rows. Sums are made in another order, so a gradient
differs by about 1e-15 in float64, and by about 1e-6 if a layer computes in float32, as the one process never does. AdamW
with lr=1e-2 and eps=1e-2 makes of an error in the gradient at most lr / eps = 1 times that error in the weight, in a step;
SGD with lr=0.01 and momentum 0.9 at most 0.01 / (1 - 0.9) = 0.1 times. A norm over few values can pass an error on ten
times larger, in each of at most four steps. The limits are 1e-12 and 5e-5; the largest differences that 547 cases had
were 4e-15 and 3e-6. A mistake (a lost gradient, a sum for a mean, an update in the wrong place) moves a weight by about
lr = 1e-2.
"""

from __future__ import annotations

import contextlib
import copy
import random
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lablib.launch.ranks import RankError, RankTimeout, run_ranks
from lablib.toys.data_parallel import ddp
from lablib.toys.zero import STAGES

W = 12  # width of every layer; an image of 3 channels of 2 x 2 to a convolution
ROWS = 2  # of a rank, in a micro-batch
DDP = ("NaiveDDP", "BucketedDDP", "OverlappedDDP")
TOYS = (*DDP, "ZeRO1", "ZeRO2", "ZeRO3")
LIMIT = {torch.float64: 1e-12, torch.float32: 5e-5}

#: A habit that must be found: one percent of every gradient is lost.
PLANTED = "loses one percent"

#: Sentences that may end a case, by what it must have in it.
REFUSALS = {
    "twice under a reentrant checkpoint": r"second backward before sync\(\)|second gradient after its bucket had left",
    "weight of another unit": r"where its unit's forward does not run",
    "returns its weight": r"returns its own weight, whose memory goes now",
    "max_norm": r"max_norm changes weights in forward",
    "changed after wrapping": r"changed after wrapping",
    "other replicas": r"another module than rank 0",
    "clips by itself": r"clip with model\.step\(max_norm",
    "narrow master": r"master=\S+ cannot hold",
}


@dataclass(frozen=True)
class Case:
    """One attack: what is trained, by which toy, and how."""

    seed: int
    number: int
    toy: str  # its class
    layers: tuple[str, ...]  # kinds of layers, in order; see `_KINDS`
    order: tuple[int, ...]  # which layers forward calls, by number
    how: tuple[str, ...]  # how each call is made: "plain", "recompute", "reentrant", "no_grad beside"
    frozen: frozenset[int]  # layers that are not trained
    tied: tuple[tuple[int, int], ...]  # pairs of linear layers that share a weight
    single: frozenset[int]  # layers that compute in float32
    skips: tuple[frozenset[int], ...]  # by step, layers that no rank calls; by rank in `skips_on`
    skips_on: int | None  # the one rank that skips, or None for all
    optimizer: tuple  # class, keywords and whether weights are in two groups
    leaf: bool  # whether the input is a leaf that wants a gradient
    steps: int  # optimizer steps
    accumulate: int  # micro-batches of a step
    clip: float | None  # largest norm of the gradient, or None
    save: int | None  # after which step everything is saved, and another model goes on; not with ZeRO
    habits: frozenset[str]  # what else is done between steps: "discard", "evaluate", "abandon"; or what must be refused
    options: dict = field(hash=False)  # of the toy

    @property
    def zero(self) -> bool:
        """Whether the toy is one of ZeRO's."""
        return self.toy.startswith("ZeRO")

    def may_be_refused(self) -> set[str]:
        """Return the refusals that this case may get; none means that it must run."""
        allowed = {"max_norm"} & set(self.layers) | set(REFUSALS) & self.habits
        again = [number for number, how in zip(self.order, self.how, strict=True) if how == "reentrant"]
        shared = len(set(again)) < len(again) or any(
            self.order.count(number) > 1
            or any(number in pair for pair in self.tied)
            or self.layers[number] == "borrower"
            for number in again
        )
        if shared and self.toy in ("OverlappedDDP", "ZeRO2"):
            allowed.add("twice under a reentrant checkpoint")
        if self.toy == "ZeRO3":
            allowed |= {"returns its weight"} if "table" in self.layers else set()
            allowed |= {"weight of another unit"} if "borrower" in self.layers else set()
        return allowed


class Linear(nn.Module):
    def __init__(self, norm: bool = False):
        super().__init__()
        self.matrix = nn.Linear(W, W)
        if norm:
            self.matrix = nn.utils.parametrizations.weight_norm(self.matrix)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.tanh(self.matrix(x))


class Image(nn.Module):
    def __init__(self, layout: torch.memory_format):
        super().__init__()
        self.convolution = nn.Conv2d(3, 3, 2, padding=1).to(memory_format=layout)
        self.norm = nn.GroupNorm(3, 3)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.norm(self.convolution(x.view(-1, 3, 2, 2)))[..., :2, :2].reshape(-1, W)


class Embedded(nn.Module):
    def __init__(self, **options: object):
        super().__init__()
        self.rows = nn.Embedding(5, W, **options)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.rows(ids)


class Normed(nn.Module):
    """A norm around a layer inside it, and statistics as buffers that stay as they are."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(W), nn.Sequential(nn.Linear(W, 5), nn.GELU(), nn.Linear(5, W)))
        self.stats = nn.BatchNorm1d(W).eval()
        self.register_buffer("shift", torch.rand(W))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.stats(x + self.inner(x)) + self.shift


class Strange(nn.Module):
    """A transposed weight, a scalar, an empty one and one that nothing uses."""

    def __init__(self):
        super().__init__()
        self.turned = nn.Parameter(torch.randn(W, W).t() / W)
        self.scale, self.nothing = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(0, 2))
        self.unused = nn.Linear(3, 2)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.turned) * self.scale + self.nothing.sum()


class Contained(nn.Module):
    """Containers in containers, none of which is called."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(W, W)}), nn.ParameterList([torch.randn(W)])])

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + torch.tanh(self.parts[0]["a"](x)) * self.parts[1][0]


@dataclass
class Boxed:
    y: Tensor


class Box(Linear):
    def forward(self, x: Tensor, ids: Tensor) -> Boxed:
        return Boxed(super().forward(x, ids))


class Listed(Linear):
    def forward(self, x: Tensor, ids: Tensor) -> dict[str, list[Tensor]]:
        return {"y": [super().forward(x, ids), x.sum()]}


class View(nn.Module):
    """Returns a view of its result, which the caller changes in place."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(W, 7), nn.Linear(7, 2 * W)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))[:, :W]


class Table(nn.Module):
    """Learned positions, handed out as they are."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(ROWS, W))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.rows[: len(x)]


_KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": Linear,
    "weight_norm": lambda: Linear(norm=True),
    "image": lambda: Image(torch.contiguous_format),
    "channels_last": lambda: Image(torch.channels_last),
    "embedding": Embedded,
    "norms": Normed,
    "strange": Strange,
    "containers": Contained,
    "dataclass": Box,
    "dict": Listed,
    "view": View,
    "borrower": Linear,  # the net multiplies by its weight once more, outside of it
    "table": Table,
    "max_norm": lambda: Embedded(max_norm=0.5),
}
_ORDINARY = tuple(_KINDS)[:11]


class Net(nn.Module):
    """The layers of a case, called in its order."""

    def __init__(self, case: Case, single: bool = True):
        super().__init__()
        self.case = case
        self.layers = nn.ModuleList(_KINDS[kind]().double() for kind in case.layers)
        for a, b in case.tied:
            self.layers[b].matrix.weight = self.layers[a].matrix.weight
        for number in case.frozen:
            self.layers[number].requires_grad_(False)
        for number in case.single:
            values = {name: t.float() for name, t in self.layers[number].state_dict().items() if t.is_floating_point()}
            if single:
                self.layers[number].float()
            else:  # the same numbers, in float64
                self.layers[number].load_state_dict(values, strict=False)
        self.out = nn.Linear(W, 3).double()

    def forward(self, x: Tensor, ids: Tensor, skipped: frozenset[int] = frozenset()) -> Tensor:
        for number, how in zip(self.case.order, self.case.how, strict=True):
            if number in skipped:
                continue
            layer, kind = self.layers[number], self.case.layers[number]
            dtype = next(layer.parameters()).dtype
            if how == "no_grad beside":
                with torch.no_grad():
                    layer(x.to(dtype), ids)
            if how in ("recompute", "reentrant"):
                y = checkpoint(layer, x.to(dtype), ids, use_reentrant=how == "reentrant")
            else:
                y = layer(x.to(dtype), ids)
            y = y.y if isinstance(y, Boxed) else y["y"][0] if isinstance(y, dict) else y
            if kind == "view":
                y.mul_(0.5)
            if kind == "borrower":
                y = y @ layer.matrix.weight.t()
            x = (x + y).double()
        return self.out(x)


def draw(seed: int, number: int, toys: tuple[str, ...] = TOYS) -> Case:
    """Return a case."""
    dice = random.Random(f"{seed} {number}")
    toy = dice.choice(toys)
    zero = toy.startswith("ZeRO")
    trap = dice.random() < 0.15  # one of the things that are refused, here or there
    count = dice.randint(1, 4)
    layers = [dice.choice(_ORDINARY) for _ in range(count)]
    habits = {habit for habit in ("discard", "evaluate", "abandon") if dice.random() < 0.25}
    options: dict[str, object] = {}
    if toy in ("BucketedDDP", "OverlappedDDP"):
        options |= {"first_bytes": dice.choice([1, 500, 2**20]), "bucket_bytes": dice.choice([1, 1500, 2**25])}
    if not zero:
        options["find_unused"] = dice.random() < 0.6
    if toy == "ZeRO2":
        options["bucket_bytes"] = dice.choice([1, 1500, 2**25])
    if toy == "ZeRO3":
        options["prefetch"] = dice.randint(0, 2)
    if zero and dice.random() < 0.3:
        options["master"] = torch.float64
    if trap:
        kinds = ["borrower", "table", "max_norm", "changed after wrapping", "other replicas"]
        kind = dice.choice(kinds + ["clips by itself", "narrow master"] * zero)
        if kind in _KINDS:
            layers[dice.randrange(count)] = kind
        else:
            habits.add(kind)
    order = list(range(count))
    if dice.random() < 0.3:  # a layer that is called more than once
        order.insert(dice.randint(0, count), dice.randrange(count))
    linear = [i for i, kind in enumerate(layers) if kind == "linear"]
    tied = ((linear[0], linear[-1]),) if len(linear) > 1 and dice.random() < 0.5 else ()
    leaf = dice.random() < 0.4
    ways = ["plain", "plain", "plain", "recompute", "no_grad beside"] + ["reentrant"] * leaf
    # Checkpointing takes tensors in and out; a table has no gradient to its input.
    fit = {
        "dataclass": ["plain"],
        "dict": ["plain"],
        "table": ["plain"],
        "max_norm": ["plain"],
        "view": ["plain", "no_grad beside"],
    }
    how = [dice.choice([w for w in ways if w in fit.get(layers[i], ways)]) for i in order]
    steps = dice.randint(2, 4)
    skips = [frozenset(i for i in order if dice.random() < 0.15) for _ in range(steps)]
    if "reentrant" in how:  # a recomputed layer after none that is trained has no graph
        skips = [frozenset()] * steps
    kind = dice.choice(["SGD", "AdamW"])
    keywords = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1} if kind == "SGD" else {"lr": 1e-2, "eps": 1e-2}
    keywords |= dice.choice([{}, {"foreach": True}, {"fused": True}])
    if kind == "SGD" and any(skips):  # torch's fused SGD fails where a weight has its first gradient after others
        keywords.pop("fused", None)
    paired = {i for pair in tied for i in pair}
    frozen = frozenset(i for i in range(count) if dice.random() < 0.15 and i not in paired)
    single = frozenset(i for i in range(count) if dice.random() < 0.2 and i not in paired)
    if options.get("find_unused") and "clips by itself" in habits:
        habits.discard("clips by itself")
    return Case(
        seed=seed,
        number=number,
        toy=toy,
        layers=tuple(layers),
        order=tuple(order),
        how=tuple(how),
        frozen=frozen,
        tied=tied,
        single=single,
        skips=tuple(skips),
        skips_on=None if toy == "ZeRO3" or dice.random() < 0.5 else 0,
        optimizer=(kind, tuple(keywords.items()), dice.random() < 0.4),
        leaf=leaf,
        steps=steps,
        accumulate=dice.choice([1, 1, 2, 3]),
        clip=dice.choice([None, None, 0.1, 10.0]),
        save=None if toy.startswith("ZeRO") else dice.choice([None, 0, 1]),
        habits=frozenset(habits),
        options=options,
    )


# One process, and one rank


def make_optimizer(case: Case, params: list[nn.Parameter], plain: bool = False) -> torch.optim.Optimizer:
    """Return the case's optimizer of parameters or shards; the plain variant for the one process."""
    name, keywords, grouped = case.optimizer
    options = {k: v for k, v in keywords if not (plain and k in ("foreach", "fused"))}
    if grouped and not case.zero:  # biases, norms and scalars without decay
        decayed = [p for p in params if p.dim() > 1]
        rest = [p for p in params if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.0}]
        return getattr(torch.optim, name)([g for g in groups if g["params"]], **options)
    return getattr(torch.optim, name)(params, **options)


def rows(case: Case, ranks: int) -> tuple[Tensor, Tensor]:
    """Return inputs and ids of (steps, ranks, micro-batches, rows)."""
    generator = torch.Generator().manual_seed(case.number)
    shape = (case.steps, ranks, case.accumulate, ROWS)
    x = torch.randn(*shape, W, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 5, shape, generator=generator)


def loss_of(output: Tensor) -> Tensor:
    """Return a mean over the rows, which pulls every output its own way, and never hard: no run diverges."""
    return (torch.sin(output) * torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)).mean()


def trained(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that an optimizer takes."""
    return [p for p in module.parameters() if p.requires_grad]


def skipped(case: Case, step: int, rank: int) -> frozenset[int]:
    """Return the layers that a rank does not call in a step."""
    return case.skips[step] if case.skips_on in (None, rank) else frozenset()


def build(case: Case, seed: int, *, single: bool) -> Net:
    """Return the net of a case, the same for the same seed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        return Net(case, single)


def alone(case: Case, ranks: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the weights after all steps of one process on the rows of all ranks, and the gradients of its inputs."""
    net = build(case, case.number, single=False)
    params = trained(net)
    optimizer = make_optimizer(case, params, plain=True)
    x, ids = rows(case, ranks)
    seen = []
    for step in range(case.steps):
        for p in params:  # the toys' convention: without find_unused what is not used is zero
            p.grad = None if case.options.get("find_unused") else torch.zeros_like(p)
        for rank in range(ranks):
            for micro in range(case.accumulate):
                part = x[step, rank, micro].clone().requires_grad_(case.leaf)
                loss = loss_of(net(part, ids[step, rank, micro], skipped(case, step, rank)))
                (loss / (ranks * case.accumulate)).backward()
                if case.leaf and rank == dist.get_rank():
                    seen.append(part.grad * ranks)
        if case.clip:
            nn.utils.clip_grad_norm_(params, case.clip)
        optimizer.step()
    return dict(net.named_parameters()), seen


class Trainer:
    """A toy around the net of a case, with one interface for all of them."""

    def __init__(self, case: Case, seed: int):
        self.case, self.net = case, build(case, seed, single=True)
        if "other replicas" in case.habits and dist.get_rank():
            self.net.out = nn.Linear(W, 4).double()
        options = dict(case.options)
        if "narrow master" in case.habits:
            options["master"] = torch.bfloat16
        if case.zero:
            self.model = STAGES[int(case.toy[-1])](self.net, lambda shards: make_optimizer(case, shards), **options)
            self.optimizer = self.model.optimizer
        else:
            self.model = getattr(ddp, case.toy)(self.net, **options)
            self.optimizer = make_optimizer(case, trained(self.net))

    def backward(self, loss: Tensor, last: bool) -> None:
        if self.case.zero:
            self.model.backward(loss)
        else:
            loss.backward()
        if last and not self.case.zero:
            self.model.sync()

    def step(self) -> None:
        if "clips by itself" in self.case.habits:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.case.zero:
            self.model.step(self.case.clip)
            return
        if self.case.clip:
            nn.utils.clip_grad_norm_(trained(self.net), self.case.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.case.options["find_unused"])  # a zero left behind counts as used

    def not_yet(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.case.zero else self.model.no_sync()

    def weights(self) -> dict:
        return self.model.full_state_dict() if self.case.zero else self.net.state_dict()


def train(case: Case) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return what `alone` does, from the toy."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    trainer = Trainer(case, case.number if rank == 0 else case.number + 1)  # rank 0's weights go to all
    if "changed after wrapping" in case.habits:
        trainer.net.out.requires_grad_(False) if case.number % 2 else trainer.net.out.float()
    x, ids = rows(case, ranks)
    seen = []
    for step in range(case.steps):
        away = skipped(case, step, rank)
        if "evaluate" in case.habits:
            with torch.no_grad():
                trainer.model(x[0, 0, 0], ids[0, 0, 0])
        if "abandon" in case.habits:
            trainer.model(x[0, 0, 0], ids[0, 0, 0], away)
        if "discard" in case.habits:
            with trainer.not_yet():
                trainer.backward(100 * loss_of(trainer.model(x[0, 0, 0], ids[0, 0, 0], away)), last=False)
            trainer.model.zero_grad() if step % 2 else trainer.optimizer.zero_grad()
        for micro in range(case.accumulate):
            part = x[step, rank, micro].clone().requires_grad_(case.leaf)
            last = micro == case.accumulate - 1
            with contextlib.nullcontext() if last else trainer.not_yet():
                loss = loss_of(trainer.model(part, ids[step, rank, micro], away)) / case.accumulate
                loss = loss * (0.99 if PLANTED in case.habits else 1)
                trainer.backward(loss, last)
            seen += [part.grad] if case.leaf else []
        trainer.step()
        if step == case.save:
            saved = copy.deepcopy((trainer.net.state_dict(), trainer.optimizer.state_dict()))
            trainer = Trainer(case, case.number + 2)
            trainer.net.load_state_dict(saved[0])
            trainer.optimizer.load_state_dict(saved[1])
    return trainer.weights(), seen


def judge(case: Case) -> str:
    """Return "equal", "refused: ..." or "FAILED: ..." of a case, on this rank."""
    warnings.filterwarnings("ignore")
    try:
        weights, seen = train(case)
    except Exception as error:
        text = str(error)
        for name in case.may_be_refused():
            if re.search(REFUSALS[name], text):
                return f"refused: {name}"
        return f"FAILED: {type(error).__name__}: {text.strip().splitlines()[0][:160] if text.strip() else ''}"
    expected, gradients = alone(case, dist.get_world_size())
    pairs = [(weights[name].double(), p.detach()) for name, p in expected.items() if p.numel()]
    pairs += zip(seen, gradients, strict=True)
    error = max((a - b).abs().max().item() for a, b in pairs)
    limit = LIMIT[torch.float32 if case.single else torch.float64]
    return "equal" if error <= limit else f"FAILED: differs by {error:.1e}"


def judge_all(cases: list[Case], notes: str) -> None:
    """Write down the outcome of each case, line by line, so that an end of the process loses none."""
    torch.use_deterministic_algorithms(True)  # with this, torch.empty is filled with NaN: nothing of a step is left
    torch.utils.deterministic.fill_uninitialized_memory = True
    with Path(notes, str(dist.get_rank())).open("w") as file:
        for case in cases:
            print(judge(case), file=file, flush=True)


def attack(cases: list[Case], ranks: int, *, timeout: float = 60) -> dict[Case, str]:
    """Return the outcome of every case: the worst of its ranks."""
    found: dict[Case, str] = {}
    left = list(cases)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            ended = "ended early"
            try:
                run_ranks(judge_all, ranks, left, folder, timeout=timeout)
            except (RankError, RankTimeout) as error:
                ended = str(error).strip().splitlines()[-1][:160]
            lines = [Path(folder, str(rank)) for rank in range(ranks)]
            by_rank = [path.read_text().splitlines() if path.exists() else [] for path in lines]
        done = min(map(len, by_rank))
        for case, outcomes in zip(left, zip(*by_rank, strict=False), strict=False):
            found[case] = max(outcomes, key=lambda outcome: "FAILED" in outcome)
            if len(set(outcomes)) > 1 and "FAILED" not in found[case]:
                found[case] = f"FAILED: ranks say {sorted(set(outcomes))}"
        if done < len(left):
            found[left[done]] = f"FAILED: {ended}"
        left = left[done + 1 :]
    return found


def failures(found: dict[Case, str]) -> dict[Case, str]:
    """Return what must not be."""
    return {case: outcome for case, outcome in found.items() if outcome.startswith("FAILED")}


def draw_many(seed: int, count: int, first: int = 0) -> Iterator[Case]:
    """Yield cases of a seed."""
    return (draw(seed, number) for number in range(first, first + count))
