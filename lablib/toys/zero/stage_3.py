"""ZeRO stage 3: every rank keeps a shard of everything, and gathers the weights of one unit at a time.

A unit is a module whose weights are gathered together, such as a transformer block; the root unit is what is left over.

    forward    unshard unit k -> run it -> reshard
    backward   unshard unit k -> run it -> reduce-scatter its gradients -> reshard

While a unit computes, the next one is on its way (prefetch).

Autograd keeps the weights that it needs by reference. Resharding therefore frees the memory under the tensor and
leaves the tensor in place; unsharding again puts the same values under it. Hooks on a unit's inputs and outputs say when
backward comes and goes. Where autograd takes another way, it finds its weight resharded, and has it unsharded then.

Read `Unit` and `ZeRO3.forward` first; `default_units` and `assign_params` choose the units and whose parameters are whose.

Papers: Rajbhandari et al. 2019, ZeRO (arXiv 1910.02054), sections 5.3 and 7.2.2;
Zhao et al. 2023, PyTorch FSDP (arXiv 2304.11277), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lablib.toys.zero.flat_shards import FlatShards, group_flat
from lablib.toys.zero.stages_1_2 import ZeRO1


class Unit:
    """Parameters that are gathered together.

    Attributes:
        flats: Its shards, one for each kind of parameter; none if all its parameters belong to others.
        inputs_left: Inputs of its forward calls whose gradient backward has not reached yet.
        reduced: Whether its gradients have left in this backward.
    """

    def __init__(self, flats: list[FlatShards]):
        self.flats, self.inputs_left, self.reduced = flats, 0, False
        for flat in flats:
            flat.detach_shard()
        self.reshard()

    def unshard(self) -> None:
        """Start to gather what is sharded."""
        for flat in self.flats:
            flat.unshard()

    def wait_for_unshard(self) -> None:
        """Wait until all of it is there."""
        for flat in self.flats:
            flat.wait_for_unshard()

    def reshard(self) -> None:
        """Free the memory of the unsharded weights."""
        for flat in self.flats:
            flat.reshard()


def default_units(module: nn.Module) -> Iterator[nn.Module]:
    """Yield every child of a list, a dict or a chain of modules, unless it is only a container itself."""
    for m in module.modules():
        if isinstance(m, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            yield from filter(has_forward, m.children())


def has_forward(module: nn.Module) -> bool:
    """Tell whether a module can be called; an nn.ModuleList cannot, and so no hook would gather it."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def assign_params(module: nn.Module, units: list[nn.Module]) -> dict[nn.Parameter, nn.Module]:
    """Return the unit of every parameter: the innermost around it, or the root where those differ."""
    units_around: dict[nn.Parameter, set[nn.Module]] = {}

    def walk(m: nn.Module, home: nn.Module) -> None:
        home = m if m in units else home
        for p in m.parameters(recurse=False):
            units_around.setdefault(p, set()).add(home)
        for child in m.children():
            walk(child, home)

    walk(module, module)
    return {p: home.pop() if len(home) == 1 else module for p, home in units_around.items()}


def tensors_in(tree: object) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists, dicts and dataclasses."""
    if isinstance(tree, Tensor):
        yield tree
    elif is_dataclass(tree):
        yield from tensors_in(vars(tree))
    elif isinstance(tree, tuple | list | dict):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(item)


class ZeRO3(ZeRO1):
    """Shard weights, gradients and optimizer; frozen weights too.

    Every rank must run the same units in the same order, or their messages don't match. Outside of forward and
    backward the module's parameters have no memory and read as NaN: use `full_state_dict`. In forward, a unit's
    parameters are there only while its forward runs; one that several units share belongs to the root, which is there
    throughout.

    Args:
        units: Modules to gather one by one; by default every child of an nn.ModuleList, nn.ModuleDict or
            nn.Sequential that has a forward.
        prefetch: Units to gather ahead of the one in use.
    """

    stage = 3

    def __init__(
        self,
        module: nn.Module,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        group: dist.ProcessGroup | None = None,
        *,
        master: torch.dtype | None = None,
        units: Iterable[nn.Module] | None = None,
        prefetch: int = 1,
    ):
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch} must not be negative; use 0 to gather nothing ahead")
        chosen = list(default_units(module) if units is None else units)
        if strangers := [type(unit).__name__ for unit in chosen if unit not in set(module.modules())]:
            raise ValueError(f"units {', '.join(strangers)} are not in the module; choose from module.modules()")
        if containers := [type(unit).__name__ for unit in chosen if not has_forward(unit)]:
            raise ValueError(f"units {', '.join(containers)} have no forward; choose the modules inside")
        chosen = [module, *dict.fromkeys(u for u in chosen if u is not module)]  # the root first
        self._wrap(module, group, master)
        self.prefetch = prefetch
        home = assign_params(module, chosen)
        self.units = [
            Unit(group_flat([p for p, m in home.items() if m is unit_module], group, master)) for unit_module in chosen
        ]
        self._shard([flat for unit in self.units for flat in unit.flats], optimizer)
        for unit_module, unit in zip(chosen, self.units, strict=True):
            # First of all hooks, as old-style weight_norm computes its weight in one.
            unit_module.register_forward_pre_hook(partial(self._before_forward, unit), prepend=True, with_kwargs=True)
            unit_module.register_forward_hook(partial(self._after_forward, unit), always_call=True)
        module.register_load_state_dict_pre_hook(self._before_load)
        memory = [(tensor.untyped_storage(), f) for f in self.flats for tensor in (f.full, f.placeholder)]
        self._flat_by_storage = {
            storage._cdata: flat for storage, flat in memory
        }  # by the address of the storage object
        self._forward_order, self._forward_end_order = [], []  # units in the order of this forward
        self._next, self._previous = {}, {}  # what followed whom in the last one, forward and backward

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the module."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            return super().forward(*args, **kwargs)

    def _pack(self, tensor: Tensor) -> tuple[Tensor, FlatShards | None]:
        flat = self._flat_of(tensor)
        if flat is not None and not flat.is_unsharded:
            raise RuntimeError("a weight is used where its unit's forward does not run; choose other units")
        return tensor, flat

    def _unpack(self, saved: tuple[Tensor, FlatShards | None]) -> Tensor:
        tensor, flat = saved
        if flat is not None:
            flat.unshard()
            flat.wait_for_unshard()
        return tensor

    def _flat_of(self, tensor: Tensor) -> FlatShards | None:
        """Return the flat in whose memory, or in whose stand-in for it, a tensor is."""
        return self._flat_by_storage.get(tensor.untyped_storage()._cdata)

    def _unshard_and_prefetch(self, unit: Unit, following: dict[Unit, Unit]) -> None:
        """Have a unit's weights, and the ones after it on their way."""
        unit.unshard()
        unit.wait_for_unshard()
        for _ in range(self.prefetch):
            if unit := following.get(unit):
                unit.unshard()

    @torch.no_grad()
    def _before_forward(self, unit: Unit, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._in_backward:  # activation recomputation runs forward again
            unit.unshard()
            return unit.wait_for_unshard()
        if unit is self.units[0]:
            self._forward_order, self._forward_end_order = [], []
        self._forward_order.append(unit)
        self._unshard_and_prefetch(unit, self._next)
        for tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad:
                unit.inputs_left += 1
                # A leaf's hook would fire before the unit's other gradients are there: such a unit stays to the end.
                if tensor.grad_fn is not None:
                    tensor.register_hook(partial(self._after_input_gradient, unit))

    @torch.no_grad()
    def _after_forward(self, unit: Unit, module: nn.Module, args: tuple, output: object) -> None:
        if self._in_backward:
            return
        for tensor in tensors_in(output):
            if self._flat_of(tensor) in unit.flats:
                raise RuntimeError(
                    f"{type(module).__name__} returns its own weight, whose memory goes now; return weight.clone()"
                )
            if tensor.grad_fn is not None:
                tensor.register_hook(partial(self._before_backward, unit))
        unit.reshard()
        self._forward_end_order.append(unit)
        if unit is self.units[0]:
            self._next = dict(pairwise(self._forward_order))
            self._previous = dict(pairwise(reversed(self._forward_end_order)))
            for other in self.units:  # gathered ahead, and then not used
                other.reshard()

    def backward(self, loss: Tensor) -> None:
        """Run backward, as in stage 1, unless the loss is NaN: a sharded weight makes it so."""
        if loss.isnan():
            raise RuntimeError("the loss is NaN: weights are, or one was read where its unit's forward does not run")
        super().backward(loss)
        with torch.no_grad():
            for unit in self.units:  # what is left: units without inputs that have a gradient, such as embeddings
                unit.reshard()
                if not unit.reduced or any(flat.unsharded_grad is not None for flat in unit.flats):
                    self._after_backward(unit)
                unit.reduced = False
            self._wait_for_reduce_scatters()

    @torch.no_grad()
    def step(self, max_norm: float | None = None) -> Tensor | None:
        """As in stage 1, but the gradients have left already, and the next forward gathers what it needs."""
        for unit in self.units:
            unit.inputs_left = 0  # forward passes without a backward
        return self._update_shards(max_norm)

    @torch.no_grad()
    def _before_backward(self, unit: Unit, gradient: Tensor) -> None:
        if not self._in_backward:
            raise RuntimeError("call model.backward(loss), not loss.backward()")
        self._unshard_and_prefetch(unit, self._previous)

    @torch.no_grad()
    def _after_input_gradient(self, unit: Unit, gradient: Tensor) -> None:
        """Backward has left the unit when the gradients of all its inputs are there."""
        unit.inputs_left -= 1
        if unit.inputs_left == 0:
            self._after_backward(unit)

    def _after_backward(self, unit: Unit) -> None:
        unit.reshard()
        unit.reduced = True
        self._reduce_scatter(flat for flat in unit.flats if flat.trained)

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of the unsharded module, with its own names, on every rank.

        Units are gathered one by one; only the result is as large as the full model.
        """
        by_name = dict(self.module.named_parameters(remove_duplicate=False))
        copies: dict[nn.Parameter, Tensor] = {}
        for unit in self.units:
            self._unshard_and_prefetch(unit, {})
            copies |= {p: p.detach().clone() for flat in unit.flats for p in flat.params}
            unit.reshard()
        # What is in no shard, such as buffers, is taken as it is.
        state = self.module.state_dict()
        return {
            name: copies[by_name[name]] if by_name.get(name) in copies else tensor.clone()
            for name, tensor in state.items()
        }

    def _before_load(self, *_: object) -> None:
        if any(not flat.is_unsharded for flat in self.flats):
            raise RuntimeError("the weights are sharded; load them first, then wrap")

    def state_dict(self, *_: object, **__: object) -> dict[str, Tensor]:
        """Refuse: the parameters have no values here."""
        raise RuntimeError("the weights are sharded; use model.full_state_dict()")
