"""The pipeline toy against one process, against torch.distributed.pipelining, and against what it sends.

Comparisons run in float64, in the norms and the loss too, which the model computes in fp32. The pipeline computes what
one process computes, micro-batch by micro-batch; only the order in which the micro-batches' gradients are added
differs, and with it the last bits: about m times 1e-16 of gradients that are below 10. A slip in the idea (a micro-batch lost or counted twice, a tied gradient that is not summed) changes a
gradient by a part of its own size, and the largest of each weight is above 1e-9, which is tested. TOLERANCE lies between.
"""

from __future__ import annotations

import copy
import random
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.utils.checkpoint import checkpoint

from lablib.calc.schedules import (
    Action,
    Schedule,
    ScheduleError,
    one_f_one_b,
    parse_schedule,
    peak_activations,
    schedule,
    schedule_names,
)
from lablib.launch.measure import record_comms
from lablib.launch.ranks import run_ranks
from lablib.toys.data_parallel import BucketedDDP
from lablib.toys.pipeline import PipelineExecutor, split_stages, step_1f1b
from lablib.toys.pipeline import executor as pipeline
from lablib.toys.pipeline.executor import Mailbox
from lablib.toys.transformer import RMSNORM_EPSILON, RMSNorm, Transformer, tiny_config
from lablib.toys.zero import ZeRO1
from tests.processes import new_seed
from tests.test_schedules import made

TOLERANCE = 1e-12
FAMILIES = ["gpt2", "llama"]


class ExactNorm(RMSNorm):
    """Llama's norm in float64."""

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x_BSH, self.weight.shape, self.weight, RMSNORM_EPSILON)


def exact_loss(logits_BSV: torch.Tensor, tokens_BT: torch.Tensor) -> torch.Tensor:
    """The model's loss in float64."""
    return torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), tokens_BT[:, 1:].flatten())


def awkward(draw: random.Random, family: str, *, layers: int, tied: bool) -> Transformer:
    """A small float64 model of odd sizes; the same on every rank that draws the same."""
    torch.manual_seed(draw.randrange(10**6))
    heads, head_dim = draw.choice([(1, 6), (3, 2), (3, 6)])
    config = tiny_config(
        family,
        num_layers=layers,
        hidden=heads * head_dim,
        num_heads=heads,
        num_kv_heads=draw.choice([1, heads]) if family == "llama" else heads,
        ffn=draw.randrange(5, 15, 2),
        vocab=draw.randrange(11, 31, 2),
        max_positions=9,
        tied=tied,
    )
    model = Transformer(config).double()
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.__class__ = ExactNorm
    with torch.no_grad():  # large enough that every gradient can be seen
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def cut(draw: random.Random, total: int, parts: int) -> list[int]:
    """A random number of layers for every stage; some may get none."""
    cuts = sorted(draw.randrange(total + 1) for _ in range(parts - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def windows(draw: random.Random, model: Transformer, sizes: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(draw.randrange(10**6))
    length = draw.randrange(4, 9)
    return [torch.randint(0, model.config.vocab, (b, length), generator=generator) for b in sizes]


def one_process(model: Transformer, microbatches: list[torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients of a copy of the model, micro-batch by micro-batch."""
    model = copy.deepcopy(model)
    model.zero_grad()
    total = 0.0
    for tokens_BT in microbatches:
        loss = exact_loss(model(tokens_BT[:, :-1]), tokens_BT) * len(tokens_BT) / sum(map(len, microbatches))
        loss.backward()
        total += loss.item()
    grads = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    # A bias of the keys moves all scores of a query alike, and softmax does not see it.
    seen = {name: g.abs().max() for name, g in grads.items() if g is not None and "k.bias" not in name}
    assert min(seen.values()) > 1e-9, seen
    return total, grads


def distance(executor: PipelineExecutor, expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of a gradient of this rank."""
    pairs = [(p.grad, expected[name]) for stage in executor.stages.values() for name, p in stage.named_parameters()]
    return max(((ours - theirs).abs().max().item() for ours, theirs in pairs), default=0.0)


def compare(model: Transformer, plan: Schedule, layers: list[int], microbatches: list[torch.Tensor]) -> dict:
    """One step of a schedule on this rank, against one process and against the simulator."""
    model = copy.deepcopy(model)
    executor = PipelineExecutor(split_stages(model, plan.num_stages, layers), plan, loss=exact_loss)
    value = executor.step(microbatches)
    loss, expected = one_process(model, microbatches)
    rank = dist.get_rank()
    assert (value is None) == (plan.placement[-1] != rank)
    assert [event.action for event in executor.events] == plan.actions(rank)
    assert executor.peak_in_flight == peak_activations(plan)[rank]
    return {"loss": 0.0 if value is None else abs(value.item() - loss), "gradients": distance(executor, expected)}


# Equal to one process


def all_schedules(seed: int) -> dict[str, dict]:
    """Every schedule that this number of ranks can run, each on a model of its own."""
    draw, p = random.Random(seed), dist.get_world_size()
    results = {}
    for turn, name in enumerate(schedule_names()):
        plan = made(name, p, draw.choice([1, 3] if name == "interleaved" else [1, 3, 5, 7]), draw.choice([2, 3]))
        m, v = plan.num_microbatches, plan.virtual_stages
        layers = cut(draw, draw.choice([3, 5, 7]), plan.num_stages)
        family, tied = FAMILIES[turn % 2], draw.random() < 0.5
        model = awkward(draw, family, layers=sum(layers), tied=tied)
        microbatches = windows(draw, model, [draw.randrange(1, 4) for _ in range(m)])
        case = f"{name} p={p} m={m} v={v} layers={layers} {family} tied={tied}"
        results[case] = compare(model, plan, layers, microbatches)
    return results


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_schedule_equals_one_process(ranks: int) -> None:
    for results in run_ranks(all_schedules, ranks, new_seed()):
        for case, distances in results.items():
            assert max(distances.values()) < TOLERANCE, (case, distances)


def random_schedule(draw: random.Random, p: int, stages: int, m: int) -> Schedule:
    """A schedule that nobody would choose: a random order among all that the dependencies allow."""
    placement = [*range(p), *(draw.randrange(p) for _ in range(stages - p))]
    draw.shuffle(placement)
    halves = {(s, k): draw.random() < 0.5 for s in range(stages) for k in range(m)}
    ranks: list[list[Action]] = [[] for _ in range(p)]
    ready = [Action("F", 0, k) for k in range(m)]
    while ready:
        kind, s, k = action = ready.pop(draw.randrange(len(ready)))
        ranks[placement[s]].append(action)
        if kind == "F" and s + 1 < stages:
            ready.append(Action("F", s + 1, k))
        elif kind == "F":
            ready.append(Action("I" if halves[s, k] else "B", s, k))
        elif kind != "W" and s:
            ready.append(Action("I" if halves[s - 1, k] else "B", s - 1, k))
        if kind == "I":
            ready.append(Action("W", s, k))
    return Schedule(ranks, m, placement, "random")


def random_schedules(seed: int) -> dict[str, dict]:
    draw, p = random.Random(seed), dist.get_world_size()
    results = {}
    for _ in range(4):
        stages, m = draw.randrange(p, p + 4), draw.randrange(1, 6)
        plan = random_schedule(draw, p, stages, m)
        layers = cut(draw, draw.choice([3, 5]), stages)
        model = awkward(draw, draw.choice(FAMILIES), layers=sum(layers), tied=draw.random() < 0.5)
        results[str(plan)] = compare(model, plan, layers, windows(draw, model, [2] * m))
    return results


def test_any_valid_order_runs() -> None:
    for results in run_ranks(random_schedules, 3, new_seed()):
        for case, distances in results.items():
            assert max(distances.values()) < TOLERANCE, (case, distances)


def several_steps(seed: int, name: str) -> dict[str, float]:
    """Two steps that accumulate; SGD; one more. Copies of a tied weight drawn differently are made equal."""
    draw = random.Random(seed)
    p = dist.get_world_size()
    plan = schedule(name, p, 3)
    model = awkward(draw, "gpt2", layers=p + 1, tied=True)
    batches = [windows(draw, model, [2, 1, 3]) for _ in range(3)]
    single = copy.deepcopy(model)
    if dist.get_rank() == p - 1:
        with torch.no_grad():
            model.head.weight.add_(1)
    executor = PipelineExecutor(split_stages(model, p), plan, loss=exact_loss)
    for both in (False, True, True):
        batch = batches.pop()
        executor.step(batch)
        for tokens_BT in batch:
            (exact_loss(single(tokens_BT[:, :-1]), tokens_BT) * len(tokens_BT) / 6).backward()
        if both:
            for parameters in (executor.parameters(), list(single.parameters())):
                optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.5)
                optimizer.step()
                optimizer.zero_grad(set_to_none=draw.random() < 0.5)
    expected = dict(single.named_parameters(remove_duplicate=False))
    return {
        name: (parameter - expected[name]).abs().max().item()
        for stage in executor.stages.values()
        for name, parameter in stage.named_parameters()
    }


def several_steps_of_two(seed: int) -> list[dict[str, float]]:
    return [several_steps(seed, name) for name in ("1f1b", "zb-h1")]


def test_steps_accumulate_and_tied_copies_stay_equal() -> None:
    for ranks in zip(*run_ranks(several_steps_of_two, 2, new_seed()), strict=True):
        assert "embed.weight" in ranks[0]
        assert "head.weight" in ranks[1]
        assert max(max(distances.values()) for distances in ranks) < TOLERANCE


def frozen(seed: int) -> float:
    """Everything on the first stage, and one linear layer on the second, has no gradient."""
    draw = random.Random(seed)
    model = awkward(draw, "llama", layers=3, tied=False)
    stages = split_stages(model, 2, [1, 2])
    stages[0].requires_grad_(False)
    model.blocks[2].mlp.up.requires_grad_(False)
    microbatches = windows(draw, model, [2, 2, 2])
    executor = PipelineExecutor(stages, schedule("zb-h1", 2, 3), loss=exact_loss)
    executor.step(microbatches)
    _, expected = one_process(model, microbatches)
    names = [(name, p.grad) for stage in executor.stages.values() for name, p in stage.named_parameters()]
    assert all((grad is None) == (expected[name] is None) for name, grad in names)
    return max(((g - expected[n]).abs().max().item() for n, g in names if g is not None), default=0.0)


def recomputed(seed: int) -> dict[str, float]:
    """Every block under activation checkpointing, of either kind, in schedules that cut backward in halves."""
    found = {}
    for name in ("1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"):
        for reentrant in (False, True):
            draw = random.Random(seed)
            plan = schedule(name, 2, 4)
            model = awkward(draw, "gpt2", layers=4, tied=False)
            executor = PipelineExecutor(split_stages(model, plan.num_stages), plan, loss=exact_loss)
            microbatches = windows(draw, model, [2, 1, 2, 3])
            expected = one_process(model, microbatches)[1]
            for stage in executor.stages.values():
                for block in stage.blocks.values():
                    block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
            executor.step(microbatches)
            found[f"{name} {reentrant}"] = distance(executor, expected)
    return found


def test_recomputation_in_a_backward_of_halves() -> None:
    for found in run_ranks(recomputed, 2, new_seed()):
        assert max(found.values()) < TOLERANCE, found


class Pipelined:
    """What ZeRO-1 calls backward on."""

    def __init__(self, executor: PipelineExecutor, microbatches: list[torch.Tensor]) -> None:
        self.backward = lambda: executor.step(microbatches)


def replicated(seed: int) -> dict[str, float]:
    """Two pipelines of two ranks side by side, whose stages share their states by ZeRO-1 or their gradients by DDP."""
    rank = dist.get_rank()
    pp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    dp = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    found = {}
    for name in ("1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"):
        draw = random.Random(seed)
        plan = schedule(name, 2, 4)
        model = awkward(draw, "llama", layers=4, tied=False)
        both = windows(draw, model, [2] * 8)
        expected = one_process(model, both)[1]
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        mine = both[4 * (rank // 2) :][:4]
        for kind in (ZeRO1, BucketedDDP):
            copied = copy.deepcopy(model)
            names = {p: n for n, p in copied.named_parameters()}
            executor = PipelineExecutor(split_stages(copied, plan.num_stages), plan, pp, loss=exact_loss)
            held = nn.ModuleList(executor.stages.values())
            if kind is ZeRO1:
                replica = ZeRO1(held, lambda shards: torch.optim.SGD(shards, lr=1.0), dp)
                replica.backward(Pipelined(executor, mine))
                replica.step()
                got = {names[p]: before[names[p]] - p for p in held.parameters()}
            else:
                replica = BucketedDDP(held, dp)
                executor.step(mine)
                replica.sync()
                got = {names[p]: p.grad for p in held.parameters()}
            found[f"{name} {kind.__name__}"] = max((g - expected[n]).abs().max().item() for n, g in got.items())
    return found


def test_replicas_of_a_pipeline_whose_backward_is_cut_in_halves() -> None:
    for found in run_ranks(replicated, 4, new_seed(), timeout=120):
        assert max(found.values()) < TOLERANCE, found


def test_frozen_weights() -> None:
    assert max(run_ranks(frozen, 2, new_seed())) < TOLERANCE


def side_by_side(seed: int) -> float:
    """Two pipelines of two ranks, each with its own group, data and schedule; outsiders are refused."""
    rank = dist.get_rank()
    groups = [dist.new_group([2, 0]), dist.new_group([3, 1])]  # sorted, so that ranks 0 and 1 come first
    draw = random.Random(seed + rank % 2)
    model = awkward(draw, FAMILIES[rank % 2], layers=3, tied=rank % 2 == 0)
    microbatches = windows(draw, model, [2, 3, 1])
    plan = schedule(["1f1b", "zb-h1"][rank % 2], 2, 3)
    with pytest.raises(ValueError, match=f"rank {rank} is not in the group"):
        PipelineExecutor(split_stages(model, 2), plan, groups[1 - rank % 2])
    executor = PipelineExecutor(split_stages(model, 2), plan, groups[rank % 2], loss=exact_loss)
    assert list(executor.stages) == [rank // 2]
    executor.step(microbatches)
    assert len(executor.timeline().ranks) == 2
    if model.config.tied:
        with pytest.raises(ValueError, match="use PipelineExecutor"):
            step_1f1b(split_stages(model, 2)[rank // 2], microbatches, groups[rank % 2])
    else:
        stage = split_stages(copy.deepcopy(model), 2)[rank // 2]
        stage.zero_grad()
        step_1f1b(stage, microbatches, groups[rank % 2], loss=exact_loss)
        for ours, theirs in zip(stage.parameters(), executor.parameters(), strict=True):
            assert (ours.grad - theirs.grad).abs().max() < TOLERANCE
    return distance(executor, one_process(model, microbatches)[1])


def in_one_function(seed: int) -> dict[str, float]:
    """1F1B in one function against the executor: losses and gradients, and what both refuse."""
    draw, p = random.Random(seed), dist.get_world_size()
    found = {}
    for family in FAMILIES:
        for sizes in ([2], [1, 3], [2, 1, 4], [1] * 9):  # fewer micro-batches than ranks, and more
            model = awkward(draw, family, layers=4, tied=p == 1)
            microbatches = windows(draw, model, sizes)
            stage = split_stages(copy.deepcopy(model), p)[dist.get_rank()]
            executor = PipelineExecutor(split_stages(model, p), one_f_one_b(p, len(sizes)), loss=exact_loss)
            ours, theirs = step_1f1b(stage, microbatches, loss=exact_loss), executor.step(microbatches)
            assert (ours is None) == (theirs is None)
            expected = {name: q.grad for mine in executor.stages.values() for name, q in mine.named_parameters()}
            assert all((q.grad is None) == (expected[name] is None) for name, q in stage.named_parameters())
            apart = [(q.grad - expected[name]).abs().max().item() for name, q in stage.named_parameters()]
            found[f"{family} {sizes}"] = max([0.0, *apart, 0.0 if ours is None else abs(ours.item() - theirs.item())])
    others = dist.new_group(range(1, p)) if p > 1 else None
    (two,) = windows(draw, model, [2])
    for wrong in ([], [two[:0]], [two, two[:, 1:]]):
        with pytest.raises(ValueError, match="one micro-batch or more"):
            step_1f1b(stage, wrong, loss=exact_loss)
    if p > 1 and dist.get_rank() == 0:
        with pytest.raises(ValueError, match="not in the group"):
            step_1f1b(stage, [two], others, loss=exact_loss)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_1f1b_in_one_function_is_the_executor(ranks: int) -> None:
    for found in run_ranks(in_one_function, ranks, new_seed()):
        assert len(found) == 8
        assert max(found.values()) < TOLERANCE, found


def test_in_a_group_of_its_own() -> None:
    assert max(run_ranks(side_by_side, 4, new_seed())) < TOLERANCE


# Equal to PyTorch's own


def against_torch(seed: int) -> dict[str, float]:
    draw, rank, p = random.Random(seed), dist.get_rank(), dist.get_world_size()
    results = {}
    for cls, name, v in (
        (ScheduleGPipe, "gpipe", 1),
        (Schedule1F1B, "1f1b", 1),
        (ScheduleInterleaved1F1B, "interleaved", 2),
    ):
        m = 3 * p if v > 1 else p + 1  # interleaved as Megatron has it wants a multiple of p
        plan = schedule(name, p, m, v)
        layers = [1 + (stage == 1) for stage in range(plan.num_stages)]
        model = awkward(draw, draw.choice(FAMILIES), layers=sum(layers), tied=False)
        microbatches = windows(draw, model, [2] * m)
        executor = PipelineExecutor(split_stages(model, plan.num_stages, layers), plan, loss=exact_loss)
        value = executor.step(microbatches)

        theirs = split_stages(copy.deepcopy(model), plan.num_stages, layers)
        for stage in theirs:
            stage.zero_grad()
        own = [PipelineStage(theirs[s], s, plan.num_stages, torch.device("cpu")) for s in plan.stages_of(rank)]
        tokens_BT, losses = torch.cat(microbatches), []
        torch_schedule = cls(own if v > 1 else own[0], m, loss_fn=exact_loss)
        inputs = [tokens_BT[:, :-1].contiguous()] if rank == 0 else []  # torch 2.11 compares strides
        torch_schedule.step(*inputs, target=tokens_BT, losses=losses)

        expected = {n: q.grad for s in plan.stages_of(rank) for n, q in theirs[s].named_parameters()}
        results[name] = distance(executor, expected)
        if value is not None:
            results[f"{name} loss"] = abs(value.item() - torch.stack(losses).mean().item())
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_torch_distributed_pipelining(ranks: int) -> None:
    for distances in run_ranks(against_torch, ranks, new_seed()):
        assert max(distances.values()) < TOLERANCE, distances


# Messages and time


def messages(name: str, v: int, tied: bool) -> tuple[dict, dict]:
    """What this rank sends and receives in a step, and what the boundaries between ranks say."""
    rank, p, m, batch, seq = dist.get_rank(), dist.get_world_size(), 4, 2, 5
    plan = schedule(name, p, m, v)
    config = tiny_config("gpt2", num_layers=2 * p, hidden=12, num_heads=3, vocab=17, tied=tied)
    model = Transformer(config)
    executor = PipelineExecutor(split_stages(model, plan.num_stages), plan)
    with record_comms() as log:
        executor.step([torch.zeros(batch, seq + 1, dtype=torch.long)] * m)
    crossings = [
        {plan.placement[s], plan.placement[s + 1]}
        for s in range(plan.num_stages - 1)
        if plan.placement[s] != plan.placement[s + 1]
    ]
    # Of every boundary that this rank has a side of, it sends one message a micro-batch, and receives one.
    count = m * sum(rank in sides for sides in crossings)
    nbytes = count * batch * seq * 12 * 4
    if tied and plan.placement[0] != plan.placement[-1] and rank in (plan.placement[0], plan.placement[-1]):
        count, nbytes = count + 1, nbytes + 17 * 12 * 4
    return (
        {"calls": dict(log.calls), "bytes": dict(log.bytes)},
        {"calls": {"send": count, "recv": count}, "bytes": {"send": nbytes, "recv": nbytes}},
    )


def messages_of_three() -> list[tuple[dict, dict]]:
    return [messages(*case) for case in (("1f1b", 1, False), ("interleaved", 2, True), ("zb-v", 1, True))]


def test_messages() -> None:
    for cases in run_ranks(messages_of_three, 2):
        for counted, expected in cases:
            assert counted == expected


class Watched(Mailbox):
    """Counts what it keeps."""

    most = 0

    def send(self, action, result):
        super().send(action, result)
        Watched.most = max(Watched.most, len(self.sent))


def kept_sends(m: int) -> int:
    pipeline.Mailbox = Watched
    model = Transformer(tiny_config("llama", num_layers=2, hidden=12, num_heads=3, vocab=17))
    executor = PipelineExecutor(split_stages(model, 2), one_f_one_b(2, m))
    executor.step([torch.zeros(1, 4, dtype=torch.long)] * m)
    return Watched.most


def test_sent_tensors_do_not_pile_up() -> None:
    assert max(run_ranks(kept_sends, 2, 12)) <= 3


# Stages, and what bad input gets


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_in_a_row_are_the_model(family: str) -> None:
    draw = random.Random(new_seed())
    model = awkward(draw, family, layers=5, tied=False)
    tokens_BS = windows(draw, model, [3])[0]
    for count, layers in ((1, None), (2, None), (3, [0, 5, 0]), (4, [1, 1, 3, 0]), (5, None)):
        x = tokens_BS
        stages = split_stages(model, count, layers)
        for stage in stages:
            x = stage(x)
        assert torch.equal(x, model(tokens_BS))
        names = [name for stage in stages for name in stage.state_dict()]
        assert sorted(names) == sorted(model.state_dict())


def test_bad_cuts_say_what_to_mend() -> None:
    model = Transformer(tiny_config("gpt2", num_layers=3, hidden=4, num_heads=1))
    with pytest.raises(ValueError, match="num_stages=4 for num_layers=3; use at most 3"):
        split_stages(model, 4)
    with pytest.raises(ValueError, match=r"layers=\[1, 1\] must have num_stages=2.*2 that sum to 2"):
        split_stages(model, 2, [1, 1])
    with pytest.raises(ValueError, match="num_stages=0"):
        split_stages(model, 0)
    with pytest.raises(ValueError, match="max_positions=512"):
        split_stages(model, 1)[0](torch.zeros(1, 513, dtype=torch.long))


def bad_input() -> None:
    model = Transformer(tiny_config("gpt2", num_layers=2, hidden=4, num_heads=1))
    stages = split_stages(model, 2)
    with pytest.raises(ValueError, match="1f1b is for 2 ranks and 2 stages; the group has 1 ranks"):
        PipelineExecutor(stages, one_f_one_b(2, 3))
    with pytest.raises(ScheduleError):
        PipelineExecutor(stages, parse_schedule(["0F0 1F0 0B0 1B0"]))
    executor = PipelineExecutor(stages, parse_schedule(["0F0 1F0 1B0 0B0"]))
    with pytest.raises(ValueError, match="2 micro-batches for a schedule of num_microbatches=1"):
        executor.step([torch.zeros(1, 4, dtype=torch.long)] * 2)
    two, halves = (
        PipelineExecutor(stages[:2], schedule(name, 1, 2, 2), loss=exact_loss) for name in ("interleaved", "zb-v")
    )
    window = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"micro-batches of T=\[4, 5\]: a mean of windows is no mean of tokens"):
        two.step([window, torch.zeros(1, 5, dtype=torch.long)])
    with pytest.raises(ValueError, match="micro-batch 1 has no windows"):
        two.step([window, window[:0]])
    with pytest.raises(RuntimeError, match=r"call it outside of torch\.no_grad"), torch.no_grad():
        two.step([window, window])
    with torch.autocast("cpu", torch.bfloat16):
        two.step([window, window])
        with pytest.raises(RuntimeError, match="convert the model to bf16, or use a schedule without W"):
            halves.step([window, window])


def test_bad_input() -> None:
    run_ranks(bad_input, 1)
