"""Expert parallelism: what the tokens send, who averages whose gradients, and how unevenly a router loads its experts.

Letters: T tokens of a rank, E experts in a layer, k experts a token, h width of the stream, f inner width of an expert,
e = ep ranks that share the experts, r = edp ranks that hold the same expert, C capacity, φ capacity factor. `value` is
the bytes of a number on the wire, `flops` F, the FLOP/s that a rank reaches, and `bandwidth` W, the bytes per second that
it sends, per direction. Chapter 13.

Sources: DeepSeek-AI 2024 (arXiv 2412.19437), sections 2.1.2 and 3.2.2, for nodes; Liu et al. 2025 (arXiv 2504.14960),
section 3, for folding; Lepikhin et al. 2020 (GShard, arXiv 2006.16668) and Fedus et al. 2021 (Switch, arXiv 2101.03961),
section 2.2 of both, for capacity.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from lablib.calc.communication import check_link, hiding_tokens, ring_all_gather_bytes
from lablib.calc.errors import check_whole, must_divide, one_of
from lablib.calc.models import ModelConfig
from lablib.calc.params import count_params

#: What is sent of a token: a copy for each chosen expert, for each rank with one, or for each node with one.
DISPATCH_WAYS = ("expert", "rank", "node")


class DispatchBytes(NamedTuple):
    """Bytes that one rank sends for one layer of experts.

    Attributes:
        inside: To ranks of its own node.
        across: To ranks of other nodes.
    """

    inside: float
    across: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.inside + self.across


def dispatch_bytes(tokens: int, experts_per_token: int, hidden: int, ep: int, *, value: int = 2) -> float:
    """Return the bytes that a rank sends for one layer of experts, forward and backward: `4 T k h (e-1)/e` values.

    Each token goes to its k experts and comes back, in both directions of training; experts are chosen evenly.
    """
    for name, number in (("tokens", tokens), ("experts_per_token", experts_per_token), ("hidden", hidden), ("ep", ep)):
        check_whole(name, number, 1)
    return 4 * ring_all_gather_bytes(tokens * experts_per_token * hidden * value, ep)


def chance_met(experts: int, pool: int, chosen: int) -> float:
    """Return the chance that one of some experts is among those that a token chooses: `1 - C(P-n, k) / C(P, k)`.

    Args:
        experts: n, for example those of one rank.
        pool: P, of which the token chooses, each set with the same chance.
    """
    return 1 - math.comb(pool - experts, chosen) / math.comb(pool, chosen)


def routed_bytes(
    tokens: int,
    hidden: int,
    *,
    num_experts: int,
    experts_per_token: int,
    ep: int,
    ranks_per_node: int = 8,
    way: str = "expert",
    node_limit: int | None = None,
    value: float = 2,
) -> DispatchBytes:
    """Return the bytes of `dispatch_bytes` by link, for three ways to send a token and for a limit on its nodes.

    "expert" sends a copy for each chosen expert. "rank" sends one to each rank that has any of them. "node" sends one
    over the network to each such node, where the rank of the same index hands it to the others. Combine goes the same
    way back, because what belongs to one token is added before it returns (DeepSeek-V3, section 3.2.2).

    Args:
        ranks_per_node: Neighbours among the ep ranks.
        node_limit: Nodes at most that a token visits, all equally often; None means no limit.
    """
    one_of("way", way, DISPATCH_WAYS)
    whole = {"tokens": tokens, "hidden": hidden, "num_experts": num_experts, "ep": ep, "ranks_per_node": ranks_per_node}
    for name, number in whole.items():
        check_whole(name, number, 1)
    check_whole("experts_per_token", experts_per_token, 1, num_experts)
    must_divide("ep", ep, "num_experts", num_experts)
    inside = min(ep, ranks_per_node)
    must_divide("ranks_per_node", inside, "ep", ep)
    nodes = ep // inside
    limit = nodes if node_limit is None else node_limit
    check_whole("node_limit", limit, 1, nodes)
    pool = num_experts // nodes * limit
    check_whole("experts_per_token", experts_per_token, 1, pool)

    if way == "expert":
        ranks_met = nodes_met = experts_per_token / ep  # copies that one rank receives of one token
        nodes_met *= inside
    else:
        # The token keeps to `limit` of the nodes; a rank or a node is one of those with chance limit / nodes.
        ranks_met = limit / nodes * chance_met(num_experts // ep, pool, experts_per_token)
        nodes_met = limit / nodes * chance_met(num_experts // nodes, pool, experts_per_token)
    there = 4 * tokens * hidden * value
    if way == "node":
        # Every rank hands on what arrives at its index, from all nodes: to the other ranks of its own node.
        return DispatchBytes(there * nodes * (inside - 1) * ranks_met, there * (nodes - 1) * nodes_met)
    return DispatchBytes(there * (inside - 1) * ranks_met, there * (ep - inside) * ranks_met)


def dispatch_ratio(expert_ffn: int, ep: int, *, flops: float, bandwidth: float, value: float = 2) -> float:
    """Return the time of dispatch and combine over that of the experts' products: `2 u F (e-1) / (9 f W e)`.

    4 T k h (e-1)/e values are sent and 6 · 3 T k h f FLOPs computed, so tokens, k and h cancel.
    """
    check_whole("expert_ffn", expert_ffn, 1)
    check_link(ep, flops=flops, bandwidth=bandwidth, value=value)
    return 4 * value * (ep - 1) / ep / bandwidth / (6 * 3 * expert_ffn / flops)


def expert_hiding_tokens(
    num_experts: int,
    experts_per_token: int,
    *,
    ep: int = 1,
    edp: int,
    flops: float,
    bandwidth: float,
    bytes_per_gradient: float = 2,
) -> float:
    """Return the tokens per rank whose backward just hides the experts' all-reduce: `E/(k e) · g/2 · (r-1)/r · F/W`.

    A rank holds E/e experts, whose gradients it sends, and computes k of them for each token. A dense MLP of the
    same width needs `hiding_tokens`, so experts need E/(k e) times as many.
    """
    must_divide("ep", ep, "num_experts", num_experts)
    check_whole("experts_per_token", experts_per_token, 1, num_experts)
    dense = hiding_tokens(edp, flops=flops, bandwidth=bandwidth, bytes_per_gradient=bytes_per_gradient)
    return num_experts / (experts_per_token * ep) * dense


def held_params(config: ModelConfig, ep: int) -> int:
    """Return the parameters that a rank holds where the routed experts are split over ep ranks and nothing else is."""
    if not config.is_moe:
        raise ValueError(f"{config.name} has no experts, so ep={ep} has nothing to split")
    check_whole("ep", ep, 1)
    must_divide("ep", ep, "num_experts", config.num_experts)
    count = count_params(config)
    return count.total - count.by_component["experts"] // ep * (ep - 1)


def expert_groups(
    *, tp: int = 1, cp: int = 1, dp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1, order: str = "tp-cp-ep-dp-pp"
) -> dict[str, list[list[int]]]:
    """Return the process groups of attention and of experts, where experts are folded over all ranks of a stage.

    The ranks of a pipeline stage are one grid for attention, tp x cp x dp, and another for experts, etp x ep x edp, both
    with the first axis fastest; edp = tp cp dp / (etp ep). Liu et al. 2025 (arXiv 2504.14960), section 3 and listing 1.

    Where pp is not the slowest axis, a stage's ranks are counted as they come. Megatron Core 0.19.2 gives the same groups,
    or refuses: it wants edp = dp there (megatron/core/parallel_state.py).

    Args:
        order: The axes, fastest first; etp has the place of tp, edp that of dp.

    Returns:
        "tp", "cp", "dp", "etp", "ep", "edp" and "pp" to groups of ranks; "dp x cp" are the ranks that hold the same
        attention weights, and "edp" those that hold the same expert.
    """
    for name, size in {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "ep": ep, "etp": etp}.items():
        check_whole(name, size, 1)
    stage = tp * cp * dp
    must_divide(f"etp={etp} x ep", etp * ep, f"tp={tp} x cp={cp} x dp", stage)
    axes = order.split("-")
    of_attention = {"tp": ("tp", tp), "cp": ("cp", cp), "dp": ("dp", dp), "pp": ("pp", pp)}
    of_experts = {"tp": ("etp", etp), "ep": ("ep", ep), "dp": ("edp", stage // (etp * ep))}
    attention, experts = (dict(grid[axis] for axis in axes if axis in grid) for grid in (of_attention, of_experts))
    stages = _grid_groups(attention, "tp", "cp", "dp")
    return (
        {axis: _grid_groups(attention, axis) for axis in attention}
        | {
            axis: [[ranks[place] for place in group] for ranks in stages for group in _grid_groups(experts, axis)]
            for axis in experts
        }
        | {"dp x cp": _grid_groups(attention, "dp", "cp")}
    )


def _grid_groups(sizes: dict[str, int], *axes: str) -> list[list[int]]:
    """Ranks that agree in all coordinates but those of `axes`; the first axis of the grid is fastest."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(sizes.values())):
        rest, key = rank, []
        for axis, size in sizes.items():
            rest, at = divmod(rest, size)
            if axis not in axes:
                key.append(at)
        groups.setdefault(tuple(key), []).append(rank)
    return list(groups.values())


def expert_gradient_factor(*, tp: int = 1, cp: int = 1, dp: int = 1, ep: int = 1, etp: int = 1) -> float:
    """Return what the mean over edp of an expert's gradients is multiplied by: `edp / (dp cp) = tp / (etp ep)`.

    An expert has seen the tokens of all ranks of its ep group, so its gradient is a sum over their batches already. The
    sum over edp is the sum over all dp cp batches, and the loss is their mean. Without folding (etp = tp) it is 1/ep.
    """
    edp = len(expert_groups(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp)["edp"][0])
    return edp / (dp * cp)


def expert_capacity(tokens: int, num_experts: int, experts_per_token: int, factor: float) -> int:
    """Return the copies that an expert takes: `⌈ φ T k / E ⌉`."""
    for name, number in (("tokens", tokens), ("num_experts", num_experts), ("experts_per_token", experts_per_token)):
        check_whole(name, number, 1)
    if not factor > 0:
        raise ValueError(f"factor={factor} must be above 0; 1 is room for the mean")
    # Rounded first, so that 1.1 x 80 / 8 is 11 and not 12: 1.1 has no exact binary value.
    return math.ceil(round(factor * tokens * experts_per_token / num_experts, 6))


def dropped_share(loads: Sequence[int], capacity: int) -> float:
    """Return the share of copies that find their expert full: `Σ max(0, n_i - C) / Σ n_i`."""
    _check_loads(loads)
    return sum(max(0, load - capacity) for load in loads) / sum(loads)


def random_dropped_share(tokens: int, num_experts: int, experts_per_token: int, factor: float) -> float:
    """Return the share of copies that a router without preferences drops, in the mean.

    Each token chooses an expert with chance k/E, so an expert's load is binomial:
    `E/(T k) · Σ_{n>C} (n - C) binomial(n; T, k/E)`.
    """
    capacity = expert_capacity(tokens, num_experts, experts_per_token, factor)
    check_whole("experts_per_token", experts_per_token, 1, num_experts)
    p = experts_per_token / num_experts
    if p == 1:
        return max(0, tokens - capacity) / tokens
    mean, spread = tokens * p, math.sqrt(tokens * p * (1 - p))
    first = max(capacity + 1, int(mean - 12 * spread))  # beyond 12 standard deviations nothing is left to add
    last = min(tokens, int(mean + 12 * spread) + 12)
    over = math.fsum((n - capacity) * _binomial(n, tokens, p) for n in range(first, last + 1))
    return over / mean


def _binomial(n: int, tokens: int, p: float) -> float:
    ways = math.lgamma(tokens + 1) - math.lgamma(n + 1) - math.lgamma(tokens - n + 1)
    return math.exp(ways + n * math.log(p) + (tokens - n) * math.log1p(-p))


def random_loads(tokens: int, num_experts: int, experts_per_token: int, *, seed: int = 0) -> list[int]:
    """Return how many tokens chose each expert, for one draw of a router without preferences."""
    check_whole("tokens", tokens, 1)
    check_whole("experts_per_token", experts_per_token, 1, num_experts)
    draw, loads = random.Random(seed), [0] * num_experts
    for _ in range(tokens):
        for expert in draw.sample(range(num_experts), experts_per_token):
            loads[expert] += 1
    return loads


def rank_experts(num_experts: int, ep: int, rank: int) -> range:
    """Return the experts that an ep rank holds: the rank-th part.

    So do Megatron Core 0.19.2 (megatron/core/transformer/moe/moe_layer.py) and torchtitan 0.3.0, whose weights are `Shard(0)`
    over ep (torchtitan/models/common/moe_sharding.py).
    """
    check_whole("ep", ep, 1)
    check_whole("rank", rank, 0, ep - 1)
    must_divide("ep", ep, "num_experts", num_experts)
    held = num_experts // ep
    return range(rank * held, (rank + 1) * held)


def rank_loads(loads: Sequence[int], ep: int) -> list[int]:
    """Return the copies that each of ep ranks computes; rank i holds the i-th part of the experts."""
    _check_loads(loads)
    check_whole("ep", ep, 1)
    must_divide("ep", ep, "num_experts", len(loads))
    held = len(loads) // ep
    return [sum(loads[first : first + held]) for first in range(0, len(loads), held)]


def imbalance(loads: Sequence[int], ep: int) -> float:
    """Return the copies of the busiest rank over the mean, `max_j n_j / (Σ n_j / e)`: how much longer all ranks wait."""
    ranks = rank_loads(loads, ep)
    return max(ranks) / (sum(ranks) / ep)


def _check_loads(loads: Sequence[int]) -> None:
    if not len(loads) or min(loads) < 0 or not sum(loads):
        raise ValueError(f"loads={list(loads)} must be a number for each expert, none negative and one above 0")
