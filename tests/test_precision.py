"""The loss scaler, the master copy and stochastic rounding against PyTorch and their definitions."""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch
from torch import nn

from lablib.calc.precision import FORMATS
from lablib.toys.precision import LossScaler, MasterWeights, RoundedWeights
from lablib.toys.precision.master import stochastic_round_bf16

SEED = random.randrange(2**31)


def _model() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


@pytest.mark.parametrize("clip", [None, 0.1])
def test_scaler_equals_grad_scaler_step_for_step(clip: float | None) -> None:
    ours, theirs = _model(), _model()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (ours, theirs)]
    settings = {"growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 3}
    scaler = LossScaler(2.0**10, growth=1.7, backoff=0.3, interval=3)
    oracle = torch.amp.GradScaler("cpu", init_scale=2.0**10, **settings)
    rng = random.Random(SEED)
    skipped = 0
    for step in range(40):
        x = torch.randn(4, 5)
        spoiled = rng.random() < 0.25
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(x).square().mean() * (math.inf if spoiled else 1.0)
            (scaler if model is ours else oracle).scale(loss).backward()
        if clip is not None:
            scaler.unscale(optimizers[0])
            oracle.unscale_(optimizers[1])
            norms = [nn.utils.clip_grad_norm_(m.parameters(), clip) for m in (ours, theirs)]
            assert torch.equal(*norms) or norms[0].isnan() == norms[1].isnan()
        stepped = scaler.step(optimizers[0])
        oracle.step(optimizers[1])
        scaler.update()
        oracle.update()
        skipped += not stepped
        assert stepped is not spoiled
        assert scaler.value == oracle.get_scale(), (step, SEED)
        assert scaler.good_steps == oracle.state_dict()["_growth_tracker"], (step, SEED)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b), (step, SEED)
    assert 0 < skipped < 40


@pytest.mark.parametrize("spoiled", [None, 0, 1])
def test_each_of_two_optimizers_unscales_its_own_gradients(spoiled: int | None) -> None:
    """As GradScaler: an overflow in one makes that one skip its step, and S shrink."""
    ours, theirs = _model(), _model()
    scaler, oracle = LossScaler(2.0**10), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for model, each in ((ours, scaler), (theirs, oracle)):
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
        each.scale(model(torch.ones(4, 5)).square().mean()).backward()
        if spoiled is not None:
            model[2 * spoiled].weight.grad[0, 0] = math.inf
        for optimizer in optimizers:
            each.step(optimizer)
        each.update()
    for mine, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine, expected, atol=1e-7)
    assert scaler.value == oracle.get_scale() == 2.0 ** (10 if spoiled is None else 9)


def test_scaler_refuses_what_grad_scaler_refuses() -> None:
    half = nn.Linear(2, 2).half()
    optimizer = torch.optim.SGD(half.parameters(), lr=0.1)
    scaler = LossScaler()
    scaler.scale(half(torch.ones(1, 2, dtype=torch.float16)).float().sum()).backward()
    with pytest.raises(ValueError, match="fp16"):
        scaler.unscale(optimizer)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(1, 5)).sum()).backward()
    scaler.unscale(optimizer)
    with pytest.raises(RuntimeError, match="unscale once"):
        scaler.unscale(optimizer)
    with pytest.raises(ValueError, match=r"growth=0\.5 > 1"):
        LossScaler(growth=0.5)


def test_the_scale_stops_growing_at_the_end_of_fp32() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = LossScaler(2.0**126, interval=1)
    oracle = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=1)
    for _ in range(4):
        for each in (scaler, oracle):
            weight.grad = torch.zeros(1)
            each.scale(torch.zeros(1))
            each.step(optimizer)
            each.update()
        assert scaler.value == oracle.get_scale()
    assert scaler.value == 2.0**127


def test_master_weights_equal_autocast_free_mixed_precision() -> None:
    model = _model()
    weights = MasterWeights(copy.deepcopy(model), torch.bfloat16)
    optimizer = torch.optim.SGD(weights.master.parameters(), lr=0.1)
    x = torch.randn(4, 5)
    weights.model(x.bfloat16()).float().square().mean().backward()
    gradients = [p.grad.float() for p in weights.model.parameters()]
    weights.take_gradients()
    optimizer.step()
    weights.give_weights()
    for start, g, master, working in zip(
        model.parameters(), gradients, weights.master.parameters(), weights.model.parameters(), strict=True
    ):
        # One multiply-add in fp32: at most one rounding of the sum and one of the product apart.
        torch.testing.assert_close(master, start - 0.1 * g, rtol=2e-7, atol=1e-8)
        assert torch.equal(working, master.bfloat16())


def test_stochastic_rounding_goes_to_the_neighbours_only() -> None:
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(4000, generator=generator) * torch.logspace(-30, 30, 4000)
    rounded = stochastic_round_bf16(x, generator=generator).double().tolist()
    fmt = FORMATS["bf16"]
    for number, result in zip(x.double().tolist(), rounded, strict=True):
        assert result in fmt.neighbours(number), (number, SEED)
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, fmt.min_subnormal])
    assert torch.equal(stochastic_round_bf16(exact), exact.bfloat16())
    assert stochastic_round_bf16(torch.tensor([math.nan])).isnan().all()


def test_stochastic_rounding_has_the_right_mean() -> None:
    # n draws of a coin with chance q have a mean within 5 standard deviations sqrt(q(1-q)/n) of q but once in
    # 1.7 million; with 50 coins that is one failure in 35,000 runs.
    draws, fmt = 20_000, FORMATS["bf16"]
    generator = torch.Generator().manual_seed(SEED)
    for number in torch.randn(50, generator=generator).tolist():
        below, above = fmt.neighbours(number)
        chance = (number - below) / (above - below)
        results = stochastic_round_bf16(torch.full((draws,), number), generator=generator).double()
        up = (results == above).double().mean().item()
        allowed = 5 * math.sqrt(chance * (1 - chance) / draws) + 1e-12
        assert abs(up - chance) <= allowed, (number, SEED)


def test_small_updates_move_only_weights_that_are_rounded_by_chance() -> None:
    # 1000 updates of 1e-4, each an eighth of half a gap at 0.02 would be lost; the sum is 0.1.
    moved = {}
    for stochastic in (False, True):
        holder = nn.Linear(64, 64, bias=False)
        nn.init.constant_(holder.weight, 1.0)
        generator = torch.Generator().manual_seed(SEED)
        weights = RoundedWeights(holder, stochastic=stochastic, generator=generator)
        optimizer = torch.optim.SGD(weights.master.parameters(), lr=1.0)
        for _ in range(100):
            weights.model.weight.grad = torch.full_like(weights.model.weight, 1e-4)
            weights.take_gradients()
            optimizer.step()
            weights.give_weights()
        moved[stochastic] = 1 - weights.model.weight.double().mean().item()
    assert moved[False] == 0
    # The gradient itself is bf16. 100 steps with chance p of a gap g: a weight deviates by less than g sqrt(100 p), and
    # the mean of 4096 weights by 1/64 of that.
    step, gap = float(torch.tensor(1e-4).bfloat16()), 2**-8
    assert moved[True] == pytest.approx(100 * step, abs=5 * gap * math.sqrt(100 * step / gap) / 64)
