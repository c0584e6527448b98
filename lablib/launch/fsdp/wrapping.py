"""Choose what FSDP gathers together: the wrap units of a model.

A unit is a module whose parameters are all-gathered in one message and reduce-scattered in one message.
Whatever belongs to no unit belongs to the root, the model itself.

    rule          units                                       messages    gathered at a time
    "none"        the root only                               few, huge   everything
    "block"       each child of the outermost nn.ModuleList   one a layer one layer and the root
    "linear"      each linear layer                           many, small one matrix and the root
    "size:N"      bottom-up, whenever N parameters are open   as you say  about N and the root

A unit must own its parameters: one that is tied to another module's, such as an output head that shares the
embedding, has to stay with that module, so the three named rules leave it to the root.

Source: Zhao et al. 2023, PyTorch FSDP (arXiv 2304.11277), section 3.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lablib.calc.parallel import Unit
from lablib.calc.units import parse_count

#: A rule by name ("none", "block", "linear", "size:1_000_000"), or a function of a module's name and the module.
Rule = str | Callable[[str, nn.Module], bool]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_RULES = '"none", "block", "linear", "size:N" (N parameters) or a function of name and module'


def wrap_units(model: nn.Module, rule: Rule = "block") -> list[tuple[str, nn.Module]]:
    """Return the modules to shard one by one, children before the modules around them, without the root.

    Args:
        rule: See the table above. A function is asked about every module but the root and those that are never
            called: containers, and the output matrix of nn.MultiheadAttention, which it reads by itself.

    Returns:
        (name, module) pairs in the order in which `fully_shard` must be called.
    """
    uncalled = _uncalled(model)
    inside = {
        name: module
        for name, module in model.named_modules()
        if name and module not in uncalled and any(True for _ in module.parameters())
    }
    owners = _owners(model)
    free = {name for name, module in inside.items() if not _shared_outside(name, module, owners)}
    if callable(rule):
        chosen = {name for name, module in inside.items() if rule(name, module)}
        if tied := sorted(chosen - free):
            others = " and ".join(_shared_outside(tied[0], inside[tied[0]], owners))
            raise ValueError(
                f"unit {tied[0]!r} shares a parameter with {others}: a parameter belongs to one unit. "
                "Leave both to the root, or choose a module that holds both"
            )
    elif rule == "none":
        return []
    elif rule == "block":
        chosen = {name for name in _blocks(model) if name in free}
        _found(chosen, rule, "the model has no nn.ModuleList or nn.Sequential of blocks")
    elif rule == "linear":
        chosen = {name for name in free if is_linear(inside[name])}
        _found(chosen, rule, "the model has no linear layer that owns its weight")
    else:
        chosen = _by_size(model, free, _least(rule))
    # named_modules goes from the outside to the inside; sorting by depth is stable, so siblings keep their order.
    names = sorted((n for n in inside if n in chosen), key=lambda n: -n.count("."))
    return [(name, inside[name]) for name in names]


def calc_units(model: nn.Module, rule: Rule = "block") -> list[Unit]:
    """Return the units as `lablib.calc.parallel.fsdp` wants them: the root first, then the others as they run.

    Call it before sharding: it reads the shapes of the unsharded parameters.
    """
    chosen = {"": model, **dict(wrap_units(model, rule))}
    order = [name for name, _ in model.named_modules() if name in chosen]
    home: dict[str, list[tuple[tuple[int, ...], bool]]] = {name: [] for name in order}
    owners = _owners(model)
    after: list[int] = []  # for the root's trained parameters, the units that come before, as the model lists them
    entered = {""}
    for _, parameter in model.named_parameters():  # a tied one comes once
        unit = _innermost(owners[id(parameter)], order)
        home[unit].append((tuple(parameter.shape), parameter.requires_grad))
        entered.add(unit)
        if not unit and parameter.requires_grad:
            # A tied one is used at both ends, and has a gradient from the first of them in backward.
            after.append(len(entered) - 1 if len(owners[id(parameter)]) == 1 else len(order) - 1)
    return [
        Unit(
            name=name,
            shapes=tuple(shape for shape, trained in home[name] if trained),
            frozen=tuple(shape for shape, trained in home[name] if not trained),
            after=tuple(after) if not name else (),
        )
        for name in order
    ]


def is_linear(module: nn.Module) -> bool:
    """Tell whether a module is one matrix product: nn.Linear, or GPT-2's Conv1D in Hugging Face's code."""
    # By name, since transformers is not needed to shard a model.
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def tied_parameters(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of every parameter that has more than one, such as `embed.weight` and `head.weight`."""
    return [tuple(names) for names in _owners(model).values() if len(names) > 1]


def _uncalled(model: nn.Module) -> set[nn.Module]:
    """Return the modules that have no forward, or none that anybody calls: no hook would gather them."""
    attention = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    return {m for m in model.modules() if isinstance(m, _CONTAINERS)} | {a.out_proj for a in attention}


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """Return every name of every parameter, by its identity."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    return owners


def _shared_outside(name: str, module: nn.Module, owners: dict[int, list[str]]) -> list[str]:
    """Return the names outside a module of parameters inside it."""
    return [
        other
        for parameter in module.parameters()
        for other in owners[id(parameter)]
        if not other.startswith(f"{name}.")
    ]


def _blocks(model: nn.Module) -> list[str]:
    """Return the children of the outermost lists: of nn.ModuleLists, or else of nn.Sequentials."""
    for kind in (nn.ModuleList, nn.Sequential):
        lists = [name for name, module in model.named_modules() if isinstance(module, kind)]
        outermost = [n for n in lists if not any(n != o and n.startswith(f"{o}.".lstrip(".")) for o in lists)]
        if outermost:
            return [
                f"{name}.{child}".lstrip(".")
                for name in outermost
                for child, _ in model.get_submodule(name).named_children()
            ]
    return []


def _least(rule: str) -> int:
    kind, _, number = str(rule).partition(":")
    if kind != "size":
        raise ValueError(f"wrap={rule!r} is unknown; use {_RULES}")
    try:
        least = int(parse_count(number.replace("_", "")))
    except ValueError as error:
        raise ValueError(f"wrap={rule!r}: {number!r} is no number of parameters; try size:1_000_000") from error
    if least < 1:
        raise ValueError(f"wrap={rule!r}: the size must be at least 1 parameter")
    return least


def _by_size(model: nn.Module, free: set[str], least: int) -> set[str]:
    """Close a unit wherever at least `least` parameters below it are in no unit yet."""
    chosen: set[str] = set()

    def visit(name: str, module: nn.Module) -> set[nn.Parameter]:
        """Return the parameters in or below a module that are in no unit; a tied one is there once."""
        left = set(module.parameters(recurse=False))
        left.update(*(visit(f"{name}.{child}".lstrip("."), m) for child, m in module.named_children()))
        if sum(p.numel() for p in left) >= least and name in free:
            chosen.add(name)
            return set()
        return left

    visit("", model)
    return chosen


def _innermost(names: list[str], units: list[str]) -> str:
    """Return the innermost unit around all names of a parameter."""
    return max((u for u in units if not u or all(n.startswith(f"{u}.") for n in names)), key=len)


def _found(chosen: set[str], rule: str, why: str) -> None:
    if not chosen:
        raise ValueError(f"wrap={rule!r} finds nothing: {why}. Use {_RULES}")
