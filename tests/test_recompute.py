"""The toy checkpoint against torch's own, bit for bit: values, gradients, random state, autocast."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lablib.calc.flops import step_flops
from lablib.calc.memory.activations import (
    block_tensors,
    cheapest_first,
    chen_cost,
    differences,
    every_strategy,
    first_blocks,
    frontier,
    hiding_width,
    ideal_segment,
    largest_batch,
    largest_that_fits,
    layer_activations,
    model_activations,
    recompute_cost,
    recompute_units,
    sqrt_segment,
)
from lablib.calc.models import preset, preset_names
from lablib.launch.recompute.kept_tensors import (
    WAYS,
    changed_function,
    compiled,
    dropout_error,
    frozen_input,
    split_backward,
)
from lablib.toys.recompute import checkpoint
from lablib.toys.transformer import Transformer, tiny_config

plain_torch = partial(torch_checkpoint, use_reentrant=False)


def without(function, *args):
    return function(*args)


def run(way, build, seed=3):
    """Return output, gradients of inputs and parameters, and the random state after forward and after backward."""
    torch.manual_seed(seed)
    function, modules, args = build()
    output = way(function, *args)
    after_forward = torch.get_rng_state()
    outputs = output if isinstance(output, tuple) else (output,)
    sum(o.float().pow(2).sum() for o in outputs if o.requires_grad).backward()
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    parameters = [p for module in modules for p in module.parameters()]
    grads = [t.grad for t in (*tensors, *parameters)]
    return [*outputs, *grads, after_forward, torch.get_rng_state()]


def same(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b))


def dropped():
    layer = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.4), nn.GELU(), nn.Linear(7, 5))
    return layer, [layer], [torch.randn(3, 5, requires_grad=True)]


def nested():
    inner, outer = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.3)), nn.Linear(5, 5)
    return (lambda x: outer(checkpoint(inner, torch.tanh(x))), [inner, outer], [torch.randn(4, 5, requires_grad=True)])


def mixed_arguments():
    layer = nn.Linear(5, 5)

    def function(x, scale, frozen, name, y):
        assert name == "kept"
        return layer(x) * scale + frozen, (x * y).exp()

    args = [
        torch.randn(2, 5, requires_grad=True),
        1.5,
        torch.randn(2, 5),
        "kept",
        torch.randn(2, 5, requires_grad=True),
    ]
    return function, [layer], args


def twice():
    x = torch.randn(2, 5, requires_grad=True)
    return lambda a, b: a.sin() * b.cos(), [], [x, x]


def part_without_gradient():
    layer = nn.Linear(5, 5)
    return lambda x: (layer(x), x.detach().argmax(dim=-1)), [layer], [torch.randn(2, 5, requires_grad=True)]


@pytest.mark.parametrize("build", [dropped, nested, mixed_arguments, twice, part_without_gradient])
def test_the_toy_equals_torch_and_no_recomputation(build):
    mine = run(checkpoint, build)
    same(mine, run(plain_torch, build))
    same(mine, run(without, build))


def test_autocast_is_as_it_was_in_forward():
    dtypes = []

    def build():
        layer = nn.Linear(5, 7)

        def function(x):
            dtypes.append(layer(x).dtype)
            return F.gelu(layer(x)) @ torch.ones(7, 5)

        return function, [layer], [torch.randn(3, 5, requires_grad=True)]

    def inside(way):
        def within(function, *args):
            with torch.autocast("cpu", torch.bfloat16):
                return way(function, *args)  # backward runs outside of it

        return within

    mine = run(inside(checkpoint), build)
    assert dtypes == [torch.bfloat16] * 2
    same(mine, run(inside(plain_torch), build))
    same(mine, run(inside(without), build))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_whole_transformer_bit_for_bit(family):
    def build(way):
        torch.manual_seed(0)
        model = Transformer(tiny_config(family, hidden=24, num_layers=3, vocab=31), dropout=0.2, attention="plain")
        for block in model.blocks:
            block.forward = partial(way, block.forward)
        return model

    models = [build(way) for way in (checkpoint, plain_torch, without)]
    tokens = torch.randint(31, (2, 12))
    losses = []
    for model in models:
        torch.manual_seed(5)
        losses.append(model.loss(tokens))
        losses[-1].backward()
    assert losses[0] == losses[1] == losses[2]
    for mine, theirs, right in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
        assert torch.equal(mine.grad, right.grad)


def test_a_change_in_place_is_noticed():
    x = torch.ones(3, requires_grad=True)
    y = x * 1
    out = checkpoint(torch.sin, y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", list(WAYS))
def test_dropout_needs_its_random_state_back(way):
    assert dropout_error(way) == 0
    assert dropout_error(way, preserve_rng_state=False) > 0.1


def test_a_function_that_changes_is_noticed_by_numbers_and_shapes_alone():
    assert "different metadata" in changed_function("torch").error
    assert "different number of tensors" in changed_function("torch", "fewer").error
    assert changed_function("torch", "output").error == ""
    for way in WAYS:
        assert changed_function(way, "value").gradient_error > 0.01
    for way in ("torch-reentrant", "toy"):
        assert changed_function(way).error == ""
        assert changed_function(way, "fewer").gradient_error > 0.01
        assert "Mismatch in shape" in changed_function(way, "output").error


def test_backward_in_two_parts():
    whole = split_backward("torch")
    assert (whole.error, whole.replays, whole.gradient_error) == ("", 2, 0)
    assert "incompatible with .grad()" in split_backward("torch-reentrant").error
    assert "not have been used" in split_backward("toy").error


def test_a_split_backward_of_pipelining_replays_for_each_group_of_weights():
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    model, x, runs = Transformer(tiny_config("llama", num_layers=1, hidden=32, vocab=7)), torch.randn(1, 8, 32), []
    block = model.blocks[0]
    y = plain_torch(lambda x: (runs.append(x), block(x))[1], x.requires_grad_())
    _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], block.parameters())
    assert len(runs) == 1 + 1
    stage_backward_weight(block.parameters(), groups)
    assert len(runs) == 1 + 1 + len(groups)
    assert len(groups) == len(list(block.parameters()))


def test_a_frozen_input():
    for way in ("torch", "toy"):
        assert frozen_input(way).gradient_error == 0
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        assert "no graph" in frozen_input("torch-reentrant").error


def test_compile_sees_a_marked_operator_or_a_plain_layer():
    error, seen = compiled("compile outside")
    assert error == 0
    assert "tag_activation_checkpoint" in seen
    error, seen = compiled("checkpoint outside")
    assert error == 0
    assert "tag_activation_checkpoint" not in seen
    assert sum("linear" in name for name in seen) == 2


# Costs: by hand, against the paper, against FLOP formulas, and at their limits

SEED = 9
STRATEGIES = ("none", "selective", "matmuls", "full", "every:2", "sqrt", "first:2", "one-in:2", "full+offload")


def gpt(h: int, a: int, layers: int = 1):
    return tiny_config("gpt2", hidden=h, num_heads=a, ffn=4 * h, num_layers=layers, vocab=51_200)


# --- tensor by tensor -------------------------------------------------------------------------------------------------


def test_the_papers_block_tensor_by_tensor():
    """Korthikanti et al., section 4.1: 34 sbh + 5 a s² b with dropout, 32 sbh + 2 a s² b without."""
    s, b, h, a = 2048, 4, 6144, 64
    sbh, pairs = s * b * h, a * s * s * b
    tensors = {t.name: t.bytes for t in block_tensors(gpt(h, a), batch=b, seq=s, attention="plain")}
    assert tensors == {
        "input of norm 1": 2 * sbh,
        "output of norm 1": 2 * sbh,
        "q": 2 * sbh,
        "k": 2 * sbh,
        "softmax output": 2 * pairs,
        "dropout mask of the weights": pairs,
        "weights after dropout": 2 * pairs,
        "v": 2 * sbh,
        "attention output": 2 * sbh,
        "dropout mask of attention": sbh,
        "input of norm 2": 2 * sbh,
        "output of norm 2": 2 * sbh,
        "input of GELU": 8 * sbh,
        "output of GELU": 8 * sbh,
        "dropout mask of the MLP": sbh,
    }
    assert sum(tensors.values()) == 34 * sbh + 5 * pairs
    without = block_tensors(gpt(h, a), batch=b, seq=s, dropout=0.0, attention="plain")
    assert sum(t.bytes for t in without) == 32 * sbh + 2 * pairs


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("attention", ["plain", "fused"])
def test_tensors_sum_to_the_layer_and_differences_to_the_difference(family, attention):
    dice = random.Random(SEED)
    print(f"seed {SEED}")
    for _ in range(20):
        config = tiny_config(
            family,
            hidden=8 * dice.randint(1, 9),
            ffn=dice.randint(1, 50),
            norm=dice.choice(("layernorm", "rmsnorm")),
            gated_mlp=dice.random() < 0.5,
        )
        shape = {"batch": dice.randint(1, 4), "seq": dice.randint(1, 30), "bytes_per_value": dice.choice((2, 4))}
        how = shape | {"attention": attention, "dropout": dice.choice((0.0, 0.2))}
        sums = {}
        for implementation in ("paper", "toy"):
            layer = layer_activations(config, implementation=implementation, **how)
            tensors = block_tensors(config, implementation=implementation, **how)
            for kind in layer:
                assert sum(t.bytes for t in tensors if t.kind == kind) == layer[kind]
            sums[implementation] = sum(layer.values())
        found = differences(config, **how)
        assert sum(d.toy - d.paper for d in found) == sums["toy"] - sums["paper"]
        assert all(d.why and d.toy != d.paper for d in found)


def test_eager_gpt_in_16_bit_differs_by_masks_and_norm_statistics_alone():
    s, b, h, a = 64, 2, 96, 4
    found = {d.name: d.toy - d.paper for d in differences(gpt(h, a), batch=b, seq=s, attention="plain")}
    statistic = 2 * s * b
    assert found == {
        "mean of norm 1": statistic,
        "inverse deviation of norm 1": statistic,
        "mean of norm 2": statistic,
        "inverse deviation of norm 2": statistic,
        "dropout mask of the weights": a * s * s * b,
        "dropout mask of attention": s * b * h,
        "dropout mask of the MLP": s * b * h,
    }


def test_every_preset_is_listed_or_says_why_not():
    for name in preset_names():
        config = preset(name)
        if config.is_moe or config.is_mla:
            with pytest.raises(ValueError, match="summed by layer_activations"):
                block_tensors(config, batch=1, seq=8, attention="plain")
        else:
            listed = sum(t.bytes for t in block_tensors(config, batch=2, seq=8, attention="plain"))
            assert listed == sum(layer_activations(config, batch=2, seq=8, attention="plain").values())


# --- strategies -------------------------------------------------------------------------------------------------------


def test_plans_cover_every_block_once():
    for layers in (1, 2, 3, 7, 12, 13):
        for name in every_strategy(layers):
            units = recompute_units(name, layers)
            assert [unit.first + i for unit in units for i in range(unit.length)] == list(range(layers))
    assert [unit.length for unit in recompute_units("every:3", 7)] == [3, 3, 1]
    assert [unit.name for unit in recompute_units("every:3", 7)][1:] == ["blocks 3 to 5", "block 6"]
    assert [unit.kind for unit in recompute_units("first:2", 3)] == ["full", "full", "none"]
    assert [unit.kind for unit in recompute_units("first:2+matmuls", 3)] == ["full", "full", "matmuls"]
    assert [unit.kind for unit in recompute_units("one-in:2", 3)] == ["full", "none", "full"]


def test_three_layers_by_hand():
    """sbh = 1 unit of 2 bytes: 34 + 5as/h bytes a layer, 2 at each boundary."""
    s, b, h, a = 128, 2, 256, 4
    config, sbh, pairs = gpt(h, a, layers=3), s * b * h, a * s * s * b
    layer, edge = 34 * sbh + 5 * pairs, 2 * sbh
    how = {"batch": b, "seq": s, "attention": "plain"}
    ends = model_activations(config, **how)
    outside = ends["embedding"] + ends["head"]
    saved = {"none": 3 * layer, "full": 3 * edge, "every:2": 2 * edge, "every:3": edge, "selective": 102 * sbh}
    saved |= {"first:2": 2 * edge + layer, "one-in:2": 2 * edge + layer, "full+offload": 0, "offload": 0}
    # Input, q, k, v, scores, context, output, up and down: 2 + 2 (3 + 1 + 1 + 4 + 1) and 2 a s² b.
    saved["matmuls"] = 3 * (22 * sbh + 2 * pairs)
    for strategy, expected in saved.items():
        assert recompute_cost(config, strategy, **how).saved_bytes - outside == expected, strategy
    full, pairwise = (recompute_cost(config, name, **how) for name in ("full", "every:2"))
    assert full.transient_bytes == layer - edge
    assert pairwise.transient_bytes == 2 * layer - edge
    start = ends["embedding"]
    assert full.instants == [
        ("end of forward", outside + 3 * edge),
        ("backward of block 2", start + 2 * edge + layer),
        ("backward of block 1", start + edge + layer),
        ("backward of block 0", start + layer),
    ]
    assert recompute_cost(config, "full+offload", **how, bandwidth=1e9).host_seconds == 2 * 3 * edge / 1e9
    assert recompute_cost(config, "offload", **how).host_bytes == 3 * layer


def test_flops_are_those_of_the_flop_formulas():
    for name in preset_names():
        config, how = preset(name), {"batch": 1, "seq": 1024}  # longer than some windows
        full = recompute_cost(config, "full", **how, dropout=0.0)
        whole = step_flops(config, **how, recompute="full", early_stop=False)
        assert (full.extra_flops, full.hardware_flops) == (whole.recompute, whole.hardware)
        early = recompute_cost(config, "full", **how, dropout=0.0, early_stop=True)
        assert early.extra_flops == step_flops(config, **how, recompute="full").recompute
        selective = recompute_cost(config, "selective", **how)
        once = step_flops(config, **how, recompute="selective", selective_passes=1)
        assert selective.extra_flops == once.recompute
        for strategy in ("every:2", "sqrt", "full+offload"):
            assert recompute_cost(config, strategy, **how).extra_flops == full.extra_flops
        assert recompute_cost(config, "none", **how).extra_flops == 0


def test_stopping_early_saves_a_third_of_a_gpt_block():
    """Of 24 n h² FLOPs the down projection takes 8: without dropout nothing asks for its output."""
    config, how = gpt(64, 4, layers=6), {"batch": 3, "seq": 10, "dropout": 0.0, "attention": "plain"}
    n = 30
    whole = recompute_cost(config, "full", **how)
    early = recompute_cost(config, "full", **how, early_stop=True)
    assert whole.extra_flops - early.extra_flops == 6 * 8 * n * 64**2
    by_two = recompute_cost(config, "every:2", **how, early_stop=True)
    assert whole.extra_flops - by_two.extra_flops == 3 * 8 * n * 64**2
    dropped = recompute_cost(config, "full", **how | {"dropout": 0.1}, early_stop=True)
    assert dropped.extra_flops == whole.extra_flops


# --- the square root --------------------------------------------------------------------------------------------------


def test_the_square_root_is_the_optimum_for_every_length():
    for layers in range(1, 200):
        least = min(chen_cost(layers, k) for k in range(1, layers + 1))
        # Whole numbers cannot do better than 2 √L, and reach its ceiling.
        assert least == math.ceil(2 * math.sqrt(layers)) == chen_cost(layers, sqrt_segment(layers))
        assert abs(sqrt_segment(layers) - math.sqrt(layers)) <= 1 + layers**0.25


def test_the_ideal_segment_is_within_one_of_the_best_by_trial():
    for name, attention in (("llama-3-8b", "fused"), ("gpt3-175b", "plain"), ("gpt2", "plain")):
        config = preset(name)
        how = {"batch": 1, "seq": 1024, "attention": attention}
        boundary = recompute_cost(config, "full", **how).units[0].stored
        inside = sum(layer_activations(config, **how).values())
        ideal = ideal_segment(config.num_layers, boundary, inside)
        costs = {k: recompute_cost(config, f"every:{k}", **how) for k in range(1, config.num_layers + 1)}
        # The blocks' share alone: behind a large head the peak is at the end of forward.
        during = {k: max(size for when, size in cost.instants[1:]) for k, cost in costs.items()}
        best = min(during, key=during.get)
        assert best in (max(1, math.floor(ideal)), math.ceil(ideal)), (name, ideal, best)


# --- frontier and budget ----------------------------------------------------------------------------------------------


def test_the_frontier_names_what_is_beaten():
    points = {p.strategy: p for p in frontier(preset("gpt3-175b"), STRATEGIES, batch=1, seq=2048, attention="plain")}
    assert points["none"].bytes_saved == 0
    assert points["none"].dominated_by == "matmuls"  # no products run again, and less is kept
    assert points["full"].bytes_saved > points["selective"].bytes_saved > 0
    for point in points.values():
        if point.dominated_by:
            better = points[point.dominated_by]
            assert better.bytes_saved >= point.bytes_saved
            assert better.extra_flops <= point.extra_flops
    assert any(not p.dominated_by for p in points.values())


@pytest.mark.parametrize(
    ("batch", "seq", "room", "name"),
    [(2, 8192, 62.5e9, "matmuls"), (1, 32768, 62.5e9, "first:21+matmuls"), (1, 8192, 5.1e9, "every:3")],
)
def test_the_first_that_fits_is_the_cheapest_of_all(batch, seq, room, name):
    config, rate = preset("llama-3-8b"), 400e12
    size = {"batch": batch, "seq": seq, "attention": "fused", "bandwidth": 63e9}
    costs = [recompute_cost(config, name, **size) for name in every_strategy(32)]
    taken = next(cost for cost in cheapest_first(costs, flops=rate) if cost.peak_bytes <= room)
    seconds = {c.strategy: c.extra_flops / rate + 2 * c.host_bytes / 63e9 for c in costs if c.peak_bytes <= room}
    assert taken.strategy == name
    assert seconds[name] == min(seconds.values())
    assert cheapest_first(reversed(costs), flops=rate)[0].strategy == "none"
    with pytest.raises(ValueError, match="give recompute_cost a bandwidth"):
        recompute_cost(config, "offload", batch=1, seq=8, attention="fused").seconds(rate)


def test_the_largest_batch_fits_and_the_next_does_not():
    config = preset("llama-3-8b")
    for strategy in STRATEGIES:
        how = {"seq": 2048, "attention": "fused"}
        budget, fixed = 60 * 10**9, 16 * 10**9
        batch = largest_batch(budget, config, strategy, fixed_bytes=fixed, **how)
        assert recompute_cost(config, strategy, batch=batch, **how).peak_bytes <= budget - fixed
        assert recompute_cost(config, strategy, batch=batch + 1, **how).peak_bytes > budget - fixed
    assert largest_batch(10**6, config, "full", seq=2048) == 0
    for limit in (0, 1, 2, 3, 7, 8, 100):
        assert largest_that_fits(lambda n, limit=limit: n <= limit) == limit


@pytest.mark.parametrize("seed", range(4))
def test_the_fewest_blocks_that_fit_are_found_by_trying_all(seed):
    dice = random.Random(seed)
    for _ in range(200):
        layers, x = dice.randint(1, 40), dice.randint(1, 9)
        block = x + dice.randint(1, 60)
        room = dice.randint(0, layers * block + 5)
        peaks = [layers * block]
        peaks += [max(n * x + (layers - n) * block, (n - 1) * x + block) for n in range(1, layers + 1)]
        assert first_blocks(layers, x, block, room) == next((n for n, peak in enumerate(peaks) if peak <= room), None)


def test_the_width_that_hides_is_where_moving_takes_as_long_as_computing():
    h = hiding_width(140e12, 31.5e9)
    assert 34 * h / 31.5e9 == pytest.approx(24 * h**2 / 140e12)
    assert hiding_width(140e12, 31.5e9, kept=2) == pytest.approx(h / 17)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("some", "'some' is not known; use one of none"),
        ("every", "needs a number from 1 to the 4 layers: every:2"),
        ("every:0", "needs a number"),
        ("first:5", "from 1 to the 4 layers"),
        ("full:2", "'full:2' is not known"),
        ("every:2+matmuls", "needs a number"),
        ("first:2+full", "needs a number"),
    ],
)
def test_unknown_strategies_are_named(strategy, words):
    with pytest.raises(ValueError, match=words):
        recompute_cost(tiny_config("gpt2"), strategy, batch=1, seq=8, attention="plain")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda gpt: recompute_cost(gpt, "full", batch=1, seq=8, bandwidth=0, attention="plain"), "bandwidth=0"),
        (lambda gpt: largest_batch(-1, gpt, "full", seq=8, attention="plain"), "must not be negative"),
        (lambda _: recompute_cost(preset("mixtral-8x7b"), "matmuls", batch=1, seq=8, attention="plain"), "has experts"),
        (lambda _: chen_cost(4, 5), "k=5"),
        (lambda _: ideal_segment(4, 0, 1), "must be positive"),
        (lambda _: first_blocks(4, 3, 3, 10), "boundary=3"),
        (lambda _: hiding_width(1e12, 0), "bandwidth=0"),
        (lambda _: recompute_units("full", 0), "num_layers=0"),
    ],
)
def test_other_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call(tiny_config("gpt2"))
