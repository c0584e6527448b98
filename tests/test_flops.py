"""FLOPs: against PyTorch's own counter on real models, and against the published tables."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from lablib.calc import flops as scaling_laws
from lablib.calc.flops import forward_flops, hfu, mfu, step_flops
from lablib.calc.models import ModelConfig, from_hf, preset
from lablib.calc.params import count_params
from tests.test_hf_config import SMALL

A100 = 312e12
DAY = 86400


def gpt(num_layers, hidden, num_heads, *, vocab=51200, seq=2048):
    return ModelConfig(
        family="gpt2", num_layers=num_layers, hidden=hidden, num_heads=num_heads, ffn=4 * hidden, vocab=vocab,
        max_positions=seq, learned_positions=True, tied=True, norm="layernorm", gated_mlp=False,
        qkv_bias=True, attn_out_bias=True, mlp_bias=True,
    )  # fmt: skip


BATCH, SEQ = 3, 16


def build(model_type):
    fields = SMALL[model_type] | {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **fields)
    # "eager" attention multiplies all s² pairs, which is what the formula counts; "eager" experts are plain matmuls,
    # which PyTorch's counter knows, and not one grouped one.
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    return model.train(), from_hf({"model_type": model_type, **fields})


def counted(model, *, backward):
    tokens = torch.randint(97, (BATCH, SEQ))
    with FlopCounterMode(display=False) as counter:
        logits = model(tokens, use_cache=False).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.drawn
@pytest.mark.parametrize("model_type", SMALL)
def test_forward_and_backward_agree_with_pytorchs_counter(model_type):
    model, config = build(model_type)
    expected = step_flops(config, batch=BATCH, seq=SEQ)
    assert counted(model, backward=False) == expected.forward
    assert counted(model, backward=True) == expected.model
    assert expected.backward == 2 * expected.forward


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma2", "starcoder2", "olmo2", "gpt_neox", "cohere"])
def test_full_recomputation_runs_every_layer_once_more_and_not_the_head(model_type):
    model, config = build(model_type)
    for layer in model.transformer.h if model_type == "gpt2" else model.base_model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    expected = step_flops(config, batch=BATCH, seq=SEQ, recompute="full", early_stop=False)
    assert (expected.early_stop, step_flops(config, batch=BATCH, seq=SEQ).early_stop) == (False, True)
    # PyTorch stops recomputing once it has what backward needs; GPT-2 has dropout behind its down projection, two have a norm.
    stopped = step_flops(config, batch=BATCH, seq=SEQ, recompute="full", dropout=model_type == "gpt2")
    assert counted(model, backward=True) == stopped.hardware
    assert (stopped.hardware < expected.hardware) == (model_type not in ("gpt2", "gemma2", "olmo2"))
    # The papers count the whole forward pass.
    with set_checkpoint_early_stop(False):
        assert counted(model, backward=True) == expected.hardware
    assert expected.model == step_flops(config, batch=BATCH, seq=SEQ).model


def test_a_window_cuts_the_scores():
    """A query meets at most w keys; where a mask leaves the first ones fewer, only `causal` counts that."""
    config, s, w = preset("mistral-7b-v0.1"), 32768, 4096
    full = replace(config, window=0, window_layers=())
    met = [min(i + 1, w) for i in range(s)]  # keys of each query, counted one by one
    for causal, share in ((False, w / s), (True, sum(met) / (s * (s + 1) // 2))):
        how = {"batch": 1, "seq": s, "causal": causal}
        cut, whole = forward_flops(config, **how), forward_flops(full, **how)
        assert cut["scores"] == pytest.approx(share * whole["scores"], rel=1e-12)
        assert {k: v for k, v in cut.items() if k != "scores"} == {k: v for k, v in whole.items() if k != "scores"}
    short = {"batch": 1, "seq": w}
    assert forward_flops(config, **short) == forward_flops(full, **short)
    # Every other layer of Gemma 2 has a window.
    gemma, s = preset("gemma-2-2b"), 8192
    whole = forward_flops(replace(gemma, window=0, window_layers=()), batch=1, seq=s)["scores"]
    assert forward_flops(gemma, batch=1, seq=s)["scores"] == whole * 3 // 4


def test_the_small_case_by_hand():
    # One token, h = 2, one head, MLP of 8, vocabulary of 3: 4 h² + 8 h² + 3 h = 54 weights multiply, 2 FLOPs each;
    # one query meets one key: 2 h FLOPs, and its value: 2 h more.
    config = gpt(1, 2, 1, vocab=3, seq=1)
    assert forward_flops(config, batch=1, seq=1) == {"attention": 32, "scores": 8, "mlp": 64, "head": 12}
    step = step_flops(config, batch=1, seq=1)
    assert (step.forward, step.backward, step.model, step.hardware) == (116, 232, 348, 348)
    assert step.by_component == {"attention": 96, "scores": 24, "mlp": 192, "head": 36}


@pytest.mark.parametrize(
    ("layers", "h", "heads", "batch"), [(24, 2304, 24, 512), (48, 6144, 64, 4), (96, 12288, 96, 64)]
)
def test_the_papers_closed_forms(layers, h, heads, batch):
    config, s, vocab = gpt(layers, h, heads), 2048, 51200
    how = {"batch": batch, "seq": s, "early_stop": False}
    none, selective, full = (step_flops(config, recompute=r, **how) for r in ("none", "selective", "full"))
    base = batch * s * layers * h**2
    # Exact integers on the left; the right side is floating point.
    assert none.model == pytest.approx(72 * base * (1 + s / (6 * h) + vocab / (12 * h * layers)), rel=1e-12)
    assert selective.hardware == pytest.approx(72 * base * (1 + s / (3 * h) + vocab / (12 * h * layers)), rel=1e-12)
    assert full.hardware == pytest.approx(96 * base * (1 + s / (6 * h) + vocab / (16 * h * layers)), rel=1e-12)
    once = step_flops(config, batch=batch, seq=s, recompute="selective", selective_passes=1)
    assert once.recompute == 4 * batch * s**2 * h * layers


# Narayanan et al. 2021, table 1: parameters in billions, heads, h, layers, GPUs, batch, TFLOP/s a GPU, percent of
# peak, PFLOP/s in all, and MFU computed from them: the table's own percentage counts recomputation.
NARAYANAN = [
    (1.7, 24, 2304, 24, 32, 512, 137, 44, 4.4, 33.5),
    (7.5, 32, 4096, 36, 128, 512, 142, 46, 18.2, 34.4),
    (39.1, 64, 8192, 48, 512, 1536, 138, 44, 70.8, 33.3),
    (76.1, 80, 10240, 60, 1024, 1792, 140, 45, 143.8, 33.7),
    (310.1, 128, 16384, 96, 1920, 2160, 155, 50, 297.4, 37.3),
    (529.6, 128, 20480, 105, 2520, 2520, 163, 52, 410.2, 39.2),
]


@pytest.mark.parametrize(
    ("billions", "heads", "h", "layers", "gpus", "batch", "teraflops", "percent", "petaflops", "mfu_percent"), NARAYANAN
)
def test_narayanan_table_1(billions, heads, h, layers, gpus, batch, teraflops, percent, petaflops, mfu_percent):
    config = gpt(layers, h, heads)
    # Printed with one decimal; 1.652 is printed as 1.7.
    assert count_params(config).total / 1e9 == pytest.approx(billions, abs=0.05)
    step = step_flops(config, batch=batch, seq=2048, recompute="full", early_stop=False)
    seconds = step.hardware / (gpus * teraflops * 1e12)
    # Printed in whole percent, and TFLOP/s were rounded before: half a point and 0.2 of one.
    assert 100 * hfu(step, seconds=seconds, devices=gpus, peak=A100) == pytest.approx(percent, abs=0.7)
    assert 100 * mfu(step, seconds=seconds, devices=gpus, peak=A100) == pytest.approx(mfu_percent, abs=0.06)
    assert step.hardware / seconds / 1e15 == pytest.approx(petaflops, rel=0.004)


# Korthikanti et al. 2022, tables 3 and 5: layers, h, heads, batch, GPUs, seconds, MFU, HFU in percent.
@pytest.mark.parametrize(
    ("layers", "h", "heads", "batch", "gpus", "seconds", "mfu_percent", "hfu_percent"),
    [(48, 6144, 64, 4, 8, 1.10, 41.5, 43.7), (96, 12288, 96, 64, 64, 13.75, 51.4, 52.8)],
)
def test_korthikanti_mfu_and_hfu(layers, h, heads, batch, gpus, seconds, mfu_percent, hfu_percent):
    step = step_flops(gpt(layers, h, heads), batch=batch, seq=2048, recompute="selective")
    # Times are printed with three digits: 0.5 percent of 44 is 0.2 points.
    assert 100 * mfu(step, seconds=seconds, devices=gpus, peak=A100) == pytest.approx(mfu_percent, abs=0.2)
    assert 100 * hfu(step, seconds=seconds, devices=gpus, peak=A100) == pytest.approx(hfu_percent, abs=0.2)


def test_palm_mfu_with_and_without_attention():
    # PaLM 540B on 6144 TPU v4 of 275 TFLOP/s at 238.3K tokens/s: 46.2 percent, 45.7 without attention.
    per_token = 6 * 540.35e9 + 12 * 118 * 48 * 256 * 2048
    plain = 6 * 540.35e9
    rate = {"seconds": 1 / 238.3e3, "devices": 6144, "peak": 275e12}
    assert 100 * mfu(per_token, **rate) == pytest.approx(46.2, abs=0.1)
    assert 100 * mfu(plain, **rate) == pytest.approx(45.7, abs=0.1)
    # MT-NLG 530B, GPUs 2240, 65.43K tokens/s: 29.7 and 30.2, which the paper truncates.
    mt_nlg = {"seconds": 1 / 65.43e3, "devices": 2240, "peak": A100}
    assert 100 * mfu(6 * 530e9, **mt_nlg) == pytest.approx(29.7, abs=0.1)


def test_causal_counts_the_pairs_that_a_mask_keeps():
    config = gpt(2, 8, 2, seq=64)
    for seq in (1, 7, 64):
        all_pairs, half = (forward_flops(config, batch=3, seq=seq, causal=c)["scores"] for c in (False, True))
        assert half * 2 * seq == all_pairs * (seq + 1)


def test_training_time_of_the_papers():
    # Narayanan et al., section 5: 175B, 300B tokens, 1024 A100s at 140 TFLOP/s, full recomputation: 34 days.
    run = scaling_laws.training_flops(175e9, 300e9, recompute="full")
    assert scaling_laws.training_time(run, devices=1024, peak=140e12) / DAY == pytest.approx(34, abs=0.5)
    # 1T parameters, 450B tokens, 3072 at 163: 84 days (83.2 for exactly 1e12).
    run = scaling_laws.training_flops(1.008e12, 450e9, recompute="full")
    assert scaling_laws.training_time(run, devices=3072, peak=163e12) / DAY == pytest.approx(84, abs=0.5)
    # A 70B model, 15T tokens, 1024 H100s at half of the peak: 144 days.
    run = scaling_laws.training_flops(70e9, 15e12)
    days = scaling_laws.training_time(run, devices=1024, peak=989.4e12, utilization=0.5) / DAY
    assert days == pytest.approx(143.9, abs=0.2)
    # Llama 3 405B: 3.8e25 FLOPs.
    assert scaling_laws.training_flops(405e9, 15.6e12) == pytest.approx(3.8e25, rel=0.005)


# Hoffmann et al. 2022, table 3: parameters, FLOPs, tokens.
@pytest.mark.parametrize(
    ("params", "budget", "tokens"), [(400e6, 1.92e19, 8.0e9), (1e9, 1.21e20, 20.2e9), (10e9, 1.23e22, 205.1e9)]
)
def test_chinchilla_table_3(params, budget, tokens):
    assert scaling_laws.training_flops(params, tokens) == pytest.approx(budget, rel=0.01)
    # 20 tokens a parameter is the round number: 20.0 to 20.5 in these rows.
    assert scaling_laws.chinchilla_tokens(params) == pytest.approx(tokens, rel=0.026)
    assert scaling_laws.chinchilla_params(budget) == pytest.approx(params, rel=0.015)


def test_deepseek_v3_cost():
    # 37B active parameters on 14.8T tokens in 2.664M GPU-hours at $2: 343 TFLOP/s, 34.6 percent of bf16's peak.
    run = scaling_laws.training_flops(37e9, 14.8e12)
    hours = scaling_laws.gpu_hours(run, peak=989.4e12, utilization=0.3463)
    assert hours == pytest.approx(2.664e6, rel=0.002)
    cost = scaling_laws.training_cost(run, peak=989.4e12, utilization=0.3463, dollars_per_hour=2)
    assert cost == pytest.approx(2 * hours)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: step_flops(preset("gpt2"), batch=0, seq=8), "batch=0 must be"),
        (lambda: step_flops(preset("gpt2"), batch=1, seq=2048), "seq=2048 is longer than the 1024 learned positions"),
        (lambda: mfu(1e15, seconds=0, peak=1e12), "seconds=0 must be"),
        (lambda: mfu(1e15, seconds=1, peak=float("nan")), "peak=nan must be"),
        (lambda: scaling_laws.training_flops(7e9, 1e9, recompute="selective"), "'none' or 'full'"),
        (lambda: scaling_laws.chinchilla_tokens("7B"), "params='7B' must be"),
    ],
)
def test_bad_input_names_the_factor(call, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        call()
