"""Counts of tensor parallelism: against the papers' closed forms, and as properties of random sizes."""

import math
import random

import pytest
import torch
import torch.distributed as dist

from lablib.calc.memory.activations import paper_activations, toy_activations
from lablib.calc.models import preset
from lablib.calc.parallel import (
    VARIANTS,
    layer_collectives,
    layer_elements,
    layer_times,
    rank_params,
    split_heads,
    tp_degrees,
)
from lablib.calc.params import count_params
from lablib.launch.measure import saved_activations
from lablib.launch.ranks import run_ranks
from lablib.toys.tensor_parallel import parallelize
from lablib.toys.transformer import Transformer, tiny_config


def test_llama_70b_has_one_key_head_a_rank_at_8_and_shares_it_at_16():
    assert tp_degrees(preset("llama-3-70b")) == [1, 2, 4, 8]
    assert tp_degrees(preset("llama-3-70b"), replicate_kv=True) == [1, 2, 4, 8, 16, 32, 64]
    eight, sixteen = split_heads(64, 8, 8), split_heads(64, 8, 16)
    assert [len(rank.keys) for rank in eight] == [1] * 8
    assert {rank.copies for rank in eight} == {1}
    assert [rank.keys[0] for rank in sixteen] == [r // 2 for r in range(16)]
    assert {rank.copies for rank in sixteen} == {2}


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ((12, 6, 4), "tp=4 and num_kv_heads=6 do not divide each other; use 1, 2, 3, 6 or 12"),
        ((12, 5, 1), "num_kv_heads=5 does not divide num_heads=12"),
        ((12, 6, 24), "tp=24 does not divide num_heads=12"),
        ((12, 6, 0), "tp=0 must be a whole number"),
    ],
)
def test_a_split_that_tears_a_group_is_named(sizes, sentence):
    with pytest.raises(ValueError, match=sentence):
        split_heads(*sizes)


def test_every_query_is_once_somewhere_with_its_key_and_no_key_is_there_for_nothing():
    dice = random.Random(3)
    for _ in range(300):
        kv, group = dice.randint(1, 12), dice.randint(1, 12)
        degrees = [n for n in range(1, kv * group + 1) if (kv * group) % n == 0]
        tp = dice.choice([n for n in degrees if kv % n == 0 or n % kv == 0])
        ranks = split_heads(kv * group, kv, tp)
        assert [head for rank in ranks for head in rank.queries] == list(range(kv * group))
        for rank in ranks:
            assert {head // group for head in rank.queries} == set(rank.keys)
        held = [head for rank in ranks for head in rank.keys]
        assert all(held.count(head) == ranks[0].copies for head in range(kv))


def test_four_all_reduces_a_layer_and_the_volume_of_narayanan():
    assert layer_collectives() == {"forward": {"all_reduce": 2}, "backward": {"all_reduce": 2}}
    sizes = {"batch": 3, "seq": 5, "hidden": 7}
    bsh = 3 * 5 * 7
    for t in (1, 2, 4, 8):
        for variant, factor in ((False, 8), ("keep", 8), ("shard", 10)):
            sent = layer_elements(**sizes, tp=t, sequence_parallel=variant)
            assert sent == pytest.approx(factor * bsh * (t - 1) / t)


@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_activations_are_those_of_the_paper(t):
    b, s = 1, 2048
    for name in ("gpt3-175b", "gpt3-6.7b"):
        config = preset(name)
        sbh, a, h = s * b * config.hidden, config.num_heads, config.hidden
        scores = 5 * a * s / (h * t)
        forms = {False: 10 + 24 / t, "keep": 4 + 30 / t, "shard": 34 / t}
        assert set(forms) == set(VARIANTS)
        for variant, factor in forms.items():
            kept = paper_activations(config, batch=b, seq=s, tp=t, sequence_parallel=variant, attention="plain")
            assert kept == pytest.approx(sbh * (factor + scores))


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "llama-2-7b"])
def test_one_rank_holds_everything_and_two_hold_half_and_the_replicated_part(name):
    config = preset(name)
    assert rank_params(config, 1) == count_params(config).total
    norms = (2 * config.num_layers + 1) * config.hidden * (2 if config.norm == "layernorm" else 1)
    biases = config.num_layers * config.hidden * (config.attn_out_bias + config.mlp_bias)
    table = config.max_positions * config.hidden * config.learned_positions
    padding = -config.vocab % 2 * config.hidden
    alone, half = rank_params(config, 1), rank_params(config, 2)
    assert 2 * half == alone + norms + biases + table + padding


def test_the_share_of_communication_does_not_depend_on_the_batch_and_grows_with_the_degree():
    config = preset("gpt3-175b")
    how = {"flops": 140e12, "bandwidth": 300e9}
    one, many = (layer_times(config, batch=b, seq=2048, tp=8, **how) for b in (1, 16))
    assert many.share == pytest.approx(one.share)
    shares = [layer_times(config, batch=1, seq=2048, tp=t, **how).share for t in (1, 2, 4, 8, 16)]
    assert shares[0] == 0
    assert shares == sorted(shares)
    # cF(t-1)/(9hW), but for the scores: their FLOPs are the s/(6h) of 72bsh^2 (1 + s/(6h)).
    closed = 2 * 140e12 * 7 / (9 * config.hidden * 300e9) / (1 + 2048 / (6 * config.hidden))
    assert one.communication / one.compute == pytest.approx(closed, rel=1e-9)


def test_the_backward_gather_costs_a_quarter_more():
    config = preset("llama-3-8b")
    how = {"batch": 1, "seq": 4096, "tp": 8, "flops": 4e14, "bandwidth": 4.5e11}
    keep, shard = (layer_times(config, **how, sequence_parallel=v) for v in ("keep", "shard"))
    assert math.isclose(shard.communication / keep.communication, 10 / 8)
    assert layer_times(config, **how).communication == keep.communication


def _measured(config, batch, seq):
    kept = {}
    for variant in VARIANTS:
        torch.manual_seed(0)
        model = parallelize(Transformer(config), dist.group.WORLD, sequence_parallel=variant)
        tokens = torch.randint(config.vocab, (batch, seq + 1))
        with saved_activations(model) as log:
            model.loss(tokens)
        kept[variant] = log.total
    return kept


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_toy_keeps_what_is_counted_byte_for_byte(tp):
    batch, seq = 3, 24
    configs = [
        tiny_config("llama", num_layers=2, hidden=32, num_heads=8, num_kv_heads=2, ffn=45, vocab=61),
        tiny_config("gpt2", num_layers=1, hidden=40, num_heads=4, vocab=50, max_positions=32),
    ]
    for config in configs:
        for rank, kept in enumerate(run_ranks(_measured, tp, config, batch, seq)):
            for variant in VARIANTS:
                counted = toy_activations(config, batch=batch, seq=seq, tp=tp, sequence_parallel=variant, rank=rank)
                assert kept[variant] == sum(counted.values()), (config.name, rank, variant)
