"""Shard a model with FSDP2, and report what was done.

    model, report = shard(Transformer(config), wrap="block", precision="bf16")
    print(report)
    optimizer = torch.optim.AdamW(model.parameters())       # after sharding: it must see the shards

What is applied to a block has an order, from the inside to the outside: recompute, compile, fully_shard. So the
compiler gets a block without FSDP's hooks; rung 07 runs the other orders and says what each one costs.

`no_sync`, `clip_grad_norm` and `full_state_dict` are for the training step of a sharded model.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lablib.calc.parallel import Unit, UnshardedState, check_reshard, gathered_timeline, padded
from lablib.calc.torch_versions import torch_facts
from lablib.calc.units import format_bytes
from lablib.launch.fsdp.wrapping import Rule, calc_units, tied_parameters, wrap_units
from lablib.launch.ranks import rank_device, rank_mesh

#: Parameters are kept in the model's dtype, gathered and used in `param_dtype`, and their gradients reduced in fp32:
#: "bf16" is recipe fsdp2-mixed-fp32-reduce. PyTorch's default, reduce_dtype=None, is fsdp2-mixed: see `reduce_dtype`.
PRECISIONS = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "fp16": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32),
}


@dataclass(frozen=True, kw_only=True)
class ShardReport:
    """A sharded model: its units, its ranks, its precision."""

    units: tuple[Unit, ...]  # the root first, then the others in the order of the model
    wrap: str  # the rule that chose them
    shards: int  # ranks that share a parameter
    replicas: int  # copies of the sharded model; above 1 it is hybrid sharding (HSDP)
    device: str  # "cpu", "cuda", ...
    mesh: str  # the mesh in words
    reshard: bool | int  # `reshard_after_forward` of the units
    root_reshard: bool | int  # the same of the root
    param_bytes: int  # bytes of a gathered value
    reduce_bytes: int  # bytes of a reduced gradient value
    precision: str  # what is cast to what, in words
    prefetch: int | None  # units gathered ahead, or None for FSDP2's own choice
    order: tuple[str, ...]  # what was applied to each block, in this order
    notes: tuple[str, ...] = field(default=())  # what you may not expect

    @property
    def params(self) -> int:
        """Parameters of the full model."""
        return sum(unit.params for unit in self.units)

    @property
    def params_per_rank(self) -> int:
        """Parameters that a rank keeps, padding included."""
        return sum(map(self.unit_shard, self.units))

    def unit_shard(self, unit: Unit) -> int:
        """Return the parameters of a unit that a rank keeps, padding included."""
        return padded(unit.shapes + unit.frozen, self.shards) // self.shards

    def gathered_timeline(self) -> list[UnshardedState]:
        """Return what is unsharded after every event of a step of this model, by `lablib.calc.parallel.fsdp`."""
        return gathered_timeline(
            self.units,
            self.shards,
            reshard=self.reshard,
            root_reshard=self.root_reshard,
            prefetch=self.prefetch,
            param_bytes=self.param_bytes,
            reduce_bytes=self.reduce_bytes,
            torch=torch.__version__,
        )

    def peak_unsharded_bytes(self) -> int:
        """Return the most bytes of gathered parameters that a rank holds at a time, besides its shards."""
        return max(moment.total for moment in self.gathered_timeline())

    def peak_held_bytes(self) -> int:
        """Return the most bytes that a rank holds unsharded at a time, gradients and all buffers included."""
        return max(moment.held for moment in self.gathered_timeline())

    def __str__(self) -> str:
        rows = [("unit", "params", "kept by a rank")]
        for names, unit in _runs(self.units):
            rows.append((names, f"{unit.params:,}", f"{self.unit_shard(unit):,}"))
        rows.append(("in all", f"{self.params:,}", f"{self.params_per_rank:,}"))
        width = [max(len(row[i]) for row in rows) for i in range(3)]
        table = [f"{a:{width[0]}}  {b:>{width[1]}}  {c:>{width[2]}}" for a, b, c in rows]
        facts = {
            "mesh": self.mesh,
            "precision": self.precision,
            "after forward": f"units {_kept(self.reshard)}, root {_kept(self.root_reshard)}"
            + "".join(f", {unit.name} kept" for unit in self.units if unit.kept),
            "prefetch": "FSDP2's own" if self.prefetch is None else f"{self.prefetch} ahead",
            "order": " -> ".join(self.order),
            "gathered": f"at most {format_bytes(self.peak_unsharded_bytes(), 'MB')} at a time, "
            f"{format_bytes(self.peak_held_bytes(), 'MB')} with gradients and all buffers",
        }
        lines = [*(f"{name}: {text}" for name, text in facts.items()), *self.notes]
        # A page's column has some 72 characters.
        return "\n".join([*table, *(textwrap.fill(text, 72, subsequent_indent="  ") for text in lines)])


def _kept(reshard: bool | int) -> str:
    if reshard is True:
        return "resharded"
    return "kept" if reshard is False else f"resharded over {reshard} ranks"


def _runs(units: tuple[Unit, ...]) -> list[tuple[str, Unit]]:
    """Return one line for each run of units of the same shapes."""
    lines: list[list[Unit]] = []
    for unit in units:
        if lines and (lines[-1][0].shapes, lines[-1][0].frozen) == (unit.shapes, unit.frozen):
            lines[-1].append(unit)
        else:
            lines.append([unit])
    return [
        ((same[0].name or "(root)") + (f" ... {same[-1].name}, {len(same)} units" if len(same) > 1 else ""), same[0])
        for same in lines
    ]


def shard(
    model: nn.Module,
    *,
    wrap: Rule = "block",
    mesh: DeviceMesh | tuple[int, ...] | None = None,
    precision: str | MixedPrecisionPolicy = "fp32",
    reshard_after_forward: bool | int = True,
    root_reshard: bool | int | None = None,
    keep: Sequence[str] = (),
    prefetch: int | None = None,
    offload: bool = False,
    compile_blocks: bool | str = False,
    recompute: bool = False,
) -> tuple[nn.Module, ShardReport]:
    """Shard a model in place with FSDP2.

    Every rank must call it, on the same model. Weights are taken from each rank as they are: give all ranks the
    same, by a seed or by `materialize`.

    Args:
        model: `lablib.toys.transformer`, a Hugging Face causal LM, or any module; on the meta device too.
        wrap: Which modules are gathered one by one, see `lablib.launch.fsdp.wrapping`.
        mesh: None for all ranks in one dim; (replicas, shards) or a 2-d DeviceMesh for hybrid sharding.
        precision: "fp32", "bf16" or "fp16", all of which reduce in fp32, or a MixedPrecisionPolicy.
        reshard_after_forward: Of the units: True frees them after forward (ZeRO-3), False keeps them until
            backward (ZeRO-2), a number keeps 1/number of them on each rank, for a cheaper gather in backward.
        root_reshard: The same for the root; None is False, as backward starts with it.
        keep: Names of units that stay gathered until backward, such as the head: it is first there.
        prefetch: Units to gather ahead, explicitly, in forward and backward. None leaves it to FSDP2, which
            gathers one ahead in backward.
        offload: Keep the shards in CPU memory; needs an accelerator.
        compile_blocks: Compile the forward of every unit with torch.compile; a text names the backend.
        recompute: Recompute the activations of every unit in backward.

    Returns:
        The same model, and what was done to it.
    """
    device_mesh = make_mesh(mesh)
    device, shards = device_mesh.device_type, device_mesh.size(device_mesh.ndim - 1)
    root_reshard = False if root_reshard is None else root_reshard
    check_reshard(reshard_after_forward, shards, "reshard_after_forward")
    check_reshard(root_reshard, shards, "root_reshard")
    policy = get_precision_policy(precision)
    backend = compiler(compile_blocks, device)
    check_options(model, wrap, offload, device, prefetch, backend, recompute)
    chosen = wrap_units(model, wrap)
    units, ties = [replace(unit, kept=unit.name in keep) for unit in calc_units(model, wrap)], tied_parameters(model)
    if strange := set(keep) - {name for name, _ in chosen}:
        raise ValueError(
            f"keep={tuple(keep)}: {strange.pop()!r} is no unit; use {', '.join(name for name, _ in chosen)}"
        )
    check_parameters(model)
    dtype = next(model.parameters()).dtype
    notes = [f"tied: {' = '.join(names)}" for names in ties]

    if recompute and getattr(getattr(model, "config", None), "use_cache", False):
        model.config.use_cache = False
        notes.append("config.use_cache was switched off: recomputation would fill the cache twice")
    for _, module in chosen:
        if recompute:
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        if backend:
            module.forward = torch.compile(module.forward, backend=backend)
    place = CPUOffloadPolicy() if offload else OffloadPolicy()
    options = {"mesh": device_mesh, "mp_policy": policy, "offload_policy": place}
    for name, module in chosen:
        fully_shard(module, reshard_after_forward=name not in keep and reshard_after_forward, **options)
    fully_shard(model, reshard_after_forward=root_reshard, **options)
    if prefetch:
        _prefetch(model, [unit.name for unit in units[1:]], prefetch)

    notes += _warnings(model, wrap, policy, offload)
    report = ShardReport(
        units=tuple(units),
        wrap=wrap if isinstance(wrap, str) else getattr(wrap, "__name__", "function"),
        shards=shards,
        replicas=device_mesh.size() // shards,
        device=device,
        mesh=describe_mesh(device_mesh),
        reshard=reshard_after_forward,
        root_reshard=root_reshard,
        param_bytes=(policy.param_dtype or dtype).itemsize,
        reduce_bytes=reduce_dtype(next(model.parameters()), policy).itemsize,
        precision=describe_casts(next(model.parameters()), policy),
        prefetch=prefetch,
        order=("recompute",) * recompute + (f"compile ({backend})",) * bool(backend) + ("fully_shard",),
        notes=tuple(notes),
    )
    return model, report


@contextmanager
def no_sync(model: nn.Module, *, keep_gathered: bool = False) -> Iterator[None]:
    """Accumulate gradients without communication: backward passes in the block reduce nothing.

    A rank then holds full gradients, not shards. The first backward after the block reduces all of them.
    `keep_gathered` also leaves the parameters gathered after backward: no all-gather for the next forward, for the
    price of the full model in memory.
    """
    root = _root(model)
    root.set_requires_gradient_sync(False)
    root.set_is_last_backward(False)
    root.set_reshard_after_backward(not keep_gathered)
    try:
        yield
    finally:
        root.set_requires_gradient_sync(True)
        root.set_is_last_backward(True)
        root.set_reshard_after_backward(True)


def clip_grad_norm(model: nn.Module, max_norm: float) -> float:
    """Scale all gradients so that their common norm is at most `max_norm`; return the norm before.

    The norm is that of the full model. torch's own returns it as a DTensor; `full_tensor` makes it the same
    number on every rank, however the DTensor holds it.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} must be above 0; float('inf') measures and changes nothing")
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the full model on every rank, on the CPU, under its own names; for small models and tests."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu().clone()
        for name, value in model.state_dict().items()
    }


def make_mesh(mesh: DeviceMesh | tuple[int, ...] | None = None) -> DeviceMesh:
    """Return a mesh with dims (shard,) or (replicate, shard) over all ranks."""
    rank_device()
    ranks = dist.get_world_size()
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim > 2:
            raise ValueError(f"the mesh has {mesh.ndim} dims; FSDP takes (shard,) or (replicate, shard)")
        return mesh
    shape = (ranks,) if mesh is None else tuple(mesh)
    product = torch.Size(shape).numel()
    if len(shape) not in (1, 2) or product != ranks or min(shape) < 1:
        raise ValueError(
            f"mesh={shape} is {' x '.join(map(str, shape))} = {product} ranks, but there are {ranks}; "
            f"use ({ranks},) or (replicas, shards) with product {ranks}"
        )
    return rank_mesh(*shape, names=("replicate", "shard")[-len(shape) :])


def get_precision_policy(precision: str | MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Return the policy of a precision by name, or the policy itself."""
    if isinstance(precision, MixedPrecisionPolicy):
        return precision
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} is unknown; use {', '.join(PRECISIONS)} or a MixedPrecisionPolicy")
    return PRECISIONS[precision]


def compiler(compile_blocks: bool | str, device: str) -> str | None:
    """Return the backend for torch.compile, or None for no compilation."""
    if not compile_blocks:
        return None
    backend = "inductor" if compile_blocks is True else compile_blocks
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ValueError(f"compile_blocks={backend!r} is no backend of torch.compile; use {', '.join(known)}")
    if backend == "inductor" and device == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise ValueError("compile_blocks=True needs a C++ compiler on a CPU; install g++, or use 'aot_eager'")
    return backend


def check_options(
    model: nn.Module, wrap: Rule, offload: bool, device: str, prefetch: int | None, backend: str | None, recompute: bool
) -> None:
    """Raise a ValueError for options that contradict each other or the device."""
    if isinstance(model, FSDPModule) or any(isinstance(m, FSDPModule) for m in model.modules()):
        raise ValueError("the model is sharded already; build it again to shard it in another way")
    if offload and device == "cpu":
        raise ValueError(
            "offload=True moves shards from an accelerator into CPU memory, and on this mesh they are there already; "
            "use offload=False on the CPU"
        )
    if prefetch is not None and prefetch < 1:
        raise ValueError(f"prefetch={prefetch} must be at least 1; None leaves it to FSDP2")
    if wrap == "none" and (backend or recompute or prefetch):
        raise ValueError("wrap='none' has no units to compile, recompute or prefetch; use wrap='block'")


def check_parameters(model: nn.Module) -> None:
    """Raise a ValueError for parameters that FSDP2 cannot shard."""
    parameters = dict(model.named_parameters())
    if scalars := [name for name, p in parameters.items() if p.dim() == 0]:
        raise ValueError(f"{', '.join(scalars)}: FSDP2 splits the first dim, and a scalar has none; use shape (1,)")
    if turned := [name for name, p in parameters.items() if not p.is_contiguous()]:
        raise ValueError(
            f"{', '.join(turned)}: FSDP2 shards plain memory layouts alone; use weight.data = weight.data.contiguous()"
        )
    dtypes = {p.dtype for p in parameters.values() if p.requires_grad}
    if len(dtypes) > 1:
        raise ValueError(
            f"trained parameters of {' and '.join(sorted(map(str, dtypes)))}: a unit is reduced in one dtype; "
            "build the model in one, and let precision= cast"
        )


def describe_mesh(mesh: DeviceMesh) -> str:
    """Return a mesh in words."""
    sizes = [mesh.size(dim) for dim in range(mesh.ndim)]
    if mesh.ndim == 1:
        return f"{sizes[0]} {mesh.device_type} ranks share every parameter"
    return f"{sizes[0]} replicas x {sizes[1]} {mesh.device_type} ranks that share every parameter"


def reduce_dtype(parameter: Tensor, policy: MixedPrecisionPolicy) -> torch.dtype:
    """Return the dtype in which the installed PyTorch reduces the gradient of a parameter.

    Without `reduce_dtype` that is the dtype of the computation up to torch 2.14, and from 2.15 on the parameter's
    `grad_dtype`: the dtype of its shard, if nobody set another, and None for that of the computation.
    """
    computed = policy.param_dtype or parameter.dtype
    as_stored = torch_facts(torch.__version__).fsdp2_reduces_as_stored
    return policy.reduce_dtype or (as_stored and parameter.grad_dtype) or computed


def describe_casts(parameter: Tensor, policy: MixedPrecisionPolicy) -> str:
    """Return in words which dtype is used where."""
    used = (parameter.dtype, policy.param_dtype or parameter.dtype, reduce_dtype(parameter, policy))
    shards, computed, reduced = (str(dtype).removeprefix("torch.") for dtype in used)
    return f"shards {shards}, gathered and computed in {computed}, gradients reduced in {reduced}"


def _root(model: nn.Module) -> FSDPModule:
    if not isinstance(model, FSDPModule):
        raise ValueError(f"{type(model).__name__} is not sharded: call shard(model) first")
    return model


def _warnings(model: nn.Module, wrap: Rule, policy: MixedPrecisionPolicy, offload: bool) -> list[str]:
    notes = {
        "linear layers return views: an in-place operation on one would skip its gather in backward": wrap == "linear",
        "on the meta device: call materialize before the first step": next(model.parameters()).is_meta,
        "fp16: scale the loss, or small gradients become zero": policy.param_dtype == torch.float16,
        "offloaded: the optimizer runs on the CPU": offload,
    }
    return [text for text, holds in notes.items() if holds]


def _prefetch(model: nn.Module, names: list[str], ahead: int) -> None:
    """Have every unit gather the `ahead` next ones, in forward and, the other way round, in backward."""
    order = [model, *map(model.get_submodule, names)]
    for i, module in enumerate(order):
        module.set_modules_to_forward_prefetch(order[i + 1 : i + 1 + ahead])
        before = order[::-1][:ahead] if i == 0 else order[max(1, i - ahead) : i][::-1]
        module.set_modules_to_backward_prefetch(before)
