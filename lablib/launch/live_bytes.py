"""Bytes of all tensors that are alive, operator by operator, on any device: a memory profiler of one class.

Every tensor comes out of an operator, and a TorchDispatchMode sees all of them. Each new storage is counted when it
appears and discounted when Python or autograd lets go of it. What a kernel uses inside is not seen, nor what an
allocator rounds up and caches: this is memory as the program asks for it, and exact.

Tensors are told apart by when they were made. Those of the forward pass, and of its repetition in backward, that are
alive while backward runs its own operators are what autograd and checkpointing *keep*. Those that backward makes
itself are gradients.

Chapter: book/09_activation_checkpointing.md
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

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
