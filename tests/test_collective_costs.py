"""What collectives cost: counts against messages followed one by one, times against laws and a topology, and fits."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lablib.calc.communication import (
    Topology,
    Traffic,
    algorithm_rounds,
    chunk_sizes,
    collective_time,
    crossover,
    dispatch_nodes,
    fastest_algorithm,
    fit_line,
    fit_pieces,
    hierarchical_rounds,
    hierarchical_traffic,
    in_switch_all_reduce_bytes,
    parse_nccl_tests,
    recomputed_bandwidths,
    ring_all_reduce_bytes,
    ring_all_reduce_time,
    traffic,
)
from lablib.calc.communication.algorithms import ALGORITHMS, Send

ALL_REDUCES = [name for name in ALGORITHMS if name.endswith("all_reduce")]
sizes = st.floats(1, 1e12)
many = st.integers(1, 40)
links = st.fixed_dictionaries(
    {"bandwidth": st.floats(1e6, 1e12), "latency": st.floats(1e-7, 1e-3), "gamma": st.floats(0, 1e-9)}
)


# Counts


def test_four_ranks_eight_numbers() -> None:
    """By hand: chunks of 2 numbers of 4 bytes."""
    expected = {
        "ring_reduce_scatter": Traffic(3, 3, 24),
        "ring_all_gather": Traffic(3, 3, 24),
        "ring_all_reduce": Traffic(6, 6, 48),
        "recursive_doubling_all_reduce": Traffic(2, 2, 64),
        "halving_doubling_all_reduce": Traffic(4, 4, 48),  # 4 + 2 numbers down, 2 + 4 up
        "tree_broadcast": Traffic(2, 2, 64),  # rank 0 sends to 1, then to 2
        "tree_reduce": Traffic(2, 0, 0),
        "tree_all_reduce": Traffic(4, 2, 64),
        "naive_all_reduce": Traffic(6, 3, 96),
        "pairwise_all_to_all": Traffic(3, 3, 24),
    }
    assert {name: traffic(name, 8, 4) for name in ALGORITHMS} == expected
    assert hierarchical_traffic(8, 4, ranks_per_node=2) == (Traffic(2, 2, 32), Traffic(2, 2, 16))


def counted(all_rounds: list[list[Send]], rank: int, itemsize: int = 4) -> Traffic:
    mine = [send for sends in all_rounds for send in sends if send.source == rank]
    return Traffic(len(all_rounds), len(mine), itemsize * sum(send.stop - send.start for send in mine))


@given(st.integers(0, 100), st.integers(1, 5), st.integers(1, 5))
def test_hierarchical_formula_counts_what_the_rounds_send(numel: int, nodes: int, g: int) -> None:
    for rank in range(nodes * g):
        inside, across = hierarchical_traffic(numel, nodes * g, ranks_per_node=g, rank=rank)
        assert inside + across == counted(hierarchical_rounds(numel, nodes * g, g), rank)


def follow(all_rounds: list[list[Send]], numel: int, n: int) -> list[list[int]]:
    """Return who is in every element on every rank: rank r's number is 100^r, so two of one rank would show."""
    held = [[100**rank] * numel for rank in range(n)]
    for sends in all_rounds:
        before = [list(row) for row in held]
        for send in sends:
            for i in range(send.start, send.stop):
                held[send.target][i] = before[send.source][i] + (held[send.target][i] if send.adds else 0)
    return held


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 11, 12])
@pytest.mark.parametrize("numel", [1, 7, 24])
def test_every_number_arrives_once(n: int, numel: int) -> None:
    everybody = sum(100**rank for rank in range(n))
    starts = list(itertools.accumulate(chunk_sizes(numel, n), initial=0))
    for name in ALL_REDUCES:
        assert follow(algorithm_rounds(name, numel, n), numel, n) == [[everybody] * numel] * n, name
    for g in [g for g in range(1, n + 1) if n % g == 0]:
        assert follow(hierarchical_rounds(numel, n, g), numel, n) == [[everybody] * numel] * n
    assert follow(algorithm_rounds("tree_reduce", numel, n), numel, n)[0] == [everybody] * numel
    assert follow(algorithm_rounds("tree_broadcast", numel, n), numel, n) == [[1] * numel] * n
    scattered = follow(algorithm_rounds("ring_reduce_scatter", numel, n), numel, n)
    gathered = follow(algorithm_rounds("ring_all_gather", numel, n), numel, n)
    for rank, (start, stop) in enumerate(itertools.pairwise(starts)):
        assert scattered[rank][start:stop] == [everybody] * (stop - start)
        assert all(row[start:stop] == [100**rank] * (stop - start) for row in gathered)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_all_to_all_sends_each_piece_once(n: int) -> None:
    sent = Counter((s.source, s.target) for sends in algorithm_rounds("pairwise_all_to_all", 3 * n, n) for s in sends)
    assert sent == Counter(itertools.permutations(range(n), 2))
    for sends in algorithm_rounds("pairwise_all_to_all", 3 * n, n):
        assert len({s.target for s in sends}) == n  # nobody gets two messages at once


@given(st.integers(0, 10**6), st.integers(1, 64))
def test_bandwidth_lower_bound(numel: int, n: int) -> None:
    """Over all ranks no all-reduce sends less than 2(n-1) arrays; the ring sends exactly that."""
    for name in ALL_REDUCES:
        total = sum(send.stop - send.start for sends in algorithm_rounds(name, numel, n) for send in sends)
        assert total >= 2 * (n - 1) * numel
        if name.startswith(("ring", "tree", "naive")):
            assert total == 2 * (n - 1) * numel


# Times


@given(st.sampled_from(ALGORITHMS), st.integers(1, 17), links)
def test_times_are_those_of_the_rounds(name: str, n: int, link: dict) -> None:
    """On one node, where all ports are alike, the formula is what the rounds take, for chunks without a rest."""
    size = math.lcm(n, 1 << (n.bit_length() - 1)) * 12
    node = Topology(
        nodes=1,
        ranks_per_node=n,
        inside=link["bandwidth"],
        across=1.0,
        inside_latency=link["latency"],
        gamma=link["gamma"],
    )
    assert node.collective_time(name, size) == pytest.approx(collective_time(name, size, n, **link))


@given(sizes, many, links)
def test_laws_of_time(size: float, n: int, link: dict) -> None:
    plain = {key: link[key] for key in ("bandwidth", "latency")}
    ring = collective_time("ring_all_reduce", size, n, **plain)
    assert ring == pytest.approx(ring_all_reduce_time(size, n, **plain))
    halves = [collective_time(f"ring_{half}", size, n, **plain) for half in ("reduce_scatter", "all_gather")]
    assert ring == pytest.approx(sum(halves))
    # Some rank must send 2(n-1)/n of the bytes (Patarasuk and Yuan 2009); news needs ⌈log2 n⌉ rounds.
    bound = max(math.ceil(math.log2(n)) * link["latency"], 2 * (n - 1) / n * size / link["bandwidth"])
    for name in ALL_REDUCES:
        assert collective_time(name, size, n, **plain) >= bound * (1 - 1e-9)
        assert collective_time(name, size, n, **link) >= collective_time(name, size, n, **plain)
        assert collective_time(name, size, 1, **link) == 0


@given(st.integers(3, 512), links)
def test_crossover(n: int, link: dict) -> None:
    short, long = "recursive_doubling_all_reduce", "ring_all_reduce"
    size = crossover(short, long, n, **link)
    if n > 4:  # at 3 and 4 the ring has as few rounds as folding, or a few more
        assert size > 0
        assert collective_time(short, size, n, **link) == pytest.approx(collective_time(long, size, n, **link))
    for factor in (0.5, 2):
        faster = collective_time(long, size * factor, n, **link) < collective_time(short, size * factor, n, **link)
        assert faster == (factor == 2 or size == 0) or size == 0
    assert crossover(long, long, n, **link) == 0
    assert crossover("ring_all_reduce", "naive_all_reduce", n, **link) is None


def test_crossover_by_hand() -> None:
    """8 ranks, 10 us, 1 GB/s: 14 against 3 rounds, 3 against 1.75 passes: 110 us = 1.25 S/W, S = 88 kB."""
    link = {"bandwidth": 1e9, "latency": 10e-6}
    assert crossover("recursive_doubling_all_reduce", "ring_all_reduce", 8, **link) == pytest.approx(88e3)
    assert fastest_algorithm(1e3, 8, **link) == "recursive_doubling_all_reduce"
    assert fastest_algorithm(1e8, 8, **link) == "halving_doubling_all_reduce"
    assert fastest_algorithm(1e8, 7, **link) == "ring_all_reduce"


# Topologies


def _two_nodes(**change: object) -> Topology:
    usual = {"nodes": 2, "ranks_per_node": 2, "inside": 1000.0, "across": 10.0}
    return Topology(**{**usual, **change})


def test_slow_links_by_hand() -> None:
    """800 bytes, 4 ranks on 2 nodes: flat, 6 steps of 200 bytes cross; in two levels, 2 steps of 2 x 200 bytes."""
    two = _two_nodes()
    assert two.collective_time("ring_all_reduce", 800) == pytest.approx(6 * 200 / 10)
    inside = 2 * 400 / 1000
    assert two.collective_time("hierarchical_all_reduce", 800) == pytest.approx(inside + 2 * 2 * 200 / 10)
    cards = _two_nodes(cards=2)
    assert cards.collective_time("ring_all_reduce", 800) == pytest.approx(6 * 200 / 10)  # one flow, one card
    assert cards.collective_time("hierarchical_all_reduce", 800) == pytest.approx(inside + 2 * 200 / 10)
    assert two.bytes_across(algorithm_rounds("ring_all_reduce", 200, 4), 4) == 6 * 200
    assert two.bytes_across(hierarchical_rounds(200, 4, 2), 4) == 800


@given(st.sampled_from(ALGORITHMS), st.integers(1, 4), st.integers(1, 4), links)
def test_a_cluster_of_equal_links_is_one_node(name: str, nodes: int, g: int, link: dict) -> None:
    """With a card for every rank and the same link everywhere, nodes make no difference."""
    same = {
        "inside": link["bandwidth"],
        "across": link["bandwidth"],
        "inside_latency": link["latency"],
        "across_latency": link["latency"],
    }
    cluster = Topology(nodes=nodes, ranks_per_node=g, cards=g, **same)
    one = Topology(nodes=1, ranks_per_node=nodes * g, **same)
    assert cluster.collective_time(name, 4000) == pytest.approx(one.collective_time(name, 4000))


# nccl-tests


def _printed(collective: str, n: int, rows: list[tuple[int, float, float]], root: bool) -> str:
    """Lines in the program's own columns, from times alone."""
    lines = ["# nThread 1 nGpus 8 minBytes 8", "#       size         count      type   redop    root     time"]
    factor = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1}.get(collective, (n - 1) / n)
    for size, *halves in rows:
        words = [str(size), str(size // 4), "float", *(["sum", "-1"] if root else [])]
        for us in halves:
            words += [f"{us:.2f}", f"{size / us / 1e3:.2f}", f"{size / us / 1e3 * factor:.2f}", "0"]
        lines.append("  ".join(words))
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 12.3"])


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "broadcast"])
def test_printed_bandwidths_are_computed_from_size_and_time(collective: str, root: bool) -> None:
    text = _printed(collective, 8, [(2**20, 71.25, 70.5), (2**30, 4700.0, 4712.0)], root)
    runs = parse_nccl_tests(text)
    assert [(run.size, run.in_place) for run in runs] == [(2**20, False), (2**20, True), (2**30, False), (2**30, True)]
    for run in runs:
        for ours, printed in zip(recomputed_bandwidths(run, collective, 8), (run.algbw, run.busbw), strict=True):
            assert ours == pytest.approx(printed, abs=0.005e9)  # two decimals of GB/s
        assert run.wrong == 0


# Fits


def test_least_squares_as_numpy_does_it() -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed={seed}")
    draw = random.Random(seed)
    points = sorted(draw.uniform(1, 1e8) for _ in range(30))
    times = [(1e-4 + size / 1e9) * draw.uniform(0.8, 1.25) for size in points]
    slope, start = np.polyfit(points, times, 1, w=1 / np.array(times))  # polyfit squares its weights
    line = fit_line(points, times)
    assert line.latency == pytest.approx(start, rel=1e-6)
    assert line.seconds_per_byte == pytest.approx(slope, rel=1e-6)


def test_pieces_find_where_the_line_breaks() -> None:
    points = [2**k for k in range(8, 28)]
    times = [20e-6 + s / 4e9 if s < 2**17 else 120e-6 + s / 1e9 for s in points]
    assert fit_line(points, times).worst > 0.2
    fit = fit_pieces(list(reversed(points)), list(reversed(times)), 2)
    assert [line.first for line in fit.lines] == [2**8, 2**17]
    assert fit.worst < 1e-6
    assert [fit.seconds(s) for s in points] == pytest.approx(times)


# Bad input


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: traffic("gossip", 8, 2), "gossip"),
        (lambda: algorithm_rounds("ring_all_reduce", 8, 0), "ranks=0"),
        (lambda: collective_time("ring_all_reduce", 8, 2, bandwidth=0), "bandwidth=0"),
        (lambda: _two_nodes(cards=0), "cards=0"),
        (lambda: _two_nodes(placement=(3, 2, 1, 0)).collective_time("hierarchical_all_reduce", 8), "placement"),
        (lambda: fit_line([1, 1], [1, 2]), "two different sizes"),
        (lambda: fit_pieces([1, 2, 3], [1, 2, 3], 2), "pieces=2"),
    ],
)
def test_bad_input(call, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


# Switches that add, and tokens that go to several experts of a node


def test_a_switch_that_adds_by_its_messages() -> None:
    """Every rank sends its chunk j to the switch for rank j, n chunks in all, and one sum: n + 1 chunks of S/n."""
    for ranks in (2, 4, 8, 72):
        for_sums, to_all = ranks, 1
        assert in_switch_all_reduce_bytes(8.0 * ranks, ranks) == pytest.approx(8.0 * (for_sums + to_all))
    assert in_switch_all_reduce_bytes(100.0, 1) == 0
    # On two ranks there is no gain: a ring sends S, the switch takes 3/2 S.
    assert in_switch_all_reduce_bytes(1.0, 2) > ring_all_reduce_bytes(1.0, 2)


@given(st.integers(1, 4), st.integers(0, 5))
def test_nodes_that_a_token_meets_are_counted_one_by_one(nodes: int, experts: int) -> None:
    places = list(itertools.product(range(nodes), repeat=experts))
    mean = sum(len(set(place) - {0}) for place in places) / len(places)
    assert dispatch_nodes(nodes, experts) == pytest.approx(mean)
