"""The checks of rung 06: fully_shard on models of others, a fault, a checkpoint, and which wrapping to take.

A checkpoint is written by ranks that take turns at every disk operation and barrier, in several orders. A write takes two
turns, and in between the file is torn. The disk remembers what it held after each, for a power cut may come at any.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lablib.calc.parallel import TimedUnit, fsdp_step, peak_held_bytes
from lablib.checks.judging import NEW, Sealed, Wrong, ask_ranks, by_name, check, numbers, on_ranks, refuse
from lablib.launch.measure import record_comms
from lablib.launch.ranks import Endless, Turns, rank_mesh
from lablib.toys.transformer import Transformer, tiny_config

__all__ = [
    *("Job", "Model", "Situation", "apply_fsdp", "choose_wrapping", "find_fault", "jobs", "models", "situations"),
    "write_checkpoint",
]


# --- fully_shard, on models of others -----------------------------------------------------------------------

_HIDDEN = 32
_NAMES = (
    ("embed", "blocks", "norm", "head"),
    ("wte", "h", "ln_f", "lm_head"),
    ("tok_embeddings", "layers", "final_norm", "output"),
)


class _GatedMLP(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up, self.gate = (nn.Linear(_HIDDEN, width, bias=False) for _ in range(2))
        self.down = nn.Linear(width, _HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class _Layer(nn.Module):
    """An MLP, or a router and experts that all take part, weighed by it."""

    def __init__(self, width: int, experts: int):
        super().__init__()
        self.norm = nn.RMSNorm(_HIDDEN)
        if experts:
            self.router = nn.Linear(_HIDDEN, experts, bias=False)
            self.experts = nn.ModuleList(_GatedMLP(width) for _ in range(experts))
        else:
            self.mlp = _GatedMLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if not hasattr(self, "router"):
            return x + self.mlp(y)
        weights = self.router(y).softmax(-1).to(x.dtype).unbind(-1)
        return x + sum(w[..., None] * expert(y) for w, expert in zip(weights, self.experts, strict=True))


class _Language(nn.Module):
    def __init__(
        self, names: Sequence[str], layers: int, width: int, vocab: int, experts: int, tied: bool, named: bool
    ):
        super().__init__()
        self._names = embed, blocks, norm, head = names
        made = [_Layer(width, experts) for _ in range(layers)]
        self.add_module(embed, nn.Embedding(vocab, _HIDDEN))
        stack = nn.ModuleDict({f"layer{i}": m for i, m in enumerate(made)}) if named else nn.ModuleList(made)
        self.add_module(blocks, stack)
        self.add_module(norm, nn.RMSNorm(_HIDDEN))
        self.add_module(head, nn.Linear(_HIDDEN, vocab, bias=False))
        if tied:
            self.get_submodule(head).weight = self.get_submodule(embed).weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embed, blocks, norm, head = map(self.get_submodule, self._names)
        x = embed(tokens)
        for block in blocks.values() if isinstance(blocks, nn.ModuleDict) else blocks:
            x = block(x)
        return head(norm(x))


@dataclass(frozen=True)
class Model:
    """A model to shard on four ranks, and what is asked of it.

    Attributes:
        most: Bytes of parameters that may be gathered while any module runs, in forward or backward.
        fp32: Names of modules that are gathered, and compute, in fp32.
        mesh: Ranks of each axis: shard, or replicate and shard.
        gathers: All-gathers of a step that units as large as `most` allows need.
    """

    words: str
    options: tuple
    seed: int
    most: int
    fp32: tuple[str, ...]
    mesh: tuple[int, ...]
    gathers: int

    def build(self) -> nn.Module:
        """Return the model, the same on every rank."""
        torch.manual_seed(self.seed)
        model = _Language(*self.options)
        nn.init.normal_(model.get_submodule(model._names[0]).weight, std=0.5)
        return model


def models(seed: int = 66) -> list[Model]:
    """Return three models that differ in names, tables, experts and mesh."""
    dice = random.Random(seed)
    layers, vocab, width, small = dice.choice((3, 4, 5)), 256, 64, 1024  # small are norms and routers
    table, mlp = 2 * vocab * _HIDDEN, 6 * width * _HIDDEN  # bytes, gathered in bf16
    names = dice.sample(_NAMES, 3)
    routers = tuple(f"{names[2][1]}.{i}.router" for i in range(2))
    return [
        Model(f"{layers} layers in an nn.ModuleDict", (names[0], layers, width, vocab, 0, False, True), seed,
              max(table, mlp) + small, (), (4,), 2 * layers + 3),
        Model("tied tables, two replicas", (names[1], layers, width, vocab, 0, True, False), seed,
              table + mlp + small, (), (2, 2), 2 * layers + 1),
        Model("experts, with a router in fp32", (names[2], 2, width, 64, 4, False, False), seed,
              mlp + 2 * small, routers, (4,), 2 * (4 + 1 + 1) * 2 + 3),
    ]  # fmt: skip


_MORE = 4  # all-gathers beyond those of the check's own wrapping: a norm of its own, a head that is freed
_AXES = ("replicate", "shard")


@check(
    kind="work",
    idea="A unit is what is gathered together: as large as the memory allows, called from the inside out, and the root last.",
    section="fully_shard: what it does to a model",
    line="Walk from the root: shard a module that fits, go into one that does not, pass by a list or a dictionary, leave tied "
    "tables to the root, and give the names in fp32 a policy of their own first.",
)
def apply_fsdp(answer: Callable[..., Any], seed: int = 66) -> str:
    """Judge `apply_fsdp(model, mesh, most, fp32)` on three models, by a step of each on four ranks."""
    made, told = models(seed), []
    drawn = iter(lambda: NEW.choice(models(NEW.randrange(2**32))), None)
    made.append(next(one for one in drawn if one.options not in [each.options for each in made]))
    all_seen = on_ranks(lambda answer: [_shard_and_step(answer, one) for one in made], 4, answer)[0]
    for model, seen in zip(made, all_seen, strict=True):
        _judge_sharded(model, seen)
        told.append(f"{model.words}: {seen['held']:,} of {model.most:,} bytes, {seen['gathers']} all-gathers")
    return f"The gradients of one process on four ranks. {'; '.join(told)}."


def _shard_and_step(answer: Callable[..., Any], made: Model) -> dict[str, Any]:
    model, alone, mesh = made.build(), made.build(), rank_mesh(*made.mesh, names=_AXES[-len(made.mesh) :])
    whole = {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False)}
    try:
        answer(model, mesh, made.most, made.fp32)
    except (RuntimeError, ValueError, AssertionError) as error:
        refuse(made.words,
            ("A module is given to `fully_shard` twice, and belongs to one unit", "already been applied" in str(error)),
            ("Calls go from the inside to the outside: a later one inside finds nothing left", "overlapping meshes" in str(error)),
            ("A list or dictionary has no forward, so no hook gathers it: shard what is in it", "implement forward" in str(error)),
        )  # fmt: skip
        raise
    _ = [unit.reshard() for unit in model.modules() if isinstance(unit, FSDPModule)]  # one may be gathered early
    named = dict(model.named_parameters())
    seen: dict[str, Any] = {
        "left": [name for name, p in named.items() if not isinstance(p, DTensor)],
        "stored": {name for name, p in named.items() if p.dtype != whole.get(name, p.dtype)},
        "elsewhere": [n for n, p in named.items() if not getattr(p, "device_mesh", mesh).mesh.equal(mesh.mesh)],
        "rootless": not isinstance(model, FSDPModule),
        "frozen": [name for name, p in named.items() if not p.requires_grad],
    }
    if any(seen.values()):
        return seen
    tokens = torch.randint(0, made.options[3], (8, 9), generator=torch.Generator().manual_seed(made.seed))
    held, dtypes = _watch(model)
    with record_comms() as log:
        try:
            _loss(model, tokens.chunk(dist.get_world_size())[dist.get_rank()]).backward()
        except (RuntimeError, ValueError, AssertionError) as error:
            return seen | {"stopped": str(error)}
    _loss(alone, tokens).backward()
    right = torch.cat([p.grad.flatten() for p in alone.parameters()])
    got = [torch.zeros(p.shape) if p.grad is None else p.grad.full_tensor().float() for p in model.parameters()]
    return seen | {
        "where": (where := max(held, key=lambda layer: sum(held[layer].values()))),
        "beside": held[where],  # bytes by parameter
        "held": sum(held[where].values()),
        "dtypes": dtypes,
        "gathers": log.calls["all_gather"],
        "units": log.calls["reduce_scatter"],
        "kept": (kept := [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]),
        "bare": [name for name, p in model.named_parameters() if p.grad is None and name not in kept],
        "reduced": sum(e.bytes for e in log.events if e.op == "reduce_scatter") / right.numel(),  # bytes a value
        "more": (more := sum(g.numel() for g in got) - right.numel()),
        "off": more or ((torch.cat([g.flatten() for g in got]) - right).norm() / right.norm()).item(),
    }


def _watch(model: nn.Module) -> tuple[dict[str, dict[str, int]], dict[str, torch.dtype]]:
    """Return, filled while the model runs, the most that is gathered around each layer, and the dtypes of its weights."""
    held: dict[str, dict[str, int]] = {}
    dtypes: dict[str, torch.dtype] = {}

    def look(name: str) -> None:  # a part of a unit that is larger than the shard is gathered, too
        local = {each: p.to_local() if isinstance(p, DTensor) else p for each, p in model.named_parameters()}
        now = {each: p.nbytes for each, p in local.items() if p.numel() > shards[each]}
        held[name] = max(held.get(name, {}), now, key=lambda sizes: sum(sizes.values()))

    def before(module: nn.Module, _: object, name: str) -> None:
        look(name)
        dtypes.update((name, p.dtype) for p in module.parameters(recurse=False))

    def after(module: nn.Module, _: object, out: torch.Tensor, name: str) -> None:
        out.register_hook(lambda gradient: look(name))

    shards = {each: p.to_local().numel() for each, p in model.named_parameters()}
    for path, module in model.named_modules():
        name = path.replace("_checkpoint_wrapped_module.", "")
        if not list(module.children()):
            module.register_forward_pre_hook(partial(before, name=name))
            module.register_forward_hook(partial(after, name=name))
    return held, dtypes


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def _judge_sharded(made: Model, seen: dict[str, Any]) -> None:
    case = made.words
    refuse(
        case,
        (lambda: f"The shards of {min(seen['stored'])} have another dtype than the parameter had: the policy casts what is "
         "gathered, and fp32 shards are the master weights", seen["stored"]),
        (lambda: f"{seen['left'][0]} is in no unit, and FSDP neither shards nor reduces it"
         + ": the call for the model comes last" * seen["rootless"], seen["left"]),
        ("The call for the model itself comes last: without it each unit takes itself for the root", seen["rootless"]),
        (lambda: f"{seen['elsewhere'][0]} is not sharded over the `mesh` given, all axes in their order", seen["elsewhere"]),
        (lambda: f"The model has {seen['more']:+,} values now: two names of one matrix are to stay one", seen.get("more")),
        (lambda: f"{seen['frozen'][0]} was to be trained, and does not ask for a gradient any more", seen.get("frozen")),
        ("Embedding and head are one matrix here, and a parameter belongs to one unit: torch stops. Leave both to the root, "
         "or give both in one list", "is shared" in seen.get("stopped", "")),
        (lambda: f"The step stops: {seen['stopped'][:150]}", "stopped" in seen),
    )  # fmt: skip
    wrong = [n for n, dtype in seen["dtypes"].items() if dtype != (torch.float32 if n in made.fp32 else torch.bfloat16)]
    wrong.sort(key=lambda name: name not in made.fp32)
    embed, _, norm, head = (f"{name}.weight" for name in made.options[0])
    large = [name for name, size in seen["beside"].items() if size > 1024]  # without norms and routers
    blocks = {name.split(".")[1] for name in large if name.startswith(f"{made.options[0][1]}.")}
    tables = [each for each in (embed, head) if each in large and f"{seen['where']}.weight" not in (each, norm)]
    wide = f"While {seen['where']} runs, {seen['held']:,} bytes are gathered, and {made.most:,} may be. "
    refuse(
        case,
        (lambda: f"{wrong[0]} computes in {seen['dtypes'][wrong[0]]}, and was to stay in fp32: it "
         "needs a unit of its own with another policy, made before the one around it", wrong and wrong[0] in made.fp32),
        (lambda: f"{wrong[0]} is gathered in {seen['dtypes'][wrong[0]]}: `param_dtype` of "
         "a MixedPrecisionPolicy makes it bf16 on the way", wrong),
        (lambda: f"{seen['kept'][0]} is still gathered when backward ends: the next step computes with these weights", seen["kept"]),
        (lambda: f"{seen['bare'][0]} has no gradient when backward ends: a step has to reduce it over all ranks", seen["bare"]),
        (f"Gradients are reduced in {seen['reduced']:.4g} bytes a value, and not all in fp32: say `reduce_dtype`", seen["reduced"] < 4),
        (f"{wide}Everything is: a unit is what is gathered together, and here it is the model",
         seen["held"] > made.most and seen["units"] <= 1 + len(made.fp32)),
        (f"{wide}They belong to {len(blocks)} layers: gather one layer at a time, and free it when it has run",
         seen["held"] > made.most and len(blocks) > 1),
        (f"{wide}Among them: {' and '.join(tables)}. Tables that are not tied are units, and an embedding is freed after forward",
         seen["held"] > made.most and tables and "tied" not in case),
        (f"{wide}Among them: {', '.join(large[:4])}. Free what has run, and cut what does not fit as one unit",
         seen["held"] > made.most),
        (f"A step has {seen['gathers']} all-gathers, and {made.gathers} do: units as large as fit pay the latency less often",
         seen["gathers"] > made.gathers + _MORE),
        (f"The gradients are not those of one process: they differ by {seen['off']:.0%}", seen["off"] > 0.05),
    )  # fmt: skip


# --- a fault that nobody announced --------------------------------------------------------------------------

_EFFECTS = {
    "stale": "every shard moves, replicas are equal, and one block computes with other weights than its shards have",
    "still": "the shards of one block stay as they were",
    "apart": "two replicas have different shards of one block",
}


class Job(Sealed):
    """A small run: two replicas of two shards, a block a unit, two micro-batches a step. It runs on one process, too."""

    ranks = 4

    def __init__(self, seed: int, fault: str = "", block: int = 0, kept: Sequence[int] = ()):
        self.seed, self._fault, self._block, self._kept = seed, fault, block, kept

    def start(self) -> tuple[Transformer, torch.optim.Optimizer]:
        """Return the model, sharded if there are four ranks, and its optimizer."""
        torch.manual_seed(self.seed)
        model = Transformer(tiny_config("llama", num_layers=4, hidden=32, ffn=64))
        if dist.get_world_size() > 1:
            mesh = rank_mesh(2, 2, names=_AXES)
            for i, block in enumerate(model.blocks):
                own = mesh["shard"] if (self._fault, self._block) == ("apart", i) else mesh
                fully_shard(block, mesh=own, reshard_after_forward=i not in self._kept)
            fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(self, model: Transformer, optimizer: torch.optim.Optimizer, number: int) -> float:
        """Train one step, and return the mean loss of all ranks."""
        ranks, total = dist.get_world_size(), torch.zeros(())
        optimizer.zero_grad()
        for micro in range(2):
            # The last one reduces and frees; a fault forgets one of these switches in its unit.
            for i, unit in enumerate([model, *model.blocks] if ranks > 1 else []):
                last, fault = micro == 1, self._fault if i == self._block + 1 else ""
                unit.set_requires_gradient_sync(last and fault != "still", recurse=False)
                unit.set_requires_all_reduce(last and fault not in ("still", "still, summed"), recurse=False)
                unit.set_reshard_after_backward(last and fault != "stale", recurse=False)
            start = torch.randint(0, 256, (8, 1), generator=torch.Generator().manual_seed(8 * number + micro))
            text = (start + 7 * torch.arange(17)) % 256  # every eighth number: soon learned
            loss = model.loss(text.chunk(ranks)[dist.get_rank()]) / 2
            loss.backward()
            total += loss.detach() / ranks
        optimizer.step()
        dist.all_reduce(total)
        return total.item()

    def losses(self, steps: int) -> list[float]:
        """Return the loss of each step, on every rank."""
        model, optimizer = self.start()
        return [self.step(model, optimizer, number) for number in range(steps)]


def jobs(seed: int = 6006) -> list[Job]:
    """Return jobs in an order that is drawn: two are healthy, and each of the others has one fault in one block."""
    dice = random.Random(seed)
    faults = ["", "", "stale", "stale", "still", "still, summed", "apart"]
    made = []
    for i, fault in enumerate(faults):
        block, other = dice.sample(range(4), 2)
        kept = (other, block) if i == 2 else (other,) * (i != 1)  # a choice of its author's, and no fault by itself
        made.append(Job(dice.randrange(1000), fault, block, kept))
    dice.shuffle(made)
    return made


@check(
    kind="fault",
    idea="Ask each unit by itself: whether it computes with the weights of its shards, whether they move, and whether the "
    "replicas have the same.",
    section="Clipping and accumulation: clip_grad_norm_, no sync",
    line="After a step look, for each block, whether its parameters are DTensors again, whether the local rows have changed, "
    "and whether they are equal over the axis of the replicas; then let all ranks agree.",
)
def find_fault(answer: Callable[[Job], Any], seed: int = 6006) -> str:
    """Judge `find_fault(job)`, called on each of four ranks, on jobs with one fault or none."""
    made = [*jobs(seed), next(job for job in jobs(NEW.randrange(2**32)) if job._fault)]
    for number, (job, said) in enumerate(zip(made, ask_ranks(answer, Job.ranks, made), strict=True)):
        _judge_found(f"job {number}", job, [_read_found(got) for got in said])
    healthy = sum(not job._fault for job in made)
    return f"{len(made)} jobs, {healthy} of them healthy. What was wrong in the others is folded below the chapter's solutions."


def _read_found(got: Any) -> tuple[str, str] | None:
    if got is None:
        return None
    otherwise = "Return None, or the name of a block and one of " + ", ".join(map(repr, _EFFECTS)) + "."
    unit, what = map(by_name(got, "unit", "what", otherwise=otherwise).get, ("unit", "what"))
    names = [f"blocks.{i}" for i in range(4)]
    if not (isinstance(unit, str) and unit in names and isinstance(what, str) and what in _EFFECTS):
        raise Wrong(otherwise)
    return names[names.index(unit)], next(each for each in _EFFECTS if each == what)


def _judge_found(name: str, job: Job, by_rank: list[tuple[str, str] | None]) -> None:
    effect, unit = job._fault.partition(",")[0], f"blocks.{job._block}"
    got = next((each for each in by_rank if each is not None), None)
    case = f"{name}: {'healthy' if got is None else ' '.join(got)}"
    what, where = (got[1], got[0]) if got else ("", "")
    refuse(
        case,
        ("Ranks give different answers: what one of them sees must be told to all, by a collective", len(set(by_rank)) > 1),
        ("A unit that stays gathered from forward to backward is no fault: its weights are those of its shards",
         got and what == "stale" and where in [f"blocks.{i}" for i in job._kept if i != job._block or effect != "stale"]),
        ("Rank 0 has the rows of 2 in every block, and 1 those of 3; 0 and 1 are one replica and hold different rows",
         what == "apart" and effect != what),
        ("Nothing is wrong with this run: its weights after some steps are those of one process", got and not effect),
        (lambda: f"Something is wrong, and this way of looking does not see it: {_EFFECTS[effect]}", not got and effect),
        ("It is another block: look at each unit by itself, and not at the sum or the first that is odd", where != unit and got),
        ("The block is right, and something else is wrong with it: a symptom may have several causes, so ask all three "
         "questions", got and what != effect),
    )  # fmt: skip


# --- a checkpoint -------------------------------------------------------------------------------------------

_TORN = "torn"
_EVENTS = 2000

Files = dict[str, Any]


class World(Turns):
    """Ranks that take turns; the first in `order` that can run does. Who begins a `slow` or `torn` write, or has `ended` one, goes last."""

    def __init__(self, ranks: int, order: Sequence[int], files: Files, slow: str = ""):
        super().__init__(ranks)
        self.order, self.slow, self.files = order, slow, copy.deepcopy(files)
        self.moments: list[Files] = [dict(self.files)]
        self.waiting: set[int] = set()  # at a barrier
        self.events = 0
        self.asked: set[tuple[int, str]] = set()  # which rank has asked for which path since anything happened

    def able(self) -> list[int]:
        """Return who can go on, in order; a barrier opens when all ranks are there."""
        if len(self.waiting) == self.ranks:
            self.waiting.clear()
        return [rank for rank in self.order if rank not in self.waiting | self.done]

    def run(self, act: Callable[[Disk, int, Callable[[], None]], None]) -> None:
        """Run `act(disk, rank, barrier)` on every rank to its end; raise what a rank raised."""
        try:
            ended = self.play(lambda rank: act(Disk(self, rank), rank, lambda: self._barrier(rank)))
        except Endless as endless:
            raise Wrong(str(endless)) from None
        if not ended:
            raise Wrong("Some ranks wait at a barrier that the others never reach: all must call it equally often.")

    def _barrier(self, rank: int) -> None:
        self.asked.clear()
        self.waiting.add(rank)
        self.step(rank, last=False)

    def step(self, rank: int, last: bool) -> None:
        """Give the turn back, and be the last one to get it again or not."""
        self.events += 1
        if self.events > _EVENTS:
            raise Wrong(f"After {_EVENTS:,} turns the ranks go on: a loop of yours never ends, or asks too often.")
        self.order = [*(each for each in self.order if each != rank), rank] if last else self.order
        self.pause(rank)

    def changed(self, rank: int, last: bool = False) -> None:
        """Remember the disk as it is now, and give the turn back."""
        self.asked.clear()
        self.moments.append(dict(self.files))
        self.step(rank, last)


class Disk(Sealed):
    """One rank's view of the disk that all share."""

    def __init__(self, world: World, rank: int):
        self._world, self._rank = world, rank

    def write(self, path: str, content: Any) -> None:
        """Write a file, folders included; it is torn until the write has ended."""
        path = os.path.normpath(path)  # a str or a Path, with a slash at its end or not
        self._world.files[path] = _TORN
        self._world.changed(self._rank, last=self._world.slow in ("slow", "torn"))
        self._world.files[path] = copy.deepcopy(content)
        self._world.changed(self._rank, last=self._world.slow == "ended")

    def rename(self, old: str, new: str) -> None:
        """Rename a file or a folder at once; the new name must be free."""
        files, old, new = self._world.files, os.path.normpath(old), os.path.normpath(new)
        if not _inside(files, old):
            once = "; one rank renames, once" * any(_inside(files, new))
            raise Wrong(f"Rank {self._rank} renames {old!r}, which is not there{once}.")
        if _inside(files, new):
            raise Wrong(f"Rank {self._rank} renames {old!r} to {new!r}, which exists already.")
        for path in _inside(files, old):
            files[new + path[len(old) :]] = files.pop(path)
        self._world.changed(self._rank)

    def remove(self, path: str) -> None:
        """Remove a file or a folder; nothing happens if it is not there."""
        for inner in _inside(self._world.files, path):
            del self._world.files[inner]
        self._world.changed(self._rank)

    def exists(self, path: str) -> bool:
        """Say whether there is a file or a folder of that name."""
        there, world = bool(_inside(self._world.files, path)), self._world
        if world.slow == "slow" or (self._rank, path) in world.asked:  # who asks again waits for the others
            world.step(self._rank, last=True)  # they may do much between a look and what is done upon it
        world.asked.add((self._rank, path))
        return there


def _inside(files: Files, path: str) -> list[str]:
    path = os.path.normpath(path)
    return [each for each in files if each == path or each.startswith(f"{path}/")]


def _published(files: Files) -> dict[str, Files]:
    folders: dict[str, Files] = {}
    for path, content in files.items():
        folder, _, name = path.partition("/")
        if folder.startswith("step-"):
            folders.setdefault(folder, {})[name] = content
    return folders


def _state(rank: int, step: int) -> dict[str, list[int]]:
    return {"model": [rank, step], "optimizer": [10 * rank, step]}


#: Who goes first, and whether all write at once, let others on as they look or have written, or a crash left a folder.
_CASES = [((0, 1), "ended"), ((0, 2, 1), "slow"), ((0, 2, 1), "torn"), ((2, 1, 0), "crash"), ((1, 3, 0, 2), "crash")]


@check(
    idea="A name that others trust may appear only when everything under it is complete, and a barrier tells you that.",
    section="Checkpoints: DCP, each rank writes its rows",
    line="Rank 0 renames the folder that all wrote aside, after a barrier that every rank reaches with its write behind it.",
)
def write_checkpoint(answer: Callable[..., None]) -> str:
    """Judge `write_checkpoint(disk, rank, ranks, step, state, barrier)` at every moment, for several orders of ranks."""
    moments, step = 0, NEW.randrange(100, 1000)
    for order, how in _CASES:
        ranks = len(order)
        old = {f"step-{step - 1}/rank-{r}": {**_state(r, step - 1), "step": step - 1} for r in range(ranks)}
        if how == "crash":  # a job of more ranks died just before it published this very step
            crashed = _play(answer, range(2 * ranks + 1), {}, step, step - 1)
            old |= [files for files in crashed if not _published(files)][-1]
        world = _play(answer, order, old, step, step, slow=how)
        moments += len(world)
        written: set[int] = set()  # ranks whose new file has been on the disk, whole
        for files in world:
            written |= (there := _on_disk(files, ranks, step))
            _judge_disk(files, ranks, step, written - there)
        _judge_end(_published(world[-1]), ranks, step)
    return f"{len(_CASES)} runs, {moments} moments, and a whole checkpoint to resume from at each of them."


def _play(answer: Callable, order: Sequence[int], old: Files, step: int, seen: int, slow: str = "") -> list[Files]:
    """Save the step of what was trained until step `seen`, and return every state of the disk."""
    world = World(ranks := len(order), order, old, slow)
    world.run(lambda disk, rank, barrier: answer(disk, rank, ranks, step, _state(rank, seen), barrier))
    return world.moments


def _on_disk(files: Files, ranks: int, step: int) -> set[int]:
    """Return the ranks whose part of the new checkpoint lies anywhere on the disk."""
    models = [content.get("model") for content in files.values() if isinstance(content, dict)]
    return {rank for rank in range(ranks) if _state(rank, step)["model"] in models}


def _judge_disk(files: Files, ranks: int, step: int, lost: set[int]) -> None:
    found = _published(files)
    early = [folder for folder in found if folder not in (f"step-{step - 1}", f"step-{step}")]
    refuse("",
        (lambda: f"{early[0]!r} begins with step-, so a job that resumes takes it for whole, and step-{step} is to be published. "
         "Any other folder needs another kind of name", early),
        ("There is a moment without any checkpoint: the old one must stay until the new one is published", not found),
    )  # fmt: skip
    for folder, content in found.items():
        named = [f"rank-{rank}" for rank in range(ranks)]
        absent = [rank for rank in range(ranks) if named[rank] not in content]
        missing = named[min(lost & set(absent) or absent)] if absent else ""
        strangers = [name for name in content if name not in named]  # one may be a marker or an index
        refuse("",
            (f"There is a moment when {folder} is visible and half written. Write aside, wait for all, then rename",
             _TORN in content.values()),
            (f"There is a file {'/'.join([folder, *strangers[:1]]).rstrip('/')!r}, and that of a rank is called {missing!r}",
             strangers and absent and ranks in (len(absent), len(_on_disk(content, ranks, step)))),
            (f"{folder} is published without {missing}, and what its rank has written is on the disk no more: it was removed, "
             "or written over", lost & set(absent)),
            (f"There is a moment when {folder} is visible without {missing}, and a job that resumes takes it for whole", absent),
            (f"{folder} is published with files of more than {ranks} ranks: clear what a crashed job left",
             any(name.removeprefix("rank-").isdigit() for name in strangers)),
        )  # fmt: skip


def _judge_end(found: dict[str, Files], ranks: int, step: int) -> None:
    if (folder := f"step-{step}") not in found:
        raise Wrong(f"All ranks have returned, and there is no folder {folder}.")
    for rank in range(ranks):
        has = saved if isinstance(saved := found[folder][f"rank-{rank}"], dict) else {}
        other = next((key for key, value in _state(rank, step).items() if has.get(key) != value), "")
        refuse("",
            ("A rank's file is one dictionary: the keys of `state`, and beside them the key step", "model" not in has),
            ("The optimizer state is not saved: the resumed run would start its moments from zero", "optimizer" not in has),
            ("The step is not saved in the file: the learning rate of the resumed run hangs on it", "step" not in has),
            (f"The file of rank {rank} has under {other!r} something else than its `state`", other),
            ("The saved step is not the one that was given", has.get("step") != step),
        )  # fmt: skip


# --- which wrapping -----------------------------------------------------------------------------------------

#: The calls of `fully_shard` before the last one, each with the parts of its unit; the rest is the root's.
Units = list[list[str]]

_RATIO = 2  # gradients are reduced in 4 bytes, and weights gathered in 2
_RANKS = 2
_TRIES = 8
_SLOWER = 1.05  # an answer may find other wrappings than the check, a little slower or faster

#: Layers, bytes of attention, of an MLP and of a table, whether the tables are one, seconds that a message waits and
#: that a byte is computed with (a byte is sent in 1 s), and what the budget is: a wrapping that just fits, None for no
#: limit. In each another idea of the chapter decides.
_SITUATIONS = {
    "tied tables": (6, 120, 240, 720, True, 4, 1.0, ("root", 1, True)),
    "a large vocabulary": (6, 120, 240, 1440, False, 4, 1.0, ("ends", 1, True)),
    "room to keep": (6, 120, 240, 240, False, 4, 0.3, ("ends", 1, False)),
    "a latency of many blocks": (8, 120, 240, 96, False, 1500, 1.0, None),
    "a latency of some blocks": (8, 120, 240, 240, False, 400, 1.2, ("ends", 2, True)),
    "a latency of four blocks": (12, 120, 240, 720, False, 1500, 1.0, ("ends", 4, False)),
    "a huge MLP": (4, 120, 2400, 240, False, 4, 1.0, ("ends", 0, True)),
    "nothing fits": (4, 120, 240, 240, False, 4, 1.0, 240),
}


class Situation:
    """A model, a machine and a budget, and what a wrapping costs there.

    Attributes:
        parts: Bytes of each part when it is gathered, in the order in which parts run.
        tied: Whether embedding and head are one table, whose bytes are the embedding's.
        budget: Bytes that may be unsharded at a time.
    """

    def __init__(self, parts: Mapping[str, int], tied: bool, latency: float, compute: float) -> None:
        self.parts, self.tied, self.latency, self.compute = dict(parts), tied, latency, compute
        self.budget, self.tries = 10**9, 0
        self._costs: dict[tuple, tuple[int, float]] = {}  # by what was asked; copies of this situation share it

    def price(self, units: Sequence[Sequence[str]], reshard: bool = True) -> tuple[int, float]:
        """Return the most bytes that are unsharded at a time, and the seconds of a step."""
        self.tries += 1
        if self.tries > _TRIES:
            raise Wrong(f"{_TRIES} wrappings are tried and you want another one, and each is a run. Begin with the rule, and let "
                        "what it held and took say which to try next: finer, kept, or coarser.")  # fmt: skip
        return self.cost(self.read(units), bool(reshard))

    def cost(self, units: Units, reshard: bool) -> tuple[int, float]:
        """Return the price of units in order, which is no try."""
        key = tuple(map(tuple, units)), reshard
        if key not in self._costs:
            inside = {name for unit in units for name in unit}
            groups = [[name for name in self.parts if name not in inside], *units]
            timed = [self._timed(str(i), group) for i, group in enumerate(groups)]
            sizes = [unit.bytes // 2 for unit in timed]
            held = peak_held_bytes(sizes, _RANKS, reshard=reshard, param_bytes=2, reduce_bytes=2 * _RATIO)
            self._costs[key] = held, fsdp_step(timed, reshard=reshard).seconds
        return self._costs[key]

    def _timed(self, name: str, group: Sequence[str]) -> TimedUnit:
        size = sum(self.parts[part] for part in group)
        table = self.parts["embed"] if "head" in group and self.tied else 0
        runs = self.compute * (size + table - self.parts["embed"] * ("embed" in group))  # an embedding is looked up
        gather, scatter = ((self.latency + each) if each else 0.0 for each in (size, _RATIO * size))
        return TimedUnit(name=name, bytes=size, gather=gather, scatter=scatter, forward=runs, backward=2 * runs)

    def read(self, units: object) -> Units:
        """Return the units as the parts run, or raise `Wrong` if torch would not take them or nobody would want them."""
        found = [[each] if isinstance(each, str) else numbers(each, "A unit") for each in numbers(units, "`units`")]
        order = {name: place for place, name in enumerate(self.parts)}
        names = [name for unit in found for name in unit]
        if strangers := [name for name in names if name not in [*order]]:
            raise Wrong(f"{strangers[0]!r} is no part of the model; those are {', '.join(list(order)[:3])}, ...")
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise Wrong(f"{twice!r} is in the units twice: a parameter belongs to one unit.")
        ends = {"embed", "head"}
        found = [unit for unit in found if unit and not (self.tied and set(unit) == ends)]  # together: as in the root
        if self.tied and any(ends & set(unit) and not ends <= set(unit) for unit in found):
            raise Wrong("Embedding and head are one table here, and a parameter belongs to one unit: torch stops. Leave both "
                        "to the root, or pass both in one list.")  # fmt: skip
        found = sorted((sorted(unit, key=order.get) for unit in found), key=lambda unit: order[unit[0]])  # type: ignore
        for unit in found:
            if order[unit[-1]] - order[unit[0]] >= len(unit):
                raise Wrong(f"The unit of {unit[0]!r} and {unit[-1]!r} leaves out parts that run in between: it would be "
                            "unsharded for all of that time.")  # fmt: skip
        return found

    def wrapping(self, ends: str, blocks: int | None) -> Units:
        """Return the tables in the root or as units, with so many blocks in a unit: 0 for its parts, None for the root."""
        inner = list(self.parts)[1:-1]
        size = {None: len(inner), 0: 1}.get(blocks, 2 * (blocks or 0))
        units = [inner[i : i + size] for i in range(0, len(inner), size)] if blocks is not None else []
        return [["embed"], *units, ["head"]] if ends == "ends" and not self.tied else units

    def candidates(self) -> dict[tuple[str, int | None, bool], tuple[int, float]]:
        """Return what every wrapping that the chapter speaks of costs."""
        counts = [None, *range(len(self.parts) // 2)]
        every = itertools.product(("root",) if self.tied else ("ends", "root"), counts, (True, False))
        return {each: self.cost(self.wrapping(*each[:2]), each[2]) for each in every}

    def fastest(self) -> tuple[str, int | None, bool] | None:
        """Return the fastest of them that fits."""
        fits = {each: seconds for each, (held, seconds) in self.candidates().items() if held <= self.budget}
        return min(fits, key=fits.get, default=None)  # type: ignore[arg-type]

    def by_reasons(self) -> tuple[str, int | None, bool] | None:
        """Return what the rule leads to: finer where it does not fit; else kept, coarser while that is faster, and one unit."""
        ends, best, least = "root" if self.tied else "ends", None, math.inf

        def better(ends: str, blocks: int | None, reshard: bool) -> bool:
            nonlocal best, least
            held, seconds = self.cost(self.wrapping(ends, blocks), reshard)
            if fits := held <= self.budget and seconds < least:
                best, least = (ends, blocks, reshard), seconds
            return fits

        if not better(ends, 1, True):
            better(ends, 0, True)
            better(ends, 0, False)
            return best
        freed, layers = not better(ends, 1, False), len(self.parts) // 2 - 1
        sizes = [2**i for i in range(1, layers.bit_length()) if 2**i <= layers]
        all(better(ends, blocks, freed) for blocks in sizes)  # until one is no better
        better("root", None, True)
        return best


def _situation(
    layers: int, attention: int, mlp: int, table: int, tied: bool, latency: float, compute: float, budget: object
) -> Situation:
    sizes = {"attention": attention, "mlp": mlp}
    blocks = {f"blocks.{i}.{part}": size for i in range(layers) for part, size in sizes.items()}
    made = Situation({"embed": table, **blocks, "head": 0 if tied else table}, tied, latency, compute)
    if isinstance(budget, tuple):
        made.budget = made.cost(made.wrapping(*budget[:2]), budget[2])[0]
    elif isinstance(budget, int):
        made.budget = budget
    return made


def situations(seed: int = 606) -> Iterator[tuple[str, Situation]]:
    """Yield those by hand, and some drawn."""
    return ((name, copy.copy(made)) for name, made in _drawn(seed))  # each has tries of its own


@lru_cache(maxsize=4)
def _drawn(seed: int) -> list[tuple[str, Situation]]:
    found = [(name, _situation(*numbers_)) for name, numbers_ in _SITUATIONS.items()]
    dice = random.Random(seed)
    while len(found) < len(_SITUATIONS) + 15:
        attention = 24 * dice.randint(1, 50)
        mlp, table = attention * dice.choice((1, 2, 12)), attention * dice.choice((1, 4, 12))
        latency, compute = attention * dice.choice((0.05, 1, 4)), dice.choice((0.3, 1.0, 3.0))
        made = _situation(dice.randint(2, 8), attention, mlp, table, dice.random() < 0.3, latency, compute, None)
        freed = dice.random() < 0.5  # a budget that keeping may not fit
        budgets = sorted(held for (*_, r), (held, _) in made.candidates().items() if r or not freed)
        made.budget = dice.choice(budgets[1:])
        best, reasoned = made.fastest(), made.by_reasons()
        seconds = [made.cost(made.wrapping(*each[:2]), each[2])[1] for each in (best, reasoned) if each]
        if best is None or (reasoned and seconds[1] <= (1 + _SLOWER) / 2 * seconds[0]):
            found.append((f"drawn, number {len(found) - len(_SITUATIONS) + 1}", made))
    return found


@check(
    idea="Memory says which wrappings are possible, and the step time says which of them to take; try those that a reason "
    "speaks for.",
    section="When to use which wrapping policy",
    line="Begin with one block a unit and the tables as units; parts of a block, freed or kept, if that does not fit, else "
    "kept units if they fit, then two, four and more blocks a unit as long as the step gets shorter, at last one unit.",
)
def choose_wrapping(answer: Callable[..., Any], seed: int = 606) -> str:
    """Judge `choose_wrapping(parts, tied, budget, price)` in situations by hand, and in some that are drawn."""
    unseen = [one for each in (seed + 1000, NEW.randrange(2**32)) for one in [*situations(each)][len(_SITUATIONS) :]]
    cases, most = [*situations(seed), *((f"unseen, {name}", made) for name, made in unseen)], 0
    for name, made in cases:
        _judge_choice(name, made, _asked(answer, made))
        most = max(most, made.tries)
    refuse("", ("The check's own lists have answered: a machine at work has none, so let the price say what to try next",
                any(name.startswith(f"{__name__}.") and "<" not in name for name in getattr(answer, "called", ()))))  # fmt: skip
    return f"{len(cases)} situations, with {most} prices in each at most, and in each the fastest that fits, or nearly."


def _asked(answer: Callable[..., Any], made: Situation) -> Any:
    """Return what was answered: the units as the parts run, and whether they are freed; or None."""
    got = answer(dict(made.parts), made.tied, made.budget, lambda units, reshard=True: made.price(units, reshard))
    if got is None:
        return None
    named = by_name(got, "units", "reshard", otherwise="Return a dictionary with units and reshard, or None.")
    if isinstance(freed := named["reshard"], str) or getattr(freed, "shape", ()) or freed not in (True, False):
        raise Wrong(f"`reshard` is True or False, and not {named['reshard']!r}.")
    return made.read(named["units"]), bool(named["reshard"])


def _judge_choice(name: str, made: Situation, got: tuple[Units, bool] | None) -> None:
    best = made.fastest()
    if got is None:
        if best is not None:
            _explain_nothing(f"{name}: you find nothing, and something fits in {made.budget:,} bytes", made)
        return
    (units, reshard), (held, seconds) = got, made.cost(*got)
    case = f"{name}: {len(units)} units beside the root, {'freed' if reshard else 'kept'}"
    if held > made.budget:
        _explain_memory(f"{case}, hold {held:,} bytes of {made.budget:,}", made, units, reshard)
    if best is not None:  # else it found one that the check does not know
        least = made.cost(made.wrapping(*best[:2]), best[2])[1]
        if seconds > _SLOWER * least:
            case = f"{case}, take {seconds:,.0f} s, and {least:,.0f} s are possible"
            _explain_time(case, made, units, reshard, best, least)


_TABLES = "The tables in the root are unsharded throughout, and their gradients are reduced last: make them units"
_LARGE = "A block is too large a unit: its neighbour, its gradients and their buffer are held too. Make parts units"


def _explain_nothing(case: str, made: Situation) -> NoReturn:
    fit = [each for each, (held, _) in made.candidates().items() if held <= made.budget]
    refuse(
        "",
        (f"{case}. {_LARGE}", all(blocks == 0 for _, blocks, _ in fit)),
        (f"{case}. {_TABLES}", not made.tied and all(ends == "ends" for ends, _, _ in fit)),
        (f"{case}. Small units, freed after forward, hold the least", True),
    )


def _explain_memory(case: str, made: Situation, units: Units, reshard: bool) -> NoReturn:
    fit = [each for each, (held, _) in made.candidates().items() if held <= made.budget]
    inside = {each for unit in units for each in unit}
    ends = [[each] for each in ("embed", "head") if each not in inside]

    def fits(other: Units, freed: bool) -> bool:
        return made.cost(made.read(other), freed)[0] <= made.budget

    refuse(
        "",
        (f"{case}. Nothing that the chapter speaks of fits, and then the answer is None", not fit),
        (f"{case}. Kept units pile up until backward: free them", not reshard and fits(units, True)),
        (f"{case}. {_TABLES}", lambda: ends and not made.tied and fits([*units, *ends], reshard)),
        (f"{case}. {_LARGE}", all(n == 0 for _, n, _ in fit) and any("attention" in p for u in units for p in u[:-1])),
        (f"{case}. A unit is held with its neighbour, its gradients and their buffer, and the root throughout", True),
    )


def _explain_time(case: str, made: Situation, units: Units, reshard: bool, best: tuple, least: float) -> NoReturn:
    fit = {each: seconds for each, (held, seconds) in made.candidates().items() if held <= made.budget}
    freed, mine = min((fit[each] for each in fit if each[2]), default=math.inf), made.cost(units, reshard)[1]
    count, faster = len(units) or 1, []
    for (*way, free), seconds in fit.items():
        other = made.wrapping(*way)
        mine_is, it_is = (({*itertools.chain(*of)}, ["embed"] in of, ["head"] in of) for of in (units, other))
        if free == reshard and _SLOWER * seconds < mine and (not units or not (other or free) or mine_is == it_is):
            faster.append((seconds, len(other) or 1))
    n = min(faster, default=(0, count))[1]  # of those whose units differ in size alone, or are the model
    refuse(
        "",
        (f"{case}. There is a wrapping with room to keep what forward has gathered: then backward gathers nothing again",
         reshard and not best[2] and freed > _SLOWER * least),
        (f"{case}. Larger units are faster: each message waits for the latency", n < count),
        (f"{case}. Smaller units are faster: the first arrives sooner, and others travel while it computes", n > count),
        (f"{case}. Of what fits, take the fastest", True),
    )  # fmt: skip
