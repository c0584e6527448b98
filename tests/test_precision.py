"""The loss scaler, the master copy and stochastic rounding against PyTorch and their definitions."""

from __future__ import annotations

import copy
import itertools
import math
import random
from statistics import fmean

import pytest
import torch
from torch import nn

from lablib.calc.memory import autocast_activations, training_memory
from lablib.calc.precision import FORMATS
from lablib.launch.precision import allreduce_error, expected_error, gloo_error, precision_memory, rounding_noise
from lablib.launch.precision import watched_training as runs
from lablib.launch.precision.float8 import rank_values, ring_sum
from lablib.launch.ranks import run_ranks
from lablib.toys.precision import LossScaler, MasterWeights, RoundedWeights
from lablib.toys.precision.master import stochastic_round_bf16
from lablib.toys.transformer import tiny_config

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


# The three failures, memory of recipes and sums over ranks: each against what the formats predict


def test_underflow_stops_fp16_and_scaling_cures_it() -> None:
    found = runs.underflow(steps=10)
    full, half, scaled = found["fp32"], found["fp16"], found["fp16, loss scaling"]
    # The same gradients, 65536 times larger: what is lost in fp16 is there with scaling.
    # Half of the smallest subnormal, 2^-25, rounds to zero: a tie, and zero is the even neighbour.
    half_of_least = int(math.log2(FORMATS["fp16"].min_subnormal)) - 1
    forecast = {name: (h.below(half_of_least) + h.zeros) / h.count for name, h in full.gradients.items()}
    dead = {name for name, h in half.gradients.items() if h.zero_share == 1}
    assert {"blocks.0.attention.q.weight", "blocks.1.attention.k.weight"} <= dead
    assert not {"blocks.0.mlp.down.bias", "blocks.1.attention.out.bias"} & dead
    # Backward through zeros spreads them, but does not start them: they die where much was forecast to be lost, and in
    # all more is lost than was forecast. A single tensor says little: a bias has 32 values, and three of them a tenth.
    alive = forecast.keys() - dead
    assert fmean(forecast[name] for name in dead) > fmean(forecast[name] for name in alive)
    assert fmean(half.gradients[name].zero_share for name in forecast) > fmean(forecast.values())
    for name in forecast:
        # The bias of keys shifts all scores of a row alike: its gradient is rounding noise, and may be zero.
        if not name.endswith("k.bias"):
            assert scaled.gradients[name].zero_share <= full.gradients[name].zero_share + 0.05, name
        # No fp16 number but zero lies below the smallest subnormal.
        assert half.gradients[name].below(int(math.log2(FORMATS["fp16"].min_subnormal))) == 0
    assert half.frozen["blocks.0.attention.q.weight"] == 1
    assert scaled.frozen["blocks.0.attention.q.weight"] < 0.1
    # One rounding of fp16 in every operator: the scaled curve is the fp32 curve to about its epsilon.
    epsilon = FORMATS["fp16"].epsilon
    assert max(abs(a - b) / a for a, b in zip(full.losses, scaled.losses, strict=True)) < 5 * epsilon
    # Where queries and keys stand still and much of the rest is zero, training is slower. By how much depends on the
    # text: fp16 falls by half as much as fp32, and is held to less than three quarters.
    assert half.losses[0] - half.losses[-1] < 0.75 * (full.losses[0] - full.losses[-1])
    assert not scaled.skipped


def test_overflow_spoils_a_fixed_scale_and_costs_a_dynamic_one_its_first_steps() -> None:
    found = runs.overflow(steps=16, interval=5)
    fixed, dynamic = found["fp16, fixed scale"], found["fp16, dynamic scale"]
    assert math.isfinite(fixed.losses[0])
    assert all(math.isnan(loss) for loss in fixed.losses[1:])
    assert sum(h.odd for h in fixed.gradients.values()) > 0
    assert dynamic.skipped[:3] == [0, 1, 2]
    assert any(later > before for before, later in itertools.pairwise(dynamic.scales))  # it grew again
    assert len(dynamic.skipped) < 11
    assert all(math.isfinite(loss) for loss in dynamic.losses)
    # The scales are what a GradScaler does with these overflows.
    oracle = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=5)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for step, scale in enumerate(dynamic.scales):
        assert oracle.get_scale() == scale, step
        weight.grad = torch.full((1,), math.inf if step in dynamic.skipped else 1.0)
        oracle.scale(torch.zeros(1))
        oracle.step(optimizer)
        oracle.update()
    # A skipped step leaves the weights, so the next loss differs by the batch alone.
    assert dynamic.losses[0] == pytest.approx(found["fp32"].losses[0], rel=1e-3)
    assert found["fp32"].mean_loss(5) < dynamic.mean_loss(5)


def test_bf16_stalls_and_both_cures_move_it() -> None:
    found = runs.stall(steps=16, warm_up=40)
    falls = {name: run.losses[0] - run.losses[-1] for name, run in found.items()}
    # Every step reads the same batch, so fp32 falls. A frozen share of the weights above 0.7 leaves less than half of
    # that to bf16, and rounding, up or down by chance, is some tenths of it: a cure is nearer to fp32 than to nothing.
    assert falls["fp32"] > 0
    assert falls["bf16"] < 0.5 * falls["fp32"]
    for cure in ("bf16, stochastic rounding", "bf16, master weights"):
        assert 0.5 * falls["fp32"] < falls[cure] < 1.5 * falls["fp32"], cure
    # A norm's weight near 1 has half a gap of 2^-9 or 2^-8: 16 steps of at most 3e-5 cannot reach it one by one.
    norms = [name for name in found["bf16"].frozen if "norm" in name and name.endswith("weight")]
    assert len(norms) == 5
    assert all(found["bf16"].frozen[name] == 1 for name in norms)
    # Rounded by chance, each of these 160 moves with a probability of 3e-5 over its gap, 2^-8 or 2^-7, in every step:
    # ten or twenty moves in all, and none of them once in ten thousand seeds.
    assert min(found["bf16, stochastic rounding"].frozen[name] for name in norms) < 1
    mean = {name: sum(run.frozen.values()) / len(run.frozen) for name, run in found.items()}
    assert mean["bf16"] > 0.7
    assert mean["fp32"] < 0.05


def test_frozen_share_is_what_half_a_gap_predicts() -> None:
    # One step of AdamW moves every weight by the learning rate: with a first step, m/sqrt(v) is the gradient's sign.
    lr, model = 2e-5, runs.small_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights = runs.RoundedWeights(model, stochastic=False)
    run = runs.train_watched(weights, steps=1, lr=lr)
    bf16 = FORMATS["bf16"]
    for name in ("blocks.0.mlp.up.weight", "blocks.1.norm1.weight"):
        values = start[name].double().flatten().tolist()
        moved = sum(bf16.moves(w, lr) + bf16.moves(w, -lr) for w in values) / 2 / len(values)
        # The sign decides only at powers of two, where the gap below is half of that above.
        assert 1 - run.frozen[name] == pytest.approx(moved, abs=0.02), name


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_memory_of_recipes_is_as_calculated(family: str) -> None:
    config = tiny_config(family, num_layers=3, hidden=48)
    found = precision_memory(config, batch=3, seq=17)
    for recipe, memory in found.items():
        assert memory.states_per_param == 16, recipe
        predicted = training_memory(config, recipe=recipe, micro_batch=3, seq=17, implementation="toy")
        assert memory.states == predicted.states, recipe
        kept = sum(autocast_activations(config, batch=3, seq=17).values())
        assert memory.activations == (kept if recipe == "autocast-bf16" else predicted.activations), recipe
    full, low, auto = (found[name].activations for name in ("fp32", "mixed-bf16", "autocast-bf16"))
    assert 0.5 * full <= low < 0.6 * full
    assert low < auto


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_allreduce_error_grows_as_derived(dtype: torch.dtype) -> None:
    found = allreduce_error((2, 4, 8, 32), dtype, size=1 << 13)
    for error in found:
        # The derivation takes the logarithms of the sums to be even over a binade; for normal numbers it is 10% off.
        assert error.reduced == pytest.approx(error.expected_reduced, rel=0.15), error
        assert error.full == pytest.approx(rounding_noise(dtype), rel=0.15), error
    # Numbers of one sign sit together in a binade, where the noise depends on the place: between 0.5 and 1 of a gap.
    for error in allreduce_error((4, 32), dtype, size=1 << 12, mean=8.0):
        assert 0.5 * error.expected_reduced < error.reduced < 1.5 * error.expected_reduced
    assert expected_error(1, dtype) == 0
    assert expected_error(200, dtype) == pytest.approx(rounding_noise(dtype) * math.sqrt(100.5), rel=1e-3)
    with pytest.raises(ValueError, match="at least 2"):
        allreduce_error((1,))


def _errors_and_bits():
    import torch.distributed as dist

    values = rank_values(dist.get_world_size(), size=999, dtype=torch.bfloat16)
    reduced = values[dist.get_rank()].clone()
    dist.all_reduce(reduced)
    agree = (reduced == ring_sum(values)).double().mean().item()
    return gloo_error(), agree


def test_a_real_all_reduce_loses_as_much_as_the_ring() -> None:
    ranks = 4
    results = run_ranks(_errors_and_bits, ranks)
    (ring,) = allreduce_error((ranks,))
    for error, agree in results:
        assert error.reduced == pytest.approx(ring.reduced, rel=0.1)
        assert error.full == ring.full
        assert error.reduced > 1.3 * error.full
        assert agree > 0.4  # another order of additions rounds differently, and often the same
    assert len({str(error) for error, _ in results}) == 1
