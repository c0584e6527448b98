"""Shard a model with FSDP2, and say what was done.

    model, report = shard(Transformer(config), wrap="block", precision="bf16")
    print(report)
    optimizer = torch.optim.AdamW(model.parameters())       # after sharding: it must see the shards

FSDP2 (`torch.distributed.fsdp.fully_shard`) keeps every parameter as a DTensor split along its first dim. A forward
hook gathers the parameters of a unit before it runs, another frees them; in backward the same, and the gradients
are reduce-scattered. The module stays the same object with the same parameter names.

What is applied to a block has an order, from the inside to the outside: recompute, compile, fully_shard. So the
compiler gets a block without FSDP's hooks; rung 07 runs the other orders and says what each one costs.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from lablib.calc.fsdp_units import check_reshard
from lablib.launch.fsdp_options import (
    PRECISIONS,
    check_options,
    check_parameters,
    compiler,
    describe_casts,
    describe_mesh,
    make_mesh,
    policy_of,
)
from lablib.launch.fsdp_step import clip_grad_norm, full_state_dict, no_sync
from lablib.launch.meta_init import init_transformer, materialize
from lablib.launch.shard_report import ShardReport
from lablib.launch.wrapping import Rule, calc_units, tied_parameters, wrap_units

__all__ = [
    "PRECISIONS",
    "ShardReport",
    "clip_grad_norm",
    "full_state_dict",
    "init_transformer",
    "make_mesh",
    "materialize",
    "no_sync",
    "shard",
]


def shard(
    model: nn.Module,
    *,
    wrap: Rule = "block",
    mesh: DeviceMesh | tuple[int, ...] | None = None,
    precision: str | MixedPrecisionPolicy = "fp32",
    reshard_after_forward: bool | int = True,
    root_reshard: bool | int | None = None,
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
        wrap: Which modules are gathered one by one, see `lablib.launch.wrapping`.
        mesh: None for all ranks in one dim; (replicas, shards) or a 2-d DeviceMesh for hybrid sharding.
        precision: "fp32", "bf16", "fp16", or a MixedPrecisionPolicy.
        reshard_after_forward: Of the units: True frees them after forward (ZeRO-3), False keeps them until
            backward (ZeRO-2), a number keeps 1/number of them on each rank, for a cheaper gather in backward.
        root_reshard: The same for the root; None is False, as backward starts with it.
        prefetch: Units to gather ahead, explicitly, in forward and backward. None leaves it to FSDP2, which
            gathers one ahead in backward.
        offload: Keep the shards in CPU memory; needs an accelerator.
        compile_blocks: Compile the forward of every unit with torch.compile; a text names the backend.
        recompute: Recompute the activations of every unit in backward.

    Returns:
        The same model, and what was done to it.

    Raises:
        ValueError: If the options contradict each other, the model or the ranks; before anything is changed.
    """
    device_mesh = make_mesh(mesh)
    device, shards = device_mesh.device_type, device_mesh.size(device_mesh.ndim - 1)
    root_reshard = False if root_reshard is None else root_reshard
    check_reshard(reshard_after_forward, shards, "reshard_after_forward")
    check_reshard(root_reshard, shards, "root_reshard")
    policy = policy_of(precision)
    backend = compiler(compile_blocks, device)
    check_options(model, wrap, offload, device, prefetch, backend, recompute)
    chosen = wrap_units(model, wrap)
    units, ties = calc_units(model, wrap), tied_parameters(model)
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
    options = {
        "mesh": device_mesh,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    for _, module in chosen:
        fully_shard(module, reshard_after_forward=reshard_after_forward, **options)
    fully_shard(model, reshard_after_forward=root_reshard, **options)
    if prefetch:
        _prefetch(model, [unit.name for unit in units[1:]], prefetch)

    if wrap == "linear":
        notes.append(
            "linear layers return views: an in-place operation on one would skip its gather in backward"
        )
    if next(model.parameters()).is_meta:
        notes.append("on the meta device: call materialize before the first step")
    if policy.param_dtype == torch.float16:
        notes.append("fp16: scale the loss, or small gradients become zero")
    if offload:
        notes.append("offloaded: the optimizer runs on the CPU")
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
        reduce_bytes=(policy.reduce_dtype or policy.param_dtype or dtype).itemsize,
        precision=describe_casts(dtype, policy),
        prefetch=prefetch,
        order=("recompute",) * recompute + (f"compile ({backend})",) * bool(backend) + ("fully_shard",),
        notes=tuple(notes),
    )
    return model, report


def _prefetch(model: nn.Module, names: list[str], ahead: int) -> None:
    """Have every unit gather the `ahead` next ones, in forward and, the other way round, in backward."""
    order = [model, *map(model.get_submodule, names)]
    for i, module in enumerate(order):
        module.set_modules_to_forward_prefetch(order[i + 1 : i + 1 + ahead])
        before = order[::-1][:ahead] if i == 0 else order[max(1, i - ahead) : i][::-1]
        module.set_modules_to_backward_prefetch(before)
