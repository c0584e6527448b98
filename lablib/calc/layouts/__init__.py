"""How a model is laid out over a cluster: meshes, rules of thumb, published layouts, and the planner.

    meshes      ranks as a grid of dp, tp, pp, cp and ep: its groups, bytes that they send, what a rank holds
    guides      the decision framework, and rules of thumb that guides print, as functions
    challenge   the clusters of the exercise, and the score of a plan
    miniature   a composition small enough for a laptop's ranks
    local_sgd   data parallelism that synchronizes every H steps
    planner     all layouts of a model on a cluster, by predicted step time    `rung plan`
    fit         largest micro-batch, longest sequence, fewest GPUs             `rung fit`
    export      the planner's answer as files of other frameworks

Read `meshes` first, then `planner.search`. Chapter 07.
"""

from lablib.calc.layouts.challenge import CASES, Case, Score, case_peak, plan_case, score
from lablib.calc.layouts.export import COUNTED, counting_for, export_job, export_layout, export_plan
from lablib.calc.layouts.guides import FAMILIES, choose, enough_microbatches, microbatch_rule, order_rule, tensor_rule
from lablib.calc.layouts.local_sgd import exchange_cost, needed_inner_steps
from lablib.calc.layouts.meshes import AXES, Holding, Mesh, axis_bytes, group_line, holdings, mesh, mesh_text
from lablib.calc.layouts.miniature import VERSIONS, AxisTraffic, Miniature, predicted_traffic

__all__ = [
    "AXES",
    "CASES",
    "COUNTED",
    "FAMILIES",
    "VERSIONS",
    "AxisTraffic",
    "Case",
    "Holding",
    "Mesh",
    "Miniature",
    "Score",
    "axis_bytes",
    "case_peak",
    "choose",
    "counting_for",
    "enough_microbatches",
    "exchange_cost",
    "export_job",
    "export_layout",
    "export_plan",
    "group_line",
    "holdings",
    "mesh",
    "mesh_text",
    "microbatch_rule",
    "needed_inner_steps",
    "order_rule",
    "plan_case",
    "predicted_traffic",
    "score",
    "tensor_rule",
]
