"""FSDP2 on real models: wrap, shard, check, save.

    sharding      `shard(model, ...)`: fully_shard with its options, and a report
    wrapping      which modules become units
    meta_device   models born on the meta device, and the memory that PyTorch's own tracker predicts
    checkpoint    distributed checkpoints, and a model as one safetensors file

Read `sharding` first. Chapters 06 and 11.
"""

from lablib.launch.fsdp.checkpoint import (
    Progress,
    Saving,
    complete_checkpoints,
    export_safetensors,
    latest_checkpoint,
    load_checkpoint,
    read_info,
    save_checkpoint,
    verify_checkpoint,
    write_safetensors_file,
)
from lablib.launch.fsdp.meta_device import TRACKED_KINDS, forecast, init_transformer, materialize
from lablib.launch.fsdp.sharding import clip_grad_norm, full_state_dict, make_mesh, no_sync, shard
from lablib.launch.fsdp.wrapping import calc_units, tied_parameters, wrap_units

__all__ = [
    "TRACKED_KINDS",
    "Progress",
    "Saving",
    "calc_units",
    "clip_grad_norm",
    "complete_checkpoints",
    "export_safetensors",
    "forecast",
    "full_state_dict",
    "init_transformer",
    "latest_checkpoint",
    "load_checkpoint",
    "make_mesh",
    "materialize",
    "no_sync",
    "read_info",
    "save_checkpoint",
    "shard",
    "tied_parameters",
    "verify_checkpoint",
    "wrap_units",
    "write_safetensors_file",
]
