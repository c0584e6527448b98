"""Measure a case of the memory grid in PyTorch: states, what forward keeps, and the peak of every moment of a step.

    found = measure(Case(kernels="hf", family="llama", size="8b", sharding="fsdp2", dp=8))
    print(found.states, found.saved, found.peak, found.peak_at)

Small cases run on real tensors. Others run under FakeTensorMode, which computes shapes and no values, and a fake
process group, which answers every collective at once: one process plays a rank of many, at any size, in seconds.
The bytes are counted by PyTorch's MemTracker and FSDPMemTracker in either way; nothing here is lablib's arithmetic.
Kernels are those of the CPU, and what an allocator rounds up and caches is in no count.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lablib.calc.memory_cases import Case
from lablib.launch.fsdp import shard
from lablib.launch.measure import saved_activations
from lablib.launch.memory_oracle_changes import answered, fused_sgd_without_values, nothing_packed
from lablib.launch.memory_oracle_models import Master, Subject, build, make_optimizer
from lablib.launch.memory_oracle_tensor import split_model
from lablib.launch.memory_oracle_zero import fullest_rank, pretended
from lablib.launch.memory_tracker import FSDPMomentTracker, MomentTracker
from lablib.launch.torch_private import FakeTensorMode

MOMENTS_OF = {"exp_avg": "momentum", "momentum_buffer": "momentum", "exp_avg_sq": "variance"}


@dataclass(frozen=True)
class Measured:
    """Bytes of one case on one rank, as PyTorch counts them.

    Attributes:
        states: By term: "weights", "gradients", "master_weights", "momentum", "variance", after a backward pass.
        saved: What forward left alive for backward, with the batch, of all micro-batches in flight.
        groups: The same by group where autograd's hooks can tell: "norms", "attention", "mlp", "embedding", "head".
        inputs: The batches' part of `saved`.
        outputs: The part of a stage's outputs, which wait for their backward.
        moments: Bytes by kind at the fullest instant of each moment.
    """

    states: dict[str, int]
    saved: int
    groups: dict[str, int]
    inputs: int
    outputs: int
    moments: dict[str, dict[str, int]]

    @property
    def totals(self) -> dict[str, int]:
        """Bytes at the fullest instant of each moment."""
        return {name: sum(kinds.values()) for name, kinds in self.moments.items()}

    @property
    def peak_at(self) -> str:
        """The moment that holds most."""
        return max(self.totals, key=self.totals.__getitem__)

    @property
    def peak(self) -> int:
        """Bytes at the peak."""
        return self.totals[self.peak_at]

    @property
    def peak_terms(self) -> dict[str, int]:
        """Bytes at the peak, by kind."""
        return self.moments[self.peak_at]


def measure(case: Case, *, real: bool | None = None) -> Measured:
    """Play one training step of a case, with optimizer states that exist already, and count.

    Call it in a process without a process group.

    Args:
        case: The case.
        real: Real tensors or fake ones; None: real ones for size "tiny".

    Raises:
        ValueError: If a process group is there already.
    """
    real = case.size == "tiny" if real is None else real
    fake = nullcontext() if real else FakeTensorMode()
    with _ranks(case) as mesh, warnings.catch_warnings():
        # True of every linear layer with a batch and a sequence, and harmless without in-place operations.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        group = None if mesh is None else mesh["tp"].get_group()
        with fake:
            subject = build(case, group)
        model = subject.model
        # Both outside of the mode: they read the mesh, which is a real tensor. FSDP2 shards what is split already.
        if case.splits_eagerly:
            split_model(model, mesh["tp"], case.kernels)
        if case.shards:
            precision = "bf16" if case.recipe == "fsdp2-mixed" else "fp32"
            keep = case.sharding == "fsdp2-keep"
            shard(model, mesh=mesh["dp"], precision=precision, reshard_after_forward=not keep)
        with fake, nullcontext() if real else fused_sgd_without_values():
            working = build(case, group, working=True).model if case.recipe == "mixed-bf16" else None
            return _play(case, subject, working)


@contextmanager
def _ranks(case: Case) -> Iterator[DeviceMesh | None]:
    """Pretend to be one of all ranks of data and tensor parallelism: rank 0, if they are alike."""
    if dist.is_initialized():
        raise ValueError("a process group is there already: call measure outside of run_ranks and torchrun")
    if case.kernels != "paper" and case.dp * case.tp == 1:
        yield None
        return
    # Of ranks that hold different numbers of bytes, the fullest is asked.
    rank = fullest_rank(build(case).model, case.dp) if case.sharding == "zero1" else 0
    with pretended(rank, case.dp * case.tp):
        yield init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=("dp", "tp"))


def _hooks_can_tell(case: Case) -> bool:
    # FSDP's gathered weights and autocast's casts are kept beside activations, checkpoint hides what it keeps, and
    # adapters lie inside of attention and MLP, while the calculator counts them apart.
    # Tensors of PyTorch's tensor parallelism are DTensors to them.
    kept_in_sight = case.recompute == "none" and case.tuning == "full" and not case.splits_eagerly
    return kept_in_sight and not case.shards and case.recipe != "autocast-bf16" and case.pp == 1


def _groups(subject: Subject, model: nn.Module) -> dict[str, int]:
    """Count what one forward pass keeps, by group of modules."""
    tokens = subject.tokens()
    with saved_activations(model) as saved:
        loss = subject.loss(model, tokens)
    del loss
    found: dict[str, int] = {}
    for module, size in saved.by_module.items():
        group = _group_of(module)
        found[group] = found.get(group, 0) + size
    return found


def _group_of(module: str) -> str:
    last = module.rpartition(".")[2]
    if "norm" in last or last.startswith("ln_"):
        return "norms"
    for group, marks in (("attention", ("attn", "attention")), ("mlp", ("mlp", "router", "experts"))):
        if any(mark in module for mark in marks):
            return group
    if any(mark in module for mark in ("embed", "positions", "wte", "wpe", "rotary")):
        return "embedding"
    return "head"  # the head itself, and the loss outside of all modules


def _play(case: Case, subject: Subject, working: nn.Module | None) -> Measured:
    trained = subject.model
    model = trained if working is None else working
    master = None if working is None else Master(trained, working)
    optimizer = make_optimizer(case, trained)
    own = getattr(optimizer, "optim", optimizer)  # of this rank
    for parameter in trained.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # states exist from here on
    optimizer.zero_grad()
    # A pipeline has the batches of the whole step before it; who accumulates reads one after the other.
    batches = [subject.tokens() for _ in range(case.micro_batches)]
    if case.pp == 1:
        batches = batches[:1] * case.micro_batches
    buckets: list[int] = []
    with ExitStack() as stack:
        if case.kernels == "hf":
            stack.enter_context(nothing_packed())
        groups = _groups(subject, model) if _hooks_can_tell(case) else {}
        if case.splits_eagerly:
            # DTensor works out the shapes of an operator that it has not met on tensors of the whole size.
            subject.loss(model, batches[0]).backward()
            optimizer.zero_grad()
        if case.shards:
            tracker = FSDPMomentTracker(model, own, batches[0])
        else:
            tracker = MomentTracker(model, own, *set(batches), *([trained] if master else []))
        stack.enter_context(tracker)
        if case.replicates:
            from torch.nn.parallel import DistributedDataParallel

            model = DistributedDataParallel(model)
            model.register_comm_hook(buckets, answered)
            _step(case, subject, model, batches[:1], tracker)  # after a backward buckets are built anew
            tracker.reset_mod_stats()
        saved, inputs, outputs = _step(case, subject, model, batches, tracker, sum(buckets))
        states = _states(model, trained if master else None, own)
        tracker.begin_optimizer()
        if master:
            master.take_gradients()
            tracker.track_external(trained)  # what it moved are gradients
            tracker.note("optimizer step")
        optimizer.step()
        if master:
            master.give_weights()
        optimizer.zero_grad()
    return Measured(states, saved, groups, inputs, outputs, tracker.moments)


def _step(
    case: Case,
    subject: Subject,
    model: nn.Module,
    batches: list[Tensor],
    tracker: MomentTracker,
    buckets: int = 0,
) -> tuple[int, int, int]:
    """Run forward and backward; return the bytes that were kept between them, the batches' and the outputs'."""
    model.zero_grad()
    tracker.start("loss" if case.pp == 1 else "end of forward", buckets)
    tracker.note("states")
    results: list[Tensor] = []
    saved, outputs, waiting = 0, 0, iter(batches)
    order = one_forward_one_backward(case.pp, len(batches))
    # The output of the frozen embedding is one here, and its hooks hold it where Python cannot see.
    leaf = case.kernels == "hf" and case.tuning == "lora" and case.recompute == "full"
    for number, action in enumerate(order):
        if case.replicates:  # gradients travel with the last micro-batch
            model.require_backward_grad_sync = number >= len(order) - 2
        if action == "F":
            tracker.reset_mod_stats()  # or MemTracker takes a second micro-batch for a second step
            tracker.begin_micro_batch()
            with torch.autocast("cpu", torch.bfloat16, enabled=case.recipe == "autocast-bf16"):
                results.append(subject.loss(model, next(waiting)))
            held = tracker.held()
            inputs = len(results) * batches[0].nbytes
            # A loss is not kept for backward. A stage's output is: the pipeline starts its backward from there.
            losses = sum(result.nbytes for result in results if case.pp == 1)
            saved = max(saved, held.get("activations", 0) + inputs - losses)
            outputs = max(outputs, sum(result.nbytes for result in results) - losses)
        elif case.pp > 1:
            output = results.pop(0)
            output.backward(torch.ones_like(output))  # the gradient that the next stage sends
            del output
        else:
            results.pop(0).backward()
        if action == "B" and (leaf or len(batches) > 1):
            gc.collect()  # hooks of the tracker and the tensors that they watch hold each other
            if leaf:
                tracker.forget_left()
    return saved, batches[0].nbytes * case.pp, outputs


def one_forward_one_backward(stages: int, micro_batches: int) -> list[str]:
    """Return what the first stage does under 1F1B: "F" and "B", each for the next micro-batch."""
    steady = ["F", "B"] * (micro_batches - stages + 1)
    return ["F"] * (stages - 1) + steady + ["B"] * (stages - 1)


def _states(model: nn.Module, master: nn.Module | None, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Count the tensors that live from step to step, and the gradients; those of one value are counters."""
    found = {
        "weights": _bytes(model.parameters()),
        "gradients": _bytes(p.grad for p in model.parameters() if p.grad is not None),
    }
    if master is not None:
        found["master_weights"] = _bytes(master.parameters())
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                found[MOMENTS_OF[name]] = found.get(MOMENTS_OF[name], 0) + _bytes([value])
    return found


def _bytes(tensors: Iterable[Tensor]) -> int:
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum({id(t): t.numel() * t.element_size() for t in local}.values())
