"""The DDP toy against one process, against DistributedDataParallel, and against what it sends.

Comparisons run in float64. One gradient then carries a rounding error of about 1e-15; AdamW multiplies an error
by at most lr/eps = 1e-2/1e-8 = 1e6 in a step, so three steps stay below 1e-8. A slip in the idea (a sum for a
mean, a missed sample, an unsynchronised weight) moves a parameter by about lr = 1e-2. TOLERANCE lies between.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lablib.calc.parallel import bucket_sizes
from lablib.launch.measure import record_comms
from lablib.launch.ranks import run_ranks
from lablib.toys.data_parallel import BucketedDDP, NaiveDDP, OverlappedDDP
from tests.processes import new_seed

TOLERANCE = 1e-7
STEPS = 3
CLASSES = [NaiveDDP, BucketedDDP, OverlappedDDP]
SMALL = {"first_bytes": 3000, "bucket_bytes": 20_000}  # a small model, and still several buckets


class Awkward(nn.Module):
    """Odd sizes, a tied weight, a frozen layer, strange layouts, and layers that some or all ranks skip."""

    def __init__(self, seed: int):
        super().__init__()
        sizes = random.Random(seed)
        # The smallest draw has 15 kB of parameters, several buckets of the sizes in SMALL.
        self.vocab, width, hidden = (sizes.randrange(low, 3 * low, 2) for low in (21, 15, 27))
        self.embed = nn.Embedding(self.vocab, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.sometimes = nn.Linear(width, width)
        self.never = nn.Linear(width, 3)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(width, hidden).t() / hidden)  # not contiguous, nor its gradient
        self.scale = nn.Parameter(torch.tensor(0.5))  # no dimension
        self.nothing = nn.Parameter(torch.zeros(0, 3))  # no element
        self.head = nn.Linear(width, self.vocab, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, tokens: torch.Tensor, detour: bool) -> torch.Tensor:
        x = self.frozen(self.embed(tokens))
        x = x + self.down(torch.tanh(self.up(x))) * self.scale + torch.tanh(x @ self.turned.t()) @ self.turned
        x = x + self.nothing.sum()
        return self.head(x + self.sometimes(x) if detour else x)

    def loss(self, tokens: torch.Tensor, detour: bool) -> torch.Tensor:
        return nn.functional.cross_entropy(self(tokens, detour), tokens.roll(1))


def wrap(cls: type, module: nn.Module, *, find_unused: bool = False) -> nn.Module:
    if cls is DistributedDataParallel:
        return DistributedDataParallel(module, find_unused_parameters=find_unused, bucket_cap_mb=0.02)
    return cls(module, find_unused=find_unused, **({} if cls is NaiveDDP else SMALL))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-8, weight_decay=0.1)


def distance(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max((x.double() - y.double()).abs().max().item() for x, y in pairs if x.numel())


def samples(seed: int, vocab: int, count: int) -> torch.Tensor:
    return torch.randint(0, vocab, (STEPS, count), generator=torch.Generator().manual_seed(seed))


# Equal to one process, and to DistributedDataParallel


def train_parallel(seed: int) -> dict[str, float]:
    """Three AdamW steps on 12 samples each; rank 0 alone takes the detour."""
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    start = Awkward(seed)
    tokens = samples(seed, start.vocab, 12)

    single = copy.deepcopy(start)
    optimizer = optimizer_of(single)
    for step in range(STEPS):
        parts = [single.loss(part, r == 0) / n for r, part in enumerate(tokens[step].chunk(n))]
        torch.stack(parts).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    distances = {"moved": distance(single, start)}
    for cls in [*CLASSES, DistributedDataParallel]:
        module = copy.deepcopy(start)
        for tensor in module.state_dict().values():
            tensor.add_(rank)  # only rank 0 starts where the single process did
        model = wrap(cls, module, find_unused=True)
        optimizer = optimizer_of(model)
        for step in range(STEPS):
            part = tokens[step].chunk(n)[rank]
            nn.functional.cross_entropy(model(part, rank == 0), part.roll(1)).backward()
            if cls is not DistributedDataParallel:
                model.sync()
            optimizer.step()
            optimizer.zero_grad()
        assert module.never.weight.grad is None
        distances[cls.__name__] = distance(module, single)
    return distances


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_equals_one_process(ranks: int) -> None:
    for distances in run_ranks(train_parallel, ranks, new_seed()):
        assert distances.pop("moved") > 1e-3
        assert max(distances.values()) < TOLERANCE, distances


def mean_of_local_gradients(dtypes: list[torch.dtype]) -> dict[str, list[float]]:
    """The gradient of every parameter is 1 + rank + its number, in each dtype."""
    result = {}
    for cls in CLASSES:
        module = nn.Module()
        module.ps = nn.ParameterList([torch.zeros(7 + 2 * i, dtype=d) for i, d in enumerate(dtypes)])
        model = cls(module, **({} if cls is NaiveDDP else {"first_bytes": 20, "bucket_bytes": 60}))
        sum(((1 + dist.get_rank() + i) * p).sum().float() for i, p in enumerate(module.ps)).backward()
        model.sync()
        assert all((p.grad == p.grad[0]).all() and p.grad.dtype == p.dtype for p in module.ps)
        if cls is not NaiveDDP:
            assert all(len({p.dtype for p in bucket}) == 1 for bucket in model.buckets)
        result[cls.__name__] = [p.grad[0].item() for p in module.ps]
    return result


def test_mixed_dtypes() -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.bfloat16, torch.float16, torch.float32]
    for gradients in run_ranks(mean_of_local_gradients, 4, dtypes):
        for values in gradients.values():
            assert values == [2.5 + i for i in range(len(dtypes))]  # exact in every one of the dtypes


def half_precision_gradient() -> list[float]:
    values = []
    for cls in CLASSES:
        module = nn.Linear(1, 1, bias=False, dtype=torch.float16)
        model = cls(module)
        (model.module.weight * 40_000).sum().backward()
        model.sync()
        values.append(module.weight.grad.item())
    return values


def test_the_sum_may_exceed_fp16() -> None:
    """The largest number of fp16 is 65504: two ranks' 40000 must be divided before they are added."""
    assert run_ranks(half_precision_gradient, 2) == [[40_000.0] * 3] * 2


class Stats(nn.Module):
    """BatchNorm has running statistics and an integer counter as buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(5), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


def buffers_like_torch() -> list[float]:
    return [buffers_of(cls) for cls in CLASSES]


def buffers_of(cls: type) -> float:
    torch.manual_seed(dist.get_rank())  # other weights and other data on every rank
    module = Stats()
    module.norm.running_mean.fill_(dist.get_rank())
    twin = copy.deepcopy(module)
    ours, theirs = cls(module), DistributedDataParallel(twin)
    for _ in range(STEPS):
        x = torch.randn(6, 5)
        for model in (ours, theirs):
            model(x).square().mean().backward()
        ours.sync()
    return distance(module, twin)


def test_buffers_follow_rank_0() -> None:
    assert run_ranks(buffers_like_torch, 3) == [[0, 0, 0]] * 3


# Parameters that were not used


def unused_gradients(find_unused: bool) -> list[list[object]]:
    """Rank 0 uses layer 0, the others layer 1, nobody layer 2; then nobody uses any."""
    seen = []
    for cls in CLASSES:
        layers = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(3)])
        model = wrap(cls, layers, find_unused=find_unused)
        for use in (0 if dist.get_rank() == 0 else 1, None):
            if use is not None:
                layers[use].weight.sum().backward()
            model.sync()
            seen.append([None if p.grad is None else p.grad[0, 0].item() for p in layers.parameters()])
            layers.zero_grad()
    return seen


def test_unused_keep_none_when_found() -> None:
    once, never = [pytest.approx(1 / 3), pytest.approx(2 / 3), None], [None, None, None]
    assert run_ranks(unused_gradients, 3, True) == [[once, never] * 3] * 3


def test_unused_become_zero_when_not_searched() -> None:
    """The documented difference to one process: a zero gradient, which weight decay and momentum act upon."""
    once, never = [pytest.approx(1 / 3), pytest.approx(2 / 3), 0], [0, 0, 0]
    assert run_ranks(unused_gradients, 3, False) == [[once, never] * 3] * 3


# Buckets and overlap


def layers_of(sizes: list[int]) -> nn.Module:
    return nn.Sequential(*[nn.Linear(1, size, bias=False) for size in sizes])


def bucket_numel(sizes: list[int], first: int, cap: int) -> list[list[int]]:
    model = BucketedDDP(layers_of(sizes), first_bytes=first, bucket_bytes=cap)
    return [[p.numel() for p in bucket] for bucket in model.buckets]


def test_buckets_are_those_of_the_calculator() -> None:
    rng = random.Random(new_seed())
    sizes = [rng.randrange(1, 400) for _ in range(40)]
    first, cap = rng.randrange(1, 2000), rng.randrange(1, 6000)
    expected = [[sizes[i] for i in b] for b in bucket_sizes([4 * s for s in sizes], first=first, cap=cap)]
    assert run_ranks(bucket_numel, 1, sizes, first, cap) == [expected]


class Chain(nn.Module):
    def __init__(self, skip_last: bool):
        super().__init__()
        self.blocks, self.skip_last = nn.ModuleList([nn.Linear(40, 40) for _ in range(12)]), skip_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[: -1 if self.skip_last else None]:
            x = block(x)
        return x


def timelines(cls: type, skip_on: int | None) -> list[tuple[str, int, float]]:
    model = wrap(cls, Chain(skip_last=dist.get_rank() == skip_on))
    for _ in range(2):  # the second step: the timeline is of the last one
        model(torch.randn(4, 40)).sum().backward()
        model.sync()
        model.zero_grad()
    return model.timeline


def events(timeline: list[tuple[str, int, float]], name: str) -> list[int]:
    return [place for place, (event, _, _) in enumerate(timeline) if event == name]


def test_overlap_first_bucket_leaves_before_the_last_gradient() -> None:
    for timeline in run_ranks(timelines, 2, OverlappedDDP, None):
        launches, gradients = events(timeline, "launch"), events(timeline, "gradient")
        assert len(gradients) == 24
        assert len(launches) == len(events(timeline, "reduced")) > 2
        assert launches[0] < gradients[-1] < events(timeline, "sync")[0]
        assert launches[-2] < gradients[-1]  # and so do all but the last
        assert [timeline[place][1] for place in launches] == list(range(len(launches)))
        times = [seconds for event, _, seconds in timeline if event != "reduced"]
        assert times == sorted(times)
        assert timeline[0][0] == "forward"


@pytest.mark.parametrize("cls", [NaiveDDP, BucketedDDP])
def test_without_overlap_everything_leaves_after_backward(cls: type) -> None:
    for timeline in run_ranks(timelines, 2, cls, None):
        assert not events(timeline, "gradient")
        assert events(timeline, "launch")[0] > events(timeline, "sync")[0]


def test_ranks_agree_on_the_order_when_they_skip_layers() -> None:
    """Rank 1 never fills bucket 0 in backward, so it must not send the buckets that it does fill."""
    one, other = run_ranks(timelines, 2, OverlappedDDP, 1)
    assert events(one, "launch")[0] < events(one, "sync")[0]
    assert events(other, "launch")[0] > events(other, "sync")[0]
    orders = [[t[place][1] for place in events(t, "launch")] for t in (one, other)]
    assert orders[0] == orders[1] == sorted(orders[0])


# What is sent


def sent(cls: type, find_unused: bool, seed: int) -> dict[str, object]:
    """Record wrapping, a step with one accumulated micro-batch, and the same step of PyTorch's DDP."""
    module = Awkward(seed)
    tokens = samples(seed, module.vocab, 6)[0]
    trainable = {id(p): p for p in module.parameters() if p.requires_grad}.values()
    twin = copy.deepcopy(module)
    with record_comms() as wrapping:
        model = wrap(cls, module, find_unused=find_unused)
    with record_comms() as step:
        with model.no_sync():
            model(tokens, True).sum().backward()
        nothing_yet = sum(step.calls.values())
        model(tokens, True).sum().backward()
        model.sync()
    theirs = wrap(DistributedDataParallel, twin, find_unused=True)
    with record_comms() as torch_step:
        theirs(tokens, True).sum().backward()
    return {
        "find_unused": find_unused,
        "wrapping": wrapping.calls,
        "wrapping bytes": wrapping.bytes["broadcast"],
        "state": sum(p.nbytes for p in module.parameters()),
        "tensors": len(list(module.parameters())),
        "nothing yet": nothing_yet,
        "calls": step.calls,
        "bytes": step.bytes["all_reduce"],
        "torch bytes": torch_step.bytes["all_reduce"],
        "ring bytes": step.ring_bytes_sent(),
        "params": len(trainable),
        "param bytes": sum(p.nbytes for p in trainable),
        "buckets": len(getattr(model, "buckets", trainable)),
    }


def sent_by_each(seed: int) -> list[dict[str, object]]:
    return [sent(cls, find_unused, seed) for cls in CLASSES for find_unused in (False, True)]


def test_one_all_reduce_per_bucket_and_all_bytes_once() -> None:
    ranks = 3
    for seen in itertools.chain(*run_ranks(sent_by_each, ranks, new_seed())):
        find_unused = seen["find_unused"]
        search = seen["params"] if find_unused else 0  # 1 byte per parameter
        # What the ranks have is compared first, in two all-gathers: how long its description is, and the description.
        assert seen["wrapping"] == {"broadcast": seen["tensors"], "all_gather": 2}
        assert seen["wrapping bytes"] == seen["state"]
        assert seen["nothing yet"] == 0
        assert seen["calls"] == {"all_reduce": seen["buckets"] + find_unused}
        assert seen["bytes"] == seen["param bytes"] + search
        assert seen["ring bytes"] == pytest.approx(2 * (ranks - 1) / ranks * seen["bytes"])
        # DistributedDataParallel sends the same bytes, and looks for unused parameters with an int32 each.
        assert seen["torch bytes"] == seen["param bytes"] + 4 * seen["params"]
        assert seen["buckets"] > 1


def test_buffers_are_sent_with_each_forward_in_training() -> None:
    assert run_ranks(buffer_calls, 2) == [[3, 0, 0]] * 2


def buffer_calls() -> list[int]:
    model, counts = OverlappedDDP(Stats()), []
    for mode in ("train", "eval", "no_sync"):
        model.train(mode != "eval")
        with record_comms() as log, model.no_sync() if mode == "no_sync" else contextlib.nullcontext():
            model(torch.randn(4, 5))
        counts.append(log.calls["broadcast"])
    return counts


# Groups, accidents and bad input


def in_pairs() -> dict[str, float]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank, means = dist.get_rank(), {}
    for cls in CLASSES:
        module = nn.Linear(1, 1, bias=False)
        module.weight.data.fill_(rank)
        model = cls(module, groups[rank // 2])
        start = module.weight.item()
        (module.weight * rank).sum().backward()
        model.sync()
        means[cls.__name__] = (start, module.weight.grad.item())
    with pytest.raises(ValueError, match=f"rank {rank} is not in the group"):
        NaiveDDP(nn.Linear(1, 1), groups[1 - rank // 2])
    return means


def test_group_is_an_argument() -> None:
    results = run_ranks(in_pairs, 4)
    for rank, means in enumerate(results):
        assert set(means.values()) == {(0.0, 0.5) if rank < 2 else (2.0, 2.5)}


def accidents() -> None:
    with pytest.raises(ValueError, match="1: gradients would be sparse"):
        NaiveDDP(nn.Sequential(nn.Linear(1, 1), nn.Embedding(3, 3, sparse=True)))

    model = OverlappedDDP(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="second backward before sync"):
        model(torch.ones(1, 2)).sum().backward()
    model.sync()

    for cls in CLASSES:
        frozen = cls(nn.Linear(2, 2).requires_grad_(False), find_unused=True)
        frozen(torch.ones(1, 2))
        frozen.sync()

        model = cls(nn.Linear(2, 2))
        with pytest.raises(KeyError), model.no_sync():
            raise KeyError
        assert model.syncing
        with model.no_sync():
            with model.no_sync():
                pass
            assert not model.syncing
        with torch.no_grad():
            model.eval()(torch.ones(1, 2))


def test_accidents() -> None:
    run_ranks(accidents, 2)


# What the replicas may be


class Undefined(torch.autograd.Function):
    """Passes x through, and has no gradient for the weight."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def undefined_gradients() -> list[object]:
    found = []
    for cls in CLASSES:
        module = nn.Module()
        module.used, module.passed = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        model = cls(module, find_unused=True)
        Undefined.apply(module.used(torch.ones(1, 1)), module.passed.weight).sum().backward()
        model.sync()
        found += [module.used.weight.grad.item(), module.passed.weight.grad]
    return found


def test_an_undefined_gradient_is_no_gradient() -> None:
    assert run_ranks(undefined_gradients, 2) == [[1.0, None] * 3] * 2


def odd_replicas() -> None:
    rank = dist.get_rank()
    other = {
        "another shape": nn.Linear(2, 2 + rank),
        "another number": nn.Sequential(*[nn.Linear(2, 2) for _ in range(2 - rank)]),
        "another dtype": nn.Linear(2, 2, dtype=torch.float64 if rank else torch.float32),
        "another layout": nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last if rank else torch.contiguous_format),
        "frozen on one": nn.Linear(2, 2).requires_grad_(rank == 0),
    }
    for module in other.values():
        for cls in CLASSES:
            with pytest.raises(ValueError, match=r"rank 1 of the group has another module than rank 0, first.*"):
                cls(module)


def test_replicas_that_differ_are_refused() -> None:
    run_ranks(odd_replicas, 2, timeout=60)
