"""The tensor parallel toy against one process, against DTensor, and against what it sends.

Comparisons run in float64, but for RMSNorm, which works in fp32 by design: sums over ranks in another order
differ by 1e-16, which now and then tips an fp32 value to its neighbour, 6e-8 away relatively. Activations and
gradients here are at most about 10, so errors stay near 1e-6. AdamW gets eps = lr = 1e-2: it then multiplies an
error of a gradient by about lr/eps = 1 in a step, and three steps stay below 1e-5, the TOLERANCE. A slip in the
idea (f forgotten, a bias added t times) changes a gradient by a good part of itself, 1e-3 and more.
"""

from __future__ import annotations

import copy
import os
import random
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lablib.launch.ranks import run_ranks
from lablib.launch.recorder import record_comms
from lablib.toys.tensor_parallel import (
    check_tp,
    full_state_dict,
    load_full_state_dict,
    parallelize,
)
from lablib.toys.tp_blocks import ParallelBlock
from lablib.toys.transformer import Block, Transformer, rotary, tiny_config

TOLERANCE = 1e-5
STEPS = 3
VARIANTS = [False, "keep", "shard"]


def new_seed() -> int:
    """A new seed for every run, printed so that a failure can be repeated with LABLIB_SEED."""
    seed = int(os.environ.get("LABLIB_SEED", random.SystemRandom().randrange(10**6)))
    print(f"LABLIB_SEED={seed}")
    return seed


def draw(seed: int, family: str, kv: int, tied: bool):
    """A model with odd inner width and vocabulary, every weight random (norms and biases too), and tokens."""
    sizes = random.Random(seed)
    head_dim = sizes.choice([6, 10])
    config = tiny_config(
        family,
        num_layers=2,
        hidden=sizes.choice([13, 17, 21]),
        num_heads=4,
        num_kv_heads=kv,
        head_dim=head_dim,
        ffn=sizes.randrange(23, 60, 2),
        vocab=sizes.randrange(151, 199, 2),
        max_positions=13,
        tied=tied,
    )
    torch.manual_seed(seed)
    model = Transformer(config, attention=sizes.choice(["fused", "plain"])).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model, torch.randint(0, config.vocab, (STEPS, 3, sizes.choice([10, 12, 14])))


def reference_loss(model: Transformer, tokens_BT: torch.Tensor) -> torch.Tensor:
    """The loss in float64; Transformer.loss would go through fp32."""
    return F.cross_entropy(model(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[:, 1:].flatten())


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.1)


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return (a.double() - b.double()).abs().max().item()


def train(seed: int, family: str, kv: int, tied: bool) -> dict[str, float]:
    """Return how far each variant is from one process."""
    start, tokens = draw(seed, family, kv, tied)
    group, found = dist.group.WORLD, {}
    for variant in VARIANTS:
        single = copy.deepcopy(start)
        model = parallelize(start, group, sequence_parallel=variant)
        state = full_state_dict(model)
        assert list(state) == list(start.state_dict())
        assert all(torch.equal(state[name], whole) for name, whole in start.state_dict().items())
        pair = optimizer_of(single), optimizer_of(model)
        for step in range(STEPS):
            loss, expected = model.loss(tokens[step]), reference_loss(single, tokens[step])
            found[f"{variant} loss {step}"] = far(loss, expected)
            loss.backward()
            expected.backward()
            grads = dict(single.named_parameters())
            for name, parameter in model.named_parameters():
                whole = model.gather(name, parameter.grad)
                found[f"{variant} {name}.grad {step}"] = far(whole, grads[name].grad)
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
        state = full_state_dict(model)
        for name, value in single.state_dict().items():
            found[f"{variant} {name}"] = far(state[name], value)
        found["moved"] = -far(single.embed.weight, start.embed.weight)
        load_full_state_dict(model, start.state_dict())
        assert all(torch.equal(full_state_dict(model)[n], w) for n, w in start.state_dict().items())
    return found


@pytest.mark.parametrize(
    ("ranks", "family", "kv", "tied"),
    [
        (1, "llama", 2, False),
        (2, "gpt2", 4, True),
        (2, "llama", 1, True),
        (4, "gpt2", 4, False),
        (4, "llama", 2, False),
        (4, "llama", 1, True),
    ],
)
def test_equal_to_one_process(ranks, family, kv, tied):
    for found in run_ranks(train, ranks, new_seed(), family, kv, tied, timeout=120):
        assert found.pop("moved") < -1e-3
        wrong = {name: error for name, error in found.items() if not error < TOLERANCE}
        assert not wrong


# Against DTensor: one block, whose split and counts are known


def against_dtensor(seed: int, variant: bool | str) -> tuple[float, Counter, Counter]:
    """Return the largest difference in output and gradients, and what each of the two called."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(seed)
    t, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    config = tiny_config("llama", hidden=24, num_heads=8, num_kv_heads=4, head_dim=6, ffn=4 * 11)
    whole = Block(config, 0.0, "fused").double()
    seq = 12
    x, weight = torch.randn(2, 3, seq, 24, dtype=torch.float64)
    rope = rotary(seq, 6, device=x.device, dtype=x.dtype)
    theirs = copy.deepcopy(whole)
    names = ("attention.q", "attention.k", "attention.v", "mlp.up", "mlp.gate")
    rows = ("attention.out", "mlp.down")
    plan = {name: ColwiseParallel() for name in names}
    plan |= {name: RowwiseParallel(output_layouts=Shard(1) if variant else Replicate()) for name in rows}
    if variant:
        plan |= {name: SequenceParallel(use_local_output=True) for name in ("norm1", "norm2")}
        plan["attention"] = PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        )
        plan["mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    parallelize_module(theirs, init_device_mesh("cpu", (t,)), plan)
    ours = ParallelBlock(whole, config, group, variant)
    part = slice(seq * rank // t, seq * (rank + 1) // t) if variant else slice(None)
    outputs, inputs, logs = [], [], []
    for block in (ours, theirs):
        local = x[:, part].clone().requires_grad_()
        with record_comms() as log:
            y = block(local, rope)
            (y * weight[:, part]).sum().backward()
        outputs.append(y)
        inputs.append(local.grad)
        logs.append(log.calls)
    differences = [far(*outputs), far(*inputs)]
    theirs_by_name = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        other = theirs_by_name[name].grad
        if hasattr(other, "full_tensor"):  # a shard, or a partial sum for norms
            other = other.full_tensor()
        if other.shape != parameter.shape:
            owner, _, leaf = name.rpartition(".")
            dim, split = ours.get_submodule(owner).splits[leaf]
            other = split.cut(other, dim, rank)
        differences.append(far(parameter.grad, other))
    return max(differences), logs[0], logs[1]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_equal_to_dtensor(ranks, variant):
    for difference, ours, theirs in run_ranks(against_dtensor, ranks, new_seed(), variant, timeout=120):
        assert difference < TOLERANCE
        if not variant:
            assert ours == {"all_reduce": 4}
            assert theirs["all_reduce"] == 7  # q, k, v and up, gate: a reduction each, not one a half


# What is sent


def sent(variant: bool | str, layers: int) -> tuple[Counter, float]:
    config = tiny_config("llama", hidden=40, num_layers=layers)
    model = parallelize(Transformer(config), dist.group.WORLD, sequence_parallel=variant)
    for parameter in model.parameters():
        # Frozen, the norms have no gradient to add up, and the count is that of the stream alone.
        parameter.requires_grad_(parameter.dim() > 1)
    with record_comms() as log:
        model.loss(torch.randint(0, 256, (2, 13))).backward()
    stream = 2 * 12 * 40 * 4
    events = [event for event in log.events if event.bytes == stream]
    return Counter(event.op for event in events), sum(event.sent for event in events) / 4


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("variant", "calls", "factor"),
    [
        (False, {"all_reduce": 4}, 8),
        ("keep", {"all_gather": 4, "reduce_scatter": 4}, 8),
        ("shard", {"all_gather": 6, "reduce_scatter": 4}, 10),
    ],
)
def test_a_layer_sends_what_the_formula_says(ranks, variant, calls, factor):
    one, two = (run_ranks(sent, ranks, variant, layers) for layers in (1, 2))
    for (calls_1, elements_1), (calls_2, elements_2) in zip(one, two, strict=True):
        assert calls_2 - calls_1 == calls
        assert elements_2 - elements_1 == pytest.approx(factor * 2 * 12 * 40 * (ranks - 1) / ranks)


def full_logits_seen(variant: bool | str) -> tuple[bool, bool]:
    """Return whether some operator of ours, and of the whole model, returns a tensor as wide as the vocabulary."""

    class Watch(TorchDispatchMode):
        seen = False

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for value in result if isinstance(result, tuple | list) else [result]:
                if isinstance(value, torch.Tensor):
                    self.seen |= value.dim() > 1 and value.numel() >= 2 * 12 * 211 and 211 in value.shape
            return result

    config, tokens = tiny_config("llama", hidden=24, vocab=211, num_layers=1), torch.ones(2, 13).long()
    whole = Transformer(config)
    answers = []
    for model in (parallelize(whole, dist.group.WORLD, sequence_parallel=variant), whole):
        with Watch() as watch:
            model.loss(tokens).backward()
        answers.append(watch.seen)
    return tuple(answers)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_rank_holds_the_full_logits(variant):
    assert run_ranks(full_logits_seen, 2, variant) == [(False, True)] * 2


# Bad input


@pytest.mark.parametrize(
    ("tp", "heads", "kv", "text"),
    [
        (8, 12, 6, "tp=8 does not divide num_heads=12; use 1, 2, 3, 6 or 12"),
        (4, 12, 6, "tp=4 neither divides num_kv_heads=6 nor is a multiple of it; use 1, 2, 3, 6 or 12"),
    ],
)
def test_impossible_splits_name_the_choices(tp, heads, kv, text):
    config = tiny_config("llama", hidden=48, num_heads=heads, num_kv_heads=kv)
    with pytest.raises(ValueError, match=f"^{text}$"):
        check_tp(config, tp)


def complaints() -> None:
    config = tiny_config("gpt2", hidden=16, num_layers=1, max_positions=8)
    whole, group = Transformer(config), dist.group.WORLD
    model, state = parallelize(whole, group), whole.state_dict()
    with pytest.raises(ValueError, match="sequence_parallel=True must be False, 'keep' or 'shard'"):
        parallelize(whole, group, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"dropout=0.1 is not supported"):
        parallelize(Transformer(config, dropout=0.1), group)
    with pytest.raises(ValueError, match=r"must lie in 0 ... 255"):
        model(torch.full((1, 4), 256))
    with pytest.raises(ValueError, match="sequence of 9 tokens, but max_positions=8"):
        model(torch.zeros(1, 9).long())
    with pytest.raises(ValueError, match="only in one of model and state dict: more"):
        load_full_state_dict(model, {**state, "more": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"head.weight: the model has .256, 16., the state dict .3, 16."):
        load_full_state_dict(model, {**state, "head.weight": torch.zeros(3, 16)})


def test_bad_input_is_named():
    run_ranks(complaints, 1)
