"""A safetensors file that is there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor


def write_safetensors_file(tensors: Mapping[str, Tensor], file: str | Path, **metadata: str) -> Path:
    """Write tensors to a file; an older file is replaced when the new one is complete.

    Args:
        tensors: By name, contiguous.
        file: Target; its folder is made when missing.
        **metadata: Goes into the file beside `format: pt`, which Hugging Face asks for.

    Raises:
        ValueError: If the package safetensors is not installed.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ValueError("writing weights needs the package safetensors: pip install safetensors") from error
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}.writing")
    try:
        save_file(dict(tensors), aside, metadata={"format": "pt", **metadata})
        os.replace(aside, file)
    finally:
        aside.unlink(missing_ok=True)
    return file
