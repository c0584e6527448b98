"""The options of `lablib.launch.fsdp.shard`, checked before anything is changed."""

from __future__ import annotations

import shutil

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from lablib.launch.devices import rank_device, rank_mesh
from lablib.launch.wrapping import Rule

#: Parameters are kept in the model's dtype, gathered and used in `param_dtype`, and their gradients reduced in fp32.
PRECISIONS = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "fp16": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32),
}


def make_mesh(mesh: DeviceMesh | tuple[int, ...] | None = None) -> DeviceMesh:
    """Return a mesh with dims (shard,) or (replicate, shard) over all ranks.

    Args:
        mesh: None, a shape, or a mesh, which is returned as it is.

    Raises:
        ValueError: If no process group is there, the shape has more than 2 dims, or its product is not the
            number of ranks.
    """
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


def policy_of(precision: str | MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Return the policy of a precision by name, or the policy itself."""
    if isinstance(precision, MixedPrecisionPolicy):
        return precision
    if precision not in PRECISIONS:
        raise ValueError(
            f"precision={precision!r} is unknown; use {', '.join(PRECISIONS)} or a MixedPrecisionPolicy"
        )
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
    model: nn.Module,
    wrap: Rule,
    offload: bool,
    device: str,
    prefetch: int | None,
    backend: str | None,
    recompute: bool,
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
        raise ValueError(
            f"{', '.join(scalars)}: FSDP2 splits the first dim, and a scalar has none; use shape (1,)"
        )
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


def describe_casts(dtype: torch.dtype, policy: MixedPrecisionPolicy) -> str:
    """Return in words which dtype is used where."""
    names = [str(d).removeprefix("torch.") for d in (dtype, policy.param_dtype or dtype)]
    reduce = str(policy.reduce_dtype or policy.param_dtype or dtype).removeprefix("torch.")
    return f"shards {names[0]}, gathered and computed in {names[1]}, gradients reduced in {reduce}"
