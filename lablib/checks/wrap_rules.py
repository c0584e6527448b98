"""The check of a size-based wrapping policy: which modules become units, and in which order."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn

from lablib.calc.models import ModelConfig
from lablib.checks.report import Wrong, check
from lablib.launch.wrapping import wrap_units
from lablib.toys.transformer import Transformer, tiny_config


def _random_tree(dice: random.Random, depth: int = 0) -> nn.Module:
    if depth == 3 or (depth and dice.random() < 0.3):
        return nn.Linear(dice.randint(2, 30), dice.randint(2, 30))
    return nn.Sequential(*[_random_tree(dice, depth + 1) for _ in range(dice.randint(2, 4))])


def _cases(seed: int) -> list[tuple[str, nn.Module, int]]:
    dice = random.Random(seed)
    with torch.device("meta"):  # shapes are enough
        model = Transformer(_config())
        by_hand = nn.Sequential(nn.Sequential(nn.Linear(9, 10), nn.Linear(9, 10)), nn.Linear(9, 30))
        trees = [_random_tree(dice) for _ in range(12)]
    block = sum(p.numel() for p in model.blocks[0].parameters())
    cases = [("two layers of 100 and one of 300", by_hand, least) for least in (100, 150, 250, 400)]
    cases += [
        ("the Transformer of this lab", model, least) for least in (block // 8, block // 2, block, 2 * block)
    ]
    for number, tree in enumerate(trees):
        most = sum(p.numel() for p in tree.parameters())
        cases.append((f"random model {number}", tree, dice.randint(20, most)))
    return cases


def _config() -> ModelConfig:
    return tiny_config("llama", num_layers=3, hidden=64)


@check
def units_by_size(answer: Callable[[nn.Module, int], list[str]], seed: int = 6) -> str:
    """Judge `units_by_size(model, least)` by hand, on the lab's model, and on random trees."""
    cases = _cases(seed)
    for what, model, least in cases:
        _judge(answer(model, least), what, model, least)
    return f"{len(cases)} models and sizes, inner units before outer ones."


def _judge(got: object, what: str, model: nn.Module, least: int) -> None:
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
        raise Wrong(
            f"{lists[0]!r} is an nn.ModuleList: it has no forward, so nothing would gather it ({case})."
        )
    if len(set(got)) < len(got):
        raise Wrong(f"A module is in the list twice; a name is the whole path from the root ({case}).")
    own = _own(model, got)
    if small := [name for name in got if own[name] < least]:
        raise Wrong(f"Unit {small[0]!r} has {own[small[0]]:,} parameters of its own; the others under it are in units "
                    f"already and do not count again ({case}).")  # fmt: skip
    right = [name for name, _ in wrap_units(model, f"size:{least}")] if _any_unit(model, least) else []
    if missing := [name for name in right if name not in got]:
        raise Wrong(f"{missing[0]!r} has enough open parameters and is no unit: close a unit as soon as there are "
                    f"{least:,}, from the inside to the outside ({case}).")  # fmt: skip
    if extra := [name for name in got if name not in right]:
        raise Wrong(
            f"{extra[0]!r} is a unit too early or too late: count from the inside to the outside ({case})."
        )
    for place, name in enumerate(got):
        if inner := [other for other in got[place + 1 :] if other.startswith(f"{name}.")]:
            raise Wrong(f"{name!r} comes before {inner[0]!r}, which lies inside it: `fully_shard(outer)` would take the "
                        f"inner parameters first ({case}).")  # fmt: skip


def _own(model: nn.Module, units: list[str]) -> dict[str, int]:
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
