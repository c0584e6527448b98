"""PyTorch's own memory trackers, asked one thing more: when in the step was how much held.

MemTracker and FSDPMemTracker see every operator, count each storage once and say of what kind it is. They keep one
peak. Here the fullest instant of every *moment* is kept too: forward of block 3, the loss, backward of block 3, the
optimizer's step. The bytes are PyTorch's; only the labels are ours.

Both trackers are private parts of PyTorch, found by `lablib.launch.torch_private`.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from lablib.calc import memory_kinds
from lablib.calc.torch_versions import torch_facts
from lablib.launch import fsdp_memory
from lablib.launch.torch_private import FSDPMemTracker, MemTracker, active_fake_mode, must_have

#: Names of kinds in both trackers, and those of `lablib.calc.memory_kinds`. FSDPMemTracker's come first.
KINDS = fsdp_memory.KINDS | {
    "Sharded Param": "weights",
    "Unsharded Param": "gathered weights",
    "Parameter": "weights",
    "Gradient": "gradients",
    "Optstate": "optimizer",
    "Other": "inputs",
}
_SKIPS_SHAPES = torch_facts(torch.__version__).tracker_skips_dtensor_shapes
_BLOCK = re.compile(r"\.(?:blocks|layers|h)\.(\d+)$")


class _NoHook:
    """Stands for the handle of a hook that is not there."""

    def remove(self) -> None:
        """Do nothing."""


class _Moments:
    """Keeps the fullest instant of every moment; to be mixed into a tracker."""

    def start(self, end: str = "loss", buckets: int = 0) -> None:
        """Begin a step: forget the moments so far, and what an earlier step left behind.

        Nothing of a step outlives it but gradients and DDP's buckets. What does has been kept by the hooks of the
        trackers themselves, in circles that Python cannot see through.

        Args:
            end: What comes behind the last block in forward.
            buckets: Bytes of DDP's buckets, which the trackers take for activations.
        """
        must_have(self, "_curr_mem_snap", "_mod_tracker", "_in_opt", "_param_to_grad_hook_handles")
        self._end, self._buckets, self._left = end, 0, {}
        self._after_step = False
        held = self.held()
        self._buckets = buckets
        self._left = {
            "activations": held.get("activations", 0) - buckets,
            "temporary": held.get("temporary", 0),
        }
        self.moments: dict[str, dict[str, int]] = {}
        self._totals: dict[str, int] = {}
        self._blocks: dict[str, int | None] = {}
        self.begin_micro_batch()

    def begin_micro_batch(self) -> None:
        """Say that forward begins, again: what runs now belongs to the embedding."""
        self._seen_block, self._now = False, ""

    def forget_left(self) -> None:
        """Say that nothing is in flight: tensors of activations that are still there are held by the trackers' hooks."""
        held = self.held()
        for kind in ("activations", "temporary"):
            self._left[kind] = self._left.get(kind, 0) + held.get(kind, 0)

    def begin_optimizer(self) -> None:
        """Say that gradients are complete: what runs now belongs to the optimizer's step."""
        self._after_step = True

    def held(self) -> dict[str, int]:
        """Return the bytes held now, by kind."""
        found: dict[str, int] = {}
        for kinds in self._curr_mem_snap.values():
            for kind, size in kinds.items():
                if size and (name := KINDS.get(getattr(kind, "value", kind))):
                    found[name] = found.get(name, 0) + size
        if self._buckets:
            found["gradient buckets"] = self._buckets
            found["activations"] -= self._buckets
        for kind, size in self._left.items():
            if size:
                found[kind] = found.get(kind, 0) - size
        if self._after_step and not self._in_opt and found.get("activations"):
            # Between backward and the step nothing is made but gradients in fp32, for the master weights.
            found["gradients"] = found.get("gradients", 0) + found.pop("activations")
        return {kind: found[kind] for kind in memory_kinds.KINDS if found.get(kind)}

    def note(self, moment: str) -> None:
        """Take the present instant into a moment."""
        total = sum(kinds["Total"] for kinds in self._curr_mem_snap.values()) - sum(self._left.values())
        if total > self._totals.get(moment, -1):
            self._totals[moment] = total
            self.moments[moment] = self.held()

    def __enter__(self) -> Any:
        self._outer_mode = active_fake_mode()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # DTensor asks for shapes with fake tensors of its own, which older trackers take for memory.
        if not _SKIPS_SHAPES and active_fake_mode() is not self._outer_mode:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _update_peak_stats(self, peak_state: Any) -> None:
        # In place of the trackers' own, which copies a snapshot for every module at every operator.
        if not hasattr(self, "moments"):
            return
        backward = self._mod_tracker.is_bw
        block = self._block(backward)
        self._seen_block = self._seen_block or block is not None
        if self._in_opt:
            self._after_step = True
        if self._in_opt or self._after_step:
            self._now = "optimizer step"
        elif block is not None:
            self._now = f"{'backward' if backward else 'forward'} of block {block}"
        elif backward:
            at_end = self._now in ("backward of block 0", "backward of the embedding")
            self._now = "backward of the embedding" if at_end else "backward of the loss"
        else:
            self._now = self._end if self._seen_block else "forward of the embedding"
        self.note(self._now)

    def _track_module_params_and_buffers(self, module: nn.Module, install_grad_hooks: bool = True) -> Any:
        # MemTracker puts a gradient's hook on every parameter that it knows none of; a frozen one takes none.
        for parameter in module.parameters():
            if not parameter.requires_grad:
                self._param_to_grad_hook_handles[parameter] = (_NoHook(), _NoHook())
        return super()._track_module_params_and_buffers(module, install_grad_hooks)

    def _block(self, backward: bool) -> int | None:
        found = []
        for name in self._mod_tracker.parents:
            if name not in self._blocks:
                inside = _BLOCK.search(name)
                self._blocks[name] = int(inside[1]) if inside else None
            if (number := self._blocks[name]) is not None:
                found.append(number)
        # While backward crosses from one block to the next both are marked; the lower one is the one that runs.
        return min(found, default=None) if backward else max(found, default=None)


class MomentTracker(_Moments, MemTracker):
    """MemTracker with moments: for what is not FSDP2's."""

    def __init__(self, *external: nn.Module | torch.optim.Optimizer | torch.Tensor) -> None:
        super().__init__()
        self.track_external(*external)


class FSDPMomentTracker(_Moments, FSDPMemTracker):
    """FSDPMemTracker with moments.

    Args:
        model: Sharded by `fully_shard`.
        optimizer: Of its parameters.
        tokens: What the model reads.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
        super().__init__(model, optimizer)
        self.track_inputs((tokens,))
