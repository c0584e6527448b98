"""Megatron's tensor parallelism: f and g, split layers, a split transformer.

    functions        f and g, and their sequence-parallel relatives
    layers           column- and row-parallel linear layers, the split vocabulary
    tp_transformer   a block and a transformer from them

Read `functions` first, beside chapter 03.
"""

from lablib.toys.tensor_parallel.functions import (
    copy_to_tp,
    gather_from_sp,
    gathered_linears,
    reduce_from_tp,
    scatter_to_sp,
    sum_gradient,
)
from lablib.toys.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    columns,
    even_split,
    head_split,
    vocab_parallel_cross_entropy,
)
from lablib.toys.tensor_parallel.tp_transformer import ParallelBlock, ParallelTransformer, Plan, parallelize

__all__ = [
    "ColumnParallelLinear",
    "ParallelBlock",
    "ParallelTransformer",
    "Plan",
    "RowParallelLinear",
    "columns",
    "copy_to_tp",
    "even_split",
    "gather_from_sp",
    "gathered_linears",
    "head_split",
    "parallelize",
    "reduce_from_tp",
    "scatter_to_sp",
    "sum_gradient",
    "vocab_parallel_cross_entropy",
]
