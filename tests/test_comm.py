"""The cost of collectives and of a DDP step, against published numbers, a simulation and laws."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lablib.calc.communication import (
    amdahl_speedup,
    bus_bandwidth,
    data_parallel_bytes,
    efficiency,
    hiding_tokens,
    hybrid_shard_bytes,
    ring_all_reduce_bytes,
    ring_all_reduce_time,
    speedup,
)
from lablib.calc.parallel import DDPStep, ddp_step_time

sizes = st.floats(1, 1e13)
ranks_ = st.integers(1, 4096)


# Published and by hand


@pytest.mark.parametrize(
    ("ranks", "bandwidth", "printed"),
    [(8, 300e9, "2.04"), (64, 200e9, "3.45"), (64, 25e9, "27.6")],  # NVLink 3; eight and one 200 Gb/s card a node
)
def test_gpt3_example(ranks: int, bandwidth: float, printed: str) -> None:
    """350 GB of 16-bit gradients over three links."""
    assert f"{ring_all_reduce_time(350e9, ranks, bandwidth=bandwidth):.3g}" == printed


def test_fsdp_paper_traffic() -> None:
    """Per GPU and step, M bytes of weights: 2M(W-1)/W, 3M(W-1)/W, and 2M(W-G)/(GW) out of the node."""
    size, world, node = 16e9, 512, 8
    assert data_parallel_bytes(size, world) == pytest.approx(2 * size * 511 / 512)
    assert data_parallel_bytes(size, world, stage=3) == pytest.approx(3 * size * 511 / 512)
    assert hybrid_shard_bytes(size, world, shard=node) == pytest.approx(2 * size * (512 - 8) / (8 * 512))
    printed = 2 * size * (world - 1) / (node * world)
    assert hybrid_shard_bytes(size, world, shard=node) == pytest.approx(printed, rel=(node - 1) / (world - 1))


def test_playbook_condition() -> None:
    """Appendix A3 in elements per second: ((n-1)/n) F / (2 t W') <= 1, and W' = W/g."""
    flops, bandwidth, n = 989.4e12, 450e9, 8
    for g in (2, 4):
        elements_per_second = bandwidth / g
        t = hiding_tokens(n, flops=flops, bandwidth=bandwidth, bytes_per_gradient=g)
        assert (n - 1) / n * flops / (2 * t * elements_per_second) == pytest.approx(1)


@pytest.mark.parametrize(("each", "overlap", "step"), [(8, False, 72), (8, True, 48), (15, True, 70)])
def test_four_layers_by_hand(each: float, overlap: bool, step: float) -> None:
    """Four layers, 10 ms of backward each; the all-reduce of a layer takes 8 or 15 ms."""
    result = ddp_step_time(
        compute_forward=0,
        compute_backward=40,
        gradient_bytes=4,
        ranks=2,
        bandwidth=1 / each,
        buckets=4,
        overlap=overlap,
    )
    assert result.step == pytest.approx(step)


def test_speedup_is_not_efficiency() -> None:
    assert speedup(2.0, 1.25, 2, scaling="strong") == pytest.approx(1.6)
    assert efficiency(2.0, 1.25, 2, scaling="strong") == pytest.approx(0.8)
    assert speedup(1.0, 1.25, 2, scaling="weak") == pytest.approx(1.6)
    assert efficiency(1.0, 1.25, 2, scaling="weak") == pytest.approx(0.8)


def test_amdahl() -> None:
    assert amdahl_speedup(4, 0.04) == pytest.approx(100 / 28)
    assert amdahl_speedup(1, 0.3) == 1
    assert amdahl_speedup(64, 0) == 64
    assert amdahl_speedup(10**9, 0.01) == pytest.approx(100, rel=1e-6)


# Laws


steps = st.fixed_dictionaries(
    {
        "compute_forward": st.floats(0, 1e3),
        "compute_backward": st.floats(0, 1e3),
        "gradient_bytes": sizes,
        "ranks": ranks_,
        "bandwidth": st.floats(1e6, 1e13),
        "latency": st.floats(0, 1e-3),
    }
)


@given(steps, st.integers(1, 40), st.booleans(), st.integers(1, 8))
def test_step_adds_up(step: dict, buckets: int, overlap: bool, micro_batches: int) -> None:
    result = ddp_step_time(**step, buckets=buckets, overlap=overlap, micro_batches=micro_batches)
    small = 1e-9 * (result.step + result.communication)
    assert result.hidden + result.exposed == pytest.approx(result.communication)
    assert result.step == pytest.approx(result.compute + result.exposed)
    assert -small <= result.hidden <= step["compute_backward"] + small
    assert result.ideal_exposed - small <= result.exposed <= result.communication + small
    if not overlap:
        assert result.hidden == pytest.approx(0, abs=small)
    once = ddp_step_time(**step, buckets=buckets, overlap=overlap)
    assert result.exposed == pytest.approx(once.exposed)  # accumulation adds compute, not communication


@given(steps, st.integers(1, 40))
def test_equal_buckets_have_a_closed_form(step: dict, m: int) -> None:
    step = {**step, "latency": 0}
    result = ddp_step_time(**step, buckets=m)
    total, backward = result.communication, step["compute_backward"]
    closed = max(total / m, total - (m - 1) / m * backward)
    assert result.exposed == pytest.approx(closed, abs=1e-9 * (total + backward))


# Bad input


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ring_all_reduce_bytes(8, 0), "ranks=0"),
        (lambda: ring_all_reduce_time(8, 2, bandwidth=0), "bandwidth=0"),
        (lambda: bus_bandwidth("gossip", 8, 2, 1), "all_reduce, reduce_scatter"),
        (lambda: hybrid_shard_bytes(8, 12, shard=8), "shard=8 does not divide ranks=12"),
        (lambda: amdahl_speedup(0, 0.5), "ranks=0"),
        (lambda: _step(buckets=0), "buckets=0"),
        (lambda: _step(micro_batches=0), "micro_batches=0"),
    ],
)
def test_bad_input(call, says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        call()


def _step(**change: object) -> DDPStep:
    usual = {"compute_forward": 1, "compute_backward": 2, "gradient_bytes": 8, "ranks": 2, "bandwidth": 4}
    return ddp_step_time(**{**usual, **change})
