"""Gradients that toys make or move by hand: they lie as their parameters do, and a replay gives those of its own forward.

A fused optimizer walks through weight, gradient and states as they lie in memory, so a gradient with other strides
updates other entries, without a word. Every function of the toys that puts something into `.grad` is in `WRITERS`.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lablib.calc.schedules import schedule
from lablib.launch.ranks import run_ranks
from lablib.toys import context_parallel, expert_parallel
from lablib.toys.data_parallel import ddp
from lablib.toys.expert_parallel.moe_transformer import MoETransformer, tiny_mixture
from lablib.toys.gradient_layout import empty_grad
from lablib.toys.pipeline import PipelineExecutor, split_stages
from lablib.toys.pipeline.stages import DeferWeights
from lablib.toys.precision import MasterWeights
from lablib.toys.transformer import Transformer, tiny_config
from lablib.toys.zero import STAGES

TOYS = Path(__file__).resolve().parents[1] / "lablib" / "toys"


class Turned(nn.Module):
    """A transposed weight, a convolution whose channels come last, and an ordinary matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Linear(12, 5)
        self.turned.weight = nn.Parameter(self.turned.weight.detach().t().contiguous().t())
        self.image = nn.Conv2d(3, 4, 2, bias=False).to(memory_format=torch.channels_last)
        self.plain = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.turned(x).square().mean() + self.plain(self.image(x.view(-1, 3, 2, 2)).flatten(1)).square().mean()


class OneTurned(nn.Module):
    """The transposed weight alone, in a product that `DeferWeights` puts off."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = Turned().turned

    def forward(self, x: Tensor) -> Tensor:
        return self.turned(x.requires_grad_()).square().mean()


def turn(model: nn.Module) -> nn.Module:
    """Transpose all matrices of a model where they lie; a tied one stays tied."""
    turned: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            if p.dim() == 2:
                turned.setdefault(p, nn.Parameter(p.detach().t().contiguous().t()))
                setattr(module, name, turned[p])
    return model


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


# Each takes a step of a model on this rank's rows, and leaves the new weights in it or returns them.


def data_parallel(make: type, module: nn.Module, rows: Tensor) -> None:
    model = make(module)
    model(rows).backward()
    model.sync()
    adamw(list(module.parameters())).step()


def zero(stage: int, module: nn.Module, rows: Tensor) -> dict[str, Tensor]:
    model = STAGES[stage](module, adamw)
    model.backward(model(rows))
    model.step()
    return model.full_state_dict()


def average(function: Callable, groups: int, module: nn.Module, rows: Tensor) -> None:
    module(rows).backward()
    function(module, *[dist.group.WORLD] * groups)
    adamw(list(module.parameters())).step()


def deferred(module: nn.Module, rows: Tensor) -> None:
    with DeferWeights() as later:
        loss = module(rows)
    loss.backward()
    later.run()
    ddp.NaiveDDP(module).sync()
    adamw(list(module.parameters())).step()


def master(module: nn.Module, rows: Tensor) -> None:
    weights = MasterWeights(module.float(), torch.float32)
    weights.model(rows.float()).backward()
    weights.take_gradients()
    ddp.NaiveDDP(module).sync()
    adamw(list(module.parameters())).step()


def pipeline(name: str, model: Transformer, tokens_BT: Tensor) -> None:
    """Both ranks end with the weights of the whole model."""
    executor = PipelineExecutor(split_stages(model, 2), schedule(name, p=2, m=2))
    tokens = [torch.empty_like(tokens_BT) for _ in range(2)]
    dist.all_gather(tokens, tokens_BT)
    executor.step(tokens)
    adamw(executor.parameters()).step()
    number = dist.get_rank()
    held: list[dict] = [{}] * 2
    dist.all_gather_object(held, executor.stages[number].state_dict())
    model.load_state_dict(held[0] | held[1])


TAKES: dict[str, tuple[Callable, Callable]] = {
    **{
        name: (Turned, partial(data_parallel, getattr(ddp, name)))
        for name in ("NaiveDDP", "BucketedDDP", "OverlappedDDP")
    },
    **{f"ZeRO{stage}": (Turned, partial(zero, stage)) for stage in STAGES},
    "context parallel": (Turned, partial(average, context_parallel.average_gradients, 1)),
    "expert parallel": (Turned, partial(average, expert_parallel.average_gradients, 2)),
    "deferred weights": (OneTurned, deferred),
    "master weights": (Turned, master),
    **{name: (Transformer, partial(pipeline, name)) for name in ("1f1b", "zb-h1")},
}

#: Every function of the toys that gives a parameter a gradient, and the case that holds it.
WRITERS = {
    "gradient_layout.set_grad": "expert parallel",
    "data_parallel.ddp.NaiveDDP.sync": "NaiveDDP",  # what it had, or None
    "data_parallel.ddp.NaiveDDP._reduce": "NaiveDDP",
    "data_parallel.ddp.BucketedDDP._mark_ready": "BucketedDDP",
    "zero.stages_1_2.ZeRO1._update_shards": "ZeRO1",  # of flat shards
    "context_parallel.cp_transformer.average_gradients": "context parallel",
    "pipeline.stages.DeferWeights.run": "deferred weights",  # a bias, of one dim
    "pipeline.executor.PipelineExecutor._summing_tied": "1f1b",
    "precision.master.MasterWeights.take_gradients": "master weights",
}


def writers() -> Iterator[str]:
    """Yield every function of the toys that assigns to `.grad`, more than None."""

    def walk(node: ast.AST, name: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inside = isinstance(child, ast.ClassDef | ast.FunctionDef)
            if isinstance(child, ast.Assign | ast.AugAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                pairs = [
                    pair
                    for target in targets
                    for pair in (
                        zip(target.elts, child.value.elts, strict=True)
                        if isinstance(target, ast.Tuple) and isinstance(child.value, ast.Tuple)
                        else [(target, child.value)]
                    )
                ]
                for target, value in pairs:
                    nothing = isinstance(value, ast.Constant) and value.value is None
                    if isinstance(target, ast.Attribute) and target.attr == "grad" and not nothing:
                        yield name
            yield from walk(child, f"{name}.{child.name}" if inside else name)

    for path in sorted(TOYS.rglob("*.py")):
        module = ".".join(path.relative_to(TOYS).with_suffix("").parts)
        yield from walk(ast.parse(path.read_text(encoding="utf-8")), module)


def test_every_function_that_writes_a_gradient_has_a_case() -> None:
    assert set(writers()) == set(WRITERS)
    assert set(WRITERS.values()) <= set(TAKES)


def build(make: Callable) -> tuple[nn.Module, Tensor]:
    """Return the model and the batch of both ranks, the same on each."""
    torch.manual_seed(0)
    if make is not Transformer:
        return make().double(), torch.randn(8, 12, dtype=torch.float64)
    config = tiny_config("gpt2", hidden=16, num_layers=2, vocab=20, max_positions=8)
    return turn(Transformer(config)).double(), torch.randint(20, (4, 7))


def beside_one_process() -> dict[str, tuple[float, bool]]:
    """Return, of every way, the largest difference of a weight after a step, and whether the gradients lie alike."""
    found = {}
    for name, (make, take) in TAKES.items():
        model, batch = build(make)
        alone = copy.deepcopy(model)
        loss = alone.loss(batch) if make is Transformer else alone(batch)
        loss.backward()
        adamw(list(alone.parameters())).step()
        ours = take(model, batch.chunk(2)[dist.get_rank()].clone()) or model.state_dict()
        far = max((ours[name] - weight).abs().max().item() for name, weight in alone.state_dict().items())
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        found[name] = far, all(a.grad is None or a.grad.stride() == b.grad.stride() for a, b in pairs)
    return found


@pytest.fixture(scope="module")
def differences() -> list[dict[str, tuple[float, bool]]]:
    return run_ranks(beside_one_process, 2)


@pytest.mark.parametrize("name", TAKES)
def test_a_fused_optimizer_updates_what_one_process_does(name: str, differences: list) -> None:
    for found in differences:
        far, alike = found[name]
        # AdamW's first step moves every weight by lr = 0.1, up or down; a master copy is in fp32.
        assert far < 1e-5
        assert alike


def test_room_lies_as_its_parameter() -> None:
    plain = torch.arange(24.0).view(2, 3, 2, 2)
    for p in (plain, plain.to(memory_format=torch.channels_last), plain.transpose(0, 1), torch.tensor(1.0)):
        for room in (empty_grad(nn.Parameter(p)), empty_grad(nn.Parameter(p), torch.zeros(p.numel()))):
            assert (room.shape, room.stride(), room.dtype) == (p.shape, p.stride(), p.dtype)


# --- replays ------------------------------------------------------------------------------------------------


def recomputed(model: nn.Module) -> nn.Module:
    """Let every block keep its inputs alone, and run again in backward."""
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def sequences(way: str, again: bool) -> dict[str, Tensor]:
    """Two micro-batches with other documents, both forward before one backward."""
    torch.manual_seed(0)
    config = tiny_config("llama", num_kv_heads=2, hidden=16, num_layers=2, vocab=20, max_positions=32)
    model = context_parallel.ContextParallelTransformer(config, dist.group.WORLD, way).double()
    model = recomputed(model) if again else model
    first, second = torch.randint(20, (2, 1, 9))
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
    (model.loss(first, documents) + model.loss(second, torch.zeros_like(documents))).backward()
    context_parallel.average_gradients(model, dist.group.WORLD)
    return {name: p.grad for name, p in model.named_parameters()}


def experts(again: bool) -> dict[str, Tensor]:
    """Two micro-batches whose losses of balance are read behind each forward, as its docstring says."""
    torch.manual_seed(0)
    model = MoETransformer(tiny_mixture(hidden=16, num_layers=2, vocab=20), dist.group.WORLD)
    model = recomputed(model) if again else model
    loss = torch.zeros(())
    for tokens in torch.randint(20, (2, 3, 9)):
        loss = loss + model.loss(tokens)
        loss = loss + model.balance_loss() + model.z_loss()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def replays() -> dict[str, tuple[float, float]]:
    """Return the largest difference of a gradient with recomputation, and the largest gradient."""
    ways = {way: partial(sequences, way) for way in context_parallel.cp_transformer.WAYS} | {"experts": experts}
    found = {}
    for name, run in ways.items():
        kept, again = run(False), run(True)
        pairs = [(kept[name], again[name]) for name in kept if kept[name] is not None]
        found[name] = tuple(max(float(t.abs().max()) for t in of) for of in ([a - b for a, b in pairs], kept.values()))
    return found


def test_a_loss_of_the_routers_without_a_gradient_is_refused() -> None:
    """A reentrant checkpoint runs forward without gradients; the loss of balance would train nothing."""
    model = MoETransformer(tiny_mixture(hidden=16, num_layers=2, vocab=20))
    tokens = torch.randint(20, (3, 9))
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=True)
    model.loss(tokens)
    for loss in (model.balance_loss, model.z_loss):
        with pytest.raises(RuntimeError, match="no gradient leads from this loss to the routers"):
            loss()
        with torch.no_grad():
            assert loss() > 0  # to look at


def test_a_replay_reads_what_its_own_forward_read() -> None:
    for found in run_ranks(replays, 2):
        for name, (far, largest) in found.items():
            assert far == 0 < largest, name
