"""The checks of rung 06: what a step sends, units by size, a checkpoint, and which wrapping rule to take.

Of the choice of a rule, both sides are judged: bytes by what FSDP2 holds in backward, and time by `fsdp_step`.

The check of a checkpoint plays ranks that take turns at every disk operation and barrier, in several orders: rank 0 far
ahead of the others, or far behind. A write takes two turns, and in between the file is torn. The disk remembers what it
held after each; a power cut may come at any of them.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import nn

from lablib.calc.models import ModelConfig
from lablib.calc.parallel import TimedUnit, fsdp_step, fsdp_traffic, peak_held_bytes
from lablib.checks.judging import Wrong, check, close, numbers, some
from lablib.launch.fsdp import calc_units, forecast, wrap_units
from lablib.launch.ranks import Endless, Turns
from lablib.toys.transformer import Transformer, tiny_config

__all__ = ["choose_wrapping", "count_collectives", "units_by_size", "write_checkpoint"]


# --- messages and values of a step --------------------------------------------------------------------------

_COUNTS = ("all_gathers", "reduce_scatters", "gathered", "reduced")


def _counted(root: int, units: list[int], reshard: bool, micro_batches: int, sync_every: bool) -> dict[str, int]:
    traffic = fsdp_traffic(
        [root, *units],
        2,
        reshard=reshard,
        micro_batches=micro_batches,
        sync_every=sync_every,
        param_bytes=1,
        reduce_bytes=1,
    )
    calls, values = traffic.calls, traffic.bytes
    numbers = (calls["all_gather"], calls["reduce_scatter"], values["all_gather"], values["reduce_scatter"])
    return dict(zip(_COUNTS, numbers, strict=True))


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
        got, right = answer(case[0], list(case[1]), *case[2:]), _counted(*case)
        if not isinstance(got, Mapping) or set(got) != set(_COUNTS):
            raise Wrong(f"Return a dictionary with the keys {', '.join(_COUNTS)}.")
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
) -> None:
    got = float(answer[name])
    case = (f"root={root:,}, units={some(units)}, reshard={reshard}, micro_batches={micro_batches}, "
            f"sync_every={sync_every}")  # fmt: skip
    truth = _counted(root, units, reshard, micro_batches, sync_every)[name]
    if name in ("gathered", "reduced") and got in (4 * truth, truth / 2, 2 * truth):
        raise Wrong(f"Count the values in the whole arrays: not bytes, and not the part that a ring sends ({case}).")
    other = partial(_counted, root, units)
    if name in ("all_gathers", "gathered"):
        once = 1 if name == "all_gathers" else root
        values = other(reshard, micro_batches, sync_every)["gathered"]

        def lacks(size: int) -> bool:
            """Say whether a message of this size is missing in each micro-batch; the count alone cannot tell which."""
            counted = name == "gathered" or got == truth - micro_batches
            return counted and close(answer["gathered"], values - micro_batches * size, rel=0)

        if got == other(not reshard, micro_batches, sync_every)[name]:
            raise Wrong("A unit that was freed after forward is gathered again in backward, one that was kept is not "
                        f"({case}).")  # fmt: skip
        if got == truth + micro_batches * once:
            raise Wrong(f"The root is not freed after forward: backward starts with it ({case}).")
        if reshard and units and lacks(units[-1]):
            raise Wrong("The last unit is needed first in backward, but FSDP frees it like the others: only the root "
                        f"is kept ({case}).")  # fmt: skip
        if micro_batches > 1 and got == other(reshard, 1, True)[name]:
            raise Wrong("Every micro-batch gathers again: weights are freed after each backward, whether or not "
                        f"gradients are reduced ({case}).")  # fmt: skip
        if lacks(root) or (name == "all_gathers" and not reshard and got == truth - micro_batches):
            raise Wrong(f"The root has weights too: it is gathered once in each micro-batch ({case}).")
        if micro_batches > 1 and got == truth - (micro_batches - 1) * once:
            raise Wrong("The root is kept from forward to backward only: then it is freed like the others, and the next "
                        f"micro-batch gathers it again ({case}).")  # fmt: skip
        if name == "all_gathers" and got == truth - micro_batches:
            raise Wrong("A message is missing in each micro-batch: the root is gathered once, and the last unit is freed "
                        f"after forward like the others ({case}).")  # fmt: skip
        raise Wrong(f"`{name}` is {truth:,}, not {got:,.0f}: write down which units are gathered in forward, and which "
                    f"again in backward, one message each ({case}).")  # fmt: skip
    if micro_batches > 1 and got == other(reshard, micro_batches, not sync_every)[name]:
        raise Wrong(
            f"Gradients are reduced after every backward, or, without sync_every, after the last one only ({case})."
        )
    if got == truth - (root if name == "reduced" else 1) * (micro_batches if sync_every else 1):
        raise Wrong(f"The root has gradients too, and one reduce-scatter of its own ({case}).")
    if got == 2 * truth:
        raise Wrong(f"Gradients exist in backward only: one reduce-scatter for each unit, not two ({case}).")
    raise Wrong(f"`{name}` is {truth:,}, not {got:,.0f}: each unit and the root have one reduce-scatter a backward "
                f"that reduces ({case}).")  # fmt: skip


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


def _config() -> ModelConfig:
    return tiny_config("llama", num_layers=3, hidden=64)


def _unit_cases(seed: int) -> list[tuple[str, nn.Module, int]]:
    dice = random.Random(seed)
    with torch.device("meta"):  # shapes are enough
        model = Transformer(_config())
        by_hand = nn.Sequential(nn.Sequential(nn.Linear(9, 10), nn.Linear(9, 10)), nn.Linear(9, 30))
        mixture = nn.Sequential(_Mixture(), nn.Linear(9, 10))
        trees = [_random_tree(dice) for _ in range(12)]
    block = sum(p.numel() for p in model.blocks[0].parameters())
    cases = [("two layers of 100 and one of 300", by_hand, least) for least in (100, 150, 250, 400)]
    cases += [("40 values beside a list of three layers of 100", mixture, least) for least in (150, 320)]
    cases += [("the Transformer of this lab", model, least) for least in (block // 8, block // 2, block, 2 * block)]
    for number, tree in enumerate(trees):
        most = sum(p.numel() for p in tree.parameters())
        cases.append((f"random model {number}", tree, dice.randint(20, most)))
    return cases


@check(
    idea="A parameter belongs to one unit: once a module has closed one, the modules around it do not count it again.",
    section="Wrapping policies: which modules become units",
    line="Add a module's own parameters and what its children have left open; at `least` append its name and leave nothing "
    "open, else hand the sum to the module around it.",
)
def units_by_size(answer: Callable[[nn.Module, int], list[str]], seed: int = 6) -> str:
    """Judge `units_by_size(model, least)` by hand, on the lab's model, and on random trees."""
    cases = _unit_cases(seed)
    for what, model, least in cases:
        _judge_units(answer(model, least), what, model, least)
    return f"{len(cases)} models and sizes, inner units before outer ones."


def _judge_units(original: object, what: str, model: nn.Module, least: int) -> None:
    case = f"{what}, least {least:,}"
    got = numbers(original, "What you return")
    if not all(isinstance(name, str) for name in got):
        raise Wrong("Return a list of module names, such as `blocks.0.mlp`.")
    if isinstance(original, set | frozenset):
        raise Wrong("A set has no order, and `fully_shard` needs inner modules before outer ones: return a list.")
    if "" in got:
        raise Wrong("The root is a unit anyway, and gets what is left: don't return its name, the empty one.")
    modules = dict(model.named_modules())
    if strangers := [name for name in got if name not in modules]:
        raise Wrong(f"The model has no module {strangers[0]!r}: a name is the whole path from the root, with dots between "
                    f"its parts and none in front ({case}).")  # fmt: skip
    if lists := [name for name in got if isinstance(modules[name], nn.ModuleList)]:
        raise Wrong(f"{lists[0]!r} is an nn.ModuleList: it has no forward, so nothing would gather it ({case}).")
    if len(set(got)) < len(got):
        raise Wrong(f"A module is in the list twice; a name is the whole path from the root ({case}).")
    own = _own_parameters(model, got)
    if small := [name for name in got if own[name] < least]:
        raise Wrong(f"Unit {small[0]!r} has {own[small[0]]:,} parameters of its own; the others under it are in units "
                    f"already and do not count again ({case}).")  # fmt: skip
    right = [name for name, _ in wrap_units(model, f"size:{least}")] if _any_unit(model, least) else []
    if missing := [name for name in right if name not in got]:
        open_ = _own_parameters(model, right)[missing[0]]
        raise Wrong(f"{missing[0]!r} has {open_:,} open parameters, its own and what its children leave, lists too, and is no "
                    f"unit: close one as soon as there are {least:,}, from the inside to the outside ({case}).")  # fmt: skip
    if extra := [name for name in got if name not in right]:
        raise Wrong(f"{extra[0]!r} is a unit too early or too late: count from the inside to the outside ({case}).")
    for place, name in enumerate(got):
        if inner := [other for other in got[place + 1 :] if other.startswith(f"{name}.")]:
            raise Wrong(f"{name!r} comes before {inner[0]!r}, which lies inside it: `fully_shard(outer)` would take the "
                        f"inner parameters first ({case}).")  # fmt: skip


def _own_parameters(model: nn.Module, units: list[str]) -> dict[str, int]:
    """Return the parameters of every unit that no unit inside it has."""
    own = dict.fromkeys([*units, ""], 0)
    for parameter, tensor in model.named_parameters():
        around = [unit for unit in own if not unit or parameter.startswith(f"{unit}.")]
        own[max(around, key=len)] += tensor.numel()
    return own


def _any_unit(model: nn.Module, least: int) -> bool:
    return any(
        sum(p.numel() for p in module.parameters()) >= least
        for name, module in model.named_modules()
        if name and not isinstance(module, nn.ModuleList)
    )


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
        if (
            self._world.asked[self._rank, path] > (2 if there else 1) * _PATIENCE
        ):  # who polls for several, names the missing
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
        if leftover:  # a job of more ranks died while it wrote this very step
            old |= {f"tmp-50/rank-{r}": {**_state(r, 49), "step": 50} for r in range(ranks + 2)}
        world = World(ranks, order, old)
        world.run(lambda disk, rank, barrier, n=ranks: answer(disk, rank, n, 50, _state(rank, 50), barrier))
        moments += len(world.moments)
        written: set[int] = set()  # ranks whose new file has been on the disk, whole
        for files in world.moments:
            written |= (there := _on_disk(files, ranks))
            _judge_disk(files, ranks, written - there)
        _judge_end(_published(world.moments[-1]), ranks)
    return f"{len(_CASES)} runs, {moments} moments, and a whole checkpoint to resume from at each of them."


def _on_disk(files: Files, ranks: int) -> set[int]:
    """Return the ranks whose part of the new checkpoint lies anywhere on the disk."""
    models = [content.get("model") for content in files.values() if isinstance(content, dict)]
    return {rank for rank in range(ranks) if _state(rank, 50)["model"] in models}


def _judge_disk(files: Files, ranks: int, lost: set[int]) -> None:
    found = _published(files)
    if early := [folder for folder in found if folder not in ("step-40", "step-50")]:
        raise Wrong(f"{early[0]!r} begins with step-, so a job that resumes takes it for whole while you still write "
                    "into it. Give the folder that you write aside another kind of name.")  # fmt: skip
    if not found:
        raise Wrong("There is a moment without any checkpoint: the old one must stay until the new one is published.")
    for folder, content in found.items():
        if _TORN in content.values():
            raise Wrong(f"There is a moment when {folder} is visible and a file in it is half written. Write aside, "
                        "then rename.")  # fmt: skip
        absent = [r for r in range(ranks) if f"rank-{r}" not in content]
        missing = [f"rank-{r}" for r in absent]
        strangers = [name for name in content if not name.removeprefix("rank-").isdigit()]
        if missing and strangers:
            raise Wrong(f"{folder} holds {strangers[0]!r}, and the file of a rank is called {missing[0]!r}.")
        if lost & set(absent):
            raise Wrong(f"{folder} is published without {missing[0]}, which was written and then removed again: what a "
                        "crash has left must be cleared before anybody writes.")  # fmt: skip
        if missing:
            raise Wrong(f"There is a moment when {folder} is visible without {missing[0]}. It may be published only "
                        "when every rank has written.")  # fmt: skip


def _judge_end(found: dict[str, Files], ranks: int) -> None:
    if "step-50" not in found:
        raise Wrong("All ranks have returned, and there is no folder step-50: nobody published it.")
    content = found["step-50"]
    shards = [
        name for name in content if name.removeprefix("rank-").isdigit()
    ]  # another name may be a marker or an index
    if len(shards) > ranks:
        raise Wrong(f"step-50 holds the files of {len(shards)} ranks, and you have {ranks}: the rest comes from a crashed "
                    "job, whose folder nobody cleared.")  # fmt: skip
    for rank in range(ranks):
        state, right = content[f"rank-{rank}"], _state(rank, 50)
        if not isinstance(state, dict) or "model" not in state:
            raise Wrong("A rank's file is one dictionary: the keys of `state`, and beside them the key step.")
        if "optimizer" not in state:
            raise Wrong(
                "The optimizer state is not saved: the resumed run starts its moments from zero, without an error."
            )
        if "step" not in state:
            raise Wrong("The step is not saved in the file: the learning rate of the resumed run hangs on it.")
        if state["model"] != right["model"] or state["optimizer"] != right["optimizer"]:
            whose = "a crashed job" if state["model"][1] != 50 else "another rank"
            raise Wrong(f"The file of rank {rank} holds the shard of {whose}.")
        if state["step"] != 50:
            raise Wrong("The saved step is not the one that was given.")


# --- which wrapping rule ------------------------------------------------------------------------------------

#: A rule: whether units are freed after forward, and the units, root first.
Wrapping = tuple[bool, list[TimedUnit]]

_RATIO = 2  # gradients are reduced in 4 bytes, and weights gathered in 2
_RANKS, _WINDOW = 2, (2, 17)

#: Models whose answer is measured, and how many rules fit in the budget.
_MODELS = {
    "a model of four blocks": ({"num_layers": 4, "hidden": 32, "ffn": 88, "vocab": 64}, 4),
    "a small Llama": ({"num_layers": 5, "hidden": 32, "ffn": 128, "vocab": 64}, 2),
    "a huge MLP": ({"num_layers": 2, "hidden": 32, "ffn": 512, "vocab": 64}, 1),
}


def _held(
    sizes: list[int],
    reshard: bool,
    *,
    root: int = 1,
    own: int = 1,
    ratio: int = _RATIO,
    ahead: bool = True,
    behind: bool = True,
    copies: bool = True,
    end: bool = True,
) -> int:
    """Return the most bytes held in backward; an argument that is not the default is a mistake of a learner.

    Args:
        root: Count the root's gradients beside its weights.
        own: Count the unit's gradients.
        ratio: Bytes in the buffer of a reduce-scatter for each byte gathered.
        ahead: Count the unit that is gathered ahead.
        behind: Count the buffer of the last reduce-scatter.
        copies: Look at the moment in which gradients are in the buffer, too.
        end: Look at the end, when the root's gradients are copied, too.
    """
    first, *rest = sizes
    moments, buffer = [(own + ratio) * first] if end and copies else [], 0
    for i in reversed(range(len(rest))):
        others = rest[: i + 1] if not reshard else rest[i - 1 : i + 1] if ahead and i else rest[i : i + 1]
        there = (1 + root) * first + sum(others) + own * rest[i]
        moments.append(there + behind * buffer)
        if copies:
            moments.append(there - rest[i] + ratio * rest[i])
        buffer = ratio * rest[i]
    return max(moments, default=(1 + own) * first)


def _gathered(sizes: list[int], reshard: bool) -> int:
    """Return the most bytes gathered in forward, which leave gradients out."""
    root, *rest = sizes
    kept = [0 if reshard else sum(rest[:i]) for i in range(len(rest))]
    copies = zip(kept, pairwise([root, *rest]), strict=True)
    return root + max((before + 2 * unit + last for before, (last, unit) in copies), default=root)


_FORWARD = (
    "That is what is gathered in forward. Backward holds more: gradients of a unit are unsharded until they are copied into "
    "the buffer of their reduce-scatter."
)

#: What a learner's bytes may be instead, and what to say about it.
_HELD_SLIPS: list[tuple[Callable[[list[int], bool], float], str]] = [
    (_gathered, _FORWARD),
    (lambda sizes, _: _gathered(sizes, True), _FORWARD),
    (lambda sizes, _: sizes[0] + 2 * max(sizes[1:], default=0), "The root and two units are weights alone. Backward holds "
                                                                "gradients too, and the buffers of their reduce-scatters."),
    (lambda sizes, _: 2 * sizes[0] + 5 * max(sizes[1:], default=0),
     "Five units beside the root is a rule of thumb for equal blocks. These differ, the last one has no buffer behind it, and "
     "the end has the root's own copy: walk through backward."),
    (lambda sizes, _: sum(sizes), "Not all weights are unsharded at a time: the root is, and the unit that runs, and the "
                                  "one gathered ahead; and there are gradients and buffers."),
    (lambda sizes, _: 2 * sum(sizes), "Not all weights and gradients are unsharded at a time: a unit's gradients are "
                                      "reduced as soon as its backward ends."),
    (partial(_held, root=0), "The root's gradients stay unsharded until the end of backward, beside its weights."),
    (partial(_held, own=0), "The gradients of the unit itself are unsharded, as many bytes as its weights, until they are "
                            "in the buffer."),
    (partial(_held, ratio=0), "Gradients are copied into the buffer of the reduce-scatter: count it, with 4 bytes a value."),
    (partial(_held, ratio=1), "The buffer of a reduce-scatter has 4 bytes a value, and `bytes` counts 2: it is twice as "
                              "large as the gathered unit."),
    (partial(_held, ahead=False), "While a unit runs backward, the unit before it is gathered ahead."),
    (partial(_held, behind=False), "The buffer of the last reduce-scatter is still there while the next unit runs: it goes "
                                   "when the next buffer is needed."),
    (partial(_held, copies=False), "Look at the moment of the copy, too: gradients and their buffer exist together."),
    (partial(_held, end=False), "Look at the end, too: the root's gradients are copied last, into a buffer of twice their "
                                "size."),
    (lambda sizes, _: _held(sizes, True), "A unit that is kept after forward (reshard is False) is there until its own "
                                          "backward has ended."),
    (lambda sizes, _: _held(sizes, False), "A unit that is freed after forward (reshard is True) is not there in backward "
                                           "until it is gathered again."),
]  # fmt: skip


def _seconds(units: list[TimedUnit], reshard: bool) -> float:
    return fsdp_step(units, reshard=reshard).seconds


#: The same for seconds.
_TIME_SLIPS: list[tuple[Callable[[list[TimedUnit], bool], float], str]] = [
    (lambda units, _: fsdp_step(units).compute, "That is computing alone: a unit must arrive before it runs."),
    (lambda units, reshard: fsdp_step(units, reshard=reshard, prefetch=False).seconds,
     "The next unit is gathered while the present one runs: leave `prefetch` as it is."),
    (lambda units, _: _seconds(units, True), "A unit that is kept after forward (reshard is False) is not gathered again: "
                                             "`fsdp_step` wants to know."),
    (lambda units, reshard: fsdp_step(units, reshard=reshard).exposed, "That is the waiting alone: the step takes the "
                                                                       "computing, too."),
]  # fmt: skip


def _right_choice(rules: Mapping[str, Wrapping], budget: int) -> dict[str, Any]:
    """Return peaks, seconds and the fastest rules that fit, all of them if they are equally fast."""
    peak = {
        rule: peak_held_bytes(
            [unit.bytes // 2 for unit in units], _RANKS, reshard=reshard, param_bytes=2, reduce_bytes=4
        )
        for rule, (reshard, units) in rules.items()
    }
    seconds = {rule: _seconds(units, reshard) for rule, (reshard, units) in rules.items()}
    fits = [rule for rule in rules if peak[rule] <= budget]
    least = min((seconds[rule] for rule in fits), default=0.0)
    return {"peak": peak, "seconds": seconds, "best": [rule for rule in fits if close(seconds[rule], least, rel=1e-9)]}


def _timed(sizes: list[int], *, latency: float, bandwidth: float, speed: float) -> list[TimedUnit]:
    """Return units that are sent and run in so many bytes a second; the root's weights, mostly vocabulary, run too."""
    return [
        TimedUnit(
            name=f"unit {i}" if i else "",
            bytes=size,
            gather=latency + size / bandwidth,
            scatter=latency + _RATIO * size / bandwidth,
            forward=size / speed,
            backward=2 * size / speed,
        )
        for i, size in enumerate(sizes)
    ]


def _four_rules(root: int, block: int, layers: int, **machine: float) -> dict[str, Wrapping]:
    """Return the four rules of the exercise for a model of equal blocks."""
    split = [block // 6, block // 6, block // 3, block // 3]
    sizes = {"none": [root + layers * block], "block": [root] + layers * [block], "linear": [root] + layers * split}
    rules = {rule: (True, _timed(each, **machine)) for rule, each in sizes.items()}
    return {**rules, "block, kept": (False, _timed(sizes["block"], **machine))}


#: Found by trying: no two mistakes above give the same bytes for all of them, and what wins differs with the budget.
_BY_HAND = {
    "one unit": (True, [84]),
    "freed": (True, [12, 28, 16, 32]),
    "kept": (False, [12, 16, 8, 28]),
    "a large root": (True, [36, 16, 8, 20]),
    "more units": (True, [16, 20, 20, 36, 32, 28]),
}


def _choice_cases(seed: int) -> Iterator[tuple[dict[str, Wrapping], int]]:
    dice = random.Random(seed)
    machine = {"latency": 1.0, "bandwidth": 4.0, "speed": 2.0}
    by_hand = {name: (reshard, _timed(sizes, **machine)) for name, (reshard, sizes) in _BY_HAND.items()}
    for budget in (10**6, 150, 20):
        yield by_hand, budget
    for _ in range(30):
        # Times around the point where the link is as busy as the device.
        root, block = 4 * dice.randint(1, 5000), 24 * dice.randint(1, 5000)
        machine = {
            "latency": block * dice.choice((0.002, 0.05, 0.6)),
            "bandwidth": 1.0,
            "speed": dice.choice((0.2, 0.8, 3.0)),
        }
        rules = _four_rules(root, block, dice.randint(2, 12), **machine)
        peaks = sorted(_right_choice(rules, 0)["peak"].values())
        yield rules, max(1, dice.choice(peaks) + dice.choice((-1, 0, 1)))


def _real_model(name: str) -> ModelConfig:
    return tiny_config("llama", **_MODELS[name][0])


def _real_rules(config: ModelConfig) -> dict[str, Wrapping]:
    """Return the four rules for a model of the lab, on a link and a device that are made up."""
    with torch.device("meta"):
        model = Transformer(config)
    machine = {"latency": 1e-6, "bandwidth": 5e9, "speed": 5e9}
    # Even sizes: on two ranks nothing is padded.
    timed = {
        rule: _timed([2 * unit.params for unit in calc_units(model, rule)], **machine)
        for rule in ("none", "block", "linear")
    }
    return {**{rule: (True, units) for rule, units in timed.items()}, "block, kept": (False, timed["block"])}


@check(
    idea="Memory says which rules are possible, and the step time says which of them to take; messages alone say neither.",
    section="Memory: what is unsharded at a time",
    line="For each unit, from the last to the first, add up weights, gradients and buffers at the end of its backward and "
    "during the copy of its gradients, and take the largest sum.",
)
def choose_wrapping(answer: Callable[..., dict[str, Any]], seed: int = 606) -> str:
    """Judge `choose_wrapping(rules, budget)` on models by formula, then shard three real ones as it says."""
    cases = 0
    for rules, budget in _choice_cases(seed):
        _judge_choice(_asked(answer, rules, budget), rules, budget)
        cases += 1
    told = []
    for name, (_, fitting) in _MODELS.items():
        rules = _real_rules(_real_model(name))
        budget = sorted(_right_choice(rules, 0)["peak"].values())[fitting - 1]
        got = _asked(answer, rules, budget)
        _judge_choice(got, rules, budget)
        told.append(_measured(name, str(got["best"]), budget))
    return f"{cases} models by formula. Played by PyTorch's tracker: {'; '.join(told)}."


def _asked(answer: Callable[..., Any], rules: Mapping[str, Wrapping], budget: int) -> Any:
    """Return an answer that may take its lists apart."""
    return answer({rule: (reshard, list(units)) for rule, (reshard, units) in rules.items()}, budget)


def _judge_choice(got: object, rules: Mapping[str, Wrapping], budget: int) -> None:
    if not isinstance(got, Mapping) or not {"peak", "seconds", "best"} <= set(got):
        raise Wrong("Return a dictionary with the keys peak, seconds and best.")
    right = _right_choice(rules, budget)
    for key, slips in (("peak", _HELD_SLIPS), ("seconds", _TIME_SLIPS)):
        mine = got[key]
        if not isinstance(mine, Mapping) or set(mine) != set(rules):
            raise Wrong(f"`{key}` is a dictionary with a number for each rule: {', '.join(rules)}.")
        if any(hasattr(value, "bars") for value in mine.values()):
            raise Wrong(
                f"`{key}` has a number for each rule, and `fsdp_step` returns the whole step: take its `.seconds`."
            )
        if not all(close(mine[rule], truth) for rule, truth in right[key].items()):  # fp32 will do
            _explain_choice(key, mine, right[key], rules, slips)
    best, mine = right["best"], got["best"]
    if mine is not None and not (isinstance(mine, str) and mine in rules):
        raise Wrong(f"`best` is the name of a rule, or None, and not {mine!r}.")
    if mine in best or (mine is None and not best):
        return
    if not best:
        raise Wrong(f"Nothing fits in {budget:,} bytes; then `best` is None.")
    if mine is None or right["peak"][mine] > budget:
        what = "None" if mine is None else f"{mine!r}, which holds {right['peak'][mine]:,}"
        raise Wrong(f"In a budget of {budget:,} bytes {best[0]!r} fits, and not {what}.")
    if all(right["peak"][rule] == budget for rule in best):
        raise Wrong(f"{best[0]!r} holds {budget:,} bytes, as many as the budget has: that fits.")
    times = f"{mine!r} takes {right['seconds'][mine]:.3g} s and {best[0]!r}, which fits too, {right['seconds'][best[0]]:.3g} s"
    messages = {rule: len(units) for rule, (_, units) in rules.items() if right["peak"][rule] <= budget}
    if messages[mine] == min(messages.values()) < messages[best[0]]:
        raise Wrong(
            f"Few messages are not a short step, since what is gathered at once overlaps with nothing: {times}."
        )
    if right["peak"][mine] == min(right["peak"].values()):
        raise Wrong(f"The least memory is not asked for: of the rules that fit, take the fastest; {times}.")
    raise Wrong(f"Of the rules that fit, take the fastest: {times}.")


def _explain_choice(
    key: str,
    got: Mapping[str, float],
    truth: Mapping[str, float],
    rules: Mapping[str, Wrapping],
    slips: Sequence[tuple[Callable[..., float], str]],
) -> NoReturn:
    """Name the mistake that gives all these numbers, or show the smallest rule that has a wrong one."""
    if key == "peak" and all(close(got[rule], fsdp_step(units, reshard=r).peak) for rule, (r, units) in rules.items()):
        raise Wrong("`.peak` of `fsdp_step` is weights alone. Backward holds gradients too, and the buffers of their "
                    "reduce-scatters: walk through it.")  # fmt: skip
    for slip, sentence in slips:
        wrong = {
            rule: slip([unit.bytes for unit in units] if key == "peak" else units, reshard)
            for rule, (reshard, units) in rules.items()
        }
        if all(close(got[rule], value) for rule, value in wrong.items()):
            raise Wrong(sentence)
    failing = [rule for rule in rules if not close(got[rule], truth[rule])]
    rule = min(failing, key=lambda name: len(rules[name][1]))
    reshard, units = rules[rule]
    sizes = [unit.bytes for unit in units]
    case = f"reshard={reshard}, root {sizes[0]:,}, units {some(sizes[1:])}"
    unit = "bytes" if key == "peak" else "s"
    raise Wrong(f"`{key}` of {rule!r} is {truth[rule]:,.6g} {unit} and not {float(got[rule]):,.6g} ({case}). I do not know "
                "which mistake gives that.")  # fmt: skip


def _measured(name: str, rule: str, budget: int) -> str:
    held, counted = _played(name, rule)
    if held > budget or held != counted:
        raise AssertionError(f"{name}, {rule}: the tracker saw {held:,} bytes, not {counted:,}, budget {budget:,}")
    return f"{name}, {rule}: {held:,} of {budget:,} bytes"


@cache
def _played(name: str, rule: str) -> tuple[int, int]:
    """Shard a model by a rule, play a step under PyTorch's tracker, and return the bytes held, seen and counted."""
    wrap, _, kept = rule.partition(", ")
    seen = forecast(
        partial(Transformer, _real_model(name)),
        world_size=_RANKS,
        batch=_WINDOW[0],
        seq=_WINDOW[1] - 1,
        optimizer=partial(torch.optim.SGD, lr=0.1),  # has no part in what is unsharded, and is soon played
        wrap=wrap,
        precision="bf16",
        reshard_after_forward=not kept,
    )
    return seen.most_held, seen.report.peak_held_bytes()
