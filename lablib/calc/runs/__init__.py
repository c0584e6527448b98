"""A long run as numbers: batch sizes, failures, scaling losses, rented hours, and the files that a run leaves.

    batch           gradient noise scale, batch size, learning-rate schedules
    failures        how often to save, and what failures cost
    scaling         what a step on N ranks loses, and to what
    trace           traces of torch.profiler from all ranks on one clock
    network_study   communication patterns on throttled links, as formulas       chapter 10
    rental          what the GPU labs cost on a rented machine                    `rung cost`
    nvidia_smi      what `nvidia-smi` prints
    cuda_snapshot   who held memory at the peak, from PyTorch's snapshot

Read `failures` first. Chapter 11.
"""

from lablib.calc.runs.batch import (
    NoiseScale,
    cosine_lr,
    examples_needed,
    linear_rule,
    noise_rule,
    noise_scale,
    sqrt_rule,
    step_gain,
    steps_needed,
)
from lablib.calc.runs.cuda_snapshot import ROUNDING, Held, History, load_snapshot, replay, round_up
from lablib.calc.runs.failures import LLAMA3, best_interval, daly_interval, lost_share, lost_time, young_interval
from lablib.calc.runs.network_study import (
    LAYOUTS,
    VARIANTS,
    Settings,
    layout_bytes,
    link_bandwidth,
    placement_rows,
    savings_rows,
    scaling_rows,
)
from lablib.calc.runs.nvidia_smi import (
    HARMFUL,
    POWER_LIMIT,
    QUERY_FIELDS,
    XIDS,
    driver_cuda,
    hardware_errors,
    link_text,
    parse_query,
    pcie_bandwidth,
    worst_link,
)
from lablib.calc.runs.rental import (
    LABS,
    MINUTES,
    RUN_GPU_LABS,
    budgets,
    expect_step,
    hours,
    parse_machine,
    rented_minutes,
    study_minutes,
)
from lablib.calc.runs.scaling import Loss, Phases, predicted_step, scaling_loss, spread
from lablib.calc.runs.trace import Trace, annotated_window, merge_intervals, merge_traces, parse_trace, split_time

__all__ = [
    "HARMFUL",
    "LABS",
    "LAYOUTS",
    "LLAMA3",
    "MINUTES",
    "POWER_LIMIT",
    "QUERY_FIELDS",
    "ROUNDING",
    "RUN_GPU_LABS",
    "VARIANTS",
    "XIDS",
    "Held",
    "History",
    "Loss",
    "NoiseScale",
    "Phases",
    "Settings",
    "Trace",
    "annotated_window",
    "best_interval",
    "budgets",
    "cosine_lr",
    "daly_interval",
    "driver_cuda",
    "examples_needed",
    "expect_step",
    "hardware_errors",
    "hours",
    "layout_bytes",
    "linear_rule",
    "link_bandwidth",
    "link_text",
    "load_snapshot",
    "lost_share",
    "lost_time",
    "merge_intervals",
    "merge_traces",
    "noise_rule",
    "noise_scale",
    "parse_machine",
    "parse_query",
    "parse_trace",
    "pcie_bandwidth",
    "placement_rows",
    "predicted_step",
    "rented_minutes",
    "replay",
    "round_up",
    "savings_rows",
    "scaling_loss",
    "scaling_rows",
    "split_time",
    "spread",
    "sqrt_rule",
    "step_gain",
    "steps_needed",
    "study_minutes",
    "worst_link",
    "young_interval",
]
