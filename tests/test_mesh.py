"""The mesh against NumPy's reshape, and its drawings."""

from __future__ import annotations

import random
from collections import Counter
from itertools import chain, product

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DistributedSampler

from lablib.calc.layouts import AXES, Mesh, group_line, holdings, mesh, mesh_text
from lablib.calc.layouts.planner import cluster
from lablib.calc.models import preset
from lablib.calc.parallel import SAMPLERS, rank_samples
from lablib.launch.torch_private import FakeStore
from tests.processes import new_seed


def draw(rng: random.Random, most: int = 400) -> Mesh:
    """A mesh with odd factors, in any order."""
    while True:
        sizes = {axis: rng.choice((1, 1, 2, 3, 4, 5, 7)) for axis in AXES}
        sizes["dp"] *= sizes["ep"]  # experts are sharded over ranks out of the replicas
        order = rng.sample(AXES, 5)
        if 1 < int(np.prod(list(sizes.values()))) // sizes["ep"] <= most:
            return mesh(**sizes, order=order, gpus_per_node=rng.choice((1, 2, 3, 4, 6, 8)))


def grid(found: Mesh) -> np.ndarray:
    """Rank numbers as an array whose axes are the mesh's, slowest first: the independent account."""
    return np.arange(found.ranks).reshape(found.sizes[::-1])


def oracle(found: Mesh, *axes: str) -> set[tuple[int, ...]]:
    names = found.order[::-1]
    axes = tuple(part for axis in axes for part in (("ep", "edp") if axis == "dp" and "edp" in names else (axis,)))
    rest = [i for i, name in enumerate(names) if name not in axes]
    moved = np.transpose(grid(found), rest + [names.index(axis) for axis in axes])
    size = int(np.prod([found.size(axis) for axis in axes]))
    return {tuple(sorted(row)) for row in moved.reshape(-1, size).tolist()}


def test_eight_ranks_by_hand() -> None:
    found = mesh(tp=2, dp=2, pp=2, gpus_per_node=8)
    assert found.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert found.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert found.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert found.coordinates(5) == {"tp": 1, "cp": 0, "ep": 0, "dp": 0, "pp": 1}
    assert found.rank(tp=1, pp=1) == 5
    assert not any(found.crosses(axis) for axis in AXES)


def test_coordinates_and_groups_are_those_of_a_reshaped_array() -> None:
    rng = random.Random(new_seed())
    for _ in range(30):
        found = draw(rng)
        where = grid(found)
        for rank in rng.sample(range(found.ranks), min(10, found.ranks)):
            at = found.coordinates(rank)
            assert where[tuple(at[axis] for axis in found.order[::-1])] == rank == found.rank(at)
        for axes in [(axis,) for axis in (*AXES, *found.order)] + [("dp", "cp"), ("dp", "tp")]:
            groups = found.groups(*axes)
            assert {tuple(group) for group in groups} == oracle(found, *axes)
            assert sorted(rank for group in groups for rank in group) == list(range(found.ranks))


def test_which_groups_cross_is_what_looking_at_every_group_says() -> None:
    rng = random.Random(new_seed())
    for _ in range(60):
        found = draw(rng)
        for axis in AXES:
            looked = [
                group for group in oracle(found, axis) if len({rank // found.gpus_per_node for rank in group}) > 1
            ]
            assert found.crosses(axis) == bool(looked)
            assert sorted(map(tuple, found.crossing(axis))) == sorted(looked)


def test_the_planner_gives_a_group_the_slow_link_exactly_if_it_crosses() -> None:
    rng = random.Random(new_seed())
    for _ in range(60):
        found = draw(rng)
        if found.ranks > found.gpus_per_node and found.ranks % found.gpus_per_node:
            continue
        machine = cluster("a100", found.ranks, gpus_per_node=found.gpus_per_node)
        for axis in found.order:
            if found.size(axis) > 1:
                slow = machine.bandwidth(found.size(axis), found.strides[axis]) < machine.intra
                assert slow == found.crosses(axis), (found, axis)


def test_out_of_a_node_a_group_uses_the_cards_of_its_ranks() -> None:
    """Looked at every group: the part of it that lies in one node is what its cards can carry, the smallest decides."""
    rng = random.Random(new_seed())
    for _ in range(60):
        found = draw(rng)
        if found.ranks > found.gpus_per_node and found.ranks % found.gpus_per_node:
            continue
        gpus = found.ranks * found.gpus_per_node  # so many that every way to straddle a node occurs
        last = gpus // (found.ranks // found.sizes[-1])
        whole = Mesh((*found.sizes[:-1], last), found.order, found.gpus_per_node)
        machine = cluster("h100", gpus, gpus_per_node=whole.gpus_per_node, intra="1 TB/s", nic="1 GB/s")
        one = cluster("h100", gpus, gpus_per_node=whole.gpus_per_node, intra="1 TB/s", nic="1 GB/s", rails=False)
        shared = cluster("h100", gpus, gpus_per_node=whole.gpus_per_node, intra="1 TB/s", nic="1 GB/s", nics_per_node=1)
        for axis in found.order:
            if found.size(axis) > 1 and whole.crosses(axis):
                size, stride = whole.size(axis), whole.strides[axis]
                parts = [
                    list(nodes).count(node)
                    for group in whole.groups(axis)
                    if len(set(nodes := [rank // whole.gpus_per_node for rank in group])) > 1
                    for node in set(nodes)
                ]
                assert machine.bandwidth(size, stride) == min(parts) * 1e9, (whole, axis)
                assert one.bandwidth(size, stride) == 1e9 == machine.hop(size, stride)
                assert shared.bandwidth(size, stride) == pytest.approx(min(parts) * 1e9 / whole.gpus_per_node)


def test_a_pair_gets_the_link_of_a_pair() -> None:
    """MI300X: one of seven links of 64 GB/s to each. A bridge joins two cards; a rack of GB200 is one node."""
    amd = cluster("mi300x", 8)
    assert [amd.bandwidth(n) / 1e9 for n in (2, 4, 8)] == [64, 192, 448]
    assert amd.bandwidth(2, 4) == amd.hop(8) == 64e9
    assert cluster("mi300x", 4).intra == 192e9
    for name, line, bus in (("a100-80gb-pcie", 300, 31.5), ("h100-pcie", 300, 63), ("h100-nvl", 300, 63)):
        cards = cluster(name, 8)
        assert [cards.bandwidth(*group) / 1e9 for group in ((2,), (2, 4), (4,), (8,))] == [line, bus, bus, bus]
        assert (cards.hop(2), cards.hop(4)) == (line * 1e9, bus * 1e9)
        assert cluster(name, 2).intra == line * 1e9
    rack = cluster("gb200", 72)
    assert (rack.nodes, rack.bandwidth(72)) == (1, 900e9)
    assert [cluster(name, 16).nodes for name in ("h100", "a100-80gb", "b200")] == [2, 2, 2]
    # A rate that is given holds for every group, a link that is named keeps its wiring.
    assert cluster("mi300x", 8, intra="300 GB/s").bandwidth(2) == 300e9
    assert cluster("mi300x", 8, intra="infinity-fabric").bandwidth(2) == 64e9


def test_no_link_is_assumed_in_silence() -> None:
    for name in ("l40s", "rtx-4090", "a100-80gb-pcie"):
        with pytest.raises(ValueError, match=r"gpus=16 leave a node .* give nic, a rate .* or one of ib-edr.*400gbe"):
            cluster(name, 16)
        assert cluster(name, 8).inter is None
    found = cluster("h100", 16).links()
    assert {key: (one["bytes_per_second"], one["from"]) for key, one in found.items()} == {
        "intra": (450e9, "assumed"), "nic": (50e9, "assumed"),
    }  # fmt: skip
    assert all(len(one["source"]) > 10 for one in found.values())
    given = cluster("l40s", 16, nic="100gbe", intra="20 GB/s").links()
    assert given["nic"] == {"link": "Ethernet, 100 Gb/s", "bytes_per_second": 12.5e9, "from": "given"}
    assert given["intra"] == {"link": "20 GB/s", "bytes_per_second": 20e9, "from": "given"}
    assert set(cluster("h100", 8).links()) == {"intra"}
    assert cluster("mi300x", 8).links()["intra"]["pair_bytes_per_second"] == 64e9
    assert cluster("h100-pcie", 8).links()["intra"]["pair_bytes_per_second"] == 300e9
    assert cluster("mi300x", 16).links_text() == (
        "Links: Infinity Fabric (MI300X), 448 GB/s inside a node of 8, 64 a pair (assumed); "
        "InfiniBand NDR, 400 Gb/s, 50 GB/s a GPU out of it (assumed)"
    )


def test_1024_gpus_8_by_8_by_16() -> None:
    found = mesh(tp=8, pp=8, dp=16, gpus=1024)
    assert (len(found.groups("tp")), len(found.groups("pp")), len(found.groups("dp"))) == (128, 128, 64)
    assert [found.crosses(axis) for axis in ("tp", "dp", "pp")] == [False, True, True]
    assert found.group(0, "dp") == list(range(0, 128, 8))
    assert "pp: 128 groups of 8, like [0, 128, 256, ..., 896]; 128 leave a node (the first touches 8)" in mesh_text(
        found
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp": 8, "pp": 4, "cp": 8, "gpus": 128}, "tp=8 x cp=8 x pp=4 = 256 ranks, but there are gpus=128"),
        ({"tp": 8, "cp": 16, "pp": 16, "dp": 4, "gpus": 16384}, "= 8192 ranks.*dp=8 would fill them"),
        ({"tp": 0}, "tp=0 must be a whole number of at least 1"),
        ({"dp": 2.0}, "dp=2.0 must be a whole number"),
        ({"ep": 4, "dp": 6}, "ep=4 does not divide dp=6"),
        ({"order": "tp-dp-pp"}, "must name each of tp, cp, ep, dp, pp once"),
        ({"gpus_per_node": 0}, "gpus_per_node=0"),
    ],
)
def test_what_cannot_be_names_its_factors(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mesh(**arguments)


def test_experts_are_sharded_over_ranks_out_of_the_replicas() -> None:
    """16 ranks, dp = 8 of which ep = 4: two copies of each expert, by hand."""
    found = mesh(ep=4, dp=8, pp=2, gpus_per_node=8)
    assert (found.ranks, found.size("dp"), found.size("edp")) == (16, 8, 2)
    assert found.groups("ep")[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found.groups("edp")[:2] == [[0, 4], [1, 5]]
    assert found.groups("dp") == [list(range(8)), list(range(8, 16))]
    assert not found.crosses("dp")
    assert "e1 ed0 p0" in mesh_text(found)


def test_the_text_shows_every_rank() -> None:
    found = mesh(tp=2, dp=3, pp=2, gpus_per_node=6)
    text = mesh_text(found)
    assert "node 0" in text
    assert "t1 d2 p1" in text
    assert group_line(found, "tp") in text
    assert "tp: 6 groups of 2, like [0, 1]; they stay in a node" in text
    six = mesh(tp=2, dp=2, pp=2, gpus_per_node=6)  # the second node is not full
    assert group_line(six, "dp") == "dp: 4 groups of 2, like [0, 2]; 2 leave a node (the first touches 1)"


QWEN = preset("qwen3-30b-a3b")


def draw_holdings(rng):
    """Return a mesh without ep, and what its ranks hold of a model with experts under settings that may be together."""
    while True:
        tp, cp, dp, pp, ep = (rng.choice((1, 2, 4)) for _ in range(5))
        etp, order = rng.choice((1, tp)), rng.sample(AXES, 5)
        if tp * cp * dp % (ep * etp) == 0 and 1 < tp * cp * dp * pp <= 64:
            break
    ranks = mesh(tp=tp, cp=cp, dp=dp, pp=pp, order=order)
    split = {"ep": ep, "etp": etp, "seq": 64, "micro_batch": rng.choice((1, 3)), "rounds": rng.choice((1, 2))}
    ways = {"sampler": rng.choice(SAMPLERS), "tokens": rng.choice(("zigzag", "contiguous"))}
    return ranks, split | ways, holdings(QWEN, ranks, **split | ways)


def test_ranks_together_hold_every_token_and_every_weight_equally_often() -> None:
    rng = random.Random(new_seed())
    for _ in range(20):
        ranks, given, held = draw_holdings(rng)
        tp, cp, dp, pp = map(ranks.size, ("tp", "cp", "dp", "pp"))
        edp = tp * cp * dp // (given["ep"] * given["etp"])
        whole = {
            "tp": tp,
            "cp": cp,
            "dp": dp,
            "pp": pp,
            "ep": given["ep"],
            "etp": given["etp"],
            "edp": edp,
            "dp x cp": dp * cp,
        }
        for name, size in whole.items():
            assert all(rank in one.groups[name] and len(one.groups[name]) == size for rank, one in enumerate(held))
            found = {tuple(one.groups[name]) for one in held}
            assert sorted(chain(*found)) == [*range(ranks.ranks)]
        batch = dp * given["micro_batch"] * given["rounds"]
        parts = {
            (batch, 64): (tp * pp, [product(chain(*one.samples), chain(*one.tokens)) for one in held]),
            (48, 32): (cp * dp, [product(one.layers, one.heads) for one in held]),
            (48, 128): (given["etp"] * edp, [product(one.layers, one.experts) for one in held]),
        }
        for sizes, (copies, shares) in parts.items():
            assert Counter(chain(*shares)) == dict.fromkeys(product(*map(range, sizes)), copies), given
        for one in held:
            assert sorted(chain(*(held[rank].experts for rank in one.groups["ep"]))) == [*range(128)]
            assert all(
                (held[rank].experts, held[rank].layers) == (one.experts, one.layers) for rank in one.groups["edp"]
            )
        assert (sum(one.embedding for one in held), sum(one.head for one in held)) == (ranks.ranks // pp,) * 2


def test_groups_of_experts_are_those_of_megatrons_second_grid() -> None:
    """Megatron Core lays etp, ep, edp and pp over all ranks, where the stages come out as attention has them."""
    rng, seen = random.Random(new_seed()), 0
    while seen < 20:
        ranks, given, held = draw_holdings(rng)
        tp, cp, dp, pp = map(ranks.size, ("tp", "cp", "dp", "pp"))
        edp = tp * cp * dp // (given["ep"] * given["etp"])
        axes = {"tp": ("etp", given["etp"]), "ep": ("ep", given["ep"]), "dp": ("edp", edp), "pp": ("pp", pp)}
        order, sizes = zip(*(axes[axis] for axis in ranks.order if axis != "cp"), strict=True)
        experts = Mesh(sizes, order)
        if oracle(experts, "pp") == oracle(ranks, "pp"):
            seen += pp > 1
            for name in ("ep", "etp", "edp"):
                assert {tuple(one.groups[name]) for one in held} == oracle(experts, name)


def test_a_rank_holds_what_pytorch_gives_it() -> None:
    """torchtitan 0.3.0: a mesh pp, batch, cp, tp and one of pp, dp_replicate, efsdp, ep over the same ranks."""
    rank, world = 13, 32
    mine = holdings(QWEN, mesh(tp=2, cp=2, dp=4, pp=2), ep=8, etp=1, seq=64)[rank]
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        dense = init_device_mesh("cpu", (2, 4, 2, 2), mesh_dim_names=("pp", "dp", "cp", "tp"))
        sparse = init_device_mesh("cpu", (2, 1, 2, 8), mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep"))
        theirs = {name: dense[name].mesh.tolist() for name in ("pp", "dp", "cp", "tp")}
        theirs |= {"dp x cp": dense["dp", "cp"].mesh.flatten().tolist()}
        theirs |= {"ep": sparse["ep"].mesh.tolist(), "edp": sparse["efsdp"].mesh.tolist()}
    finally:
        dist.destroy_process_group()
    assert {name: mine.groups[name] for name in theirs} == theirs


def test_samples_are_dealt_as_pytorch_and_megatron_deal_them() -> None:
    for dp, micro_batch, rounds in product((1, 2, 5), (1, 3), (1, 4)):
        batch = np.arange(dp * micro_batch * rounds)
        for rank in range(dp):
            dealt = {
                way: list(chain(*rank_samples(dp, rank, micro_batch=micro_batch, rounds=rounds, sampler=way)))
                for way in SAMPLERS
            }
            assert dealt["interleaved"] == list(DistributedSampler(batch, dp, rank, shuffle=False))
            assert dealt["contiguous"] == batch.reshape(rounds, dp, micro_batch)[:, rank].flatten().tolist()


def test_what_cannot_be_held_is_said() -> None:
    with pytest.raises(ValueError, match="a mesh without it"):
        holdings(QWEN, mesh(dp=4, ep=2), seq=64)
    with pytest.raises(ValueError, match="tp=8 does not divide num_kv_heads=4"):
        holdings(QWEN, mesh(tp=8), seq=64)
    with pytest.raises(ValueError, match="unknown sampler 'random'"):
        rank_samples(2, 0, micro_batch=1, rounds=1, sampler="random")
