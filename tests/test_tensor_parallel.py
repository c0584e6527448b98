"""The tensor parallel toy against one process, against DTensor, and against what it sends.

Comparisons run in float64, but for RMSNorm, which works in fp32 by design: sums over ranks in another order
differ by 1e-16, which now and then tips an fp32 value to its neighbour, 6e-8 away relatively. Activations and
gradients here are at most about 10, so errors stay near 1e-6. AdamW gets eps = lr = 1e-2: it then multiplies an
error of a gradient by about lr/eps = 1 in a step, and three steps stay below 1e-5, the TOLERANCE. A slip in the
idea (f forgotten, a bias added t times) changes a gradient by a good part of itself, 1e-3 and more.
"""

from __future__ import annotations

import copy
import math
import random
import runpy
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

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
from lablib.launch.measure import record_comms, saved_activations
from lablib.launch.ranks import run_ranks
from lablib.launch.torch_private import TorchDispatchMode
from lablib.toys import torch_names as collective_names
from lablib.toys.tensor_parallel import ParallelBlock, Plan, parallelize
from lablib.toys.tensor_parallel.tp_transformer import check_tp
from lablib.toys.transformer import Block, Transformer, rotary, tiny_config
from tests.processes import far, on_ranks

TOLERANCE = 1e-5
STEPS = 3


def draw(seed: int, family: str, kv: int, tied: bool, frozen: bool):
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
    for parameter in sizes.sample(list(model.parameters()), k=6 * frozen):
        parameter.requires_grad_(False)
    return model, torch.randint(0, config.vocab, (STEPS, 3, sizes.choice([10, 12, 14])))


def reference_loss(model: Transformer, tokens_BT: torch.Tensor) -> torch.Tensor:
    """The loss in float64; Transformer.loss would go through fp32."""
    return F.cross_entropy(model(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[:, 1:].flatten())


def three_steps(model: torch.nn.Module, loss_of: Callable, tokens: torch.Tensor) -> dict:
    """Train, and return every loss and gradient by name and step, and the weights at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.1)
    seen = {}
    for step in range(STEPS):
        loss = loss_of(tokens[step])
        loss.backward()
        seen["loss", step] = loss.detach()
        seen |= {(n, step): None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return seen | {(name, "end"): value for name, value in model.state_dict().items()}


def mine(model, name: str, whole: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's slice of a whole parameter or gradient: the one that the layer says it holds."""
    owner, _, leaf = name.rpartition(".")
    dim, split = getattr(model.get_submodule(owner), "splits", {}).get(leaf, (0, None))
    return whole if split is None or whole is None else split.cut(whole, dim, dist.get_rank())


def train(seed: int, cases: tuple) -> list[dict[str, float]]:
    """Return for each case how far each variant is from one process."""
    found = []
    for case in cases:
        start, tokens = draw(seed, *case)
        single = copy.deepcopy(start)
        truth = three_steps(single, lambda tokens, model=single: reference_loss(model, tokens), tokens)
        before = start.state_dict()
        differences = {"moved": -max(far(truth[name, "end"], before[name]) for name in before)}
        for variant in VARIANTS:
            model = parallelize(start, dist.group.WORLD, sequence_parallel=variant)
            assert all(torch.equal(p, mine(model, n, before[n])) for n, p in model.state_dict().items())
            state = {name: model.gather(name, piece) for name, piece in model.state_dict().items()}
            assert list(state) == list(before)
            assert all(torch.equal(state[name], whole) for name, whole in before.items())
            for (name, step), value in three_steps(model, model.loss, tokens).items():
                whole = truth[name, step]
                expected = whole if name == "loss" else mine(model, name, whole)
                differences[f"{variant} {name} {step}"] = far(value, expected)
        found.append(differences)
    return found


#: By number of ranks: family, KV heads (of four query heads), tied, some weights frozen.
CASES = {
    1: (("llama", 2, False, False),),
    2: (("gpt2", 4, True, False), ("llama", 1, True, True)),
    4: (("gpt2", 4, False, True), ("llama", 2, False, False), ("llama", 1, True, False)),
}


@pytest.mark.drawn
@pytest.mark.parametrize(("ranks", "case"), [(n, case) for n, cases in CASES.items() for case in cases])
def test_equal_to_one_process(ranks, case, seed):
    for found in on_ranks(train, ranks, seed, CASES[ranks]):
        differences = dict(found[CASES[ranks].index(case)])
        assert differences.pop("moved") < -1e-3
        wrong = {name: error for name, error in differences.items() if not error < TOLERANCE}
        assert not wrong


# Against DTensor: one block, whose split and counts are known


def against_dtensor(seed: int) -> dict[bool | str, tuple[float, Counter, Counter]]:
    """Return for each variant the largest difference in output and gradients, and what each of the two called."""
    return {variant: one_against_dtensor(seed, variant) for variant in VARIANTS}


def one_against_dtensor(seed: int, variant: bool | str) -> tuple[float, Counter, Counter]:
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
    ours = ParallelBlock(whole, Plan(config, group, variant))
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
        differences.append(far(parameter.grad, mine(ours, name, other)))
    return max(differences), logs[0], logs[1]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_equal_to_dtensor(ranks, variant, seed):
    for found in on_ranks(against_dtensor, ranks, seed):
        difference, ours, theirs = found[variant]
        assert difference < TOLERANCE
        if not variant:
            assert ours == {"all_reduce": 4}
            assert theirs["all_reduce"] == 7  # q, k, v and up, gate: a reduction each, not one a half
        if variant == "keep":
            for op in ("all_gather", "reduce_scatter"):  # ours also sums gradients of norms: all-reduces
                assert ours[op] == theirs[op] == 4


# PyTorch's plan for the whole model, which the chapter shows


def by_plan() -> tuple[dict[str, float], Counter]:
    """Return how far loss, gradients and gradient norm are from one process, and what was called."""
    from torch.distributed.tensor.parallel import loss_parallel

    from lablib.launch.layouts import split_by_plan
    from lablib.launch.ranks import rank_mesh

    torch.manual_seed(3)
    config = tiny_config("llama", num_layers=2, hidden=24, num_heads=8, num_kv_heads=4, head_dim=4, vocab=64)
    alone, tokens = Transformer(config), torch.randint(0, config.vocab, (2, 13))
    split = split_by_plan(copy.deepcopy(alone), rank_mesh(dist.get_world_size(), names=("tp",)))
    truth = alone.loss(tokens)
    truth.backward()
    with record_comms() as log, loss_parallel():
        loss = F.cross_entropy(split(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
    pairs = zip(split.parameters(), alone.parameters(), strict=True)
    norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9) for model in (split, alone)]
    return {
        "loss": abs(float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss) - truth.item()),
        "gradients": max(far(p.grad.full_tensor(), q.grad) for p, q in pairs),
        "norm": abs(norms[0].full_tensor().item() - norms[1].item()),
    }, log.calls


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_plan_of_the_chapter_is_one_process_split(ranks):
    for found, calls in on_ranks(by_plan, ranks):
        assert {name: gap for name, gap in found.items() if gap > TOLERANCE} == {}
        # Four of each a layer, and two for the ends; the loss has a maximum and two sums.
        assert calls == {"all_gather": 10, "reduce_scatter": 10, "all_reduce": 3}


def by_plan_beyond_the_key_heads() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    from lablib.launch.layouts import split_by_plan
    from lablib.launch.ranks import rank_mesh

    config = tiny_config("llama", hidden=24, num_heads=8, num_kv_heads=1, head_dim=4)
    model, mesh = Transformer(config), rank_mesh(dist.get_world_size(), names=("tp",))
    with pytest.raises(ValueError, match="tp=2 does not divide num_kv_heads=1, and a plan copies no head"):
        split_by_plan(model, mesh)
    keys = parallelize_module(model.blocks[0].attention.k, mesh, ColwiseParallel())
    with pytest.raises(RuntimeError):
        keys(torch.randn(2, 3, 24)).view(2, 3, -1, config.head_dim)


def test_a_plan_copies_no_key_head():
    on_ranks(by_plan_beyond_the_key_heads, 2)


# What is sent


def sent() -> dict[tuple[bool | str, int], tuple[Counter, float]]:
    return {(variant, layers): sent_by(variant, layers) for variant in VARIANTS for layers in (1, 2)}


def sent_by(variant: bool | str, layers: int) -> tuple[Counter, float]:
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
    for found in on_ranks(sent, ranks):
        (calls_1, elements_1), (calls_2, elements_2) = found[variant, 1], found[variant, 2]
        assert calls_2 - calls_1 == calls
        assert elements_2 - elements_1 == pytest.approx(factor * 2 * 12 * 40 * (ranks - 1) / ranks)


class _Widest(TorchDispatchMode):
    """Notes whether some operator returns a tensor as large and as wide as the full logits."""

    seen = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                self.seen |= value.dim() > 1 and value.numel() >= 2 * 12 * 211 and 211 in value.shape
        return result


def full_logits_seen() -> dict[bool | str | None, bool]:
    """Return whether full logits appear, by variant; None is the whole model."""
    config, tokens = tiny_config("llama", hidden=24, vocab=211, num_layers=1), torch.ones(2, 13).long()
    whole = Transformer(config)
    models = {v: parallelize(whole, dist.group.WORLD, sequence_parallel=v) for v in VARIANTS} | {None: whole}
    found = {}
    for variant, model in models.items():
        with _Widest() as watch:
            model.loss(tokens).backward()
        found[variant] = watch.seen
    return found


def test_no_rank_holds_the_full_logits():
    for found in run_ranks(full_logits_seen, 2):
        assert found.pop(None), "the watch sees them where they are"
        assert not any(found.values()), found


# Names of collectives


def test_each_version_of_torch_gets_the_name_that_it_knows(monkeypatch):
    now = runpy.run_path(collective_names.__file__)
    for name, old, new in (
        ("all_gather", "all_gather_into_tensor", "all_gather_single"),
        ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"),
    ):
        assert now[name] is getattr(dist, new, None) or not hasattr(dist, new)
        monkeypatch.delattr(dist, new, raising=False)
        monkeypatch.setattr(dist, old, old, raising=False)
        assert runpy.run_path(collective_names.__file__)[name] == old


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
    model = parallelize(whole, group)
    with pytest.raises(ValueError, match="sequence_parallel=True must be False, 'keep' or 'shard'"):
        parallelize(whole, group, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"dropout=0.1 is not supported"):
        parallelize(Transformer(config, dropout=0.1), group)
    with pytest.raises(ValueError, match=r"must lie in 0 ... 255"):
        model(torch.full((1, 4), 256))
    with pytest.raises(ValueError, match="sequence of 9 tokens, but max_positions=8"):
        model(torch.zeros(1, 9).long())


def test_bad_input_is_named():
    run_ranks(complaints, 1)


# Counts: against the papers' closed forms, and as properties of random sizes


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
    closed = 2 * 140e12 * 7 / (9 * config.hidden * 300e9)
    assert one.ratio == pytest.approx(closed / (1 + 2048 / (6 * config.hidden)), rel=1e-9)
    assert layer_times(config, batch=1, seq=2048, tp=8, **how, scores=False).ratio == pytest.approx(closed, rel=1e-9)


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
