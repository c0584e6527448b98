"""Recomputation measured: what a strategy keeps, costs and moves, and what it communicates again on several ranks.

`measure_step` runs a step of the toy transformer and counts; `predicted_cost` says beforehand what it will count, in
the same words. `find_largest_batch` runs batches until one does not fit.

The others combine it with FSDP2, tensor parallelism, DDP and pipelines: `run_ranks(fsdp_gathers, 2, "inside")`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lablib.calc.memory.activations import RecomputeCost, largest_that_fits, recompute_cost
from lablib.launch.measure import LiveBytes, record_comms
from lablib.launch.ranks import rank_mesh
from lablib.launch.recompute.apply import AppliedStrategy, apply_strategy
from lablib.toys.tensor_parallel import parallelize
from lablib.toys.transformer import Transformer, tiny_config


@dataclass(frozen=True)
class MeasuredStep:
    """One step of a model under a strategy."""

    strategy: str  # its name
    saved_bytes: int  # alive when forward ends, as `RecomputeCost.saved_bytes`
    peak_bytes: int  # the most that forward and its repetitions kept, as `RecomputeCost.peak_bytes`
    host_bytes: int  # copied to the host in forward
    forward_flops: int  # of the forward pass, by FlopCounterMode
    extra_flops: int  # of what ran again in backward
    # of the full step. A fused attention kernel forgets the scores and computes them again inside its own backward:
    # one product of forward's two more than twice the forward pass, whatever the strategy.
    flops: int
    seconds: tuple[float, ...]  # times of steps, empty if none was timed
    loss: float  # what it was


def measure_step(
    model: Transformer,
    strategy: str,
    *,
    batch: int,
    seq: int,
    implementation: str = "torch",
    early_stop: bool = True,
    flops: bool = True,
    repeats: int = 0,
) -> MeasuredStep:
    """Run steps (forward and backward) under a strategy: one counts bytes, one FLOPs, `repeats` are timed."""
    device = model.embed.weight.device

    def forward() -> Tensor:
        torch.manual_seed(0)
        return model.loss(torch.randint(model.config.vocab, (batch, seq + 1), device=device))

    with apply_strategy(model, strategy, implementation=implementation, early_stop=early_stop) as applied:
        model.zero_grad(set_to_none=True)
        applied.tracker = tracker = LiveBytes()
        with tracker:
            loss = forward()
            tracker.end_forward()
            saved = tracker.kept
            loss.backward()
        applied.tracker = None
        held = loss.nbytes  # the caller's, not autograd's
        host_bytes = applied.host_bytes
        counted = _count_flops(applied, forward) if flops else (0, 0, 0)
        seconds = []
        for _ in range(repeats + 1 if repeats else 0):
            model.zero_grad(set_to_none=True)
            seconds.append(_timed(forward, device))
        model.zero_grad(set_to_none=True)
    return MeasuredStep(
        strategy=strategy,
        saved_bytes=saved - held,
        peak_bytes=tracker.kept_peak - held,
        host_bytes=host_bytes,
        forward_flops=counted[0],
        extra_flops=counted[1],
        flops=counted[2],
        seconds=tuple(seconds[1:]),
        loss=loss.item(),
    )


def _count_flops(applied: AppliedStrategy, forward: Callable[[], Tensor]) -> tuple[int, int, int]:
    """Return the FLOPs of a step's forward pass, of what runs again, and of all."""
    # PyTorch has no formula for its CPU kernel of fused attention.
    cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    formulas = {
        cpu: lambda query, key, value, *_, **__: _attention_flops(query, key, products=2),
        backward: lambda gradient, query, key, *_, **__: _attention_flops(query, key, products=5),
    }
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        loss = forward()
        first = counter.get_total_flops()
        applied.tracker = tracker = _ReplayFlops(counter)
        loss.backward()
    applied.tracker = None
    return first, tracker.flops, counter.get_total_flops()


def _attention_flops(query: tuple[int, ...], key: tuple[int, ...], products: int) -> int:
    batch, heads, seq, width = query
    return products * 2 * batch * heads * seq * key[2] * width


class _ReplayFlops:
    """Stands in for LiveBytes where FLOPs are counted: adds up those of parts that run again."""

    in_backward = True

    def __init__(self, counter: FlopCounterMode) -> None:
        self.counter, self.flops = counter, 0

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Count what runs in the block."""
        before = self.counter.get_total_flops()
        try:
            yield
        finally:
            self.flops += self.counter.get_total_flops() - before

    def forget(self, tensor: Tensor) -> None:
        """Nothing: FLOPs have no place."""


def _timed(forward: Callable[[], Tensor], device: torch.device) -> float:
    start = time.perf_counter()
    forward().backward()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def predicted_cost(
    model: Transformer,
    strategy: str,
    *,
    batch: int,
    seq: int,
    implementation: str = "torch",
    early_stop: bool = True,
    bandwidth: float | None = None,
) -> RecomputeCost:
    """Return what `measure_step` will count: `recompute_cost` with implementation="toy" and the model's own settings."""
    return recompute_cost(
        model.config,
        strategy,
        batch=batch,
        seq=seq,
        implementation="toy",
        bytes_per_value=model.embed.weight.element_size(),
        attention="fused" if model.blocks[0].attention.fused else "plain",
        dropout=model.dropout.p,
        early_stop=early_stop,
        reentrant=implementation != "torch",
        bandwidth=bandwidth,
    )


def find_largest_batch(budget_bytes: int, model: Transformer, strategy: str, *, seq: int, **how: Any) -> int:
    """Return the largest batch whose measured peak fits a budget, by running batches."""

    def fits(batch: int) -> bool:
        step = measure_step(model, strategy, batch=batch, seq=seq, flops=False, **how)
        return step.peak_bytes <= budget_bytes

    return largest_that_fits(fits)


ORDERS = ("none", "inside", "outside", "segments")


@dataclass(frozen=True)
class Gathers:
    """The communication of one step of FSDP2."""

    order: str  # where recomputation was
    all_gathers: tuple[int, int]  # all-gathers in forward, and in backward
    reduce_scatters: int  # reduce-scatters in backward
    gradient_error: float  # how far gradients are from one process without recomputation


class _Around(nn.Module):
    """Runs blocks, hooks and all, under one checkpoint: their hooks run in the replay, too."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(blocks)

    def forward(self, x_BSH: Tensor, rope_2SD: Tensor | None = None) -> Tensor:
        return checkpoint(self._run, x_BSH, rope_2SD, use_reentrant=False)

    def _run(self, x_BSH: Tensor, rope_2SD: Tensor | None) -> Tensor:
        for block in self.inner:
            x_BSH = block(x_BSH, rope_2SD)
        return x_BSH


def fsdp_gathers(order: str, *, reshard_after_forward: bool = True) -> Gathers:
    """Run one step of a small model under FSDP2, a unit a block, and count what it communicates.

    Backward gathers a unit's parameters anyway, and the replay runs inside of that: recomputation costs FSDP2 no
    gather. It does so in any order of application, since FSDP2's hooks know a replay from a forward pass and leave
    the parameters gathered after it. Only with `reshard_after_forward=False` is there nothing to gather at all.

    "inside": recompute a block's forward, then shard the block, so that FSDP's hooks stay outside of the replay:
    the order that torchtitan takes (split, recompute, compile, shard).
    "outside": shard the block, then recompute the call of it, hooks included.
    "segments": the same with two sharded blocks under one checkpoint, which are gathered at once in backward.

    Args:
        reshard_after_forward: Whether a unit frees its parameters after its forward (ZeRO-3) or keeps them.
    """
    if order not in ORDERS:
        raise ValueError(f"order={order!r} must be one of {', '.join(map(repr, ORDERS))}")
    config = tiny_config("llama", num_layers=4, hidden=16, vocab=31)
    windows = torch.randint(config.vocab, (2, 9), generator=torch.Generator().manual_seed(1))

    def build() -> Transformer:
        torch.manual_seed(0)
        return Transformer(config)

    alone = build()
    alone.loss(windows).backward()
    model = build()
    names = [name for name, _ in model.named_parameters()]
    if order == "inside":
        apply_strategy(model, "full")
    mesh = rank_mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh)
    parameters = list(model.parameters())
    if order in ("outside", "segments"):
        length = 1 if order == "outside" else 2
        blocks = list(model.blocks)
        model.blocks = nn.ModuleList(_Around(*blocks[i : i + length]) for i in range(0, len(blocks), length))
    with record_comms() as log:
        loss = model(windows[:, :-1])
        loss = torch.nn.functional.cross_entropy(loss.flatten(0, 1), windows[:, 1:].flatten())
        forward = log.calls["all_gather"]
        loss.backward()
    right = dict(alone.named_parameters())
    errors = [
        (parameter.grad.full_tensor() - right[name].grad).abs().max().item()
        for name, parameter in zip(names, parameters, strict=True)
    ]
    return Gathers(
        order=order,
        all_gathers=(forward, log.calls["all_gather"] - forward),
        reduce_scatters=log.calls["reduce_scatter"],
        gradient_error=max(errors),
    )


def tensor_parallel_reduces(strategy: str, *, early_stop: bool = True, layers: int = 2) -> tuple[int, int]:
    """Run one step of the tensor parallel toy over a strategy; return a block's all-reduces, forward and backward.

    What communicates inside of a replay communicates again: 2 + 2 all-reduces a block without recomputation, 2 + 4 if
    the full block runs again, and one less where PyTorch stops early, since nothing asks for the last one. The
    attention core, which "selective" repeats, has none.
    """
    torch.manual_seed(0)
    config = tiny_config("gpt2", num_layers=layers, hidden=16, vocab=32)
    model = parallelize(Transformer(config, attention="plain"), dist.group.WORLD)
    windows = torch.randint(config.vocab, (2, 9), generator=torch.Generator().manual_seed(1))
    counts = []
    # Embedding, head and loss reduce as well, as often in every model: two sizes tell the blocks' share.
    for blocks in (model.blocks[:1], model.blocks):
        model.blocks = blocks
        with apply_strategy(model, strategy, early_stop=early_stop), record_comms() as log:
            loss = model.loss(windows)
            forward = log.calls["all_reduce"]
            loss.backward()
        counts.append((forward, log.calls["all_reduce"] - forward))
    (forward, backward), (more_forward, more_backward) = counts
    return (more_forward - forward) // (layers - 1), (more_backward - backward) // (layers - 1)


def ddp_error(use_reentrant: bool, *, find_unused_parameters: bool = True) -> str:
    """Train one step of DDP over two recomputed layers; return the first sentence of the error, "" if it went well.

    With `find_unused_parameters` DDP walks the graph from the loss before backward. A reentrant checkpoint hides its
    parameters from that walk: DDP takes them for unused, marks them ready, and is told about them once more.
    """
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    ddp = DistributedDataParallel(_Recomputed(layers, use_reentrant), find_unused_parameters=find_unused_parameters)
    x = torch.ones(2, 6, requires_grad=True)
    try:
        ddp(x).sum().backward()
    except RuntimeError as error:
        return str(error).split(". ")[0]
    return ""


class _Recomputed(nn.Module):
    def __init__(self, layers: nn.Sequential, use_reentrant: bool) -> None:
        super().__init__()
        self.layers, self.use_reentrant = layers, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


def pipeline_error(schedule: Callable, *, micro_batches: int = 4) -> float:
    """Run a pipeline schedule over recomputed stages, one on each rank; return the gradients' largest error.

    Use the way without reentrance: the runtime asks for gradients of a stage's inputs by name, and the first stage
    has tokens, which have none.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(world)]
    x = torch.randn(2 * micro_batches, 6)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).pow(2).mean()

    right = torch.autograd.grad(loss(nn.Sequential(*layers)(x), x), list(layers[rank].parameters()))
    mine = layers[rank]
    mine.forward = partial(checkpoint, mine.forward, use_reentrant=False)
    steps = schedule(PipelineStage(mine, rank, world, torch.device("cpu")), micro_batches, loss_fn=loss)
    if rank == 0:
        steps.step(x)
    else:
        steps.step(target=x) if rank == world - 1 else steps.step()
    return max((p.grad - g).abs().max().item() for p, g in zip(mine.parameters(), right, strict=True))
