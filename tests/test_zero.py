"""The ZeRO toys against one process, PyTorch's own, the calculator, and what they send.

Why not bit for bit: one process takes the mean of all samples; n ranks take the mean of n means, and add the
numbers in another order: (a + b + c + d) / 4 and ((a + b) / 2 + (c + d) / 2) / 2 round differently.
Why 1e-7: comparisons run in float64, where one gradient carries a rounding error of about 1e-15. AdamW divides by
sqrt(v) + eps, so from equal states an error grows by at most lr / eps = 1e-2 / 1e-8 = 1e6, to 1e-9, in one step. Later
steps have no such bound, since weights that differ change gradients too: a hundred times that is left for them.
A slip in the idea (a sum for a mean, a missed shard, padding that leaks) moves a weight by about lr = 1e-2.
"""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lablib.calc.models import preset
from lablib.calc.parallel import (
    MUON_WAYS,
    deal_out,
    deal_whole,
    least_sent,
    muon_cost,
    muon_matrices,
    newton_schulz_flops,
    shard_size,
    state_terms,
    torch_muon_sent,
    zero_choices,
    zero_sent_bytes,
)
from lablib.launch.measure import record_comms
from lablib.launch.ranks import run_ranks
from lablib.toys.transformer import Transformer, tiny_config
from lablib.toys.zero import STAGES, ZeRO1, ZeRO3, held_bytes
from lablib.toys.zero.flat_shards import FlatShards
from tests.processes import new_seed

TOLERANCE = 1e-7
STEPS = 3
OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, eps=1e-8, weight_decay=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=1e-1, momentum=0.9, weight_decay=0.1),
}


class Layer(nn.Module):
    """Odd sizes, strange layouts, a frozen part, and a part that only some ranks use."""

    def __init__(self, width: int, hidden: int, recompute: bool):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.sometimes = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(width, hidden).t() / hidden)  # not contiguous
        self.scale = nn.Parameter(torch.tensor(0.5))  # no dimension
        self.nothing = nn.Parameter(torch.zeros(0, 3))  # no element
        self.recompute = recompute

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale + torch.tanh(x @ self.turned.t()) @ self.turned

    def forward(self, x: torch.Tensor, *, detour: bool) -> torch.Tensor:
        x = x + torch.tanh(self.frozen(x))  # first: its backward is the last to need weights
        x = x + (checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x))
        return x + self.sometimes(x) + self.nothing.sum() if detour else x


class Awkward(nn.Module):
    """Uneven layers, a weight tied between the ends, another between two layers, and one that nobody uses."""

    def __init__(self, seed: int, recompute: bool = False):
        super().__init__()
        sizes = random.Random(seed)
        self.vocab, width = sizes.randrange(11, 60, 2), sizes.randrange(5, 30, 2)
        self.embed = nn.Embedding(self.vocab, width)
        hidden = sizes.randrange(7, 60, 2)
        self.blocks = nn.ModuleList(Layer(width, hidden + 2 * (i == 2), recompute) for i in range(4))
        self.blocks[3].up.weight = self.blocks[1].up.weight
        self.never = nn.Linear(width, 3)
        self.head = nn.Linear(width, self.vocab, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, tokens: torch.Tensor, detour: bool) -> torch.Tensor:
        x = self.embed(tokens)
        for block in [*self.blocks, self.blocks[0]]:  # one layer runs twice
            x = block(x, detour=detour)
        return self.head(x)


def loss_of(model: nn.Module, tokens: torch.Tensor, detour: bool) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens, detour), tokens.roll(1))


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def samples(seed: int, vocab: int, count: int) -> torch.Tensor:
    return torch.randint(0, vocab, (STEPS, count), generator=torch.Generator().manual_seed(seed))


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    assert all(a[name].shape == b[name].shape for name in a)
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a if a[name].numel())


def wrap(stage: int, module: nn.Module, optimizer: str = "adamw", **options: object) -> ZeRO1:
    if stage == 2:
        options = {"bucket_bytes": 4000} | options  # a small model, and still several buckets
    return STAGES[stage](module, OPTIMIZERS[optimizer], **options)


def piece_of(flat: FlatShards, values: list[torch.Tensor]) -> torch.Tensor:
    """This rank's shard of what has a number for each value of the parameters."""
    full = values[0].new_zeros(flat.world_size * flat.width)
    for place, value in zip(flat.split(full), values, strict=True):
        place.copy_(value)
    return full.chunk(flat.world_size)[flat.rank]


# Equal to one process


def train(seed: int, optimizer: str, micro_batches: int, max_norm: float | None) -> dict[str, float]:
    """Three steps on 12 samples for each micro-batch; rank 0 alone takes the detour."""
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    start = Awkward(seed)
    tokens = samples(seed, start.vocab, 12 * micro_batches)

    single = copy.deepcopy(start)
    updates = OPTIMIZERS[optimizer](trained(single))
    norms = []
    for step in range(STEPS):
        for p in trained(single):
            p.grad = torch.zeros_like(p)  # the toys' convention: not used is zero
        for r, part in enumerate(tokens[step].chunk(n)):
            for piece in part.chunk(micro_batches):
                (loss_of(single, piece, r == 0) / n / micro_batches).backward()
        if max_norm:
            norms.append(nn.utils.clip_grad_norm_(trained(single), max_norm).item())
        updates.step()
    state = single.state_dict()
    alone = dict(single.named_parameters())
    result = {"moved": distance(state, start.state_dict())}
    for stage in STAGES:
        module = copy.deepcopy(start)
        for tensor in module.state_dict().values():
            tensor.add_(rank)  # only rank 0 starts where the single process did
        model = wrap(stage, module, optimizer)
        for step in range(STEPS):
            for piece in tokens[step].chunk(n)[rank].chunk(micro_batches):
                model.backward(loss_of(model, piece, rank == 0) / micro_batches)
            norm = model.step(max_norm)
            if max_norm:
                result[f"norm {stage} {step}"] = abs(norm.item() - norms[step])
        result[f"weights {stage}"] = distance(model.full_state_dict(), state)
        names = {p: name for name, p in module.named_parameters()}
        for flat in model.trained:
            whole = [updates.state[alone[names[p]]] for p in flat.params]
            for key, mine in model.optimizer.state[flat.sharded_param].items():
                right = whole[0][key] if key == "step" else piece_of(flat, [values[key] for values in whole])
                result[f"state {stage}"] = max((mine - right).abs().max().item(), result.get(f"state {stage}", 0.0))
    return result


#: Optimizer, micro-batches and largest gradient norm; on three ranks accumulation and clipping too.
PLAIN = [("adamw", 1, None)]
ACCUMULATED = [("adamw", 3, 0.5), ("momentum", 3, 0.5)]


def train_each(seed: int, cases: list[tuple]) -> dict[tuple, dict[str, float]]:
    return {case: train(seed, *case) for case in cases}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_equals_one_process(ranks: int) -> None:
    cases = PLAIN + (ACCUMULATED if ranks == 3 else [])
    for by_case in run_ranks(train_each, ranks, new_seed(), cases):
        assert list(by_case) == cases
        for case, result in by_case.items():
            assert result.pop("moved") > 1e-3
            assert max(result.values()) < TOLERANCE, (case, result)


class TwoInputs(nn.Module):
    """Backward reaches `x` first, and needs the weights of `a` and `b` after that for `y`."""

    def __init__(self, width: int):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))
        self.a.requires_grad_(False)

    def forward(self, x: torch.Tensor, *, y: torch.Tensor) -> dict[str, torch.Tensor]:
        deep = torch.tanh(self.b(torch.tanh(self.a(y))))
        return {"sum": deep + self.c(x)}


class Crossing(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.left, self.right = nn.Linear(3, width), nn.Linear(3, width)
        self.layers = nn.ModuleList([TwoInputs(width), TwoInputs(width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, y = self.left(x), self.right(x)
        for layer in self.layers:
            x = layer(x, y=y)["sum"]
        return x.square().mean()


def crossing(seed: int) -> tuple[float, Counter]:
    torch.manual_seed(seed)
    single = Crossing(7).double()
    model = wrap(3, copy.deepcopy(single))
    optimizer = OPTIMIZERS["adamw"](trained(single))
    for x in torch.randn(STEPS, 2, 5, 3, dtype=torch.float64):
        (sum(single(part) for part in x) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        with record_comms() as log:
            model.backward(model(x[dist.get_rank()]))
        model.step()
    return distance(model.full_state_dict(), single.state_dict()), log.calls


def test_a_unit_stays_until_all_its_inputs_have_gradients() -> None:
    for error, calls in run_ranks(crossing, 2, new_seed()):
        assert error < TOLERANCE
        # The root and two layers; the layers have frozen weights too, which are a flat of their own.
        assert calls == {"all_gather": 2 * (1 + 2 + 2), "reduce_scatter": 3}


# Against PyTorch's own


def train_torch(seed: int) -> dict[str, float]:
    """DDP with ZeroRedundancyOptimizer against stages 1 and 2, and fully_shard against stage 3."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch.jit when it loads

    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    sizes = random.Random(seed)
    config = tiny_config("gpt2", num_layers=3, num_heads=3, hidden=3 * sizes.randrange(3, 9), ffn=41, tied=True)
    start = Transformer(config).double()
    start.positions.requires_grad_(False)
    tokens = torch.randint(0, 256, (STEPS, n, 9))[:, rank : rank + 1]
    adamw = {"lr": 1e-2, "weight_decay": 0.1}

    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(start))
    updates = ZeroRedundancyOptimizer(trained(theirs), torch.optim.AdamW, **adamw)
    sharded = copy.deepcopy(start)
    for block in sharded.blocks:
        fully_shard(block)
    fully_shard(sharded)
    sharded_updates = torch.optim.AdamW(trained(sharded), **adamw)
    ours = {stage: wrap(stage, copy.deepcopy(start)) for stage in STAGES}
    for part in tokens:
        for model, optimizer in ((theirs, updates), (sharded, sharded_updates)):
            logits = model(part[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        for model in ours.values():
            model.backward(nn.functional.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()))
            model.step()
    ddp = theirs.module.state_dict()
    fsdp = {name: tensor.full_tensor() for name, tensor in sharded.state_dict().items()}
    result = {stage: distance(model.full_state_dict(), fsdp if stage == 3 else ddp) for stage, model in ours.items()}
    return result | {"moved": distance(ddp, start.state_dict())}


# Bytes sent


def step_of(model: nn.Module, tokens_BT: torch.Tensor) -> None:
    logits_BSV = model(tokens_BT[:, :-1])
    loss = nn.functional.cross_entropy(logits_BSV.float().flatten(0, 1), tokens_BT[:, 1:].flatten())
    model.backward(loss) if isinstance(model, ZeRO1) else loss.backward()


def traffic(seed: int, backwards: int) -> dict[str, tuple[dict[str, int], float]]:
    """Bytes by operation, and bytes sent, of a second step with several backward passes."""
    torch.manual_seed(seed)
    start = Transformer(tiny_config("llama", hidden=8 * random.Random(seed).randrange(2, 6), ffn=36))
    tokens_BT = torch.randint(0, 256, (1, 9))
    theirs = copy.deepcopy(start)
    for block in theirs.blocks:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(theirs, reshard_after_forward=True)  # by default the root would stay gathered
    updates = OPTIMIZERS["adamw"](theirs.parameters())
    models = {stage: wrap(stage, copy.deepcopy(start)) for stage in STAGES} | {"torch": theirs}
    result = {}
    for name, model in models.items():
        for _ in range(2):
            with record_comms() as log:
                for _ in range(backwards):
                    step_of(model, tokens_BT)
                if model is theirs:
                    updates.step()
                else:
                    model.step()
        result[name] = dict(log.bytes), log.ring_bytes_sent()
    result["psi"] = 4 * sum(p.numel() for p in start.parameters())
    result["padded"] = {s: 4 * sum(f.width for f in models[s].flats) * dist.get_world_size() for s in STAGES}
    result["flats"] = {s: len(models[s].flats) for s in STAGES}
    return result


def beside_torch(seed: int, backwards: int) -> tuple[dict, dict]:
    result = train_torch(seed) if dist.get_world_size() < 4 else None  # two and three ranks say it all
    return result, traffic(seed, backwards)


@pytest.mark.drawn
@pytest.mark.parametrize(("ranks", "backwards"), [(2, 1), (4, 1), (3, 2)])
def test_weights_and_bytes_sent_are_torch_s(ranks: int, backwards: int) -> None:
    for result, seen in run_ranks(beside_torch, ranks, new_seed(), backwards):
        if result is not None:
            assert result.pop("moved") > 1e-3
            assert max(result.values()) < TOLERANCE, result
        psi, padded = seen["psi"], seen["padded"]
        reduced, gathered = {1: 1, 2: backwards, 3: backwards}, {1: 1, 2: 1, 3: 2 * backwards}
        for stage in STAGES:
            size = padded[stage]
            assert psi <= size < psi + 4 * ranks * seen["flats"][stage]  # fewer than N values of padding a flat
            by_operation = {"reduce_scatter": reduced[stage] * size, "all_gather": gathered[stage] * size}
            assert seen[stage][0] == by_operation
            times = reduced[stage] + gathered[stage]
            assert seen[stage][1] == pytest.approx(times * size * (ranks - 1) / ranks)
            if ranks != 3:  # 2 and 4 divide every unit of this model
                assert size == psi
        if ranks == 3:
            assert seen["torch"][1] > seen[3][1]  # fully_shard pads the rows of every tensor
        else:
            assert seen["torch"] == seen[3]


# Bytes held


def held(seed: int | None, recipe: str, optimizer: str) -> dict[str, object]:
    """The states after the second backward, before its step; the odd model has a seed."""
    n = dist.get_world_size()
    module = Transformer(tiny_config("gpt2", num_layers=2)) if seed is None else Awkward(seed).float()
    master = torch.float32 if recipe == "mixed-bf16" else None
    module.to(torch.bfloat16 if master else torch.float32)
    frozen = {p: p.nbytes for p in module.parameters() if not p.requires_grad}
    width = {stage: {} for stage in STAGES}
    for stage in STAGES:
        model = wrap(stage, copy.deepcopy(module), optimizer, master=master)
        for _ in range(2):
            if seed is None:
                step_of(model, torch.randint(0, 256, (1, 9)))
            else:
                model.backward(loss_of(model, torch.arange(7), dist.get_rank() == 0))
            terms = held_bytes(model)
            model.step()
        own = sum(flat.width for flat in model.trained)
        rest = sum(flat.width for flat in model.flats if not flat.trained) if stage == 3 else None
        width[stage] = {
            "held": terms,
            "padded": own * n,
            "frozen": sum(frozen.values()) if rest is None else rest * (2 if master else 4),
            "after": held_bytes(model)["gradients"],
            "flats": len(model.flats),
        }
    return width | {"psi": sum(p.numel() for p in module.parameters() if p.requires_grad)}


RECIPES = [("fp32", "adamw"), ("mixed-bf16", "adamw"), ("fp32", "momentum")]


def held_each(seed: int) -> tuple[dict, dict]:
    """The odd model, and one that 1, 2 and 4 divide, in every recipe."""
    even = {} if dist.get_world_size() == 3 else {case: held(None, *case) for case in RECIPES}
    return held(seed, "fp32", "adamw"), even


@pytest.mark.drawn
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_bytes_held_are_the_calculator_s(ranks: int) -> None:
    """A flat is padded to a multiple of the ranks: fewer than N values each, and nothing else is extra."""
    for odd, even in run_ranks(held_each, ranks, new_seed()):
        assert list(even) == ([] if ranks == 3 else RECIPES)
        for (recipe, optimizer), seen in even.items():
            updates = {"momentum": "sgd-momentum"}.get(optimizer, optimizer)
            for stage in STAGES:
                expected = state_terms(seen["psi"], ranks, stage, recipe, updates)
                assert seen[stage]["held"] == {"master_weights": 0} | {k: v for k, v in expected.items() if v}
                assert seen[stage]["after"] == 0
        for stage in STAGES:
            padded = odd[stage]["padded"]
            assert odd["psi"] <= padded < odd["psi"] + ranks * odd[stage]["flats"]
            expected = state_terms(padded, ranks, stage, "fp32", "adamw")
            expected["weights"] += odd[stage]["frozen"]
            assert odd[stage]["held"] == {k: v for k, v in expected.items() if v} | {"master_weights": 0}
        assert odd[1]["padded"] == ranks * shard_size(odd["psi"], ranks)  # stage 1 has one flat: no more padding


# What stage 3 has gathered, and when


def gathered(prefetch: int) -> list[dict[str, int]]:
    """Count, at every layer, in forward and backward, how many units have their weights."""
    torch.manual_seed(0)
    model = ZeRO3(Transformer(tiny_config("gpt2", num_layers=6, hidden=16)), OPTIMIZERS["adamw"], prefetch=prefetch)
    most = {"forward": 0, "backward": 0}

    def count(phase: str) -> None:
        there = sum(any(flat.is_unsharded for flat in unit.flats) for unit in model.units)
        most[phase] = max(most[phase], there)

    for block in model.module.blocks:
        block.mlp.register_forward_hook(lambda module, args, output: count("forward"))
        block.mlp.register_full_backward_hook(lambda module, *gradients: count("backward"))
    seen = []
    for turn in range(2):
        most.update(forward=0, backward=0)
        step_of(model, torch.randint(0, 256, (1, 9)))
        full = sum(flat.is_unsharded for flat in model.flats)
        seen.append({**most, "left": full, "gradients": sum(f.unsharded_grad is not None for f in model.flats)})
        if turn == 0:  # a forward that never gets a backward, and that later ones must not wait for
            model(torch.randint(0, 256, (1, 9)))
        model.step()
    return seen


def _deal(sizes: list[int]) -> list[int]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # here: its package warns as it is imported

    params = [nn.Parameter(torch.zeros(size)) for size in sizes]
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
    return [sum(p.numel() for group in part for p in group["params"]) for part in optimizer._partition_parameters()]


def test_owners_are_dealt_as_torch_deals_them() -> None:
    dice = random.Random(new_seed())
    for sizes in ([5, 5, 5, 5, 5], [9, 1, 1, 1, 8, 3], [dice.randint(1, 50) for _ in range(20)]):
        assert run_ranks(_deal, 3, sizes)[0] == deal_whole(sizes, 3)


def test_a_job_takes_the_largest_micro_batches_that_fit() -> None:
    """By trying: m micro-batches of a rank's sequences, the larger ones rounded up, beside the states."""
    dice = random.Random(new_seed())
    for _ in range(300):
        params, ranks, each = dice.randint(1, 60), dice.randint(1, 6), dice.randint(1, 12)
        activations, budget = dice.randint(1, 40), dice.randint(1, 20 * params)
        choices = zero_choices(params, ranks, ranks * each, activations, budget)
        for stage, choice in enumerate(choices):
            held = sum(state_terms(params, ranks, stage).values())
            tried = [m for m in range(1, each + 1) if held + -(-each // m) * activations <= budget]
            assert (choice.held, choice.micro_batches) == (held, min(tried, default=None))
            assert choice.sent == (zero_sent_bytes(params, ranks, stage, min(tried)) if tried else None)
        sent = {choice.stage: choice.sent for choice in choices if choice.sent is not None}
        best = least_sent(choices)
        units = {k: (2, 2, choices[k].micro_batches + 1, 3 * choices[k].micro_batches)[k] for k in sent}
        assert best is None if not sent else all((units[best], best) <= (units[k], k) for k in sent)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_few_units_are_gathered_at_a_time(prefetch: int) -> None:
    for first, second in run_ranks(gathered, 2, prefetch):
        assert first["forward"] == 2  # the root and one block: what comes next is not known yet
        assert second["forward"] == second["backward"] == 2 + prefetch
        assert second["left"] == second["gradients"] == 0


# State dicts, groups and bad input


def whole_again(seed: int) -> None:
    torch.manual_seed(seed)
    start = Awkward(seed)
    start.register_buffer("count", torch.arange(3) + 1)
    state, other = start.state_dict(), copy.deepcopy(start)
    for tensor in other.state_dict().values():
        tensor.add_(dist.get_rank())  # rank 0's weights and buffers go to all
    for stage in STAGES:
        model = wrap(stage, copy.deepcopy(other))
        assert distance(model.full_state_dict(), state) == 0
        # The state is the same to the last bit. What is computed from it need not be: a weight that begins elsewhere
        # in memory, inside of a flat buffer, may be multiplied by another kernel, which adds in another order.
        logits, wanted = model(torch.arange(5), True), start(torch.arange(5), True)
        assert (logits - wanted).abs().max() < 1e-12 * wanted.abs().max()
        half = wrap(stage, copy.deepcopy(other).bfloat16(), master=torch.float32)
        half.step()  # without a backward: nothing moves
        assert distance(half.full_state_dict(), copy.deepcopy(start).bfloat16().state_dict()) == 0


def test_state_dict_bit_for_bit() -> None:
    run_ranks(whole_again, 3, new_seed())


def in_pairs() -> list[float]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank, values = dist.get_rank(), []
    for cls in STAGES.values():
        module = nn.Linear(1, 3, bias=False)
        module.weight.data.fill_(rank)
        model = cls(module, lambda ps: torch.optim.SGD(ps, lr=1.0), groups[rank // 2])
        model.backward((model(torch.ones(1, 1)) * rank**2).sum())
        model.step()
        values += model.full_state_dict()["weight"].flatten().tolist()
        with pytest.raises(ValueError, match=f"rank {rank} is not in the group"):
            cls(nn.Linear(1, 1), OPTIMIZERS["adamw"], groups[1 - rank // 2])
    return values


def test_group_is_an_argument() -> None:
    """Each pair starts from its first rank's weight and takes off the mean of its ranks' gradients."""
    for rank, values in enumerate(run_ranks(in_pairs, 4)):
        assert values == [0 - (0 + 1) / 2 if rank < 2 else 2 - (4 + 9) / 2] * 9


def accidents() -> None:
    adamw = OPTIMIZERS["adamw"]
    for stage, cls in STAGES.items():
        with pytest.raises(ValueError, match="1: gradients would be sparse"):
            cls(nn.Sequential(nn.Linear(1, 1), nn.Embedding(3, 3, sparse=True)), adamw)
        with pytest.raises(ValueError, match="every parameter is frozen"):
            cls(nn.Linear(2, 2).requires_grad_(False), adamw)
        model = wrap(stage, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        before = model.full_state_dict()
        with pytest.raises(RuntimeError, match=r"call model.backward\(loss\)"):
            model(torch.ones(1, 2)).sum().backward()
        model = wrap(stage, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        before = model.full_state_dict()
        model.step()
        assert distance(before, model.full_state_dict()) == 0
    with pytest.raises(ValueError, match="units Linear are not in the module"):
        ZeRO3(nn.Linear(1, 1), adamw, units=[nn.Linear(1, 1)])
    with pytest.raises(ValueError, match="prefetch=-1 must not be negative"):
        ZeRO3(nn.Linear(1, 1), adamw, prefetch=-1)


def test_accidents() -> None:
    run_ranks(accidents, 2)


# What used to be wrong in silence


def sgd(shards: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(shards, lr=1.0)


class Chain(nn.Module):
    """Layers of any kind, and how to run them."""

    def __init__(self, layers: list[nn.Module], run: Callable):
        super().__init__()
        self.layers, self.run = nn.ModuleList(layers), run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.layers, x)


def linears(count: int) -> list[nn.Linear]:
    return [nn.Linear(6, 6) for _ in range(count)]


def refused() -> None:
    """What `attacked_toys` does not draw."""
    adamw = OPTIMIZERS["adamw"]
    for cls in STAGES.values():
        model = cls(nn.Linear(2, 2), sgd)
        model.backward(model(torch.ones(1, 2)).sum())
        with pytest.raises(RuntimeError, match=r"call model\.step\(\), not optimizer\.step\(\)"):
            model.optimizer.step()
        model.step()
        with pytest.raises(ValueError, match="must have all flat shards"):
            cls(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), lambda shards: adamw(shards[:1]))
    module = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(ValueError, match="units ModuleList have no forward"):
        ZeRO3(module, sgd, units=[module[1]])
    model = ZeRO3(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), sgd)
    state = model.full_state_dict()
    with pytest.raises(RuntimeError, match=r"use model\.full_state_dict"):
        model.state_dict()
    for part, prefix in ((model, "module."), (model.module, "")):
        with pytest.raises(RuntimeError, match="load them first, then wrap"):
            part.load_state_dict({prefix + name: tensor for name, tensor in state.items()})
    assert model.module[0].weight.isnan().all()
    assert "nan" in repr(model.module[0].weight)
    biased = ZeRO3(Chain(linears(2), lambda ls, x: ls[1](x) + ls[0].bias), sgd)
    with pytest.raises(RuntimeError, match="the loss is NaN: weights are, or one was read where"):
        biased.backward(biased(torch.ones(1, 6)).sum())


def test_what_zero_cannot_do_is_refused() -> None:
    run_ranks(refused, 2)


def mixed_master(seed: int) -> dict[str, object]:
    """bf16 matrices and fp32 norms under an fp32 master."""
    torch.manual_seed(seed)

    class Widen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.float()

    start = nn.Sequential(nn.Linear(4, 4).bfloat16(), Widen(), nn.LayerNorm(4), nn.Linear(4, 4))
    x = torch.randn(5, 4).bfloat16()
    found = {}
    for optimizer in OPTIMIZERS:
        ended = []
        for stage in STAGES:
            model = wrap(stage, copy.deepcopy(start), optimizer, master=torch.float32)
            for _ in range(5):
                model.backward(model(x).square().sum())
                model.step()
            ended.append(model.full_state_dict())
        found[f"stages {optimizer}"] = max(distance(ended[0], other) for other in ended[1:])
    # Weights that others change, as weight clipping does, are the master copy's too.
    model = wrap(1, nn.Linear(4, 4).bfloat16(), master=torch.float32)
    with torch.no_grad():
        model.module.weight.fill_(0.5)
    model.step()
    found["changed by others"] = (
        (model.trained[0].sharded_param[:8] - 0.5).abs().max().item() if not dist.get_rank() else 0
    )
    return found


def test_a_master_copy_is_the_same_in_every_stage_and_takes_what_others_change() -> None:
    for found in run_ranks(mixed_master, 2, new_seed()):
        assert all(value == 0 for value in found.values()), found


# Muon: whole matrices


@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (16, 16)])
def test_the_flops_of_a_factor_are_those_that_torch_counts(shape: tuple[int, int]) -> None:
    with FlopCounterMode(display=False) as counter:
        _zeropower_via_newtonschulz(torch.randn(shape), (3.4, -4.8, 2.0), 5, 1e-7)
    assert counter.get_total_flops() == newton_schulz_flops(shape)


def _torch_muon(shapes: list[tuple[int, int]], exact: bool) -> tuple[Counter, float, float]:
    """Take a step of torch.optim.Muon under FSDP2; return what it sends, and how far it ends from one process."""
    if exact:
        torch.Tensor.bfloat16 = torch.Tensor.clone  # Newton-Schulz then stays in float64
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(c, r, bias=False) for r, c in shapes]).double()
    alone = copy.deepcopy(model)
    fully_shard(model)
    model(torch.randn(256, shapes[0][1], dtype=torch.float64)).square().sum().backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        q.grad = p.grad.full_tensor()
    here, there = (torch.optim.Muon(m.parameters(), lr=0.1, weight_decay=0.0) for m in (model, alone))
    with record_comms() as log:
        here.step()
    there.step()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return log.calls, log.ring_bytes_sent(), max((p.full_tensor() - q).abs().max().item() for p, q in pairs)


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="DTensor's choices are those of 2.13")
def test_torch_s_muon_under_fsdp2_communicates_for_every_product() -> None:
    shapes = [(36, 48), (48, 36)]
    for ranks in (2, 3):
        calls, sent, _ = run_ranks(_torch_muon, ranks, shapes, False)[0]
        # Five iterations: three gathers for the wide matrix, two all-reduces for the tall one; and a norm for each.
        assert calls == {"all_gather": 5 * 3, "all_reduce": 5 * 2 + 2}
        assert sent == pytest.approx(torch_muon_sent(shapes, ranks))
    # Right it is: without bf16 it ends where one process does. An iteration magnifies a rounding of 1e-16 at most
    # 3.4 + 3 * 4.8 + 5 * 2.0 = 28 times, five of them 2e7 times.
    assert run_ranks(_torch_muon, 2, shapes, True)[0][2] < 1e-8


def _home_sends(shapes: list[tuple[int, int]]) -> float:
    """Take a momentum of every matrix home, and each rank's rows of its factor back."""
    dealt = deal_out([newton_schulz_flops(shape) for shape in shapes], 3)
    with record_comms() as log:
        for k, (rows, columns) in enumerate(shapes):
            (home,) = (rank for rank, mine in enumerate(dealt) if k in mine)
            mine = torch.randn(rows // 3, columns)
            parts = [torch.empty_like(mine) for _ in range(3)] if dist.get_rank() == home else None
            dist.gather(mine, parts, home)
            dist.scatter(mine, parts, home)
    return log.ring_bytes_sent()


def test_what_muon_costs_by_hand_and_on_ranks() -> None:
    shapes = [(12, 9), (9, 30), (6, 6), (30, 9), (3, 14)]
    assert max(run_ranks(_home_sends, 3, shapes)) == pytest.approx(muon_cost(shapes, 3, "home", bytes_per_value=4).step)
    matrices = [(2, 2), (2, 2), (2, 4), (2, 2)]  # 20 values
    owner, stacks = (muon_cost(matrices, 2, way) for way in ("owner", "by shape"))
    assert (owner.held, owner.zero, owner.step) == (1.2, 2 * 12 * 2, 0)  # 8 + 4 on one rank, 4 + 4 on the other
    assert (stacks.held, stacks.zero, stacks.step) == (1.6, 2 * 16 * 2, 0)  # two of three, and the one, on both
    assert stacks.flops == 2 * newton_schulz_flops((2, 2)) + newton_schulz_flops((4, 2))
    for wrong in ((matrices, 0, "owner"), ([], 2, "owner"), (matrices, 2, "elsewhere")):
        with pytest.raises(ValueError, match="must be"):
            muon_cost(*wrong)


def test_claim_owners_send_least_on_few_ranks_and_a_home_on_many() -> None:
    matrices = muon_matrices(preset("llama-3-8b"))
    sent = {n: {way: muon_cost(matrices, n, way).sent for way in MUON_WAYS} for n in (8, 64, 256)}
    assert [min(by_way, key=by_way.get) for by_way in sent.values()] == ["owner", "home", "home"]
    assert 64 < len(matrices) < 256  # where ranks are more than matrices, some own none


@pytest.mark.parametrize("ranks", [1, 8, 64, 256])
def test_gathering_adds_and_computes_most(ranks: int) -> None:
    """As torchtitan's pull request 3719 says: owners add nothing, who gathers computes each factor on every rank."""
    matrices = muon_matrices(preset("llama-3-8b"))
    assert Counter(matrices) == {(4096, 4096): 64, (1024, 4096): 64, (14336, 4096): 64, (4096, 14336): 32}
    gather, home, owner, stacks = (muon_cost(matrices, ranks, way) for way in MUON_WAYS)
    assert owner.step == stacks.step == 0
    assert gather.busy == ranks
    if ranks > 1:
        assert 0 < home.step < gather.step < torch_muon_sent(matrices, ranks)
        assert max(home.busy, owner.busy, stacks.busy) < ranks
        assert (owner.sent < home.sent) == (ranks == 8), "the chapter says where padding begins to cost more"
    assert owner.held * sum(map(math.prod, matrices)) / ranks == max(deal_whole(list(map(math.prod, matrices)), ranks))
