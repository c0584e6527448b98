"""Private names of PyTorch: which the course uses, where each lives, and what to say when one is gone.

    from lablib.launch.torch_private import FakeTensorMode, MemTracker

A name is looked up when it is asked for, so nothing is loaded that nobody uses. Private names may move with any
release; those below are known to be where they stand in every release of `lablib.calc.torch_versions.SUPPORTED`.
`tests/test_torch_private.py` finds every other private name in the repository and asks for a reason.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from lablib.calc.torch_versions import PINNED, SUPPORTED

_CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel"

#: Our name, the module that has it, and its name there.
NAMES = {
    "FSDPMemTracker": ("torch.distributed._tools.fsdp2_mem_tracker", "FSDPMemTracker"),
    "FakeStore": ("torch.testing._internal.distributed.fake_pg", "FakeStore"),
    "FakeTensorMode": ("torch._subclasses.fake_tensor", "FakeTensorMode"),
    "HeadTailLoadBalancer": (f"{_CONTEXT_PARALLEL}._load_balancer", "_HeadTailLoadBalancer"),
    "MemTracker": ("torch.distributed._tools.mem_tracker", "MemTracker"),
    "TorchDispatchMode": ("torch.utils._python_dispatch", "TorchDispatchMode"),
    "active_fake_mode": ("torch._guards", "active_fake_mode"),
    "checkpoint_wrapper": ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "checkpoint_wrapper"),
    "clear_cublas_workspaces": ("torch._C", "_cuda_clearCublasWorkspaces"),
    "dispatch_has_kernel": ("torch._C", "_dispatch_has_kernel_for_dispatch_key"),
    "functional_collectives": ("torch.distributed", "_functional_collectives"),
    "memory_snapshot": ("torch.cuda.memory", "_snapshot"),
    "record_memory_history": ("torch.cuda.memory", "_record_memory_history"),
    "resolve_process_group": ("torch.distributed.distributed_c10d", "_resolve_process_group"),
    "ring_attention": (f"{_CONTEXT_PARALLEL}._attention", "_templated_ring_attention"),
    "ring_attention_backward": (f"{_CONTEXT_PARALLEL}._attention", "_templated_ring_attention_backward"),
    "ring_attention_options": (f"{_CONTEXT_PARALLEL}._attention", "_cp_options"),
    "set_rotate_method": (f"{_CONTEXT_PARALLEL}._attention", "set_rotate_method"),
    "tree_leaves": ("torch.utils._pytree", "tree_leaves"),
}


class MissingPrivateNameError(ImportError):
    """The installed PyTorch has a private name no longer, or not yet."""


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place, theirs = NAMES[name]
    try:
        return getattr(import_module(place), theirs)
    except (ImportError, AttributeError):
        raise MissingPrivateNameError(missing(f"{place}.{theirs}")) from None


def must_have(thing: object, *names: str) -> None:
    """Say that an object of PyTorch has these private attributes."""
    for name in names:
        if not hasattr(thing, name):
            base = next(c for c in type(thing).__mro__ if c.__module__.startswith("torch."))
            raise MissingPrivateNameError(missing(f"{base.__module__}.{base.__name__}.{name}"))


def missing(name: str) -> str:
    """Return what to say when PyTorch does not have a name."""
    return (
        f"torch {torch.__version__} has no {name}: it is a private part of PyTorch, which the course knows in torch "
        f"{SUPPORTED[0]} to {SUPPORTED[-1]}; install the version of constraints.txt: "
        f"pip install 'torch=={PINNED}.*'"
    )
