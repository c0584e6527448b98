"""Training in 16 and 8 bits: what breaks, what autocast does, what a reduced sum loses.

    watched_training   small trainings that overflow, underflow or stall
    autocast           what autocast casts, traced, and its memory
    float8             FP8 layers and their errors, and the error of an all-reduce in 16 bits
    libraries          torchao's and bitsandbytes' blocks and moments, where they are installed

Read `watched_training` first. Chapter 08.
"""

from lablib.launch.precision.autocast import differs_on_gpu, gpu_policy, precision_memory, trace_autocast
from lablib.launch.precision.float8 import (
    allreduce_error,
    expected_error,
    gloo_error,
    missing_for_float8,
    precompute_scales,
    product_error,
    rounding_noise,
    through,
    to_float8,
)
from lablib.launch.precision.watched_training import overflow, small_model, stall, train_watched, underflow

__all__ = [
    "allreduce_error",
    "differs_on_gpu",
    "expected_error",
    "gloo_error",
    "gpu_policy",
    "missing_for_float8",
    "overflow",
    "precision_memory",
    "precompute_scales",
    "product_error",
    "rounding_noise",
    "small_model",
    "stall",
    "through",
    "to_float8",
    "trace_autocast",
    "train_watched",
    "underflow",
]
