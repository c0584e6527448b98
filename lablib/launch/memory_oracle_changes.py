"""What the oracles change in PyTorch so that they can measure at all, each change in one place.

A real run makes neither the mask nor the copies that these three avoid, and a real all-reduce of a bucket works in
place. What no oracle can see is said in `lablib.launch.memory_oracles`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lablib.launch.torch_private import dispatch_has_kernel


@contextmanager
def fused_sgd_without_values() -> Iterator[None]:
    """Let fake tensors through PyTorch's fused SGD: with no kernel for shapes, all arguments would be allocated."""
    library = torch.library.Library("aten", "IMPL")
    try:
        if not dispatch_has_kernel("aten::_fused_sgd_", "Meta"):
            library.impl("_fused_sgd_", lambda *args, **kwargs: None, "Meta")
        yield
    finally:
        library._destroy()


@contextmanager
def nothing_packed() -> Iterator[None]:
    """Tell transformers that a batch holds no packed sequences.

    It looks at values, which fake tensors have not, and then makes a mask that a real run does not make.
    """
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    look = getattr(masking_utils, name)
    setattr(masking_utils, name, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masking_utils, name, look)


def answered(state, bucket):  # DDP takes no annotations that are text
    """Stand for the all-reduce of a bucket, and note its size: DDP does not take the fake group's empty answer."""
    state.append(bucket.buffer().nbytes)
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
