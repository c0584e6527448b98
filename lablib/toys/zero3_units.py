"""Units of ZeRO stage 3: which modules are gathered as a whole, and whose parameters those are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass

from torch import Tensor, nn

from lablib.toys.flat_shards import FlatShards


class Unit:
    """What is gathered together.

    Attributes:
        flats: Its shards, one for each kind of parameter; none if all its parameters belong to others.
        inputs_left: Inputs of its forward calls whose gradient backward has not reached yet.
        reduced: Whether its gradients have left in this backward.
    """

    def __init__(self, flats: list[FlatShards]):
        self.flats, self.inputs_left, self.reduced = flats, 0, False

    def gather(self) -> None:
        """Start to gather what is released."""
        for flat in self.flats:
            flat.gather()

    def wait(self) -> None:
        """Wait until all of it is there."""
        for flat in self.flats:
            flat.wait()

    def release(self) -> None:
        """Free the memory of the whole weights."""
        for flat in self.flats:
            flat.release()


def default_units(module: nn.Module) -> Iterator[nn.Module]:
    """Yield every child of a list, a dict or a chain of modules, unless it is only a container itself."""
    for m in module.modules():
        if isinstance(m, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            yield from filter(has_forward, m.children())


def has_forward(module: nn.Module) -> bool:
    """Tell whether a module can be called; an nn.ModuleList cannot, and so no hook would gather it."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def assign(module: nn.Module, units: list[nn.Module]) -> dict[nn.Parameter, nn.Module]:
    """Return the unit of every parameter: the innermost around it, or the root where those differ."""
    homes: dict[nn.Parameter, set[nn.Module]] = {}

    def walk(m: nn.Module, home: nn.Module) -> None:
        home = m if m in units else home
        for p in m.parameters(recurse=False):
            homes.setdefault(p, set()).add(home)
        for child in m.children():
            walk(child, home)

    walk(module, module)
    return {p: home.pop() if len(home) == 1 else module for p, home in homes.items()}


def tensors_in(tree: object) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists, dicts and dataclasses.

    Args:
        tree: What a forward takes or returns.
    """
    if isinstance(tree, Tensor):
        yield tree
    elif is_dataclass(tree):
        yield from tensors_in(vars(tree))
    elif isinstance(tree, tuple | list | dict):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(item)
