"""Expert parallelism: what the tokens send, over which ranks experts lie, and who averages whose gradients.

Four tokens on each of two ranks, four experts, two of them on each rank, two experts a token: a rank's tokens make
eight copies, and if the choice is even, four of them have their expert on the other rank. They go there and come back,
in forward and in backward.

Letters: T tokens of a rank, E experts in a layer, k experts a token, h width of the stream, f inner width of an expert,
e = ep ranks that share the experts, r = edp ranks that hold the same expert. Chapter 13.

Sources: DeepSeek-AI 2024 (arXiv 2412.19437), sections 2.1.2 and 3.2.2, for nodes; Liu et al. 2025 (arXiv 2504.14960),
section 3, for folding.
"""

from __future__ import annotations

import math
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

    Args:
        tokens: T, of one rank.
        value: Bytes of a number on the wire.
    """
    for name, number in (("tokens", tokens), ("experts_per_token", experts_per_token), ("hidden", hidden), ("ep", ep)):
        check_whole(name, number, 1)
    return 4 * ring_all_gather_bytes(tokens * experts_per_token * hidden * value, ep)


def chance_met(experts: int, pool: int, chosen: int) -> float:
    """Return the chance that one of some experts is among those that a token chooses: `1 - C(P-n, k) / C(P, k)`.

    Args:
        experts: n, for example those of one rank.
        pool: P, of which the token chooses, each set with the same chance.
        chosen: k different ones.
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
        tokens: T, of one rank.
        ranks_per_node: Neighbours among the ep ranks.
        way: One of `DISPATCH_WAYS`.
        node_limit: Nodes at most that a token visits, all equally often; None means no limit.
        value: Bytes of a number on the wire.
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


def dispatch_ratio(
    expert_ffn: int, ep: int, *, flops: float, bandwidth: float, value: float = 2, gated: bool = True
) -> float:
    """Return the time of dispatch and combine over that of the experts' products: `2 u F (e-1) / (9 f W e)`.

    4 T k h (e-1)/e values are sent and 6 · 3 T k h f FLOPs computed, so tokens, k and h cancel. Without a gate an
    expert has two matrices, and 9 becomes 6.

    Args:
        expert_ffn: f, the inner width of an expert.
        flops: F, that a rank reaches, in FLOP/s.
        bandwidth: W, what a rank sends in bytes per second, per direction.
        value: u, bytes of a number on the wire.
    """
    check_whole("expert_ffn", expert_ffn, 1)
    check_link(ep, flops=flops, bandwidth=bandwidth, value=value)
    matrices = 3 if gated else 2
    return 4 * value * (ep - 1) / ep / bandwidth / (6 * matrices * expert_ffn / flops)


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

    A rank holds E/e experts, whose gradients it sends, and computes k of them for each token. A dense layer of the
    same width needs `hiding_tokens`, so a mixture needs E/(k e) times as many.

    Args:
        edp: r, the ranks that hold the same expert.
        flops: F, that a rank reaches, in FLOP/s.
        bandwidth: W, what a rank sends in bytes per second, per direction.
    """
    must_divide("ep", ep, "num_experts", num_experts)
    check_whole("experts_per_token", experts_per_token, 1, num_experts)
    dense = hiding_tokens(edp, flops=flops, bandwidth=bandwidth, bytes_per_gradient=bytes_per_gradient)
    return num_experts / (experts_per_token * ep) * dense


def held_params(config: ModelConfig, ep: int) -> int:
    """Return the parameters that a rank holds where the routed experts are split over ep ranks and nothing else is.

    Args:
        ep: Divides the experts of a layer.
    """
    if not config.is_moe:
        raise ValueError(f"{config.name} has no experts, so ep={ep} has nothing to split")
    check_whole("ep", ep, 1)
    must_divide("ep", ep, "num_experts", config.num_experts)
    count = count_params(config)
    return count.total - count.by_component["experts"] // ep * (ep - 1)


def expert_groups(
    *, tp: int = 1, cp: int = 1, dp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1
) -> dict[str, list[list[int]]]:
    """Return the process groups of attention and of experts, where experts are folded over all ranks of a stage.

    The ranks of a pipeline stage are one grid for attention, tp x cp x dp, and another for experts, etp x ep x edp, both
    with the first axis fastest; edp = tp cp dp / (etp ep). Liu et al. 2025 (arXiv 2504.14960), section 3 and listing 1.

    Args:
        ep: Ranks that share the experts of a layer.
        etp: Ranks that split each expert.

    Returns:
        "tp", "cp", "dp", "etp", "ep", "edp" and "pp" to groups of ranks; "dp x cp" are the ranks that hold the same
        attention weights, and "edp" those that hold the same expert.
    """
    for name, size in {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "ep": ep, "etp": etp}.items():
        check_whole(name, size, 1)
    stage = tp * cp * dp
    must_divide(f"etp={etp} x ep", etp * ep, f"tp={tp} x cp={cp} x dp", stage)
    attention = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
    experts = {"etp": etp, "ep": ep, "edp": stage // (etp * ep), "pp": pp}
    found = {axis: _grid_groups(attention, axis) for axis in attention}
    return (
        found
        | {axis: _grid_groups(experts, axis) for axis in experts}
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
