"""The checks of rung 06: what a step sends, units by size, a checkpoint, and which wrapping to take.

A wrapping is judged by what it costs, bytes by what FSDP2 holds in backward and time by `fsdp_step`, beside the best of
those that the chapter speaks of.

The check of a checkpoint plays ranks that take turns at every disk operation and barrier, in several orders: rank 0 far
ahead of the others, or far behind. A write takes two turns, and in between the file is torn. The disk remembers what it
held after each; a power cut may come at any of them.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NoReturn

import torch
from torch import nn

from lablib.calc.parallel import TimedUnit, fsdp_step, fsdp_traffic, peak_held_bytes
from lablib.checks.judging import Wrong, by_name, check, close, numbers, refuse, some
from lablib.launch.fsdp import forecast, tied_parameters, wrap_units
from lablib.launch.ranks import Endless, Turns
from lablib.toys.transformer import Transformer, tiny_config

__all__ = ["Situation", "choose_wrapping", "count_collectives", "situations", "units_by_size", "write_checkpoint"]


# --- messages and values of a step --------------------------------------------------------------------------

_COUNTS = ("all_gathers", "reduce_scatters", "gathered", "reduced")


def _counted(root: int, units: list[int], reshard: bool, micro_batches: int, sync_every: bool) -> dict[str, int]:
    how = {"reshard": reshard, "micro_batches": micro_batches, "sync_every": sync_every}
    traffic = fsdp_traffic([root, *units], 2, **how, param_bytes=1, reduce_bytes=1)
    found = [each[kind] for each in (traffic.calls, traffic.bytes) for kind in ("all_gather", "reduce_scatter")]
    return dict(zip(_COUNTS, found, strict=True))


@check(
    idea="A unit that is freed after forward is gathered a second time in backward, and the root is kept until then.",
    section="Collectives of a step: 1 + 2U gathers, 1 + U scatters",
    line="Count the root once and every other unit once or twice in each micro-batch, and each of them once in every "
    "backward that reduces.",
)
def count_collectives(answer: Callable[..., dict[str, int]], seed: int = 66) -> str:
    """Judge `count_collectives(root, units, reshard, micro_batches, sync_every)` by hand, then on random models."""
    dice = random.Random(seed)
    cases = [(6, [10, 22, 14], True, 1, True), (6, [10, 22, 14], False, 1, True), (6, [10, 22, 14], True, 5, True)]
    cases += [(6, [10, 22, 14], True, 5, False), (8, [], True, 1, True)]
    for _ in range(40):
        # Even sizes: on two ranks nothing is padded.
        units = [2 * dice.randint(1, 10**6) for _ in range(dice.randint(0, 90))]
        flags = (dice.random() < 0.5, dice.randint(1, 8), dice.random() < 0.5)
        cases.append((2 * dice.randint(1, 10**6), units, *flags))
    for case in cases:
        got, right = by_name(answer(case[0], list(case[1]), *case[2:]), *_COUNTS), _counted(*case)
        for name in _COUNTS:
            if not close(got[name], right[name], rel=0):
                _explain_count(name, got, *case)
    return f"{len(cases)} steps, collective by collective."


def _explain_count(
    name: str,
    answer: Mapping[str, Any],
    root: int,
    units: list[int],
    reshard: bool,
    micro_batches: int,
    sync_every: bool,
) -> NoReturn:
    got = float(answer[name])
    how = f"reshard={reshard}, micro_batches={micro_batches}, sync_every={sync_every}"
    case = f"root={root:,}, units=[{some(units)}], {how}"
    other = partial(_counted, root, units)
    truth, several = other(reshard, micro_batches, sync_every), micro_batches > 1
    right = truth[name]
    if name in ("gathered", "reduced") and got in (4 * right, right / 2, 2 * right):
        raise Wrong(f"Count the values in the whole arrays: not bytes, and not the part that a ring sends ({case}).")
    if name in ("all_gathers", "gathered"):
        counts, once = name == "all_gathers", 1 if name == "all_gathers" else root
        one_less = counts and got == right - micro_batches

        def lacks(size: int) -> bool:
            """Say whether a message of this size is missing in each micro-batch; the count alone cannot tell which."""
            return (one_less or not counts) and close(
                answer["gathered"], truth["gathered"] - micro_batches * size, rel=0
            )

        refuse(
            case,
            ("A unit that was freed after forward is gathered again in backward, one that was kept is not",
             got == other(not reshard, micro_batches, sync_every)[name]),
            ("The root is not freed after forward: backward starts with it", got == right + micro_batches * once),
            ("The last unit is needed first in backward, but FSDP frees it like the others: only the root is kept",
             lambda: reshard and units and lacks(units[-1])),
            ("Every micro-batch gathers again: weights are freed after each backward, whether or not gradients are reduced",
             several and got in (once_a_step := other(reshard, 1, True)[name], once_a_step + (micro_batches - 1) * once)),
            ("The root is gathered too, once in each micro-batch", lambda: lacks(root) or (one_less and not reshard)),
            ("The root is kept from forward to backward only: then it is freed like the others, and the next micro-batch "
             "gathers it again", several and got == right - (micro_batches - 1) * once),
            ("A message is missing in each micro-batch: the root is gathered once, and the last unit is freed after forward "
             "like the others", one_less),
            (f"`{name}` is {right:,}, not {got:,.0f}: write down which units are gathered in forward, and which again in "
             "backward, one message each", True),
        )  # fmt: skip
    refuse(
        case,
        ("Gradients are reduced after every backward, or, without sync_every, after the last one only",
         several and got == other(reshard, micro_batches, not sync_every)[name]),
        ("The root has gradients too, and one reduce-scatter of its own",
         got == right - (root if name == "reduced" else 1) * (micro_batches if sync_every else 1)),
        ("Gradients exist in backward only: one reduce-scatter for each unit, not two", got == 2 * right),
        (f"`{name}` is {right:,}, not {got:,.0f}: each unit and the root reduce once a backward that reduces", True),
    )  # fmt: skip


# --- units by size ------------------------------------------------------------------------------------------


def _random_tree(dice: random.Random, depth: int = 0) -> nn.Module:
    if depth == 3 or (depth and dice.random() < 0.3):
        return nn.Linear(dice.randint(2, 30), dice.randint(2, 30))
    return nn.Sequential(*[_random_tree(dice, depth + 1) for _ in range(dice.randint(2, 4))])


class _Mixture(nn.Module):
    """A parameter of its own, and a list of experts, which has no forward: what is open in it is handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(40))
        self.experts = nn.ModuleList(nn.Linear(9, 10) for _ in range(3))


def _tied_layers() -> nn.Sequential:
    first, second = nn.Linear(9, 10), nn.Linear(9, 10)
    second.weight, second.bias = first.weight, first.bias
    return nn.Sequential(first, second)


@cache
def _unit_cases(seed: int) -> list[tuple[str, nn.Module, int, list[tuple[str, nn.Module]]]]:
    """Return models in words and as they are, a least number of values, and the units of it."""
    dice = random.Random(seed)
    with torch.device("meta"):  # shapes are enough
        model = Transformer(tiny_config("llama", num_layers=3, hidden=64))
        by_hand = nn.Sequential(nn.Sequential(nn.Linear(9, 10), nn.Linear(9, 10)), nn.Linear(9, 30))
        mixture = nn.Sequential(_Mixture(), nn.Linear(9, 10))
        trees = [_random_tree(dice) for _ in range(12)]
        tied = Transformer(tiny_config("gpt2", num_layers=2, hidden=32))
        twins = nn.Sequential(nn.Sequential(_tied_layers(), nn.Linear(9, 10)), nn.Linear(9, 30))
    block, table = sum(p.numel() for p in model.blocks[0].parameters()), tied.embed.weight.numel()
    leasts = [
        ("two layers of 100 and one of 300", by_hand, (100, 150, 250, 400)),
        ("40 values beside a list of three layers of 100", mixture, (150, 320)),
        ("the Transformer of this lab", model, (block // 8, block // 2, block, 2 * block)),
        ("a tied pair of 100 and a layer of 100 beside one of 300", twins, (100, 150, 250, 400)),
        ("a Transformer whose embedding and head are tied", tied, (table // 3, table, 2 * table)),
    ]
    for number, tree in enumerate(trees):
        leasts.append((f"random model {number}", tree, (dice.randint(20, sum(p.numel() for p in tree.parameters())),)))
    cases = [(what, tree, least) for what, tree, several in leasts for least in several]
    return [(what, tree, least, wrap_units(tree, f"size:{least}")) for what, tree, least in cases]


@check(
    idea="A parameter belongs to one unit: once a module has closed one, the modules around it do not count it again.",
    section="Wrapping policies: which modules become units",
    line="Add a module's own parameters and what its children have left open; at `least` append its name and leave nothing "
    "open, else hand the sum to the module around it.",
)
def units_by_size(answer: Callable[[nn.Module, int], list[str]], seed: int = 6) -> str:
    """Judge `units_by_size(model, least)` by hand, on the lab's model, and on random trees."""
    cases = _unit_cases(seed)
    for what, model, least, units in cases:
        _judge_units(answer(model, least), model, least, [name for name, _ in units], f"{what}, least {least:,}")
    return f"{len(cases)} models and sizes, inner units before outer ones."


def _judge_units(original: object, model: nn.Module, least: int, right: list[str], case: str) -> None:
    got = numbers(original, "What you return")
    refuse("",
        ("Return a list of module names, such as `blocks.0.mlp`", not all(isinstance(name, str) for name in got)),
        ("A set has no order, and `fully_shard` needs inner modules before outer ones: return a list",
         isinstance(original, set | frozenset)),
        ("The root is a unit anyway, and gets what is left: don't return its name, the empty one", "" in got),
    )  # fmt: skip
    if got == right:
        return
    modules = dict(model.named_modules())
    if strangers := [name for name in got if name not in modules]:
        raise Wrong(f"The model has no module {strangers[0]!r}: a name is the whole path from the root, with dots between "
                    f"its parts and none in front ({case}).")  # fmt: skip
    lists = [name for name in got if isinstance(modules[name], nn.ModuleList)]
    torn = [
        (unit, names) for names in tied_parameters(model) for unit in got
        if 0 < sum(name.startswith(f"{unit}.") for name in names) < len(names)
    ]  # fmt: skip
    own = _own_parameters(model, got)
    small = [name for name in got if own[name] < least]
    missing = [name for name in right if name not in got]
    inside = [(name, other) for i, name in enumerate(got) for other in got[i + 1 :] if other.startswith(f"{name}.")]
    extra = [name for name in got if name not in right]
    refuse(
        case,
        (lambda: f"{lists[0]!r} is an nn.ModuleList: it has no forward, so nothing would gather it", lists),
        ("A module is in the list twice; a name is the whole path from the root", len(set(got)) < len(got)),
        (lambda: f"{torn[0][0]!r} has one of {' and '.join(torn[0][1])}, which are one parameter: it belongs to one unit, and "
         "torch stops; leave it open for the module around both", torn),
        (lambda: f"Unit {small[0]!r} has {own[small[0]]:,} parameters of its own, fewer than {least:,}; those of units inside "
         "it do not count again", small),
        (lambda: f"{missing[0]!r} has {_own_parameters(model, right)[missing[0]]:,} open parameters, its own and what its "
         f"children leave, lists too, and is no unit: close one as soon as there are {least:,}, from the inside to the "
         "outside", missing),
        (lambda: f"{extra[0]!r} is a unit too early or too late: count from the inside to the outside", extra),
        (lambda: "{!r} comes before {!r}, which lies inside it: `fully_shard(outer)` would take the inner parameters first"
         .format(*inside[0]), inside),
    )  # fmt: skip


def _own_parameters(model: nn.Module, units: list[str]) -> dict[str, int]:
    """Return the parameters of every unit that no unit inside it has."""
    own = dict.fromkeys([*units, ""], 0)
    for parameter, tensor in model.named_parameters():
        around = [unit for unit in own if not unit or parameter.startswith(f"{unit}.")]
        own[max(around, key=len)] += tensor.numel()
    return own


# --- a checkpoint -------------------------------------------------------------------------------------------

_TORN = "torn"
_PATIENCE = 100  # times that a rank may ask for one path while nothing happens
_EVENTS = 2000

Files = dict[str, Any]


class World(Turns):
    """Ranks that take turns; the first one in `order` that can run does."""

    def __init__(self, ranks: int, order: Sequence[int], files: Files):
        super().__init__(ranks)
        self.order, self.files = order, copy.deepcopy(files)
        self.moments: list[Files] = [dict(self.files)]
        self.waiting: set[int] = set()  # at a barrier
        self.events = 0
        self.asked: Counter[tuple[int, str]] = Counter()  # how often a rank asked for a path since anything happened

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
        self._count()
        self.waiting.add(rank)
        self.pause(rank)

    def _count(self) -> None:
        self.asked.clear()
        self.events += 1
        if self.events > _EVENTS:
            raise Wrong(f"After {_EVENTS:,} barriers and operations on the disk the ranks still go on: a loop in your answer "
                        "never ends.")  # fmt: skip

    def changed(self, rank: int) -> None:
        """Remember the disk as it is now, and give the turn back."""
        self._count()
        self.moments.append(dict(self.files))
        self.pause(rank)


class Disk:
    """One rank's view of the disk that all share."""

    def __init__(self, world: World, rank: int):
        self._world, self._rank = world, rank

    def write(self, path: str, content: Any) -> None:
        """Write a file, folders included; it is torn until the write has ended."""
        self._world.files[path] = _TORN
        self._world.changed(self._rank)
        self._world.files[path] = copy.deepcopy(content)
        self._world.changed(self._rank)

    def rename(self, old: str, new: str) -> None:
        """Rename a file or a folder at once; the new name must be free."""
        files = self._world.files
        if not _inside(files, old):
            raise Wrong(f"Rank {self._rank} renames {old!r}, which is not there: one rank renames, once.")
        if _inside(files, new):
            raise Wrong(f"Rank {self._rank} renames {old!r} to {new!r}, which exists already: one rank renames, once.")
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
        there = bool(_inside(self._world.files, path))
        self._world.asked[self._rank, path] += 1
        often = _PATIENCE * (2 if there else 1)  # who polls for several, names the missing
        if self._world.asked[self._rank, path] > often:
            raise Wrong(f"Rank {self._rank} asks again and again whether {path!r} is there. A file is there before it is "
                        "complete, so who polls may see half of it: what waits for the others is a barrier.")  # fmt: skip
        return there


def _inside(files: Files, path: str) -> list[str]:
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


#: Ranks, who goes first, and whether a crashed job of more ranks has left its folder behind.
_CASES = [(2, (0, 1), False), (2, (1, 0), False), (3, (0, 2, 1), False), (3, (2, 1, 0), True), (4, (1, 3, 0, 2), True)]


@check(
    idea="A name that others trust may appear only when everything under it is complete, and only a barrier tells you that.",
    section="Checkpoints: DCP, each rank writes its rows",
    line="Rank 0 renames the folder that all wrote aside, after a barrier that every rank reaches with its write behind it.",
)
def write_checkpoint(answer: Callable[..., None]) -> str:
    """Judge `write_checkpoint(disk, rank, ranks, step, state, barrier)` at every moment, for several orders of ranks."""
    moments = 0
    for ranks, order, leftover in _CASES:
        old = {f"step-40/rank-{r}": {**_state(r, 40), "step": 40} for r in range(ranks)}
        if leftover:  # a job of more ranks died just before it published this very step
            more = 2 * ranks + 1
            old |= [files for files in _play(answer, more, range(more), {}, 49) if not _published(files)][-1]
        world = _play(answer, ranks, order, old, 50)
        moments += len(world)
        written: set[int] = set()  # ranks whose new file has been on the disk, whole
        for files in world:
            written |= (there := _on_disk(files, ranks))
            _judge_disk(files, ranks, written - there)
        _judge_end(_published(world[-1]), ranks)
    return f"{len(_CASES)} runs, {moments} moments, and a whole checkpoint to resume from at each of them."


def _play(answer: Callable[..., None], ranks: int, order: Sequence[int], old: Files, seen: int) -> list[Files]:
    """Save step 50 of what was trained until step `seen`, and return every state of the disk."""
    world = World(ranks, order, old)
    world.run(lambda disk, rank, barrier: answer(disk, rank, ranks, 50, _state(rank, seen), barrier))
    return world.moments


def _on_disk(files: Files, ranks: int) -> set[int]:
    """Return the ranks whose part of the new checkpoint lies anywhere on the disk."""
    models = [content.get("model") for content in files.values() if isinstance(content, dict)]
    return {rank for rank in range(ranks) if _state(rank, 50)["model"] in models}


def _judge_disk(files: Files, ranks: int, lost: set[int]) -> None:
    found = _published(files)
    early = [folder for folder in found if folder not in ("step-40", "step-50")]
    refuse("",
        (lambda: f"{early[0]!r} begins with step-, so a job that resumes takes it for whole while you still write into it. "
         "Give the folder that you write aside another kind of name", early),
        ("There is a moment without any checkpoint: the old one must stay until the new one is published", not found),
    )  # fmt: skip
    for folder, content in found.items():
        absent = [rank for rank in range(ranks) if f"rank-{rank}" not in content]
        missing = f"rank-{absent[0]}" if absent else ""
        strangers = [name for name in content if not name.removeprefix("rank-").isdigit()]
        refuse("",
            (f"There is a moment when {folder} is visible and half written. Write aside, then rename",
             _TORN in content.values()),
            (f"{folder} holds {''.join(strangers[:1])!r}, and the file of a rank is called {missing!r}", missing and strangers),
            (f"{folder} is published without {missing}, which was written and then removed again: what a crash has left must "
             "be cleared before anybody writes", lost & set(absent)),
            (f"There is a moment when {folder} is visible without {missing}. It may be published only when every rank has "
             "written", absent),
        )  # fmt: skip


def _judge_end(found: dict[str, Files], ranks: int) -> None:
    if "step-50" not in found:
        raise Wrong("All ranks have returned, and there is no folder step-50: nobody published it.")
    content = found["step-50"]
    shards = [name for name in content if name.removeprefix("rank-").isdigit()]  # another may be a marker or an index
    if len(shards) > ranks:
        raise Wrong(f"step-50 holds the files of {len(shards)} ranks, and you have {ranks}: the rest comes from a crashed "
                    "job, whose folder nobody cleared.")  # fmt: skip
    for rank in range(ranks):
        state, right = content[f"rank-{rank}"], _state(rank, 50)
        has = state if isinstance(state, dict) else {}
        other = has.get("model") != right["model"] or has.get("optimizer") != right["optimizer"]
        whose = "a crashed job" if other and "model" in has and has["model"][1] != 50 else "another rank"
        refuse("",
            ("A rank's file is one dictionary: the keys of `state`, and beside them the key step", "model" not in has),
            ("The optimizer state is not saved: the resumed run would start its moments from zero",
             "optimizer" not in has),
            ("The step is not saved in the file: the learning rate of the resumed run hangs on it", "step" not in has),
            (f"The file of rank {rank} holds the shard of {whose}", other),
            ("The saved step is not the one that was given", has.get("step") != 50),
        )  # fmt: skip


# --- which wrapping -----------------------------------------------------------------------------------------

#: The calls of `fully_shard` before the last one, each with the parts of its unit; the rest is the root's.
Units = list[list[str]]

_RATIO = 2  # gradients are reduced in 4 bytes, and weights gathered in 2
_RANKS = 2
_TRIES = 200
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
    "a huge MLP": (4, 120, 2400, 240, False, 4, 1.0, ("ends", 0, True)),
    "nothing fits": (4, 120, 240, 240, False, 4, 1.0, 240),
}

#: The same of models that are sharded as the answer says: layers, hidden, the width of the MLP, vocabulary.
_REAL = {
    "a large vocabulary": (4, 32, 64, 512, False, ("ends", 1, True)),
    "a huge MLP": (2, 32, 512, 64, False, ("ends", 0, True)),
    "tied tables": (4, 32, 64, 128, True, ("root", 1, True)),
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
            raise Wrong(f"{_TRIES} wrappings are tried and you want another one: think of which can be the best, by what "
                        "decides, and try those.")  # fmt: skip
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

    def needs_luck(self) -> bool:
        """Say whether only odd wrappings are fast: three blocks a unit, or blocks as units and large tables in the root."""
        every = {each: cost for each, cost in self.candidates().items() if cost[0] <= self.budget}
        usual = {each: cost for each, cost in every.items() if each[1] in (None, 0, 1, 2, 4) and
                 (self.tied or each[1] is None or each[0] == "ends")}  # fmt: skip
        least = min((seconds for _, seconds in every.values()), default=0.0)
        return min((seconds for _, seconds in usual.values()), default=math.inf) > (1 + _SLOWER) / 2 * least


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


def _real_situation(layers: int, hidden: int, width: int, vocab: int, tied: bool, budget: tuple) -> Situation:
    """Return the situation of a model of that size, in bf16, on a machine that is made up."""
    sizes = (4 * hidden**2, 4 * hidden * width, 2 * vocab * hidden)
    return _situation(layers, *sizes, tied, 0.02 * sizes[0], 1.0, budget)


def situations(seed: int = 606) -> Iterator[tuple[str, Situation]]:
    """Yield those by hand, and some drawn."""
    return ((name, copy.copy(made)) for name, made in _drawn(seed))  # each has tries of its own


@lru_cache(maxsize=4)
def _drawn(seed: int) -> list[tuple[str, Situation]]:
    found = [(name, _situation(*numbers_)) for name, numbers_ in _SITUATIONS.items()]
    dice = random.Random(seed)
    while len(found) < len(_SITUATIONS) + 15:
        attention = 24 * dice.randint(1, 50)
        mlp, table = attention * dice.choice((1, 2, 6)), attention * dice.choice((1, 4, 12))
        latency, compute = attention * dice.choice((0.05, 1, 4)), dice.choice((0.3, 1.0, 3.0))
        made = _situation(dice.randint(2, 8), attention, mlp, table, dice.random() < 0.3, latency, compute, None)
        made.budget = dice.choice(sorted(held for held, _ in made.candidates().values())[1:])
        if not made.needs_luck():
            found.append((f"drawn, number {len(found) - len(_SITUATIONS) + 1}", made))
    return found


@check(
    idea="Memory says which wrappings are possible, and the step time says which of them to take; try those that a reason "
    "speaks for.",
    section="When to use which wrapping policy",
    line="Try the tables in the root and as units, with the parts of a block, one block and several blocks in a unit, freed "
    "and kept, and take the fastest that fits.",
)
def choose_wrapping(answer: Callable[..., Any], seed: int = 606) -> str:
    """Judge `choose_wrapping(parts, tied, budget, price)` by formula, then shard three real models as it says."""
    cases = list(situations(seed))
    for name, made in cases:
        _judge_choice(name, made, _asked(answer, made))
    told = []
    for name, (*numbers_, budget) in _REAL.items():
        made = _real_situation(*numbers_, budget)
        got = _asked(answer, made)
        _judge_choice(name, made, got)
        held = _played(tuple(numbers_), tuple(map(tuple, got[0])), got[1])
        if held > made.budget:
            raise AssertionError(f"{name}, {got}: the tracker saw {held:,} bytes, budget {made.budget:,}")
        told.append(f"{name}, {held:,} of {made.budget:,} bytes")
    return f"{len(cases)} situations by formula. Sharded as you say, and played under PyTorch's tracker: {'; '.join(told)}."


def _asked(answer: Callable[..., Any], made: Situation) -> Any:
    """Return what was answered: the units as the parts run, and whether they are freed; or None."""
    got = answer(dict(made.parts), made.tied, made.budget, lambda units, reshard=True: made.price(units, reshard))
    if got is None:
        return None
    otherwise = "Return a dictionary with units and reshard, or None if nothing fits."
    named = by_name(got, "units", "reshard", otherwise=otherwise)
    if isinstance(named["reshard"], str) or named["reshard"] not in (True, False):
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
            _explain_time(case, made, len(units), reshard, best, least)


_TABLES = "The tables in the root are unsharded throughout, and so are their gradients: make them units"
_LARGE = "One part of a block is large, and held with its neighbour, its gradients and their buffer: make parts units"


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
        (f"{case}. {_LARGE}", all(blocks == 0 for _, blocks, _ in fit)),
        (f"{case}. A unit is held with its neighbour, its gradients and their buffer: smaller units hold less", True),
    )


def _explain_time(case: str, made: Situation, count: int, reshard: bool, best: tuple, least: float) -> NoReturn:
    freed = [cost[1] for each, cost in made.candidates().items() if each[2] and cost[0] <= made.budget]
    fewer = len(made.wrapping(*best[:2]))
    refuse(
        "",
        (f"{case}. There is room to keep what forward has gathered: then backward gathers nothing again",
         reshard and not best[2] and min(freed, default=math.inf) > _SLOWER * least),
        (f"{case}. Each collective waits for the latency first: larger units pay it less often", count > fewer),
        (f"{case}. What is gathered at once overlaps with nothing, since nothing runs before it has arrived: smaller units "
         "travel while others compute", count < fewer),
        (f"{case}. Of what fits, take the fastest", True),
    )  # fmt: skip


class _Stack(nn.Module):
    """A model of the parts of a situation, where the parts of a unit are one module."""

    def __init__(self, layers: int, hidden: int, width: int, vocab: int, tied: bool, units: Sequence[Sequence[str]]):
        super().__init__()
        parts: dict[str, nn.Module] = {"embed": nn.Embedding(vocab, hidden)}
        for i, (name, inner) in itertools.product(range(layers), (("attention", hidden), ("mlp", width))):
            two = (nn.Linear(hidden, inner, bias=False), nn.Linear(inner, hidden, bias=False))
            parts[f"blocks.{i}.{name}"] = nn.Sequential(*two)
        parts["head"] = nn.Linear(hidden, vocab, bias=False)
        if tied:
            parts["head"].weight = parts["embed"].weight
        first = {unit[0]: unit for unit in units}
        inside = {name for unit in units for name in unit}
        for i, (name, part) in enumerate(parts.items()):
            if name in first:
                self.add_module(f"unit{i}", nn.Sequential(*[parts[each] for each in first[name]]))
            elif name not in inside:
                self.add_module(f"part{i}", part)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        for module in self.children():
            tokens = module(tokens)
        return tokens

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


@cache
def _played(sizes: tuple, units: tuple[tuple[str, ...], ...], reshard: bool) -> int:
    """Shard a model, play a step under PyTorch's tracker, and return the most bytes that were unsharded."""
    seen = forecast(
        partial(_Stack, *sizes, units),
        world_size=_RANKS,
        batch=2,
        seq=16,
        optimizer=partial(torch.optim.SGD, lr=0.1),  # has no part in what is unsharded, and is soon played
        wrap=(lambda name, _: name.startswith("unit") and "." not in name) if units else "none",
        precision="bf16",
        reshard_after_forward=reshard,
    )
    return seen.most_held
