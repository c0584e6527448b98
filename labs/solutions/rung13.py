"""Worked exercises of rung 13, expert parallelism."""

import math


def route(logits, bias, k):
    """The bias has a say in the choice and none in the weights."""
    scores = logits.softmax(-1)
    chosen = (scores + bias).topk(k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True), chosen


def send_counts(chosen, home):
    """One copy for every choice, to the rank where the expert lives."""
    counts = [[0] * len(chosen) for _ in chosen]
    for source, tokens in enumerate(chosen):
        for experts in tokens:
            for expert in experts:
                counts[source][home[expert]] += 1
    return counts


def kept_tokens(chosen, experts, factor):
    """First choices in the order of tokens, then second ones."""
    k = len(chosen[0])
    capacity = math.ceil(factor * len(chosen) * k / experts)
    taken = [0] * experts
    kept = [[False] * k for _ in chosen]
    for choice in range(k):
        for token, wanted in enumerate(chosen):
            expert = wanted[choice]
            kept[token][choice] = taken[expert] < capacity
            taken[expert] += 1
    return kept


def expert_bytes(tokens, size, experts, k, ep, per_node):
    """There and back, forward and backward: four times a way."""
    nodes = ep // per_node
    missed = math.comb(experts - experts // nodes, k) / math.comb(experts, k)
    ways = 4 * tokens * size
    return {
        "inside": ways * k * (per_node - 1) / ep,
        "across": ways * k * (ep - per_node) / ep,
        "once": ways * (nodes - 1) * (1 - missed),
    }


def place_experts(rank, attention, folded, experts, chosen):
    """A rank has a place on attention's grid and one on the experts'."""

    def group(grid, *axes):
        ranks, stride = [rank], 1
        for axis, size in grid.items():
            if axis in axes:
                first = [r - rank // stride % size * stride for r in ranks]
                steps = range(size)
                ranks = [r + i * stride for r in first for i in steps]
            stride *= size
        return sorted(ranks)

    each, sharers = experts // folded["ep"], group(folded, "ep")
    mine = sharers.index(rank) * each
    losses = attention["dp"] * attention["cp"]
    return {
        "holds": range(mine, mine + each),
        "sends_to": [sharers[expert // each] for expert in chosen],
        "expert": (group(folded, "edp"), losses),
        "other": (group(attention, "dp", "cp"), losses),
    }
