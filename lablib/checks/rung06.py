"""The checks of rung 06: what a step sends, units by size, a checkpoint, and which wrapping rule to take.

The check of a checkpoint plays ranks that take turns at every disk operation and barrier, in several orders: rank 0 far
ahead of the others, or far behind. A write takes two turns, and in between the file is torn. The disk remembers what it
held after each; a power cut may come at any of them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from lablib.calc.models import ModelConfig
from lablib.calc.parallel import fsdp_traffic, peak_unsharded_bytes
from lablib.calc.torch_versions import PINNED, release
from lablib.checks.report import Wrong, check, close, some
from lablib.checks.turns import Turns
from lablib.launch.fsdp import calc_units, forecast, shard, wrap_units
from lablib.launch.measure import record_comms
from lablib.launch.ranks import run_ranks
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


@check
def count_collectives(answer: Callable[..., dict[str, int]], seed: int = 66) -> str:
    """Judge `count_collectives(root, units, reshard, micro_batches, sync_every)` by hand, then on random models."""
    dice = random.Random(seed)
    cases = [(8, [], True, 1, True), (2, [4, 4], True, 1, True), (2, [4, 4], False, 1, True)]
    cases += [(2, [4, 4], True, 3, True), (2, [4, 4], True, 3, False)]
    for _ in range(40):
        # Even sizes: on two ranks nothing is padded.
        units = [2 * dice.randint(1, 10**6) for _ in range(dice.randint(0, 90))]
        flags = (dice.random() < 0.5, dice.randint(1, 8), dice.random() < 0.5)
        cases.append((2 * dice.randint(1, 10**6), units, *flags))
    for case in cases:
        got, right = answer(*case), _counted(*case)
        if not isinstance(got, dict) or set(got) != set(_COUNTS):
            raise Wrong(f"Return a dictionary with the keys {', '.join(_COUNTS)}.")
        for name in _COUNTS:
            if not close(got[name], right[name], rel=0):
                _explain_count(name, float(got[name]), *case)
    return f"{len(cases)} steps, message by message."


def _explain_count(
    name: str, got: float, root: int, units: list[int], reshard: bool, micro_batches: int, sync_every: bool
) -> None:
    case = (f"root={root:,}, units={some(units)}, reshard={reshard}, micro_batches={micro_batches}, "
            f"sync_every={sync_every}")  # fmt: skip
    truth = _counted(root, units, reshard, micro_batches, sync_every)[name]
    if name in ("gathered", "reduced") and got in (4 * truth, truth / 2):
        raise Wrong(f"Count the values in the whole arrays: not bytes, and not the part that a ring sends ({case}).")
    other = partial(_counted, root, units)
    if name in ("all_gathers", "gathered"):
        once = 1 if name == "all_gathers" else root
        last = micro_batches * (1 if name == "all_gathers" else (units or [0])[-1])
        right = _counted(root, units, reshard, micro_batches, sync_every)[name]
        if got == other(not reshard, micro_batches, sync_every)[name]:
            raise Wrong("A unit that was freed after forward is gathered again in backward, one that was kept is not "
                        f"({case}).")  # fmt: skip
        if got == right + micro_batches * once:
            raise Wrong(f"The root is not freed after forward: backward starts with it ({case}).")
        if reshard and units and got == right - last:
            raise Wrong("The last unit is needed first in backward, but FSDP frees it like the others: only the root "
                        f"is kept ({case}).")  # fmt: skip
        if micro_batches > 1 and got == other(reshard, 1, True)[name]:
            raise Wrong("Every micro-batch gathers again: weights are freed after each backward, whether or not "
                        f"gradients are reduced ({case}).")  # fmt: skip
        if got == right - micro_batches * once:
            raise Wrong(f"The root has weights too: it is gathered once in each micro-batch ({case}).")
        raise Wrong(f"`{name}` is {right:,}, not {got:,.0f}: write down which units are gathered in forward, and which "
                    f"again in backward, one message each ({case}).")  # fmt: skip
    right = _counted(root, units, reshard, micro_batches, sync_every)[name]
    if micro_batches > 1 and got == other(reshard, micro_batches, not sync_every)[name]:
        raise Wrong(
            f"Gradients are reduced after every backward, or, without sync_every, after the last one only ({case})."
        )
    if got == right - (root if name == "reduced" else 1) * (micro_batches if sync_every else 1):
        raise Wrong(f"The root has gradients too, and one reduce-scatter of its own ({case}).")
    if got == 2 * right:
        raise Wrong(f"Gradients exist in backward only: one reduce-scatter for each unit, not two ({case}).")
    raise Wrong(f"`{name}` is {right:,}, not {got:,.0f}: each unit and the root have one reduce-scatter a backward "
                f"that reduces ({case}).")  # fmt: skip


# --- units by size ------------------------------------------------------------------------------------------


def _random_tree(dice: random.Random, depth: int = 0) -> nn.Module:
    if depth == 3 or (depth and dice.random() < 0.3):
        return nn.Linear(dice.randint(2, 30), dice.randint(2, 30))
    return nn.Sequential(*[_random_tree(dice, depth + 1) for _ in range(dice.randint(2, 4))])


def _config() -> ModelConfig:
    return tiny_config("llama", num_layers=3, hidden=64)


def _unit_cases(seed: int) -> list[tuple[str, nn.Module, int]]:
    dice = random.Random(seed)
    with torch.device("meta"):  # shapes are enough
        model = Transformer(_config())
        by_hand = nn.Sequential(nn.Sequential(nn.Linear(9, 10), nn.Linear(9, 10)), nn.Linear(9, 30))
        trees = [_random_tree(dice) for _ in range(12)]
    block = sum(p.numel() for p in model.blocks[0].parameters())
    cases = [("two layers of 100 and one of 300", by_hand, least) for least in (100, 150, 250, 400)]
    cases += [("the Transformer of this lab", model, least) for least in (block // 8, block // 2, block, 2 * block)]
    for number, tree in enumerate(trees):
        most = sum(p.numel() for p in tree.parameters())
        cases.append((f"random model {number}", tree, dice.randint(20, most)))
    return cases


@check
def units_by_size(answer: Callable[[nn.Module, int], list[str]], seed: int = 6) -> str:
    """Judge `units_by_size(model, least)` by hand, on the lab's model, and on random trees."""
    cases = _unit_cases(seed)
    for what, model, least in cases:
        _judge_units(answer(model, least), what, model, least)
    return f"{len(cases)} models and sizes, inner units before outer ones."


def _judge_units(got: object, what: str, model: nn.Module, least: int) -> None:
    case = f"{what}, least {least:,}"
    if not isinstance(got, list) or not all(isinstance(name, str) for name in got):
        raise Wrong("Return a list of module names, such as `blocks.0.mlp`.")
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
        raise Wrong(f"{missing[0]!r} has enough open parameters and is no unit: close a unit as soon as there are "
                    f"{least:,}, from the inside to the outside ({case}).")  # fmt: skip
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

Files = dict[str, Any]


class World(Turns):
    """Ranks that take turns; the first one in `order` that can run does."""

    def __init__(self, ranks: int, order: Sequence[int], files: Files):
        super().__init__(ranks)
        self.order, self.files = order, copy.deepcopy(files)
        self.moments: list[Files] = [dict(self.files)]
        self.waiting: set[int] = set()  # at a barrier

    def able(self) -> list[int]:
        """Return who can go on, in order; a barrier opens when all ranks are there."""
        if len(self.waiting) == self.ranks:
            self.waiting.clear()
        return [rank for rank in self.order if rank not in self.waiting | self.done]

    def run(self, act: Callable[[Disk, int, Callable[[], None]], None]) -> None:
        """Run `act(disk, rank, barrier)` on every rank to its end; raise what a rank raised."""
        if not self.play(lambda rank: act(Disk(self, rank), rank, lambda: self._barrier(rank))):
            raise Wrong("Some ranks wait at a barrier that the others never reach: all must call it equally often.")

    def _barrier(self, rank: int) -> None:
        self.waiting.add(rank)
        self.pause(rank)

    def changed(self, rank: int) -> None:
        """Remember the disk as it is now, and give the turn back."""
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
        return bool(_inside(self._world.files, path))


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


@check
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
    if len(content) > ranks:
        raise Wrong(f"step-50 holds {len(content)} files for {ranks} ranks: the rest comes from a crashed job, whose "
                    "folder nobody cleared.")  # fmt: skip
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

_RULES = ("none", "block", "linear")

_RANKS, _WINDOW = 2, (2, 17)

#: Models whose answer is measured.
_MODELS = {
    "a small Llama": {"num_layers": 1, "hidden": 32, "ffn": 128},
    "a model of three blocks": {"num_layers": 3, "hidden": 32, "ffn": 88},
    "a huge MLP": {"num_layers": 1, "hidden": 32, "ffn": 1024},
}


def _real_model(name: str) -> ModelConfig:
    return tiny_config("llama", **_MODELS[name])


def _rules(config: ModelConfig) -> dict[str, list[int]]:
    """Return the bytes of every unit under every rule, root first; all are even, so nothing is padded."""
    with torch.device("meta"):
        model = Transformer(config)
    return {rule: [4 * unit.params for unit in calc_units(model, rule)] for rule in _RULES}


def _right_choice(rules: Mapping[str, list[int]], budget: int, version: str) -> dict[str, Any]:
    peak = {rule: peak_unsharded_bytes(units, _RANKS, param_bytes=1, torch=version) for rule, units in rules.items()}
    messages = {rule: fsdp_traffic(units, _RANKS).calls.total() for rule, units in rules.items()}
    fits = [rule for rule in rules if peak[rule] <= budget]
    return {"peak": peak, "messages": messages, "best": min(fits, key=messages.__getitem__, default=None)}


@check
def choose_wrapping(answer: Callable[..., dict[str, Any]], seed: int = 606) -> str:
    """Judge `choose_wrapping(rules, budget)` on random models, then shard three real ones as it says and measure.

    What FSDP2 holds in forward depends on the version of PyTorch. The count of the installed one is right, and so is
    that of the version which the chapter writes down.
    """
    here = release(torch.__version__)
    version = _counted_as(answer, here)
    try:
        cases, picks = _judge_choices(answer, seed, version)
    except Wrong as wrong:
        if version == here:
            raise
        raise Wrong(f"{wrong} This is counted as torch {version} does; what {here} does passes, too.") from None
    return f"{cases} models by formula, of torch {version}. Measured with {here}: {_measured(picks)}."


def _counted_as(answer: Callable[..., dict[str, Any]], here: str) -> str:
    """Return the installed version if the answer counts its bytes on a model that tells versions apart."""
    rules = {"three": [30, 10, 6, 12]}
    booked, own = (_right_choice(rules, 0, version)["peak"]["three"] for version in (PINNED, here))
    if booked == own:
        return here
    got = answer({name: list(units) for name, units in rules.items()}, booked)
    peak = got.get("peak") if isinstance(got, dict) else None
    said = peak.get("three") if isinstance(peak, dict) else None
    return here if said is not None and close(said, own, rel=0) else PINNED


def _judge_choices(
    answer: Callable[..., dict[str, Any]], seed: int, version: str
) -> tuple[int, dict[str, tuple[str, int]]]:
    """Judge by the count of one version; return how many models by formula, and the rule and budget of real ones."""
    dice = random.Random(seed)
    cases: list[tuple[dict[str, list[int]], int]] = [({"one": [32], "three": [4, 10, 6, 12]}, b) for b in (70, 40, 10)]
    for _ in range(30):
        layers, root, block = dice.randint(1, 24), 2 * dice.randint(1, 5000), 12 * dice.randint(1, 5000)
        split = [block // 6, block // 6, block // 3, block // 3]
        rules = {"none": [root + layers * block], "block": [root] + layers * [block], "linear": [root] + layers * split}
        peaks = sorted(_right_choice(rules, 0, version)["peak"].values())
        cases.append((rules, max(1, dice.choice(peaks) + dice.choice((-1, 0, 1)))))
    for rules, budget in cases:
        _judge_choice(answer({name: list(units) for name, units in rules.items()}, budget), rules, budget, version)
    picks = {}
    # All three rules fit in the first budget, two in the second, one in the third.
    for name, fitting in zip(_MODELS, (2, 1, 0), strict=True):
        rules = _rules(_real_model(name))
        budget = sorted(_right_choice(rules, 0, version)["peak"].values())[fitting]
        got = answer(dict(rules), budget)
        _judge_choice(got, rules, budget, version)
        picks[name] = (got["best"], budget)
    return len(cases), picks


def _judge_choice(got: object, rules: Mapping[str, list[int]], budget: int, version: str) -> None:
    if not isinstance(got, dict) or set(got) != {"peak", "messages", "best"}:
        raise Wrong("Return a dictionary with the keys peak, messages and best.")
    right = _right_choice(rules, budget, version)
    for key in ("peak", "messages"):
        if not isinstance(got[key], dict) or set(got[key]) != set(rules):
            raise Wrong(f"`{key}` is a dictionary with a number for each rule: {', '.join(rules)}.")
        for rule, truth in right[key].items():
            if not close(got[key][rule], truth, rel=0):
                _explain_choice(key, float(got[key][rule]), truth, rule, rules[rule])
    best = right["best"]
    if got["best"] is not None and not isinstance(got["best"], str):
        raise Wrong(f"`best` is the name of a rule, or None, and not {got['best']!r}.")
    if got["best"] == best:
        return
    case = f"budget {budget:,}, peaks {right['peak']}, messages {right['messages']}"
    if best is None:
        raise Wrong(f"Nothing fits; then `best` is None ({case}).")
    if got["best"] not in rules or right["peak"][got["best"]] > budget:
        raise Wrong(f"Rule {got['best']!r} does not fit in the budget ({case}).")
    raise Wrong(f"Rule {got['best']!r} fits, and {best!r} fits too with fewer messages ({case}).")


def _explain_choice(key: str, got: float, right: int, rule: str, units: list[int]) -> None:
    root, rest = units[0], units[1:]
    case = f"rule {rule!r}, root {root:,}, units {some(rest)}"
    if key == "messages":
        if got in (1 + 2 * len(rest), 1 + len(rest)):
            raise Wrong(f"Count both: all-gathers and reduce-scatters ({case}).")
        if got == 3 * (1 + len(rest)):
            raise Wrong(f"The root is gathered once, since it is not freed after forward ({case}).")
        raise Wrong(f"A step has {right:,} messages, not {got:,.0f} ({case}).")
    if rest and got in (sum(units), 2 * sum(units)):
        raise Wrong(f"Not all units are whole at a time: one is, beside the buffers of gathers ({case}).")
    walked = root + max((2 * unit + before for before, unit in pairwise([0, *rest])), default=0)
    if rest and got == walked:
        raise Wrong(f"The root is there throughout, and its buffer too while the first unit is copied ({case}).")
    if rest and got == right - root:
        raise Wrong(f"The root stays gathered while the units run ({case}).")
    if got in (root + max(rest, default=0), root):
        raise Wrong(f"A gathered unit exists twice while it is copied out of the gather's buffer ({case}).")
    if rest and got == root + 2 * max(rest):
        raise Wrong("The buffer of the unit before is still there while a unit is copied; the first unit comes after "
                    f"the root ({case}).")  # fmt: skip
    raise Wrong(f"At most {right:,} bytes are gathered at a time, not {got:,.0f}: for each unit add up what is there "
                f"while it is copied, and take the largest sum ({case}).")  # fmt: skip


def _measured(picks: Mapping[str, tuple[str, int]]) -> str:
    """Shard every model as picked: messages on real ranks, memory by PyTorch's tracker."""
    sent = run_ranks(_run_picks, _RANKS, {name: rule for name, (rule, _) in picks.items()})[0]
    told = []
    for name, (rule, budget) in picks.items():
        config = _real_model(name)
        seen = forecast(
            partial(Transformer, config),
            world_size=_RANKS,
            batch=_WINDOW[0],
            seq=_WINDOW[1] - 1,
            optimizer=partial(torch.optim.SGD, lr=0.1),  # has no part in what is gathered, and is soon played
            wrap=rule,
        )
        truth = _right_choice(_rules(config), budget, torch.__version__)
        if seen.most_gathered > budget or seen.most_gathered != truth["peak"][rule]:
            raise AssertionError(f"{name}, {rule}: the tracker saw {seen.most_gathered:,} bytes, budget {budget:,}")
        if sent[name] != truth["messages"][rule]:
            raise AssertionError(f"{name}, {rule}: {sent[name]} messages were sent, not {truth['messages'][rule]}")
        told.append(f"{name}, {rule}: {seen.most_gathered:,} of {budget:,} bytes, {sent[name]} messages")
    return "; ".join(told)


def _run_picks(picks: Mapping[str, str]) -> dict[str, int]:
    sent = {}
    for name, rule in picks.items():
        torch.manual_seed(0)
        model, _ = shard(Transformer(_real_model(name)), wrap=rule)
        tokens = torch.randint(0, 256, _WINDOW, generator=torch.Generator().manual_seed(0))
        with record_comms() as log:
            model.loss(tokens).backward()
        sent[name] = log.calls.total()
    return sent
