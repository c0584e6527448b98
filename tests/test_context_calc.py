"""Context parallelism in numbers, against counting: tokens one by one, values that leave a rank, and what was printed."""

from __future__ import annotations

import pytest

from lablib.calc.layouts import axis_bytes
from lablib.calc.layouts.planner import Layout
from lablib.calc.parallel import (
    ORDERS,
    WAYS,
    attention_traffic,
    busy_share,
    causal_blocks,
    causal_imbalance,
    context_buffers,
    context_degrees,
    rank_chunks,
    ring_hiding_tokens,
    ring_work,
    token_owners,
    ulysses_crossover,
)

SMALL = {"batch": 2, "seq": 24, "heads": 4, "kv_heads": 2, "head_dim": 3}


def held_tokens(cp: int, rank: int, order: str, seq: int) -> list[int]:
    """The tokens of a rank, listed one by one."""
    if order == "striped":
        return list(range(rank, seq, cp))
    chunks = rank_chunks(cp, rank, order)
    size = seq // (len(chunks) * cp)
    return [chunk * size + token for chunk in chunks for token in range(size)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_ring_work_is_the_count_of_pairs_that_the_mask_keeps(order: str, cp: int) -> None:
    held = [held_tokens(cp, rank, order, 24) for rank in range(cp)]
    assert sorted(token for rank in held for token in rank) == list(range(24))
    owners = token_owners(cp, order, 24)
    assert all(owners[token] == rank for rank in range(cp) for token in held[rank])
    for step, row in enumerate(ring_work(cp, order, 24)):
        for rank, pairs in enumerate(row):
            assert pairs == sum(key <= query for query in held[rank] for key in held[(rank - step) % cp])


@pytest.mark.parametrize("order", ORDERS)
def test_busy_share_and_blocks_are_what_ring_work_tends_to(order: str) -> None:
    for cp in (1, 2, 4, 8):
        seq = 2**20
        block = (seq // cp) ** 2
        work = ring_work(cp, order, seq)
        by_rank = [sum(row[rank] for row in work) / block for rank in range(cp)]
        assert by_rank == pytest.approx(causal_blocks(cp, order), rel=1e-4)  # the diagonal, s of s² pairs
        assert busy_share(cp, order, seq=seq) == pytest.approx(busy_share(cp, order), rel=1e-4)


def test_busy_share_has_the_closed_forms_of_the_chapter() -> None:
    assert busy_share(8, "contiguous") == pytest.approx(8 / 15)
    assert busy_share(8, "striped", seq=64) == pytest.approx((64 + 1) / (64 + 8))
    assert busy_share(8, "zigzag", seq=64) == 1.0
    for cp in (1, 2, 3, 8):
        assert causal_imbalance(cp) == pytest.approx(1 / busy_share(cp, "contiguous"))  # the last rank never waits
        assert sum(causal_blocks(cp)) == pytest.approx(sum(causal_blocks(cp, "zigzag"))) == pytest.approx(cp * cp / 2)


def test_traffic_is_what_leaves_a_rank_value_by_value() -> None:
    """Two sequences of 24 tokens on 4 ranks: 12 tokens a rank, queries of 12 and keys of 6 values, 2 bytes each."""
    block = 12 * (6 + 6) * 2
    ring, gathered, again = (
        attention_traffic(way, **{**SMALL, "kv_heads": 2}, cp=4, regather=regather)
        for way, regather in (("ring", False), ("gathered", False), ("gathered", True))
    )
    assert (ring.forward, ring.backward) == (3 * block, 6 * block)
    assert (gathered.forward, gathered.backward) == (3 * block, 3 * block)
    assert again.total == ring.total
    assert (ring.messages, gathered.messages, again.messages) == (9, 6, 9)
    assert ring.backward_calls == {"send": 6}
    assert again.backward_calls == {"all_gather": 1, "reduce_scatter": 1}
    # Each of 4 ranks gets one query head and the key head that it reads: 3 + 3 + 3 + 3 values of 12 tokens.
    ulysses = attention_traffic("ulysses", **SMALL, cp=4)
    assert ulysses.forward == ulysses.backward == 3 * 12 * (3 + 3 + 3 + 3) * 2
    assert ulysses.messages == 8 * 3


def test_one_rank_sends_and_buffers_nothing() -> None:
    for way in WAYS:
        alone = attention_traffic(way, **SMALL, cp=1)
        assert (alone.total, alone.messages) == (0, 0)
        assert alone.forward_calls == alone.backward_calls == {}
        assert context_buffers(way, **SMALL, cp=1) == 0


def test_gradients_in_fp32_cost_only_their_way_home() -> None:
    half, full = (attention_traffic("ring", **SMALL, cp=4, gradient_value=size) for size in (2, 4))
    assert full.total == half.total * 4 / 3
    assert full.forward == half.forward


def test_the_gather_is_what_a_layout_counts_for_cp() -> None:
    layout = Layout(tp=2, cp=4)
    one = attention_traffic("gathered", batch=1, seq=8192, heads=16, kv_heads=4, head_dim=128, cp=4)
    assert axis_bytes("llama-3-8b", layout, seq=8192, global_batch=1)["cp"] == pytest.approx(32 * one.total)


def test_buffers_of_a_ring_and_of_ulysses_shrink_with_cp_and_those_of_a_gather_grow() -> None:
    sizes = {"batch": 1, "seq": 4096, "heads": 8, "kv_heads": 8, "head_dim": 64}
    held = {way: [context_buffers(way, **sizes, cp=cp) for cp in (2, 4, 8)] for way in WAYS}
    whole = 2 * 4096 * 512 * 2
    assert held["gathered"] == [whole / 2, whole * 3 / 4, whole * 7 / 8]
    assert held["ring"] == [whole / 2, whole / 2, whole / 4]
    assert held["ulysses"] == [whole, whole / 2, whole / 4]


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (32, 8), (64, 32)])
@pytest.mark.parametrize("way", ["ring", "gathered"])
def test_ulysses_sends_less_exactly_beyond_the_crossover(heads: int, kv_heads: int, way: str) -> None:
    sizes = {"batch": 1, "seq": 4096, "heads": heads, "kv_heads": kv_heads, "head_dim": 8}
    cross = ulysses_crossover(heads, kv_heads, way)
    for cp in (2, 4, 8):
        less = attention_traffic("ulysses", **sizes, cp=cp).total < attention_traffic(way, **sizes, cp=cp).total
        assert less == (cp > cross)


def test_tokens_that_hide_the_ring_are_those_of_the_paper() -> None:
    """Liu et al. 2023, table 2: minimal blocks in thousands of tokens, with one decimal, for four of its machines."""
    plain = {"heads": 32, "kv_heads": 32, "causal": False}
    for flops, bandwidth, block in ((312, 300, 1.0), (123, 112, 1.1), (275, 268, 1.0), (196, 186, 1.1)):
        tokens = ring_hiding_tokens(**plain, flops=flops * 1e12, bandwidth=bandwidth * 1e9)
        assert tokens == pytest.approx(1000 * block, abs=50)  # half of the last digit printed
    grouped = ring_hiding_tokens(heads=32, kv_heads=8, flops=312e12, bandwidth=300e9)
    assert grouped == pytest.approx(1040 / 4 * 2)


def test_at_the_hiding_size_a_step_computes_as_long_as_it_sends() -> None:
    flops, bandwidth, cp = 400e12, 50e9, 4
    tokens = ring_hiding_tokens(heads=32, kv_heads=8, flops=flops, bandwidth=bandwidth)
    seq = 2 * cp * round(tokens / 2)
    pairs = ring_work(cp, "zigzag", seq)[1][0]
    compute = 4 * pairs * 32 * 128 / flops  # two products, a multiplication and an addition each
    sent = attention_traffic("ring", batch=1, seq=seq, heads=32, kv_heads=8, head_dim=128, cp=cp).forward / (cp - 1)
    assert compute == pytest.approx(sent / bandwidth, rel=1e-3)  # seq is rounded to whole chunks


def test_degrees_that_each_way_allows() -> None:
    llama = {"heads": 32, "kv_heads": 8}
    assert context_degrees("ulysses", seq=8192, **llama) == [1, 2, 4, 8]
    assert context_degrees("ulysses", seq=8192, **llama, tp=4) == [1, 2]
    assert context_degrees("ulysses", seq=8192, **llama, tp=4, replicate_kv=True) == [1, 2, 4, 8]
    assert context_degrees("ring", seq=24, **llama) == [1, 2, 3, 4, 6, 12]
    assert context_degrees("gathered", seq=24, **llama, order="contiguous") == [1, 2, 3, 4, 6, 8, 12, 24]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attention_traffic("ringg", **SMALL, cp=2), "unknown way 'ringg'"),
        (lambda: attention_traffic("ring", **SMALL, cp=5), "cp=5 does not divide seq=24"),
        (lambda: attention_traffic("ulysses", **SMALL, cp=3), "cp=3 does not divide heads=4"),
        (lambda: attention_traffic("ulysses", **{**SMALL, "heads": 12, "kv_heads": 6}, cp=4), "divide kv_heads=6"),
        (lambda: context_buffers("ring", **{**SMALL, "kv_heads": 3}, cp=2), "kv_heads=3 does not divide heads=4"),
        (lambda: context_degrees("ring", seq=8, heads=4, kv_heads=4, tp=3), "tp=3 does not divide kv_heads=4"),
        (lambda: ring_work(3, "zigzag", 9), "2 cp=6 does not divide seq=9"),
        (lambda: token_owners(3, "zigzag", 9), "2 cp=6 does not divide seq=9"),
        (lambda: busy_share(0, "zigzag"), "cp=0 must be a whole number"),
        (lambda: busy_share(2, "diagonal"), "unknown order 'diagonal'"),
        (lambda: rank_chunks(2, 2, "zigzag"), "rank=2"),
        (lambda: causal_blocks(2, True), "unknown order True"),
    ],
)
def test_what_does_not_fit_is_refused_with_every_factor(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
