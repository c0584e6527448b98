"""Every layout of a model on a cluster, ordered by predicted step time.

`plan(model, cluster, ...)` searches, `plan_reasons` explains its first choice, `judge_runs` judges the time model on published runs.

    layout        a layout and a cluster, and which layouts fit on which
    memory        what a layout needs of each GPU
    time          how long a step takes: work, exposed communication, bubble
    search        `plan`
    assumptions   what a layout's prediction takes for granted, and what is refused
    explain       the answer in sentences, and where published layouts land in it
    calibration   the published runs that the two fitted constants come from

Read `search` first, then `time`. Chapter 07.
"""

from lablib.calc.layouts.planner.assumptions import expert_limits, model_limits, not_modelled, refuse_unmodelled
from lablib.calc.layouts.planner.calibration import (
    EFFICIENCY,
    LLAMA3,
    MEASURED_RUNS,
    NARAYANAN,
    UNFITTED,
    Run,
    judge_runs,
    megatron_gpt,
    predict_run,
    workload_of_run,
)
from lablib.calc.layouts.planner.explain import (
    PART_NAMES,
    WORKED_EXAMPLES,
    place_in_plan,
    place_of_published,
    plan_reasons,
    plan_run,
    reason_against,
)
from lablib.calc.layouts.planner.layout import FIELDS, Cluster, Layout, check_layout, check_nodes, chunk_layers, cluster
from lablib.calc.layouts.planner.memory import layout_memory
from lablib.calc.layouts.planner.search import Candidate, Plan, divisors, nothing_fits, plan
from lablib.calc.layouts.planner.time import MicroBatch, Workload, layer_work, step_time, total_seconds

__all__ = [
    "EFFICIENCY",
    "FIELDS",
    "LLAMA3",
    "MEASURED_RUNS",
    "NARAYANAN",
    "PART_NAMES",
    "UNFITTED",
    "WORKED_EXAMPLES",
    "Candidate",
    "Cluster",
    "Layout",
    "MicroBatch",
    "Plan",
    "Run",
    "Workload",
    "check_layout",
    "check_nodes",
    "chunk_layers",
    "cluster",
    "divisors",
    "expert_limits",
    "judge_runs",
    "layer_work",
    "layout_memory",
    "megatron_gpt",
    "model_limits",
    "not_modelled",
    "nothing_fits",
    "place_in_plan",
    "place_of_published",
    "plan",
    "plan_reasons",
    "plan_run",
    "predict_run",
    "reason_against",
    "refuse_unmodelled",
    "step_time",
    "total_seconds",
    "workload_of_run",
]
