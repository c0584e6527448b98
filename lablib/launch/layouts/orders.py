"""The order in which kinds of parallelism are applied, and what really happens in another order.

    for outcome in try_orders():
        print(outcome)

The order is: cut stages, split layers (tp), recompute, compile, shard (FSDP), and then make the optimizer. `CASES` has
the other orders, each a few lines of PyTorch, run on four ranks: two replicas (dp) of two tensor-parallel ranks, from
the same small model and the same tokens. The verdict is made from what was seen: the text of an error, or a number
held against the right one. Not every other order is wrong: one here makes no difference, against what is often said.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from lablib.launch.layouts.variants import apply_in_order, clip_grad_norm, mean_loss, shard_blocks, tp_plan, wrap_blocks
from lablib.launch.measure import record_comms
from lablib.launch.ranks import run_ranks
from lablib.launch.torch_private import checkpoint_wrapper
from lablib.toys.pipeline import split_stages
from lablib.toys.transformer import Transformer, tiny_config

RANKS = 4
VERDICTS = ("right", "refused", "silently wrong", "wasteful", "no difference")
LEARNING_RATE = 0.1  # of plain SGD
TOLERANCE = 1e-5  # losses near 4 in fp32: two correct ways differ by some 1e-6, one SGD step changes 1e-2 and more


@dataclass(frozen=True)
class Outcome:
    """One order, tried."""

    name: str  # short name
    order: tuple[str, ...]  # what was applied, in this order
    verdict: str  # one of `VERDICTS`
    seen: str  # what was seen: the first line of the error, or the numbers as a sentence
    numbers: dict[str, float] = field(default_factory=dict)  # the numbers behind the sentence
    warned: int = 0  # how many different warnings PyTorch gave
    fix: str = ""  # what to do

    def __str__(self) -> str:
        return f"{' -> '.join(self.order)}: {self.verdict}. {self.seen}"


def try_orders(names: list[str] | None = None, *, timeout: float = 120) -> list[Outcome]:
    """Run orders of application by their names in `CASES`, all by default, and say what happened."""
    chosen = list(CASES if names is None else names)
    if unknown := [name for name in chosen if name not in CASES]:
        raise ValueError(f"unknown order {', '.join(unknown)}; use some of {', '.join(CASES)}")
    found = run_ranks(run_cases, RANKS, chosen, timeout=timeout)[0]
    return [Outcome(name, CASES[name].order, *found[name], CASES[name].fix) for name in chosen]


class Bench:
    """The model and the tokens that every case starts from, and what is right for them."""

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        config = tiny_config("gpt2", num_layers=2, hidden=16, vocab=32, max_positions=16, tied=False)
        self.base = Transformer(config)
        self.all_tokens = tokens = torch.randint(0, config.vocab, (4, 9))
        self.tokens = tokens.chunk(2)[self.mesh["dp"].get_local_rank()]
        alone = self.model()
        optimizer = torch.optim.SGD(alone.parameters(), lr=LEARNING_RATE)
        loss = mean_loss(alone(tokens[:, :-1]), tokens)
        loss.backward()
        self.before = loss.item()
        self.norm = nn.utils.get_total_norm([p.grad for p in alone.parameters()]).item()
        optimizer.step()
        with torch.no_grad():
            self.after = mean_loss(alone(tokens[:, :-1]), tokens).item()
        self.blocks = sum(p.numel() for p in alone.blocks.parameters())

    def model(self) -> Transformer:
        """Return a fresh copy of the model."""
        return copy.deepcopy(self.base)

    def loss(self, model: nn.Module, *, replicas: bool = True) -> Tensor:
        """Return the loss of this replica's tokens; of all of them where there are no replicas."""
        tokens = self.tokens if replicas else self.all_tokens
        return mean_loss(model(tokens[:, :-1]), tokens)

    def train(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, replicas: bool = True
    ) -> tuple[float, dict[str, int]]:
        """Take one step; return the loss of all tokens after it, and the calls of forward and backward."""
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, foreach=False)
        with record_comms() as log:
            self.loss(model, replicas=replicas).backward()
        optimizer.step()
        with torch.no_grad():
            loss = self.loss(model, replicas=replicas).detach()
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size(), dict(log.calls)

    def local(self, model: nn.Module) -> int:
        """Return the parameters of the blocks that this rank holds."""
        held = (p for name, p in model.named_parameters() if "blocks." in name)
        return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in held)

    def tp(self, model: nn.Module) -> nn.Module:
        """Split the layers."""
        return parallelize_module(model, self.mesh["tp"], tp_plan(self.base))

    def fsdp(self, model: Transformer) -> Transformer:
        """Shard the blocks, then the rest."""
        shard_blocks(model, self.mesh["dp"])
        return model

    def ddp(self, model: nn.Module) -> DistributedDataParallel:
        """Make replicas."""
        return DistributedDataParallel(model, process_group=self.mesh["dp"].get_group())


Result = tuple[str, str, dict[str, float]]  # verdict, what was seen, the numbers behind it


@dataclass(frozen=True)
class Case:
    """One order."""

    order: tuple[str, ...]  # what is applied, in this order
    run: Callable[[Bench], Result]  # does it
    fix: str  # what to do


CASES: dict[str, Case] = {}


def _case(*order: str, fix: str = "") -> Callable[[Callable[[Bench], Result]], Callable[[Bench], Result]]:
    """Put a function into `CASES`, by its name."""

    def register(run: Callable[[Bench], Result]) -> Callable[[Bench], Result]:
        CASES[run.__name__.removeprefix("_").replace("_", "-")] = Case(order, run, fix)
        return run

    return register


def _by_loss(bench: Bench, loss: float) -> Result:
    numbers = {"loss": loss, "before": bench.before, "right": bench.after}
    seen = f"Loss {loss:.4f} after a step; one process goes from {bench.before:.4f} to {bench.after:.4f}."
    return ("no difference" if abs(loss - bench.after) < TOLERANCE else "silently wrong"), seen, numbers


def _by_held(bench: Bench, model: nn.Module, *, replicas: bool = True) -> Result:
    """For an order in which the plan finds no block: how much a rank still holds of them."""
    held = bench.local(model)
    loss, _ = bench.train(model, replicas=replicas)
    right = abs(loss - bench.after) < TOLERANCE
    numbers = {"held": float(held), "whole": float(bench.blocks), "loss": loss, "right": bench.after}
    seen = (
        f"A rank holds {held:,} of the {bench.blocks:,} parameters of the blocks, and the loss after a step, {loss:.4f}, "
        f"is {'right: nothing but warnings tells' if right else f'not {bench.after:.4f}'}."
    )
    return ("silently wrong" if held == bench.blocks else "no difference"), seen, numbers


@_case("tp", "recompute", "compile", "FSDP", "optimizer")
def _right(bench: Bench) -> Result:
    model = bench.model()
    apply_in_order(model, bench.mesh, recompute=True, compile_backend="eager")
    loss, _ = bench.train(model)
    off = abs(loss - bench.after)
    numbers = {"loss": loss, "right": bench.after, "off": off}
    if off >= TOLERANCE:
        return "silently wrong", f"Loss {loss:.4f} after a step; one process has {bench.after:.4f}.", numbers
    return "right", f"Loss {loss:.4f} after a step, as in one process.", numbers


@_case("FSDP", "tp", fix="tp first: FSDP shards DTensors, tp does not split shards.")
def _fsdp_tp(bench: Bench) -> Result:
    return _by_loss(bench, bench.train(bench.tp(bench.fsdp(bench.model())))[0])


@_case("tp", "DDP", fix="FSDP in place of DDP: it takes DTensors.")
def _tp_ddp(bench: Bench) -> Result:
    return _by_loss(bench, bench.train(bench.ddp(bench.tp(bench.model())))[0])


@_case("FSDP of the model", "FSDP of its blocks", fix="Blocks first, the model last.")
def _root_blocks(bench: Bench) -> Result:
    model = bench.model()
    fully_shard(model, mesh=bench.mesh["dp"])
    return _by_loss(bench, bench.train(bench.fsdp(model))[0])


@_case("FSDP", "stages", fix="Cut stages first: what is gathered by the root's forward must have a root that runs.")
def _fsdp_stages(bench: Bench) -> Result:
    first, last = split_stages(bench.fsdp(bench.model()), 2)
    return _by_loss(bench, bench.train(nn.Sequential(first, last))[0])


@_case("recompute", "tp", fix="tp first: the wrapper changes the names that the plan looks for.")
def _recompute_tp(bench: Bench) -> Result:
    model = bench.model()
    wrap_blocks(model, checkpoint_wrapper)
    return _by_held(bench, bench.tp(model), replicas=False)


@_case("compile", "tp", fix="tp first: the compiled module has other names too; read the warnings.")
def _compile_tp(bench: Bench) -> Result:
    model = bench.model()
    wrap_blocks(model, lambda block: torch.compile(block, backend="eager"))
    return _by_held(bench, bench.tp(model), replicas=False)


@_case("DDP", "tp", fix="tp first, with FSDP: DDP's wrapper changes the names too.")
def _ddp_tp(bench: Bench) -> Result:
    return _by_held(bench, bench.tp(bench.ddp(bench.model())))


@_case("optimizer", "FSDP", fix="The optimizer last: it holds parameters that the model no longer has.")
def _optimizer_fsdp(bench: Bench) -> Result:
    model = bench.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return _by_loss(bench, bench.train(bench.fsdp(model), optimizer)[0])


@_case("optimizer", "tp", fix="The optimizer last: it still trains what tp left alone, and nothing else.")
def _optimizer_tp(bench: Bench) -> Result:
    model = bench.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return _by_loss(bench, bench.train(bench.tp(model), optimizer, replicas=False)[0])


@_case("DDP", "stages", fix="Cut stages first, and wrap each: DDP prepares its hooks in its own forward.")
def _ddp_stages(bench: Bench) -> Result:
    model = bench.model()
    bench.ddp(model)  # its hooks are there, but its forward never runs
    model = nn.Sequential(*split_stages(model, 2))
    with record_comms() as log:
        bench.loss(model).backward()
    grad = model[1].head.weight.grad
    mean = grad.clone()
    dist.all_reduce(mean, group=bench.mesh["dp"].get_group())
    apart = (grad - mean / 2).abs().max().item() / grad.abs().max().item()
    numbers = {"apart": apart, "all_reduces": float(log.calls["all_reduce"])}
    seen = f"Backward reduces nothing: gradients of the head are {apart:.0%} of their largest value off the mean."
    return ("silently wrong" if apart > TOLERANCE else "no difference"), seen, numbers


@_case("tp", "stages", fix="Cut stages first.")
def _tp_stages(bench: Bench) -> Result:
    model, stage = bench.model(), split_stages(bench.model(), 2)[bench.mesh["dp"].get_local_rank()]
    with record_comms() as all_layers:
        bench.tp(model)
    with record_comms() as own_layers:
        parallelize_module(stage, bench.mesh["tp"], tp_plan(stage))
    much, little = (sum(log.bytes.values()) for log in (all_layers, own_layers))
    numbers = {"bytes": float(much), "bytes_of_own_stage": float(little)}
    seen = (
        f"Every rank takes part in splitting {much:,} bytes of weights, where its own stage has {little:,}: "
        "without a meta device the whole model must fit before it is cut."
    )
    return ("wasteful" if much > little else "no difference"), seen, numbers


@_case("FSDP", "recompute", fix="The usual order all the same: with reentrant checkpoints FSDP1 gathers once more.")
def _fsdp_recompute(bench: Bench) -> Result:
    other, usual = bench.fsdp(bench.model()), bench.model()
    wrap_blocks(other, checkpoint_wrapper)
    wrap_blocks(usual, checkpoint_wrapper)
    (loss, calls), (_, expected) = bench.train(other), bench.train(bench.fsdp(usual))
    numbers = {"all_gathers": float(calls["all_gather"]), "usual_all_gathers": float(expected["all_gather"])}
    same = abs(loss - bench.after) < TOLERANCE and calls == expected
    seen = (
        f"Loss {loss:.4f} after a step, as in one process, and {calls['all_gather']} all-gathers in a step against "
        f"{expected['all_gather']} in the usual order."
    )
    return ("no difference" if same else "wasteful"), seen, numbers


@_case(
    "tp of some layers",
    "FSDP",
    "clip",
    fix="Norms (the layers) have no place on the tp mesh: add up the squares mesh by mesh.",
)
def _clip(bench: Bench) -> Result:
    model = bench.fsdp(bench.tp(bench.model()))
    bench.loss(model).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return "no difference", f"The norm is {norm}.", {}


@_case("tp of some layers", "FSDP", "clip mesh by mesh")
def _clip_by_mesh(bench: Bench) -> Result:
    model, max_norm = bench.fsdp(bench.tp(bench.model())), bench.norm / 2
    bench.loss(model).backward()
    norm = clip_grad_norm(model.parameters(), max_norm)
    clipped = clip_grad_norm(model.parameters(), float("inf"))
    right = abs(norm - bench.norm) < TOLERANCE * bench.norm and abs(clipped - max_norm) < TOLERANCE * max_norm
    seen = f"Norm {norm:.5f}; one process has {bench.norm:.5f}."
    return ("right" if right else "silently wrong"), seen, {"norm": norm, "right": bench.norm, "clipped": clipped}


def run_cases(names: list[str]) -> dict[str, tuple[str, str, dict[str, float], int]]:
    """Run cases on this rank, all ranks the same; the last number is how many warnings PyTorch gave."""
    bench = Bench()
    return {name: _run(bench, CASES[name]) for name in names}


def _run(bench: Bench, case: Case) -> tuple[str, str, dict[str, float], int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            verdict, seen, numbers = case.run(bench)
        except (RuntimeError, ValueError) as error:
            text = str(error).strip().splitlines()[0]
            verdict, seen, numbers = "refused", f"{type(error).__name__}: {text}", {}
    messages = {str(one.message).splitlines()[0] for one in caught if issubclass(one.category, UserWarning)}
    return verdict, seen, numbers, len(messages)
