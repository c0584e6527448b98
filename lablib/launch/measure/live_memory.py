"""Measure memory by counting: model states, every byte that autograd saves, and all tensors that are alive.

`measure_states` adds up the tensors that exist between steps. `saved_activations` asks autograd, whose saved-tensor
hooks see every tensor that an operator keeps. `LiveBytes` is a memory profiler of one class: a TorchDispatchMode counts
each storage when an operator makes it, and discounts it when Python or autograd lets go of it.

All count on any device, since they look at tensors and not at an allocator, which rounds and caches; memory that a
kernel uses inside is not seen.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from lablib.launch.torch_private import TorchDispatchMode, tree_leaves


class LiveBytes(TorchDispatchMode):
    """Count what is alive of what is made while the mode is on.

    Attributes:
        live: Bytes alive now, gradients included.
        peak: The most that were alive at once.
        kept: Bytes alive now that forward, or its repetition, made.
        kept_peak: The most that were kept at the end of forward or while backward ran operators of its own.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.kept = self.kept_peak = 0
        self._in_forward = True
        self._depth = 0
        self._known: dict[int, bool] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: tuple[type, ...], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self._sample()
        for tensor in _tensors((args, kwargs)):
            # What was there before, such as a parameter, is not ours, and views of it are neither.
            self._add(tensor.untyped_storage(), own=False)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._add(tensor.untyped_storage())
        return result

    def end_forward(self) -> None:
        """Say that what comes now is backward."""
        self._in_forward = False
        self._sample()

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Run a part of forward again: what it makes is kept, too, and its temporaries are not sampled."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def forget(self, tensor: Tensor) -> None:
        """Count a tensor no longer: it stands for memory of the host."""
        self._drop(id(tensor.untyped_storage()), tensor.untyped_storage().nbytes())

    @property
    def in_backward(self) -> bool:
        """Whether forward has ended."""
        return not self._in_forward

    def _sample(self) -> None:
        if self.in_backward and not self._depth:
            self.kept_peak = max(self.kept_peak, self.kept)

    def _add(self, storage: torch.UntypedStorage, own: bool = True) -> None:
        key, size = id(storage), storage.nbytes() if own else 0
        if key in self._known:
            return
        kept = self._in_forward or self._depth > 0
        self._known[key] = kept
        self.live += size
        self.kept += size if kept else 0
        self.peak = max(self.peak, self.live)
        # When it goes, its key may be given to another storage.
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        kept = self._known.pop(key, None)
        if kept is None:
            return
        self.live -= size
        self.kept -= size if kept else 0


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def measure_states(model: nn.Module, optimizer: torch.optim.Optimizer, *, counters: bool = False) -> dict[str, int]:
    """Return the bytes of the model states that exist now on this rank; a tied tensor counts once.

    Args:
        optimizer: Its states, by their names ("exp_avg", ...), and as "master" the parameters that it updates
            and the model does not have: fp32 copies of bf16 weights.
        counters: Count states of one value too, such as AdamW's step number of each tensor: not per parameter.
    """
    own = {id(parameter) for parameter in model.parameters()}
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    master = [p for p in updated if id(p) not in own]
    everything = [*model.parameters(), *master]
    states = {
        "parameters": _count_bytes(model.parameters()),
        "gradients": _count_bytes(p.grad for p in everything if p.grad is not None),
    }
    if master:
        states["master"] = _count_bytes(master)
    by_name: dict[str, list[Tensor]] = {"counters": []}
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                counter = name == "step" or value.numel() == 1 < parameter.numel()
                by_name.setdefault("counters" if counter else name, []).append(value)
    if not counters:
        del by_name["counters"]
    return states | {name: _count_bytes(tensors) for name, tensors in by_name.items()}


def _local(tensor: Tensor) -> Tensor:
    # A sharded tensor (DTensor) speaks for all ranks: what this rank holds is its local part.
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _count_bytes(tensors: Iterable[Tensor]) -> int:
    # Views of one storage, such as gradients in a bucket, differ in address; a tensor without data has none.
    unique = {(tensor.data_ptr() or id(tensor), tensor.numel()): tensor for tensor in map(_local, tensors)}
    return sum(tensor.numel() * tensor.element_size() for tensor in unique.values())


@dataclass
class SavedActivations:
    """Bytes that autograd kept; a storage counts once, for the module and the operator that kept it first."""

    # bytes by the name of the innermost module, "" for the outermost one, "(outside)" for none
    by_module: Counter[str] = field(default_factory=Counter)
    # bytes by operator: "linear", "softmax", "scaled_dot_product_attention",
    by_kind: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.by_kind.values())


class CurrentOperator(TorchFunctionMode):
    """Remembers in `name` which torch function runs: hooks get a tensor, and not what it is kept for."""

    name = "(none)"

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outer, self.name = self.name, getattr(func, "__name__", str(func))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.name = outer


@contextmanager
def saved_activations(model: nn.Module | None = None) -> Iterator[SavedActivations]:
    """Count the bytes that autograd saves for backward while the block runs: put one forward pass in it.

    A view counts as its full storage, which it keeps alive. Parameters and buffers exist anyway and don't count.
    Whatever is saved counts, so a backward pass inside that recomputes adds what it saves in turn. Modules are named as
    in `model`, by default the outermost one that runs. The result is complete when the block ends.
    """
    result = SavedActivations()
    names = {} if model is None else {module: name for name, module in model.named_modules()}
    running: list[nn.Module] = []
    # By identity and not by address: memory that is freed meanwhile is soon given to another storage.
    saved: dict[StorageWeakRef, tuple[torch.UntypedStorage, str, str]] = {}
    operator = CurrentOperator()

    def enter(module: nn.Module, args: Any) -> None:
        if module not in names:
            names.update({inner: name for name, inner in module.named_modules() if inner not in names})
        running.append(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    def keep(tensor: Tensor) -> Tensor:
        storage = _local(tensor).untyped_storage()
        where = names[running[-1]] if running else "(outside)"
        saved.setdefault(StorageWeakRef(storage), (storage, where, operator.name))
        return tensor

    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(enter).remove)
        stack.callback(register_module_forward_hook(leave, always_call=True).remove)
        stack.enter_context(saved_tensors_hooks(keep, lambda tensor: tensor))
        stack.enter_context(operator)
        yield result

    existing = {
        StorageWeakRef(_local(tensor).untyped_storage())
        for module in names
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    }
    for reference, (storage, where, kind) in saved.items():
        if reference not in existing and storage.nbytes():
            result.by_module[where] += storage.nbytes()
            result.by_kind[kind] += storage.nbytes()
