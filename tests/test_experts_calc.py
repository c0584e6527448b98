"""What experts send, drop and wait for, and who averages their gradients: by hand, by counting, by drawing."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from statistics import fmean

import pytest

from lablib.calc.communication import dispatch_nodes, hiding_tokens, ring_all_reduce_time
from lablib.calc.layouts import mesh
from lablib.calc.models import preset
from lablib.calc.parallel import (
    DISPATCH_WAYS,
    chance_met,
    dispatch_bytes,
    dispatch_ratio,
    dropped_share,
    expert_capacity,
    expert_gradient_factor,
    expert_groups,
    expert_hiding_tokens,
    held_params,
    imbalance,
    random_dropped_share,
    random_loads,
    rank_loads,
    routed_bytes,
)
from lablib.calc.params import count_params, layer_params


def test_a_copy_for_each_expert_is_what_the_all_to_all_sends() -> None:
    for ep, node in ((1, 8), (4, 8), (8, 8), (64, 8), (32, 4)):
        sizes = {"num_experts": 64, "experts_per_token": 6, "ep": ep, "ranks_per_node": node}
        sent = routed_bytes(4096, 2048, **sizes)
        assert sent.total == pytest.approx(dispatch_bytes(4096, 6, 2048, ep))
        assert (sent.across > 0) == (ep > node)


@pytest.mark.parametrize(
    ("experts", "k", "ep", "node", "limit"), [(8, 2, 4, 2, 2), (8, 3, 8, 2, 2), (12, 3, 6, 3, 1), (8, 2, 8, 2, 3)]
)
def test_bytes_by_link_are_counted_over_all_choices(experts, k, ep, node, limit) -> None:
    """One token of rank 0, every set of nodes and every set of experts in them: what is sent, averaged."""
    held, nodes = experts // ep, ep // node
    sums = {way: [0.0, 0.0] for way in DISPATCH_WAYS}
    choices = [
        chosen
        for allowed in itertools.combinations(range(nodes), limit)
        for chosen in itertools.combinations([i for i in range(experts) if i // held // node in allowed], k)
    ]
    for chosen in choices:
        ranks = [i // held for i in chosen]
        for way, met in (("expert", ranks), ("rank", set(ranks))):
            sums[way][0] += sum(0 < rank < node for rank in met)
            sums[way][1] += sum(rank >= node for rank in met)
        # Over the network to the rank of index 0 of each node, and from there to the others that have an expert.
        sums["node"][0] += sum(rank % node != 0 for rank in set(ranks))
        sums["node"][1] += len({rank // node for rank in ranks} - {0})
    for way, (inside, across) in sums.items():
        sizes = {"num_experts": experts, "experts_per_token": k, "ep": ep, "ranks_per_node": node}
        sent = routed_bytes(1, 1, **sizes, way=way, node_limit=limit, value=0.25)
        assert sent.inside == pytest.approx(inside / len(choices))
        assert sent.across == pytest.approx(across / len(choices))


def test_once_per_node_sends_less_and_never_more_than_the_nodes_allow() -> None:
    sizes = {"num_experts": 256, "experts_per_token": 8, "ep": 64}
    sent = {way: routed_bytes(4096, 7168, **sizes, way=way) for way in DISPATCH_WAYS}
    assert sent["expert"].across > sent["rank"].across > sent["node"].across
    limited = routed_bytes(4096, 7168, **sizes, way="node", node_limit=4)
    assert limited.across < 4 * 4096 * 7168 * 2 * 4 * 7 / 8 <= sent["node"].across * 4  # 4 nodes, one of 8 its own
    # With many experts on a node, k different ones are nearly k independent ones: chapter 10's formula.
    assert sent["node"].across == pytest.approx(4 * 4096 * 7168 * 2 * dispatch_nodes(8, 8), rel=0.02)


def test_vectors_of_a_published_benchmark_are_predicted() -> None:
    """Its rate times its time; rates are whole GB/s, and 18 of them are known to one in 36."""
    uccl = json.loads((Path(__file__).parent.parent / "book" / "data" / "uccl_ep.json").read_text(encoding="utf-8"))
    for ep, *published in uccl["H200"] + uccl["B200"]:
        places, experts = (8, 256) if ep == 8 else (ep // 8, 288)
        vectors = 4096 * places * chance_met(experts // places, experts, 8)
        for i, size in ((0, 7168 * (1 + 4 / 128)), (2, 7168 * 2)):
            rate, microseconds = published[i : i + 2]
            assert vectors * size == pytest.approx(rate * microseconds * 1e3, rel=0.01 + 0.5 / rate)


def test_dispatch_against_compute_does_not_know_tokens_experts_or_width() -> None:
    flops, bandwidth, ep = 400e12, 50e9, 8
    for tokens, k, hidden, ffn in ((4096, 8, 7168, 2048), (512, 2, 4096, 14336)):
        sent = dispatch_bytes(tokens, k, hidden, ep) / bandwidth
        computed = 6 * tokens * k * 3 * hidden * ffn / flops
        assert dispatch_ratio(ffn, ep, flops=flops, bandwidth=bandwidth) == pytest.approx(sent / computed)


def test_a_mixture_needs_e_over_k_times_the_tokens() -> None:
    rates = {"flops": 400e12, "bandwidth": 50e9}
    assert expert_hiding_tokens(8, 2, edp=64, **rates) == pytest.approx(4 * hiding_tokens(64, **rates))
    # The definition itself: backward of the experts takes as long as the all-reduce of the gradients held.
    tokens = expert_hiding_tokens(128, 8, ep=4, edp=16, **rates)
    params = 3 * 2048 * 768
    backward = 4 * tokens * 8 * params / rates["flops"]
    assert backward == pytest.approx(ring_all_reduce_time(2 * 128 // 4 * params, 16, bandwidth=rates["bandwidth"]))


def test_held_parameters_are_all_but_the_experts_of_others() -> None:
    mixtral = preset("mixtral-8x7b")
    count = count_params(mixtral)
    assert held_params(mixtral, 1) == count.total
    one = layer_params(mixtral, 0)["experts"] // 8 * 32
    assert held_params(mixtral, 8) == count.total - 7 * one
    with pytest.raises(ValueError, match="ep=3 does not divide num_experts=8; use 1, 2, 4 or 8"):
        held_params(mixtral, 3)
    with pytest.raises(ValueError, match="no experts"):
        held_params(preset("llama-3-8b"), 2)


def test_capacity_by_hand() -> None:
    assert expert_capacity(8, 4, 2, 1.0) == 4
    assert expert_capacity(8, 4, 2, 1.25) == 5
    assert expert_capacity(10, 4, 1, 1.0) == 3  # 2.5, rounded up
    assert expert_capacity(80, 8, 1, 1.1) == 11
    assert dropped_share([8, 4, 3, 1], 4) == 4 / 16
    assert rank_loads([8, 4, 3, 1], 2) == [12, 4]
    assert imbalance([8, 4, 3, 1], 2) == 1.5
    assert imbalance([5, 5, 5, 5], 4) == 1


def test_a_random_router_drops_what_was_counted() -> None:
    """Exact for small cases: every choice of every token; the formula has only the load of one expert."""
    for tokens, experts, k, factor in ((4, 3, 1, 1.0), (3, 4, 2, 1.0), (4, 4, 2, 1.25)):
        capacity = expert_capacity(tokens, experts, k, factor)
        shares = []
        for choice in itertools.product(itertools.combinations(range(experts), k), repeat=tokens):
            loads = [sum(i in chosen for chosen in choice) for i in range(experts)]
            shares.append(dropped_share(loads, capacity))
        assert random_dropped_share(tokens, experts, k, factor) == pytest.approx(fmean(shares))
    # Large: the mean of 20 draws. One share varies by a fifth of itself, so the mean by a twentieth; 4 of those.
    drawn = [
        dropped_share(random_loads(2048, 64, 4, seed=seed), expert_capacity(2048, 64, 4, 1.0)) for seed in range(20)
    ]
    assert random_dropped_share(2048, 64, 4, 1.0) == pytest.approx(fmean(drawn), rel=0.2)
    assert random_dropped_share(64, 4, 4, 0.5) == 0.5
    assert random_dropped_share(4096, 8, 2, 2.0) == pytest.approx(0, abs=1e-12)
    assert random_dropped_share(2048, 64, 4, 0.01) == pytest.approx(0.99, abs=0.01)


def test_loads_are_drawn_alike_every_time() -> None:
    assert random_loads(100, 8, 2) == random_loads(100, 8, 2)
    assert sum(random_loads(100, 8, 2)) == 200
    assert max(random_loads(100, 8, 8)) == 100


def test_groups_without_folding_are_those_of_the_mesh() -> None:
    """With cp = 1 and experts split like attention, folding is the layout of chapter 07."""
    ours, old = expert_groups(tp=2, dp=8, pp=2, ep=4, etp=2), mesh(tp=2, dp=8, pp=2, ep=4)
    for name, axes in {"tp": ("tp",), "dp": ("dp",), "ep": ("ep",), "edp": ("edp",), "pp": ("pp",)}.items():
        assert ours[name] == old.groups(*axes)
    assert ours["etp"] == ours["tp"]


def test_folded_groups_by_hand() -> None:
    """16 ranks, tp=2, cp=2, dp=4: experts over the 8 ranks of a node, and two copies of each."""
    found = expert_groups(tp=2, cp=2, dp=4, ep=8)
    assert found["ep"] == [[*range(8)], [*range(8, 16)]]
    assert found["edp"] == [[i, i + 8] for i in range(8)]
    assert found["tp"][:2] == [[0, 1], [2, 3]]
    assert found["dp x cp"] == [[*range(0, 16, 2)], [*range(1, 16, 2)]]
    assert expert_gradient_factor(tp=2, cp=2, dp=4, ep=8) == 2 / 8


def test_every_rank_is_once_in_every_kind_of_group() -> None:
    rng = random.Random(3)
    for _ in range(40):
        tp, cp, dp, pp = (rng.choice((1, 2, 4)) for _ in range(4))
        stage = tp * cp * dp
        etp = rng.choice([n for n in (1, 2, 4) if stage % n == 0])
        ep = rng.choice([n for n in range(1, stage // etp + 1) if stage // etp % n == 0])
        found = expert_groups(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp)
        for groups in found.values():
            assert sorted(rank for group in groups for rank in group) == [*range(stage * pp)]
        # A stage of the pipeline has the same ranks for attention and for experts.
        assert found["pp"] == expert_groups(tp=tp, cp=cp, dp=dp, pp=pp)["pp"]
        factor = expert_gradient_factor(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp)
        assert factor == pytest.approx(tp / (etp * ep))


def test_an_expert_averaged_over_its_copies_is_ep_times_too_large() -> None:
    """Four ranks with a batch each, a loss that is linear in the weight of one expert, ep = 2."""
    gradients = [1.0, 2.0, 4.0, 5.0]  # of each rank's own loss
    found = expert_groups(dp=4, ep=2)
    at_copy = {rank: sum(gradients[r] for r in group) for group in found["ep"] for rank in group}
    (copies, *_) = found["edp"]
    mean = fmean(at_copy[rank] for rank in copies)
    assert mean == 2 * fmean(gradients)
    assert mean * expert_gradient_factor(dp=4, ep=2) == fmean(gradients)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expert_groups(tp=2, dp=4, ep=3), "ep=3 does not divide tp=2 x cp=1 x dp=8"),
        (lambda: routed_bytes(8, 4, num_experts=8, experts_per_token=2, ep=3), "ep=3 does not divide num_experts=8"),
        (lambda: routed_bytes(8, 4, num_experts=8, experts_per_token=2, ep=4, way="rack"), "unknown way 'rack'"),
        (
            lambda: routed_bytes(8, 4, num_experts=8, experts_per_token=3, ep=8, ranks_per_node=2, node_limit=1),
            "experts_per_token=3",
        ),
        (lambda: routed_bytes(8, 4, num_experts=8, experts_per_token=2, ep=8, ranks_per_node=3), "ranks_per_node=3"),
        (lambda: expert_capacity(8, 4, 2, 0), "factor=0 must be above 0"),
        (lambda: imbalance([], 2), "a number for each expert"),
        (lambda: rank_loads([1, 2, 3], 2), "ep=2 does not divide num_experts=3"),
        (lambda: expert_hiding_tokens(8, 9, edp=2, flops=1, bandwidth=1), "experts_per_token=9"),
    ],
)
def test_what_cannot_be_is_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()
