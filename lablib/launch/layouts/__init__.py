"""Several kinds of parallelism in one job, small enough for a laptop.

    composition     a small run in both versions: distance from one process, traffic beside the prediction
    variants        the model, built from `lablib.toys` and from PyTorch's own parts
    orders          wrappers in every order: which work, and what the others do
    pipeline_runs   schedules on real ranks, timed, and PyTorch's own schedules on the same stages
    tp_plan         PyTorch's plan of tensor parallelism for a Llama

Read `composition` first. Chapters 03, 04 and 07.
"""

from lablib.launch.layouts.composition import run_miniature
from lablib.launch.layouts.orders import try_orders
from lablib.launch.layouts.pipeline_runs import (
    TORCH_SCHEDULES,
    fsdp_gathers,
    measured_times,
    microbatch_windows,
    predicted_peaks,
    torch_step,
    watched_step,
)
from lablib.launch.layouts.tp_plan import split_by_plan

__all__ = [
    "TORCH_SCHEDULES",
    "fsdp_gathers",
    "measured_times",
    "microbatch_windows",
    "predicted_peaks",
    "run_miniature",
    "split_by_plan",
    "torch_step",
    "try_orders",
    "watched_step",
]
