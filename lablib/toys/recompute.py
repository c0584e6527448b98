"""Activation checkpointing from `autograd.Function`: forget in forward, compute again in backward.

    y = checkpoint(block, x)          # in place of y = block(x)

Forward runs under no_grad, so that autograd keeps nothing but the inputs. Backward puts back the random state and the
autocast settings of forward, runs the function once more with gradients on, and calls backward inside backward.
Hence the name of this way: reentrant. It is PyTorch's `use_reentrant=True`, with its limits (chapter 09): parameters
get their gradients as a side effect in `.grad`, of the arguments only tensors get any, not those inside a list or a
dict, and a function that does other things the second time gives wrong gradients in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor


class Surroundings:
    """State beside its arguments that a function depends on: random states and autocast, of the CPU and one device."""

    def __init__(self, args: tuple, preserve_rng_state: bool) -> None:
        devices = {arg.device for arg in args if isinstance(arg, Tensor) and arg.device.type not in ("cpu", "meta")}
        self.random = torch.get_rng_state() if preserve_rng_state else None
        self.device_random = {
            device: torch.get_device_module(device).get_rng_state(device)
            for device in (devices if preserve_rng_state else ())
        }
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled())
            for kind in {"cpu", *(device.type for device in devices)}
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Go back to them, and afterwards to what was the case outside."""
        with ExitStack() as stack:
            if self.random is not None:
                stack.enter_context(torch.random.fork_rng(devices=[]))
                torch.set_rng_state(self.random)
            for device, state in self.device_random.items():
                module = torch.get_device_module(device)
                stack.callback(module.set_rng_state, module.get_rng_state(device), device)
                module.set_rng_state(state, device)
            for kind, dtype, enabled, cache in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache))
            yield


class Recompute(torch.autograd.Function):
    """`fn(*args)` that keeps its arguments and nothing else."""

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, fn: Callable, preserve_rng_state: bool, *args: Any) -> Any:
        """Run without a graph; autograd watches what is saved."""
        ctx.fn, ctx.surroundings = fn, Surroundings(args, preserve_rng_state)
        ctx.where = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        ctx.others = [None if i in ctx.where else arg for i, arg in enumerate(args)]
        ctx.save_for_backward(*(args[i] for i in ctx.where))
        return fn(*args)  # under no_grad: no graph inside

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        """Run again with a graph, then through it."""
        args = list(ctx.others)
        for i, tensor in zip(ctx.where, ctx.saved_tensors, strict=True):
            args[i] = tensor.detach()
            args[i].requires_grad_(tensor.requires_grad)
        with ctx.surroundings.restored(), torch.enable_grad():
            outputs = ctx.fn(*args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            # gradients are None for what is no tensor
            if gradient is not None and output.requires_grad
        ]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))
        return None, None, None, *(getattr(arg, "grad", None) for arg in args)


def checkpoint(fn: Callable, *args: Any, preserve_rng_state: bool = True) -> Any:
    """Return `fn(*args)`, keeping the arguments for backward and none of the values between.

    Args:
        fn: A function or module of tensors and other things, that returns a tensor or a tuple.
        *args: Its arguments; tensors in them get gradients.
        preserve_rng_state: Go back to forward's random numbers when `fn` runs again, so that dropout drops the same.
    """
    # Parameters inside fn are no arguments: without this ticket a frozen input would cut them off from backward.
    ticket = torch.empty(0, requires_grad=True)
    return Recompute.apply(ticket, fn, preserve_rng_state, *args)
