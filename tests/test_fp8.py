"""FP8 scaling and the FP8 linear against torch._scaled_mm, torchao where it is installed, and their definitions."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn

from lablib.calc.precision import FORMATS, mx_scale, scale_count
from lablib.calc.precision.fp8 import BLOCKS
from lablib.calc.torch_versions import torch_facts
from lablib.launch.precision import float8, rounding_noise
from lablib.launch.precision.float8 import delayed_scaling_run, error_table, fp8_error, trained_tensors, with_outlier
from lablib.toys.precision import (
    E4M3,
    E5M2,
    SCALINGS,
    DelayedScaling,
    fp4,
    fp8,
    hadamard,
    quantize,
    quantize_nvfp4,
    swap_linears,
    turn,
)
from lablib.toys.precision.fp8 import Fp8Linear, spread
from lablib.toys.transformer import Transformer, tiny_config

SEED = random.randrange(2**31)


def _matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED + seed)
    return torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 2, rows)[:, None]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scaling", list(SCALINGS))
def test_every_block_has_its_own_scale(scaling: str, dtype: torch.dtype) -> None:
    rng = random.Random(SEED)
    x = _matrix(rng.randrange(129, 300), rng.randrange(129, 300))
    quantized = quantize(x, scaling, dtype)
    assert quantized.scale_RC.numel() == scale_count(*x.shape, scaling)
    rows, columns = (size or x.shape[dim] for dim, size in enumerate(SCALINGS[scaling]))
    found = quantized.dequantize()
    if scaling.startswith("mx32"):  # an E8M0 scale is one byte, and nothing is lost in it
        assert torch.equal(quantized.scale_RC.to(torch.float8_e8m0fnu).float(), quantized.scale_RC)
    fmt, rounding = FORMATS["e4m3" if dtype == E4M3 else "e5m2"], scaling.partition("-")[2] or "rceil"
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            if rng.random() > 0.02 and (i, j) != (0, 0):
                continue  # a few blocks of many: each is checked value by value
            block = x[i : i + rows, j : j + columns]
            scale = quantized.scale_RC[i // rows, j // columns].item()
            if scaling.startswith("mx32"):
                assert scale == mx_scale(block.abs().max().item(), fmt.max, epsilon=fmt.epsilon, rounding=rounding)
            else:
                assert scale == pytest.approx(block.abs().max().item() / fmt.max, rel=1e-6)
            ours = found[i : i + rows, j : j + columns].flatten().tolist()
            # fp32 division and multiplication, as the toy does; the rounding between them by the calculator.
            scaled = (block / scale).flatten().tolist()
            for value, number in list(zip(ours, scaled, strict=True))[:200]:
                expected = torch.tensor(fmt.round(number, overflow="saturate")) * scale
                assert value == expected.item(), (scaling, SEED)


def test_calculator_and_toy_agree_about_blocks() -> None:
    for name, (rows, columns) in SCALINGS.items():
        assert BLOCKS[name] in (None, (rows, columns))


def test_a_scale_rounded_up_cuts_nothing_off() -> None:
    x = _matrix(64, 256)
    up, down = quantize(x, "mx32"), quantize(x, "mx32-floor")
    cut = (x.abs() > 448 * spread(down.scale_RC, (1, 32), x.shape)).sum()
    assert cut > 0, SEED
    assert not (x.abs() > 448 * spread(up.scale_RC, (1, 32), x.shape)).any(), SEED
    # The scales are equal where the largest of a block fits, and a power of two apart where it does not.
    assert set((up.scale_RC / down.scale_RC).flatten().tolist()) == {1.0, 2.0}
    for top in (448.0, 224.0, 448 * 2.0**-20):
        exact = quantize(torch.full((1, 32), top), "mx32")
        assert exact.dequantize().eq(top).all()
        assert exact.values_MK.float().eq(448).all()


def test_four_bits_are_those_of_the_calculator() -> None:
    e2m1, generator = FORMATS["e2m1"], torch.Generator().manual_seed(SEED)
    numbers = torch.cat((torch.linspace(-7, 7, 281), torch.randn(500, generator=generator) * 3))
    found = fp4.round_e2m1(numbers)
    expected = [e2m1.round(x, overflow="saturate") for x in numbers.tolist()]
    assert found.tolist() == expected
    # By chance: one of the two neighbours, and the number on average.
    for x in (0.2, 1.1, 2.75, 5.5):
        drawn = fp4.round_e2m1(torch.full((20_000,), x), stochastic=True, generator=generator)
        below, above = e2m1.neighbours(x)
        assert set(drawn.tolist()) == {below, above}
        # Five deviations of a mean of 20,000 draws, each off by at most half a gap.
        assert abs(drawn.mean().item() - x) < 5 * (above - below) / 2 / math.sqrt(20_000), SEED


def test_nvfp4_has_two_levels_of_scales() -> None:
    x = _matrix(48, 64)
    x[3, 16:32] = 0
    for square in (False, True):
        made = quantize_nvfp4(x, square=square)
        rows = 16 if square else 1
        assert made.scale_RC.dtype == E4M3
        assert made.scale_RC.shape == (48 // rows, 4)
        assert made.tensor_scale.item() == pytest.approx(x.abs().max().item() / (448 * 6))
        assert made.scale_RC.float().max() == 448
        assert set(made.values_MK.abs().flatten().tolist()) <= {0, 0.5, 1, 1.5, 2, 3, 4, 6}
        assert made.dequantize().isfinite().all()
    # A square block makes a weight and its transpose the same numbers; a row block does not.
    assert torch.equal(quantize_nvfp4(x.T, square=True).dequantize().T, quantize_nvfp4(x, square=True).dequantize())
    assert not torch.equal(quantize_nvfp4(x.T).dequantize().T, quantize_nvfp4(x).dequantize())
    assert torch.equal(quantize_nvfp4(torch.zeros(2, 16)).dequantize(), torch.zeros(2, 16))


def test_a_turn_spreads_an_outlier_and_cancels_in_a_product() -> None:
    generator = torch.Generator().manual_seed(SEED)
    a, b = (torch.randn(24, 64, generator=generator) for _ in range(2))
    h = hadamard(generator=generator)
    torch.testing.assert_close(h @ h.T, torch.eye(16))
    torch.testing.assert_close(turn(a, h) @ turn(b, h).T, a @ b.T)
    spike = torch.zeros(1, 16)
    spike[0, 5] = 8.0
    assert turn(spike, h).abs().tolist() == [[2.0] * 16]
    # One value of sixteen is 50 times the others, which then become zero; turned, all sixteen are of one size.
    a[:, ::16] *= 50
    zeroed = [(quantize_nvfp4(x).values_MK == 0).double().mean().item() for x in (a, turn(a, h))]
    assert zeroed[0] > 0.5 > 0.2 > zeroed[1], SEED


def test_zeros_outliers_and_bad_input() -> None:
    zeros = quantize(torch.zeros(3, 200), "block1x128")
    assert torch.equal(zeros.dequantize(), torch.zeros(3, 200))
    assert zeros.saturated == 0
    given = quantize(torch.tensor([[1.0, 1000.0]]), "tensor", scale=torch.tensor(1.0))
    assert given.dequantize().tolist() == [[1.0, 448.0]]
    assert given.saturated == 1
    with pytest.raises(ValueError, match="unknown scaling 'rows'; did you mean row"):
        quantize(torch.zeros(2, 2), "rows")
    with pytest.raises(ValueError, match="takes a matrix"):
        quantize(torch.zeros(2))
    with pytest.raises(ValueError, match="one for the tensor"):
        quantize(torch.zeros(2, 2), "row", scale=torch.tensor(1.0))


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize(("left", "right"), [(E4M3, E4M3), (E5M2, E4M3)])
def test_matmul_equals_scaled_mm(scaling: str, left: torch.dtype, right: torch.dtype) -> None:
    a, b = _matrix(32, 48), _matrix(64, 48, seed=1)
    ours = fp8.fp8_matmul(a, b, (scaling, scaling), (left, right))
    qa, qb = quantize(a, scaling, left), quantize(b, scaling, right)
    scales = [q.scale_RC if scaling == "row" else q.scale_RC.reshape(()) for q in (qa, qb)]
    if scaling == "row":
        scales[1] = scales[1].T.contiguous()
    matrices = (qa.values_MK, qb.values_MK.T)
    if scaling == "row" and not torch_facts(torch.__version__).cpu_scales_by_row:
        with pytest.raises(RuntimeError, match="only supports per-tensor scaling for CPU"):
            torch._scaled_mm(*matrices, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.float32)
        theirs = matrices[0].float() @ matrices[1].float() * scales[0] * scales[1]
    else:
        theirs = torch._scaled_mm(*matrices, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.float32)
    # 48 products of FP8 values are exact in fp32; their sum has 47 roundings of at most 2^-24 of the sum of magnitudes,
    # and the scales two more each.
    bound = 60 * 2.0**-24 * (qa.dequantize().abs() @ qb.dequantize().abs().T)
    assert ((ours - theirs).abs() <= bound).all(), SEED


@pytest.mark.parametrize("recipe", list(fp8.RECIPES))
def test_linear_backward_is_its_three_matmuls(recipe: str) -> None:
    layer = Fp8Linear(160, 130, recipe=recipe)
    x = _matrix(40, 160).view(2, 20, 160).requires_grad_()
    out = layer(x)
    g = _matrix(40, 130, seed=2).view_as(out)
    out.backward(g)
    how, flat, g_MN = layer.recipe, x.detach().flatten(0, 1), g.flatten(0, 1)

    def product(a, b, scalings, dtypes):
        return quantize(a, scalings[0], dtypes[0]).dequantize() @ quantize(b, scalings[1], dtypes[1]).dequantize().T

    weight = layer.weight.detach()
    forward = product(flat, weight, (how.activations, how.weights), (how.dtype, how.dtype)) + layer.bias
    torch.testing.assert_close(out.flatten(0, 1), forward)
    backward = (how.gradient_dtype, how.dtype)
    torch.testing.assert_close(x.grad.flatten(0, 1), product(g_MN, weight.T, (how.activations, how.weights), backward))
    torch.testing.assert_close(layer.weight.grad, product(g_MN.T, flat.T, (how.activations, how.activations), backward))
    torch.testing.assert_close(layer.bias.grad, g_MN.sum(0))
    # And near the exact ones: each factor has the noise of E4M3 or E5M2, which random signs do not add up.
    exact = g_MN.T @ flat
    noise = math.hypot(rounding_noise(how.gradient_dtype), rounding_noise(how.dtype))
    assert (layer.weight.grad - exact).norm() / exact.norm() < 2 * noise


def test_memory_hardly_falls_with_the_fp8_linear() -> None:
    from lablib.launch.measure import saved_activations

    windows = torch.randint(256, (2, 33))
    plain, eight = (Transformer(tiny_config("llama", num_layers=1)) for _ in range(2))
    names = swap_linears(eight)
    assert "head" not in names
    assert len(names) == 7
    assert all(p.dtype == torch.float32 for p in eight.parameters())
    totals = []
    for model in (plain, eight):
        with saved_activations(model) as saved:
            loss = model.loss(windows)
        loss.backward()
        totals.append(saved.total)
    assert totals[0] == totals[1]


def test_training_in_fp8_follows_fp32() -> None:
    from lablib.toys.text import batches, tokens

    curves = []
    for recipe in (None, "deepseek-v3"):
        torch.manual_seed(0)
        model = Transformer(tiny_config("gpt2", num_layers=1, hidden=64, max_positions=32))
        if recipe:
            swap_linears(model, recipe=recipe)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        stream, losses = batches(tokens(), batch=4, seq=32, seed=1), []
        for _ in range(25):
            optimizer.zero_grad()
            loss = model.loss(next(stream))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[0] != curves[1]
    # Rounding noise of a few percent in every matmul moves the loss by less than a tenth of what it falls.
    fall = curves[0][0] - curves[0][-1]
    assert fall > 0
    assert max(abs(a - b) for a, b in zip(*curves, strict=True)) < 0.1 * fall


def test_delayed_scaling_takes_the_past() -> None:
    delayed = DelayedScaling(E4M3, history=2)
    assert delayed.scale() == 1
    for largest, expected in ((4.0, 4.0), (2.0, 4.0), (1.0, 2.0), (math.inf, 2.0), (math.nan, 2.0)):
        delayed.quantize(torch.tensor([[largest, 0.5]]))
        assert delayed.scale().item() == pytest.approx(expected / 448)
    assert DelayedScaling(margin=1, history=1).scale() == 1
    with pytest.raises(ValueError, match="history=0"):
        DelayedScaling(history=0)


def test_delayed_scaling_misses_a_spike_for_one_step() -> None:
    # A spike far above whatever happened in the six steps before: nearly every value lies beyond the range.
    rows = delayed_scaling_run(steps=14, history=6, spike=12, factor=1e4)
    assert rows[12]["saturated"] > 0.5
    # Nearly everything that is cut off is lost, an error of almost 1; E5M2 rounds to 1/4 of a power of two, at most 1/8.
    assert rows[12]["delayed"] > 3 * rows[12]["current"]
    assert rows[13]["saturated"] == 0
    assert rows[13]["covered"] == pytest.approx(rows[12]["amax"])
    for row in rows:
        assert (row["saturated"] > 0) == (row["amax"] > row["covered"] * (1 + 1e-6))


def test_errors_of_real_tensors() -> None:
    table = error_table(trained_tensors(steps=3, hidden=128))
    for (kind, scaling, name), error in table.items():
        dtype = E4M3 if name == "e4m3" else E5M2
        # Even over a gap g, an error has a mean square of g²/12, and g is eps times the value or, at the end of a
        # binade, half of that. A few values are below the normal range; a tenth allows for them.
        most = torch.finfo(dtype).eps / math.sqrt(12)
        assert most / 2 < error.error < 1.1 * most, (kind, scaling, name)
    for kind in ("weights", "activations", "gradients"):
        assert table[kind, "tensor", "e5m2"].error > 1.7 * table[kind, "tensor", "e4m3"].error
        assert table[kind, "block1x128", "e4m3"].zeroed <= table[kind, "tensor", "e4m3"].zeroed
    assert table["gradients", "tensor", "e4m3"].zeroed > 10 * table["gradients", "tensor", "e5m2"].zeroed


def test_an_outlier_costs_those_that_share_its_scale() -> None:
    generator = torch.Generator().manual_seed(SEED)
    signs = torch.randint(0, 2, (256, 256), generator=generator) * 2 - 1
    # Magnitudes from 1 to 2: E4M3 rounds to zero what is 448 * 2^10 = 458,752 times smaller than the largest of its
    # block, which is every neighbour of an outlier of a million and no value of a block without one.
    x = with_outlier(signs * (1 + torch.rand(256, 256, generator=generator)), 1e6)
    sharing = {
        "tensor": 256 * 256,
        "row": 256,
        "block1x128": 128,
        "block128x128": 128 * 128,
        **dict.fromkeys(("mx32", "mx32-floor", "mx32-even", "mx32-ceil"), 32),
    }
    assert set(sharing) == set(SCALINGS)
    for scaling, values in sharing.items():
        found = quantize(x, scaling).dequantize()
        assert (found == 0).sum().item() == values - 1, (scaling, SEED)
    assert fp8_error(x, "tensor").zeroed > fp8_error(x, "block1x128").zeroed


def test_float8_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(ValueError, match="fsdp_gather needs one scale"):
        float8.to_float8(model, recipe="rowwise", fsdp_gather=True)
    with pytest.raises(ValueError, match="unknown recipe"):
        float8.to_float8(model, recipe="blockwise")
    monkeypatch.setattr(float8.importlib.util, "find_spec", lambda name: None)
    assert "torchao is not installed" in float8.missing_for_float8()
    with pytest.raises(ValueError, match="torchao is not installed"):
        float8.to_float8(model)


def test_linear_equals_torchao() -> None:
    pytest.importorskip("torchao", reason="torchao, the extra fp8, is not installed")
    torch.manual_seed(SEED)
    layer = Fp8Linear(64, 48, bias=False)
    model = nn.Sequential(nn.Linear(64, 48, bias=False), nn.Linear(48, 5))
    model[0].weight = nn.Parameter(layer.weight.detach().clone())
    report = float8.to_float8(model, emulate=True)
    assert report.swapped == ("0",)
    assert report.kept == {"1": "5 is not a multiple of 16"}
    ours, theirs = (torch.randn(32, 64, generator=torch.Generator().manual_seed(SEED)) for _ in range(2))
    ours.requires_grad_(), theirs.requires_grad_()
    g = torch.randn(32, 48)
    layer(ours).backward(g)
    model[0](theirs).backward(g)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer.weight.grad, model[0].weight.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer(ours), model[0](theirs), rtol=1e-5, atol=1e-6)
