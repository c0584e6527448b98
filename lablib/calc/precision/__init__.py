"""Number formats, and recipes that say which of them holds what.

    formats   fp32 to FP4: range, spacing, rounding, and which GPU computes in them
    recipes   precision recipes and optimizers: bytes per parameter
    fp8       scales and blocks in 8 and 4 bits, errors of sums, and what FP8 saves of a step

Read `formats` first. Chapter 08; `recipes` is used from chapter 01 on.
"""

from lablib.calc.precision.formats import (
    FORMATS,
    Format,
    find_format,
    format_spans,
    gap_at,
    least_update,
    peak_ratio,
    scale_window,
    support_table,
)
from lablib.calc.precision.fp8 import (
    DEEPSEEK_V3,
    HIGH_PRECISION,
    MX_ROUNDINGS,
    STATES,
    TORCHAO_LLAMA3_8B,
    gather_bytes,
    implied_share,
    largest_scale,
    linear_params,
    mx_doubles,
    mx_scale,
    quantized_bytes,
    ring_sum_error,
    rounding_error,
    scale_count,
    step_speedup,
)
from lablib.calc.precision.recipes import (
    LEAST_QUANTIZED,
    OPTIMIZERS,
    RECIPES,
    Optimizer,
    Recipe,
    find_optimizer,
    recipe,
)

__all__ = [
    "DEEPSEEK_V3",
    "FORMATS",
    "HIGH_PRECISION",
    "LEAST_QUANTIZED",
    "MX_ROUNDINGS",
    "OPTIMIZERS",
    "RECIPES",
    "STATES",
    "TORCHAO_LLAMA3_8B",
    "Format",
    "Optimizer",
    "Recipe",
    "find_format",
    "find_optimizer",
    "format_spans",
    "gap_at",
    "gather_bytes",
    "implied_share",
    "largest_scale",
    "least_update",
    "linear_params",
    "mx_doubles",
    "mx_scale",
    "peak_ratio",
    "quantized_bytes",
    "recipe",
    "ring_sum_error",
    "rounding_error",
    "scale_count",
    "scale_window",
    "step_speedup",
    "support_table",
]
