"""ZeRO: the states that each stage shards over the data-parallel ranks, what it sends, and which stage a job should take.

Four ranks and 8 parameters at 2 + 2 + 12 bytes: stage 0 holds 128 bytes on every rank, stage 1 holds 32 + 24,
stage 2 holds 16 + 4 + 24, stage 3 holds 4 + 4 + 24.

    stage 0   w + g + K             stage 2   w + (g + K)/N
    stage 1   w + g + K/N           stage 3   (w + g + K)/N

A shard is the ceiling of params / ranks: all parameters of a rank count as one flat array, padded at its end.

Source: Rajbhandari et al. 2019, ZeRO (arXiv 1910.02054), sections 5 and 7, figure 1, tables 1 and 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lablib.calc.communication import ring_all_gather_bytes, ring_reduce_scatter_bytes
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
    """
    return sum(state_terms(params, ranks, stage, recipe, optimizer).values())


def zero_traffic(
    params: int, ranks: int, stage: int, micro_batches: int = 1, bytes_per_value: int = 2
) -> dict[str, float]:
    """Return the bytes that one rank sends in an optimizer step, by collective and what it carries.

    For m micro-batches: DDP (accumulating with `no_sync`) and stage 1 scatter gradients once and gather once;
    stage 2 scatters m times and gathers once; stage 3 scatters m times and gathers 2m times.
    ZeRO (arXiv 1910.02054), section 7.2, has m = 1: `data_parallel_bytes`.
    """
    _check(params, ranks, stage)
    if micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches} must be at least 1")
    size = bytes_per_value * params
    scatters = micro_batches if stage >= 2 else 1
    gathers = 2 * micro_batches if stage == 3 else 1
    gathered = "gradients" if stage == 0 else "weights"
    return {
        "reduce-scatter of gradients": scatters * ring_reduce_scatter_bytes(size, ranks),
        f"all-gather of {gathered}": gathers * ring_all_gather_bytes(size, ranks),
    }


def zero_sent_bytes(params: int, ranks: int, stage: int, micro_batches: int = 1, bytes_per_value: int = 2) -> float:
    """Return the bytes that one rank sends in an optimizer step.

    In units of `ψ (N-1)/N` values: 2 for DDP and stage 1, m + 1 for stage 2, 3m for stage 3.
    """
    return sum(zero_traffic(params, ranks, stage, micro_batches, bytes_per_value).values())


@dataclass(frozen=True)
class StageChoice:
    """What one stage does with one job.

    Attributes:
        micro_batches: Micro-batches in a step, None if not even one sequence fits beside the states.
        sent: Bytes that a rank sends in a step, None likewise.
    """

    stage: int
    held: int
    micro_batches: int | None
    sent: float | None


def zero_choices(params: int, ranks: int, sequences: int, activations: int, budget: int) -> list[StageChoice]:
    """Return what each of the stages 0 to 3 holds and sends if its micro-batches are as large as memory allows.

    `b = floor((budget - held) / activations)` sequences fit, and `m = ceil(sequences / (ranks b))` micro-batches are
    needed. Chapter 05, "Which stage".

    Args:
        activations: Bytes that one sequence of a micro-batch keeps for backward.
        budget: Bytes of a device for states and activations.
    """
    if sequences < 1 or sequences % ranks or activations < 1:
        raise ValueError(f"sequences={sequences} must be a multiple of ranks={ranks}, and activations at least 1 byte")
    choices = []
    for stage in range(4):
        held = zero_state_bytes(params, ranks, stage)
        fit = (budget - held) // activations
        count = -(-(sequences // ranks) // fit) if fit > 0 else None
        sent = None if count is None else zero_sent_bytes(params, ranks, stage, count)
        choices.append(StageChoice(stage, held, count, sent))
    return choices


def least_sent(choices: Sequence[StageChoice]) -> int | None:
    """Return the stage that fits and sends least, the lowest of several; None if none fits."""
    fit = [choice for choice in choices if choice.sent is not None]
    # Equal sums of transfers may differ in the last bits.
    least = min((choice.sent for choice in fit), default=0.0) * (1 + 1e-9)
    return min((choice.stage for choice in fit if choice.sent <= least), default=None)


def deal_out(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Return which tensors each rank owns, by number: the largest first, each to the rank with least.

    So does `torch.distributed.optim.ZeroRedundancyOptimizer`.
    """
    owned: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for k in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
        rank = loads.index(min(loads))
        owned[rank].append(k)
        loads[rank] += sizes[k]
    return owned


def deal_whole(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return how much each rank owns if tensors are dealt out so."""
    return [sum(sizes[k] for k in mine) for mine in deal_out(sizes, ranks)]


def max_params(
    budget: int,
    ranks: int = 1,
    stage: int = 0,
    recipe: str | Recipe = "mixed-bf16",
    optimizer: str | Optimizer = "adamw",
) -> int:
    """Return the largest model whose states fit in so many bytes per rank, activations left out.

    ZeRO (arXiv 1910.02054), table 2: model parallelism multiplies what fits.
    """
    _check(0, ranks, stage)
    if budget < 0:
        raise ValueError(f"budget={budget} must not be negative")
    # More parameters never need fewer bytes, so halve the interval. No parameter takes less than a byte per rank.
    fits, too_many = 0, int(budget) * ranks + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if zero_state_bytes(middle, ranks, stage, recipe, optimizer) <= budget:
            fits = middle
        else:
            too_many = middle
    return fits


def _check(params: int, ranks: int, stage: int) -> None:
    for name, value, least in (("params", params, 0), ("ranks", ranks, 1), ("stage", stage, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
    if stage > 3:
        raise ValueError(f"stage={stage} does not exist: ZeRO has stages 1, 2 and 3, and 0 replicates")
