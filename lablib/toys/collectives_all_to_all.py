"""All-to-all: rank i's piece j becomes rank j's piece i, as expert and sequence parallelism need it.

In step k every rank sends to the rank k places to its right and receives from the one k places to its left: nobody
gets two messages at once, and every piece goes straight to where it belongs.

Paper: Thakur, Rabenseifner and Gropp 2005.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from lablib.calc.collective_costs import Traffic, chunk_sizes
from lablib.toys.wire import Wire, flat, same_size


def pairwise_all_to_all(
    output: Tensor,
    input: Tensor,
    output_sizes: Sequence[int] | None = None,
    input_sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Traffic:
    """Exchange pieces between all pairs of ranks in n - 1 steps: a rank sends (n-1)/n · S bytes.

    Args:
        output: What comes, one piece of each rank after the other.
        input: What leaves, one piece for each rank after the other; contiguous, like `output`.
        output_sizes: Elements of each piece that comes; None cuts `output` as evenly as can be. Where the pieces
            differ, give both: what rank i calls `input_sizes[j]` rank j must call `output_sizes[i]`.
        input_sizes: The same for `input`.
        group: The process group; None is all ranks.

    Returns:
        What this rank sent.

    Raises:
        ValueError: If the sizes do not fit the tensors, or a tensor is not contiguous.
    """
    wire = Wire(group)
    coming = _pieces(output, output_sizes, wire.size, "output")
    leaving = _pieces(input, input_sizes, wire.size, "input")
    same_size(coming[wire.rank], leaving[wire.rank], "the output's piece", "the input's piece of this rank")
    coming[wire.rank].copy_(leaving[wire.rank])
    for step in range(1, wire.size):
        to, source = (wire.rank + step) % wire.size, (wire.rank - step) % wire.size
        wire.exchange(send=leaving[to], to=to, receive=coming[source], source=source)
    return wire.traffic


def _pieces(tensor: Tensor, sizes: Sequence[int] | None, parts: int, name: str) -> list[Tensor]:
    row = flat(tensor)
    sizes = chunk_sizes(row.numel(), parts) if sizes is None else list(sizes)
    if len(sizes) != parts or sum(sizes) != row.numel() or min(sizes) < 0:
        raise ValueError(f"{name}_sizes={sizes} must be {parts} sizes that add up to {row.numel()} elements")
    return list(row.split(sizes))
