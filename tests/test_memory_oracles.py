"""The oracles of the memory calculator are held to other witnesses: PyTorch's own trackers, hooks, papers, real tensors."""

from __future__ import annotations

import gc
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from lablib.calc.models import ModelConfig
from lablib.calc.torch_versions import release
from lablib.launch.fsdp import forecast
from lablib.launch.measure import LiveBytes
from lablib.launch.torch_private import FakeStore, MemTracker
from lablib.proof.cases import Case, case_model
from lablib.proof.oracles import build_model, make_optimizer, measure_case
from lablib.proof.oracles.measurement import one_forward_one_backward
from lablib.proof.oracles.paper import PaperTransformer
from lablib.toys.transformer import Transformer
from tests import torch_schedules

GPT = replace(case_model("gpt2", "tiny"), ffn=4 * 48)  # as the formulas of the paper have it


@pytest.fixture
def group():
    """Return a function that makes tensor-parallel groups of rank 0 of a pretended run of 4."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield lambda tp: dist.new_group(list(range(tp)))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "case",
    [
        Case(family="gpt2", micro_batch=3, attention="plain", step="foreach"),
        Case(recipe="mixed-bf16", recompute="full", optimizer="sgd-momentum"),
        Case(recipe="fsdp2-mixed", sharding="fsdp2", dp=4, step="fused"),
        Case(optimizer="sgd", step="fused"),
        Case(implementation="paper", family="mixtral", tensor="2+sp", seq=64, recompute="selective"),
        Case(implementation="hf", family="qwen2", recipe="autocast-bf16"),
        Case(family="gpt2", recipe="pure-bf16", accumulate=3, recompute="selective"),
    ],
    ids=lambda case: case.name,
)
def test_fake_tensors_hold_what_real_ones_hold(case: Case) -> None:
    real, fake = measure_case(case, real=True), measure_case(case, real=False)
    assert real.states == fake.states
    assert real.groups == fake.groups
    # Transformers looks at a few values that fake tensors do not have, and makes some numbers less of them.
    allowed = 64 if case.implementation == "hf" else 0
    assert abs(real.saved - fake.saved) <= allowed
    if case.shards and case.step == "fused" and release(torch.__version__) == "2.11":
        # There a DTensor asks for the shapes of a fused step anew, in the very mode that plays the run.
        assert fake.peak_at == "optimizer step"
        assert fake.peak > real.peak
        return
    assert abs(real.peak - fake.peak) <= allowed
    assert real.peak_at == fake.peak_at


def test_the_peak_is_that_of_pytorch_s_tracker_without_ours() -> None:
    """MemTracker as it comes, over the same step."""
    case = Case(family="gpt2", micro_batch=2, recipe="pure-bf16")
    subject = build_model(case)
    optimizer = make_optimizer(case, subject.model)
    for parameter in subject.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    tokens = subject.tokens()
    tracker = MemTracker()
    tracker.track_external(subject.model, optimizer, tokens)
    with tracker:
        subject.loss(subject.model, tokens).backward()
        optimizer.step()
    (kinds,) = tracker.get_tracker_snapshot("peak").values()
    found = measure_case(case)
    # We hold the loss, one bf16 number, while backward runs.
    assert 0 <= found.peak - kinds["Total"] <= 2


def test_a_sharded_peak_is_that_of_two_steps_in_pytorch_s_tracker() -> None:
    """Optimizer states that exist already come to the same as a first step that makes them."""
    case = Case(sharding="fsdp2", dp=4, recipe="fsdp2-mixed")
    two_steps = forecast(lambda: Transformer(case.settings()["model"]), world_size=4, batch=1, seq=64, precision="bf16")
    assert abs(measure_case(case).peak - two_steps.total) <= 4


def test_the_peak_is_that_of_our_own_profiler() -> None:
    """LiveBytes shares nothing with MemTracker but the idea; it counts what is made, and not what was there."""
    case = Case(family="llama", micro_batch=2)
    found = measure_case(case)
    subject = build_model(case)
    tokens = subject.tokens()
    gc.collect()
    with LiveBytes() as live:
        subject.loss(subject.model, tokens).backward()
    made = {name: sum(kinds.values()) for name, kinds in found.moments.items() if name != "optimizer step"}
    assert live.peak == pytest.approx(max(made.values()) - made["states"], abs=8)


@pytest.mark.parametrize("implementation", ["toy", "hf"])
def test_hooks_and_tracker_count_the_same(implementation: str) -> None:
    """Autograd's hooks see what is saved; the tracker sees what is alive. With nothing else alive they agree."""
    found = measure_case(Case(implementation=implementation, family="qwen2", micro_batch=2))
    assert sum(found.groups.values()) == pytest.approx(found.saved, abs=16 if implementation == "hf" else 0)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_order_of_a_stage_is_pytorch_s(stages: int) -> None:
    if reason := torch_schedules.why_not():
        assert not torch_schedules.is_proven(), reason
        pytest.skip(reason)
    for micro_batches in (stages, stages + 1, 2 * stages):
        order = torch_schedules.order("Schedule1F1B", stages, micro_batches)[0]
        # An action is a stage, what it does, and the micro-batch: 0F3.
        assert [action[1] for action in order] == one_forward_one_backward(stages, micro_batches)


def test_a_stage_is_as_full_as_its_micro_batches() -> None:
    one, two, four = (measure_case(Case(family="gpt2", pp=pp)) for pp in (1, 2, 4))
    per_block = one.moments["forward of block 1"]["activations"] - one.moments["forward of block 0"]["activations"]
    ends = two.inputs + two.outputs + 2 * 64 * 8  # tokens, streams, and the indices of the positions
    assert two.saved == 2 * 2 * per_block + ends  # 2 blocks, 2 micro-batches in flight
    assert four.saved - 4 * per_block == 2 * ends  # 1 block, 4 micro-batches


@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_gradients_that_add_up_are_there_in_the_next_forward(sharding: str) -> None:
    how = {"recipe": "fp32", "sharding": sharding, "dp": 4 if sharding == "fsdp2" else 1}
    one, three = measure_case(Case(**how)), measure_case(Case(**how, accumulate=3))
    assert three.states == one.states
    assert three.saved == one.saved
    for moment in ("forward of the embedding", "forward of block 2", "loss"):
        assert three.totals[moment] - one.totals[moment] == one.states["gradients"]
    # A gradient is stored until it has been added; behind the last one there are as many as without.
    assert three.totals["optimizer step"] == one.totals["optimizer step"]


def test_ddp_adds_gradients_up_before_it_sends_them() -> None:
    case = Case(sharding="ddp", dp=4, accumulate=3, optimizer="sgd")
    found = measure_case(case)
    assert found.states["gradients"] == found.states["weights"]
    # One reduction a step: its buckets hold every gradient once.
    assert found.moments["optimizer step"]["gradient buckets"] == found.states["gradients"]


def formula(config: ModelConfig, s: int, b: int, t: int, variant: str) -> float:
    """Korthikanti et al. (arXiv 2205.05198), equations 1, 2 and 4 and table 2: bytes of one layer in 16 bits."""
    h, a = config.hidden, config.num_heads
    scores = 5 * a * s / h
    return {
        "none": s * b * h * (34 + scores),
        "tp": s * b * h * (10 + 24 / t + scores / t),
        "tp+sp": s * b * h * (34 + scores) / t,
        "tp+sp+selective": s * b * h * 34 / t,
        "full": 2 * s * b * h,
    }[variant]


@pytest.mark.parametrize("variant", ["none", "tp", "tp+sp", "tp+sp+selective", "full"])
def test_the_paper_s_kernels_keep_what_the_paper_says(variant: str, group) -> None:
    draw = random.Random(variant)
    t = 1 if variant in ("none", "full") else draw.choice((2, 4))
    b, s = draw.randint(1, 3), 4 * draw.randint(3, 9)
    how = {
        "sequence_parallel": "sp" in variant,
        "recompute": {"tp+sp+selective": "selective", "full": "full"}.get(variant, "none"),
        "attention": "plain",
        "dropout": True,
    }
    kept = []
    for layers in (1, 3):
        model = PaperTransformer(GPT, group(t), blocks=layers, **how).bfloat16()
        tokens = torch.zeros(b, s + 1, dtype=torch.int64)
        with LiveBytes() as live:
            loss = model.loss(tokens)
            kept.append(live.live)
        loss.backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    assert (kept[1] - kept[0]) / 2 == formula(GPT, s, b, t, variant), f"b={b} s={s} t={t}"


def test_buckets_of_ddp_are_a_second_copy_of_the_gradients() -> None:
    alone, replicated = (measure_case(Case(family="gpt2", sharding=s, dp=dp)) for s, dp in (("none", 1), ("ddp", 4)))
    assert replicated.moments["loss"]["gradient buckets"] == replicated.states["gradients"]
    assert replicated.saved == alone.saved
    assert replicated.peak == alone.peak + alone.states["gradients"]


def test_bad_input(group) -> None:
    with pytest.raises(ValueError, match="a process group is there already"):
        measure_case(Case())
    with pytest.raises(ValueError, match="implementation='paper' needs a tensor-parallel group"):
        build_model(replace(Case(), implementation="paper"))
