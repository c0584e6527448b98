"""Model states under ZeRO: what each stage shards over the data-parallel ranks.

Four ranks and 8 parameters at 2 + 2 + 12 bytes: stage 0 holds 128 bytes on every rank, stage 1 holds 32 + 24,
stage 2 holds 16 + 4 + 24, stage 3 holds 4 + 4 + 24.

    stage 0   w + g + K             stage 2   w + (g + K)/N
    stage 1   w + g + K/N           stage 3   (w + g + K)/N

A shard is the ceiling of params / ranks: all parameters of a rank count as one flat array, padded at its end.

Source: Rajbhandari et al. 2019, ZeRO (arXiv 1910.02054), section 5, figure 1, tables 1 and 2.
"""

from __future__ import annotations

from lablib.calc.precision import Optimizer, Recipe, find_optimizer, recipe


def shard_size(params: int, ranks: int) -> int:
    """Return the parameters of one rank's shard, `ceil(params / ranks)`."""
    return -(-params // ranks)


def state_terms(
    params: int,
    ranks: int = 1,
    stage: int = 0,
    recipe_: str | Recipe = "mixed-bf16",
    optimizer: str | Optimizer = "adamw",
) -> dict[str, int]:
    """Return the bytes of model states on one rank, by term.

    Args:
        params: Trained parameters, `ψ`; with tensor or pipeline parallelism those of this rank.
        stage: ZeRO stage: 0 replicates, 1 shards the optimizer, 2 gradients too, 3 weights too.
    """
    _check(params, ranks, stage)
    dtypes, updates = recipe(recipe_), find_optimizer(optimizer)
    own = shard_size(params, ranks)
    weights, gradients, optimized = (own if stage >= least else params for least in (3, 2, 1))
    return {
        "weights": weights * dtypes.weights,
        "gradients": gradients * dtypes.gradients,
        "gradient_accumulation": gradients * dtypes.accumulation,
        "gradient_copy": optimized * dtypes.gradient_copy,
        "master_weights": optimized * dtypes.master,
        **updates.moment_bytes(optimized, dtypes.moment),
    }


def zero_state_bytes(
    params: int,
    ranks: int = 1,
    stage: int = 0,
    recipe: str | Recipe = "mixed-bf16",
    optimizer: str | Optimizer = "adamw",
) -> int:
    """Return the bytes of model states on one rank.

    Stage 1: `4 ψ + 12 ψ/N` for mixed-bf16 with AdamW. ZeRO (arXiv 1910.02054), table 1.

    Args:
        params: Parameters, `ψ`.
        stage: ZeRO stage, 0 to 3.
    """
    return sum(state_terms(params, ranks, stage, recipe, optimizer).values())


def max_params(
    budget: int,
    ranks: int = 1,
    stage: int = 0,
    recipe: str | Recipe = "mixed-bf16",
    optimizer: str | Optimizer = "adamw",
    model_parallel: int = 1,
) -> int:
    """Return the largest model whose states fit in so many bytes per rank, activations left out.

    ZeRO (arXiv 1910.02054), table 2: model parallelism multiplies what fits.

    Args:
        stage: ZeRO stage, 0 to 3.
        model_parallel: Ranks that split the model evenly before ZeRO does.
    """
    _check(0, ranks, stage)
    if budget < 0 or model_parallel < 1:
        raise ValueError(f"budget={budget} must not be negative and model_parallel={model_parallel} must be at least 1")
    # More parameters never need fewer bytes, so halve the interval. No parameter takes less than a byte per rank.
    fits, too_many = 0, int(budget) * ranks + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if zero_state_bytes(middle, ranks, stage, recipe, optimizer) <= budget:
            fits = middle
        else:
            too_many = middle
    return fits * model_parallel


def _check(params: int, ranks: int, stage: int) -> None:
    for name, value, least in (("params", params, 0), ("ranks", ranks, 1), ("stage", stage, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
    if stage > 3:
        raise ValueError(f"stage={stage} does not exist: ZeRO has stages 1, 2 and 3, and 0 replicates")
