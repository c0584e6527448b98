"""Measure a case of the memory grid in PyTorch: states, what forward keeps, and the peak of every phase of a step.

    found = measure_case(Case(implementation="hf", family="llama", size="8b", sharding="fsdp2", dp=8))
    print(found.states, found.saved, found.peak, found.peak_at)

Small cases run on real tensors. Others run under FakeTensorMode, which computes shapes and no values, and a fake
process group, which answers every collective at once: one process plays a rank of many, at any size, in seconds.
The bytes are counted by PyTorch's MemTracker and FSDPMemTracker in either way; nothing here is lablib's arithmetic.
Kernels are those of the CPU, and what an allocator rounds up and caches is in no count.

The trackers see every operator, count each storage once, say of what kind it is, and keep one peak. Here the fullest
instant of every *moment* is kept too: forward of block 3, the loss, backward of block 3, the optimizer's step. They are
private parts of PyTorch, found by `lablib.launch.torch_private`. Four functions change PyTorch so that it can be
measured at all; a real run makes neither the mask nor the copies that they avoid.
"""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from lablib.calc.torch_versions import torch_facts
from lablib.launch.fsdp import TRACKED_KINDS as FSDP_KINDS
from lablib.launch.fsdp import shard
from lablib.launch.measure import saved_activations
from lablib.launch.precision.libraries import moment_bytes
from lablib.launch.torch_private import (
    FakeTensorMode,
    FSDPMemTracker,
    MemTracker,
    active_fake_mode,
    dispatch_has_kernel,
    must_have,
)
from tests.evidence import verdict
from tests.evidence.cases import Case
from tests.evidence.oracles.context import waits_without_copies
from tests.evidence.oracles.models import (
    LOW_BIT,
    Master,
    Subject,
    build_model,
    fullest_rank,
    make_optimizer,
    pretended,
    split_model,
)

#: Names of kinds in both trackers, and those of `tests.evidence.verdict`. FSDPMemTracker's come first.
KINDS = FSDP_KINDS | {
    "Sharded Param": "weights",
    "Unsharded Param": "gathered weights",
    "Parameter": "weights",
    "Gradient": "gradients",
    "Optstate": "optimizer",
    "Other": "inputs",
}
#: What FSDP2 is told to cast and to reduce in.
POLICIES = {"fsdp2-mixed": MixedPrecisionPolicy(param_dtype=torch.bfloat16), "fsdp2-mixed-fp32-reduce": "bf16"}
_SKIPS_SHAPES = torch_facts(torch.__version__).tracker_skips_dtensor_shapes
_BLOCK = re.compile(r"\.(?:blocks|layers|h)\.(\d+)$")


class _NoHook:
    """Stands for the handle of a hook that is not there."""

    def remove(self) -> None:
        """Do nothing."""


class _Moments:
    """Keeps the fullest instant of every moment; to be mixed into a tracker."""

    def start(self, end: str = "loss", buckets: int = 0) -> None:
        """Begin a step: forget the moments so far, and what an earlier step left behind.

        Nothing of a step outlives it but gradients and DDP's buckets. What does has been kept by the hooks of the
        trackers themselves, in circles that Python cannot see through.
        """
        must_have(self, "_curr_mem_snap", "_mod_tracker", "_in_opt", "_param_to_grad_hook_handles")
        self._end, self._buckets, self._left = end, 0, {}
        self._after_step = False
        held = self.held()
        self._buckets = buckets
        self._left = {"activations": held.get("activations", 0) - buckets, "temporary": held.get("temporary", 0)}
        self.moments: dict[str, dict[str, int]] = {}
        self._totals: dict[str, int] = {}
        self._blocks: dict[str, int | None] = {}
        self.begin_micro_batch()

    def begin_micro_batch(self) -> None:
        """Say that forward begins, again: what runs now belongs to the embedding."""
        self._seen_block, self._now = False, ""

    def forget_left(self) -> None:
        """Say that nothing is in flight: tensors of activations that are still there are held by the trackers' hooks."""
        held = self.held()
        for kind in ("activations", "temporary"):
            self._left[kind] = self._left.get(kind, 0) + held.get(kind, 0)

    def begin_optimizer(self) -> None:
        """Say that gradients are complete: what runs now belongs to the optimizer's step."""
        self._after_step = True

    def held(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for kinds in self._curr_mem_snap.values():
            for kind, size in kinds.items():
                if size and (name := KINDS.get(getattr(kind, "value", kind))):
                    found[name] = found.get(name, 0) + size
        if self._buckets:
            found["gradient buckets"] = self._buckets
            found["activations"] -= self._buckets
        for kind, size in self._left.items():
            if size:
                found[kind] = found.get(kind, 0) - size
        if self._after_step and not self._in_opt and found.get("activations"):
            # Between backward and the step nothing is made but gradients in fp32, for the master weights.
            found["gradients"] = found.get("gradients", 0) + found.pop("activations")
        return {kind: found[kind] for kind in verdict.KINDS if found.get(kind)}

    def note(self, moment: str) -> None:
        total = sum(kinds["Total"] for kinds in self._curr_mem_snap.values()) - sum(self._left.values())
        if total > self._totals.get(moment, -1):
            self._totals[moment] = total
            self.moments[moment] = self.held()

    def __enter__(self) -> Any:
        self._outer_mode = active_fake_mode()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # DTensor asks for shapes with fake tensors of its own, which older trackers take for memory.
        if not _SKIPS_SHAPES and active_fake_mode() is not self._outer_mode:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _update_peak_stats(self, peak_state: Any) -> None:
        # In place of the trackers' own, which copies a snapshot for every module at every operator.
        if not hasattr(self, "moments"):
            return
        backward = self._mod_tracker.is_bw
        block = self._block(backward)
        self._seen_block = self._seen_block or block is not None
        if self._in_opt:
            self._after_step = True
        if self._in_opt or self._after_step:
            self._now = "optimizer step"
        elif block is not None:
            self._now = f"{'backward' if backward else 'forward'} of block {block}"
        elif backward:
            at_end = self._now in ("backward of block 0", "backward of the embedding")
            self._now = "backward of the embedding" if at_end else "backward of the loss"
        else:
            self._now = self._end if self._seen_block else "forward of the embedding"
        self.note(self._now)

    def _track_module_params_and_buffers(self, module: nn.Module, install_grad_hooks: bool = True) -> Any:
        # MemTracker puts a gradient's hook on every parameter that it knows none of; a frozen one takes none.
        for parameter in module.parameters():
            if not parameter.requires_grad:
                self._param_to_grad_hook_handles[parameter] = (_NoHook(), _NoHook())
        return super()._track_module_params_and_buffers(module, install_grad_hooks)

    def _block(self, backward: bool) -> int | None:
        found = []
        for name in self._mod_tracker.parents:
            if name not in self._blocks:
                inside = _BLOCK.search(name)
                self._blocks[name] = int(inside[1]) if inside else None
            if (number := self._blocks[name]) is not None:
                found.append(number)
        # While backward crosses from one block to the next both are marked; the lower one is the one that runs.
        return min(found, default=None) if backward else max(found, default=None)


class MomentTracker(_Moments, MemTracker):
    """MemTracker with moments: for what is not FSDP2's."""

    def __init__(self, *external: nn.Module | torch.optim.Optimizer | torch.Tensor) -> None:
        super().__init__()
        self.track_external(*external)


class FSDPMomentTracker(_Moments, FSDPMemTracker):
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
        super().__init__(model, optimizer)
        self.track_inputs((tokens,))


@contextmanager
def fused_sgd_without_values() -> Iterator[None]:
    """Let fake tensors through PyTorch's fused SGD: with no kernel for shapes, all arguments would be allocated."""
    library = torch.library.Library("aten", "IMPL")
    try:
        if not dispatch_has_kernel("aten::_fused_sgd_", "Meta"):
            library.impl("_fused_sgd_", lambda *args, **kwargs: None, "Meta")
        yield
    finally:
        library._destroy()


@contextmanager
def _without_values() -> Iterator[None]:
    with fused_sgd_without_values(), waits_without_copies():
        yield


@contextmanager
def nothing_packed() -> Iterator[None]:
    """Tell transformers that a batch holds no packed sequences.

    It looks at values, which fake tensors have not, and then makes a mask that a real run does not make.
    """
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    look = getattr(masking_utils, name)
    setattr(masking_utils, name, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(masking_utils, name, look)


def answered(state, bucket):  # DDP takes no annotations that are text
    """Stand for the all-reduce of a bucket, and note its size: DDP does not take the fake group's empty answer."""
    state.append(bucket.buffer().nbytes)
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


MOMENTS_OF = {"exp_avg": "momentum", "momentum_buffer": "momentum", "exp_avg_sq": "variance"}
MOMENTS_OF |= {"momentum": "momentum", "variance": "variance"}  # of `lablib.toys.precision.LowBitAdamW`


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
        return {name: sum(kinds.values()) for name, kinds in self.moments.items()}

    @property
    def peak_at(self) -> str:
        return max(self.totals, key=self.totals.__getitem__)

    @property
    def peak(self) -> int:
        return self.totals[self.peak_at]

    @property
    def peak_terms(self) -> dict[str, int]:
        return self.moments[self.peak_at]


def measure_case(case: Case, *, real: bool | None = None) -> Measured:
    """Play one training step of a case, with optimizer states that exist already, and count.

    Call it in a process without a process group.

    Args:
        real: Real tensors or fake ones; None: real ones for size "tiny".
    """
    real = case.size == "tiny" if real is None else real
    fake = nullcontext() if real else FakeTensorMode()
    with prepared(case, fake) as (subject, group), fake, nullcontext() if real else _without_values():
        working = build_model(case, group, working=True).model if case.recipe == "mixed-bf16" else None
        return play(case, subject, working)


@contextmanager
def prepared(case: Case, fake: AbstractContextManager) -> Iterator[tuple[Subject, dist.ProcessGroup | None]]:
    """Build a case's model, split and sharded over ranks that are pretended for as long as the context lasts.

    Yields:
        The model and how to train it, and the group that it was built with.
    """
    with _ranks(case) as mesh, warnings.catch_warnings():
        # True of every linear layer with a batch and a sequence, and harmless without in-place operations.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        group = None if mesh is None else mesh["tp"].get_group()
        if case.cp > 1:  # ranks that share sequences are neighbours
            group = dist.new_group(list(range(case.cp)))
        with fake:
            subject = build_model(case, group)
        model = subject.model
        # Both outside of the mode: they read the mesh, which is a real tensor. FSDP2 shards what is split already.
        if case.splits_eagerly:
            split_model(model, mesh["tp"], case.implementation)
        if case.shards:
            precision = POLICIES.get(case.recipe, "fp32")
            keep = case.sharding == "fsdp2-keep"
            dims = ("replicas", "dp") if case.shard else "dp"
            shard(model, mesh=mesh[dims], precision=precision, reshard_after_forward=not keep)
        yield subject, group


@contextmanager
def _ranks(case: Case) -> Iterator[DeviceMesh | None]:
    """Pretend to be one of all ranks of data and tensor parallelism: rank 0, if they are alike."""
    if dist.is_initialized():
        raise ValueError("a process group is there already: call measure outside of run_ranks and torchrun")
    replicas = case.dp * case.cp  # all of them hold the same weights, which FSDP2 and DDP take for data parallelism
    if case.implementation != "paper" and replicas * case.tp == 1:
        yield None
        return
    # Of ranks that hold different numbers of bytes, the fullest is asked.
    rank = fullest_rank(build_model(case).model, case.dp) if case.sharding == "zero1" else 0
    with pretended(rank, replicas * case.tp):
        shards = case.shard or replicas
        sizes = (replicas // shards, shards, case.tp)
        yield init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "dp", "tp"))


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
    if ("norm" in last and last not in ("q_norm", "k_norm")) or last.startswith("ln_"):
        return "norms"
    for group, marks in (("attention", ("attn", "attention")), ("mlp", ("mlp", "router", "experts"))):
        if any(mark in module for mark in marks):
            return group
    if any(mark in module for mark in ("embed", "positions", "wte", "wpe", "rotary")):
        return "embedding"
    return "head"  # the head itself, and the loss outside of all modules


def play(case: Case, subject: Subject, working: nn.Module | None) -> Measured:
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
        if case.implementation == "hf":
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
        states = _states(case, model, trained if master else None, own)
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
    case: Case, subject: Subject, model: nn.Module, batches: list[Tensor], tracker: MomentTracker, buckets: int = 0
) -> tuple[int, int, int]:
    """Run forward and backward; return the bytes that were kept between them, the batches' and the outputs'."""
    model.zero_grad()
    tracker.start("loss" if case.pp == 1 else "end of forward", buckets)
    tracker.note("states")
    results: list[Tensor] = []
    saved, outputs, waiting = 0, 0, iter(batches)
    order = one_forward_one_backward(case.pp, len(batches))
    # The output of the frozen embedding is one here, and its hooks hold it where Python cannot see.
    leaf = case.implementation == "hf" and case.tuning == "lora" and case.recompute == "full"
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


def _states(case: Case, model: nn.Module, master: nn.Module | None, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Count the tensors that live from step to step, and the gradients; those of one value are counters."""
    found = {
        "weights": _bytes(model.parameters()),
        "gradients": _bytes(p.grad for p in model.parameters() if p.grad is not None),
    }
    if master is not None:
        found["master_weights"] = _bytes(master.parameters())
    if case.optimizer in LOW_BIT and case.optimizer != "adamw-bf16":
        return found | {name: size for name, size in moment_bytes(optimizer).items() if size}
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                found[MOMENTS_OF[name]] = found.get(MOMENTS_OF[name], 0) + _bytes([value])
    return found


def _bytes(tensors: Iterable[Tensor]) -> int:
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum({id(t): t.numel() * t.element_size() for t in local}.values())
