"""Memory under context parallelism: the formulas are held to PyTorch's ring, an exchange, and the ring of this course."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from lablib.calc.memory import run_config, training_memory, unproven
from lablib.calc.memory.activations import layer_activations
from lablib.calc.memory.tape import own_temporaries, ring_temporaries
from lablib.calc.memory.timeline import explain_instant, memory_timeline
from lablib.calc.models import preset
from lablib.launch.measure import LiveBytes
from lablib.launch.torch_private import FakeTensorMode, set_rotate_method
from lablib.toys.context_parallel import ring_attention
from tests.evidence.cases import Case, case_model
from tests.evidence.oracles import measure_case
from tests.evidence.oracles.context import METHODS, torch_ring, waits_without_copies
from tests.evidence.oracles.models import pretended
from tests.evidence.verdict import compare, predict

# (query heads, key heads, tokens of a rank, head width, sequences): grouped or not, wide or long.
SHAPES = [(8, 2, 64, 16, 1), (4, 4, 96, 24, 3), (12, 6, 48, 40, 1)]
DTYPES = [torch.float32, torch.bfloat16]
HF = {"implementation": "hf", "recipe": "fsdp2-mixed", "sharding": "fsdp2", "zero": 3}


def parts(heads: int, kv_heads: int, tokens: int, width: int, batch: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k and v as projections leave them: tokens one after the other."""
    made = [torch.zeros(batch, tokens, n, width, dtype=dtype) for n in (heads, kv_heads, kv_heads)]
    return [x.transpose(1, 2).requires_grad_() for x in made]


def held(attend, tensors: list[torch.Tensor]) -> tuple[int, int]:
    """The bytes beside inputs at the fullest instant of forward, and of backward."""
    with LiveBytes() as forward:
        out = attend(*tensors)
    kept, grad = forward.live, torch.zeros_like(out)
    with LiveBytes() as backward:
        out.backward(grad)
    return forward.peak - kept, backward.peak - sum(x.nbytes for x in tensors)


@pytest.mark.drawn
@pytest.mark.parametrize("way", METHODS)
@pytest.mark.parametrize("cp", [2, 3, 4, 8])
def test_what_pytorch_s_ring_holds_while_it_runs(way: str, cp: int) -> None:
    for (heads, kv_heads, tokens, width, batch), dtype in ((shape, dtype) for shape in SHAPES for dtype in DTYPES):
        rows = batch * heads * tokens
        with pretended(0, cp), FakeTensorMode(), waits_without_copies():
            set_rotate_method(METHODS[way])
            tensors = parts(heads, kv_heads, tokens, width, batch, dtype)
            found = held(lambda *qkv: torch_ring(*qkv, dist.group.WORLD), tensors)
        assert found == ring_temporaries(rows * width, rows * width * kv_heads // heads, rows, dtype.itemsize, cp, way)


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_what_the_ring_of_this_course_holds_while_it_runs(cp: int) -> None:
    for (heads, kv_heads, tokens, width, batch), dtype in ((shape, dtype) for shape in SHAPES for dtype in DTYPES):
        rows = batch * heads * tokens
        with pretended(0, cp):
            tensors = parts(heads, kv_heads, tokens, width, batch, dtype)
            found = held(lambda *qkv: ring_attention(*qkv, dist.group.WORLD), tensors)
        sizes = rows * width, rows * width * kv_heads // heads, rows, batch * heads, tokens, dtype.itemsize
        assert found == own_temporaries(*sizes, cp)


@pytest.mark.drawn
@pytest.mark.parametrize(
    "case",
    [
        Case(implementation="hf", seq=128, cp=4, sharding="ddp", recompute="full", recipe="pure-bf16"),
        Case(implementation="hf", seq=128, cp=2, cp_way="gathered", sharding="fsdp2", micro_batch=3),
        Case(implementation="hf", seq=128, cp=4, cp_way="ulysses", sharding="fsdp2", dp=2, recipe="fsdp2-mixed"),
        Case(seq=128, cp=4, sharding="fsdp2", recompute="selective", recipe="pure-bf16"),
        Case(seq=128, cp=2, sharding="fsdp2", family="gpt2", recompute="full"),
    ],
    ids=lambda case: case.name,
)
def test_the_first_rank_is_counted(case: Case) -> None:
    found = measure_case(case)
    measured = {"states": found.states, "saved": found.saved, "groups": {}}
    measured |= {"peak": found.peak, "peak_terms": found.peak_terms}
    numbers = compare(predict(case, found.peak_at, torch.__version__), measured)
    assert all(number.holds for number in numbers)
    # Beside bookkeeping: 4 bytes a trained tensor, the loss and its gradient, and of this course's mean two numbers more.
    tensors = 68  # of GPT-2, which has most
    assert all(abs(n.predicted - n.measured) <= 4 * tensors + 64 for n in numbers if not n.what.startswith("states"))


def test_a_rank_keeps_what_it_would_keep_of_its_own_tokens_and_its_output_twice() -> None:
    config, how = preset("llama-3-8b"), {"batch": 2, "implementation": "hf"}
    alone = layer_activations(config, seq=1024, **how)
    for way in ("ring", "gathered", "ulysses"):
        split = layer_activations(config, seq=8192, cp=8, cp_way=way, **how)
        again = {kind: size - alone[kind] for kind, size in split.items() if size != alone[kind]}
        assert again == {"attention": 2 * 1024 * config.q_width * 2}
    full = {"recompute": "full"}
    assert layer_activations(config, seq=8192, cp=8, **how, **full) == layer_activations(
        config, seq=1024, **how, **full
    )


def test_this_course_keeps_an_output_in_fp32_beside_the_one_in_16_bits() -> None:
    config = case_model("llama", "tiny")
    for value, beside in ((2, 4), (4, 0)):
        how = {"batch": 1, "implementation": "toy", "bytes_per_value": value}
        alone, split = (layer_activations(config, seq=64 * cp, cp=cp, **how)["attention"] for cp in (1, 4))
        assert split - alone == beside * 64 * config.q_width


def test_states_are_sharded_over_dp_and_cp_together() -> None:
    sizes = {"model": "llama-3-8b", "seq": 4096, **HF}
    both, dp = training_memory(dp=2, cp=4, **sizes), training_memory(dp=8, **sizes)
    assert both.state_terms == dp.state_terms


def test_a_gather_holds_more_the_more_ranks_there_are_and_a_ring_does_not() -> None:
    sizes = 4096 * 4096, 4096 * 1024, 4096 * 32, 2
    ring = [ring_temporaries(*sizes, cp, "ring") for cp in (4, 8, 16)]
    gathered = [ring_temporaries(*sizes, cp, "gathered") for cp in (4, 8, 16)]
    assert ring[0] == ring[1] == ring[2]
    message = 2 * 2 * 4096 * 1024
    assert [b - a for (_, a), (_, b) in pairwise(gathered)] == [4 * message, 8 * message]


def test_the_settings_are_explained() -> None:
    run = run_config("llama-3.2-1b", cp=8, cp_way="gathered", seq=8192, recompute="full", **HF)
    lines = explain_instant(memory_timeline(run), "backward of block 0", run)
    (running,) = (line for line in lines if line.term == "operator_temporaries")
    assert "gathered attention" in running.numbers
    assert running.proof == "measured"
    assert unproven(run_config("llama-3-8b", cp=2, **HF)) == ()
    assert unproven(run_config("llama-3-8b", cp=2)) == ("paper's peak", "cp")


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        ("gpt2", {"implementation": "hf"}, "does not know gpt2: family 'gpt2'"),
        ("mixtral-8x7b", {"implementation": "hf"}, "does not know mixtral-8x7b"),
        ("llama-3-8b", {"implementation": "torchtitan"}, "use cp=1, or implementation='paper'"),
        ("llama-3-8b", {"implementation": "toy", "cp_way": "ulysses"}, "cp_way='ulysses'; use ring"),
        (
            "llama-3-8b",
            {"implementation": "megatron", "cp_way": "gathered"},
            "implementation='megatron' with cp=4 is not known",
        ),
        ("llama-3-8b", {"implementation": "hf", "cp_way": "star"}, "unknown cp_way 'star'"),
        ("llama-3-8b", {"implementation": "hf", "attention": "plain"}, "attention='plain'; use 'fused'"),
        ("llama-3-8b", {"implementation": "hf", "recipe": "autocast-bf16"}, "autocast does not reach"),
        ("llama-3-8b", {"implementation": "hf", "seq": 2052}, "cp=4 does not divide seq / 2=1026"),
        ("qwen2.5-0.5b", {"implementation": "hf", "cp_way": "ulysses"}, "cp=4 does not divide num_kv_heads=2"),
    ],
)
def test_what_was_not_measured_is_refused(model: str, settings: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run_config(model, **{"cp": 4, "seq": 1024} | settings)
