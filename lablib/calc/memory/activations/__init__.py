"""Activations: the bytes that a transformer block keeps for its backward, and what recomputation saves.

`layer_activations` in `block` sums up what the tape of a block keeps; `saved_tensors` names every tensor of it. `paper`
has the papers' equations (Korthikanti et al. 2022). `recompute` has the strategies of recomputation, their cost and
their frontier.

Read `paper` first, then `block`. Chapters 01 and 09.
"""

from lablib.calc.memory.activations.block import (
    embedding_activations,
    head_activations,
    layer_activations,
    model_activations,
    toy_activations,
)
from lablib.calc.memory.activations.paper import paper_activations
from lablib.calc.memory.activations.recompute import (
    RecomputeCost,
    RecomputeUnit,
    cheapest_first,
    chen_cost,
    every_strategy,
    first_blocks,
    frontier,
    hiding_width,
    ideal_segment,
    largest_batch,
    largest_that_fits,
    recompute_cost,
    recompute_units,
    sqrt_segment,
)
from lablib.calc.memory.activations.saved_tensors import SavedTensor, block_tensors, differences
from lablib.calc.memory.implementation import check_config

__all__ = [
    "RecomputeCost",
    "RecomputeUnit",
    "SavedTensor",
    "block_tensors",
    "cheapest_first",
    "check_config",
    "chen_cost",
    "differences",
    "embedding_activations",
    "every_strategy",
    "first_blocks",
    "frontier",
    "head_activations",
    "hiding_width",
    "ideal_segment",
    "largest_batch",
    "largest_that_fits",
    "layer_activations",
    "model_activations",
    "paper_activations",
    "recompute_cost",
    "recompute_units",
    "sqrt_segment",
    "toy_activations",
]
