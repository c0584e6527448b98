"""Where a rank computes: the one place from which meshes, models and tensors take their device.

A rank is told by whoever starts it, `run_ranks(..., device=...)` or `torchrun(..., device=...)`, and never finds out
by looking around: what runs on the CPU of a laptop runs on the CPU of a rented machine as well.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

#: What `init_process_group` takes for ranks on each kind of device. Objects and CPU tensors travel by gloo on both.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def hide_gpus(environ: MutableMapping[str, str]) -> None:
    """Let a process see no GPU. To be called before it has asked CUDA for anything.

    PyTorch takes the accelerator that it sees where nobody names a device: `fully_shard` without a mesh would move
    the model there, and leave the batches on the CPU.
    """
    environ["CUDA_VISIBLE_DEVICES"] = ""


def rank_device() -> torch.device:
    """Return the device of this rank: its GPU where the process group has NCCL, and otherwise the CPU."""
    if not dist.is_initialized():
        raise ValueError("no process group: call this inside run_ranks, or under torchrun after init_process_group")
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def rank_mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return a mesh of all ranks on the device of this one: one axis, or so many ranks along each."""
    kind = rank_device().type
    return init_device_mesh(kind, shape or (dist.get_world_size(),), mesh_dim_names=names)
