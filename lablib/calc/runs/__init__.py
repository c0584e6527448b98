"""A long run as numbers: batch sizes, failures, lost efficiency, rented hours, and the files that a run leaves.

| module | exports | chapter |
|---|---|---|
| `batch` | `noise_scale` (a `NoiseScale`); `steps_needed`, `examples_needed`, `step_gain` of a batch; `linear_rule`, `sqrt_rule`, `noise_rule` for its learning rate; `cosine_lr`; `shuffled_place`, a shuffled order of any length that nobody keeps | 11 |
| `failures` | `young_interval`, `daly_interval`, `best_interval` between checkpoints; `lost_share`, `lost_time`, `restarting`; `LLAMA3_FAILURES`, a published log | 11 |
| `goodput` | `PUBLISHED_RUNS`, each a `PublishedRun` with what the law predicts for it; `expected_ettr`, `simulate_restarts`; `RSC_FAILURES`, `RSC_MTTF_HOURS`, `mtbf_of_rate` | 14 |
| `replica_groups` | `ReplicaGroups` that die one at a time: `group_goodput`, a `GroupGoodput`; `simulate_groups`; `checkpointed_goodput`, with `rare_restarts`; `restart_instead`, `crossover` | 14 |
| `bill` | `plan_bill` of a layout, a `Bill`: days, GPU hours and dollars as intervals, goodput, spares (`rung plan --tokens`) | 11 |
| `scaling` | `scaling_loss`, a `ScalingLoss` by part; `predicted_step` under FSDP; `spread` of samples | 11 |
| `rental` | `parse_machine`, `lab_budgets`, `expect_step` of a rented machine (`rung cost`); `LAB_BUDGETS`, `RUN_GPU_LABS`, `rented_minutes`; `STUDY_MINUTES`, `study_minutes`, `hours_text` of the course | 11 |
| `trace` | `parse_trace` (a `Trace`), `merge_traces`, `split_time`, `annotated_window`, `merge_intervals` | 02, 11 |
| `network_study` | `StudySettings`, `STUDY_VARIANTS`, `STUDY_LAYOUTS`; `scaling_rows`, `savings_rows`, `placement_rows`; `layout_bytes`, `link_bandwidth` | 10 |
| `cuda_snapshot` | `load_snapshot`, `replay_snapshot`: a `MemoryHistory` of `HeldMemory`; `round_up` of an allocation | 01 |

Read `failures` first. Chapter 11.
"""

from lablib.calc.runs.batch import (
    NoiseScale,
    cosine_lr,
    examples_needed,
    linear_rule,
    noise_rule,
    noise_scale,
    shuffled_place,
    sqrt_rule,
    step_gain,
    steps_needed,
)
from lablib.calc.runs.bill import Bill, plan_bill
from lablib.calc.runs.cuda_snapshot import HeldMemory, MemoryHistory, load_snapshot, replay_snapshot, round_up
from lablib.calc.runs.failures import (
    LLAMA3_FAILURES,
    best_interval,
    daly_interval,
    lost_share,
    lost_time,
    restarting,
    young_interval,
)
from lablib.calc.runs.goodput import (
    PUBLISHED_RUNS,
    RSC_FAILURES,
    RSC_MTTF_HOURS,
    PublishedRun,
    expected_ettr,
    mtbf_of_rate,
    simulate_restarts,
)
from lablib.calc.runs.network_study import (
    STUDY_LAYOUTS,
    STUDY_VARIANTS,
    StudySettings,
    layout_bytes,
    link_bandwidth,
    placement_rows,
    savings_rows,
    scaling_rows,
)
from lablib.calc.runs.rental import (
    LAB_BUDGETS,
    RUN_GPU_LABS,
    STUDY_MINUTES,
    expect_step,
    hours_text,
    lab_budgets,
    parse_machine,
    rented_minutes,
    study_minutes,
)
from lablib.calc.runs.replica_groups import (
    GroupGoodput,
    ReplicaGroups,
    checkpointed_goodput,
    crossover,
    group_goodput,
    rare_restarts,
    restart_instead,
    simulate_groups,
)
from lablib.calc.runs.scaling import ScalingLoss, predicted_step, scaling_loss, spread
from lablib.calc.runs.trace import Trace, annotated_window, merge_intervals, merge_traces, parse_trace, split_time

__all__ = [
    "LAB_BUDGETS", "LLAMA3_FAILURES", "PUBLISHED_RUNS", "RSC_FAILURES", "RSC_MTTF_HOURS", "RUN_GPU_LABS",
    "STUDY_LAYOUTS", "STUDY_MINUTES", "STUDY_VARIANTS", "Bill", "GroupGoodput", "HeldMemory", "MemoryHistory",
    "NoiseScale", "PublishedRun", "ReplicaGroups", "ScalingLoss", "StudySettings", "Trace", "annotated_window",
    "best_interval", "checkpointed_goodput", "cosine_lr", "crossover", "daly_interval", "examples_needed",
    "expect_step", "expected_ettr", "group_goodput", "hours_text", "lab_budgets", "layout_bytes", "linear_rule",
    "link_bandwidth", "load_snapshot", "lost_share", "lost_time", "merge_intervals", "merge_traces", "mtbf_of_rate",
    "noise_rule", "noise_scale", "parse_machine", "parse_trace", "placement_rows", "plan_bill", "predicted_step",
    "rare_restarts", "rented_minutes", "replay_snapshot", "restart_instead", "restarting", "round_up", "savings_rows", "scaling_loss",
    "scaling_rows", "shuffled_place", "simulate_groups", "simulate_restarts", "split_time", "spread", "sqrt_rule",
    "step_gain", "steps_needed", "study_minutes", "young_interval",
]  # fmt: skip
