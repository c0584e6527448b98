"""Number formats against PyTorch's own: every code of every small format, casts bit for bit, and what follows."""

from __future__ import annotations

import math
import random

import pytest
import torch

from lablib.calc.hardware import ACCELERATORS
from lablib.calc.models import preset
from lablib.calc.precision import FORMATS, find_format, fp8, gap_at, least_update, scale_window, support_table
from lablib.calc.precision.formats import support
from lablib.calc.torch_versions import torch_facts

SEED = random.randrange(2**31)
WITH_DTYPE = [name for name, fmt in FORMATS.items() if fmt.torch_name]
SMALL = [name for name in WITH_DTYPE if FORMATS[name].bits <= 16]
INTEGERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, FORMATS[name].torch_name)


def _same(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


@pytest.mark.parametrize("name", WITH_DTYPE)
def test_limits_are_those_of_finfo(name: str) -> None:
    fmt, info = FORMATS[name], torch.finfo(_dtype(name))
    assert (fmt.bits, fmt.max, fmt.min_normal) == (info.bits, info.max, info.smallest_normal)
    # Up to 2.14 PyTorch says 0.125 for float8_e5m2fnuz, which has two mantissa bits: the gap after 1 is 0.25.
    one = torch.ones(1).to(_dtype(name))
    integers = INTEGERS[fmt.bits]
    after = (one.view(integers) + 1).view(_dtype(name)).double().item()
    assert after - 1 == fmt.epsilon
    right = name != "e5m2fnuz" or torch_facts(torch.__version__).e5m2fnuz_eps_is_right
    assert (fmt.epsilon == info.eps) == right
    assert fmt.bytes == torch.empty(1, dtype=_dtype(name)).element_size()


@pytest.mark.parametrize("name", SMALL)
def test_every_code_means_what_pytorch_says(name: str) -> None:
    fmt = FORMATS[name]
    codes = torch.arange(2**fmt.bits).to(INTEGERS[fmt.bits])
    for code, value in enumerate(codes.view(_dtype(name)).double().tolist()):
        assert _same(fmt.decode(code), value), (name, code)
        if not math.isnan(value):
            assert fmt.encode(value) == code, (name, code)
    if fmt.specials != "none":
        assert math.isnan(fmt.decode(fmt.encode(math.nan)))


def _awkward(name: str) -> list[float]:
    """Random fp32 numbers over the range of a format, ties between neighbours, and what lies beside them."""
    fmt, rng = FORMATS[name], random.Random(SEED)
    low, high = math.log2(fmt.min_subnormal) - 2, math.log2(fmt.max) + 2
    numbers = [2 ** rng.uniform(max(low, -148), min(high, 127.9)) for _ in range(1500)]
    for _ in range(500):
        below = fmt.round(rng.choice(numbers), overflow="saturate")
        tie = below + fmt.ulp(below) / 2
        numbers += [below, tie, tie * (1 + 2**-22), tie * (1 - 2**-22)]
    # Each as fp32 holds it, since that is what PyTorch casts from.
    exact = torch.tensor([0.0, *numbers], dtype=torch.float64).float()
    signed = torch.cat((exact, -exact)) if fmt.signed else exact
    return signed[signed.isfinite()].double().tolist()


@pytest.mark.parametrize("name", SMALL)
def test_rounding_is_pytorchs_cast_bit_for_bit(name: str) -> None:
    fmt, numbers = FORMATS[name], _awkward(name)
    if name == "e8m0":  # PyTorch rounds fp32's own subnormals, below 2^-126, in another way
        numbers = [number for number in numbers if number >= 2.0**-126]
    cast = torch.tensor(numbers, dtype=torch.float32).to(_dtype(name)).double().tolist()
    for number, theirs in zip(numbers, cast, strict=True):
        ours = fmt.round(number)
        if math.isnan(ours):  # beyond a format without infinity: PyTorch saturates or says NaN, by version
            assert math.isnan(theirs) or abs(theirs) == fmt.max, (name, number, SEED)
            assert fmt.round(number, overflow="saturate") == math.copysign(fmt.max, number)
        else:
            assert _same(ours, theirs), (name, number, ours, theirs, SEED)


def test_tf32_is_fp32_with_13_bits_less() -> None:
    fmt, rng = FORMATS["tf32"], random.Random(SEED)
    for _ in range(500):
        x = torch.tensor(rng.gauss(0, 1) * 2.0 ** rng.randrange(-30, 30))
        # Round to nearest even on the bits of fp32: add half of the last kept bit, and its parity, then cut.
        bits = x.view(torch.int32).item()
        kept = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
        theirs = torch.tensor(kept, dtype=torch.int64).to(torch.int32).view(torch.float32).item()
        assert fmt.round(x.item()) == theirs, (x, SEED)
    assert fmt.bits == 19
    assert fmt.bytes == 4


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_ulp_is_the_gap_to_the_next_value(name: str) -> None:
    fmt, rng = FORMATS[name], random.Random(SEED)
    for x in [1.0, 0.02, fmt.min_normal, fmt.min_subnormal, *(rng.lognormvariate(0, 5) for _ in range(50))]:
        held = torch.tensor(min(x, fmt.max / 2)).to(_dtype(name))
        following = torch.nextafter(held, torch.tensor(math.inf).to(held.dtype))
        assert fmt.ulp(held.item()) == following.double().item() - held.double().item(), (x, SEED)


@pytest.mark.parametrize(("name", "epsilon_percent", "top"), [("e4m3", 12.5, 448), ("e5m2", 25, 57344)])
def test_claim_fp8_precision(name: str, epsilon_percent: float, top: float) -> None:
    fmt = FORMATS[name]
    assert 100 * fmt.epsilon == epsilon_percent
    assert fmt.max == top
    # Half of epsilon bounds the relative error of every normal number, and nothing smaller does.
    worst = max(
        abs(fmt.round(x) - x) / x
        for a in (value for value in fmt.values() if 1 <= value < 2)
        for x in (a + fmt.epsilon * k / 64 for k in range(64))
    )
    assert fmt.unit_roundoff / (1 + fmt.unit_roundoff) <= worst <= fmt.unit_roundoff


def test_claim_bf16_has_the_range_of_fp32_and_not_its_precision() -> None:
    bf16, fp32, fp16 = (FORMATS[name] for name in ("bf16", "fp32", "fp16"))
    assert bf16.binades == fp32.binades == 254
    assert 0.99 < bf16.max / fp32.max < 1
    assert bf16.epsilon == 2**-7 == 8 * fp16.epsilon
    # Which update moves a weight: from 1/512 of it at the end of a binade to 1/256 at its beginning.
    assert not bf16.moves(1.0, 2**-8)
    assert bf16.moves(1.0, 2**-8 * 1.01)
    assert not bf16.moves(1.984375, 1.984375 * 2**-9)
    assert bf16.moves(1.984375, 1.984375 * 2**-9 * 1.02)
    assert not bf16.moves(0.02, 5e-5)
    assert fp16.moves(0.02, 5e-5)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="unknown format 'bf61'; did you mean bf16"):
        find_format("bf61")
    assert find_format("torch.bfloat16") is FORMATS["bf16"]
    with pytest.raises(ValueError, match="code 256 is not among the 256 codes of e4m3"):
        FORMATS["e4m3"].decode(256)
    with pytest.raises(ValueError, match="e8m0 has no sign bit"):
        FORMATS["e8m0"].round(-1.0)
    with pytest.raises(ValueError, match="e2m1 has no code for NaN"):
        FORMATS["e2m1"].encode(math.nan)
    with pytest.raises(ValueError, match="unknown overflow"):
        FORMATS["fp16"].round(1.0, overflow="wrap")


def test_claim_a100_has_no_fp8() -> None:
    assert not support("a100").fp8_formats
    mxfp8 = {row.card for row in support_table() if "mxfp8" in row.formats}
    blackwell = {card for card, known in ACCELERATORS.items() if (known.capability or (0, 0)) >= (10, 0)}
    assert mxfp8 == blackwell | {"mi350x", "mi355x"} >= {"b200", "rtx-5090"}
    # Blackwell emulates FP8 in blocks (Transformer Engine, FP8 blockwise scaling, supported devices).
    assert {row.capability for row in support_table() if "fp8-block" in row.formats} == {"9.0"}
    assert support("mi300x").fp8_formats == ("e4m3fnuz", "e5m2fnuz")
    assert support("mi355x").fp8_formats == ("e4m3", "e5m2")
    assert all(row.source for row in support_table())
    assert "bf16" not in support("t4").formats
    # Where the hardware table has a rate, the card has the format.
    rows = {row.card: row for row in support_table()}
    assert set(rows) == set(ACCELERATORS)
    for card, known in ACCELERATORS.items():
        for dtype in set(known.flops) - {"fp32"}:
            assert dtype in rows[card].formats, (card, dtype)


def test_a_loss_scale_between_its_edges_loses_nothing() -> None:
    fp16, (low, high) = FORMATS["fp16"], scale_window(3e-9, 0.2)
    assert low * 3e-9 == pytest.approx(2.0**-25)
    assert fp16.round(low * 1.01 * 3e-9) > 0 == fp16.round(low * 3e-9 * (1 - 1e-9))
    assert math.isfinite(fp16.round(high * 0.2))
    assert math.isinf(fp16.round(high * 1.01 * 0.2))
    for weight in (1.0, 1.9, 0.02):
        held = FORMATS["bf16"].round(weight)
        least = least_update(FORMATS["bf16"], held)
        assert gap_at(FORMATS["bf16"], held) == 2 * least
        assert FORMATS["bf16"].moves(held, 1.01 * least)
        assert not FORMATS["bf16"].moves(held, 0.99 * least)


def test_scales_in_four_and_eight_bits() -> None:
    # 4 bits a value, 8 for each 16, and 32 for the tensor.
    assert fp8.quantized_bytes(64, 64, "nvfp4") == 64 * 64 * 4.5 / 8 + 4
    assert fp8.quantized_bytes(64, 64, "mx32") == 64 * 64 * 8.25 / 8
    assert [fp8.mx_scale(x) for x in (0, 448, 449, 224, 225, 14)] == [2.0**-127, 1, 2, 0.5, 1, 2**-5]
    assert [fp8.mx_scale(x, rounding="floor") for x in (0, 448, 449, 511, 512, 14)] == [2.0**-127, 1, 1, 1, 2, 2**-5]
    rng = random.Random(SEED)
    for _ in range(200):
        largest = 2 ** rng.uniform(-40, 40)
        assert 224 < largest / fp8.mx_scale(largest) <= 448, (largest, SEED)
        assert 256 <= largest / fp8.mx_scale(largest, rounding="floor") < 512, (largest, SEED)


def test_claim_fp8_training_saves_no_memory() -> None:
    totals = {name: recipe.total for name, recipe in fp8.STATES.items()}
    assert totals["mixed-bf16"] == totals["torchao float8 with FSDP2"] == 16
    assert totals["deepseek-v3"] == 13
    (base, memory), (fast, fast_memory) = list(fp8.TORCHAO_LLAMA3_8B.values())[:2]
    assert fast_memory > memory
    share = fp8.implied_share(fast / base)
    assert fp8.step_speedup(share) == pytest.approx(fast / base)
    assert 0.39 < share < 0.41
    assert fp8.step_speedup(1) == 2


def test_float8_gather_counts_matrices_once_and_the_rest_twice() -> None:
    from lablib.toys.transformer import Transformer, tiny_config

    for family in ("gpt2", "llama"):
        config = tiny_config(family, num_layers=3)
        model = Transformer(config)
        inside = [p.numel() for name, p in model.named_parameters() if "blocks" in name and p.dim() == 2]
        everything = sum(p.numel() for p in model.parameters())
        assert fp8.linear_params(config) == sum(inside)
        assert fp8.gather_bytes(config, 4, float8=False) == 2 * everything * 3 / 4
        assert fp8.gather_bytes(config, 4, float8=True) == (2 * everything - sum(inside)) * 3 / 4
    with pytest.raises(ValueError, match="only dense models"):
        fp8.linear_params(preset("mixtral-8x7b"))
