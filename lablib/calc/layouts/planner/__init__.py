"""Every layout of a model on a cluster, by predicted step time and by how wrong such times are.

`plan(model, cluster, ...)` searches, `plan_reasons` explains its first choice, `predict_run` what it says of published runs.

    layout        a layout and a cluster, and which layouts fit on which
    memory        what a layout needs of each GPU
    time          how long a step takes: work, exposed communication, bubble
    rates         how close runs come to full rates: the fitted constants
    peak          the same at its fullest, as the memory calculator counts an implementation
    search        `plan`, its layouts by time, each judged by its peak before it is named, and which of them tie
    explain       the answer in sentences, and what it takes for granted
    calibration   published runs as jobs, what is predicted for them, and errors on measured runs like this one

Read `search` first, then `time`. Chapter 07.
"""

from lablib.calc.layouts.planner.calibration import (
    APART,
    LIKE_THIS,
    LLAMA3,
    MEASURED,
    MEASURED_RUNS,
    NARAYANAN,
    WORKED_EXAMPLES,
    Likeness,
    Run,
    counted_flops,
    counting_of_run,
    like_this,
    measured_rows,
    megatron_gpt,
    narayanan,
    predict_run,
    run_choices,
    workload_of_run,
)
from lablib.calc.layouts.planner.explain import (
    PART_NAMES,
    expert_limits,
    missing_units,
    model_limits,
    not_modelled,
    plan_reasons,
    reason_against,
    why_first,
)
from lablib.calc.layouts.planner.layout import FIELDS, Cluster, Layout, Training, check_layout, check_nodes, cluster
from lablib.calc.layouts.planner.memory import layout_memory
from lablib.calc.layouts.planner.peak import Counting, Peak, counted_run, layout_peak, peak_and_step
from lablib.calc.layouts.planner.rates import FITTED, FRAMEWORKS, KERNELS, Fitted, Framework, Rates, generation
from lablib.calc.layouts.planner.search import NEAREST, Candidate, Plan, divisors, nothing_fits, plan
from lablib.calc.layouts.planner.time import (
    MicroBatch,
    StepWork,
    Workload,
    host_bytes,
    layer_work,
    pass_seconds,
    step_time,
)

__all__ = [
    "APART",
    "FIELDS",
    "FITTED",
    "FRAMEWORKS",
    "KERNELS",
    "LIKE_THIS",
    "LLAMA3",
    "MEASURED",
    "MEASURED_RUNS",
    "NARAYANAN",
    "NEAREST",
    "PART_NAMES",
    "WORKED_EXAMPLES",
    "Candidate",
    "Cluster",
    "Counting",
    "Fitted",
    "Framework",
    "Layout",
    "Likeness",
    "MicroBatch",
    "Peak",
    "Plan",
    "Rates",
    "Run",
    "StepWork",
    "Training",
    "Workload",
    "check_layout",
    "check_nodes",
    "cluster",
    "counted_flops",
    "counted_run",
    "counting_of_run",
    "divisors",
    "expert_limits",
    "generation",
    "host_bytes",
    "layer_work",
    "layout_memory",
    "layout_peak",
    "like_this",
    "measured_rows",
    "megatron_gpt",
    "missing_units",
    "model_limits",
    "narayanan",
    "not_modelled",
    "nothing_fits",
    "pass_seconds",
    "peak_and_step",
    "plan",
    "plan_reasons",
    "predict_run",
    "reason_against",
    "run_choices",
    "step_time",
    "why_first",
    "workload_of_run",
]
