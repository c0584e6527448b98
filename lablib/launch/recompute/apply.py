"""Apply a strategy of activation recomputation to the toy transformer, without editing it.

    with apply_strategy(model, "every:2"):
        model.loss(tokens).backward()

Blocks get another `forward` for as long as the strategy is on: names of parameters and state dicts stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from lablib.calc.memory.activations import RecomputeUnit, recompute_units
from lablib.launch.measure import LiveBytes
from lablib.toys.recompute import checkpoint as toy_checkpoint
from lablib.toys.transformer import Transformer

PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def matmul_policy() -> list[Any]:
    """Return the operators whose outputs the "matmuls" strategy saves: matrix products and fused attention."""
    return [getattr(torch.ops.aten, name).default for name in PRODUCTS if hasattr(torch.ops.aten, name)]


class AppliedStrategy:
    """A strategy that is on: `remove()` it, or leave its `with` block.

    Attributes:
        units: What happens to which blocks.
        host_bytes: Bytes copied to the host since it was put on.
        tracker: Is told when a part of forward runs again in backward; anything with the methods of `LiveBytes`.
    """

    def __init__(self, units: list[RecomputeUnit]) -> None:
        self.units = units
        self.host_bytes = 0
        self.tracker: LiveBytes | None = None
        self._changed: list[tuple[nn.Module, str, Callable | None]] = []

    def __enter__(self) -> AppliedStrategy:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Give every module its own methods back."""
        while self._changed:
            module, name, before = self._changed.pop()
            if before is None:
                delattr(module, name)
            else:
                setattr(module, name, before)

    def change(self, module: nn.Module, name: str, function: Callable) -> None:
        """Put a function in place of a method of a module."""
        self._changed.append((module, name, vars(module).get(name)))  # a model may have put a method of its own there
        setattr(module, name, function)

    def notice(self, function: Callable) -> Callable:
        """Return the function, telling the tracker when it runs again in backward."""

        def noticed(*args: Any) -> Any:
            if self.tracker is None or not self.tracker.in_backward:
                return function(*args)
            with self.tracker.replay():
                return function(*args)

        return noticed


class _CountedOffload(save_on_cpu):
    """PyTorch's `save_on_cpu`, counted. It copies what each operator saves: weights, and one tensor many times, too.

    A tensor on an accelerator goes to pinned memory. One that is on the host already would be its own copy: it is
    copied to ordinary memory, so that a laptop moves the same bytes, and a CPU run beside a GPU asks nothing of it.
    """

    def __init__(self, applied: AppliedStrategy, device: torch.device) -> None:
        pinned = device.type != "cpu"
        super().__init__(pin_memory=pinned, **({"device_type": device.type} if pinned else {}))
        to_host, to_device = self.pack_hook, self.unpack_hook

        def pack(tensor: Tensor) -> Any:
            packed = to_host(tensor.detach())
            if not pinned:
                packed = (packed[0], packed[1].clone())
            applied.host_bytes += packed[1].nbytes
            if applied.tracker is not None:
                applied.tracker.forget(packed[1])
            return packed

        def unpack(packed: Any) -> Tensor:
            def back(packed: Any) -> Tensor:
                tensor = to_device(packed)
                # Where the device is the CPU itself, nothing would move.
                return tensor.clone() if tensor is packed[1] else tensor

            return applied.notice(back)(packed)

        self.pack_hook, self.unpack_hook = pack, unpack


def apply_strategy(
    model: Transformer,
    strategy: str,
    *,
    implementation: str = "torch",
    early_stop: bool = True,
    preserve_rng_state: bool = True,
) -> AppliedStrategy:
    """Make the blocks of a model keep what a strategy keeps; return the handle that undoes it.

    Args:
        model: Changed until the handle is removed; its parameters and their names stay.
        implementation: "torch" for `torch.utils.checkpoint` with use_reentrant=False, "torch-reentrant" for the
            other one, or "toy" for `lablib.toys.recompute`.
        early_stop: Let "torch" stop a replay as soon as it has what backward needs.
        preserve_rng_state: Whether a replay draws the random numbers of forward again.

    Raises:
        ValueError: If a name is unknown, a strategy is on already, "matmuls" is asked of an implementation without
            policies, or a block that joins a segment has hooks (FSDP's, for one), which would not see it run.
    """
    units = recompute_units(strategy, len(model.blocks))
    if implementation == "toy":
        run_again = partial(toy_checkpoint, preserve_rng_state=preserve_rng_state)
    elif implementation in ("torch", "torch-reentrant"):
        how = {"use_reentrant": True} if "-" in implementation else {"use_reentrant": False, "early_stop": early_stop}
        run_again = partial(torch_checkpoint, preserve_rng_state=preserve_rng_state, **how)
    else:
        raise ValueError(f"implementation={implementation!r} must be one of 'torch', 'torch-reentrant', 'toy'")
    if implementation != "torch" and any(unit.kind == "matmuls" for unit in units):
        raise ValueError(f"strategy={strategy!r} needs implementation='torch', not {implementation!r}: it has policies")
    if any("forward" in vars(block) or isinstance(block.attention.core, partial) for block in model.blocks):
        raise ValueError("a strategy is on already; remove it first")
    applied = AppliedStrategy(units)
    for unit in units:
        _apply(applied, unit, list(model.blocks[unit.first : unit.first + unit.length]), run_again)
    return applied


def _apply(applied: AppliedStrategy, unit: RecomputeUnit, blocks: list[nn.Module], run_again: Callable) -> None:
    if unit.kind == "none":
        return
    if unit.kind == "selective":
        core = applied.notice(blocks[0].attention.core)
        applied.change(blocks[0].attention, "core", partial(run_again, core))
        return
    for block in blocks[1:]:
        if block._forward_pre_hooks or block._forward_hooks:
            raise ValueError(f"{unit.name} would run as one, past the hooks of the blocks in it; use strategy='full'")
    forwards = [block.forward for block in blocks]

    def run(x_BSH: Tensor, rope_2SD: Tensor | None = None, *more: Tensor | None) -> Tensor:
        for forward in forwards:
            x_BSH = forward(x_BSH, rope_2SD, *more)
        return x_BSH

    again = partial(run_again, applied.notice(run))
    if unit.kind == "matmuls":
        again = partial(again.func, *again.args, **again.keywords, context_fn=_save_products)

    def offloaded(function: Callable, x_BSH: Tensor, *args: Any) -> Tensor:
        with _CountedOffload(applied, x_BSH.device):
            return function(x_BSH, *args)

    forward = {
        "full": again,
        "matmuls": again,
        "offload": partial(offloaded, run),
        "full+offload": partial(offloaded, again),
    }[unit.kind]
    applied.change(blocks[0], "forward", forward)
    for block in blocks[1:]:
        applied.change(block, "forward", _already_run)


def _save_products() -> Any:
    return create_selective_checkpoint_contexts(matmul_policy())


def _already_run(x_BSH: Tensor, *_: Tensor | None) -> Tensor:
    """Pass the stream on: the first block of the segment ran this one."""
    return x_BSH
