"""Bytes per parameter: published totals, the Megatron table, ZeRO's tables and figure, 8-bit blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lablib.calc.parallel import max_params, state_terms, zero_state_bytes
from lablib.calc.precision import find_optimizer, recipe
from lablib.calc.precision.recipes import OPTIMIZERS, RECIPES
from lablib.calc.units import GB

# Rajbhandari et al. 2019, table 1: parameters, ranks, then GB per device for the stages 1, 2 and 3.
ZERO_TABLE_1 = [
    (7_500_000_000, 1, (120, 120, 120)),
    (7_500_000_000, 4, (52.5, 41.3, 30)),
    (7_500_000_000, 16, (35.6, 21.6, 7.5)),
    (7_500_000_000, 64, (31.4, 16.6, 1.88)),
    (7_500_000_000, 256, (30.4, 15.4, 0.47)),
    (7_500_000_000, 1024, (30.1, 15.1, 0.12)),
    (128_000_000_000, 1, (2048, 2048, 2048)),
    (128_000_000_000, 4, (896, 704, 512)),
    (128_000_000_000, 64, (536, 284, 32)),
    (128_000_000_000, 1024, (513, 257, 2)),
    (1_000_000_000_000, 1, (16000, 16000, 16000)),
    (1_000_000_000_000, 4, (7000, 5500, 4000)),
    (1_000_000_000_000, 64, (4187, 2218, 250)),
    (1_000_000_000_000, 1024, (4011, 2013, 15.6)),
]


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("fp32", 16),
        ("mixed-bf16", 16),
        ("mixed-fp16", 16),
        ("mixed-bf16-fp32-grads", 18),
        ("mixed-bf16-fp32-accum", 20),
        ("megatron-fp16", 20),
        ("fsdp2-mixed", 16),
        ("fsdp2-mixed-fp32-reduce", 16),
        ("autocast-bf16", 16),
        ("autocast-fp16", 16),
        ("pure-bf16", 8),
        ("pure-bf16-fp32-moments", 12),
    ],
)
def test_every_recipe_has_its_bytes_with_adamw(name: str, total: int) -> None:
    assert recipe(name).bytes_per_param() == total
    assert zero_state_bytes(1000, recipe=name) == 1000 * total


@pytest.mark.parametrize(("name", "extra"), [("sgd", 0), ("sgd-momentum", 4), ("adamw", 8)])
def test_optimizers_add_their_moments(name: str, extra: int) -> None:
    assert recipe("mixed-bf16").bytes_per_param(name) == 8 + extra


def test_8bit_moments_count_one_scale_per_started_block() -> None:
    moments = find_optimizer("adamw-8bit").moment_bytes(257)
    assert moments == {"momentum": 257 + 2 * 4, "variance": 257 + 2 * 4}
    # 6 bytes without scales, as Transformer Math 101 counts master copy and 8-bit moments: 4 + 1 + 1.
    terms = state_terms(256 * 10**6, recipe_="mixed-bf16", optimizer="adamw-8bit")
    optimizer = terms["master_weights"] + terms["momentum"] + terms["variance"]
    assert optimizer / (256 * 10**6) == 6 + 2 * 4 / 256


@pytest.mark.parametrize(
    ("name", "replicated", "sharded"), [("megatron-fp16", 4, 16), ("mixed-bf16-fp32-grads", 6, 12), ("fp32", 8, 8)]
)
@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_megatron_distributed_optimizer_table(name: str, replicated: int, sharded: int, ranks: int) -> None:
    params = 64 * 10**6
    assert zero_state_bytes(params, ranks, 1, name) == params * replicated + params * sharded // ranks


@pytest.mark.parametrize(("params", "ranks", "printed"), ZERO_TABLE_1)
def test_zero_table_1(params: int, ranks: int, printed: tuple[float, ...]) -> None:
    # The 7.5B column is rounded to a tenth, the others are cut off after the unit.
    tolerance = 0.06 if params < 10**10 else 1.0
    for stage, expected in zip((1, 2, 3), printed, strict=True):
        assert zero_state_bytes(params, ranks, stage) / GB == pytest.approx(expected, abs=tolerance)


def test_zero_figure_1() -> None:
    exact = [zero_state_bytes(7_500_000_000, 64, stage) for stage in range(4)]
    assert exact == [120_000_000_000, 31_406_250_000, 16_640_625_000, 1_875_000_000]


@pytest.mark.parametrize(
    ("mp", "printed"), [(1, (2, 7.6, 14.4, 128)), (2, (4, 15.2, 28.8, 256)), (8, (16, 60.8, 115.2, 1024))]
)
def test_zero_table_2(mp: int, printed: tuple[float, ...]) -> None:
    # Printed values are cut to a tenth, then multiplied by mp: each is at most 0.1 mp low. "1T" is 1024B.
    for stage, expected in enumerate(printed):
        billions = mp * max_params(32 * GB, 64, stage) / 1e9
        assert expected <= billions + 1e-6
        assert billions < expected + 0.1 * mp


@given(
    params=st.integers(0, 10**13),
    ranks=st.integers(1, 5000),
    name=st.sampled_from(list(RECIPES)),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
)
def test_stages_only_ever_help_and_shards_cover_the_model(params: int, ranks: int, name: str, optimizer: str) -> None:
    stages = [zero_state_bytes(params, ranks, stage, name, optimizer) for stage in range(4)]
    assert stages == sorted(stages, reverse=True)
    assert ranks * stages[3] >= stages[0]
    # Padding and partial blocks cost each rank less than one parameter and one block of scales per moment.
    assert ranks * stages[3] - stages[0] < ranks * (20 + 2 * 4 + 8)


@given(
    budget=st.integers(0, 10**13),
    ranks=st.integers(1, 2000),
    stage=st.integers(0, 3),
    name=st.sampled_from(list(RECIPES)),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
)
def test_max_params_is_the_largest_that_fits(budget: int, ranks: int, stage: int, name: str, optimizer: str) -> None:
    most = max_params(budget, ranks, stage, name, optimizer)
    assert zero_state_bytes(most, ranks, stage, name, optimizer) <= budget
    assert zero_state_bytes(most + 1, ranks, stage, name, optimizer) > budget


def test_unknown_names_suggest_close_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown recipe 'mixed_bf16'; did you mean mixed-bf16"):
        recipe("mixed_bf16")
    with pytest.raises(ValueError, match=r"unknown optimizer 'adam'; did you mean adamw"):
        find_optimizer("adam")
    with pytest.raises(ValueError, match=r"use one of adamw, sgd, sgd-momentum, adamw-8bit"):
        find_optimizer("???")
