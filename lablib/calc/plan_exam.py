"""Does the planner find what the papers chose? The place of every published layout among the planner's own.

The planner gets what the paper printed besides the layout: recomputation, micro-batch, ZeRO stage, dtypes, attention.
The Megatron papers had no context parallelism, so theirs is fixed at 1. A place counts distinct (tp, cp, pp, dp).
"""

from __future__ import annotations

from dataclasses import dataclass

from lablib.calc.plan import Plan, plan
from lablib.calc.plan_layout import Layout
from lablib.calc.plan_runs import LLAMA3, Run
from lablib.calc.plan_time import Efficiency

#: Layouts as their papers print them, by preset, with devices per node, sequence and batch: worked examples. Llama 3:
#: table 4, second row; its chunks are ours. DeepSeek-V3 (arXiv 2412.19437), section 3.2: 2,048 GPUs, 16 stages, experts
#: over 8 nodes, ZeRO-1 and no tensor parallelism; schedule (theirs is DualPipe), recomputation and batch are ours.
WORKED_EXAMPLES = {
    "llama-3.1-405b": (
        Layout(tp=8, pp=16, dp=128, zero=1, schedule="interleaved", virtual_stages=8),
        {"gpus_per_node": 8, "seq": 8192, "global_batch": 2048},
    ),
    "deepseek-v3": (
        Layout(ep=64, pp=16, dp=128, zero=1, recompute="full"),
        {"gpus_per_node": 8, "seq": 4096, "global_batch": 15360},
    ),
}


@dataclass(frozen=True)
class Place:
    """Where a published layout stands.

    Attributes:
        run: The row.
        place: 1 for the planner's first choice; None if it thinks that the layout does not fit.
        of: Shapes that fit.
        slower: How much slower it is predicted to be than the first choice, as a share; None with no place.
    """

    run: Run
    place: int | None
    of: int
    slower: float | None


def plan_run(run: Run, efficiency: Efficiency | None = None) -> Plan:
    """Return the planner's layouts for a published row.

    Args:
        run: The row.
        efficiency: The fitted constants; None means the planner's own.
    """
    fixed = {"recompute": run.recompute, "micro_batch": run.micro_batch, "zero": run.zero}
    if run.paper != LLAMA3:
        fixed["cp"] = 1
    own = {} if efficiency is None else {"efficiency": efficiency}
    return plan(
        run.model,
        gpus=run.gpus,
        gpu=run.gpu,
        seq=run.seq,
        global_batch=run.global_batch,
        recipe_=run.recipe,
        attention=run.attention,
        sequence_parallel=run.sequence_parallel,
        **own,
        **{name: value for name, value in fixed.items() if value is not None},
    )


def place(run: Run, efficiency: Efficiency | None = None) -> Place:
    """Return the place of a row's layout.

    Args:
        run: The row.
        efficiency: The fitted constants; None means the planner's own.
    """
    return place_in(plan_run(run, efficiency), run)


def place_in(found: Plan, run: Run) -> Place:
    """Return the place of a row's layout among those of a plan.

    Args:
        found: What `plan_run` found for the row; `found.at(efficiency)` ranks it anew without a new search.
        run: The row.
    """
    shapes = found.distinct()
    for number, candidate in enumerate(shapes, start=1):
        if candidate.layout.shape == (run.tp, run.cp, run.pp, run.dp):
            return Place(run, number, len(shapes), candidate.step / shapes[0].step - 1)
    return Place(run, None, len(shapes), None)
