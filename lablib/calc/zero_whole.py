"""ZeRO stage 1 by whole parameters, as `torch.distributed.optim.ZeroRedundancyOptimizer` divides the optimizer.

It cuts no tensor. The largest parameter goes to the rank that has least so far, then the next largest:

    sizes 10, 6, 5, 4, 3 on 2 ranks:   rank 0 gets 10, 4     rank 1 gets 6, 5, 3     both 14

A flat array would give ceil(28 / 2) = 14 to each, too. With one large table it does not come out even: 100, 6, 5, 4 on
2 ranks are 100 and 15, and more ranks help no further. Every rank has all weights and gradients, as under DDP.

    psi_max >= max(largest parameter, psi / N)        psi_max: values on the fullest rank; psi: all values; N: ranks

Source: torch/distributed/optim/zero_redundancy_optimizer.py, `_partition_parameters`.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapreplace
from math import prod

from lablib.calc.memory_stage import Stage
from lablib.calc.zero import state_terms


def greedy_partition(sizes: Iterable[int], ranks: int) -> list[list[int]]:
    """Return the sizes that each rank gets, in the order in which it gets them.

    Args:
        sizes: Values of each parameter.
        ranks: Ranks that share them.

    Raises:
        ValueError: If there is no rank.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]  # a heap: the least first, and of equal ones the lowest rank
    for size in sorted(sizes, reverse=True):
        load, least = loads[0]
        parts[least].append(size)
        heapreplace(loads, (load + size, least))
    return parts


def parts_of_ranks(stage: Stage) -> list[list[int]]:
    """Return the sizes of the parameters whose optimizer states each data-parallel rank holds."""
    return greedy_partition(map(prod, stage.trained_shapes), stage.run.replicas(False))


def fullest_part(stage: Stage) -> list[int]:
    """Return the sizes on the rank that has most; the first one if several do."""
    return max(parts_of_ranks(stage), key=sum)


def whole_states(stage: Stage) -> dict[str, int]:
    """Return the bytes of states on the fullest rank, by term: all weights and gradients, and its part's moments.

    A master copy stays unsharded too: it is what the optimizer updates, and every rank gets all of it.
    """
    run, params = stage.run, stage.total_params
    frozen = params["frozen", False] + params["frozen", True]
    trained = params["trained", False] + params["trained", True]
    terms = state_terms(trained, 1, 0, run.recipe, run.optimizer)
    terms["weights"] += frozen * run.recipe.weights
    return terms | run.optimizer.moment_bytes(sum(fullest_part(stage)), run.recipe.moment)
