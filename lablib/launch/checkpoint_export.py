"""A sharded checkpoint as one safetensors file, for everything that knows nothing of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from lablib.launch.checkpoint_files import alone_is_fine, check_content, read_info
from lablib.launch.safetensors_file import write_safetensors_file

_PREFIX = "model."


def export_safetensors(checkpoint: str | Path, file: str | Path, dtype: torch.dtype | None = None) -> Path:
    """Write the model of a checkpoint as one safetensors file; in one process, without ranks.

    Names are those of the module that was saved: a Hugging Face model's file is one that `from_pretrained` reads.
    Of tied parameters the first name is written, as Hugging Face does; `safetensors.torch.load_model` restores
    the others. The whole model must fit into memory.

    Args:
        checkpoint: From `save`.
        file: Target; an older file is replaced when the new one is complete.
        dtype: Cast floating-point tensors to this; None keeps what was saved.

    Returns:
        The file.

    Raises:
        ValueError: If the checkpoint is missing or damaged, or the package safetensors is not installed.
    """
    info = read_info(checkpoint)
    check_content(checkpoint, info)
    stored = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if name.startswith(_PREFIX)
    }
    with alone_is_fine():
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    tensors = {
        name.removeprefix(_PREFIX): t.to(dtype) if dtype and t.is_floating_point() else t
        for name, t in state.items()
    }
    return write_safetensors_file(tensors, file, step=str(info["step"]), tied=json.dumps(info["tied"]))
