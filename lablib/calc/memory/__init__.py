"""How many bytes each rank of a training run needs, and when.

`training_memory` answers for the model's states, activations and buffers of one rank; `memory_timeline`, in `timeline`,
follows one training step from instant to instant; `timeline.explain_instant` names the formula behind each term.

    formulas        `training_memory`: weights, gradients, optimizer states, activations and buffers of a stage
    config          the settings of a run: defaults, ranges, help
    stage           what a stage holds: layers, tensors, units, and how they are sharded
    implementation  whose operators are counted: the papers', this course's, Hugging Face's
    terms           every term: name, formula, source; and what comes back, with its totals
    room            whether a peak fits on a GPU: `verdict`
    tape            what operators keep for backward, and autograd's lifetimes in five rules: it counts
    activations     what a block keeps, summed up and tensor by tensor; the papers' equations; recomputation
    timeline        the step, instant by instant, and its peak

Read `formulas` first, then `activations.paper`. Chapters 01 and 09.
"""

from lablib.calc.memory.config import (
    ATTENTION,
    LONGEST,
    OFFLOADS,
    RECOMPUTE,
    SETTINGS,
    TUNINGS,
    RunConfig,
    resolve_model,
    run_config,
)
from lablib.calc.memory.formulas import autocast_activations, stage_memory, training_memory, weights_are_sharded
from lablib.calc.memory.implementation import IMPLEMENTATIONS, current_names, find_implementation
from lablib.calc.memory.room import MEANING, RESERVE, UNPROVEN_SHARE, Verdict, check_reserve, unproven, verdict
from lablib.calc.memory.stage import Stage
from lablib.calc.memory.terms import GRADIENT_TERMS, ROLES, WEIGHT_TERMS, MemoryBreakdown, find_term, sum_by_role

__all__ = [
    "ATTENTION",
    "GRADIENT_TERMS",
    "IMPLEMENTATIONS",
    "LONGEST",
    "MEANING",
    "OFFLOADS",
    "RECOMPUTE",
    "RESERVE",
    "ROLES",
    "SETTINGS",
    "TUNINGS",
    "UNPROVEN_SHARE",
    "WEIGHT_TERMS",
    "MemoryBreakdown",
    "RunConfig",
    "Stage",
    "Verdict",
    "autocast_activations",
    "check_reserve",
    "current_names",
    "find_implementation",
    "find_term",
    "resolve_model",
    "run_config",
    "stage_memory",
    "sum_by_role",
    "training_memory",
    "unproven",
    "verdict",
    "weights_are_sharded",
]
