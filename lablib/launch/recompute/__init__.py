"""Activation checkpointing on real models: applied, measured, combined with other kinds of parallelism.

    apply            strategies on PyTorch's modules
    measured_steps   time, memory, and other kinds of parallelism beside it
    kept_tensors     what autograd keeps, tensor by tensor, with names

Read `apply` first, then `measured_steps`. Chapter 09.
"""

from lablib.launch.recompute.apply import apply_strategy, matmul_policy
from lablib.launch.recompute.kept_tensors import bytes_by_name, named_saved_tensors
from lablib.launch.recompute.measured_steps import (
    ddp_error,
    find_largest_batch,
    fsdp_gathers,
    measure_step,
    pipeline_error,
    predicted_cost,
    tensor_parallel_reduces,
)

__all__ = [
    "apply_strategy",
    "bytes_by_name",
    "ddp_error",
    "find_largest_batch",
    "fsdp_gathers",
    "matmul_policy",
    "measure_step",
    "named_saved_tensors",
    "pipeline_error",
    "predicted_cost",
    "tensor_parallel_reduces",
]
