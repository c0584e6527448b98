"""How many bytes each rank of a training run needs, and when.

`training_memory` answers for the model's states, activations and buffers of one rank; `memory_timeline`, in `timeline`,
follows one training step from instant to instant; `explain_memory` names the formula behind each term.

    config        the settings of a run: defaults, ranges, help
    calculator    `training_memory`: which stage of the pipeline needs the most
    stage         what a stage holds: layers, tensors, units, and how they are sharded
    states        weights, gradients, optimizer states and activations of a stage: the formulas
    terms         every term: name, formula, source; and what comes back, with its totals
    activations   what one block keeps for its backward, by implementation, and recomputation
    tape          autograd's lifetimes in five rules, playable without a tensor
    timeline      the step, instant by instant, and its peak

Read `states` for the formulas, then `activations.block`. Chapters 01 and 09.
"""

from lablib.calc.memory.calculator import autocast_activations, training_memory
from lablib.calc.memory.config import ATTENTION, OFFLOADS, RECOMPUTE, SETTINGS, RunConfig, resolve_model, run_config
from lablib.calc.memory.stage import Stage
from lablib.calc.memory.states import stage_memory, weights_are_sharded
from lablib.calc.memory.terms import GRADIENT_TERMS, ROLES, WEIGHT_TERMS, MemoryBreakdown, When, find_term

__all__ = [
    "ATTENTION",
    "GRADIENT_TERMS",
    "OFFLOADS",
    "RECOMPUTE",
    "ROLES",
    "SETTINGS",
    "WEIGHT_TERMS",
    "MemoryBreakdown",
    "RunConfig",
    "Stage",
    "When",
    "autocast_activations",
    "find_term",
    "resolve_model",
    "run_config",
    "stage_memory",
    "training_memory",
    "weights_are_sharded",
]
