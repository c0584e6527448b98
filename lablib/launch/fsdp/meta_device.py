"""Models born on the meta device, and the memory of an FSDP2 step as PyTorch's FSDPMemTracker predicts it.

On the meta device a parameter has a shape and no memory, so a model of any size can be built and sharded on every
rank. `materialize` then allocates each rank's shards: module by module the full parameters are made, filled, cut and
freed. All ranks draw the same full parameters from the same seed, so the result does not depend on their number.

`forecast` needs neither memory nor other ranks: FakeTensorMode computes shapes and no values, and a fake process group
answers every collective at once, so one process plays rank 0 of many. It is a model of memory, not a measurement:
activations are those of the CPU's kernels, and an allocator's gaps are not counted.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lablib.calc.models import ModelConfig
from lablib.launch.fsdp.sharding import ShardReport, make_mesh, shard
from lablib.launch.torch_private import FakeStore, FakeTensorMode, FSDPMemTracker, must_have
from lablib.toys.transformer import INIT_STD

#: Fills the parameters and buffers that a module holds itself; gets the module's name and the module.
InitFn = Callable[[str, nn.Module], None]


def materialize(model: nn.Module, init_fn: InitFn | None = None, device: str | torch.device = "cpu") -> nn.Module:
    """Allocate a model that is on the meta device, and fill it module by module.

    Seed torch the same on every rank before.

    Args:
        model: Sharded or not, all of it on the meta device.
        init_fn: Called in the order of `named_modules` for each module that holds parameters or buffers, which
            are unsharded and on `device` then. By default `model._init_weights(module)` (Hugging Face) or the
            module's own `reset_parameters()`.
    """
    home: dict[int, list[tuple[nn.Module, str]]] = {}
    for name, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and not tensor.is_meta:
                raise ValueError(f"{name}.{key} is on {tensor.device}: build the model under torch.device('meta')")
        for key, parameter in module._parameters.items():
            if parameter is not None:
                home.setdefault(id(parameter), []).append((module, key))
    filled: set[int] = set()
    for name, module in list(model.named_modules()):
        old = {key: p for key, p in module._parameters.items() if p is not None}
        buffers = {key: b for key, b in module._buffers.items() if b is not None}
        if not buffers and all(id(p) in filled for p in old.values()):
            continue  # nothing of its own, or tied to what is there
        for key, parameter in old.items():
            module._parameters[key] = nn.Parameter(_empty(parameter, device), parameter.requires_grad)
        for key, buffer in buffers.items():
            module._buffers[key] = _empty(buffer, device)
        with torch.no_grad():
            (init_fn or partial(_default, model))(name, module)
        _check_filled(name, module)
        for key, parameter in old.items():
            if id(parameter) not in filled:
                value = _cut(module._parameters[key], parameter)
                for owner, its_key in home[id(parameter)]:
                    owner._parameters[its_key] = value
                filled.add(id(value))
            else:
                module._parameters[key] = parameter
    return model


def init_transformer(config: ModelConfig) -> InitFn:
    """Return an init function for `lablib.toys.transformer`: bit for bit the values of `Transformer.init_weights`."""

    def fill(name: str, module: nn.Module) -> None:
        adds_to_stream = name.endswith(("attention.out", "mlp.down"))
        shrink = math.sqrt(2 * config.num_layers) if adds_to_stream else 1
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=INIT_STD / shrink)
            else:
                nn.init.constant_(parameter, 0.0 if key == "bias" else 1.0)

    return fill


def _empty(tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """Return memory for a full tensor; NaN shows what is never filled."""
    full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return full.fill_(math.nan) if full.is_floating_point() else full


def _default(model: nn.Module, name: str, module: nn.Module) -> None:
    if hasattr(model, "_init_weights"):
        model._init_weights(module)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()
    else:
        raise ValueError(f"{name} ({type(module).__name__}) has no reset_parameters(): pass an init_fn that fills it")


def _check_filled(name: str, module: nn.Module) -> None:
    for key, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and tensor.is_floating_point() and tensor.isnan().any():
            raise ValueError(f"init_fn left {name}.{key} without values")


def _cut(full: nn.Parameter, old: nn.Parameter) -> nn.Parameter:
    """Return this rank's shard of a full parameter, as the old one was sharded."""
    value = full.detach()
    if isinstance(old, DTensor):
        # Every rank has drawn the same full tensor, so each cuts its own piece and nothing is sent.
        value = distribute_tensor(value, old.device_mesh, old.placements, src_data_rank=None)
    return nn.Parameter(value, requires_grad=old.requires_grad)


#: The tracker's names, and ours.
TRACKED_KINDS = {
    "Sharded Param": "parameters",
    "Unsharded Param": "unsharded parameters",
    "Sharded Grad": "gradients",
    "Unsharded Grad": "unsharded gradients",
    "OptState": "optimizer",
    "All Gather": "all-gather buffers",
    "Reduce Scatter": "reduce-scatter buffers",
    "Activation": "activations",
    "Temp": "temporary",
    "Buffer": "buffers",
    "Inputs": "inputs",
}


@dataclass(frozen=True)
class MemoryForecast:
    """Bytes on rank 0, by the kinds of `TRACKED_KINDS`."""

    peak: dict[str, int]  # at the instant when the most is held in all
    after_backward: dict[str, int]  # between backward and the optimizer's step: the states
    most: dict[str, int]  # the most of each kind at any instant; these instants differ, so the sum means nothing
    # the most of unsharded parameters and all-gather buffers together: what
    # `lablib.calc.parallel.peak_unsharded_bytes` computes. The parts that `reshard_after_forward` as a number keeps
    # after forward are among the activations here.
    most_gathered: int
    # the same with unsharded gradients and the buffers of reduce-scatters: `lablib.calc.parallel.peak_held_bytes`
    most_held: int
    report: ShardReport  # what `shard` did

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.peak.values())


def forecast(
    build: Callable[[], nn.Module],
    *,
    world_size: int,
    batch: int,
    seq: int,
    loss: Callable[[nn.Module, Tensor], Tensor] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    **options: Any,
) -> MemoryForecast:
    """Play two training steps of rank 0 among many ranks; the second one counts, with its optimizer state.

    Call it in a process without a process group, such as a notebook.

    Args:
        build: Returns the model; runs without memory.
        loss: Gets the model and `tokens_BT` with T = seq + 1. By default `model.loss(tokens_BT)`, or, for a
            Hugging Face model, its own loss.
        **options: Of `lablib.launch.fsdp.shard`.
    """
    for name, number in (("world_size", world_size), ("batch", batch), ("seq", seq)):
        if number < 1:
            raise ValueError(f"{name}={number} must be at least 1")
    if dist.is_initialized():
        raise ValueError("a process group is there already: call forecast outside of run_ranks and torchrun")
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        mesh = make_mesh(options.pop("mesh", None))
        fake = FakeTensorMode()
        with fake:
            model = build()
        # Outside of the mode: fully_shard reads the mesh, which is a real tensor.
        model, report = shard(model, mesh=mesh, **options)
        with fake, warnings.catch_warnings():
            # True of every linear layer with a batch and a sequence, and harmless without in-place operations.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
            updates = optimizer(model.parameters())
            tokens_BT = torch.zeros(batch, seq + 1, dtype=torch.int64)
            tracker = _Tracker(model, updates)
            tracker.track_inputs((tokens_BT,))
            with tracker:
                for step in range(2):
                    (loss or _loss)(model, tokens_BT).backward()
                    after_backward = _bytes(tracker.get_tracker_snapshot("current"))
                    updates.step()
                    updates.zero_grad()
                    if step == 0:
                        tracker.reset_mod_stats()
            peak = _bytes(tracker.get_tracker_snapshot("peak"))
    finally:
        dist.destroy_process_group()
    return MemoryForecast(peak, after_backward, tracker.most, tracker.most_gathered, tracker.most_held, report)


class _Tracker(FSDPMemTracker):
    """Also remembers the most of each kind, which need not be at the peak of the sum."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        must_have(self, "_curr_mem_snap", "_root_mod")
        self.most = dict.fromkeys(TRACKED_KINDS.values(), 0)
        self.most_gathered = self.most_held = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is not NotImplemented:
            held = _bytes(self._curr_mem_snap)  # get_tracker_snapshot would copy it, at every operation
            self.most = {kind: max(most, held[kind]) for kind, most in self.most.items()}
            gathered = held["unsharded parameters"] + held["all-gather buffers"]
            self.most_gathered = max(self.most_gathered, gathered)
            self.most_held = max(
                self.most_held, gathered + held["reduce-scatter buffers"] + self._gradients(func, args, kwargs)
            )
        return result

    def _gradients(self, func: Any, args: Any, kwargs: Any) -> int:
        """Return the bytes of unsharded gradients and of a buffer that they are copied into, where either is complete."""
        name = str(func)
        if not name.startswith(("fsdp.chunk_cat", "profiler._record_function_enter")):
            return 0
        found = {id(p.grad): p.grad for p in self._root_mod.parameters() if not isinstance(p, DTensor)}
        if name.startswith("fsdp.chunk_cat"):  # the unit's own parameters are sharded again by then
            found |= {id(t): t for t in (*args[0], kwargs["out"])}
        return sum(tensor.nbytes for tensor in found.values() if tensor is not None)


def _bytes(snapshot: dict[torch.device, dict[Any, int]]) -> dict[str, int]:
    """Return a snapshot of all devices by our kinds."""
    total = dict.fromkeys(TRACKED_KINDS.values(), 0)
    for kinds in snapshot.values():
        for kind, size in kinds.items():
            if (name := TRACKED_KINDS.get(getattr(kind, "value", kind))) is not None:
                total[name] += size
    return total


def _loss(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    if hasattr(model, "loss") and callable(model.loss):
        return model.loss(tokens_BT)
    return model(input_ids=tokens_BT, labels=tokens_BT).loss
