"""Which tensors one call of the optimizer updates together on this rank, where that is not simply all of them.

"foreach" needs its temporaries for one group at a time; "for-loop" goes through the groups one tensor after the other.

Chapter: book/memory_calculator.md. Source: torch/optim/adamw.py; torch/distributed/optim/zero_redundancy_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from lablib.calc.fsdp_shards import in_order
from lablib.calc.run_config import RunConfig
from lablib.calc.tensors import Tensor
from lablib.calc.zero_whole import fullest_part


def optimizer_groups(run: RunConfig, tensors: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """Return the sizes of the tensors of each group, in order; nothing where all of a rank's tensors are one group.

    `ZeroRedundancyOptimizer` updates the rank's own part. PyTorch's tensor parallelism leaves split and whole
    tensors, which foreach and fused kernels take in separate groups only; with FSDP2 all of them are split.

    Args:
        run: The run.
        tensors: A stage's tensors, unit by unit.
    """
    if run.sharding == "whole":
        return [fullest_part(run, tensors)]
    if run.tp > 1 and run.kernels != "paper" and run.sharding != "fsdp2":
        return [
            [
                prod(shape)
                for unit in tensors
                for shape in in_order(run, [t for t in unit if bool(t.split) == split])
            ]
            for split in (True, False)
        ]
    return []
