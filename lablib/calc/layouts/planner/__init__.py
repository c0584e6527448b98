"""Every layout of a model on a cluster, ordered by predicted step time.

`plan(model, cluster, ...)` searches, `plan_reasons` explains its first choice, `judge_runs` judges the time model on published runs.

    layout        a layout and a cluster, and which layouts fit on which
    memory        what a layout needs of each GPU
    time          how long a step takes: work, exposed communication, bubble
    peak          the same at its fullest, as the memory calculator counts an implementation
    candidates    layouts by time, each judged by its peak before it is named
    search        `plan`
    explain       the answer in sentences, and where published layouts land in it
    calibration   the published runs that the two fitted constants come from

Read `search` first, then `time`. Chapter 07.
"""

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
from lablib.calc.layouts.planner.candidates import Candidate
from lablib.calc.layouts.planner.explain import (
    PART_NAMES,
    WORKED_EXAMPLES,
    counting_of_run,
    place_in_plan,
    place_of_published,
    plan_reasons,
    plan_run,
    reason_against,
)
from lablib.calc.layouts.planner.layout import FIELDS, Cluster, Layout, check_layout, chunk_layers, cluster
from lablib.calc.layouts.planner.memory import layout_memory
from lablib.calc.layouts.planner.peak import Counting, counted_run, layout_peak
from lablib.calc.layouts.planner.search import NEAREST, RESERVE, Plan, divisors, nothing_fits, plan
from lablib.calc.layouts.planner.time import MicroBatch, Workload, layer_work, step_time, total_seconds

__all__ = [
    "EFFICIENCY",
    "FIELDS",
    "LLAMA3",
    "MEASURED_RUNS",
    "NARAYANAN",
    "NEAREST",
    "PART_NAMES",
    "RESERVE",
    "UNFITTED",
    "WORKED_EXAMPLES",
    "Candidate",
    "Cluster",
    "Counting",
    "Layout",
    "MicroBatch",
    "Plan",
    "Run",
    "Workload",
    "check_layout",
    "chunk_layers",
    "cluster",
    "counted_run",
    "counting_of_run",
    "divisors",
    "judge_runs",
    "layer_work",
    "layout_memory",
    "layout_peak",
    "megatron_gpt",
    "nothing_fits",
    "place_in_plan",
    "place_of_published",
    "plan",
    "plan_reasons",
    "plan_run",
    "predict_run",
    "reason_against",
    "step_time",
    "total_seconds",
    "workload_of_run",
]
